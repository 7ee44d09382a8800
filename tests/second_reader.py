"""A second reader of files in NumPy, written from docs/format.md and docs/entropy.md alone."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from io import BytesIO
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash
import zstandard
from blake3 import blake3

Array = np.ndarray[Any, Any]
FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}  # exponent, mantissa
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}
CONTAINERS: dict[str, Any] = {"d": dict, "w": dict, "o": OrderedDict, "c": Counter, "l": list, "t": tuple}
SCALARS: dict[str, Callable[[Any], Any]] = {
    "i": lambda text: int(text, 16),
    "f": lambda text: struct.unpack(">d", bytes.fromhex(text))[0],
    "b": base64.b64decode,
    "s": lambda text: base64.b64decode(text).decode("utf-8", "surrogatepass"),
    "k": lambda nodes: tuple(map(scalar, nodes)),
}


class Table:
    """The numbers of a table, from the lowest bit of the first byte on."""

    def __init__(self, data: Source) -> None:
        found = np.unpackbits(np.frombuffer(data.read(), np.uint8), bitorder="little").tolist()
        self.bits, self.empty = iter(found), not found

    def plain(self, k: int) -> int:
        return sum(next(self.bits) << j for j in range(k))

    def gamma(self) -> int:
        zeros = next(k for k, bit in enumerate(self.bits) if bit)
        return 1 << zeros | self.plain(zeros)

    def near(self, w: int) -> int:
        size, above = divmod(self.gamma(), 2)
        return w + size if above else w - size

    def code_lengths(self, size: int) -> list[int]:
        out, space, s, v = [0] * size, 0 if self.empty else 2**24, -1, 0
        while space:
            s += self.gamma()
            v = self.near(v) if any(out) else self.gamma() - 1
            out[s], space = v or 1, space - 2 ** (24 - v)
        assert not any(self.bits)
        return out

    def frequencies(self, rows: int, size: int, precision: int) -> Array:
        out, c, last, peak, w, counts = np.zeros((rows, size), int), -1, -1, -1, precision, {-1: 0, 1: 0}
        digits = self.plain(4)
        while c < rows - 1 and (c := c + self.gamma()) < rows:
            before, peak = peak, self.near(peak + c - last)
            for step in counts if digits else ():
                counts[step], s = self.near(counts[step]), peak
                for _ in range(counts[step]):
                    s += step * self.gamma()
                    above = out[last, s - peak + before] if last >= 0 and 0 <= s - peak + before < size else 0
                    w = self.near(int(above).bit_length() or w)
                    d = min(w, digits) - 1
                    out[c, s] = (2**d + self.plain(d)) << (w - 1 - d)
            out[c, peak], last = 2**precision - out[c].sum(), c
        assert not any(self.bits)
        return out


class Source(BytesIO):
    """Bytes that are read from the front; `read()` takes the rest of a stream."""

    def byte(self) -> int:
        return self.read(1)[0]

    def varint(self) -> int:
        b = self.byte()
        return b if b < 128 else b - 128 + 128 * self.varint()

    def varints(self, n: int) -> list[int]:
        return [self.varint() for _ in range(n)]

    def array(self, dtype: Any, n: int) -> Array:
        return np.frombuffer(self.read(n * np.dtype(dtype).itemsize), dtype, n)

    def block(self) -> Source:
        return Source(self.read(self.varint()))

    def packed(self, widths: Array) -> Array:
        """Read numbers of the given bit widths, the lowest bit first; zeros pad the last byte."""
        bits = np.unpackbits(np.frombuffer(self.read(), np.uint8), bitorder="little").astype(np.uint64)
        starts, out = np.cumsum(widths) - widths, np.zeros(widths.size, np.uint64)
        assert not bits[widths.sum() :].any()
        for j in range(int(widths.max(initial=0))):
            out[widths > j] |= bits[starts[widths > j] + j] << np.uint64(j)
        return out

    def lengths(self, n: int) -> list[int]:
        return Table(self.block()).code_lengths(n)

    def huffman(self, lengths: list[int], n: int) -> Array:
        codes, code, before, out, each = dict[str, int](), -1, 0, list[int](), -(-n // 4)
        for length, s in sorted((length, s) for s, length in enumerate(lengths) if length):
            code, before = (code + 1) << (length - before), length
            codes[f"{code:0{length}b}"] = s
        for k, stream in enumerate(map(self.read, [*self.varints(3 if n else 0), None])):
            bits, count = iter("".join(f"{b:08b}" for b in stream)), min(k * each + each, n) - min(k * each, n)
            out += [codes[next(word for word in itertools.accumulate(bits) if word in codes)] for _ in range(count)]
            assert "".join(bits) in "0000000"
        return np.array(out, int)

    def rans(self, rows: Array, count: int) -> Array:
        """Read a table of frequencies, one row a context, and the symbols of the given contexts."""
        form, columns, slots, out, contexts = self.byte(), self.varint(), [], list[int](), rows.tolist()
        # Four states take words one by one, in order; 64 states in rows of 16; the first row takes the last words.
        precision, states, least, together = (12, 64, 2**15, 16) if form == 64 else (form, 4, 2**16, 1)
        for row in Table(self.block()).frequencies(count, columns, precision).tolist():
            order = sorted(range(columns), key=lambda s: s != row.index(max(row)))
            slots.append([(s, k, row[s]) for s in order for k in range(row[s])])
        data = self.read()
        x = np.frombuffer(data[: 4 * states], "<u4").tolist() or [least] * states
        words = np.frombuffer(data[4 * states :], "<u2")[:: 1 if states == 64 else -1].tolist()
        for start in range(0, rows.size, together):
            own = [(i % states, contexts[i]) for i in range(start, min(start + together, rows.size))]
            for k, row in own:
                s, first, f = slots[row][x[k] % 2**precision]
                x[k] = f * (x[k] >> precision) + first
                out.append(s)
            for k, _ in reversed(own):
                x[k] = x[k] * 65536 + words.pop() if x[k] < least else x[k]
        assert (x, words) == ([least] * states, [])
        return np.array(out, int)

    def published(self) -> Array:
        (count, size), out = self.varints(2), list[int]()
        alphabet = np.cumsum([-self.varint(), *self.varints(size - 1)])
        for token in alphabet[self.huffman(self.lengths(size), count)].tolist():
            out += [-token] if token <= 0 else out[-1:] * (token - 1)
        return np.array(out)

    def rearranged(self, context: Array) -> Array:
        out, modulus = np.empty_like(context), self.varint()
        for value in np.unique(context):
            out[context == value] = (value - self.block().symbols(int((context == value).sum()))) % modulus
        return out

    def place_classes(self, columns: int, part: slice) -> Array:
        """Return row class + column class of the elements of a part of a matrix."""
        down = self.block().symbols(-(-part.stop // columns))
        return np.add.outer(down, self.block().symbols(columns)).reshape(-1)[part]

    def matrix(self, n: int, context: Array | None) -> Array:
        way, usual, columns, phase, count = self.byte(), self.byte(), *self.varints(3)
        part, nearest = slice(phase, phase + n), np.zeros(n, int)
        heights = self.varints(count) if count > 1 else [-(-part.stop // columns)]
        if self.byte() == 1:
            ranks = [self.byte() for _ in heights]
            ends = np.cumsum([*map(int.__mul__, ranks, heights), *(k * columns for k in ranks)])
            factors = np.split(self.block().symbols(int(ends[-1])) - 128, ends[:-1])
            pairs = zip(ranks, heights, factors[:count], factors[count:], strict=True)
            sums = [a.reshape(k, rows).T @ b.reshape(k, columns) for k, rows, a, b in pairs]
            fourths = np.rint(np.concatenate(sums).reshape(-1)[part] / 16).astype(int) + 2
            nearest, row, rows = fourths // 4, fourths % 4, 4
        else:
            rows, base = self.varints(2)
            row = np.clip(self.place_classes(columns, part) - base, 0, rows - 1)
        coded = self.rans(row, rows)
        numbers = np.where(coded % 2, -1 - coded // 2, coded // 2) + nearest
        if way == 1:
            numbers = (numbers + 128) % 256 - 128
            return (np.where(numbers < 0, -1 - 2 * numbers, 2 * numbers) + 1) % 256
        return (numbers + (context if way == 2 else usual)) % 256

    def symbols(self, n: int, context: Array | None = None, contexts: int = 1) -> Array:
        method = self.byte()
        known = np.full(n, self.byte()) if method == 0 else np.zeros(n, int) if context is None else context
        reader: dict[int, Callable[[], Array]] = {
            1: lambda: self.packed(np.full(n, self.byte())),
            2: lambda: self.huffman(self.lengths(256), n),
            3: self.published,
            4: lambda: self.rans(np.zeros(n, int), 1),
            5: lambda: self.rans(known, contexts),
            6: lambda: self.rearranged(known),
            8: lambda: np.frombuffer(zstandard.decompress(self.read()), np.uint8),
            9: lambda: np.frombuffer(self.read(), np.uint8),
            10: lambda: self.matrix(n, context),
        }
        found = known if method in (0, 7) else reader[method]()
        assert (found.size, self.read()) == (n, b"")
        return found.astype(int)

    def planes(self, width: int, n: int, *more: Array) -> Array:
        columns = [*(self.block().symbols(n) for _ in range(width)), *more]
        return np.stack(columns, axis=1).astype(np.uint8).reshape(-1).view(f"<u{len(columns)}")

    def numbers(self, n: int) -> Array:
        return self.planes(width := self.varint(), n, *[np.zeros(n, np.uint8)] * (8 - width))

    def table(self) -> Array:
        out, count = np.zeros(256, np.float32), self.varint()
        at = np.cumsum(np.array(self.varints(count), int) + 1) - 1
        out[at] = floats(self.array("<u2", count), "bfloat16")
        return out

    def exact(self, dtype: str, n: int, before: Array | None) -> Array:
        part, total = PARTS.get(dtype, dtype), n * kind(dtype).itemsize
        width, is_float, old = kind(part).itemsize, part in FLOATS, before
        old, n = np.empty(0) if before is None else before.view(kind(part)), total // width
        found = {
            0: lambda: self.symbols(total).astype(np.uint8),
            1: lambda: self.planes(width, n),
            2: lambda: changed_by(self.planes(width, n), old, is_float),
            3: lambda: old,
            4: lambda: self.scaled(width, n),
            5: lambda: self.sizes(*FLOATS[part], old),
            6: lambda: self.planes(width, n) ^ old,
            7: lambda: self.sparse(is_float or ("float8" in dtype and dtype != "float8_e8m0fnu"), old),
        }[self.byte()]()
        assert not self.read()
        return found.view(kind(dtype))

    def either(self, dtype: str, n: int, before: Array | None) -> Array:
        """Read items that are stored as in `bytes`, or plainly."""
        return self.block().exact(dtype, n, before) if self.byte() else self.array(kind(dtype), n)

    def scaled(self, width: int, n: int) -> Array:
        columns, context, contexts, by = self.varint(), None, 1, 4 if width == 8 else 1
        if columns:
            phase = self.varint()
            context = np.minimum(self.place_classes(columns, slice(phase, phase + n)), 255)
            contexts = max(2, int(context.max()) + 1)
        top = self.block().symbols(n, context, contexts)
        rotated = self.planes(width - 1, n, top)
        return rotated >> rotated.dtype.type(by) | rotated << rotated.dtype.type(8 * width - by)

    def categories(self, width: int, n: int, *context: Any) -> Array:
        """Read numbers of `width` bytes: their categories, then their extra bits."""
        b, c = 2 if width == 8 else 3, self.block().symbols(n, *context)
        k = np.maximum((c >> b) - 1, 0)
        return (((c - (k << b)).astype(np.uint64) << k.astype(np.uint64)) + self.packed(k)).astype(f"<u{width}")

    def sizes(self, exponent: int, mantissa: int, before: Array) -> Array:
        wide, context, contexts = before.astype(np.uint64) >> np.uint64(mantissa - 4), before, 16
        if self.byte() == 1:
            context = wide.astype(int) % 16
        else:
            fields = (wide >> np.uint64(4)).astype(int) % 2**exponent
            count = np.bincount(fields[:: 16 if fields.size > 2**14 else 1], minlength=2**exponent)
            first = (np.cumsum(count) - count) // max(256, -(-int(count.sum()) // 64))
            numbers, group = np.unique(first, return_inverse=True)
            context, contexts = group[fields], max(2, numbers.size)
        return changed_by(self.categories(before.itemsize, before.size, context, contexts), before, True)

    def sparse(self, is_float: bool, before: Array) -> Array:
        by_xor, edges, width = self.byte(), self.varints(self.varint()), before.itemsize
        contexts = len(edges) + 1
        classes = np.repeat(np.arange(contexts), self.varints(contexts))
        shifts = self.array("u1", contexts).astype(int)[classes]
        q, d = np.divmod(self.block().symbols(classes.size, classes, contexts), 5)
        k = np.maximum(q // 2 - 1, 0)
        gaps = (q - 2 * k << k + shifts) + self.block().packed(k + shifts).astype(int)
        changes, context = (d + 1).astype(before.dtype), classes[d == 4]
        if count := self.varint():
            read = self.block().symbols if width == 1 else lambda *about: self.categories(width, *about)
            changes[d == 4] += read(count, context, contexts).astype(before.dtype)
        magnitude = before & before.dtype.type(2 ** (8 * width - 1) - 1)
        reached, steps = np.searchsorted(np.array(edges, before.dtype), magnitude, side="right"), np.zeros_like(before)
        for c in range(contexts):
            steps[np.flatnonzero(reached == c)[np.cumsum(gaps[classes == c] + 1) - 1]] = changes[classes == c]
        return before ^ steps if by_xor else changed_by(steps, before, is_float)


def kind(dtype: str) -> np.dtype[Any]:
    """Return the unsigned dtype of a dtype's items; V for items of more than eight bytes."""
    size = {"bfloat16": 2, "complex32": 4}.get(dtype) or (1 if "float8" in dtype else np.dtype(dtype).itemsize)
    return np.dtype(f"<u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def floats(items: Array, dtype: str) -> Array:
    return (items.astype("<u4") << 16).view("<f4") if dtype == "bfloat16" else items.view(dtype)


def rounded(x: Array, dtype: str) -> Array:
    """Round values to items, to nearest, ties to even; to bfloat16 through float32."""
    if dtype != "bfloat16":
        return x.astype(dtype).view(kind(dtype))
    bits = x.astype("<f4").view("<u4")
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")


def unzigzag(z: Array) -> Array:
    return (z >> z.dtype.type(1)) ^ (np.zeros_like(z) - (z & z.dtype.type(1)))


def changed_by(z: Array, before: Array, is_float: bool) -> Array:
    """Return the patterns whose zig-zag difference to `before` is z."""
    top = before.dtype.type(1 << (8 * before.itemsize - 1))
    low = top - before.dtype.type(1)
    new = np.where((before & top != 0) & is_float, before ^ low, before) + unzigzag(z)
    return np.where((new & top != 0) & is_float, new ^ low, new)


def bucket_values(numbers: Array, b: int, dtype: str) -> Array:
    exponent, mantissa = FLOATS[dtype]
    octave, step = np.divmod(np.maximum(numbers, 1) - 1, 2**b)
    bits, unit = np.minimum(octave, mantissa), 2 - 2 ** (exponent - 1) - mantissa
    middle = np.ldexp(2 * (2**b + step) + 1.0, octave - b - 1 + unit)
    single = np.ldexp(-(-(2**b + step) // 2 ** np.maximum(b - bits, 0)) + 0.0, octave - bits + unit)
    return np.where(bits > b, middle, single) * (numbers > 0)


class Leaf(SimpleNamespace):
    """An array: its record, its items as unsigned patterns, and `more` for a later delta."""


class Unit:
    """A group: its arrays, their parents (empty without a delta), arrays of `v`."""

    def __init__(self, record: dict[str, Any], body: Source, *arrays: list[Leaf]) -> None:
        (self.leaves, self.parents, self.others), self.stream = arrays, record["f"]
        self.meta, self.pieces = record.get("m", {}), [body.read(n) for n in record["b"]]
        self.dtype, self.sizes = self.leaves[0].dtype, [prod(leaf.shape) for leaf in self.leaves]

    def known(self, name: str) -> Any:
        """Return the parents' data of this name, joined; None where not every parent has it."""
        data = [old.more[name] for old in self.parents if name in old.more]
        return np.concatenate(data) if data and len(data) == len(self.parents) else None

    def cut(self, joined: Array) -> list[Array]:
        return np.split(joined, np.cumsum(self.sizes)[:-1])

    def keep(self, name: str, joined: Array) -> None:
        for leaf, data in zip(self.leaves, self.cut(joined), strict=True):
            leaf.more[name] = data

    def chunks(self, before: Any, head: int = 0, step: int = 2**22) -> Iterator[tuple[Source, int, slice, Any]]:
        """Yield the pieces after the first `head`: piece, size, slice, that part of `before`."""
        for i, piece in enumerate(map(Source, self.pieces[head:])):
            part = slice(i * step, min(sum(self.sizes), i * step + step))
            yield piece, part.stop - part.start, part, None if before is None else before[part]
            assert not piece.read()

    def read_bytes(self) -> Iterator[Array]:
        for piece, n, _, old in self.chunks(self.known("exact"), step=2**24 // kind(self.dtype).itemsize):
            yield piece.exact(self.dtype, n, old)

    def read_copy(self) -> Iterator[Array]:
        (other,) = self.others
        by_float32 = other.library == "torch" and kind(self.dtype).itemsize == 2
        values = floats(other.items, other.dtype).astype(np.float32 if by_float32 else other.dtype)
        yield other.items if other.dtype == self.dtype else rounded(values, self.dtype)

    def read_levels(self) -> Iterator[Array]:
        head, context, contexts = Source(self.pieces[0]), self.known("levels"), 0
        codebooks, held = list(self.codebooks(head)), np.zeros(sum(self.sizes), "<u2")
        guess = held.copy() if context is None else self.known("held")
        if context is not None:
            context = self.shifted(context, olds := [old.more["codebook"] for old in self.parents], 1)
            contexts = min(256, 2 + max(map(sum, zip(map(len, olds), self.shifts(olds), strict=True))))
        coded = [piece.symbols(n, old, contexts) for piece, n, _, old in self.chunks(context, 1)]
        levels = self.shifted(np.concatenate([*coded, np.empty(0, int)]), codebooks, -1)
        at = np.flatnonzero(levels == 1)
        held[at] = changed_by(head.planes(2, head.varint()), guess[at], True)
        items = rounded(floats(held, "bfloat16"), self.dtype)
        odd = at[np.cumsum(head.varints(head.varint()), dtype=int)]
        items[odd], held[odd] = head.array(items.dtype, odd.size), 0
        assert not head.read()
        for leaf, codebook, own, data in zip(self.leaves, codebooks, self.cut(levels), self.cut(items), strict=True):
            data[own > 1], leaf.more["codebook"] = codebook[own[own > 1] - 2], codebook
        self.keep("levels", levels)
        self.keep("held", held)
        yield items

    def codebooks(self, head: Source) -> Iterator[Array]:
        modes = head.block().symbols(len(self.leaves)).tolist()
        counts = head.block().symbols(len(modes) - modes.count(1)).tolist()
        firsts, steps = (head.numbers(modes.count(2)) for _ in range(2))
        left, uniform = iter(counts), zip(unzigzag(firsts).view("<i8"), steps.byteswap().view("<f8"), strict=True)
        for i, mode in enumerate(modes):
            if mode == 2:
                first, step = next(uniform)
                yield rounded(np.arange(first, first + next(left)) * step, self.dtype)
            else:
                yield self.parents[i].more["codebook"] if mode else head.array(kind(self.dtype), next(left))

    def shifts(self, codebooks: list[Array]) -> Array:
        zeros = np.array([(floats(codebook, self.dtype) < 0).sum() for codebook in codebooks])
        return zeros.max() - zeros

    def shifted(self, levels: Array, codebooks: list[Array], sign: int) -> Array:
        """Return levels whose first entry >= 0 is the same everywhere; sign -1 undoes it."""
        by = np.repeat(self.shifts(codebooks), self.sizes)
        return np.where(levels < 2, levels, (levels.astype(int) - 2 + sign * by) % 254 + 2).astype(np.uint8)

    def read_multiples(self) -> Iterator[Array]:
        step, width, numbers, before = self.meta["s"], self.meta["w"], list[Array](), self.known("multiples")
        bias, old = 2 ** (8 * width - 1), self.parents[0].more if before is not None else {"step": None}
        before = (before + bias).astype(f"<u{width}") if old["step"] == step and old["width"] <= width else None
        for piece, n, _, part in self.chunks(before, step=2**24 // width):
            numbers.append(piece.exact(f"uint{8 * width}", n, part).astype(np.int64) - bias)
            yield rounded(numbers[-1] * np.float64(step), self.dtype)
        self.leaves[0].more = {"multiples": np.concatenate(numbers), "step": step, "width": width}

    def read_log_buckets(self) -> Iterator[Array]:
        for piece, n, _, _ in self.chunks(None):
            lowest, _, flags = piece.varint(), piece.varint(), piece.byte()
            octave, values = piece.block().symbols(n), np.zeros(n)
            there = np.flatnonzero(octave)
            negative = piece.block().symbols(there.size) if flags & 1 else 0
            numbers = (octave[there] - 1 + lowest << self.meta["b"]) + 1
            for shift in range(0, self.meta["b"], 8):
                numbers += piece.block().symbols(there.size) << shift
            values[there] = bucket_values(numbers, self.meta["b"], self.dtype) * np.where(negative, -1, 1)
            items = rounded(values, self.dtype)
            at = piece.array("<u4", piece.varint() if flags & 2 else 0)
            items[at] = piece.array(items.dtype, at.size)
            yield items

    def with_escapes(self, estimates: Array, factors: Array, escape: int, before: Any = None) -> Iterator[Array]:
        """Yield estimates times the factors of their symbols, or values of their own."""
        symbols = np.empty(estimates.size, np.uint8)
        for piece, n, part, old in self.chunks(before, 1):
            symbols[part] = own = piece.block().symbols(n, old, 256)
            out = estimates[part] * factors[own]
            out[own == escape] = piece.array("<f4", piece.varint())
            yield rounded(out, self.dtype)
        self.keep(f"symbols of {self.stream}", symbols)

    def read_rank_one(self) -> Iterator[Array]:
        head, before, count = Source(self.pieces[0]), self.known("symbols of rank-one"), len(self.leaves)
        lengths = [n for side in (0, 1) for n in [(leaf.shape[0], prod(leaf.shape[1:]))[side] for leaf in self.leaves]]
        j = head.block().planes(2, sum(lengths)).astype(np.int64)
        j = j if before is None else np.concatenate([self.known("rows"), self.known("columns")]) + unzigzag(j)
        sides, estimates = np.split(j, np.cumsum(lengths)[:-1]), []
        for leaf, *pair in zip(self.leaves, sides[:count], sides[count:], strict=True):
            leaf.more["rows"], leaf.more["columns"] = pair
            row, column = (bucket_values(numbers, 3, "float32").astype(np.float32) for numbers in pair)
            estimates.append(np.multiply.outer(row, column).reshape(-1))
        yield from self.with_escapes(np.concatenate(estimates), head.table(), 1, before)

    def read_grid(self) -> Iterator[Array]:
        v, head = np.concatenate([floats(other.items, self.dtype) for other in self.others]), Source(self.pieces[0])
        root = np.sqrt(np.where((v >= 0) & np.isfinite(v), v, np.float32(0)))
        yield from self.with_escapes(root, head.table() * np.float32(head.varint() / 256), 0)

    def read_own_grid(self) -> Iterator[Array]:
        head, shape = Source(self.pieces[0]), self.leaves[0].shape
        factors = head.table() * np.float32(head.varint() / 256)
        j = head.block().planes(2, shape[0] + prod(shape[1:])).astype(np.int64)
        row, column = np.split(bucket_values(j, 3, "float32").astype(np.float32), [shape[0]])
        yield from self.with_escapes(np.sqrt(np.multiply.outer(row, column).reshape(-1)), factors, 0)

    def read_exponent(self) -> Iterator[Array]:
        head, coding, width, constant = Source(self.pieces[0]), -1, 0, 0
        if head.byte() == 1:
            tables = [head.lengths(head.varint()) for _ in range(head.varint())]
        else:
            tables, addends = self.parents[0].more.get("tables", []), head.array(kind(self.dtype), head.varint())
            coding, lengths = head.byte(), np.zeros(addends.size + 1, int)
            constant, width = (head.varint(), 0) if coding == 0 else (0, addends.size.bit_length())
            ranked = head.varints(head.varint() if coding in (2, 3) else 0)
            if coding == 2:
                tables = [*(t for t in tables if len(t) != len(ranked)), head.lengths(len(ranked))][-8:]
            lengths[ranked] = next((t for t in tables if len(t) == len(ranked)), [])
        for piece, n, _, before in self.chunks(self.known("exact"), 1):
            if coding == -1 and piece.byte() == 0:
                yield piece.exact(self.dtype, n, before)
                continue
            if coding == -1:
                addends, high = piece.array(kind(self.dtype), piece.varint()), piece.block().symbols(n)
                levels = 256 * high + piece.block().symbols(n, high, max(2, int(high.max()) + 1))
            elif coding in (2, 3):
                levels = piece.huffman(lengths.tolist(), n)
            else:
                levels = piece.symbols(n) if coding == 4 else constant + piece.packed(np.full(n, width)).astype(int)
            steps = np.concatenate([[0.0], floats(addends, self.dtype).astype(float), [0.0]])[levels]
            items = np.where(levels == 0, before, rounded(floats(before, self.dtype) + steps, self.dtype))
            kept = levels == addends.size + 1
            items[kept] = piece.array(kind(self.dtype), int(kept.sum()))
            yield items
        self.leaves[0].more = {"tables": tables}

    def read_changed(self) -> Iterator[Array]:
        for piece, n, _, before in self.chunks(self.known("exact")):
            if piece.byte() == 0:
                yield piece.exact(self.dtype, n, None)
                continue
            mask = np.unpackbits(piece.block().symbols(-(-n // 8)).astype(np.uint8), count=n, bitorder="little") == 1
            items = before.copy()
            items[mask] = piece.exact(self.dtype, int(mask.sum()), None) if mask.any() else []
            yield items

    def read_clusters(self) -> Iterator[Array]:
        entries = [10**e * (4 * 2**e + 9 * k) / (40 * 2**e * 10**6) for e in range(7) for k in range(1, 4 * 2**e, 2)]
        values = np.array(sorted([0.0, 1.0, *entries])).astype(np.float32)
        for piece, n, _, _ in self.chunks(None):
            m = piece.varint()
            minimum, scale, labels = piece.array("<f4", m), piece.array("<f4", m), piece.block().symbols(n)
            codes = piece.block().symbols(n, labels, max(2, m))
            yield rounded(values[codes] * scale[labels] + minimum[labels], self.dtype)

    def read_rows(self) -> Iterator[Array]:
        """Yield rows; each is kept as its style, numbers, codes and items."""
        (leaf,), columns = self.leaves, prod(self.leaves[0].shape[1:])
        before = self.parents[0].more.get("matrix") if self.parents else None
        rows: list[Any] = list(before or [None] * leaf.shape[0])
        for piece, n, part, _ in self.chunks(None, step=max(1, 2**22 // columns) * columns):
            start, marks = part.start // columns, piece.block().symbols(n // columns)
            for k, style in enumerate(self.meta["s"]):
                at = start + np.flatnonzero(marks == k + 1)
                old = [rows[i] for i in at]
                if at.size and style[0] == "raw":
                    known = np.concatenate([row[3] for row in old]) if before else None
                    numbers = codes = items = piece.either(self.dtype, at.size * columns, known).reshape(-1, columns)
                elif at.size:
                    numbers, codes, values = quantized_rows(piece, style, columns, old)
                    items = rounded(values, self.dtype)
                for i, j in enumerate(at):
                    rows[j] = style, numbers[i], codes[i], items[i]
            yield from (row[3] for row in rows[start : start + marks.size])
        leaf.more = {"matrix": rows}


def quantized_rows(piece: Source, style: list[Any], columns: int, old: list[Any]) -> tuple[Array, Array, Array]:
    """Return numbers, codes and values of each row, coded by the old rows of equal style."""
    (method, bits, *_), n, parents = style, len(old), (None, None)
    width = {"symmetric": 1, "kmeans": 2**bits}.get(method, 2)
    other = style, np.zeros(width, "<f4"), np.full(columns, 2**bits)
    same = [row if row and row[0] == style else other for row in old]
    if any(row is not other for row in same):
        codes = np.concatenate([row[2] for row in same]) if bits <= 4 else None
        parents = np.stack([row[1] for row in same], axis=1).reshape(-1), codes
    numbers = piece.either("float32", width * n, parents[0]).view("<f4").reshape(width, n).T
    codes = piece.block().symbols(n * columns, parents[1], 2**bits + 1).reshape(n, columns)
    if method == "kmeans":
        return numbers, codes, np.take_along_axis(numbers, codes, axis=1)
    scale, minimum = numbers[:, :1], numbers[:, -1:]
    scale = (-minimum - minimum) / np.float32(2**bits - 1) if method == "symmetric" else scale
    return numbers, codes, codes.astype(np.float32) * scale + minimum


def scalar(node: Any) -> Any:
    ((tag, body),) = node.items() if isinstance(node, dict) else [("", node)]
    return SCALARS[tag](body) if tag else node


def tree(nodes: Iterator[Any], leaves: list[Leaf], keys: dict[int, str], path: tuple[Any, ...] = ()) -> Any:
    """Return the value of the next node and its children; `keys` receives array keys."""
    node = next(nodes)
    ((tag, body),) = node.items() if isinstance(node, dict) else [("", None)]
    if tag == "a":
        keys.setdefault(body, json.dumps(path))
        return leaves[body]
    if tag not in CONTAINERS:
        return scalar(node)
    names = range(body) if tag in "lt" else body
    children = [tree(nodes, leaves, keys, (*path, name)) for name in names]
    return CONTAINERS[tag](children if tag in "lt" else dict(zip(map(scalar, names), children, strict=True)))


def header_of(blob: bytes) -> tuple[dict[str, Any], Source]:
    """Return the header, with a record for each array, and the body."""
    magic, version, flags, stored, plain, count, reserved = struct.unpack("<8sIIQQII", blob[:40])
    if (magic, version) != (b"\x89SPT\r\n\x1a\n", 2):
        raise ValueError(f"not a file of version 2: magic {magic!r}, version {version}")
    at = start = 56 + stored + 24 * count
    text = zstandard.decompress(blob[56 : 56 + stored])
    checksum = xxhash.xxh3_128(blob[:40] + blob[56:at]).digest()
    assert (flags, reserved, len(text), checksum) == (0, 0, plain, blob[40:56])
    for length, digest in struct.iter_unpack("<Q16s", blob[56 + stored : start]):
        assert xxhash.xxh3_128(blob[at : at + length]).digest() == digest
        at += length
    others = (header := json.loads(text)).keys() - {"parent", "as", "raw", "tree", "why", "arrays", "groups"}
    assert (at, others) == (len(blob), set())
    header |= {"arrays": rows(header["arrays"], "ldsovqenyc"), "groups": rows(header["groups"], "afmbp")}
    return header, Source(blob[start:])


def rows(columns: dict[str, Any], names: str) -> list[dict[str, Any]]:
    """Return the records that are stored as columns."""
    records: list[dict[str, Any]] = [{} for _ in range(columns.pop("count"))]
    assert columns.keys() <= set(names)
    for name, column in columns.items():
        column = [column["v"][i] for i in column.get("i", [0] * len(records))] if isinstance(column, dict) else column
        for record, value in zip(records, column, strict=True):
            record |= {} if value is None else {name: value}
    return records


def read(blob: bytes, parent: Any = (None, None, {})) -> tuple[Any, str, dict[str, Leaf]]:
    """Return the state (arrays are `Leaf`s), its identity, and the arrays by key."""
    header, body = header_of(blob)
    records, keys, nodes, decoders = header["arrays"], dict[int, str](), iter(header["tree"]), []
    leaves = [Leaf(library=x.get("l", "torch"), order=x.get("o"), dtype=x["d"], shape=x["s"], more={}) for x in records]
    state = tree(nodes, leaves, keys)
    members = [-1]
    for record in header["groups"]:
        members = (members[0] + np.cumsum(record.get("a", [1]))).tolist()
        others = [leaves[records[i]["v"]] for i in members if "v" in records[i]]
        olds = [parent[2][keys[i]] for i in members] if record.get("p") else []
        decoders.append(Unit(record, body, [leaves[i] for i in members], olds, others))
    assert (header["parent"], next(nodes, None), body.read()) == (parent[1], None, b"")
    with np.errstate(all="ignore"):
        for unit in sorted(decoders, key=lambda unit: len(unit.others)):  # arrays that `v` names come first
            made = getattr(unit, "read_" + unit.stream.replace("-", "_"))()
            items = np.concatenate([*made, np.empty(0, kind(unit.dtype))])
            for leaf, data in zip(unit.leaves, unit.cut(items), strict=True):
                leaf.items = data
                leaf.more |= {"exact": data} if unit.stream in ("bytes", "changed", "exponent") else {}
    return state, header.get("as") or blake3(blob).hexdigest(), {keys[i]: leaf for i, leaf in enumerate(leaves)}
