"""Assignment of levels to weights: the nearest, or at a price of a bit those of least cost.

The rate-distortion encoder iterates prices and levels towards a fixed point. It is an encoder-only choice: the decoder
reads levels and never knows. The error is always against the true weights, so it does not accumulate along a chain.

An encoder that keeps an old level, because a new one costs too many bits, leaves the weight behind the training. The
errors of an array then point against its *drift*, the direction in which its weights move, and a training that
continues from a restored checkpoint has lost that progress. So if past weights are known (`compress(earlier=)`), the
encoder codes `w + gain (w - past)` instead of `w`. Each array has its own gain. Each checkpoint moves it by half of
the *lag*, the part of the drift that the restored weights w~ lack:

    lag = <w - w~, w - past> / |w - past|**2

The next delta reads the gain in the metadata of its parent. Lossy first moments lose steps of the optimizer, so the
restored weights are coded ahead by these steps, too (`codec.weights.importance`). The decoder does not need the gain,
and errors are stated against the true weights.

A jump (a layer that is initialized again, a learning rate thirty times as high) makes a right gain far too large. So an
array whose error is mostly an overshoot is coded again, with a gain that is lower by the overshoot, or with none. No
lead is larger than the rest of the error. Weights that moved farther than their own length have no gain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.backend.arrays import is_torch, like, on_gpu
from ...kernels.error_sums import Distortion
from ...kernels.histogram import Histogram
from ...kernels.levels import joint_counts
from ...kernels.quantizer import FIRST_CODE, Thresholds, assign, dequantize
from ...kernels.rate_distortion import Unsettled, extrapolate, rate_distortion_levels, settled_bounds, unsettled
from ..base import CHUNK, Leaf
from ..parallel import map_chunks
from ..state.casting import scaled_distortion
from ..state.leaves import Array, NpArray, from_bytes, on_host
from .codebook import codebook_array, largest_of, variance
from .importance import mean_root, weights_of
from .levels import GAIN_STEPS, LARGEST_GAIN, LevelsReference, held_values

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
        has_zero: whether some weights are 0; they keep that value.
    """

    price: float
    mean: float = 0.0
    scale: float = 0.0
    has_zero: bool = False


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


_TRIES = 2
"""Aims that are tried before none."""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class Quantized:
    """An array as levels, not yet written.

    Args:
        levels: the levels and their codebook.
        error: relative L2 error met.
        note: reason for the choice of the codebook.
    """

    levels: LevelsReference
    error: float
    note: str


@dataclass(frozen=True, slots=True)
class _Part:
    """The results of a chunk except its levels on the host."""

    protected: NpArray
    distances: Distances
    on_device: tuple[Array, ...] = ()


def assigned(
    leaf: Leaf, limits: Thresholds, trade: Trade, codebook: NpArray, before: LevelsReference | None, scale: float
) -> tuple[LevelsReference, Distortion]:
    """Return the levels of all elements, the restored protected values, and the distortion.

    Args:
        leaf: the array.
        limits: thresholds of pruning and protection.
        trade: what the rate-distortion encoder weighs.
        codebook: float64, ascending, values of the array's dtype.
        before: the parent, or None.
        scale: of the distortion, see `codebook.scaled_distortion`.
    """
    gain = 0.0 if before is None else before.drift_gain
    for _ in range(_TRIES):
        reference, met, over = _coded(leaf, limits, trade, codebook, before, scale, gain)
        if not over:
            return reference, met
        gain = coarse(gain - over)
    return _coded(leaf, limits, trade, codebook, before, scale, 0.0)[:2]


