"""The drift gain of an array: how far its weights are extrapolated.

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

from ...kernels.error_sums import Distortion
from .levels import GAIN_STEPS, LARGEST_GAIN

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
