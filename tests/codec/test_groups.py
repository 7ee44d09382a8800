"""Groups of small arrays: equal values by every way of reading, and hostile groups."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.checkpoint import Checkpoint
from shrinkpoint.codec.format.container import from_columns, to_columns
from shrinkpoint.codec.format.ranged import Ranged
from shrinkpoint.codec.partial import decompress_only
from shrinkpoint.codec.rebase import rebase
from shrinkpoint.codec.records import Group

from ..golden.make import small
from ..seeds import fresh_seed
from .common import difference, put_together, take_apart

LEVELS = {
    "default": sp.Config(),
    "lossless": sp.presets.lossless(),
    "exact weights": sp.presets.exact_weights(),
    "precise": sp.presets.precise(),
    "compact": sp.presets.compact(),
    "log buckets": sp.Config([("second moment", sp.LogBuckets())]),
}


def chain(cfg: sp.Config) -> list[sp.Checkpoint]:
    found: list[sp.Checkpoint] = []
    for t in range(3):
        found.append(sp.compress(small(t), found[-1] if found else None, cfg))
    return found


def shared(ckpt: sp.Checkpoint) -> list[Group]:
    """Return the groups of several arrays."""
    return [group for group in ckpt.groups if len(group.members) > 1]


@pytest.mark.parametrize("name", LEVELS)
def test_every_way_to_read_gives_the_same(name: str) -> None:
    made = chain(LEVELS[name])
    assert all(len(shared(ckpt)) >= 2 for ckpt in made)
    parent: sp.Checkpoint | None = None
    for ckpt in made:
        expected = sp.decompress(ckpt)
        blob = ckpt.to_bytes()
        alone = Checkpoint.from_bytes(blob)
        assert difference(sp.decompress(alone, parent), expected) == ""
        read = Checkpoint.from_bytes(blob, parent)
        assert difference(sp.decompress(read), expected) == ""
        out = torch.utils._pytree.tree_map(lambda x: torch.full_like(x, 7) if torch.is_tensor(x) else x, expected)
        sp.decompress(Checkpoint.from_bytes(blob), parent, out=out)
        assert difference(out, expected) == ""
        for over in (None, made[0]):
            stated = rebase(ckpt, over) if ckpt is not made[0] or over is None else ckpt
            assert (
                difference(
                    sp.decompress(Checkpoint.from_bytes(stated.to_bytes()), over if stated.is_delta else None), expected
                )
                == ""
            )
        parent = read


@pytest.mark.parametrize("name", LEVELS)
def test_rows_of_members_add_up_and_state_the_error(name: str) -> None:
    state, ckpt = small(0), sp.compress(small(0), cfg=LEVELS[name])
    restored = sp.decompress(ckpt)
    rows = {row.path: row for row in ckpt.summary()}
    for group in ckpt.groups:
        assert sum(ckpt.records[i].nbytes for i in group.members) == sum(group.lengths)
    assert all(r.nbytes >= 0 for r in ckpt.records)
    for path, row in rows.items():
        x, y = (_at(tree, path) for tree in (state, restored))
        if not torch.is_tensor(x) or x.dtype != torch.float32:
            continue
        finite = torch.isfinite(x)
        miss, size = (y - x)[finite].double(), x[finite].double()
        if row.measure == "exact":
            assert torch.equal(x.view(torch.int32), y.view(torch.int32))
        elif row.measure == "relative L2":
            assert float(miss.norm()) <= row.error * float(size.norm()) * (1 + 1e-9)
        else:
            assert bool((miss.abs() <= row.error * size.abs() * (1 + 1e-9)).all())


def _at(tree: Any, path: str) -> Any:
    for key in path.split("/"):
        tree = tree[key]
    return tree


@pytest.mark.parametrize("name", ["default", "lossless", "exact weights"])
def test_weights_are_restored_as_if_coded_alone(name: str) -> None:
    """An array of a group has the same values as the array compressed alone."""
    cfg = LEVELS[name]
    if name == "default":
        cfg = sp.Config([("weight", sp.Quantize(protect=0))])
    state = small(0)
    together = sp.decompress(sp.compress(state, cfg=cfg))
    for layer in range(10):
        key = f"layers.{layer}.weight"
        entry = {"state": {key: state["optimizer"]["state"][key]}}
        alone = sp.compress({"model": {key: state["model"][key]}, "optimizer": entry}, cfg=cfg)
        assert not shared(alone)
        a, b = sp.decompress(alone)["model"][key], together["model"][key]
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_reading_one_array_fetches_no_more_than_its_group() -> None:
    state = {f"layers.{i}.weight": torch.randn(128, 128) for i in range(200)}
    ckpt = sp.compress(state, cfg=sp.Config([("*", sp.Quantize())]))
    blob = ckpt.to_bytes()
    file = Ranged(len(blob), lambda start, stop: blob[start:stop])
    (group,) = [r.group for r in ckpt.records if r.path == "layers.77.weight"]
    found = decompress_only(lambda above: Checkpoint(file, None, ckpt.id), ["layers.77.weight"])
    assert torch.equal(found["layers.77.weight"], sp.decompress(ckpt)["layers.77.weight"])
    assert len(group.members) > 1
    assert file.fetched < 3 * (1 << 18) + group.nbytes


def test_arrays_of_a_state_share_no_memory() -> None:
    for cfg in LEVELS.values():
        restored = sp.decompress(Checkpoint.from_bytes(sp.compress(small(0), cfg=cfg).to_bytes()))
        tensors = [x for x in torch.utils._pytree.tree_leaves(restored) if torch.is_tensor(x)]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in tensors)


JSON = st.one_of(st.integers(-3, 3), st.booleans(), st.text(max_size=2), st.lists(st.integers(0, 2), max_size=2))
RECORDS = st.lists(st.dictionaries(st.sampled_from("dslen"), JSON, max_size=4), max_size=20)


@given(RECORDS)
def test_columns_give_their_records_back(records: list[dict[str, Any]]) -> None:
    columns = json.loads(json.dumps(to_columns(records)))
    assert json.dumps(from_columns(columns, len(records))) == json.dumps(
        [dict(sorted(r.items(), key=lambda p: list(columns).index(p[0]))) for r in records]
    )


@pytest.mark.parametrize(
    "columns",
    [
        [],
        {},
        {"count": -1},
        {"count": 10**12, "d": {"v": ["float32"]}},
        {"count": True},
        {"count": 2.0},
        {"count": 1, "d": 3},
        {"count": 1, "d": [1, 2]},
        {"count": 2, "d": {"v": ["a", "b"]}},
        {"count": 2, "d": {"v": [], "i": [0, 0]}},
        {"count": 2, "d": {"v": ["a"], "i": [0, 1]}},
        {"count": 2, "d": {"v": ["a"], "i": [0, -1]}},
        {"count": 2, "d": {"v": ["a"], "i": [False, 0]}},
        {"count": 2, "d": {"v": ["a"], "i": [0]}},
    ],
)
def test_hostile_columns(columns: Any) -> None:
    with pytest.raises(sp.CorruptDataError):
        from_columns(columns, 5)


def _group(header: dict[str, Any], stream: str) -> dict[str, Any]:
    """Return the record of the first group of several arrays in a stream format."""
    found: dict[str, Any] = next(g for g in header["groups"] if g["f"] == stream and len(g.get("a", [1])) > 1)
    return found


def _numbers(header: dict[str, Any], stream: str) -> list[int]:
    before = -1
    for group in header["groups"]:
        if group is _group(header, stream):
            break
        before += group.get("a", [1])[0]
    return (before + np.cumsum(_group(header, stream)["a"])).tolist()


def _member(header: dict[str, Any], **fields: Any) -> None:
    header["arrays"][_numbers(header, "levels")[0]] |= fields


def _empty(header: dict[str, Any]) -> None:
    for number in _numbers(header, "levels"):
        header["arrays"][number]["s"] = [0, 5]


HOSTILE: dict[str, Callable[[dict[str, Any]], None]] = {
    "no list": lambda h: h.update(groups={}),
    "no groups": lambda h: h.pop("groups"),
    "no record": lambda h: h.update(groups=[*h["groups"], 3]),
    "no members": lambda h: h["groups"].append({"f": "bytes", "a": [], "b": []}),
    "no stream": lambda h: _group(h, "levels").pop("f"),
    "no lengths": lambda h: _group(h, "levels").pop("b"),
    "a key too many": lambda h: _group(h, "levels").update(x=1),
    "members a text": lambda h: _group(h, "levels").update(a="12"),
    "a member a float": lambda h: _group(h, "levels").update(a=[0.0]),
    "a member beyond": lambda h: _group(h, "levels")["a"].append(10**6),
    "a member huge": lambda h: _group(h, "levels")["a"].append(10**60),
    "a member negative": lambda h: _group(h, "levels").update(a=[-1]),
    "a member twice": lambda h: _group(h, "levels")["a"].append(0),
    "a member of two groups": lambda h: h["groups"].append({**_group(h, "levels"), "a": [0]}),
    "a member left out": lambda h: _group(h, "levels")["a"].pop(),
    "a member with pieces": lambda h: _member(h, b=[1]),
    "a member with a stream": lambda h: _member(h, f="levels"),
    "a member that is a delta": lambda h: _member(h, p=True),
    "a member of another dtype": lambda h: _member(h, d="float64"),
    "a member of another library": lambda h: _member(h, l="numpy"),
    "a member that is empty": lambda h: _member(h, s=[0, 5]),
    "all members empty": _empty,
    "a member that is too large": lambda h: _member(h, s=[1 << 22]),
    "a member that has a pair": lambda h: _member(h, v=0),
    "stream unknown": lambda h: _group(h, "levels").update(f="unknown"),
    "stream of one array": lambda h: _group(h, "levels").update(f="exponent"),
    "stream a list": lambda h: _group(h, "levels").update(f=[]),
    "a delta without a parent": lambda h: _group(h, "levels").update(p=True),
    "a grid that is a delta": lambda h: _group(h, "grid").update(p=True),
    "a grid without pairs": lambda h: h["arrays"][_numbers(h, "grid")[0]].pop("v"),
    "a grid paired with a grid": lambda h: h["arrays"][_numbers(h, "grid")[0]].update(v=_numbers(h, "grid")[1]),
    "a grid paired with another shape": lambda h: h["arrays"][_numbers(h, "grid")[0]].update(v=_numbers(h, "bytes")[0]),
    "lengths": lambda h: _group(h, "levels").update(b=[1]),
    "more lengths": lambda h: _group(h, "levels")["b"].append(0),
    "thresholds": lambda h: _group(h, "levels")["m"].update(t=[]),
    "thresholds that are not there": lambda h: _group(h, "levels")["m"].update(i=[9] * 11),
    "too few gains": lambda h: _group(h, "levels")["m"].update(a=[1]),
    "a gain": lambda h: _group(h, "levels")["m"].update(a=[10**9] * 11),
    "vectors as matrices": lambda h: h["arrays"][_numbers(h, "rank-one")[0]].update(s=[1536]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_groups(name: str) -> None:
    header, chunks = take_apart(sp.compress(small(0)).to_bytes())
    HOSTILE[name](header)
    item = {"float32": 4, "float64": 8}
    header["raw"] = sum(int(np.prod(r["s"], dtype=object)) * item[r["d"]] for r in header["arrays"])
    with pytest.raises((sp.CorruptDataError, sp.MissingParentError)):
        sp.decompress(Checkpoint.from_bytes(put_together(header, chunks)))


@pytest.mark.parametrize("name", ["default", "lossless", "log buckets"])
def test_altered_groups_with_right_checksums(name: str) -> None:
    made = chain(LEVELS[name])
    seed = fresh_seed()
    rng = random.Random(seed)
    for _ in range(120):
        number = rng.randrange(2)
        header, chunks = take_apart(made[number].to_bytes())
        body = b"".join(chunks)
        at, pieces = 0, []
        for n in (n for group in header["groups"] for n in group["b"]):
            pieces.append(bytearray(body[at : at + n]))
            at += n
        piece = rng.choice(pieces)
        for _ in range(rng.choice([1, 1, 3])):
            if piece:
                piece[min(len(piece) - 1, int(rng.expovariate(0.05)))] = rng.choice(
                    [0, 1, 127, 255, rng.randrange(256)]
                )
        if rng.random() < 0.3:
            del piece[rng.randrange(len(piece) + 1) :]
        new = iter(pieces)
        for group in header["groups"]:
            group["b"] = [len(next(new)) for _ in group["b"]]
        blob = put_together(header, [b"".join(map(bytes, pieces))])
        try:
            with np.errstate(all="ignore"):
                sp.decompress(Checkpoint.from_bytes(blob, made[0] if number else None))
        except sp.ShrinkpointError:
            pass
        except Exception as e:
            raise AssertionError(f"seed {seed}: {type(e).__name__}: {e}") from e


def _check_error(row: sp.Row, x: Any, y: Any) -> None:
    finite = np.isfinite(x)
    np.testing.assert_array_equal(x[~finite], y[~finite])
    x, y = x[finite], y[finite]
    if row.measure == "exact":
        np.testing.assert_array_equal(x, y)
    elif row.measure == "relative L2":
        assert np.linalg.norm(y - x) <= row.error * (1 + 1e-6) * np.linalg.norm(x)
    else:
        assert row.measure == "relative"
        assert (np.abs(y - x) <= row.error * (1 + 1e-6) * np.abs(x)).all()


LOSSLESS, QUANTIZED = sp.Exact(), sp.Quantize(bins=16)


def weights(rng: np.random.Generator, count: int = 12, rows: int = 30) -> dict[str, Any]:
    return {f"w{i}": rng.standard_normal((rows, 40)).astype("f4") for i in range(count)}


def changed(state: dict[str, Any], how: str) -> tuple[dict[str, Any], sp.Config]:
    """Return the next state and its rules."""
    rng = np.random.default_rng(2)
    cfg = sp.Config([("w*", QUANTIZED)])
    after = {name: x + np.float32(0.001) * rng.standard_normal(x.shape).astype("f4") for name, x in state.items()}
    if how == "some go":
        after = {name: x for name, x in after.items() if name not in ("w0", "w7")}
    elif how == "few are left":
        after = {name: after[name] for name in ("w1", "w5")}
    elif how == "some come":
        after |= {f"x{i}": rng.standard_normal((30, 40)).astype("f4") for i in range(9)}
        cfg = sp.Config([("*", QUANTIZED)])
    elif how == "a shape changes":
        after["w3"] = rng.standard_normal((31, 40)).astype("f4")
    elif how == "a shape is transposed":
        after["w3"] = np.ascontiguousarray(after["w3"].T)
    elif how == "a dtype changes":
        after["w3"] = after["w3"].astype("f2")
    elif how == "a library changes":
        after["w3"] = torch.from_numpy(after["w3"])
    elif how == "all become exact":
        cfg = sp.Config([("*", LOSSLESS)])
    elif how == "some become exact":
        cfg = sp.Config([("w[0-4]", LOSSLESS), ("w*", QUANTIZED)])
    elif how == "all become buckets":
        cfg = sp.Config([("*", sp.LogBuckets(2.0**-4))])
    elif how == "another order":
        after = dict(reversed(after.items()))
    elif how == "one is not finite":
        after["w3"] = np.full((30, 40), np.nan, np.float32)
    elif how == "one is zero":
        after["w3"] = np.zeros((30, 40), np.float32)
    else:
        assert how == "nothing"
        after = state
    return after, cfg


CHANGES = ["some go", "few are left", "some come", "a shape changes", "a shape is transposed", "a dtype changes"]
CHANGES += ["a library changes", "all become exact", "some become exact", "all become buckets", "another order"]
CHANGES += ["one is not finite", "one is zero", "nothing"]


@pytest.mark.parametrize("how", CHANGES)
def test_deltas_when_members_change(how: str) -> None:
    """Groups decode after members come, go or change, over a parent from memory or bytes."""
    state = weights(np.random.default_rng(0))
    cfg = sp.Config([("w*", QUANTIZED)])
    made = [sp.compress(state, cfg=cfg)]
    assert len(made[0].groups) == 1
    steps = [(state, cfg), changed(state, how), (state, cfg)]
    read = sp.Checkpoint.from_bytes(made[0].to_bytes())
    for own, rules in steps[1:]:
        made.append(sp.compress(own, made[-1], rules))
        other = sp.compress(own, read, rules)
        assert other.to_bytes() == made[-1].to_bytes()
        read = sp.Checkpoint.from_bytes(made[-1].to_bytes(), read)
        found = sp.decompress(read)
        assert difference(found, sp.decompress(made[-1])) == ""
        for row in made[-1].summary():
            _check_error(row, np.asarray(own[row.path], np.float64), np.asarray(found[row.path], np.float64))


def test_a_member_that_alone_stays_exact() -> None:
    """An array without finite values is stored exactly, apart from the group of the others."""
    state = weights(np.random.default_rng(0))
    state["w4"] = np.full((30, 40), np.inf, np.float32)
    ckpt = sp.compress(state, cfg=sp.Config([("*", QUANTIZED)]))
    found = sp.decompress(sp.Checkpoint.from_bytes(ckpt.to_bytes()))
    np.testing.assert_array_equal(found["w4"], state["w4"])
    assert max(len(group.members) for group in ckpt.groups) >= 11


def test_gains_and_thresholds_of_members() -> None:
    """Members of a group may differ in the age of thresholds and in their drift gains."""
    rng = np.random.default_rng(3)
    state = weights(rng, 20)
    cfg = sp.Config([("*", sp.Quantize(bins=16, rate=0.01, protect=0.01))])
    prev, before = None, state
    for t in range(3):
        ckpt = sp.compress(state, prev, cfg, earlier=before if t else None)
        read = sp.Checkpoint.from_bytes(ckpt.to_bytes(), prev)
        assert difference(sp.decompress(read), sp.decompress(ckpt)) == ""
        assert shared(ckpt)
        prev, before = read, state
        state = {name: x + np.float32(0.01) for name, x in state.items()}


def test_groups_are_at_most_four_mebibytes() -> None:
    state = {f"w{i}": np.full(1 << 17, i, np.float32) for i in range(20)}
    ckpt = sp.compress(state, cfg=sp.presets.lossless())
    assert len(ckpt.groups) > 1
    for own in shared(ckpt):
        assert sum(ckpt.records[i].spec.nbytes for i in own.members) <= 1 << 22
