"""Rate-distortion levels on the GPU: four candidates, prices from small tables.

Extrapolation is two reads and a write, bound by memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import Launch, elements, like, on_device, single, tensor, widened
from ..errors import BadArgumentError
from . import Table

CHOOSE = Launch(block=1024, warps=4, registers=128)
SETTLE = Launch(block=1024, warps=4)


@triton.jit
def cost_of(candidate, value, weight, codebook_ptr, prices_ptr, row, usable):
    """Cost of a level: weight * (value - code)**2 + price, each operation rounded."""
    d = value - tl.load(codebook_ptr + (candidate - 2), mask=usable, other=0.0)
    square = weight * (d * d)
    return square + tl.load(prices_ptr + (row + candidate), mask=usable, other=0.0)


@triton.jit
def choose_kernel(
    x_ptr,
    levels_ptr,
    previous_ptr,
    codebook_ptr,
    prices_ptr,
    importance_ptr,
    n: tl.int64,
    top: tl.int32,
    contexts: tl.int32,
    out_ptr,
    outside_ptr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose the cheapest of nearest level, its neighbours and previous level.

    Of equal costs the first.
    """
    offsets, inside = elements(n, BLOCK)
    value = single(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    weight = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHTED:
        weight = tl.load(importance_ptr + offsets, mask=inside, other=0.0)
    nearest = tl.load(levels_ptr + offsets, mask=inside, other=0).to(tl.int32)
    before = tl.load(previous_ptr + offsets, mask=inside, other=0).to(tl.int32)
    known = (nearest <= top) & (before < contexts)
    usable = inside & known & (nearest >= 2)
    row = before * (top + 1)
    best = nearest
    least = cost_of(nearest, value, weight, codebook_ptr, prices_ptr, row, usable)
    candidate = tl.maximum(nearest - 1, 2)
    cost = cost_of(candidate, value, weight, codebook_ptr, prices_ptr, row, usable)
    best = tl.where(cost < least, candidate, best)
    least = tl.where(cost < least, cost, least)
    candidate = tl.minimum(nearest + 1, top)
    cost = cost_of(candidate, value, weight, codebook_ptr, prices_ptr, row, usable)
    best = tl.where(cost < least, candidate, best)
    least = tl.where(cost < least, cost, least)
    candidate = tl.where(before >= 2, tl.minimum(before, top), nearest)
    cost = cost_of(candidate, value, weight, codebook_ptr, prices_ptr, row, usable)
    best = tl.where(cost < least, candidate, best)
    tl.store(out_ptr + offsets, tl.where(usable, best, nearest).to(tl.uint8), mask=inside)
    outside = tl.max((inside & ~known).to(tl.int32), axis=0)
    tl.store(outside_ptr, 1, mask=outside > 0)  # every program writes the same value


def rate_distortion_levels(
    x: Array,
    levels: Array,
    previous: Array,
    codebook: Table,
    prices: Table,
    importance: Array | None = None,
) -> Array:
    """See `shrinkpoint.kernels.rate_distortion.rate_distortion_levels`."""
    t, own, before = tensor(x), tensor(levels), tensor(previous)
    out = torch.empty_like(own)
    outside = torch.zeros(1, dtype=torch.int32, device=t.device)
    weights = torch.empty(0, device=t.device) if importance is None else tensor(importance)
    inputs = t, own, before, on_device(codebook, t), on_device(prices, t), weights
    sizes = t.numel(), codebook.shape[0] + 1, prices.shape[0]
    CHOOSE.run(choose_kernel, t.numel(), *inputs, *sizes, out, outside, WEIGHTED=importance is not None)
    if outside.item():
        raise BadArgumentError("a level is beyond the codebook, or a previous level beyond the prices")
    return like(out, x)


@triton.jit
def unsettled_kernel(
    x_ptr,
    levels_ptr,
    previous_ptr,
    bounds_ptr,
    importance_ptr,
    n: tl.int64,
    width: tl.int32,
    contexts: tl.int32,
    open_ptr,
    outside_ptr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark elements outside their pair's bounds by 1, others by 0."""
    offsets, inside = elements(n, BLOCK)
    value = single(tl.load(x_ptr + offsets, mask=inside, other=0.0))
    level = tl.load(levels_ptr + offsets, mask=inside, other=0).to(tl.int32)
    before = tl.load(previous_ptr + offsets, mask=inside, other=0).to(tl.int32)
    known = (level < width) & (before < contexts)
    usable = inside & known
    pair = 4 * (before * width + level)
    below = value - tl.load(bounds_ptr + pair, mask=usable, other=0.0)
    above = tl.load(bounds_ptr + (pair + 2), mask=usable, other=0.0) - value
    if WEIGHTED:
        weight = tl.load(importance_ptr + offsets, mask=inside, other=0.0)
        below = weight * below
        above = weight * above
    passed = below < tl.load(bounds_ptr + (pair + 1), mask=usable, other=0.0)
    passed |= above < tl.load(bounds_ptr + (pair + 3), mask=usable, other=0.0)
    tl.store(open_ptr + offsets, passed.to(tl.uint8), mask=inside)
    outside = tl.max((inside & ~known).to(tl.int32), axis=0)
    tl.store(outside_ptr, 1, mask=outside > 0)  # every program writes the same value


def unsettled(
    x: Array, levels: Array, previous: Array, bounds: Table, importance: Array | None = None
) -> tuple[Array, Array, Array, Array, Array | None]:
    """See `shrinkpoint.kernels.rate_distortion.unsettled`."""
    t, own, before = tensor(x), tensor(levels), tensor(previous)
    weights = torch.empty(0, device=t.device) if importance is None else tensor(importance)
    unsure = torch.empty(t.shape, dtype=torch.uint8, device=t.device)
    outside = torch.zeros(1, dtype=torch.int32, device=t.device)
    inputs = t, own, before, on_device(bounds, t), weights, t.numel(), bounds.shape[1], bounds.shape[0]
    SETTLE.run(unsettled_kernel, t.numel(), *inputs, unsure, outside, WEIGHTED=importance is not None)
    if outside.item():
        raise BadArgumentError("a level or a previous level is beyond the bounds")
    at = torch.nonzero(unsure).reshape(-1)
    taken = [like(part, x) for part in (at, t[at].float(), own[at], before[at])]
    return taken[0], taken[1], taken[2], taken[3], None if importance is None else like(weights[at], x)


ELEMENTS = Launch(block=4096, warps=8)


@triton.jit
def extrapolate_kernel(
    x_ptr, earlier_ptr, n: tl.int64, factor: tl.float64, out_ptr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute x + (x - earlier) * factor, or x where that is not finite."""
    offsets, inside = elements(n, BLOCK)
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
    """See `shrinkpoint.kernels.rate_distortion.extrapolate`."""
    own, before = tensor(x), tensor(earlier)
    double = own.dtype == torch.float64
    out = torch.empty(own.shape, dtype=torch.float64 if double else torch.float32, device=own.device)
    ELEMENTS.run(extrapolate_kernel, own.numel(), own, before, own.numel(), factor, out, DOUBLE=double)
    return like(out, x)
