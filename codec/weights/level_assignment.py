"""Assignment of levels to weights, extrapolated by their drift if a gain is given.

An encoder that keeps an old level, because a new one costs too many bits, leaves the weight behind the training. The
errors of an array then point against its *drift*, the direction in which its weights move, and a training that
continues from a restored checkpoint has lost that progress. So if past weights are known (`compress(earlier=)`), the
encoder codes `w + gain (w - past)` instead of `w`. Each array has its own gain. Each checkpoint moves it by half of
the *lag*, the part of the drift that the restored weights w~ lack:

    lag = <w - w~, w - past> / |w - past|**2

The next delta reads the gain in the metadata of its parent. Lossy first moments lose steps of the optimizer, so the
restored weights are coded ahead by these steps, too (`codec.weights.past_weights`). The decoder does not need the gain,
and errors are stated against the true weights.

A jump (a layer that is initialized again, a learning rate thirty times as high) makes a right gain far too large. So an
array whose error is mostly an overshoot is coded again, with a gain that is lower by the overshoot, or with none. No
lead is larger than the rest of the error. Weights that moved farther than their own length have no gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ...kernels.backend.arrays import is_torch, like, on_gpu
from ...kernels.error_sums import Distortion
from ...kernels.quantizer import Thresholds, assign, dequantize
from ...kernels.rate_distortion import extrapolate
from ..base import CHUNK, Leaf
from ..parallel import map_chunks
from ..state.casting import scaled_distortion
from ..state.leaves import Array, NpArray, from_bytes, on_host
from .importance import weights_of
from .levels import GAIN_STEPS, LARGEST_GAIN, LevelsReference, codebook_array
from .protected import held_values
from .ratedistortion import Trade, cheapest_levels

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
