"""Log buckets and histograms on the GPU: histograms of many tensors in one launch.

Integer atomics count shifted bit patterns. A large tensor is counted in several copies of its histogram, added up at
the end; totals are 64-bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import Array, dtype_name, to_cpu
from ..backend.floats import FORMATS
from ..backend.gpu import (
    INTEGERS,
    Launch,
    bit_view,
    bucket_of,
    elements,
    like,
    magnitude_bits,
    on_device,
    pattern_of,
    product_magnitude,
    run,
    special_levels,
    tensor,
)
from ..quantizer import Thresholds, product_format
from ..quantizer import magnitude_bits as threshold_bits
from . import Histogram, target

ELEMENTS = Launch(block=1024, warps=8)


@triton.jit
def index_kernel(
    patterns_ptr,
    n: tl.int64,
    bits: tl.int32,
    index_ptr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    OCTAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Position of each pattern in the signed layout."""
    offsets, inside = elements(n, BLOCK)
    pattern = tl.load(patterns_ptr + offsets, mask=inside, other=0)
    j = bucket_of(magnitude_bits(pattern, WIDTH), bits, WIDTH, M)
    buckets = OCTAVES << bits
    index = tl.where(j > buckets, 2 * buckets + 1, tl.where(pattern < 0, buckets - j, buckets + j))
    tl.store(index_ptr + offsets, index, mask=inside)


def bucket_index(x: Array, bits: int) -> Array:
    """See `shrinkpoint.kernels.histogram.bucket_index`."""
    t = tensor(x)
    fmt = FORMATS[dtype_name(x)]
    index = torch.empty(t.shape, dtype=torch.int32, device=t.device)
    constants = {"WIDTH": fmt.width, "M": fmt.mantissa, "OCTAVES": fmt.octaves}
    ELEMENTS.run(index_kernel, t.numel(), bit_view(t), t.numel(), bits, index, **constants)
    return like(index, x)


