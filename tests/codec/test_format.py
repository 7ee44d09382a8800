"""A second reader, written from docs/format.md, docs/entropy.md and docs/kernels.md alone: it finds what we find."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from collections import Counter, OrderedDict
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from blake3 import blake3

import shrinkpoint as sp
from shrinkpoint.codec.rebase import rebase as restate

from ..golden.make import KINDS, cases
from ..golden.subclass import Coded
from .common import difference

FORMATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}


class Bytes:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        assert 0 <= n <= len(self.data) - self.at
        self.at += n
        return self.data[self.at - n : self.at]

    def varint(self) -> int:
        value = 0
        for shift in itertools.count(0, 7):
            (b,) = self.take(1)
            value |= (b & 127) << shift
            if b < 128:
                return value
        raise AssertionError

    def block(self) -> bytes:
        return self.take(self.varint())

    def rest(self) -> bytes:
        return self.take(len(self.data) - self.at)


# ---------------------------------------------------------------------------------------------- docs/entropy.md


class RangeCoder:
    def __init__(self, data: bytes) -> None:
        self.source = itertools.chain(data, itertools.repeat(0))
        self.code = int.from_bytes(bytes(next(self.source) for _ in range(4)), "big")
        self.range = 2**32 - 1

    def split(self, p: int) -> int:
        bound = (self.range // 65536) * p
        if self.code < bound:
            bit, self.range = 0, bound
        else:
            bit, self.code, self.range = 1, self.code - bound, self.range - bound
        while self.range < 2**24:
            self.code, self.range = (self.code * 256 + next(self.source)) % 2**32, self.range * 256
        return bit

    def bit(self, model: list[int]) -> int:
        z, t = model
        bit = self.split(z)
        z = z - (2 * z) // (2 * t + 3) if bit else z + (2 * (65536 - z)) // (2 * t + 3)
        model[:] = [min(max(z, 32), 65504), min(t + 1, 62)]
        return bit

    def plain(self, k: int) -> int:
        value = 0
        for _ in range(k):
            value = 2 * value + self.split(32768)
        return value

    def count(self, models: list[list[int]], k: int, limit: int) -> int:
        n = 0
        while n < limit and self.bit(models[min(n, k)]):
            n += 1
        return n


def models(n: int) -> list[list[int]]:
    return [[32768, 0] for _ in range(n)]


class Near:
    def __init__(self) -> None:
        self.equal, self.up, self.down, self.rise = models(1)[0], models(1)[0], models(4), models(4)

    def __call__(self, coder: RangeCoder, v: int, top: int) -> int:
        if not coder.bit(self.equal):
            return v
        if coder.bit(self.up):
            return v + 1 + coder.count(self.rise, 3, top - v - 1)
        return v - 1 - coder.count(self.down, 3, v - 2)


def code_lengths(data: bytes, size: int) -> list[int]:
    coder, there, first, near = RangeCoder(data), models(4), models(25), Near()
    space, a, b, v = 2**24, 0, 0, None
    out = [0] * size
    for s in range(size):
        t = coder.bit(there[2 * a + b])
        b, a = a, t
        if not t:
            continue
        v = coder.count(first, 24, 24) if v is None else near(coder, v, 24)
        out[s] = v or 1
        space -= 2 ** (24 - v)
        if not space:
            break
    return out


def frequencies(data: bytes, rows: int, size: int, precision: int) -> list[list[int]]:
    coder, near = RangeCoder(data), Near()
    empties, diagonal, same, alone_ = models(2), models(3), models(3), models(1)[0]
    there, first, digit = models(12), models(13), models(16)
    digits = coder.plain(4)
    empty = kind = 0
    last, peak0 = -1, -1
    out = [[0] * size for _ in range(rows)]
    for c in range(rows):
        empty = coder.bit(empties[empty])
        if empty:
            continue
        d = peak0 + c - last
        if not coder.bit(diagonal[kind]):
            peak, new = d, 0
        elif not coder.bit(same[kind]):
            peak, new = peak0, 1
        else:
            peak, new = coder.plain((size - 1).bit_length()), 2
        kind = new
        row = out[c]
        if digits and not coder.bit(alone_):
            for s in range(size):
                if s == peak:
                    continue
                at = s - peak + peak0
                above = out[last][at].bit_length() if last >= 0 and 0 <= at < size else 0
                left = row[s - 1].bit_length() if s > 0 and s - 1 != peak else 0
                index = 6 * (above > 0) + 3 * (left > 0 or s - 1 == peak) + min(abs(s - peak), 3) - 1
                if not coder.bit(there[index]):
                    continue
                if above or left:
                    w = near(coder, above or left, precision)
                else:
                    w = 1 + coder.count(first, 12, precision - 1)
                value = 1
                for k in range(1, w):
                    value = 2 * value + (coder.bit(digit[k]) if k < digits else 0)
                row[s] = value
        row[peak] = 2**precision - sum(row)
        last, peak0 = c, peak
    return out


def huffman(data: bytes, lengths: list[int], n: int) -> list[int]:
    if n == 0:
        return []
    codes, code, before = {}, -1, 0
    for length, s in sorted((x, s) for s, x in enumerate(lengths) if x):
        code = (code + 1) << (length - before)
        before = length
        codes[length, code] = s
    source = Bytes(data)
    sizes = [source.varint() for _ in range(3)]
    q = -(-n // 4)
    out: list[int] = []
    for k in range(4):
        stream = source.take(sizes[k]) if k < 3 else source.rest()
        text = "".join(f"{b:08b}" for b in stream)
        at = 0
        for _ in range(min(k * q, n), min((k + 1) * q, n)):
            width = 1
            while (width, int(text[at : at + width], 2)) not in codes:
                width += 1
            out.append(codes[width, int(text[at : at + width], 2)])
            at += width
        assert len(text) - at < 8
        assert "1" not in text[at:]
    return out


def rans(source: Bytes, rows: int, contexts: list[int] | None, n: int) -> list[int]:
    precision, columns = source.take(1)[0], source.varint()
    wide = precision == 64
    precision = 12 if wide else precision
    table, data = frequencies(source.block(), rows, columns, precision), source.rest()
    size = 2**precision
    slots: list[list[tuple[int, int, int]]] = []
    for row in table:
        line: list[tuple[int, int, int]] = []
        peak = max(range(len(row)), key=lambda s: (row[s], -s))
        for s in [peak, *(i for i in range(len(row)) if i != peak)]:
            start = len(line)
            line += [(s, start, row[s])] * row[s]
        slots.append(line)
    if wide:
        return rans_of_64(data, contexts, slots, n)
    x = list(struct.unpack("<4I", data[:16])) if data else [1 << 16] * 4
    words = iter(struct.unpack(f"<{len(data[16:]) // 2}H", data[16:]))
    out = []
    for i in range(n):
        s, start, f = slots[contexts[i] if contexts is not None else 0][x[i % 4] % size]
        value = f * (x[i % 4] // size) + x[i % 4] % size - start
        x[i % 4] = value if value >= 1 << 16 else value * 65536 + next(words)
        out.append(s)
    assert x == [1 << 16] * 4
    assert next(words, None) is None
    return out


def rans_of_64(data: bytes, contexts: list[int] | None, slots: list[list[tuple[int, int, int]]], n: int) -> list[int]:
    x = list(struct.unpack("<64I", data[:256]))
    words = list(struct.unpack(f"<{len(data[256:]) // 2}H", data[256:]))
    out = []
    for first in range(0, n, 16):
        low = []
        for i in range(first, min(first + 16, n)):
            s, start, f = slots[contexts[i] if contexts is not None else 0][x[i % 64] % 4096]
            x[i % 64] = f * (x[i % 64] // 4096) + x[i % 64] % 4096 - start
            out.append(s)
            if x[i % 64] < 1 << 15:
                low.append(i % 64)
        for j in reversed(low):
            x[j] = x[j] * 65536 + words.pop()
    assert x == [1 << 15] * 64
    assert not words
    return out


def rare(data: bytes, expected: list[int]) -> list[int]:
    out = list(expected)
    if not data:
        return out
    coder, far, up, tree = RangeCoder(data), models(32), models(32), models(256)
    width = coder.plain(6)
    count = 2 ** (width - 1) + coder.plain(width - 1)
    at, left = 0, len(out)
    for changes in range(count, 0, -1):
        most = left - changes
        q, gap = most * 2**32 // left, 0
        for j in range(most.bit_length()):
            z = 2**48 // (2**32 + q)
            if z >= 65535:
                gap += coder.plain(most.bit_length() - j) << j if coder.split(65535) else 0
                break
            gap += coder.split(z) << j
            q = q * q // 2**32
        assert gap <= most
        at, left = at + gap, left - gap - 1
        e = out[at]
        if not coder.bit(far[e // 8]):
            out[at] = {0: 1, 255: 254}[e] if e in (0, 255) else e + 1 if coder.bit(up[e // 8]) else e - 1
        else:
            t = 1
            for _ in range(8):
                t = 2 * t + coder.bit(tree[t])
            assert abs(t - 256 - e) > 1
            out[at] = t - 256
        at += 1
    return out


# ---------------------------------------------------------------------------------------------- docs/format.md


def symbols(data: bytes, n: int, context: Any = None, contexts: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    source = Bytes(data)
    method = source.take(1)[0]
    out: Any
    if method == 0:
        out = [source.take(1)[0]] * n
    elif method == 1:
        width = source.take(1)[0]
        value = int.from_bytes(source.rest(), "little")
        out = [value >> (i * width) & ((1 << width) - 1) for i in range(n)]
    elif method == 2:
        lengths = code_lengths(source.block(), 256)
        out = huffman(source.rest(), lengths, n)
    elif method == 3:
        tokens, size = source.varint(), source.varint()
        alphabet = [-source.varint()]
        for _ in range(size - 1):
            alphabet.append(alphabet[-1] + source.varint())
        lengths = code_lengths(source.block(), size)
        out = []
        for token in (alphabet[r] for r in huffman(source.rest(), lengths, tokens)):
            out += [-token] if token <= 0 else [out[-1]] * (token - 1)
    elif method in (4, 5):
        out = rans(source, contexts if method == 5 else 1, context.tolist() if method == 5 else None, n)
    elif method == 6:
        modulus = source.varint()
        out = np.zeros(n, np.uint8)
        for value in range(contexts):
            where = np.flatnonzero(context == value)
            if where.size:
                part = symbols(source.block(), where.size).astype(int)
                out[where] = (value - part) % modulus
    elif method == 7:
        out = context
    elif method == 8:
        out = list(zstandard.decompress(source.rest()))
    elif method == 9:
        out = list(source.rest())
    elif method == 10:
        out = rare(source.rest(), context.tolist())
    elif method == 11:
        usual = [source.take(1)[0]] * n
        out = rare(source.rest(), usual)
    elif method == 13:
        columns, phase, matrices = (source.varint() for _ in range(3))
        assert 1 <= columns <= n
        assert phase < columns
        lines = -(-(phase + n) // columns), columns
        heights = [lines[0]] if matrices == 1 else [source.varint() for _ in range(matrices)]
        assert sum(heights) == lines[0]
        assert matrices == 1 or (phase == 0 and lines[0] * columns == n and min(heights) > 0)
        counts = [n] if matrices == 1 else [h * columns for h in heights]
        ranks, shifts = [], []
        for count in counts:
            ranks.append(source.varint())
            assert ranks[-1] <= min(16, columns // 4, count // columns // 4)
            shifts.append(source.varint() if ranks[-1] else 1)
            assert 1 <= shifts[-1] <= 20
        parts = [source.block(), source.block()]
        left = symbols(parts[0], sum(k * h for k, h in zip(ranks, heights, strict=True))).astype(int) - 128
        right = symbols(parts[1], sum(k * columns for k in ranks)).astype(int) - 128
        row, column = np.divmod(phase + np.arange(n), columns)
        place = np.full(n, 6)
        i = j = first = top = 0
        for rank, height, shift, count in zip(ranks, heights, shifts, counts, strict=True):
            a = left[i : i + rank * height].reshape(rank, height)
            b = right[j : j + rank * columns].reshape(rank, columns)
            part = slice(first, first + count)
            sums = (a[:, row[part] - top] * b[:, column[part]]).sum(axis=0)
            place[part] = np.clip((sums + (1 << (shift - 1))) >> shift, -6, 6) + 6
            i, j, first, top = i + rank * height, j + rank * columns, first + count, top + height
        classes = source.varint()
        assert 1 <= classes <= 19
        if classes > 1:
            base = source.varint()
            assert base <= 255
            parts += [source.block(), source.block()]
            down, across = (symbols(p, k).astype(int) for p, k in zip(parts[2:], lines, strict=True))
            place = place * classes + np.clip(down[row] + across[column] - base, 0, classes - 1)
        assert all(part[0] not in (12, 13) for part in parts)
        out = rans(source, 13 * classes, place.tolist(), n)
    elif method == 12:
        columns, phase, others, classes, base = (source.varint() for _ in range(5))
        assert 1 <= columns <= n
        assert phase < columns
        assert 1 <= others <= 256
        assert 2 <= classes <= 256 // others
        assert base <= 255
        parts = source.block(), source.block()
        assert all(part[0] not in (12, 13) for part in parts)
        at = phase + np.arange(n)
        row, column = symbols(parts[0], -(-(phase + n) // columns)), symbols(parts[1], columns)
        place = np.clip(row.astype(int)[at // columns] + column[at % columns] - base, 0, classes - 1)
        if others > 1:
            assert context.max() < others
            place = place + classes * context.astype(int)
        out = rans(source, others * classes, place.tolist(), n)
    else:
        raise AssertionError(method)
    assert source.at == len(data)
    assert len(out) == n
    return np.asarray(out, np.uint8)


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def text_of(data: bytes, record: dict[str, Any]) -> Any:
    """A scalar of text, with what NUL it has at its end."""
    dtype = numpy_dtype(record["d"])
    if dtype.kind == "S":
        return np.bytes_(bytes(data))
    return np.str_(bytes(data).decode("utf-32-be" if record["d"][0] == ">" else "utf-32-le", "surrogatepass"))


def item_size(name: str) -> int:
    return numpy_dtype(name).itemsize


def key(u: np.ndarray[Any, Any], is_float: bool) -> Any:
    """Patterns to ordered integers modulo 2**width, its own inverse."""
    width = 8 * u.dtype.itemsize
    top = np.asarray(1 << (width - 1), u.dtype)
    return np.where((u & top != 0) & is_float, u ^ (top - np.asarray(1, u.dtype)), u)


def undo(z: np.ndarray[Any, Any], before: np.ndarray[Any, Any], is_float: bool) -> np.ndarray[Any, Any]:
    """The patterns whose zig-zag difference to `before` is z."""
    one = np.asarray(1, z.dtype)
    step = (z >> one) ^ (np.zeros_like(z) - (z & one))
    with np.errstate(over="ignore"):
        return np.asarray(key(key(before, is_float) + step, is_float), z.dtype)


def planes(source: Bytes, width: int, n: int) -> np.ndarray[Any, Any]:
    out = np.zeros(n, np.uint64)
    for i in range(width):
        out |= symbols(source.block(), n).astype(np.uint64) << np.uint64(8 * i)
    return out.astype(f"u{width}")


def read_bytes(record: dict[str, Any], pieces: list[bytes], parent: Any) -> Any:
    n = int(np.prod(record["s"], dtype=object)) * item_size(record["d"])
    assert len(pieces) == -(-n // 2**24)
    out = b""
    for i, piece in enumerate(pieces):
        size = min(2**24, n - i * 2**24)
        before = None if parent is None or "data" not in parent else parent["data"][i * 2**24 :][:size]
        out += bytes_chunk(piece, record["d"], size, before)
    return {"data": out}


def bytes_chunk(piece: bytes, dtype: str, size: int, before: bytes | None) -> bytes:
    source = Bytes(piece)
    method = source.take(1)[0]
    width = item_size(dtype) // (2 if "complex" in dtype else 1)
    if method == 0:
        return symbols(source.rest(), size).tobytes()
    if method in (1, 2, 6):
        patterns = planes(source, width, size // width)
        assert source.at == len(piece)
        if method == 2:
            assert before is not None
            is_float = width > 1 and ("float" in dtype or "complex" in dtype)
            patterns = undo(patterns, np.frombuffer(before, patterns.dtype), is_float)
        if method == 6:
            assert before is not None
            patterns = patterns ^ np.frombuffer(before, patterns.dtype)
        return bytes(patterns.tobytes())
    if method == 4:
        return scaled(source, dtype, size // width)
    if method == 5:
        assert before is not None
        return sizes(source, dtype, np.frombuffer(before, f"u{width}"))
    if method == 7:
        assert before is not None
        return sparse(source, dtype, np.frombuffer(before, f"u{width}"))
    assert method == 3
    assert before is not None
    return before


def real(dtype: str) -> str:
    """The float that a complex dtype has two of."""
    return {"complex64": "float32", "complex128": "float64", "complex32": "float16"}.get(dtype, dtype)


def scaled(source: Bytes, dtype: str, n: int) -> bytes:
    exponent, mantissa = FORMATS[real(dtype)]
    width = 1 + exponent + mantissa
    columns = source.varint()
    if columns:
        phase = source.varint()
        assert phase < columns <= max(n, 64)
        at = phase + np.arange(n)
        rows = symbols(source.block(), -(-(phase + n) // columns)).astype(int)
        cols = symbols(source.block(), columns).astype(int)
        context = np.minimum(rows[at // columns] + cols[at % columns], 255)
        top = symbols(source.block(), n, context, max(2, int(context.max()) + 1))
    else:
        top = symbols(source.block(), n)
    rotated = top.astype(np.uint64) << np.uint64(width - 8)
    for k in range(width // 8 - 1):
        rotated |= symbols(source.block(), n).astype(np.uint64) << np.uint64(8 * k)
    assert source.at == len(source.data)
    back = 4 if width == 64 else 1
    numbers = [(u >> back | u << (width - back)) % 2**width for u in rotated.tolist()]
    return np.array(numbers, np.uint64).astype(f"u{width // 8}").tobytes()


def sizes(source: Bytes, dtype: str, before: np.ndarray[Any, Any]) -> bytes:
    exponent, mantissa = FORMATS[real(dtype)]
    width, n = 1 + exponent + mantissa, before.size
    kind = source.take(1)[0]
    old = before.astype(np.uint64)
    if kind == 0:
        field = (old >> np.uint64(mantissa)).astype(int) % 2**exponent
        counted = field[::16] if n > 2**14 else field
        count = np.bincount(counted, minlength=2**exponent)
        first = (np.cumsum(count) - count) // max(256, -(-counted.size // 64))
        names = sorted(set(first.tolist()))
        context, contexts = np.array([names.index(first[f]) for f in field]), max(2, len(names))
    else:
        assert kind == 1
        context, contexts = (old >> np.uint64(mantissa - 4)).astype(int) % 16, 16
    categories = symbols(source.block(), n, context, contexts).tolist()
    extra, at, numbers = int.from_bytes(source.rest(), "little"), 0, []
    b = 2 if width == 64 else 3
    for c in categories:
        assert c < (width - 1 - b << b) + (2 << b)
        k = max((c >> b) - 1, 0)
        numbers.append((c - (k << b) << k) + (extra >> at & (1 << k) - 1))
        at += k
    assert extra >> at == 0
    return undo(np.array(numbers, np.uint64).astype(before.dtype), before, True).tobytes()


def sparse(source: Bytes, dtype: str, before: np.ndarray[Any, Any]) -> bytes:
    n, width = before.size, 8 * before.itemsize
    is_float = ("float" in dtype or "complex" in dtype) and dtype != "float8_e8m0fnu"
    by_xor = {0: False, 1: True}[source.take(1)[0]]
    edges = [source.varint() for _ in range(source.varint())]
    assert len(edges) <= 7
    assert not edges or is_float
    assert edges == sorted(set(edges))
    assert all(1 <= edge < 2 ** (width - 1) for edge in edges)
    counts = [source.varint() for _ in range(len(edges) + 1)]
    shifts = list(source.take(len(edges) + 1))
    total = sum(counts)
    assert max(shifts) <= 24
    assert n <= 2**25
    assert total <= n // 4
    classes = np.repeat(np.arange(len(counts)), counts)
    changes = symbols(source.block(), total, *([classes, len(counts)] if edges else [])).astype(int).tolist()
    bits, at = int.from_bytes(source.block(), "little"), 0
    size = source.varint()
    large: list[int] = []
    where = classes[[c % 5 == 4 for c in changes]] if changes else classes
    assert size == where.size
    if size and width == 8:
        large = symbols(source.block(), size, *([where, len(counts)] if edges else [])).astype(int).tolist()
    elif size:
        categories = symbols(source.block(), size, *([where, len(counts)] if edges else [])).tolist()
        extra, used, b = int.from_bytes(source.rest(), "little"), 0, 2 if width == 64 else 3
        for c in categories:
            assert c < (width - 1 - b << b) + (2 << b)
            k = max((c >> b) - 1, 0)
            large.append((c - (k << b) << k) + (extra >> used & (1 << k) - 1))
            used += k
        assert extra >> used == 0
    assert source.at == len(source.data)
    magnitude = before & before.dtype.type(2 ** (width - 1) - 1)
    reached = sum((magnitude >= before.dtype.type(edge) for edge in edges), np.zeros(n, int))
    found, number, rest = np.zeros(n, before.dtype), 0, iter(large)
    for k, count in enumerate(counts):
        items, place = np.flatnonzero(reached == k), -1
        for change in changes[number : number + count]:
            q, d = divmod(change, 5)
            assert q < 50
            opened = max(q // 2 - 1, 0)
            e = bits >> at & (1 << opened + shifts[k]) - 1
            at += opened + shifts[k]
            place += (q - 2 * opened << opened + shifts[k]) + e + 1
            value = d + 1 if d < 4 else next(rest) + 5
            assert value < 2**width
            found[items[place]] = value
        number += count
    assert bits >> at == 0
    return (before ^ found if by_xor else undo(found, before, is_float)).tobytes()


def to_float(data: bytes, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, numpy_dtype(dtype)).astype(np.float64)


def bfloat16_or_none(data: bytes, dtype: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """bfloat16 patterns, 0 where it does not hold the value; and where that is."""
    own = numpy_dtype(dtype)
    with np.errstate(all="ignore"):
        x = np.frombuffer(data, own).astype(np.float64)
        narrow = x.astype(np.float32).astype(ml_dtypes.bfloat16)
        back = narrow.astype(np.float32).astype(own).astype(np.float64)
        held = np.isfinite(x) & np.isfinite(back) & ((back != 0) | (x == 0))
    return np.where(held, narrow.view(np.uint16), 0).astype(np.uint16), held


def unfolded(z: int) -> int:
    return z // 2 if z % 2 == 0 else -(z + 1) // 2


def read_levels(record: dict[str, Any], pieces: list[bytes], parent: Any) -> Any:
    n, width = int(np.prod(record["s"])), item_size(record["d"])
    own = numpy_dtype(record["d"])
    before = parent if parent is not None and "levels" in parent else None
    levels = np.empty(0, np.uint8)
    for i, piece in enumerate(pieces[1:]):
        size = min(2**22, n - i * 2**22)
        context = None if before is None else before["levels"][i * 2**22 :][:size]
        known = 0 if before is None else len(before["codebook"]) // width + 2
        levels = np.concatenate([levels, symbols(piece, size, context, known)])
    source = Bytes(pieces[0])
    entries = source.varint()
    mode = source.take(1)[0]
    assert mode in (0, 1, 2)
    if mode == 2:
        first = unfolded(source.varint())
        (step,) = struct.unpack("<d", source.take(8))
        with np.errstate(all="ignore"):
            codebook = np.array([k * step for k in range(first, first + entries)]).astype(own).tobytes()
    else:
        codebook = source.take(entries * width) if mode == 0 else before["codebook"]
    assert len(codebook) == entries * width
    count = source.varint()
    steps = planes(source, 2, count)
    at = np.flatnonzero(levels == 1)
    assert at.size == count
    predicted = np.zeros(n, np.uint16)
    if before is not None:
        old, _ = bfloat16_or_none(before["protected"], record["d"])
        predicted[before["levels"] == 1] = old
    patterns = undo(steps, predicted[at], True)
    with np.errstate(all="ignore"):
        protected = patterns.view(ml_dtypes.bfloat16).astype(np.float32).astype(own)
    odd = np.cumsum([source.varint() for _ in range(source.varint())], dtype=int)
    protected[odd] = np.frombuffer(source.take(odd.size * width), own)
    assert source.at == len(pieces[0])
    out = np.zeros(n, own)
    out[at] = protected
    rest = levels >= 2
    out[rest] = np.frombuffer(codebook, own)[levels[rest] - 2]
    return {"levels": levels, "codebook": codebook, "protected": protected.tobytes(), "values": out.tobytes()}


def bucket_value(j: int, b: int, dtype: str) -> float:
    """The midpoint of magnitude bucket j, or the single value it holds, or the next above (docs/kernels.md)."""
    exponent, mantissa = FORMATS[dtype]
    if j == 0:
        return 0.0
    octave, fraction = (j - 1) >> b, (j - 1) & ((1 << b) - 1)
    base = Fraction(2) ** (2 - (1 << (exponent - 1)) - mantissa + octave)
    low = base * (1 + Fraction(fraction, 1 << b))
    unit = base / (1 << min(octave, mantissa))
    if Fraction(1, 1 << b) * base <= unit:
        return float(-(-low // unit) * unit)
    return float(low + base / (2 << b))


def read_log_buckets(record: dict[str, Any], pieces: list[bytes], _parent: Any) -> Any:
    n, b = int(np.prod(record["s"])), record["m"]["b"]
    own = numpy_dtype(record["d"])
    parts = []
    for i, piece in enumerate(pieces):
        size = min(2**22, n - i * 2**22)
        source = Bytes(piece)
        low, _high, flags = source.varint(), source.varint(), source.take(1)[0]
        octave = symbols(source.block(), size).astype(int)
        present = np.flatnonzero(octave)
        negative = symbols(source.block(), present.size) if flags & 1 else np.zeros(present.size, np.uint8)
        fraction = np.zeros(present.size, int)
        for shift in range(0, b, 8):
            fraction |= symbols(source.block(), present.size).astype(int) << shift
        j = ((octave[present] - 1 + low) << b) + fraction + 1
        out = np.zeros(size, own)
        out[present] = [
            (-1 if s else 1) * bucket_value(int(k), b, record["d"]) for k, s in zip(j, negative, strict=True)
        ]
        if flags & 2:
            q = source.varint()
            at = np.frombuffer(source.take(4 * q), "<u4")
            out[at] = np.frombuffer(source.take(q * own.itemsize), own)
        assert source.at == len(piece)
        parts.append(out.tobytes())
    return {"values": b"".join(parts)}


def table(source: Bytes) -> np.ndarray[Any, np.dtype[np.float32]]:
    out = np.zeros(256, np.float32)
    at = np.cumsum([source.varint() + 1 for _ in range(source.varint())], dtype=int) - 1
    out[at] = np.frombuffer(source.take(2 * at.size), ml_dtypes.bfloat16).astype(np.float32)
    return out


def joined(parents: list[Any], name: str) -> Any:
    """A field of the parents' memories, one after another."""
    if isinstance(parents[0][name], bytes):
        return b"".join(p[name] for p in parents)
    return np.concatenate([p[name] for p in parents])


