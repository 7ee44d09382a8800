"""The codebook of an array: fitted to its histogram, or its parent's kept as long as that is nearly as good.

A codebook refit from scratch moves every boundary and throws the delta away; a frozen one makes deltas small. So the
default keeps the parent's until its error passes `trigger` times the best possible, and says why it did what.
"""

from __future__ import annotations

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


def spread_within(histogram: Histogram, weights: Floats) -> float:
    """Weighted variance inside the buckets, taken as uniform: no codebook on buckets can do better than this."""
    values = histogram.values()
    _, exponent = np.frexp(values)
    width = np.where(values == 0, 0.0, np.ldexp(1.0, exponent - 1 - histogram.bits))
    return float((weights * width * width).sum() / 12)


def variance(histogram: Histogram) -> float:
    """Variance of the counted elements of a signed histogram."""
    values, n = histogram.values(), histogram.total
    if n == 0:
        return 0.0
    mean = float((histogram.counts[:-1] * values).sum()) / n
    return float((histogram.counts[:-1] * (values - mean) ** 2).sum()) / n


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
    values = histogram.values()
    weights = bucket_weights(histogram.counts[:-1], values, how.sigma)
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
    floor = spread_within(histogram, weights)
    loss, least = (quantization_loss(values, weights, c) + floor for c in (parent, best))
    if loss <= how.trigger * least:
        return parent, "frozen"
    return best, f"refit: loss {loss / least:.3g} times the best" if least else "refit: the best is exact"


def predicted_error(histogram: Histogram, codebook: Floats) -> float:
    """Relative L2 error that quantizing the counted elements with this codebook will have, from the histogram alone."""
    values = histogram.values()
    weights = histogram.counts[:-1].astype(np.float64)
    norm = float((weights * values * values).sum())
    if codebook.size == 0 or norm == 0.0:
        return 0.0
    return float(np.sqrt((quantization_loss(values, weights, codebook) + spread_within(histogram, weights)) / norm))
