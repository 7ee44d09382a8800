"""Settings of the quantization of weights, and the plans that follow from them.

Planning sketches all arrays and finds thresholds over them, and for each array the price of a bit and the values to
which its codebook is fitted.

Protection is global: the top F of all weights by magnitude, or F/2 by magnitude and F/2 by sensitivity |g w| where
gradients are known. Pruning is by layer type: the lowest fraction of all weights of that type, by one metric;
embeddings are never pruned. Thresholds lie on bucket boundaries of the sketch, on the side that takes no more than
asked, so a histogram can be split at them exactly.

Source: Inshrinkerator, sections 4.1 to 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...kernels.backend.arguments import check_field, choice, flag, integer, number, or_none
from ...kernels.backend.arrays import on_gpu
from ...kernels.backend.floats import FORMATS, bits_for
from ...kernels.histogram import Histogram, kept_histogram_many, log_histogram_many, merge, used_buckets_many
from ...kernels.quantizer import Thresholds
from ..base import Leaf, Reference
from ..errors import BadArgumentError
from ..parallel import map_batches, map_chunks
from ..state.leaves import LeafSpec, NpArray, on_host
from .codebook import Cells, Fit, problem_of, solve_together
from .level_assignment import Trade, mean_roots, spread, trades
from .levels import MAX_BINS, LevelsReference, compatible_parent


@dataclass(frozen=True, slots=True)
class Filled:
    """A histogram that stores only the buckets in use.

    The histograms of all arrays are held at once, and one with all buckets takes 0.3 MB for float32 and 2 MB for
    float64.

    Args:
        buckets: int32 [k], ascending.
        counts: int64 [k], each above 0.
        bits, format, signed: as of the `Histogram`.
    """

    buckets: np.ndarray[Any, np.dtype[np.int32]]
    counts: np.ndarray[Any, np.dtype[np.int64]]
    bits: int
    format: str
    signed: bool

    @staticmethod
    def of(histogram: Histogram) -> Filled:
        """Return the buckets of a histogram that are in use."""
        used = histogram.counts.nonzero()[0]
        counts = histogram.counts[used]
        return Filled(used.astype(np.int32), counts, histogram.bits, histogram.format, histogram.signed)

    def histogram(self) -> Histogram:
        """Return the histogram with all buckets."""
        return _together([self])[0]


@dataclass(frozen=True, slots=True)
class Sketch:
    """Histograms of one array, from which thresholds are computed.

    Args:
        layer: its layer type.
        values: of its values.
        products: of its sensitivity |g w|, where there is a gradient.
    """

    layer: str
    values: Filled
    products: Filled | None

    @staticmethod
    def of(layer: str, signed: Histogram, sensitivity: Histogram | None = None) -> Sketch:
        """Return the sketch of an array from its histograms."""
        return Sketch(layer, Filled.of(signed), None if sensitivity is None else Filled.of(sensitivity))

    @property
    def signed(self) -> Histogram:
        """Return the histogram of the values."""
        return self.values.histogram()

    @property
    def sensitivity(self) -> Histogram | None:
        """Return the histogram of the sensitivity, or None."""
        return None if self.products is None else self.products.histogram()


def _together(parts: Iterable[Filled]) -> list[Histogram]:
    """Add up histograms of the same format, resolution and signedness."""
    totals: dict[tuple[int, str, bool], np.ndarray[Any, np.dtype[np.int64]]] = {}
    for part in parts:
        key = part.bits, part.format, part.signed
        if key not in totals:
            totals[key] = np.zeros((1 + part.signed) * FORMATS[part.format].buckets(part.bits) + 2, np.int64)
        totals[key][part.buckets] += part.counts
    return [Histogram(counts, *key) for key, counts in totals.items()]


def magnitudes(parts: Iterable[Filled]) -> Histogram:
    """Return the sum of several histograms as a histogram of magnitudes."""
    return merge(*_same_bits([histogram.magnitude() for histogram in _together(parts)]))


def upper_threshold(histogram: Histogram, budget: float) -> float:
    """Return the least boundary with at most `budget` elements at or above it, or infinity."""
    tail = np.cumsum(histogram.counts[:-1][::-1])[::-1]
    allowed = np.flatnonzero(tail <= budget)
    if allowed.size == 0 or tail[allowed[0]] == 0:
        return math.inf
    return float(histogram.lower_bounds()[allowed[0]])


def lower_threshold(histogram: Histogram, budget: float) -> float:
    """Return the largest bucket boundary with at most `budget` elements below it, or 0."""
    below = np.concatenate([[0], np.cumsum(histogram.counts[:-1])])[:-1]
    allowed = np.flatnonzero(below <= budget)
    last = int(allowed[-1])
    return float(histogram.lower_bounds()[last]) if below[last] > 0 else 0.0


def _same_bits(histograms: list[Histogram]) -> list[Histogram]:
    """Return magnitude histograms at the finest resolution among them.

    One is coarser only where its dtype has no more mantissa bits: its buckets hold one value each, their lower bounds,
    and moving them to a finer grid is exact.
    """
    finest = max(h.bits for h in histograms)
    return [_refined(h, finest) for h in histograms]


def _refined(histogram: Histogram, bits: int) -> Histogram:
    up = bits - histogram.bits
    if up == 0:
        return histogram
    # A format of the same range whose mantissa is long enough: bfloat16's range is within float32's, as is float16's.
    wide = merge(histogram, _empty("float64" if histogram.format == "float64" else "float32", histogram.bits))
    inner = wide.counts[1:-1]
    finer = np.zeros(2 + (inner.size << up), np.int64)
    finer[0], finer[-1] = wide.counts[0], wide.counts[-1]
    finer[1 : -1 : 1 << up] = inner
    return Histogram(finer, bits, wide.format, wide.signed)


def _empty(name: str, bits: int) -> Histogram:
    return Histogram(np.zeros(FORMATS[name].buckets(bits) + 2, np.int64), bits, name, False)


def protection(sketches: Sequence[Sketch], fraction: float) -> tuple[float, float]:
    """Return thresholds (magnitude, sensitivity) that protect the top `fraction` of weights."""
    values = magnitudes(s.values for s in sketches)
    products = [s.products for s in sketches if s.products is not None]
    budget = fraction * values.total
    if not products:
        return upper_threshold(values, budget), math.inf
    return upper_threshold(values, budget / 2), upper_threshold(magnitudes(products), budget / 2)


def pruning(sketches: Sequence[Sketch], fraction: float, metric: str) -> dict[str, tuple[float, float]]:
    """Return thresholds (magnitude, sensitivity) for pruning, by layer type."""
    table: dict[str, tuple[float, float]] = {}
    for layer in sorted({s.layer for s in sketches} - {"embedding"}):
        group = [s for s in sketches if s.layer == layer]
        if metric == "sensitivity":
            known = magnitudes(s.products for s in group if s.products is not None)
            table[layer] = (0.0, lower_threshold(known, fraction * known.total))
        else:
            all_of_it = magnitudes(s.values for s in group)
            table[layer] = (lower_threshold(all_of_it, fraction * all_of_it.total), 0.0)
    return table


def kept(histogram: Histogram, thresholds: Thresholds) -> Histogram:
    """Remove the elements beyond magnitude thresholds from a signed histogram."""
    values, counts = histogram.values(), histogram.counts.copy()
    low, high = thresholds.prune_magnitude, thresholds.protect_magnitude
    counts[: values.searchsorted(-high, "right")] = 0
    counts[values.searchsorted(high) :] = 0
    counts[values.searchsorted(-low, "right") : values.searchsorted(low)] = 0
    return Histogram(counts, histogram.bits, histogram.format, histogram.signed)


def share_at_or_above(histogram: Histogram, threshold: float) -> float:
    """Return the share of elements at or above a threshold on a bucket boundary."""
    if not histogram.total or math.isinf(threshold):
        return 0.0
    above = histogram.counts[:-1][histogram.lower_bounds() >= threshold]
    return float(above.sum()) / histogram.total


SMALL = 1 << 19
"""Raw bytes up to which an array is coded with others."""
_TOGETHER = 64
"""Small arrays that are sketched at once."""
FINEST_SKETCH = 2.0**-13
_STEP = 8
"""A codebook is refit when its array's protected share passes a power of this times the configured share."""
_FEW = 32
"""Fewer protected elements than these may come and go by chance."""


