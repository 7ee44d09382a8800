"""The codebook of an array: fitted to its histogram, or its parent's kept as long as that is nearly as good.

A codebook refit from scratch moves every boundary and throws the delta away; a frozen one makes deltas small. So the
default keeps the parent's until its error passes `trigger` times the best possible, and says why it did what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernels.distortion import Distortion, distortion
from ..kernels.histogram import Histogram
from ..kernels.kmeans import bucket_weights, quantization_loss, weighted_kmeans
from .leaves import Array

MOST = 254
"""Most entries of a codebook: a level is a byte, and two levels are taken."""
_FINER = 0.8
"""A uniform parent this much finer than need be is replaced: its error is small, but bits are wasted."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Fit:
    """How codebooks are fitted.

    Args:
        bins: entries, 2 to 254.
        sigma: weight of a bucket = sigma * frequency + (1 - sigma) * magnitude, each summing to one; in [0, 1].
        solver: "exact", "kmeans++", or "uniform": equidistant entries with the error of the exact codebook of `bins`.
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


def scaled_distortion(x: Array, y: Array, scale: float) -> Distortion:
    """The distortion of arrays brought near 1 by `unit`; its sums are in those units, its ratios the arrays' own."""
    if scale == 1.0:
        return distortion(x, y)
    with np.errstate(invalid="ignore", under="ignore"):
        return distortion(x * scale, y * scale)


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


def _coarser(values: Floats, counts: Floats, bits: int, bins: int) -> tuple[Floats, Floats]:
    """Means and counts of buckets put together by fours or twos, as long as 16 times `bins` are left; or all."""
    fraction, exponent = np.frexp(values)
    for parts in (1 << kept for kept in (bits - 1, bits) if kept > 0):
        first = np.flatnonzero(np.diff(np.ldexp(np.trunc(fraction * parts) / parts, exponent), prepend=-np.inf))
        if first.size >= 16 * bins:
            number = np.add.reduceat(counts, first)
            return np.add.reduceat(counts * values, first) / number, number
    return values, counts


def uniform(values: Floats, counts: Floats, bins: int, bits: int) -> Floats:
    """Multiples of a step that err as much as the best `bins` entries do, over the whole range of the values.

        step = sqrt(12 D),  D = mean squared error of the exact codebook of `bins` entries

    An optimal codebook of so many entries is not optimal for an entropy coder: of all codebooks with the same error the
    equidistant one has very nearly the least entropy, and the fewest values that cross a boundary between checkpoints.
    The step is rounded to 8 bits, so that multiples are exact; there are at most 254 entries.

    Args:
        values: ascending, with `counts` > 0, shape (n,).
        counts: how often each occurs.
        bins: entries of the codebook whose error is aimed at.
        bits: of the histogram.

    Source: Gish and Pierce 1968 (asymptotically efficient quantizing).
    """
    if bins >= values.size:
        best: Floats = weighted_kmeans(values, counts, bins)
        return best
    scale = unit(float(np.abs(values).max()))
    scaled = values * scale
    # Boundaries of the best codebook need not be found to a bucket: its error is flat there.
    exact: Floats = weighted_kmeans(*_coarser(scaled, counts, bits, bins), bins)
    loss = quantization_loss(scaled, counts, exact) + _spread_within(scaled, counts, bits)
    low, high = float(values[0]), float(values[-1])
    step = max(math.sqrt(12 * loss / float(counts.sum())) / scale, (high / 2 - low / 2) / (MOST - 2) * 2)
    mantissa, exponent = math.frexp(step)
    step = math.ldexp(math.ceil(mantissa * 256), exponent - 8)
    if not 0 < step < math.inf:
        return exact / scale
    first, last = math.floor(low / step + 0.5), math.ceil(high / step - 0.5)
    return np.arange(first, last + 1, dtype=np.float64) * step


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
    if how.solver == "uniform":
        best = uniform(values, weights, how.bins, histogram.bits)
    else:
        best = weighted_kmeans(values, weights, how.bins, method=how.solver, seed=how.seed)
    if not usable or parent is None:
        return best, "new"
    if how.policy != "frozen":
        return best, "refit"
    if how.solver == "uniform":
        if parent.size > 1 and best.size > 1 and spacing(parent) < _FINER * spacing(best):
            return best, f"refit: a step of {spacing(parent) / spacing(best):.3g} times the best"
    elif parent.size != best.size:
        return best, f"refit: {parent.size} entries became {best.size}"
    used = np.flatnonzero(weights)
    scale = unit(float(np.abs(values[used]).max()))
    values, weights = values[used] * scale, weights[used]
    floor = _spread_within(values, weights, histogram.bits)
    loss, least = (quantization_loss(values, weights, c * scale) + floor for c in (parent, best))
    if loss <= how.trigger * least:
        return parent, "frozen"
    return best, f"refit: loss {loss / least:.3g} times the best" if least else "refit: the best is exact"


def spacing(codebook: Floats) -> float:
    """Mean distance of the entries of a codebook of at least two; infinite where a float64 does not hold it."""
    half = float(codebook[-1]) / 2 - float(codebook[0]) / 2
    return half / (codebook.size - 1) * 2


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
