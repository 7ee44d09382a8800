"""Float split on the GPU: one pass for range and counts, one that moves nonzero elements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from ..float_split import MAX_OCTAVES, Octaves, check_counts
from .launch import Launch, like, on, tensor

if TYPE_CHECKING:
    from ..arrays import Array

SPLIT = Launch(block=2048, warps=8)
JOIN = Launch(block=4096, warps=8)


@triton.jit
def distance_of(index, inside, buckets):
    """Signed bucket of each element, and whether it is nonzero and whether it is finite."""
    finite = (index >= 0) & (index <= 2 * buckets)
    distance = tl.where(finite, index - buckets, 0)
    return distance, inside & (distance != 0), inside & (finite == 0)


@triton.jit
def range_kernel(index_ptr, n: tl.int64, blocks: tl.int64, buckets: tl.int32, found_ptr, BLOCK: tl.constexpr):
    """Range and counts of each block.

    Four rows: nonzero elements, not finite elements, least and greatest magnitude of the nonzero ones.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    index = tl.load(index_ptr + offsets, mask=inside, other=0)
    distance, some, odd = distance_of(index, inside, buckets)
    j = tl.abs(distance)
    tl.store(found_ptr + block, tl.sum(some.to(tl.int32), axis=0))
    tl.store(found_ptr + blocks + block, tl.sum(odd.to(tl.int32), axis=0))
    tl.store(found_ptr + 2 * blocks + block, tl.min(tl.where(some, j, buckets + 1), axis=0))
    tl.store(found_ptr + 3 * blocks + block, tl.max(tl.where(some, j, 0), axis=0))


