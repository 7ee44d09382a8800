"""Small tables as bits, on the CPU: code lengths and frequencies.

The same functions write and read: `_plain` either writes the given number or reads one and returns it, so writer and
reader always follow the same order. docs/entropy.md defines the format.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend.jit import njit_in_place, njit_inline
from ..errors import BadArgumentError, CorruptDataError

NumPy = np.ndarray[Any, Any]
Int = Any  # a machine integer or truth value inside compiled code

# Constants that are passed to other functions have a type, because Numba compiles the callee again for a bare literal.
ZERO, ONE, FOUR = np.int64(0), np.int64(1), np.int64(4)
WIDEST = np.int64(20)
"""Most bits of a number; no table needs more."""
_ROW, _CELL = 12, 6
"""Bytes that a row and a frequency take at most."""


@njit_inline
def _width(value: Int) -> Int:
    """Return the number of binary digits."""
    width = np.int64(0)
    while value > 0:
        value >>= 1
        width += 1
    return width


@njit_inline
def _plain(bits: NumPy, at: Int, reading: Int, width: Int, value: Int) -> Any:
    """Write or read `width` bits of `value`, the lowest first; return it and the next bit."""
    if reading:
        value = np.int64(0)
        for k in range(width):
            byte = (at + k) >> 3
            if byte < bits.size:
                value |= np.int64((bits[byte] >> ((at + k) & 7)) & 1) << k
        return value, at + width
    for k in range(width):
        bits[(at + k) >> 3] |= np.uint8(((value >> k) & 1) << ((at + k) & 7))
    return value, at + width


@njit_inline
def _gamma(bits: NumPy, at: Int, reading: Int, value: Int) -> Any:
    """Write or read a number from 1 on; 0 if the bits are invalid.

    A zero for each digit after the first comes first, then a one, then those digits.
    """
    width = _width(value)
    if reading:
        width, one = np.int64(0), np.int64(0)
        while one == 0 and width < WIDEST:
            one, at = _plain(bits, at, reading, ONE, ZERO)
            width += 1
        if one == 0:
            return np.int64(0), at
    else:
        _, at = _plain(bits, at + width - 1, reading, ONE, ONE)
    rest, at = _plain(bits, at, reading, width - 1, value & ((np.int64(1) << (width - 1)) - 1))
    return (np.int64(1) << (width - 1)) | rest, at


@njit_inline
def _near(bits: NumPy, at: Int, reading: Int, known: Int, value: Int) -> Any:
    """Write or read a number near a known one; far below zero if the bits are invalid."""
    difference = value - known
    zigzag, at = _gamma(bits, at, reading, 2 * abs(difference) + np.int64(difference >= 0))
    # 1, 2, 3, 4, ... stand for 0, -1, 1, -2, ...
    size = zigzag >> 1
    if zigzag == 0:
        return np.int64(-(1 << 20)), at
    return known + (size if zigzag & 1 else -size), at


@njit_in_place
def _lengths(bits: NumPy, reading: Int, lengths: NumPy, highest: Int) -> Int:
    """Write or read the lengths of a complete code; return the number of bits, or -1."""
    symbols = np.int64(0)
    for s in range(lengths.size):
        symbols += np.int64(lengths[s] > 0)
    at, space = np.int64(0), np.int64(1) << highest
    last, length = np.int64(-1), np.int64(0)
    while space > 0:
        following = last + 1
        while not reading and following < lengths.size - 1 and lengths[following] == 0:
            following += 1
        value = np.int64(0)
        if not reading:
            value = np.int64(lengths[following])
        gap, at = _gamma(bits, at, reading, following - last)
        if gap == 0 or last + gap >= lengths.size:
            return np.int64(-1)
        if last < 0:
            length, at = _gamma(bits, at, reading, value + np.int64(symbols != 1))
            length -= 1
            if length == 0:  # the only symbol
                lengths[gap - 1] = 1
                return at
        else:
            length, at = _near(bits, at, reading, length, value)
        if length < 1 or length > highest:
            return np.int64(-1)
        last += gap
        space -= np.int64(1) << (highest - length)
        lengths[last] = length
    return at if space == 0 else np.int64(-1)


@njit_inline
def _peak(row: NumPy) -> Int:
    """Return the lowest of the symbols with the greatest frequency."""
    best = np.int64(0)
    for s in range(row.size):
        if row[s] > row[best]:
            best = np.int64(s)
    return best


@njit_inline
def _digits(table: NumPy) -> Int:
    """Return the most digits of a frequency that is not the greatest of its row."""
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
def _beside(row: NumPy, peak: Int, step: Int) -> Int:
    """Return how many symbols have a frequency on one side of the peak."""
    count = np.int64(0)
    s = peak + step
    while 0 <= s < row.size:
        count += np.int64(row[s] > 0)
        s += step
    return count


@njit_in_place
def _frequencies(bits: NumPy, reading: Int, table: NumPy, precision: Int) -> Int:
    """Write or read frequencies; return the number of bits, -1 if the bits are of no table."""
    rows, columns = table.shape
    digits = np.int64(0)
    if not reading:
        digits = _digits(table)
    digits, at = _plain(bits, np.int64(0), reading, FOUR, digits)
    c, last, last_peak = np.int64(-1), np.int64(-1), np.int64(-1)
    below, above, width = np.int64(0), np.int64(0), precision
    while c < rows - 1:
        following = c + 1
        while not reading and following < rows and table[following, _peak(table[following])] == 0:
            following += 1
        gap, at = _gamma(bits, at, reading, following - c)
        c += gap
        if gap == 0 or c > rows:
            return np.int64(-1)
        if c == rows:
            break
        row = table[c]
        peak = np.int64(0)
        if not reading:
            peak = _peak(row)
        peak, at = _near(bits, at, reading, last_peak + c - last, peak)
        if peak < 0 or peak >= columns:
            return np.int64(-1)
        rest, greatest = np.int64(1) << precision, np.int64(1)
        for upwards in range(2 if digits > 0 else 0):
            step = np.int64(2 * upwards - 1)
            count = np.int64(0)
            if not reading:
                count = _beside(row, peak, step)
            if upwards:
                count, at = _near(bits, at, reading, above, count)
                above = count
            else:
                count, at = _near(bits, at, reading, below, count)
                below = count
            if count < 0 or count > columns:
                return np.int64(-1)
            s = peak
            for _ in range(count):
                distance = np.int64(1)
                while not reading and row[s + step * distance] == 0:
                    distance += 1
                distance, at = _gamma(bits, at, reading, distance)
                s += step * distance
                if distance == 0 or s < 0 or s >= columns:
                    return np.int64(-1)
                known, moved = np.int64(0), s - peak + last_peak
                if last >= 0 and 0 <= moved < columns:
                    known = _width(np.int64(table[last, moved]))
                if known == 0:
                    known = width
                value = np.int64(row[s])
                width, at = _near(bits, at, reading, known, _width(value))
                if width < 1 or width > precision:
                    return np.int64(-1)
                own = min(width, digits) - 1
                value, at = _plain(bits, at, reading, own, (value >> (width - 1 - own)) & ((np.int64(1) << own) - 1))
                value = ((np.int64(1) << own) | value) << (width - 1 - own)
                row[s] = value
                rest -= value
                # The peak is the lowest of equal symbols, so an earlier frequency must be smaller.
                greatest = max(greatest, value + np.int64(not upwards))
        if rest < greatest:
            return np.int64(-1)
        row[peak] = rest
        last, last_peak = c, peak
    return at if not reading or digits == _digits(table) else np.int64(-1)


def pack(table: NumPy, parameter: int, is_lengths: bool) -> bytes:
    """Return the bytes of a table.

    Args:
        table: uint32 [rows, columns]: code lengths (one row), or frequencies.
        parameter: the greatest length, or the precision of the frequencies.
        is_lengths: whether it holds code lengths.

    Raises:
        BadArgumentError: the table is not valid.
    """
    found = np.count_nonzero(table)
    if not found and is_lengths:
        return b""
    bits = np.zeros(_CELL * found + _ROW * table.shape[0] + _ROW, np.uint8)
    if is_lengths:
        size = _lengths(bits, False, table[0], np.int64(parameter))
    else:
        size = _frequencies(bits, False, table, np.int64(parameter))
    if size < 0:
        raise BadArgumentError("the table holds neither the lengths of a complete code nor valid frequencies")
    return bits[: -(-size // 8)].tobytes()


def unpack(data: NumPy, rows: int, columns: int, parameter: int, is_lengths: bool) -> NumPy:
    """Return the table that `pack` wrote.

    Raises:
        CorruptDataError: the bytes are not such a table.
    """
    table = np.zeros((rows, columns), np.uint32)
    if is_lengths:
        size = _lengths(data, True, table[0], np.int64(parameter)) if data.size else 0
    else:
        size = _frequencies(data, True, table, np.int64(parameter))
    if size < 0 or -(-size // 8) != data.size or (size % 8 and data[-1] >> (size % 8)):
        raise CorruptDataError("a table is not written as it has to be")
    return table
