"""Row and column classes on the CPU: row after row, each a loop that vectorises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like
from ..coder_arguments import compiled
from .jit import njit_in_place
from .local_array import local_array

if TYPE_CHECKING:
    from ..arrays import Array

NumPy = np.ndarray[Any, Any]
NARROW = 48
"""Columns below which rows are not processed in separate loops."""
SHORT = 1 << 15
"""Rows, and elements of a row, that are summed in 32 bits before they are added to 64-bit sums."""


def row_column_sums(values: Array, columns: int, phase: int, origin: int | Array, most: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.scale_classes.row_column_sums`."""
    v = compiled(values)
    rows = np.zeros(-(-(phase + v.size) // columns), np.int64)
    sums = np.zeros(columns, np.int64)
    same = np.full(1, origin, np.uint8) if isinstance(origin, int) else compiled(origin)
    given = v, same, isinstance(origin, int), np.uint8(most), phase, rows, sums
    if columns < NARROW:
        _narrow_sums(*given)
    else:
        _sums(*given, np.zeros(columns, np.uint32))
    return like(rows, values), like(sums, values)


def class_sums(
    rows: Array, columns: Array, n: int, phase: int, base: int, classes: int, context: Array | None
) -> Array:
    """See `shrinkpoint.kernels.scale_classes.class_sums`."""
    out = np.empty(n, np.uint8)
    r, c = compiled(rows), compiled(columns)
    if context is None:
        _classes(r, c, phase, base, classes, out)
    else:
        with np.errstate(over="ignore"):  # uncompiled code would warn
            _beside(r, c, phase, base, classes, compiled(context), out)
    return like(out, rows)


def pattern_classes(patterns: Array, shift: int, table: Array) -> Array:
    """See `shrinkpoint.kernels.scale_classes.pattern_classes`."""
    u = compiled(patterns)
    out = np.empty(u.size, np.uint8)
    _look_up(u, u.dtype.type(shift), compiled(table), out)
    return like(out, patterns)


@njit_in_place
def _look_up(patterns: NumPy, shift: Any, table: NumPy, out: NumPy) -> None:
    for i in range(out.size):
        out[i] = table[np.int64(patterns[i] >> shift)]


@njit_in_place
def _narrow_sums(values: NumPy, origins: NumPy, one: bool, most: Any, phase: int, rows: NumPy, sums: NumPy) -> None:
    """Row and column sums of narrow matrices, one element after another.

    For short rows the vectorized loops of `_sums` cost more than they save.
    """
    r, c, total = 0, phase, np.int64(0)
    for i in range(values.size):
        origin = origins[0] if one else origins[i]
        far = np.int64(min(np.uint8(max(values[i], origin) - min(values[i], origin)), most))
        total += far
        sums[c] += far
        c += 1
        if c == sums.size:
            rows[r] = total
            r, c, total = r + 1, 0, np.int64(0)
    if c:
        rows[r] = total


@njit_in_place
def _sums(
    values: NumPy, origins: NumPy, one: bool, most: Any, phase: int, rows: NumPy, sums: NumPy, short: NumPy
) -> None:
    width = sums.size
    distances = local_array(SHORT, np.uint8)
    origin = origins[0] if one else np.uint8(0)
    for r in range(rows.size):
        first = max(r * width - phase, 0)
        end = min((r + 1) * width - phase, values.size)
        total = np.int64(0)
        for start in range(first, end, SHORT):
            part = values[start : min(start + SHORT, end)]
            own = distances[: part.size]
            if one:
                for i in range(part.size):
                    own[i] = min(np.uint8(max(part[i], origin) - min(part[i], origin)), most)
            else:
                beside = origins[start : start + part.size]
                for i in range(part.size):
                    own[i] = min(np.uint8(max(part[i], beside[i]) - min(part[i], beside[i])), most)
            column = short[start + phase - r * width :]
            some = np.uint32(0)
            for i in range(part.size):
                some += np.uint32(own[i])
            total += np.int64(some)
            for i in range(part.size):
                column[i] += np.uint32(own[i])
        rows[r] = total
        if r % SHORT == SHORT - 1 or r == rows.size - 1:
            for c in range(width):
                sums[c] += np.int64(short[c])
                short[c] = np.uint32(0)


@njit_in_place
def _classes(rows: NumPy, columns: NumPy, phase: int, base: int, classes: int, out: NumPy) -> None:
    width = columns.size
    top = np.int16(classes - 1)
    for r in range(rows.size):
        first = max(r * width - phase, 0)
        part = out[first : min((r + 1) * width - phase, out.size)]
        column = columns[first + phase - r * width :]
        own = np.int16(np.int16(rows[r]) - np.int16(base))
        for c in range(part.size):
            part[c] = np.uint8(min(max(np.int16(own + np.int16(column[c])), np.int16(0)), top))


@njit_in_place
def _beside(rows: NumPy, columns: NumPy, phase: int, base: int, classes: int, context: NumPy, out: NumPy) -> None:
    width = columns.size
    top, factor = np.int16(classes - 1), np.uint8(classes & 255)
    for r in range(rows.size):
        first = max(r * width - phase, 0)
        part = out[first : min((r + 1) * width - phase, out.size)]
        beside = context[first : first + part.size]
        column = columns[first + phase - r * width :]
        own = np.int16(np.int16(rows[r]) - np.int16(base))
        for c in range(part.size):
            both = np.uint8(min(max(np.int16(own + np.int16(column[c])), np.int16(0)), top))
            part[c] = np.uint8(both + np.uint8(beside[c] * factor))
