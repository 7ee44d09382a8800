"""Moments of adaptive optimizers, by what an error in them does to the update m / sqrt(v).

`SecondMoment`: v as rank one (row mean x column mean / mean, as Adafactor keeps it) times a coarse power of two. Most
elements need no correction, so it costs a few hundredths of a bit; the correction bounds the error of every element,
and is right on average in the logarithm, so that updates are neither longer nor shorter than they were.

`FirstMoment`: m on a uniform grid in units of sqrt(v~), v~ being the decoded second moment: an error of half a step is
half a step of the update. The value of a grid point is the mean of what fell on it, so that the sum of m stays.

Pieces, second moment: (0) block: row factors, block: column factors, both as log buckets of 3 bits or differences to
the parent's; the table of each symbol's factor. (1 + i) chunk i: block: symbol stream in the context of
the parent's symbols; varint number of escapes, their float32 patterns.
First moment: (0) the table of each grid point's value. (1 + i) as above, without a parent; where products predict the
numbers, between the two the bfloat16 by which a value is moved for each quarter step to its prediction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ..kernels.arrays import on_gpu
from ..kernels.distortion import Distortion, distortion
from ..kernels.floats import FORMATS
from ..kernels.grid import ESCAPE as OFF_GRID
from ..kernels.grid import grid_symbols, grid_values
from ..kernels.logbucket import bucket_index, bucket_value
from ..kernels.residual import ESCAPE as NO_RESIDUAL
from ..kernels.residual import factor_sums, residual_factors, residual_symbols, residual_values
from . import bfloat16, entropy
from .base import CHUNK, Leaf, Memory, Stored, check_range
from .errors import BadArgumentError, CorruptDataError
from .fields import Reader, Writer
from .leaves import Array, LeafSpec, NpArray, as_bytes, check_memory, from_bytes, on_host
from .lowrank import Finer, Moves, Select, move_table, signed
from .moments import LogBuckets, ValuesMemory
from .parallel import map_chunks
from .places import columns_of

_FACTOR_BITS = 3
_ATTEMPTS = 5
_F32 = FORMATS["float32"]
_NOTHING_LEFT = 0.99
"""A grid with more relative L2 error than this holds next to nothing of the values: zeros have 1."""
_FINE = 3 / 16
"""Directions of first moments are sought in steps of this at most, down to half of it."""
_SMALLEST = 1 / 64
"""Norm of a first moment over that of the roots of its second one, below which the two do not belong together."""


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """Store a second moment as rank one times a power of two. Arrays of one dimension are stored as log buckets.

    Args:
        octaves: width of a correction's cell in powers of two, 1 to 64; a larger one costs less, errs more. None
            (default): `cell_octaves` of `Config.rate`.
        alpha: relative error where rank one does not apply, see `LogBuckets`; default 0.25.
        max_error: relative L2 error the array may have, in (0, 1): rank one with the widest cells that keep to it, none
            wider than `octaves`, else log buckets, else exact. None (default): `Config.max_rel_error`.

    Raises:
        BadArgumentError: a value out of range.

    Source: Shazeer and Stern 2018 (Adafactor), section 3, for the estimate.
    """

    octaves: int | None = None
    alpha: float = 0.25
    max_error: float | None = None
    id: ClassVar[str] = "second moment"

    def __post_init__(self) -> None:
        if self.octaves is not None and (type(self.octaves) is not int or not 1 <= self.octaves <= 64):
            raise BadArgumentError(f"octaves is {self.octaves!r}; it must be an integer in [1, 64], or None")
        LogBuckets(self.alpha, self.max_error)

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Memory | None]) -> Sequence[None]:
        """Nothing to look at."""
        return [None] * len(leaves)

    def encode(self, leaf: Leaf, parent: Memory | None, plan: None = None) -> Stored:
        """Encode one array; `error` is the largest relative error of an element, with `max_error` relative L2."""
        shape = matrix_shape(leaf.spec)
        widest = cell_octaves(0.0) if self.octaves is None else self.octaves
        target = math.inf if self.max_error is None else self.max_error
        for octaves in sorted({widest, *range(1, min(widest, 4))}, reverse=True):
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
        self, leaf: Leaf, parent: Memory | None, shape: tuple[int, int], octaves: int
    ) -> tuple[Stored, Distortion]:
        """As a matrix, with cells of so many octaves; and how far it is from it."""
        before = _rank_one(parent, leaf.spec)
        indices = tuple(bucket_index(f, _FACTOR_BITS) for f in factors(leaf.flat, leaf.spec, shape))
        rows, columns = map(_factor_values, indices)

        def one(start: int) -> tuple[Array, NpArray, NpArray, Array]:
            x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
            old = None if before is None else _beside(before.symbols[start : start + CHUNK], x)
            symbols, distances, counts = residual_symbols(x, rows, columns, start, octaves, old)
            return symbols, distances, counts, _escaped(x, symbols, NO_RESIDUAL, counts)

        starts = range(0, leaf.spec.size, CHUNK)
        parts = map_chunks(one, starts)
        distances, counts = (sum((p[i] for p in parts), np.zeros(256)) for i in (1, 2))
        beyond = _beyond(distances, counts)
        if beyond.any():
            parts = [_without(part, beyond, leaf, start) for part, start in zip(parts, starts, strict=True)]
            distances, counts = (sum((p[i] for p in parts), np.zeros(256)) for i in (1, 2))
        table = _rounded(residual_factors(distances, counts))
        # The first moment beside it needs the decoded values: they are at hand here, where their error is measured.
        data = _empty_beside(leaf.flat, leaf.spec)

        def met(number: int) -> Distortion:
            start, symbols, escaped = starts[number], parts[number][0], parts[number][3]
            values = residual_values(symbols, rows, columns, start, table)
            restored = _restored(_with_escaped(values, symbols, NO_RESIDUAL, escaped), leaf.spec)
            data[start : start + CHUNK] = restored
            return distortion(leaf.flat[start : start + CHUNK], restored)

        error = sum(map_chunks(met, range(len(parts))), Distortion(0.0, 0.0, 0.0))
        symbols, escaped = (np.concatenate([on_host(p[i]) for p in parts]) for i in (0, 3))
        memory = RankOneMemory(symbols, indices[0], indices[1], table, escaped)
        pieces = _rank_one_pieces(memory, before, [part[2] for part in parts])
        worst = error.largest_relative
        return Stored("rank-one", {}, pieces, memory, worst, "relative", decoded=lambda: data), error


def _beyond(distances: NpArray, counts: NpArray) -> NpArray:
    """bool [256]: symbols whose factor no normal bfloat16 holds, so that their elements would come out wrong."""
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.where(counts > 0, distances / counts, 0.0) / 2.0**23
    beyond: NpArray = np.abs(octaves) > 125
    return beyond


def _without(
    part: tuple[Array, NpArray, NpArray, Array], beyond: NpArray, leaf: Leaf, start: int
) -> tuple[Array, NpArray, NpArray, Array]:
    """A chunk's symbols, distances, counts and escaped values with some symbols escaped, too."""
    symbols, distances, counts, _ = part
    x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
    symbols[_beside(beyond, symbols)[symbols.long() if on_gpu(symbols) else symbols]] = NO_RESIDUAL
    counts = counts.copy()
    counts[NO_RESIDUAL] += counts[beyond].sum()
    counts[beyond] = 0
    return symbols, np.where(beyond, 0.0, distances), counts, _escaped(x, symbols, NO_RESIDUAL, counts)


