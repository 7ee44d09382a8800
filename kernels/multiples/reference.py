"""Multiples of a step by array-API functions."""

from __future__ import annotations

from typing import Any

from array_api_compat import array_namespace

from ..backend.arrays import Array
from . import LANES, PART


def square_sum(x: Array) -> tuple[float, float]:
    """See `shrinkpoint.kernels.multiples.square_sum`."""
    xp = array_namespace(x)
    wide = xp.astype(x, xp.float64)
    return (_sum([v * v for v in map(float, wide)]), float(xp.max(xp.abs(wide)))) if x.shape[0] else (0.0, 0.0)


def _sum(squares: list[float]) -> float:
    """Add up numbers in the order of the contract."""
    n = len(squares)
    if n > PART:
        first = n // 2 - n // 2 % LANES
        return _sum(squares[:first]) + _sum(squares[first:])
    sums: list[Any] = [0.0] * LANES
    for i in range(n - n % LANES):
        sums[i % LANES] += squares[i]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    for square in squares[n - n % LANES :]:
        sums[0] += square
    return float(sums[0])


def step_multiples(x: Array, step: float, dtype: str) -> Array:
    """See `shrinkpoint.kernels.multiples.step_multiples`."""
    xp = array_namespace(x)
    wide = xp.astype(x, xp.float64)
    return xp.astype(xp.round(wide / xp.full_like(wide, step)), getattr(xp, dtype))


def step_values(multiples: Array, step: float, dtype: str) -> Array:
    """See `shrinkpoint.kernels.multiples.step_values`."""
    xp = array_namespace(multiples)
    return xp.astype(xp.astype(multiples, xp.float64) * step, getattr(xp, dtype))
