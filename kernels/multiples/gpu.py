"""Multiples of a step on the GPU; sums are added up in the order of NumPy, part by part."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import INTERPRETED, Launch, elements, like, on_device, run, tensor
from . import LANES, PART, halvings

SQUARES = Launch(block=32, warps=4)
"""In parts of at most 128 elements."""
ELEMENTS = Launch(block=1024, warps=8)


@triton.jit
def squares_kernel(
    x_ptr, starts_ptr, parts: tl.int64, sums_ptr, LANES: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum of squares of each part, and its largest magnitude.

    `starts` has one entry more than there are parts.
    """
    part = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = part < parts
    first = tl.load(starts_ptr + part, mask=exists, other=0)
    size = (tl.load(starts_ptr + part + 1, mask=exists, other=0) - first).to(tl.int32)
    whole = size // LANES * LANES
    lane = tl.arange(0, LANES)
    sums = tl.zeros((BLOCK, LANES), tl.float64)
    most = tl.zeros((BLOCK, LANES), tl.float64)
    for step in range(STEPS):
        place = step * LANES + lane
        inside = place[None, :] < whole[:, None]
        x = tl.load(x_ptr + (first[:, None] + place[None, :]), mask=inside, other=0.0).to(tl.float64)
        sums += x * x
        most = tl.maximum(most, tl.abs(x))
    largest = tl.max(most, axis=1)
    # Neighbours are added up, as tl.sum need not do.
    low, high = tl.split(tl.reshape(sums, (BLOCK, 4, 2)))
    low, high = tl.split(tl.reshape(low + high, (BLOCK, 2, 2)))
    low, high = tl.split(low + high)
    total = low + high
    for k in range(LANES - 1):
        x = tl.load(x_ptr + (first + whole + k), mask=whole + k < size, other=0.0).to(tl.float64)
        total += x * x
        largest = tl.maximum(largest, tl.abs(x))
    tl.store(sums_ptr + part, total, mask=exists)
    tl.store(sums_ptr + parts + part, largest, mask=exists)


def square_sum(x: Array) -> tuple[float, float]:
    """See `shrinkpoint.kernels.multiples.square_sum`."""
    t = tensor(x)
    if not t.numel():
        return 0.0, 0.0
    levels, sizes = halvings(t.numel())
    starts = on_device(np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)]), t)
    sums = torch.empty((2, sizes.size), dtype=torch.float64, device=t.device)
    block = min(SQUARES.size(t.numel()), 1 << 12) if INTERPRETED else SQUARES.block
    constants = {"LANES": LANES, "STEPS": PART // LANES, "BLOCK": block, **SQUARES.options}
    run(squares_kernel, -(-sizes.size // block), t, starts, sizes.size, sums, **constants)
    total = sums[0]
    for level in reversed(levels):
        halved = on_device(level, t)
        last = (1 + halved).cumsum(0) - 1
        total = torch.where(halved > 0, total[last - halved] + total[last], total[last])
    found, largest = torch.stack([total[0], sums[1].max()]).tolist()
    return found, largest


@triton.jit
def multiples_kernel(x_ptr, n: tl.int64, step: tl.float64, out_ptr, BLOCK: tl.constexpr):
    """Nearest multiple of each element; past 2**52 a float64 has no bits left for a fraction."""
    offsets, inside = elements(n, BLOCK)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float64)
    quotient = x / tl.full((1,), step, tl.float64)
    whole = (quotient + 6755399441055744.0) - 6755399441055744.0
    tl.store(out_ptr + offsets, whole.to(tl.int32).to(out_ptr.dtype.element_ty), mask=inside)


def step_multiples(x: Array, step: float, dtype: str) -> Array:
    """See `shrinkpoint.kernels.multiples.step_multiples`."""
    t = tensor(x)
    out = torch.empty(t.shape, dtype=getattr(torch, dtype), device=t.device)
    ELEMENTS.run(multiples_kernel, t.numel(), t, t.numel(), step, out)
    return like(out, x)


@triton.jit
def values_kernel(multiples_ptr, n: tl.int64, step: tl.float64, out_ptr, BLOCK: tl.constexpr):
    """Compute multiple * step in float64, rounded to the output's dtype."""
    offsets, inside = elements(n, BLOCK)
    multiple = tl.load(multiples_ptr + offsets, mask=inside, other=0).to(tl.float64)
    value = multiple * tl.full((1,), step, tl.float64)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=inside)


def step_values(multiples: Array, step: float, dtype: str) -> Array:
    """See `shrinkpoint.kernels.multiples.step_values`."""
    t = tensor(multiples)
    out = torch.empty(t.shape, dtype=getattr(torch, dtype), device=t.device)
    ELEMENTS.run(values_kernel, t.numel(), t, t.numel(), step, out)
    return like(out, multiples)
