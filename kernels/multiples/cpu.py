"""Multiples of a step on the CPU: NumPy, whose order of a sum the contract states."""

from __future__ import annotations

import numpy as np

from ..backend.arrays import Array, like, to_numpy


def square_sum(x: Array) -> tuple[float, float]:
    """See `shrinkpoint.kernels.multiples.square_sum`."""
    a = to_numpy(x)
    with np.errstate(all="ignore"):
        squares = float(np.square(a, dtype=np.float64).sum())
    return (squares, max(float(a.max()), -float(a.min()))) if a.size else (0.0, 0.0)


def step_multiples(x: Array, step: float, dtype: str) -> Array:
    """See `shrinkpoint.kernels.multiples.step_multiples`."""
    quotients = np.divide(to_numpy(x), step, dtype=np.float64)
    return like(np.rint(quotients, out=quotients).astype(dtype), x)


def step_values(multiples: Array, step: float, dtype: str) -> Array:
    """See `shrinkpoint.kernels.multiples.step_values`."""
    with np.errstate(all="ignore"):
        return like(np.multiply(to_numpy(multiples), step, dtype=np.float64).astype(dtype, copy=False), multiples)
