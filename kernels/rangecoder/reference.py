"""Oracle of small tables and sparse changes: a range coder on one long integer."""

from __future__ import annotations

from typing import Protocol

from ..errors import CorruptDataError

WHOLE = 2**32


class _Models:
    """Adaptive probabilities of a zero, in 65536ths, with a falling learning rate."""

    def __init__(self) -> None:
        self.zero: dict[object, int] = {}
        self.seen: dict[object, int] = {}

    def probability(self, model: object) -> int:
        return self.zero.get(model, 32768)

    def learn(self, model: object, bit: int) -> None:
        p, seen = self.probability(model), self.seen.get(model, 0)
        p += -(2 * p // (2 * seen + 3)) if bit else 2 * (65536 - p) // (2 * seen + 3)
        self.zero[model] = p
        self.seen[model] = min(seen + 1, 62)


class _Coder(Protocol):
    """Interface of encoder and decoder: `split` codes one bit with a probability of zero.

    One walk over the data serves both directions.
    """

    def split(self, probability: int, bit: int) -> int: ...


class _Encoder:
    def __init__(self) -> None:
        self.low, self.range, self.bytes = 0, WHOLE - 1, 0

    def split(self, probability: int, bit: int) -> int:
        bound = (self.range >> 16) * probability
        self.low += bound if bit else 0
        self.range = self.range - bound if bit else bound
        while self.range < 2**24:
            self.low <<= 8
            self.range <<= 8
            self.bytes += 1
        return bit

    def done(self) -> bytes:
        """Shortest number in the range, without trailing zeros."""
        for drop in (32, 24, 16, 8, 0):
            value = -(-self.low >> drop) << drop
            if value < self.low + self.range:
                break
        return value.to_bytes(self.bytes + 4, "big").rstrip(b"\0")


class _Decoder:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data + bytes(4), 4
        self.code, self.range = int.from_bytes(self.data[:4], "big"), WHOLE - 1

    def split(self, probability: int, bit: int) -> int:
        bound = (self.range >> 16) * probability
        bit = int(self.code >= bound)
        self.code -= bound if bit else 0
        self.range = self.range - bound if bit else bound
        while self.range < 2**24:
            following = self.data[self.at] if self.at < len(self.data) else 0
            # No encoder writes a code beyond the range; the code is limited so that it cannot grow.
            self.code, self.range, self.at = (self.code << 8 | following) % WHOLE, self.range << 8, self.at + 1
        return bit


class _Walk:
    """Coder of plain bits, small counts, and numbers near a known number."""

    def __init__(self, coder: _Coder) -> None:
        self.coder, self.models = coder, _Models()

    def bit(self, model: object, bit: bool) -> int:
        found = self.coder.split(self.models.probability(model), int(bit))
        self.models.learn(model, found)
        return found

    def plain(self, bits: int, value: int) -> int:
        out = 0
        for k in reversed(range(bits)):
            out = 2 * out + self.coder.split(32768, value >> k & 1)
        return out

    def count(self, model: str, most: int, limit: int, value: int) -> int:
        out = 0
        while out < limit and self.bit((model, min(out, most)), value > out):
            out += 1
        return out

    def near(self, near: int, highest: int, value: int) -> int:
        if not self.bit("differs", value != near):
            return near
        if self.bit("greater", value > near):
            if near == highest:
                raise CorruptDataError("a number of a table is out of range")
            return near + 1 + self.count("up", 3, highest - near - 1, value - near - 1)
        if near == 1:
            raise CorruptDataError("a number of a table is out of range")
        return near - 1 - self.count("down", 3, near - 2, near - value - 1)

    def gap(self, left: int, changes: int, gap: int) -> int:
        """Number of elements before the next change, digit by digit from the lowest."""
        most = left - changes
        out, q = 0, most * WHOLE // left
        for j in range(most.bit_length()):
            zero = 2**48 // (WHOLE + q)
            if zero >= 65535:
                if self.coder.split(65535, int(gap >> j > 0)):
                    out |= self.plain(most.bit_length() - j, gap >> j) << j
                break
            out |= self.coder.split(zero, gap >> j & 1) << j
            q = q * q // WHOLE
        if out > most:
            raise CorruptDataError("a change is beyond the last element")
        return out

    def changed(self, usual: int, symbol: int) -> int:
        """The new symbol of an element: a neighbour of the usual symbol, or any, by eight digits."""
        if not self.bit(("far", usual // 8), abs(symbol - usual) != 1):
            if usual in (0, 255):
                return 1 if usual == 0 else 254
            return usual + (1 if self.bit(("up", usual // 8), symbol > usual) else -1)
        out, path = 0, ""
        for k in reversed(range(8)):
            digit = self.bit(("digit", path), symbol >> k & 1 > 0)
            out, path = 2 * out + digit, f"{path}{digit}"
        if abs(out - usual) <= 1:
            raise CorruptDataError("a change to the same symbol, or a neighbour coded as a distant symbol")
        return out


def _walk_lengths(walk: _Walk, lengths: list[int], highest: int) -> list[int]:
    lone = sum(length > 0 for length in lengths) == 1
    out = [0] * len(lengths)
    space = 2**highest
    near: int | None = None
    one, two = 0, 0  # whether the last symbol is there, and the one before it
    for s, length in enumerate(lengths):
        one, two = walk.bit(("there", one, two), length > 0), one
        if not one:
            continue
        if near is None:
            near = walk.count("first", highest, highest, 0 if lone else length)
        else:
            near = walk.near(near, highest, length)
        out[s] = max(near, 1)
        space -= 2 ** (highest - near)
        if space <= 0:
            break
    if space not in (0, 2**highest):
        raise CorruptDataError("the lengths of a table belong to no complete code")
    return out


def _walk_frequencies(walk: _Walk, table: list[list[int]], precision: int) -> list[list[int]]:
    total, columns = 2**precision, len(table[0])
    peaks = [row.index(max(row)) for row in table]
    others = [f for row, peak in zip(table, peaks, strict=True) for s, f in enumerate(row) if s != peak and f]
    digits = walk.plain(4, max(((f // (f & -f)).bit_length() for f in others), default=0))
    out: list[list[int]] = []
    empty, kind = 0, 0
    last, last_peak = -1, -1
    for c, (row, peak) in enumerate(zip(table, peaks, strict=True)):
        new = [0] * columns
        out.append(new)
        empty = walk.bit(("empty", empty), not any(row))
        if empty:
            continue
        diagonal = last_peak + c - last
        if not walk.bit(("diagonal", kind), peak != diagonal):
            peak, kind = diagonal, 0
        elif not walk.bit(("same", kind), peak != last_peak):
            peak, kind = last_peak, 1
        else:
            peak, kind = walk.plain((columns - 1).bit_length(), peak), 2
        if not 0 <= peak < columns:
            raise CorruptDataError("a peak of a table is out of range")
        alone = digits == 0 or walk.bit("alone", row[peak] == total)
        for s in range(columns):
            if s == peak or alone:
                continue
            moved = s - peak + last_peak
            above = out[last][moved].bit_length() if last >= 0 and 0 <= moved < columns else 0
            left = new[s - 1].bit_length() if s > 0 and s - 1 != peak else 0
            model = ("there", above > 0, left > 0 or s - 1 == peak, min(abs(s - peak), 3))
            if not walk.bit(model, row[s] > 0):
                continue
            if above or left:
                bits = walk.near(above or left, precision, row[s].bit_length())
            else:
                bits = 1 + walk.count("first", 12, precision - 1, row[s].bit_length() - 1)
            f = 1
            for k in range(1, bits):
                digit = row[s] >> (bits - 1 - k) & 1 if bits == row[s].bit_length() else 0
                f = 2 * f + (walk.bit(("digit", k), digit > 0) if k < digits else 0)
            new[s] = f
        new[peak] = total - sum(new)
        if new[peak] < max(1, max(new)):
            raise CorruptDataError("the frequencies of a row exceed their sum")
        last, last_peak = c, peak
    return out


def pack_lengths(lengths: list[int], highest: int) -> bytes:
    """Encode lengths of a complete code, each at most `highest`, as bytes."""
    coder = _Encoder()
    _walk_lengths(_Walk(coder), lengths, highest)
    return coder.done()


def unpack_lengths(data: bytes, size: int, highest: int) -> list[int]:
    """Decode code lengths: the inverse of `pack_lengths`."""
    out = _walk_lengths(_Walk(_Decoder(data)), [0] * size, highest)
    if pack_lengths(out, highest) != data:
        raise CorruptDataError("a table is not written as it has to be")
    return out


def pack_frequencies(table: list[list[int]], precision: int) -> bytes:
    """Encode rows of frequencies that sum to 0 or 2**precision, as bytes."""
    coder = _Encoder()
    _walk_frequencies(_Walk(coder), table, precision)
    return coder.done()


def unpack_frequencies(data: bytes, rows: int, columns: int, precision: int) -> list[list[int]]:
    """Decode frequencies: the inverse of `pack_frequencies`."""
    out = _walk_frequencies(_Walk(_Decoder(data)), [[0] * columns for _ in range(rows)], precision)
    if pack_frequencies(out, precision) != data:
        raise CorruptDataError("a table is not written as it has to be")
    return out


def _walk_changes(walk: _Walk, symbols: list[int], usual: list[int]) -> list[int]:
    places = [i for i, (s, u) in enumerate(zip(symbols, usual, strict=True)) if s != u]
    width = walk.plain(6, len(places).bit_length())
    if not 1 <= width <= 32:
        raise CorruptDataError(f"a number of changes of {width} bits")
    count = 2 ** (width - 1) + walk.plain(width - 1, len(places) - 2 ** (width - 1))
    if count > len(usual):
        raise CorruptDataError(f"{count} changes among {len(usual)} elements")
    out, at = list(usual), 0
    for i in range(count):
        gap = walk.gap(len(usual) - at, count - i, places[i] - at if places else 0)
        at += gap
        out[at] = walk.changed(usual[at], symbols[at])
        at += 1
    return out


def pack_changes(symbols: list[int], usual: list[int]) -> bytes:
    """Encode the symbols that differ from the usual ones; no changes give no bytes."""
    if symbols == usual:
        return b""
    coder = _Encoder()
    _walk_changes(_Walk(coder), symbols, usual)
    return coder.done()


def unpack_changes(data: bytes, usual: list[int]) -> list[int]:
    """Decode changes: the inverse of `pack_changes`."""
    if not data:
        return list(usual)
    out = _walk_changes(_Walk(_Decoder(data)), list(usual), usual)
    if pack_changes(out, usual) != data:
        raise CorruptDataError("changes are not written as they have to be")
    return out
