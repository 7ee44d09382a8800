"""Second moments as rank one times a power of two.

v as row mean x column mean / mean, as Adafactor keeps it, times a power of two to a fraction of an octave. v changes
slowly, so most elements of a delta keep their correction, and even a fine one costs little there. The correction bounds
the error of every element, and keeps the mean of 1 / sqrt(v), so that updates are neither longer nor shorter.

Pieces: (0) block: row factors and column factors as log buckets of 3 bits or differences to the parent's; the
table of each symbol's factor. (1 + i) chunk i: block: symbol stream in the context of the parent's symbols; varint
number of escapes, their float32 patterns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, number
from ...kernels.backend.arrays import imported, on_gpu, placed_with
from ...kernels.backend.floats import FORMATS
from ...kernels.error_sums import Distortion, distortion, distortion_many
from ...kernels.histogram import bucket_index, bucket_value
from ...kernels.scales import ESCAPE as NO_RESIDUAL
from ...kernels.scales import (
    MOST_OCTAVES,
    eighths_of,
    factor_sums,
    factors_many,
    residual_factors,
    residual_symbols,
    residual_symbols_many,
    residual_values,
    residual_values_many,
)
from .. import entropy
from ..base import CHUNK, PART, EncodedGroup, EncodedGroups, Leaf, Parents, Reference, Stored, Unplanned
from ..entropy.blocks import is_block
from ..errors import BadArgumentError, CorruptDataError
from ..format.fields import Piece, Reader, Writer, chunks_of
from ..groups import (
    Coded,
    FilledReference,
    ends_of,
    fill_each,
    joined_leaf,
    joined_spec,
    matrix_of,
    own_parts,
    parts,
    spread,
    values_of_each,
)
from ..parallel import map_chunks
from ..state.casting import as_float32, to_bfloat16
from ..state.leaves import Array, LeafSpec, NpArray, on_host
from .logbuckets import LogBuckets, check_limits, given
from .symbolvalues import (
    as_stored,
    escapes_of,
    pack_chunk,
    pack_table,
    put,
    put_decoded,
    read_chunk,
    read_table,
    room_like,
    symbols_there,
    with_escapes,
)

FACTOR_BITS = 3
"""Bits of the log buckets of row and column factors."""
_NARROWER = (3, 2, 1, 0.5, 0.25, 0.125)
"""Cells to try, after a codec's own, where an error target is missed."""
_F32 = FORMATS["float32"]


