"""Asymmetric numeral systems on the CPU: four states in registers; 64 states in `wide`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..backend.arrays import like, to_numpy, writeable
from ..backend.jit import njit_in_place, njit_inline
from ..errors import BadArgumentError, CorruptDataError
from ..tables import cpu as tables
from . import START, STATES, short_digits
from . import wide as wide_rans

if TYPE_CHECKING:
    from ..backend.arrays import Array

NumPy = np.ndarray[Any, Any]
Int = Any  # a machine integer or truth value inside compiled code
U8 = np.uint8
U16 = np.uint16
U64 = np.uint64
LEAST = U64(1 << 16)
"""`kernels.rans.START` (a compiled function must not take it from another module: see `jit`)."""
HEADER = 4 * STATES


@njit_inline
def _peak(frequencies: NumPy) -> Int:
    """Symbol of the greatest frequency; of equal ones the lowest."""
    peak: Int = 0
    for s in range(frequencies.size):
        if frequencies[s] > frequencies[peak]:
            peak = s
    return peak


@njit_inline
def _gain(count: Int, frequency: Int) -> Any:
    """Gain of raising a symbol's frequency by one; -1 for an absent symbol."""
    f = np.float64(frequency)
    return np.float64(count) / np.sqrt(f * (f + 1.0)) if count > 0 else -1.0


@njit_inline
def _loss(count: Int, frequency: Int) -> Any:
    """Loss of lowering a symbol's frequency by one; infinite if it cannot be lowered."""
    f = np.float64(frequency)
    return np.float64(count) / np.sqrt(f * (f - 1.0)) if count > 0 and f > 1.0 else np.inf


@njit_inline
def _round_row(counts: NumPy, total: Int, out: NumPy, gains: NumPy, losses: NumPy) -> None:
    """Scale `counts` to the sum `total`; each present symbol gets at least 1.

    See `rans_frequencies`.
    """
    size = counts.size
    n = np.int64(0)
    for s in range(size):
        n += counts[s]
    left = np.int64(total)
    for s in range(size):
        out[s] = 0
        if counts[s] > 0:
            # The start only has to be close; the loop below corrects it, however float64 rounded.
            share = np.float64(counts[s]) * np.float64(total) / np.float64(n)
            floor = np.floor(share)
            if share * share > floor * (floor + 1.0):
                floor += 1.0
            out[s] = np.int64(floor)
            left -= np.int64(floor)
        gains[s], losses[s] = _gain(counts[s], out[s]), _loss(counts[s], out[s])
    if n == 0:
        return
    while True:
        # Find the symbol that gains most by one more, and the symbol that loses least by one less. Among equal symbols,
        # the first is raised and the last is lowered, so that the result does not depend on the start.
        up: Int = -1
        down: Int = -1
        gain, loss = -1.0, np.inf
        for s in range(size):
            if gains[s] > gain:
                gain, up = gains[s], s
            if losses[s] <= loss:
                loss, down = losses[s], s
        if left == 0 and not (gain > loss or (gain == loss and up < down)):
            return
        if left >= 0:
            out[up] += 1
            gains[up], losses[up] = _gain(counts[up], out[up]), _loss(counts[up], out[up])
        if left <= 0:
            out[down] -= 1
            gains[down], losses[down] = _gain(counts[down], out[down]), _loss(counts[down], out[down])
        left -= np.sign(left)


@njit_in_place
def _round_rows(counts: NumPy, total: Int, out: NumPy, work: NumPy) -> None:
    gains, losses = work[0], work[1]
    for row in range(counts.shape[0]):
        _round_row(counts[row], total, out[row], gains, losses)


@njit_in_place
def _survey(counts: NumPy) -> Any:
    """Return least and greatest count, and sum and number of all but each row's greatest."""
    least, greatest, others, present = counts[0, 0], counts[0, 0], np.int64(0), np.int64(0)
    for row in range(counts.shape[0]):
        peak = counts[row, 0]
        for s in range(counts.shape[1]):
            count = counts[row, s]
            least, peak = min(least, count), max(peak, count)
            others += count
            present += np.int64(count > 0)
        greatest = max(greatest, peak)
        others -= peak
        present -= np.int64(peak > 0)
    return least, greatest, others, present


