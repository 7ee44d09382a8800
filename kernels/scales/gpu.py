"""Octaves and rank-one estimates on the GPU; the estimate is computed, never stored."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import Array, to_cpu
from ..backend.gpu import Launch, elements, like, on_device, rounded, tables, tally, tensor, totals
from . import FARTHEST, FIRST, MAX_OCTAVES, SCALE, Factors, Octaves, Shapes, cell_centers, check_counts

SPLIT = Launch(block=2048, warps=8)
JOIN = Launch(block=2048, warps=4)


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
    offsets, inside = elements(n, BLOCK)
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
    offsets, inside = elements(n, BLOCK)
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
    """See `shrinkpoint.kernels.scales.split_octaves`.

    Waits for the device for the counts and for the streams.
    """
    t = tensor(index)
    n, blocks, planes = t.numel(), SPLIT.programs(t.numel()), (bits + 7) // 8
    if n == 0:
        nothing = np.empty(0, np.uint8)
        return Octaves(0, 0, nothing, nothing, nothing.reshape(planes, 0), np.empty(0, np.int64))
    found = torch.empty((4, blocks), dtype=torch.int32, device=t.device)
    SPLIT.run(range_kernel, n, t, n, blocks, buckets, found)
    ends = found[:2].cumsum(1, dtype=torch.int64)
    numbers = torch.stack([*ends[:, -1], found[2].min().to(torch.int64), found[3].max().to(torch.int64)])
    nonzero, not_finite, smallest, largest = numbers.tolist()
    low, high = ((smallest - 1) >> bits, (largest - 1) >> bits) if nonzero else (0, 0)
    if high - low >= MAX_OCTAVES:
        return None
    symbols = torch.empty(n, dtype=torch.uint8, device=t.device)
    streams = torch.empty((1 + planes, nonzero), dtype=torch.uint8, device=t.device)
    odd = torch.empty(not_finite, dtype=torch.int64, device=t.device)
    inputs = t, ends, found, n, blocks, nonzero, bits, buckets, low
    SPLIT.run(split_kernel, n, *inputs, symbols, streams, odd, PLANES=planes)
    parts = to_cpu(streams).numpy()
    return Octaves(low, high, to_cpu(symbols).numpy(), parts[0], parts[1:], to_cpu(odd).numpy())


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
    offsets, inside = elements(n, BLOCK)
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
    """See `shrinkpoint.kernels.scales.join_octaves`."""
    symbols, negative, fraction = (tensor(s) for s in (octaves.symbols, octaves.negative, octaves.fraction))
    n, blocks = symbols.numel(), JOIN.programs(symbols.numel())
    index = torch.empty(n, dtype=torch.int32, device=symbols.device)
    counts = torch.empty(blocks, dtype=torch.int32, device=symbols.device)
    JOIN.run(count_kernel, n, symbols, n, counts)
    ends = counts.cumsum(0, dtype=torch.int64)
    nonzero = int(ends[-1]) if n else 0
    check_counts(octaves, nonzero)
    inputs = symbols, negative, fraction, ends, counts, n, nonzero, bits, buckets, octaves.low
    JOIN.run(join_kernel, n, *inputs, index, PLANES=fraction.shape[0])
    return like(index, octaves.symbols)


SYMBOLS = Launch(block=2048, warps=4, registers=255, rounds=32)
VALUES = Launch(block=4096, warps=8)
NARROW = 1 << 30
"""Maximum number of columns for which positions in a row, plus a block, fit 32 bits."""


@triton.jit
def estimate_of(rows_ptr, columns_ptr, start, columns, inside, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Estimates rows[i] * columns[j] of BLOCK matrix elements from `start` on, in C order."""
    row = start // columns
    across = start - row * columns + tl.arange(0, BLOCK)
    if not WIDE:  # one 64-bit division per program; those per element are 32-bit
        across = across.to(tl.int32)
        columns = columns.to(tl.int32)
    down = across // columns
    r = tl.load(rows_ptr + (row + down), mask=inside, other=0.0)
    return r * tl.load(columns_ptr + (across - down * columns), mask=inside, other=0.0)


def factor_sums(x: Array, columns: int) -> tuple[Any, Any]:
    """See `shrinkpoint.kernels.scales.factor_sums`."""
    part = tensor(x).reshape(-1, columns)
    by_row = part.sum(dim=1, dtype=torch.float64)
    if not bool(by_row.isfinite().all()):
        part = torch.where(part.isfinite(), part, 0.0)
        by_row = part.sum(dim=1, dtype=torch.float64)
    return to_cpu(by_row).numpy(), to_cpu(part.sum(dim=0, dtype=torch.float64)).numpy()


