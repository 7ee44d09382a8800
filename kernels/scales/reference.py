"""Oracle of octaves, classes and rank-one estimates; their streams are host arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from ..backend.arrays import Array, to_numpy
from ..backend.floats import sign_and_magnitude
from . import ESCAPE, FARTHEST, FIRST, MAX_OCTAVES, SCALE, ZERO, Factors, Octaves, Shapes, cell_centers


def split_octaves(index: Array, bits: int, buckets: int) -> Octaves | None:
    """See `shrinkpoint.kernels.scales`."""
    signed = to_numpy(index).astype(np.int64) - buckets
    j = np.abs(signed)
    odd = np.flatnonzero(j > buckets)
    some = (j > 0) & (j <= buckets)
    m = j[some] - 1
    octave = m >> bits
    low, high = (int(octave.min()), int(octave.max())) if m.size else (0, 0)
    if high - low >= MAX_OCTAVES:
        return None
    symbols = np.zeros(j.size, np.uint8)
    symbols[some] = octave - low + 1
    part = m & ((1 << bits) - 1)
    planes = [(part >> shift) & 255 for shift in range(0, bits, 8)]
    fraction = np.array(planes, np.uint8).reshape((bits + 7) // 8, m.size)
    return Octaves(low, high, symbols, (signed[some] < 0).astype(np.uint8), fraction, odd)


def join_octaves(octaves: Octaves, bits: int, buckets: int) -> Array:
    """See `shrinkpoint.kernels.scales`."""
    some = octaves.symbols > 0
    j = ((octaves.symbols[some].astype(np.int64) + octaves.low - 1) << bits) + 1
    for plane, part in enumerate(octaves.fraction):
        j += part.astype(np.int64) << (8 * plane)
    out = np.full(octaves.symbols.size, buckets, np.int64)
    out[some] += np.where(octaves.negative > 0, -j, j)
    return out.astype(np.int32)


def row_column_sums(values: Array, columns: int, phase: int, most: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.scales.row_column_sums`."""
    xp = array_namespace(values)
    n = values.shape[0]
    rows = -(-(phase + n) // columns)
    v = xp.clip(xp.astype(values, xp.int64), 0, most)
    after = xp.zeros(rows * columns - phase - n, dtype=xp.int64)
    matrix = xp.reshape(xp.concat([xp.zeros(phase, dtype=xp.int64), v, after]), (rows, columns))
    return xp.sum(matrix, axis=1, dtype=xp.int64), xp.sum(matrix, axis=0, dtype=xp.int64)


def class_sums(rows: Array, columns: Array, n: int, phase: int, base: int, classes: int) -> Array:
    """See `shrinkpoint.kernels.scales.class_sums`."""
    xp = array_namespace(rows)
    both = xp.expand_dims(xp.astype(rows, xp.int64), axis=1) + xp.expand_dims(xp.astype(columns, xp.int64), axis=0)
    return xp.astype(xp.reshape(xp.clip(both - base, 0, classes - 1), (-1,))[phase : phase + n], xp.uint8)


def pattern_classes(patterns: Array, shift: int, table: Array) -> Array:
    """See `shrinkpoint.kernels.scales.pattern_classes`."""
    xp = array_namespace(patterns)
    upper = [u >> shift for u in to_numpy(patterns).tolist()]  # torch converts no uint64 above 2**63
    return xp.take(table, xp.asarray(upper, dtype=xp.int64))


_NORMAL = 1 << 23
_INFINITE = 255 << 23
_ONE = 127 << 23


def _estimates(xp: Any, like: Array, rows: Factors, columns: Factors, start: int) -> Array:
    at = np.arange(start, start + like.shape[0])
    i, j = np.divmod(at, max(columns.size, 1))
    place = device(like)
    return xp.asarray(rows[i], device=place) * xp.asarray(columns[j], device=place)


def factor_sums(x: Array, columns: int) -> tuple[Any, Any]:
    """See `shrinkpoint.kernels.scales`."""
    xp = array_namespace(x)
    values = xp.where(xp.isfinite(x), x, xp.zeros_like(x))
    part = xp.astype(xp.reshape(values, (x.shape[0] // columns, columns)), xp.float64)
    sums = (xp.sum(part, axis=1), xp.sum(part, axis=0))
    rows, below = (np.asarray([float(s[i]) for i in range(s.shape[0])]) for s in sums)
    return rows, below


def _symbols(
    x: Array, rows: Factors, columns: Factors, start: int, eighths: int, previous: Array | None
) -> tuple[Array, Any, Any]:
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


def _matrices(shapes: Shapes, n: int, start: int = 0) -> Iterator[tuple[slice, slice, slice, int]]:
    """Elements, rows, columns and first element of each of several joined matrices."""
    at = i = j = 0
    for height, width in shapes.tolist():
        end = min(at + height * width - start, n)
        yield slice(at, end), slice(i, i + height), slice(j, j + width), start
        at, i, j, start = end, i + height, j + width, 0


def factors_many(x: Array, shapes: Shapes) -> tuple[Factors, Factors]:
    """See `shrinkpoint.kernels.scales`."""
    rows, columns = (np.empty(int(shapes[:, k].sum()), np.float32) for k in range(2))
    for part, of_rows, of_columns, _ in _matrices(shapes, x.shape[0]):
        height, width = of_rows.stop - of_rows.start, of_columns.stop - of_columns.start
        across, down = factor_sums(x[part], width)
        mean = across.sum() / (height * width)
        rows[of_rows] = np.maximum(across / width, 0)
        columns[of_columns] = np.maximum(down / height / mean if mean > 0 else down / height, 0)
    return rows, columns


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, shapes: Shapes, start: int, eighths: int, previous: Array | None
) -> tuple[Array, Any, Any]:
    """See `shrinkpoint.kernels.scales`."""
    found = [
        _symbols(x[part], rows[i], columns[j], first, eighths, None if previous is None else previous[part])
        for part, i, j, first in _matrices(shapes, x.shape[0], start)
    ]
    xp = array_namespace(x)
    empty = [xp.zeros(0, dtype=xp.uint8)]
    return (
        xp.concat(empty + [symbols for symbols, _, _ in found]),
        sum((sums for _, sums, _ in found), np.zeros(256)),
        sum((counts for _, _, counts in found), np.zeros(256)),
    )


def residual_values(
    symbols: Array, rows: Factors, columns: Factors, shapes: Shapes, start: int, table: Factors
) -> Array:
    """See `shrinkpoint.kernels.scales`."""
    xp = array_namespace(symbols)
    factors = xp.take(xp.asarray(table, device=device(symbols)), xp.astype(symbols, xp.int64))
    parts = [
        _estimates(xp, symbols[part], rows[i], columns[j], first) * factors[part]
        for part, i, j, first in _matrices(shapes, symbols.shape[0], start)
    ]
    return xp.concat([xp.zeros(0, dtype=xp.float32), *parts])
