"""Level differences, grouping and pair counts, compiled.

Counting and grouping walk four quarters of the input side by side: the chains of increments do not wait for each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like, to_numpy
from ..errors import BadArgumentError, CorruptDataError
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@njit
def _subtract(a: Any, b: Any, size: int, out: Any) -> bool:
    """`out = (a - b) mod size`; whether every element of both was below size."""
    wrap = np.uint8(size & 255)
    largest = np.uint8(size - 1)
    above = np.uint8(0)
    for i in range(a.size):
        p, c = a[i], b[i]
        above |= np.uint8(p > largest) | np.uint8(c > largest)
        out[i] = np.uint8(np.uint8(p - c) + (wrap if p < c else np.uint8(0)))
    return above == 0


@njit
def _count_quarters(keys: Any, tables: Any) -> None:
    """Counts of each key in the four quarters of keys (the last takes the remainder): `tables[quarter, key]`."""
    n = keys.size
    quarter = n // 4
    t0, t1, t2, t3 = tables[0], tables[1], tables[2], tables[3]
    k1, k2, k3 = keys[quarter:], keys[2 * quarter :], keys[3 * quarter :]
    for i in range(quarter):
        t0[keys[i]] += 1
        t1[k1[i]] += 1
        t2[k2[i]] += 1
        t3[k3[i]] += 1
    for i in range(4 * quarter, n):
        t3[keys[i]] += 1


@njit
def _starts(tables: Any, counts: Any) -> None:
    """Turn counts a quarter into the positions where each quarter's elements of each key begin; counts: the totals."""
    at = 0
    for key in range(256):
        begin = at
        for quarter in range(4):
            number = tables[quarter, key]
            tables[quarter, key] = at
            at += number
        counts[key] = at - begin


@njit
def _split(values: Any, keys: Any, starts: Any, out: Any) -> None:
    n = keys.size
    quarter = n // 4
    t0, t1, t2, t3 = starts[0], starts[1], starts[2], starts[3]
    k1, k2, k3 = keys[quarter:], keys[2 * quarter :], keys[3 * quarter :]
    v1, v2, v3 = values[quarter:], values[2 * quarter :], values[3 * quarter :]
    for i in range(quarter):
        a, b, c, d = keys[i], k1[i], k2[i], k3[i]
        p = t0[a]
        out[p] = values[i]
        t0[a] = p + 1
        q = t1[b]
        out[q] = v1[i]
        t1[b] = q + 1
        r = t2[c]
        out[r] = v2[i]
        t2[c] = r + 1
        s = t3[d]
        out[s] = v3[i]
        t3[d] = s + 1
    for i in range(4 * quarter, n):
        s = t3[keys[i]]
        out[s] = values[i]
        t3[keys[i]] = s + 1


@njit
def _merge(grouped: Any, keys: Any, starts: Any, out: Any) -> None:
    n = keys.size
    quarter = n // 4
    t0, t1, t2, t3 = starts[0], starts[1], starts[2], starts[3]
    k1, k2, k3 = keys[quarter:], keys[2 * quarter :], keys[3 * quarter :]
    o1, o2, o3 = out[quarter:], out[2 * quarter :], out[3 * quarter :]
    for i in range(quarter):
        a, b, c, d = keys[i], k1[i], k2[i], k3[i]
        p = t0[a]
        out[i] = grouped[p]
        t0[a] = p + 1
        q = t1[b]
        o1[i] = grouped[q]
        t1[b] = q + 1
        r = t2[c]
        o2[i] = grouped[r]
        t2[c] = r + 1
        s = t3[d]
        o3[i] = grouped[s]
        t3[d] = s + 1
    for i in range(4 * quarter, n):
        s = t3[keys[i]]
        out[i] = grouped[s]
        t3[keys[i]] = s + 1


@njit
def _pairs(previous: Any, current: Any, tables: Any) -> None:
    """Add to `tables[lane * 65536 + previous * 256 + current]`, lanes taking turns."""
    one = np.uint32(1)
    n = previous.size
    whole = n - n % 4
    for i in range(0, whole, 4):
        tables[np.uint64(previous[i]) << np.uint64(8) | np.uint64(current[i])] += one
        tables[(np.uint64(previous[i + 1]) << np.uint64(8) | np.uint64(current[i + 1])) + np.uint64(65536)] += one
        tables[(np.uint64(previous[i + 2]) << np.uint64(8) | np.uint64(current[i + 2])) + np.uint64(131072)] += one
        tables[(np.uint64(previous[i + 3]) << np.uint64(8) | np.uint64(current[i + 3])) + np.uint64(196608)] += one
    for i in range(whole, n):
        tables[np.uint64(previous[i]) << np.uint64(8) | np.uint64(current[i])] += one


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
    """Starts a quarter and key, and counts a key; None where a key is not below size."""
    tables = np.zeros((4, 256), dtype=np.int64)
    _count_quarters(keys, tables)
    if tables[:, size:].any():
        return None
    counts = np.empty(256, dtype=np.int64)
    _starts(tables, counts)
    return tables, counts[:size].copy()


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
    for begin in range(0, a.size, 1 << 30):  # the partial counters are uint32
        tables = np.zeros((4, 256, 256), dtype=np.uint32)
        _pairs(a[begin : begin + (1 << 30)], b[begin : begin + (1 << 30)], tables.reshape(-1))
        counts += tables[:, :previous_size, :current_size].sum(axis=0, dtype=np.int64)
    if int(counts.sum()) != a.size:
        raise BadArgumentError(
            f"a previous level is not below {previous_size} or a current one not below {current_size}"
        )
    return like(counts, current)
