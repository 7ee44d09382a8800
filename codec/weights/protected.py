"""Protected values: as bfloat16, or exactly in their own dtype if bfloat16 cannot hold them.

A value is held when its rounding to bfloat16 (to nearest, ties to even; float64 by way of float32), taken back to its
own dtype, is finite and is zero only if the value is.
"""

from __future__ import annotations

import numpy as np

from ...kernels.arrays import is_torch
from ..state.casting import bfloat16_patterns, float_values, from_bfloat16
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes


def _round(data: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray]:
    """bfloat16 patterns of values (0 where not held), and which are held."""
    values = float_values(data, spec)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = bfloat16_patterns(values.astype(np.float32))
    found = np.where(np.isfinite(values), nearest, 0).astype(np.uint16)
    back = float_values(from_bfloat16(found, spec), spec)
    fits = np.isfinite(values) & np.isfinite(back) & ((back != 0) | (values == 0))
    return np.where(fits, found, np.uint16(0)).astype(np.uint16), fits


def held_values(values: Array, spec: LeafSpec) -> NpArray:
    """Return protected values as restored, as bytes: rounded to bfloat16 if it holds them."""
    data = as_bytes(values) if is_torch(values) else np.ascontiguousarray(values).view(np.uint8)
    found, fits = _round(data, spec)
    back = from_bfloat16(found, spec).reshape(-1, spec.itemsize)
    own = data.reshape(-1, spec.itemsize)
    return np.where(fits[:, None], back, own).reshape(-1)


def held_patterns(restored: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray]:
    """Return bfloat16 patterns of the result of `held_values`, and positions of exact values."""
    found, fits = _round(restored, spec)
    return found, np.flatnonzero(~fits)