@dataclass(frozen=True, slots=True)
class QuantizeSettings:
    """Fields of `Quantize` with their checks; `Quantize` documents them.

    Raises:
        BadArgumentError: a value out of range; the message names it and its limits.
    """

    bins: int = 64
    embedding_bins: int | None = None
    prune: float = 0.0
    prune_metric: str = "magnitude"
    protect: float = 0.0005
    alpha: float = 0.01
    sigma: float = 1.0
    solver: str = "uniform"
    policy: str = "frozen"
    trigger: float = 1.05
    coder: str = "smallest"
    seed: int = 0
    max_error: float | None = None
    rate: float | None = None
    residual: bool = False

    def __post_init__(self) -> None:
        check_field(self, "bins", integer, 2, MAX_BINS)
        check_field(self, "embedding_bins", or_none, integer, 2, MAX_BINS)
        check_field(self, "prune", number, 0, 1, open_high=True)
        check_field(self, "protect", number, 0, 1, open_high=True)
        if self.prune + self.protect > 1:
            raise BadArgumentError(f"prune + protect is {self.prune + self.protect:g}; it must be at most 1")
        check_field(self, "alpha", number, FINEST_SKETCH, 1, open_high=True)
        check_field(self, "sigma", number, 0, 1)
        check_field(self, "trigger", number, 1, 1e9)
        check_field(self, "max_error", or_none, number, 0, 1, open_low=True, open_high=True)
        check_field(self, "rate", or_none, number, 0, 1e6)
        check_field(self, "residual", flag)
        check_field(self, "seed", integer, 0, 2**63 - 1)
        for name, allowed in (
            ("prune_metric", ("magnitude", "sensitivity")),
            ("solver", ("uniform", "exact", "kmeans++")),
            ("policy", ("frozen", "warm", "refit")),
            ("coder", ("smallest", "published")),
        ):
            check_field(self, name, choice, allowed)
        if self.policy == "warm" and self.solver == "uniform":
            raise BadArgumentError(
                "policy 'warm' is for solver 'exact' or 'kmeans++': a step, which is all that 'uniform' (the default) "
                "has, is not iterated; 'frozen' or 'refit' is needed"
            )

    @property
    def chooses_step(self) -> bool:
        """Return whether the error target determines step and protected share, too."""
        return self.max_error is not None and self.solver == "uniform"

    def fit_for(self, leaf: Leaf) -> Fit:
        """Return the settings of the fit of an array's codebook."""
        bins = self.embedding_bins if self.embedding_bins and leaf.kind.layer == "embedding" else self.bins
        return Fit(bins, self.sigma, self.solver, self.policy, self.trigger, self.seed)

    def outgrown(self, share: float, before: LevelsReference | None, spec: LeafSpec) -> str:
        """Return the reason to refit a codebook because the array protects more than before, or "".

        Thresholds are for all arrays together, so one array's share may grow unseen. Its codebook is refit each
        time that share passes 8, 64, ... times `protect` and is of 32 elements or more.

        Args:
            share: of the array's finite elements, protected now.
            before: the parent.
            spec: of the array.
        """
        if before is None or not self.protect or not spec.size:
            return ""
        was = before.protected.size / spec.itemsize / spec.size
        passed = any(was < _STEP**n * self.protect <= share for n in range(1, 20))
        passed = passed and share * spec.size >= _FEW
        return f"refit: {share:.2%} are protected, {was:.2%} were" if passed else ""

    def moved(self, thresholds: Thresholds, before: LevelsReference | None) -> str:
        """Return a note if the protection threshold, frozen like codebooks, still changed; else ""."""
        if self.policy != "frozen" or before is None:
            return ""
        now, was = thresholds.protect_magnitude, before.thresholds.protect_magnitude
        return "" if now == was else f"; protected from {now:.6g} on, before from {was:.6g}"


