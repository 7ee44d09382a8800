"""Fixed-width packing on the GPU: 32 values of a width of w bits fill w words of 32 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..errors import BadArgumentError, CorruptDataError
from .launch import INTEGERS, Launch, bit_view, like, on, tensor

if TYPE_CHECKING:
    from ..arrays import Array

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


def pack_bits(values: Array, width: int) -> Array:
    """See `shrinkpoint.kernels.bitpack.pack_bits`."""
    t = tensor(values)
    size = (t.numel() * width + 7) // 8
    words = torch.empty((size + 3) // 4, dtype=torch.int32, device=t.device)
    outside = torch.zeros(1, dtype=torch.int32, device=t.device)
    if width == 0:
        outside |= bit_view(t).any()
    elif words.numel():
        block = PACK.size(words.numel())
        with on(t):
            pack_kernel[(-(-words.numel() // (block // width * width)),)](
                # inputs
                bit_view(t),
                t.numel(),
                words.numel(),
                width,
                # outputs
                words,
                outside,
                # constants
                **PACK.constants(words.numel()),
            )
    if width < 8 * t.element_size() and outside.item():  # a full width needs no check and no wait
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
    """See `shrinkpoint.kernels.bitpack.unpack_bits`."""
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
        with on(t):
            unpack_kernel[UNPACK.grid(n)](
                # inputs
                t,
                n,
                size,
                width,
                # outputs
                values,
                # constants
                **UNPACK.constants(n),
            )
    return like(values.view(kind), data)
