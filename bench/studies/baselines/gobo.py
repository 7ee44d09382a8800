"""GOBO: exact outliers of a layer's Gaussian, and a few centroids for all other weights.

Source: A. H. Zadeh, I. Edo, O. M. Awad, A. Moshovos: GOBO: Quantizing Attention-Based NLP Models for Low Latency and
Energy Efficient Inference, MICRO 2020, arXiv 2005.03842. It was made for finished models: only its quantization is
here, which Inshrinkerator's table 7 is about. Outliers are values whose log probability density under the layer's
normal distribution is below -4.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float32]


def outliers(x: Floats, outlier: float = -4.0) -> npt.NDArray[np.bool_]:
    """Return the mask of values whose log density is below `outlier`."""
    mean, deviation = float(x.mean(dtype=np.float64)), float(x.std(dtype=np.float64))
    if deviation == 0.0:
        return np.zeros(x.size, np.bool_)
    density = -0.5 * ((x - mean) / deviation) ** 2 - math.log(deviation * math.sqrt(2 * math.pi))
    found: npt.NDArray[np.bool_] = density < outlier
    return found


def centroids(x: npt.ArrayLike, count: int, rounds: int) -> Doubles:
    """Fit at most `count` centroids of x by GOBO's iteration, ascending.

    They start as means of groups of equal size; each round assigns to the nearest and takes the means again, until the
    sum of |x - centroid| falls no more. The round of least sum counts.

    Args:
        x: values, 1-D.
        count: centroids.
        rounds: most rounds.

    Example:
        >>> centroids([0.0, 1.0, 10.0, 11.0], 2, 10).tolist()
        [0.5, 10.5]
    """
    values: Doubles = np.sort(np.asarray(x, np.float64))
    if not values.size:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    edges = np.unique(np.linspace(0, values.size, count + 1).round().astype(np.int64))
    codes = np.diff(sums[edges]) / np.diff(edges)
    best, least = codes, math.inf
    for _ in range(rounds):
        # The values nearest to a centroid are a stretch of the sorted ones, up to half-way to the next centroid.
        cuts = np.searchsorted(values, (codes[1:] + codes[:-1]) / 2, side="right")
        edges = np.concatenate([[0], cuts, [values.size]])
        total = _distance(values, sums, edges, codes)
        if not total < least:
            break
        best, least = codes, total
        sizes = np.diff(edges)
        codes = np.where(sizes > 0, np.diff(sums[edges]) / np.maximum(sizes, 1), codes)
    return best


def _distance(values: Doubles, sums: Doubles, edges: npt.NDArray[np.int64], codes: Doubles) -> float:
    """Sum of |x - code| over groups of sorted values."""
    middle = np.clip(np.searchsorted(values, codes), edges[:-1], edges[1:])
    below = codes * (middle - edges[:-1]) - (sums[middle] - sums[edges[:-1]])
    above = sums[edges[1:]] - sums[middle] - codes * (edges[1:] - middle)
    return float((below + above).sum())
