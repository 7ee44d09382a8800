"""Scaling of arrays by powers of two, so that squares neither overflow nor vanish."""

from __future__ import annotations

import math

import numpy as np

from ...kernels.error_sums import Distortion, distortion
from .leaves import Array


def unit(largest: float) -> float:
    """Return a power of two that scales `largest` near 1 if squares would overflow or underflow."""
    if largest == 0.0 or 1e-100 < largest < 1e100:
        return 1.0
    return math.ldexp(1.0, max(-1000, min(1000, -math.frexp(largest)[1])))


def scaled_distortion(x: Array, y: Array, scale: float) -> Distortion:
    """Return the distortion of arrays scaled by `unit`; sums are scaled, ratios are not."""
    if scale == 1.0:
        return distortion(x, y)
    # In float64 for every dtype: the scale may be beyond float32.
    a, b = (v.astype(np.float64, copy=False) if isinstance(v, np.ndarray) else v.double() for v in (x, y))
    with np.errstate(invalid="ignore", under="ignore"):
        return distortion(a * scale, b * scale)
