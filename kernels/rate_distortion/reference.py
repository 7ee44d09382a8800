"""Oracle of rate-distortion levels and extrapolation, by array-API functions."""

from __future__ import annotations

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array, dtype_name
from . import Table


def rate_distortion_levels(
    x: Array,
    levels: Array,
    previous: Array,
    codebook: Table,
    prices: Table,
    importance: Array | None = None,
) -> Array:
    """See `kernels.rate_distortion`."""
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


def settled_bounds(codebook: Table, prices: Table, slack: float) -> Table:
    """See `kernels.rate_distortion`; float64, candidates: nearest - 1, + 1, previous."""
    contexts, width = prices.shape
    bounds = np.empty((contexts, width, 4))
    bounds[:] = -np.inf, 0.0, np.inf, 0.0
    codes, cost = codebook.astype(np.float64), prices.astype(np.float64)
    for p, n in np.ndindex(contexts, width):
        if n < 2:
            continue
        own, b = codes[n - 2], bounds[p, n]
        gaps = np.diff(codes)[max(n - 3, 0) : n - 1]
        reach = 4.0 * gaps.max(initial=0.0)
        for m in (n - 1, n + 1, min(p, width - 1)):
            if not 2 <= m < width or m == n:
                continue
            far, middle = abs(codes[m - 2] - own), 0.5 * (own + codes[m - 2])
            gain = (cost[p, n] - cost[p, m]) + slack
            away, worth = 0.0, 2.0**-120
            if gain > 0:
                square = reach * reach + (reach + far) * (reach + far)
                with np.errstate(divide="ignore"):
                    away = (square * 2.0**-20 + 2.0**-147) / (2.0 * far)
                    worth = (gain + (cost[p, n] + cost[p, m]) * 2.0**-20 + 2.0**-147) / (2.0 * far)
                worth = max(worth * (1.0 + 2.0**-20), 2.0**-120)
                if max(square, away, worth) >= 2.0**122:
                    away = worth = np.inf
                b[0], b[2] = max(b[0], own - reach), min(b[2], own + reach)
            if m < n:
                b[0], b[1] = max(b[0], middle + away), max(b[1], worth)
            else:
                b[2], b[3] = min(b[2], middle - away), max(b[3], worth)
    rounded = bounds.astype(np.float32)
    for k, way in enumerate((np.inf, np.inf, -np.inf, np.inf)):
        rounded[..., k] = np.where(bounds[..., k] == -way, -way, np.nextafter(rounded[..., k], np.float32(way)))
    largest = np.finfo(np.float32).max
    rounded[..., 0], rounded[..., 2] = np.minimum(rounded[..., 0], largest), np.maximum(rounded[..., 2], -largest)
    return rounded


def unsettled(
    x: Array, levels: Array, previous: Array, bounds: Table, importance: Array | None = None
) -> tuple[Array, Array, Array, Array, Array | None]:
    """See `kernels.rate_distortion`."""
    xp = array_namespace(x)
    pair = xp.astype(previous, xp.int64) * bounds.shape[1] + xp.astype(levels, xp.int64)
    low, low_worth, high, high_worth = (
        xp.take(xp.asarray(np.ascontiguousarray(bounds[..., k]).reshape(-1)), pair) for k in range(4)
    )
    values = xp.astype(x, xp.float32)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN is settled: it costs NaN at every level
        below, above = values - low, high - values
        if importance is not None:
            below, above = importance * below, importance * above
    at = xp.nonzero((below < low_worth) | (above < high_worth))[0]
    taken = [xp.take(part, at) for part in (values, levels, previous)]
    return at, taken[0], taken[1], taken[2], None if importance is None else xp.take(importance, at)


def extrapolate(x: Array, earlier: Array, factor: float) -> Array:
    """See `kernels.extrapolate`."""
    xp = array_namespace(x, earlier)
    wide = xp.float64 if dtype_name(x) == "float64" else xp.float32
    own, before = xp.astype(x, wide), xp.astype(earlier, wide)
    way = own - before
    far = own + way * xp.full_like(own, factor)
    return xp.where(xp.isfinite(far), far, xp.where(xp.isnan(own), xp.full_like(own, xp.nan), own))
