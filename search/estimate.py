"""Estimation of size and error of many points without encoding, from samples.

Thresholds come from sketches of the whole arrays, as in the codec. Codebook, levels, pair counts with the parent and
error come from the histogram of an array and a sample of its blocks, by the codec's own functions. The entropy of the
counts approximates the coder. Results are shared between all points that use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..codec.base import Leaf, Reference
from ..codec.compress import grouped
from ..codec.parallel import map_chunks
from ..codec.state.leaves import NpArray
from ..codec.weights import planning
from ..codec.weights.codebook import Cells, Fit, few_values, fit_closely, held_codebook
from ..codec.weights.importance import weights_of
from ..codec.weights.level_assignment import Trade, cheapest_levels, mean_roots, trades
from ..codec.weights.levels import MAX_BINS, LevelsReference, compatible_parent
from ..codec.weights.planning import Limits
from ..codec.weights.quantize import Quantize
from ..kernels.backend.arrays import is_torch
from ..kernels.histogram import Histogram, kept_histogram
from ..kernels.quantizer import Thresholds, assign
from . import sample as sizes
from .cube import Point, normal
from .sample import Sample, Unit, chosen_units, energy, sample

_PATTERN, _SHORTEST = 1 << 14, 64
"""Number of elements of all arrays whose errors are kept to compare points; and the minimum for each array."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected size and error of a point.

    Args:
        nbytes: stored bytes of the arrays it changes.
        error: mean over their elements of the array's squared relative L2 error.
        pruned: share of `error` that comes from pruned weights.
        pattern: [k] float32, relative errors of some elements of every array. The product of the patterns of two points
            is the mean over arrays of <d, d'> / ||x||^2, where d and d' are the points' changes of an array x.
    """

    nbytes: float
    error: float
    pruned: float
    pattern: NpArray = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Settings of a point for one array: codebook, thresholds, and the price of a bit."""

    how: Fit
    limit: Thresholds
    trade: Trade


