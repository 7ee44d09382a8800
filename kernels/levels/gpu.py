"""Levels of two checkpoints on the GPU: cyclic differences, stable grouping, pair counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import Launch, elements, like, tensor
from ..errors import BadArgumentError, CorruptDataError

SUBTRACT = Launch(block=8192, warps=8)
GROUP = Launch(block=512, warps=1, interpreted=1 << 16)
PAIRS = Launch(block=4096, warps=8, registers=168, rounds=8)
PAIR_TABLES = (512, 1024)
"""Compiled sizes of a table that a program counts for itself; 0 stands for larger ones."""
COPIES = 16
"""Number of copies of the pair table, which programs use in turn."""
COPIED_COUNTERS = 1 << 20
SLICE = 1 << 30
"""Elements per launch: no 32-bit counter can overflow."""


@triton.jit
def subtract_kernel(first_ptr, second_ptr, n: tl.int64, size: tl.int32, out_ptr, outside_ptr, BLOCK: tl.constexpr):
    """Compute (first - second) mod size for each element.

    `outside` becomes 1 if an element of either is not below size.
    """
    offsets, inside = elements(n, BLOCK)
    first = tl.load(first_ptr + offsets, mask=inside, other=0).to(tl.int32)
    second = tl.load(second_ptr + offsets, mask=inside, other=0).to(tl.int32)
    d = first - second
    tl.store(out_ptr + offsets, tl.where(d < 0, d + size, d).to(tl.uint8), mask=inside)
    highest = tl.max(tl.maximum(first, second), axis=0)
    tl.store(outside_ptr, 1, mask=highest >= size)  # every program writes the same value


def _subtract(first: Array, second: Array, size: int) -> tuple[torch.Tensor, bool]:
    a, b = tensor(first), tensor(second)
    out, outside = torch.empty_like(b), torch.zeros(1, dtype=torch.int32, device=b.device)
    SUBTRACT.run(subtract_kernel, b.numel(), a, b, b.numel(), size, out, outside)
    return out, not outside.item()


def delta(previous: Array, current: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.delta`."""
    out, good = _subtract(previous, current, size)
    if not good:
        raise BadArgumentError(f"a level is not below size, {size}")
    return like(out, current)


