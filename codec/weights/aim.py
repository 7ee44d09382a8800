"""How far ahead of the drift an array is coded: found from the lag of one delta, for the next.

A weight that keeps its old level because the bits of a new one are not worth it stays behind where the training takes
it: the errors of an array then point against its *drift*, the way its weights are going, and who goes on from a
restored checkpoint has lost that much of the training. So where the drift is known (`compress(..., earlier=)`), what is
coded is not `w` but `w + aim (w - earlier)`. The aim is each array's own. It is moved by half the *lag* found at each
checkpoint, the part of the drift that is missing in the restored weights w~,

    lag = <w - w~, w - earlier> / |w - earlier|**2,

until none is; the next delta finds it in the metadata of its parent. Where first moments are lost, too, so are the
steps that they would still have brought about: then the restored weights shall lead by those
(`codec.weights.drift`). The decoder does not know, and errors are stated against the true weights.

After a jump (a layer that is initialised anew, a learning rate raised thirtyfold) an aim that was right leads far
astray: by as much again as the weights jumped. So an array whose error is to a good part an overshoot is coded again,
with an aim that is lower by that much, or none; and no lead is longer than the rest of the error is. Weights that have
gone farther than they are long (a layer set to zero) are on no way that could be aimed along, whatever the error is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...kernels.approximation_error import Distortion
from .levels import AIM_STEPS, FARTHEST_AIM

_GAIN = 0.5
"""Part of the lag found by which the aim is moved."""
_BORNE = 0.25
"""Part of the squared error that an overshoot may be."""
_NONE = Distortion(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Distances:
    """How far the weights w, the restored ones w~ and the earlier ones are from each other; those of chunks add up.

    Args:
        met: of w~ as an approximation of w.
        drift: of earlier as an approximation of w; nothing where it is not known.
        gone: of w~ as an approximation of earlier.
    """

    met: Distortion = _NONE
    drift: Distortion = _NONE
    gone: Distortion = _NONE

    def __add__(self, other: Distances) -> Distances:
        return Distances(self.met + other.met, self.drift + other.drift, self.gone + other.gone)

    def next_aim(self, aim: float, lead: float) -> float:
        """The aim of the next delta, a multiple of `1 / AIM_STEPS`; as it is where no drift is known.

        Args:
            aim: of this one.
            lead: part of the drift by which w~ shall be ahead.
        """
        missing = self._missing(lead)
        return aim if missing is None else coarse(aim + _GAIN * missing)

    def overshoot(self, aim: float, lead: float) -> float:
        """By how much an aim was too far, where much of the squared error comes of that; else 0. As `next_aim`.

        All of it, where the drift is longer than the weights: that was a jump.
        """
        if self.drift.squared_error > self.drift.squared_norm:
            return aim
        missing = self._missing(lead)
        if not aim or missing is None or missing >= 0:
            return 0.0
        return -missing if missing**2 * self.drift.squared_error > _BORNE * self.met.squared_error else 0.0

    def _missing(self, lead: float) -> float | None:
        """The lag and what lead is wanted; None where there is no drift, or none that can be summed.

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


def coarse(aim: float) -> float:
    """In range, and so coarse that the order in which distortions are summed decides nothing."""
    return round(AIM_STEPS * min(FARTHEST_AIM, max(0.0, aim))) / AIM_STEPS
