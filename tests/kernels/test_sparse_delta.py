"""Sparse deltas: all back ends against NumPy's comparison; hostile data is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.backend.instructions import BLOCK
from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.planes import WIDTHS, difference, ordered_by_sign
from shrinkpoint.kernels.sparse_delta import (
    SparseDelta,
    apply_changes,
    collect_changes,
    gap_shifts,
    join_changes,
    locate_changes,
    loops,
    split_changes,
)
from shrinkpoint.kernels.sparse_delta import cpu as compiled

from .patterns import array_of, patterns_of, random_patterns

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 63, 64, 65, 700]
DTYPES = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "uint8", "int16", "uint64", "bool"]


def edges_of(dtype: str) -> list[tuple[int, ...]]:
    """Return no edges, one edge, and the most edges, with the lowest and highest."""
    if not ordered_by_sign(dtype):
        return [()]
    top = 1 << (WIDTHS[dtype] - 1)
    return [(), (top // 2,), (1, 2, top // 8, top // 4, top // 2, top - 2, top - 1)]


def pair(rng: np.random.Generator, dtype: str, n: int, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Return patterns and changed ones; half of the changes are small."""
    old = random_patterns(rng, dtype, n)
    new = old.copy()
    at = rng.random(n) < share
    new[at] = random_patterns(rng, dtype, n)[at]
    if dtype != "bool":
        small = at & (rng.random(n) < 0.5)
        new[small] = old[small] + rng.integers(1, 4, int(small.sum())).astype(old.dtype)
    return new, old


