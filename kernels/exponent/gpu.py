"""Exponent buckets on the GPU: counts per program, extremes by rarely executed atomics."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import Array, dtype_name
from ..backend.floats import format_named
from ..backend.gpu import (
    INTEGERS,
    Launch,
    bit_view,
    elements,
    like,
    magnitude_bits,
    on_device,
    pattern_of,
    tensor,
    widened,
)
from ..planes.gpu import UNSIGNED
from . import Buckets, Promotion, unknown_level

COUNT = Launch(block=1024, warps=4, rounds=8)
LOOK_UP = Launch(block=2048, warps=8)
ADD = Launch(block=2048, warps=8, registers=255)
COPIES = 16
"""Number of copies of the tables, which programs use in turn."""
SLICE = 1 << 30
"""Elements per launch: no 32-bit counter can overflow."""


@triton.jit
def narrowed(x, WIDTH: tl.constexpr, M: tl.constexpr):
    """The pattern of the number of a format that is nearest to x, halves to even; x is not NaN."""
    if WIDTH > 16:
        pattern = pattern_of(x)
    elif M == 7:
        bits = x.to(tl.int32, bitcast=True)
        pattern = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    else:
        pattern = x.to(tl.float16).to(tl.int16, bitcast=True)
    return pattern


@triton.jit
def differences_kernel(
    current_ptr, previous_ptr, n: tl.int64, out_ptr, WIDTH: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr
):
    """Patterns of current - previous in a format of this width; infinity for NaN."""
    offsets, inside = elements(n, BLOCK)
    x = widened(tl.load(current_ptr + offsets, mask=inside, other=0), False)
    y = widened(tl.load(previous_ptr + offsets, mask=inside, other=0), False)
    step = x - y
    infinity: tl.constexpr = ((1 << (WIDTH - 1 - M)) - 1) << M
    pattern = tl.where(step == step, narrowed(step, WIDTH, M), infinity)
    tl.store(out_ptr + offsets, pattern.to(out_ptr.dtype.element_ty), mask=inside)


def exponent_differences(current: Array, previous: Array) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_differences`."""
    x, y = tensor(current), tensor(previous)
    out = torch.empty(x.shape, dtype=torch.float32 if x.dtype == torch.float16 else x.dtype, device=x.device)
    fmt = format_named(dtype_name(out))
    LOOK_UP.run(differences_kernel, x.numel(), x, y, x.numel(), bit_view(out), WIDTH=fmt.width, M=fmt.mantissa)
    return like(out, current)


@triton.jit
def bucket_number(pattern, WIDTH: tl.constexpr, M: tl.constexpr):
    """Bucket number `sign * E + field`: the pattern shifted right past its mantissa."""
    return (pattern >> M).to(tl.int32) & ((1 << (WIDTH - M)) - 1)


