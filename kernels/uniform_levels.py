"""Levels of codebooks with equidistant entries, for several arrays joined end to end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import array, check_ends, check_table, number
from .arrays import back_end
from .errors import BadArgumentError
from .quantizer import MAX_CODES

if TYPE_CHECKING:
    from .arrays import Array

Floats = np.ndarray[Any, np.dtype[np.float64]]
Integers = np.ndarray[Any, np.dtype[np.int64]]
SMALLEST_STEP, LARGEST_STEP = 2.0**-100, 2.0**100
"""Range of steps whose multiples, and the midpoints between them, float32 holds exactly."""


def uniform_levels_many(
    x: Array, ends: Integers, steps: Floats, firsts: Integers, sizes: Integers, limit: float
) -> tuple[Array, Floats]:
    """Return the level of each element's nearest entry, as `quantizer.assign`, and array errors.

    The entries of an array are `k * step` for k = first ... first + size - 1; entry number i has level 2 + i. An
    element half-way between two takes the lower. One with |x| >= limit, or that is not finite, has level 1.

    Args:
        x: float32 [n] on the host.
        ends: int64 [m] NumPy, ascending: where each array ends; the last is n.
        steps: float64 [m], each with at most 8 significant bits, within 2**-100 ... 2**100.
        firsts: int64 [m], first multiple, within -2**15 ... 2**15.
        sizes: int64 [m], entries, 1 ... 254.
        limit: of the protected elements, > 0, may be infinite.

    Returns:
        levels: uint8 [n].
        sums: float64 [m, 2]: squared error and squared norm over the elements that are not protected.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.

    Example:
        >>> x, one = np.array([0.2, 0.9, 9.0], np.float32), np.ones(1)
        >>> uniform_levels_many(x, np.array([3]), one, np.array([0]), np.array([2]), 5.0)[0].tolist()
        [2, 3, 1]
    """
    array("x", x, ("float32",), 1, host=True)
    _check(int(x.shape[0]), ends, steps, firsts)
    check_table("sizes", sizes, "int64", ends.shape)
    if sizes.size and not 1 <= int(sizes.min()) <= int(sizes.max()) <= MAX_CODES:
        raise BadArgumentError(f"sizes are not all within 1 ... {MAX_CODES}")
    limit = number("limit", limit, 0, math.inf, open_low=True)
    levels, sums = back_end(x, "uniform_levels").uniform_levels_many(x, ends, steps, firsts, sizes, limit)
    return levels, sums


def uniform_values_many(levels: Array, ends: Integers, steps: Floats, firsts: Integers) -> Array:
    """Return the float32 values of levels of `uniform_levels_many`; 0 for levels 0 and 1.

    Args:
        levels: uint8 [n] on the host.
        ends: as in `uniform_levels_many`.
        steps: as in `uniform_levels_many`.
        firsts: as in `uniform_levels_many`.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.

    Example:
        >>> levels = np.array([2, 3, 1], np.uint8)
        >>> uniform_values_many(levels, np.array([3]), np.full(1, 0.5), np.array([-1])).tolist()
        [-0.5, 0.0, 0.0]
    """
    array("levels", levels, ("uint8",), 1, host=True)
    _check(int(levels.shape[0]), ends, steps, firsts)
    return back_end(levels, "uniform_levels").uniform_values_many(levels, ends, steps, firsts)


def _check(n: int, ends: Integers, steps: Floats, firsts: Integers) -> None:
    check_ends("ends", ends, n)
    for name, table, dtype in (("steps", steps, "float64"), ("firsts", firsts, "int64")):
        check_table(name, table, dtype, ends.shape)
    if not ends.size:
        return
    if not SMALLEST_STEP <= float(steps.min()) <= float(steps.max()) <= LARGEST_STEP:
        raise BadArgumentError("a step is not within 2**-100 ... 2**100")
    if not -(1 << 15) <= int(firsts.min()) <= int(firsts.max()) <= 1 << 15:
        raise BadArgumentError("a first multiple is not within -2**15 ... 2**15")