@triton.jit
def symbols_kernel(
    x_ptr,
    rows_ptr,
    columns_ptr,
    n: tl.int64,
    start: tl.int64,
    columns: tl.int64,
    eighths: tl.int32,
    centers_ptr,
    previous_ptr,
    symbols_ptr,
    counts_ptr,
    sums_ptr,
    FIRST: tl.constexpr,
    FARTHEST: tl.constexpr,
    SCALE: tl.constexpr,
    SETTLED: tl.constexpr,
    WIDE: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Symbol of each element, with counts and sums by symbol of ROUNDS blocks per program."""
    program = tl.program_id(0).to(tl.int64)
    first = program * (BLOCK * ROUNDS)
    counts = tl.zeros((256,), tl.int32)
    sums = tl.zeros((256,), tl.float64)
    for begin in range(first, tl.minimum(first + BLOCK * ROUNDS, n), BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        inside = offsets < n
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0)
        estimate = estimate_of(rows_ptr, columns_ptr, start + begin, columns, inside, WIDE, BLOCK)
        key = x.to(tl.int32, bitcast=True)
        base = estimate.to(tl.int32, bitcast=True)
        usable = (key >= 0x00800000) & (key < 0x7F800000) & (base >= 0x00800000) & (base < 0x7F800000)
        ratio = tl.div_rn(tl.where(usable, x, 1.0), tl.where(usable, estimate, 1.0))
        pattern = ratio.to(tl.int32, bitcast=True)
        normal = usable & (pattern >= 0x00800000) & (pattern < 0x7F800000)
        distance = tl.where(normal, pattern - 0x3F800000, 0)
        # floor((distance + cell / 2) / cell) in two steps; the offset keeps the second dividend positive.
        k = ((distance >> 19) + eighths + 4096 * eighths) // (2 * eighths) - 2048
        symbol = tl.where(normal & (tl.abs(k) <= FARTHEST), FIRST + FARTHEST + k, 1)
        symbol = tl.where((key & 0x7FFFFFFF) == 0, 0, symbol)
        if SETTLED:
            old = tl.load(previous_ptr + offsets, mask=inside, other=0).to(tl.int32)
            beyond = tl.abs(distance.to(tl.int64) - (old - (FIRST + FARTHEST)).to(tl.int64) * eighths * 1048576)
            near = beyond - eighths * 524288 <= eighths * 262144
            symbol = tl.where((symbol >= FIRST) & (old >= FIRST) & near, old, symbol)
        tl.store(symbols_ptr + offsets, symbol.to(tl.uint8), mask=inside)
        center = tl.load(centers_ptr + symbol)
        share = rounded(tl.sqrt_rn(tl.div_rn(center, tl.where(symbol >= FIRST, ratio, 1.0))) * SCALE)
        counts, sums = tally(symbol, share, inside, FIRST, counts, sums)
    tl.store(counts_ptr + 256 * program + tl.arange(0, 256), counts)
    tl.store(sums_ptr + 256 * program + tl.arange(0, 256), sums)


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, shapes: Shapes, start: int, eighths: int, previous: Array | None
) -> tuple[Array, Any, Any]:
    """See `shrinkpoint.kernels.scales.residual_symbols`."""
    t = tensor(x)
    symbols = torch.empty(t.numel(), dtype=torch.uint8, device=t.device)
    counts, sums = tables(SYMBOLS.programs(t.numel()), t.device)
    old = symbols if previous is None else tensor(previous)
    matrix = on_device(rows, t), on_device(columns, t), t.numel(), start, columns.size
    inputs = t, *matrix, eighths, on_device(cell_centers(eighths), t), old
    constants = {"FIRST": FIRST, "FARTHEST": FARTHEST, "SCALE": SCALE, "SETTLED": previous is not None}
    SYMBOLS.run(symbols_kernel, t.numel(), *inputs, symbols, counts, sums, **constants, WIDE=columns.size > NARROW)
    count, total = totals(counts, sums).numpy()
    return like(symbols, x), total, count


@triton.jit
def values_kernel(
    symbols_ptr,
    rows_ptr,
    columns_ptr,
    table_ptr,
    n: tl.int64,
    start: tl.int64,
    columns: tl.int64,
    out_ptr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute (rows[i] * columns[j]) * table[symbol] for each element."""
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    symbol = tl.load(symbols_ptr + offsets, mask=inside, other=0).to(tl.int32)
    estimate = estimate_of(rows_ptr, columns_ptr, start + block * BLOCK, columns, inside, WIDE, BLOCK)
    tl.store(out_ptr + offsets, estimate * tl.load(table_ptr + symbol), mask=inside)


def residual_values(
    symbols: Array, rows: Factors, columns: Factors, shapes: Shapes, start: int, table: Factors
) -> Array:
    """See `shrinkpoint.kernels.scales.residual_values`."""
    t = tensor(symbols)
    out = torch.empty(t.numel(), dtype=torch.float32, device=t.device)
    inputs = t, on_device(rows, t), on_device(columns, t), on_device(table, t), t.numel(), start, columns.size
    VALUES.run(values_kernel, t.numel(), *inputs, out, WIDE=columns.size > NARROW)
    return like(out, symbols)
