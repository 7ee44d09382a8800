"""Byte planes and lossless differences on the GPU: elementwise, bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..backend.arrays import Array, dtype_name
from ..backend.gpu import INTEGERS, Launch, bit_view, elements, like, order_key, tensor
from . import ordered_by_sign, width_of

ELEMENTS = Launch(block=4096, warps=8)

UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


@triton.jit
def split_kernel(
    patterns_ptr, n: tl.int64, planes_ptr, ITEMSIZE: tl.constexpr, ROTATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Split patterns into planes: planes[p, i] = byte p of pattern i rotated to the left."""
    offsets, inside = elements(n, BLOCK)
    pattern = tl.load(patterns_ptr + offsets, mask=inside, other=0)
    if ITEMSIZE == 1:
        pattern = pattern.to(tl.int32)
    lowest = pattern
    if ROTATION > 0:
        lowest = (pattern << ROTATION) | ((pattern >> (8 * ITEMSIZE - ROTATION)) & ((1 << ROTATION) - 1))
    tl.store(planes_ptr + offsets, (lowest & 255).to(tl.uint8), mask=inside)
    for p in tl.static_range(1, ITEMSIZE):
        tl.store(planes_ptr + p * n + offsets, ((pattern >> (8 * p - ROTATION)) & 255).to(tl.uint8), mask=inside)


def split_planes(x: Array, rotation: int = 0) -> Array:
    """See `shrinkpoint.kernels.planes.split_planes`."""
    t = tensor(x)
    planes = torch.empty((t.element_size(), t.numel()), dtype=torch.uint8, device=t.device)
    patterns = bit_view(t)
    ELEMENTS.run(split_kernel, t.numel(), patterns, t.numel(), planes, ITEMSIZE=t.element_size(), ROTATION=rotation)
    return like(planes, x)


@triton.jit
def merge_kernel(
    planes_ptr, n: tl.int64, patterns_ptr, ITEMSIZE: tl.constexpr, ROTATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Merge planes into patterns, rotated to the right."""
    offsets, inside = elements(n, BLOCK)
    kind: tl.constexpr = tl.int64 if ITEMSIZE == 8 else tl.int32
    pattern = tl.load(planes_ptr + offsets, mask=inside, other=0).to(kind)
    for p in tl.static_range(1, ITEMSIZE):
        byte = tl.load(planes_ptr + p * n + offsets, mask=inside, other=0).to(kind)
        pattern = pattern | (byte << (8 * p))
    if ROTATION > 0:
        back: tl.constexpr = 8 * ITEMSIZE - ROTATION
        pattern = ((pattern >> ROTATION) & ((1 << back) - 1)) | (pattern << back)
    tl.store(patterns_ptr + offsets, pattern.to(patterns_ptr.dtype.element_ty), mask=inside)


def merge_planes(planes: Array, dtype: str, rotation: int = 0, out: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.planes.merge_planes`."""
    t = tensor(planes)
    itemsize, n = width_of(dtype) // 8, t.shape[1]
    patterns = torch.empty(n, dtype=INTEGERS[itemsize], device=t.device) if out is None else bit_view(out)
    ELEMENTS.run(merge_kernel, n, t, n, patterns, ITEMSIZE=itemsize, ROTATION=rotation)
    return like(patterns.view(UNSIGNED[itemsize]), planes) if out is None else out


@triton.jit
def sign_extended(u, WIDTH: tl.constexpr):
    """The WIDTH low bits of u as a two's complement number, int32 (int64 for 64 bits)."""
    if WIDTH == 64:
        s = u.to(tl.int64)
    elif WIDTH == 32:
        s = u.to(tl.int32)
    else:
        s = (u.to(tl.int32) << (32 - WIDTH)) >> (32 - WIDTH)
    return s


@triton.jit
def difference_kernel(
    current_ptr,
    previous_ptr,
    n: tl.int64,
    out_ptr,
    WIDTH: tl.constexpr,
    FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Zig-zag of the difference of two patterns modulo 2**WIDTH, order-mapped first if FLOAT."""
    offsets, inside = elements(n, BLOCK)
    current = sign_extended(tl.load(current_ptr + offsets, mask=inside, other=0), WIDTH)
    previous = sign_extended(tl.load(previous_ptr + offsets, mask=inside, other=0), WIDTH)
    if FLOAT:
        current = order_key(current, WIDTH)
        previous = order_key(previous, WIDTH)
    d = sign_extended(current - previous, WIDTH)
    zigzag = (d << 1) ^ tl.where(d < 0, -1, 0)
    tl.store(out_ptr + offsets, zigzag.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def undifference_kernel(
    difference_ptr,
    previous_ptr,
    n: tl.int64,
    out_ptr,
    WIDTH: tl.constexpr,
    FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the current patterns from the result of `difference_kernel`."""
    offsets, inside = elements(n, BLOCK)
    low: tl.constexpr = (1 << (WIDTH - 1)) - 1
    zigzag = sign_extended(tl.load(difference_ptr + offsets, mask=inside, other=0), WIDTH)
    previous = sign_extended(tl.load(previous_ptr + offsets, mask=inside, other=0), WIDTH)
    if FLOAT:
        previous = order_key(previous, WIDTH)
    d = ((zigzag >> 1) & low) ^ tl.where((zigzag & 1) == 1, -1, 0)
    current = sign_extended(previous + d, WIDTH)
    if FLOAT:
        current = order_key(current, WIDTH)
    tl.store(out_ptr + offsets, current.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def xor_kernel(a_ptr, b_ptr, n: tl.int64, out_ptr, BLOCK: tl.constexpr):
    """Compute a ^ b on patterns, which is its own inverse."""
    offsets, inside = elements(n, BLOCK)
    a = tl.load(a_ptr + offsets, mask=inside, other=0)
    b = tl.load(b_ptr + offsets, mask=inside, other=0)
    tl.store(out_ptr + offsets, a ^ b, mask=inside)


def difference(current: Array, previous: Array, method: str = "arithmetic", *, dtype: str | None = None) -> Array:
    """See `shrinkpoint.kernels.planes.difference`."""
    c, p = tensor(current), tensor(previous)
    out = _combine(difference_kernel, c, p, method, dtype or dtype_name(previous))
    return like(out.view(UNSIGNED[c.element_size()]).reshape(c.shape), current)


def undifference(
    diff: Array, previous: Array, method: str = "arithmetic", *, dtype: str | None = None, out: Array | None = None
) -> Array:
    """See `shrinkpoint.kernels.planes.undifference`."""
    d, p = tensor(diff), tensor(previous)
    current = _combine(undifference_kernel, d, p, method, dtype or dtype_name(previous), out)
    return like(current.view(p.dtype).reshape(p.shape), previous) if out is None else out


def _combine(
    kernel: triton.JITFunction,
    first: torch.Tensor,
    second: torch.Tensor,
    method: str,
    dtype: str,
    room: torch.Tensor | None = None,
) -> torch.Tensor:
    """Combine patterns of two arrays by `kernel` or exclusive or; flat, in `room` if given."""
    a, b = bit_view(first), bit_view(second)
    out = torch.empty_like(a) if room is None else bit_view(room)
    if method == "xor":
        ELEMENTS.run(xor_kernel, a.numel(), a, b, a.numel(), out)
    else:
        width, float_ = 8 * a.element_size(), ordered_by_sign(dtype)
        ELEMENTS.run(kernel, a.numel(), a, b, a.numel(), out, WIDTH=width, FLOAT=float_)
    return out