def _escaped(x: Array, symbols: Array, escape: int, counts: NpArray) -> Array:
    """The values without a symbol of their own, in order."""
    return x[symbols == escape] if counts[escape] else x[:0]


def _with_escaped(values: Array, symbols: Array, escape: int, escaped: Array) -> Array:
    """The values with those put back that `_escaped` took out."""
    if len(escaped):
        values[symbols == escape] = escaped
    return values


@dataclass(frozen=True, slots=True)
class RankOneMemory:
    """A second moment as it is stored, a byte an element: what the next delta's symbols are coded against.

    Args:
        symbols: uint8 [n], see `kernels.residual`.
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

    def chunk(self, start: int) -> NpArray:
        """The decoded elements of the chunk at `start` as float32."""
        symbols = self.symbols[start : start + CHUNK]
        values: NpArray = residual_values(
            symbols, _factor_values(self.rows), _factor_values(self.columns), start, self.table
        )
        if self.escaped.size:
            first = int(np.count_nonzero(self.symbols[:start] == NO_RESIDUAL))
            own = self.escaped[first : first + np.count_nonzero(symbols == NO_RESIDUAL)]
            _with_escaped(values, symbols, NO_RESIDUAL, own)
        return values

    def values(self, spec: LeafSpec) -> Array:
        """The decoded array."""
        data = np.empty(spec.nbytes, np.uint8)

        def one(start: int) -> None:
            values = narrowed(self.chunk(start), spec)
            data[start * spec.itemsize : start * spec.itemsize + values.size] = values

        map_chunks(one, range(0, spec.size, CHUNK))
        return from_bytes(data, spec)


def _rank_one(parent: Memory | None, spec: LeafSpec) -> RankOneMemory | None:
    """The parent's memory where it is one of this stream (shapes are equal wherever there is a parent)."""
    return parent if isinstance(parent, RankOneMemory) and parent.symbols.size == spec.size else None


