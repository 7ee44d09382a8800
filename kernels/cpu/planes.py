"""Byte planes and lossless differences on the CPU: one pass at the speed of a memory copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import dtype_name, is_torch, like, to_numpy
from ..coder_arguments import lent
from ..planes import ordered_by_sign, width_of
from .jit import njit_in_place, njit_inline
from .local_array import local_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..arrays import Array

BLOCK = 512
"""Elements per block, which stays in the first-level cache during the pass of each plane."""


def patterns(x: Array) -> np.ndarray[Any, Any]:
    """Flatten x in C order as unsigned integers of its width; no copy if x is contiguous."""
    if is_torch(x):
        import torch

        unsigned = getattr(torch, f"uint{8 * x.element_size()}")
        flat: np.ndarray[Any, Any] = x.detach().resolve_neg().contiguous().view(-1).view(unsigned).numpy()
        return flat
    a = to_numpy(x)
    a = a.astype(a.dtype.newbyteorder("="), copy=False)  # patterns are numbers, independent of the byte order in memory
    return a.reshape(-1).view(np.dtype(f"uint{8 * a.dtype.itemsize}"))


def as_values(bits: np.ndarray[Any, Any], x: Array) -> Array:
    """View patterns as values of x's dtype in the library of x."""
    if is_torch(x):
        return like(bits, x).view(x.dtype)
    if isinstance(x, np.ndarray):
        return bits.view(x.dtype.newbyteorder("="))
    name = dtype_name(x)
    return like(bits, x, dtype=name) if name == "bfloat16" else like(bits.view(name), x)


def split_planes(x: Array, rotation: int = 0) -> Array:
    """See `shrinkpoint.kernels.planes.split_planes`."""
    u = patterns(x)
    out = np.empty((u.itemsize, u.size), np.uint8)
    if u.itemsize > 1:
        _split(u, u.dtype.type(rotation), out)
    elif rotation:
        _rotate(u, u.dtype.type(rotation), out[0])
    else:
        out[0] = u
    return like(out, x)


