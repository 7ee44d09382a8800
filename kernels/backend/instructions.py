"""Instructions of LLVM that Numba does not offer: for 64 elements, words, and the cache.

The comparison of vectors of elements gives one bit per lane. NumPy and Numba's vectorizer would first produce a byte
per element, so it is written as a vector instruction of LLVM, which is available on every processor.

A prefetch tells the processor which memory will be read next. If the stores of a loop depend on its reads (counters,
scattered values), hardware prefetching is too slow on some machines: a histogram of 100 MB ran at 3.7 GB/s without it
and at 9.8 with it (docs/decisions/speed.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils, config, types
from numba.extending import intrinsic

INTERPRETED = bool(config.DISABLE_JIT)  # type: ignore[attr-defined]
HAS_BMI2 = (
    not INTERPRETED
    and not config.CPU_FEATURES  # type: ignore[attr-defined]
    and config.CPU_NAME is None  # type: ignore[attr-defined]
    and bool(dict(binding.get_host_cpu_features()).get("bmi2"))
)
"""Whether code is compiled for this processor, and it moves the bits of a mask by one instruction."""
_WORD = ir.IntType(64)
LANES = 64
EDGES = 8
"""Entries of an array of edges; the unused ones are above every pattern."""
AHEAD = 8192
"""Distance of a prefetch in bytes: two pages, so that a new page's address is known in time."""
_READ, _KEEP, _DATA = 0, 3, 1
BLOCK = 1 << 14
"""Elements per block that is copied and then compared while it is in the cache."""


def _vector(context: Any, builder: Any, array: Any, value: Any, index: Any) -> Any:
    """LANES elements of an array from an index on, and their type."""
    data = context.make_array(array)(context, builder, value).data
    kind = ir.VectorType(ir.IntType(array.dtype.bitwidth), LANES)
    at = builder.bitcast(builder.gep(data, [index]), kind.as_pointer())
    return builder.load(at, align=array.dtype.bitwidth // 8), kind


def _differing(typing: Any, x: Any, y: Any, index: Any) -> Any:
    """Code for a mask of the lanes in which two arrays differ."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, _ = _vector(context, builder, signature.args[0], arguments[0], arguments[2])
        second, _ = _vector(context, builder, signature.args[1], arguments[1], arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", first, second), ir.IntType(64))

    return types.uint64(x, y, types.int64), generate


def _at_least(typing: Any, x: Any, index: Any, edge: Any) -> Any:
    """Code for a mask of the lanes whose pattern without its sign reaches an edge."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded, kind = _vector(context, builder, signature.args[0], arguments[0], arguments[1])
        low = ir.Constant(kind, [(1 << (signature.args[0].dtype.bitwidth - 1)) - 1] * LANES)
        nothing, number = ir.Constant(kind, ir.Undefined), ir.IntType(32)
        one = builder.insert_element(nothing, arguments[2], ir.Constant(number, 0))
        zeros = ir.Constant(ir.VectorType(number, LANES), [0] * LANES)
        edges = builder.shuffle_vector(one, nothing, zeros)
        reached = builder.icmp_unsigned(">=", builder.and_(loaded, low), edges)
        return builder.bitcast(reached, ir.IntType(64))

    return types.uint64(x, types.int64, x.dtype), generate


def _edges_reached(typing: Any, edges: Any, pattern: Any) -> Any:
    """Emit code for the number of eight edges that a pattern without its sign reaches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, item = signature.args[0], ir.IntType(signature.args[0].dtype.bitwidth)
        data = context.make_array(array)(context, builder, arguments[0]).data
        kind, number = ir.VectorType(item, EDGES), ir.IntType(32)
        loaded = builder.load(builder.bitcast(data, kind.as_pointer()), align=array.dtype.bitwidth // 8)
        low = builder.and_(arguments[1], ir.Constant(item, (1 << (array.dtype.bitwidth - 1)) - 1))
        nothing, zeros = ir.Constant(kind, ir.Undefined), ir.Constant(ir.VectorType(number, EDGES), [0] * EDGES)
        lanes = builder.shuffle_vector(builder.insert_element(nothing, low, ir.Constant(number, 0)), nothing, zeros)
        reached = builder.bitcast(builder.icmp_unsigned(">=", lanes, loaded), ir.IntType(EDGES))
        return builder.zext(builder.ctpop(reached), ir.IntType(64))

    return types.int64(edges, edges.dtype), generate


def _eight_bytes(typing: Any, x: Any, index: Any) -> Any:
    """Emit code that reads eight bytes as a number, the lowest byte first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        at = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(64).as_pointer())
        return builder.load(at, align=1)

    return types.uint64(x, types.int64), generate


