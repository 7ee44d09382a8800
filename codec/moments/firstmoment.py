"""First moments on a grid of the update m / sqrt(v).

In units of sqrt(v~), v~ being the decoded second moment, an error of half a step is half a step of the update. The
value of a grid point is the mean of what fell on it, times a gain that all points share: <m~, m> = <m, m>, so that
momentum does not shrink at a restore.

Pieces: (0) the table of each grid point's mean, and the gain. (1 + i) chunk i: block: symbol stream; varint number of
escapes, their float32 patterns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, number, or_none
from ...kernels.backend.arrays import is_torch, on_gpu
from ...kernels.error_sums import Distortion
from ...kernels.moment_grid import ESCAPE as OFF_GRID
from ...kernels.moment_grid import grid_products, grid_symbols, grid_values
from .. import entropy
from ..base import CHUNK, Leaf, Reference, Stored
from ..entropy.row_column_classes import columns_of
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..parallel import map_chunks
from ..state.casting import to_bfloat16
from ..state.leaves import Array, LeafSpec, NpArray, on_host
from .logbuckets import LogBuckets, ValuesReference, check_alpha
from .symbolvalues import (
    as_float32,
    decoded_values,
    escapes_of,
    pack_chunk,
    pack_table,
    placed_with,
    read_chunk,
    read_table,
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
ATTEMPTS = 12
"""Steps that are tried before log buckets."""
MOST_OFF_GRID = 0.01
"""Share of the elements that may be on no grid point."""
NOTHING_LEFT = 0.99
"""Relative L2 error above which a grid loses almost all of the values; zeros have 1."""
_INFINITY = 0x7F800000
"""Pattern of infinity as float32."""
_SMALLEST = 1 / 64
"""Norm of a first moment over that of the roots of its second one, below which the two do not belong together."""


@dataclass(frozen=True, slots=True)
class FirstMoment:
    """Store a first moment on a grid in units of the root of its second moment.

    A first moment is stored as log buckets instead in three cases: its parameter does not have a second moment that
    is known to be in its unit (SGD, Lion, LaProp); the second moment does not give a grid (v = 0, but m is not 0); or
    the grid would lose almost all of it (a relative L2 error above 0.99) because m and v are not averages of the same
    gradients (the norm of m is below 1/64 of that of sqrt(v), as in some kinds of Adafactor).

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

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Sequence[None]:
        """Return None for each array: this codec needs no plans."""
        return [None] * len(leaves)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; `error` is the relative L2 error."""
        if leaf.pair is not None:
            square = placed_with(leaf.pair, leaf.flat)
            step = self._first_step(leaf, square)
            for _ in range(ATTEMPTS):
                error, stored = self._on_grid(leaf, square, step)
                if stored is not None:
                    return stored
                step = self.narrower(step, error) or step
                if not math.isfinite(step):
                    break
        # Log buckets keep each element to `alpha`, and so the array; only a target may ask for more than that.
        wanted = None if self.max_error is None or self.max_error >= self.alpha else self.max_error
        return LogBuckets(self.alpha, wanted).encode(leaf, parent, unbiased=True)

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

    def _first_step(self, leaf: Leaf, square: Array) -> float:
        """Return the widest step whose error keeps to the bound on a sample of an array."""
        step = self.step
        if self.bound >= 1 or leaf.spec.size < 4 * _SAMPLE:  # all elements are counted as quickly
            return step
        x, own = (_sampled(values) for values in (leaf.flat, square))
        x = as_float32(x, leaf.spec)
        for _ in range(ATTEMPTS):
            symbols, sums, counts = grid_symbols(x, own, step)
            table = GridTable.of(sums, counts, grid_products(x, own, symbols, means_of(sums, counts)), self.bound < 1)
            narrower = self.narrower(step, table.error.relative_l2)
            if narrower is None or not math.isfinite(narrower):
                break
            step = narrower
        return step

    def _on_grid(self, leaf: Leaf, square: Array, step: float) -> tuple[float, Stored | None]:
        """Round to grid points `step` apart; return the error, and the result if it is in bounds.

        The error is infinite if too many elements are off the grid.
        """

        def one(start: int) -> tuple[Array, NpArray, NpArray, Array]:
            x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
            symbols, sums, counts = grid_symbols(x, square[start : start + CHUNK], step)
            return symbols, sums, counts, escapes_of(x, symbols, OFF_GRID, counts)

        parts = map_chunks(one, range(0, leaf.spec.size, CHUNK))
        sums, counts = (sum((p[i] for p in parts), np.zeros(256)) for i in (1, 2))
        if counts[OFF_GRID] > MOST_OFF_GRID * leaf.spec.size:
            return math.inf, None
        means = means_of(sums, counts)

        def products(number: int) -> NpArray:
            part = slice(number * CHUNK, (number + 1) * CHUNK)
            x = as_float32(leaf.flat[part], leaf.spec)
            return np.array(grid_products(x, square[part], parts[number][0], means))

        totals: NpArray = sum(map_chunks(products, range(len(parts))), np.zeros(3))
        table = GridTable.of(sums, counts, totals.tolist(), self.bound < 1)
        error = table.error.relative_l2
        if leaf.spec.dtype != "float32":  # rounding to the dtype adds to it
            error += 2.0**-9
        if error > NOTHING_LEFT and _in_another_unit(leaf, square):
            return math.inf, None
        if self.narrower(step, error) is not None:
            return error, None
        columns = columns_of(leaf.spec.shape)

        def packed(number: int) -> bytes:
            symbols, _, known, escaped = parts[number]
            matrix = entropy.Matrix(columns, number * CHUNK, numbers=entropy.Numbers.ALTERNATING)
            return pack_chunk(on_host(symbols), on_host(escaped), known, None, matrix)

        pieces = [table.packed(), *map_chunks(packed, range(len(parts)))]
        return error, Stored("grid", {}, pieces, None, error, "relative L2")


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


def _in_another_unit(leaf: Leaf, square: Array) -> bool:
    """Return whether m is too small compared with sqrt(v) to be a mean of gradients.

    An average of pure noise with a beta of 0.999 is 1/45 of its size, so Adam's moments are above `_SMALLEST`.
    """
    first = second = 0.0
    for start in range(0, leaf.spec.size, CHUNK):
        x = as_float32(leaf.flat[start : start + CHUNK], leaf.spec)
        v = square[start : start + CHUNK]
        x, v = (x.double(), v.double()) if on_gpu(x) else (x.astype(np.float64), v.astype(np.float64))
        first, second = first + float((x * x).sum()), second + float(v.sum())
    return is_in_another_unit(first, second)


def is_in_another_unit(first: float, second: float) -> bool:
    """Return whether squared norms of m and sqrt(v) show that they do not belong together."""
    return 0 < first < _SMALLEST**2 * second


def decode_grid(
    spec: LeafSpec, meta: dict[str, Any], pieces: Sequence[memoryview], parent: Reference | None, pair: Array | None
) -> ValuesReference:
    """Decode the stream format "grid"."""
    if spec.dtype not in ("float32", "bfloat16") or not pieces or pair is None:
        raise CorruptDataError(f"grid: dtype {spec.dtype} cannot be stored on a grid, or the second moment is missing")
    head = Reader(pieces[0], "grid")
    means, gain = read_table(head), head.varint()
    head.end()
    if gain > _GAIN_STEPS * _LARGEST_GAIN:
        raise CorruptDataError(f"grid: a gain of {gain} steps is out of range")
    table = with_gain(means, gain)

    def one(piece: memoryview, start: int, n: int) -> NpArray:
        symbols, escaped = read_chunk(piece, n, OFF_GRID)
        values = grid_values(symbols, pair[start : start + n], table)
        restored: NpArray = with_escapes(values, symbols, OFF_GRID, escaped)
        return restored

    return decoded_values(spec, pieces, one)


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
