"""Residuals by array-API functions, over bit patterns from `bits.sign_and_magnitude`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace, device

from ..residual import ESCAPE, FARTHEST, FIRST, ZERO
from .bits import sign_and_magnitude

if TYPE_CHECKING:
    from ..arrays import Array
    from ..residual import Factors

_NORMAL = 1 << 23
_INFINITE = 255 << 23


def _estimates(xp: Any, like: Array, rows: Factors, columns: Factors, start: int) -> Array:
    at = np.arange(start, start + like.shape[0])
    i, j = np.divmod(at, max(columns.size, 1))
    place = device(like)
    return xp.asarray(rows[i], device=place) * xp.asarray(columns[j], device=place)


def factor_sums(x: Array, columns: int) -> tuple[Any, Any]:
    """See `kernels.residual`."""
    xp = array_namespace(x)
    values = xp.where(xp.isfinite(x), x, xp.zeros_like(x))
    part = xp.astype(xp.reshape(values, (x.shape[0] // columns, columns)), xp.float64)
    sums = (xp.sum(part, axis=1), xp.sum(part, axis=0))
    rows, below = (np.asarray([float(s[i]) for i in range(s.shape[0])]) for s in sums)
    return rows, below


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, start: int, octaves: int, previous: Array | None = None
) -> tuple[Array, Any, Any]:
    """See `kernels.residual`."""
    xp = array_namespace(x)
    estimate = _estimates(xp, x, rows, columns, start)
    negative, key = sign_and_magnitude(x)
    _, base = sign_and_magnitude(estimate)
    cell = octaves * _NORMAL
    k = (key - base + cell // 2) // cell
    normal = (key >= _NORMAL) & (key < _INFINITE) & (base >= _NORMAL) & (base < _INFINITE)
    fits = normal & ~negative & (xp.abs(k) <= FARTHEST)
    symbol = xp.where(fits, FIRST + FARTHEST + k, xp.full_like(key, ESCAPE))
    symbol = xp.where(key == 0, xp.full_like(key, ZERO), symbol)
    if previous is not None:
        old = xp.astype(previous, key.dtype)
        beyond = xp.abs(key - base - (old - (FIRST + FARTHEST)) * cell) - cell // 2
        symbol = xp.where((symbol >= FIRST) & (old >= FIRST) & (beyond <= cell // 4), old, symbol)
    distances, counts = np.zeros(256), np.zeros(256)
    distance = xp.where(fits, key - base, xp.zeros_like(key))
    for value in map(int, xp.unique_values(symbol)):
        here = symbol == value
        counts[value] = int(xp.sum(xp.astype(here, xp.int64)))
        if value >= FIRST:
            distances[value] = int(xp.sum(xp.where(here, xp.astype(distance, xp.int64), xp.zeros_like(distance))))
    return xp.astype(symbol, xp.uint8), distances, counts


def residual_values(symbols: Array, rows: Factors, columns: Factors, start: int, table: Factors) -> Array:
    """See `kernels.residual`."""
    xp = array_namespace(symbols)
    factors = xp.take(xp.asarray(table, device=device(symbols)), xp.astype(symbols, xp.int64))
    return _estimates(xp, symbols, rows, columns, start) * factors
