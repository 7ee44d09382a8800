"""Grids on the CPU in short blocks: first symbols (vectorized), then sums in four lanes."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, like, to_numpy
from ..backend.instructions import local_array
from ..backend.jit import njit_in_place
from . import ESCAPE, FARTHEST

_STEP = 1 << 10
"""Elements per block, whose quotients stay in the first-level cache."""
_LANES = 32
"""Partial sums of squares, enough to fill vector registers."""


@njit_in_place
def _symbols(x: Any, square: Any, step: Any, farthest: Any, out: Any, sums: Any, counts: Any) -> None:
    """Grid symbols of a block, with sums and counts in `[4 * symbol + lane]`.

    With four lanes, an addition does not wait for the previous one.
    """
    zero, beyond = np.float32(0.0), np.float32(np.inf)
    quotients = local_array(_STEP, np.float32)
    for at in range(0, x.size, _STEP):
        n = min(_STEP, x.size - at)
        own, root, symbols = x[at : at + n], square[at : at + n], out[at : at + n]
        for i in range(n):
            s = np.sqrt(root[i])
            u = own[i] / s if s > zero else (zero if own[i] == zero else beyond)
            q = np.rint(u / step)
            near = abs(q) <= farthest  # false for NaN
            k = np.int32(q if near else zero)
            quotients[i] = u if near else zero
            symbols[i] = np.uint8(1 + 2 * abs(k) - np.int32(k < 0) if near else 0)
        whole = n // 4 * 4
        for i in range(0, whole, 4):
            a, b = np.uint64(symbols[i]) << np.uint64(2), np.uint64(symbols[i + 1]) << np.uint64(2)
            c, d = np.uint64(symbols[i + 2]) << np.uint64(2), np.uint64(symbols[i + 3]) << np.uint64(2)
            sums[a] += np.float64(quotients[i])
            sums[b + np.uint64(1)] += np.float64(quotients[i + 1])
            sums[c + np.uint64(2)] += np.float64(quotients[i + 2])
            sums[d + np.uint64(3)] += np.float64(quotients[i + 3])
            counts[a] += 1.0
            counts[b + np.uint64(1)] += 1.0
            counts[c + np.uint64(2)] += 1.0
            counts[d + np.uint64(3)] += 1.0
        for i in range(whole, n):
            a = np.uint64(symbols[i]) << np.uint64(2)
            sums[a] += np.float64(quotients[i])
            counts[a] += 1.0


@njit_in_place
def _values(symbols: Any, square: Any, table: Any, out: Any) -> None:
    for at in range(0, symbols.size, _STEP):
        n = min(_STEP, symbols.size - at)
        own, root, values = symbols[at : at + n], square[at : at + n], out[at : at + n]
        for i in range(n):
            values[i] = table[own[i]]
        for i in range(n):
            values[i] *= np.sqrt(root[i])


@njit_in_place
def _products(x: Any, square: Any, symbols: Any, table: Any, escape: Any, sums: Any) -> None:
    """Sums of squares, products and squares of values, in lanes of `sums` [3, lanes]."""
    values = local_array(_STEP, np.float32)
    norms, products, squares = sums[0], sums[1], sums[2]
    for at in range(0, x.size, _STEP):
        n = min(_STEP, x.size - at)
        own, root, symbol = x[at : at + n], square[at : at + n], symbols[at : at + n]
        for i in range(n):
            values[i] = table[symbol[i]]
        for i in range(n):
            values[i] *= np.sqrt(root[i])
        whole = n - n % _LANES
        for begin in range(0, whole, _LANES):
            a, b, on = own[begin : begin + _LANES], values[begin : begin + _LANES], symbol[begin : begin + _LANES]
            for k in range(_LANES):
                u = np.float64(a[k] if on[k] != escape else np.float32(0.0))
                y = np.float64(b[k] if on[k] != escape else np.float32(0.0))
                norms[k] += u * u
                products[k] += u * y
                squares[k] += y * y
        for i in range(whole, n):
            u = np.float64(own[i] if symbol[i] != escape else np.float32(0.0))
            y = np.float64(values[i] if symbol[i] != escape else np.float32(0.0))
            norms[i - whole] += u * u
            products[i - whole] += u * y
            squares[i - whole] += y * y


def grid_symbols(x: Array, square: Array, step: float) -> tuple[Array, Any, Any]:
    """See `kernels.moment_grid`."""
    values = to_numpy(x)
    out = np.empty(values.size, np.uint8)
    sums, counts = np.zeros((256, 4)), np.zeros((256, 4))
    _symbols(
        values, to_numpy(square), np.float32(step), np.float32(FARTHEST), out, sums.reshape(-1), counts.reshape(-1)
    )
    return like(out, x), sums.sum(axis=1), counts.sum(axis=1)


def grid_values(symbols: Array, square: Array, table: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    """See `kernels.moment_grid`."""
    own = to_numpy(symbols)
    out = np.empty(own.size, np.float32)
    _values(own, to_numpy(square), table, out)
    return like(out, symbols)


def grid_products(
    x: Array, square: Array, symbols: Array, table: np.ndarray[Any, np.dtype[np.float32]]
) -> tuple[float, float, float]:
    """See `kernels.moment_grid.grid_products`."""
    sums = np.zeros((3, _LANES))
    _products(to_numpy(x), to_numpy(square), to_numpy(symbols), table, np.uint8(ESCAPE), sums)
    norm, products, squares = (float(lanes.sum()) for lanes in sums)
    return norm, products, squares