@dataclass(frozen=True, slots=True)
class SecondMoment(Unplanned):
    """Store a second moment as rank one times powers of two; 1-D arrays as log buckets.

    Args:
        octaves: width of a correction's cell in powers of two, a multiple of 1/8 from 1/8 to 16; a larger one costs
            less, errs more. Default 0.5.
        alpha: relative error where rank one does not apply, see `LogBuckets`; default 0.25.
        max_error: relative L2 error the array may have, in (0, 1): rank one with the widest cells that keep to it, none
            wider than `octaves`, else log buckets, else exact. None (default): `Config.max_rel_error`.

    Raises:
        BadArgumentError: a value out of range.

    Source: Shazeer and Stern 2018 (Adafactor), section 3, for the estimate.
    """

    octaves: float = 0.5
    alpha: float = 0.25
    max_error: float | None = None
    id: ClassVar[str] = "second moment"

    def __post_init__(self) -> None:
        check_field(self, "octaves", number, 1 / 8, MOST_OCTAVES)
        eighths_of(self.octaves)
        check_limits(self)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; `error` is the largest relative error, or relative L2 with `max_error`."""
        target = math.inf if self.max_error is None else self.max_error
        for octaves in (self.octaves, *(o for o in _NARROWER if o < self.octaves)):
            if matrix_shape(leaf.spec) is None:
                break
            if _least_error(octaves) > target:
                continue
            group, (met,) = self._rank_one([leaf], [parent], octaves)
            if not math.isfinite(met.largest_relative):  # a factor took a value beyond the dtype's range
                break
            stored = group.only
            if self.max_error is None:
                return stored
            if met.relative_l2 <= target:
                return dataclasses.replace(stored, error=met.relative_l2, measure="relative L2")
        return LogBuckets(self.alpha, self.max_error).encode(leaf, parent)

    def groups(self, leaf: Leaf) -> Hashable | None:
        """Return whether an array is a matrix; None: it is coded alone."""
        able = self.max_error is None and leaf.spec.dtype in ("float32", "bfloat16")
        return matrix_shape(leaf.spec) is not None if able else None

    def encode_group(self, leaves: Sequence[Leaf], parents: Parents, plans: Sequence[None]) -> EncodedGroups:
        """Encode second moments of one dtype together; all or none are matrices."""
        if matrix_shape(leaves[0].spec) is None:
            return LogBuckets(self.alpha).encode_group(leaves, parents, plans)
        group, met = self._rank_one(leaves, parents, self.octaves)
        if any(not math.isfinite(one.largest_relative) for one in met):
            return EncodedGroups(alone=dict.fromkeys(range(len(leaves))))
        return EncodedGroups([group])

    def _rank_one(
        self, leaves: Sequence[Leaf], parents: Parents, octaves: float
    ) -> tuple[EncodedGroup, list[Distortion]]:
        """Encode as rank one with cells of `octaves` octaves; also return each distortion."""
        specs, leaf = [leaf.spec for leaf in leaves], joined_leaf(leaves)
        before = joined_rank_one(parents, specs)
        indices = [bucket_index(side, FACTOR_BITS) for side in _factors(leaf, specs)]
        scales = _Scales(factor_values(indices[0]), factor_values(indices[1]), shapes_of(specs))

        def one(start: int) -> tuple[Array, NpArray, NpArray, Array]:
            x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
            old = None if before is None else placed_with(before.symbols[start : start + CHUNK], x)
            symbols, sums, counts = scales.symbols(x, start, octaves, old)
            return symbols, sums, counts, escapes_of(x, symbols, NO_RESIDUAL, counts)

        starts = range(0, leaf.spec.size, CHUNK)
        chunks = map_chunks(one, starts)
        sums, counts = (sum((p[i] for p in chunks), np.zeros(256)) for i in (1, 2))
        factor = residual_factors(sums, counts, octaves)
        beyond = (counts > 0) & (np.arange(256) > NO_RESIDUAL) & ~((factor > 2.0**-125) & (factor < 2.0**125))
        if beyond.any():  # no normal bfloat16 holds these factors
            chunks = [_without(part, beyond, leaf, start) for part, start in zip(chunks, starts, strict=True)]
        table = to_bfloat16(np.where(beyond, np.float32(0), factor))
        # Its first moment needs the decoded values, which are available here, where their error is measured.
        data = room_like(leaf.flat, leaf.spec)

        def restore(number: int) -> Distortion | None:
            start, symbols, escaped = starts[number], chunks[number][0], chunks[number][3]
            restored = as_stored(scales.values(symbols, start, table, escaped), leaf.spec)
            put(data, start, restored)
            return distortion(leaf.flat[start : start + CHUNK], restored) if len(specs) == 1 else None

        of_chunks = map_chunks(restore, range(len(chunks)))
        if len(specs) == 1:
            met = [sum(filter(None, of_chunks), Distortion(0.0, 0.0, 0.0))]
        else:
            met = distortion_many(leaf.flat, data, ends_of(specs))
        symbols, escaped = (np.concatenate([on_host(p[i]) for p in chunks]) for i in (0, 3))
        joined = RankOneReference(symbols, indices[0], indices[1], table, escaped)
        there = [part[0] for part in chunks]
        pieces = rank_one_pieces(specs, joined, before, [part[2] for part in chunks], there)
        members = zip(split_rank_one(joined, specs), met, parts(data, specs), strict=True)
        stored = [
            Stored("rank-one", {}, (), reference, own.largest_relative, "relative", decoded=partial(given, values))
            for reference, own, values in members
        ]
        return EncodedGroup(range(len(leaves)), "rank-one", {}, pieces, before is not None, stored), met


@dataclass(frozen=True, slots=True)
class _Scales:
    """Row and column factors of joined matrices.

    Args:
        rows: float32 [sum of rows].
        columns: float32 [sum of columns].
        shapes: int64 [m, 2], rows and columns of each.
    """

    rows: NpArray
    columns: NpArray
    shapes: NpArray

    def symbols(self, x: Array, start: int, octaves: float, old: Array | None) -> tuple[Array, NpArray, NpArray]:
        """Return the symbols of elements from `start` on, with sums and counts."""
        if len(self.shapes) == 1:
            rows, begin = self._rows(start, x.shape[0])
            return residual_symbols(x, rows, self.columns, begin, octaves, old)
        return residual_symbols_many(x, self.rows, self.columns, self.shapes, octaves, old)

    def values(self, symbols: Array, start: int, table: NpArray, escaped: Array) -> Array:
        """Return the values of symbols, float32; arguments as in `symbols`."""
        return with_escapes(self.without_escapes(symbols, start, table), symbols, NO_RESIDUAL, escaped)

    def without_escapes(self, symbols: Array, start: int, table: NpArray) -> Array:
        """Return the values of symbols that are not escaped; arguments as in `values`."""
        if len(self.shapes) > 1 and on_gpu(symbols):
            return self._values_there(symbols, table)
        if len(self.shapes) > 1:
            return residual_values_many(symbols, self.rows, self.columns, self.shapes, table)
        rows, begin = self._rows(start, symbols.shape[0])
        return residual_values(symbols, rows, self.columns, begin, table)

    def _values_there(self, symbols: Array, table: NpArray) -> Array:
        """Return the values of several matrices on the GPU of their symbols."""
        heights, widths = self.shapes.T
        lengths = np.repeat(widths, heights)  # of each row
        # How far the column's factor of an element is from the element's own place.
        shifts = np.repeat(np.cumsum(widths) - widths, heights) - (np.cumsum(lengths) - lengths)
        rows, columns, means = (placed_with(x, symbols) for x in (self.rows, self.columns, table))
        torch: Any = imported("torch")
        place = torch.arange(symbols.shape[0], device=symbols.device) + spread(shifts, lengths, symbols)
        estimates = rows[spread(np.arange(lengths.size), lengths, symbols)] * columns[place]
        values: Array = estimates * means[symbols.long()]
        return values

    def _rows(self, start: int, n: int) -> tuple[NpArray, int]:
        """Return the factors of the rows of n elements from `start` on, and where the first lies."""
        first, columns = start // self.columns.size, self.columns.size
        return self.rows[first : -(-(start + n) // columns)], start - first * columns


def _factors(leaf: Leaf, specs: Sequence[LeafSpec]) -> tuple[NpArray, NpArray]:
    """Return the row and column factors of joined matrices."""
    shapes = shapes_of(specs)
    if len(specs) > 1:
        return factors_many(as_float32(leaf.flat, leaf.spec), shapes)
    return factors(leaf.flat, leaf.spec, (int(shapes[0, 0]), int(shapes[0, 1])))


def _without(
    part: tuple[Array, NpArray, NpArray, Array], beyond: NpArray, leaf: Leaf, start: int
) -> tuple[Array, NpArray, NpArray, Array]:
    """Escape some symbols of a chunk; return its symbols, sums, counts and escaped values."""
    symbols, sums, counts, _ = part
    x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
    symbols[placed_with(beyond, symbols)[symbols.long() if on_gpu(symbols) else symbols]] = NO_RESIDUAL
    counts = counts.copy()
    counts[NO_RESIDUAL] += counts[beyond].sum()
    counts[beyond] = 0
    return symbols, np.where(beyond, 0.0, sums), counts, escapes_of(x, symbols, NO_RESIDUAL, counts)


@dataclass(frozen=True, slots=True)
class RankOneReference(FilledReference):
    """A stored second moment, a byte per element: the reference of the next delta.

    Args:
        symbols: uint8 [n], see `kernels.scales.residual_symbols`.
        rows: int32 [R], log buckets of the row factors.
        columns: int32 [C], of the column factors.
        table: float32 [256], factor of each symbol.
        escaped: float32, the values of the elements without a residual, in order.
    """

    symbols: NpArray
    rows: NpArray
    columns: NpArray
    table: NpArray
    escaped: NpArray

    def escapes(self, step: int) -> list[NpArray]:
        """Return the escaped values of each `step` elements."""
        if not self.escaped.size:
            return [self.escaped] * -(-self.symbols.size // step)
        starts = range(0, self.symbols.size, step)
        counts = [int(np.count_nonzero(self.symbols[start : start + step] == NO_RESIDUAL)) for start in starts]
        return np.split(self.escaped, np.cumsum(counts[:-1]))

    def fill(self, spec: LeafSpec, out: NpArray) -> None:
        """Write the bytes of the decoded array."""
        _fill(self, [spec], out)

    def fill_there(self, spec: LeafSpec, out: Array) -> None:
        """Scale the estimates in a flat tensor on a GPU, where symbols and factors are sent."""
        _fill(self, [spec], out)


def _rank_one(parent: Reference | None, spec: LeafSpec) -> RankOneReference | None:
    """Return the parent's reference if it is of this stream."""
    return parent if isinstance(parent, RankOneReference) and parent.symbols.size == spec.size else None


