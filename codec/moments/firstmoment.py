"""First moments on a grid of the update m / sqrt(v).

In units of sqrt(v~), v~ being the decoded second moment, an error of half a step is half a step of the update. The
value of a grid point is the mean of what fell on it, times a gain that all points share: <m~, m> = <m, m>, so that
momentum does not shrink at a restore.

A first moment without a second one, of an optimizer whose class says how errors of it act, is on a grid in units of the
root of the rank-one estimate of its own square, which is stored with it.

Pieces: (0) the table of each grid point's mean, and the gain; without a second moment also the factors of the
estimate, as in "rank-one". (1 + i) chunk i: block: symbol stream; varint number of
escapes, their float32 patterns.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, number, or_none
from ...kernels.backend.arrays import is_torch, on_gpu, placed_with
from ...kernels.error_sums import Distortion, distortion_many
from ...kernels.histogram import bucket_index
from ...kernels.moment_grid import ESCAPE as OFF_GRID
from ...kernels.moment_grid import grid_products, grid_symbols, grid_values
from .. import entropy
from ..base import CHUNK, PART, EncodedGroup, EncodedGroups, Leaf, Parents, Reference, Stored, Unplanned
from ..errors import CorruptDataError
from ..format.fields import Piece, Reader, Writer, chunks_of, parts_of
from ..groups import Coded, ends_of, joined_leaf, matrix_of, own_parts, parts
from ..parallel import map_chunks
from ..state.casting import as_float32, to_bfloat16
from ..state.leaves import Array, LeafSpec, NpArray
from .logbuckets import LogBuckets, ValuesReference, check_alpha
from .secondmoment import FACTOR_BITS, factor_values, factors, matrix_shape, pack_factors, read_factors
from .symbolvalues import (
    as_stored,
    escapes_of,
    pack_chunk,
    pack_table,
    put_decoded,
    read_chunk,
    read_table,
    symbols_there,
    with_escapes,
)

LARGEST_ERROR = 0.58
"""Relative L2 error that no first moment exceeds unless its codec allows it (`max_error=1`).

Of a grid whose error is e without the gain it is e / sqrt(1 - e**2) with it: 0.58 for an error of 0.5."""
_SAMPLE, _RUNS = 1 << 15, 64
"""Elements from which the first step is computed, and the contiguous runs that they are taken in."""
_LARGEST_GAIN = 1.5
_GAIN_STEPS = 256
"""Gains are multiples of 1 / 256, so that no rounding of sums is seen in the bytes."""
_ATTEMPTS = 12
"""Steps that are tried before log buckets."""
_FEWEST_MOMENTS = 4
"""Fewer first moments of a step of their own take the next finer one: a table costs more than it gives."""
_MOST_OFF_GRID = 0.01
"""Share of the elements that may be on no grid point."""
_NOTHING_LEFT = 0.99
"""Relative L2 error above which a grid loses almost all of the values; zeros have 1."""
_INFINITY = 0x7F800000
"""Pattern of infinity as float32."""
_SMALLEST = 1 / 64
"""Norm of a first moment over that of the roots of its second one, below which the two do not belong together."""

_STEPS = {"sgd": 1.0, "lion": 1.0, "adopt": 0.5, "ademamix": 0.5, "muon": 0.25}
"""Grid steps in units of the rank-one estimate, by the class of the optimizer in lower case.

Muon's is the smallest, because orthogonalizing amplifies small directions. Other classes have not been measured."""
_HALF = 0.5
"""The codec's step at which those of the classes hold; a smaller one makes them smaller."""


