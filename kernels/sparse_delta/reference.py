"""Oracle of the sparse deltas: flags of changes, running counts for ranks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array, as_list, dtype_name, from_list, to_numpy
from ..planes import reference as planes
from ..planes import width_of
from . import GAP_BITS, SMALL, SYMBOLS, SparseDelta, wrong_changes, wrong_gap, wrong_rank


def collect_changes(
    current: Array, previous: Array, edges: tuple[int, ...], limit: int, copy_to: Array | None, dtype: str
) -> SparseDelta | None:
    """See `shrinkpoint.kernels.sparse_delta.collect_changes`."""
    xp = array_namespace(current)
    c, p = planes.patterns(current), planes.patterns(previous)
    changed = c != p
    if copy_to is not None and bool(xp.any(changed)):
        copy_to[:] = xp.reshape(current, (-1,))
    if int(xp.sum(xp.astype(changed, xp.int64))) > limit:
        return None
    steps = planes.patterns(planes.difference(current, previous, "arithmetic", dtype=dtype))
    steps = xp.reshape(steps, (-1,))
    counts, ranks, changes = [], [], []
    for members in _classes(p, edges, dtype):
        rank = xp.cumulative_sum(xp.astype(members, xp.int64)) - 1
        chosen = members & changed
        counts.append(int(xp.sum(xp.astype(chosen, xp.int64))))
        ranks.append(rank[chosen])
        changes.append(steps[chosen])
    width = width_of(dtype)
    return SparseDelta(np.asarray(counts, np.int64), xp.concat(ranks), planes.unsigned(xp.concat(changes), width))


def _classes(p: Array, edges: tuple[int, ...], dtype: str) -> list[Array]:
    """Mark the elements of each class by their patterns (int64).

    64-bit patterns are in two's complement.
    """
    xp = array_namespace(p)
    if not edges:
        return [xp.ones(p.shape, dtype=xp.bool)]
    low = p & ((1 << (width_of(dtype) - 1)) - 1)
    bounds = [0, *edges, None]
    return [
        (low >= bottom) & (low < top if top is not None else low >= 0) for bottom, top in itertools.pairwise(bounds)
    ]


def _placed(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, dtype: str
) -> tuple[Array, Array]:
    """Positions, ascending, and the new patterns there."""
    xp = array_namespace(previous)
    p = planes.patterns(previous)
    found, order, at = [], [], 0
    for count, members in zip(delta.counts.tolist(), _classes(p, edges, dtype), strict=True):
        ranks = delta.ranks[at : at + count]
        places = xp.nonzero(members)[0] if members.shape[0] else xp.zeros(0, dtype=xp.int64)
        at += count
        if count == 0:
            continue
        ascending = bool(xp.all(ranks[1:] > ranks[:-1])) and int(ranks[0]) >= 0
        if not ascending or int(ranks[-1]) >= places.shape[0]:
            raise wrong_rank()
        found.append(xp.take(places, ranks))
    positions = xp.concat(found) if found else xp.zeros(0, dtype=xp.int64)
    order = xp.argsort(positions)
    positions = xp.take(xp.astype(positions, xp.int64), order)
    steps = xp.take(planes.patterns(delta.changes), order)
    width = width_of(dtype)
    old = planes.unsigned(xp.take(p, positions), width)
    new = planes.undifference(planes.unsigned(steps, width), old, method, dtype=dtype)
    return positions, planes.patterns(new)


def collect_and_locate(
    current: Array, previous: Array, edges: tuple[int, ...], limit: int, dtype: str
) -> tuple[SparseDelta, Array, Array] | None:
    """See `shrinkpoint.kernels.sparse_delta.collect_and_locate`."""
    delta = collect_changes(current, previous, edges, limit, None, dtype)
    if delta is None:
        return None
    return delta, *locate_changes(previous, delta, edges, "arithmetic", dtype)


def locate_changes(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, dtype: str
) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.sparse_delta.locate_changes`."""
    positions, new = _placed(previous, delta, edges, method, dtype)
    return positions, planes.with_dtype_of(new, previous)


