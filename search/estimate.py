"""Size and error of many points without encoding: from histograms, and from pair counts with the parent on a sample.

Thresholds come from the sketches of all arrays whole, as in the codec. Codebook, levels, pair counts and error come
from the histogram of an array and a sample of its blocks, by the codec's own functions; the entropy of the counts then
stands for the coder. What is fitted or counted once serves all points that share it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..codec import bfloat16, entropy
from ..codec.base import Leaf, Memory
from ..codec.cells import fit_closely
from ..codec.codebook import Cells, Fit, fit, largest_of, spacing, too_coarse, variance
from ..codec.leaves import LeafSpec, NpArray, as_bytes, taken
from ..codec.parallel import map_chunks
from ..codec.partition import Sketch, kept, pruning, upper_threshold
from ..codec.quantize import MAX_BINS, LevelsMemory, Quantize, few_values, held_codebook
from ..codec.ratedistortion import cheapest_levels
from ..kernels.arrays import is_torch
from ..kernels.assign import Thresholds, assign
from ..kernels.histogram import Histogram, kept_histogram
from ..kernels.huffman import huffman_lengths
from ..kernels.levels import joint_counts
from ..kernels.planes import difference, split_planes
from .cube import Point
from .sample import Sample, energy, representatives, sample

_COARSE = 4
"""Sub-bucket bits of the histograms that codebooks are fitted to, where the parent's cannot be kept."""
_TOP = 0.01
"""Fraction of the largest values that protected ones are judged by."""
_OVERHEAD = 34.0
"""Bytes of an array's record in the header and of its fields."""
_MULTIPLES = 12.0
"""Bytes of a codebook of equidistant entries."""
_ALIKE = 1.35
"""Codebooks whose spacings are further apart are never kept for each other."""
_ENOUGH = 256
"""Protected values from which an entropy can be told."""
_PATTERN, _SHORTEST = 1 << 14, 64
"""Elements whose errors are kept to compare points by, all arrays together; and of each array at least."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a point is expected to cost and to do.

    Args:
        nbytes: stored bytes of the arrays it changes.
        error: mean over their elements of the array's squared relative L2 error.
        pruned: share of `error` that is pruned weights.
        pattern: [k] float32, relative errors of some elements of every array. The product of those of two points is the
            mean over arrays of <d, d'> / ||x||^2, d and d' what they change of an array x.
    """

    nbytes: float
    error: float
    pruned: float
    pattern: NpArray = field(compare=False, repr=False)


