"""Levels of equidistant entries by array-API functions, one array after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace

if TYPE_CHECKING:
    from ..arrays import Array


def uniform_levels_many(
    x: Array, ends: Any, steps: Any, firsts: Any, sizes: Any, limit: float
) -> tuple[Array, np.ndarray[Any, np.dtype[np.float64]]]:
    """See `kernels.uniform_levels`."""
    xp = array_namespace(x)
    levels, sums = [xp.zeros(0, dtype=xp.uint8)], np.zeros((ends.size, 2))
    begin = 0
    for m, end in enumerate(ends.tolist()):
        value = xp.astype(x[begin:end], xp.float64)
        inside = xp.isfinite(value) & (xp.abs(value) < limit)
        value = xp.where(inside, value, xp.zeros_like(value))
        first, step = int(firsts[m]), float(steps[m])
        nearest = xp.clip(xp.ceil(value / step - 0.5), first, first + int(sizes[m]) - 1)
        miss = xp.where(inside, nearest * step - value, xp.zeros_like(value))
        sums[m] = float(xp.sum(miss * miss)), float(xp.sum(value * value))
        levels.append(xp.astype(xp.where(inside, nearest - first + 2, xp.ones_like(value)), xp.uint8))
        begin = end
    return xp.concat(levels), sums


def uniform_values_many(levels: Array, ends: Any, steps: Any, firsts: Any) -> Array:
    """See `kernels.uniform_levels`."""
    xp = array_namespace(levels)
    found = [xp.zeros(0, dtype=xp.float32)]
    begin = 0
    for m, end in enumerate(ends.tolist()):
        own = levels[begin:end]
        value = (xp.astype(own, xp.float64) + float(firsts[m]) - 2.0) * float(steps[m])
        found.append(xp.astype(xp.where(own >= 2, value, xp.zeros_like(value)), xp.float32))
        begin = end
    return xp.concat(found)