def _coded(
    leaf: Leaf,
    limits: Thresholds,
    trade: Trade,
    codebook: NpArray,
    before: LevelsReference | None,
    scale: float,
    gain: float,
) -> tuple[LevelsReference, Distortion, float]:
    """Assign levels as `assigned` does, with a gain; also return the gain's overshoot, or 0."""
    levels = np.empty(leaf.spec.size, np.uint8)
    native = codebook_array(codebook, leaf.spec)
    zero = np.flatnonzero(codebook == 0)[: int(trade.has_zero)]
    # Prices are compared in float32: values beyond its range stay at the nearest levels.
    keeps = bool(trade.price) and codebook.size > 0 and float(np.abs(codebook).max()) <= _LARGEST

    def one(start: int) -> _Part:
        part = slice(start, start + CHUNK)
        x = leaf.flat[part]
        gradient = None if leaf.gradient is None else leaf.gradient[part]
        earlier = None if leaf.earlier is None or not codebook.size else leaf.earlier[part]
        wanted = x if earlier is None or not gain else extrapolate(x, earlier, gain)
        own = assign(wanted, limits, codebook, gradient=gradient)
        if keeps:
            parent = None if before is None else before.levels[part]
            matters = None
            if trade.mean and leaf.importance is not None:
                matters = weights_of(leaf.importance[part], trade.mean, trade.scale)
            parent_size = 1 if before is None else before.size
            own = cheapest_levels(wanted, own, parent, parent_size, codebook, trade.price, matters)
        if zero.size and (keeps or wanted is not x):
            own[(x == 0) & (own >= FIRST_CODE)] = FIRST_CODE + int(zero[0])
        held = held_values(_where_protected(x, own), leaf.spec)
        values = native.to(x.device) if is_torch(x) else native
        protected = from_bytes(held, leaf.spec)
        restored = dequantize(own, values, protected=protected.to(x.device) if is_torch(x) else protected)
        levels[part] = on_host(own)
        kept = (own,) if on_gpu(own) else ()
        met = scaled_distortion(x, restored, scale)
        if earlier is None:
            return _Part(held, Distances(met), kept)
        drift, gone = scaled_distortion(x, earlier, scale), scaled_distortion(earlier, restored, scale)
        return _Part(held, Distances(met, drift, gone), kept)

    parts = map_chunks(one, range(0, leaf.spec.size, CHUNK))
    protected = np.concatenate([p.protected for p in parts]) if parts else np.empty(0, np.uint8)
    distances = sum((p.distances for p in parts), Distances())
    kept = tuple(chunk for p in parts for chunk in p.on_device)
    next_gain = distances.next_gain(gain, leaf.lead)
    reference = LevelsReference(levels, codebook, protected, limits, next_gain, device_chunks=kept)
    return reference, distances.met, distances.overshoot(gain, leaf.lead)


def _where_protected(x: Array, levels: Array) -> Array:
    """Return the protected elements (level 1), in order."""
    if not is_torch(x) or on_gpu(x):
        return x[levels == 1]
    # Positions are faster than a mask, which is read twice: very few elements are protected.
    return x[like(np.flatnonzero(levels.numpy() == 1), x)]


_GAIN = 0.5
"""Part of the lag found by which the gain is moved."""
_BORNE = 0.25
"""Part of the squared error that an overshoot may be."""
_NONE = Distortion(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Distances:
    """Distances between weights w, restored weights w~ and past weights; `+` adds chunks.

    Args:
        met: of w~ as an approximation of w.
        drift: of earlier as an approximation of w; zero if unknown.
        gone: of w~ as an approximation of earlier.
    """

    met: Distortion = _NONE
    drift: Distortion = _NONE
    gone: Distortion = _NONE

    def __add__(self, other: Distances) -> Distances:
        return Distances(self.met + other.met, self.drift + other.drift, self.gone + other.gone)

    def next_gain(self, gain: float, lead: float) -> float:
        """Return the gain of the next delta, a multiple of `1 / GAIN_STEPS`.

        It is `gain` if no drift is known.

        Args:
            gain: of this one.
            lead: part of the drift by which w~ should be ahead.
        """
        missing = self._missing(lead)
        return gain if missing is None else coarse(gain + _GAIN * missing)

    def overshoot(self, gain: float, lead: float) -> float:
        """Return by how much a gain was too large; 0 if that causes little of the squared error.

        The whole gain was too large if the drift is longer than the weights: that was a jump. Arguments are as in
        `next_gain`.
        """
        if self.drift.squared_error > self.drift.squared_norm:
            return gain
        missing = self._missing(lead)
        if not gain or missing is None or missing >= 0:
            return 0.0
        return -missing if missing**2 * self.drift.squared_error > _BORNE * self.met.squared_error else 0.0

    def _missing(self, lead: float) -> float | None:
        """Return the lag plus the wanted lead, as a part of the drift.

        None if drift is zero or unknown, or if a sum is not finite.

        With e = w - w~ and D = w - earlier it is `|e|**2 + |D|**2 - |D - e|**2 = 2 <e, D>`.
        """
        met, drift, gone = (d.squared_error for d in (self.met, self.drift, self.gone))
        if not drift > 0:
            return None
        lag = (met + drift - gone) / (2 * drift)
        if not math.isfinite(lag):
            return None
        rest = max(0.0, met / drift - min(0.0, lag) ** 2)
        return lag + min(lead, math.sqrt(rest))


def coarse(gain: float) -> float:
    """Clip a gain to its range and round it to a multiple of `1 / GAIN_STEPS`."""
    return round(GAIN_STEPS * min(LARGEST_GAIN, max(0.0, gain))) / GAIN_STEPS
