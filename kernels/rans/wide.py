"""Asymmetric numeral systems of 64 states on the CPU: 16 symbols a step, in vectors.

Numba does not vectorize a loop that reads a table or moves an index depending on the data. A step is therefore
written in the instructions of LLVM, which every processor has in some form. Two of them exist only from AVX-512 on, and
other processors get a form without branches: the words that some of 16 states give or take, packed together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types

from ..backend.instructions import address, has, instruction, memory, repeated
from ..backend.jit import njit_in_place, njit_inline
from ..errors import BadArgumentError, CorruptDataError
from . import WIDE_START

if TYPE_CHECKING:
    from collections.abc import Callable

NumPy = np.ndarray[Any, Any]
Int = Any  # a machine integer or truth value inside compiled code
U64 = np.uint64
PRECISION = 12
"""`kernels.rans.WIDE_PRECISION`; frequencies and starts have 13 bits."""
LANES = 16
STATES = 64
LEAST = 1 << 15
"""`kernels.rans.WIDE_START` (a compiled function must not take it from another module: see `jit`)."""
HEADER = 4 * STATES
NOTHING = 1 << PRECISION
"""The decoder's entry of a context that has no symbols; of one that has, slot - start is below f."""
HAS_PACKING = has("avx512vbmi2", "avx512bw", "avx512vl")
"""Whether the processor packs words by one instruction."""

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _vector(kind: Any, value: int, lanes: int = LANES) -> Any:
    """Return a constant vector with the same value in all lanes."""
    return ir.Constant(ir.VectorType(kind, lanes), [value] * lanes)


