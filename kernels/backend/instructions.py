"""Instructions of LLVM that Numba does not offer: for vectors, words, cache and stack.

The comparison of vectors of elements gives one bit per lane. NumPy and Numba's vectorizer would first produce a byte
per element, so it is written as a vector instruction of LLVM, which is available on every processor.

A prefetch tells the processor which memory will be read next. If the stores of a loop depend on its reads (counters,
scattered values), hardware prefetching is too slow on some machines: a histogram of 100 MB ran at 3.7 GB/s without it
and at 9.8 with it (docs/decisions/speed.md).

Each instruction is a generator of code, as Numba's `intrinsic` takes it, below the function that uncompiled code calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba.core import cgutils, config, types
from numba.extending import intrinsic
from numba.np import arrayobj

INTERPRETED = bool(config.DISABLE_JIT)  # type: ignore[attr-defined]


def has(*features: str) -> bool:
    """Return whether code is compiled for this processor, and it has these features."""
    is_own = not INTERPRETED and not config.CPU_FEATURES and config.CPU_NAME is None  # type: ignore[attr-defined]
    return bool(is_own) and all(dict(binding.get_host_cpu_features()).get(name) for name in features)


HAS_BMI2 = has("bmi2")
"""Whether the processor moves the bits of a mask by one instruction."""
_WORD, _NUMBER, _BIT = ir.IntType(64), ir.IntType(32), ir.IntType(1)
LANES = 64
EDGES = 8
"""Entries of an array of edges; the unused ones are above every pattern."""
AHEAD = 8192
"""Distance of a prefetch in bytes: two pages, so that a new page's address is known in time."""
_READ, _KEEP, _DATA = 0, 3, 1
BLOCK = 1 << 14
"""Elements per block that is copied and then compared while it is in the cache."""
_ALIGNMENT = 64
"""Bytes of an array on the stack: of a line of the cache, and of any view of another dtype."""


def instruction(uncompiled: Any, *, prefer_literal: bool = False) -> Callable[[Any], Any]:
    """Return a decorator that makes an instruction of a generator.

    Without a compiler the instruction is the function `uncompiled`.
    """
    return lambda generator: uncompiled if INTERPRETED else intrinsic(prefer_literal=prefer_literal)(generator)


def memory(context: Any, builder: Any, signature: Any, arguments: Any, number: int = 0) -> Any:
    """Return the address of the elements of an argument that is an array."""
    return context.make_array(signature.args[number])(context, builder, arguments[number]).data


def address(builder: Any, data: Any, index: Any, kind: Any) -> Any:
    """Return the address of an element as that of a value of another type."""
    return builder.bitcast(builder.gep(data, [index]), kind.as_pointer())


