"""Packing and masks on the CPU: eight bytes at a time; set bits are read by words."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.arrays import Array, like, to_numpy, writeable
from ..backend.instructions import local_array
from ..backend.jit import njit_in_place, njit_inline
from ..errors import BadArgumentError, CorruptDataError
from ..planes.cpu import as_values, patterns
from . import trailing_bits_set, wrong_count

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


def pack_bits(values: Array, width: int, *, checked: bool = True) -> Array:
    """See `shrinkpoint.kernels.packing.pack_bits`."""
    v = writeable(values)
    largest = int(v.max(initial=0))
    if largest >> width:
        raise BadArgumentError(f"values holds {largest}, which does not fit a width of {width} bits")
    size = (v.size * width + 7) // 8
    out = np.empty(size + 8, np.uint8)
    if width:
        _pack(v, width, out)
    return like(out[:size], values)


def unpack_bits(data: Array, width: int, n: int, dtype: str = "uint8") -> Array:
    """See `shrinkpoint.kernels.packing.unpack_bits`."""
    d = writeable(data)
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


BLOCK = 4096
"""Flags per round; they stay in the first-level cache between comparing and packing."""

PACK = np.uint64(0x0102040810204080)
"""Factor that moves flag q of eight flag bytes to bit 56 + q; no two of the 64 partial products share a bit."""

SPREAD = np.uint64(0x0101010101010101)
PICK = np.uint64(0x8040201008040201)
CARRY = np.uint64(0x7F7F7F7F7F7F7F7F)

DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
BIT_AT = np.zeros(64, np.uint8)
"""Position of a lone set bit, by the top six bits of its product with `DE_BRUIJN` (Numba has no count of zeros)."""
for _position in range(64):
    BIT_AT[((int(DE_BRUIJN) << _position) % (1 << 64)) >> 58] = _position

DENSE = 32
"""Set bits above which a word is processed element by element without branches instead of bit by bit."""


def changed_mask(current: Array, previous: Array) -> Array:
    """See `shrinkpoint.kernels.packing.changed_mask`."""
    c, p = patterns(current), patterns(previous)
    out = np.empty((c.size + 7) // 8, np.uint8)
    _changed(c, p, out)
    return like(out, current)


def pack_mask(mask: Array) -> Array:
    """See `shrinkpoint.kernels.packing.pack_mask`."""
    m = patterns(mask)
    out = np.empty((m.size + 7) // 8, np.uint8)
    _pack_mask(m, out)
    return like(out, mask)


def unpack_mask(data: Array, n: int) -> Array:
    """See `shrinkpoint.kernels.packing.unpack_mask`."""
    words = _words(to_numpy(data), n)
    flags = np.empty(64 * words.size, np.uint8)
    _unpack_mask(words.view(np.uint8), flags.view(np.uint64))
    return like(flags[:n].view(np.bool_), data)


def gather(x: Array, mask_bits: Array) -> Array:
    """See `shrinkpoint.kernels.packing.gather`."""
    flat = patterns(x)
    words = _words(to_numpy(mask_bits), flat.size)
    out = np.empty(_count(words), flat.dtype)
    _gather(flat, words, BIT_AT, out)
    return as_values(out, x)


def scatter(base: Array, mask_bits: Array, values: Array) -> Array:
    """See `shrinkpoint.kernels.packing.scatter`."""
    out, v = patterns(base).copy(), patterns(values)
    words = _words(to_numpy(mask_bits), out.size)
    marked = _count(words)
    if marked != v.size:
        raise wrong_count(marked, v.size)
    _scatter(words, v, BIT_AT, out)
    return as_values(out.reshape(base.shape), base)


def _words(data: np.ndarray[Any, Any], n: int) -> np.ndarray[Any, Any]:
    """The mask of n elements as aligned, zero-padded 64-bit words.

    Checks that the bits after the last element are zero.
    """
    if n % 8 and data[-1] >> (n % 8):
        raise trailing_bits_set()
    words = np.zeros((n + 63) // 64, "<u8")
    words.view(np.uint8)[: data.size] = data
    return words


@njit_inline
def _fold(flags: Any, used: Any, target: Any) -> None:
    """Pack the first `used` flag bytes of the block, eight by one multiplication."""
    for i in range(used, 8 * target.size):
        flags[i] = 0
    eight = flags.view(np.uint64)
    for j in range(target.size):
        target[j] = np.uint8((eight[j] * PACK) >> np.uint64(56))


@njit_in_place
def _changed(current: Any, previous: Any, out: Any) -> None:
    """Compare into a cached block of flag bytes, which vectorises, then pack them."""
    flags = local_array(BLOCK, np.uint8)
    for start in range(0, current.size, BLOCK):
        stop = min(start + BLOCK, current.size)
        c, p = current[start:stop], previous[start:stop]
        for i in range(stop - start):
            flags[i] = c[i] != p[i]
        _fold(flags, stop - start, out[start // 8 : (stop + 7) // 8])


@njit_in_place
def _pack_mask(mask: Any, out: Any) -> None:
    """Pack bytes that are zero or not."""
    flags = local_array(BLOCK, np.uint8)
    for start in range(0, mask.size, BLOCK):
        stop = min(start + BLOCK, mask.size)
        m = mask[start:stop]
        for i in range(stop - start):
            flags[i] = m[i] != 0
        _fold(flags, stop - start, out[start // 8 : (stop + 7) // 8])


@njit_in_place
def _unpack_mask(data: Any, eight: Any) -> None:
    """Expand each byte into eight flag bytes.

    Copy it eight times, select one bit in each copy, move that bit to the bottom.
    """
    for j in range(data.size):
        picked = (np.uint64(data[j]) * SPREAD) & PICK
        eight[j] = ((picked + CARRY) >> np.uint64(7)) & SPREAD


@njit_inline
def _ones(word: Any) -> Any:
    """Number of set bits of a 64-bit word."""
    w = word - ((word >> np.uint64(1)) & np.uint64(0x5555555555555555))
    w = (w & np.uint64(0x3333333333333333)) + ((w >> np.uint64(2)) & np.uint64(0x3333333333333333))
    w = (w + (w >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return np.int64((w * SPREAD) >> np.uint64(56))


@njit_in_place
def _count(words: Any) -> Any:
    """Number of set bits of all words."""
    total = 0
    for j in range(words.size):
        total += _ones(words[j])
    return total


@njit_in_place
def _gather(x: Any, words: Any, bit_at: Any, out: Any) -> None:
    """Copy the elements whose bit is set; `out` has exactly as many elements as bits are set."""
    zero, one = np.uint64(0), np.uint64(1)
    k = np.int64(0)
    for j in range(words.size):
        word, start = words[j], 64 * j
        # The branch-free form writes one element ahead and reads whole words, so more than a word must be left.
        if _ones(word) > DENSE and k + 64 < out.size:
            for q in range(64):
                out[k] = x[start + q]
                k += np.int64((word >> np.uint64(q)) & one)
        else:
            while word != zero:
                lowest = word & (~word + one)
                out[k] = x[start + np.int64(bit_at[(lowest * DE_BRUIJN) >> np.uint64(58)])]
                k += 1
                word = word & (word - one)


@njit_in_place
def _scatter(words: Any, values: Any, bit_at: Any, out: Any) -> None:
    """Write the next of `values` wherever bit i is set; as many values as set bits."""
    zero, one = np.uint64(0), np.uint64(1)
    ahead = local_array(64, values.dtype)
    k = np.int64(0)
    for j in range(words.size):
        word, start = words[j], 64 * j
        if _ones(word) > DENSE and k + 64 < values.size:  # reads one place ahead
            for q in range(64):
                ahead[q] = values[k]
                k += np.int64((word >> np.uint64(q)) & one)
            for q in range(64):
                if (word >> np.uint64(q)) & one:
                    out[start + q] = ahead[q]
        else:
            while word != zero:
                lowest = word & (~word + one)
                out[start + np.int64(bit_at[(lowest * DE_BRUIJN) >> np.uint64(58)])] = values[k]
                k += 1
                word = word & (word - one)
