"""Float split on the CPU: one pass for the range, one that writes all streams."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, to_numpy
from ..float_split import MAX_OCTAVES, Octaves
from .jit import njit_in_place


@njit_in_place
def _range(index: Any, bits: int, buckets: int) -> Any:
    """Smallest and largest nonzero magnitude, and numbers of nonzero and not finite elements."""
    low = np.int32(buckets + 1)
    high = np.int32(0)
    nonzero = 0
    odd = 0
    for i in range(index.size):
        j = abs(index[i] - np.int32(buckets))
        finite = j <= buckets
        some = (j > 0) & finite
        nonzero += some
        odd += not finite
        low = min(low, j if some else low)
        high = max(high, j if some else high)
    return low, high, nonzero, odd


@njit_in_place
def _split(index: Any, bits: int, buckets: int, low: int, symbols: Any, negative: Any, fraction: Any, odd: Any) -> None:
    # One extra slot at the end of each stream: every element is written, but only counted ones advance the position.
    mask = np.int32((1 << bits) - 1)
    planes = fraction.shape[0]
    at = 0
    odd_at = 0
    for i in range(index.size):
        signed = index[i] - np.int32(buckets)
        j = abs(signed)
        if j > buckets:
            symbols[i] = 0
            odd[odd_at] = i
            odd_at += 1
            continue
        m = j - np.int32(1)
        some = j > 0
        symbols[i] = ((m >> bits) - low + 1) if some else 0
        negative[at] = signed < 0
        if planes > 0:
            fraction[0, at] = m & mask & np.int32(255)
        if planes > 1:
            fraction[1, at] = (m & mask) >> np.int32(8)
        at += some


@njit_in_place
def _join(symbols: Any, negative: Any, fraction: Any, bits: int, buckets: int, low: int, out: Any) -> None:
    planes = fraction.shape[0]
    at = 0
    for i in range(symbols.size):
        s = np.int32(symbols[i])
        if s == 0:
            out[i] = buckets
            continue
        j = ((s + np.int32(low - 1)) << bits) + np.int32(1)
        if planes > 0:
            j += np.int32(fraction[0, at])
        if planes > 1:
            j += np.int32(fraction[1, at]) << np.int32(8)
        out[i] = buckets - j if negative[at] else buckets + j
        at += 1


def split_octaves(index: Array, bits: int, buckets: int) -> Octaves | None:
    """See `shrinkpoint.kernels.float_split`."""
    host = to_numpy(index)
    smallest, largest, nonzero, n_odd = _range(host, bits, buckets)
    low, high = ((int(smallest) - 1) >> bits, (int(largest) - 1) >> bits) if nonzero else (0, 0)
    if high - low >= MAX_OCTAVES:
        return None
    symbols = np.empty(host.size, np.uint8)
    negative = np.empty(nonzero + 1, np.uint8)
    fraction = np.empty(((bits + 7) // 8, nonzero + 1), np.uint8)
    odd = np.empty(n_odd, np.int64)
    _split(host, bits, buckets, low, symbols, negative, fraction, odd)
    return Octaves(low, high, symbols, negative[:nonzero], fraction[:, :nonzero], odd)


def join_octaves(octaves: Octaves, bits: int, buckets: int) -> Array:
    """See `shrinkpoint.kernels.float_split`."""
    out = np.empty(octaves.symbols.size, np.int32)
    _join(octaves.symbols, octaves.negative, octaves.fraction, bits, buckets, octaves.low, out)
    return out
