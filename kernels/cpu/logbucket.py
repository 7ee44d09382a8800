"""Bucket index and midpoint of each element on the CPU, on bit patterns."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import Array, bit_view, dtype_name, like, to_numpy
from ..floats import FORMATS, format_named
from .jit import njit_in_place


@njit_in_place
def _index(u: Any, mantissa: int, exponent: int, bits: int, buckets: int, out: Any) -> None:
    """Bucket indices in short blocks.

    A vectorized loop handles zeros and normal numbers; a second loop runs where a subnormal occurred.
    """
    low = np.uint64(mantissa - bits)
    magnitude = (np.uint64(1) << np.uint64(mantissa + exponent)) - np.uint64(1)
    fraction = (np.uint64(1) << np.uint64(mantissa)) - np.uint64(1)
    normal = np.int64(((mantissa - 1) << bits) + 1)
    for begin in range(0, u.size, 256):
        v, o = u[begin : begin + 256], out[begin : begin + 256]
        tiny = np.uint8(0)
        for i in range(v.size):
            m = np.uint64(v[i]) & magnitude
            j = np.int64(m >> low) + normal if m > fraction else np.int64(0)
            tiny |= np.uint8(m - np.uint64(1) < fraction)
            at = buckets - j if np.uint64(v[i]) > magnitude else buckets + j
            o[i] = np.int32(2 * buckets + 1 if j > buckets else at)
        if tiny == 0:
            continue
        for i in range(v.size):
            m = np.uint64(v[i]) & magnitude
            if m - np.uint64(1) < fraction:
                p = np.int64(0)
                rest = m
                for width in (32, 16, 8, 4, 2, 1):
                    if rest >> np.uint64(width):
                        rest >>= np.uint64(width)
                        p += width
                j = (p << bits) + np.int64(((m << np.uint64(mantissa - p)) & fraction) >> low) + 1
                o[i] = np.int32(buckets - j if np.uint64(v[i]) > magnitude else buckets + j)


@njit_in_place
def _value(index: Any, mantissa: int, exponent: int, bits: int, buckets: int, out: Any) -> None:
    """Bucket midpoints in short blocks.

    A vectorized loop handles zero, normal numbers and NaN; a second loop runs where a subnormal occurred.
    """
    kind = out.dtype.type
    infinity = np.int64(((1 << exponent) - 1) << mantissa)
    nan = infinity | np.int64(1 << (mantissa - 1))
    half = np.int64((1 << (mantissa - bits)) >> 1)
    low, first = np.int64(mantissa - bits), np.int64((mantissa - 1) << bits)
    subnormals = np.int64(mantissa << bits)
    sign = np.int64(1) << np.int64(mantissa + exponent)
    for begin in range(0, index.size, 256):
        v, o = index[begin : begin + 256], out[begin : begin + 256]
        tiny = np.uint8(0)
        for i in range(v.size):
            j = np.int64(v[i]) - buckets
            k = abs(j) - 1
            pattern = ((k - first) << low) + half
            pattern = pattern | sign if j < 0 else pattern
            pattern = np.int64(0) if k < 0 else pattern
            tiny |= np.uint8((k >= 0) & (k < subnormals))
            o[i] = kind(nan if k >= buckets else pattern)
        if tiny == 0:
            continue
        for i in range(v.size):
            j = np.int64(v[i]) - buckets
            k = abs(j) - 1
            if k >= 0 and k < subnormals:
                p = k >> bits
                significand = (np.int64(1) << bits) + (k & ((np.int64(1) << bits) - 1))
                if p > bits:
                    pattern = (significand << (p - bits)) + (np.int64(1) << (p - bits - 1))
                else:  # less than one unit wide: the next whole unit
                    pattern = -(-significand >> (bits - p))
                o[i] = kind(pattern | sign if j < 0 else pattern)


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