@njit_in_place
def _shorten(exact: NumPy, digits: Int, total: Int, out: NumPy) -> Int:
    """Round all frequencies but the greatest of each row to `digits` significant bits.

    Returns whether that is possible.
    """
    for c in range(exact.shape[0]):
        peak = _peak(exact[c])
        rest = np.int64(total)
        greatest = np.int64(1)
        for s in range(exact.shape[1]):
            value = np.int64(exact[c, s])
            if s != peak:
                drop = np.int64(0)
                while value >> (drop + digits) > 0:
                    drop += 1
                value = (value + (np.int64(1) << drop >> 1)) >> drop << drop
                out[c, s] = value
                rest -= value
                # The first of equal peaks must stay the peak, so an earlier frequency must stay smaller.
                greatest = max(greatest, value + np.int64(s < peak))
        if exact[c, peak] == 0:
            out[c, peak] = 0
        elif rest < greatest:
            return False
        else:
            out[c, peak] = rest
    return True


@njit_in_place
def _encode_table(frequencies: NumPy, precision: Int, table: NumPy) -> None:
    """Encoder constants per context and symbol.

    They are the least state that must emit a word, the reciprocal of f (0: absent), the start, and 2**p - f.

    The reciprocal r = ceil(2**(32 + p) / f) exceeds the quotient by less than 1. A state x that takes a symbol is below
    2**32 and below f << (32 - p), so (x * r) >> (32 + p) is exactly x // f, and x * r is below 2**64. `table` must hold
    zeros, because most contexts have few symbols or no symbol.
    """
    columns = frequencies.shape[1]
    total = U64(1) << U64(precision)
    for c in range(frequencies.shape[0]):
        peak = _peak(frequencies[c])
        start = U64(frequencies[c, peak])
        for s in range(columns):
            f = U64(frequencies[c, s])
            if f == U64(0):
                continue
            at = c * columns + s
            table[at, 0] = f << U64(32 - precision)
            table[at, 1] = ((total << U64(32)) + f - U64(1)) // f
            table[at, 3] = total - f
            if s != peak:
                table[at, 2] = start
                start += f


@njit_inline
def _context(contexts: Any, i: Any) -> Any:
    """Context of symbol i; 0 without contexts.

    Numba compiles a version without contexts.
    """
    if contexts is None:
        return U64(0)
    return U64(contexts[i])


@njit_in_place
def _encode_rest(
    symbols: NumPy, contexts: Any, columns: Int, table: NumPy, precision: Int, words: NumPy, states: NumPy
) -> Int:
    """Encode the symbols after the last group of four; return the next position in `words`.

    -1 if a symbol has no frequency.
    """
    at = words.size - 1
    for i in range(symbols.size - 1, symbols.size - symbols.size % 4 - 1, -1):
        x = states[i & 3]
        e = _context(contexts, i) * U64(columns) + U64(symbols[i])
        if table[e, 1] == U64(0):
            return -1
        if x >= table[e, 0]:
            words[at] = U16(x & U64(0xFFFF))
            at -= 1
            x >>= U64(16)
        states[i & 3] = x + table[e, 2] + ((x * table[e, 1]) >> U64(32 + precision)) * table[e, 3]
    return at


@njit_inline
def _emitted(x: Any, limit: Any, words: NumPy, to: Any) -> Any:
    """Move a word out of a state that reaches the limit; return state and next position.

    The word is written in any case but not always kept, because a branch here could not be predicted.
    """
    full = x >= limit
    words[to] = U16(x & U64(0xFFFF))
    return x >> U64(16) if full else x, to - U64(full)