def expected(new: np.ndarray, old: np.ndarray, edges: tuple[int, ...], dtype: str, method: str) -> SparseDelta:
    """Compute the delta by sorting and counting with NumPy."""
    low = old & old.dtype.type((1 << (8 * old.itemsize - 1)) - 1)
    classes = np.searchsorted(np.asarray(edges, old.dtype), low, "right") if edges else np.zeros(old.size, int)
    steps = difference(new, old, method, dtype=dtype)  # type: ignore[arg-type]
    counts, ranks, changes = [], [], []
    for c in range(len(edges) + 1):
        own = np.flatnonzero(classes == c)
        hit = new[own] != old[own]
        counts.append(int(hit.sum()))
        ranks.append(np.flatnonzero(hit))
        changes.append(steps[own][hit])
    return SparseDelta(np.asarray(counts), np.concatenate(ranks), np.concatenate(changes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_delta_and_apply(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    module = back_end.module("sparse_delta")
    sizes = SIZES if back_end.name != "gpu" else [0, 1, 65, 1030, 5000]
    for n in sizes:
        for number, edges in enumerate(edges_of(dtype)):
            share = [0.0, 0.03, 0.4, 1.0][(n + number) % 4]
            method = ("arithmetic", "xor")[(n + number) % 2]
            new, old = pair(fresh, dtype, n, share)
            x, y = array_of(back_end, new, dtype), array_of(back_end, old, dtype)
            found = module.collect_changes(x, y, edges, n, None, dtype)
            both = module.collect_and_locate(x, y, edges, n, dtype)
            assert both is not None
            for own, same in zip(both[0], found, strict=True):
                np.testing.assert_array_equal(back_end.numpy(own), back_end.numpy(same), strict=True)
            places = back_end.numpy(both[1])
            np.testing.assert_array_equal(places, np.flatnonzero(new != old))
            np.testing.assert_array_equal(patterns_of(both[2]), new[places])
            most = int((new != old).sum()) - 1
            assert most < 0 or module.collect_and_locate(x, y, edges, most, dtype) is None
            wanted = expected(new, old, edges, dtype, "arithmetic")
            np.testing.assert_array_equal(found.counts, wanted.counts)
            np.testing.assert_array_equal(back_end.numpy(found.ranks), wanted.ranks, strict=True)
            np.testing.assert_array_equal(patterns_of(found.changes), wanted.changes, strict=True)
            if method == "xor":
                flips = expected(new, old, edges, dtype, method).changes
                found = found._replace(changes=array_of(back_end, flips, flips.dtype.name))
            out = module.apply_changes(y, found, edges, method, None, dtype)
            assert out.dtype == y.dtype
            np.testing.assert_array_equal(patterns_of(out), new, strict=True)
            np.testing.assert_array_equal(patterns_of(y), old, strict=True)  # the parent is left alone
            positions, values = module.locate_changes(y, found, edges, method, dtype)
            np.testing.assert_array_equal(back_end.numpy(positions), np.flatnonzero(new != old))
            np.testing.assert_array_equal(patterns_of(values), new[new != old])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8"])
def test_in_place_copies_and_limits(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    if back_end.library == "strict":
        pytest.skip("arrays of the standard are written by whole slices only")
    module, n = back_end.module("sparse_delta"), 3000
    edges = edges_of(dtype)[-1]
    new, old = pair(fresh, dtype, n, 0.1)
    new[0] = old[0] ^ 1
    x, y, copy = (array_of(back_end, u.copy(), dtype) for u in (new, old, old))
    changed = int((new != old).sum())
    assert module.collect_changes(x, y, edges, changed - 1, copy, dtype) is None
    np.testing.assert_array_equal(patterns_of(copy), new)
    copy = array_of(back_end, old.copy(), dtype)
    found = module.collect_changes(x, y, edges, changed, copy, dtype)
    np.testing.assert_array_equal(patterns_of(copy), new)
    assert module.apply_changes(y, found, edges, "arithmetic", y, dtype) is y
    np.testing.assert_array_equal(patterns_of(y), new)


def test_what_is_equal_at_first_is_copied_too(fresh: np.random.Generator) -> None:
    """Values before the first change are copied from the parent."""
    n = 3 * BLOCK + 77
    for first in (
        0,
        63,
        64,
        BLOCK - 1,
        BLOCK,
        2 * BLOCK + 100,
        n - 1,
    ):
        old = random_patterns(fresh, "float16", n)
        new = old.copy()
        new[first] ^= 1
        for edges in ((), (1000, 20000)):
            copy = np.full(n, 7, np.uint16)
            found = collect_changes(new, old, edges, copy_to=copy, dtype="float16")
            np.testing.assert_array_equal(copy, new)
            assert found is not None
            np.testing.assert_array_equal(apply_changes(old, found, edges, dtype="float16"), new)
    copy = np.full(n, 7, np.uint16)
    found = collect_changes(old, old, copy_to=copy)
    assert found is not None
    assert found.ranks.size == 0
    assert (copy == 7).all()


def test_split_and_join(sequential_back_end: BackEnd, fresh: np.random.Generator) -> None:
    module, library = sequential_back_end.module("sparse_delta"), sequential_back_end
    for dtype in ("uint8", "uint16", "uint32", "uint64"):
        top = int(np.iinfo(dtype).max)
        gaps = [0, 1, 2, 3, 4, 5, 6, 7, 8, 100, (1 << 22) - 1, 1 << 20, 0]
        ranks = np.concatenate([np.cumsum(np.asarray(gaps) + 1) - 1, [5], [0, 1]])
        changes = np.asarray([1, 2, 3, 4, 5, 6, top, top - 1, 1, 4, 5, 9, 2, 3, top, 1], dtype)
        counts = np.asarray([13, 0, 1, 2])
        given = SparseDelta(counts, library.array(ranks), library.array(changes))
        shifts = np.asarray([0, 0, 1, 24])
        symbols, extra, large = module.split_changes(given, shifts)
        assert library.numpy(large).tolist() == [int(c) - 5 for c in changes if c > 4]
        reference = [0, 1, 2, 3, 4, 4, 5, 5, 6]
        assert (library.numpy(symbols)[: len(reference)] // 5).tolist() == reference
        joined = module.join_changes(counts, shifts, 1 << 25, symbols, extra, large)
        np.testing.assert_array_equal(library.numpy(joined.ranks), ranks)
        np.testing.assert_array_equal(library.numpy(joined.changes), changes)


def test_back_ends_write_the_same_bytes(fresh: np.random.Generator) -> None:
    from shrinkpoint.kernels.sparse_delta import reference as oracle

    new, old = pair(fresh, "float16", 4000, 0.2)
    found = collect_changes(new, old, (3000, 9000), dtype="float16")
    assert found is not None
    for shifts in (gap_shifts(found), (0, 24, 3)):
        theirs = oracle.split_changes(found, np.asarray(shifts))
        for mine, other in zip(split_changes(found, shifts), theirs, strict=True):
            np.testing.assert_array_equal(mine, other, strict=True)


@pytest.mark.parametrize(
    "ranks",
    [[0, 0], [5, 4], [-1, 3], [3, 10], [0, 1 << 40], [1 << 62, (1 << 62) + 1], [-(1 << 62), 0]],
)
@pytest.mark.parametrize("edges", [(), (100,), (1, 2, 3, 4, 5, 6, 7)])
def test_ranks_that_are_wrong_are_refused(back_end: BackEnd, ranks: list[int], edges: tuple[int, ...]) -> None:
    module = back_end.module("sparse_delta")
    previous = back_end.array(np.zeros(10, np.float32))
    counts = np.asarray([2] + [0] * len(edges))
    delta = SparseDelta(counts, back_end.array(np.asarray(ranks)), back_end.array(np.ones(2, np.uint32)))
    with pytest.raises(CorruptDataError, match="rank"):
        module.locate_changes(previous, delta, edges, "arithmetic", "float32")
    with pytest.raises(CorruptDataError, match="rank"):
        module.apply_changes(previous, delta, edges, "arithmetic", None, "float32")


def test_a_class_without_members_has_no_changes(back_end: BackEnd) -> None:
    module = back_end.module("sparse_delta")
    previous = back_end.array(np.zeros(70, np.float32))
    delta = SparseDelta(np.asarray([0, 1]), back_end.array(np.zeros(1, int)), back_end.array(np.ones(1, np.uint32)))
    with pytest.raises(CorruptDataError, match="rank"):
        module.locate_changes(previous, delta, (5,), "arithmetic", "float32")


def test_no_index_leaves_its_array(fresh: np.random.Generator) -> None:
    """Run the compiled loops as plain Python, where NumPy checks every index."""
    symbols, extra, large = split_changes(
        SparseDelta(np.asarray([3, 1]), np.asarray([2, 700, 9000, 4]), np.asarray([1, 9, 2, 70], np.uint16)),
        [2, 0],
    )
    words = np.zeros((extra.size + 7) // 8 + 2, np.uint64)
    words.view(np.uint8)[: extra.size] = extra
    ranks, changes, state = np.zeros(4, np.int64), np.zeros(4, np.uint16), np.zeros(2, np.int64)
    if hasattr(loops.join, "py_func"):
        with np.errstate(over="ignore"):
            done = loops.join.py_func(
                np.asarray([3, 1]),
                np.asarray([2, 0]),
                1 << 14,
                symbols,
                words,
                8 * extra.size,
                large,
                ranks,
                changes,
                state,
            )
        assert done == 0
        assert ranks.tolist() == [2, 700, 9000, 4]


@given(st.data())
def test_any_parts_are_refused_or_joined(data: st.DataObject) -> None:
    counts = np.asarray(data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=8)))
    symbols = np.asarray(
        data.draw(st.lists(st.integers(0, 255), min_size=int(counts.sum()), max_size=int(counts.sum()))), np.uint8
    )
    extra, wide = data.draw(st.binary(max_size=9)), data.draw(st.lists(st.integers(0, 255), max_size=9))
    n = data.draw(st.integers(0, 3000))
    shifts = data.draw(st.lists(st.integers(0, 24), min_size=len(counts), max_size=len(counts)))
    try:
        found = join_changes(counts, shifts, n, symbols, extra, np.asarray(wide, np.uint8))
    except CorruptDataError:
        return
    again = split_changes(found, shifts)
    for mine, given_ in zip(again, (symbols, np.frombuffer(extra, np.uint8), np.asarray(wide, np.uint8)), strict=True):
        np.testing.assert_array_equal(mine, given_)
    if len(counts) == 1:
        locate_changes(np.zeros(n, np.uint8), found)


def test_read_only_and_strided_arrays(fresh: np.random.Generator) -> None:
    new, old = (random_patterns(fresh, "float32", 600).reshape(20, 30).view(np.float32) for _ in range(2))
    old.flags.writeable = False
    found = collect_changes(new[::2].T, old[::2].T)
    assert found is not None
    out = apply_changes(old[::2].T, found)
    np.testing.assert_array_equal(patterns_of(out), patterns_of(np.ascontiguousarray(new[::2].T)))
    x = torch.tensor([1.0, 2.0], dtype=torch.bfloat16, requires_grad=True)
    y = torch.tensor([1.0, 3.0], dtype=torch.bfloat16)
    both = collect_changes(x, y)
    assert both is not None
    assert torch.equal(apply_changes(y, both), x.detach())


def test_public_functions_on_a_device(device: str, fresh: np.random.Generator) -> None:
    new, old = pair(fresh, "bfloat16", 3000, 0.05)
    x, y = (torch.from_numpy(u.copy()).view(torch.bfloat16).to(device) for u in (new, old))
    edges = edges_of("bfloat16")[-1]
    found = collect_changes(x, y, edges)
    assert found is not None
    assert torch.equal(apply_changes(y, found, edges).view(torch.int16), x.view(torch.int16))
    assert apply_changes(y, found, edges, out=y) is y
    assert torch.equal(y.view(torch.int16), x.view(torch.int16))


def joined(counts: list[int], symbols: bytes, extra: bytes = b"", large: list[int] = [], n: int = 9) -> Any:  # noqa: B006
    """Join changes of one class and four bytes."""
    return join_changes(np.asarray(counts), [0], n, symbols, extra, np.asarray(large, np.uint32))


EIGHT, ONE = np.zeros(8, np.float32), np.zeros(1, np.int64)
GOOD = SparseDelta(np.asarray([1]), ONE, np.ones(1, np.uint32))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: collect_changes(EIGHT, EIGHT[:7]), BadArgumentError, "shape"),
        (lambda: collect_changes(EIGHT, EIGHT.astype(float)), BadArgumentError, "dtype"),
        (lambda: collect_changes(EIGHT, EIGHT, [3, 2]), BadArgumentError, "ascending"),
        (lambda: collect_changes(EIGHT, EIGHT, range(1, 9)), BadArgumentError, "at most 7"),
        (lambda: collect_changes(EIGHT, EIGHT, [1 << 31]), BadArgumentError, "an edge"),
        (lambda: collect_changes(EIGHT.view(int), EIGHT.view(int), [5]), BadArgumentError, "floats"),
        (lambda: collect_changes(EIGHT, EIGHT, limit=-1), BadArgumentError, "limit"),
        (lambda: apply_changes(EIGHT, GOOD, method="sum"), BadArgumentError, "method"),
        (lambda: collect_changes(EIGHT, EIGHT, copy_to=EIGHT[:7]), BadArgumentError, "copy_to"),
        (lambda: collect_changes(EIGHT, EIGHT, dtype="float16"), BadArgumentError, "widths"),
        (lambda: apply_changes(EIGHT, GOOD._replace(counts=np.asarray([2]))), BadArgumentError, "add up"),
        (lambda: apply_changes(EIGHT, GOOD, [5]), BadArgumentError, "classes"),
        (lambda: apply_changes(EIGHT, GOOD._replace(changes=np.ones(1, np.uint16))), BadArgumentError, "uint32"),
        (lambda: apply_changes(EIGHT, GOOD, out=EIGHT.reshape(2, 4)), BadArgumentError, "out"),
        (lambda: apply_changes(EIGHT, None), BadArgumentError, "SparseDelta"),
        (lambda: split_changes(GOOD._replace(ranks=ONE - 1), [0]), BadArgumentError, "gap"),
        (lambda: split_changes(GOOD._replace(ranks=ONE + (1 << 25)), [0]), BadArgumentError, "gap"),
        (lambda: split_changes(GOOD._replace(changes=np.zeros(1, np.uint32)), [0]), BadArgumentError, "gap"),
        (
            lambda: joined([1], b"\0", n=1 << 26),
            BadArgumentError,
            "n is",
        ),
        (lambda: joined([2], b"\0", b""), CorruptDataError, "symbols"),
        (lambda: joined([1], b"\xff", b""), CorruptDataError, "exist"),
        (
            lambda: joined([1], b"\x04", b""),
            CorruptDataError,
            "too few",
        ),
        (
            lambda: joined([1], b"\x04", b"", [2**32 - 1]),
            CorruptDataError,
            "wider",
        ),
        (
            lambda: joined([1], b"\x00", b"\x01"),
            CorruptDataError,
            "bits",
        ),
        (
            lambda: joined([1], b"\x00", b"", [0]),
            CorruptDataError,
            "1 large",
        ),
        (lambda: split_changes(GOOD, [25]), BadArgumentError, "a shift is 25"),
        (lambda: split_changes(GOOD, []), BadArgumentError, "0 shifts for 1"),
        (
            lambda: joined([10], bytes(10), b""),
            CorruptDataError,
            "among 9",
        ),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with np.errstate(over="ignore"), pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("offset", [0, 1, 8])
def test_much_memory_is_written_around_the_cache(fresh: np.random.Generator, offset: int) -> None:
    """Large targets are written right at any alignment, with and without changes."""
    n = compiled.MUCH // 2 + 77
    old = random_patterns(fresh, "float16", n)
    new = old.copy()
    for part in (slice(64, 128), slice(640, 100_000, 50), slice(n - 3, n)):
        new[part] ^= 1
    for edges in ((), (1000, 20000)):
        found = collect_changes(new, old, edges, dtype="float16")
        assert found is not None
        room = np.full(n + 64, 7, np.uint16)
        out = room[offset : offset + n]
        assert apply_changes(old, found, edges, out=out, dtype="float16") is out
        np.testing.assert_array_equal(out, new)
        assert (room[:offset] == 7).all()
        assert (room[offset + n :] == 7).all()
