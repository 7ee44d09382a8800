"""Rate-distortion-optimised levels on the GPU: elementwise, float32, nothing fused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..errors import BadArgumentError
from .launch import Launch, like, on, tensor

if TYPE_CHECKING:
    from ..arrays import Array

CHOICES = Launch(block=1024, warps=4)


@triton.jit
def cost_of(values, candidate, p, inside, codebook_ptr, prices_ptr, width):
    """Squared error plus price of a candidate level."""
    d = values - tl.load(codebook_ptr + candidate - 2, mask=inside, other=0.0)
    return d * d + tl.load(prices_ptr + p * width + candidate, mask=inside, other=0.0)


@triton.jit
def choose_kernel(
    x_ptr,
    levels_ptr,
    previous_ptr,
    codebook_ptr,
    prices_ptr,
    n: tl.int64,
    top: tl.int32,
    out_ptr,
    BLOCK: tl.constexpr,
):
    """The cheapest of the nearest level, its neighbours and the previous level; levels 0 and 1 stay."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    level = tl.load(levels_ptr + offsets, mask=inside, other=0).to(tl.int32)
    p = tl.load(previous_ptr + offsets, mask=inside, other=0).to(tl.int32)
    quantized = inside & (level >= 2)
    values = tl.load(x_ptr + offsets, mask=quantized, other=0.0).to(tl.float32)
    width = top + 1
    own = tl.where(quantized, level, 2)
    below = tl.maximum(own - 1, 2)
    above = tl.minimum(own + 1, top)
    old = tl.where(p >= 2, tl.minimum(p, top), own)
    best = own
    least = cost_of(values, own, p, quantized, codebook_ptr, prices_ptr, width)
    cost = cost_of(values, below, p, quantized, codebook_ptr, prices_ptr, width)
    best = tl.where(cost < least, below, best)
    least = tl.where(cost < least, cost, least)
    cost = cost_of(values, above, p, quantized, codebook_ptr, prices_ptr, width)
    best = tl.where(cost < least, above, best)
    least = tl.where(cost < least, cost, least)
    cost = cost_of(values, old, p, quantized, codebook_ptr, prices_ptr, width)
    best = tl.where(cost < least, old, best)
    tl.store(out_ptr + offsets, tl.where(quantized, best, level).to(tl.uint8), mask=inside)


def rate_distortion_levels(
    x: Array, levels: Array, previous: Array, codebook: Array, prices: np.ndarray[Any, np.dtype[np.float32]]
) -> Array:
    """See `shrinkpoint.kernels.ratedistortion`."""
    t, own, before = tensor(x), tensor(levels), tensor(previous)
    out = torch.empty(t.shape, dtype=torch.uint8, device=t.device)
    if t.numel() == 0:
        return like(out, x)
    if int(own.max()) > codebook.size + 1 or int(before.max()) >= prices.shape[0]:
        raise BadArgumentError("a level is beyond the codebook, or a previous level beyond the prices")
    with on(t):
        choose_kernel[CHOICES.grid(t.numel())](
            # inputs
            t,
            own,
            before,
            torch.from_numpy(codebook).to(t.device),
            torch.from_numpy(np.ascontiguousarray(prices)).to(t.device),
            t.numel(),
            codebook.size + 1,
            # outputs
            out,
            # constants
            **CHOICES.constants(t.numel()),
        )
    return like(out, x)
