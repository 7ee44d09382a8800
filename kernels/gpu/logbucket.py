"""Log buckets elementwise on the GPU: integer arithmetic on bit patterns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..arrays import dtype_name
from ..floats import FORMATS
from .bits import bucket_of, magnitude_bits
from .launch import INTEGERS, Launch, bit_view, like, on, tensor

if TYPE_CHECKING:
    from ..arrays import Array

ELEMENTS = Launch(block=2048, warps=4)


@triton.jit
def index_kernel(
    patterns_ptr,
    n: tl.int64,
    bits: tl.int32,
    index_ptr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    OCTAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Position of each pattern in the signed layout."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    pattern = tl.load(patterns_ptr + offsets, mask=inside, other=0)
    j = bucket_of(magnitude_bits(pattern, WIDTH), bits, WIDTH, M)
    buckets = OCTAVES << bits
    index = tl.where(j > buckets, 2 * buckets + 1, tl.where(pattern < 0, buckets - j, buckets + j))
    tl.store(index_ptr + offsets, index, mask=inside)


def bucket_index(x: Array, bits: int) -> Array:
    """See `shrinkpoint.kernels.logbucket.bucket_index`."""
    t = tensor(x)
    fmt = FORMATS[dtype_name(x)]
    index = torch.empty(t.shape, dtype=torch.int32, device=t.device)
    if t.numel():
        with on(t):
            index_kernel[ELEMENTS.grid(t.numel())](
                # inputs
                bit_view(t),
                t.numel(),
                bits,
                # outputs
                index,
                # constants
                WIDTH=fmt.width,
                M=fmt.mantissa,
                OCTAVES=fmt.octaves,
                **ELEMENTS.constants(t.numel()),
            )
    return like(index, x)


@triton.jit
def value_kernel(
    index_ptr,
    n: tl.int64,
    bits: tl.int32,
    patterns_ptr,
    WIDTH: tl.constexpr,
    M: tl.constexpr,
    OCTAVES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Pattern of the midpoint of each bucket.

    Bucket j covers `[significand, significand + 1) * 2**(octave - bits)` smallest units, `octave = (j - 1) >> bits`.
    The pattern of a subnormal is its number of units. For a normal number, the mantissa field is the fraction, and the
    exponent field follows from the octave.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    index = tl.load(index_ptr + offsets, mask=inside, other=0)
    buckets = OCTAVES << bits
    valid = (index >= 0) & (index <= 2 * buckets)
    distance = tl.where(valid, index - buckets, 0)
    j = tl.abs(distance)
    below = tl.maximum(j - 1, 0)
    octave = below >> bits
    fraction = below & ((1 << bits) - 1)
    significand = fraction + (1 << bits)
    if WIDTH == 64:
        octave = octave.to(tl.int64)
        fraction = fraction.to(tl.int64)
        significand = significand.to(tl.int64)
    spread = M - bits  # mantissa bits below the fraction
    half = (1 << spread) >> 1
    if WIDTH == 64:
        half = (tl.full((), 1, tl.int64) << spread) >> 1
    normal = ((octave - (M - 1)) << M) + (fraction << spread) + half
    wide = tl.maximum(octave - bits, 0)
    narrow = tl.maximum(bits - octave, 0)
    one = octave * 0 + 1
    rounded_up = (significand + ((one << narrow) - 1)) >> narrow
    units = tl.where(narrow > 0, rounded_up, (significand << wide) + ((one << wide) >> 1))
    magnitude = tl.where(octave >= M, normal, units)
    magnitude = tl.where(j == 0, 0, magnitude)
    if WIDTH == 64:
        sign = tl.full((), -0x8000000000000000, tl.int64)
    elif WIDTH == 32:
        sign = tl.full((), -0x80000000, tl.int32)
    else:
        sign = tl.full((), 0x8000, tl.int32)
    quiet_nan: tl.constexpr = (((1 << (WIDTH - 1 - M)) - 1) << M) | (1 << (M - 1))
    pattern = tl.where(distance < 0, magnitude | sign, magnitude)
    pattern = tl.where(valid, pattern, quiet_nan)
    tl.store(patterns_ptr + offsets, pattern.to(patterns_ptr.dtype.element_ty), mask=inside)


def bucket_value(index: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.logbucket.bucket_value`."""
    t = tensor(index)
    fmt = FORMATS[dtype]
    patterns = torch.empty(t.shape, dtype=INTEGERS[fmt.width // 8], device=t.device)
    if t.numel():
        with on(t):
            value_kernel[ELEMENTS.grid(t.numel())](
                # inputs
                t,
                t.numel(),
                bits,
                # outputs
                patterns,
                # constants
                WIDTH=fmt.width,
                M=fmt.mantissa,
                OCTAVES=fmt.octaves,
                **ELEMENTS.constants(t.numel()),
            )
    return like(patterns.view(getattr(torch, fmt.name)), index)
