"""Extrapolation on the GPU: two reads and a write, bound by memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .bits import single, widened
from .launch import Launch, like, on, tensor

if TYPE_CHECKING:
    from ..arrays import Array

ELEMENTS = Launch(block=4096, warps=8)


@triton.jit
def extrapolate_kernel(
    x_ptr, earlier_ptr, n: tl.int64, factor: tl.float64, out_ptr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute x + (x - earlier) * factor, or x where that is not finite."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    x = widened(tl.load(x_ptr + offsets, mask=inside, other=0.0), DOUBLE)
    earlier = tl.load(earlier_ptr + offsets, mask=inside, other=0.0)
    if DOUBLE:
        way = x - widened(earlier, True)
    else:
        way = x - single(earlier)
    far = x + way * tl.full((1,), factor, x.dtype)
    stays = tl.where(x == x, x, float("nan"))
    tl.store(out_ptr + offsets, tl.where(tl.abs(far) < float("inf"), far, stays), mask=inside)


def extrapolate(x: Array, earlier: Array, factor: float) -> Array:
    """See `shrinkpoint.kernels.extrapolation.extrapolate`."""
    own, before = tensor(x), tensor(earlier)
    double = own.dtype == torch.float64
    out = torch.empty(own.shape, dtype=torch.float64 if double else torch.float32, device=own.device)
    if own.numel():
        with on(own):
            extrapolate_kernel[ELEMENTS.grid(own.numel())](
                # inputs
                own,
                before,
                own.numel(),
                factor,
                # outputs
                out,
                # constants
                DOUBLE=double,
                **ELEMENTS.constants(own.numel()),
            )
    return like(out, x)
