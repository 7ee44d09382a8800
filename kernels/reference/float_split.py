"""Oracle of the float split; its streams are host arrays, as in every back end."""

from __future__ import annotations

import numpy as np

from ..arrays import Array, to_numpy
from ..float_split import MAX_OCTAVES, Octaves


def split_octaves(index: Array, bits: int, buckets: int) -> Octaves | None:
    """See `shrinkpoint.kernels.float_split`."""
    signed = to_numpy(index).astype(np.int64) - buckets
    j = np.abs(signed)
    odd = np.flatnonzero(j > buckets)
    some = (j > 0) & (j <= buckets)
    m = j[some] - 1
    octave = m >> bits
    low, high = (int(octave.min()), int(octave.max())) if m.size else (0, 0)
    if high - low >= MAX_OCTAVES:
        return None
    symbols = np.zeros(j.size, np.uint8)
    symbols[some] = octave - low + 1
    part = m & ((1 << bits) - 1)
    planes = [(part >> shift) & 255 for shift in range(0, bits, 8)]
    fraction = np.array(planes, np.uint8).reshape((bits + 7) // 8, m.size)
    return Octaves(low, high, symbols, (signed[some] < 0).astype(np.uint8), fraction, odd)


def join_octaves(octaves: Octaves, bits: int, buckets: int) -> Array:
    """See `shrinkpoint.kernels.float_split`."""
    some = octaves.symbols > 0
    j = ((octaves.symbols[some].astype(np.int64) + octaves.low - 1) << bits) + 1
    for plane, part in enumerate(octaves.fraction):
        j += part.astype(np.int64) << (8 * plane)
    out = np.full(octaves.symbols.size, buckets, np.int64)
    out[some] += np.where(octaves.negative > 0, -j, j)
    return out.astype(np.int32)