class Estimator:
    """Sizes and errors of points for one state; what it has counted once it keeps.

    Args:
        leaves: the arrays that points change.
        parents: what a delta of each is coded against.
        codec: any point's codec: it says how arrays are sketched.
    """

    def __init__(self, leaves: Sequence[Leaf], parents: Sequence[Memory | None], codec: Quantize) -> None:
        self._leaves = list(leaves)
        self._parents = [
            p if isinstance(p, LevelsMemory) and p.levels.size == leaf.spec.size else None
            for leaf, p in zip(leaves, parents, strict=True)
        ]
        self._sketches: list[Sketch] = codec.sketch(self._leaves)
        self._chosen = representatives(self._leaves)
        total = sum(self._leaves[i].spec.size for i, _ in self._chosen)
        self._samples = {i: sample(self._leaves[i], self._parents[i], total) for i, _ in self._chosen}
        self._protect: dict[float, tuple[float, float]] = {}
        self._prune: dict[tuple[float, str], dict[str, tuple[float, float]]] = {}
        self._found: dict[Quantize, Estimate] = {}
        self._few: dict[int, NpArray | None] = {}
        self._protected = self._bytes_protected()

    def __call__(self, points: Sequence[Point]) -> list[Estimate]:
        """One estimate a point."""
        codecs = [_normal(p.codec()) for p in points]
        missing = [c for c in dict.fromkeys(codecs) if c not in self._found]
        if missing:
            limits = [self._thresholds(c) for c in missing]
            rows = map_chunks(lambda c: self._of_leaf(c[0], missing, limits), self._chosen)
            sums = np.sum([scale * row for (_, scale), (row, _) in zip(self._chosen, rows, strict=True)], axis=0)
            patterns = np.concatenate([part for _, part in rows], axis=1) / np.float32(len(rows) ** 0.5)
            size = sum(leaf.spec.size for leaf in self._leaves)
            for codec, (nbytes, error, pruned), pattern in zip(missing, sums, patterns, strict=True):
                share = pruned / error if error else 0.0
                self._found[codec] = Estimate(float(nbytes), float(error / size), float(share), pattern)
        return [self._found[c] for c in codecs]

    def _thresholds(self, codec: Quantize) -> dict[str, Thresholds]:
        """Thresholds by layer type, as `Quantize.prepare` has them."""
        if codec.protect not in self._protect:
            self._protect[codec.protect] = codec.protection_limits(self._sketches, self._parents)
        key = codec.prune, codec.prune_metric
        if key not in self._prune:
            self._prune[key] = pruning(self._sketches, *key) if codec.prune else {}
        protect, prune = self._protect[codec.protect], self._prune[key]
        return {s.layer: Thresholds(*protect, *prune.get(s.layer, (0.0, 0.0))) for s in self._sketches}

    def _of_leaf(
        self, i: int, codecs: Sequence[Quantize], limits: Sequence[dict[str, Thresholds]]
    ) -> tuple[NpArray, NpArray]:
        """[codecs, 3]: bytes, error and pruned part of the error, both times the number of elements; and patterns."""
        leaf, part, before = self._leaves[i], self._samples[i], self._parents[i]
        out = np.zeros((len(codecs), 3))
        histograms: dict[Thresholds, tuple[Histogram, Histogram]] = {}
        counted: dict[Any, tuple[float, float, float]] = {}
        seen: dict[Any, NpArray] = {}
        places = _places(part.wide.size, max(_SHORTEST, _PATTERN // len(self._chosen)))
        patterns = np.zeros((len(codecs), places.size), np.float32)
        for row, pattern, codec, by_layer in zip(out, patterns, codecs, limits, strict=True):
            limit = by_layer[leaf.kind.layer]
            if limit not in histograms:
                histograms[limit] = self._histogram(i, limit)
            bins = codec.embedding_bins if codec.embedding_bins and leaf.kind.layer == "embedding" else codec.bins
            how = Fit(bins, codec.sigma, codec.solver, codec.policy, codec.trigger, codec.seed)
            key = how, limit, codec.coder, codec.rate
            if key not in counted:
                few = self._all_values(i, histograms[limit][0], bins) if codec.coder == "smallest" else None
                codebook, histogram = _codebook(
                    histograms[limit], how, before, leaf, limit, few, exactly=bool(codec.rate)
                )
                rate = codec.rate if codec.rate and 1e-15 < largest_of(histogram) < 1e15 else 0.0
                trade = rate * variance(histogram) if rate else 0.0
                levels = _levels(part, before, limit, codebook, trade)
                nbytes = self._bytes(levels, part, before, codebook.size, codec.coder)
                if before is None or not np.array_equal(before.codebook, codebook):
                    nbytes += _MULTIPLES if codec.solver == "uniform" else codebook.size * leaf.spec.itemsize
                off, error, pruned = _error(levels, part, codebook)
                counted[key] = nbytes, leaf.spec.size * error, leaf.spec.size * pruned
                share = math.sqrt(off.size / max(1, places.size) / part.norm) if part.norm else 0.0
                # In float64: of an array of subnormals the share is beyond float32.
                seen[key] = share * off[places].astype(np.float64)
            row[:], pattern[:] = counted[key], seen[key]
        return out, patterns

    def _all_values(self, i: int, histogram: Histogram, most: int) -> NpArray | None:
        """All values of an array where they are at most `most`, as the codec finds them; looked for once."""
        if not 0 < np.count_nonzero(histogram.counts[:-1]) <= most:
            return None
        if i not in self._few:
            self._few[i] = few_values(self._leaves[i], Cells.of(histogram), MAX_BINS)
        few = self._few[i]
        return few if few is not None and few.size <= most else None

    def _histogram(self, i: int, limit: Thresholds) -> tuple[Histogram, Histogram]:
        """What a codebook is fitted to, and a coarser one, quicker to fit to, which changes sizes by little.

        With few different values, what the coarser one would merge may be most of the array.
        """
        leaf, part = self._leaves[i], self._samples[i]
        fine = self._sketches[i].signed
        if leaf.gradient is None:
            fine = kept(fine, limit)
        else:
            fine = kept_histogram(part.x, limit, fine.bits, gradient=part.gradient)
        few = np.count_nonzero(fine.counts[:-1]) <= MAX_BINS
        return fine, fine if few else coarser(fine, _COARSE)

    def _bytes(self, levels: NpArray, part: Sample, before: LevelsMemory | None, entries: int, coder: str) -> float:
        """Stored bytes of the whole array but for its codebook, from the levels of the sample."""
        size, scale = entries + 2, part.scale
        nbytes = _OVERHEAD
        if part.parent is None or before is None:
            counts = entropy.counts_of(levels)[None, :size]
            same, new = 0, int(counts[0, 1])
            nbytes += _huffman(counts[0], scale) if coder == "published" else _entropy(counts, scale)
        else:
            counts = joint_counts(part.parent, levels, before.size, max(size, before.size))
            same = int(counts[1, 1])
            new = int(counts[:, 1].sum()) - same
            if coder == "published":
                nbytes += scale * len(entropy.encode_rearranged(levels, size, part.parent, before.size))
            elif int(np.trace(counts)) < levels.size:
                nbytes += min(_entropy(counts, scale), _entropy(counts.sum(axis=0, keepdims=True), scale))
        return nbytes + scale * (same * self._protected[0] + new * self._protected[1])

    def _bytes_protected(self) -> tuple[float, float]:
        """Bytes of a protected value where the parent protected it too, and where it did not; over all arrays."""
        same, new = np.zeros((2, 256), np.int64), np.zeros((2, 256), np.int64)
        for i, part in self._samples.items():
            leaf, before = self._leaves[i], self._parents[i]
            top = upper_threshold(self._sketches[i].signed.magnitude(), _TOP * leaf.spec.size)
            data = as_bytes(part.x)
            large = np.flatnonzero(np.abs(bfloat16.wide(data, leaf.spec)) >= top)
            new += _plane_counts(data.reshape(-1, leaf.spec.itemsize)[large], None, leaf.spec)
            if before is not None and before.protected.size:
                now = as_bytes(taken(leaf.flat, np.flatnonzero(before.levels == 1)))
                same += _plane_counts(now, before.protected, leaf.spec)
        fresh = _plane_bytes(new, 1.5)
        return _plane_bytes(same, fresh), fresh


def coarser(histogram: Histogram, bits: int) -> Histogram:
    """A signed histogram with fewer sub-buckets an octave; as it is where it has no more.

    Example:
        >>> from shrinkpoint.kernels.histogram import log_histogram
        >>> x = np.linspace(-2, 3, 1000, dtype=np.float32)
        >>> fine, direct = log_histogram(x, 6, signed=True), log_histogram(x, 4, signed=True)
        >>> bool((coarser(fine, 4).counts == direct.counts).all())
        True
    """
    up = histogram.bits - bits
    if up <= 0:
        return histogram
    middle = (histogram.counts.size - 2) // 2
    negative = histogram.counts[:middle].reshape(-1, 1 << up).sum(axis=1)
    positive = histogram.counts[middle + 1 : -1].reshape(-1, 1 << up).sum(axis=1)
    counts = np.concatenate([negative, histogram.counts[middle : middle + 1], positive, histogram.counts[-1:]])
    return Histogram(counts, bits, histogram.format, histogram.signed)


def _normal(codec: Quantize) -> Quantize:
    return dataclasses.replace(codec, prune_metric="magnitude") if codec.prune == 0.0 else codec


def _codebook(
    histograms: tuple[Histogram, Histogram],
    how: Fit,
    before: LevelsMemory | None,
    leaf: Leaf,
    limit: Thresholds,
    few: NpArray | None,
    *,
    exactly: bool,
) -> tuple[NpArray, Histogram]:
    """The codebook as the codec would have it, and the histogram it was fitted to.

    An optimal codebook may come from the coarser one. Where the parent's may be kept, or an iteration follows that
    makes large differences of small ones, it must be from what the codec sees. `few` are all values of the array, which
    then each have an entry.
    """
    fine, coarse = histograms
    parent = None if before is None else before.codebook
    histogram = fine if exactly or how.solver == "kmeans++" or how.policy == "warm" else coarse
    codebook, reason = fit(histogram, how, parent)
    if parent is not None and histogram is coarse and (reason == "frozen" or _alike(codebook, parent)):
        histogram = fine
        codebook, reason = fit(histogram, how, parent)
    cells = Cells.of(fine)
    if few is not None:
        if not np.isin(few, codebook).all():
            return few, histogram
    elif how.solver != "kmeans++" and too_coarse(cells, codebook):
        codebook, reason, cells, _ = fit_closely(leaf, limit, cells, how, parent)
    return codebook if reason == "frozen" else held_codebook(codebook, cells, how, leaf.spec), histogram


def _alike(a: NpArray, b: NpArray) -> bool:
    """Whether two codebooks are so nearly as fine that the one might be kept for the other."""
    if a.size < 2 or b.size < 2:
        return True
    return 1 / _ALIKE <= spacing(a) / spacing(b) <= _ALIKE


def _levels(part: Sample, before: LevelsMemory | None, limit: Thresholds, codebook: NpArray, trade: float) -> NpArray:
    """Levels of the sample, as the codec would choose them."""
    own = assign(part.x, limit, codebook, gradient=part.gradient)
    if trade and codebook.size:
        own = cheapest_levels(part.x, own, part.parent, 1 if before is None else before.size, codebook, trade)
    levels: NpArray = own.numpy() if is_torch(own) else own
    return levels


def _places(size: int, count: int) -> NpArray:
    """Up to `count` places at even distances."""
    return np.arange(size) if size <= count else np.linspace(0, size - 1, count).astype(np.int64)


def _error(levels: NpArray, part: Sample, codebook: NpArray) -> tuple[NpArray, float, float]:
    """Errors of a sample with these levels; their relative square sum, and the part of it that is pruned weights."""
    table = np.concatenate([np.zeros(2), part.unit * codebook]).astype(part.wide.dtype)
    off = part.wide - table[levels]
    off[levels == 1] = 0
    if not part.norm:
        return off, 0.0, 0.0
    return off, energy(off) / part.norm, energy(part.wide[levels == 0]) / part.norm


def _entropy(counts: NpArray, scale: float) -> float:
    """Bytes of levels with these pair counts by an ideal coder with one table a context, and of the tables."""
    rows = counts.sum(axis=1, keepdims=True)
    bits = (counts * np.log2(np.maximum(rows, 1) / np.maximum(counts, 1))).sum()
    return scale * float(bits) / 8 + 0.5 * np.count_nonzero(counts) + 20.0


def _huffman(counts: NpArray, scale: float) -> float:
    present = counts[counts > 0]
    if present.size <= 1:
        return 2.0
    lengths = huffman_lengths(np.ascontiguousarray(present))
    return scale * float((present * lengths).sum()) / 8 + 0.5 * present.size + 8.0


def _plane_counts(values: NpArray, before: NpArray | None, spec: LeafSpec) -> NpArray:
    """[2, 256]: how often each byte occurs in either plane of protected values, coded as the codec codes them."""
    patterns, _ = bfloat16.patterns(values.reshape(-1), spec)
    guess = np.zeros_like(patterns) if before is None else bfloat16.patterns(before, spec)[0]
    planes = split_planes(difference(patterns, guess, dtype="bfloat16"))
    return np.stack([np.bincount(plane, minlength=256) for plane in planes])


def _plane_bytes(counts: NpArray, otherwise: float) -> float:
    """Bytes a value by the entropy of both planes; `otherwise` where there are too few values to tell."""
    n = int(counts[0].sum())
    if n < _ENOUGH:
        return otherwise
    shares = counts / n
    return float(-(shares * np.log2(np.where(shares > 0, shares, 1.0))).sum()) / 8