def _rank_one_pieces(
    memory: RankOneMemory, before: RankOneMemory | None, counts: Sequence[NpArray] = ()
) -> list[bytes]:
    """The table and the chunks; `counts` of each chunk's symbols, where they are known."""
    head = Writer()
    head.block(_pack_factors(memory.rows, None if before is None else before.rows))
    head.block(_pack_factors(memory.columns, None if before is None else before.columns))
    head.raw(_pack_table(memory.table))

    def one(start: int) -> bytes:
        symbols = memory.symbols[start : start + CHUNK]
        old = None if before is None else before.symbols[start : start + CHUNK]
        first = int(np.count_nonzero(memory.symbols[:start] == NO_RESIDUAL)) if memory.escaped.size else 0
        count = int(np.count_nonzero(symbols == NO_RESIDUAL)) if memory.escaped.size else 0
        known = counts[start // CHUNK] if counts else None
        return _pack_chunk(symbols, memory.escaped[first : first + count], known, old, memory.columns.size, start)

    return [head.done(), *map_chunks(one, range(0, memory.symbols.size, CHUNK))]


def restate_rank_one(
    spec: LeafSpec, meta: dict[str, Any], memory: Memory, parent: Memory | None
) -> tuple[dict[str, Any], list[bytes]]:
    """The same symbols and factors against another parent, see `codec.restate`."""
    if not isinstance(memory, RankOneMemory):
        raise BadArgumentError("rank one: the memory of another stream cannot be restated")
    return meta, _rank_one_pieces(memory, _rank_one(parent, spec))


@dataclass(frozen=True, slots=True)
class FirstMoment:
    """Store a first moment on a grid in units of the root of its second moment.

    Without a second moment beside it (SGD, Lion), or where that is not enough (v = 0 and m not), it is stored as log
    buckets; and so it is where the grid would hold next to nothing (a relative L2 error above 0.99) because m is no
    average of what v is made of (its norm below 1/64 of that of sqrt(v), as in some kinds of Adafactor).

    Args:
        step: distance of grid points in units of m / sqrt(v), in (0, 16]; None: `grid_step` of `Config.rate`.
        alpha: relative error where there is no second moment, see `LogBuckets`; default 0.25.
        max_error: relative L2 error the array may have, in (0, 1): the widest step that keeps to it, no wider than
            `step`, else log buckets, else exact. None (default): `Config.max_rel_error`.

    Raises:
        BadArgumentError: a value out of range.
    """

    step: float | None = None
    alpha: float = 0.25
    max_error: float | None = None
    id: ClassVar[str] = "first moment"
    uses_sibling: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.step is not None:
            check_range("step", self.step, 0, 16, open_low=True)
        LogBuckets(self.alpha, self.max_error)

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Memory | None]) -> Sequence[None]:
        """Nothing to look at."""
        return [None] * len(leaves)

    def encode(self, leaf: Leaf, parent: Memory | None, plan: None = None) -> Stored:
        """Encode one array; `error` is the relative L2 error."""
        step = grid_step(0.0) if self.step is None else float(self.step)
        for _ in range(1 if self.max_error is None else _ATTEMPTS):
            error, stored = (math.inf, None) if leaf.sibling is None else self._on_grid(leaf, leaf.sibling, step)
            if stored is not None:
                return stored
            if self.max_error is None or not math.isfinite(error):
                break
            # The error is about in proportion to the step, once that is not much more than the values.
            step *= 2.0 ** -(max(1, math.ceil(8 * math.log2(error / self.max_error))) / 8)
        return LogBuckets(self.alpha, self.max_error).encode(leaf, parent)

    def _on_grid(self, leaf: Leaf, sibling: Array, step: float) -> tuple[float, Stored | None]:
        """With grid points so far apart: the error, infinite where too many are on none; None where it misses."""
        square = _beside(sibling, leaf.flat)
        columns = columns_of(leaf.spec.shape)

        def rounded(start: int, step: float, select: Select = _all) -> tuple[Array, NpArray, NpArray]:
            part = slice(start, start + CHUNK)
            return grid_symbols(as_float32(select(leaf.flat[part]), leaf.spec), select(square[part]), step)

        def one(start: int) -> tuple[Array, NpArray, NpArray, Array]:
            symbols, sums, counts = rounded(start, step)
            x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
            return symbols, sums, counts, _escaped(x, symbols, OFF_GRID, counts)

        starts = range(0, leaf.spec.size, CHUNK)
        parts = map_chunks(one, starts)
        counts = sum((p[2] for p in parts), np.zeros(256))
        if counts[OFF_GRID] > 0.01 * leaf.spec.size:
            return math.inf, None
        bits = _finer_bits(step)

        def packed(number: int) -> tuple[bytes, Moves | None, float]:
            start, (symbols, _, known, escaped) = starts[number], parts[number]
            finer = Finer(lambda select: signed(on_host(rounded(start, step / 2**bits, select)[0])), bits)
            out = Writer()
            coded, moves = entropy.encode_numbers(on_host(symbols), known.astype(np.int64), columns, start, finer)
            out.block(coded)
            reach = 0.0
            if moves is not None:
                reach = float(_rounded(np.array([moves.share * step / 4]))[0])
                out.raw(_bfloat16s(np.array([reach])))
            _write_escaped(out, on_host(escaped))
            return out.done(), moves, reach

        pieces = map_chunks(packed, range(len(parts)))
        moved = sum((reach * moves.sums for _, moves, reach in pieces if moves is not None), np.zeros(256))
        with np.errstate(divide="ignore", invalid="ignore"):
            table = _rounded(np.where(counts > 0, (sum((p[1] for p in parts), np.zeros(256)) - moved) / counts, 0.0))
        table[OFF_GRID] = 0.0

        def met(number: int) -> Distortion:
            start, (symbols, _, _, escaped) = starts[number], parts[number]
            _, moves, reach = pieces[number]
            values = grid_values(symbols, square[start : start + CHUNK], table, **_beside_moves(moves, reach, symbols))
            restored = _restored(_with_escaped(values, symbols, OFF_GRID, escaped), leaf.spec)
            return distortion(leaf.flat[start : start + CHUNK], restored)

        error = sum(map_chunks(met, range(len(parts))), Distortion(0.0, 0.0, 0.0)).relative_l2
        if self.max_error is not None and not error <= self.max_error:
            return error, None
        if error > _NOTHING_LEFT and _in_another_unit(leaf, square):
            return math.inf, None
        stored = [_pack_table(table), *(coded for coded, _, _ in pieces)]
        return error, Stored("grid", {}, stored, None, error, "relative L2")


