"""The compiled loops that find the changes between two arrays, word by word of 64 elements."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.jit import njit_in_place
from ..backend.local_array import local_array
from .lanes import BLOCK, LANES, at_least, differing, edges_reached, move, ones, zeros_below


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
