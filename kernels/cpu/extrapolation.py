"""Extrapolation on the CPU: one vectorized pass; 16-bit formats are widened in blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import dtype_name, like, to_numpy
from .jit import njit_in_place
from .widen import NARROW, widened

if TYPE_CHECKING:
    from ..arrays import Array

_BLOCK = 1 << 16
"""Elements per block: their float32 values stay in the second-level cache, and the cost of a call is small."""


@njit_in_place
def _extrapolate(x: Any, earlier: Any, factor: Any, out: Any) -> None:
    kind = out.dtype.type
    endless, nan = kind(np.inf), kind(np.nan)
    for i in range(x.size):
        v = x[i]
        far = v + (v - kind(earlier[i])) * factor
        stays = v if v == v else nan
        out[i] = far if abs(far) < endless else stays


def extrapolate(x: Array, earlier: Array, factor: float) -> Array:
    """See `kernels.extrapolate`."""
    names = dtype_name(x), dtype_name(earlier)
    own, before = to_numpy(x).reshape(-1), to_numpy(earlier).reshape(-1)
    out = np.empty(own.size, np.float64 if names[0] == "float64" else np.float32)
    step = max(own.size, 1) if NARROW.isdisjoint(names) else _BLOCK
    targets = [(name, np.empty(min(step, own.size), np.float32) if name in NARROW else None) for name in names]
    with np.errstate(all="ignore"):  # uncompiled code would warn
        for start in range(0, own.size, step):
            part = slice(start, start + step)
            a, b = (widened(v[part], *to) for v, to in zip((own, before), targets, strict=True))
            _extrapolate(a, b, out.dtype.type(factor), out[part])
    return like(out.reshape(x.shape), x)
