"""Magnitude categories on the CPU: bit lengths by the exponent of a float, in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like, to_numpy
from ..categories import WIDTHS, category_count
from ..coder_arguments import compiled
from ..errors import CorruptDataError
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array

NumPy = np.ndarray[Any, Any]
BLOCK = 512
"""Values per block: their categories are found by vectorized loops before their open bits are packed."""


def split_categories(values: Array, bits: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.categories.split_categories`."""
    v = compiled(values)
    categories = np.empty(v.size, np.uint8)
    extra = np.empty(8 * ((v.size * (8 * v.itemsize - 1 - bits) + 63) // 64 + 1), np.uint8)
    total = int((_split_wide if v.itemsize == 8 else _split)(v, bits, categories, extra.view("<u8")))
    extra.resize((total + 7) // 8, refcheck=False)  # in place, because no other reference exists
    return like(categories, values), like(extra, values)


def join_categories(categories: Array, extra: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.categories.join_categories`."""
    c, data = compiled(categories), to_numpy(extra)
    limit = category_count(WIDTHS[dtype], bits)
    top = int(c.max()) if c.size else 0
    if top >= limit:
        raise CorruptDataError(f"category {top} is not a category of {dtype}")
    total = int(_open_bits(c, bits))
    if data.size != (total + 7) // 8 or (total % 8 and data[-1] >> (total % 8)):
        raise CorruptDataError(f"{data.size} bytes are not the {total} bits that the categories leave open")
    words = np.zeros((data.size + 7) // 8 + 1, "<u8")
    words.view(np.uint8)[: data.size] = data
    values = np.empty(c.size, dtype)
    _join(c, words, values.dtype.type(bits), values)
    return like(values, categories)


@njit
def _split(values: NumPy, bits: Any, categories: NumPy, words: NumPy) -> Any:
    """Split 16- or 32-bit values into `categories` and `words`; return the number of open bits."""
    one, sixty = np.uint64(1), np.uint64(63)
    shift = np.uint32(bits)
    least = np.uint32(np.uint32(1) << shift)
    offset = np.int32(126) + np.int32(bits)  # exponent bias less the halving, and the bits after the leading one
    floats = np.empty(BLOCK, np.float32)
    patterns = floats.view(np.int32)
    wide = np.empty(BLOCK, np.uint32)
    open_bits, extra = np.zeros(BLOCK, np.uint32), np.zeros(BLOCK, np.uint32)
    sizes, fields = np.zeros(BLOCK // 2, np.uint64), np.zeros(BLOCK // 2, np.uint64)
    word, fill = np.uint64(0), np.uint64(0)
    at = np.int64(0)
    for start in range(0, values.size, BLOCK):
        part = values[start : start + BLOCK]
        own = categories[start : start + BLOCK]
        # The second bit is cleared, so that no rounding reaches the next power of two. The value is halved, so that it
        # is positive.
        for i in range(part.size):
            v = (np.uint32(part[i]) | least) >> np.uint32(1)
            floats[i] = np.float32(np.int32(v & ~(v >> np.uint32(1))))
        some = np.uint32(0)
        for i in range(part.size):
            v = np.uint32(part[i])
            k = np.uint32((patterns[i] >> np.int32(23)) - offset)
            wide[i] = (k << shift) + (v >> k)
            open_bits[i] = k
            extra[i] = v & ((np.uint32(1) << k) - np.uint32(1))
            some |= k
        for i in range(part.size):
            own[i] = np.uint8(wide[i])
        if some == np.uint32(0):
            continue
        for i in range(part.size, BLOCK):
            open_bits[i] = extra[i] = np.uint32(0)
        # Open bits of two neighbours are joined, then of four and more while they fit into a word. This shortens the
        # loop in which each step depends on the previous one.
        most = np.uint64(0)
        for i in range(BLOCK // 2):
            first = np.uint64(open_bits[2 * i])
            fields[i] = np.uint64(extra[2 * i]) | np.uint64(extra[2 * i + 1]) << first
            size = first + np.uint64(open_bits[2 * i + 1])
            sizes[i] = size
            most = max(most, size)
        count = BLOCK // 2
        while count > 1 and most <= np.uint64(32):
            count //= 2
            most = np.uint64(0)
            for i in range(count):
                first = sizes[2 * i]
                fields[i] = fields[2 * i] | fields[2 * i + 1] << first
                size = first + sizes[2 * i + 1]
                sizes[i] = size
                most = max(most, size)
        for i in range(count):
            x = fields[i]
            word |= x << fill
            words[at] = word
            filled = fill + sizes[i]
            full = filled >> np.uint64(6)
            at += np.int64(full)
            word = ((x >> one) >> (sixty - fill)) if full else word
            fill = filled & sixty
    words[at] = word
    return np.int64(64) * at + np.int64(fill)


@njit
def _split_wide(values: NumPy, bits: Any, categories: NumPy, words: NumPy) -> Any:
    """Split 64-bit values, as `_split` does for narrower ones."""
    one, sixty = np.uint64(1), np.uint64(63)
    shift = np.uint64(bits)
    least = one << shift
    floats = np.empty(BLOCK, np.float64)
    patterns = floats.view(np.int64)
    offset = np.int64(1022) + np.int64(bits)
    word, fill, total = np.uint64(0), np.uint64(0), np.int64(0)
    at = np.int64(0)
    for start in range(0, values.size, BLOCK):
        part = values[start : start + BLOCK]
        for i in range(part.size):
            v = (part[i] | least) >> one
            floats[i] = np.float64(np.int64(v & ~(v >> one)))
        for i in range(part.size):
            k = np.uint64((patterns[i] >> np.int64(52)) - offset)
            categories[start + i] = np.uint8((k << shift) + (part[i] >> k))
            x = part[i] & ((one << k) - one)
            word |= x << fill
            words[at] = word
            filled = fill + k
            full = filled >> np.uint64(6)
            at += np.int64(full)
            word = ((x >> one) >> (sixty - fill)) if full else word
            fill = filled & sixty
            total += np.int64(k)
    words[at] = word
    return total


@njit
def _open_bits(categories: NumPy, bits: int) -> Any:
    """Total number of open bits of these categories."""
    total = np.int64(0)
    for start in range(0, categories.size, 1 << 20):  # 32 bits are enough for so many, and vectorise
        part = categories[start : start + (1 << 20)]
        some = np.uint32(0)
        for i in range(part.size):
            c = part[i] >> np.uint8(bits)
            some += np.uint32(c) - np.uint32(c > 0)
        total += np.int64(some)
    return total


@njit
def _join(categories: NumPy, words: NumPy, bits: Any, values: NumPy) -> None:
    kind = values.dtype.type
    one, sixty, six = np.uint64(1), np.uint64(63), np.uint64(6)
    at = np.uint64(0)
    for i in range(values.size):
        c = np.uint64(categories[i])
        size = c >> np.uint64(bits)
        k = size - np.uint64(size > 0)
        word, shift = at >> six, at & sixty
        x = (words[word] >> shift) | ((words[word + one] << one) << (sixty - shift))
        values[i] = kind(((c - (k << np.uint64(bits))) << k) + (x & ((one << k) - one)))
        at += k