def _all(x: Array) -> Array:
    return x


def _finer_bits(step: float) -> int:
    """How often a step is halved where directions are sought, once to seven times."""
    bits = 1
    while bits < 7 and step > _FINE * 2**bits:
        bits += 1
    return bits


def _beside_moves(moves: Moves | None, reach: float, symbols: Array) -> dict[str, Any]:
    """The arguments of `grid_values` that move values."""
    if moves is None:
        return {}
    return {"moved": _beside(moves.distances, symbols), "moves": move_table(reach)}


def _in_another_unit(leaf: Leaf, square: Array) -> bool:
    """Whether m is nowhere near the size of sqrt(v), so that it is no average of the gradients that v is made of.

    An average with a beta of 0.999 of mere noise is 1/45 of it; so `_SMALLEST` is below all that Adam makes.
    """
    first = second = 0.0
    for start in range(0, leaf.spec.size, CHUNK):
        x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
        v = square[start : start + CHUNK]
        x, v = (x.double(), v.double()) if on_gpu(x) else (x.astype(np.float64), v.astype(np.float64))
        first, second = first + float((x * x).sum()), second + float(v.sum())
    return 0 < first < _SMALLEST**2 * second


def grid_step(rate: float) -> float:
    """The step of first moments at a rate: `min(16, max(0.625, sqrt(32000 rate)))`.

    A uniform quantizer's distortion, step**2 / 12, falls by a fixed share with every bit: the step that spends a bit
    where it is worth `rate` grows with the root of it. The factor is measured: a bit of a first moment is worth a tenth
    to a fifth of a bit of the weights after 200 further steps (docs/decisions/smaller-deltas.md).

    Example:
        >>> grid_step(0.0), grid_step(0.0005), grid_step(0.002)
        (0.625, 4.0, 8.0)
    """
    return min(16.0, max(0.625, math.sqrt(32000 * rate)))