@dataclass(frozen=True, slots=True)
class Limits:
    """Thresholds over all arrays of a codec.

    Args:
        protect: (magnitude, sensitivity) from which on weights are protected.
        prune: layer type -> (magnitude, sensitivity) below which its weights are pruned.
    """

    protect: tuple[float, float]
    prune: Mapping[str, tuple[float, float]]

    def of(self, layer: str) -> Thresholds:
        """Return the thresholds of arrays of a layer type."""
        return Thresholds(*self.protect, *self.prune.get(layer, (0.0, 0.0)))


@dataclass(frozen=True)
class Plan:
    """The decisions for one array before any array is encoded.

    Args:
        sketch: of the whole array.
        thresholds: of pruning and protection.
        trade: terms of the rate-distortion cost.
        kept: counts of the elements neither pruned nor protected, if gradients decide that; None: see `sketch`.
        codes: solution of the k-means problem, if it was solved together with others; None: not solved yet.
    """

    sketch: Sketch
    thresholds: Thresholds
    trade: Trade
    kept: Cells | None = None
    codes: NpArray | None = None

    @cached_property
    def cells(self) -> Cells:
        """Return the counts of the elements that are neither pruned nor protected."""
        return Cells.of(kept(self.sketch.signed, self.thresholds)) if self.kept is None else self.kept