def undelta(previous: Array, delta: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.undelta`."""
    out, good = _subtract(previous, delta, size)
    if not good:
        raise CorruptDataError(f"a level or difference is not below {size}, the number of levels")
    return like(out, delta)


@triton.jit
def count_keys_kernel(
    keys_ptr,
    n: tl.int64,
    blocks: tl.int64,
    size: tl.int32,
    counts_ptr,
    outside_ptr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the elements of each key below size in each block: counts[key, block]."""
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    key = tl.load(keys_ptr + offsets, mask=inside, other=0).to(tl.int32)
    counts = tl.histogram(key, BINS, mask=inside & (key < size))
    bins = tl.arange(0, BINS)
    tl.store(counts_ptr + bins * blocks + block, counts, mask=bins < size)
    tl.store(outside_ptr, 1, mask=tl.max(key, axis=0) >= size)


@triton.jit
def rank_in_block(key, inside, size, FIELD: tl.constexpr, BLOCK: tl.constexpr):
    """Number of elements of the same key before each element of the block.

    Several running counts share one 64-bit integer, so that one scan ranks several keys. A field holds ranks up to
    `2**FIELD = BLOCK`. The count of the element itself, which could overflow the field, is subtracted before reading.
    """
    fields: tl.constexpr = 63 // FIELD
    rank = tl.zeros((BLOCK,), tl.int32)
    one = tl.full((BLOCK,), 1, tl.int64)
    for first in range(0, size, fields):
        slot = key - first
        mine = inside & (slot >= 0) & (slot < fields)
        shift = (tl.where(mine, slot, 0) * FIELD).to(tl.int64)
        own = tl.where(mine, one << shift, 0)
        before = tl.cumsum(own, axis=0) - own
        rank = tl.where(mine, ((before >> shift) & ((1 << FIELD) - 1)).to(tl.int32), rank)
    return rank


@triton.jit
def regroup_kernel(
    values_ptr,
    keys_ptr,
    ends_ptr,
    counts_ptr,
    n: tl.int64,
    blocks: tl.int64,
    size: tl.int32,
    out_ptr,
    SPLIT: tl.constexpr,
    FIELD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move each value to its place among the elements of its key (SPLIT), or back.

    `ends[key, block]` is the position, in grouped order, of the end of the elements of this key in this block.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    key = tl.load(keys_ptr + offsets, mask=inside, other=0).to(tl.int32)
    inside = inside & (key < size)
    rank = rank_in_block(key, inside, size, FIELD, BLOCK)
    cell = key.to(tl.int64) * blocks + block
    start = tl.load(ends_ptr + cell, mask=inside, other=0) - tl.load(counts_ptr + cell, mask=inside, other=0)
    place = start + rank
    if SPLIT:
        tl.store(out_ptr + place, tl.load(values_ptr + offsets, mask=inside, other=0), mask=inside)
    else:
        tl.store(out_ptr + offsets, tl.load(values_ptr + place, mask=inside, other=0), mask=inside)


def _regroup(values: Array, keys: Array, size: int, *, split: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Group values by key, or restore their order, and count elements per key.

    None where a key is not below size.
    """
    t, k = tensor(values), tensor(keys)
    out = torch.empty(t.numel() if split else k.shape, dtype=torch.uint8, device=k.device)
    blocks = GROUP.programs(k.numel())
    counts = torch.empty((size, blocks), dtype=torch.int32, device=k.device)
    outside = torch.zeros(1, dtype=torch.int32, device=k.device)
    bins = 32 if size <= 32 else 256
    GROUP.run(count_keys_kernel, k.numel(), k, k.numel(), blocks, size, counts, outside, BINS=bins)
    if outside.item():
        return None
    ends = counts.reshape(-1).cumsum(0, dtype=torch.int64)
    field = GROUP.size(k.numel()).bit_length() - 1
    GROUP.run(regroup_kernel, k.numel(), t, k, ends, counts, k.numel(), blocks, size, out, SPLIT=split, FIELD=field)
    return out, counts.sum(1)


def split_by_level(values: Array, keys: Array, size: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.levels.split_by_level`."""
    result = _regroup(values, keys, size, split=True)
    if result is None:
        raise BadArgumentError(f"a key is not below size, {size}")
    return like(result[0], values), like(result[1], values)


def merge_by_level(grouped: Array, keys: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.merge_by_level`."""
    result = _regroup(grouped, keys, size, split=False)
    if result is None:
        raise CorruptDataError(f"a key is not below {size}, the number of levels")
    return like(result[0], grouped)


@triton.jit
def pairs_kernel(
    previous_ptr,
    current_ptr,
    n: tl.int64,
    previous_size: tl.int32,
    current_size: tl.int32,
    copies: tl.int32,
    counts_ptr,
    outside_ptr,
    BINS: tl.constexpr,
    TABLE: tl.constexpr,
    ROUNDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add each pair of levels to one copy of the table.

    A program counts ROUNDS blocks. A small table (TABLE) it counts for itself and adds once. Of a larger one, whose
    pairs are mostly unchanged levels, it counts the diagonal for itself; other pairs use an atomic each.
    """
    program = tl.program_id(0)
    first = program.to(tl.int64) * (BLOCK * ROUNDS)
    lanes = tl.arange(0, BLOCK)
    table_ptr = counts_ptr + (program % copies).to(tl.int64) * (previous_size * current_size)
    own: tl.constexpr = TABLE if TABLE else BINS
    counted = tl.zeros((own,), tl.int32)
    strange = tl.zeros((BLOCK,), tl.int32)
    for start in range(first, tl.minimum(first + BLOCK * ROUNDS, n), BLOCK):
        offsets = start + lanes
        inside = offsets < n
        previous = tl.load(previous_ptr + offsets, mask=inside, other=0).to(tl.int32)
        current = tl.load(current_ptr + offsets, mask=inside, other=0).to(tl.int32)
        valid = inside & (previous < previous_size) & (current < current_size)
        pair = previous * current_size + current
        if TABLE:
            counted += tl.histogram(tl.where(valid, pair, 0), TABLE, mask=valid)
        else:
            same = previous == current
            tl.atomic_add(table_ptr + pair, 1, mask=valid & ~same, sem="relaxed")
            counted += tl.histogram(current, BINS, mask=valid & same)
        strange += (inside & ~valid).to(tl.int32)
    bins = tl.arange(0, own)
    if TABLE:
        tl.atomic_add(table_ptr + bins, counted, mask=counted > 0, sem="relaxed")
    else:
        tl.atomic_add(table_ptr + bins * (current_size + 1), counted, mask=counted > 0, sem="relaxed")
    tl.store(outside_ptr, 1, mask=tl.max(strange, axis=0) > 0)


def joint_counts(previous: Array, current: Array, previous_size: int, current_size: int) -> Array:
    """See `shrinkpoint.kernels.levels.joint_counts`."""
    a, b = tensor(previous).reshape(-1), tensor(current).reshape(-1)
    totals = torch.zeros((previous_size, current_size), dtype=torch.int64, device=b.device)
    outside = torch.zeros(1, dtype=torch.int32, device=b.device)
    bins = 32 if max(previous_size, current_size) <= 32 else 256
    table = next((size for size in PAIR_TABLES if totals.numel() <= size), 0)
    for begin in range(0, b.numel(), SLICE):
        part = b[begin : begin + SLICE]
        copies = max(1, min(COPIES, PAIRS.programs(part.numel()), COPIED_COUNTERS // totals.numel()))
        counts = torch.zeros((copies, previous_size, current_size), dtype=torch.int32, device=b.device)
        inputs = a[begin : begin + SLICE], part, part.numel(), previous_size, current_size, copies
        PAIRS.run(pairs_kernel, part.numel(), *inputs, counts, outside, BINS=bins, TABLE=table)
        totals += counts.sum(0)
    if outside.item():
        raise BadArgumentError(
            f"a previous level is not below {previous_size} or a current one not below {current_size}"
        )
    return like(totals, current)
