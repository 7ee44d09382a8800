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
    x: Any, keys: Any, estimates: Any, estimate_keys: Any, half: int, cell: int, out: Any, sums: Any, bases: Any,
    counts: Any,
) -> None:  # fmt: skip
    for t in range(x.size):
        key = np.int64(keys[t])
        base = np.int64(estimate_keys[t])
        if key == 0 or key == 0x80000000:
            symbol = ZERO
        elif key < _NORMAL or key >= _INFINITE or base < _NORMAL or base >= _INFINITE:
            symbol = ESCAPE
        else:
            k = (key - base + half) // cell
            symbol = FIRST + FARTHEST + k if abs(k) <= FARTHEST else ESCAPE
        out[t] = symbol
        if symbol >= FIRST:
            sums[symbol] += np.float64(x[t])
            bases[symbol] += np.float64(estimates[t])
        counts[symbol] += 1.0


@njit
def _values(symbols: Any, estimates: Any, table: Any, out: Any) -> None:
    for t in range(symbols.size):
        out[t] = estimates[t] * table[symbols[t]]


_STEP = 1 << 14
"""Estimates made at once: they stay in the first-level cache."""


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, start: int, octaves: int
) -> tuple[Array, Any, Any, Any]:
    """See `kernels.residual`."""
    values = to_numpy(x)
    keys = values.view(np.uint32)
    out = np.empty(values.size, np.uint8)
    sums, bases, counts = np.zeros(256), np.zeros(256), np.zeros(256)
    cell = octaves * _NORMAL
    estimates = np.empty(min(_STEP, values.size), np.float32)
    i, j = divmod(start, max(columns.size, 1))
    for at in range(0, values.size, _STEP):
        part = slice(at, min(at + _STEP, values.size))
        base = estimates[: part.stop - at]
        i, j = _estimates(rows, columns, i, j, base)
        _symbols(values[part], keys[part], base, base.view(np.uint32), cell // 2, cell, out[part], sums, bases, counts)
    return like(out, x), sums, bases, counts


def residual_values(symbols: Array, rows: Factors, columns: Factors, start: int, table: Factors) -> Array:
    """See `kernels.residual`."""
    own = to_numpy(symbols)
    out = np.empty(own.size, np.float32)
    estimates = np.empty(min(_STEP, own.size), np.float32)
    i, j = divmod(start, max(columns.size, 1))
    for at in range(0, own.size, _STEP):
        part = slice(at, min(at + _STEP, own.size))
        base = estimates[: part.stop - at]
        i, j = _estimates(rows, columns, i, j, base)
        _values(own[part], base, table, out[part])
    return like(out, symbols)
