"""Which level each weight gets, and what it is restored to; levels that are kept back are aimed ahead of the drift.

A weight that keeps its old level because the bits of a new one are not worth it stays behind where the training takes
it: the errors of an array then point against its *drift*, the way its weights are going, and who goes on from a
restored checkpoint has lost that much of the training. So where the drift is known (`compress(..., earlier=)`), what is
coded is not `w` but `w + aim (w - earlier)`. The aim is each array's own. It is moved by half the *lag* found at each
checkpoint, the part of the drift that is missing,

    lag = <w - w~, w - earlier> / |w - earlier|**2,

until none is; the next delta finds it in the metadata of its parent. Where first moments are lost, too, so are the
steps that they would still have brought about: then the restored weights shall lead by those (`codec.drift`). The
decoder does not know, and errors are stated against the true weights.

After a jump (a layer that is initialised anew, a learning rate raised thirtyfold) an aim that was right leads far
astray: by as much again as the weights jumped. So an array whose error is to a good part an overshoot is coded again,
with an aim that is lower by that much, or none; and no lead is longer than the rest of the error is. Weights that have
gone farther than they are long (a layer set to zero) are on no way that could be aimed along, whatever the error is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..kernels.arrays import is_torch, on_gpu
from ..kernels.assign import Thresholds, assign, dequantize
from ..kernels.distortion import Distortion
from ..kernels.extrapolate import extrapolate
from .base import CHUNK, Leaf
from .codebook import scaled_distortion
from .importance import weights_of
from .leaves import Array, NpArray, from_bytes, on_host
from .levels import AIM_STEPS, FARTHEST_AIM, LevelsMemory, codebook_array
from .parallel import map_chunks
from .protected import held_values
from .ratedistortion import cheapest_levels
from .trade import Trade

_GAIN = 0.5
"""Part of the lag found by which the aim is moved."""
_BORNE, _TRIES = 0.25, 2
"""Part of the squared error that an overshoot may be; aims that are tried before none."""
_NONE = Distortion(0.0, 0.0, 0.0)
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk: its protected values, and how far the restored ones, x and the earlier ones are from each other."""

    protected: NpArray
    met: Distortion
    drift: Distortion
    made: Distortion


def assigned(
    leaf: Leaf, limits: Thresholds, trade: Trade, codebook: NpArray, before: LevelsMemory | None, scale: float
) -> tuple[LevelsMemory, Distortion]:
    """Levels of all elements, the values of the protected ones as they will be restored, and the distortion.

    Args:
        leaf: the array.
        limits: of what is pruned and what is protected.
        trade: what the rate-distortion encoder weighs.
        codebook: float64, ascending, values of the array's dtype.
        before: the parent, or None.
        scale: of the distortion, see `codebook.scaled_distortion`.
    """
    aim = 0.0 if before is None else before.aim
    for _ in range(_TRIES):
        memory, met, over = _coded(leaf, limits, trade, codebook, before, scale, aim)
        if not over:
            return memory, met
        aim = _rounded(aim - over)
    return _coded(leaf, limits, trade, codebook, before, scale, 0.0)[:2]


def _coded(
    leaf: Leaf,
    limits: Thresholds,
    trade: Trade,
    codebook: NpArray,
    before: LevelsMemory | None,
    scale: float,
    aim: float,
) -> tuple[LevelsMemory, Distortion, float]:
    """As `assigned`, with an aim; beside it by how much that was too far, 0 where it will do."""
    levels = np.empty(leaf.spec.size, np.uint8)
    native = codebook_array(codebook, leaf.spec)
    # Prices are compared in float32: what it does not hold stays at the nearest levels.
    keeps = bool(trade.price) and codebook.size > 0 and float(np.abs(codebook).max()) <= _LARGEST

    def one(start: int) -> _Part:
        part = slice(start, start + CHUNK)
        x = leaf.flat[part]
        gradient = None if leaf.gradient is None else leaf.gradient[part]
        earlier = None if leaf.earlier is None or not codebook.size else leaf.earlier[part]
        wanted = x if earlier is None or not aim else extrapolate(x, earlier, aim)
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
        met = scaled_distortion(x, restored, scale)
        if earlier is None:
            return _Part(held, met, _NONE, _NONE)
        return _Part(held, met, scaled_distortion(x, earlier, scale), scaled_distortion(earlier, restored, scale))

    parts = map_chunks(one, range(0, leaf.spec.size, CHUNK))
    protected = np.concatenate([p.protected for p in parts]) if parts else np.empty(0, np.uint8)
    met, drift, made = (sum((getattr(p, name) for p in parts), _NONE) for name in ("met", "drift", "made"))
    memory = LevelsMemory(levels, codebook, protected, limits, moved(aim, met, drift, made, leaf.lead))
    return memory, met, overshoot(aim, met, drift, made, leaf.lead)


def moved(aim: float, met: Distortion, drift: Distortion, made: Distortion, lead: float) -> float:
    """The aim of the next delta, a multiple of `1 / AIM_STEPS`; as it is where no drift is known.

    With e = w - w~ and D = w - earlier it is `|e|**2 + |D|**2 - |D - e|**2 = 2 <e, D>`.

    Args:
        aim: of this one.
        met: of w~ as an approximation of w.
        drift: of earlier as an approximation of w.
        made: of w~ as an approximation of earlier.
        lead: part of the drift by which w~ shall be ahead.
    """
    missing = _missing(met, drift, made, lead)
    return aim if missing is None else _rounded(aim + _GAIN * missing)


def overshoot(aim: float, met: Distortion, drift: Distortion, made: Distortion, lead: float) -> float:
    """By how much an aim was too far, where much of the squared error comes of that; else 0. Arguments as `moved`.

    All of it, where the drift is longer than the weights: that was a jump.
    """
    if drift.squared_error > drift.squared_norm:
        return aim
    missing = _missing(met, drift, made, lead)
    if not aim or missing is None or missing >= 0:
        return 0.0
    return -missing if missing**2 * drift.squared_error > _BORNE * met.squared_error else 0.0


def _missing(met: Distortion, drift: Distortion, made: Distortion, lead: float) -> float | None:
    """The lag and what lead is wanted; None where there is no drift, or none that can be summed."""
    if not drift.squared_error > 0:
        return None
    lag = (met.squared_error + drift.squared_error - made.squared_error) / (2 * drift.squared_error)
    if not math.isfinite(lag):
        return None
    rest = max(0.0, met.squared_error / drift.squared_error - min(0.0, lag) ** 2)
    return lag + min(lead, math.sqrt(rest))


def _rounded(aim: float) -> float:
    """In range, and so coarse that the order in which distortions are summed decides nothing."""
    return round(AIM_STEPS * min(FARTHEST_AIM, max(0.0, aim))) / AIM_STEPS


def _where_protected(x: Array, levels: Array) -> Array:
    """The elements of level 1, in order."""
    if not is_torch(x) or on_gpu(x):
        return x[levels == 1]
    import torch

    # A mask would be read twice, and slowly: hardly any element is protected.
    return x[torch.from_numpy(np.flatnonzero(levels.numpy() == 1))]
