"""Oracle of the exponent buckets: sign and exponent by shifts, one bucket after another."""

from __future__ import annotations

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array, dtype_name
from ..backend.floats import format_named, from_bits, sign_and_magnitude, to_bits
from . import Buckets, Promotion, unknown_level


def exponent_differences(current: Array, previous: Array) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_differences`."""
    xp = array_namespace(current)
    # Of narrower floats a sum in float64 is rounded as if it had been exact.
    with np.errstate(all="ignore"):
        steps = xp.astype(current, xp.float64) - xp.astype(previous, xp.float64)
        steps = xp.where(steps == steps, steps, xp.full_like(steps, float("inf")))
        return xp.astype(steps, xp.float32 if dtype_name(current) == "float16" else current.dtype)


def exponent_buckets(x: Array) -> Buckets:
    """See `shrinkpoint.kernels.exponent.exponent_buckets`."""
    fmt = format_named(dtype_name(x))
    fields = 1 << fmt.exponent
    counts, lowest, highest = (np.zeros((2, fields), np.int64) for _ in range(3))
    xp = array_namespace(x)
    negative, magnitude = sign_and_magnitude(xp.reshape(x, (-1,)))
    field = magnitude >> fmt.mantissa
    nonzero = magnitude != 0
    for present in xp.unique_values(field[nonzero]):
        for sign in (0, 1):
            members = magnitude[nonzero & (field == present) & (negative == (sign == 1))]
            if members.shape[0]:
                counts[sign, int(present)] = members.shape[0]
                lowest[sign, int(present)] = int(xp.min(members))
                highest[sign, int(present)] = int(xp.max(members))
    zeros = int(xp.sum(xp.astype(~nonzero, xp.int64)))
    return Buckets(counts, lowest, highest, zeros, fmt.name)


def exponent_quantize(x: Array, promotion: Promotion) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_quantize`."""
    fmt = format_named(promotion.format)
    xp = array_namespace(x)
    negative, magnitude = sign_and_magnitude(xp.reshape(x, (-1,)))
    bucket = (magnitude >> fmt.mantissa) + (xp.astype(negative, xp.int64) << fmt.exponent)
    levels = xp.take(xp.asarray(promotion.table.astype(np.int64)), bucket)
    levels = xp.where(magnitude == 0, 0, levels)
    dtype = xp.uint8 if promotion.table.dtype == np.uint8 else xp.uint16
    return xp.reshape(xp.astype(levels, dtype), tuple(x.shape))


def exponent_dequantize(levels: Array, codebook: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_dequantize`."""
    xp = array_namespace(levels)
    index = xp.astype(xp.reshape(levels, (-1,)), xp.int64)
    top = int(xp.max(index)) if index.shape[0] else 0
    if top >= codebook.shape[0]:
        raise unknown_level(top, codebook.shape[0])
    return xp.reshape(xp.asarray(codebook)[index], tuple(levels.shape))


def exponent_sums(
    previous: Array, levels: Array, codebook: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]]
) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_sums`."""
    fmt = format_named(dtype_name(previous))
    entry = exponent_dequantize(levels, codebook.view(f"int{fmt.width}").astype(np.int64))
    xp = array_namespace(previous)
    with np.errstate(all="ignore"):
        total = xp.astype(previous, xp.float64) + xp.astype(from_bits(entry, fmt.name), xp.float64)
        sums = to_bits(xp.astype(total, previous.dtype))
    old, low = to_bits(previous), (1 << (fmt.width - 1)) - 1
    infinity, quiet = ((1 << fmt.exponent) - 1) << fmt.mantissa, 1 << (fmt.mantissa - 1)
    nan = (infinity | quiet) - (1 << (fmt.width - 1))
    out = xp.where((sums & low) > infinity, nan if fmt.width == 64 else nan & ((1 << fmt.width) - 1), sums)
    out = xp.where((old & low) > infinity, old | quiet, out)
    return from_bits(xp.where(levels == 0, old, out), fmt.name)