def _least_error(octaves: int) -> float:
    """A relative L2 error that second moments in cells so wide hardly ever stay below, so that they need no trying."""
    return 0.05 * min(octaves, 3)


def cell_octaves(rate: float) -> int:
    """The width of second moments' cells at a rate: 2 powers of two below 0.01, then 3.

    One is a little better after many restores, and takes a fifth more bytes where checkpoints are far apart.

    Example:
        >>> cell_octaves(0.0), cell_octaves(0.01)
        (2, 3)
    """
    return 2 if rate < 0.01 else 3


def matrix_shape(spec: LeafSpec) -> tuple[int, int] | None:
    """Rows and columns an array is factored by: its first axis against the rest; None where that makes no matrix."""
    if len(spec.shape) < 2 or spec.dtype not in ("float32", "bfloat16"):
        return None
    rows = spec.shape[0]
    columns = spec.size // rows if rows else 0
    return (rows, columns) if rows > 1 and columns > 1 else None


def as_float32(flat: Array, spec: LeafSpec) -> Array:
    """Values as float32, on their GPU or as NumPy; exact for the dtypes `matrix_shape` admits."""
    return flat.float() if on_gpu(flat) else bfloat16.wide(as_bytes(flat), spec)


def _beside(x: Array, flat: Array) -> Array:
    """An array on the GPU of another, or as NumPy on the host where that is."""
    if not on_gpu(flat):
        return on_host(x)
    import torch

    return torch.as_tensor(x).to(flat.device)


def _empty_beside(flat: Array, spec: LeafSpec) -> Array:
    """Room for decoded values, where the values are."""
    return flat.new_empty(spec.size) if on_gpu(flat) else from_bytes(np.empty(spec.nbytes, np.uint8), spec)


def _restored(values: Array, spec: LeafSpec) -> Array:
    """float32 values in the array's dtype, where they are."""
    if on_gpu(values):
        return values.bfloat16() if spec.dtype == "bfloat16" else values
    return from_bytes(narrowed(values, spec), spec)


def narrowed(values: NpArray, spec: LeafSpec) -> NpArray:
    """Bytes of float32 values in the array's dtype; bfloat16 to nearest, ties to even."""
    return (bfloat16.nearest(values) if spec.dtype == "bfloat16" else values).view(np.uint8)


def factors(flat: Array, spec: LeafSpec, shape: tuple[int, int]) -> tuple[NpArray, NpArray]:
    """Row means, and column means over the mean of all: their products are the rank-one estimate."""
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


