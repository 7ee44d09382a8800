"""Oracle of the rank-one residuals, on bit patterns from `bits.sign_and_magnitude`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace, device

from ..rank_one import ESCAPE, FARTHEST, FIRST, SCALE, ZERO, cell_centers
from .bits import sign_and_magnitude

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..arrays import Array
    from ..rank_one import Factors, Shapes

_NORMAL = 1 << 23
_INFINITE = 255 << 23
_ONE = 127 << 23


def _estimates(xp: Any, like: Array, rows: Factors, columns: Factors, start: int) -> Array:
    at = np.arange(start, start + like.shape[0])
    i, j = np.divmod(at, max(columns.size, 1))
    place = device(like)
    return xp.asarray(rows[i], device=place) * xp.asarray(columns[j], device=place)


def factor_sums(x: Array, columns: int) -> tuple[Any, Any]:
    """See `shrinkpoint.kernels.rank_one`."""
    xp = array_namespace(x)
    values = xp.where(xp.isfinite(x), x, xp.zeros_like(x))
    part = xp.astype(xp.reshape(values, (x.shape[0] // columns, columns)), xp.float64)
    sums = (xp.sum(part, axis=1), xp.sum(part, axis=0))
    rows, below = (np.asarray([float(s[i]) for i in range(s.shape[0])]) for s in sums)
    return rows, below


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, start: int, eighths: int, previous: Array | None = None
) -> tuple[Array, Any, Any]:
    """See `shrinkpoint.kernels.rank_one`."""
    xp = array_namespace(x)
    estimate = _estimates(xp, x, rows, columns, start)
    one = xp.ones_like(x)
    negative, key = sign_and_magnitude(x)
    usable = ~negative & _normal(key) & _normal(sign_and_magnitude(estimate)[1])
    ratio = xp.where(usable, x, one) / xp.where(usable, estimate, one)
    _, pattern = sign_and_magnitude(ratio)
    distance = pattern - _ONE
    cell = eighths << 20
    k = (distance + cell // 2) // cell
    fits = usable & _normal(pattern) & (xp.abs(k) <= FARTHEST)
    symbol = xp.where(fits, FIRST + FARTHEST + k, xp.full_like(key, ESCAPE))
    symbol = xp.where(key == 0, xp.full_like(key, ZERO), symbol)
    if previous is not None:
        old = xp.astype(previous, key.dtype)
        beyond = xp.abs(distance - (old - (FIRST + FARTHEST)) * cell) - cell // 2
        symbol = xp.where((symbol >= FIRST) & (old >= FIRST) & (beyond <= cell // 4), old, symbol)
    centers = xp.take(xp.asarray(cell_centers(eighths), device=device(x)), symbol)
    share = xp.astype(xp.round(_root(xp, centers / xp.where(fits, ratio, one)) * SCALE), xp.float64)
    sums, counts = np.zeros(256), np.zeros(256)
    for value in map(int, xp.unique_values(symbol)):
        here = symbol == value
        counts[value] = int(xp.sum(xp.astype(here, xp.int64)))
        if value >= FIRST:
            sums[value] = float(xp.sum(xp.where(here, share, xp.zeros_like(share))))
    return xp.astype(symbol, xp.uint8), sums, counts


def _normal(pattern: Array) -> Any:
    return (pattern >= _NORMAL) & (pattern < _INFINITE)


def _root(xp: Any, x: Array) -> Array:
    """Return the correctly rounded float32 square root.

    It is computed in float64, because torch's float32 root on the CPU is not correctly rounded.
    """
    return xp.astype(xp.sqrt(xp.astype(x, xp.float64)), xp.float32)


def residual_values(symbols: Array, rows: Factors, columns: Factors, start: int, table: Factors) -> Array:
    """See `shrinkpoint.kernels.rank_one`."""
    xp = array_namespace(symbols)
    factors = xp.take(xp.asarray(table, device=device(symbols)), xp.astype(symbols, xp.int64))
    return _estimates(xp, symbols, rows, columns, start) * factors


def _matrices(shapes: Shapes) -> Iterator[tuple[slice, slice, slice]]:
    """Elements, rows and columns of each of several matrices that stand one after another."""
    at = i = j = 0
    for height, width in shapes.tolist():
        yield slice(at, at + height * width), slice(i, i + height), slice(j, j + width)
        at, i, j = at + height * width, i + height, j + width


def factors_many(x: Array, shapes: Shapes) -> tuple[Factors, Factors]:
    """See `shrinkpoint.kernels.rank_one`."""
    rows, columns = (np.empty(int(shapes[:, k].sum()), np.float32) for k in range(2))
    for part, of_rows, of_columns in _matrices(shapes):
        height, width = of_rows.stop - of_rows.start, of_columns.stop - of_columns.start
        across, down = factor_sums(x[part], width)
        mean = across.sum() / (height * width)
        rows[of_rows] = np.maximum(across / width, 0)
        columns[of_columns] = np.maximum(down / height / mean if mean > 0 else down / height, 0)
    return rows, columns


def residual_symbols_many(
    x: Array, rows: Factors, columns: Factors, shapes: Shapes, eighths: int, previous: Array | None
) -> tuple[Array, Any, Any]:
    """See `shrinkpoint.kernels.rank_one`."""
    found = [
        residual_symbols(x[part], rows[i], columns[j], 0, eighths, None if previous is None else previous[part])
        for part, i, j in _matrices(shapes)
    ]
    xp = array_namespace(x)
    empty = [xp.zeros(0, dtype=xp.uint8)]
    return (
        xp.concat(empty + [symbols for symbols, _, _ in found]),
        sum((sums for _, sums, _ in found), np.zeros(256)),
        sum((counts for _, _, counts in found), np.zeros(256)),
    )


def residual_values_many(symbols: Array, rows: Factors, columns: Factors, shapes: Shapes, table: Factors) -> Array:
    """See `shrinkpoint.kernels.rank_one`."""
    xp = array_namespace(symbols)
    parts = [residual_values(symbols[part], rows[i], columns[j], 0, table) for part, i, j in _matrices(shapes)]
    return xp.concat([xp.zeros(0, dtype=xp.float32), *parts])