def check_gradients(codec: QuantizeSettings, leaves: Sequence[Leaf]) -> None:
    """Refuse to prune arrays by sensitivity without gradients."""
    if codec.prune and codec.prune_metric == "sensitivity":
        for leaf in leaves:
            if leaf.gradient is None and leaf.kind.layer != "embedding":
                raise BadArgumentError(f"{leaf.path}: pruning by sensitivity needs its gradient in grads=")


def sketched(codec: QuantizeSettings, leaves: Sequence[Leaf]) -> list[Sketch]:
    """Return histograms of the values and, with a gradient, of the sensitivity of each array."""

    small = [i for i, leaf in enumerate(leaves) if _is_small(leaf)]
    others = [i for i, leaf in enumerate(leaves) if not _is_small(leaf)]
    found = dict(zip(small, _small_sketches(codec, [leaves[i] for i in small]), strict=True))
    found |= zip(others, _large_sketches(codec, [leaves[i] for i in others]), strict=True)
    return [found[i] for i in range(len(leaves))]


def _is_small(leaf: Leaf) -> bool:
    """Return whether an array is sketched together with others."""
    return (
        leaf.spec.nbytes <= SMALL and leaf.spec.dtype == "float32" and leaf.gradient is None and not on_gpu(leaf.flat)
    )


def _small_sketches(codec: QuantizeSettings, leaves: Sequence[Leaf]) -> list[Sketch]:
    bits, found = min(_bits(codec), FORMATS["float32"].mantissa), []
    for begin in range(0, len(leaves), _TOGETHER):
        part = leaves[begin : begin + _TOGETHER]
        joined = np.concatenate([on_host(leaf.flat) for leaf in part])
        buckets, counts, ends = used_buckets_many(joined, np.cumsum([leaf.spec.size for leaf in part]), bits)
        start = 0
        for leaf, end in zip(part, ends.tolist(), strict=True):
            filled = Filled(buckets[start:end], counts[start:end], bits, "float32", True)
            found.append(Sketch(leaf.kind.layer, filled, None))
            start = end
    return found


def _large_sketches(codec: QuantizeSettings, leaves: Sequence[Leaf]) -> list[Sketch]:
    def some(numbers: list[int]) -> list[Sketch]:
        bits, known = _bits(codec), [i for i in numbers if leaves[i].gradient is not None]
        signed = log_histogram_many([leaves[i].flat for i in numbers], bits, signed=True)
        sensitivity = log_histogram_many(
            [leaves[i].flat for i in known], bits, gradients=[leaves[i].gradient for i in known]
        )
        of = dict(zip(known, sensitivity, strict=True))
        return [Sketch.of(leaves[i].kind.layer, h, of.get(i)) for i, h in zip(numbers, signed, strict=True)]

    return map_batches(some, leaves)


def _bits(codec: QuantizeSettings) -> int:
    """Return the sub-bucket bits of float64 sketches; narrower formats may have fewer."""
    return bits_for(codec.alpha, FORMATS["float64"])


def limits(codec: QuantizeSettings, sketches: Sequence[Sketch], before: Thresholds | None) -> Limits:
    """Return the thresholds over all arrays, from their sketches and the parent's thresholds."""
    return Limits(protection_limits(codec, sketches, before), pruning_limits(codec, sketches))


def thresholds_before(parents: Sequence[Reference | None]) -> Thresholds | None:
    """Return the parent's thresholds from its first quantized array, or None."""
    return next((p.thresholds for p in parents if isinstance(p, LevelsReference)), None)


