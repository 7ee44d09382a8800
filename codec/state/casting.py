"""Conversion of floats between dtypes: bytes, values for computation, bfloat16 patterns.

Also scaling by powers of two, so that squares neither overflow nor vanish.
"""

from __future__ import annotations

import math

import numpy as np

from ...kernels.backend.arrays import on_gpu
from ...kernels.error_sums import Distortion, distortion
from .leaves import Array, LeafSpec, NpArray, as_bytes

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Dtypes whose values are computed with."""


def as_float32(flat: Array, spec: LeafSpec) -> Array:
    """Return values as float32, on their GPU or as NumPy."""
    return flat.float() if on_gpu(flat) else float_values(as_bytes(flat), spec)


def float_values(data: NpArray, spec: LeafSpec) -> NpArray:
    """Convert bytes of 16, 32 or 64-bit floats to float32 or float64, exactly."""
    if spec.dtype == "bfloat16":
        return _from_patterns(data.view(np.uint16))
    if spec.dtype == "float16":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return data.view(np.float16).astype(np.float32)
    return data.view(spec.dtype)


def rounded(values: NpArray, spec: LeafSpec) -> NpArray:
    """Round float32 or float64 values to the array's dtype, as bytes; bfloat16 without NaN."""
    with np.errstate(all="ignore"):  # too large for the dtype is infinity, too small is zero: that is rounding
        if spec.dtype == "bfloat16":
            return bfloat16_patterns(values.astype(np.float32, copy=False)).view(np.uint8)
        return values.astype(spec.dtype, copy=False).view(np.uint8)


def bfloat16_patterns(values: NpArray) -> NpArray:
    """Return the nearest bfloat16 patterns, uint16, of float32 values that are not NaN."""
    bits = values.view(np.uint32)
    nearest = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return nearest.astype(np.uint16)


def to_bfloat16(values: NpArray) -> NpArray:
    """Round values to bfloat16 and return them as float32."""
    return _from_patterns(bfloat16_patterns(values.astype(np.float32)))


def from_bfloat16(patterns: NpArray, spec: LeafSpec) -> NpArray:
    """Convert bfloat16 patterns to the array's dtype; return new bytes."""
    if spec.dtype == "bfloat16":
        return patterns.copy().view(np.uint8)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return _from_patterns(patterns).astype(spec.dtype).view(np.uint8)


def _from_patterns(patterns: NpArray) -> NpArray:
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)


def largest(flat: Array) -> float:
    """Return the largest finite magnitude of a float64 array; 0 without one."""
    if on_gpu(flat):
        return float(flat.abs().nan_to_num(0.0, 0.0, 0.0).max()) if flat.shape[0] else 0.0
    x = as_bytes(flat).view(np.float64)
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


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
