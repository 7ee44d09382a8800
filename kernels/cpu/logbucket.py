"""Bucket index and midpoint of each element, compiled, on bit patterns."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, bit_view, dtype_name, like, to_numpy
from ..floats import FORMATS, format_named
from .jit import njit


@njit
def _index(u: Any, mantissa: int, exponent: int, bits: int, buckets: int, out: Any) -> None:
    low = np.uint64(mantissa - bits)
    magnitude = (np.uint64(1) << np.uint64(mantissa + exponent)) - np.uint64(1)
    fraction = (np.uint64(1) << np.uint64(mantissa)) - np.uint64(1)
    normal = np.int64(((mantissa - 1) << bits) + 1)
    for i in range(u.size):
        pattern = np.uint64(u[i])
        m = pattern & magnitude
        j = np.int64(m >> low) + normal
        if m <= fraction:
            if m == 0:
                j = 0
            else:
                p = 0
                rest = m
                for width in (32, 16, 8, 4, 2, 1):
                    if rest >> np.uint64(width):
                        rest >>= np.uint64(width)
                        p += width
                j = (p << bits) + np.int64(((m << np.uint64(mantissa - p)) & fraction) >> low) + 1
        at = buckets - j if pattern > magnitude else buckets + j
        out[i] = 2 * buckets + 1 if j > buckets else at


@njit
def _value(index: Any, mantissa: int, exponent: int, bits: int, buckets: int, out: Any) -> None:
    infinity = ((1 << exponent) - 1) << mantissa
    nan = infinity | (1 << (mantissa - 1))
    half = (1 << (mantissa - bits)) >> 1
    for i in range(index.size):
        j = np.int64(index[i]) - buckets
        k = abs(j) - 1
        pattern = ((k - ((mantissa - 1) << bits)) << (mantissa - bits)) + half
        if k < mantissa << bits:
            if k < 0:
                pattern = 0
            else:
                p = k >> bits
                significand = (1 << bits) + (k & ((1 << bits) - 1))
                if p > bits:
                    pattern = (significand << (p - bits)) + (1 << (p - bits - 1))
                else:  # less than a unit wide: the next whole unit
                    pattern = -(-significand >> (bits - p))
        if k >= buckets:
            pattern, j = nan, 0
        out[i] = np.uint64(pattern) | (np.uint64(j < 0) << np.uint64(mantissa + exponent))


def bucket_index(x: Array, bits: int) -> Array:
    """See `shrinkpoint.kernels.logbucket.bucket_index`."""
    fmt = format_named(dtype_name(x))
    values = to_numpy(x)
    out = np.empty(values.shape, dtype=np.int32)
    _index(bit_view(values), fmt.mantissa, fmt.exponent, bits, fmt.buckets(bits), out.reshape(-1))
    return like(out, x)


def bucket_value(index: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.logbucket.bucket_value`."""
    fmt = FORMATS[dtype]
    flat = to_numpy(index)
    out = np.empty(flat.shape, dtype=f"uint{fmt.width}")
    _value(flat.reshape(-1), fmt.mantissa, fmt.exponent, bits, fmt.buckets(bits), out.reshape(-1))
    if dtype == "bfloat16":
        return like(out, index, dtype="bfloat16")
    return like(out.view(dtype), index)
