"""Fixed-width packing on the CPU: eight bytes at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like
from ..coder_arguments import compiled
from ..errors import BadArgumentError, CorruptDataError
from .jit import njit_in_place

if TYPE_CHECKING:
    from ..arrays import Array

NumPy = np.ndarray[Any, Any]
Int = Any  # a machine integer or truth value inside compiled code
U8 = np.uint8
U64 = np.uint64


@njit_in_place
def _pack(values: NumPy, width: Int, out: NumPy) -> None:
    """Pack values of a fixed width; `out` needs eight extra bytes at its end."""
    w = U64(width)
    whole = U64(values.size // 8 if width <= 8 else 0)  # groups of eight values, which take `width` bytes
    for g in range(whole):
        i = g * U64(8)
        word = U64(0)
        for k in range(8):
            word |= U64(values[i + U64(k)]) << (w * U64(k))
        at = g * w
        for k in range(8):  # one store; its excess is zeros, which the next group replaces
            out[at + U64(k)] = U8((word >> U64(8 * k)) & U64(255))
    at = whole * w
    held = U64(0)
    bits = U64(0)
    for one in range(whole * U64(8), U64(values.size)):
        held |= U64(values[one]) << bits
        bits += w
        if bits >= U64(32):
            for k in range(4):
                out[at + U64(k)] = U8((held >> U64(8 * k)) & U64(255))
            at += U64(4)
            held >>= U64(32)
            bits -= U64(32)
    for k in range(4):
        out[at + U64(k)] = U8((held >> U64(8 * k)) & U64(255))


@njit_in_place
def _unpack(data: NumPy, width: Int, out: NumPy) -> None:
    """Unpack values of a fixed width; `data` needs eight extra bytes at its end."""
    w = U64(width)
    mask = (U64(1) << w) - U64(1)
    whole = U64(out.size // 8 if width <= 8 else 0)
    for g in range(whole):
        at = g * w
        word = U64(0)
        for k in range(8):
            word |= U64(data[at + U64(k)]) << U64(8 * k)
        for k in range(8):
            out[g * U64(8) + U64(k)] = (word >> (w * U64(k))) & mask
    bit = whole * w * U64(8)
    for i in range(whole * U64(8), U64(out.size)):
        at = bit >> U64(3)
        word = U64(0)
        for k in range(8):
            word |= U64(data[at + U64(k)]) << U64(8 * k)
        out[i] = (word >> (bit & U64(7))) & mask
        bit += w


def pack_bits(values: Array, width: int) -> Array:
    """See `kernels.bitpack.pack_bits`."""
    v = compiled(values)
    largest = int(v.max(initial=0))
    if largest >> width:
        raise BadArgumentError(f"values holds {largest}, which does not fit a width of {width} bits")
    size = (v.size * width + 7) // 8
    out = np.empty(size + 8, np.uint8)
    if width:
        _pack(v, width, out)
    return like(out[:size], values)


def unpack_bits(data: Array, width: int, n: int, dtype: str = "uint8") -> Array:
    """See `kernels.bitpack.unpack_bits`."""
    d = compiled(data)
    size = (n * width + 7) // 8
    if d.size != size:
        raise CorruptDataError(f"{n} values of {width} bits take {size} bytes, not {d.size}")
    if n * width % 8 and d[-1] >> (n * width % 8):
        raise CorruptDataError(f"bits are set after the last of {n} values of {width} bits")
    if width == 0:
        return like(np.zeros(n, dtype), data)
    padded = np.zeros(size + 8, np.uint8)
    padded[:size] = d
    out = np.empty(n, dtype)
    _unpack(padded, width, out)
    return like(out, data)
