"""Exact integer products of a matrix with low-rank factors, for low-rank prediction.

A matrix of R x C integers is estimated by p[i, j] = sum over k < r of a[i, k] b[j, k] with one-byte a and b. All
numbers are integers, so the writer and the reader of a stream compute the same estimates on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..backend.arguments import array, integer
from ..backend.dispatch import back_end
from ..errors import BadArgumentError

if TYPE_CHECKING:
    from ..backend.arrays import Array

MOST_RANK = 16
"""Largest rank."""
TOP = 63
"""Largest entry of a direction."""
_MOST = 2**52


def _factor(name: str, factor: Array, lines: int | None = None) -> tuple[int, int]:
    """Check a factor, an int8 matrix on the host, and return its number of lines and its rank.

    Without `lines` any positive number of lines is allowed.
    """
    array(name, factor, ("int8",), 2, host=True)
    if not 1 <= factor.shape[1] <= MOST_RANK:
        raise BadArgumentError(f"{name} has shape {tuple(factor.shape)}; (lines, 1 ... {MOST_RANK}) is needed")
    least, most = (1, _MOST) if lines is None else (lines, lines)
    return integer(f"the number of lines of {name}", factor.shape[0], least, most), int(factor.shape[1])


def row_products(values: Array, factor: Array, phase: int = 0) -> Array:
    """Sum over each row of a matrix of the values times the factors of their columns.

        out[i, k] = sum of values[t] * factor[j, k] over t of row i

    Value t stands in row i = (phase + t) // C and column j = (phase + t) % C.

    Args:
        values: int8[n], a part of the matrix in C order.
        factor: int8[C, r], r 1 ... `MOST_RANK`.
        phase: column in which the first value stands, 0 ... C - 1; default 0.

    Returns:
        int64[ceil((phase + n) / C), r].

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> values, factor = np.asarray([1, 2, 3, 4], np.int8), np.asarray([[1], [-1]], np.int8)
        >>> row_products(values, factor).tolist()
        [[-1], [-1]]
    """
    values = array("values", values, ("int8",), 1, host=True)
    columns, _ = _factor("factor", factor)
    phase = integer("phase", phase, 0, columns - 1)
    out: Array = back_end(values, "prediction").row_products(values, factor, phase)
    return out


def column_products(values: Array, factor: Array, columns: int, phase: int = 0) -> Array:
    """Sum over each column of a matrix of the values times the factors of their rows.

        out[j, k] = sum of values[t] * factor[i, k] over t of column j

    Rows and columns as in `row_products`.

    Args:
        values: int8[n], a part of the matrix in C order.
        factor: int8[ceil((phase + n) / C), r], r 1 ... `MOST_RANK`.
        columns: C, 1 or more.
        phase: as in `row_products`.

    Returns:
        int64[C, r].

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> values, factor = np.asarray([1, 2, 3, 4], np.int8), np.asarray([[1], [-1]], np.int8)
        >>> column_products(values, factor, 2).tolist()
        [[-2], [-2]]
    """
    values = array("values", values, ("int8",), 1, host=True)
    columns = integer("columns", columns, 1, _MOST)
    phase = integer("phase", phase, 0, columns - 1)
    _factor("factor", factor, -(-(phase + int(values.shape[0])) // columns))
    out: Array = back_end(values, "prediction").column_products(values, factor, columns, phase)
    return out


def orthogonal_directions(vectors: Array) -> Array:
    """Return orthogonal directions of the span of each of several sets of vectors, as int8.

    Vectors are shifted to 15 bits; then each is orthogonal to the ones before it, by Cholesky's factorization of their
    products, and scaled to a largest entry of 63. A vector in the span of those before becomes 0. Products and their
    sums are exact; the rest is float64 in one order of operations, which all back ends share.

    Args:
        vectors: int64 [m, n, r] on the host, n vectors of r ... in columns, r 1 ... `MOST_RANK`.

    Returns:
        int8 [m, n, r].

    Raises:
        BadArgumentError: another dtype or shape, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> orthogonal_directions(np.array([[[2, 1], [0, 1]]])).tolist()
        [[[63, 0], [0, 63]]]

    Source: Halko, Martinsson and Tropp 2011, section 4.5 (subspace iteration); Cholesky QR.
    """
    vectors = array("vectors", vectors, ("int64",), 3, host=True)
    if not 1 <= vectors.shape[2] <= MOST_RANK:
        raise BadArgumentError(f"vectors has shape {tuple(vectors.shape)}; (..., 1 ... {MOST_RANK}) is needed")
    out: Array = back_end(vectors, "prediction").orthogonal_directions(vectors)
    return out


def product_classes(rows: Array, columns: Array, n: int, phase: int = 0, *, shift: int, most: int) -> Array:
    """Return the low-rank estimate at each position, rounded to one of `2 most + 1` classes.

    The estimate is rounded to a multiple of `2**shift`.

        p      = sum over k of rows[i, k] * columns[j, k]
        out[t] = most + min(max((p + 2**(shift - 1)) >> shift, -most), most);  t stands in row i, column j

    Args:
        rows: int8[ceil((phase + n) / C), r], r 1 ... `MOST_RANK`.
        columns: int8[C, r].
        n: number of positions, >= 0.
        phase: as in `row_products`.
        shift: 1 ... 20.
        most: 1 ... 127.

    Returns:
        uint8[n].

    Raises:
        BadArgumentError: wrong dtype, shape or range, or an array on a GPU.

    Example:
        >>> import numpy as np
        >>> rows, columns = np.asarray([[2], [-1]], np.int8), np.asarray([[3], [0], [9]], np.int8)
        >>> product_classes(rows, columns, 6, shift=1, most=6).tolist()  # of 6 0 18 / -3 0 -9 by halves
        [9, 6, 12, 5, 6, 2]
    """
    n = integer("n", n, 0, _MOST)
    width, rank = _factor("columns", columns)
    phase = integer("phase", phase, 0, width - 1)
    _, other = _factor("rows", rows, -(-(phase + n) // width))
    integer("the rank of rows", other, rank, rank)
    shift, most = integer("shift", shift, 1, 20), integer("most", most, 1, 127)
    out: Array = back_end(rows, "prediction").product_classes(rows, columns, n, phase, shift, most)
    return out