def _vector(context: Any, builder: Any, signature: Any, arguments: Any, number: int, index: Any) -> Any:
    """Return LANES elements of an argument from an index on, and their type."""
    width = signature.args[number].dtype.bitwidth
    kind = ir.VectorType(ir.IntType(width), LANES)
    data = memory(context, builder, signature, arguments, number)
    return builder.load(address(builder, data, index, kind), align=width // 8), kind


def repeated(builder: Any, value: Any, kind: Any) -> Any:
    """Return a vector with a value in each lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.Constant(_NUMBER, 0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(_NUMBER, kind.count), [0] * kind.count))


def _mask(flags: Any) -> Any:
    assert flags.size == LANES
    return np.packbits(flags, bitorder="little").view(np.uint64)[0]


@instruction(lambda x, y, index: _mask(x[index : index + LANES] != y[index : index + LANES]))
def differing(typing: Any, x: Any, y: Any, index: Any) -> Any:
    """The mask of the lanes in which two arrays differ."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, _ = _vector(context, builder, signature, arguments, 0, arguments[2])
        second, _ = _vector(context, builder, signature, arguments, 1, arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", first, second), _WORD)

    return types.uint64(x, y, types.int64), generate


def _magnitudes(x: Any) -> Any:
    """Return patterns without their signs."""
    return x & x.dtype.type((1 << (8 * x.itemsize - 1)) - 1)


@instruction(lambda x, index, edge: _mask(_magnitudes(x[index : index + LANES]) >= edge))
def at_least(typing: Any, x: Any, index: Any, edge: Any) -> Any:
    """The mask of the lanes whose pattern without its sign reaches an edge."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        loaded, kind = _vector(context, builder, signature, arguments, 0, arguments[1])
        low = ir.Constant(kind, [(1 << (signature.args[0].dtype.bitwidth - 1)) - 1] * LANES)
        edges = repeated(builder, arguments[2], kind)
        return builder.bitcast(builder.icmp_unsigned(">=", builder.and_(loaded, low), edges), _WORD)

    return types.uint64(x, types.int64, x.dtype), generate


@instruction(lambda edges, pattern: np.int64(np.count_nonzero(edges <= _magnitudes(pattern))))
def edges_reached(typing: Any, edges: Any, pattern: Any) -> Any:
    """The number of eight edges that a pattern without its sign reaches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        width = signature.args[0].dtype.bitwidth
        kind = ir.VectorType(ir.IntType(width), EDGES)
        address = builder.bitcast(memory(context, builder, signature, arguments), kind.as_pointer())
        loaded = builder.load(address, align=width // 8)
        low = builder.and_(arguments[1], ir.Constant(ir.IntType(width), (1 << (width - 1)) - 1))
        reached = builder.icmp_unsigned(">=", repeated(builder, low, kind), loaded)
        return builder.zext(builder.ctpop(builder.bitcast(reached, ir.IntType(EDGES))), _WORD)

    return types.int64(edges, edges.dtype), generate


@instruction(lambda x, index: x[index : index + 8].copy().view(np.uint64)[0])
def eight_bytes(typing: Any, x: Any, index: Any) -> Any:
    """Eight bytes as a number, the lowest byte first."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = memory(context, builder, signature, arguments)
        return builder.load(address(builder, data, arguments[1], _WORD), align=1)

    return types.uint64(x, types.int64), generate


def _put_word(data: Any, at: Any, word: Any) -> None:
    data[at : at + 8] = np.frombuffer(np.uint64(word).tobytes(), np.uint8)


@instruction(_put_word)
def put_word(typing: Any, data: Any, at: Any, word: Any) -> Any:
    """Store a word of eight bytes from any byte on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at = address(builder, memory(context, builder, signature, arguments), arguments[1], _WORD)
        builder.store(arguments[2], at, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


def _move(target: Any, source: Any, start: Any, stop: Any) -> None:
    target[start:stop] = source[start:stop]


@instruction(_move)
def move(typing: Any, target: Any, source: Any, start: Any, stop: Any) -> Any:
    """Copy elements start ... stop - 1 from one array to the same place of another."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, own = (memory(context, builder, signature, arguments, number) for number in (0, 1))
        start, count = arguments[2], builder.sub(arguments[3], arguments[2])
        at, source_at = builder.gep(to, [start]), builder.gep(own, [start])
        cgutils.raw_memcpy(builder, at, source_at, count, target.dtype.bitwidth // 8)  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(target, source, types.int64, types.int64), generate


def _copy_word(target: Any, to: Any, source: Any, index: Any) -> None:
    target[to : to + LANES] = source[index : index + LANES]


def _word_copier(around_cache: bool) -> Any:
    """Return the generator of code that copies LANES elements from one array to another.

    Args:
        around_cache: write to memory without reading it into the cache first, as `memcpy` does with much memory: of the
            array that is written, elements must begin at a multiple of 16 bytes.
    """

    def typed(typing: Any, target: Any, to: Any, source: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, kind = _vector(context, builder, signature, arguments, 2, arguments[3])
            at = address(builder, memory(context, builder, signature, arguments), arguments[1], kind)
            stored = builder.store(value, at, align=16 if around_cache else target.dtype.bitwidth // 8)
            if around_cache:
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_NUMBER, 1)]))
            return context.get_dummy_value()

        return types.void(target, types.int64, source, types.int64), generate

    return typed


copy_word = instruction(_copy_word)(_word_copier(around_cache=False))
stream_word = instruction(_copy_word)(_word_copier(around_cache=True))


@instruction(lambda: None)
def barrier(typing: Any) -> Any:
    """After it, other threads see the stores that bypassed the cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


def _of_bits(emit: Any) -> Any:
    """Return the generator of code that computes a number from the bits of a word."""

    def typed(typing: Any, x: Any) -> Any:
        return types.uint64(types.uint64), lambda context, builder, signature, arguments: emit(builder, arguments[0])

    return typed


_UNDEFINED_AT_ZERO = ir.Constant(_BIT, 1)
ones = instruction(lambda x: np.uint64(int(x).bit_count()))(_of_bits(lambda builder, x: builder.ctpop(x)))
"""The number of set bits."""
zeros_below = instruction(lambda x: np.uint64((int(x) & -int(x)).bit_length() - 1))(
    _of_bits(lambda builder, x: builder.cttz(x, _UNDEFINED_AT_ZERO))
)
"""The position of the lowest set bit."""
zeros_above = instruction(lambda x: np.uint64(64 - int(x).bit_length()))(
    _of_bits(lambda builder, x: builder.ctlz(x, _UNDEFINED_AT_ZERO))
)
"""The number of clear bits above the highest set bit."""


def _parts(builder: Any, mask: Any, element: Any) -> Any:
    """Yield shift, mask and number of bits of each lane of a word; masks hold the lowest bits."""
    width = element.bitwidth
    for first in range(0, 64, width):
        own = builder.and_(builder.lshr(mask, _WORD(first)), _WORD((1 << width) - 1))
        yield _WORD(first), own, builder.ctpop(own)


def _bmi2(builder: Any, name: str, arguments: Any) -> Any:
    full = f"llvm.x86.bmi.{name}.64"
    found = builder.module.globals.get(full)
    return builder.call(found or ir.Function(builder.module, ir.FunctionType(_WORD, [_WORD] * 2), full), arguments[:2])


def _places(mask: Any) -> list[int]:
    """Return the positions of the ones of a mask."""
    return [i for i in range(64) if int(mask) >> i & 1]


@instruction(lambda bits, mask, _: np.uint64(sum((int(bits) >> k & 1) << i for k, i in enumerate(_places(mask)))))
def spread(typing: Any, bits: Any, mask: Any, element: Any) -> Any:
    """Put the lowest bits of a word where the mask has ones.

    Without BMI2 the ones must be the lowest bits of each lane.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_BMI2:
            return _bmi2(builder, "pdep", arguments)
        out, rest = _WORD(0), arguments[0]
        for first, own, size in _parts(builder, arguments[1], signature.args[2]):
            out = builder.or_(out, builder.shl(builder.and_(rest, own), first))
            rest = builder.lshr(rest, size)
        return out

    return types.uint64(types.uint64, types.uint64, element), generate


@instruction(lambda word, mask, _: np.uint64(sum((int(word) >> i & 1) << k for k, i in enumerate(_places(mask)))))
def squeeze(typing: Any, word: Any, mask: Any, element: Any) -> Any:
    """Put the bits for which the mask has ones next to one another: the inverse of `spread`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if HAS_BMI2:
            return _bmi2(builder, "pext", arguments)
        out, at = _WORD(0), _WORD(0)
        for first, own, size in _parts(builder, arguments[1], signature.args[2]):
            out = builder.or_(out, builder.shl(builder.and_(builder.lshr(arguments[0], first), own), at))
            at = builder.add(at, size)
        return out

    return types.uint64(types.uint64, types.uint64, element), generate


@instruction(lambda array, index: None)
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """`prefetch(array, index)`: `array[index]` will be read soon; it may be past the end."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bytes_at = ir.IntType(8)
        kind = ir.FunctionType(ir.VoidType(), [bytes_at.as_pointer(), _NUMBER, _NUMBER, _NUMBER])
        hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")  # type: ignore[no-untyped-call]
        at = address(builder, memory(context, builder, signature, arguments), arguments[1], bytes_at)
        builder.call(hint, [at, *(_NUMBER(value) for value in (_READ, _KEEP, _DATA))])
        return context.get_dummy_value()

    return types.void(array, index), generate


@instruction(np.empty, prefer_literal=True)
def local_array(typing: Any, count: Any, kind: Any) -> Any:
    """`local_array(count, kind)`: elements of a dtype on the stack, not set.

    The memory is freed when the compiled function returns.
    """
    if not isinstance(count, types.IntegerLiteral):
        return None
    result: Any = types.Array(kind.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        element = context.get_data_type(kind.dtype)
        data = cgutils.alloca_once(builder, element, size=count.literal_value)  # type: ignore[no-untyped-call]
        data.align = _ALIGNMENT
        width = int(context.get_abi_sizeof(element))
        size, stride = (context.get_constant(types.intp, n) for n in (count.literal_value, width))
        array = context.make_array(result)(context, builder)
        arrayobj.populate_array(array, data=data, shape=[size], strides=[stride], itemsize=stride, meminfo=None)  # type: ignore[no-untyped-call]
        return array._getvalue()

    return result(count, kind), generate