@dataclass(frozen=True, slots=True)
class _Member:
    """An array of a unit, with the data that all points share.

    Args:
        number: of the array.
        leaf: the array.
        part: its sample.
        before: its parent, or None.
        places: positions of the pattern in the sample.
        histograms: of the values that are neither pruned nor protected, by thresholds.
        protected: bytes of the protected values, by the thresholds of protection.
    """

    number: int
    leaf: Leaf
    part: Sample
    before: LevelsReference | None
    places: NpArray
    histograms: dict[Thresholds, Histogram] = field(default_factory=dict)
    protected: dict[tuple[float, float], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Quantized:
    """A sample as levels of a codebook.

    Args:
        levels: uint8 [n].
        codebook: float64.
        errors: error of the array and its pruned part, both times its number of elements.
        pattern: errors of some elements.
    """

    levels: NpArray
    codebook: NpArray
    errors: NpArray
    pattern: NpArray


class Estimator:
    """Estimator of sizes and errors of points for one state, with cached results.

    Args:
        leaves: the arrays that points change.
        parents: the decoded parent of each array, or None for a base.
        codec: the codec of any point, which determines how arrays are sketched.
    """

    def __init__(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None], codec: Quantize) -> None:
        self._leaves = list(leaves)
        self._parents = [compatible_parent(parent, leaf.spec) for leaf, parent in zip(leaves, parents, strict=True)]
        self._sketches = planning.sketched(codec, self._leaves)
        signed = (s.signed for s in self._sketches)
        scales = [planning.upper_threshold(h.magnitude(), h.total / 2) for h in signed]
        groups = grouped(self._leaves, [codec] * len(self._leaves), self._parents)
        self._groups = groups
        self._chosen = chosen_units(self._leaves, scales, groups)
        self._members = [i for unit in self._chosen for i in unit.members]
        total = sum(self._leaves[i].spec.size for i in self._members)
        self._samples = {i: sample(self._leaves[i], self._parents[i], total) for i in self._members}
        self._protect: dict[float, tuple[float, float]] = {}
        self._prune: dict[tuple[float, str], dict[str, tuple[float, float]]] = {}
        self._found: dict[Quantize, Estimate] = {}
        self._few: dict[int, NpArray | None] = {}
        self._header: float | None = None
        self._roots: dict[int, float] | None = None
        self._spreads: dict[tuple[Thresholds, ...], list[float | None]] = {}

    def __call__(self, points: Sequence[Point]) -> list[Estimate]:
        """Return one estimate per point."""
        codecs = [normal(p).codec() for p in points]
        missing = [c for c in dict.fromkeys(codecs) if c not in self._found]
        if missing:
            limits = [self._limits(c) for c in missing]
            slopes = [self._trades(c, decided) for c, decided in zip(missing, limits, strict=True)]
            rows = map_chunks(lambda unit: self._of_unit(unit, missing, limits, slopes), self._chosen)
            sums = np.sum([row for row, _ in rows], axis=0)
            patterns = np.concatenate([part for _, part in rows], axis=1) / np.float32(len(self._members) ** 0.5)
            size = sum(leaf.spec.size for leaf in self._leaves)
            if self._header is None:
                is_delta = any(before is not None for before in self._parents)
                self._header = sizes.nbytes_of_header(self._leaves, limits[0], is_delta, self._groups)
            for codec, (nbytes, error, pruned), pattern in zip(missing, sums, patterns, strict=True):
                share = pruned / error if error else 0.0
                self._found[codec] = Estimate(self._header + float(nbytes), float(error / size), float(share), pattern)
        return [self._found[c] for c in codecs]

    def _limits(self, codec: Quantize) -> Limits:
        """Return the thresholds over all arrays, cached for protection and for pruning."""
        if codec.protect not in self._protect:
            self._protect[codec.protect] = planning.protection_limits(
                codec, self._sketches, planning.thresholds_before(self._parents)
            )
        key = codec.prune, codec.prune_metric
        if key not in self._prune:
            self._prune[key] = planning.pruning_limits(codec, self._sketches)
        return Limits(self._protect[codec.protect], self._prune[key])

    def _trades(self, codec: Quantize, decided: Limits) -> list[Trade]:
        """Return the price of a bit in each array."""
        if not codec.rate:
            return [Trade(0.0)] * len(self._leaves)
        if self._roots is None:
            self._roots = mean_roots(self._leaves)
        thresholds = tuple(decided.of(s.layer) for s in self._sketches)
        if thresholds not in self._spreads:
            self._spreads[thresholds] = planning.spreads(self._sketches, thresholds)
        sizes = [leaf.spec.size for leaf in self._leaves]
        return trades(codec.rate, sizes, self._spreads[thresholds], self._roots)

    def _of_unit(
        self, unit: Unit, codecs: Sequence[Quantize], limits: Sequence[Limits], slopes: Sequence[Sequence[Trade]]
    ) -> tuple[NpArray, NpArray]:
        """Return bytes, error and error by pruning of a unit, [codecs, 3], and error patterns.

        Both errors are multiplied by the number of elements.
        """
        members = [self._member(i) for i in unit.members]
        out = np.zeros((len(codecs), 3))
        patterns = np.zeros((len(codecs), sum(one.places.size for one in members)), np.float32)
        counted: dict[Any, tuple[NpArray, NpArray]] = {}
        for row, pattern, codec, decided, of_all in zip(out, patterns, codecs, limits, slopes, strict=True):
            asked = [_Asked(codec.fit_for(m.leaf), decided.of(m.leaf.kind.layer), of_all[m.number]) for m in members]
            key = codec.coder, *asked
            if key not in counted:
                found = [self._quantized(m, own, codec) for m, own in zip(members, asked, strict=True)]
                nbytes = self._nbytes(unit, members, asked, found, codec)
                errors = unit.scale * np.sum([q.errors for q in found], axis=0)
                counted[key] = np.array([nbytes, *errors]), np.concatenate([q.pattern for q in found])
            row[:], pattern[:] = counted[key]
        return out, patterns

    def _member(self, i: int) -> _Member:
        part = self._samples[i]
        places = _places(part.wide.size, max(_SHORTEST, _PATTERN // len(self._members)))
        return _Member(i, self._leaves[i], part, self._parents[i], places)

    def _quantized(self, member: _Member, asked: _Asked, codec: Quantize) -> _Quantized:
        """Quantize the sample of an array; return its levels and errors."""
        part, limit, size = member.part, asked.limit, member.leaf.spec.size
        if limit not in member.histograms:
            member.histograms[limit] = self._histogram(member.number, limit)
        histogram = member.histograms[limit]
        few = self._all_values(member.number, histogram, asked.how.bins) if codec.coder == "smallest" else None
        codebook = _codebook(Cells.of(histogram), asked.how, member.before, member.leaf, limit, few)
        levels = _levels(part, limit, codebook, asked.trade)
        off, error, pruned = _error(levels, part, codebook)
        share = math.sqrt(off.size / max(1, member.places.size) / part.norm) if part.norm else 0.0
        # In float64, because the share of an array of subnormals overflows float32.
        pattern = share * off[member.places].astype(np.float64)
        return _Quantized(levels, codebook, np.array([size * error, size * pruned]), pattern)

    def _nbytes(
        self,
        unit: Unit,
        members: Sequence[_Member],
        asked: Sequence[_Asked],
        found: Sequence[_Quantized],
        codec: Quantize,
    ) -> float:
        """Return the bytes of all arrays that a unit represents, without their records."""
        if unit.count:
            each = zip(members, found, strict=True)
            samples = [sizes.sampled_levels(q.levels, q.codebook, m.part, m.leaf.spec) for m, q in each]
            return unit.times * sizes.nbytes_of_group(samples, [m.part for m in members], unit)
        ((member,), (own,), (quantized,)) = members, asked, found
        spec, limit = member.leaf.spec, own.limit
        if (shares := (limit.protect_magnitude, limit.protect_sensitivity)) not in member.protected:
            member.protected[shares] = sizes.nbytes_of_protected(quantized.levels, member.part, spec)
        nbytes = member.protected[shares] + sizes.nbytes_of_codebook(quantized.codebook, member.before, spec)
        size, columns = quantized.codebook.size + 2, spec.columns
        return unit.scale * (nbytes + sizes.nbytes_of_levels(quantized.levels, size, member.part, codec.coder, columns))

    def _all_values(self, i: int, histogram: Histogram, most: int) -> NpArray | None:
        """Return the distinct values of an array if there are at most `most`, else None."""
        if not 0 < np.count_nonzero(histogram.counts[:-1]) <= most:
            return None
        if i not in self._few:
            self._few[i] = few_values(self._leaves[i], Cells.of(histogram), MAX_BINS)
        few = self._few[i]
        return few if few is not None and few.size <= most else None

    def _histogram(self, i: int, limit: Thresholds) -> Histogram:
        """Return the histogram of the values that are neither pruned nor protected.

        It covers the whole array if gradients are not used, and else the sample.
        """
        leaf, part, whole = self._leaves[i], self._samples[i], self._sketches[i].signed
        if leaf.gradient is None:
            return planning.kept(whole, limit)
        return kept_histogram(part.x, limit, whole.bits, gradient=part.gradient)


def _codebook(
    cells: Cells, how: Fit, before: LevelsReference | None, leaf: Leaf, limit: Thresholds, few: NpArray | None
) -> NpArray:
    """Return the codebook as the codec fits it; `few` are all distinct values, if given."""
    parent = None if before is None else before.codebook
    codebook, reason, cells, _ = fit_closely(leaf, limit, cells, how, parent, few=few)
    return codebook if reason == "frozen" else held_codebook(codebook, cells, how, leaf.spec)


def _levels(part: Sample, limit: Thresholds, codebook: NpArray, trade: Trade) -> NpArray:
    """Return the levels of the sample, chosen as by the codec."""
    before = part.before
    own = assign(part.wanted, limit, codebook, gradient=part.gradient)
    if trade.price and codebook.size:
        parent, contexts = (None, 1) if before is None else (before.levels, before.size)
        matters = None
        if trade.mean and part.importance is not None:
            matters = weights_of(part.importance, trade.mean, trade.scale)
        own = cheapest_levels(part.wanted, own, parent, contexts, codebook, trade.price, matters)
    levels: NpArray = own.numpy() if is_torch(own) else own
    return levels


def _places(size: int, count: int) -> NpArray:
    """Return up to `count` evenly spaced positions."""
    return np.arange(size) if size <= count else np.linspace(0, size - 1, count).astype(np.int64)


def _error(levels: NpArray, part: Sample, codebook: NpArray) -> tuple[NpArray, float, float]:
    """Return errors of a sample, their relative square sum, and its part from pruning."""
    table = np.concatenate([np.zeros(2), part.unit * codebook]).astype(part.wide.dtype)
    off = part.wide - table[levels]
    off[levels == 1] = 0
    if not part.norm:
        return off, 0.0, 0.0
    return off, energy(off) / part.norm, energy(part.wide[levels == 0]) / part.norm