def pruning_limits(codec: QuantizeSettings, sketches: Sequence[Sketch]) -> dict[str, tuple[float, float]]:
    """Return pruning thresholds by layer type."""
    return pruning(sketches, codec.prune, codec.prune_metric) if codec.prune else {}


def protection_limits(
    codec: QuantizeSettings, sketches: Sequence[Sketch], before: Thresholds | None
) -> tuple[float, float]:
    """Return protection thresholds; old ones are kept while the protected share is about right.

    Under an error target each array has its own magnitude, and protection by sensitivity stays.
    """
    if not codec.protect:
        return (np.inf, np.inf)
    if codec.chooses_step:
        return (np.inf, protection(sketches, codec.protect)[1])
    if codec.policy == "frozen" and before is not None and not any(s.products for s in sketches):
        old = before.protect_magnitude
        share = share_at_or_above(magnitudes(s.values for s in sketches), old)
        if 0.5 * codec.protect <= share <= 1.25 * codec.protect:
            return (old, np.inf)
    return protection(sketches, codec.protect)


def spreads(sketches: Sequence[Sketch], thresholds: Sequence[Thresholds]) -> list[float | None]:
    """Return the variance of the coded elements of each array, see `spread`."""
    pairs = list(zip(sketches, thresholds, strict=True))
    return map_chunks(lambda pair: spread(kept(pair[0].signed, pair[1])), pairs)


def plans(
    codec: QuantizeSettings,
    leaves: Sequence[Leaf],
    parents: Sequence[Reference | None],
    sketches: Sequence[Sketch],
    decided: Limits,
) -> list[Plan]:
    """Return a plan for each array, under thresholds that may rest on more arrays than these.

    Codebooks of arrays on a GPU are solved together on that GPU.
    """
    thresholds = [decided.of(sketch.layer) for sketch in sketches]
    slopes = [Trade(0.0)] * len(leaves)
    if codec.rate:
        sizes = [leaf.spec.size for leaf in leaves]
        slopes = trades(codec.rate, sizes, spreads(sketches, thresholds), mean_roots(leaves))
    cells = _kept(codec, leaves, thresholds)
    found = [Plan(*made) for made in zip(sketches, thresholds, slopes, cells, strict=True)]
    if codec.max_error is not None or codec.solver == "uniform":
        return found
    codes = _codes(codec, leaves, parents, found)
    return [replace(plan, codes=own) for plan, own in zip(found, codes, strict=True)]


def _kept(codec: QuantizeSettings, leaves: Sequence[Leaf], thresholds: Sequence[Thresholds]) -> list[Cells | None]:
    """Count the elements neither pruned nor protected of each array with a gradient."""

    def some(numbers: list[int]) -> list[Cells]:
        counted = kept_histogram_many(
            [leaves[i].flat for i in numbers],
            [thresholds[i] for i in numbers],
            _bits(codec),
            gradients=[leaves[i].gradient for i in numbers],
        )
        return [Cells.of(histogram) for histogram in counted]

    known = [i for i, leaf in enumerate(leaves) if leaf.gradient is not None]
    found = map_batches(lambda numbers: some([known[n] for n in numbers]), [leaves[i] for i in known])
    of = dict(zip(known, found, strict=True))
    return [of.get(i) for i in range(len(leaves))]


def _codes(
    codec: QuantizeSettings, leaves: Sequence[Leaf], parents: Sequence[Reference | None], planned: Sequence[Plan]
) -> list[NpArray | None]:
    """Solve the k-means problems of arrays on a GPU.

    Those of other arrays are solved when used: None here.
    """

    def some(numbers: list[int]) -> list[NpArray | None]:
        place = leaves[numbers[0]].flat
        problems = {}
        if on_gpu(place):
            for i in numbers:
                how, cells = codec.fit_for(leaves[i]), planned[i].cells
                before = compatible_parent(parents[i], leaves[i].spec)
                problem = problem_of(cells, how, None if before is None else before.codebook)
                if problem is not None:
                    problems[i] = problem
        found = dict(zip(problems, solve_together(list(problems.values()), place), strict=True)) if problems else {}
        return [found.get(i) for i in numbers]

    return map_batches(some, leaves)