@triton.jit(do_not_specialize_on_alignment=["index_ptr", "symbols_ptr"])
def split_kernel(
    index_ptr,
    ends_ptr,
    found_ptr,
    n: tl.int64,
    blocks: tl.int64,
    nonzero: tl.int64,
    bits: tl.int32,
    buckets: tl.int32,
    low: tl.int32,
    symbols_ptr,
    streams_ptr,
    odd_ptr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write symbols of all elements, and signs and fractions of the nonzero ones in order.

    Positions of infinities and NaNs are written too.

    `streams` has a row of signs and PLANES rows of fractions. `ends` holds the cumulative sums of the first rows of
    `found`, up to and including each block. Elements are loaded and stored one by one: with wide loads and stores the
    compiler moves every address of the streams through shared memory and needs twice the registers.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    index = tl.load(index_ptr + offsets, mask=inside, other=0)
    distance, some, odd = distance_of(index, inside, buckets)
    m = tl.abs(distance) - 1
    symbol = tl.where(some, (m >> bits) - low + 1, 0)
    tl.store(symbols_ptr + offsets, symbol.to(tl.uint8), mask=inside)
    one = some.to(tl.int32)
    place = tl.load(ends_ptr + block) - tl.load(found_ptr + block) + (tl.cumsum(one, axis=0) - one)
    tl.store(streams_ptr + place, (distance < 0).to(tl.uint8), mask=some)
    fraction = m & ((1 << bits) - 1)
    for p in tl.static_range(PLANES):
        tl.store(streams_ptr + (p + 1) * nonzero + place, ((fraction >> (8 * p)) & 255).to(tl.uint8), mask=some)
    count = tl.load(found_ptr + blocks + block)
    if count > 0:
        one = odd.to(tl.int32)
        place = tl.load(ends_ptr + blocks + block) - count + (tl.cumsum(one, axis=0) - one)
        tl.store(odd_ptr + place, offsets, mask=odd)


def split_octaves(index: Array, bits: int, buckets: int) -> Octaves | None:
    """See `shrinkpoint.kernels.float_split.split_octaves`.

    Waits for the device for the counts and for the streams.
    """
    t = tensor(index)
    n, blocks, planes = t.numel(), SPLIT.programs(t.numel()), (bits + 7) // 8
    if n == 0:
        nothing = np.empty(0, np.uint8)
        return Octaves(0, 0, nothing, nothing, nothing.reshape(planes, 0), np.empty(0, np.int64))
    found = torch.empty((4, blocks), dtype=torch.int32, device=t.device)
    with on(t):
        range_kernel[(blocks,)](
            # inputs
            t,
            n,
            blocks,
            buckets,
            # outputs
            found,
            # constants
            **SPLIT.constants(n),
        )
    ends = found[:2].cumsum(1, dtype=torch.int64)
    numbers = torch.stack([*ends[:, -1], found[2].min().to(torch.int64), found[3].max().to(torch.int64)])
    nonzero, not_finite, smallest, largest = numbers.tolist()
    low, high = ((smallest - 1) >> bits, (largest - 1) >> bits) if nonzero else (0, 0)
    if high - low >= MAX_OCTAVES:
        return None
    symbols = torch.empty(n, dtype=torch.uint8, device=t.device)
    streams = torch.empty((1 + planes, nonzero), dtype=torch.uint8, device=t.device)
    odd = torch.empty(not_finite, dtype=torch.int64, device=t.device)
    with on(t):
        split_kernel[(blocks,)](
            # inputs
            t,
            ends,
            found,
            n,
            blocks,
            nonzero,
            bits,
            buckets,
            low,
            # outputs
            symbols,
            streams,
            odd,
            # constants
            PLANES=planes,
            **SPLIT.constants(n),
        )
    parts = streams.cpu().numpy()
    return Octaves(low, high, symbols.cpu().numpy(), parts[0], parts[1:], odd.cpu().numpy())


@triton.jit
def count_kernel(symbols_ptr, n: tl.int64, counts_ptr, BLOCK: tl.constexpr):
    """Nonzero symbols of each block."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    symbol = tl.load(symbols_ptr + offsets, mask=offsets < n, other=0)
    tl.store(counts_ptr + block, tl.sum((symbol > 0).to(tl.int32), axis=0))


@triton.jit
def join_kernel(
    symbols_ptr,
    negative_ptr,
    fraction_ptr,
    ends_ptr,
    counts_ptr,
    n: tl.int64,
    nonzero: tl.int64,
    bits: tl.int32,
    buckets: tl.int32,
    low: tl.int32,
    index_ptr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join the parts: each nonzero symbol takes the next sign and fraction."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    symbol = tl.load(symbols_ptr + offsets, mask=inside, other=0).to(tl.int32)
    some = symbol > 0
    one = some.to(tl.int32)
    place = tl.load(ends_ptr + block) - tl.load(counts_ptr + block) + (tl.cumsum(one, axis=0) - one)
    j = ((symbol + (low - 1)) << bits) + 1
    for p in tl.static_range(PLANES):
        j += tl.load(fraction_ptr + p * nonzero + place, mask=some, other=0).to(tl.int32) << (8 * p)
    negative = tl.load(negative_ptr + place, mask=some, other=0) > 0
    distance = tl.where(some, tl.where(negative, -j, j), 0)
    tl.store(index_ptr + offsets, buckets + distance, mask=inside)


def join_octaves(octaves: Octaves, bits: int, buckets: int) -> Array:
    """See `shrinkpoint.kernels.float_split.join_octaves`."""
    symbols, negative, fraction = (tensor(s) for s in (octaves.symbols, octaves.negative, octaves.fraction))
    n, blocks = symbols.numel(), JOIN.programs(symbols.numel())
    index = torch.empty(n, dtype=torch.int32, device=symbols.device)
    counts = torch.empty(blocks, dtype=torch.int32, device=symbols.device)
    if n:
        with on(symbols):
            count_kernel[(blocks,)](
                # inputs
                symbols,
                n,
                # outputs
                counts,
                # constants
                **JOIN.constants(n),
            )
    ends = counts.cumsum(0, dtype=torch.int64)
    nonzero = int(ends[-1]) if n else 0
    check_counts(octaves, nonzero)
    if n:
        with on(symbols):
            join_kernel[(blocks,)](
                # inputs
                symbols,
                negative,
                fraction,
                ends,
                counts,
                n,
                nonzero,
                bits,
                buckets,
                octaves.low,
                # outputs
                index,
                # constants
                PLANES=fraction.shape[0],
                **JOIN.constants(n),
            )
    return like(index, octaves.symbols)
