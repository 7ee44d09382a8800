"""Protected values as bfloat16, and those that bfloat16 cannot hold in their own dtype, to the bit.

A value is held when its rounding to bfloat16 (to nearest, ties to even; float64 by way of float32), taken back to its
own dtype, is finite and is zero only if the value is.
"""

from __future__ import annotations

import numpy as np

from ..kernels.arrays import is_torch
from .leaves import Array, LeafSpec, NpArray, as_bytes


def nearest(values: NpArray) -> NpArray:
    """bfloat16 patterns of float32 values that are not NaN: to nearest, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def wide(data: NpArray, spec: LeafSpec) -> NpArray:
    """Bytes of 16, 32 or 64-bit floats as float32 or float64."""
    if spec.dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if spec.dtype == "float16":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return data.view(np.float16).astype(np.float32)
    return data.view(spec.dtype)


def _narrow(patterns: NpArray, spec: LeafSpec) -> NpArray:
    """bfloat16 patterns as bytes of the array's dtype."""
    if spec.dtype == "bfloat16":
        return patterns.view(np.uint8)
    values = (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return values.astype(spec.dtype).view(np.uint8)


def _round(data: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray]:
    """bfloat16 patterns of values (0 where not held), and which are held."""
    values = wide(data, spec)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        rounded = nearest(values.astype(np.float32))
    patterns = np.where(np.isfinite(values), rounded, 0).astype(np.uint16)
    back = wide(_narrow(patterns, spec), spec)
    held = np.isfinite(values) & np.isfinite(back) & ((back != 0) | (values == 0))
    return np.where(held, patterns, np.uint16(0)).astype(np.uint16), held


def held(values: Array, spec: LeafSpec) -> NpArray:
    """Bytes of protected values as they will be restored: rounded to bfloat16 where held, else unchanged."""
    data = as_bytes(values) if is_torch(values) else np.ascontiguousarray(values).view(np.uint8)
    patterns, fits = _round(data, spec)
    back = _narrow(patterns, spec).reshape(-1, spec.itemsize)
    own = data.reshape(-1, spec.itemsize)
    return np.where(fits[:, None], back, own).reshape(-1)


def patterns(restored: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray]:
    """bfloat16 patterns of values that `held` returned, and the positions of those it left in their own dtype."""
    found, fits = _round(restored, spec)
    return found, np.flatnonzero(~fits)


def widened(stored: NpArray, spec: LeafSpec) -> NpArray:
    """bfloat16 patterns as bytes of the array's dtype, writable."""
    return _narrow(stored, spec).copy()
