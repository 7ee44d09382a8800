"""Oracle of small tables: code lengths and frequencies as text of zeros and ones."""

from __future__ import annotations

from ..errors import CorruptDataError

WIDEST = 20
"""Most binary digits of a number."""


class _Bits:
    """Bits that are written in order, or read if text is given."""

    def __init__(self, text: str | None = None) -> None:
        self.reading, self.text, self.at = text is not None, text or "", 0

    def plain(self, width: int, value: int) -> int:
        """Return a number of `width` digits, the lowest first; zeros follow the end."""
        if not self.reading:
            self.text += "".join(str(value >> k & 1) for k in range(width))
        digits = self.text[self.at : self.at + width]
        self.at += width
        return sum(1 << k for k, digit in enumerate(digits) if digit == "1")

    def gamma(self, value: int) -> int:
        """Return a number from 1 on: a zero for each digit but one, a one, the lower digits."""
        zeros = value.bit_length() - 1
        if self.reading:
            zeros = next((k for k in range(WIDEST) if self.text[self.at + k : self.at + k + 1] == "1"), -1)
        if zeros < 0:
            raise CorruptDataError("a number of a table has too many digits")
        self.plain(zeros + 1, 1 << zeros)
        return 1 << zeros | self.plain(zeros, value & (1 << zeros) - 1)

    def near(self, known: int, value: int) -> int:
        """Return a number that is likely near a known one."""
        difference = value - known
        size, above = divmod(self.gamma(2 * difference + 1 if difference >= 0 else -2 * difference), 2)
        return known + (size if above else -size)

    def to_bytes(self) -> bytes:
        return int(self.text[::-1] or "0", 2).to_bytes(-(-len(self.text) // 8), "little")


def _bits(data: bytes) -> _Bits:
    return _Bits(f"{int.from_bytes(data, 'little'):0{8 * len(data)}b}"[::-1] if data else "")


def _end(bits: _Bits) -> None:
    if -(-bits.at // 8) != -(-len(bits.text) // 8) or "1" in bits.text[bits.at :]:
        raise CorruptDataError("a table does not end with its last byte")


def _walk_lengths(bits: _Bits, lengths: list[int], highest: int) -> list[int]:
    """Write or read the lengths of a complete code, and return them."""
    out, space = [0] * len(lengths), 2**highest
    there = [s for s, length in enumerate(lengths) if length]
    last, near = -1, None
    while space > 0:
        following = there.pop(0) if there else last + 1
        last += bits.gamma(following - last)
        if last >= len(lengths):
            raise CorruptDataError("a code length is beyond the last symbol")
        if near is None:
            near = bits.gamma(lengths[last] + bool(there)) - 1
            if near == 0:  # the only symbol
                out[last] = 1
                return out
        else:
            near = bits.near(near, lengths[last])
        if not 1 <= near <= highest:
            raise CorruptDataError(f"a code length of {near} is out of range")
        out[last] = near
        space -= 2 ** (highest - near)
    if space < 0:
        raise CorruptDataError("the lengths of a table belong to no complete code")
    return out


def _digits(table: list[list[int]]) -> int:
    """Return the most significant bits of a frequency that is not the peak of its row."""
    others = [f for row in table for s, f in enumerate(row) if f and s != row.index(max(row))]
    return max(((f // (f & -f)).bit_length() for f in others), default=0)


def _walk_frequencies(bits: _Bits, table: list[list[int]], precision: int) -> list[list[int]]:
    """Write or read rows of frequencies, and return them."""
    rows, columns = len(table), len(table[0])
    filled = [c for c, row in enumerate(table) if any(row)]
    out = [[0] * columns for _ in table]
    digits = bits.plain(4, _digits(table))
    c, last, last_peak, width = -1, -1, -1, precision
    beside = {-1: 0, 1: 0}
    while c < rows - 1:
        c += bits.gamma((filled.pop(0) if filled else rows) - c)
        if c > rows:
            raise CorruptDataError("a row is beyond the last of the table")
        if c == rows:
            break
        row, new = table[c], out[c]
        peak = bits.near(last_peak + c - last, row.index(max(row)))
        if not 0 <= peak < columns:
            raise CorruptDataError("a peak of a table is out of range")
        for step in (-1, 1) if digits else ():
            side = [s for s in range(peak + step, columns if step > 0 else -1, step) if row[s]]
            beside[step] = bits.near(beside[step], len(side))
            if beside[step] < 0:
                raise CorruptDataError("a number of frequencies is negative")
            s = peak
            for k in range(beside[step]):
                s += step * bits.gamma(abs(side[k] - s) if k < len(side) else 1)
                if not 0 <= s < columns:
                    raise CorruptDataError("a frequency is beyond the table")
                moved = s - peak + last_peak
                above = out[last][moved] if last >= 0 and 0 <= moved < columns else 0
                width = bits.near(above.bit_length() or width, row[s].bit_length())
                if not 1 <= width <= precision:
                    raise CorruptDataError(f"a frequency of {width} bits is out of range")
                own = min(width, digits) - 1
                rest = bits.plain(own, row[s] >> (width - 1 - own) & (1 << own) - 1 if row[s] else 0)
                new[s] = (1 << own | rest) << (width - 1 - own)
        new[peak] = 2**precision - sum(new)
        if new[peak] < 1 or new.index(max(new)) != peak:
            raise CorruptDataError("the frequencies of a row exceed their sum")
        last, last_peak = c, peak
    if _digits(out) != digits:
        raise CorruptDataError("the frequencies have fewer digits than stated")
    return out


def pack_lengths(lengths: list[int], highest: int) -> bytes:
    """Encode lengths of a complete code, each at most `highest`, as bytes."""
    bits = _Bits()
    if any(lengths):
        _walk_lengths(bits, lengths, highest)
    return bits.to_bytes()


def unpack_lengths(data: bytes, size: int, highest: int) -> list[int]:
    """Decode code lengths: the inverse of `pack_lengths`."""
    bits = _bits(data)
    out = _walk_lengths(bits, [0] * size, highest) if data else [0] * size
    _end(bits)
    return out


def pack_frequencies(table: list[list[int]], precision: int) -> bytes:
    """Encode rows of frequencies that sum to 0 or 2**precision, as bytes."""
    bits = _Bits()
    _walk_frequencies(bits, table, precision)
    return bits.to_bytes()


def unpack_frequencies(data: bytes, rows: int, columns: int, precision: int) -> list[list[int]]:
    """Decode frequencies: the inverse of `pack_frequencies`."""
    bits = _bits(data)
    out = _walk_frequencies(bits, [[0] * columns for _ in range(rows)], precision)
    _end(bits)
    return out
