"""Sparse deltas on the CPU: compare 64 elements at once, then walk the changed ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, is_torch, like, to_numpy, writeable, writeable_view
from ..backend.instructions import EDGES, LANES
from ..planes import ordered_by_sign
from ..planes.cpu import as_values, patterns
from . import GAP_BITS, SparseDelta, wrong_changes, wrong_gap, wrong_rank
from .loops import compact, group, join, mark, put, put_classes, split

MUCH = 1 << 20
"""Bytes that do not stay in the cache anyway."""


def collect_changes(
    current: Array, previous: Array, edges: tuple[int, ...], limit: int, copy_to: Array | None, dtype: str
) -> SparseDelta | None:
    """See `shrinkpoint.kernels.sparse_delta.collect_changes`."""
    found = _collect(current, previous, edges, limit, copy_to, dtype)
    return None if found is None else found[0]


def collect_and_locate(
    current: Array, previous: Array, edges: tuple[int, ...], limit: int, dtype: str
) -> tuple[SparseDelta, Array, Array] | None:
    """See `shrinkpoint.kernels.sparse_delta.collect_and_locate`."""
    found = _collect(current, previous, edges, limit, None, dtype)
    if found is None:
        return None
    delta, positions, values = found
    return delta, like(positions.copy(), current), as_values(values.copy(), previous)


def _collect(
    current: Array, previous: Array, edges: tuple[int, ...], limit: int, copy_to: Array | None, dtype: str
) -> tuple[SparseDelta, np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Return the changes, and buffers that begin with their positions and new patterns."""
    c, p = _readable(current), _readable(previous)
    copy = c[:0] if copy_to is None else _writable(copy_to)
    positions, changes = np.empty(limit + LANES, np.int64), np.empty(limit + LANES, p.dtype)
    values = np.empty(limit + LANES, p.dtype)
    classes, counts = np.empty(limit + LANES, np.uint8), np.zeros(len(edges) + 1, np.int64)
    ranks, given = np.empty(limit + LANES, np.int64), _padded(edges, p.dtype)
    found = ranks, changes, classes, counts, positions, values
    m = int(compact(c, p, copy, copy_to is not None, given, limit, ordered_by_sign(dtype), *found))
    if m < 0:
        return None
    if not edges:  # copied: the buffer for many changes is not kept for a few
        delta = SparseDelta(counts, like(positions[:m].copy(), current), like(changes[:m].copy(), current))
        return delta, positions[:m], values[:m]
    grouped_ranks, grouped = np.empty(m, np.int64), np.empty(m, p.dtype)
    group(classes[:m], ranks, changes, np.cumsum(counts) - counts, grouped_ranks, grouped)
    delta = SparseDelta(counts, like(grouped_ranks, current), like(grouped, current))
    return delta, positions[:m], values[:m]


