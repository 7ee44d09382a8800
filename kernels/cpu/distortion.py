"""Distortion on the CPU: one pass, four partial sums so that additions need not wait for each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import dtype_name, to_numpy
from ..distortion import Distortion
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array

_STEP = 1 << 20
_TINY = 1e-290
_LIFT = 2.0**300


@njit
def _finite(x: Any, y: Any) -> Any:
    """Sums in four lanes; what is not finite makes the norm not finite, and the caller starts again with `_careful`."""
    error0 = error1 = error2 = error3 = 0.0
    norm0 = norm1 = norm2 = norm3 = 0.0
    largest = 0.0
    n = x.size
    whole = n - n % 4
    for i in range(0, whole, 4):
        a0, a1, a2, a3 = np.float64(x[i]), np.float64(x[i + 1]), np.float64(x[i + 2]), np.float64(x[i + 3])
        d0, d1, d2, d3 = y[i] - a0, y[i + 1] - a1, y[i + 2] - a2, y[i + 3] - a3
        error0 += d0 * d0
        error1 += d1 * d1
        error2 += d2 * d2
        error3 += d3 * d3
        norm0 += a0 * a0
        norm1 += a1 * a1
        norm2 += a2 * a2
        norm3 += a3 * a3
        # Compared without a division; after a short while hardly ever taken.
        over0 = (abs(d0) > largest * abs(a0)) | ((abs(a0) < _TINY) & (d0 != 0.0))
        over1 = (abs(d1) > largest * abs(a1)) | ((abs(a1) < _TINY) & (d1 != 0.0))
        over2 = (abs(d2) > largest * abs(a2)) | ((abs(a2) < _TINY) & (d2 != 0.0))
        over3 = (abs(d3) > largest * abs(a3)) | ((abs(a3) < _TINY) & (d3 != 0.0))
        if over0 | over1 | over2 | over3:
            for k in range(i, i + 4):
                largest = _larger(largest, np.float64(x[k]), np.float64(y[k]))
    for i in range(whole, n):
        a = np.float64(x[i])
        d = y[i] - a
        error0 += d * d
        norm0 += a * a
        largest = _larger(largest, a, np.float64(y[i]))
    return (error0 + error1) + (error2 + error3), (norm0 + norm1) + (norm2 + norm3), largest


@njit
def _careful(x: Any, y: Any) -> Any:
    error = norm = largest = 0.0
    for i in range(x.size):
        a = np.float64(x[i])
        if np.isfinite(a):
            d = y[i] - a
            error += d * d
            norm += a * a
            largest = _larger(largest, a, np.float64(y[i]))
    return error, norm, largest


@njit
def _larger(largest: float, a: float, b: float) -> float:
    if abs(a) < _TINY:
        # A product of subnormals would round away what is compared.
        a, b = a * _LIFT, b * _LIFT
    d = abs(b - a)
    if d > largest * abs(a):
        return d / abs(a) if a != 0.0 else np.inf
    return largest


def _floats(x: Array) -> Any:
    """x as NumPy float32 or float64; the 16-bit formats are widened, which is exact."""
    values = to_numpy(x)
    if dtype_name(x) == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32) if values.dtype == np.float16 else values


def distortion(x: Array, y: Array) -> Distortion:
    """See `kernels.distortion`."""
    x, y = x.reshape(-1), y.reshape(-1)
    total = Distortion(0.0, 0.0, 0.0)
    for start in range(0, x.shape[0], _STEP):
        a, b = _floats(x[start : start + _STEP]), _floats(y[start : start + _STEP])
        parts = _finite(a, b)
        if not math.isfinite(parts[1]):
            parts = _careful(a, b)
        total += Distortion(*(float(p) for p in parts))
    return total
