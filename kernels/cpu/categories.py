"""Magnitude categories on the CPU: bit lengths by the exponent of a float, in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import config, types
from numba.extending import intrinsic

from ..arrays import like, to_numpy
from ..categories import WIDTHS, category_count
from ..coder_arguments import compiled, lent
from ..errors import CorruptDataError
from .jit import njit_in_place
from .local_array import local_array

if TYPE_CHECKING:
    from ..arrays import Array

INTERPRETED = bool(config.DISABLE_JIT)  # type: ignore[attr-defined]
HAS_BMI2 = (
    not INTERPRETED
    and not config.CPU_FEATURES  # type: ignore[attr-defined]
    and config.CPU_NAME is None  # type: ignore[attr-defined]
    and bool(dict(binding.get_host_cpu_features()).get("bmi2"))
)
"""Whether code is compiled for this processor, and it moves the bits of a mask by one instruction."""
_WORD = ir.IntType(64)
NumPy = np.ndarray[Any, Any]
BLOCK = 512
"""Values per block: their categories are found by vectorized loops before their open bits are packed."""
ROOM = 8 * BLOCK
"""Bytes after the open bits that may be read (their value does not matter)."""


def split_categories(values: Array, bits: int) -> tuple[Array, Array]:
    """See `kernels.categories.split_categories`."""
    v = compiled(values)
    categories = np.empty(v.size, np.uint8)
    extra = np.empty(8 * ((v.size * (8 * v.itemsize - 1 - bits) + 63) // 64 + 1), np.uint8)
    if v.itemsize == 8:
        total = int(_split_wide(v, bits, categories, extra.view("<u8")))
    else:
        total = int(_split(v, bits, categories, extra))
    extra.resize((total + 7) // 8, refcheck=False)  # in place: nobody else has seen it
    return like(categories, values), like(extra, values)


def join_categories(categories: Array, extra: Array, bits: int, dtype: str, out: Array | None = None) -> Array:
    """See `kernels.categories.join_categories`."""
    c, data = lent(to_numpy(categories)), to_numpy(extra)
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


def _lanes(builder: Any, mask: Any, element: Any) -> Any:
    """Yield shift, mask and number of bits of each lane of a word; masks hold the lowest bits."""
    width = element.bitwidth
    for first in range(0, 64, width):
        own = builder.and_(builder.lshr(mask, _WORD(first)), _WORD((1 << width) - 1))
        yield _WORD(first), own, builder.ctpop(own)


def _spread(typing: Any, bits: Any, mask: Any, element: Any) -> Any:
    """Code that puts the lowest bits of a word where the mask has ones (BMI2 on x86)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_BMI2:
            return _bmi2(builder, "pdep", arguments)
        out, rest = _WORD(0), arguments[0]
        for first, own, size in _lanes(builder, arguments[1], signature.args[2]):
            out = builder.or_(out, builder.shl(builder.and_(rest, own), first))
            rest = builder.lshr(rest, size)
        return out

    return types.uint64(types.uint64, types.uint64, element), generate


def _squeeze(typing: Any, word: Any, mask: Any, element: Any) -> Any:
    """Emit code that moves the bits under a mask next to one another: the inverse of `_spread`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_BMI2:
            return _bmi2(builder, "pext", arguments)
        out, at = _WORD(0), _WORD(0)
        for first, own, size in _lanes(builder, arguments[1], signature.args[2]):
            out = builder.or_(out, builder.shl(builder.and_(builder.lshr(arguments[0], first), own), at))
            at = builder.add(at, size)
        return out

    return types.uint64(types.uint64, types.uint64, element), generate


def _bmi2(builder: Any, name: str, arguments: Any) -> Any:
    full = f"llvm.x86.bmi.{name}.64"
    found = builder.module.globals.get(full)
    return builder.call(found or ir.Function(builder.module, ir.FunctionType(_WORD, [_WORD] * 2), full), arguments[:2])


def _get(typing: Any, data: Any, at: Any) -> Any:
    """Code that loads a word of eight bytes from any byte on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load(builder.bitcast(builder.gep(memory, [arguments[1]]), _WORD.as_pointer()), align=1)

    return types.uint64(data, types.int64), generate