def cut(data: Any, records: list[dict[str, Any]], unit: int = 1) -> list[Any]:
    """What belongs to each member, of whose elements each has so many entries."""
    ends = np.cumsum([unit * int(np.prod(r["s"])) for r in records]).tolist()
    return [data[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def read_bundle(
    bundle: dict[str, Any], records: list[dict[str, Any]], pieces: list[bytes], old: Any, second: Any
) -> Any:
    """The memory of each member."""
    n, width = sum(int(np.prod(r["s"])) for r in records), item_size(records[0]["d"])
    whole = {"s": [n], "d": records[0]["d"], "m": bundle.get("m", {})}
    assert n * width <= 2**20
    if bundle["f"] == "levels":
        return read_levels_together(whole, records, pieces, old)
    if bundle["f"] == "rank-one":
        return read_rank_one_together(whole, records, pieces, old)
    if bundle["f"] == "bytes":
        before = None if old is None else {"data": joined(old, "data")}
        found = read_bytes(whole, pieces, before)
    elif bundle["f"] == "grid":
        found = read_grid(whole, pieces, second)
    else:
        assert bundle["f"] == "log-buckets"
        found = read_log_buckets(whole, pieces, None)
    ((name, data),) = found.items()
    return [{name: own} for own in cut(data, records, width)]


def read_rank_one_together(whole: Any, records: Any, pieces: list[bytes], old: Any) -> Any:
    shapes = [(r["s"][0], int(np.prod(r["s"])) // r["s"][0]) for r in records]
    source = Bytes(pieces[0])
    numbers, factors = [], []
    for which in range(2):
        lengths = [shape[which] for shape in shapes]
        inner = Bytes(source.block())
        j = symbols(inner.block(), sum(lengths)).astype(int)
        j += symbols(inner.block(), sum(lengths)).astype(int) << 8
        assert inner.at == len(inner.data)
        if old is not None:
            j = np.concatenate([p["numbers"][which] for p in old]) + np.array([unfolded(int(z)) for z in j], int)
        numbers.append(np.split(j, np.cumsum(lengths)[:-1]))
        factors.append([np.array([bucket_value(int(k), 3, "float32") for k in own], np.float32) for own in numbers[-1]])
    means = table(source)
    assert source.at == len(pieces[0])
    with np.errstate(all="ignore"):
        products = np.concatenate([np.multiply.outer(a, b).reshape(-1) for a, b in zip(*factors, strict=True)])
        before = None if old is None else joined(old, "symbols")
        n = whole["s"][0]
        values, found = with_escapes(pieces[1:], lambda part, s: products[part] * means[s], 1, n, before)
    data = cut(narrowed(values, whole["d"]), records, item_size(whole["d"]))
    each = zip(data, cut(found, records), *numbers, strict=True)
    return [{"values": v, "symbols": s, "numbers": [a, b]} for v, s, a, b in each]


def first_not_negative(codebook: bytes, dtype: str) -> int:
    return int((to_float(codebook, dtype) < 0).sum())


def shifted(levels: list[Any], codebooks: list[bytes], dtype: str, sign: int) -> Any:
    """Levels so that the first entry that is not negative has one level in all arrays, or (sign -1) back."""
    zeros = [first_not_negative(c, dtype) for c in codebooks]
    out = []
    for own, zero in zip(levels, zeros, strict=True):
        moved = (own.astype(int) - 2 + sign * (max(zeros) - zero)) % 254 + 2
        out.append(np.where(own < 2, own, moved).astype(np.uint8))
    return np.concatenate(out)


def read_levels_together(whole: Any, records: Any, pieces: list[bytes], old: Any) -> Any:
    dtype, n = whole["d"], whole["s"][0]
    own, width = numpy_dtype(dtype), item_size(dtype)
    assert len(pieces) == 2
    source = Bytes(pieces[0])
    modes = symbols(source.block(), len(records))
    entries = symbols(source.block(), int((modes != 1).sum())).astype(int).tolist()
    count = int((modes == 2).sum())
    firsts, steps = (planes(source, k, count).astype(np.uint64) for k in (4, 8))
    multiples = zip(firsts.astype(np.int64) - 2**31, steps.view(np.float64), strict=True)
    codebooks = []
    for i, mode in enumerate(modes):
        if mode == 1:
            codebooks.append(old[i]["codebook"])
            continue
        size = entries.pop(0)
        if mode == 0:
            codebooks.append(source.take(size * width))
            continue
        first, step = next(multiples)
        with np.errstate(all="ignore"):
            codebooks.append(np.array([(first + k) * step for k in range(size)]).astype(own).tobytes())
    before = None
    if old is not None:
        before = shifted([p["levels"] for p in old], [p["codebook"] for p in old], dtype, 1)
    coded = symbols(pieces[1], n, before, 256)
    levels = cut(shifted(cut(coded, records), codebooks, dtype, -1), records)
    count = source.varint()
    assert count == sum(int((part == 1).sum()) for part in levels)
    predicted = []
    for i, part in enumerate(levels):
        guess = np.zeros(part.size, np.uint16)
        if old is not None:
            guess[old[i]["levels"] == 1] = bfloat16_or_none(old[i]["protected"], dtype)[0]
        predicted.append(guess[part == 1])
    patterns = undo(planes(source, 2, count), np.concatenate(predicted), True)
    with np.errstate(all="ignore"):
        protected = patterns.view(ml_dtypes.bfloat16).astype(np.float32).astype(own)
    odd = np.cumsum([source.varint() for _ in range(source.varint())], dtype=int)
    protected[odd] = np.frombuffer(source.take(odd.size * width), own)
    assert source.at == len(pieces[0])
    found, at = [], 0
    for part, codebook in zip(levels, codebooks, strict=True):
        out = np.zeros(part.size, own)
        held = protected[at : at + int((part == 1).sum())]
        out[part == 1] = held
        out[part >= 2] = np.frombuffer(codebook, own)[part[part >= 2] - 2]
        found.append({"levels": part, "codebook": codebook, "protected": held.tobytes(), "values": out.tobytes()})
        at += held.size
    return found


def narrowed(x: np.ndarray[Any, Any], dtype: str) -> bytes:
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(numpy_dtype(dtype)).tobytes()


def with_escapes(
    pieces: list[bytes], estimate: Any, escape: int, n: int, before: Any = None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    out = np.empty(n, np.float32)
    found = np.empty(n, np.uint8)
    for i, piece in enumerate(pieces):
        part = slice(i * 2**22, min((i + 1) * 2**22, n))
        source = Bytes(piece)
        context = None if before is None else before[part]
        found[part] = symbol = symbols(source.block(), part.stop - part.start, context, 256)
        out[part] = estimate(part, symbol)
        exact = np.frombuffer(source.take(4 * source.varint()), "<f4")
        out[part][symbol == escape] = exact
        assert source.at == len(piece)
    return out, found


def read_rank_one(record: dict[str, Any], pieces: list[bytes], parent: Any) -> Any:
    rows, n = record["s"][0], int(np.prod(record["s"]))
    columns = n // rows
    source = Bytes(pieces[0])
    before = parent if parent is not None and "numbers" in parent else None
    factors, numbers = [], []
    for which, size in enumerate((rows, columns)):
        inner = Bytes(source.block())
        j = symbols(inner.block(), size).astype(int)
        j += symbols(inner.block(), size).astype(int) << 8
        assert inner.at == len(inner.data)
        if before is not None:
            j = before["numbers"][which] + np.array([unfolded(int(z)) for z in j], int)
        numbers.append(j)
        factors.append(np.array([bucket_value(int(k), 3, "float32") for k in j], np.float32))
    means = table(source)
    assert source.at == len(pieces[0])
    flat = np.arange(n)

    def estimate(part: slice, symbol: Any) -> Any:
        at = flat[part]
        with np.errstate(all="ignore"):
            return (factors[0][at // columns] * factors[1][at % columns]) * means[symbol]

    old = None if before is None else before["symbols"]
    values, found = with_escapes(pieces[1:], estimate, 1, n, old)
    return {"values": narrowed(values, record["d"]), "numbers": numbers, "symbols": found}


def read_grid(record: dict[str, Any], pieces: list[bytes], second: bytes) -> Any:
    n = int(np.prod(record["s"]))
    source = Bytes(pieces[0])
    steps = table(source)
    assert source.at == len(pieces[0])
    with np.errstate(all="ignore"):
        v = np.frombuffer(second, numpy_dtype(record["d"])).astype(np.float32)
        root = np.sqrt(np.where((v >= 0) & np.isfinite(v), v, np.float32(0)))
    values, _ = with_escapes(pieces[1:], lambda part, s: steps[s] * root[part], 0, n)
    return {"values": narrowed(values, record["d"])}


def plus(before: bytes, levels: Any, addends: bytes, dtype: str) -> np.ndarray[Any, Any]:
    """An array and its levels' addends, rounded once (float64 is wide enough to round again)."""
    own = numpy_dtype(dtype)
    old = np.frombuffer(before, own)
    steps = np.concatenate([np.zeros(1, own), np.frombuffer(addends, own)])
    with np.errstate(all="ignore"):
        sums = old.astype(np.float64) + steps[levels].astype(np.float64)
        narrow = sums.astype(np.float64 if dtype == "float64" else np.float32).astype(own)
    return np.where(levels == 0, old, narrow)


def bit_packed(data: bytes, width: int, n: int) -> np.ndarray[Any, Any]:
    value = int.from_bytes(data, "little")
    return np.array([value >> (i * width) & ((1 << width) - 1) for i in range(n)], int)


def read_exponent(record: dict[str, Any], pieces: list[bytes], parent: Any) -> Any:
    n, dtype = int(np.prod(record["s"])), record["d"]
    width = item_size(dtype)
    before = parent["data"] if parent is not None and "data" in parent else None
    tables = list(parent.get("tables", [])) if parent is not None else []
    source = Bytes(pieces[0])
    form = source.take(1)[0]
    out = b""
    if form == 1:
        tables = []
        for _ in range(source.varint()):
            size = source.varint()
            tables.append(code_lengths(source.block(), size))
        for i, piece in enumerate(pieces[1:]):
            size = min(2**22, n - i * 2**22)
            old = None if before is None else before[i * 2**22 * width :][: size * width]
            if piece[0] == 0:
                out += bytes_chunk(piece[1:], dtype, size * width, old)
                continue
            assert piece[0] == 1
            assert old is not None
            inner = Bytes(piece[1:])
            count = inner.varint()
            addends = inner.take(count * width)
            high = symbols(inner.block(), size).astype(int)
            low = symbols(inner.block(), size, high, max(2, int(high.max()) + 1)).astype(int)
            levels = 256 * high + low
            kept = levels == count + 1
            values = plus(old, np.where(kept, 0, levels), addends, dtype)
            values[kept] = np.frombuffer(inner.take(int(kept.sum()) * width), values.dtype)
            assert inner.at == len(inner.data)
            out += values.tobytes()
    else:
        assert form == 0
        count = source.varint()
        addends = source.take(count * width)
        coding = source.take(1)[0]
        constant, lengths = 0, [0] * (count + 1)
        if coding == 0:
            constant = source.varint()
        elif coding in (2, 3):
            ranked = [source.varint() for _ in range(source.varint())]
            if coding == 2:
                by_rank = code_lengths(source.block(), len(ranked))
                tables = ([t for t in tables if len(t) != len(ranked)] + [by_rank])[-8:]
            else:
                (by_rank,) = (t for t in tables if len(t) == len(ranked))
            for level, length in zip(ranked, by_rank, strict=True):
                lengths[level] = length
        for i, piece in enumerate(pieces[1:]):
            size = min(2**22, n - i * 2**22)
            levels = {
                0: lambda _, size=size: np.full(size, constant),
                1: lambda piece, size=size: bit_packed(piece, count.bit_length(), size),
                2: lambda piece, size=size: np.array(huffman(piece, lengths, size), int),
                3: lambda piece, size=size: np.array(huffman(piece, lengths, size), int),
                4: lambda piece, size=size: symbols(piece, size).astype(int),
            }[coding](piece)
            out += plus(before[i * 2**22 * width :][: size * width], levels, addends, dtype).tobytes()
    assert source.at == len(pieces[0])
    return {"data": out, "tables": tables}


def read_changed(record: dict[str, Any], pieces: list[bytes], parent: Any) -> Any:
    n, width = int(np.prod(record["s"], dtype=object)), item_size(record["d"])
    out = b""
    for i, piece in enumerate(pieces):
        size = min(2**22, n - i * 2**22)
        source = Bytes(piece)
        if source.take(1)[0] == 0:
            out += bytes_chunk(source.rest(), record["d"], size * width, None)
            continue
        mask = symbols(source.block(), -(-size // 8))
        there = np.unpackbits(mask, bitorder="little").astype(bool)
        assert not there[size:].any()
        there = there[:size]
        values = np.frombuffer(parent["data"][i * 2**22 * width :][: size * width], f"u{width}").copy()
        count = int(there.sum())
        if count:
            values[there] = np.frombuffer(bytes_chunk(source.rest(), record["d"], count * width, None), f"u{width}")
        assert source.at == len(piece)
        out += values.tobytes()
    return {"data": out}


def read_clusters(record: dict[str, Any], pieces: list[bytes], _parent: Any) -> Any:
    entries = [Fraction(0), Fraction(1)]
    for e in range(7):
        for k in range(2 ** (e + 1)):
            part = Fraction(1, 10) + Fraction(9 * (2 * k + 1), 20 * 2 ** (e + 1))
            entries.append(Fraction(10**e, 10**6) * part)
    values = np.array([float(v) for v in sorted(entries)]).astype(np.float32)
    n, out = int(np.prod(record["s"])), []
    for i, piece in enumerate(pieces):
        size = min(2**22, n - i * 2**22)
        source = Bytes(piece)
        m = source.varint()
        minimum, scale = np.frombuffer(source.take(4 * m), "<f4"), np.frombuffer(source.take(4 * m), "<f4")
        labels = symbols(source.block(), size)
        codes = symbols(source.block(), size, labels, max(2, m))
        assert source.at == len(piece)
        out.append(values[codes] * scale[labels] + minimum[labels])
    return {"values": narrowed(np.concatenate(out), record["d"])}


def read_rows(record: dict[str, Any], pieces: list[bytes], parent: Any) -> Any:
    """Rows as (style, numbers, codes), or ("raw", bytes): what a later delta takes over or is coded against."""
    count, dtype = record["s"][0], record["d"]
    columns = int(np.prod(record["s"])) // count
    step = max(1, 2**22 // columns)
    assert len(pieces) == -(-count // step)
    before = parent["rows"] if parent is not None and "rows" in parent else [None] * count
    rows = list(before)
    for i, piece in enumerate(pieces):
        first, size = i * step, min(step, count - i * step)
        source = Bytes(piece)
        marks = symbols(source.block(), size)
        for k, style in enumerate(record["m"]["s"]):
            at = first + np.flatnonzero(marks == k + 1)
            if not at.size:
                continue
            old = [before[r] for r in at]
            if style[0] == "raw":
                known = None if None in old else b"".join(values_of(row, columns, dtype) for row in old)
                width = columns * item_size(dtype)
                data = row_array(source, dtype, at.size * width, known)
                for j, r in enumerate(at):
                    rows[r] = (("raw",), data[j * width : (j + 1) * width])
                continue
            method, bits = style[0], style[1]
            p = {"symmetric": 1, "kmeans": 2**bits}.get(method, 2)
            same = [row is not None and row[0] == tuple(style) for row in old]
            known = None
            if any(same):
                numbers = [row[1] if s else np.zeros(p, "<f4") for row, s in zip(old, same, strict=True)]
                known = np.stack(numbers, axis=1).astype("<f4").tobytes()
            data = row_array(source, "float32", 4 * p * at.size, known)
            numbers = np.frombuffer(data, "<f4").reshape(p, at.size)
            context = None
            if any(same) and bits <= 4:
                codes = [row[2] if s else np.full(columns, 2**bits) for row, s in zip(old, same, strict=True)]
                context = np.concatenate(codes)
            codes = symbols(source.block(), at.size * columns, context, 2**bits + 1).reshape(at.size, columns)
            for j, r in enumerate(at):
                rows[r] = (tuple(style), numbers[:, j], codes[j])
        assert source.at == len(piece)
    assert None not in [row if row is None else 0 for row in rows]
    return {"rows": rows, "data": b"".join(values_of(row, columns, dtype) for row in rows)}


def row_array(source: Bytes, dtype: str, size: int, before: bytes | None) -> bytes:
    form = source.take(1)[0]
    assert form in (0, 1)
    return source.take(size) if form == 0 else bytes_chunk(source.block(), dtype, size, before)


def values_of(row: Any, columns: int, dtype: str) -> bytes:
    style = row[0]
    if style[0] == "raw":
        return bytes(row[1])
    numbers, codes = row[1], row[2]
    if style[0] == "kmeans":
        return narrowed(numbers[codes], dtype)
    minimum = numbers[-1]
    scale = (-minimum - minimum) / np.float32(2 ** style[1] - 1) if style[0] == "symmetric" else numbers[0]
    return narrowed(codes.astype(np.float32) * scale + minimum, dtype)


def read_multiples(record: dict[str, Any], pieces: list[bytes], parent: Any) -> Any:
    step, width = record["m"]["s"], record["m"]["w"]
    bias = 1 << (8 * width - 1)
    before = None
    if parent is not None and parent.get("step") == step and parent["width"] <= width:
        numbers = parent["multiples"] + (bias - (1 << (8 * parent["width"] - 1)))
        before = {"data": numbers.astype(f"<u{width}").tobytes()}
    integers = {"s": record["s"], "d": f"uint{8 * width}"}
    numbers = np.frombuffer(read_bytes(integers, pieces, before)["data"], f"<u{width}").astype(np.int64)
    data = ((numbers - bias) * np.float64(step)).astype(record["d"]).tobytes()
    return {"multiples": numbers, "step": step, "width": width, "data": data}


READERS = {
    "rows": read_rows,
    "multiples": read_multiples,
    "bytes": read_bytes,
    "levels": read_levels,
    "log-buckets": read_log_buckets,
    "rank-one": read_rank_one,
    "exponent": read_exponent,
    "changed": read_changed,
    "clusters": read_clusters,
}


def scalar(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    ((tag, text),) = node.items()
    if tag == "i":
        return int(text, 16)
    if tag == "f":
        return struct.unpack(">d", bytes.fromhex(text))[0]
    if tag == "k":
        return tuple(scalar(x) for x in text)
    if tag == "s":
        return base64.b64decode(text).decode("utf-8", "surrogatepass")
    assert tag == "b"
    return base64.b64decode(text)


def open_file(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body."""
    magic, version, flags, stored, plain, count, zero = struct.unpack("<8sIIQQII", blob[:40])
    assert (magic, version, flags, zero) == (b"\x89SPT\r\n\x1a\n", 1, 0, 0)
    at = 56 + stored + 24 * count
    assert xxhash.xxh3_128(blob[:40] + blob[56:at]).digest() == blob[40:56]
    text = zstandard.decompress(blob[56 : 56 + stored])
    assert len(text) == plain
    assert text.isascii()
    body = b""
    for i in range(count):
        length, digest = struct.unpack_from("<Q16s", blob, 56 + stored + 24 * i)
        chunk = blob[at : at + length]
        assert xxhash.xxh3_128(chunk).digest() == digest
        body += chunk
        at += length
    assert at == len(blob)
    header = json.loads(text)
    count = header["arrays"].pop("count")
    rows: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, column in header["arrays"].items():
        values = column
        if isinstance(column, dict):
            values = [column["v"][i] for i in column.get("i", [0] * count)]
        assert len(values) == count
        for row, value in zip(rows, values, strict=True):
            row.update({} if value is None else {name: value})
    header["arrays"] = rows
    return header, body


def subclass(parts: dict[str, Any]) -> Any:
    """The one tensor subclass of the golden files from its parts."""

    def plain(x: Any) -> Any:
        if isinstance(x, list):
            return [plain(v) for v in x]
        if not isinstance(x, dict):
            return x
        ((tag, body),) = x.items()
        if tag == "dict":
            return {plain(k): plain(v) for k, v in body}
        kinds = {"tuple": tuple, "size": torch.Size, "dtype": lambda name: getattr(torch, name), "device": torch.device}
        return kinds[tag](plain(body))

    assert list(parts) == ["class", "tensors", "context", "size", "stride"]
    codes, scale = (parts["tensors"][name] for name in ("codes", "scale"))
    if codes is None:  # the first walk is for the paths
        return None
    assert parts["class"].endswith("golden.subclass:Coded")
    assert parts["size"] == list(codes.shape)
    return Coded(codes, scale, plain(parts["context"]))


def read(blob: bytes, parent: dict[str, Any] | None = None) -> dict[str, Any]:
    """A file as {"state", "id", "memory"}: what a stranger's reader makes of it."""
    header, body = open_file(blob)
    assert header["parent"] == (parent["id"] if parent else None)
    keys: dict[int, str] = {}
    nodes = iter(header["tree"])

    def walk(path: tuple[str, ...], arrays: Any) -> Any:
        node = next(nodes)
        tag = next(iter(node)) if isinstance(node, dict) else ""
        if tag in ("l", "t"):
            items = [walk((*path, str(i)), arrays) for i in range(node[tag])]
            return items if tag == "l" else tuple(items)
        if tag in ("d", "o", "c", "w"):
            pairs = [(scalar(k), walk((*path, json.dumps(k)), arrays)) for k in node[tag]]
            made: dict[Any, Any] = {"d": dict, "o": OrderedDict, "c": Counter, "w": dict}[tag]()
            made.update(pairs) if tag != "c" else [made.__setitem__(k, v) for k, v in pairs]
            return subclass(made) if tag == "w" else made
        if tag == "a":
            keys.setdefault(node["a"], "\0".join(path))
            return arrays(node["a"])
        return scalar(node)

    walk((), lambda number: None)
    old = parent["memory"] if parent else {}
    memory: dict[str, Any] = {}
    pieces, at = [], 0
    bundles = header.get("bundles", [])
    for record in [*header["arrays"], *bundles]:
        pieces.append([])
        for n in record.get("b", []):
            pieces[-1].append(body[at : at + n])
            at += n
    assert at == len(body)
    records = header["arrays"]
    units: list[Any] = [i for i in range(len(records)) if "f" in records[i]]
    for bundle, own in zip(bundles, pieces[len(records) :], strict=True):
        numbers = np.cumsum(bundle["a"]).tolist()
        assert not any(records[i].keys() & {"f", "b", "m", "p"} for i in numbers)
        units.append((bundle, numbers, own))
    assert sum(1 if isinstance(u, int) else len(u[1]) for u in units) == len(records)
    for unit in sorted(units, key=lambda u: "v" in records[u if isinstance(u, int) else u[1][0]]):
        if not isinstance(unit, int):
            bundle, numbers, own = unit
            members = [records[i] for i in numbers]
            parents = [old[keys[i]] for i in numbers] if bundle.get("p") else None
            second = b"".join(memory[keys[r["v"]]]["values"] for r in members if "v" in r)
            found_all = read_bundle(bundle, members, own, parents, second)
            for i, found in zip(numbers, found_all, strict=True):
                memory[keys[i]] = {**found, "s": records[i]["s"], "d": records[i]["d"]}
            continue
        number = unit
        record = {"f": "bytes", **records[number]}
        if record["f"] == "grid":
            found = read_grid(record, pieces[number], memory[keys[record["v"]]]["values"])
        elif record["f"] == "copy":
            other = records[record["v"]]
            assert (other["s"], other.get("l"), pieces[number]) == (record["s"], record.get("l"), [])
            original = memory[keys[record["v"]]]
            flat = np.frombuffer(original.get("data", original.get("values")), numpy_dtype(other["d"]))
            with np.errstate(all="ignore"):
                found = {"values": flat.astype(numpy_dtype(record["d"])).tobytes()}
        else:
            before = old.get(keys[number]) if record.get("p") else None
            if before is not None:
                assert (before["s"], before["d"]) == (record["s"], record["d"])
            found = READERS[record["f"]](record, pieces[number], before)
        memory[keys[number]] = {**found, "s": record["s"], "d": record["d"]}

    made: dict[int, Any] = {}

    def array(number: int) -> Any:
        record = records[number]
        if number not in made:
            found = memory[keys[number]]
            data = found.get("data", found.get("values"))
            if record.get("l", "torch") == "torch":
                flat = (
                    torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
                )
                x: Any = flat.view(getattr(torch, record["d"])).reshape(record["s"])
            else:
                x = np.frombuffer(data, numpy_dtype(record["d"])).reshape(record["s"])
                if record["l"] == "numpy scalar":
                    x = text_of(data, record) if x.dtype.kind in "SU" else x[()]
            made[number] = x
        return made[number]

    nodes = iter(header["tree"])
    state = walk((), array)
    assert next(nodes, None) is None
    return {"state": state, "id": header.get("as") or blake3(blob).hexdigest(), "memory": memory}


@pytest.mark.parametrize("name", cases())
def test_a_strangers_reader_finds_the_same(name: str) -> None:
    make, cfg, length = cases()[name]
    ours = theirs = None
    for t in range(length):
        ours = sp.compress(make(t), ours, cfg, kinds=KINDS.get(make))
        theirs = read(ours.to_bytes(), theirs)
        assert difference(sp.decompress(ours), theirs["state"]) == ""
        assert theirs["id"] == ours.id


@pytest.mark.parametrize("name", [name for name, (_, _, length) in cases().items() if length > 1])
def test_a_strangers_reader_finds_the_same_stated_anew(name: str) -> None:
    """As a base and as a super-step over the first of its chain."""
    make, cfg, length = cases()[name]
    chain: list[sp.Checkpoint] = []
    for t in range(length):
        chain.append(sp.compress(make(t), chain[-1] if chain else None, cfg, kinds=KINDS.get(make)))
    first = read(chain[0].to_bytes())
    for parent, known in ((None, None), (chain[0], first)):
        theirs = read(restate(chain[-1], parent).to_bytes(), known)
        assert difference(sp.decompress(chain[-1]), theirs["state"]) == ""
        assert theirs["id"] == chain[-1].id


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_strangers_reader_finds_the_same_in_large_arrays(dtype: str) -> None:
    """Scales of rows and columns, contexts counted on a part, both kinds of context."""
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(0, 2, (150, 1)) + rng.normal(0, 2, (1, 120)))
    w = scale * rng.standard_normal((150, 120))
    v = (w * w).astype(np.float32).astype(np.float64)
    states = [
        {"weight": torch.from_numpy(x).to(getattr(torch, dtype)), "v": torch.from_numpy(y).to(getattr(torch, dtype))}
        for x, y in ((w, v), (w + 1e-2 * rng.standard_normal(w.shape), 0.95 * v + 1e-9 * v * w))
    ]
    base = sp.compress(states[0], cfg=sp.presets.lossless())
    delta = sp.compress(states[1], base, sp.presets.lossless())
    first = read(base.to_bytes())
    for ckpt, theirs, state in ((base, first, states[0]), (delta, read(delta.to_bytes(), first), states[1])):
        assert difference(sp.decompress(ckpt), state) == ""
        assert difference(theirs["state"], state) == ""
    assert {bytes(base.pieces_of(r)[0][:1]) for r in base.records} == {b"\x04"}
    used = {bytes(delta.pieces_of(r)[0][:2]) for r in delta.records}
    assert b"\x05\x00" in used
