"""Exact differences of floats, with sizes coded in the context of the parent's magnitude.

Differences are those of the ordered patterns (`kernels.planes.difference`), in units of the last place. A training
step is about as large for a small weight as for a large one, so it is more units for a small weight: the parent's
exponent predicts most of the size. The bits below the leading four bits of the size are noise and are stored raw
(`kernels.planes`).

    byte: kind of context, block: categories of the zig-zag differences in that context, their extra bits
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ...kernels.backend.arrays import numbers, on_gpu, placed_with
from ...kernels.levels import joint_counts
from ...kernels.planes import join_categories, most_bits, split_categories, undifference
from ...kernels.scales import pattern_classes
from .. import entropy
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..state.leaves import Array, NpArray
from .scaled import Layout

MAGNITUDE, MANTISSA = range(2)
_CONTEXTS, _LEAST, _STRIDE = 64, 256, 16


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
    out = Writer()
    out.byte(kind)
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
    group = (np.cumsum(counts) - counts) // max(_LEAST, -(-some.size // _CONTEXTS))
    number = np.zeros(fields, np.uint8)  # of each exponent's group, for groups ascend
    np.cumsum(group[1:] != group[:-1], out=number[1:])
    return pattern_classes(before, layout.mantissa, np.tile(number, 2)), max(2, int(number[-1]) + 1)


@lru_cache(maxsize=4)
def _upper_bits(upper: int) -> NpArray:
    """Return the table that maps upper pattern bits to the upper four mantissa bits."""
    table = np.tile(np.arange(16, dtype=np.uint8), 1 << upper)
    table.flags.writeable = False
    return table
