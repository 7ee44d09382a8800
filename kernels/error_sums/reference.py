"""Distortion by array-API functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array
from . import Distortion


def distortion(x: Array, y: Array) -> Distortion:
    """See `kernels.distortion`."""
    xp = array_namespace(x, y)
    a, b = xp.astype(xp.reshape(x, (-1,)), xp.float64), xp.astype(xp.reshape(y, (-1,)), xp.float64)
    finite = xp.isfinite(a)
    d = xp.where(finite, b - a, xp.zeros_like(a))
    a = xp.where(finite, a, xp.zeros_like(a))
    if a.shape[0] == 0:
        return Distortion(0.0, 0.0, 0.0)
    change = xp.abs(d)
    size = xp.where(a == 0, xp.ones_like(a), xp.abs(a))
    relative = xp.where(a == 0, xp.where(change > 0, xp.full_like(a, xp.inf), xp.zeros_like(a)), change / size)
    return Distortion(float(xp.sum(d * d)), float(xp.sum(a * a)), float(xp.max(relative)))


def distortion_many(x: Array, y: Array, ends: np.ndarray[Any, np.dtype[np.int64]]) -> list[Distortion]:
    """See `kernels.distortion_many`."""
    parts = zip((0, *ends.tolist()), ends.tolist(), strict=False)
    return [distortion(x[start:end], y[start:end]) for start, end in parts]
