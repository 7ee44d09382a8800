"""Byte planes, differences and categories on the CPU, at the speed of a memory copy.

The category of an integer comes from the exponent of a float.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend.arrays import Array, dtype_name, is_torch, like, to_numpy, writeable, writeable_view
from ..backend.instructions import eight_bytes, local_array, ones, put_word, spread, squeeze
from ..backend.jit import njit_in_place, njit_inline
from ..errors import CorruptDataError
from . import VALUE_WIDTHS as WIDTHS
from . import category_count, ordered_by_sign, width_of

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
    each = [writeable_view(to_numpy(p)) for p in planes]
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


NumPy = np.ndarray[Any, Any]
CATEGORY_BLOCK = 512
"""Values per block: their categories are found by vectorized loops before their open bits are packed."""
ROOM = 8 * CATEGORY_BLOCK
"""Bytes after the open bits that may be read (their value does not matter)."""


def split_categories(values: Array, bits: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.planes.split_categories`."""
    v = writeable(values)
    categories = np.empty(v.size, np.uint8)
    extra = np.empty(8 * ((v.size * (8 * v.itemsize - 1 - bits) + 63) // 64 + 1), np.uint8)
    if v.itemsize == 8:
        total = int(_split_wide(v, bits, categories, extra.view("<u8")))
    else:
        total = int(_split_categories(v, bits, categories, extra))
    extra.resize((total + 7) // 8, refcheck=False)  # in place: nobody else has seen it
    return like(categories, values), like(extra, values)


def join_categories(categories: Array, extra: Array, bits: int, dtype: str, out: Array | None = None) -> Array:
    """See `shrinkpoint.kernels.planes.join_categories`."""
    c, data = writeable_view(to_numpy(categories)), to_numpy(extra)
    limit = category_count(WIDTHS[dtype], bits)
    top = int(c.max()) if c.size else 0
    if top >= limit:
        raise CorruptDataError(f"category {top} is not a category of {dtype}")
    padded = np.zeros((data.size + ROOM) // 8 + 1, "<u8")
    padded.view(np.uint8)[: data.size] = data
    values = np.empty(c.size, dtype) if out is None else to_numpy(out)
    if values.itemsize == 8:
        total = int(_join_wide(c, padded, 8 * data.size, bits, values))
    else:
        total = int(_join(c, padded.view(np.uint8), 8 * data.size, bits, values))
    if total < 0 or data.size != (total + 7) // 8 or (total % 8 and data[-1] >> (total % 8)):
        raise CorruptDataError(f"{data.size} bytes are not the bits that the categories leave open")
    return like(values, categories) if out is None else out


@njit_in_place
def _split_categories(values: NumPy, bits: Any, categories: NumPy, extra: NumPy) -> Any:
    """Split 16- or 32-bit values into `categories` and `extra`; return the number of open bits.

    The open bits of a word of values (four of 16 bits, two of 32) leave the others in one step: at most 56, to which 7
    from before come. With fewer than three bits after the leading one they are up to 60, and take two steps.
    """
    kind = values.dtype.type
    shift = np.uint32(bits)
    least = np.uint32(np.uint32(1) << shift)
    offset = np.int32(126) + np.int32(bits)  # exponent bias less the halving, and the bits after the leading one
    floats = local_array(CATEGORY_BLOCK, np.float32)
    patterns = floats.view(np.int32)
    own, masks = local_array(CATEGORY_BLOCK, values.dtype), local_array(CATEGORY_BLOCK, values.dtype)
    words, open_bits = own.view(np.uint64), masks.view(np.uint64)
    at, fill, held = np.int64(0), np.int64(0), np.uint64(0)
    lanes = 8 // values.itemsize
    halves = 2 if lanes == 2 and bits < 3 else 1
    whole, low = ~np.uint64(0), np.uint64(0xFFFFFFFF)
    for start in range(0, values.size, CATEGORY_BLOCK):
        part = values[start : start + CATEGORY_BLOCK]
        found = categories[start : start + CATEGORY_BLOCK]
        # The second bit is cleared, so that no rounding reaches the next power of two; halved, so that it is positive.
        for i in range(part.size):
            v = (np.uint32(part[i]) | least) >> np.uint32(1)
            floats[i] = np.float32(np.int32(v & ~(v >> np.uint32(1))))
        for i in range(part.size):
            own[i] = part[i]
        some = np.uint32(0)
        for i in range(part.size):
            k = np.uint32((patterns[i] >> np.int32(23)) - offset)
            found[i] = np.uint8((k << shift) + (np.uint32(part[i]) >> k))
            masks[i] = kind((np.uint32(1) << k) - np.uint32(1))
            some |= k
        if some == np.uint32(0):
            continue
        for i in range(part.size, CATEGORY_BLOCK):
            masks[i] = kind(0)
        for j in range((part.size + lanes - 1) // lanes):
            for half in range(halves):
                mask = open_bits[j] & (whole if halves == 1 else low << np.uint64(32 * half))
                held |= squeeze(words[j], mask, kind(0)) << np.uint64(fill)
                put_word(extra, at, held)
                fill += np.int64(ones(mask))
                at += fill >> 3
                held >>= np.uint64(fill & 56)
                fill &= 7
    put_word(extra, at, held)
    return 8 * at + fill


@njit_in_place
def _split_wide(values: NumPy, bits: Any, categories: NumPy, words: NumPy) -> Any:
    """Split 64-bit values, as `_split_categories` does for narrower ones."""
    one, sixty = np.uint64(1), np.uint64(63)
    shift = np.uint64(bits)
    least = one << shift
    floats = local_array(CATEGORY_BLOCK, np.float64)
    patterns = floats.view(np.int64)
    offset = np.int64(1022) + np.int64(bits)
    word, fill, total = np.uint64(0), np.uint64(0), np.int64(0)
    at = np.int64(0)
    for start in range(0, values.size, CATEGORY_BLOCK):
        part = values[start : start + CATEGORY_BLOCK]
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


@njit_in_place
def _join(categories: NumPy, data: NumPy, available: int, bits: Any, values: NumPy) -> Any:
    """Join values of 16 or 32 bits; return the open bits used, -1 if too few are available.

    A word of values takes at most 56 open bits in one step, as in `_split_categories`, and a load has 57. A block whose
    categories are the values takes no load. The bits are compared before each block: after `available`, as many bytes
    may be read as a block takes.
    """
    kind = values.dtype.type
    shift, one = np.uint32(bits), np.uint32(1)
    least = np.uint8(2 << bits)
    joined, masks = local_array(CATEGORY_BLOCK, values.dtype), local_array(CATEGORY_BLOCK, values.dtype)
    words, open_bits = joined.view(np.uint64), masks.view(np.uint64)
    at = np.int64(0)
    lanes = 8 // values.itemsize
    halves = 2 if lanes == 2 and bits < 3 else 1
    whole, low = ~np.uint64(0), np.uint64(0xFFFFFFFF)
    for start in range(0, values.size, CATEGORY_BLOCK):
        own, out = categories[start : start + CATEGORY_BLOCK], values[start : start + CATEGORY_BLOCK]
        top = np.uint8(0)
        for i in range(own.size):
            top = max(top, own[i])
        if top < least:
            for i in range(out.size):
                out[i] = kind(own[i])
            continue
        if at > available:
            return np.int64(-1)
        for i in range(own.size):
            c = np.uint32(own[i])
            k = np.uint32((c >> shift) - np.uint32((c >> shift) > np.uint32(0)))
            joined[i] = kind((c - (k << shift)) << k)
            masks[i] = kind((one << k) - one)
        for i in range(own.size, CATEGORY_BLOCK):
            masks[i] = kind(0)
        for j in range((own.size + lanes - 1) // lanes):
            for half in range(halves):
                mask = open_bits[j] & (whole if halves == 1 else low << np.uint64(32 * half))
                words[j] |= spread(eight_bytes(data, at >> 3) >> np.uint64(at & 7), mask, kind(0))
                at += np.int64(ones(mask))
        for i in range(out.size):
            out[i] = joined[i]
    return at


@njit_in_place
def _join_wide(categories: NumPy, words: NumPy, available: int, bits: Any, values: NumPy) -> Any:
    """Join 64-bit values one by one; return the bits used, -1 if too few are available."""
    one, sixty, six = np.uint64(1), np.uint64(63), np.uint64(6)
    shift = np.uint64(bits)
    at = np.uint64(0)
    for i in range(values.size):
        if at > np.uint64(available):
            return np.int64(-1)
        c = np.uint64(categories[i])
        k = c >> shift
        k -= np.uint64(k > np.uint64(0))
        word, fill = at >> six, at & sixty
        x = (words[word] >> fill) | ((words[word + one] << one) << (sixty - fill))
        values[i] = ((c - (k << shift)) << k) + (x & ((one << k) - one))
        at += k
    return np.int64(at)