def _factor_values(index: NpArray) -> NpArray:
    """Factors, float32, of their log buckets, int32, as `bucket_index` counts them."""
    values: NpArray = bucket_value(index, _FACTOR_BITS, "float32")
    return values


def _pack_factors(index: NpArray, before: NpArray | None) -> bytes:
    """Log buckets of factors, or their zig-zag differences to the parent's, as two planes of bytes."""
    numbers = index - np.int32(_F32.buckets(_FACTOR_BITS))
    if before is not None:
        step = index - before
        numbers = (step << 1) ^ (step >> 31)
    out = Writer()
    for shift in (0, 8):
        out.block(entropy.encode(((numbers >> shift) & 255).astype(np.uint8)))
    return out.done()


def _read_factors(data: memoryview, n: int, before: NpArray | None) -> NpArray:
    reader = Reader(data, "factors")
    numbers = np.zeros(n, np.int32)
    for shift in (0, 8):
        numbers += entropy.decode(reader.block(), n).astype(np.int32) << shift
    reader.end()
    buckets = np.int32(_F32.buckets(_FACTOR_BITS))
    index = numbers + buckets if before is None else before + ((numbers >> 1) ^ -(numbers & 1))
    if n and not buckets <= int(index.min()) <= int(index.max()) <= 2 * buckets:
        raise CorruptDataError("factors: a bucket is out of range")
    return index


