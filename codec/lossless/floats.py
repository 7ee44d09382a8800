"""Exact floats: byte planes in the context of their scale, or differences to the parent.

**Alone.** Patterns are rotated so that the uppermost byte holds the exponent (for float16 with three bits of the
mantissa, for float64 only the lower eight of its eleven bits). The sign moves to the lowest bits, which are as
unpredictable as the sign. The scale of a position is its mean exponent, given by one byte a row and one a column, since
weights and moments are nearly products of a row's and a column's scale. Arrays without rows have rows of 64 and no
columns.

    varint number of columns C, 0 where the scale does not pay; if it does: varint column of the first element,
    block: classes of the rows, block: classes of the columns,
    block: uppermost plane (in the context of row class + column class), a block each: the other planes, lowest first

**Differences** are those of the ordered patterns (`kernels.planes.difference`), in units of the last place. A training
step is about as large for a small weight as for a large one, so it is more units for a small weight: the parent's
exponent predicts most of the size. The bits below the leading four bits of the size are noise and are stored raw
(`kernels.planes`).

    byte: kind of context, block: categories of the zig-zag differences in that context, their extra bits
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ...kernels.backend.arrays import numbers, on_gpu, placed_with, write
from ...kernels.levels import joint_counts
from ...kernels.planes import join_categories, merge_planes, most_bits, split_categories, undifference
from ...kernels.scales import class_sums, pattern_classes, row_column_sums
from .. import entropy
from ..entropy.matrices import populations
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
    out.block(*map(entropy.coded, planes[:-1]))
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
    out.varint(width, phase)
    out.block(entropy.encode(rows8), entropy.encode(columns8), coded)
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


MAGNITUDE, MANTISSA = range(2)
_CONTEXTS, _FEWEST, _STRIDE = 64, 256, 16


def encode_differences(steps: NpArray, before: NpArray, layout: Layout, kind: int) -> Writer:
    """Code float patterns as differences to the parent's patterns.

    Args:
        steps: zig-zag differences, shape (n,).
        before: unsigned patterns of the parent.
        layout: of the float.
        kind: of context, as `difference_bits` found it on a sample.
    """
    categories, extra = split_categories(steps, most_bits(layout.width))
    context, contexts = _contexts(before, layout, kind)
    out = Writer(kind)
    out.block(entropy.in_context(categories, context, contexts)[0])
    out.raw(extra)
    return out


def decode_differences(data: Reader, before: NpArray, out: Array, layout: Layout) -> None:
    """Fill bytes, on the host or on a GPU, that `encode_differences` coded.

    The parent's bytes are on the host; a GPU adds the differences.
    """
    kind, width = data.byte(), layout.width // 8
    if kind not in (MAGNITUDE, MANTISSA):
        raise CorruptDataError(f"exact: context {kind} is unknown")
    old, target = numbers(before, width), numbers(out, width)
    context, contexts = _contexts(old, layout, kind)
    categories = entropy.decode(data.block(), old.size, context, contexts)
    steps = np.empty_like(old) if on_gpu(out) else target
    join_categories(categories, data.rest(), most_bits(layout.width), f"uint{layout.width}", out=steps)
    undifference(placed_with(steps, out), placed_with(old, out), dtype=f"float{layout.width}", out=target)


def difference_bits(steps: NpArray, before: NpArray, layout: Layout) -> tuple[float, int]:
    """Estimate the bits of zig-zag differences without tables; also return the better context.

    Both arrays are a sample, as `entropy.sample` takes it.
    """
    categories, extra = split_categories(steps, most_bits(layout.width))
    top = max(2, int(categories.max(initial=0)) + 1)
    bits = []
    for kind in (MAGNITUDE, MANTISSA):
        context, contexts = _contexts(before, layout, kind)
        bits.append(entropy.sampled_bits(joint_counts(context, categories, contexts, top)))
    kind = int(np.argmin(bits))
    return bits[kind] + 8.0 * int(extra.size), kind


def _contexts(before: NpArray, layout: Layout, kind: int) -> tuple[NpArray, int]:
    """Return the context of each element, and the number of contexts.

    MAGNITUDE: exponents from the lowest up, joined until they hold a 64th of the elements, and 256 of them; counted on
    every 16th element where there are many.
    MANTISSA: the upper four bits of the mantissa, where all values shrink by the same factor.
    """
    upper = layout.width - layout.mantissa  # bits of sign and exponent
    if kind == MANTISSA:
        return pattern_classes(before, layout.mantissa - 4, _upper_bits(upper)), 16
    fields = 1 << (upper - 1)
    some = before[::_STRIDE] if before.size > entropy.SAMPLE else before
    counts = np.bincount((some >> some.dtype.type(layout.mantissa)).astype(np.int64) & (fields - 1), minlength=fields)
    group = (np.cumsum(counts) - counts) // max(_FEWEST, -(-some.size // _CONTEXTS))
    number = np.zeros(fields, np.uint8)  # of each exponent's group, for groups ascend
    np.cumsum(group[1:] != group[:-1], out=number[1:])
    return pattern_classes(before, layout.mantissa, np.tile(number, 2)), max(2, int(number[-1]) + 1)


@lru_cache(maxsize=4)
def _upper_bits(upper: int) -> NpArray:
    """Return the table that maps upper pattern bits to the upper four mantissa bits."""
    table = np.tile(np.arange(16, dtype=np.uint8), 1 << upper)
    table.flags.writeable = False
    return table
