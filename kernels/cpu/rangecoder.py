"""Small tables (code lengths, frequencies) and rare changes as few bytes: an adaptive binary range coder, on the CPU.

One walk over a table serves both directions: `_bit` either writes the bit it is given or reads one and returns it, so
the decoder cannot disagree with the encoder about what comes next. docs/entropy.md has the format.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import BadArgumentError, CorruptDataError
from .jit import njit

NumPy = np.ndarray[Any, Any]
Int = Any  # a machine integer or truth value inside compiled code
U64 = np.uint64

EVEN = 32768
"""Probability of a zero, in 65536ths, that every model starts with."""
PATIENCE = 62
"""Bits after which a model keeps adapting at the same rate."""

I64 = np.int64
# Numbers that are passed on are given a type here: for a bare literal Numba compiles the callee anew.
THREE, FOUR, TWELVE = I64(3), I64(4), I64(12)

WHOLE, SURE = U64(1 << 32), U64(65535)

# Where each family of models begins. Those of `_frequencies`:
EMPTY, DIAGONAL, SAME, SINGLE, PRESENT = I64(0), I64(2), I64(5), I64(8), I64(9)
EQUAL, UP, STEP, FIRST, MANTISSA, MODELS = I64(21), I64(22), I64(23), I64(31), I64(44), 60
# Those of `_lengths`:
L_PRESENT, L_EQUAL, L_UP, L_STEP, L_FIRST = I64(0), I64(4), I64(5), I64(6), I64(14)
# Those of the changes; neighbours have a model for every eight expected symbols, the rest are leaves of a tree:
C_FAR, C_UP, C_TREE, C_MODELS = I64(0), I64(32), I64(64), 320
SIX, EIGHT = I64(6), I64(8)

LOW, RANGE, AT, DECODING, FAILED = 0, 1, 2, 3, 4
"""Places of the coder's state: low (encoding) or code (decoding), range, next byte, and two flags."""


@njit
def _emit(state: NumPy, data: NumPy, byte: Int) -> None:
    at = np.int64(state[AT])
    if at >= data.size:
        state[FAILED] = U64(1)
        return
    data[at] = np.uint8(byte)
    state[AT] = U64(at + 1)


@njit
def _carry(state: NumPy, data: NumPy) -> None:
    at = np.int64(state[AT]) - 1
    while at > 0 and data[at] == 255:
        data[at] = np.uint8(0)
        at -= 1
    if at >= 0:
        data[at] = np.uint8(data[at] + 1)


@njit
def _split(state: NumPy, data: NumPy, bound: Any, bit: Int) -> Int:
    """Takes the part of the range that belongs to `bit`, or finds out which part it is; `bound` belongs to 0."""
    if state[DECODING]:
        bit = np.int64(state[LOW] >= bound)
        if bit:
            state[LOW] -= bound
            state[RANGE] -= bound
        else:
            state[RANGE] = bound
        while state[RANGE] < U64(1 << 24):
            at = np.int64(state[AT])
            byte = U64(0)  # the bytes after the last are zeros
            if at < data.size:
                byte = U64(data[at])
            state[LOW] = ((state[LOW] << U64(8)) | byte) & U64(0xFFFFFFFF)
            state[RANGE] <<= U64(8)
            state[AT] = U64(at + 1)
        return bit
    if bit:
        state[LOW] += bound
        state[RANGE] -= bound
        if state[LOW] >> U64(32):
            _carry(state, data)
            state[LOW] &= U64(0xFFFFFFFF)
    else:
        state[RANGE] = bound
    while state[RANGE] < U64(1 << 24):
        _emit(state, data, np.int64(state[LOW] >> U64(24)))
        state[LOW] = (state[LOW] << U64(8)) & U64(0xFFFFFFFF)
        state[RANGE] <<= U64(8)
    return bit


@njit
def _bit(state: NumPy, data: NumPy, models: NumPy, model: Int, bit: Int) -> Int:
    zero = np.int64(models[model, 0])
    seen = np.int64(models[model, 1])
    bit = _split(state, data, (state[RANGE] >> U64(16)) * U64(zero), bit)
    if bit:
        zero -= 2 * zero // (2 * seen + 3)
    else:
        zero += 2 * (65536 - zero) // (2 * seen + 3)
    models[model, 0] = zero  # rounding keeps it from 0 and 65536
    models[model, 1] = min(seen + 1, PATIENCE)
    return bit


@njit
def _plain(state: NumPy, data: NumPy, bits: Int, value: Int) -> Int:
    """`bits` bits of `value`, the highest first, without a model."""
    out = np.int64(0)
    for k in range(bits - 1, -1, -1):
        out |= _split(state, data, (state[RANGE] >> U64(16)) * U64(EVEN), (value >> k) & 1) << k
    return out