def locate_changes(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, dtype: str
) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.sparse_delta.locate_changes`."""
    p = _readable(previous)
    positions, values = np.empty(delta.ranks.shape[0], np.int64), np.empty(delta.ranks.shape[0], p.dtype)
    _apply(p, delta, edges, method, dtype, p[:0], False, positions, values)
    return like(positions, previous), as_values(values, previous)


def apply_changes(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, out: Array | None, dtype: str
) -> Array:
    """See `shrinkpoint.kernels.sparse_delta.apply_changes`."""
    p = _readable(previous)
    target = np.empty_like(p) if out is None else _writable(out)
    in_place = target.ctypes.data == p.ctypes.data
    _apply(p, delta, edges, method, dtype, target, not in_place, np.empty(0, np.int64), p[:0])
    return as_values(target.reshape(tuple(previous.shape)), previous) if out is None else out


def split_changes(delta: SparseDelta, shifts: Any) -> tuple[Array, Array, Array]:
    """See `shrinkpoint.kernels.sparse_delta.split_changes`."""
    ranks, changes = writeable(delta.ranks), writeable(delta.changes)
    symbols, large = np.empty(ranks.size, np.uint8), np.empty(ranks.size + 1, changes.dtype)
    words = np.empty(ranks.size * (GAP_BITS - 1) // 64 + 2, np.uint64)
    state = np.zeros(3, np.int64)
    if not split(delta.counts, shifts, ranks, changes, symbols, words, large, state):
        raise wrong_gap(int(state[0]))
    extra = words.view(np.uint8)[: (int(state[1]) + 7) // 8].copy()
    out = delta.ranks
    return like(symbols, out), like(extra, out), like(large[: int(state[2])].copy(), out)


def join_changes(counts: Any, shifts: Any, n: int, symbols: Array, extra: Array, large: Array) -> SparseDelta:
    """See `shrinkpoint.kernels.sparse_delta.join_changes`."""
    own, data, wide = writeable(symbols), to_numpy(extra), writeable(large)
    words = np.zeros((data.size + 7) // 8 + 2, np.uint64)
    words.view(np.uint8)[: data.size] = data
    ranks, changes = np.empty(own.size, np.int64), np.empty(own.size, wide.dtype)
    state = np.zeros(2, np.int64)
    problem = int(join(counts, shifts, n, own, words, 8 * data.size, wide, ranks, changes, state))
    if problem:
        raise wrong_changes(_PROBLEMS[problem])
    used = int(state[0])
    if data.size != (used + 7) // 8 or (used % 8 and int(data[-1]) >> (used % 8)):
        raise wrong_changes(f"{data.size} bytes are not the {used} bits that the gaps leave open")
    if int(state[1]) != wide.size:
        raise wrong_changes(f"{wide.size} large ones, {int(state[1])} are needed")
    return SparseDelta(counts, like(ranks, large), like(changes, large))


_PROBLEMS = {
    1: "a symbol does not exist",
    2: "too few bits for the gaps",
    3: "a rank is beyond the last element",
    4: "too few large ones",
    5: "one is wider than its dtype",
}


def _readable(x: Array) -> np.ndarray[Any, Any]:
    """The patterns of an array, as `writeable_view`."""
    return writeable_view(patterns(x))


def _writable(x: Array) -> np.ndarray[Any, Any]:
    """The patterns of a flat array, in its own memory."""
    if is_torch(x):
        return patterns(x)
    flat: np.ndarray[Any, Any] = to_numpy(x)
    return flat.view(f"uint{8 * flat.itemsize}")


def _padded(edges: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Return eight edges; the unused ones are above every pattern."""
    top = 1 << (8 * dtype.itemsize - 1)
    return np.asarray([*edges, *[top] * (EDGES - len(edges))], dtype)


def _apply(
    p: np.ndarray[Any, Any],
    delta: SparseDelta,
    edges: tuple[int, ...],
    method: str,
    dtype: str,
    out: np.ndarray[Any, Any],
    copy: bool,
    positions: np.ndarray[Any, Any],
    values: np.ndarray[Any, Any],
) -> None:
    """Write the changed array to `out`, or if `out` is empty, `positions` and `values`."""
    ranks, changes = writeable(delta.ranks), writeable(delta.changes)
    signed, xor = ordered_by_sign(dtype), method == "xor"
    if not edges:
        fits = put(p, ranks, changes, signed, xor, out, copy, positions, values)
    else:
        ends, streams = np.cumsum(delta.counts), copy and p.nbytes >= MUCH and out.ctypes.data % 16 == 0
        begins = ends - delta.counts
        firsts, lasts, bits = _marks(ranks, begins, ends, p.size)
        padded = _padded(edges, p.dtype)
        made = put_classes(
            p, padded, begins, firsts, lasts, bits, changes, signed, xor, out, copy, streams, positions, values
        )
        fits = int(made) == ranks.size
    if not fits:
        raise wrong_rank()


def _marks(
    ranks: np.ndarray[Any, Any], begins: np.ndarray[Any, Any], ends: np.ndarray[Any, Any], n: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the first and last byte of each class, and a bit for each rank that changes.

    After the last rank of a class at least nine bytes are zero, and the last byte is the first of these.
    """
    most = np.asarray([ranks[end - 1] if end > begin else 0 for begin, end in zip(begins, ends, strict=True)], np.int64)
    if ranks.size and not 0 <= int(most.min()) <= int(most.max()) < n:
        raise wrong_rank()
    sizes = np.zeros(8, np.int64)
    sizes[: most.size] = (most >> 3) + 1
    firsts = np.cumsum(sizes + 9) - sizes - 9
    bits = np.zeros(int((sizes + 9).sum()), np.uint8)
    if not mark(ranks, begins, ends, firsts, bits):
        raise wrong_rank()
    return firsts, firsts + sizes, bits
