"""Whole multiples of one step: the finest grids of weights.

All arithmetic is in float64, each operation rounded once, in the order written.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, choice, number
from ..backend.arrays import Array
from ..backend.dispatch import Dispatch


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def square_sum(self, x: Array) -> tuple[float, float]: ...
    def step_multiples(self, x: Array, step: float, dtype: str) -> Array: ...
    def step_values(self, multiples: Array, step: float, dtype: str) -> Array: ...


back_end = Dispatch[BackEnd]("multiples")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)

FLOATS = ("float32", "float64")
INTEGERS = ("int16", "int32")
LANES, PART = 8, 128
"""Partial sums of a part, and most elements that it has."""
Integers = np.ndarray[Any, np.dtype[np.int64]]


def square_sum(x: Array) -> tuple[float, float]:
    """Sum of the squares in float64, in NumPy's order, and the largest magnitude.

    The order is that of `numpy.sum`: an array of more than 128 elements is halved, the first half a multiple of 8; a
    part has eight partial sums s_k of every eighth square, which are added up as ((s_0 + s_1) + (s_2 + s_3)) +
    ((s_4 + s_5) + (s_6 + s_7)); then come the last squares, fewer than eight, one by one.

    Args:
        x: float32 or float64 [n].

    Returns:
        The sum and the magnitude, 0 and 0 of an empty array; a sum that is not finite if an element is not, and then
        any magnitude.

    Raises:
        BadArgumentError: another dtype, or more than one axis.

    Example:
        >>> square_sum(np.array([3.0, -4.0]))
        (25.0, 4.0)
    """
    array("x", x, FLOATS, 1)
    return back_end(x).square_sum(x)


def step_multiples(x: Array, step: float, dtype: str = "int16") -> Array:
    """Whole number of steps nearest to each element: `rint(x / step)`, halves to even.

    Args:
        x: float32 or float64 [n], finite; quotients must fit the dtype.
        step: > 0.
        dtype: "int16" or "int32".

    Returns:
        array of dtype, [n].

    Raises:
        BadArgumentError: another dtype or shape, or a step out of range.

    Example:
        >>> step_multiples(np.array([0.1, -0.3, 0.25]), 0.1).tolist()
        [1, -3, 2]
    """
    array("x", x, FLOATS, 1)
    return back_end(x).step_multiples(x, _step(step), choice("dtype", dtype, INTEGERS))


def step_values(multiples: Array, step: float, dtype: str = "float32") -> Array:
    """Values of multiples: `multiple * step`, rounded to float64 and then to dtype.

    Args:
        multiples: int16 or int32 [n].
        step: > 0.
        dtype: "float32" or "float64".

    Returns:
        array of dtype, [n].

    Raises:
        BadArgumentError: another dtype or shape, or a step out of range.

    Example:
        >>> step_values(np.array([1, -3], np.int16), 0.5).tolist()
        [0.5, -1.5]
    """
    array("multiples", multiples, INTEGERS, 1)
    return back_end(multiples).step_values(multiples, _step(step), choice("dtype", dtype, FLOATS))


def _step(step: float) -> float:
    return number("step", step, 0, math.inf, open_low=True, open_high=True)


@lru_cache(maxsize=4)
def halvings(n: int) -> tuple[tuple[Integers, ...], Integers]:
    """Return the order of a sum of n elements, n at least 1.

    Returns:
        Of each level, from the whole down, 1 for each part that is halved and 0 for others; the sizes of the last
        parts.
    """
    levels, sizes = [], np.array([n], np.int64)
    while sizes.max() > PART:
        is_long = sizes > PART
        first = np.where(is_long, sizes // 2 - sizes // 2 % LANES, sizes)
        levels.append(is_long.astype(np.int64))
        both = np.stack([first, sizes - first], axis=1).reshape(-1)
        sizes = both[both > 0]
    return tuple(levels), sizes