@njit
def _count(state: NumPy, data: NumPy, models: NumPy, base: Int, most: Int, limit: Int, value: Int) -> Int:
    """`value` in 0 ... limit as so many ones and a zero (no zero after `limit` ones), in `most` + 1 models."""
    out = np.int64(0)
    while out < limit:
        if _bit(state, data, models, base + min(out, most), np.int64(value > out)) == 0:
            break
        out += 1
    return out


@njit
def _near(
    state: NumPy, data: NumPy, models: NumPy, equal: Int, up: Int, step: Int, near: Int, highest: Int, value: Int
) -> Int:
    """`value` in 1 ... highest, by how far it is from `near`; 0 if the bytes say that it is outside."""
    if _bit(state, data, models, equal, np.int64(value != near)) == 0:
        return near
    if _bit(state, data, models, up, np.int64(value > near)) == 1:
        if near >= highest:
            return 0
        return near + 1 + _count(state, data, models, step + FOUR, THREE, highest - near - 1, value - near - 1)
    if near <= 1:
        return 0
    return near - 1 - _count(state, data, models, step, THREE, near - 2, near - value - 1)


@njit
def _width(value: Int) -> Int:
    """Bits of `value`; 0 for 0."""
    bits = np.int64(0)
    while value >> bits:
        bits += 1
    return bits


@njit
def _lengths(state: NumPy, data: NumPy, models: NumPy, lengths: NumPy, highest: Int) -> Int:
    """The code lengths; whether they are those of a complete code (or of none)."""
    size = lengths.size
    left = np.int64(1) << highest  # of the code space
    whole = left
    near = np.int64(-1)
    before = np.int64(0)  # whether the two symbols before are present: 2 * last + last but one
    present = np.int64(0)
    for s in range(size):
        present += np.int64(lengths[s] > 0)
    for s in range(size):
        there = _bit(state, data, models, L_PRESENT + before, np.int64(lengths[s] > 0))
        before = before // 2 + 2 * there
        if there == 0:
            lengths[s] = 0
            continue
        if near < 0:
            # The first length; 0 stands for the 1 of a symbol that occurs alone.
            given = np.int64(lengths[s])
            if present == 1:
                given = np.int64(0)
            near = _count(state, data, models, L_FIRST, highest, highest, given)
            lengths[s] = max(near, np.int64(1))
        else:
            near = _near(state, data, models, L_EQUAL, L_UP, L_STEP, near, highest, np.int64(lengths[s]))
            if near == 0:
                return False
            lengths[s] = near
        left -= whole >> near
        if left <= 0:
            for k in range(s + 1, size):
                lengths[k] = 0
            return left == 0
    return left == whole


@njit
def _frequencies(state: NumPy, data: NumPy, models: NumPy, table: NumPy, precision: Int) -> Int:
    """The frequencies; whether each row is what it has to be."""
    rows, columns = table.shape
    total = np.int64(1) << precision
    wide = _width(columns - 1)
    digits = np.int64(0)  # significant bits of the frequencies that are not the greatest of their rows
    if not state[DECODING]:
        for c in range(rows):
            peak = np.argmax(table[c])
            for s in range(columns):
                if s != peak and table[c, s] > 0:
                    value = np.int64(table[c, s])
                    while value & 1 == 0:
                        value >>= 1
                    digits = max(digits, _width(value))
    digits = _plain(state, data, FOUR, digits)
    empty = np.int64(0)
    kind = np.int64(0)
    last, last_peak = np.int64(-1), np.int64(-1)  # the row before that is not empty
    for c in range(rows):
        peak = np.int64(0)
        is_empty, single = np.int64(0), np.int64(0)
        if not state[DECODING]:
            peak = np.int64(np.argmax(table[c]))
            is_empty = np.int64(table[c, peak] == 0)
            single = np.int64(table[c, peak] == total)
        empty = _bit(state, data, models, EMPTY + empty, is_empty)
        if empty:
            for s in range(columns):
                table[c, s] = 0
            continue
        diagonal = last_peak + c - last
        if _bit(state, data, models, DIAGONAL + kind, np.int64(peak != diagonal)) == 0:
            peak, kind = diagonal, np.int64(0)
        elif _bit(state, data, models, SAME + kind, np.int64(peak != last_peak)) == 0:
            peak, kind = last_peak, np.int64(1)
        else:
            peak, kind = _plain(state, data, wide, peak), np.int64(2)
        if peak < 0 or peak >= columns:
            return False
        if digits > 0:
            single = _bit(state, data, models, SINGLE, single)
        else:
            single = np.int64(1)
        rest = total
        greatest = np.int64(0)
        for s in range(columns):
            if s == peak:
                continue
            if single:
                table[c, s] = 0
                continue
            above = np.int64(0)
            if last >= 0 and 0 <= s - peak + last_peak < columns:
                above = _width(np.int64(table[last, s - peak + last_peak]))
            left = np.int64(0)
            if s > 0 and s - 1 != peak:
                left = _width(np.int64(table[c, s - 1]))
            model = PRESENT + min(abs(s - peak), np.int64(3)) - 1
            if left > 0 or s - 1 == peak:
                model += 3
            if above > 0:
                model += 6
            if _bit(state, data, models, model, np.int64(table[c, s] > 0)) == 0:
                table[c, s] = 0
                continue
            value = np.int64(table[c, s])
            near = left
            if above > 0:
                near = above
            if near > 0:
                bits = _near(state, data, models, EQUAL, UP, STEP, near, precision, _width(value))
                if bits == 0:
                    return False
            else:
                bits = 1 + _count(state, data, models, FIRST, TWELVE, precision - 1, _width(value) - 1)
            out = np.int64(1)
            for k in range(1, bits):
                digit = np.int64(0)
                if k < digits:
                    digit = _bit(state, data, models, MANTISSA + k, (value >> (bits - 1 - k)) & 1)
                out = 2 * out + digit
            table[c, s] = out
            rest -= out
            greatest = max(greatest, out)
        if rest < max(greatest, np.int64(1)):
            return False
        table[c, peak] = rest
        last, last_peak = np.int64(c), peak
    return True


