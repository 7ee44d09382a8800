"""Sparse deltas on the GPU: count by blocks, scan, move; only changes leave the device.

The host codes the changes: they are a few percent of the arrays, and their transfer takes less time than reading the
arrays (docs/decisions/sparse-deltas.md).
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import INTEGERS, Launch, bit_view, elements, like, magnitude_bits, on_device, order_key, tensor
from ..planes import ordered_by_sign, width_of
from ..planes.gpu import UNSIGNED, sign_extended
from . import SparseDelta, wrong_rank

CLASSES = 8
COLLECT = Launch(block=2048, warps=8, registers=255)
APPLY = Launch(block=2048, warps=8, registers=255)


@triton.jit
def class_of(pattern, edges_ptr, WIDTH: tl.constexpr, EDGES: tl.constexpr):
    """Number of edges that a pattern reaches."""
    low = magnitude_bits(pattern, WIDTH)
    number = tl.zeros(low.shape, dtype=tl.int32)
    for e in tl.static_range(EDGES):
        number += (low >= tl.load(edges_ptr + e).to(low.dtype)).to(tl.int32)
    return number


@triton.jit
def step_of(x, y, WIDTH: tl.constexpr, FLOAT: tl.constexpr):
    """Return the change from pattern y to x; bits above WIDTH are dropped."""
    s = sign_extended(x, WIDTH)
    t = sign_extended(y, WIDTH)
    if FLOAT:
        s = order_key(s, WIDTH)
        t = order_key(t, WIDTH)
    d = sign_extended(s - t, WIDTH)
    return (d << 1) ^ tl.where(d < 0, -1, 0)


@triton.jit
def stepped(y, z, WIDTH: tl.constexpr, FLOAT: tl.constexpr, XOR: tl.constexpr):
    """Apply change z to pattern y."""
    t = sign_extended(y, WIDTH)
    if XOR:
        x = t ^ sign_extended(z, WIDTH)
    else:
        if WIDTH == 64:
            half = (z >> 1) & 0x7FFFFFFFFFFFFFFF
        elif WIDTH == 32:
            half = (z >> 1) & 0x7FFFFFFF
        else:
            half = (z.to(tl.int32) >> 1) & ((1 << (WIDTH - 1)) - 1)
        d = half ^ tl.where((z & 1) != 0, -1, 0)
        if FLOAT:
            t = order_key(t, WIDTH)
        x = sign_extended(t + d, WIDTH)
        if FLOAT:
            x = order_key(x, WIDTH)
    return x


@triton.jit
def count_kernel(
    current_ptr,
    previous_ptr,
    edges_ptr,
    n: tl.int64,
    blocks: tl.int64,
    counts_ptr,
    WIDTH: tl.constexpr,
    EDGES: tl.constexpr,
    COMPARE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the elements of each class, and with COMPARE the changed ones, by blocks.

    counts[c, block], and counts[EDGES + 1 + c, block].
    """
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    y = tl.load(previous_ptr + offsets, mask=inside, other=0)
    number = class_of(y, edges_ptr, WIDTH, EDGES)
    if COMPARE:
        changed = inside & (tl.load(current_ptr + offsets, mask=inside, other=0) != y)
    for c in tl.static_range(EDGES + 1):
        own = inside & (number == c)
        tl.store(counts_ptr + c * blocks + block, tl.sum(own.to(tl.int32), axis=0))
        if COMPARE:
            tl.store(counts_ptr + (EDGES + 1 + c) * blocks + block, tl.sum((own & changed).to(tl.int32), axis=0))


