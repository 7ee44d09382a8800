"""Trees of plain containers and scalars are restored: types, keys, order, bits."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shrinkpoint as sp

from .common import difference, round_trip

any_text = st.text(st.characters(exclude_categories=[]), max_size=12)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    any_text,
    st.binary(max_size=12),
)
keys = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
arrays = st.builds(
    lambda seed, shape, dtype, kind: _array(seed, shape, dtype, kind),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 4), max_size=3),
    st.sampled_from(["float32", "float64", "int64", "uint8", "bool", "complex64", "float16"]),
    st.sampled_from(["torch", "numpy", "scalar"]),
)
trees = st.recursive(
    st.one_of(scalars, arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(any_text, st.integers(), max_size=4).map(Counter),
    ),
    max_leaves=12,
)


def _array(seed: int, shape: list[int], dtype: str, kind: str) -> Any:
    width = np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, width), dtype=np.uint8)
    if dtype == "bool":
        raw &= 1
    x = raw.view(dtype).reshape(shape)
    if kind == "torch":
        return torch.from_numpy(x.copy())
    return x if kind == "numpy" else x.reshape(-1)[0] if x.size else x.dtype.type(0)


@given(trees.filter(lambda t: isinstance(t, (dict, list, tuple))))
@example({})
@example([])
@example(())
@example([[], {}, (), OrderedDict(), Counter()])
@example({"": {"": {"": 1}}})
@example(["\ud83d\ude00", "😀", "\ude00\ud83d", "\ud800", "\x00", "\x1f"])
@example({"\ud83d\ude00": 1, "😀": 2})
@example([2**53, 2**53 + 1, -(2**53) - 1, 2**64, -(2**1000), 10**5000])
@example([0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324, 1.7976931348623157e308, 0.1, 1e22, 1.0])
@example([True, 1, 1.0, False, 0, 0.0, None, "None", b"", ""])
@example({1: "int", "1": "text", 1.5: "float", b"1": "bytes", (1,): "tuple", ("1",): "tuple", None: 0})
@example({True: 1, "True": 2, "true": 3})
@example({math.nan: 1, -0.0: 2, 2**70: 3, -(2**200): 4})
def test_any_tree_round_trips(tree: Any) -> None:
    assert difference(tree, round_trip(tree)) == ""


@given(st.data())
def test_the_same_tree_gives_the_same_bytes(data: st.DataObject) -> None:
    tree = data.draw(trees.filter(lambda t: isinstance(t, (dict, list, tuple))))
    first = sp.compress(tree)
    assert sp.compress(tree).to_bytes() == first.to_bytes()
    again = sp.Checkpoint.from_bytes(first.to_bytes())
    assert again.to_bytes() == first.to_bytes()
    assert again.id == first.id


@pytest.mark.parametrize("depth", [5000, 20000])
def test_deep_trees(depth: int) -> None:
    tree: Any = [torch.arange(3), 1.5]
    for level in range(depth):
        tree = ({"k": tree, "n": level}, [tree], (tree, level))[level % 3]
    assert difference(tree, round_trip(tree)) == ""


def test_wide_trees() -> None:
    state = {"order": random.Random(1).sample(range(100_000), 100_000), "names": {i: str(i) for i in range(20_000)}}
    assert difference(state, round_trip(state)) == ""


def test_large_bytes_and_text() -> None:
    state = [random.Random(2).randbytes(3 << 20), "π" * 100_000, 10**5000, {10**5000: np.arange(3), 0: 10**5000}]
    assert difference(state, round_trip(state)) == ""


@pytest.mark.parametrize(
    "state",
    [
        {"a/b": np.arange(3), "a": {"b": np.arange(4)}},
        {1: np.arange(3), "1": np.arange(4), 1.5: np.arange(5), "1.5": np.arange(6), (1,): np.arange(7)},
        {"a": [np.arange(3)], "a/0": np.arange(4)},
        {None: np.arange(3), "None": np.arange(4), b"None": np.arange(5)},
        {"": np.arange(3), "/": np.arange(4), "//": {"": np.arange(5)}},
        [{0: np.arange(3)}, [np.arange(4)], {"0": np.arange(5)}, {"0/": {"": np.arange(2)}}],
    ],
)
def test_arrays_whose_paths_look_alike_stay_apart(state: Any) -> None:
    """Arrays with similar paths stay separate in a base and in a delta."""
    base = sp.compress(state)
    assert difference(state, round_trip(state)) == ""
    read = sp.Checkpoint.from_bytes(base.to_bytes())

    def more(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: more(v) for k, v in x.items()}
        return [more(v) for v in x] if isinstance(x, list) else x + 1000

    later = more(state)
    delta = sp.compress(later, prev=base)
    assert difference(later, sp.decompress(sp.Checkpoint.from_bytes(delta.to_bytes()), read)) == ""
    assert len({row.path for row in base.summary()}) >= 1
    assert len(base.summary()) == len(delta.summary())


class _Str(str):
    __slots__ = ()


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "leaf",
    [
        object(),
        lambda: 0,
        {1, 2},
        frozenset({1}),
        1j,
        range(3),
        bytearray(b"x"),
        memoryview(b"x"),
        Point(1, 2),
        defaultdict(list),
        _Str("x"),
        torch.float32,
        torch.device("cpu"),
        torch.Size([1]),
        torch.Generator(),
        torch.nn.Linear(1, 1),
        np.random.default_rng(0),
        np.dtype("f4"),
        int,
        Ellipsis,
    ],
    ids=lambda x: type(x).__name__,
)
def test_unsupported_leaves_are_refused_by_their_path(leaf: Any) -> None:
    with pytest.raises(sp.UnsupportedLeafError, match=r"^model/0/deep: "):
        sp.compress({"model": [{"deep": leaf}], "fine": 1})
    with pytest.raises(sp.UnsupportedLeafError, match=r"^model/1: "):
        sp.compress({"model": (0, leaf)})


@pytest.mark.parametrize("key", [object(), frozenset({1}), np.int64(3), (1, object()), _Str("x"), 1j, Point(1, 2)])
def test_unsupported_keys_are_refused_by_the_path_of_their_dict(key: Any) -> None:
    with pytest.raises(sp.UnsupportedLeafError, match="model/table"):
        sp.compress({"model": {"table": {"ok": 1, key: 2}}})


@pytest.mark.parametrize(
    "state",
    [
        None,
        1,
        "text",
        b"x",
        torch.zeros(3),
        np.zeros(3),
        torch.nn.Linear(2, 2),
        {1, 2},
        iter([1]),
        Point(1, 2),
        defaultdict(int),
        object(),
        np.float64(1.0),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_state_that_is_no_tree_is_refused(state: Any) -> None:
    with pytest.raises((sp.BadArgumentError, sp.UnsupportedLeafError), match=r"tree|root|state"):
        sp.compress(state)


def test_a_tree_that_contains_itself_is_refused() -> None:
    ring: list[Any] = [1]
    ring.append({"again": ring})
    with pytest.raises(sp.BadArgumentError, match="contains itself"):
        sp.compress({"ring": ring})
    shared = [1, 2]
    assert difference([shared, shared, [shared]], round_trip([shared, shared, [shared]])) == ""


def test_nothing_is_left_of_a_refused_state() -> None:
    """A refused state leaves no trace: the call works without the bad leaf."""
    state: dict[str, Any] = {"a": torch.arange(5), "b": object()}
    with pytest.raises(sp.UnsupportedLeafError):
        sp.compress(state)
    del state["b"]
    assert difference(state, round_trip(state)) == ""


def test_who_passes_a_module_is_told_what_to_pass() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(sp.ShrinkpointError, match=r"not Linear; pass its state_dict\(\)"):
        sp.compress(module)
    with pytest.raises(sp.ShrinkpointError, match=r"^a/b: .*SGD cannot.*; pass its state_dict\(\)"):
        sp.compress({"a": {"b": torch.optim.SGD(module.parameters())}})
    with pytest.raises(sp.ShrinkpointError) as refused:
        sp.compress({"a": object()})
    assert "state_dict" not in str(refused.value)
