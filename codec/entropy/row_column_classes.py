"""Classes of matrix positions by how the symbols of their row and column deviate.

Some rows and columns of a matrix change more than others: an inactive unit has small first moments, and the row of a
frequent token has more changed levels than that of a rare one. The expected size at a position is nearly the product
of a row factor and a column factor (a sum of logarithms). So one byte a row and one a column give encoder and decoder
the distribution of the symbol at each position in advance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.scales import class_sums, row_column_sums

U8 = np.ndarray[Any, np.dtype[np.uint8]]
I64 = np.ndarray[Any, np.dtype[np.int64]]

MOST_CLASSES = 16
_LEAST = 4096
"""Number of symbols below which one table for each class never pays."""
_EACH = 512
"""Mean number of symbols in a context that pays for its part of the table; two classes are tried with fewer."""
_FARTHEST = 8
"""Largest deviation of a row or a column from the mean, in half octaves."""
_WITHOUT = 1 / 64
"""Share of the positions that need no class of their own."""
_ALIKE = 63 / 64
"""Share of the positions in one class above which further classes do not pay."""
_FAR = 8
"""Symbols are clipped to this, because larger ones cost few bits more."""


def _halves() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the bounds between half octaves, 2**((2 k - 1) / 4), the same on all machines."""
    quarter = math.sqrt(math.sqrt(2.0))
    bounds = [math.ldexp(quarter if k % 2 else 1.0 / quarter, k // 2) for k in range(1 - _FARTHEST, _FARTHEST + 1)]
    return np.array(bounds)


_BOUNDS = _halves()


@dataclass(frozen=True, slots=True)
class Places:
    """Class of each position: row class plus column class minus `base`, in 0 ... `classes` - 1.

    Args:
        rows: uint8, shape (R,), of the rows that the symbols are in.
        columns: uint8, shape (C,).
        phase: column in which the first symbol stands.
        base: sum that is class 0, as are those below.
        classes: 1 to 256.
    """

    rows: U8
    columns: U8
    phase: int
    base: int
    classes: int

    def of(self, n: int) -> U8:
        """Return the classes of n positions."""
        found: U8 = class_sums(self.rows, self.columns, n, self.phase, base=self.base, classes=self.classes)
        return found


def classes_of(symbols: U8, columns: int, start: int) -> Places | None:
    """Return classes by the mean symbol of rows and columns.

    Args:
        symbols: uint8, shape (n,), the rarer the larger.
        columns: of the matrix; 0: the symbols are not part of a matrix.
        start: number of the first symbol in it.

    Returns:
        None where nearly all places are of one class, or the matrix is too small.
    """
    n = symbols.size
    most = min(MOST_CLASSES, max(2, n // _EACH))
    if n < _LEAST or not 2 <= columns <= n // 2:
        return None
    phase = start % columns
    rows, sums = row_column_sums(symbols, columns, phase, most=_FAR)
    total = int(rows.sum())
    if not total:
        return None
    across, down = populations(n, columns, phase, rows.size)
    of_rows, of_columns = (off_mean(*own, n / total) for own in ((rows, across), (sums, down)))
    mass = _mass(of_rows, of_columns)
    if _span(mass) > most:
        of_rows, of_columns = of_rows >> 1, of_columns >> 1
        mass = _mass(of_rows, of_columns)
    if mass.max() >= _ALIKE * mass.sum():
        return None
    # As many sums next to each other as there may be classes, where most places are.
    within = np.convolve(mass, np.ones(most))
    base = max(0, int(within.argmax()) - most + 1)
    classes = min(most, mass.size - base)
    return Places(of_rows.astype(np.uint8), of_columns.astype(np.uint8), phase, base, classes)


def off_mean(sums: I64, numbers: I64, scale: float) -> I64:
    """Return the distance of each line's mean from the total mean, in half octaves.

    If there are far more lines than different sums (narrow matrices), each sum is computed once for each length of a
    line. Only the first and the last line may be short; the lengths of the others differ by at most two.
    """
    most = int(sums.max()) + 1
    if sums.size <= 4 * most:
        return np.searchsorted(_BOUNDS, sums * scale / np.maximum(numbers, 1)).astype(np.int64)
    between = numbers[1:-1] if numbers.size > 2 else numbers
    found = np.zeros(sums.size, np.int64)
    for length in {int(numbers[0]), int(numbers[-1]), *range(int(between.min()), int(between.max()) + 1)}:
        own = np.searchsorted(_BOUNDS, np.arange(most) * scale / max(length, 1))
        found = np.where(numbers == length, own[sums], found)
    return found


def populations(n: int, columns: int, phase: int, rows: int) -> tuple[I64, I64]:
    """Count how many of n elements are in each row and column; the first is in column `phase`."""
    across = np.full(rows, columns, np.int64)
    across[0] -= phase
    across[-1] -= -(phase + n) % columns
    down = np.full(columns, rows, np.int64)
    down[:phase] -= 1
    down[columns - (-(phase + n) % columns) :] -= 1
    return across, down


def _mass(rows: I64, columns: I64) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the number of positions for each sum of row class and column class."""
    return np.convolve(np.bincount(rows).astype(np.float64), np.bincount(columns).astype(np.float64))


def _span(mass: np.ndarray[Any, np.dtype[np.float64]]) -> int:
    """Return the number of central classes that hold all but `_WITHOUT` of the positions."""
    share = np.cumsum(mass) / mass.sum()
    return int(np.searchsorted(share, 1 - _WITHOUT / 2)) - int(np.searchsorted(share, _WITHOUT / 2)) + 1