def _rounded(values: NpArray) -> NpArray:
    """float32 values rounded to bfloat16: what is stored is what is used."""
    return (bfloat16.nearest(values.astype(np.float32)).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack_table(table: NpArray) -> bytes:
    """The entries that are not zero: how many; of each the steps from the one before, less one; their bfloat16s."""
    used = np.flatnonzero(table)
    out = Writer()
    out.varint(used.size)
    for gap in np.diff(used, prepend=-1):
        out.varint(int(gap) - 1)
    out.raw(_bfloat16s(table[used]))
    return out.done()


def _bfloat16s(values: NpArray) -> NpArray:
    """float32 values that are bfloat16s as those, two bytes each."""
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype("<u2")


def _read_bfloat16s(data: Reader, count: int) -> NpArray:
    """So many bfloat16s as float32."""
    values = (data.array("<u2", count).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if not np.isfinite(values).all():
        raise CorruptDataError("moment: a value of a table is not finite")
    return values


def _read_table(data: Reader) -> NpArray:
    count = data.varint()
    if count > 256:
        raise CorruptDataError(f"moment: a table of {count} values")
    at = -1
    used = []
    for _ in range(count):
        at += 1 + data.varint()
        used.append(at)
    if at > 255:
        raise CorruptDataError("moment: an entry is beyond the table")
    table = np.zeros(256, np.float32)
    table[used] = _read_bfloat16s(data, count)
    return table


def _pack_chunk(
    symbols: NpArray,
    escaped: NpArray,
    counts: NpArray | None,
    before: NpArray | None,
    columns: int,
    start: int,
) -> bytes:
    """The chunk at `start` of a matrix of so many columns; `counts` of its symbols, where they are known."""
    out = Writer()
    if before is None:
        known = None if counts is None else counts.astype(np.int64)
        out.block(entropy.encode(symbols, known, columns, start))
    else:
        out.block(entropy.encode_levels(symbols, 256, before, 256, "smallest", columns, start))
    _write_escaped(out, escaped)
    return out.done()


def _write_escaped(out: Writer, escaped: NpArray) -> None:
    out.varint(escaped.size)
    out.raw(escaped.astype("<f4", copy=False))


def _read_chunk(piece: memoryview, n: int, escape: int, before: NpArray | None = None) -> tuple[NpArray, NpArray]:
    data = Reader(piece, "moment")
    symbols = entropy.decode(data.block(), n, before, 256)
    return symbols, _read_escaped(data, symbols, escape)


def _read_escaped(data: Reader, symbols: NpArray, escape: int) -> NpArray:
    """The values of the elements with the escape symbol, which end the piece."""
    count = data.varint()
    if count != int(np.count_nonzero(symbols == escape)):
        raise CorruptDataError(f"moment: {count} escaped values do not fit the symbols")
    escaped = data.array("<f4", count)
    data.end()
    return escaped


def _decode(spec: LeafSpec, pieces: Sequence[memoryview], one: Any) -> ValuesMemory:
    starts = range(0, spec.size, CHUNK)
    if len(pieces) != len(starts) + 1:
        raise CorruptDataError(f"moment: {len(pieces)} pieces for {len(starts)} chunks")
    check_memory(spec.nbytes, "moment")
    data = np.empty(spec.nbytes, np.uint8)

    def chunk(number: int) -> None:
        start = starts[number]
        n = min(CHUNK, spec.size - start)
        values = narrowed(one(pieces[number + 1], start, n), spec)
        data[start * spec.itemsize : (start + n) * spec.itemsize] = values

    map_chunks(chunk, range(len(starts)))
    return ValuesMemory(from_bytes(data, spec))


def decode_rank_one(
    spec: LeafSpec, meta: dict[str, Any], pieces: Sequence[memoryview], parent: Memory | None, sibling: Array | None
) -> RankOneMemory:
    """The stream format "rank-one"."""
    shape = matrix_shape(spec)
    if shape is None or not pieces:
        raise CorruptDataError(f"rank one: {spec.dtype} {spec.shape} is no matrix of it")
    head = Reader(pieces[0], "rank one")
    starts = range(0, spec.size, CHUNK)
    if len(pieces) != len(starts) + 1:
        raise CorruptDataError(f"rank one: {len(pieces)} pieces for {len(starts)} chunks")
    check_memory(8 * (shape[0] + shape[1]) + spec.size, "rank one")
    before = _rank_one(parent, spec)
    rows = _read_factors(head.block(), shape[0], None if before is None else before.rows)
    columns = _read_factors(head.block(), shape[1], None if before is None else before.columns)
    table = _read_table(head)
    head.end()

    symbols = np.empty(spec.size, np.uint8)

    def one(number: int) -> NpArray:
        own = symbols[starts[number] : starts[number] + CHUNK]
        old = None if before is None else before.symbols[starts[number] : starts[number] + CHUNK]
        own[:], escaped = _read_chunk(pieces[number + 1], own.size, NO_RESIDUAL, old)
        return escaped

    escaped = np.concatenate(map_chunks(one, range(len(starts))))
    return RankOneMemory(symbols, rows, columns, table, escaped)


def decode_grid(
    spec: LeafSpec, meta: dict[str, Any], pieces: Sequence[memoryview], parent: Memory | None, sibling: Array | None
) -> ValuesMemory:
    """The stream format "grid"."""
    if spec.dtype not in ("float32", "bfloat16") or not pieces or sibling is None:
        raise CorruptDataError(f"grid: {spec.dtype} has none, or its second moment is missing")
    head = Reader(pieces[0], "grid")
    table = _read_table(head)
    head.end()

    def one(piece: memoryview, start: int, n: int) -> NpArray:
        data = Reader(piece, "grid")
        symbols, factors = entropy.decode_numbers(data.block(), n)
        beside: dict[str, Any] = {}
        if factors is not None:
            beside = {"moved": factors.distances(signed(symbols)), "moves": move_table(_read_bfloat16s(data, 1)[0])}
        escaped = _read_escaped(data, symbols, OFF_GRID)
        values: NpArray = grid_values(symbols, sibling[start : start + n], table, **beside)
        if escaped.size:
            values[symbols == OFF_GRID] = escaped
        return values

    return _decode(spec, pieces, one)


def square_of(values: Array, spec: LeafSpec) -> Array:
    """A decoded second moment as the grid needs it: float32, what is negative or not finite as 0."""
    square = as_float32(values, spec)
    # Extremes first: they need no memory, and a NaN is an extreme.
    if not spec.size or (float(square.min()) >= 0 and float(square.max()) < math.inf):
        return square
    if on_gpu(square):
        return square.where((square >= 0) & (square < math.inf), 0.0)
    return np.where((square >= 0) & (square < np.inf), square, np.float32(0))
