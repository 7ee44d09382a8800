"""Positive values as a rank-one estimate times a coarse power of two, for second moments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import array, check_table, integer, same_device, shown
from .arrays import back_end
from .errors import BadArgumentError

if TYPE_CHECKING:
    from .arrays import Array

ZERO, ESCAPE, FIRST = 0, 1, 2
"""Symbols of an element that is 0, of one that has no residual, and of the lowest residual."""
FARTHEST = 126
"""Largest residual, in cells, that has a symbol: FIRST + FARTHEST is no residual at all."""
Floats = np.ndarray[Any, np.dtype[np.float64]]
Factors = np.ndarray[Any, np.dtype[np.float32]]


def factor_sums(x: Array, columns: int) -> tuple[Floats, Floats]:
    """Sums of a matrix's rows and of its columns over what is finite, from one pass: a rank-one estimate's factors.

    Args:
        x: float32 [R * columns], a matrix in C order.
        columns: how many elements a row has, >= 1.

    Returns:
        float64 [R] and float64 [columns] on the host. Each addition is rounded once; in which order they are made is a
        back end's own, so the last bits may differ between them.

    Raises:
        BadArgumentError: another dtype, or no whole number of rows.

    Example:
        >>> factor_sums(np.array([1, 2, 3, 10, 20, np.inf], np.float32), 3)[1].tolist()
        [11.0, 22.0, 3.0]

    Source: Shazeer and Stern 2018 (Adafactor), section 3.
    """
    array("x", x, ("float32",), 1)
    columns = integer("columns", columns, 1, 2**56)
    if int(x.shape[0]) % columns:
        raise BadArgumentError(f"{int(x.shape[0])} elements are no whole number of rows of {columns}")
    rows, below = back_end(x, "residual").factor_sums(x, columns)
    return rows, below


def residual_symbols(
    x: Array, rows: Factors, columns: Factors, start: int, octaves: int, previous: Array | None = None
) -> tuple[Array, Floats, Floats]:
    """How many cells of `octaves` octaves each element is off its estimate `rows[i] * columns[j]`.

        key(y) = bit pattern of y as an integer;  cell = octaves * 2**23
        k = floor((key(x) - key(estimate) + cell / 2) / cell);  symbol = 2 + 126 + k

    Between powers of two the pattern of a float32 is linear in the value, so key / 2**23 is the logarithm to base 2 to
    within 0.09. 0 has symbol 0. An element that is negative, not finite or subnormal, whose estimate is not a normal
    number, or with |k| > 126, escapes (symbol 1). Where `previous` has a residual too, an element that is at most a
    quarter of a cell beyond that one's cell keeps it: little is lost, and a symbol that stays costs nothing.

    Args:
        x: float32 [n], elements `start` ... of a matrix with these rows and columns, in C order.
        rows: float32 [R] on the host, >= 0.
        columns: float32 [C] on the host, >= 0.
        start: number of the first element, >= 0.
        octaves: width of a cell, 1 to 64.
        previous: uint8 [n], the symbols of the same elements at an earlier time; None (default): there are none.

    Returns:
        symbols: uint8 [n].
        distances: float64 [256] on the host, sum of `key(x) - key(estimate)` by symbol, an integer; 0 for symbols 0, 1.
        counts: float64 [256] on the host, how often each symbol occurs.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.

    Example:
        >>> x = np.array([1, 1, 64, 0], np.float32)
        >>> residual_symbols(x, np.ones(2, np.float32), np.ones(2, np.float32), 0, 3)[0].tolist()
        [128, 128, 130, 0]

    Source: the rank-one estimate is Adafactor's (Shazeer and Stern 2018, section 3).
    """
    array("x", x, ("float32",), 1)
    start = _checked_start(rows, columns, start, int(x.shape[0]))
    octaves = integer("octaves", octaves, 1, 64)
    if previous is not None:
        array("previous", previous, ("uint8",), x.shape)
        same_device("previous", previous, "x", x)
    symbols, distances, counts = back_end(x, "residual").residual_symbols(x, rows, columns, start, octaves, previous)
    return symbols, distances, counts


def residual_factors(distances: Floats, counts: Floats) -> Factors:
    """What the estimate of a symbol's elements is multiplied by: the factor at their mean distance, in keys.

    That is their geometric mean, as near as keys are logarithms: what divides by the root of the values, as Adam does,
    keeps its mean in the logarithm. The arithmetic mean, that of the largest ones, would make most steps too small.

    Args:
        distances: float64 [256], sums of `residual_symbols`, over all chunks.
        counts: float64 [256].

    Returns:
        float32 [256], 0 for symbols 0, 1 and those that do not occur.

    Raises:
        BadArgumentError: dtypes or shapes do not fit.

    Example:
        >>> d, n = np.zeros(256), np.zeros(256)
        >>> d[129], n[129] = 6 * 2.0**23, 2
        >>> float(residual_factors(d, n)[129])
        8.0
    """
    check_table("distances", distances, "float64", (256,))
    check_table("counts", counts, "float64", (256,))
    used = (counts > 0) & (np.arange(256) >= FIRST)
    mean = np.rint(distances / np.where(used, counts, 1.0))
    patterns = np.clip(mean + (127 << 23), 1 << 23, (255 << 23) - 1).astype(np.int32)
    return np.where(used, patterns.view(np.float32), np.float32(0))


def residual_values(symbols: Array, rows: Factors, columns: Factors, start: int, table: Factors) -> Array:
    """The elements again: `(rows[i] * columns[j]) * table[symbol]` in float32, each operation rounded once.

    Args:
        symbols: uint8 [n].
        rows: as in `residual_symbols`.
        columns: as in `residual_symbols`.
        start: as in `residual_symbols`.
        table: float32 [256] on the host: factor of each symbol; 0 for zero and the escape.

    Raises:
        BadArgumentError: dtypes, shapes or ranges do not fit.
    """
    array("symbols", symbols, ("uint8",), 1)
    start = _checked_start(rows, columns, start, int(symbols.shape[0]))
    check_table("table", table, "float32", (256,))
    return back_end(symbols, "residual").residual_values(symbols, rows, columns, start, table)


def _checked_start(rows: Factors, columns: Factors, start: int, n: int) -> int:
    for name, factors in (("rows", rows), ("columns", columns)):
        if not isinstance(factors, np.ndarray) or factors.dtype != np.float32 or factors.ndim != 1:
            raise BadArgumentError(f"{name} is {shown(factors)}; a float32 NumPy array of one dimension is needed")
    start = integer("start", start, 0, rows.size * columns.size)
    if start + n > rows.size * columns.size:
        raise BadArgumentError(f"elements {start} to {start + n} are not within {rows.size} x {columns.size}")
    return start
