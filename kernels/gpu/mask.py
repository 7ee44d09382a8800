"""Bit masks of changed elements and their values on the GPU: pack, count, scan, move."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..mask import trailing_bits_set, wrong_count
from .launch import Launch, bit_view, like, on, tensor

if TYPE_CHECKING:
    from ..arrays import Array

PACK = Launch(block=8192, warps=8)
UNPACK = Launch(block=8192, warps=8)
MOVE = Launch(block=4096, warps=8)


@triton.jit
def pack_kernel(current_ptr, previous_ptr, n: tl.int64, bits_ptr, COMPARE: tl.constexpr, BLOCK: tl.constexpr):
    """Set bit i if current[i] differs from previous[i] (COMPARE), or from zero."""
    block = tl.program_id(0).to(tl.int64)
    byte = tl.arange(0, BLOCK // 8)
    place = tl.arange(0, 8)
    offsets = block * BLOCK + (byte[:, None] * 8 + place[None, :])
    inside = offsets < n
    current = tl.load(current_ptr + offsets, mask=inside, other=0)
    if COMPARE:
        differs = current != tl.load(previous_ptr + offsets, mask=inside, other=0)
    else:
        differs = current != 0
    packed = tl.sum(differs.to(tl.int32) << place[None, :], axis=1)
    at = block * (BLOCK // 8) + byte
    tl.store(bits_ptr + at, packed.to(tl.uint8), mask=at * 8 < n)


def _pack(current: torch.Tensor, previous: torch.Tensor | None) -> torch.Tensor:
    n = current.numel()
    bits = torch.empty((n + 7) // 8, dtype=torch.uint8, device=current.device)
    if n:
        with on(current):
            pack_kernel[PACK.grid(n)](
                # inputs
                bit_view(current),
                bit_view(current if previous is None else previous),
                n,
                # outputs
                bits,
                # constants
                COMPARE=previous is not None,
                **PACK.constants(n),
            )
    return bits


def changed_mask(current: Array, previous: Array) -> Array:
    """See `shrinkpoint.kernels.mask.changed_mask`."""
    return like(_pack(tensor(current), tensor(previous)), current)


def pack_mask(mask: Array) -> Array:
    """See `shrinkpoint.kernels.mask.pack_mask`."""
    return like(_pack(tensor(mask), None), mask)


@triton.jit
def unpack_kernel(bits_ptr, n: tl.int64, flags_ptr, BLOCK: tl.constexpr):
    """Expand bits into flags: flags[i] = bit i."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    byte = tl.load(bits_ptr + (offsets >> 3), mask=inside, other=0).to(tl.int32)
    tl.store(flags_ptr + offsets, ((byte >> (offsets & 7).to(tl.int32)) & 1).to(tl.uint8), mask=inside)


def unpack_mask(data: Array, n: int) -> Array:
    """See `shrinkpoint.kernels.mask.unpack_mask`."""
    bits = tensor(data)
    if n % 8 and int(bits[-1]) >> (n % 8):
        raise trailing_bits_set()
    flags = torch.empty(n, dtype=torch.uint8, device=bits.device)
    if n:
        with on(bits):
            unpack_kernel[UNPACK.grid(n)](
                # inputs
                bits,
                n,
                # outputs
                flags,
                # constants
                **UNPACK.constants(n),
            )
    return like(flags.view(torch.bool), data)


@triton.jit
def count_kernel(bits_ptr, size: tl.int64, counts_ptr, BYTES: tl.constexpr):
    """Count the set bits of each block of BYTES bytes."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BYTES + tl.arange(0, BYTES)
    byte = tl.load(bits_ptr + offsets, mask=offsets < size, other=0).to(tl.int32)
    byte = byte - ((byte >> 1) & 0x55)
    byte = (byte & 0x33) + ((byte >> 2) & 0x33)
    tl.store(counts_ptr + block, tl.sum((byte + (byte >> 4)) & 0x0F, axis=0))


@triton.jit
def gather_kernel(x_ptr, bits_ptr, ends_ptr, counts_ptr, n: tl.int64, out_ptr, BLOCK: tl.constexpr):
    """Move the marked elements to the front.

    `ends` counts the marked elements up to and including each block.
    """
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    byte = tl.load(bits_ptr + (offsets >> 3), mask=inside, other=0).to(tl.int32)
    marked = (byte >> (offsets & 7).to(tl.int32)) & 1
    place = tl.load(ends_ptr + block) - tl.load(counts_ptr + block) + (tl.cumsum(marked, axis=0) - marked)
    x = tl.load(x_ptr + offsets, mask=marked > 0, other=0)
    tl.store(out_ptr + place, x, mask=marked > 0)


@triton.jit
def scatter_kernel(base_ptr, values_ptr, bits_ptr, ends_ptr, counts_ptr, n: tl.int64, out_ptr, BLOCK: tl.constexpr):
    """Put the next value at each marked element: the inverse of `gather_kernel`."""
    block = tl.program_id(0).to(tl.int64)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    byte = tl.load(bits_ptr + (offsets >> 3), mask=inside, other=0).to(tl.int32)
    marked = (byte >> (offsets & 7).to(tl.int32)) & 1
    place = tl.load(ends_ptr + block) - tl.load(counts_ptr + block) + (tl.cumsum(marked, axis=0) - marked)
    old = tl.load(base_ptr + offsets, mask=inside & (marked == 0), other=0)
    new = tl.load(values_ptr + place, mask=marked > 0, other=0)
    tl.store(out_ptr + offsets, tl.where(marked > 0, new, old), mask=inside)


def _marked(bits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return cumulative counts of marked elements by block, and the total; waits once."""
    blocks = MOVE.programs(n)
    counts = torch.empty(blocks, dtype=torch.int32, device=bits.device)
    if blocks == 0:
        return counts, counts.to(torch.int64), 0
    with on(bits):
        count_kernel[(blocks,)](
            # inputs
            bits,
            bits.numel(),
            # outputs
            counts,
            # constants
            BYTES=MOVE.size(n) // 8,
            **MOVE.options,
        )
    ends = counts.cumsum(0, dtype=torch.int64)
    total, last = torch.stack([ends[-1], bits[-1].to(torch.int64)]).tolist()
    if n % 8 and last >> (n % 8):
        raise trailing_bits_set()
    return counts, ends, total


def gather(x: Array, mask_bits: Array) -> Array:
    """See `shrinkpoint.kernels.mask.gather`."""
    t, bits = tensor(x), tensor(mask_bits)
    counts, ends, total = _marked(bits, t.numel())
    out = torch.empty(total, dtype=t.dtype, device=t.device)
    if total:
        with on(t):
            gather_kernel[MOVE.grid(t.numel())](
                # inputs
                bit_view(t),
                bits,
                ends,
                counts,
                t.numel(),
                # outputs
                bit_view(out),
                # constants
                **MOVE.constants(t.numel()),
            )
    return like(out, x)


def scatter(base: Array, mask_bits: Array, values: Array) -> Array:
    """See `shrinkpoint.kernels.mask.scatter`."""
    t, bits, v = tensor(base), tensor(mask_bits), tensor(values)
    counts, ends, total = _marked(bits, t.numel())
    if total != v.numel():
        raise wrong_count(total, v.numel())
    out = torch.empty_like(t)
    if t.numel():
        with on(t):
            scatter_kernel[MOVE.grid(t.numel())](
                # inputs
                bit_view(t),
                bit_view(v),
                bits,
                ends,
                counts,
                t.numel(),
                # outputs
                bit_view(out),
                # constants
                **MOVE.constants(t.numel()),
            )
    return like(out, base)
