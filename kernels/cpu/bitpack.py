"""Fixed-width packing on the CPU: eight bytes at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like
from ..errors import BadArgumentError, CorruptDataError
from ..sequential import compiled
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array

NumPy = np.ndarray[Any, Any]
U64 = np.uint64


@njit
def _pack(values: NumPy, width: int, words: NumPy) -> None:
    w = U64(width)
    held = U64(0)
    bits = U64(0)
    at = U64(0)
    for i in range(values.size):
        v = U64(values[i])
        held |= v << bits
        bits += w
        if bits >= U64(64):
            words[at] = held
            at += U64(1)
            bits -= U64(64)
            held = v >> (w - bits)  # w - bits >= 1 bits of v are in the full word; width <= 32, so no shift by 64
    if bits:
        words[at] = held


@njit
def _unpack(words: NumPy, width: int, out: NumPy) -> None:
    w = U64(width)
    mask = (U64(1) << w) - U64(1)
    bit = U64(0)
    for i in range(out.size):
        at = bit >> U64(6)
        low = bit & U64(63)
        # The next word is shifted in two steps, since a shift by 64 is undefined.
        both = (words[at] >> low) | ((words[at + U64(1)] << U64(1)) << (U64(63) - low))
        out[i] = both & mask
        bit += w


def pack_bits(values: Array, width: int) -> Array:
    """See `kernels.bitpack.pack_bits`."""
    v = compiled(values)
    largest = int(v.max(initial=0))
    if largest >> width:
        raise BadArgumentError(f"values holds {largest}, which does not fit a width of {width} bits")
    size = (v.size * width + 7) // 8
    words = np.empty(size // 8 + 1, np.uint64)
    if width:
        _pack(v, width, words)
    return like(words.astype("<u8", copy=False).view(np.uint8)[:size].copy(), values)


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
    words = np.zeros(size // 8 + 2, "<u8")
    words.view(np.uint8)[:size] = d
    out = np.empty(n, dtype)
    _unpack(words.astype(np.uint64, copy=False), width, out)
    return like(out, data)