def _set(typing: Any, data: Any, at: Any, word: Any) -> Any:
    """Code that stores a word of eight bytes from any byte on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        at = builder.bitcast(builder.gep(memory, [arguments[1]]), _WORD.as_pointer())
        builder.store(arguments[2], at, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


def _count(typing: Any, word: Any) -> Any:
    """Code for the number of set bits."""
    return types.int64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


if INTERPRETED:

    def spread(bits: Any, mask: Any, element: Any) -> Any:
        """Put the lowest bits of a word where the mask has ones."""
        places = [i for i in range(64) if int(mask) >> i & 1]
        return np.uint64(sum((int(bits) >> k & 1) << i for k, i in enumerate(places)))

    def squeeze(word: Any, mask: Any, element: Any) -> Any:
        """Put the bits for which the mask has ones next to one another."""
        places = [i for i in range(64) if int(mask) >> i & 1]
        return np.uint64(sum((int(word) >> i & 1) << k for k, i in enumerate(places)))

    def get(data: Any, at: Any) -> Any:
        """Load a word of eight bytes."""
        return np.frombuffer(data[at : at + 8].tobytes(), np.uint64)[0]

    def put(data: Any, at: Any, word: Any) -> None:
        """Store a word of eight bytes."""
        data[at : at + 8] = np.frombuffer(np.uint64(word).tobytes(), np.uint8)

    def count(word: Any) -> Any:
        """The number of set bits."""
        return np.int64(int(word).bit_count())
else:
    spread: Any = intrinsic(_spread)  # type: ignore[no-redef]
    squeeze: Any = intrinsic(_squeeze)  # type: ignore[no-redef]
    get: Any = intrinsic(_get)  # type: ignore[no-redef]
    put: Any = intrinsic(_set)  # type: ignore[no-redef]
    count: Any = intrinsic(_count)  # type: ignore[no-redef]


@njit_in_place
def _split(values: NumPy, bits: Any, categories: NumPy, extra: NumPy) -> Any:
    """Split 16- or 32-bit values into `categories` and `extra`; return the number of open bits.

    The open bits of a word of values (four of 16 bits, two of 32) leave the others in one step: at most 56, to which 7
    from before come. With fewer than three bits after the leading one they are up to 60, and take two steps.
    """
    kind = values.dtype.type
    shift = np.uint32(bits)
    least = np.uint32(np.uint32(1) << shift)
    offset = np.int32(126) + np.int32(bits)  # exponent bias less the halving, and the bits after the leading one
    floats = local_array(BLOCK, np.float32)
    patterns = floats.view(np.int32)
    own, masks = local_array(BLOCK, values.dtype), local_array(BLOCK, values.dtype)
    words, open_bits = own.view(np.uint64), masks.view(np.uint64)
    at, fill, held = np.int64(0), np.int64(0), np.uint64(0)
    lanes = 8 // values.itemsize
    halves = 2 if lanes == 2 and bits < 3 else 1
    whole, low = ~np.uint64(0), np.uint64(0xFFFFFFFF)
    for start in range(0, values.size, BLOCK):
        part = values[start : start + BLOCK]
        found = categories[start : start + BLOCK]
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
        for i in range(part.size, BLOCK):
            masks[i] = kind(0)
        for j in range((part.size + lanes - 1) // lanes):
            for half in range(halves):
                mask = open_bits[j] & (whole if halves == 1 else low << np.uint64(32 * half))
                held |= squeeze(words[j], mask, kind(0)) << np.uint64(fill)
                put(extra, at, held)
                fill += count(mask)
                at += fill >> 3
                held >>= np.uint64(fill & 56)
                fill &= 7
    put(extra, at, held)
    return 8 * at + fill


@njit_in_place
def _split_wide(values: NumPy, bits: Any, categories: NumPy, words: NumPy) -> Any:
    """Split 64-bit values, as `_split` does for narrower ones."""
    one, sixty = np.uint64(1), np.uint64(63)
    shift = np.uint64(bits)
    least = one << shift
    floats = local_array(BLOCK, np.float64)
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


@njit_in_place
def _join(categories: NumPy, data: NumPy, available: int, bits: Any, values: NumPy) -> Any:
    """Join values of 16 or 32 bits; return the open bits used, -1 if too few are available.

    A word of values takes at most 56 open bits in one step, as in `_split`, and a load has 57. A block whose
    categories are the values takes no load. The bits are compared before each block: after `available`, as many bytes
    may be read as a block takes.
    """
    kind = values.dtype.type
    shift, one = np.uint32(bits), np.uint32(1)
    least = np.uint8(2 << bits)
    joined, masks = local_array(BLOCK, values.dtype), local_array(BLOCK, values.dtype)
    words, open_bits = joined.view(np.uint64), masks.view(np.uint64)
    at = np.int64(0)
    lanes = 8 // values.itemsize
    halves = 2 if lanes == 2 and bits < 3 else 1
    whole, low = ~np.uint64(0), np.uint64(0xFFFFFFFF)
    for start in range(0, values.size, BLOCK):
        own, out = categories[start : start + BLOCK], values[start : start + BLOCK]
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
        for i in range(own.size, BLOCK):
            masks[i] = kind(0)
        for j in range((own.size + lanes - 1) // lanes):
            for half in range(halves):
                mask = open_bits[j] & (whole if halves == 1 else low << np.uint64(32 * half))
                words[j] |= spread(get(data, at >> 3) >> np.uint64(at & 7), mask, kind(0))
                at += count(mask)
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