@triton.jit
def value_kernel(
    index_ptr,
    n: tl.int64,
    bits: tl.int32,
    patterns_ptr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    OCTAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pattern of the midpoint of each bucket.

    Bucket j covers `[significand, significand + 1) * 2**(octave - bits)` smallest units, `octave = (j - 1) >> bits`.
    The pattern of a subnormal is its number of units. For a normal number, the mantissa field is the fraction, and the
    exponent field follows from the octave.
    """
    offsets, inside = elements(n, BLOCK)
    index = tl.load(index_ptr + offsets, mask=inside, other=0)
    buckets = OCTAVES << bits
    valid = (index >= 0) & (index <= 2 * buckets)
    distance = tl.where(valid, index - buckets, 0)
    j = tl.abs(distance)
    below = tl.maximum(j - 1, 0)
    octave = below >> bits
    fraction = below & ((1 << bits) - 1)
    significand = fraction + (1 << bits)
    if WIDTH == 64:
        octave = octave.to(tl.int64)
        fraction = fraction.to(tl.int64)
        significand = significand.to(tl.int64)
    spread = M - bits  # mantissa bits below the fraction
    half = (1 << spread) >> 1
    if WIDTH == 64:
        half = (tl.full((), 1, tl.int64) << spread) >> 1
    normal = ((octave - (M - 1)) << M) + (fraction << spread) + half
    wide = tl.maximum(octave - bits, 0)
    narrow = tl.maximum(bits - octave, 0)
    one = octave * 0 + 1
    rounded_up = (significand + ((one << narrow) - 1)) >> narrow
    units = tl.where(narrow > 0, rounded_up, (significand << wide) + ((one << wide) >> 1))
    magnitude = tl.where(octave >= M, normal, units)
    magnitude = tl.where(j == 0, 0, magnitude)
    if WIDTH == 64:
        sign = tl.full((), -0x8000000000000000, tl.int64)
    elif WIDTH == 32:
        sign = tl.full((), -0x80000000, tl.int32)
    else:
        sign = tl.full((), 0x8000, tl.int32)
    quiet_nan: tl.constexpr = (((1 << (WIDTH - 1 - M)) - 1) << M) | (1 << (M - 1))
    pattern = tl.where(distance < 0, magnitude | sign, magnitude)
    pattern = tl.where(valid, pattern, quiet_nan)
    tl.store(patterns_ptr + offsets, pattern.to(patterns_ptr.dtype.element_ty), mask=inside)


def bucket_value(index: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.histogram.bucket_value`."""
    t = tensor(index)
    fmt = FORMATS[dtype]
    patterns = torch.empty(t.shape, dtype=INTEGERS[fmt.width // 8], device=t.device)
    constants = {"WIDTH": fmt.width, "M": fmt.mantissa, "OCTAVES": fmt.octaves}
    ELEMENTS.run(value_kernel, t.numel(), t, t.numel(), bits, patterns, **constants)
    return like(patterns.view(getattr(torch, fmt.name)), index)


COUNT = Launch(block=1024, warps=4, rounds=16)
WINDOW = 1024
"""Counters of a program's window, a power of two. Older versions of Triton count in steps of 32 bins."""
COPIES = 4
"""Copies of a histogram, which programs use in turn, so that fewer programs update the same bucket at once."""
COPIED_COUNTERS = 1 << 20
"""Maximum number of counters in all copies of one histogram (4 MiB, which stay in the second-level cache)."""
COUNTERS = 1 << 24
"""Maximum number of counters in one launch (64 MiB)."""
SLICE = 1 << 30
"""Maximum number of elements that one histogram counts: no 32-bit counter can overflow."""
FIELDS = 8
"""Number of columns of the table in which a program finds its tensor; see `_table`."""


@triton.jit
def tensor_of(program, table_ptr, tensors, FIELDS: tl.constexpr):
    """Row of the tensor that a program works on.

    It is the last row whose first program, in column 0, is not after this program.
    """
    low = 0
    high = tensors - 1
    while low < high:
        middle = (low + high + 1) >> 1
        starts = tl.load(table_ptr + middle * FIELDS) <= program
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle - 1)
    return low


@triton.jit
def counted_bucket(
    x_ptr,
    gradient_ptr,
    offsets,
    inside,
    field_ptr,
    bits,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    PRODUCT: tl.constexpr,
    DOUBLE: tl.constexpr,
    KEPT: tl.constexpr,
):
    """Magnitude bucket of x or |gradient * x|, whether x is negative, and whether it is counted."""
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    pattern = pattern_of(x)
    if PRODUCT:
        magnitude = product_magnitude(x, tl.load(gradient_ptr + offsets, mask=inside, other=0.0), DOUBLE)
    else:
        magnitude = magnitude_bits(pattern, WIDTH)
    if KEPT:
        sensitivity = None
        if KEPT == 2:
            sensitivity = product_magnitude(x, tl.load(gradient_ptr + offsets, mask=inside, other=0.0), DOUBLE)
        protected, pruned = special_levels(
            magnitude,
            sensitivity,
            tl.load(field_ptr + 4),
            tl.load(field_ptr + 5),
            tl.load(field_ptr + 6),
            tl.load(field_ptr + 7),
        )
        inside = inside & ~(protected | pruned)
    return bucket_of(magnitude, bits, WIDTH, M), pattern < 0, inside


@triton.jit
def count_kernel(
    x_ptr,
    gradient_ptr,
    table_ptr,
    tensors: tl.int32,
    size: tl.int32,
    copies: tl.int32,
    bits: tl.int32,
    counts_ptr,
    FIELDS: tl.constexpr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    SIGNED: tl.constexpr,
    PRODUCT: tl.constexpr,
    DOUBLE: tl.constexpr,
    KEPT: tl.constexpr,
    WINDOW: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the log buckets of many tensors to one copy of the counters.

    Counted are x, |gradient * x| (PRODUCT), or the x that are neither pruned nor protected (KEPT).

    A program counts ROUNDS blocks. Most elements are less than some octaves below the largest: they are counted in a
    window of WINDOW buckets (half of it for each sign), which ends an octave above the largest of the first block.
    Elements outside it use an atomic each. The table holds the distance of each tensor from `x` and `gradient` in
    elements.
    """
    program = tl.program_id(0)
    number = tensor_of(program, table_ptr, tensors, FIELDS)
    field_ptr = table_ptr + number * FIELDS
    part = program - tl.load(field_ptr)
    n = tl.load(field_ptr + 1)
    x_ptr += tl.load(field_ptr + 2)
    gradient_ptr += tl.load(field_ptr + 3)
    # J, the number of buckets of a sign: `size` is 2 J + 2, or J + 2.
    buckets = (size - 2) // 2 if SIGNED else size - 2
    zero = buckets if SIGNED else 0
    side: tl.constexpr = WINDOW // 2 if SIGNED else WINDOW
    copy_ptr = counts_ptr + (number.to(tl.int64) * copies + part % copies) * size
    first = part * (BLOCK * ROUNDS)
    lanes = tl.arange(0, BLOCK)
    j, negative, kept = counted_bucket(
        x_ptr, gradient_ptr, first + lanes, first + lanes < n, field_ptr, bits, WIDTH, M, PRODUCT, DOUBLE, KEPT
    )
    top = tl.max(tl.where(kept & (j <= buckets), j, 0), axis=0) + (1 << bits)
    window = tl.zeros((WINDOW,), tl.int32)
    zeros = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, tl.minimum(first + BLOCK * ROUNDS, n), BLOCK):
        offsets = start + lanes
        j, negative, kept = counted_bucket(
            x_ptr, gradient_ptr, offsets, offsets < n, field_ptr, bits, WIDTH, M, PRODUCT, DOUBLE, KEPT
        )
        zeros += (kept & (j == 0)).to(tl.int32)  # most elements may be zeros, which share one update
        kept = kept & (j != 0)
        near = kept & (j <= top) & (j > top - side)
        slot = tl.where(near, top - j, 0)
        if SIGNED:
            slot = tl.where(negative, slot + side, slot)
            index = tl.where(j > buckets, size - 1, tl.where(negative, buckets - j, buckets + j))
        else:
            index = j
        window += tl.histogram(slot, WINDOW, mask=near)
        tl.atomic_add(copy_ptr + index, 1, mask=kept & ~near, sem="relaxed")
    total = tl.sum(zeros, axis=0)
    tl.atomic_add(copy_ptr + zero, total, mask=total > 0, sem="relaxed")
    slot = tl.arange(0, WINDOW)
    if SIGNED:
        j = top - (slot & (side - 1))
        index = tl.where(j > buckets, size - 1, tl.where(slot >= side, buckets - j, buckets + j))
    else:
        index = top - slot
    tl.atomic_add(copy_ptr + index, window, mask=window > 0, sem="relaxed")


def log_histogram_many(
    xs: Sequence[Array], bits: int, *, signed: bool = False, gradients: Sequence[Array | None]
) -> list[Histogram]:
    """See `shrinkpoint.kernels.histogram.log_histogram_many`."""
    return _count(xs, gradients, None, bits, signed=signed)


def kept_histogram_many(
    xs: Sequence[Array], thresholds: Sequence[Thresholds], bits: int, *, gradients: Sequence[Array | None]
) -> list[Histogram]:
    """See `shrinkpoint.kernels.histogram.kept_histogram_many`."""
    return _count(xs, gradients, thresholds, bits, signed=True)


def log_histogram(x: Array, bits: int, *, signed: bool = False, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.log_histogram`."""
    return log_histogram_many([x], bits, signed=signed, gradients=[gradient])[0]


def kept_histogram(x: Array, thresholds: Thresholds, bits: int, *, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.kept_histogram`."""
    return kept_histogram_many([x], [thresholds], bits, gradients=[gradient])[0]


@dataclass(frozen=True, slots=True)
class _Part:
    """At most SLICE elements of one tensor, with the thresholds as bit patterns."""

    number: int
    x: torch.Tensor
    gradient: torch.Tensor
    limits: tuple[int, int, int, int]


def _count(
    xs: Sequence[Array],
    gradients: Sequence[Array | None],
    thresholds: Sequence[Thresholds] | None,
    bits: int,
    *,
    signed: bool,
) -> list[Histogram]:
    """Histograms of x, of |gradient * x| given gradients, or of kept x given thresholds."""
    groups: dict[tuple[str, str | None], list[int]] = {}
    for number, (x, gradient) in enumerate(zip(xs, gradients, strict=True)):
        groups.setdefault((dtype_name(x), None if gradient is None else dtype_name(gradient)), []).append(number)
    found: dict[int, Histogram] = {}
    for group in groups.values():
        x, gradient = xs[group[0]], gradients[group[0]]
        fmt, own_bits = target(x, gradient if thresholds is None else None, bits)
        constants = {
            "WIDTH": fmt.width,
            "M": fmt.mantissa,
            "SIGNED": signed,
            "PRODUCT": gradient is not None and thresholds is None,
            "DOUBLE": gradient is not None and product_format(x, gradient) == "float64",
            "KEPT": 0 if thresholds is None else 1 if gradient is None else 2,
            "WINDOW": WINDOW,
        }
        size = (2 if signed else 1) * fmt.buckets(own_bits) + 2
        totals = {number: np.zeros(size, dtype=np.int64) for number in group}
        parts = [p for number in group for p in _parts(number, xs, gradients, thresholds)]
        for copies, some in _launches(parts, size):
            for part, counts in zip(some, _launch(some, size, copies, own_bits, constants), strict=True):
                totals[part.number] += counts
        found |= {number: Histogram(total, own_bits, fmt.name, signed) for number, total in totals.items()}
    return [found[number] for number in range(len(xs))]


def _parts(
    number: int, xs: Sequence[Array], gradients: Sequence[Array | None], thresholds: Sequence[Thresholds] | None
) -> list[_Part]:
    x, gradient = xs[number], gradients[number]
    t = tensor(x).reshape(-1)
    g = t if gradient is None else tensor(gradient).reshape(-1)
    limits = (0, 0, 0, 0) if thresholds is None else threshold_patterns(x, thresholds[number], gradient)
    return [
        _Part(number, t[start : start + SLICE], g[start : start + SLICE], limits)
        for start in range(0, t.numel(), SLICE)
    ]


def _launches(parts: Sequence[_Part], size: int) -> Iterator[tuple[int, Sequence[_Part]]]:
    """Yield the number of counter copies and the parts that one launch counts.

    There is one copy if several copies would have more counters than there are elements.
    """
    most = max(1, min(COPIES, COPIED_COUNTERS // size))
    small = [p for p in parts if p.x.numel() < most * size]
    large = [p for p in parts if p.x.numel() >= most * size]
    for copies, some in ((1, small), (most, large)):
        step = max(1, COUNTERS // (copies * size))
        for start in range(0, len(some), step):
            yield copies, some[start : start + step]


def _launch(
    parts: Sequence[_Part], size: int, copies: int, bits: int, constants: dict[str, Any]
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Launch the counting of some parts; return their counters on the host.

    A slice's counts fit int32.
    """
    first = parts[0]
    longest = max(p.x.numel() for p in parts)
    table, programs = _table(parts, longest)
    counts = torch.zeros((len(parts), copies, size), dtype=torch.int32, device=first.x.device)
    inputs = first.x, first.gradient, on_device(table, first.x), len(parts), size, copies, bits
    run(count_kernel, programs, *inputs, counts, FIELDS=FIELDS, **constants, **COUNT.constants(longest))
    summed = counts[:, 0] if copies == 1 else counts.sum(1, dtype=torch.int32)
    result: np.ndarray[Any, np.dtype[np.int32]] = to_cpu(summed).numpy()
    return result


def _table(parts: Sequence[_Part], longest: int) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    """Table with one row per part, and the total number of programs.

    A row holds: first program, number of elements, distances of x and gradient from those of the first part in
    elements, thresholds.
    """
    table = np.zeros((len(parts), FIELDS), dtype=np.int64)
    programs = 0
    for row, part in zip(table, parts, strict=True):
        places = (
            (mine.data_ptr() - origin.data_ptr()) // mine.element_size()
            for mine, origin in ((part.x, parts[0].x), (part.gradient, parts[0].gradient))
        )
        row[:] = programs, part.x.numel(), *places, *part.limits
        programs += -(-part.x.numel() // (COUNT.repeats * COUNT.size(longest)))
    return table, programs


def threshold_patterns(x: Array, thresholds: Thresholds, gradient: Array | None) -> tuple[int, int, int, int]:
    """Thresholds as the bit patterns that kernels compare with.

    The order is protect, prune, protect_sensitivity, prune_sensitivity.
    """
    own = FORMATS[dtype_name(x)]
    protect, prune = (threshold_bits(v, own) for v in (thresholds.protect_magnitude, thresholds.prune_magnitude))
    if gradient is None:
        return protect, prune, 0, 0
    product = FORMATS[product_format(x, gradient)]
    protect_product = threshold_bits(thresholds.protect_sensitivity, product)
    return protect, prune, protect_product, threshold_bits(thresholds.prune_sensitivity, product)
