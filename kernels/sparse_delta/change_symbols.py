"""The compiled loops that split changes into symbols and open bits, and join them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.jit import njit_in_place
from . import GAP_BITS, SMALL, SYMBOLS
from .lanes import zeros_above


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
