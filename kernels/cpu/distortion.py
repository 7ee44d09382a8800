"""Distortion on the CPU: one pass, four partial sums so that additions need not wait for each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import dtype_name, to_numpy
from ..distortion import Distortion
from .jit import njit

if TYPE_CHECKING:
    from ..arrays import Array

_STEP = 1 << 20


@njit
def _distortion(x: Any, y: Any) -> Any:
    error0 = error1 = error2 = error3 = 0.0
    norm0 = norm1 = norm2 = norm3 = 0.0
    largest = 0.0
    n = x.size
    for i in range(0, n, 4):
        for k in range(min(4, n - i)):
            a = np.float64(x[i + k])
            if not np.isfinite(a):
                continue
            d = np.float64(y[i + k]) - a
            e = d * d
            s = a * a
            if k == 0:
                error0 += e
                norm0 += s
            elif k == 1:
                error1 += e
                norm1 += s
            elif k == 2:
                error2 += e
                norm2 += s
            else:
                error3 += e
                norm3 += s
            # Compared without a division: |d| > largest |a|.
            if abs(d) > largest * abs(a):
                largest = abs(d) / abs(a) if a != 0.0 else np.inf
    return (error0 + error1) + (error2 + error3), (norm0 + norm1) + (norm2 + norm3), largest


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
        parts = _distortion(_floats(x[start : start + _STEP]), _floats(y[start : start + _STEP]))
        total += Distortion(*(float(p) for p in parts))
    return total
