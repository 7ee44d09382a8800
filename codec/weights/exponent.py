"""Differences to the restored parent with one value per sign and exponent (LC-Checkpoint).

    restored_t = restored_(t-1) + Q(x_t - restored_(t-1)),   restored_0 = x_0

What one delta loses is part of the next difference, so errors do not add up along a chain. Q gives every element the
mean of the smallest and the largest value of its bucket (sign and exponent); priority promotion keeps the buckets of
largest exponent and makes the rest zero. The levels are Huffman coded by a table that the reference carries from one
delta to the next.

Piece 0 says what the levels mean; the other pieces are chunks. docs/format.md has the bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, choice, integer, number, or_none
from ...kernels.backend.arrays import imported, on_gpu, placed_with, to_host, to_numpy
from ...kernels.backend.floats import FORMATS
from ...kernels.error_sums import Distortion
from ...kernels.exponent import (
    MAX_BITS,
    Buckets,
    Promotion,
    exponent_buckets,
    exponent_differences,
    exponent_quantize,
    merge_buckets,
    promote,
)
from ...kernels.huffman import huffman_decode, huffman_encode, huffman_lengths, pack_lengths, unpack_lengths
from ...kernels.packing import pack_bits, unpack_bits
from .. import entropy
from ..base import CHUNK, Leaf, Parents, Reference, Stored, Unplanned
from ..errors import BadArgumentError, CorruptDataError
from ..format.fields import Piece, Reader, Writer
from ..groups import BytesReference, Coded
from ..lossless.addends import add, added, blocks, decode_addends, encode_addends
from ..lossless.exact import Exact, decode_chunk, decode_parts, encode_chunk, exactly, parent_bytes
from ..parallel import map_chunks
from ..state.casting import float_values, largest, rounded, scaled_distortion, unit
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, floats

LEVELS, RESTATED = range(2)
CONSTANT, PACKED, HUFFMAN, CACHED, SMALLEST = range(5)
EXACTLY, BY_ADDENDS = range(2)
TABLES = 8
"""Code tables kept, one for each number of buckets."""
_FITS = 1.01
"""A cached table fits where it costs at most this much of what a new one would, its own bytes counted."""


@dataclass(frozen=True, slots=True)
class ExponentReference(BytesReference):
    """The restored bytes, and the code tables in use.

    Args:
        data: uint8, bytes of the restored array.
        tables: code lengths by frequency rank, one byte a bucket; one table a number of buckets, the oldest first.
    """

    tables: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class ExponentDelta(Unplanned):
    """Store float arrays as quantized differences to the restored parent; bases are exact.

    An array is stored exactly, and its summary row says why, where a difference is not finite. In a second moment an
    element that would become negative keeps its old value.

    Args:
        bits: x of the priority promotion, which keeps 2**x - 1 buckets, 1 to 8; None: no promotion; default 2.
        coder: "smallest" (default), "huffman" with cached tables (as published), or "packed" (fixed-width codes).
        max_error: relative L2 error an array may have, in (0, 1); one that misses it is stored exactly. None:
            `Config.max_rel_error`.

    Raises:
        BadArgumentError: a value out of range; the message names it and its limits.

    Example:
        >>> ExponentDelta(bits=3, coder="huffman")
        ExponentDelta(bits=3, coder='huffman', max_error=None)

    Source: LC-Checkpoint, section 3.
    """

    bits: int | None = 2
    coder: str = "smallest"
    max_error: float | None = None
    id: ClassVar[str] = "exponent"

    def __post_init__(self) -> None:
        check_field(self, "bits", or_none, integer, 1, 8)
        check_field(self, "coder", choice, ("smallest", "huffman", "packed"))
        check_field(self, "max_error", or_none, number, 0, 1, open_low=True, open_high=True)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; `error` is the relative L2 error of the restored array."""
        spec = leaf.spec
        before = parent_bytes(parent, spec)
        if before is None or spec.size == 0:
            return Exact().encode(leaf, parent)
        x, starts = leaf.flat, range(0, spec.size, CHUNK)

        def counted(start: int) -> tuple[Array, Buckets, float]:
            part = before[_bytes_of(start, spec)]
            old = placed_with(part, x) if on_gpu(x) else part
            most = largest(x[start : start + CHUNK]) if spec.dtype == "float64" else 0.0
            return old, exponent_buckets(exponent_differences(_values(x, start, spec), floats(old, spec))), most

        first = map_chunks(counted, starts)
        buckets = merge_buckets(*(b for _, b, _ in first))
        broken = int(buckets.counts[:, -1].sum())
        if broken:
            return exactly(leaf, parent, f"{broken} differences are not finite")
        promotion = promote(buckets, MAX_BITS if self.bits is None else self.bits)
        if promotion.codebook.size <= 1 << 8 and promotion.table.dtype != np.uint8:
            promotion = dataclasses.replace(promotion, table=promotion.table.astype(np.uint8))
        levels = np.empty(spec.size, promotion.table.dtype)
        restored, addends = np.empty(spec.nbytes, np.uint8), _addends(promotion, spec)
        scale = unit(max(most for _, _, most in first))

        def quantized(start: int) -> Distortion:
            part, values, old = _bytes_of(start, spec), _values(x, start, spec), first[start // CHUNK][0]
            there = exponent_quantize(exponent_differences(values, floats(old, spec)), promotion)
            found = added(old, there, addends, spec)
            if leaf.kind.role == "second moment":
                _clear(there, (floats(found, spec) < 0) & (values >= 0))
                found = added(old, there, addends, spec)
            own = levels[start : start + CHUNK]
            own[:] = to_host(there)  # a byte an element, and the host adds again for the next delta
            restored[part] = added(before[part], own, addends, spec) if on_gpu(x) else found
            return _distortion(values, floats(found, spec), spec, scale)

        with np.errstate(all="ignore"):
            met = sum(map_chunks(quantized, starts), Distortion(0.0, 0.0, 0.0))
        if not math.isfinite(met.squared_error):
            return exactly(leaf, parent, "the restored values would not be finite")
        if self.max_error is not None and met.relative_l2 > self.max_error:
            return exactly(leaf, parent, f"the differences miss the error target {self.max_error:g}")
        tables = parent.tables if isinstance(parent, ExponentReference) else ()
        pieces, tables, how = _encode_levels(levels, addends, tables, self.coder)
        reference = ExponentReference(restored, tables)
        note = _shares(buckets, promotion, spec, self, sum(map(len, pieces))) + how
        return Stored(
            "exponent",
            {},
            pieces,
            reference,
            met.relative_l2,
            "relative L2",
            note,
            decoded=lambda: reference.values(spec),
        )


def _bytes_of(start: int, spec: LeafSpec) -> slice:
    """Return the bytes of the chunk that starts at this element."""
    return slice(start * spec.itemsize, (start + CHUNK) * spec.itemsize)


def _of_differences(spec: LeafSpec) -> LeafSpec:
    """Return the dtype of differences; float32 for float16, whose differences are subnormal."""
    return dataclasses.replace(spec, dtype="float32") if spec.dtype == "float16" else spec


def _values(x: Array, start: int, spec: LeafSpec) -> Array:
    """Return the values of a chunk, as `floats` does."""
    part = x[start : start + CHUNK]
    return part if on_gpu(x) else floats(as_bytes(part), spec)


def _clear(levels: Array, where: Array) -> None:
    """Set some levels to 0."""
    if on_gpu(levels):  # torch fills signed integers only
        levels.view(getattr(imported("torch"), f"int{8 * levels.element_size()}")).masked_fill_(where, 0)
    else:
        to_numpy(levels)[to_numpy(where)] = 0


def _addends(promotion: Promotion, spec: LeafSpec) -> NpArray:
    """Return the patterns of the addends of levels from 1 on, in the array's dtype."""
    patterns = promotion.codebook[1:]
    wide = _of_differences(spec)
    return patterns if wide is spec else rounded(patterns.view(wide.dtype), spec).view(f"<u{spec.itemsize}")


def _distortion(x: Array, restored: Array, spec: LeafSpec, scale: float) -> Distortion:
    """Return the distortion of `restored`, with both arrays scaled by a power of two."""
    if on_gpu(x):
        return scaled_distortion(x, restored, scale)
    met, data, other = Distortion(0.0, 0.0, 0.0), as_bytes(x), as_bytes(restored)
    for part in blocks(data.size // spec.itemsize, spec):
        met += scaled_distortion(float_values(data[part], spec), float_values(other[part], spec), scale)
    return met


# ------------------------------------------------------------------------------------------------ levels to bytes


def _encode_levels(
    levels: NpArray, addends: NpArray, tables: tuple[bytes, ...], coder: str
) -> tuple[list[bytes], tuple[bytes, ...], str]:
    """Encode levels; return pieces, the new code tables, and the source of the one used."""
    out = Writer(LEVELS)
    out.varint(addends.size)
    out.raw(addends)
    wide = levels.dtype != np.uint8
    counts = np.bincount(levels) if wide else entropy.counts_of(levels)
    # By falling frequency, the lower level first where two are as frequent.
    ranked = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    starts = range(0, levels.size, CHUNK)
    if ranked.size == 1:
        out.byte(CONSTANT)
        out.varint(int(ranked[0]))
        return [out.done(), *(b"" for _ in starts)], tables, ""
    how = ""
    if coder == "smallest" and addends.size < 1 << 8:
        out.byte(SMALLEST)
        work: Callable[[NpArray], bytes] = entropy.encode
    elif coder == "packed":
        out.byte(PACKED)
        work = functools.partial(_packed, width=addends.size.bit_length())
    else:
        lengths, known = _code_table(counts[ranked], tables)
        out.byte(CACHED if known else HUFFMAN)
        out.varint(ranked.size, *ranked.tolist())
        if not known:
            out.block(pack_lengths(lengths))
            tables = with_table(tables, lengths.tobytes())
        how = ", code table reused" if known else ", new code table"
        by_level = np.zeros(addends.size + 1, np.uint8)
        by_level[ranked] = lengths
        work = functools.partial(_huffman, lengths=by_level)
    return [out.done(), *map_chunks(lambda start: work(levels[start : start + CHUNK]), starts)], tables, how


def _packed(levels: NpArray, width: int) -> bytes:
    return bytes(pack_bits(levels, width))


def _huffman(levels: NpArray, lengths: NpArray) -> bytes:
    return bytes(huffman_encode(levels, lengths))


def _code_table(counts: NpArray, tables: tuple[bytes, ...]) -> tuple[NpArray, bool]:
    """Return code lengths by rank, and whether they come from a cached table."""
    fresh = np.sort(huffman_lengths(counts.astype(np.int64)))
    cost = float((counts * fresh).sum()) / 8 + len(pack_lengths(fresh))
    for table in tables:
        cached = np.frombuffer(table, np.uint8)
        if cached.size == counts.size and float((counts * cached).sum()) / 8 <= _FITS * cost:
            return cached, True
    return fresh, False


def with_table(tables: tuple[bytes, ...], table: bytes) -> tuple[bytes, ...]:
    """Add a code table to the cache, in place of one of the same size or of the oldest."""
    return (*(t for t in tables if len(t) != len(table)), table)[-TABLES:]


def _shares(buckets: Buckets, promotion: Promotion, spec: LeafSpec, codec: ExponentDelta, stored: int) -> str:
    """Return relative sizes as in the paper's figure 4: (n log2 k + k b) / (n b) for E and E+P."""
    found = int(np.count_nonzero(buckets.counts))
    kept = promotion.codebook.size - 1

    def share(nbytes: float) -> str:
        return f"{100 * nbytes / spec.nbytes:.3g} %"

    def indexed(k: int) -> str:
        return share(math.ceil(spec.size * k.bit_length() / 8) + k * spec.itemsize)

    steps = [("E", indexed(found))]
    if codec.bits is not None:
        steps.append(("E+P", indexed(kept)))
    if codec.coder != "packed":
        steps.append((f"{steps[-1][0]}+{'H' if codec.coder == 'huffman' else 'C'}", share(stored)))
    return f"{', '.join(f'{name} {size}' for name, size in steps)}; {kept} of {found} buckets"


# ------------------------------------------------------------------------------------------------ bytes to levels


@dataclass(frozen=True, slots=True)
class _Meaning:
    """The contents of piece 0: how chunks of levels are coded, and the addend of each level."""

    coding: int
    addends: NpArray
    value: int
    lengths: NpArray
    tables: tuple[bytes, ...]

    def levels(self, piece: memoryview, n: int) -> NpArray:
        """Return the levels of one chunk."""
        dtype = "uint8" if self.addends.size < 1 << 8 else "uint16"
        if self.coding == CONSTANT:
            if len(piece):
                raise CorruptDataError(f"exponent: {len(piece)} bytes for a constant")
            return np.full(n, self.value, dtype)
        if self.coding == PACKED:
            packed: NpArray = unpack_bits(bytes(piece), self.addends.size.bit_length(), n, dtype)
            return packed
        if self.coding == SMALLEST:
            return entropy.decode(piece, n)
        coded: NpArray = huffman_decode(np.frombuffer(piece, np.uint8), self.lengths, n, dtype)
        return coded


def _read_meaning(data: Reader, spec: LeafSpec, tables: tuple[bytes, ...]) -> _Meaning:
    width = f"<u{spec.itemsize}"
    size = data.varint()
    if size >= 1 << MAX_BITS:
        raise CorruptDataError(f"exponent: {size} buckets")
    addends = data.array(width, size)
    coding = data.byte()
    value, lengths = 0, np.zeros(size + 1, np.uint8)
    if coding == CONSTANT:
        value = data.varint()
        if value > size:
            raise CorruptDataError(f"exponent: level {value} of {size}")
    elif coding in (HUFFMAN, CACHED):
        count = data.varint()
        if not 2 <= count <= size + 1:
            raise CorruptDataError(f"exponent: {count} of {size + 1} levels")
        ranked = np.array([min(data.varint(), size + 1) for _ in range(count)])
        if np.unique(ranked).size != count or int(ranked.max()) > size:
            raise CorruptDataError("exponent: a level is out of range or has two ranks")
        if coding == HUFFMAN:
            by_rank = unpack_lengths(np.frombuffer(data.block(), np.uint8), count)
            if not by_rank.all():
                raise CorruptDataError("exponent: a level without a code")
            tables = with_table(tables, by_rank.tobytes())
        else:
            known = [t for t in tables if len(t) == count]
            if not known:
                raise CorruptDataError(f"exponent: the parent has no code table for {count} levels")
            by_rank = np.frombuffer(known[0], np.uint8)
        lengths[ranked] = by_rank
    elif coding not in (PACKED, SMALLEST) or (coding == SMALLEST and size >= 1 << 8):
        raise CorruptDataError(f"exponent: coding {coding} of {size} levels")
    return _Meaning(coding, addends, value, lengths, tables)


def decode_exponent(coded: Coded) -> list[ExponentReference]:
    """Decode the stream format "exponent"."""
    spec, parent = coded.spec, coded.parent
    if spec.dtype not in FORMATS or not coded.pieces:
        raise CorruptDataError(f"exponent: {spec.dtype} has no buckets, or the first piece is missing")
    before = parent_bytes(parent, spec)
    inherited = parent.tables if isinstance(parent, ExponentReference) else ()
    head = Reader(coded.pieces[0], "exponent")
    form = head.byte()
    if form == LEVELS:
        if before is None:
            raise CorruptDataError("exponent: a difference without a parent")
        meaning = _read_meaning(head, spec, inherited)
        tables = meaning.tables
    elif form == RESTATED:
        tables = _read_tables(head)
    else:
        raise CorruptDataError(f"exponent: form {form} is unknown")
    head.end()

    def decode(piece: memoryview, own: Array, spec: LeafSpec, old: NpArray | None) -> None:
        if form == RESTATED:
            _decode_rebased(piece, own, spec, old)
        elif old is not None:
            levels = meaning.levels(piece, own.shape[0] // spec.itemsize)
            add(old, levels, meaning.addends, spec, own)

    joined = decode_parts("exponent", coded, before, CHUNK * spec.itemsize, decode, head=True)
    return [ExponentReference(joined.data, tables)]


# --------------------------------------------------------------------------------------------- encoded again


def rebase_exponent(
    specs: Sequence[LeafSpec], references: Sequence[Reference], parents: Parents
) -> tuple[dict[str, Any], list[Piece]]:
    """Encode the same restored array and code tables against another parent."""
    (spec,), (reference,), (parent,) = specs, references, parents
    if not isinstance(reference, BytesReference):
        raise BadArgumentError("exponent: the reference of another stream cannot be rebased as exponent buckets")
    tables = reference.tables if isinstance(reference, ExponentReference) else ()
    before = parent_bytes(parent, spec)
    head = Writer(RESTATED)
    head.varint(len(tables))
    for table in tables:
        head.varint(len(table))
        head.block(pack_lengths(np.frombuffer(table, np.uint8)))

    def one(start: int) -> Writer:
        part = _bytes_of(start, spec)
        own = reference.data[part]
        old = None if before is None else before[part]
        exact = encode_chunk(own, spec, old, start)
        added = None if old is None else encode_addends(own, old, spec)
        if added is None or len(exact) <= len(added):
            return Writer(EXACTLY, exact)
        return Writer(BY_ADDENDS, added)

    return {}, [head.done(), *map_chunks(one, range(0, spec.size, CHUNK))]


def _read_tables(data: Reader) -> tuple[bytes, ...]:
    tables: tuple[bytes, ...] = ()
    count = data.varint()
    if count > TABLES:
        raise CorruptDataError(f"exponent: {count} code tables")
    for _ in range(count):
        size = data.varint()
        if not 2 <= size <= 1 << MAX_BITS:
            raise CorruptDataError(f"exponent: a code table of {size} levels")
        table = unpack_lengths(np.frombuffer(data.block(), np.uint8), size)
        if not table.all() or any(len(t) == size for t in tables):
            raise CorruptDataError("exponent: a level without a code, or two tables of a size")
        tables = (*tables, table.tobytes())
    return tables


def _decode_rebased(piece: memoryview, out: Array, spec: LeafSpec, before: NpArray | None) -> None:
    if len(piece) == 0 or piece[0] not in (EXACTLY, BY_ADDENDS):
        raise CorruptDataError("exponent: a chunk is neither exact nor made by addends")
    if piece[0] == EXACTLY:
        decode_chunk(piece[1:], out, spec, before)
    elif before is None:
        raise CorruptDataError("exponent: addends without a parent")
    else:
        decode_addends(piece[1:], out, spec, before)
