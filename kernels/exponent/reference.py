"""Oracle of the exponent buckets: sign and exponent by shifts, one bucket after another."""

from __future__ import annotations

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array, dtype_name
from ..backend.bits import sign_and_magnitude
from ..backend.floats import format_named
from . import Buckets, Promotion, unknown_level


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