def apply_changes(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, out: Array | None, dtype: str
) -> Array:
    """See `shrinkpoint.kernels.sparse_delta.apply_changes`."""
    xp = array_namespace(previous)
    positions, new = _placed(previous, delta, edges, method, dtype)
    patterns = xp.asarray(planes.patterns(previous), copy=True)
    for i in range(positions.shape[0]):
        patterns[int(positions[i])] = new[i]
    values = planes.with_dtype_of(patterns, previous)
    if out is None:
        return xp.reshape(values, tuple(previous.shape))
    out[:] = values
    return out


def split_changes(delta: SparseDelta, shifts: Any) -> tuple[Array, Array, Array]:
    """See `shrinkpoint.kernels.sparse_delta.split_changes`."""
    ranks, changes = as_list(delta.ranks), to_numpy(delta.changes).tolist()
    symbols, large, number, filled, at = [], [], 0, 0, 0
    for count, shift in zip(delta.counts.tolist(), shifts.tolist(), strict=True):
        last = -1
        for rank, change in zip(ranks[at : at + count], changes[at : at + count], strict=True):
            gap, last = rank - last - 1, rank
            if not 0 <= gap < 1 << GAP_BITS or change == 0:
                raise wrong_gap(gap)
            above = (gap >> shift | 2).bit_length() - 2
            bits = shift + above
            number |= (gap & (1 << bits) - 1) << filled
            filled += bits
            small = change <= SMALL
            symbols.append((SMALL + 1) * (2 * above + (gap >> bits)) + (change - 1 if small else SMALL))
            large += [] if small else [change - SMALL - 1]
        at += count
    xp = array_namespace(delta.ranks)
    extra = list(number.to_bytes((filled + 7) // 8, "little"))
    wide = xp.asarray(large, dtype=delta.changes.dtype)
    return from_list(symbols, "uint8", delta.ranks), from_list(extra, "uint8", delta.ranks), wide


def join_changes(counts: Any, shifts: Any, n: int, symbols: Array, extra: Array, large: Array) -> SparseDelta:
    """See `shrinkpoint.kernels.sparse_delta.join_changes`."""
    number, left, wide = int.from_bytes(bytes(as_list(extra)), "little"), 8 * extra.shape[0], to_numpy(large).tolist()
    top = 1 << width_of(dtype_name(large))
    given, ranks, changes, filled, far = iter(as_list(symbols)), [], [], 0, 0
    for count, shift in zip(counts.tolist(), shifts.tolist(), strict=True):
        last = -1
        for _ in range(count):
            symbol = next(given)
            if symbol >= SYMBOLS:
                raise wrong_changes("a symbol does not exist")
            category, small = divmod(symbol, SMALL + 1)
            above = max(category // 2 - 1, 0)
            bits = shift + above
            if filled + bits > left:
                raise wrong_changes("too few bits for the gaps")
            last += 1 + ((category - 2 * above) << bits) + (number >> filled & (1 << bits) - 1)
            filled += bits
            if last >= n:
                raise wrong_changes("a rank is beyond the last element")
            ranks.append(last)
            if small < SMALL:
                changes.append(small + 1)
                continue
            if far == len(wide):
                raise wrong_changes("too few large ones")
            changes.append(wide[far] + SMALL + 1)
            far += 1
            if changes[-1] >= top:
                raise wrong_changes("one is wider than its dtype")
    if extra.shape[0] != (filled + 7) // 8 or number >> filled:
        raise wrong_changes(f"{extra.shape[0]} bytes are not the {filled} bits that the gaps leave open")
    if far != len(wide):
        raise wrong_changes(f"{len(wide)} large ones, {far} are needed")
    xp = array_namespace(large)
    return SparseDelta(counts, xp.asarray(ranks, dtype=xp.int64), xp.asarray(changes, dtype=large.dtype))
