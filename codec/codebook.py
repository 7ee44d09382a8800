"""The codebook of an array: fitted to its histogram, or its parent's kept as long as that is nearly as good.

A codebook refit from scratch moves every boundary and throws the delta away; a frozen one makes deltas small. So the
default keeps the parent's until its error passes `trigger` times the best possible, and says why it did what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels.histogram import Histogram
from ..kernels.kmeans import bucket_weights, quantization_loss, weighted_kmeans

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Fit:
    """How codebooks are fitted.

    Args:
        bins: entries, 2 to 254.
        sigma: weight of a bucket = sigma * frequency + (1 - sigma) * magnitude, each summing to one; in [0, 1].
        solver: "exact" or "kmeans++".
        policy: "refit", "warm" (Lloyd from the parent's) or "frozen" (the parent's until `trigger`).
        trigger: frozen codebooks are refit when their loss passes this multiple of the best; at least 1.
        seed: of kmeans++.
    """

    bins: int
    sigma: float
    solver: str
    policy: str
    trigger: float
    seed: int


def unit(largest: float) -> float:
    """A power of two that brings `largest` near 1, so that squares neither overflow nor vanish; 1 where they do not."""
    if largest == 0.0 or 1e-100 < largest < 1e100:
        return 1.0
    return math.ldexp(1.0, max(-1000, min(1000, -math.frexp(largest)[1])))


def largest_of(histogram: Histogram) -> float:
    """Magnitude of the largest counted bucket of a signed histogram; 0 where nothing is counted."""
    return float(np.abs(histogram.values()[np.flatnonzero(histogram.counts[:-1])]).max(initial=0.0))


def _spread_within(values: Floats, weights: Floats, bits: int) -> float:
    """Weighted variance inside the buckets, taken as uniform: no codebook on buckets can do better than this."""
    _, exponent = np.frexp(values)
    width = np.where(values == 0, 0.0, np.ldexp(1.0, exponent - 1 - bits))
    return float((weights * width * width).sum() / 12)


def variance(histogram: Histogram) -> float:
    """Variance of the counted elements of a signed histogram whose squares float64 holds."""
    present = np.flatnonzero(histogram.counts[:-1])
    values, counts, n = histogram.values()[present], histogram.counts[present], histogram.total
    if n == 0:
        return 0.0
    mean = float((counts * values).sum()) / n
    return float((counts * (values - mean) ** 2).sum()) / n


def fit(histogram: Histogram, how: Fit, parent: Floats | None) -> tuple[Floats, str]:
    """A codebook for the elements counted in a signed histogram.

    Args:
        histogram: of the elements to quantize.
        how: bins, weights, solver, policy.
        parent: the parent's codebook of the same array, ascending, or None.

    Returns:
        Ascending float64 codebook of at most `how.bins` entries (fewer when there are fewer distinct buckets), and the
        reason: "new", "refit", "warm", "frozen", or "refit: ..." with what triggered it.
    """
    present = np.flatnonzero(histogram.counts[:-1])
    values = histogram.values()[present]
    weights = bucket_weights(histogram.counts[present], values, how.sigma)
    if not weights.any():
        return np.empty(0), "empty"
    usable = parent is not None and parent.size > 0
    if usable and how.policy == "warm" and parent is not None and parent.size == how.bins:
        return weighted_kmeans(values, weights, how.bins, initial=parent), "warm"
    best = weighted_kmeans(values, weights, how.bins, method=how.solver, seed=how.seed)
    if not usable or parent is None:
        return best, "new"
    if how.policy != "frozen":
        return best, "refit"
    if parent.size != best.size:
        return best, f"refit: {parent.size} entries became {best.size}"
    used = np.flatnonzero(weights)
    scale = unit(float(np.abs(values[used]).max()))
    values, weights = values[used] * scale, weights[used]
    floor = _spread_within(values, weights, histogram.bits)
    loss, least = (quantization_loss(values, weights, c * scale) + floor for c in (parent, best))
    if loss <= how.trigger * least:
        return parent, "frozen"
    return best, f"refit: loss {loss / least:.3g} times the best" if least else "refit: the best is exact"


def predicted_error(histogram: Histogram, codebook: Floats) -> float:
    """Relative L2 error that quantizing the counted elements with this codebook will have, from the histogram alone."""
    used = np.flatnonzero(histogram.counts[:-1])
    if codebook.size == 0 or used.size == 0:
        return 0.0
    scale = unit(largest_of(histogram))
    values, weights = histogram.values()[used] * scale, histogram.counts[used].astype(np.float64)
    norm = float((weights * values * values).sum())
    loss = quantization_loss(values, weights, codebook * scale) + _spread_within(values, weights, histogram.bits)
    return math.sqrt(loss / norm) if norm else 0.0
