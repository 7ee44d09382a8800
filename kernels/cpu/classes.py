"""Row and column classes on the CPU: row after row, each a loop that vectorises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like
from ..sequential import compiled
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array

NumPy = np.ndarray[Any, Any]
SHORT = 1 << 15
"""Rows summed in 32 bits before they are added to sums of 64, and elements of a row likewise."""


def row_column_sums(values: Array, columns: int, phase: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.classes.row_column_sums`."""
    v = compiled(values)
    rows = np.zeros(-(-(phase + v.size) // columns), np.int64)
    sums = np.zeros(columns, np.int64)
    _sums(v, phase, rows, sums, np.zeros(columns, np.uint32))
    return like(rows, values), like(sums, values)


def class_sums(rows: Array, columns: Array, n: int, phase: int) -> Array:
    """See `shrinkpoint.kernels.classes.class_sums`."""
    out = np.empty(n, np.uint8)
    _classes(compiled(rows), compiled(columns), phase, out)
    return like(out, rows)


def pattern_classes(patterns: Array, shift: int, table: Array) -> Array:
    """See `shrinkpoint.kernels.classes.pattern_classes`."""
    u = compiled(patterns)
    out = np.empty(u.size, np.uint8)
    _look_up(u, u.dtype.type(shift), compiled(table), out)
    return like(out, patterns)


@njit
def _look_up(patterns: NumPy, shift: Any, table: NumPy, out: NumPy) -> None:
    for i in range(out.size):
        out[i] = table[np.int64(patterns[i] >> shift)]


@njit
def _sums(values: NumPy, phase: int, rows: NumPy, sums: NumPy, short: NumPy) -> None:
    width = sums.size
    for r in range(rows.size):
        first = max(r * width - phase, 0)
        part = values[first : min((r + 1) * width - phase, values.size)]
        total = np.int64(0)
        for start in range(0, part.size, SHORT):
            some = np.uint32(0)
            for v in part[start : start + SHORT]:
                some += np.uint32(v)
            total += np.int64(some)
        rows[r] = total
        column = short[first + phase - r * width :]
        for c in range(part.size):
            column[c] += np.uint32(part[c])
        if r % SHORT == SHORT - 1 or r == rows.size - 1:
            for c in range(width):
                sums[c] += np.int64(short[c])
                short[c] = np.uint32(0)


@njit
def _classes(rows: NumPy, columns: NumPy, phase: int, out: NumPy) -> None:
    width = columns.size
    for r in range(rows.size):
        first = max(r * width - phase, 0)
        part = out[first : min((r + 1) * width - phase, out.size)]
        column = columns[first + phase - r * width :]
        own = rows[r]
        for c in range(part.size):
            both = np.uint8(own + column[c])
            part[c] = both if both >= own else np.uint8(255)  # it wrapped around
