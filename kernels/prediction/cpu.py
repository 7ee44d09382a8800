"""Low-rank products on the CPU, row by row with the components apart, so loops vectorize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend.arrays import like, to_numpy
from ..backend.jit import njit, njit_in_place
from ..rans import compiled
from . import TOP

if TYPE_CHECKING:
    from ..backend.arrays import Array

NumPy = np.ndarray[Any, Any]
SHORT = 1 << 15
"""Values of a row, and rows, that are summed in 32 bits (at most 2**29) before they are added to 64-bit sums."""


def row_products(values: Array, factor: Array, phase: int) -> Array:
    """See `shrinkpoint.kernels.prediction.row_products`."""
    v, f = compiled(values), _by_component(factor)
    out = np.zeros((-(-(phase + v.size) // f.shape[1]), f.shape[0]), np.int64)
    _row_products(v, f, phase, out)
    return like(out, values)


def column_products(values: Array, factor: Array, columns: int, phase: int) -> Array:
    """See `shrinkpoint.kernels.prediction.column_products`."""
    v, f = compiled(values), _by_component(factor)
    out = np.zeros((f.shape[0], columns), np.int64)
    _column_products(v, f, phase, np.zeros((f.shape[0], columns), np.int32), out)
    return like(np.ascontiguousarray(out.T), values)


def product_classes(rows: Array, columns: Array, n: int, phase: int, shift: int, most: int) -> Array:
    """See `shrinkpoint.kernels.prediction.product_classes`."""
    out = np.empty(n, np.uint8)
    a, b = _by_component(rows), _by_component(columns)
    _classes(a, b, phase, shift, most, np.empty(min(SHORT, b.shape[1]), np.int32), out)
    return like(out, rows)


def _by_component(factor: Array) -> NumPy:
    """Transpose a factor to int32 [r, lines], so that each component is contiguous."""
    return np.ascontiguousarray(to_numpy(factor).T, np.int32)


@njit_in_place
def _row_products(values: NumPy, factor: NumPy, phase: int, out: NumPy) -> None:
    rank, width = factor.shape
    for r in range(out.shape[0]):
        first = max(r * width - phase, 0)
        end = min((r + 1) * width - phase, values.size)
        for start in range(first, end, SHORT):
            part = values[start : min(start + SHORT, end)]
            at = start + phase - r * width
            for k in range(rank):
                own = factor[k, at : at + part.size]
                some = np.int32(0)
                for i in range(part.size):
                    some += np.int32(part[i]) * own[i]
                out[r, k] += np.int64(some)


@njit_in_place
def _column_products(values: NumPy, factor: NumPy, phase: int, short: NumPy, out: NumPy) -> None:
    rank, width = out.shape
    rows = factor.shape[1]
    for r in range(rows):
        first = max(r * width - phase, 0)
        part = values[first : min((r + 1) * width - phase, values.size)]
        at = first + phase - r * width
        for k in range(rank):
            own, times = short[k, at : at + part.size], factor[k, r]
            for i in range(part.size):
                own[i] += np.int32(part[i]) * times
        if r % SHORT == SHORT - 1 or r == rows - 1:
            for k in range(rank):
                for c in range(width):
                    out[k, c] += np.int64(short[k, c])
                    short[k, c] = np.int32(0)


@njit_in_place
def _classes(rows: NumPy, columns: NumPy, phase: int, shift: int, most: int, sums: NumPy, out: NumPy) -> None:
    rank, width = columns.shape
    half, by, top = np.int32(1 << (shift - 1)), np.int32(shift), np.int32(most)
    for r in range(rows.shape[1]):
        first = max(r * width - phase, 0)
        end = min((r + 1) * width - phase, out.size)
        for start in range(first, end, SHORT):
            part = out[start : min(start + SHORT, end)]
            at = start + phase - r * width
            own = sums[: part.size]
            own[:] = half
            for k in range(rank):
                beside, times = columns[k, at : at + part.size], rows[k, r]
                for i in range(part.size):
                    own[i] += beside[i] * times
            for i in range(part.size):
                part[i] = np.uint8(min(max(own[i] >> by, -top), top) + top)


@njit
def _directions(vectors: NumPy, top: float, out: NumPy) -> None:
    sets, lines, rank = vectors.shape
    x, gram, inverse = np.empty((rank, lines)), np.empty((rank, rank)), np.zeros((rank, rank))
    row, total, used = np.empty(rank), np.empty(lines), np.zeros(rank, np.uint8)
    for m in range(sets):
        most = np.int64(0)
        for i in range(lines):
            for k in range(rank):
                most = max(most, abs(vectors[m, i, k]))
        shift = np.int64(0)
        while most >> shift >= 1 << 15:
            shift += 1
        for i in range(lines):
            for k in range(rank):
                x[k, i] = np.float64(vectors[m, i, k] >> shift)
        for j in range(rank):
            for k in range(rank):
                whole = 0.0
                for i in range(lines):
                    whole += x[j, i] * x[k, i]
                gram[j, k] = whole
        inverse[:] = 0.0
        used[:] = 0
        for k in range(rank):
            norm = 0.0
            for j in range(k):
                row[j] = 0.0
                if used[j]:
                    for i in range(j + 1):
                        row[j] += inverse[j, i] * gram[i, k]
                norm += row[j] * row[j]
            left = gram[k, k] - norm
            if not left > 1e-6 * gram[k, k]:
                continue
            used[k] = 1
            inverse[k, k] = 1.0
            for j in range(k):
                if used[j]:
                    for i in range(j + 1):
                        inverse[k, i] -= row[j] * inverse[j, i]
            length = np.sqrt(left)
            for i in range(k + 1):
                inverse[k, i] /= length
        for k in range(rank):
            largest = 0.0
            if used[k]:
                for i in range(lines):
                    total[i] = x[0, i] * inverse[k, 0]
                for j in range(1, k + 1):
                    for i in range(lines):
                        total[i] += x[j, i] * inverse[k, j]
                for i in range(lines):
                    largest = max(largest, abs(total[i]))
            for i in range(lines):
                out[m, i, k] = np.int8(np.rint(total[i] * (top / largest))) if largest > 0.0 else np.int8(0)


def orthogonal_directions(vectors: Array) -> Array:
    """See `shrinkpoint.kernels.prediction.orthogonal_directions`."""
    own = compiled(vectors)
    out = np.empty(own.shape, np.int8)
    _directions(own, float(TOP), out)
    return like(out, vectors)
