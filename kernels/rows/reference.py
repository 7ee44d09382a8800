"""Oracle of row quantization: all rows at once, one array operation for each rounded step."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array
from . import ERROR_STEPS, KMEANS_STEPS, search_steps, unknown_code


def row_quantize(
    x: Array, bits: int, method: str = "adaptive", *, num_bins: int = 25, ratio: float = 1.0
) -> tuple[Array, Array, Array]:
    """See `shrinkpoint.kernels.rows.row_quantize`."""
    xp = array_namespace(x)
    top = float(2**bits - 1)
    with np.errstate(all="ignore"):
        rows, low, high, width, good = _ranges(xp, x, symmetric=method == "symmetric")
        if method == "adaptive":
            y = xp.where(width > 0.0, (rows - low) / xp.where(width > 0.0, width, 1.0), 0.0)
            i, j = _search(xp, y, top, num_bins, search_steps(num_bins, ratio))
            step = width / float(num_bins)
            below, above = i * step, j * step
            low, high = low + xp.where(width > 0.0, below, 0.0), high - xp.where(width > 0.0, above, 0.0)
        span = high - low
        scale = xp.where(span > 0.0, span / top, 0.0)
        place = (rows - low) / xp.where(scale > 0.0, scale, 1.0)
        codes = xp.where(scale > 0.0, xp.round(_clip(xp, place, top)), 0.0)
    codes = xp.where(good, codes, 0.0)
    nan = xp.asarray(xp.nan, dtype=xp.float32)
    scale, low = xp.where(good, scale, nan), xp.where(good, low, nan)
    return xp.astype(codes, xp.uint8), scale[:, 0], low[:, 0]


def row_dequantize(codes: Array, scale: Array, minimum: Array) -> Array:
    """See `shrinkpoint.kernels.rows.row_dequantize`."""
    xp = array_namespace(codes)
    with np.errstate(all="ignore"):
        product = xp.astype(codes, xp.float32) * scale[:, None]
        return product + minimum[:, None]


def row_kmeans(x: Array, bits: int, *, iterations: int = 15) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.rows.row_kmeans`."""
    xp = array_namespace(x)
    last = 2**bits - 1
    with np.errstate(all="ignore"):
        rows, low, _, width, good = _ranges(xp, x, symmetric=False)
        y = xp.where(width > 0.0, (rows - low) / xp.where(width > 0.0, width, 1.0), 0.0)
        units = xp.astype(xp.round(y * float(KMEANS_STEPS)), xp.int64)
        grid = xp.asarray([i * KMEANS_STEPS // last for i in range(last + 1)], dtype=xp.int64)
        centres = xp.broadcast_to(grid, (x.shape[0], last + 1))
        for _ in range(iterations):
            member = _nearest(xp, units, centres)[:, :, None] == xp.arange(last + 1, dtype=xp.int64)
            sums = xp.sum(xp.where(member, units[:, :, None], 0), axis=1)
            counts = xp.sum(xp.astype(member, xp.int64), axis=1)
            means = (2 * sums + counts) // xp.where(counts > 0, 2 * counts, 1)
            centres = xp.where(counts > 0, means, centres)
        codes = xp.where(good, _nearest(xp, units, centres), 0)
        product = (xp.astype(centres, xp.float32) / float(KMEANS_STEPS)) * width
        codebook = xp.where(good, product + low, xp.asarray(xp.nan, dtype=xp.float32))
    return xp.astype(codes, xp.uint8), codebook


def row_lookup(codes: Array, codebook: Array) -> Array:
    """See `shrinkpoint.kernels.rows.row_lookup`."""
    xp = array_namespace(codes)
    entries = codebook.shape[1]
    index = xp.astype(codes, xp.int64)
    if 0 not in codes.shape and int(xp.max(index)) >= entries:
        raise unknown_code(int(xp.max(index)), entries)
    first = xp.arange(codes.shape[0], dtype=xp.int64)[:, None] * entries
    flat = xp.take(xp.reshape(codebook, (-1,)), xp.reshape(index + first, (-1,)))
    return xp.reshape(flat, tuple(codes.shape))


def _ranges(xp: Any, x: Array, *, symmetric: bool) -> tuple[Array, Array, Array, Array, Array]:
    """Rows as float32 with minimum, maximum, range and validity as columns.

    Invalid rows become 0.
    """
    rows = xp.astype(x, xp.float32)
    if x.shape[1] == 0:
        zero = xp.zeros((x.shape[0], 1), dtype=xp.float32)
        return rows, zero, zero, zero, zero == 0.0
    low = xp.min(rows, axis=1, keepdims=True) + 0.0
    high = xp.max(rows, axis=1, keepdims=True) + 0.0
    if symmetric:
        high = xp.max(xp.abs(rows), axis=1, keepdims=True)
        low = -high + 0.0
    width = high - low
    good = xp.isfinite(width) & xp.all(xp.isfinite(rows), axis=1, keepdims=True)
    rows, low, high, width = (xp.where(good, v, 0.0) for v in (rows, low, high, width))
    return rows, low, high, width, good


def _clip(xp: Any, t: Array, top: float) -> Array:
    """Limit t to [0, top]; NaN becomes 0."""
    return xp.where(t > 0.0, xp.where(t < top, t, top), 0.0)


def _cost(xp: Any, y: Array, top: float, bins: int, i: Array, j: Array) -> Array:
    """Error E(i, j) of every row; i, j float32 [R, 1] whole numbers."""
    a = i / float(bins)
    r = (float(bins) - j) / float(bins) - a
    scale = r / top
    inverse = xp.where(r > 0.0, top / xp.where(r > 0.0, r, 1.0), 0.0)
    q = xp.round(_clip(xp, (y - a) * inverse, top))
    product = q * scale
    error = (product + a) - y
    units = xp.astype(xp.round(error * float(ERROR_STEPS)), xp.int64)
    return xp.sum(units * units, axis=1, keepdims=True)


def _search(xp: Any, y: Array, top: float, bins: int, steps: int) -> tuple[Array, Array]:
    """Run the greedy search of every row; return the bins cut off below and above."""
    i = xp.zeros((y.shape[0], 1), dtype=xp.float32)
    j, best_i, best_j = i, i, i
    best = _cost(xp, y, top, bins, i, j)
    for _ in range(steps):
        up, down = _cost(xp, y, top, bins, i + 1.0, j), _cost(xp, y, top, bins, i, j + 1.0)
        rise = up < down
        i, j = xp.where(rise, i + 1.0, i), xp.where(rise, j, j + 1.0)
        cost = xp.where(rise, up, down)
        better = cost < best
        best = xp.where(better, cost, best)
        best_i, best_j = xp.where(better, i, best_i), xp.where(better, j, best_j)
    return best_i, best_j


def _nearest(xp: Any, units: Array, centres: Array) -> Array:
    """Number of midpoints below each unit: int64 [R, D]."""
    doubled = centres[:, :-1] + centres[:, 1:]
    return xp.sum(xp.astype(2 * units[:, :, None] > doubled[:, None, :], xp.int64), axis=2)