@triton.jit
def extremes_kernel(
    patterns_ptr,
    n: tl.int64,
    copies: tl.int32,
    counts_ptr,
    lowest_ptr,
    highest_ptr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the elements of each bucket and find their extremes, in one copy of the tables.

    The last bucket is for zeros. A program counts ROUNDS blocks.
    """
    program = tl.program_id(0)
    first = program.to(tl.int64) * (BLOCK * ROUNDS)
    lanes = tl.arange(0, BLOCK)
    buckets: tl.constexpr = 1 << (WIDTH - M)
    table = (program % copies).to(tl.int64) * (buckets + 1)
    zeros = tl.zeros((BLOCK,), tl.int32)
    if buckets <= 512:
        counted = tl.zeros((buckets,), tl.int32)
    for start in range(first, tl.minimum(first + BLOCK * ROUNDS, n), BLOCK):
        offsets = start + lanes
        inside = offsets < n
        pattern = tl.load(patterns_ptr + offsets, mask=inside, other=0)
        magnitude = magnitude_bits(pattern, WIDTH)
        bucket = bucket_number(pattern, WIDTH, M)
        zeros += (inside & (magnitude == 0)).to(tl.int32)
        some = inside & (magnitude != 0)
        if buckets <= 512:
            counted += tl.histogram(bucket, buckets, mask=some)
        else:  # a histogram per program would cost more than the atomics that it saves
            tl.atomic_add(counts_ptr + table + bucket, 1, mask=some, sem="relaxed")
        # Almost no element has to update an extreme. The first-level cache would keep outdated ones.
        low_ptr = lowest_ptr + table + bucket
        high_ptr = highest_ptr + table + bucket
        lower = some & (magnitude < tl.load(low_ptr, mask=some, other=0, cache_modifier=".cg"))
        higher = some & (magnitude > tl.load(high_ptr, mask=some, other=0, cache_modifier=".cg"))
        tl.atomic_min(low_ptr, magnitude, mask=lower, sem="relaxed")
        tl.atomic_max(high_ptr, magnitude, mask=higher, sem="relaxed")
    total = tl.sum(zeros, axis=0)
    tl.atomic_add(counts_ptr + table + buckets, total, mask=total > 0, sem="relaxed")
    if buckets <= 512:
        tl.atomic_add(counts_ptr + table + tl.arange(0, buckets), counted, mask=counted > 0, sem="relaxed")


def exponent_buckets(x: Array) -> Buckets:
    """See `shrinkpoint.kernels.exponent.exponent_buckets`."""
    fmt = format_named(dtype_name(x))
    t = bit_view(tensor(x))
    fields = 1 << fmt.exponent
    magnitude = torch.int64 if fmt.width == 64 else torch.int32
    copies = max(1, min(COPIES, COUNT.programs(t.numel())))
    totals = torch.zeros(2 * fields + 1, dtype=torch.int64, device=t.device)
    lowest = torch.full((copies, 2 * fields + 1), torch.iinfo(magnitude).max, dtype=magnitude, device=t.device)
    highest = torch.zeros((copies, 2 * fields + 1), dtype=magnitude, device=t.device)
    for start in range(0, t.numel(), SLICE):
        part = t[start : start + SLICE]
        counts = torch.zeros((copies, 2 * fields + 1), dtype=torch.int32, device=t.device)
        n, tables = part.numel(), (counts, lowest, highest)
        COUNT.run(extremes_kernel, n, part, n, copies, *tables, WIDTH=fmt.width, M=fmt.mantissa)
        totals += counts.sum(0)
    lows = torch.where(totals > 0, lowest.amin(0).to(torch.int64), 0)
    host = torch.stack([totals, lows, highest.amax(0).to(torch.int64)]).cpu().numpy()
    count, low, high = (np.ascontiguousarray(row[:-1].reshape(2, fields)) for row in host)
    return Buckets(count, low, high, int(host[0, -1]), fmt.name)


@triton.jit
def quantize_kernel(
    patterns_ptr, table_ptr, n: tl.int64, levels_ptr, WIDTH: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr
):
    """Level of each pattern's bucket; 0 for zeros."""
    offsets, inside = elements(n, BLOCK)
    pattern = tl.load(patterns_ptr + offsets, mask=inside, other=0)
    level = tl.load(table_ptr + bucket_number(pattern, WIDTH, M))
    level = tl.where(magnitude_bits(pattern, WIDTH) == 0, 0, level)
    tl.store(levels_ptr + offsets, level, mask=inside)


def exponent_quantize(x: Array, promotion: Promotion) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_quantize`."""
    fmt = format_named(promotion.format)
    t = tensor(x)
    n, table = t.numel(), on_device(promotion.table, t)
    levels = torch.empty(t.shape, dtype=table.dtype, device=t.device)
    LOOK_UP.run(quantize_kernel, n, bit_view(t), table, n, levels, WIDTH=fmt.width, M=fmt.mantissa)
    return like(levels, x)


@triton.jit
def look_up_kernel(levels_ptr, codebook_ptr, n: tl.int64, size: tl.int32, out_ptr, top_ptr, BLOCK: tl.constexpr):
    """Look up codebook[level]; `top` becomes the highest level without an entry."""
    offsets, inside = elements(n, BLOCK)
    level = tl.load(levels_ptr + offsets, mask=inside, other=0).to(tl.int32)
    tl.store(out_ptr + offsets, tl.load(codebook_ptr + level, mask=level < size, other=0), mask=inside)
    top = tl.max(level, axis=0)
    tl.atomic_max(top_ptr, top, mask=top >= size, sem="relaxed")


def exponent_dequantize(levels: Array, codebook: np.ndarray[Any, Any]) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_dequantize`."""
    t = tensor(levels)
    itemsize = codebook.dtype.itemsize
    patterns = on_device(codebook.view(f"int{8 * itemsize}"), t)
    out = torch.empty(t.shape, dtype=INTEGERS[itemsize], device=t.device)
    if t.numel():
        top = torch.zeros(1, dtype=torch.int32, device=t.device)
        LOOK_UP.run(look_up_kernel, t.numel(), t, patterns, t.numel(), codebook.size, out, top)
        found = int(top.item())
        if found >= codebook.size:
            raise unknown_level(found, codebook.size)
    return like(out.view(UNSIGNED[itemsize]), levels)


@triton.jit
def sums_kernel(
    previous_ptr,
    levels_ptr,
    codebook_ptr,
    n: tl.int64,
    size: tl.int32,
    out_ptr,
    top_ptr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Patterns of previous + codebook[level]; `top` becomes the highest level without an entry."""
    offsets, inside = elements(n, BLOCK)
    x = tl.load(previous_ptr + offsets, mask=inside, other=0)
    level = tl.load(levels_ptr + offsets, mask=inside, other=0).to(tl.int32)
    step = tl.load(codebook_ptr + level, mask=level < size, other=0)
    total = widened(x, False) + widened(step, False)
    infinity: tl.constexpr = ((1 << (WIDTH - 1 - M)) - 1) << M
    quiet: tl.constexpr = 1 << (M - 1)
    nan: tl.constexpr = (infinity | quiet) - (1 << (WIDTH - 1))
    old = pattern_of(x)
    new = tl.where(total == total, narrowed(total, WIDTH, M), nan)
    new = tl.where(magnitude_bits(old, WIDTH) > infinity, old | quiet, new)
    new = tl.where(level == 0, old, new)
    tl.store(out_ptr + offsets, new.to(out_ptr.dtype.element_ty), mask=inside)
    top = tl.max(level, axis=0)
    tl.atomic_max(top_ptr, top, mask=top >= size, sem="relaxed")


def exponent_sums(previous: Array, levels: Array, codebook: np.ndarray[Any, Any]) -> Array:
    """See `shrinkpoint.kernels.exponent.exponent_sums`."""
    fmt = format_named(dtype_name(previous))
    x, t = tensor(previous), tensor(levels)
    out = torch.empty_like(x)
    if x.numel():
        steps = torch.from_numpy(np.ascontiguousarray(codebook).view(f"int{fmt.width}")).to(x.device).view(x.dtype)
        top = torch.zeros(1, dtype=torch.int32, device=x.device)
        inputs = x, t, steps, x.numel(), codebook.size
        ADD.run(sums_kernel, x.numel(), *inputs, bit_view(out), top, WIDTH=fmt.width, M=fmt.mantissa)
        found = int(top.item())
        if found >= codebook.size:
            raise unknown_level(found, codebook.size)
    return like(out, previous)
