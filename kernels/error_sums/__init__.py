"""The error of an approximation of an array, measured in one pass."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, check_ends, same_device
from ..backend.arrays import Array
from ..backend.dispatch import Dispatch, OnHost
from ..backend.floats import FORMATS


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def distortion(self, x: Array, y: Array) -> Distortion: ...


class HostBackEnd(Protocol):
    """Functions that only the back ends on the host have."""

    def distortion_many(self, x: Array, y: Array, ends: np.ndarray[Any, np.dtype[np.int64]]) -> list[Distortion]: ...


back_end = Dispatch[BackEnd]("error_sums")
on_host = OnHost[HostBackEnd]("error_sums")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)


@dataclass(frozen=True, slots=True)
class Distortion:
    """Sums over the finite elements of x, in float64.

    Args:
        squared_error: sum of (y - x)**2.
        squared_norm: sum of x**2.
        largest_relative: largest |y - x| / |x| over nonzero x; infinite if y is not zero where x is; NaN if y holds a
            NaN, like the squared error.
    """

    squared_error: float
    squared_norm: float
    largest_relative: float

    def __post_init__(self) -> None:
        # The maximum of numbers and NaN depends on the order of comparisons.
        if math.isnan(self.squared_error):
            object.__setattr__(self, "largest_relative", math.nan)

    @property
    def relative_l2(self) -> float:
        """Relative L2 error ||y - x|| / ||x||; 0 only for equal arrays.

        It is infinite if x is zero and y is not; a result that underflows is the smallest normal float.
        """
        if self.squared_error == 0.0 and (self.squared_norm or self.largest_relative < math.inf):
            return sys.float_info.min if self.largest_relative else 0.0
        return math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else math.inf

    def __add__(self, other: Distortion) -> Distortion:
        """Return the distortion of two parts of an array together."""
        return Distortion(
            self.squared_error + other.squared_error,
            self.squared_norm + other.squared_norm,
            max(self.largest_relative, other.largest_relative),
        )


def distortion(x: Array, y: Array) -> Distortion:
    """Squared error, squared norm and largest relative error of y as an approximation of x.

    Elements of x that are not finite do not count: they are never approximated.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        y: the same shape, any of these dtypes, on the same device.

    Raises:
        BadArgumentError: another dtype, or the shapes or devices differ.

    Example:
        >>> import numpy as np
        >>> distortion(np.array([3.0, 4.0]), np.array([3.0, 4.5])).relative_l2
        0.1
    """
    array("x", x, FORMATS)
    same_device("x", x, "y", array("y", y, FORMATS, x.shape))
    return back_end(x).distortion(x, y)


def distortion_many(x: Array, y: Array, ends: np.ndarray[Any, np.dtype[np.int64]]) -> list[Distortion]:
    """Return the `distortion` of each of several arrays joined end to end.

    Args:
        x: [n] on the host, of a dtype as in `distortion`.
        y: [n] on the host.
        ends: int64 [m] NumPy, ascending: where each array ends; the last is n.

    Raises:
        BadArgumentError: no such dtype, or sizes that do not fit.

    Example:
        >>> x = np.array([3.0, 4.0, 1.0])
        >>> [d.squared_error for d in distortion_many(x, x + 1, np.array([2, 3]))]
        [2.0, 1.0]
    """
    array("x", x, FORMATS, 1, host=True)
    array("y", y, FORMATS, x.shape, host=True)
    check_ends("ends", ends, int(x.shape[0]))
    return on_host().distortion_many(x, y, ends)
