"""Moments coded together: second ones by rank one or in log buckets, first ones on a grid."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...kernels.error_sums import Distortion, distortion_many
from ...kernels.histogram import bucket_index
from ...kernels.moment_grid import ESCAPE as OFF_GRID
from ...kernels.moment_grid import grid_symbols, grid_values
from ...kernels.scales import ESCAPE as NO_RESIDUAL
from ...kernels.scales import factors_many, residual_factors, residual_symbols_many, residual_values_many
from .. import entropy
from ..base import Leaf, Reference, Stored
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..moments.firstmoment import (
    ATTEMPTS,
    MOST_OFF_GRID,
    NOTHING_LEFT,
    FirstMoment,
    decode_grid,
    is_in_another_unit,
    sample_of,
)
from ..moments.logbuckets import LogBuckets, decode_log_buckets
from ..moments.secondmoment import (
    FACTOR_BITS,
    RankOneReference,
    SecondMoment,
    factor_values,
    matrix_shape,
    pack_factors,
    read_factors,
)
from ..moments.symbolvalues import (
    as_float32,
    as_stored,
    escapes_of,
    pack_chunk,
    pack_table,
    read_chunk,
    read_table,
    with_escapes,
)
from ..state.casting import rounded, to_bfloat16
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes
from .joined import (
    Joined,
    JoinedValues,
    Pieces,
    StoredBundle,
    Together,
    ends_of,
    joined_leaf,
    joined_spec,
    matrix_of,
    parts,
)

_FEWEST = 4
"""Fewer first moments of a step of their own take the next finer one: a table costs more than it gives."""


@dataclass(frozen=True, slots=True)
class JoinedRankOne:
    """References of second moments as rank one, joined, with one table of factors.

    Args:
        symbols: uint8 [n].
        rows: int32, log buckets of the row factors of one matrix after another.
        columns: int32, of the column factors.
        table: float32 [256], factor of each symbol, of all matrices.
        escaped: float32, values of the elements without a residual, in order.
        specs: of the arrays.
    """

    symbols: NpArray
    rows: NpArray
    columns: NpArray
    table: NpArray
    escaped: NpArray
    specs: Sequence[LeafSpec]

    def split(self) -> list[Reference]:
        """See `Joined`."""
        found: list[Reference] = []
        i = j = k = 0
        for symbols, spec in zip(parts(self.symbols, self.specs), self.specs, strict=True):
            height = spec.shape[0]
            width = spec.size // height
            end = k + (int(np.count_nonzero(symbols == NO_RESIDUAL)) if self.escaped.size else 0)
            rows, columns = self.rows[i : i + height], self.columns[j : j + width]
            found.append(RankOneReference(symbols, rows, columns, self.table, self.escaped[k:end]))
            i, j, k = i + height, j + width, end
        return found

    def values(self) -> NpArray:
        """Decoded values, float32."""
        rows, columns = factor_values(self.rows), factor_values(self.columns)
        values = residual_values_many(self.symbols, rows, columns, _shapes(self.specs), self.table)
        restored: NpArray = with_escapes(values, self.symbols, NO_RESIDUAL, self.escaped)
        return restored

    def data(self) -> NpArray:
        """See `Joined`."""
        return rounded(self.values(), joined_spec(self.specs))


def _shapes(specs: Sequence[LeafSpec]) -> NpArray:
    return np.array([matrix_shape(spec) for spec in specs], np.int64)


def join_rank_one(references: Sequence[Reference | None], specs: Sequence[LeafSpec]) -> JoinedRankOne | None:
    """See `BundleStream.join`; members of a bundle share one table."""
    found: list[RankOneReference] = []
    for reference, spec in zip(references, specs, strict=True):
        if not isinstance(reference, RankOneReference) or reference.symbols.size != spec.size:
            return None
        found.append(reference)
    joined = (np.concatenate([getattr(r, name) for r in found]) for name in ("symbols", "rows", "columns", "escaped"))
    symbols, rows, columns, escaped = joined
    return JoinedRankOne(symbols, rows, columns, found[0].table, escaped, specs)


def second_moments_together(
    codec: SecondMoment, leaves: Sequence[Leaf], parents: Sequence[Reference | None]
) -> Together:
    """Encode second moments of one dtype together; all or none are matrices."""
    specs = [leaf.spec for leaf in leaves]
    leaf = joined_leaf(leaves)
    if matrix_shape(specs[0]) is None:
        return _in_log_buckets(LogBuckets(codec.alpha), leaf, specs)
    before, shapes = join_rank_one(parents, specs), _shapes(specs)
    x = as_float32(leaf.flat, leaf.spec)
    rows, columns = (bucket_index(factors, FACTOR_BITS) for factors in factors_many(x, shapes))
    of_rows, of_columns = factor_values(rows), factor_values(columns)
    old = None if before is None else before.symbols
    symbols, sums, counts = residual_symbols_many(x, of_rows, of_columns, shapes, codec.octaves, old)
    factors = residual_factors(sums, counts, codec.octaves)
    used = (counts > 0) & (np.arange(256) > NO_RESIDUAL)
    if (used & ~((factors > 2.0**-125) & (factors < 2.0**125))).any():  # no normal bfloat16 holds these factors
        return _each_alone(leaves)
    escaped = escapes_of(x, symbols, NO_RESIDUAL, counts)
    joined = JoinedRankOne(symbols, rows, columns, to_bfloat16(factors), escaped, specs)
    restored = as_stored(joined.values(), leaf.spec)
    errors = [met.largest_relative for met in distortion_many(leaf.flat, restored, ends_of(specs))]
    if math.inf in errors:  # a factor took a value beyond the dtype's range
        return _each_alone(leaves)
    pieces = _rank_one_pieces(joined, before, counts)
    stored = [
        Stored("rank-one", {}, (), reference, error, "relative", decoded=partial(_given, values))
        for reference, error, values in zip(joined.split(), errors, parts(restored, specs), strict=True)
    ]
    return Together([StoredBundle(range(len(leaves)), "rank-one", {}, pieces, before is not None, stored)], {})


def _given(values: Array) -> Array:
    return values


def _each_alone(leaves: Sequence[Leaf]) -> Together:
    return Together([], dict.fromkeys(range(len(leaves))))


def _in_log_buckets(codec: LogBuckets, leaf: Leaf, specs: Sequence[LeafSpec]) -> Together:
    stored = codec.encode(leaf, None)
    if stored.stream != "log-buckets" or stored.decoded is None:
        return Together([], dict.fromkeys(range(len(specs))))
    values = stored.decoded()
    errors = distortion_many(leaf.flat, values, ends_of(specs))
    found = [
        dataclasses.replace(stored, pieces=(), error=met.largest_relative, decoded=partial(_given, own))
        for met, own in zip(errors, parts(values, specs), strict=True)
    ]
    return Together([StoredBundle(range(len(specs)), stored.stream, stored.meta, stored.pieces, False, found)], {})


def log_buckets_together(codec: LogBuckets, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Together:
    """Encode arrays of one dtype in log buckets, together."""
    return _in_log_buckets(codec, joined_leaf(leaves), [leaf.spec for leaf in leaves])


def _rank_one_pieces(joined: JoinedRankOne, before: JoinedRankOne | None, counts: NpArray | None) -> list[bytes]:
    head = Writer()
    head.block(pack_factors((joined.rows, joined.columns), None if before is None else (before.rows, before.columns)))
    head.raw(pack_table(joined.table))
    old, matrix = None if before is None else before.symbols, matrix_of(joined.specs, entropy.Numbers.CENTERED)
    return [head.done(), pack_chunk(joined.symbols, joined.escaped, counts, old, matrix)]


def rebase_rank_one_together(joined: Joined, before: Joined | None) -> Pieces:
    """Encode symbols and factors as a base or against another parent."""
    assert isinstance(joined, JoinedRankOne)
    return {}, _rank_one_pieces(joined, before if isinstance(before, JoinedRankOne) else None, None)


def decode_rank_one_together(
    specs: Sequence[LeafSpec],
    meta: dict[str, Any],
    pieces: Sequence[memoryview],
    before: Joined | None,
    square: Array | None,
) -> JoinedRankOne:
    """Decode second moments that were coded together by rank one."""
    if len(pieces) != 2 or any(matrix_shape(spec) is None for spec in specs):
        raise CorruptDataError("rank one: a bundle of no matrices, or not in two pieces")
    old = before if isinstance(before, JoinedRankOne) else None
    shapes = _shapes(specs)
    head = Reader(pieces[0], "rank one")
    across, down = (int(lines) for lines in shapes.sum(axis=0))
    rows, columns = read_factors(head.block(), across, down, None if old is None else (old.rows, old.columns))
    table = read_table(head)
    head.end()
    size = sum(spec.size for spec in specs)
    symbols, escaped = read_chunk(pieces[1], size, NO_RESIDUAL, None if old is None else old.symbols)
    return JoinedRankOne(symbols, rows, columns, table, escaped, specs)


def decode_log_buckets_together(
    specs: Sequence[LeafSpec],
    meta: dict[str, Any],
    pieces: Sequence[memoryview],
    before: Joined | None,
    square: Array | None,
) -> JoinedValues:
    """Decode arrays that were coded together in log buckets."""
    return JoinedValues(as_bytes(decode_log_buckets(joined_spec(specs), meta, pieces, None).flat), specs)


@dataclass(frozen=True, slots=True)
class _OnGrid:
    """First moments rounded to grid points of one step."""

    table: NpArray
    symbols: NpArray
    counts: NpArray
    escaped: NpArray
    met: list[Distortion]


def first_moments_together(codec: FirstMoment, leaves: Sequence[Leaf]) -> Together:
    """Encode first moments of one dtype together, grouped by the step that each needs.

    Each array comes with the squares of its scale as `Leaf.pair`.
    """
    steps: dict[int, float] = {}
    alone: dict[int, Stored | None] = {}
    waiting = {codec.step: list(range(len(leaves)))}
    for _ in range(ATTEMPTS):
        if not waiting:
            break
        missed: dict[float, list[int]] = {}
        for step, group in waiting.items():
            for i, met in zip(group, _on_grid(codec, leaves, group, step).met, strict=True):
                narrower = codec.narrower(step, met.relative_l2)
                if narrower is None:
                    steps[i] = step
                elif math.isfinite(narrower):
                    missed.setdefault(narrower, []).append(i)
                else:
                    alone[i] = None
        waiting = missed
    alone |= {i: None for group in waiting.values() for i in group}
    bundles = []
    for step, group in _by_step(steps).items():
        found = _on_grid(codec, leaves, group, step)
        late = [i for i, met in zip(group, found.met, strict=True) if codec.narrower(step, met.relative_l2)]
        if late:  # by other means of grid points than in the trial
            alone |= dict.fromkeys(late)
            group = [i for i in group if i not in set(late)]
            if not group:
                continue
            found = _on_grid(codec, leaves, group, step)
            if any(codec.narrower(step, met.relative_l2) for met in found.met):
                alone |= dict.fromkeys(group)
                continue
        specs = [leaves[i].spec for i in group]
        matrix = matrix_of(specs, entropy.Numbers.ALTERNATING)
        chunk = pack_chunk(found.symbols, found.escaped, found.counts, None, matrix)
        stored = [Stored("grid", {}, (), None, met.relative_l2, "relative L2") for met in found.met]
        bundles.append(StoredBundle(group, "grid", {}, [pack_table(found.table), chunk], False, stored))
    return Together(bundles, alone)


def _by_step(steps: dict[int, float]) -> dict[float, list[int]]:
    """Return the arrays of each step, ascending; those of a rare step use the next finer one."""
    found: dict[float, list[int]] = {}
    carried: list[int] = []
    for step in sorted(set(steps.values()), reverse=True):
        carried += [i for i, own in steps.items() if own == step]
        if len(carried) >= _FEWEST:
            found[step] = sorted(carried)
            carried = []
    if carried:
        finest = min(steps.values())
        found[finest] = sorted(found.get(finest, []) + carried)
    return found


def _on_grid(codec: FirstMoment, leaves: Sequence[Leaf], group: Sequence[int], step: float) -> _OnGrid:
    members = [leaves[i] for i in group]
    specs = [leaf.spec for leaf in members]
    leaf = joined_leaf(members)
    square = np.concatenate([leaf.pair for leaf in members])
    x = as_float32(leaf.flat, leaf.spec)
    symbols, sums, counts = grid_symbols(x, square, step)
    table = codec.table_of(sums, counts, sample_of(leaf.flat, square, leaf.spec), step)
    escaped = escapes_of(x, symbols, OFF_GRID, counts)
    values = with_escapes(grid_values(symbols, square, table), symbols, OFF_GRID, escaped)
    met = distortion_many(leaf.flat, as_stored(values, leaf.spec), ends_of(specs))
    for k, (own, scale) in enumerate(zip(parts(symbols, specs), parts(square, specs), strict=True)):
        off = counts[OFF_GRID] and np.count_nonzero(own == OFF_GRID) > MOST_OFF_GRID * own.size
        lost = met[k].relative_l2 > NOTHING_LEFT and is_in_another_unit(
            met[k].squared_norm, float(scale.sum(dtype=np.float64))
        )
        if off or lost:
            met[k] = Distortion(math.inf, 1.0, math.inf)
    return _OnGrid(table, symbols, counts, escaped, met)


def decode_grid_together(
    specs: Sequence[LeafSpec],
    meta: dict[str, Any],
    pieces: Sequence[memoryview],
    before: Joined | None,
    square: Array | None,
) -> JoinedValues:
    """Decode first moments that were coded together on a grid."""
    return JoinedValues(as_bytes(decode_grid(joined_spec(specs), meta, pieces, None, square).flat), specs)