@njit_in_place
def _encode_groups(
    symbols: NumPy, contexts: Any, columns: Int, table: NumPy, precision: Int, words: NumPy, at: Int, states: NumPy
) -> Int:
    """Encode groups of four, last to first; fastest below about one bit per symbol.

    Writes `words` from `at` down; returns the next `at`, -1 if a symbol has no frequency.

    A state x takes a symbol by x + start + (x // f) * (2**p - f), which is ((x // f) << p) + x % f + start.
    """
    k = U64(32 + precision)
    row = U64(columns)
    to = U64(at)
    absent = False
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    for j in range(symbols.size // 4):
        i = U64(symbols.size - 4 - 4 * j)
        e3 = _context(contexts, i + U64(3)) * row + U64(symbols[i + U64(3)])
        e2 = _context(contexts, i + U64(2)) * row + U64(symbols[i + U64(2)])
        e1 = _context(contexts, i + U64(1)) * row + U64(symbols[i + U64(1)])
        e0 = _context(contexts, i) * row + U64(symbols[i])
        # Rarely true if a symbol takes a fraction of a bit. Always true for an absent symbol, whose limit is zero.
        if x3 >= table[e3, 0] or x2 >= table[e2, 0] or x1 >= table[e1, 0] or x0 >= table[e0, 0]:
            x3, to = _emitted(x3, table[e3, 0], words, to)
            x2, to = _emitted(x2, table[e2, 0], words, to)
            x1, to = _emitted(x1, table[e1, 0], words, to)
            x0, to = _emitted(x0, table[e0, 0], words, to)
            absent |= min(min(table[e3, 1], table[e2, 1]), min(table[e1, 1], table[e0, 1])) == U64(0)
        x3 += table[e3, 2] + ((x3 * table[e3, 1]) >> k) * table[e3, 3]
        x2 += table[e2, 2] + ((x2 * table[e2, 1]) >> k) * table[e2, 3]
        x1 += table[e1, 2] + ((x1 * table[e1, 1]) >> k) * table[e1, 3]
        x0 += table[e0, 2] + ((x0 * table[e0, 1]) >> k) * table[e0, 3]
    if absent:
        return -1
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return np.int64(to)


@njit_in_place
def _decode_table(frequencies: NumPy, precision: Int, symbol_of: NumPy, table: NumPy, peaks: NumPy) -> None:
    """Fill the decoder tables of symbols, frequencies with starts, and row peaks.

    symbol_of[c << p | slot]; table[c * S + s]: f | start << 32; peaks[c]: its symbol | its f << 8.

    In an empty row all slots lead to symbol 0 with f = 0 and bit 63 set. `symbol_of` must hold zeros; most of them are
    not written, because many contexts of a delta do not occur.
    """
    columns = frequencies.shape[1]
    for c in range(frequencies.shape[0]):
        row = np.int64(c) << precision
        peak = _peak(frequencies[c])
        peaks[c] = U64(peak) | (U64(frequencies[c, peak]) << U64(8))
        start = np.int64(frequencies[c, peak])
        for s in range(columns):
            f = np.int64(frequencies[c, s])
            first = start
            if s == peak:
                first = np.int64(0)
            else:
                start += f
            table[c * columns + s] = U64(f) | (U64(first) << U64(32))
            if s > 0:
                for k in range(row + first, row + first + f):
                    symbol_of[k] = s
        if start == 0:
            table[c * columns] = U64(1) << U64(63)


@njit_in_place
def _decode_groups(
    words: NumPy, contexts: Any, symbol_of: NumPy, table: NumPy, peaks: NumPy, columns: Int, precision: Int,
    states: NumPy, out: NumPy,
) -> Int:  # fmt: skip
    """Decode groups of four, fastest below about one bit per symbol; return the words read.

    -1 if the data are corrupt.

    `words` ends in four words that may be read but do not count. The peak of a row has the first slots, so one
    comparison identifies it, without a look-up that waits for the state.
    """
    p = U64(precision)
    row = U64(columns)
    mask = (U64(1) << p) - U64(1)
    half = U64(0xFFFFFFFF)
    least = LEAST
    limit = U64(words.size - 4)
    at = U64(0)
    x0, x1, x2, x3 = states[0], states[1], states[2], states[3]
    for j in range(out.size // 4):
        i = U64(4 * j)
        c0, c1 = _context(contexts, i), _context(contexts, i + U64(1))
        c2, c3 = _context(contexts, i + U64(2)), _context(contexts, i + U64(3))
        e0, e1, e2, e3 = peaks[c0], peaks[c1], peaks[c2], peaks[c3]
        f0, f1, f2, f3 = e0 >> U64(8), e1 >> U64(8), e2 >> U64(8), e3 >> U64(8)
        d0, d1, d2, d3 = x0 & mask, x1 & mask, x2 & mask, x3 & mask
        if d0 < f0 and d1 < f1 and d2 < f2 and d3 < f3:
            x0 = f0 * (x0 >> p) + d0
            x1 = f1 * (x1 >> p) + d1
            x2 = f2 * (x2 >> p) + d2
            x3 = f3 * (x3 >> p) + d3
            out[i] = U8(e0 & U64(255))
            out[i + U64(1)] = U8(e1 & U64(255))
            out[i + U64(2)] = U8(e2 & U64(255))
            out[i + U64(3)] = U8(e3 & U64(255))
        else:
            s0, s1 = symbol_of[(c0 << p) + d0], symbol_of[(c1 << p) + d1]
            s2, s3 = symbol_of[(c2 << p) + d2], symbol_of[(c3 << p) + d3]
            e0, e1 = table[c0 * row + U64(s0)], table[c1 * row + U64(s1)]
            e2, e3 = table[c2 * row + U64(s2)], table[c3 * row + U64(s3)]
            if (e0 | e1 | e2 | e3) >> U64(63):
                return -1
            x0 = (e0 & half) * (x0 >> p) + d0 - (e0 >> U64(32))
            x1 = (e1 & half) * (x1 >> p) + d1 - (e1 >> U64(32))
            x2 = (e2 & half) * (x2 >> p) + d2 - (e2 >> U64(32))
            x3 = (e3 & half) * (x3 >> p) + d3 - (e3 >> U64(32))
            out[i] = s0
            out[i + U64(1)] = s1
            out[i + U64(2)] = s2
            out[i + U64(3)] = s3
        if x0 < least or x1 < least or x2 < least or x3 < least:
            short = x0 < least
            x0 = (x0 << U64(16)) | U64(words[at]) if short else x0
            at += U64(short)
            short = x1 < least
            x1 = (x1 << U64(16)) | U64(words[at]) if short else x1
            at += U64(short)
            short = x2 < least
            x2 = (x2 << U64(16)) | U64(words[at]) if short else x2
            at += U64(short)
            short = x3 < least
            x3 = (x3 << U64(16)) | U64(words[at]) if short else x3
            at += U64(short)
            if at > limit:
                return -1
    states[0], states[1], states[2], states[3] = x0, x1, x2, x3
    return np.int64(at)


@njit_in_place
def _decode_rest(
    words: NumPy, at: Int, contexts: Any, symbol_of: NumPy, table: NumPy, columns: Int, precision: Int,
    states: NumPy, out: NumPy,
) -> Int:  # fmt: skip
    """Decode the symbols after the last group; return whether words and states end correctly."""
    p = U64(precision)
    for i in range(out.size):
        x = states[i]
        slot = x & ((U64(1) << p) - U64(1))
        s = symbol_of[(_context(contexts, i) << p) + slot]
        e = table[_context(contexts, i) * U64(columns) + U64(s)]
        if e >> U64(63):
            return False
        out[i] = s
        x = (e & U64(0xFFFFFFFF)) * (x >> p) + slot - (e >> U64(32))
        if x < LEAST:
            if at >= words.size - 4:
                return False
            x = (x << U64(16)) | U64(words[at])
            at += 1
        states[i] = x
    for k in range(4):
        if states[k] != LEAST:
            return False
    return at == words.size - 4


def rans_frequencies(counts: Array, precision: int, *, exact: bool = False) -> Array:
    """See `kernels.rans.rans_frequencies`."""
    c = writeable(counts, np.int64)
    least, greatest, others, present = _survey(c)
    if least < 0 or greatest > 1 << 48:
        raise BadArgumentError(f"counts holds {least} ... {greatest}; 0 ... 2**48 is the range")
    out = np.empty(c.shape, np.uint32)
    _round_rows(c, 1 << precision, out, np.empty((2, c.shape[1])))
    if exact:
        return like(out, counts)
    digits = short_digits(int(others), int(present))
    short = np.empty_like(out)
    while digits < precision and not _shorten(out, digits, 1 << precision, short):
        digits += 1
    return like(short if digits < precision else out, counts)


def _rows(frequencies: NumPy, precision: int) -> None:
    sums = frequencies.sum(axis=1, dtype=np.uint64)
    wrong = (sums != 0) & (sums != 1 << precision)
    if wrong.any():
        row = int(wrong.argmax())
        raise BadArgumentError(f"row {row} of frequencies sums to {sums[row]}; 0 or {1 << precision} is needed")


def _contexts(contexts: Array | None, rows: int) -> NumPy | None:
    if contexts is None:
        return None
    c = writeable(contexts)
    if c.size and int(c.max()) >= rows:
        raise BadArgumentError(f"contexts holds {int(c.max())}; frequencies has {rows} rows")
    return c


def rans_encode(
    symbols: Array, contexts: Array | None, frequencies: Array, precision: int, lanes: int = STATES
) -> Array:
    """See `kernels.rans.rans_encode`."""
    s = writeable(symbols)
    f = writeable(frequencies)
    _rows(f, precision)
    rows, columns = f.shape
    c = _contexts(contexts, rows)
    if s.size and int(s.max()) >= columns:
        raise BadArgumentError(f"symbols holds {int(s.max())}; frequencies has {columns} columns")
    if lanes != STATES:
        return like(wide_rans.encode(s, c, f), symbols)
    table = np.zeros((f.size, 4), np.uint64)
    _encode_table(f, precision, table)
    words = np.empty(s.size + 1, np.uint16)  # at most one word per symbol, and one in excess
    states = np.full(STATES, START, np.uint64)
    at = _encode_rest(s, c, columns, table, precision, words, states)
    if at >= 0:
        whole = s.size - s.size % 4
        of = None if c is None else c[:whole]
        at = _encode_groups(s[:whole], of, columns, table, precision, words, at, states)
    if at < 0:
        raise BadArgumentError("symbols holds one whose frequency in its context is zero")
    count = words.size - 1 - at
    if count == 0 and (states == START).all():
        return like(np.empty(0, np.uint8), symbols)
    out = np.empty(HEADER + 2 * count, np.uint8)
    out[:HEADER] = states.astype("<u4").view(np.uint8)
    out[HEADER:] = words[words.size - count :].astype("<u2", copy=False).view(np.uint8)
    return like(out, symbols)


def rans_decode(
    data: Array, contexts: Array | None, frequencies: Array, precision: int, n: int, lanes: int = STATES
) -> Array:
    """See `kernels.rans.rans_decode`."""
    d = to_numpy(data)
    f = writeable(frequencies)
    _rows(f, precision)
    rows, columns = f.shape
    c = _contexts(contexts, rows)
    if lanes != STATES:
        return like(wide_rans.decode(d, c, f, n), data)
    count = max(d.size - HEADER, 0) // 2
    states = np.full(STATES, START, np.uint64)
    if d.size:
        if d.size < HEADER or d.size % 2:
            raise CorruptDataError(f"{d.size} bytes are not rANS states and words")
        states[:] = np.frombuffer(d[:HEADER].tobytes(), "<u4")
        if (states < START).any() or (d.size == HEADER and (states == START).all()):
            raise CorruptDataError("a rANS state is out of range, or all states are at their start value")
    words = np.empty(count + 4, np.uint16)
    words[:count], words[count:] = d[HEADER:].view("<u2"), 0
    if (
        c is not None and n < rows
    ):  # rows without symbols get no table, so that a few bytes cannot require 16 million slots
        f = f * (np.bincount(c, minlength=rows) > 0)[:, None].astype(f.dtype)
    symbol_of = np.zeros(rows << precision, np.uint8)
    table = np.empty(f.size, np.uint64)
    peaks = np.empty(rows, np.uint64)
    _decode_table(f, precision, symbol_of, table, peaks)
    out = np.empty(n, np.uint8)
    at = _decode_groups(words, c, symbol_of, table, peaks, columns, precision, states, out)
    whole = n - n % 4
    last = None if c is None else c[whole:]
    if at < 0 or not _decode_rest(words, at, last, symbol_of, table, columns, precision, states, out[whole:]):
        raise CorruptDataError(f"the bytes are not {n} rANS symbols of these frequencies")
    return like(out, data)


def coding_cost(counts: Array, frequencies: Array, precision: int) -> float:
    """See `kernels.rans.coding_cost`."""
    c, f = writeable(counts, np.int64), writeable(frequencies)
    there = c > 0
    if (f[there] == 0).any():
        return float("inf")
    return float((c[there] * (precision - np.log2(f[there].astype(np.float64)))).sum())


@njit_in_place
def _entropy(counts: NumPy) -> Any:
    bits = 0.0
    for row in range(counts.shape[0]):
        number = np.int64(0)
        for s in range(counts.shape[1]):
            number += counts[row, s]
        total = np.float64(number)
        for s in range(counts.shape[1]):
            if counts[row, s] > 0:
                # Not computed as a difference of two large sums, which is inaccurate if one symbol is frequent.
                bits += np.float64(counts[row, s]) * np.log2(total / np.float64(counts[row, s]))
    return bits


def entropy_bits(counts: Array) -> float:
    """See `kernels.rans.entropy_bits`."""
    c = writeable(counts, np.int64)
    return float(_entropy(c if c.ndim == 2 else c[None, :]))


def pack_frequencies(frequencies: Array, precision: int) -> bytes:
    """See `kernels.rans.pack_frequencies`."""
    f = writeable(frequencies)
    _rows(f, precision)
    return tables.pack(f, precision, False)


def unpack_frequencies(data: Array, rows: int, columns: int, precision: int) -> Array:
    """See `kernels.rans.unpack_frequencies`."""
    return like(tables.unpack(writeable(data), rows, columns, precision, False), data)
