"""Low-rank prediction of small integers in matrices, by row and column factors.

    z[i, j] = rint(4 * sum over k < 8 of a[i, k] b[j, k] / 64);  nearest = (z + 2) >> 2;  quarter = (z + 2) & 3

Factors are multiples of 1/8 in one byte. All decisions are made on integers or on single float64 operations in one
order, so that the same numbers have the same factors on every machine, and a reader needs the factors alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, check_table, integer
from ..backend.arrays import Array
from ..backend.dispatch import OnHost
from ..errors import BadArgumentError


class HostBackEnd(Protocol):
    """Functions of the back ends on the host."""

    def low_rank_factors(self, numbers: Array, heights: Heights, columns: int, phase: int) -> tuple[Array, Array]: ...
    def low_rank_differences(
        self, numbers: Array, rows: Array, columns: Array, heights: Heights, phase: int
    ) -> tuple[Array, Array]: ...
    def zigzag(self, numbers: Array) -> Array: ...
    def unzigzag(self, symbols: Array) -> Array: ...
    def low_rank_predictions(
        self, rows: Array, columns: Array, heights: Heights, n: int, phase: int
    ) -> tuple[Array, Array]: ...


on_host = OnHost[HostBackEnd]("prediction")

if TYPE_CHECKING:
    from . import cpu, reference

    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

RANK = 8
"""Number of directions of a matrix; those that do not pay are 0."""
QUARTERS = 4
"""Values of `quarter`: the position of a prediction between two integers."""
CLIP = 8
"""Larger numbers are clipped to this for the search: a few of them must not determine the directions."""
TOP = 63
"""Largest entry of a direction during the search."""
SAMPLE, WHOLE, LEAST_ROWS = 1 << 18, 1 << 16, 64
"""Size of the sample in which directions are searched, of matrices that are searched whole, and the least rows."""
UNIT = 8
"""Factors are multiples of 1 / `UNIT`."""
_MOST = 2**52
Heights = np.ndarray[Any, np.dtype[np.int64]]


def sample_rows(rows: int, columns: int) -> int:
    """Return the number of rows in which the directions of a matrix are searched.

    Example:
        >>> sample_rows(512, 512), sample_rows(100, 64), sample_rows(8192, 8192)
        (128, 100, 64)
    """
    return min(rows, max(LEAST_ROWS, WHOLE // columns, min(rows // 4, SAMPLE // columns)))


def low_rank_factors(numbers: Array, heights: Heights, columns: int, phase: int = 0) -> tuple[Array, Array]:
    """Return factors that predict the numbers of each of several matrices.

    The strongest directions of a sample of whole rows are found by two rounds of subspace iteration. A direction is
    used if the bits that it saves exceed those of its factors, after the part that noise of the same power would
    seem to save is subtracted; other directions are 0.

    Args:
        numbers: int8 [n], the matrices in C order, one after another.
        heights: int64 [m], rows of each matrix, 1 or more; together `ceil((phase + n) / columns)`.
        columns: of all matrices, 1 or more.
        phase: column of the first number, if there is one matrix; default 0. Its first and last row may be incomplete.

    Returns:
        rows: int8 [sum of heights, 8].
        columns: int8 [m * columns, 8].

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> signs = np.where(np.arange(64) % 3, 1, -1)
        >>> numbers = (3 * np.outer(signs, signs)).astype(np.int8).reshape(-1)
        >>> rows, columns = low_rank_factors(numbers, np.array([64]), 64)
        >>> nearest, quarter = low_rank_predictions(rows, columns, np.array([64]), 64 * 64)
        >>> bool((nearest == numbers).all())
        True

    Source: Halko, Martinsson and Tropp 2011, algorithm 4.4 and section 4.5 (subspace iteration, Cholesky QR).
    """
    numbers = array("numbers", numbers, ("int8",), 1, host=True)
    columns = integer("columns", columns, 1, _MOST)
    phase = integer("phase", phase, 0, columns - 1)
    _check_heights(heights, int(numbers.shape[0]), columns, phase)
    return on_host().low_rank_factors(numbers, heights, columns, phase)


def low_rank_differences(
    numbers: Array, rows: Array, columns: Array, heights: Heights, phase: int = 0
) -> tuple[Array, Array]:
    """Return the `zigzag` differences of numbers to their predictions, and the quarters.

        differences = zigzag(numbers - nearest, modulo 256)

    Args:
        numbers: int8 [n].
        rows: int8 [sum of heights, 8], of `low_rank_factors`.
        columns: int8 [m * C, 8].
        heights: int64 [m].
        phase: as in `low_rank_factors`.

    Returns:
        differences: uint8 [n].
        quarter: uint8 [n], 0 ... 3.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> one = np.zeros((2, 8), np.int8)
        >>> one[:, 0] = 8, 12  # predictions 1, 1.5, 1.5, 2.25
        >>> [x.tolist() for x in low_rank_differences(np.array([1, 2, 3, 0], np.int8), one, one, np.array([2]))]
        [[0, 0, 2, 3], [2, 0, 0, 3]]
    """
    numbers = array("numbers", numbers, ("int8",), 1, host=True)
    phase = _check_factors(rows, columns, heights, int(numbers.shape[0]), phase)
    return on_host().low_rank_differences(numbers, rows, columns, heights, phase)


def zigzag(numbers: Array) -> Array:
    """Map the numbers 0, -1, 1, -2, ... to 0, 1, 2, 3, ...: small magnitudes to small symbols.

    Args:
        numbers: int8 [n].

    Returns:
        uint8 [n].

    Raises:
        BadArgumentError: wrong dtype or shape, or an array on a GPU.

    Example:
        >>> zigzag(np.array([0, -1, 1, -2, 127, -128], np.int8)).tolist()
        [0, 1, 2, 3, 254, 255]
    """
    numbers = array("numbers", numbers, ("int8",), 1, host=True)
    return on_host().zigzag(numbers)


def unzigzag(symbols: Array) -> Array:
    """Return the numbers that `zigzag` mapped, int8 [n].

    Args:
        symbols: uint8 [n].

    Raises:
        BadArgumentError: wrong dtype or shape, or an array on a GPU.

    Example:
        >>> unzigzag(np.array([0, 1, 2, 3, 254, 255], np.uint8)).tolist()
        [0, -1, 1, -2, 127, -128]
    """
    symbols = array("symbols", symbols, ("uint8",), 1, host=True)
    return on_host().unzigzag(symbols)


def low_rank_predictions(rows: Array, columns: Array, heights: Heights, n: int, phase: int = 0) -> tuple[Array, Array]:
    """Return the nearest integer to the prediction of each position, and its quarter.

    Args:
        rows: int8 [sum of heights, 8], of `low_rank_factors`.
        columns: int8 [m * C, 8].
        heights: int64 [m].
        n: number of positions, >= 0.
        phase: as in `low_rank_factors`.

    Returns:
        nearest: int8 [n], modulo 256.
        quarter: uint8 [n], 0 ... 3.

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> one = np.zeros((2, 8), np.int8)
        >>> one[:, 0] = 8, 12
        >>> [x.tolist() for x in low_rank_predictions(one, one, np.array([2]), 4)]  # of 1, 1.5, 1.5, 2.25
        [[1, 2, 2, 2], [2, 0, 0, 3]]
    """
    n = integer("n", n, 0, _MOST)
    phase = _check_factors(rows, columns, heights, n, phase)
    return on_host().low_rank_predictions(rows, columns, heights, n, phase)


def _check_factors(rows: Array, columns: Array, heights: Heights, n: int, phase: int) -> int:
    """Refuse factors that do not fit n numbers; return the phase."""
    for name, factor in (("rows", rows), ("columns", columns)):
        array(name, factor, ("int8",), 2, host=True)
        if factor.shape[1] != RANK:
            raise BadArgumentError(f"{name} has shape {tuple(factor.shape)}; (lines, {RANK}) is needed")
    count = heights.size if isinstance(heights, np.ndarray) else 0
    if not count or not columns.shape[0] or columns.shape[0] % count:
        raise BadArgumentError(f"columns has {columns.shape[0]} lines, which {count} matrices cannot share")
    width = columns.shape[0] // count
    phase = integer("phase", phase, 0, width - 1)
    _check_heights(heights, n, width, phase)
    if int(heights.sum()) != rows.shape[0]:
        raise BadArgumentError(f"rows has {rows.shape[0]} lines; heights has {int(heights.sum())}")
    return phase


def _check_heights(heights: Heights, n: int, columns: int, phase: int) -> None:
    check_table("heights", heights, "int64", 1)
    lines = -(-(phase + n) // columns)
    fits = heights.size >= 1 and (heights >= 1).all() and int(heights.sum()) == lines
    if not fits or (heights.size > 1 and (phase or n % columns)):
        raise BadArgumentError(f"heights of {heights.size} matrices do not fit {n} numbers in {columns} columns")
