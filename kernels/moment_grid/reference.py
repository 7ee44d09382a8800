"""Grids by array-API functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from ..backend.arrays import Array
from . import ESCAPE, FARTHEST


def _root(xp: Any, square: Array) -> Array:
    """Return the correctly rounded float32 square root.

    It is computed in float64, because torch's float32 root on the CPU is not correctly rounded.
    """
    return xp.astype(xp.sqrt(xp.astype(square, xp.float64)), xp.float32)


def grid_symbols(x: Array, square: Array, step: float) -> tuple[Array, Any, Any]:
    """See `kernels.moment_grid`."""
    xp = array_namespace(x)
    s = _root(xp, square)
    zero, one = xp.zeros_like(x), xp.ones_like(x)
    beyond = xp.where(x == 0, zero, xp.full_like(x, xp.inf))
    u = xp.where(s > 0, x / xp.where(s > 0, s, one), beyond)
    q = xp.round(u / xp.full_like(x, step))
    on_grid = xp.abs(q) <= FARTHEST
    k = xp.astype(xp.where(on_grid, q, zero), xp.int64)
    symbol = xp.where(on_grid, 1 + 2 * xp.abs(k) - xp.astype(k < 0, xp.int64), xp.zeros_like(k))
    sums, counts = np.zeros(256), np.zeros(256)
    wide = xp.astype(u, xp.float64)
    for value in map(int, xp.unique_values(symbol)):
        here = symbol == value
        counts[value] = float(xp.sum(xp.astype(here, xp.float64)))
        if value:
            sums[value] = float(xp.sum(xp.where(here, wide, xp.zeros_like(wide))))
    return xp.astype(symbol, xp.uint8), sums, counts


def grid_values(symbols: Array, square: Array, table: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    """See `kernels.moment_grid`."""
    xp = array_namespace(symbols)
    return xp.take(xp.asarray(table, device=device(symbols)), xp.astype(symbols, xp.int64)) * _root(xp, square)


def grid_products(
    x: Array, square: Array, symbols: Array, table: np.ndarray[Any, np.dtype[np.float32]]
) -> tuple[float, float, float]:
    """See `kernels.moment_grid.grid_products`."""
    xp = array_namespace(x)
    on_grid, zero = symbols != ESCAPE, xp.zeros_like(x)
    wide = xp.astype(xp.where(on_grid, x, zero), xp.float64)
    values = xp.astype(xp.where(on_grid, grid_values(symbols, square, table), zero), xp.float64)
    return float(xp.sum(wide**2)), float(xp.sum(wide * values)), float(xp.sum(values**2))
