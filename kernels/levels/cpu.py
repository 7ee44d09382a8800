"""Level differences, grouping and pair counts on the CPU.

Grouping processes the two halves of the input in the same loop, with separate counters, so that their increments do not
wait for each other. More than two parts are not faster, because each part writes to one position per key.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, like, to_numpy
from ..backend.instructions import local_array
from ..backend.jit import njit_in_place
from ..errors import BadArgumentError, CorruptDataError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

CHUNK = 1 << 30
"""Elements between two additions of the uint32 pair counters to the int64 ones."""


@njit_in_place
def _subtract(a: Any, b: Any, size: int, out: Any) -> Any:
    """Compute `out = (a - b) mod size`; whether all elements of both were below size."""
    wrap = np.uint8(size & 255)
    largest = np.uint8(size - 1)
    above = np.uint8(0)
    for i in range(a.size):
        p, c = a[i], b[i]
        above |= np.uint8(p > largest) | np.uint8(c > largest)
        out[i] = np.uint8(np.uint8(p - c) + (wrap if p < c else np.uint8(0)))
    return above == 0


@njit_in_place
def _count_halves(keys: Any, lanes: Any) -> None:
    """Count keys in `lanes[8 * key + lane]`, separately for both halves of the array.

    Even lanes count the first half (the shorter), odd lanes the second.
    """
    one, three = np.uint64(1), np.uint64(3)
    half = keys.size // 2
    a, b = keys[:half], keys[half:]
    whole = half // 4 * 4
    for i in range(0, whole, 4):
        lanes[np.uint64(a[i]) << three] += one
        lanes[(np.uint64(b[i]) << three) + np.uint64(1)] += one
        lanes[(np.uint64(a[i + 1]) << three) + np.uint64(2)] += one
        lanes[(np.uint64(b[i + 1]) << three) + np.uint64(3)] += one
        lanes[(np.uint64(a[i + 2]) << three) + np.uint64(4)] += one
        lanes[(np.uint64(b[i + 2]) << three) + np.uint64(5)] += one
        lanes[(np.uint64(a[i + 3]) << three) + np.uint64(6)] += one
        lanes[(np.uint64(b[i + 3]) << three) + np.uint64(7)] += one
    for i in range(whole, half):
        lanes[np.uint64(a[i]) << three] += one
    for i in range(whole, b.size):
        lanes[(np.uint64(b[i]) << three) + np.uint64(1)] += one


@njit_in_place
def _split(values: Any, keys: Any, places: Any, out: Any) -> None:
    """Move each value to `places[2 * key + half]` and advance that position by one."""
    one = np.uint64(1)
    half = keys.size // 2
    a, b, first, second = keys[:half], keys[half:], values[:half], values[half:]
    for i in range(half):
        j = np.uint64(a[i]) << one
        p = places[j]
        out[p] = first[i]
        places[j] = p + one
        k = (np.uint64(b[i]) << one) + one
        q = places[k]
        out[q] = second[i]
        places[k] = q + one
    for i in range(half, b.size):
        out[places[(np.uint64(b[i]) << one) + one]] = second[i]


@njit_in_place
def _merge(grouped: Any, keys: Any, places: Any, out: Any) -> None:
    """Take each value from `places[2 * key + half]` and advance that position by one."""
    one = np.uint64(1)
    half = keys.size // 2
    a, b, first, second = keys[:half], keys[half:], out[:half], out[half:]
    for i in range(half):
        j = np.uint64(a[i]) << one
        p = places[j]
        first[i] = grouped[p]
        places[j] = p + one
        k = (np.uint64(b[i]) << one) + one
        q = places[k]
        second[i] = grouped[q]
        places[k] = q + one
    for i in range(half, b.size):
        second[i] = grouped[places[(np.uint64(b[i]) << one) + one]]


@njit_in_place
def _pairs(previous: Any, current: Any, previous_size: int, current_size: int, shift: int, lanes: Any) -> Any:
    """Count level pairs in lanes that take turns; whether every level was in range.

    A pair counts in `lanes[4 * (previous << shift | current) + lane]`.

    The levels are processed in short blocks: a vectorized loop forms the pairs, and a second loop counts them. The
    first loop finds a level beyond its size, before the second would write outside the counters.
    """
    one, two, by = np.uint32(1), np.uint64(2), np.uint16(shift)
    top_previous, top_current = np.uint8(previous_size - 1), np.uint8(current_size - 1)
    pairs = local_array(256, np.uint16)
    whole = previous.size // 256 * 256
    for begin in range(0, whole, 256):
        p, c = previous[begin : begin + 256], current[begin : begin + 256]
        above = np.uint8(0)
        for i in range(256):
            above |= np.uint8(p[i] > top_previous) | np.uint8(c[i] > top_current)
            pairs[i] = np.uint16(np.uint16(p[i]) << by | np.uint16(c[i]))
        if above:
            return False
        for i in range(0, 256, 4):
            lanes[np.uint64(pairs[i]) << two] += one
            lanes[(np.uint64(pairs[i + 1]) << two) + np.uint64(1)] += one
            lanes[(np.uint64(pairs[i + 2]) << two) + np.uint64(2)] += one
            lanes[(np.uint64(pairs[i + 3]) << two) + np.uint64(3)] += one
    for i in range(whole, previous.size):
        if previous[i] > top_previous or current[i] > top_current:
            return False
        lanes[(np.uint64(previous[i]) << np.uint64(shift) | np.uint64(current[i])) << two] += one
    return True


@njit_in_place
def _add_lanes(lanes: Any, counts: Any) -> None:
    """Add the four lanes of each pair to `counts`.

    Rows of `counts` may be shorter than those of `lanes`.
    """
    for row in range(counts.shape[0]):
        own, out = lanes[row], counts[row]
        for k in range(out.size):
            out[k] += np.int64(own[k, 0]) + np.int64(own[k, 1]) + np.int64(own[k, 2]) + np.int64(own[k, 3])


def _flat(x: Array) -> Bytes:
    return to_numpy(x).reshape(-1)


def _difference(a: Array, b: Array, size: int) -> tuple[Bytes, bool]:
    first, second = _flat(a), _flat(b)
    out = np.empty(tuple(b.shape), dtype=np.uint8)
    return out, bool(_subtract(first, second, size, out.reshape(-1)))


def delta(previous: Array, current: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.delta`."""
    out, good = _difference(previous, current, size)
    if not good:
        raise BadArgumentError(f"a level is not below size, {size}")
    return like(out, current)


