"""Packing and masks on the GPU: 32 values of w bits fill w words; pack, count, scan, move."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend.arrays import Array
from ..backend.gpu import INTEGERS, Launch, bit_view, elements, like, run, tensor
from ..errors import BadArgumentError, CorruptDataError
from . import trailing_bits_set, wrong_count

PACK = Launch(block=1024, warps=8)
"""In words."""
UNPACK = Launch(block=2048, warps=8)


@triton.jit
def number_of(pattern):
    """An unsigned number from a pattern loaded as a signed integer of its width."""
    if pattern.dtype == tl.int16:
        number = (pattern.to(tl.int32) & 0xFFFF).to(tl.uint32)
    else:
        number = pattern.to(tl.uint32)
    return number


@triton.jit
def pack_kernel(
    values_ptr,
    n: tl.int64,
    words: tl.int64,
    width: tl.int32,
    words_ptr,
    outside_ptr,
    BLOCK: tl.constexpr,
):
    """Pack values into 32-bit words; word j holds bits 32 j ... 32 j + 31.

    `outside` becomes 1 if a value has more than `width` bits.

    A program writes the words of whole groups of 32 values, as many as BLOCK words hold. It thus begins with the first
    bit of a value, and all arithmetic except addresses takes 32 bits.
    """
    groups = BLOCK // width
    program = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, BLOCK)
    at = program * (groups * width) + word
    inside = (word < groups * width) & (at < words)
    first = (word * 32) // width  # the value that has the word's lowest bit, and its bits before that
    before = word * 32 - first * width
    place = program * (groups * 32) + first
    value = number_of(tl.load(values_ptr + place, mask=inside, other=0))
    seen = value
    packed = value >> before
    for k in range(1, (30 + width) // width + 1):
        shift = k * width - before
        mine = inside & (shift < 32) & (place + k < n)
        value = number_of(tl.load(values_ptr + (place + k), mask=mine, other=0))
        seen = seen | value
        packed = packed | (value << tl.minimum(shift, 31))
    tl.store(words_ptr + at, packed.to(tl.int32, bitcast=True), mask=inside)
    beyond = (seen >> (width - 1)) >> 1
    tl.store(outside_ptr, 1, mask=tl.max((beyond > 0).to(tl.int32), axis=0) > 0)  # every program writes the same value


def pack_bits(values: Array, width: int, *, checked: bool = True) -> Array:
    """See `shrinkpoint.kernels.packing.pack_bits`."""
    t = tensor(values)
    size = (t.numel() * width + 7) // 8
    words = torch.empty((size + 3) // 4, dtype=torch.int32, device=t.device)
    outside = torch.zeros(1, dtype=torch.int32, device=t.device)
    if width == 0:
        outside |= bit_view(t).any()
    elif words.numel():
        programs = -(-words.numel() // (PACK.size(words.numel()) // width * width))
        inputs = bit_view(t), t.numel(), words.numel(), width
        run(pack_kernel, programs, *inputs, words, outside, **PACK.constants(words.numel()))
    if checked and width < 8 * t.element_size() and outside.item():  # a full width needs no check and no wait
        raise BadArgumentError(f"values holds some that do not fit a width of {width} bits")
    return like(words.view(torch.uint8)[:size], values)


@triton.jit
def unpack_kernel(data_ptr, n: tl.int64, size: tl.int64, width: tl.int32, values_ptr, BLOCK: tl.constexpr):
    """Unpack values from bits `width * i` on, byte by byte.

    The data may start at any address.
    """
    program = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    offsets = program * BLOCK + lane
    inside = offsets < n
    bit = lane * width
    byte = program * (BLOCK // 8 * width) + (bit >> 3)
    # Enough bytes for the value and up to seven bits before it.
    wide: tl.constexpr = tl.uint64 if values_ptr.dtype.element_ty == tl.int32 else tl.uint32
    held = tl.load(data_ptr + byte, mask=inside & (byte < size), other=0).to(wide)
    for k in range(1, (width + 14) // 8):
        more = tl.load(data_ptr + (byte + k), mask=inside & (byte + k < size), other=0).to(wide)
        held = held | (more << (8 * k))
    full = (tl.full((), 1, wide) << width) - 1
    value = (held >> (bit & 7)) & full
    tl.store(values_ptr + offsets, value.to(values_ptr.dtype.element_ty), mask=inside)


def unpack_bits(data: Array, width: int, n: int, dtype: str = "uint8") -> Array:
    """See `shrinkpoint.kernels.packing.unpack_bits`."""
    t = tensor(data)
    size = (n * width + 7) // 8
    if t.numel() != size:
        raise CorruptDataError(f"{n} values of {width} bits take {size} bytes, not {t.numel()}")
    if n * width % 8 and int(t[-1]) >> (n * width % 8):
        raise CorruptDataError(f"bits are set after the last of {n} values of {width} bits")
    kind = getattr(torch, dtype)
    make = torch.empty if width else torch.zeros
    values = make(n, dtype=INTEGERS[kind.itemsize], device=t.device)
    if size:
        UNPACK.run(unpack_kernel, n, t, n, size, width, values)
    return like(values.view(kind), data)


PACK_MASK = Launch(block=4096, warps=4)
UNPACK_MASK = Launch(block=8192, warps=8)
MOVE = Launch(block=2048, warps=4)


@triton.jit
def pack_mask_kernel(current_ptr, previous_ptr, n: tl.int64, bits_ptr, COMPARE: tl.constexpr, BLOCK: tl.constexpr):
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
    other = bit_view(current if previous is None else previous)
    PACK_MASK.run(pack_mask_kernel, n, bit_view(current), other, n, bits, COMPARE=previous is not None)
    return bits


def changed_mask(current: Array, previous: Array) -> Array:
    """See `shrinkpoint.kernels.packing.changed_mask`."""
    return like(_pack(tensor(current), tensor(previous)), current)


def pack_mask(mask: Array) -> Array:
    """See `shrinkpoint.kernels.packing.pack_mask`."""
    return like(_pack(tensor(mask), None), mask)


@triton.jit
def unpack_mask_kernel(bits_ptr, n: tl.int64, flags_ptr, BLOCK: tl.constexpr):
    """Expand bits into flags: flags[i] = bit i."""
    offsets, inside = elements(n, BLOCK)
    byte = tl.load(bits_ptr + (offsets >> 3), mask=inside, other=0).to(tl.int32)
    tl.store(flags_ptr + offsets, ((byte >> (offsets & 7).to(tl.int32)) & 1).to(tl.uint8), mask=inside)


def unpack_mask(data: Array, n: int) -> Array:
    """See `shrinkpoint.kernels.packing.unpack_mask`."""
    bits = tensor(data)
    if n % 8 and int(bits[-1]) >> (n % 8):
        raise trailing_bits_set()
    flags = torch.empty(n, dtype=torch.uint8, device=bits.device)
    UNPACK_MASK.run(unpack_mask_kernel, n, bits, n, flags)
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
    offsets, inside = elements(n, BLOCK)
    byte = tl.load(bits_ptr + (offsets >> 3), mask=inside, other=0).to(tl.int32)
    marked = (byte >> (offsets & 7).to(tl.int32)) & 1
    place = tl.load(ends_ptr + block) - tl.load(counts_ptr + block) + (tl.cumsum(marked, axis=0) - marked)
    x = tl.load(x_ptr + offsets, mask=marked > 0, other=0)
    tl.store(out_ptr + place, x, mask=marked > 0)


@triton.jit
def scatter_kernel(base_ptr, values_ptr, bits_ptr, ends_ptr, counts_ptr, n: tl.int64, out_ptr, BLOCK: tl.constexpr):
    """Put the next value at each marked element: the inverse of `gather_kernel`."""
    block = tl.program_id(0).to(tl.int64)
    offsets, inside = elements(n, BLOCK)
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
    run(count_kernel, blocks, bits, bits.numel(), counts, BYTES=MOVE.size(n) // 8, **MOVE.options)
    ends = counts.cumsum(0, dtype=torch.int64)
    total, last = torch.stack([ends[-1], bits[-1].to(torch.int64)]).tolist()
    if n % 8 and last >> (n % 8):
        raise trailing_bits_set()
    return counts, ends, total


def gather(x: Array, mask_bits: Array) -> Array:
    """See `shrinkpoint.kernels.packing.gather`."""
    t, bits = tensor(x), tensor(mask_bits)
    counts, ends, total = _marked(bits, t.numel())
    out = torch.empty(total, dtype=t.dtype, device=t.device)
    if total:
        MOVE.run(gather_kernel, t.numel(), bit_view(t), bits, ends, counts, t.numel(), bit_view(out))
    return like(out, x)


def scatter(base: Array, mask_bits: Array, values: Array) -> Array:
    """See `shrinkpoint.kernels.packing.scatter`."""
    t, bits, v = tensor(base), tensor(mask_bits), tensor(values)
    counts, ends, total = _marked(bits, t.numel())
    if total != v.numel():
        raise wrong_count(total, v.numel())
    out = torch.empty_like(t)
    MOVE.run(scatter_kernel, t.numel(), bit_view(t), bit_view(v), bits, ends, counts, t.numel(), bit_view(out))
    return like(out, base)
