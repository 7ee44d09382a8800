"""Adaptive binary range coder for small tables and sparse changes, on the CPU.

Small tables are code lengths and frequencies.

The same functions encode and decode: `_bit` either writes the given bit or reads one and returns it, so encoder and
decoder always follow the same order. docs/entropy.md defines the format.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.jit import njit_in_place, njit_inline
from ..errors import BadArgumentError, CorruptDataError

NumPy = np.ndarray[Any, Any]
Int = Any  # a machine integer or truth value inside compiled code
U64 = np.uint64

EVEN = 32768
"""Initial probability of a zero in every model, in 65536ths."""
PATIENCE = 62
"""Bits after which a model keeps adapting at the same rate."""

I64 = np.int64
# Constants that are passed to other functions have a type, because Numba compiles the callee again for a bare literal.
THREE, FOUR, TWELVE = I64(3), I64(4), I64(12)

WHOLE, SURE = U64(1 << 32), U64(65535)
LOWER, LEAST = U64(0xFFFFFFFF), U64(1 << 24)

# First number of each family of models. Those of `_frequencies`:
EMPTY, DIAGONAL, SAME, SINGLE, PRESENT = I64(0), I64(2), I64(5), I64(8), I64(9)
EQUAL, UP, STEP, FIRST, MANTISSA, MODELS = I64(21), I64(22), I64(23), I64(31), I64(44), 60
# Those of `_lengths`:
L_PRESENT, L_EQUAL, L_UP, L_STEP, L_FIRST = I64(0), I64(4), I64(5), I64(6), I64(14)
# Those of the changes; neighbours have a model for every eight expected symbols, the rest are leaves of a tree:
C_FAR, C_UP, C_TREE, C_MODELS = I64(0), I64(32), I64(64), 320
SIX = I64(6)

Coder = Any  # (low when encoding, code less low when decoding; range; next byte; whether it decodes)
"""The state of the coder is passed as a tuple instead of an array, so that it stays in registers."""


def _reciprocals() -> NumPy:
    """Reciprocals 2**32 / (2 t + 3), rounded up, for exact division by multiplication.

    Times a number below 2**18, shifted by 32, such a reciprocal gives the quotient exactly.
    """
    return np.asarray([-(-(1 << 32) // (2 * t + 3)) for t in range(PATIENCE + 1)], np.int64)


RECIPROCALS = _reciprocals()


@njit_inline
def _carry(data: NumPy, at: Int) -> None:
    at = min(at, np.int64(data.size)) - 1  # beyond the end nothing was written; the caller repeats with a larger buffer
    while at > 0 and data[at] == 255:
        data[at] = np.uint8(0)
        at -= 1
    if at >= 0:
        data[at] = np.uint8(data[at] + 1)


@njit_inline
def _split(coder: Coder, data: NumPy, bound: Any, bit: Int) -> Any:
    """Encode or decode one bit: narrow the range to the part of `bit`; `bound` belongs to 0."""
    low, width, at, decoding = coder
    if decoding:
        bit = np.int64(low >= bound)
        if bit:
            low -= bound
            width -= bound
        else:
            width = bound
        while width < LEAST:
            byte = U64(0)  # the bytes after the last are zeros
            if at < data.size:
                byte = U64(data[at])
            low = ((low << U64(8)) | byte) & LOWER
            width <<= U64(8)
            at += 1
    else:
        if bit:
            low += bound
            width -= bound
        else:
            width = bound
        if low >> U64(32):
            _carry(data, at)
            low &= LOWER
        while width < LEAST:
            if at < data.size:
                data[at] = np.uint8(low >> U64(24))
            low = (low << U64(8)) & LOWER
            width <<= U64(8)
            at += 1
    return bit, (low, width, at, decoding)


@njit_inline
def _bit(coder: Coder, data: NumPy, models: NumPy, model: Int, bit: Int) -> Any:
    zero, seen = models[model, 0], models[model, 1]
    bit, coder = _split(coder, data, (coder[1] >> U64(16)) * U64(zero), bit)
    if bit:
        zero -= (2 * zero * RECIPROCALS[seen]) >> 32
    else:
        zero += (2 * (65536 - zero) * RECIPROCALS[seen]) >> 32
    models[model, 0] = zero  # rounding keeps it from 0 and 65536
    models[model, 1] = min(seen + 1, PATIENCE)
    return bit, coder


@njit_inline
def _plain(coder: Coder, data: NumPy, bits: Int, value: Int) -> Any:
    """Encode or decode `bits` bits of `value` without a model, highest first."""
    out = np.int64(0)
    for k in range(bits - 1, -1, -1):
        bit, coder = _split(coder, data, (coder[1] >> U64(16)) * U64(EVEN), (value >> k) & 1)
        out |= bit << k
    return out, coder


@njit_inline
def _count(coder: Coder, data: NumPy, models: NumPy, base: Int, most: Int, limit: Int, value: Int) -> Any:
    """Encode or decode a count in 0 ... limit in unary, with `most` + 1 models.

    The code is `count` ones and a zero (no zero after `limit` ones).
    """
    out = np.int64(0)
    while out < limit:
        bit, coder = _bit(coder, data, models, base + min(out, most), np.int64(value > out))
        if bit == 0:
            break
        out += 1
    return out, coder


@njit_inline
def _near(
    coder: Coder, data: NumPy, models: NumPy, equal: Int, up: Int, step: Int, near: Int, highest: Int, value: Int
) -> Any:
    """Encode or decode `value` in 1 ... highest by its distance from `near`.

    Return 0 if decoded bytes give a number out of range.
    """
    out = np.int64(0)
    other, coder = _bit(coder, data, models, equal, np.int64(value != near))
    if other == 0:
        return near, coder
    above, coder = _bit(coder, data, models, up, np.int64(value > near))
    if above == 1:
        if near < highest:
            more, coder = _count(coder, data, models, step + FOUR, THREE, highest - near - 1, value - near - 1)
            out = near + 1 + more
    elif near > 1:
        less, coder = _count(coder, data, models, step, THREE, near - 2, near - value - 1)
        out = near - 1 - less
    return out, coder


@njit_inline
def _width(value: Int) -> Int:
    """Number of binary digits of `value`; 0 for 0."""
    bits = np.int64(0)
    while value >> bits:
        bits += 1
    return bits


@njit_inline
def _lengths(coder: Coder, data: NumPy, models: NumPy, lengths: NumPy, highest: Int) -> Any:
    """Encode or decode code lengths; return whether they form a complete code or are all 0."""
    size = lengths.size
    left = np.int64(1) << highest  # of the code space
    whole = left
    near = np.int64(-1)
    before = np.int64(0)  # whether the two symbols before are present: 2 * last + last but one
    present = np.int64(0)
    for s in range(size):
        present += np.int64(lengths[s] > 0)
    for s in range(size):
        there, coder = _bit(coder, data, models, L_PRESENT + before, np.int64(lengths[s] > 0))
        before = before // 2 + 2 * there
        if there == 0:
            lengths[s] = 0
            continue
        if near < 0:
            # The first length; 0 means length 1 of the only symbol.
            given = np.int64(lengths[s])
            if present == 1:
                given = np.int64(0)
            near, coder = _count(coder, data, models, L_FIRST, highest, highest, given)
            lengths[s] = max(near, np.int64(1))
        else:
            near, coder = _near(coder, data, models, L_EQUAL, L_UP, L_STEP, near, highest, np.int64(lengths[s]))
            if near == 0:
                return False, coder
            lengths[s] = near
        left -= whole >> near
        if left <= 0:
            for k in range(s + 1, size):
                lengths[k] = 0
            return left == 0, coder
    return left == whole, coder


@njit_inline
def _peak(row: NumPy) -> Int:
    """Position of the first of the greatest frequencies."""
    peak = np.int64(0)
    for s in range(row.size):
        if row[s] > row[peak]:
            peak = np.int64(s)
    return peak


@njit_inline
def _digits(table: NumPy) -> Int:
    """Most significant bits of any frequency except the greatest of each row."""
    digits = np.int64(0)
    for c in range(table.shape[0]):
        peak = _peak(table[c])
        for s in range(table.shape[1]):
            if s != peak and table[c, s] > 0:
                value = np.int64(table[c, s])
                while value & 1 == 0:
                    value >>= 1
                digits = max(digits, _width(value))
    return digits


@njit_inline
def _frequencies(coder: Coder, data: NumPy, models: NumPy, table: NumPy, precision: Int, work: NumPy) -> Any:
    """Encode or decode the frequencies; return whether each row is valid and canonical."""
    rows, columns = table.shape
    total = np.int64(1) << precision
    wide = _width(columns - 1)
    decoding = coder[3]
    digits = np.int64(0)
    if not decoding:
        digits = _digits(table)
    digits, coder = _plain(coder, data, FOUR, digits)
    # Bits of each frequency of this row and of the last one that is not empty; those of a peak only in the latter.
    own, before = work[0], work[1]
    empty = np.int64(0)
    kind = np.int64(0)
    last, last_peak = np.int64(-1), np.int64(-1)  # the row before that is not empty
    for c in range(rows):
        peak = np.int64(0)
        is_empty, single = np.int64(0), np.int64(0)
        if not decoding:
            peak = _peak(table[c])
            is_empty = np.int64(table[c, peak] == 0)
            single = np.int64(table[c, peak] == total)
        empty, coder = _bit(coder, data, models, EMPTY + empty, is_empty)
        if empty:
            for s in range(columns):
                table[c, s] = 0
            continue
        diagonal = last_peak + c - last
        off, coder = _bit(coder, data, models, DIAGONAL + kind, np.int64(peak != diagonal))
        if off == 0:
            peak, kind = diagonal, np.int64(0)
        else:
            other, coder = _bit(coder, data, models, SAME + kind, np.int64(peak != last_peak))
            if other == 0:
                peak, kind = last_peak, np.int64(1)
            else:
                peak, coder = _plain(coder, data, wide, peak)
                kind = np.int64(2)
                if peak in (diagonal, last_peak):
                    return False, coder
        if peak < 0 or peak >= columns:
            return False, coder
        if digits > 0:
            single, coder = _bit(coder, data, models, SINGLE, single)
        else:
            single = np.int64(1)
        rest = total
        greatest = np.int64(1)
        for s in range(columns):
            own[s] = 0
            if s == peak:
                continue
            if single:
                table[c, s] = 0
                continue
            above = np.int64(0)
            if last >= 0 and 0 <= s - peak + last_peak < columns:
                above = before[s - peak + last_peak]
            left = np.int64(0)
            if s > 0:
                left = own[s - 1]
            model = PRESENT + min(abs(s - peak), np.int64(3)) - 1
            if left > 0 or s - 1 == peak:
                model += 3
            if above > 0:
                model += 6
            there, coder = _bit(coder, data, models, model, np.int64(table[c, s] > 0))
            if there == 0:
                table[c, s] = 0
                continue
            value = np.int64(table[c, s])
            near = left
            if above > 0:
                near = above
            if near > 0:
                bits, coder = _near(coder, data, models, EQUAL, UP, STEP, near, precision, _width(value))
                if bits == 0:
                    return False, coder
            else:
                bits, coder = _count(coder, data, models, FIRST, TWELVE, precision - 1, _width(value) - 1)
                bits += 1
            out = np.int64(1)
            for k in range(1, bits):
                digit = np.int64(0)
                if k < digits:
                    digit, coder = _bit(coder, data, models, MANTISSA + k, (value >> (bits - 1 - k)) & 1)
                out = 2 * out + digit
            table[c, s] = out
            own[s] = bits
            rest -= out
            # The peak is the lowest of equal symbols, so an earlier frequency must be smaller.
            greatest = max(greatest, out + np.int64(s < peak))
        if rest < greatest or (single == 0 and rest == total):
            return False, coder
        table[c, peak] = rest
        own[peak] = _width(rest)
        own, before = before, own
        last, last_peak = np.int64(c), peak
    return not decoding or digits == _digits(table), coder


@njit_inline
def _gap(coder: Coder, data: NumPy, left: Int, changes: Int, gap: Int) -> Any:
    """Encode or decode the number of unchanged elements before the next change.

    -1 if decoding gives more elements than are left.

    If each element is unchanged with probability q, the binary digits of the gap are independent, and the odds that
    digit j is 1 are q**(2**j) : 1. Digits that are almost never 1 are coded together.
    """
    most = left - changes
    out = np.int64(0)
    q = (U64(most) << U64(32)) // U64(left)
    width = _width(most)
    for j in range(width):
        zero = (WHOLE << U64(16)) // (WHOLE + q)
        if zero >= SURE:
            some, coder = _split(coder, data, (coder[1] >> U64(16)) * SURE, np.int64(gap >> j > 0))
            if some:
                upper, coder = _plain(coder, data, width - j, gap >> j)
                if upper == 0:
                    return np.int64(-1), coder
                out |= upper << j
            break
        digit, coder = _split(coder, data, (coder[1] >> U64(16)) * zero, (gap >> j) & 1)
        out |= digit << j
        q = (q * q) >> U64(32)
    return (np.int64(-1) if out > most else out), coder


@njit_inline
def _changed(coder: Coder, data: NumPy, models: NumPy, usual: Int, symbol: Int) -> Any:
    """Encode or decode the new symbol of a changed element.

    -1 if decoded bytes are not in canonical form.
    """
    group = usual >> 3
    far, coder = _bit(coder, data, models, C_FAR + group, np.int64(abs(symbol - usual) != 1))
    if far == 0:
        if usual == 0:
            return np.int64(1), coder
        if usual == 255:
            return np.int64(254), coder
        up, coder = _bit(coder, data, models, C_UP + group, np.int64(symbol > usual))
        return usual - 1 + 2 * up, coder
    node = np.int64(1)
    for k in range(7, -1, -1):
        bit, coder = _bit(coder, data, models, C_TREE + node, (symbol >> k) & 1)
        node = 2 * node + bit
    if abs(node - 256 - usual) <= 1:
        return np.int64(-1), coder
    return node - 256, coder


@njit_in_place
def _encode_changes(data: NumPy, symbols: NumPy, usual: NumPy, places: NumPy, n: Int, models: NumPy) -> Int:
    """Encode the changes; return the size of the data, -1 if `data` is too small."""
    coder = _open(data, False)
    width = _width(np.int64(places.size))
    _, coder = _plain(coder, data, SIX, width)
    _, coder = _plain(coder, data, width - 1, np.int64(places.size))
    at = np.int64(0)
    for i in range(places.size):
        _, coder = _gap(coder, data, n - at, places.size - i, np.int64(places[i]) - at)
        at = np.int64(places[i]) + 1
        _, coder = _changed(coder, data, models, np.int64(usual[i]), np.int64(symbols[i]))
    return _close(coder, data)


@njit_inline
def _number_of_changes(coder: Coder, data: NumPy) -> Any:
    """Decode the number of changes; -1 if the bytes are not such a number."""
    width, coder = _plain(coder, data, SIX, np.int64(0))
    if width < 1 or width > 32:
        return np.int64(-1), coder
    rest, coder = _plain(coder, data, width - 1, np.int64(0))
    return (np.int64(1) << (width - 1)) | rest, coder


@njit_in_place
def _decode_changes(data: NumPy, usual: NumPy, out: NumPy, models: NumPy) -> Int:
    """Decode changes into `out`; return whether the data are canonical."""
    coder = _open(data, True)
    count, coder = _number_of_changes(coder, data)
    if count < 1 or count > usual.size:
        return False
    at = np.int64(0)
    for i in range(count):
        gap, coder = _gap(coder, data, usual.size - at, count - i, np.int64(0))
        if gap < 0:
            return False
        at += gap
        symbol, coder = _changed(coder, data, models, np.int64(usual[at]), np.int64(0))
        if symbol < 0:
            return False
        out[at] = symbol
        at += 1
    return _is_close(coder, data)


@njit_inline
def _window(data: NumPy, at: Int) -> Any:
    """Return the four bytes from `at` as a number; the data are followed by zeros."""
    value = U64(0)
    for k in range(4):
        value <<= U64(8)
        if at + k < data.size:
            value |= U64(data[at + k])
    return value


@njit_inline
def _open(data: NumPy, decoding: Int) -> Coder:
    low, at = U64(0), np.int64(0)
    if decoding:
        low, at = _window(data, at), np.int64(4)
    return low, LOWER, at, decoding


@njit_inline
def _end(low: Any, width: Any) -> Any:
    """Number in the range that takes the fewest bytes without trailing zeros, and that size."""
    for size in range(4):
        mask = LOWER >> U64(8 * size)
        value = (low + mask) & ~mask
        if value - low < width:
            return value, size
    return low, 4


@njit_inline
def _close(coder: Coder, data: NumPy) -> Int:
    """Write the end of the data without trailing zeros; return the size, -1 if no room.

    The reader adds the zeros itself.
    """
    low, width, at, _ = coder
    value, size = _end(low, width)
    if at + size > data.size:
        return np.int64(-1)
    if value >> U64(32):
        _carry(data, at)
    for k in range(size):
        data[at + k] = np.uint8(value >> U64(24 - 8 * k))
    end = at + size
    while end > 0 and data[end - 1] == 0:
        end -= 1
    return end


@njit_inline
def _is_close(coder: Coder, data: NumPy) -> Int:
    """Return whether the bytes read so far are those that `_close` writes (canonical form).

    The number read is `code` above the lower end of the range, which determines the last 32 bits of that end and the
    number written. A code is beyond the range only if it was so from the start.
    """
    code, width, at, _ = coder
    low = (WHOLE + _window(data, at - 4) - code) & LOWER
    value, _ = _end(low, width)
    inside = _window(data, np.int64(0)) < LOWER
    return inside and code == value - low and data.size <= at and (data.size == 0 or data[-1] > 0)


@njit_inline
def _table(coder: Coder, data: NumPy, table: NumPy, parameter: Int, is_lengths: Int, models: NumPy, work: NumPy) -> Any:
    if is_lengths:
        return _lengths(coder, data, models, table[0], parameter)
    return _frequencies(coder, data, models, table, parameter, work)


@njit_in_place
def _encode(table: NumPy, parameter: Int, is_lengths: Int, data: NumPy, models: NumPy, work: NumPy) -> Int:
    """Encode a table; return the size, -1 if the table is invalid, -2 if `data` is too small."""
    fine, coder = _table(_open(data, False), data, table, parameter, is_lengths, models, work)
    if not fine:
        return np.int64(-1)
    size = _close(coder, data)
    return size if size >= 0 else np.int64(-2)


@njit_in_place
def _decode(table: NumPy, parameter: Int, is_lengths: Int, data: NumPy, models: NumPy, work: NumPy) -> Int:
    """Decode a table into `table`; return whether the data are canonical."""
    fine, coder = _table(_open(data, True), data, table, parameter, is_lengths, models, work)
    return fine and _is_close(coder, data)


def _models(count: int) -> NumPy:
    """Probabilities of a zero and numbers of bits seen, of models that have seen none."""
    return _FRESH[:count].copy()


_FRESH = np.zeros((C_MODELS, 2), np.int64)
_FRESH[:, 0] = EVEN


def pack(table: NumPy, parameter: int, lengths: bool) -> bytes:
    """Encode a table uint32[rows, columns] as bytes.

    The table is one row of code lengths up to `parameter`, or frequencies with that precision.
    """
    room = max(256, table.size)
    while True:
        data = np.empty(room, np.uint8)
        size = _encode(table, parameter, lengths, data, _models(MODELS), np.zeros((2, table.shape[1]), np.int64))
        if size >= 0:
            return data[:size].tobytes()
        if size == -1:
            raise BadArgumentError("the table holds neither the lengths of a complete code nor valid frequencies")
        room *= 4


def unpack(data: NumPy, rows: int, columns: int, parameter: int, lengths: bool) -> NumPy:
    """Decode a table: the inverse of `pack`; raises CorruptDataError for non-canonical bytes."""
    table = np.zeros((rows, columns), np.uint32)
    if not _decode(table, parameter, lengths, data, _models(MODELS), np.zeros((2, columns), np.int64)):
        raise CorruptDataError(f"{data.size} bytes are not a table of {rows} x {columns}")
    return table


def pack_changes(symbols: NumPy, usual: NumPy, places: NumPy, n: int) -> NumPy:
    """Encode symbols that differ from the usual ones, at ascending positions among n.

    No changes give no bytes.
    """
    if places.size == 0:
        return np.empty(0, np.uint8)
    room = 64 + 8 * places.size
    while True:
        data = np.empty(room, np.uint8)
        size = _encode_changes(data, symbols, usual, places, n, _models(C_MODELS))
        if size >= 0:
            return data[:size].copy()
        room *= 4


def unpack_changes(data: NumPy, usual: NumPy, out: NumPy) -> bool:
    """Decode changes into `out`, a copy of `usual`; return whether the bytes are canonical."""
    return data.size == 0 or bool(_decode_changes(data, usual, out, _models(C_MODELS)))
