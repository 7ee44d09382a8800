"""The compiled loops that find changed elements by their ranks and write the new values."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.jit import njit
from .lanes import BLOCK, HAS_DEPOSIT, LANES, at_least, barrier, copy_word, move, ones, stream_word, zeros_below

if HAS_DEPOSIT:
    from .lanes import deposited

    @njit
    def _select(mask: Any, rank: Any) -> Any:
        """The position of the set bit that has `rank` set bits below it."""
        return zeros_below(deposited(np.uint64(1) << rank, mask))

else:

    @njit
    def _select(mask: Any, rank: Any) -> Any:
        """The position of the set bit that has `rank` set bits below it, by halves."""
        one, at, size = np.uint64(1), np.uint64(0), np.uint64(32)
        while size > np.uint64(0):
            below = ones((mask >> at) & ((one << size) - one))
            if rank >= below:
                rank -= below
                at += size
            size >>= one
        return at


@njit
def put(
    previous: Any, ranks: Any, changes: Any, signed: Any, xor: Any, out: Any, copy: Any, positions: Any, values: Any
) -> Any:
    """Apply changes whose ranks are positions; return whether the ranks are valid."""
    kind = previous.dtype.type
    none, bit, half = kind(0), kind(1), kind(1 << (8 * previous.itemsize - 1))
    low = kind(half - bit)
    whole = kind(low | half)
    k, n, m = np.int64(0), previous.size, ranks.size
    last = np.int64(-1)
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        if copy:
            move(out, previous, start, stop)
        while k < m and ranks[k] < stop:
            at = ranks[k]
            if at <= last:
                return False
            last = at
            y, z = previous[at], changes[k]
            if xor:
                x = kind(y ^ z)
            else:
                z = kind(kind(z >> bit) ^ (whole if kind(z & bit) != none else none))
                if signed:
                    y = kind(y ^ (low if y >= half else none))
                x = kind(y + z)
                if signed:
                    x = kind(x ^ (low if x >= half else none))
            if out.size > 0:
                out[at] = x
            else:
                positions[k] = at
                values[k] = x
            k += 1
    return k == m


@njit
def put_classes(
    previous: Any,
    edges: Any,
    starts: Any,
    ends: Any,
    ranks: Any,
    changes: Any,
    signed: Any,
    xor: Any,
    out: Any,
    copy: Any,
    streams: Any,
    positions: Any,
    values: Any,
) -> Any:
    """Apply changes of several classes; return whether the ranks are valid.

    Each word of elements is copied after its changes are made, with `streams` by stores that bypass the cache.
    """
    one, zero = np.uint64(1), np.uint64(0)
    kind = previous.dtype.type
    none, bit, half = kind(0), kind(1), kind(1 << (8 * previous.itemsize - 1))
    low = kind(half - bit)
    whole = kind(low | half)
    never = np.int64(1 << 62)
    padding = np.zeros(LANES, previous.dtype)
    found = np.zeros(LANES, previous.dtype)
    e0, e1, e2, e3, e4, e5, e6 = edges[0], edges[1], edges[2], edges[3], edges[4], edges[5], edges[6]
    n0 = n1 = n2 = n3 = n4 = n5 = n6 = np.int64(0)
    # For each class, the next rank to find and its position in the lists.
    at = np.zeros(8, np.int64)
    waiting = np.zeros(8, np.int64)
    before, reach, top = np.zeros(9, np.int64), np.zeros(9, np.uint64), np.zeros(8, np.int64)
    for c in range(8):
        at[c] = starts[c] if c < starts.size else 0
        waiting[c] = ranks[at[c]] if c < starts.size and at[c] < ends[c] else never
        if waiting[c] < 0:
            return False
    w0, w1, w2, w3 = waiting[0], waiting[1], waiting[2], waiting[3]
    w4, w5, w6, w7 = waiting[4], waiting[5], waiting[6], waiting[7]
    k, n = np.int64(0), previous.size
    full = n - n % LANES
    direct = out.size > 0 and not copy
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        for i in range(start, stop, LANES):
            lanes = ~zero
            if i < full:
                m0, m1, m2 = at_least(previous, i, e0), at_least(previous, i, e1), at_least(previous, i, e2)
                m3, m4, m5 = at_least(previous, i, e3), at_least(previous, i, e4), at_least(previous, i, e5)
                m6 = at_least(previous, i, e6)
                t = i + LANES
            else:
                padding[: n - full] = previous[full:]
                m0, m1, m2 = at_least(padding, 0, e0), at_least(padding, 0, e1), at_least(padding, 0, e2)
                m3, m4, m5 = at_least(padding, 0, e3), at_least(padding, 0, e4), at_least(padding, 0, e5)
                m6 = at_least(padding, 0, e6)
                lanes = (one << np.uint64(n - full)) - one
                t = n
            t0, t1, t2 = n0 + np.int64(ones(m0)), n1 + np.int64(ones(m1)), n2 + np.int64(ones(m2))
            t3, t4, t5 = n3 + np.int64(ones(m3)), n4 + np.int64(ones(m4)), n5 + np.int64(ones(m5))
            t6 = n6 + np.int64(ones(m6))
            hit = np.uint64(w0 < t - t0) | np.uint64(w1 < t0 - t1) << one | np.uint64(w2 < t1 - t2) << np.uint64(2)
            hit |= np.uint64(w3 < t2 - t3) << np.uint64(3) | np.uint64(w4 < t3 - t4) << np.uint64(4)
            hit |= np.uint64(w5 < t4 - t5) << np.uint64(5) | np.uint64(w6 < t5 - t6) << np.uint64(6)
            hit |= np.uint64(w7 < t6) << np.uint64(7)
            if hit == zero and copy:
                if i >= full:
                    move(out, previous, i, n)
                elif streams:
                    stream_word(out, i, previous, i)
                else:
                    copy_word(out, i, previous, i)
            if hit != zero:
                if copy and i < full:
                    copy_word(found, 0, previous, i)
                elif copy:
                    move(out, previous, i, n)
                before[0], before[1], before[2], before[3] = i, n0, n1, n2
                before[4], before[5], before[6], before[7] = n3, n4, n5, n6
                reach[0], reach[1], reach[2], reach[3] = lanes, m0, m1, m2
                reach[4], reach[5], reach[6], reach[7] = m3, m4, m5, m6
                top[0], top[1], top[2], top[3] = t - t0, t0 - t1, t1 - t2, t2 - t3
                top[4], top[5], top[6], top[7] = t3 - t4, t4 - t5, t5 - t6, t6
                d = zero
                while hit != zero:
                    own = np.int64(zeros_below(hit))
                    hit &= hit - one
                    members = reach[own] & ~reach[own + 1]
                    below = before[own] - before[own + 1]
                    rank, j, end, limit = waiting[own], at[own], ends[own], top[own]
                    while rank < limit:
                        b = _select(members, np.uint64(rank - below))
                        y, z = previous[i + np.int64(b)], changes[j]
                        if xor:
                            x = kind(y ^ z)
                        else:
                            z = kind(kind(z >> bit) ^ (whole if kind(z & bit) != none else none))
                            if signed:
                                y = kind(y ^ (low if y >= half else none))
                            x = kind(y + z)
                            if signed:
                                x = kind(x ^ (low if x >= half else none))
                        if direct or (copy and i >= full):
                            out[i + np.int64(b)] = x
                        else:
                            found[np.int64(b)] = x
                            d |= one << b
                        j += 1
                        following = ranks[j] if j < end else never
                        if following <= rank:
                            return False
                        rank = following
                    waiting[own], at[own] = rank, j
                w0, w1, w2, w3 = waiting[0], waiting[1], waiting[2], waiting[3]
                w4, w5, w6, w7 = waiting[4], waiting[5], waiting[6], waiting[7]
                if copy and i < full:
                    if streams:
                        stream_word(out, i, found, 0)
                    else:
                        copy_word(out, i, found, 0)
                    d = zero
                while d != zero:
                    b = zeros_below(d)
                    d &= d - one
                    positions[k] = i + np.int64(b)
                    values[k] = found[np.int64(b)]
                    k += 1
            n0, n1, n2, n3, n4, n5, n6 = t0, t1, t2, t3, t4, t5, t6
    if streams:
        barrier()
    for c in range(starts.size):
        if at[c] != ends[c]:
            return False
    return True