def shapes_of(specs: Sequence[LeafSpec]) -> NpArray:
    """Return rows and columns of matrices, int64 [m, 2]."""
    return np.array([matrix_shape(spec) for spec in specs], np.int64)


def joined_rank_one(references: Parents, specs: Sequence[LeafSpec]) -> RankOneReference | None:
    """Join references, with the table of the first; None if one is of another stream."""
    found = [known for r, spec in zip(references, specs, strict=True) if (known := _rank_one(r, spec)) is not None]
    if len(found) < len(specs):
        return None
    if len(found) == 1:
        return found[0]
    joined = (np.concatenate([getattr(r, name) for r in found]) for name in ("symbols", "rows", "columns", "escaped"))
    symbols, rows, columns, escaped = joined
    return RankOneReference(symbols, rows, columns, found[0].table, escaped)


def split_rank_one(joined: RankOneReference, specs: Sequence[LeafSpec]) -> list[RankOneReference]:
    """Return the reference of each of several arrays, parts of the joined one."""
    if len(specs) == 1:
        return [joined]
    found: list[RankOneReference] = []
    i = j = k = 0
    for symbols, (height, width) in zip(parts(joined.symbols, specs), shapes_of(specs).tolist(), strict=True):
        end = k + (int(np.count_nonzero(symbols == NO_RESIDUAL)) if joined.escaped.size else 0)
        rows, columns = joined.rows[i : i + height], joined.columns[j : j + width]
        found.append(RankOneReference(symbols, rows, columns, joined.table, joined.escaped[k:end]))
        i, j, k = i + height, j + width, end
    return found


