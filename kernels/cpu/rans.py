"""Asymmetric numeral systems on the CPU: no division, no branch per symbol, four states in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import like
from ..errors import BadArgumentError, CorruptDataError
from ..rans import START, STATES
from ..sequential import compiled
from . import tables
from .jit import njit, njit_inline

if TYPE_CHECKING:
    from ..arrays import Array

NumPy = np.ndarray[Any, Any]
U8 = np.uint8
U16 = np.uint16
U64 = np.uint64
HEADER = 4 * STATES


@njit
def _round_row(counts: NumPy, total: int, out: NumPy) -> None:
    """`counts` scaled to the sum `total`, each present symbol at least 1."""
    size = counts.size
    n = np.int64(0)
    for s in range(size):
        n += counts[s]
    left = np.int64(total)
    for s in range(size):
        out[s] = 0
        if counts[s] > 0:
            # The quotient only has to be near: what follows mends it whichever way float64 rounded.
            out[s] = max(np.int64(1), np.int64(np.float64(counts[s]) / np.float64(n) * np.float64(total)))
            left -= np.int64(out[s])
    if n == 0:
        return
    while True:
        # The symbol that gains most by one more, and the one that loses least by one less.
        up, down = -1, -1
        gain, loss = -1.0, np.inf
        for s in range(size):
            if counts[s] > 0:
                f = np.float64(out[s])
                g = np.float64(counts[s]) / np.sqrt(f * (f + 1.0))
                if g > gain:
                    gain, up = g, s
                if f > 1.0:
                    g = np.float64(counts[s]) / np.sqrt(f * (f - 1.0))
                    if g < loss:
                        loss, down = g, s
        if left > 0:
            out[up] += 1
            left -= 1
        elif left < 0:
            out[down] -= 1
            left += 1
        elif gain > loss:
            out[up] += 1
            out[down] -= 1
        else:
            return


@njit
def _encode_table(frequencies: NumPy, precision: int, table: NumPy) -> None:
    """Per symbol two words: the reciprocal of f, and start | (2**precision - f) << 32 | (f == 0) << 63."""
    total = U64(1) << U64(precision)
    at = 0
    for c in range(frequencies.shape[0]):
        start = U64(0)
        for s in range(frequencies.shape[1]):
            f = U64(frequencies[c, s])
            if f == U64(0):
                table[at] = U64(0)
                table[at + 1] = U64(1) << U64(63)
            else:
                table[at] = ((total << U64(32)) + f - U64(1)) // f
                table[at + 1] = start | ((total - f) << U64(32))
            start += f
            at += 2


@njit_inline
def _put(x: Any, entry: Any, table: NumPy, precision: Any, words: NumPy, at: Any) -> Any:
    """One symbol into state x: renormalise, then x + start + (x // f) * (2**precision - f).

    The reciprocal r = ceil(2**(32 + precision) / f) exceeds the quotient by less than f, and x < 2**32, so
    (x * r) >> (32 + precision) is exactly x // f; after renormalisation x // f < 2**(32 - precision), so the product
    stays below 2**64.
    """
    reciprocal = table[entry]
    rest = table[entry + U64(1)]
    complement = (rest >> U64(32)) & U64(0x1FFFF)
    f = (U64(1) << precision) - complement
    full = U64((x >> (U64(32) - precision)) >= f)
    words[at] = U16(x & U64(0xFFFF))
    at -= full
    x >>= full << U64(4)
    quotient = (x * reciprocal) >> (U64(32) + precision)
    return x + (rest & U64(0xFFFF)) + quotient * complement, at, rest


@njit
def _encode(
    symbols: NumPy, contexts: NumPy, stride: int, table: NumPy, precision: int, words: NumPy, states: NumPy
) -> int:
    """Fills `words` from its end; returns the number of words, or -1 if a symbol has frequency zero."""
    n = symbols.size
    p = U64(precision)
    row = U64(stride)
    two = U64(1)
    at = U64(words.size - 1)
    bad = U64(0)
    whole = n - n % 4
    for i in range(n - 1, whole - 1, -1):
        e = (U64(contexts[i]) * row + U64(symbols[i])) << two
        states[i & 3], at, rest = _put(states[i & 3], e, table, p, words, at)
        bad |= rest
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    for j in range(whole // 4):
        i = U64(whole - 4 - 4 * j)
        e3 = (U64(contexts[i + U64(3)]) * row + U64(symbols[i + U64(3)])) << two
        e2 = (U64(contexts[i + U64(2)]) * row + U64(symbols[i + U64(2)])) << two
        e1 = (U64(contexts[i + U64(1)]) * row + U64(symbols[i + U64(1)])) << two
        e0 = (U64(contexts[i]) * row + U64(symbols[i])) << two
        x3, at, r3 = _put(x3, e3, table, p, words, at)
        x2, at, r2 = _put(x2, e2, table, p, words, at)
        x1, at, r1 = _put(x1, e1, table, p, words, at)
        x0, at, r0 = _put(x0, e0, table, p, words, at)
        bad |= (r0 | r1) | (r2 | r3)
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    if bad >> U64(63):
        return -1
    return words.size - 1 - np.int64(at)


@njit
def _decode_table(frequencies: NumPy, precision: int, symbol_of: NumPy, table: NumPy) -> None:
    """The symbol of each slot of each row, and f | start << 32 of each symbol (entry 0 of an empty row: f = 0)."""
    for c in range(frequencies.shape[0]):
        start = np.int64(0)
        row = np.int64(c) << precision
        for s in range(frequencies.shape[1]):
            f = np.int64(frequencies[c, s])
            table[c, s] = U64(f) | (U64(start) << U64(32))
            for k in range(row + start, row + start + f):
                symbol_of[k] = s
            start += f
        if start == 0:
            for k in range(row, row + (np.int64(1) << precision)):
                symbol_of[k] = 0


@njit_inline
def _get(x: Any, c: Any, symbol_of: NumPy, table: NumPy, stride: Any, precision: Any, words: NumPy, at: Any) -> Any:
    """One symbol out of state x, the state after it, and its frequency (0: the row is empty)."""
    slot = x & ((U64(1) << precision) - U64(1))
    s = U64(symbol_of[(c << precision) + slot])
    entry = table[c * stride + s]
    f = entry & U64(0xFFFFFFFF)
    x = f * (x >> precision) + slot - (entry >> U64(32))
    empty = U64(x < U64(65536))
    x = (x << (empty << U64(4))) | (U64(words[at]) * empty)
    return x, at + empty, s, f


@njit
def _decode(
    words: NumPy,
    count: int,
    states: NumPy,
    contexts: NumPy,
    use: int,
    symbol_of: NumPy,
    table: NumPy,
    stride: int,
    precision: int,
    out: NumPy,
) -> bool:
    """`words` holds `count` words and at least four more that may be read but count for nothing."""
    n = out.size
    p = U64(precision)
    row = U64(stride)
    on = U64(use)  # 1: contexts are contexts; 0: they are some array of n bytes, and all rows are row 0
    at = U64(0)
    limit = U64(count)
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    whole = n - n % 4
    for j in range(whole // 4):
        i = U64(4 * j)
        c0 = U64(contexts[i]) * on
        c1 = U64(contexts[i + U64(1)]) * on
        c2 = U64(contexts[i + U64(2)]) * on
        c3 = U64(contexts[i + U64(3)]) * on
        x0, at, s0, f0 = _get(x0, c0, symbol_of, table, row, p, words, at)
        x1, at, s1, f1 = _get(x1, c1, symbol_of, table, row, p, words, at)
        x2, at, s2, f2 = _get(x2, c2, symbol_of, table, row, p, words, at)
        x3, at, s3, f3 = _get(x3, c3, symbol_of, table, row, p, words, at)
        out[i] = U8(s0)
        out[i + U64(1)] = U8(s1)
        out[i + U64(2)] = U8(s2)
        out[i + U64(3)] = U8(s3)
        if at > limit or min(min(f0, f1), min(f2, f3)) == U64(0):
            return False
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    for i in range(whole, n):
        c = U64(contexts[i]) * on
        states[i & 3], at, s, f = _get(states[i & 3], c, symbol_of, table, row, p, words, at)
        out[i] = U8(s)
        if at > limit or f == U64(0):
            return False
    for k in range(4):
        if states[k] != U64(65536):
            return False
    return at == limit


def rans_frequencies(counts: Array, precision: int) -> Array:
    """See `kernels.rans.rans_frequencies`."""
    c = compiled(counts)
    if c.size and (int(c.min()) < 0 or int(c.max()) > 1 << 48):
        raise BadArgumentError(f"counts holds {int(c.min())} ... {int(c.max())}; 0 ... 2**48 is the range")
    out = np.empty(c.shape, np.uint32)
    for row in range(c.shape[0]):
        _round_row(c[row], 1 << precision, out[row])
    return like(out, counts)


def _rows(frequencies: NumPy, precision: int) -> NumPy:
    sums = frequencies.sum(axis=1, dtype=np.uint64)
    wrong = (sums != 0) & (sums != 1 << precision)
    if wrong.any():
        row = int(wrong.argmax())
        raise BadArgumentError(f"row {row} of frequencies sums to {sums[row]}; 0 or {1 << precision} is needed")
    return sums


def _contexts(contexts: Array | None, instead: NumPy, rows: int) -> NumPy:
    """The contexts, checked; without any, an array as long as there are symbols, whose content does not matter."""
    if contexts is None:
        return instead
    c = compiled(contexts)
    if c.size and int(c.max()) >= rows:
        raise BadArgumentError(f"contexts holds {int(c.max())}; frequencies has {rows} rows")
    return c


def rans_encode(symbols: Array, contexts: Array | None, frequencies: Array, precision: int) -> Array:
    """See `kernels.rans.rans_encode`."""
    s = compiled(symbols)
    f = compiled(frequencies)
    _rows(f, precision)
    rows, columns = f.shape
    c = _contexts(contexts, s, rows)
    if s.size and int(s.max()) >= columns:
        raise BadArgumentError(f"symbols holds {int(s.max())}; frequencies has {columns} columns")
    table = np.empty(2 * f.size, np.uint64)
    _encode_table(f, precision, table)
    words = np.empty(s.size + 1, np.uint16)  # at most one word a symbol, and one that is written in vain
    states = np.full(STATES, START, np.uint64)
    count = _encode(s, c, 0 if contexts is None else columns, table, precision, words, states)
    if count < 0:
        raise BadArgumentError("symbols holds one whose frequency in its context is zero")
    if count == 0 and (states == START).all():
        return like(np.empty(0, np.uint8), symbols)
    out = np.empty(HEADER + 2 * count, np.uint8)
    out[:HEADER] = states.astype("<u4").view(np.uint8)
    out[HEADER:] = words[words.size - count :].astype("<u2", copy=False).view(np.uint8)
    return like(out, symbols)


def rans_decode(data: Array, contexts: Array | None, frequencies: Array, precision: int, n: int) -> Array:
    """See `kernels.rans.rans_decode`."""
    d = compiled(data)
    f = compiled(frequencies)
    _rows(f, precision)
    rows, columns = f.shape
    states = np.full(STATES, START, np.uint64)
    if d.size:
        if d.size < HEADER or d.size % 2:
            raise CorruptDataError(f"{d.size} bytes are not rANS states and words")
        states[:] = d[:HEADER].view("<u4") if d.flags.aligned else np.frombuffer(d[:HEADER].tobytes(), "<u4")
        if (states < START).any():
            raise CorruptDataError("a rANS state is out of range")
    count = max(d.size - HEADER, 0) // 2
    if d.size and count == 0 and (states == START).all():
        raise CorruptDataError("rANS states that say nothing are stored")
    words = np.zeros(count + 4, np.uint16)
    words[:count] = np.frombuffer(d[HEADER:].tobytes(), "<u2")
    out = np.empty(n, np.uint8)
    c = _contexts(contexts, out, rows)
    symbol_of = np.empty(rows << precision, np.uint8)
    table = np.empty((rows, columns), np.uint64)
    _decode_table(f, precision, symbol_of, table)
    use = int(contexts is not None)
    if not _decode(words, count, states, c, use, symbol_of, table.reshape(-1), columns, precision, out):
        raise CorruptDataError(f"the bytes are not {n} rANS symbols of these frequencies")
    return like(out, data)


def coding_cost(counts: Array, frequencies: Array, precision: int) -> float:
    """See `kernels.rans.coding_cost`."""
    c, f = compiled(counts), compiled(frequencies)
    there = c > 0
    if (f[there] == 0).any():
        return float("inf")
    return float((c[there] * (precision - np.log2(f[there].astype(np.float64)))).sum())


def pack_frequencies(frequencies: Array, precision: int) -> bytes:
    """See `kernels.rans.pack_frequencies`."""
    f = compiled(frequencies)
    _rows(f, precision)
    return tables.pack(f, precision, False)


def unpack_frequencies(data: Array, rows: int, columns: int, precision: int) -> Array:
    """See `kernels.rans.unpack_frequencies`."""
    return like(tables.unpack(compiled(data), rows, columns, precision, False), data)
