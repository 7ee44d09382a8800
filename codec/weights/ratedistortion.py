"""The rate-distortion encoder: the price of a bit, and levels that follow from it.

Prices and levels are iterated towards a fixed point.

An encoder-only choice: the decoder reads levels and never knows. The error is always against the true weights, so it
does not accumulate along a chain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.backend.arrays import is_torch, like
from ...kernels.histogram import Histogram
from ...kernels.levels import joint_counts
from ...kernels.rate_distortion import Unsettled, rate_distortion_levels, settled_bounds, unsettled
from ..base import Leaf
from ..parallel import map_chunks
from ..state.leaves import Array, NpArray, on_host
from .codebook import largest_of, variance
from .importance import mean_root

ROUNDS = 3
_AHEAD, _SLACK = 2.0, 0.5
"""An element is settled if it keeps its level at prices higher by this factor and by these bits."""
_MOST, _PROBED = 0.5, 16
"""Where more than this share of the first sixteenth is open, all elements are looked at."""
_FEW = 32
"""Elements for each pair of levels below which bounds cost more than they save."""
_STEPS = 4
"""Prices an octave that `largest_price` chooses among."""
_CHEAPEST, _DEAREST = -28, 16
"""The cheapest and the dearest of them, in steps from what a squared error at the target is."""


def cheapest_levels(
    x: Array,
    nearest: Array,
    parent: NpArray | None,
    parent_size: int,
    codebook: NpArray,
    price: float,
    importance: Array | None = None,
) -> Array:
    """Return levels of least `importance * error**2 + price * bits` with a conditional coder.

    Each round decides all elements again, by prices from the levels of the round before. Most are settled: no level but
    the nearest can win (`settled_bounds`). So a round looks at the others alone, and finds the same.

    Args:
        x: values, shape (n,).
        nearest: uint8, what `assign` gave.
        parent: uint8 on the host, the parent's levels, or None: all in one context.
        parent_size: number of levels of the parent, 1 without one.
        codebook: float64, ascending.
        price: squared error (times importance) worth one bit, >= 0.
        importance: float32, shape (n,), in the library and on the device of x; None: 1 for all.
    """
    before: Array = np.zeros(nearest.shape[0], np.uint8) if parent is None else parent
    before = like(before, x).to(x.device) if is_torch(x) else before
    codes = codebook.astype(np.float32)
    shape = max(parent_size, 2), codebook.size + 2
    first = counts = _pairs(before, nearest, shape)
    part = whole = Unsettled(slice(None), x, nearest, before, importance)
    bounded, bounds, last = x.shape[0] >= _FEW * first.size, None, None
    settled: NpArray | int = 0
    for _ in range(ROUNDS):
        prices = (price * _bits(counts)).astype(np.float32)
        if bounded and (bounds is None or (_stricter(settled_bounds(codes, prices), bounds) & (first > 0)).any()):
            bounds = settled_bounds(codes, (_AHEAD * prices).astype(np.float32), _SLACK * price)
            bounded = _share(whole, bounds) <= _MOST
            part, last = unsettled(x, nearest, before, bounds, importance) if bounded else whole, None
            settled = first - _pairs(part.previous, part.levels, shape) if bounded else 0
        chosen = rate_distortion_levels(part.x, part.levels, part.previous, codes, prices, part.importance)
        if last is not None and bool((chosen == last).all()):
            break
        counts, last = settled + _pairs(part.previous, chosen, shape), chosen
    levels: Array = nearest.clone() if is_torch(nearest) else nearest.copy()
    levels[part.at] = chosen
    return levels


def _pairs(previous: Array, levels: Array, shape: tuple[int, int]) -> NpArray:
    return on_host(joint_counts(previous, levels, *shape))


def _stricter(bounds: NpArray, others: NpArray) -> NpArray:
    """Return for each pair of levels whether new bounds are stricter than old ones."""
    outside: NpArray = (bounds[..., :2] > others[..., :2]).any(-1) | (bounds[..., 2] < others[..., 2])
    return outside | (bounds[..., 3] > others[..., 3])


def _share(whole: Unsettled, bounds: NpArray) -> float:
    """Return the share of the first elements that is outside the bounds."""
    few = slice(max(1, whole.x.shape[0] // _PROBED))
    importance = None if whole.importance is None else whole.importance[few]
    found = unsettled(whole.x[few], whole.levels[few], whole.previous[few], bounds, importance)
    return int(found.at.shape[0]) / int(few.stop)


def largest_price(
    x: Array,
    nearest: NpArray,
    parent: NpArray | None,
    parent_size: int,
    codebook: NpArray,
    allowed: float,
    spare: float,
) -> float:
    """Return the largest price in a series at which `cheapest_levels` stays within an error.

    Args:
        x: values on the host, shape (n,).
        nearest: uint8, what `assign` gave.
        parent: as for `cheapest_levels`.
        parent_size: as for `cheapest_levels`.
        codebook: float64, ascending.
        allowed: mean squared error that an element may have; the series begins and ends at multiples of it.
        spare: sum of squared errors that may be added, >= 0.

    Returns:
        The price, 0 where all are too dear.
    """
    wide = on_host(x.double() if is_torch(x) else x.astype(np.float64))
    table = np.concatenate([np.zeros(2), codebook])
    kept = np.flatnonzero(nearest >= 2)
    before = (wide[kept] - table[nearest[kept]]) ** 2
    levels = like(nearest, x)
    first = math.floor(_STEPS * math.log2(allowed))
    low, high = _CHEAPEST - 1, _DEAREST + 1
    while high - low > 1:
        middle = (low + high) // 2
        price = math.exp2((first + middle) / _STEPS)
        chosen = on_host(cheapest_levels(x, levels, parent, parent_size, codebook, price))
        added = float(((wide[kept] - table[chosen[kept]]) ** 2 - before).sum())
        low, high = (middle, high) if added <= spare else (low, middle)
    return math.exp2((first + low) / _STEPS) if low >= _CHEAPEST else 0.0


def _bits(counts: NpArray) -> NpArray:
    """Return ideal code lengths with half a count added, so that unused levels stay possible."""
    smoothed = counts + 0.5
    bits: NpArray = np.log2(smoothed.sum(axis=1, keepdims=True) / smoothed)
    return bits


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
