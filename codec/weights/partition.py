"""Thresholds for protected, pruned and quantized weights, from the sketches of all arrays.

Protection is global: the top F of all weights by magnitude, or F/2 by magnitude and F/2 by sensitivity |g w| where
gradients are known. Pruning is by layer type: the lowest fraction of all weights of that type, by one metric;
embeddings are never pruned. Thresholds lie on bucket boundaries of the sketch, on the side that takes no more than
asked, so a histogram can be split at them exactly.

Source: Inshrinkerator, sections 4.1 to 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.backend.floats import FORMATS
from ...kernels.histogram import Histogram, merge
from ...kernels.quantizer import Thresholds


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
