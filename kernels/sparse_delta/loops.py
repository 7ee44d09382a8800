"""Compiled loops that find changes, find them again by their ranks, and code them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.instructions import (
    BLOCK,
    HAS_BMI2,
    LANES,
    at_least,
    barrier,
    copy_word,
    differing,
    edges_reached,
    eight_bytes,
    local_array,
    move,
    ones,
    spread,
    stream_word,
    zeros_above,
    zeros_below,
)
from ..backend.jit import njit_in_place, njit_inline
from . import GAP_BITS, SMALL, SYMBOLS


@njit_in_place
def _begin(copy: Any, current: Any, previous: Any, start: Any, i: Any, stop: Any) -> None:
    """Copy the unchanged elements before word i from the parent, and the rest of its block."""
    move(copy, current, start, stop)
    move(copy, previous, 0, i)


@njit_in_place
def compact(
    current: Any, previous: Any, copy: Any, copies: Any, edges: Any, limit: Any, signed: Any,
    ranks: Any, changes: Any, classes: Any, counts: Any, positions: Any, values: Any,
) -> Any:  # fmt: skip
    """Collect changes in the order of positions, with their classes; return their number.

    It is -1 above the limit. `counts` returns the number of each class.
    """
    one, zero = np.uint64(1), np.uint64(0)
    kind = previous.dtype.type
    none, bit, half = kind(0), kind(1), kind(1 << (8 * previous.itemsize - 1))
    low = kind(half - bit)
    whole = kind(low | half)
    first, second = local_array(LANES, previous.dtype), local_array(LANES, previous.dtype)
    for b in range(LANES):
        first[b] = second[b] = none
    e0, e1, e2, e3, e4, e5, e6 = edges[0], edges[1], edges[2], edges[3], edges[4], edges[5], edges[6]
    # Elements before the word that reach each edge, and the lanes of the word that do.
    n0 = n1 = n2 = n3 = n4 = n5 = n6 = np.int64(0)
    before, reach = local_array(9, np.int64), local_array(9, np.uint64)
    before[8], reach[0], reach[8] = 0, ~zero, zero
    k, n = np.int64(0), previous.size
    full = n - n % LANES
    begun = False
    for start in range(0, n, BLOCK):
        stop = min(start + BLOCK, n)
        if begun:
            move(copy, current, start, stop)
        if k > limit:
            if not copies:
                return np.int64(-1)
            continue
        source = copy if begun else current
        for i in range(start, stop, LANES):
            if i < full:
                d = differing(source, previous, i)
                m0, m1, m2 = at_least(previous, i, e0), at_least(previous, i, e1), at_least(previous, i, e2)
                m3, m4, m5 = at_least(previous, i, e3), at_least(previous, i, e4), at_least(previous, i, e5)
                m6 = at_least(previous, i, e6)
            else:
                for tail in range(n - full):
                    first[tail], second[tail] = source[full + tail], previous[full + tail]
                d = differing(first, second, 0)
                m0, m1, m2 = at_least(second, 0, e0), at_least(second, 0, e1), at_least(second, 0, e2)
                m3, m4, m5 = at_least(second, 0, e3), at_least(second, 0, e4), at_least(second, 0, e5)
                m6 = at_least(second, 0, e6)
            if d != zero:
                if copies and not begun:
                    _begin(copy, current, previous, start, i, stop)
                    begun, source = True, copy
                before[0], before[1], before[2], before[3] = i, n0, n1, n2
                before[4], before[5], before[6], before[7] = n3, n4, n5, n6
                reach[1], reach[2], reach[3], reach[4] = m0, m1, m2, m3
                reach[5], reach[6], reach[7] = m4, m5, m6
                while d != zero:
                    b = zeros_below(d)
                    d &= d - one
                    at = i + np.int64(b)
                    x, y = source[at], previous[at]
                    j = edges_reached(edges, y)
                    members = reach[j] & ~reach[j + 1] & ((one << b) - one)
                    positions[k] = at
                    values[k] = x
                    if signed:
                        x = kind(x ^ (low if x >= half else none))
                        y = kind(y ^ (low if y >= half else none))
                    z = kind(x - y)
                    z = kind(kind(z << bit) ^ (whole if z >= half else none))
                    ranks[k] = before[j] - before[j + 1] + np.int64(ones(members))
                    changes[k] = z
                    classes[k] = np.uint8(j)
                    is_one = np.int64(z != none)  # another thread may have written since the comparison
                    counts[j] += is_one
                    k += is_one
                if k > limit:
                    break
            n0 += np.int64(ones(m0))
            n1 += np.int64(ones(m1))
            n2 += np.int64(ones(m2))
            n3 += np.int64(ones(m3))
            n4 += np.int64(ones(m4))
            n5 += np.int64(ones(m5))
            n6 += np.int64(ones(m6))
    return np.int64(-1) if k > limit else k


@njit_in_place
def group(classes: Any, ranks: Any, changes: Any, starts: Any, grouped_ranks: Any, grouped: Any) -> None:
    """Group the changes by class, in order within each class; `starts` is modified."""
    for i in range(classes.size):
        c = classes[i]
        at = starts[c]
        grouped_ranks[at] = ranks[i]
        grouped[at] = changes[i]
        starts[c] = at + 1


@njit_inline
def deposited(bits: Any, mask: Any) -> Any:
    """Spread the lowest bits of a number over the set bits of a mask."""
    if HAS_BMI2:
        return spread(bits, mask, bits)
    one, found = np.uint64(1), np.uint64(0)
    while bits != np.uint64(0):
        rank, at, size = zeros_below(bits), np.uint64(0), np.uint64(32)
        bits &= bits - one
        while size > np.uint64(0):
            below = ones((mask >> at) & ((one << size) - one))
            if rank >= below:
                rank -= below
                at += size
            size >>= one
        if rank == np.uint64(0) and at < np.uint64(64):
            found |= (one << at) & mask
    return found


@njit_in_place
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


@njit_in_place
def mark(ranks: Any, starts: Any, ends: Any, firsts: Any, bits: Any) -> Any:
    """Set the bit of each rank in the bits of its class; return whether ranks ascend.

    The bits of a class begin at its entry of `firsts`.
    """
    for c in range(starts.size):
        last = np.int64(-1)
        for j in range(starts[c], ends[c]):
            rank = ranks[j]
            if rank <= last:
                return False
            last = rank
            bits[firsts[c] + (rank >> 3)] |= np.uint8(1 << (rank & 7))
    return True


@njit_inline
def _marked(bits: Any, first: Any, last: Any, rank: Any, count: Any) -> Any:
    """Return the bits of up to 64 ranks from `rank` on; those after the last byte are zero."""
    at, shift = min(first + (rank >> 3), last), np.uint64(rank & 7)
    found = eight_bytes(bits, at) >> shift
    if count > 57:
        found |= (np.uint64(bits[at + 8]) << np.uint64(1)) << (np.uint64(63) - shift)
    return found


@njit_in_place
def put_classes(
    previous: Any, edges: Any, starts: Any, firsts: Any, lasts: Any, bits: Any, changes: Any, signed: Any, xor: Any,
    out: Any, copy: Any, streams: Any, positions: Any, values: Any,
) -> Any:  # fmt: skip
    """Apply changes of several classes; return their number.

    The marked ranks of a class are deposited in the lanes of a word that are of the class. Each word of elements is
    copied after its changes are made, with `streams` by stores that bypass the cache.
    """
    one, zero = np.uint64(1), np.uint64(0)
    kind = previous.dtype.type
    none, bit, half = kind(0), kind(1), kind(1 << (8 * previous.itemsize - 1))
    low = kind(half - bit)
    padding, found = local_array(LANES, previous.dtype), local_array(LANES, previous.dtype)
    for lane in range(LANES):
        padding[lane] = none
    e0, e1, e2, e3, e4, e5, e6 = edges[0], edges[1], edges[2], edges[3], edges[4], edges[5], edges[6]
    f0, f1, f2, f3 = firsts[0], firsts[1], firsts[2], firsts[3]
    f4, f5, f6, f7 = firsts[4], firsts[5], firsts[6], firsts[7]
    l0, l1, l2, l3 = lasts[0], lasts[1], lasts[2], lasts[3]
    l4, l5, l6, l7 = lasts[4], lasts[5], lasts[6], lasts[7]
    # Elements before the word that reach each edge, and for each class its next change.
    n0 = n1 = n2 = n3 = n4 = n5 = n6 = np.int64(0)
    following = local_array(8, np.int64)
    for own in range(8):
        following[own] = starts[own] if own < starts.size else 0
    many = starts.size > 4
    k, n = np.int64(0), previous.size
    full = n - n % LANES
    direct = out.size > 0 and not copy
    for i in range(0, n, LANES):
        lanes, t = ~zero, i + LANES
        m3 = m4 = m5 = m6 = zero
        if i < full:
            m0, m1, m2 = at_least(previous, i, e0), at_least(previous, i, e1), at_least(previous, i, e2)
            if many:
                m3, m4 = at_least(previous, i, e3), at_least(previous, i, e4)
                m5, m6 = at_least(previous, i, e5), at_least(previous, i, e6)
        else:
            for lane in range(n - full):
                padding[lane] = previous[full + lane]
            lanes, t = (one << np.uint64(n - full)) - one, n
            m0, m1, m2 = at_least(padding, 0, e0), at_least(padding, 0, e1), at_least(padding, 0, e2)
            if many:
                m3, m4 = at_least(padding, 0, e3), at_least(padding, 0, e4)
                m5, m6 = at_least(padding, 0, e5), at_least(padding, 0, e6)
        t0, t1, t2 = n0 + np.int64(ones(m0)), n1 + np.int64(ones(m1)), n2 + np.int64(ones(m2))
        d = deposited(_marked(bits, f0, l0, i - n0, t - t0 - i + n0), lanes & ~m0)
        d |= deposited(_marked(bits, f1, l1, n0 - n1, t0 - t1 - n0 + n1), m0 & ~m1)
        d |= deposited(_marked(bits, f2, l2, n1 - n2, t1 - t2 - n1 + n2), m1 & ~m2)
        if many:
            t3, t4 = n3 + np.int64(ones(m3)), n4 + np.int64(ones(m4))
            t5, t6 = n5 + np.int64(ones(m5)), n6 + np.int64(ones(m6))
            d |= deposited(_marked(bits, f3, l3, n2 - n3, t2 - t3 - n2 + n3), m2 & ~m3)
            d |= deposited(_marked(bits, f4, l4, n3 - n4, t3 - t4 - n3 + n4), m3 & ~m4)
            d |= deposited(_marked(bits, f5, l5, n4 - n5, t4 - t5 - n4 + n5), m4 & ~m5)
            d |= deposited(_marked(bits, f6, l6, n5 - n6, t5 - t6 - n5 + n6), m5 & ~m6)
            d |= deposited(_marked(bits, f7, l7, n6, t6 - n6), m6)
            n3, n4, n5, n6 = t3, t4, t5, t6
        else:
            d |= deposited(_marked(bits, f3, l3, n2, t2 - n2), m2)
        n0, n1, n2 = t0, t1, t2
        if copy and i >= full:
            move(out, previous, i, n)
        elif copy and d == zero:
            if streams:
                stream_word(out, i, previous, i)
            else:
                copy_word(out, i, previous, i)
        elif copy:
            copy_word(found, 0, previous, i)
        changed = d != zero
        while d != zero:
            b = np.int64(zeros_below(d))
            d &= d - one
            y = previous[i + b]
            c = edges_reached(edges, y)
            j = following[c]
            following[c] = j + 1
            z = changes[j]
            if xor:
                x = kind(y ^ z)
            else:
                z = kind(kind(z >> bit) ^ kind(none - kind(z & bit)))
                if signed:
                    y = kind(y ^ (low if y >= half else none))
                x = kind(y + z)
                if signed:
                    x = kind(x ^ (low if x >= half else none))
            if copy and i < full:
                found[b] = x
            elif copy or direct:
                out[i + b] = x
            else:
                positions[k] = i + b
                values[k] = x
            k += 1
        if copy and changed and i < full:
            if streams:
                stream_word(out, i, found, 0)
            else:
                copy_word(out, i, found, 0)
    if streams:
        barrier()
    return k


@njit_in_place
def split(counts: Any, shifts: Any, ranks: Any, changes: Any, symbols: Any, words: Any, large: Any, state: Any) -> Any:
    """Write symbols, open bits and large changes.

    `state` returns a gap that does not fit, and the numbers of open bits and large changes.
    """
    one, two, sixty = np.uint64(1), np.uint64(2), np.uint64(63)
    kind = changes.dtype.type
    most, five = kind(SMALL), kind(SMALL + 1)
    word, fill, at = np.uint64(0), np.uint64(0), np.int64(0)
    k, far = np.int64(0), np.int64(0)
    for c in range(counts.size):
        last, shift = np.int64(-1), np.uint64(shifts[c])
        for _ in range(counts[c]):
            gap = ranks[k] - last - 1
            last = ranks[k]
            if gap < 0 or gap >= (1 << GAP_BITS) or changes[k] == kind(0):
                state[0] = gap
                return False
            g = np.uint64(gap)
            bits = np.uint64(62) - zeros_above((g >> shift) | two)
            category = two * bits
            bits += shift
            category += g >> bits
            z = changes[k]
            symbols[k] = np.uint8(np.uint64(SMALL + 1) * category + np.uint64(min(z, five)) - one)
            large[far] = kind(z - five)  # kept if the change is large
            far += np.int64(z > most)
            x = g & ((one << bits) - one)
            word |= x << fill
            words[at] = word
            filled = fill + bits
            is_full = filled > sixty
            at += np.int64(is_full)
            carried = np.uint64(0) - np.uint64(is_full)
            word = (word & ~carried) | (((x >> one) >> (sixty - fill)) & carried)
            fill = filled & sixty
            k += 1
    words[at] = word
    state[1] = 64 * at + np.int64(fill)
    state[2] = far
    return True


@njit_in_place
def join(
    counts: Any, shifts: Any, n: Any, symbols: Any, words: Any, bits_given: Any, large: Any, ranks: Any, changes: Any,
    state: Any,
) -> Any:  # fmt: skip
    """Read ranks and changes; return 0, or the number of the fault.
    `state` returns the numbers of open bits and large changes that were used.
    """
    one, two, sixty, six = np.uint64(1), np.uint64(2), np.uint64(63), np.uint64(6)
    kind = changes.dtype.type
    five = kind(SMALL + 1)
    top = np.uint64(bits_given)
    at = np.uint64(0)
    k, far = np.int64(0), np.int64(0)
    for c in range(counts.size):
        last, shift = np.int64(-1), np.uint64(shifts[c])
        for _ in range(counts[c]):
            symbol = np.uint64(symbols[k])
            if symbol >= np.uint64(SYMBOLS):
                return 1
            category = symbol // np.uint64(SMALL + 1)
            small = symbol - np.uint64(SMALL + 1) * category
            half = category >> one
            bits = half - np.uint64(half > 0)
            category -= two * bits
            bits += shift
            if at + bits > top:
                return 2
            part = at & sixty
            w = np.int64(at >> six)
            x = (words[w] >> part) | ((words[w + 1] << one) << (sixty - part))
            gap = (category << bits) + (x & ((one << bits) - one))
            at += bits
            last += np.int64(gap) + 1
            if last >= n:
                return 3
            ranks[k] = last
            if small < np.uint64(SMALL):
                changes[k] = kind(small + one)
            else:
                if far >= large.size:
                    return 4
                z = kind(large[far] + five)
                if z < five:
                    return 5
                changes[k] = z
                far += 1
            k += 1
    state[0] = np.int64(at)
    state[1] = far
    return 0