@njit
def _gap(state: NumPy, data: NumPy, left: Int, changes: Int, gap: Int) -> Int:
    """How many of the elements left come before the next of so many changes, -1 if that is too many.

    Unchanged with probability q each, the gap has independent binary digits: digit j is 1 as q**(2**j) to 1. Those
    that are hardly ever 1 are asked for together.
    """
    most = left - changes
    out = np.int64(0)
    q = (U64(most) << U64(32)) // U64(left)
    width = _width(most)
    for j in range(width):
        zero = (WHOLE << U64(16)) // (WHOLE + q)
        if zero >= SURE:
            if _split(state, data, (state[RANGE] >> U64(16)) * SURE, np.int64(gap >> j > 0)):
                out |= _plain(state, data, width - j, gap >> j) << j
            break
        out |= _split(state, data, (state[RANGE] >> U64(16)) * zero, (gap >> j) & 1) << j
        q = (q * q) >> U64(32)
    return np.int64(-1) if out > most else out


@njit
def _changed(state: NumPy, data: NumPy, models: NumPy, usual: Int, symbol: Int) -> Int:
    """What a symbol has become; -1 if the bytes say what would be said otherwise."""
    group = usual >> 3
    if _bit(state, data, models, C_FAR + group, np.int64(abs(symbol - usual) != 1)) == 0:
        if usual == 0:
            return np.int64(1)
        if usual == 255:
            return np.int64(254)
        return usual - 1 + 2 * _bit(state, data, models, C_UP + group, np.int64(symbol > usual))
    node = np.int64(1)
    for k in range(7, -1, -1):
        node = 2 * node + _bit(state, data, models, C_TREE + node, (symbol >> k) & 1)
    if abs(node - 256 - usual) <= 1:
        return np.int64(-1)
    return node - 256


@njit
def _encode_changes(state: NumPy, data: NumPy, symbols: NumPy, usual: NumPy, places: NumPy, n: Int) -> Int:
    models = np.zeros((C_MODELS, 2), np.int64)
    _open(state, data, models, False)
    width = _width(np.int64(places.size))
    _plain(state, data, SIX, width)
    _plain(state, data, width - 1, np.int64(places.size))
    at = np.int64(0)
    for i in range(places.size):
        _gap(state, data, n - at, places.size - i, np.int64(places[i]) - at)
        at = np.int64(places[i]) + 1
        _changed(state, data, models, np.int64(usual[i]), np.int64(symbols[i]))
    size = _close(state, data)
    if state[FAILED]:
        return np.int64(-1)
    return size


@njit
def _count_changes(state: NumPy, data: NumPy, models: NumPy) -> Int:
    """Begins to decode: how many changes there are; -1 if that is no number."""
    _open(state, data, models, True)
    width = _plain(state, data, SIX, np.int64(0))
    if width < 1 or width > 32:
        return np.int64(-1)
    return (np.int64(1) << (width - 1)) | _plain(state, data, width - 1, np.int64(0))