def undelta(previous: Array, delta: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.undelta`."""
    out, good = _difference(previous, delta, size)
    if not good:
        raise CorruptDataError(f"a level or difference is not below {size}, the number of levels")
    return like(out, delta)


def _groups(keys: Bytes, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """Start of each key's elements in both halves, and counts per key.

    None where a key is not below size.
    """
    lanes = np.zeros((256, 4, 2), dtype=np.uint64)
    _count_halves(keys, lanes.reshape(-1))
    number = lanes.sum(axis=1).astype(np.int64)
    if number[size:].any():
        return None
    places = np.cumsum(number.reshape(-1)) - number.reshape(-1)
    return places.astype(np.uint64), number.sum(axis=1)[:size]


def split_by_level(values: Array, keys: Array, size: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.levels.split_by_level`."""
    flat, flat_keys = _flat(values), _flat(keys)
    groups = _groups(flat_keys, size)
    if groups is None:
        raise BadArgumentError(f"a key is not below size, {size}")
    out = np.empty(flat.size, dtype=np.uint8)
    _split(flat, flat_keys, groups[0], out)
    return like(out, values), like(groups[1], values)


def merge_by_level(grouped: Array, keys: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.merge_by_level`."""
    flat_keys = _flat(keys)
    groups = _groups(flat_keys, size)
    if groups is None:
        raise CorruptDataError(f"a key is not below {size}, the number of levels")
    out = np.empty(tuple(keys.shape), dtype=np.uint8)
    _merge(_flat(grouped), flat_keys, groups[0], out.reshape(-1))
    return like(out, grouped)


def joint_counts(previous: Array, current: Array, previous_size: int, current_size: int) -> Array:
    """See `shrinkpoint.kernels.levels.joint_counts`."""
    a, b = _flat(previous), _flat(current)
    counts = np.zeros((previous_size, current_size), dtype=np.int64)
    shift = (current_size - 1).bit_length()
    for begin in range(0, a.size, CHUNK):
        lanes = np.zeros((previous_size, 1 << shift, 4), dtype=np.uint32)
        part = slice(begin, begin + CHUNK)
        if not _pairs(a[part], b[part], previous_size, current_size, shift, lanes.reshape(-1)):
            raise BadArgumentError(
                f"a previous level is not below {previous_size} or a current one not below {current_size}"
            )
        _add_lanes(lanes, counts)
    return like(counts, current)