def rank_one_values(specs: Sequence[LeafSpec], references: Sequence[Reference]) -> list[Array]:
    """Return the values of the references of a group, which have one table."""
    joined = joined_rank_one(references, specs)
    if joined is None:
        return values_of_each(specs, references)
    data = np.empty(joined_spec(specs).nbytes, np.uint8)
    _fill(joined, specs, data)
    return own_parts(data, specs)


def fill_rank_one(specs: Sequence[LeafSpec], references: Sequence[Reference], out: Array) -> None:
    """Fill a flat tensor on a GPU with the values of the references of a group."""
    joined = joined_rank_one(references, specs)
    if joined is None:
        fill_each(specs, references, out)
    else:
        _fill(joined, specs, out)


def _fill(joined: RankOneReference, specs: Sequence[LeafSpec], data: Array) -> None:
    """Write the values of joined matrices to their bytes, or to a flat tensor on a GPU."""
    step = CHUNK if on_gpu(data) else PART
    scales, spec = (
        _Scales(factor_values(joined.rows), factor_values(joined.columns), shapes_of(specs)),
        joined_spec(specs),
    )

    def one(chunk: tuple[int, NpArray]) -> None:
        start, escaped = chunk
        symbols = placed_with(joined.symbols[start : start + step], data)
        values = scales.without_escapes(symbols, start, joined.table)
        put_decoded(data, start, values, symbols, NO_RESIDUAL, escaped, spec)

    map_chunks(one, zip(range(0, spec.size, step), joined.escapes(step), strict=True))


