"""Levels of a tensor and back on the GPU: comparisons with pivots, then bisection."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import Array, dtype_name
from ..backend.floats import FORMATS
from ..backend.gpu import (
    Launch,
    bit_view,
    elements,
    like,
    magnitude_bits,
    on_device,
    pattern_of,
    product_magnitude,
    special_levels,
    tensor,
    widened,
)
from ..errors import CorruptDataError
from ..histogram.gpu import threshold_patterns
from . import Thresholds, boundaries, product_format

ASSIGN = Launch(block=2048, warps=8, registers=128)
VALUES = Launch(block=4096, warps=8)
SEARCHES = (4, 6, 8)
"""Compiled numbers of steps of the boundary search: for up to 16, 64 and 256 codes."""
PIVOTS = 4
"""First steps of the search, which compare with 15 pivots that all elements share instead of looking up boundaries."""


@triton.jit
def assign_kernel(
    x_ptr,
    gradient_ptr,
    boundaries_ptr,
    n: tl.int64,
    protect: tl.int64,
    prune: tl.int64,
    protect_sensitivity: tl.int64,
    prune_sensitivity: tl.int64,
    levels_ptr,
    WIDTH: tl.constexpr,
    GRADIENT: tl.constexpr,
    DOUBLE: tl.constexpr,
    STEPS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Level of each element: its place among pivots, then bisection between two of them.

    `boundaries` has `2**STEPS - 1` ascending entries, the unused ones infinite.
    """
    offsets, inside = elements(n, BLOCK)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
    code = tl.zeros((BLOCK,), tl.int32)
    if STEPS > 0:
        value = widened(x, WIDTH == 64)
        apart: tl.constexpr = 1 << (STEPS - PIVOTS)
        for pivot in tl.static_range((1 << PIVOTS) - 1):
            code += (tl.load(boundaries_ptr + (apart * (pivot + 1) - 1)) <= value).to(tl.int32)
        code *= apart
        for step in tl.static_range(STEPS - PIVOTS):
            ahead = 1 << (STEPS - PIVOTS - 1 - step)
            # code + ahead boundaries are at or below x exactly if the last of them is.
            last = tl.load(boundaries_ptr + (code + (ahead - 1)))
            code = tl.where(last <= value, code + ahead, code)
    # The search comes first: flags that are held during it would be moved to the stack.
    magnitude = magnitude_bits(pattern_of(x), WIDTH)
    sensitivity = None
    if GRADIENT:
        sensitivity = product_magnitude(x, tl.load(gradient_ptr + offsets, mask=inside, other=0.0), DOUBLE)
    protected, pruned = special_levels(magnitude, sensitivity, protect, prune, protect_sensitivity, prune_sensitivity)
    other = code + 2 if STEPS > 0 else code + 1  # an empty codebook: elements not pruned are protected
    level = tl.where(protected, 1, tl.where(pruned, 0, other))
    tl.store(levels_ptr + offsets, level.to(tl.uint8), mask=inside)


def assign(x: Array, thresholds: Thresholds, codebook: Array, *, gradient: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.quantizer.assign`; the codebook comes as float64 on the host."""
    t = tensor(x)
    g = t if gradient is None else tensor(gradient)
    fmt = FORMATS[dtype_name(x)]
    codes = int(codebook.shape[0])
    steps = next(s for s in SEARCHES if codes <= 1 << s) if codes else -1
    edges = np.full(max((1 << max(steps, 0)) - 1, 1), np.inf, np.float64 if fmt.width == 64 else np.float32)
    edges[: max(codes - 1, 0)] = boundaries(codebook, fmt.name)
    levels = torch.empty(t.shape, dtype=torch.uint8, device=t.device)
    inputs = t, g, on_device(edges, t), t.numel(), *threshold_patterns(x, thresholds, gradient)
    double = gradient is not None and product_format(x, gradient) == "float64"
    constants = {"WIDTH": fmt.width, "GRADIENT": gradient is not None, "DOUBLE": double}
    ASSIGN.run(assign_kernel, t.numel(), *inputs, levels, **constants, STEPS=steps, PIVOTS=PIVOTS)
    return like(levels, x)


@triton.jit
def protected_kernel(levels_ptr, n: tl.int64, counts_ptr, highest_ptr, BLOCK: tl.constexpr):
    """Count the protected elements and find the highest level of each block."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    level = tl.load(levels_ptr + offsets, mask=offsets < n, other=0).to(tl.int32)
    tl.store(counts_ptr + block, tl.sum((level == 1).to(tl.int32), axis=0))
    tl.store(highest_ptr + block, tl.max(level, axis=0))


@triton.jit
def values_kernel(
    levels_ptr,
    table_ptr,
    protected_ptr,
    before_ptr,
    n: tl.int64,
    values_ptr,
    PROTECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Look up the value of each level; protected values come in flat order.

    The table has the two special levels, then the codebook.

    `before` holds, for each block of BLOCK elements, the number of protected elements up to and including it.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    level = tl.load(levels_ptr + offsets, mask=inside, other=0).to(tl.int32)
    value = tl.load(table_ptr + level)
    if PROTECTED:
        is_protected = (level == 1) & inside
        one = is_protected.to(tl.int32)
        rank = tl.cumsum(one, axis=0) - one
        before = tl.load(before_ptr + block) - tl.sum(one, axis=0)
        value = tl.where(is_protected, tl.load(protected_ptr + (before + rank), mask=is_protected, other=0), value)
    tl.store(values_ptr + offsets, value, mask=inside)


def dequantize(levels: Array, codebook: Array, *, protected: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.quantizer.dequantize`."""
    t, codes = tensor(levels), tensor(codebook)
    exact = codes[:0] if protected is None else tensor(protected)
    values = torch.empty(t.shape, dtype=codes.dtype, device=t.device)
    before = _protected_before(t, codes.numel(), None if protected is None else exact.numel())
    # Values are moved as integers, never computed with, so NaNs keep payloads.
    table = bit_view(torch.cat([codes.new_zeros(2), codes]))
    own = bit_view(exact if exact.numel() else codes.new_zeros(1))
    inputs = t, table, own, before, t.numel()
    VALUES.run(values_kernel, t.numel(), *inputs, bit_view(values), PROTECTED=exact.numel() > 0)
    return like(values, codebook)


def _protected_before(levels: torch.Tensor, codes: int, protected: int | None) -> Any:
    """Number of protected elements up to and including each block, int64.

    Checks the levels, which waits for the device once.
    """
    blocks = VALUES.programs(levels.numel())
    counts, highest = (torch.empty(blocks, dtype=torch.int32, device=levels.device) for _ in range(2))
    VALUES.run(protected_kernel, levels.numel(), levels, levels.numel(), counts, highest)
    before = counts.cumsum(0, dtype=torch.int64)
    found, top = torch.stack([before[-1], highest.max().to(torch.int64)]).tolist() if blocks else (0, 0)
    if top > codes + 1:
        raise CorruptDataError(f"levels hold {top}; with {codes} codes the highest is {codes + 1}")
    if protected is not None and found != protected:
        raise CorruptDataError(f"levels mark {found} protected elements; {protected} values are given")
    return before
