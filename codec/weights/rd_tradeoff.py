"""The price of a bit for the rate-distortion encoder, in each of several arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...kernels.histogram import Histogram
from ..base import Leaf
from ..parallel import map_chunks
from .codebook import largest_of, variance
from .importance import mean_root


@dataclass(frozen=True, slots=True)
class Trade:
    """Terms of the rate-distortion cost: `importance * error**2 + price * bits`.

    Args:
        price: of a bit; 0: every weight gets its nearest level.
        mean: mean root of the second moment that gives the importance; 0 if unknown.
        scale: factor that makes the mean importance of all arrays 1.
    """

    price: float
    mean: float = 0.0
    scale: float = 0.0


def spread(histogram: Histogram) -> float | None:
    """Return the variance of the coded values; None if it is out of the float32 range."""
    return variance(histogram) if 1e-15 < largest_of(histogram) < 1e15 else None


def mean_roots(leaves: Sequence[Leaf]) -> dict[int, float]:
    """Return the mean root of the importance of each array that has one, by its number."""
    known = [i for i, leaf in enumerate(leaves) if leaf.importance is not None]
    return dict(zip(known, map_chunks(lambda i: mean_root(leaves[i].importance), known), strict=True))


def trades(
    rate: float, sizes: Sequence[int], spreads: Sequence[float | None], roots: Mapping[int, float]
) -> list[Trade]:
    """Return the price of a bit: one slope for all arrays with importance, else one per array.

    Args:
        rate: price of a bit in variances, >= 0.
        sizes: elements of each array.
        spreads: of each, see `spread`.
        roots: see `mean_roots`.
    """
    spans = [0.0 if s is None else s for s in spreads]
    known = {i: mean for i, mean in roots.items() if spreads[i] is not None and 1e-100 < mean < 1e100}
    elements = sum(sizes[i] for i in known)
    # `fsum` rounds once; the result of `sum` for floats depends on the version of Python.
    total = math.fsum(sizes[i] * mean for i, mean in known.items())
    weighted = math.fsum(sizes[i] * mean * spans[i] for i, mean in known.items())
    return [
        Trade(rate * weighted / total, known[i], elements / total) if i in known else Trade(rate * spans[i])
        for i in range(len(sizes))
    ]
