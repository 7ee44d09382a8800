"""Exact floats without a parent: byte planes, with exponents in the context of their scale.

Patterns are rotated so that the uppermost byte holds the exponent (for float16 with three bits of the mantissa, for
float64 only the lower eight of its eleven bits). The sign moves to the lowest bits, which are as unpredictable as the
sign. The scale of a position is its mean exponent, given by one byte a row and one a column, since weights and moments
are nearly products of a row's and a column's scale. Arrays without rows have rows of 64 and no columns.

    varint number of columns C, 0 where the scale does not pay; if it does: varint column of the first element,
    block: classes of the rows, block: classes of the columns,
    block: uppermost plane (in the context of row class + column class), a block each: the other planes, lowest first
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.backend.arrays import numbers, on_gpu, write
from ...kernels.planes import merge_planes
from ...kernels.scales import class_sums, row_column_sums
from .. import entropy
from ..entropy.row_column_classes import populations
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..state.leaves import Array, NpArray

ROWS_OF = 64
_LEAST_ROWS = 8
_LEAST = 2048


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of the fields of a float pattern.

    Args:
        width: bits of the pattern.
        mantissa: bits of the mantissa.
        rotation: bits to the left that bring (the lower eight bits of) the exponent to the top.
        steps: values of the uppermost byte an octave.
    """

    width: int
    mantissa: int
    rotation: int
    steps: int


LAYOUTS = {
    "float16": Layout(16, 10, 1, 8),
    "bfloat16": Layout(16, 7, 1, 1),
    "float32": Layout(32, 23, 1, 1),
    "float64": Layout(64, 52, 4, 1),
    "complex32": Layout(16, 10, 1, 8),
    "complex64": Layout(32, 23, 1, 1),
    "complex128": Layout(64, 52, 4, 1),
}
"""By dtype; a complex number is two floats."""


def encode_scaled(planes: NpArray, layout: Layout, columns: int, start: int) -> Writer:
    """Code float patterns without a parent.

    Args:
        planes: of the rotated patterns, shape (bytes, n).
        layout: of the float.
        columns: of the matrix that they are a part of; 0: not part of a matrix.
        start: number of the first one in it.
    """
    top = planes[-1]
    out = Writer()
    scaled = _in_scale(top, layout, columns, start)
    if scaled is None:
        out.varint(0)
        out.block(entropy.coded(top))
    else:
        out.raw(scaled)
    for plane in planes[:-1]:
        out.block(entropy.coded(plane))
    return out


def _in_scale(top: NpArray, layout: Layout, columns: int, start: int) -> Writer | None:
    """Code the uppermost plane in the context of the positions' scale; None if that is larger."""
    n = top.size
    if n < _LEAST:
        return None
    matrix = columns >= _LEAST_ROWS and n >= _LEAST_ROWS * columns
    width, phase = (columns, start % columns) if matrix else (ROWS_OF, 0)
    rows, sums = row_column_sums(top, width, phase)
    # Half octaves, rounded; of columns the distance to the mean of all.
    across, down = populations(n, width, phase, rows.size)
    row_class = _halves(rows, across, layout.steps)
    column_class = _halves(sums, down, layout.steps) if matrix else np.zeros(width, np.int64)
    rows8, columns8 = ((np.minimum(c - c.min(), 255)).astype(np.uint8) for c in (row_class, column_class))
    context = class_sums(rows8, columns8, n, phase)
    coded, alone = entropy.in_context(top, context, max(2, int(context.max()) + 1))
    out = Writer()
    out.varint(width)
    out.varint(phase)
    out.block(entropy.encode(rows8))
    out.block(entropy.encode(columns8))
    out.block(coded)
    return out if 8 * len(out) < alone else None


def _halves(sums: NpArray, numbers: NpArray, steps: int) -> NpArray:
    """Return means in half octaves, rounded."""
    octaves = numbers.astype(np.int64) * steps
    halves: NpArray = (4 * sums + octaves) // (2 * octaves)
    return halves


def decode_scaled(data: Reader, out: Array, layout: Layout) -> None:
    """Fill bytes, on the host or on a GPU, that `encode_scaled` coded; raises CorruptDataError."""
    target = numbers(out, layout.width // 8)
    width, n = data.varint(), target.shape[0]
    if width == 0:
        top = entropy.decode(data.block(), n)
    else:
        phase = data.varint()
        if width > max(n, ROWS_OF) or phase >= width:
            raise CorruptDataError(f"exact: {n} elements in {width} columns from {phase}")
        rows = entropy.decode(data.block(), -(-(phase + n) // width))
        columns = entropy.decode(data.block(), width)
        context = class_sums(rows, columns, n, phase)
        top = entropy.decode(data.block(), n, context, max(2, int(context.max(initial=0)) + 1))
    planes = [entropy.decode(data.block(), n) for _ in range(layout.width // 8 - 1)]
    merge_planes(planes_near([*planes, top], out), f"uint{layout.width}", layout.rotation, out=target)


def planes_near(planes: Sequence[NpArray], memory: Array) -> Array | list[NpArray]:
    """Return byte planes for `merge_planes`: on the host as they are, for memory on a GPU there."""
    if not on_gpu(memory):
        return list(planes)
    there = memory.new_empty((len(planes), planes[0].size))
    for row, plane in zip(there, planes, strict=True):
        write(row, plane)
    return there