@triton.jit
def collect_kernel(
    current_ptr,
    previous_ptr,
    edges_ptr,
    starts_ptr,
    n: tl.int64,
    blocks: tl.int64,
    ranks_ptr,
    changes_ptr,
    WIDTH: tl.constexpr,
    FLOAT: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move rank and change of each changed element to its position in the result.

    `starts` counts the elements before each block, by class.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    x = tl.load(current_ptr + offsets, mask=inside, other=0)
    y = tl.load(previous_ptr + offsets, mask=inside, other=0)
    number = class_of(y, edges_ptr, WIDTH, EDGES)
    changed = inside & (x != y)
    z = step_of(x, y, WIDTH, FLOAT).to(changes_ptr.dtype.element_ty)
    for c in range(EDGES + 1):  # not unrolled, because predicates of all classes at once would spill
        own = (inside & (number == c)).to(tl.int32)
        hit = own * changed.to(tl.int32)
        rank = tl.load(starts_ptr + c * blocks + block) + (tl.cumsum(own, axis=0) - own)
        place = tl.load(starts_ptr + (EDGES + 1 + c) * blocks + block) + (tl.cumsum(hit, axis=0) - hit)
        tl.store(ranks_ptr + place, rank, mask=hit > 0)
        tl.store(changes_ptr + place, z, mask=hit > 0)


@triton.jit
def mark_kernel(
    ranks_ptr,
    bases_ptr,
    tops_ptr,
    ends_ptr,
    m: tl.int64,
    marks_ptr,
    bad_ptr,
    CLASSES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mark each changed element: marks[base of its class + rank] = 1.

    Ranks that do not ascend or are beyond their class are counted.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < m
    rank = tl.load(ranks_ptr + offsets, mask=inside, other=0)
    base = tl.zeros((BLOCK,), dtype=tl.int64)
    top = tl.zeros((BLOCK,), dtype=tl.int64)
    begins = tl.zeros((BLOCK,), dtype=tl.int32)
    for c in tl.static_range(CLASSES):
        start = tl.load(ends_ptr + c)
        own = (offsets >= start) & (offsets < tl.load(ends_ptr + c + 1))
        base = tl.where(own, tl.load(bases_ptr + c), base)
        top = tl.where(own, tl.load(tops_ptr + c), top)
        begins = tl.where(own & (offsets == start), 1, begins)
    last = tl.load(ranks_ptr + offsets - 1, mask=inside & (begins == 0), other=-1)
    fits = (rank >= 0) & (rank < top) & (rank > last)
    wrong = tl.sum((inside & (fits == 0)).to(tl.int32), axis=0)
    tl.atomic_add(bad_ptr, wrong, mask=wrong > 0)
    tl.store(marks_ptr + base + rank, tl.full((BLOCK,), 1, tl.uint8), mask=inside & fits)


@triton.jit
def flag_count_kernel(
    previous_ptr,
    edges_ptr,
    marks_ptr,
    starts_ptr,
    n: tl.int64,
    blocks: tl.int64,
    counts_ptr,
    WIDTH: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the marked elements of each class and of all classes, by blocks.

    counts[c, block], and counts[EDGES + 1, block].
    """
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    number = class_of(tl.load(previous_ptr + offsets, mask=inside, other=0), edges_ptr, WIDTH, EDGES)
    total = tl.zeros((), dtype=tl.int32)
    for c in range(EDGES + 1):  # not unrolled, because predicates of all classes at once would spill
        own = (inside & (number == c)).to(tl.int32)
        rank = tl.load(starts_ptr + c * blocks + block) + (tl.cumsum(own, axis=0) - own)
        marked = tl.sum(tl.load(marks_ptr + rank, mask=own > 0, other=0).to(tl.int32), axis=0)
        tl.store(counts_ptr + c * blocks + block, marked)
        total += marked
    tl.store(counts_ptr + (EDGES + 1) * blocks + block, total)


@triton.jit
def apply_kernel(
    previous_ptr,
    edges_ptr,
    marks_ptr,
    starts_ptr,
    firsts_ptr,
    changes_ptr,
    n: tl.int64,
    blocks: tl.int64,
    out_ptr,
    positions_ptr,
    WIDTH: tl.constexpr,
    FLOAT: tl.constexpr,
    XOR: tl.constexpr,
    EDGES: tl.constexpr,
    EMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the new pattern of each marked element to its position in `out`.

    With EMIT, the patterns are written one after another, with their positions.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
    y = tl.load(previous_ptr + offsets, mask=inside, other=0)
    number = class_of(y, edges_ptr, WIDTH, EDGES)
    at = tl.zeros((BLOCK,), dtype=tl.int64)
    hit = tl.zeros((BLOCK,), dtype=tl.int32)
    for c in range(EDGES + 1):  # not unrolled, because predicates of all classes at once would spill
        own = (inside & (number == c)).to(tl.int32)
        rank = tl.load(starts_ptr + c * blocks + block) + (tl.cumsum(own, axis=0) - own)
        marked = tl.load(marks_ptr + rank, mask=own > 0, other=0).to(tl.int32)
        place = tl.load(firsts_ptr + c * blocks + block) + (tl.cumsum(marked, axis=0) - marked)
        at = tl.where(marked > 0, place, at)
        hit += marked
    z = tl.load(changes_ptr + at, mask=hit > 0, other=0)
    x = stepped(y, z, WIDTH, FLOAT, XOR).to(out_ptr.dtype.element_ty)
    if EMIT:
        place = tl.load(firsts_ptr + (EDGES + 1) * blocks + block) + (tl.cumsum(hit, axis=0) - hit)
        tl.store(out_ptr + place, x, mask=hit > 0)
        tl.store(positions_ptr + place, offsets, mask=hit > 0)
    else:
        tl.store(out_ptr + offsets, x, mask=hit > 0)


def _edges(edges: tuple[int, ...], t: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*edges, 0][: max(1, len(edges))], dtype=torch.int64, device=t.device)


def _before(counts: torch.Tensor) -> torch.Tensor:
    """Return the cumulative counts before each block, row by row."""
    return counts.cumsum(1, dtype=torch.int64) - counts


def collect_changes(
    current: Array, previous: Array, edges: tuple[int, ...], limit: int, copy_to: Array | None, dtype: str
) -> SparseDelta | None:
    """See `shrinkpoint.kernels.sparse_delta.collect_changes`."""
    new, old = tensor(current).reshape(-1), tensor(previous).reshape(-1)
    if copy_to is not None:
        new = tensor(copy_to).copy_(new)
    n, width, classes = old.numel(), width_of(dtype), len(edges) + 1
    x, y, bounds = bit_view(new), bit_view(old), _edges(edges, old)
    blocks = COLLECT.programs(n)
    counts = torch.zeros((2 * classes, blocks), dtype=torch.int32, device=old.device)
    shared = {"WIDTH": width, "EDGES": len(edges)}
    COLLECT.run(count_kernel, n, x, y, bounds, n, blocks, counts, COMPARE=True, **shared)
    found = counts[classes:].sum(1, dtype=torch.int64).tolist()
    total = sum(found)
    if total > limit:
        return None
    ranks = torch.empty(total, dtype=torch.int64, device=old.device)
    changes = torch.empty(total, dtype=INTEGERS[width // 8], device=old.device)
    if total:
        starts = _before(counts)
        ends = np.cumsum(found) - found
        starts[classes:] += on_device(ends, old)[:, None]
        inputs = x, y, bounds, starts, n, blocks
        COLLECT.run(collect_kernel, n, *inputs, ranks, changes, FLOAT=ordered_by_sign(dtype), **shared)
    own = changes.view(UNSIGNED[width // 8])
    return SparseDelta(np.asarray(found, np.int64), like(ranks, current), like(own, current))


def _placed(
    old: torch.Tensor,
    delta: SparseDelta,
    edges: tuple[int, ...],
    method: str,
    dtype: str,
    out: torch.Tensor,
    positions: torch.Tensor | None,
) -> None:
    """Write new patterns to `out`, at their positions or, with `positions`, one after another."""
    ranks, changes = tensor(delta.ranks), bit_view(tensor(delta.changes))
    n, m, width, classes = old.numel(), ranks.numel(), width_of(dtype), len(edges) + 1
    if m == 0:
        return
    if m > n:
        raise wrong_rank()
    y, bounds, blocks = bit_view(old), _edges(edges, old), APPLY.programs(n)
    counts = torch.zeros((classes, blocks), dtype=torch.int32, device=old.device)
    marks = torch.zeros(n, dtype=torch.uint8, device=old.device)
    bad = torch.zeros(1, dtype=torch.int32, device=old.device)
    flags = torch.zeros((classes + 1, blocks), dtype=torch.int32, device=old.device)
    shared = {"WIDTH": width, "EDGES": len(edges)}
    lists = on_device(np.concatenate([[0], np.cumsum(delta.counts)]), old)
    APPLY.run(count_kernel, n, y, y, bounds, n, blocks, counts, COMPARE=False, **shared)
    tops = counts.sum(1, dtype=torch.int64)
    bases = tops.cumsum(0) - tops
    starts = _before(counts) + bases[:, None]
    APPLY.run(mark_kernel, m, ranks, bases, tops, lists, m, marks, bad, CLASSES=classes)
    if int(bad):
        raise wrong_rank()
    APPLY.run(flag_count_kernel, n, y, bounds, marks, starts, n, blocks, flags, **shared)
    firsts = _before(flags)
    firsts[:classes] += lists[:-1, None]
    inputs = y, bounds, marks, starts, firsts, changes, n, blocks
    constants = {"FLOAT": ordered_by_sign(dtype), "XOR": method == "xor", "EMIT": positions is not None, **shared}
    APPLY.run(apply_kernel, n, *inputs, out, firsts if positions is None else positions, **constants)


def collect_and_locate(
    current: Array, previous: Array, edges: tuple[int, ...], limit: int, dtype: str
) -> tuple[SparseDelta, Array, Array] | None:
    """See `shrinkpoint.kernels.sparse_delta.collect_and_locate`."""
    delta = collect_changes(current, previous, edges, limit, None, dtype)
    if delta is None:
        return None
    return delta, *locate_changes(previous, delta, edges, "arithmetic", dtype)


def locate_changes(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, dtype: str
) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.sparse_delta.locate_changes`."""
    old = tensor(previous).reshape(-1)
    m = int(delta.ranks.shape[0])
    values = torch.empty(m, dtype=old.dtype, device=old.device)
    positions = torch.empty(m, dtype=torch.int64, device=old.device)
    _placed(old, delta, edges, method, dtype, bit_view(values), positions)
    return like(positions, previous), like(values, previous)


def apply_changes(
    previous: Array, delta: SparseDelta, edges: tuple[int, ...], method: str, out: Array | None, dtype: str
) -> Array:
    """See `shrinkpoint.kernels.sparse_delta.apply_changes`."""
    old = tensor(previous).reshape(-1)
    target = old.clone() if out is None else tensor(out)
    if out is not None and target.data_ptr() != old.data_ptr():
        target.copy_(old)
    _placed(old, delta, edges, method, dtype, bit_view(target), None)
    return like(target.reshape(tuple(previous.shape)), previous) if out is None else out
