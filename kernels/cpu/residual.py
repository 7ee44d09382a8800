"""Residuals on the CPU: one pass, the estimate never stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like, to_numpy
from ..residual import ESCAPE, FARTHEST, FIRST, ZERO
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array
    from ..residual import Factors

_NORMAL = 1 << 23
_INFINITE = 255 << 23


@njit
def _estimates(rows: Any, columns: Any, i: int, j: int, out: Any) -> Any:
    """Fill `out` with the next estimates from row i, column j; returns where the following ones start."""
    r = rows[i]
    for t in range(out.size):
        out[t] = r * columns[j]
        j += 1
        if j == columns.size:
            j = 0
            i += 1
            if i < rows.size:
                r = rows[i]
    return i, j


@njit
def _symbols(
    x: Any, keys: Any, rows: Any, columns: Any, start: int, cell: int, estimates: Any, estimate_keys: Any, out: Any,
    sums: Any, bases: Any, counts: Any,
) -> None:  # fmt: skip
    half = cell // 2
    i, j = start // columns.size, start % columns.size
    for at in range(0, x.size, estimates.size):
        n = min(estimates.size, x.size - at)
        i, j = _estimates(rows, columns, i, j, estimates[:n])
        for t in range(n):
            key: Any = np.int64(keys[at + t])
            base: Any = np.int64(estimate_keys[t])
            if key == 0 or key == 0x80000000:
                symbol = ZERO
            elif key < _NORMAL or key >= _INFINITE or base < _NORMAL or base >= _INFINITE:
                symbol = ESCAPE
            else:
                k = (key - base + half) // cell
                symbol = FIRST + FARTHEST + k if abs(k) <= FARTHEST else ESCAPE
            out[at + t] = symbol
            if symbol >= FIRST:
                sums[symbol] += np.float64(x[at + t])
                bases[symbol] += np.float64(estimates[t])
            counts[symbol] += 1.0


@njit
def _values(symbols: Any, rows: Any, columns: Any, start: int, table: Any, estimates: Any, out: Any) -> None:
    i, j = start // columns.size, start % columns.size
    for at in range(0, symbols.size, estimates.size):
        n = min(estimates.size, symbols.size - at)
        i, j = _estimates(rows, columns, i, j, estimates[:n])
        for t in range(n):
            out[at + t] = estimates[t] * table[symbols[at + t]]


_STEP = 1 << 12
"""Estimates made at once: they stay in the first-level cache."""


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, start: int, octaves: int
) -> tuple[Array, Any, Any, Any]:
    """See `kernels.residual`."""
    values = to_numpy(x)
    out = np.empty(values.size, np.uint8)
    sums, bases, counts = np.zeros(256), np.zeros(256), np.zeros(256)
    estimates = np.empty(_STEP, np.float32)
    cell = octaves * _NORMAL
    if values.size:
        _symbols(
            values, values.view(np.uint32), rows, columns, start, cell, estimates, estimates.view(np.uint32), out, sums,
            bases, counts,
        )  # fmt: skip
    return like(out, x), sums, bases, counts


def residual_values(symbols: Array, rows: Factors, columns: Factors, start: int, table: Factors) -> Array:
    """See `kernels.residual`."""
    own = to_numpy(symbols)
    out = np.empty(own.size, np.float32)
    if own.size:
        _values(own, rows, columns, start, table, np.empty(_STEP, np.float32), out)
    return like(out, symbols)