def rank_one_pieces(
    specs: Sequence[LeafSpec],
    reference: RankOneReference,
    before: RankOneReference | None,
    counts: Sequence[NpArray] = (),
    there: Sequence[Array] = (),
) -> list[Piece]:
    """Return the pieces of joined arrays: one with factors and table, and one for each chunk.

    Args:
        specs: of the arrays.
        reference: their symbols.
        before: that of their parents.
        counts: of the symbols of each chunk, if known.
        there: the symbols of each chunk where they were made, if known.
    """
    head = Writer()
    head.block(
        pack_factors((reference.rows, reference.columns), None if before is None else (before.rows, before.columns))
    )
    head.raw(pack_table(reference.table))

    def one(chunk: tuple[int, NpArray]) -> Piece:
        start, escaped = chunk
        old = None if before is None else before.symbols[start : start + CHUNK]
        known = counts[start // CHUNK] if counts else None
        own = reference.symbols[start : start + CHUNK]
        symbols = there[start // CHUNK] if there and is_block(own.size) else own
        return pack_chunk(symbols, escaped, known, old, matrix_of(specs, start, entropy.Numbers.CENTERED))

    starts = range(0, reference.symbols.size, CHUNK)
    return [head.done(), *map_chunks(one, zip(starts, reference.escapes(CHUNK), strict=True))]


def rebase_rank_one(
    specs: Sequence[LeafSpec], references: Sequence[Reference], parents: Parents
) -> tuple[dict[str, Any], list[Piece]]:
    """Encode the same symbols and factors as a base or against other parents."""
    joined = joined_rank_one(references, specs)
    if joined is None:
        raise BadArgumentError("rank one: the reference of another stream cannot be rebased")
    return {}, rank_one_pieces(specs, joined, joined_rank_one(parents, specs))


def _least_error(octaves: float) -> float:
    """Return an approximate lower bound of the relative L2 error with cells of this width."""
    return 0.05 * min(octaves, 3)


def matrix_shape(spec: LeafSpec) -> tuple[int, int] | None:
    """Return rows and columns for the factors: first axis, other axes; None without a matrix."""
    if len(spec.shape) < 2 or spec.dtype not in ("float32", "bfloat16"):
        return None
    rows = spec.shape[0]
    columns = spec.size // rows if rows else 0
    return (rows, columns) if rows > 1 and columns > 1 else None


def factors(flat: Array, spec: LeafSpec, shape: tuple[int, int]) -> tuple[NpArray, NpArray]:
    """Return row means and relative column means, whose products are the rank-one estimate."""
    step = max(1, CHUNK // shape[1])
    rows = np.empty(shape[0])
    columns = np.zeros(shape[1])
    for start in range(0, shape[0], step):
        part = as_float32(flat[start * shape[1] : (start + step) * shape[1]], spec)
        by_row, by_column = factor_sums(part, shape[1])
        rows[start : start + step] = by_row / shape[1]
        columns += by_column
    columns /= shape[0]
    mean = rows.mean()
    columns = columns / mean if mean > 0 else columns
    return np.maximum(rows, 0).astype(np.float32), np.maximum(columns, 0).astype(np.float32)


def factor_values(index: NpArray) -> NpArray:
    """Return float32 factors from their log buckets, int32 as in `bucket_index`."""
    values: NpArray = bucket_value(index, FACTOR_BITS, "float32")
    return values


Factors = tuple[NpArray, NpArray]
"""Log buckets of row factors and of column factors, int32."""


def pack_factors(factors: Factors, before: Factors | None) -> bytes:
    """Pack log buckets of factors, or zig-zag differences from the parent's, as two byte planes."""
    numbers = np.concatenate(factors) - np.int32(_F32.buckets(FACTOR_BITS))
    if before is not None:
        step = numbers + np.int32(_F32.buckets(FACTOR_BITS)) - np.concatenate(before)
        numbers = (step << 1) ^ (step >> 31)
    out = Writer()
    out.block(*(entropy.coded(((numbers >> shift) & 255).astype(np.uint8)) for shift in (0, 8)))
    return out.done()


def read_factors(data: memoryview, rows: int, columns: int, before: Factors | None) -> Factors:
    """Return the log buckets of factors that `pack_factors` packed.

    Args:
        data: the packed bytes.
        rows: number of row factors.
        columns: number of column factors.
        before: the parent's log buckets; None for a base.

    Raises:
        CorruptDataError: the bytes are malformed, or a bucket is out of range.
    """
    reader, n = Reader(data, "factors"), rows + columns
    numbers = np.zeros(n, np.int32)
    for shift in (0, 8):
        numbers += entropy.decode(reader.block(), n).astype(np.int32) << shift
    reader.end()
    buckets = np.int32(_F32.buckets(FACTOR_BITS))
    index = numbers + buckets if before is None else np.concatenate(before) + ((numbers >> 1) ^ -(numbers & 1))
    if n and not buckets <= int(index.min()) <= int(index.max()) <= 2 * buckets:
        raise CorruptDataError("factors: a bucket is out of range")
    return index[:rows], index[rows:]


def decode_rank_one(coded: Coded) -> list[RankOneReference]:
    """Decode the stream format "rank-one"."""
    for spec in coded.specs:
        if matrix_shape(spec) is None:
            raise CorruptDataError(f"rank one: {spec.dtype} {spec.shape} is not a matrix for rank one")
    across, down = (int(lines) for lines in shapes_of(coded.specs).sum(axis=0))
    size = coded.spec.size
    chunks = chunks_of("rank one", coded.pieces, size, 8 * (across + down) + size, step=CHUNK, head=True)
    head = Reader(coded.pieces[0], "rank one")
    before = joined_rank_one(coded.parents, coded.specs)
    rows, columns = read_factors(head.block(), across, down, None if before is None else (before.rows, before.columns))
    table = read_table(head)
    head.end()

    symbols = np.empty(size, np.uint8)

    there = symbols_there(chunks, None if before is None else before.symbols)

    def one(number: int) -> NpArray:
        piece, part = chunks[number]
        own, old = symbols[part], None if before is None else before.symbols[part]
        own[:], escaped = read_chunk(piece, own.size, NO_RESIDUAL, old, there[number])
        return escaped

    escaped = np.concatenate(map_chunks(one, range(len(chunks))))
    return split_rank_one(RankOneReference(symbols, rows, columns, table, escaped), coded.specs)