@njit
def _decode_changes(state: NumPy, data: NumPy, models: NumPy, usual: NumPy, places: NumPy, out: NumPy) -> Int:
    """Goes on after `_count_changes`: fills `places`, one for each change, and `out` there; whether that can be."""
    at = np.int64(0)
    for i in range(places.size):
        gap = _gap(state, data, usual.size - at, places.size - i, np.int64(0))
        if gap < 0:
            return False
        at += gap
        symbol = _changed(state, data, models, np.int64(usual[at]), np.int64(0))
        if symbol < 0:
            return False
        places[i], out[at] = at, symbol
        at += 1
    return True


@njit
def _open(state: NumPy, data: NumPy, models: NumPy, decoding: Int) -> None:
    state[LOW], state[RANGE], state[AT], state[FAILED] = U64(0), U64(0xFFFFFFFF), U64(0), U64(0)
    state[DECODING] = U64(decoding)
    if decoding:
        for k in range(4):
            state[LOW] <<= U64(8)
            if k < data.size:
                state[LOW] |= U64(data[k])
        state[AT] = U64(4)
    for k in range(models.shape[0]):
        models[k, 0] = EVEN
        models[k, 1] = 0


@njit
def _close(state: NumPy, data: NumPy) -> Int:
    """The shortest end that lies in the range, without the zeros that a reader adds itself; returns the size."""
    for size in range(5):
        mask = (U64(1) << U64(32 - 8 * size)) - U64(1)
        value = (state[LOW] + mask) & ~mask
        if value - state[LOW] < state[RANGE]:
            if value >> U64(32):
                _carry(state, data)
            for k in range(size):
                _emit(state, data, np.int64((value >> U64(24 - 8 * k)) & U64(255)))
            break
    end = np.int64(state[AT])
    while end > 0 and data[end - 1] == 0:
        end -= 1
    return end


@njit
def _code(table: NumPy, parameter: Int, is_lengths: Int, data: NumPy, decoding: Int) -> Int:
    """Encodes `table` (two-dimensional) into `data` or fills it from there.

    Returns the size of the data, -1 if they are not such a table, -2 if `data` is too small to encode into.
    """
    state = np.zeros(5, np.uint64)
    models = np.zeros((MODELS, 2), np.int64)
    _open(state, data, models, decoding)
    if is_lengths:
        fine = _lengths(state, data, models, table[0], parameter)
    else:
        fine = _frequencies(state, data, models, table, parameter)
    if not fine:
        return -1
    if decoding:
        return data.size
    size = _close(state, data)
    if state[FAILED]:
        return -2
    return size


def pack(table: NumPy, parameter: int, lengths: bool) -> bytes:
    """uint32[rows, columns] as bytes; one row of code lengths up to `parameter`, or frequencies of that precision."""
    room = max(256, table.size)
    while True:
        data = np.empty(room, np.uint8)
        size = _code(table, parameter, lengths, data, False)
        if size >= 0:
            return data[:size].tobytes()
        if size == -1:
            raise BadArgumentError("the table is not one of a complete code, or not one of frequencies")
        room *= 4


def unpack(data: NumPy, rows: int, columns: int, parameter: int, lengths: bool) -> NumPy:
    """The inverse of `pack`; raises CorruptDataError for bytes that `pack` does not write."""
    table = np.zeros((rows, columns), np.uint32)
    # A table has one form only: what is read must be what would be written.
    if _code(table, parameter, lengths, data, True) < 0 or pack(table, parameter, lengths) != data.tobytes():
        raise CorruptDataError(f"{data.size} bytes are not a table of {rows} x {columns}")
    return table


def pack_changes(symbols: NumPy, usual: NumPy, places: NumPy, n: int) -> NumPy:
    """Symbols at ascending places among n that are not the usual ones there; no bytes if there are none."""
    if places.size == 0:
        return np.empty(0, np.uint8)
    room = 64 + 8 * places.size
    while True:
        data = np.empty(room, np.uint8)
        size = _encode_changes(np.zeros(5, np.uint64), data, symbols, usual, places, n)
        if size >= 0:
            return data[:size].copy()
        room *= 4


def unpack_changes(data: NumPy, usual: NumPy, out: NumPy) -> bool:
    """Put the changes that `pack_changes` wrote into `out`, a copy of `usual`; whether the bytes are such."""
    if data.size == 0:
        return True
    state, models = np.zeros(5, np.uint64), np.zeros((C_MODELS, 2), np.int64)
    count = _count_changes(state, data, models)
    if not 0 < count <= usual.size:
        return False
    places = np.empty(count, np.int64)
    if not _decode_changes(state, data, models, usual, places, out):
        return False
    # Changes have one form only: what is read must be what would be written.
    return bool(np.array_equal(pack_changes(out[places], usual[places], places, usual.size), data))
