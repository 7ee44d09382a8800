"""Oracle of the levels: every comparison made on exact float64 values, code by code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array
from ..errors import CorruptDataError
from . import Thresholds, product_format

_TINY = 2.0**-1000


def product(x: Array, gradient: Array, name: str) -> Array:
    """Product gradient * x, one rounded multiplication in the format `name`."""
    xp = array_namespace(x)
    wide = getattr(xp, name)
    return xp.astype(gradient, wide) * xp.astype(x, wide)


def _decide(x: Array, thresholds: Thresholds, gradient: Array | None) -> tuple[Array, Array]:
    """Decide which elements are protected and which pruned; protection wins."""
    xp = array_namespace(x)
    magnitude = xp.abs(xp.astype(x, xp.float64))
    protected = ~xp.isfinite(magnitude) | (magnitude >= thresholds.protect_magnitude)
    pruned = magnitude < thresholds.prune_magnitude
    if gradient is not None:
        sensitivity = xp.abs(xp.astype(product(x, gradient, product_format(x, gradient)), xp.float64))
        protected = protected | ~xp.isfinite(sensitivity) | (sensitivity >= thresholds.protect_sensitivity)
        pruned = pruned | (sensitivity < thresholds.prune_sensitivity)
    return protected, pruned & ~protected


def kept(x: Array, thresholds: Thresholds, gradient: Array | None) -> Array:
    """Return a mask (bool) of the elements that are neither pruned nor protected."""
    protected, pruned = _decide(x, thresholds, gradient)
    return ~(protected | pruned)


def assign(x: Array, thresholds: Thresholds, codebook: np.ndarray[Any, Any], *, gradient: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.quantizer.assign`.

    A value is past a boundary exactly when it is above the midpoint.
    """
    xp = array_namespace(x)
    value = xp.astype(x, xp.float64)
    protected, pruned = _decide(x, thresholds, gradient)
    level = xp.full(tuple(x.shape), 2 if len(codebook) else 1, dtype=xp.uint8)
    for a, b in pairwise(codebook):
        total = float(a) + float(b)
        # Half a sum of subnormals may not be a float64, so the distances are compared instead.
        past = value > total - value if abs(total) < _TINY else value > 0.5 * float(a) + 0.5 * float(b)
        level = level + xp.astype(past, xp.uint8)
    level = xp.where(pruned, xp.zeros_like(level), level)
    return xp.where(protected, xp.ones_like(level), level)


def dequantize(levels: Array, codebook: Array, *, protected: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.quantizer.dequantize`."""
    xp = array_namespace(codebook)
    flat = xp.reshape(levels, (-1,))
    codes = codebook.shape[0]
    if flat.shape[0] and int(xp.max(flat)) >= codes + 2:
        raise CorruptDataError(f"a level is {int(xp.max(flat))}; the codebook has {codes} codes")
    out = xp.zeros(tuple(flat.shape), dtype=codebook.dtype)
    for number in range(codes):
        out = xp.where(flat == number + 2, codebook[number], out)
    if protected is not None:
        exact = flat == 1
        wanted = int(xp.sum(xp.astype(exact, xp.int64)))
        if protected.shape[0] != wanted:
            raise CorruptDataError(f"{protected.shape[0]} protected values, but {wanted} elements of level 1")
        if wanted:
            rank = xp.cumulative_sum(xp.astype(exact, xp.int64)) - 1
            out = xp.where(exact, xp.take(protected, xp.where(exact, rank, 0)), out)
    return xp.reshape(out, tuple(levels.shape))


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
