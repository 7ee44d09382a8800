"""Assignment of levels to weights, extrapolated by their drift if a gain is given."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.backend.arrays import is_torch, on_gpu
from ...kernels.error_sums import Distortion
from ...kernels.quantizer import Thresholds, assign, dequantize
from ...kernels.rate_distortion import extrapolate
from ..base import CHUNK, Leaf
from ..parallel import map_chunks
from ..state.leaves import Array, NpArray, from_bytes, on_host
from ..state.scaling import scaled_distortion
from .drift_gain import Distances, coarse
from .importance import weights_of
from .levels import LevelsReference, codebook_array
from .protected import held_values
from .ratedistortion import cheapest_levels
from .rd_tradeoff import Trade

_TRIES = 2
"""Aims that are tried before none."""
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class _Part:
    """The results of a chunk except its levels."""

    protected: NpArray
    distances: Distances


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
        met = scaled_distortion(x, restored, scale)
        if earlier is None:
            return _Part(held, Distances(met))
        drift, gone = scaled_distortion(x, earlier, scale), scaled_distortion(earlier, restored, scale)
        return _Part(held, Distances(met, drift, gone))

    parts = map_chunks(one, range(0, leaf.spec.size, CHUNK))
    protected = np.concatenate([p.protected for p in parts]) if parts else np.empty(0, np.uint8)
    distances = sum((p.distances for p in parts), Distances())
    reference = LevelsReference(levels, codebook, protected, limits, distances.next_gain(gain, leaf.lead))
    return reference, distances.met, distances.overshoot(gain, leaf.lead)


def _where_protected(x: Array, levels: Array) -> Array:
    """Return the protected elements (level 1), in order."""
    if not is_torch(x) or on_gpu(x):
        return x[levels == 1]
    import torch

    # Positions are faster than a mask, which is read twice: very few elements are protected.
    return x[torch.from_numpy(np.flatnonzero(levels.numpy() == 1))]
