"""`load(paths=)` returns matching leaves as a whole load does, and reads no more bytes."""

from __future__ import annotations

import fnmatch
import glob
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.partial import select
from shrinkpoint.codec.state import tree
from tests.codec.common import difference
from tests.store.common import data_path, fill, listing, lossless

TREES = st.recursive(
    st.integers(-5, 5) | st.none() | st.text(max_size=2) | st.builds(lambda n: np.arange(n), st.integers(0, 4)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "c/d", "e"]) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=12,
)


def leaves(found: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return leaves by path; of equal paths the last."""
    if isinstance(found, (dict, list, tuple)):
        items = found.items() if isinstance(found, dict) else enumerate(found)
        merged: dict[str, Any] = {}
        for key, value in items:
            merged.update(leaves(value, (*path, str(key))))
        return merged
    return {"/".join(path): found}


def pruned(found: Any, pattern: str, path: tuple[str, ...] = ()) -> Any:
    """Return (whether a leaf matches, the matching part), by recursion."""
    if not isinstance(found, (dict, list, tuple)):
        return fnmatch.fnmatchcase("/".join(path), pattern), found
    items = list(found.items() if isinstance(found, dict) else enumerate(found))
    below = [(key, *pruned(value, pattern, (*path, str(key)))) for key, value in items]
    matches = any(m for _, m, _ in below)
    if isinstance(found, dict):
        return matches, {k: v for k, m, v in below if m}
    kept = [v if m else None for _, m, v in below]
    return matches, kept if isinstance(found, list) else tuple(kept)


@given(
    st.dictionaries(st.sampled_from(["a", "b", "x"]), TREES, min_size=1, max_size=3),
    st.sampled_from(["*", "a*", "a/*", "*/0", "*a*", "b/e", "?", "x/*/1"]),
)
def test_pruning_by_an_oracle(state: dict[str, Any], pattern: str) -> None:
    nodes, arrays = tree.flatten(state, lambda x: isinstance(x, np.ndarray))
    matches, expected = pruned(state, pattern)
    if not matches:
        with pytest.raises(sp.BadArgumentError, match="no path matches"):
            select(nodes, [pattern])
        return
    found = tree.unflatten(select(nodes, [pattern]), lambda number, _: arrays[number].value)
    assert difference(expected, found) == ""


def test_names_are_looked_up_and_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["w", "a[0]", "a0", "*", "[*]", "x[", "[!a]", "?"]
    state: dict[str, Any] = {name: np.full(1, i) for i, name in enumerate(names)}
    nodes, arrays = tree.flatten(state, lambda x: isinstance(x, np.ndarray))

    def found(*patterns: str) -> list[str]:
        return list(tree.unflatten(select(nodes, patterns), lambda number, _: arrays[number].value))

    assert found("[!a]") == ["w", "*", "?"]
    assert found("a[0]", "w") == ["w", "a0"]
    assert found("*") == names
    with monkeypatch.context() as patch:
        patch.setattr(fnmatch, "fnmatchcase", lambda path, pattern: pytest.fail(f"{path} tried for {pattern}"))
        for name in names:
            assert found(glob.escape(name)) == [name]
        assert found("w", "a0") == ["w", "a0"]
        with pytest.raises(sp.BadArgumentError, match=r"no path matches 'a\[\[\]1\]'"):
            found(glob.escape("a[1]"))


def model(step: int, n: int = 96) -> dict[str, Any]:
    """Return a training state whose arrays use every way of storage."""
    g = torch.Generator().manual_seed(3)
    weights = {f"l{i}.weight": torch.randn(n, n, generator=g) for i in range(4)}
    for w in weights.values():
        w[: n // 8] += 0.001 * step
    moments = {
        i: {
            "exp_avg": torch.randn(n, n, generator=g) * 1e-3,
            "exp_avg_sq": torch.rand(n, n, generator=g) * 1e-6,
            "step": 5,
        }
        for i in range(4)
    }
    norm = torch.arange(n) + float(step)
    return {
        "model": {**weights, "norm.weight": norm},
        "optimizer": {"state": moments},
        "step": step,
        "rng": [b"x", step],
    }


@pytest.mark.parametrize(
    "cfg", [sp.Config(), lossless(), sp.Config(max_rel_error=0.05)], ids=["default", "exact", "bound"]
)
@pytest.mark.parametrize("against", ["previous", "base"])
@pytest.mark.parametrize("url", ["folder", "memory"])
def test_the_same_as_a_whole_load(cfg: sp.Config, against: str, url: str, tmp_path: Path) -> None:
    cfg = sp.Config(cfg.rules, max_rel_error=cfg.max_rel_error, chain=sp.ChainPolicy(None, against))
    store = sp.Store(tmp_path / "run" if url == "folder" else f"memory://{tmp_path}", cfg)
    for step in range(4):
        store.save(step, model(step))
    before = listing(tmp_path)
    for step in (0, 1, 3):
        whole = leaves(store.load(step, count=False))
        for patterns in (
            "model/*",
            "*exp_avg",
            ["*exp_avg_sq", "step"],
            "*/l2.weight",
            "rng/1",
            "optimizer/state/1/*",
            "*",
        ):
            part = leaves(sp.Store(store.url).load(step, patterns))
            globs = [patterns] if isinstance(patterns, str) else patterns
            wanted = {p: v for p, v in whole.items() if any(fnmatch.fnmatchcase(p, g) for g in globs)}
            found = {p: v for p, v in part.items() if v is not None or p in wanted}
            assert difference(wanted, found) == "", (step, patterns)
    assert difference(sp.Store(store.url).load(paths="step"), {"step": 3}) == ""
    assert listing(tmp_path) == before
    assert store.restores() == 0


def test_lists_keep_their_positions(tmp_path: Path) -> None:
    store = sp.Store(tmp_path)
    store.save(
        1, {"layers": [{"weight": np.ones(3)}, {"weight": np.zeros(3), "b": 2}, 5], "other": [1, 2], "t": (1, (2, 3))}
    )
    assert difference(store.load(1, "layers/1/weight"), {"layers": [None, {"weight": np.zeros(3)}, None]}) == ""
    assert difference(store.load(1, ["t/1/0", "other/*"]), {"other": [1, 2], "t": (None, (2, None))}) == ""


def test_tied_arrays_stay_tied(tmp_path: Path) -> None:
    w = torch.randn(20, 20)
    store = sp.Store(tmp_path)
    store.save(1, {"a": w, "b": {"c": w}, "d": torch.ones(2)})
    found = store.load(1, ["a", "b/*"])
    assert found["a"] is found["b"]["c"]
    assert list(found) == ["a", "b"]
    assert torch.equal(store.load(1, "b/c")["b"]["c"], w)


def test_what_is_read(tmp_path: Path) -> None:
    """A partial load reads the header and the needed chunks only."""
    rng = np.random.default_rng(0)
    big = {f"w{i}": rng.standard_normal(150_000) for i in range(10)}
    store = sp.Store(tmp_path, lossless())
    for step in range(3):
        store.save(step, {**{k: v + step for k, v in big.items()}, "late": np.arange(step + 2000)})
    total = sum(p.stat().st_size for p in (tmp_path / "data").iterdir())
    files = store._files
    read: list[tuple[str, int]] = []
    whole, part = files.read, files.read_range

    def reading(name: str) -> bytes:
        data = whole(name)
        read.append((name, len(data)))
        return data

    def reading_range(name: str, start: int, stop: int) -> bytes:
        data = part(name, start, stop)
        read.append((name, len(data)))
        return data

    files.read, files.read_range = reading, reading_range  # type: ignore[method-assign]
    assert np.array_equal(store.load(2, "w7")["w7"], big["w7"] + 2)
    data = [n for name, n in read if name.startswith("data/")]
    assert 3 <= len(data) <= 6
    assert sum(data) < 0.2 * total
    read.clear()
    # New in shape at each step: no delta, so no parent is opened.
    assert store.load(2, "late")["late"].size == 2002
    assert len({name for name, _ in read if name.startswith("data/")}) == 1


def test_damage_elsewhere_does_not_matter_and_damage_here_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    store = sp.Store(tmp_path, lossless())
    store.save(0, {"a": rng.standard_normal(200_000), "b": rng.standard_normal(200_000)})
    path = data_path(tmp_path, 0)
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)
    assert store.load(0, "a")["a"].size == 200_000
    for paths in ("b", "*"):
        with pytest.raises(sp.CorruptDataError, match="checksum"):
            store.load(0, paths)
    path.write_bytes(data[:-50])
    with pytest.raises(sp.CorruptDataError, match="manifest"):
        store.load(0, "a")


@pytest.mark.parametrize("paths", [5, b"a", [], "", ["a", 3], [""], {"a": 1}, ()])
def test_patterns_that_are_none(tmp_path: Path, paths: Any) -> None:
    store = fill(sp.Store(tmp_path), 1)
    with pytest.raises(sp.BadArgumentError, match="paths"):
        store.load(1, paths)


def test_a_pattern_that_matches_nothing(tmp_path: Path) -> None:
    store = fill(sp.Store(tmp_path), 1)
    with pytest.raises(sp.BadArgumentError, match=r"'modle/\*'.*paths are like step, model/weight"):
        store.load(1, ["model/*", "modle/*"])


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_flipped_byte_is_never_loaded(at: int, flip: int) -> None:
    url = "memory://test-partial-flip"
    store = sp.Store(url, lossless())
    if not store.steps():
        fill(store, 0, 1)
    files = store._files
    name = f"data/{store.describe(1).parents[0]}"
    data = bytearray(files.read(name))
    data[at % len(data)] ^= flip
    whole = files.read(name)
    files.write(name, bytes(data))
    try:
        found = sp.Store(url).load(1, ["ids", "model/weight"])
    except sp.ShrinkpointError:
        pass
    else:
        assert (
            difference(found, {"model": {"weight": store.load(1)["model"]["weight"]}, "ids": store.load(1)["ids"]})
            == ""
        )
    finally:
        files.write(name, whole)


def test_keys_that_are_no_text_stand_beside_what_is_wanted(tmp_path: Path) -> None:
    state = {b"raw": np.arange(3.0), (1, b"x"): {2: 5, True: 6}, None: 1.5, "t": b"xx"}
    store = sp.Store(tmp_path, sp.presets.lossless())
    store.save(1, state)
    assert store.load(1, paths="t") == {"t": b"xx"}
    assert difference(store.load(1, paths="*raw*"), {b"raw": state[b"raw"]}) == ""
    assert store.load(1, paths="*x*/2") == {(1, b"x"): {2: 5}}
