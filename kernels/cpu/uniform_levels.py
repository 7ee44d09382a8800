"""Levels of equidistant entries on the CPU: one pass over each array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like, to_numpy
from .jit import njit_in_place

if TYPE_CHECKING:
    from ..arrays import Array

_LANES = 64
"""Partial sums of an array, so that additions need not wait for each other."""


@njit_in_place
def _levels(
    x: Any, ends: Any, steps: Any, firsts: Any, sizes: Any, limit: float, out: Any, sums: Any, error: Any, norm: Any
) -> None:
    begin = 0
    for m in range(ends.size):
        step, first = steps[m], np.float64(firsts[m])
        last = first + np.float64(sizes[m] - 1)
        error[:] = 0.0
        norm[:] = 0.0
        for at in range(begin, ends[m], _LANES):
            n = min(_LANES, ends[m] - at)
            own, levels = x[at : at + n], out[at : at + n]
            for i in range(n):
                value = np.float64(own[i])
                # Exact enough: float32 values and steps of 8 bits are never nearly half-way, unless they are.
                nearest = min(max(np.ceil(value / step - 0.5), first), last)
                inside = abs(value) < limit  # false for NaN
                miss = nearest * step - value if inside else 0.0
                error[i] += miss * miss
                norm[i] += value * value if inside else 0.0
                levels[i] = np.uint8(np.int32(nearest - first) + 2) if inside else np.uint8(1)
        sums[m, 0] = sums[m, 1] = 0.0
        for i in range(_LANES):
            sums[m, 0] += error[i]
            sums[m, 1] += norm[i]
        begin = ends[m]


@njit_in_place
def _values(levels: Any, ends: Any, steps: Any, firsts: Any, table: Any, out: Any) -> None:
    """Values of each array; entries 0 and 1 of `table` are 0."""
    begin = 0
    for m in range(ends.size):
        for level in range(2, 256):
            table[level] = np.float32(np.float64(firsts[m] + level - 2) * steps[m])
        for i in range(begin, ends[m]):
            out[i] = table[levels[i]]
        begin = ends[m]


def uniform_levels_many(
    x: Array, ends: Any, steps: Any, firsts: Any, sizes: Any, limit: float
) -> tuple[Array, np.ndarray[Any, np.dtype[np.float64]]]:
    """See `kernels.uniform_levels`."""
    values = to_numpy(x)
    out, sums = np.empty(values.size, np.uint8), np.empty((ends.size, 2))
    # Infinities count as not finite under every limit.
    below = min(limit, float(np.finfo(np.float64).max))
    _levels(values, ends, steps, firsts, sizes, below, out, sums, np.empty(_LANES), np.empty(_LANES))
    return like(out, x), sums


def uniform_values_many(levels: Array, ends: Any, steps: Any, firsts: Any) -> Array:
    """See `kernels.uniform_levels`."""
    own = to_numpy(levels)
    out = np.empty(own.size, np.float32)
    _values(own, ends, steps, firsts, np.zeros(256, np.float32), out)
    return like(out, levels)
