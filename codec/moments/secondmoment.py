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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, number
from ...kernels.backend.arrays import on_gpu
from ...kernels.backend.floats import FORMATS
from ...kernels.error_sums import Distortion, distortion
from ...kernels.histogram import bucket_index, bucket_value
from ...kernels.scales import ESCAPE as NO_RESIDUAL
from ...kernels.scales import MOST_OCTAVES, eighths_of, factor_sums, residual_factors, residual_symbols, residual_values
from .. import entropy
from ..base import CHUNK, Leaf, Reference, Stored
from ..errors import BadArgumentError, CorruptDataError
from ..format.chunks import Chunk, chunks_of
from ..format.fields import Reader, Writer
from ..parallel import map_chunks
from ..state.casting import rounded, to_bfloat16
from ..state.leaves import Array, LeafSpec, NpArray, from_bytes, on_host
from .logbuckets import LogBuckets, check_limits
from .symbolvalues import (
    as_float32,
    as_stored,
    escapes_of,
    pack_chunk,
    pack_table,
    placed_with,
    put,
    read_chunk,
    read_table,
    room_like,
    with_escapes,
)

FACTOR_BITS = 3
"""Bits of the log buckets of row and column factors."""
_NARROWER = (3, 2, 1, 0.5, 0.25, 0.125)
"""Cells to try, after a codec's own, where an error target is missed."""
_F32 = FORMATS["float32"]


@dataclass(frozen=True, slots=True)
class SecondMoment:
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

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Sequence[None]:
        """Return None for each array: this codec needs no plans."""
        return [None] * len(leaves)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; `error` is the largest relative error, or relative L2 with `max_error`."""
        shape = matrix_shape(leaf.spec)
        target = math.inf if self.max_error is None else self.max_error
        for octaves in (self.octaves, *(o for o in _NARROWER if o < self.octaves)):
            if shape is None:
                break
            if _least_error(octaves) > target:
                continue
            stored, met = self._rank_one(leaf, parent, shape, octaves)
            if met.largest_relative == np.inf:  # a factor took a value beyond the dtype's range
                break
            if self.max_error is None:
                return stored
            if met.relative_l2 <= target:
                return dataclasses.replace(stored, error=met.relative_l2, measure="relative L2")
        return LogBuckets(self.alpha, self.max_error).encode(leaf, parent)

    def _rank_one(
        self, leaf: Leaf, parent: Reference | None, shape: tuple[int, int], octaves: float
    ) -> tuple[Stored, Distortion]:
        """Encode as rank one with cells of `octaves` octaves; also return the distortion."""
        before = _rank_one(parent, leaf.spec)
        indices = tuple(bucket_index(f, FACTOR_BITS) for f in factors(leaf.flat, leaf.spec, shape))
        rows, columns = map(factor_values, indices)

        def one(start: int) -> tuple[Array, NpArray, NpArray, Array]:
            x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
            old = None if before is None else placed_with(before.symbols[start : start + CHUNK], x)
            symbols, sums, counts = residual_symbols(x, rows, columns, start, octaves, old)
            return symbols, sums, counts, escapes_of(x, symbols, NO_RESIDUAL, counts)

        starts = range(0, leaf.spec.size, CHUNK)
        parts = map_chunks(one, starts)
        sums, counts = (sum((p[i] for p in parts), np.zeros(256)) for i in (1, 2))
        factor = residual_factors(sums, counts, octaves)
        beyond = (counts > 0) & (np.arange(256) > NO_RESIDUAL) & ~((factor > 2.0**-125) & (factor < 2.0**125))
        if beyond.any():  # no normal bfloat16 holds these factors
            parts = [_without(part, beyond, leaf, start) for part, start in zip(parts, starts, strict=True)]
        table = to_bfloat16(np.where(beyond, np.float32(0), factor))
        # Its first moment needs the decoded values, which are available here, where their error is measured.
        data = room_like(leaf.flat, leaf.spec)

        def met(number: int) -> Distortion:
            start, symbols, escaped = starts[number], parts[number][0], parts[number][3]
            values = residual_values(symbols, rows, columns, start, table)
            restored = as_stored(with_escapes(values, symbols, NO_RESIDUAL, escaped), leaf.spec)
            put(data, start, restored)
            return distortion(leaf.flat[start : start + CHUNK], restored)

        error = sum(map_chunks(met, range(len(parts))), Distortion(0.0, 0.0, 0.0))
        symbols, escaped = (np.concatenate([on_host(p[i]) for p in parts]) for i in (0, 3))
        reference = RankOneReference(symbols, indices[0], indices[1], table, escaped)
        pieces = _rank_one_pieces(reference, before, [part[2] for part in parts])
        worst = error.largest_relative
        return Stored("rank-one", {}, pieces, reference, worst, "relative", decoded=lambda: data), error


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
class RankOneReference:
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

    def escapes(self) -> list[NpArray]:
        """Return the escaped values of each chunk."""
        if not self.escaped.size:
            return [self.escaped] * -(-self.symbols.size // CHUNK)
        starts = range(0, self.symbols.size, CHUNK)
        counts = [int(np.count_nonzero(self.symbols[start : start + CHUNK] == NO_RESIDUAL)) for start in starts]
        return np.split(self.escaped, np.cumsum(counts[:-1]))

    def values(self, spec: LeafSpec) -> Array:
        """The decoded array."""
        rows, columns = factor_values(self.rows), factor_values(self.columns)
        data = np.empty(spec.nbytes, np.uint8)

        def one(chunk: tuple[int, NpArray]) -> None:
            start, escaped = chunk
            symbols = self.symbols[start : start + CHUNK]
            values = residual_values(symbols, rows, columns, start, self.table)
            raw = rounded(with_escapes(values, symbols, NO_RESIDUAL, escaped), spec)
            data[start * spec.itemsize : start * spec.itemsize + raw.size] = raw

        map_chunks(one, zip(range(0, spec.size, CHUNK), self.escapes(), strict=True))
        return from_bytes(data, spec)


def _rank_one(parent: Reference | None, spec: LeafSpec) -> RankOneReference | None:
    """Return the parent's reference if it is of this stream."""
    return parent if isinstance(parent, RankOneReference) and parent.symbols.size == spec.size else None