def _load(builder: Any, data: Any, index: Any, bits: int, lanes: int = LANES) -> Any:
    """Load elements of an array from an index on."""
    return builder.load(address(builder, data, index, ir.VectorType(ir.IntType(bits), lanes)), align=bits // 8)


def _store(builder: Any, vector: Any, data: Any, index: Any) -> None:
    """Store a vector to an array from an index on."""
    builder.store(vector, address(builder, data, index, vector.type), align=vector.type.element.width // 8)


def _gather(builder: Any, data: Any, indices: Any, bits: int, lanes: int) -> Any:
    """Load one element for each lane by index; the gather instruction would not be faster."""
    out = ir.Constant(ir.VectorType(ir.IntType(bits), lanes), ir.Undefined)
    for k in range(lanes):
        lane = ir.Constant(_I32, k)
        at = builder.zext(builder.extract_element(indices, lane), _I64)
        out = builder.insert_element(out, builder.load(builder.gep(data, [at])), lane)
    return out


def _upper_halves(builder: Any, words: Any) -> Any:
    """The upper 32 bits of 16 words."""
    halves = builder.bitcast(words, ir.VectorType(_I32, 2 * LANES))
    odd = ir.Constant(ir.VectorType(_I32, LANES), list(range(1, 2 * LANES, 2)))
    return builder.shuffle_vector(halves, ir.Constant(halves.type, ir.Undefined), odd)


def _ones(builder: Any, mask: Any) -> Any:
    """The number of lanes in a mask."""
    return builder.zext(builder.ctpop(builder.zext(builder.bitcast(mask, _I16), _I32)), _I64)


def _packing(builder: Any, name: str, words: Any, mask: Any) -> Any:
    """Call the processor's instruction that packs the words of a mask, or spreads them."""
    kinds = [words.type, words.type, mask.type]
    full = f"llvm.x86.avx512.mask.{name}.v16i16"
    found = builder.module.globals.get(full)
    function = found or ir.Function(builder.module, ir.FunctionType(words.type, kinds), full)
    return builder.call(function, [words, _vector(_I16, 0), mask])


def _put(builder: Any, words: Any, mask: Any, data: Any, index: Any) -> None:
    """Store the words of a mask one after another; up to 16 words are overwritten."""
    if HAS_PACKING:
        _store(builder, _packing(builder, "compress", words, mask), data, index)
        return
    for k in range(LANES):
        lane = ir.Constant(_I32, k)
        builder.store(builder.extract_element(words, lane), builder.gep(data, [index]), align=2)
        index = builder.add(index, builder.zext(builder.extract_element(mask, lane), _I64))


def _take(builder: Any, mask: Any, data: Any, index: Any) -> Any:
    """Load words for the lanes of a mask, one after another; other lanes are undefined."""
    if HAS_PACKING:
        return _packing(builder, "expand", _load(builder, data, index, 16), mask)
    out = ir.Constant(ir.VectorType(_I16, LANES), ir.Undefined)
    for k in range(LANES):
        lane = ir.Constant(_I32, k)
        out = builder.insert_element(out, builder.load(builder.gep(data, [index]), align=2), lane)
        index = builder.add(index, builder.zext(builder.extract_element(mask, lane), _I64))
    return out


def _with_context(context: Any, builder: Any, signature: Any, arguments: Any, number: int, start: Any) -> Any:
    """Load the contexts of 16 symbols; None for coding without contexts."""
    if isinstance(signature.args[number], types.NoneType):
        return None
    contexts = memory(context, builder, signature, arguments, number)
    return builder.zext(_load(builder, contexts, start, 8), ir.VectorType(_I32, LANES))


def _variable(builder: Any, value: Any) -> Any:
    """Allocate a variable with an initial value; LLVM keeps it in a register."""
    return cgutils.alloca_once_value(builder, value)  # type: ignore[no-untyped-call]


def _loop(builder: Any, first: Any, step: int, goes_on: Callable[[Any], Any], body: Callable[[Any], None]) -> Any:
    """Emit a loop over an index from `first` on; return the index with which it ended."""
    index = _variable(builder, first)
    condition, inside, after = (builder.append_basic_block(name) for name in ("condition", "inside", "after"))
    builder.branch(condition)
    with builder.goto_block(condition):
        builder.cbranch(goes_on(builder.load(index)), inside, after)
    with builder.goto_block(inside):
        now = builder.load(index)
        body(now)
        builder.store(builder.add(now, ir.Constant(_I64, step)), index)
        builder.branch(condition)
    builder.position_at_end(after)
    return builder.load(index)


def _load_states(builder: Any, data: Any) -> list[Any]:
    """Load all states and the vector after them into variables."""
    places = range(0, STATES + LANES, LANES)
    return [_variable(builder, _load(builder, data, ir.Constant(_I64, k), 32)) for k in places]


def _store_states(builder: Any, variables: list[Any], data: Any) -> None:
    """Store the variables that `_load_states` loaded."""
    for k, variable in enumerate(variables):
        _store(builder, builder.load(variable), data, ir.Constant(_I64, LANES * k))


@njit_inline
def _encode_few(
    symbols: NumPy, contexts: Any, columns: Int, table: NumPy, words: NumPy, at: Int, states: NumPy, start: Int,
    stop: Int,
) -> Int:  # fmt: skip
    """Encode symbols of one row, one by one; return the next position in `words`."""
    for i in range(start, stop):
        x = np.int64(states[i & 63])
        row = np.int64(0) if contexts is None else np.int64(contexts[i])
        e = np.int64(table[row * np.int64(columns) + np.int64(symbols[i])])
        f: Int = (e >> 32) & 8191
        base = (e >> 45) & 8191
        if x >= f << (31 - PRECISION):
            words[at] = np.uint16(x & 65535)
            at += 1
            x >>= 16
        states[i & 63] = np.uint32(x + base + (x // (f if f else 1)) * ((1 << PRECISION) - f))
        states[STATES] = min(states[STATES], np.uint32(f))
    return at


@njit_inline
def _decode_few(
    words: NumPy, at: Int, contexts: Any, table: NumPy, states: NumPy, out: NumPy, start: Int, stop: Int
) -> Int:
    """Decode symbols of one row, one by one; return the start of the words read so far."""
    slots = (1 << PRECISION) - 1
    for i in range(start, stop):
        x = np.int64(states[i & 63])
        row = np.int64(0) if contexts is None else np.int64(contexts[i])
        e = np.int64(table[(row << PRECISION) | (x & slots)])
        states[STATES] |= np.uint32(e == NOTHING)
        x = ((e & slots) + 1) * (x >> PRECISION) + ((e >> PRECISION) & slots)
        states[i & 63] = np.uint32(x)
        out[i] = np.uint8(e >> (2 * PRECISION))
        at -= np.int64(x < LEAST)
    word = at
    for i in range(start, stop):
        if states[i & 63] < LEAST:
            states[i & 63] = (np.uint32(states[i & 63]) << np.uint32(16)) | np.uint32(words[word])
            word += 1
    return at


def _encode_rows(
    symbols: Any, contexts: Any, columns: Any, table: Any, words: Any, at: Any, states: Any, whole: Any
) -> Any:
    for start in range(whole - LANES, -1, -LANES):
        at = _encode_few(symbols, contexts, columns, table, words, at, states, start, start + LANES)
    return at


@instruction(_encode_rows)
def encode_blocks(
    typing: Any, symbols: Any, contexts: Any, columns: Any, table: Any, words: Any, at: Any, states: Any, whole: Any
) -> Any:
    """Emit the encoder of whole blocks, last to first; return the next position of words."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        places = [memory(context, builder, signature, arguments, k) for k in (0, 3, 4, 6)]
        own = _load_states(builder, places[3])
        position = _variable(builder, arguments[5])
        width = repeated(builder, builder.trunc(arguments[2], _I32), ir.VectorType(_I32, LANES))
        thirteen = _vector(_I32, (1 << 13) - 1)

        def row(begin: Any, state: Any) -> None:
            x = builder.load(state)
            entries = builder.zext(_load(builder, places[0], begin, 8), ir.VectorType(_I32, LANES))
            rows = _with_context(context, builder, signature, arguments, 1, begin)
            if rows is not None:
                entries = builder.add(entries, builder.mul(rows, width))
            entry = _gather(builder, places[1], entries, 64, LANES)
            high = _upper_halves(builder, entry)
            f = builder.and_(high, thirteen)
            start = builder.and_(builder.lshr(high, _vector(_I32, 13)), thirteen)
            full = builder.icmp_unsigned(">=", x, builder.shl(f, _vector(_I32, 31 - PRECISION)))
            low = builder.trunc(x, ir.VectorType(_I16, LANES))
            x = builder.select(full, builder.lshr(x, _vector(_I32, 16)), x)
            # Twice the state times the reciprocal is still below 2**64; only the upper half counts.
            twice = builder.zext(builder.add(x, x), ir.VectorType(_I64, LANES))
            product = builder.mul(twice, builder.and_(entry, _vector(_I64, (1 << 32) - 1)))
            quotient = builder.lshr(_upper_halves(builder, product), builder.lshr(high, _vector(_I32, 26)))
            rest = builder.sub(_vector(_I32, 1 << PRECISION), f)
            builder.store(builder.add(builder.add(x, start), builder.mul(quotient, rest)), state)
            now = builder.load(position)
            _put(builder, low, full, places[2], now)
            builder.store(builder.add(now, _ones(builder, full)), position)
            least = builder.load(own[-1])
            builder.store(builder.select(builder.icmp_unsigned("<", f, least), f, least), own[-1])

        def block(i: Any) -> None:
            for k in reversed(range(STATES // LANES)):
                row(builder.add(i, ir.Constant(_I64, LANES * k)), own[k])

        first = builder.sub(arguments[7], ir.Constant(_I64, STATES))
        _loop(builder, first, -STATES, lambda i: builder.icmp_signed(">=", i, ir.Constant(_I64, 0)), block)
        _store_states(builder, own, places[3])
        return builder.load(position)

    given = (symbols, contexts, types.int64, table, words, types.int64, states, types.int64)
    return types.int64(*given), generate


def _decode_rows(words: Any, at: Any, contexts: Any, table: Any, states: Any, out: Any, whole: Any) -> Any:
    for start in range(0, whole, LANES):
        if start % STATES == 0 and at < STATES:
            return -1
        at = _decode_few(words, at, contexts, table, states, out, start, start + LANES)
    return at


@instruction(_decode_rows)
def decode_blocks(
    typing: Any, words: Any, at: Any, contexts: Any, table: Any, states: Any, out: Any, whole: Any
) -> Any:
    """Emit the decoder of whole blocks; return the start of the words read, or -1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.VectorType(_I32, LANES)
        places = [memory(context, builder, signature, arguments, k) for k in (0, 3, 4, 5)]
        own = _load_states(builder, places[2])
        position = _variable(builder, arguments[1])
        empty = _variable(builder, ir.Constant(ir.VectorType(ir.IntType(1), LANES), [0] * LANES))
        slots = _vector(_I32, (1 << PRECISION) - 1)

        def row(begin: Any, state: Any) -> None:
            x = builder.load(state)
            index = builder.and_(x, slots)
            rows = _with_context(context, builder, signature, arguments, 2, begin)
            if rows is not None:
                index = builder.or_(index, builder.shl(rows, _vector(_I32, PRECISION)))
            entry = _gather(builder, places[1], index, 32, LANES)
            f = builder.add(builder.and_(entry, slots), _vector(_I32, 1))
            beyond = builder.and_(builder.lshr(entry, _vector(_I32, PRECISION)), slots)
            symbol = builder.lshr(entry, _vector(_I32, 2 * PRECISION))
            x = builder.add(builder.mul(f, builder.lshr(x, _vector(_I32, PRECISION))), beyond)
            short = builder.icmp_unsigned("<", x, _vector(_I32, LEAST))
            now = builder.sub(builder.load(position), _ones(builder, short))
            more = builder.zext(_take(builder, short, places[0], now), wide)
            builder.store(builder.select(short, builder.or_(builder.shl(x, _vector(_I32, 16)), more), x), state)
            builder.store(now, position)
            nothing = builder.icmp_unsigned("==", entry, _vector(_I32, NOTHING))
            builder.store(builder.or_(builder.load(empty), nothing), empty)
            _store(builder, builder.trunc(symbol, ir.VectorType(ir.IntType(8), LANES)), places[3], begin)

        def block(i: Any) -> None:
            for k in range(STATES // LANES):
                row(builder.add(i, ir.Constant(_I64, LANES * k)), own[k])

        def goes_on(i: Any) -> Any:
            enough = builder.icmp_signed(">=", builder.load(position), ir.Constant(_I64, STATES))
            return builder.and_(enough, builder.icmp_signed("<", i, arguments[6]))

        end = _loop(builder, ir.Constant(_I64, 0), STATES, goes_on, block)
        builder.store(builder.or_(builder.load(own[-1]), builder.zext(builder.load(empty), wide)), own[-1])
        _store_states(builder, own, places[2])
        early = builder.icmp_signed("<", end, arguments[6])
        return builder.select(early, ir.Constant(_I64, -1), builder.load(position))

    return types.int64(words, types.int64, contexts, table, states, out, types.int64), generate


@njit_in_place
def _encode(symbols: NumPy, contexts: Any, columns: Int, table: NumPy, words: NumPy, states: NumPy) -> Int:
    """Encode rows of 16, last to first; return the number of words.

    The first 64 of `states` are states, and the others the least frequencies met: 0 if a symbol is not in the table.
    """
    at, n = np.int64(0), np.int64(symbols.size)
    whole = n - n % STATES
    for start in range(whole + STATES - LANES, whole - 1, -LANES):
        at = _encode_few(symbols, contexts, columns, table, words, at, states, start, min(start + LANES, n))
    return encode_blocks(symbols, contexts, columns, table, words, at, states, whole)


@njit_in_place
def _decode(words: NumPy, at: Int, contexts: Any, table: NumPy, states: NumPy, out: NumPy) -> Int:
    """Decode rows of 16, first to last; return the start of the words read, -1 if too few.

    The first 64 of `words` do not count: a step reads as many at most before it is noticed. Of `states` the first 64
    are states, and the others become 1 where a context has no symbols.
    """
    n = np.int64(out.size)
    whole = n - n % STATES
    at = decode_blocks(words, at, contexts, table, states, out, whole)
    if at < STATES:
        return -1
    for start in range(whole, n, LANES):
        at = _decode_few(words, at, contexts, table, states, out, start, min(start + LANES, n))
    return at


@njit_in_place
def _tables(frequencies: NumPy, decoding: bool, encoder: NumPy, decoder: NumPy) -> None:
    """Fill the tables of the encoder or of the decoder; they are zero before.

    Of the encoder, by context and symbol: reciprocal | f << 32 | start << 45 | k << 58, so that for a state x < f << 19
    `x // f` is exactly `x * reciprocal >> (31 + k)`: the reciprocal `2**(31 + k) / f`, rounded up, exceeds the
    quotient by less than `x / 2**(31 + k) <= 2**-12`. Of the decoder, by context and slot: f - 1 | slot - start << 12 |
    symbol << 24.
    """
    columns = frequencies.shape[1]
    for c in range(frequencies.shape[0]):
        peak: Int = np.int64(0)
        for s in range(columns):
            if frequencies[c, s] > frequencies[c, peak]:
                peak = s
        following = np.int64(frequencies[c, peak])
        if decoding and following == 0:
            for k in range(1 << PRECISION):
                decoder[(np.int64(c) << PRECISION) + k] = np.uint32(NOTHING)
        for s in range(columns):
            f = np.int64(frequencies[c, s])
            if f == 0:
                continue
            start = np.int64(0)
            if s != peak:
                start = following
                following += f
            if decoding:
                at = (np.int64(c) << PRECISION) + start
                for k in range(f):
                    decoder[at + k] = np.uint32((f - 1) | (k << PRECISION) | (np.int64(s) << (2 * PRECISION)))
            else:
                bits = np.int64(0)
                while np.int64(1) << bits < f:
                    bits += 1
                reciprocal = ((np.int64(1) << (31 + bits)) + f - 1) // f
                fields = U64(f) << U64(32) | U64(start) << U64(45) | U64(bits) << U64(58)
                encoder[c * columns + s] = fields | U64(reciprocal)


def encode(symbols: NumPy, contexts: NumPy | None, frequencies: NumPy) -> NumPy:
    """See `kernels.rans.rans_encode`; contexts and symbols are within the table."""
    table = np.zeros(frequencies.size, np.uint64)
    _tables(frequencies, False, table, np.empty(0, np.uint32))
    words = np.empty(symbols.size + LANES, np.uint16)
    states = np.full(STATES + LANES, WIDE_START, np.uint32)
    count = int(_encode(symbols, contexts, frequencies.shape[1], table, words, states))
    if not states[STATES:].all():
        raise BadArgumentError("symbols holds one whose frequency in its context is zero")
    out = np.empty(HEADER + 2 * count, np.uint8)
    out[:HEADER] = states[:STATES].astype("<u4").view(np.uint8)
    out[HEADER:] = words[:count].astype("<u2", copy=False).view(np.uint8)
    return out


def decode(data: NumPy, contexts: NumPy | None, frequencies: NumPy, n: int) -> NumPy:
    """See `kernels.rans.rans_decode`; contexts are within the table."""
    if data.size < HEADER or data.size % 2:
        raise CorruptDataError(f"{data.size} bytes are not {STATES} rANS states and words")
    states = np.zeros(STATES + LANES, np.uint32)
    own = states[:STATES]
    own[:] = np.frombuffer(data[:HEADER].tobytes(), "<u4")
    if int(own.min()) < WIDE_START or int(own.max()) >= WIDE_START << 16:
        raise CorruptDataError("a rANS state is out of range")
    count = (data.size - HEADER) // 2
    words = np.zeros(STATES + count + LANES, np.uint16)
    words[STATES : STATES + count] = data[HEADER:].view("<u2")
    table = np.zeros(frequencies.shape[0] << PRECISION, np.uint32)
    _tables(frequencies, True, np.empty(0, np.uint64), table)
    out = np.empty(n, np.uint8)
    at = int(_decode(words, STATES + count, contexts, table, states, out))
    if at != STATES or (own != WIDE_START).any() or states[STATES:].any():
        raise CorruptDataError(f"the bytes are not {n} rANS symbols of these frequencies")
    return out