@dataclass(frozen=True, slots=True)
class FirstMoment(Unplanned):
    """Store a first moment on a grid in units of the root of its second moment.

    A matrix whose parameter does not have a second moment that is known to be in its unit is stored in units of its own
    rank-one estimate, if `kinds` says that its optimizer is SGD, Lion, ADOPT, AdEMAMix or Muon.

    A first moment is stored as log buckets instead in three cases: nothing gives a unit (LaProp, vectors); the unit
    does not give a grid (v = 0, but m is not 0); or the grid would lose almost all of it (a relative L2 error above
    0.99) because m and v are not averages of the same gradients (the norm of m is below 1/64 of that of sqrt(v), as in
    some kinds of Adafactor).

    Args:
        step: distance of grid points in units of m / sqrt(v), in (0, 16]; default 0.5.
        alpha: relative error for arrays without a second moment, see `LogBuckets`; default 0.25.
        max_error: relative L2 error the array may have, in (0, 1]: the widest step that keeps to it, no wider than
            `step`, else log buckets, else exact. None (default): the lesser of 0.58 and `Config.max_rel_error`. 1: no
            bound and no gain, so that a wide step may restore the array as zeros.

    Raises:
        BadArgumentError: a value out of range.
    """

    step: float = 0.5
    alpha: float = 0.25
    max_error: float | None = None
    id: ClassVar[str] = "first moment"

    def __post_init__(self) -> None:
        check_field(self, "step", number, 0, 16, open_low=True)
        check_alpha(self)
        check_field(self, "max_error", or_none, number, 0, 1, open_low=True)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; `error` is the relative L2 error."""
        if leaf.pair is not None:
            stored = self._alone(leaf, placed_with(leaf.pair, leaf.flat), self.step)
        else:
            stored = self._on_own_estimate(leaf)
        if stored is not None:
            return stored
        # Log buckets keep each element to `alpha`, and so the array; only a target may ask for more than that.
        wanted = None if self.max_error is None or self.max_error >= self.alpha else self.max_error
        return LogBuckets(self.alpha, wanted).encode(leaf, parent, unbiased=True)

    def groups(self, leaf: Leaf) -> Hashable | None:
        """Return True if arrays can be coded together: those with a second moment."""
        return True if leaf.pair is not None and leaf.spec.dtype in ("float32", "bfloat16") else None

    def encode_group(self, leaves: Sequence[Leaf], parents: Parents, plans: Sequence[None]) -> EncodedGroups:
        """Encode first moments of one dtype together, grouped by the step that each needs.

        Each array comes with the squares of its scale as `Leaf.pair`.
        """
        groups = self._on_grids(leaves, self.step)
        late = set(range(len(leaves))).difference(*(group.members for group in groups))
        return EncodedGroups(groups, dict.fromkeys(late))

    def _on_own_estimate(self, leaf: Leaf) -> Stored | None:
        """Return the array on a grid in units of its own rank-one estimate; None: no grid suits it."""
        widest, shape = _STEPS.get((leaf.kind.optimizer or "").lower()), matrix_shape(leaf.spec)
        if widest is None or shape is None:
            return None
        x = as_float32(leaf.flat, leaf.spec)
        with np.errstate(over="ignore"):
            sides = factors(x * x, LeafSpec(leaf.spec.library, "float32", leaf.spec.shape), shape)
        if not all(np.isfinite(side).all() for side in sides):
            return None
        rows, columns = (bucket_index(side, FACTOR_BITS) for side in sides)
        stored = self._alone(leaf, _estimate(rows, columns, leaf.flat), widest * min(self.step / _HALF, 1.0))
        if stored is None:
            return None
        head = Writer()
        head.raw(*parts_of(stored.pieces[0]))
        head.block(pack_factors((rows, columns), None))
        return dataclasses.replace(stored, stream="own-grid", pieces=[head.done(), *stored.pieces[1:]])

    def _alone(self, leaf: Leaf, square: Array, step: float) -> Stored | None:
        """Return one array on the widest grid within the bound, at most `step`; None: no grid."""
        groups = self._on_grids([dataclasses.replace(leaf, pair=square)], self._first_step(leaf, square, step))
        return groups[0].only if groups else None

    def _on_grids(self, leaves: Sequence[Leaf], step: float) -> list[EncodedGroup]:
        """Return groups of arrays on the widest grids within the bound, at most `step` apart."""
        steps: dict[int, float] = {}
        tried: dict[float, tuple[list[int], _OnGrid]] = {}
        waiting = {step: list(range(len(leaves)))}
        for _ in range(_ATTEMPTS):
            missed: dict[float, list[int]] = {}
            for step, group in waiting.items():
                found = self._on_grid([leaves[i] for i in group], step)
                wanted = [self.narrower(step, error) for error in found.errors]
                if not any(wanted):
                    tried[step] = group, found
                for i, narrower in zip(group, wanted, strict=True):
                    if narrower is None:
                        steps[i] = step
                    elif math.isfinite(narrower):
                        missed.setdefault(narrower, []).append(i)
                del found  # a byte an element
            waiting = missed
        groups = []
        for step, group in _by_step(steps).items():
            for _ in range(2):  # means of the grid points of more arrays may put one out of bounds
                known = tried.pop(step, None)
                is_known = known is not None and known[0] == group
                found = known[1] if known and is_known else self._on_grid([leaves[i] for i in group], step)
                kept = [i for i, error in zip(group, found.errors, strict=True) if not self.narrower(step, error)]
                if len(kept) == len(group):
                    groups.append(found.encoded(group))
                if len(kept) in (0, len(group)):
                    break
                group = kept
        return groups

    @property
    def bound(self) -> float:
        """Relative L2 error that an array may have."""
        return LARGEST_ERROR if self.max_error is None else self.max_error

    def narrower(self, step: float, error: float) -> float | None:
        """Return the step to try next after a step that gave this relative L2 error.

        None: the error is within the bound. Infinite: no step will do.
        """
        if not math.isfinite(error):
            return math.inf
        if self.bound >= 1 or error <= self.bound:
            return None
        # The error is about in proportion to the step, once that is not much more than the values.
        eighths = max(1, math.ceil(8 * (math.log2(error) - math.log2(self.bound))))
        return float(step * 2.0 ** (-eighths / 8))

    def _first_step(self, leaf: Leaf, square: Array, step: float) -> float:
        """Return the widest step, at most `step`, whose error on a sample is within the bound."""
        if self.bound >= 1 or leaf.spec.size < 4 * _SAMPLE:  # all elements are counted as quickly
            return step
        x, own = (_sampled(values) for values in (leaf.flat, square))
        x = as_float32(x, leaf.spec)
        for _ in range(_ATTEMPTS):
            symbols, sums, counts = grid_symbols(x, own, step)
            table = GridTable.of(sums, counts, grid_products(x, own, symbols, means_of(sums, counts)), self.bound < 1)
            narrower = self.narrower(step, table.error.relative_l2)
            if narrower is None or not math.isfinite(narrower):
                break
            step = narrower
        return step

    def _on_grid(self, leaves: Sequence[Leaf], step: float) -> _OnGrid:
        """Round arrays to grid points `step` apart."""
        specs, leaf = [leaf.spec for leaf in leaves], joined_leaf(leaves)
        pairs: Any = [leaf.pair for leaf in leaves]
        square = pairs[0] if len(pairs) == 1 else np.concatenate(pairs)

        def one(start: int) -> tuple[Array, NpArray, NpArray, Array]:
            x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
            symbols, sums, counts = grid_symbols(x, square[start : start + CHUNK], step)
            return symbols, sums, counts, escapes_of(x, symbols, OFF_GRID, counts)

        chunks = map_chunks(one, range(0, leaf.spec.size, CHUNK))
        sums, counts = (sum((p[i] for p in chunks), np.zeros(256)) for i in (1, 2))
        means = means_of(sums, counts)

        def products(number: int) -> NpArray:
            part = slice(number * CHUNK, (number + 1) * CHUNK)
            x = as_float32(leaf.flat[part], leaf.spec)
            sums: NpArray = np.array(grid_products(x, square[part], chunks[number][0], means))
            return sums

        totals: NpArray = sum(map_chunks(products, range(len(chunks))), np.zeros(3))
        table = GridTable.of(sums, counts, totals.tolist(), self.bound < 1)
        off = [counts[OFF_GRID]]
        if len(leaves) == 1:  # the sums give its error; rounding the gain and to the dtype adds to it
            rounding = 2.0**-22 if leaf.spec.dtype == "float32" else 2.0**-9
            errors = [table.error.relative_l2 + (rounding if totals[0] else 0.0)]
        else:
            ((symbols, _, _, escaped),) = chunks
            off = [np.count_nonzero(part == OFF_GRID) for part in parts(symbols, specs)]
            values = with_escapes(grid_values(symbols, square, table.values), symbols, OFF_GRID, escaped)
            met = distortion_many(leaf.flat, as_stored(values, leaf.spec), ends_of(specs))
            errors = [one.relative_l2 for one in met]
        flats, squares = parts(leaf.flat, specs), parts(square, specs)
        for k, spec in enumerate(specs):
            if off[k] > _MOST_OFF_GRID * spec.size or (
                errors[k] > _NOTHING_LEFT and _in_another_unit(flats[k], spec, squares[k])
            ):
                errors[k] = math.inf
        return _OnGrid(specs, table, chunks, errors)


@dataclass(frozen=True, slots=True)
class _OnGrid:
    """First moments rounded to grid points of one step.

    Args:
        specs: of the arrays.
        table: of the values of grid points.
        chunks: of the joined arrays: symbols, sums and counts by symbol, and escaped values.
        errors: relative L2 error of each array; infinite if too many elements are off the grid, or nothing is left.
    """

    specs: Sequence[LeafSpec]
    table: GridTable
    chunks: Sequence[tuple[Array, NpArray, NpArray, Array]]
    errors: list[float]

    def encoded(self, members: Sequence[int]) -> EncodedGroup:
        """Return the arrays, with these numbers, as a group."""

        def packed(number: int) -> Piece:
            symbols, _, known, escaped = self.chunks[number]
            matrix = matrix_of(self.specs, number * CHUNK, entropy.Numbers.ALTERNATING)
            return pack_chunk(symbols, escaped, known, None, matrix)

        pieces = [self.table.packed(), *map_chunks(packed, range(len(self.chunks)))]
        stored = [Stored("grid", {}, (), None, error, "relative L2") for error in self.errors]
        return EncodedGroup(members, "grid", {}, pieces, False, stored)


def _by_step(steps: dict[int, float]) -> dict[float, list[int]]:
    """Return the arrays of each step, ascending; those of a rare step use the next finer one."""
    found: dict[float, list[int]] = {}
    carried: list[int] = []
    for step in sorted(set(steps.values()), reverse=True):
        carried += [i for i, own in steps.items() if own == step]
        if len(carried) >= _FEWEST_MOMENTS:
            found[step] = sorted(carried)
            carried = []
    if carried:
        finest = min(steps.values())
        found[finest] = sorted(found.get(finest, []) + carried)
    return found


def _sampled(x: Array) -> Array:
    """Return contiguous runs of an array of more than `_SAMPLE` elements, joined."""
    length = _SAMPLE // _RUNS
    starts = np.linspace(0, x.shape[0] - length, _RUNS).astype(np.int64).tolist()
    runs = [x[start : start + length] for start in starts]
    if is_torch(x):
        import torch

        return torch.cat(runs)
    return np.concatenate(runs)


def means_of(sums: NpArray, counts: NpArray) -> NpArray:
    """Return the mean of each grid point as bfloat16, float32 [256]; 0 for the escape."""
    with np.errstate(divide="ignore", invalid="ignore"):
        means: NpArray = np.where(counts > 0, sums / counts, 0.0)
    means[OFF_GRID] = 0.0
    rounded: NpArray = to_bfloat16(means)
    return rounded


@dataclass(frozen=True, slots=True)
class GridTable:
    """Values of grid points: their means times one gain.

    Args:
        means: values of bfloat16, float32 [256].
        gain: in multiples of 1 / 256.
        error: distortion of the array with them, of its elements that have a grid point.
    """

    means: NpArray
    gain: int
    error: Distortion

    @staticmethod
    def of(sums: NpArray, counts: NpArray, products: Sequence[float], has_gain: bool) -> GridTable:
        """Return the table of grid points.

        Args:
            sums: of the elements of each symbol, in roots of the second moment.
            counts: of each symbol.
            products: `grid_products` with the means.
            has_gain: whether <m~, m> = <m, m>; a grid that may lose nearly all keeps its means.
        """
        norm, product, squares = products
        gain = 1.0
        if has_gain and 0 < product < math.inf:
            gain = min(max(norm / product, 1 / _LARGEST_GAIN), _LARGEST_GAIN)
        steps = round(_GAIN_STEPS * gain)
        left = norm - 2 * (steps / _GAIN_STEPS) * product + (steps / _GAIN_STEPS) ** 2 * squares
        return GridTable(means_of(sums, counts), steps, Distortion(max(left, 0.0), norm, 0.0))

    @property
    def values(self) -> NpArray:
        """Return the value of each symbol, float32 [256]."""
        return with_gain(self.means, self.gain)

    def packed(self) -> bytes:
        """Return the bytes of the table."""
        out = Writer()
        out.raw(pack_table(self.means))
        out.varint(self.gain)
        return out.done()


def with_gain(means: NpArray, gain: int) -> NpArray:
    """Return float32 means times a gain in steps."""
    return means * np.float32(gain / _GAIN_STEPS)


def _in_another_unit(flat: Array, spec: LeafSpec, square: Array) -> bool:
    """Return whether m is too small compared with sqrt(v) to be a mean of gradients.

    An average of pure noise with a beta of 0.999 is 1/45 of its size, so Adam's moments are above `_SMALLEST`.
    """
    first = second = 0.0
    for start in range(0, spec.size, CHUNK):
        x = as_float32(flat[start : start + CHUNK], spec)
        v = square[start : start + CHUNK]
        x, v = (x.double(), v.double()) if on_gpu(x) else (x.astype(np.float64), v.astype(np.float64))
        first, second = first + float((x * x).sum()), second + float(v.sum())
    return 0 < first < _SMALLEST**2 * second


def decode_grid(coded: Coded) -> list[ValuesReference]:
    """Decode the stream format "grid"."""
    spec, pieces, pair = coded.spec, coded.pieces, coded.pair
    if spec.dtype not in ("float32", "bfloat16") or not pieces or pair is None:
        raise CorruptDataError(f"grid: dtype {spec.dtype} cannot be stored on a grid, or the second moment is missing")
    head = Reader(pieces[0], "grid")
    table = _read_values(head)
    head.end()
    return _decoded(coded, lambda room: placed_with(pair, room), table)


def decode_own_grid(coded: Coded) -> list[ValuesReference]:
    """Decode the stream format "own-grid"."""
    spec, pieces = coded.spec, coded.pieces
    shape = matrix_shape(spec)
    if shape is None:
        raise CorruptDataError(f"own grid: {spec.dtype} {spec.shape} is not a matrix that can have one")
    chunks_of("own grid", pieces, spec.size, 8 * (shape[0] + shape[1]) + spec.nbytes, step=CHUNK, head=True)
    head = Reader(pieces[0], "own grid")
    table = _read_values(head)
    rows, columns = read_factors(head.block(), *shape, None)
    head.end()
    return _decoded(coded, lambda room: _estimate(rows, columns, room), table)


def _estimate(rows: NpArray, columns: NpArray, flat: Array) -> Array:
    """Return products of factors in the order of a matrix, float32, on the device of an array."""
    across, down = (placed_with(factor_values(side), flat) for side in (rows, columns))
    estimate: Array = (across[:, None] * down[None, :]).reshape(-1)
    return estimate


def _read_values(head: Reader) -> NpArray:
    means, gain = read_table(head), head.varint()
    if gain > _GAIN_STEPS * _LARGEST_GAIN:
        raise CorruptDataError(f"grid: a gain of {gain} steps is out of range")
    return with_gain(means, gain)


def _decoded(coded: Coded, square: Callable[[Array], Array], table: NpArray) -> list[ValuesReference]:
    """Decode grid symbols where there is room; `square` returns the squares of the scales there."""
    spec = coded.spec
    chunks, data = chunks_of("moment", coded.pieces, spec.size, spec.nbytes, step=CHUNK, head=True), coded.room()
    pair, step = square(data), CHUNK if on_gpu(data) else PART

    there = symbols_there(chunks)

    def one(number: int) -> None:
        piece, part = chunks[number]
        symbols, escaped = read_chunk(piece, part.stop - part.start, OFF_GRID, known=there[number])
        for start in range(0, symbols.size, step):
            own, at = symbols[start : start + step], part.start + start
            near = placed_with(own, data)
            values = grid_values(near, pair[at : at + own.size], table)
            count = int(np.count_nonzero(own == OFF_GRID)) if escaped.size else 0
            put_decoded(data, at, values, near, OFF_GRID, escaped[:count], spec)
            escaped = escaped[count:]

    map_chunks(one, range(len(chunks)))
    return [ValuesReference(flat) for flat in own_parts(data, coded.specs)]


def square_of(values: Array, spec: LeafSpec) -> Array:
    """Return a decoded second moment as float32, with 0 for negative and non-finite values."""
    square = as_float32(values, spec)
    if not on_gpu(square):
        # The patterns of infinity, NaN and negative numbers are above those of other numbers: one pass, no memory.
        if not spec.size or int(square.view(np.uint32).max()) < _INFINITY:
            return square
        return np.where((square >= 0) & (square < np.inf), square, np.float32(0))
    if not spec.size or (float(square.min()) >= 0 and float(square.max()) < math.inf):
        return square
    return square.where((square >= 0) & (square < math.inf), 0.0)
