"""Exponent buckets on the CPU: one table look-up per element by sign and exponent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend.arrays import dtype_name, like, to_numpy
from ..backend.floats import format_named
from ..backend.jit import njit_in_place
from ..planes.cpu import patterns
from . import Buckets, Promotion, unknown_level

if TYPE_CHECKING:
    from ..backend.arrays import Array

LANES = 4
"""Counters per bucket, so that equal neighbours do not wait for each other's increment to reach memory."""


def exponent_buckets(x: Array) -> Buckets:
    """See `shrinkpoint.kernels.exponent.exponent_buckets`."""
    fmt = format_named(dtype_name(x))
    u = patterns(x)
    fields = 1 << fmt.exponent
    counts = np.zeros((LANES, 2 * fields + 1), np.int64)
    lowest = np.full(2 * fields + 1, np.iinfo(u.dtype).max, u.dtype)
    highest = np.zeros(2 * fields + 1, u.dtype)
    _count(u, u.dtype.type(fmt.mantissa), counts, lowest, highest)
    total = counts.sum(axis=0)
    lowest[total == 0] = 0
    magnitudes = [a[:-1].reshape(2, fields).astype(np.int64) for a in (lowest, highest)]
    return Buckets(total[:-1].reshape(2, fields), magnitudes[0], magnitudes[1], int(total[-1]), fmt.name)


def exponent_quantize(x: Array, promotion: Promotion) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_quantize`."""
    u = patterns(x)
    levels = np.empty(u.size, promotion.table.dtype)
    _quantize(u, u.dtype.type(format_named(promotion.format).mantissa), promotion.table, levels)
    return like(levels.reshape(x.shape), x)


def exponent_dequantize(levels: Array, codebook: np.ndarray[Any, Any]) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_dequantize`."""
    v = to_numpy(levels).reshape(-1)
    top = int(v.max()) if v.size else 0
    if top >= codebook.size:
        raise unknown_level(top, codebook.size)
    out = np.empty(v.size, codebook.dtype)
    _look_up(v, np.ascontiguousarray(codebook), out)
    return like(out.reshape(levels.shape), levels)


@njit_in_place
def _count(u: Any, mantissa: Any, counts: Any, lowest: Any, highest: Any) -> None:
    """Count patterns by lane and bucket; the last bucket counts the zeros."""
    kind = u.dtype.type
    magnitude_mask = kind(kind(1) << kind(8 * u.itemsize - 1)) - kind(1)
    zeros = counts.shape[1] - 1
    for i in range(u.size):
        magnitude = kind(u[i] & magnitude_mask)
        bucket = np.int64(u[i] >> mantissa) if magnitude else zeros
        counts[i % LANES, bucket] += 1
        if magnitude < lowest[bucket]:
            lowest[bucket] = magnitude
        if magnitude > highest[bucket]:
            highest[bucket] = magnitude


@njit_in_place
def _quantize(u: Any, mantissa: Any, table: Any, levels: Any) -> None:
    kind = u.dtype.type
    magnitude_mask = kind(kind(1) << kind(8 * u.itemsize - 1)) - kind(1)
    for i in range(u.size):
        level = table[np.int64(u[i] >> mantissa)]
        levels[i] = level if u[i] & magnitude_mask else table.dtype.type(0)


@njit_in_place
def _look_up(levels: Any, codebook: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = codebook[levels[i]]