def _move(typing: Any, target: Any, source: Any, start: Any, stop: Any) -> Any:
    """Code that copies elements start ... stop - 1 from one array to the same place of another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        target_type, source_type = signature.args[:2]
        to = context.make_array(target_type)(context, builder, arguments[0]).data
        own = context.make_array(source_type)(context, builder, arguments[1]).data
        start, count = arguments[2], builder.sub(arguments[3], arguments[2])
        at, source_at = builder.gep(to, [start]), builder.gep(own, [start])
        cgutils.raw_memcpy(builder, at, source_at, count, target_type.dtype.bitwidth // 8)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(target, source, types.int64, types.int64), generate


def _word_copier(around_cache: bool) -> Any:
    """Code that copies LANES elements from an index of one array to an index of another.

    Args:
        around_cache: write to memory without reading it into the cache first, as `memcpy` does with much memory: of the
            array that is written, elements must begin at a multiple of 16 bytes.
    """

    def typed(typing: Any, target: Any, to: Any, source: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, kind = _vector(context, builder, signature.args[2], arguments[2], arguments[3])
            data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
            at = builder.bitcast(builder.gep(data, [arguments[1]]), kind.as_pointer())
            stored = builder.store(value, at, align=16 if around_cache else target.dtype.bitwidth // 8)
            if around_cache:
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64), generate

    return typed


def _barrier(typing: Any) -> Any:
    """Emit code after which other threads see the stores that bypassed the cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _ones(typing: Any, x: Any) -> Any:
    """Code for the number of set bits."""
    return types.uint64(types.uint64), lambda context, builder, signature, arguments: builder.ctpop(arguments[0])


def _zeros_below(typing: Any, x: Any) -> Any:
    """Code for the position of the lowest set bit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


def _zeros_above(typing: Any, x: Any) -> Any:
    """Code for the number of clear bits above the highest set bit."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


def _parts(builder: Any, mask: Any, element: Any) -> Any:
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
        for first, own, size in _parts(builder, arguments[1], signature.args[2]):
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
        for first, own, size in _parts(builder, arguments[1], signature.args[2]):
            out = builder.or_(out, builder.shl(builder.and_(builder.lshr(arguments[0], first), own), at))
            at = builder.add(at, size)
        return out

    return types.uint64(types.uint64, types.uint64, element), generate


def _bmi2(builder: Any, name: str, arguments: Any) -> Any:
    full = f"llvm.x86.bmi.{name}.64"
    found = builder.module.globals.get(full)
    return builder.call(found or ir.Function(builder.module, ir.FunctionType(_WORD, [_WORD] * 2), full), arguments[:2])


def _put_word(typing: Any, data: Any, at: Any, word: Any) -> Any:
    """Code that stores a word of eight bytes from any byte on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        memory = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        at = builder.bitcast(builder.gep(memory, [arguments[1]]), _WORD.as_pointer())
        builder.store(arguments[2], at, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


def _deposit(typing: Any, bits: Any, mask: Any) -> Any:
    """Generate code that spreads a number's bits over the set bits of a mask (BMI2 on x86)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _bmi2(builder, "pdep", arguments)

    return types.uint64(types.uint64, types.uint64), generate


def _prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Generate `llvm.prefetch` for the address of an element, which may lie outside the array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        bytes_at, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [bytes_at, number, number, number])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        at = builder.bitcast(builder.gep(data, [arguments[1]]), bytes_at)
        builder.call(hint, [at, *(number(value) for value in (_READ, _KEEP, _DATA))])
        return context.get_dummy_value()

    return types.void(array, index), generate


