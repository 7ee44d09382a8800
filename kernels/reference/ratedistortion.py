"""Rate-distortion-optimised levels by array-API functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace

if TYPE_CHECKING:
    from ..arrays import Array


def rate_distortion_levels(
    x: Array,
    levels: Array,
    previous: Array,
    codebook: Array,
    prices: np.ndarray[Any, np.dtype[np.float32]],
    importance: Array | None = None,
) -> Array:
    """See `kernels.ratedistortion`."""
    xp = array_namespace(x)
    codes, table = xp.asarray(codebook), xp.reshape(xp.asarray(prices), (-1,))
    width, top = prices.shape[1], codebook.shape[0] + 1
    nearest, p = xp.astype(levels, xp.int64), xp.astype(previous, xp.int64)
    quantized = nearest >= 2
    values = xp.where(quantized, xp.astype(x, xp.float32), xp.zeros(x.shape, dtype=xp.float32))
    best = xp.where(quantized, nearest, xp.full_like(nearest, 2))
    own = best
    if top < 2:
        return levels

    def cost(candidate: Array) -> Array:
        d = values - xp.take(codes, candidate - 2)
        square = d * d if importance is None else importance * (d * d)
        return square + xp.take(table, p * width + candidate)

    least = cost(own)
    old = xp.where(p >= 2, xp.clip(p, 2, top), own)
    for candidate in (xp.clip(own - 1, 2, top), xp.clip(own + 1, 2, top), old):
        c = cost(candidate)
        best = xp.where(c < least, candidate, best)
        least = xp.where(c < least, c, least)
    return xp.astype(xp.where(quantized, best, nearest), xp.uint8)