def merge_planes(planes: Array | Sequence[Array], dtype: str, rotation: int = 0, out: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.planes.merge_planes`."""
    each = [lent(to_numpy(p)) for p in planes]
    target = np.empty(each[0].size, np.dtype(f"uint{width_of(dtype)}")) if out is None else to_numpy(out)
    bits = target.dtype.type(rotation)
    if target.itemsize == 1:
        _rotate(each[0], np.uint8(8 - rotation), target) if rotation else np.copyto(target, each[0])
    elif target.itemsize == 2:
        _merge_two(each[0], each[1], bits, target)
    elif target.itemsize == 4:
        _merge_four(each[0], each[1], each[2], each[3], bits, target)
    else:
        low, high = np.empty(target.size, np.uint32), np.empty(target.size, np.uint32)
        _merge_four(each[0], each[1], each[2], each[3], np.uint32(0), low)
        _merge_four(each[4], each[5], each[6], each[7], np.uint32(0), high)
        _merge_halves(low, high, bits, target)
    return like(target, planes[0]) if out is None else out


def difference(current: Array, previous: Array, method: str = "arithmetic", *, dtype: str | None = None) -> Array:
    """See `shrinkpoint.kernels.planes.difference`."""
    c, p = patterns(current), patterns(previous)
    out = np.empty_like(c)
    if method == "xor":
        np.bitwise_xor(c, p, out=out)
    else:
        _difference(c, p, ordered_by_sign(dtype or dtype_name(previous)), out)
    return like(out.reshape(current.shape), current)


def undifference(
    diff: Array, previous: Array, method: str = "arithmetic", *, dtype: str | None = None, out: Array | None = None
) -> Array:
    """See `shrinkpoint.kernels.planes.undifference`."""
    d, p = patterns(diff), patterns(previous)
    target = np.empty_like(p) if out is None else to_numpy(out)
    if method == "xor":
        np.bitwise_xor(d, p, out=target)
    else:
        _undifference(d, p, ordered_by_sign(dtype or dtype_name(previous)), target)
    return as_values(target.reshape(previous.shape), previous) if out is None else out


@njit_in_place
def _rotate(source: Any, bits: Any, target: Any) -> None:
    """Rotate bit patterns left by 1 to width - 1 bits: target[i] = rotl(source[i])."""
    kind = source.dtype.type
    back = kind(kind(8 * source.itemsize) - bits)
    for i in range(target.size):
        target[i] = kind(kind(source[i] << bits) | kind(source[i] >> back))


# LLVM inlines the functions below, so that every shift is a constant. With a shift known only at run time, the vector
# loop would work on 64 bits and run at a third of the speed.
@njit_inline
def _byte(source: Any, shift: Any, target: Any) -> None:
    """Extract the byte that starts at bit `shift` of each pattern.

    There is one input and one output stream, so that the loop vectorizes.
    """
    kind = source.dtype.type
    for i in range(target.size):
        target[i] = np.uint8(source[i] >> kind(shift))


@njit_in_place
def _split(u: Any, rotation: Any, out: Any) -> None:
    """Write out[p, i] = byte p of u[i], one plane after another over a cached block."""
    rotated = local_array(BLOCK, u.dtype)
    for start in range(0, u.size, BLOCK):
        stop = min(start + BLOCK, u.size)
        source = u[start:stop]
        if rotation > 0:
            target = rotated[: stop - start]
            _rotate(source, rotation, target)
            source = target
        _byte(source, 0, out[0, start:stop])
        _byte(source, 8, out[1, start:stop])
        if out.shape[0] >= 4:
            _byte(source, 16, out[2, start:stop])
            _byte(source, 24, out[3, start:stop])
        if out.shape[0] == 8:
            _byte(source, 32, out[4, start:stop])
            _byte(source, 40, out[5, start:stop])
            _byte(source, 48, out[6, start:stop])
            _byte(source, 56, out[7, start:stop])


@njit_in_place
def _merge_two(a: Any, b: Any, rotation: Any, out: Any) -> None:
    """Join two byte planes into patterns of 16 bits, rotated to the right."""
    back = np.uint16(np.uint16(16) - rotation)
    joined = local_array(BLOCK, np.uint16)  # a loop that may read its own output does not vectorize
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        target, low, high = out[start:stop], a[start:stop], b[start:stop]
        if rotation > 0:
            target = joined[: stop - start]
        for i in range(target.size):
            target[i] = np.uint16(np.uint16(low[i]) | np.uint16(np.uint16(high[i]) << np.uint16(8)))
        if rotation > 0:
            _rotate(target, back, out[start:stop])


@njit_in_place
def _merge_four(a: Any, b: Any, c: Any, d: Any, rotation: Any, out: Any) -> None:
    """Join four byte planes into patterns of 32 bits, rotated to the right."""
    s8, s16, s24 = np.uint32(8), np.uint32(16), np.uint32(24)
    back = np.uint32(np.uint32(32) - rotation)
    joined = local_array(BLOCK, np.uint32)
    for start in range(0, out.size, BLOCK):
        stop = min(start + BLOCK, out.size)
        target = out[start:stop]
        p0, p1, p2, p3 = a[start:stop], b[start:stop], c[start:stop], d[start:stop]
        if rotation > 0:
            target = joined[: stop - start]
        for i in range(target.size):
            low = np.uint32(p0[i]) | (np.uint32(p1[i]) << s8)
            target[i] = low | (np.uint32(p2[i]) << s16) | (np.uint32(p3[i]) << s24)
        if rotation > 0:
            _rotate(target, back, out[start:stop])


@njit_in_place
def _merge_halves(low: Any, high: Any, rotation: Any, out: Any) -> None:
    """Join the lower and the upper 32 bits of patterns, rotated to the right."""
    back = np.uint64(np.uint64(64) - rotation)
    for i in range(out.size):
        x = np.uint64(low[i]) | (np.uint64(high[i]) << np.uint64(32))
        out[i] = (x >> rotation) | (x << back) if rotation > 0 else x


# In the next two functions every choice is a compare and a select. With shifts, the vector loop would work on 64 bits,
# and 8- and 16-bit types would run at half to a quarter of the speed.
@njit_in_place
def _difference(current: Any, previous: Any, signed: Any, out: Any) -> None:
    """Zig-zag code of the difference of order-mapped patterns, modulo 2**width."""
    kind = out.dtype.type
    zero, one, half = kind(0), kind(1), kind(1 << (8 * out.itemsize - 1))
    low = kind(half - one)
    ones = kind(low | half)
    if signed:
        for i in range(out.size):
            c, p = current[i], previous[i]
            c = kind(c ^ (low if c >= half else zero))
            p = kind(p ^ (low if p >= half else zero))
            d = kind(c - p)
            out[i] = kind(kind(d << one) ^ (ones if d >= half else zero))
    else:
        for i in range(out.size):
            d = kind(current[i] - previous[i])
            out[i] = kind(kind(d << one) ^ (ones if d >= half else zero))


@njit_in_place
def _undifference(diff: Any, previous: Any, signed: Any, out: Any) -> None:
    """Inverse of `_difference`."""
    kind = out.dtype.type
    zero, one, half = kind(0), kind(1), kind(1 << (8 * out.itemsize - 1))
    low = kind(half - one)
    ones = kind(low | half)
    steps = local_array(BLOCK, out.dtype)  # a loop that may read its own output does not vectorize
    for start in range(0, out.size, BLOCK):
        parent, target = previous[start : start + BLOCK], out[start : start + BLOCK]
        own = diff[start : start + BLOCK]
        for i in range(own.size):
            d = own[i]
            steps[i] = kind(kind(d >> one) ^ (ones if kind(d & one) != zero else zero))
        if signed:
            for i in range(target.size):
                p = parent[i]
                c = kind(kind(p ^ (low if p >= half else zero)) + steps[i])
                target[i] = kind(c ^ (low if c >= half else zero))
        else:
            for i in range(target.size):
                target[i] = kind(parent[i] + steps[i])
