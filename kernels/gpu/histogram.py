"""Log-bucket histograms on the GPU: integer atomics into several histograms, added up in 64 bits at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..arrays import dtype_name
from ..assign import magnitude_bits as threshold_bits
from ..floats import FORMATS
from ..histogram import Histogram, product_format, target
from .bits import bucket_of, magnitude_bits, pattern_of, product_magnitude, special_levels
from .launch import Launch, on, tensor

if TYPE_CHECKING:
    import numpy as np

    from ..arrays import Array
    from ..assign import Thresholds
    from ..floats import FloatFormat

COUNT = Launch(block=2048, warps=4, registers=168)
COPIES = 16
"""Histograms that programs take turns in: fewer of them wait for each other's update of a popular bucket."""
COPIED_COUNTERS = 1 << 20
"""Most counters in all copies together (4 MiB, which stay in the second-level cache)."""
SLICE = 1 << 30
"""Elements per launch: no 32-bit counter can overflow."""


# Element-wise loads keep one element a lane in the order that the atomics want; with 16-byte loads the compiler would
# move every address through shared memory.
@triton.jit(do_not_specialize_on_alignment=["x_ptr", "gradient_ptr"])
def count_kernel(
    x_ptr,
    gradient_ptr,
    n: tl.int64,
    size: tl.int32,
    copies: tl.int32,
    bits: tl.int32,
    protect: tl.int64,
    prune: tl.int64,
    protect_sensitivity: tl.int64,
    prune_sensitivity: tl.int64,
    counts_ptr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    SIGNED: tl.constexpr,
    PRODUCT: tl.constexpr,
    DOUBLE: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the log buckets of x, of |gradient * x| (PRODUCT), or of the x that keep a level (KEPT) to one copy."""
    program = tl.program_id(0)
    offsets = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    pattern = pattern_of(x)
    if PRODUCT:
        magnitude = product_magnitude(x, tl.load(gradient_ptr + offsets, mask=inside, other=0.0), DOUBLE)
    else:
        magnitude = magnitude_bits(pattern, WIDTH)
    if KEPT == 2:
        sensitivity = product_magnitude(x, tl.load(gradient_ptr + offsets, mask=inside, other=0.0), DOUBLE)
        protected, pruned = special_levels(
            magnitude, sensitivity, protect, prune, protect_sensitivity, prune_sensitivity
        )
        inside = inside & ~(protected | pruned)
    elif KEPT == 1:
        protected, pruned = special_levels(magnitude, None, protect, prune, protect_sensitivity, prune_sensitivity)
        inside = inside & ~(protected | pruned)
    index = bucket_of(magnitude, bits, WIDTH, M)
    zero = 0
    if SIGNED:
        half = (size - 2) // 2
        zero = half
        index = tl.where(index > half, size - 1, tl.where(pattern < 0, half - index, half + index))
    copy_ptr = counts_ptr + (program % copies).to(tl.int64) * size
    tl.atomic_add(copy_ptr + index, 1, mask=inside & (magnitude != 0), sem="relaxed")
    # Zeros are often most of a tensor and would all wait for the same counter: one update for all of them.
    zeros = tl.sum((inside & (magnitude == 0)).to(tl.int32), axis=0)
    tl.atomic_add(copy_ptr + zero, zeros, mask=zeros > 0, sem="relaxed")


def log_histogram(x: Array, bits: int, *, signed: bool = False, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.log_histogram`."""
    fmt, bits = target(x, gradient, bits)
    counts = _count(x, gradient, fmt, bits, signed=signed, product=gradient is not None)
    return Histogram(counts, bits, fmt.name, signed)


def kept_histogram(x: Array, thresholds: Thresholds, bits: int, *, gradient: Array | None = None) -> Histogram:
    """See `shrinkpoint.kernels.histogram.kept_histogram`."""
    fmt, bits = target(x, None, bits)
    return Histogram(_count(x, gradient, fmt, bits, signed=True, thresholds=thresholds), bits, fmt.name, signed=True)


def _count(
    x: Array,
    gradient: Array | None,
    fmt: FloatFormat,
    bits: int,
    *,
    signed: bool,
    product: bool = False,
    thresholds: Thresholds | None = None,
) -> np.ndarray[Any, np.dtype[np.int64]]:
    t = tensor(x).reshape(-1)
    g = t if gradient is None else tensor(gradient).reshape(-1)
    size = (2 if signed else 1) * fmt.buckets(bits) + 2
    limits = (0, 0, 0, 0) if thresholds is None else threshold_patterns(x, thresholds, gradient)
    kept = 0 if thresholds is None else 1 if gradient is None else 2
    totals = torch.zeros(size, dtype=torch.int64, device=t.device)
    for start in range(0, t.numel(), SLICE):
        part, g_part = t[start : start + SLICE], g[start : start + SLICE]
        programs = COUNT.programs(part.numel())
        copies = max(1, min(COPIES, programs, COPIED_COUNTERS // size))
        counts = torch.zeros((copies, size), dtype=torch.int32, device=t.device)
        with on(t):
            count_kernel[(programs,)](
                # inputs
                part,
                g_part,
                part.numel(),
                size,
                copies,
                bits,
                *limits,
                # outputs
                counts,
                # constants
                WIDTH=fmt.width,
                M=fmt.mantissa,
                SIGNED=signed,
                PRODUCT=product,
                DOUBLE=gradient is not None and product_format(x, gradient) == "float64",
                KEPT=kept,
                **COUNT.constants(part.numel()),
            )
        totals += counts.sum(0)
    result: np.ndarray[Any, np.dtype[np.int64]] = totals.cpu().numpy()
    return result


def threshold_patterns(x: Array, thresholds: Thresholds, gradient: Array | None) -> tuple[int, int, int, int]:
    """protect, prune, protect_sensitivity, prune_sensitivity as the bit patterns that kernels compare with."""
    own = FORMATS[dtype_name(x)]
    protect, prune = (threshold_bits(v, own) for v in (thresholds.protect_magnitude, thresholds.prune_magnitude))
    if gradient is None:
        return protect, prune, 0, 0
    product = FORMATS[product_format(x, gradient)]
    protect_product = threshold_bits(thresholds.protect_sensitivity, product)
    return protect, prune, protect_product, threshold_bits(thresholds.prune_sensitivity, product)
