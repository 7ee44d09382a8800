"""Approximation error on the CPU: one pass with many independent partial sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend.arrays import Array, dtype_name, to_numpy
from ..backend.jit import njit_in_place, njit_inline
from ..backend.widen import widened
from . import Distortion

_STEP = 1 << 20
_LANES = 128
"""Number of partial sums, enough to fill vector registers."""
_TINY = 1e-290
_LIFT = 2.0**300


@njit_in_place
def _finite(x: Any, y: Any, error: Any, norm: Any) -> Any:
    """Sums over an array in parallel lanes, for finite elements only.

    An infinity or NaN makes the norm not finite; then the caller starts again with `_careful`.

    The array is processed in short blocks. The first loop is vectorized and tests without a division whether the
    largest relative error grew, which is rare after the first blocks.
    """
    largest = 0.0
    lanes = error.size
    whole = x.size - x.size % lanes
    for at in range(0, whole, lanes):
        a, b = x[at : at + lanes], y[at : at + lanes]
        over = 0
        for k in range(lanes):
            u = np.float64(a[k])
            d = np.float64(b[k]) - u
            error[k] += d * d
            norm[k] += u * u
            over += (abs(d) > largest * abs(u)) | ((abs(u) < _TINY) & (d != 0.0))
        if over:
            for k in range(lanes):
                largest = _larger(largest, np.float64(a[k]), np.float64(b[k]))
    for i in range(whole, x.size):
        u = np.float64(x[i])
        d = np.float64(y[i]) - u
        error[i - whole] += d * d
        norm[i - whole] += u * u
        largest = _larger(largest, u, np.float64(y[i]))
    total = squares = 0.0
    for k in range(lanes):
        total += error[k]
        squares += norm[k]
    return total, squares, largest


@njit_in_place
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


@njit_inline
def _larger(largest: float, a: float, b: float) -> float:
    if abs(a) < _TINY:
        # A product of subnormals would be rounded, and the comparison would be wrong.
        a, b = a * _LIFT, b * _LIFT
    d = abs(b - a)
    if d > largest * abs(a):
        return d / abs(a) if a != 0.0 else np.inf
    return largest


def distortion(x: Array, y: Array) -> Distortion:
    """See `kernels.distortion`."""
    first, second = to_numpy(x).reshape(-1), to_numpy(y).reshape(-1)
    total = Distortion(0.0, 0.0, 0.0)
    for start in range(0, first.size, _STEP):
        part = slice(start, start + _STEP)
        a, b = widened(first[part], dtype_name(x)), widened(second[part], dtype_name(y))
        parts = _finite(a, b, np.zeros(_LANES), np.zeros(_LANES))
        if not math.isfinite(parts[1]):
            parts = _careful(a, b)
        total += Distortion(*(float(p) for p in parts))
    return total


@njit_in_place
def _finite_many(x: Any, y: Any, ends: Any, error: Any, norm: Any, out: Any) -> None:
    """Write the three results of `_finite` for each joined array to a row of `out`."""
    start = 0
    for m in range(ends.size):
        error[:] = 0.0
        norm[:] = 0.0
        out[m, 0], out[m, 1], out[m, 2] = _finite(x[start : ends[m]], y[start : ends[m]], error, norm)
        start = ends[m]


def distortion_many(x: Array, y: Array, ends: np.ndarray[Any, np.dtype[np.int64]]) -> list[Distortion]:
    """See `kernels.distortion_many`."""
    a, b = widened(to_numpy(x), dtype_name(x)), widened(to_numpy(y), dtype_name(y))
    out = np.empty((ends.size, 3))
    _finite_many(a, b, ends, np.empty(_LANES), np.empty(_LANES), out)
    for m in np.flatnonzero(~np.isfinite(out[:, 1])):
        part = slice(int(ends[m - 1]) if m else 0, int(ends[m]))
        out[m] = _careful(a[part], b[part])
    return [Distortion(*row) for row in out.tolist()]