def _rank_one_pieces(
    reference: RankOneReference, before: RankOneReference | None, counts: Sequence[NpArray] = ()
) -> list[bytes]:
    """Return the pieces: one with factors and table, and one for each chunk."""
    head = Writer()
    head.block(
        pack_factors((reference.rows, reference.columns), None if before is None else (before.rows, before.columns))
    )
    head.raw(pack_table(reference.table))

    def one(chunk: tuple[int, NpArray]) -> bytes:
        start, escaped = chunk
        old = None if before is None else before.symbols[start : start + CHUNK]
        known = counts[start // CHUNK] if counts else None
        symbols = reference.symbols[start : start + CHUNK]
        matrix = entropy.Matrix(reference.columns.size, start, numbers=entropy.Numbers.CENTERED)
        return pack_chunk(symbols, escaped, known, old, matrix)

    starts = range(0, reference.symbols.size, CHUNK)
    return [head.done(), *map_chunks(one, zip(starts, reference.escapes(), strict=True))]


def rebase_rank_one(
    spec: LeafSpec, meta: dict[str, Any], reference: Reference, parent: Reference | None
) -> tuple[dict[str, Any], list[bytes]]:
    """Encode the same symbols and factors as a base or against another parent."""
    if not isinstance(reference, RankOneReference):
        raise BadArgumentError("rank one: the reference of another stream cannot be rebased")
    return meta, _rank_one_pieces(reference, _rank_one(parent, spec))


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
    for shift in (0, 8):
        out.block(entropy.coded(((numbers >> shift) & 255).astype(np.uint8)))
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


def decode_rank_one(
    spec: LeafSpec, meta: dict[str, Any], pieces: Sequence[memoryview], parent: Reference | None, pair: Array | None
) -> RankOneReference:
    """Decode the stream format "rank-one"."""
    shape = matrix_shape(spec)
    if shape is None:
        raise CorruptDataError(f"rank one: {spec.dtype} {spec.shape} is not a matrix that can be stored as rank one")
    chunks = chunks_of("rank one", pieces, spec.size, 8 * (shape[0] + shape[1]) + spec.size, step=CHUNK, head=True)
    head = Reader(pieces[0], "rank one")
    before = _rank_one(parent, spec)
    rows, columns = read_factors(head.block(), *shape, None if before is None else (before.rows, before.columns))
    table = read_table(head)
    head.end()

    symbols = np.empty(spec.size, np.uint8)

    def one(chunk: Chunk) -> NpArray:
        piece, part = chunk
        own, old = symbols[part], None if before is None else before.symbols[part]
        own[:], escaped = read_chunk(piece, own.size, NO_RESIDUAL, old)
        return escaped

    escaped = np.concatenate(map_chunks(one, chunks))
    return RankOneReference(symbols, rows, columns, table, escaped)
