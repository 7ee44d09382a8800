"""Grids on the CPU: one pass each way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like, to_numpy
from ..grid import FARTHEST
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array


@njit
def _symbols(x: Any, square: Any, step: Any, farthest: Any, out: Any, sums: Any, counts: Any) -> None:
    zero = np.float32(0.0)
    for i in range(x.size):
        s = np.sqrt(square[i])
        u = x[i] / s if s > zero else (zero if x[i] == zero else np.float32(np.inf))
        q = np.rint(u / step)
        if abs(q) <= farthest:  # false for NaN
            k = np.int32(q)
            symbol = 1 + 2 * abs(k) - (k < 0)
            sums[symbol] += np.float64(u)
        else:
            symbol = np.int32(0)
        out[i] = symbol
        counts[symbol] += 1.0


@njit
def _values(symbols: Any, square: Any, table: Any, out: Any) -> None:
    for i in range(symbols.size):
        out[i] = table[symbols[i]] * np.sqrt(square[i])


def grid_symbols(x: Array, square: Array, step: float) -> tuple[Array, Any, Any]:
    """See `kernels.grid`."""
    values = to_numpy(x)
    out = np.empty(values.size, np.uint8)
    sums, counts = np.zeros(256), np.zeros(256)
    _symbols(values, to_numpy(square), np.float32(step), np.float32(FARTHEST), out, sums, counts)
    return like(out, x), sums, counts


def grid_values(symbols: Array, square: Array, table: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    """See `kernels.grid`."""
    own = to_numpy(symbols)
    out = np.empty(own.size, np.float32)
    _values(own, to_numpy(square), table, out)
    return like(out, symbols)