if INTERPRETED:

    def differing(x: Any, y: Any, index: Any) -> Any:
        """The mask of lanes in which two arrays differ."""
        return _mask(x[index : index + LANES] != y[index : index + LANES])

    def at_least(x: Any, index: Any, edge: Any) -> Any:
        """The mask of lanes whose pattern without its sign reaches an edge."""
        low = x.dtype.type((1 << (8 * x.itemsize - 1)) - 1)
        return _mask((x[index : index + LANES] & low) >= edge)

    def edges_reached(edges: Any, pattern: Any) -> Any:
        """The number of edges that a pattern without its sign reaches."""
        low = edges.dtype.type((1 << (8 * edges.itemsize - 1)) - 1)
        return np.int64(np.count_nonzero(edges <= (pattern & low)))

    def eight_bytes(x: Any, index: Any) -> Any:
        """Eight bytes as a number, the lowest byte first."""
        return x[index : index + 8].copy().view(np.uint64)[0]

    def _mask(flags: Any) -> Any:
        assert flags.size == LANES
        return np.packbits(flags, bitorder="little").view(np.uint64)[0]

    def move(target: Any, source: Any, start: Any, stop: Any) -> None:
        """Copy elements start ... stop - 1."""
        target[start:stop] = source[start:stop]

    def copy_word(target: Any, to: Any, source: Any, index: Any) -> None:
        """Copy LANES elements."""
        target[to : to + LANES] = source[index : index + LANES]

    stream_word = copy_word

    def barrier() -> None:
        """Do nothing: uncompiled code has no stores that bypass the cache."""

    def ones(x: Any) -> Any:
        """The number of set bits."""
        return np.uint64(int(x).bit_count())

    def zeros_below(x: Any) -> Any:
        """The position of the lowest set bit."""
        return np.uint64((int(x) & -int(x)).bit_length() - 1)

    def zeros_above(x: Any) -> Any:
        """The number of clear bits above the highest set bit."""
        return np.uint64(64 - int(x).bit_length())

    def spread(bits: Any, mask: Any, element: Any) -> Any:
        """Put the lowest bits of a word where the mask has ones."""
        places = [i for i in range(64) if int(mask) >> i & 1]
        return np.uint64(sum((int(bits) >> k & 1) << i for k, i in enumerate(places)))

    def squeeze(word: Any, mask: Any, element: Any) -> Any:
        """Put the bits for which the mask has ones next to one another."""
        places = [i for i in range(64) if int(mask) >> i & 1]
        return np.uint64(sum((int(word) >> i & 1) << k for k, i in enumerate(places)))

    def put_word(data: Any, at: Any, word: Any) -> None:
        """Store a word of eight bytes."""
        data[at : at + 8] = np.frombuffer(np.uint64(word).tobytes(), np.uint8)

    def prefetch(array: Any, index: Any) -> None:
        """Do nothing: uncompiled code has no prefetch."""
else:
    differing: Any = intrinsic(_differing)  # type: ignore[no-redef]
    at_least: Any = intrinsic(_at_least)  # type: ignore[no-redef]
    edges_reached: Any = intrinsic(_edges_reached)  # type: ignore[no-redef]
    eight_bytes: Any = intrinsic(_eight_bytes)  # type: ignore[no-redef]
    move: Any = intrinsic(_move)  # type: ignore[no-redef]
    copy_word: Any = intrinsic(_word_copier(around_cache=False))  # type: ignore[no-redef]
    stream_word: Any = intrinsic(_word_copier(around_cache=True))  # type: ignore[no-redef]
    barrier: Any = intrinsic(_barrier)  # type: ignore[no-redef]
    ones: Any = intrinsic(_ones)  # type: ignore[no-redef]
    zeros_below: Any = intrinsic(_zeros_below)  # type: ignore[no-redef]
    zeros_above: Any = intrinsic(_zeros_above)  # type: ignore[no-redef]
    spread: Any = intrinsic(_spread)  # type: ignore[no-redef]
    squeeze: Any = intrinsic(_squeeze)  # type: ignore[no-redef]
    put_word: Any = intrinsic(_put_word)  # type: ignore[no-redef]
    prefetch: Any = intrinsic(_prefetch)  # type: ignore[no-redef]
    """`prefetch(array, index)`: `array[index]` will be read soon; it may be past the end."""

if HAS_BMI2:
    deposited: Any = intrinsic(_deposit)
