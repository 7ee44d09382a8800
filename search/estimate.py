"""Estimate size and error of many points without encoding, from histograms and samples.

Thresholds come from sketches of the whole arrays, as in the codec. Codebook, levels, pair counts with the parent and
error come from the histogram of an array and a sample of its blocks, by the codec's own functions. The entropy of the
counts approximates the coder. Results are shared between all points that use them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..codec.base import Leaf, Reference
from ..codec.entropy.row_column_classes import columns_of
from ..codec.parallel import map_chunks
from ..codec.state.leaves import NpArray
from ..codec.weights.codebook import Cells, Fit
from ..codec.weights.importance import weights_of
from ..codec.weights.levels import MAX_BINS, LevelsReference, compatible_parent
from ..codec.weights.partition import kept, upper_threshold
from ..codec.weights.planning import (
    Limits,
    fit_for,
    protection_limits,
    pruning_limits,
    sketched,
    spreads,
    thresholds_before,
)
from ..codec.weights.quantize import Quantize
from ..codec.weights.ratedistortion import cheapest_levels
from ..codec.weights.rd_tradeoff import Trade, mean_roots, trades
from ..codec.weights.sketch_refinement import few_values, fit_closely, held_codebook
from ..kernels.arrays import is_torch
from ..kernels.histogram import Histogram, kept_histogram
from ..kernels.quantizer import Thresholds, assign
from .cube import Point
from .sample import Sample, energy, representatives, sample
from .size_estimate import nbytes_of_codebook, nbytes_of_header, nbytes_of_levels, nbytes_of_protected

_PATTERN, _SHORTEST = 1 << 14, 64
"""Number of elements of all arrays whose errors are kept to compare points; and the minimum for each array."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected size and error of a point.

    Args:
        nbytes: stored bytes of the arrays it changes.
        error: mean over their elements of the array's squared relative L2 error.
        pruned: share of `error` that is pruned weights.
        pattern: [k] float32, relative errors of some elements of every array. The product of those of two points is the
            mean over arrays of <d, d'> / ||x||^2, where d and d' are their changes of an array x.
    """

    nbytes: float
    error: float
    pruned: float
    pattern: NpArray = field(compare=False, repr=False)


class Estimator:
    """Estimate sizes and errors of points for one state, with results cached.

    Args:
        leaves: the arrays that points change.
        parents: the decoded parent of each array, or None for a base.
        codec: the codec of any point, which determines how arrays are sketched.
    """

    def __init__(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None], codec: Quantize) -> None:
        self._leaves = list(leaves)
        self._parents = [compatible_parent(parent, leaf.spec) for leaf, parent in zip(leaves, parents, strict=True)]
        self._sketches = sketched(codec, self._leaves)
        signed = (s.signed for s in self._sketches)
        scales = [upper_threshold(h.magnitude(), h.total / 2) for h in signed]
        self._chosen = representatives(self._leaves, scales)
        total = sum(self._leaves[i].spec.size for i, _ in self._chosen)
        self._samples = {i: sample(self._leaves[i], self._parents[i], total) for i, _ in self._chosen}
        self._protect: dict[float, tuple[float, float]] = {}
        self._prune: dict[tuple[float, str], dict[str, tuple[float, float]]] = {}
        self._found: dict[Quantize, Estimate] = {}
        self._few: dict[int, NpArray | None] = {}
        self._header: float | None = None
        self._roots: dict[int, float] | None = None
        self._spreads: dict[tuple[Thresholds, ...], list[float | None]] = {}

    def __call__(self, points: Sequence[Point]) -> list[Estimate]:
        """Return one estimate per point."""
        codecs = [_normal(p.codec()) for p in points]
        missing = [c for c in dict.fromkeys(codecs) if c not in self._found]
        if missing:
            limits = [self._limits(c) for c in missing]
            slopes = [self._trades(c, decided) for c, decided in zip(missing, limits, strict=True)]
            rows = map_chunks(lambda c: self._of_leaf(c[0], missing, limits, slopes), self._chosen)
            sums = np.sum([scale * row for (_, scale), (row, _) in zip(self._chosen, rows, strict=True)], axis=0)
            patterns = np.concatenate([part for _, part in rows], axis=1) / np.float32(len(rows) ** 0.5)
            size = sum(leaf.spec.size for leaf in self._leaves)
            if self._header is None:
                is_delta = any(before is not None for before in self._parents)
                self._header = nbytes_of_header(self._leaves, limits[0], is_delta)
            for codec, (nbytes, error, pruned), pattern in zip(missing, sums, patterns, strict=True):
                share = pruned / error if error else 0.0
                self._found[codec] = Estimate(self._header + float(nbytes), float(error / size), float(share), pattern)
        return [self._found[c] for c in codecs]

    def _limits(self, codec: Quantize) -> Limits:
        """Thresholds over all arrays; those of pruning do not depend on those of protection."""
        if codec.protect not in self._protect:
            self._protect[codec.protect] = protection_limits(codec, self._sketches, thresholds_before(self._parents))
        key = codec.prune, codec.prune_metric
        if key not in self._prune:
            self._prune[key] = pruning_limits(codec, self._sketches)
        return Limits(self._protect[codec.protect], self._prune[key])

    def _trades(self, codec: Quantize, decided: Limits) -> list[Trade]:
        """The price of a bit in each array."""
        if not codec.rate:
            return [Trade(0.0)] * len(self._leaves)
        if self._roots is None:
            self._roots = mean_roots(self._leaves)
        thresholds = tuple(decided.of(s.layer) for s in self._sketches)
        if thresholds not in self._spreads:
            self._spreads[thresholds] = spreads(self._sketches, thresholds)
        sizes = [leaf.spec.size for leaf in self._leaves]
        return trades(codec.rate, sizes, self._spreads[thresholds], self._roots)

    def _of_leaf(
        self,
        i: int,
        codecs: Sequence[Quantize],
        limits: Sequence[Limits],
        slopes: Sequence[Sequence[Trade]],
    ) -> tuple[NpArray, NpArray]:
        """[codecs, 3]: bytes, error and its pruned part; and patterns.

        Both errors are multiplied by the number of elements.
        """
        leaf, part, before = self._leaves[i], self._samples[i], self._parents[i]
        out = np.zeros((len(codecs), 3))
        histograms: dict[Thresholds, Histogram] = {}
        counted: dict[Any, tuple[float, float, float]] = {}
        seen: dict[Any, NpArray] = {}
        protected: dict[tuple[float, float], float] = {}
        columns = columns_of(leaf.spec.shape)
        places = _places(part.wide.size, max(_SHORTEST, _PATTERN // len(self._chosen)))
        patterns = np.zeros((len(codecs), places.size), np.float32)
        for row, pattern, codec, decided, of_all in zip(out, patterns, codecs, limits, slopes, strict=True):
            limit, trade = decided.of(leaf.kind.layer), of_all[i]
            if limit not in histograms:
                histograms[limit] = self._histogram(i, limit)
            how = fit_for(codec, leaf)
            key = how, limit, codec.coder, trade
            if key not in counted:
                histogram = histograms[limit]
                few = self._all_values(i, histogram, how.bins) if codec.coder == "smallest" else None
                codebook = _codebook(Cells.of(histogram), how, before, leaf, limit, few)
                levels = _levels(part, limit, codebook, trade)
                if (shares := (limit.protect_magnitude, limit.protect_sensitivity)) not in protected:
                    protected[shares] = nbytes_of_protected(levels, part, leaf.spec)
                nbytes = protected[shares] + nbytes_of_codebook(codebook, before, leaf.spec)
                nbytes += nbytes_of_levels(levels, codebook.size + 2, part, codec.coder, columns)
                off, error, pruned = _error(levels, part, codebook)
                counted[key] = nbytes, leaf.spec.size * error, leaf.spec.size * pruned
                share = math.sqrt(off.size / max(1, places.size) / part.norm) if part.norm else 0.0
                # In float64, because the share of an array of subnormals overflows float32.
                seen[key] = share * off[places].astype(np.float64)
            row[:], pattern[:] = counted[key], seen[key]
        return out, patterns

    def _all_values(self, i: int, histogram: Histogram, most: int) -> NpArray | None:
        """The distinct values of an array if there are at most `most`, as the codec finds them."""
        if not 0 < np.count_nonzero(histogram.counts[:-1]) <= most:
            return None
        if i not in self._few:
            self._few[i] = few_values(self._leaves[i], Cells.of(histogram), MAX_BINS)
        few = self._few[i]
        return few if few is not None and few.size <= most else None

    def _histogram(self, i: int, limit: Thresholds) -> Histogram:
        """Histogram of the values that are neither pruned nor protected.

        It covers the whole array if gradients are not used, and else the sample.
        """
        leaf, part, whole = self._leaves[i], self._samples[i], self._sketches[i].signed
        if leaf.gradient is None:
            return kept(whole, limit)
        return kept_histogram(part.x, limit, whole.bits, gradient=part.gradient)


def _normal(codec: Quantize) -> Quantize:
    return dataclasses.replace(codec, prune_metric="magnitude") if codec.prune == 0.0 else codec


def _codebook(
    cells: Cells, how: Fit, before: LevelsReference | None, leaf: Leaf, limit: Thresholds, few: NpArray | None
) -> NpArray:
    """Return the codebook as the codec fits it; `few` are all distinct values, if given."""
    parent = None if before is None else before.codebook
    codebook, reason, cells, _ = fit_closely(leaf, limit, cells, how, parent, few=few)
    return codebook if reason == "frozen" else held_codebook(codebook, cells, how, leaf.spec)


def _levels(part: Sample, limit: Thresholds, codebook: NpArray, trade: Trade) -> NpArray:
    """Levels of the sample, as the codec chooses them."""
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
    """Up to `count` evenly spaced positions."""
    return np.arange(size) if size <= count else np.linspace(0, size - 1, count).astype(np.int64)


def _error(levels: NpArray, part: Sample, codebook: NpArray) -> tuple[NpArray, float, float]:
    """Errors of a sample, their relative square sum, and its part from pruned weights."""
    table = np.concatenate([np.zeros(2), part.unit * codebook]).astype(part.wide.dtype)
    off = part.wide - table[levels]
    off[levels == 1] = 0
    if not part.norm:
        return off, 0.0, 0.0
    return off, energy(off) / part.norm, energy(part.wide[levels == 0]) / part.norm
