"""Values on a uniform grid in units of a scale: a first moment in units of its update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, check_table, number, same_device
from ..backend.arrays import Array
from ..backend.dispatch import Dispatch


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def grid_symbols(self, x: Array, square: Array, step: float) -> tuple[Array, Any, Any]: ...
    def grid_values(self, symbols: Array, square: Array, table: np.ndarray[Any, np.dtype[np.float32]]) -> Array: ...
    def grid_products(
        self, x: Array, square: Array, symbols: Array, table: np.ndarray[Any, np.dtype[np.float32]]
    ) -> tuple[float, float, float]: ...


back_end = Dispatch[BackEnd]("moment_grid")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)

ESCAPE = 0
"""Symbol of an element without a grid point: not finite, too far out, or nonzero where its scale is zero."""
FARTHEST = 127
"""Largest grid point that has a symbol."""
Floats = np.ndarray[Any, np.dtype[np.float64]]


def grid_symbols(x: Array, square: Array, step: float) -> tuple[Array, Floats, Floats]:
    """Symbol of the nearest grid point of each element, with sums and counts by symbol.

        q = rint((x / sqrt(square)) / step);  symbol = 1 + 2 |q| - (q < 0);  0 (escape) without a grid point

    in float32, each operation rounded once, ties to even. Where `square` is 0, x = 0 is grid point 0, and any other x
    is an escape.

    Args:
        x: float32 [n].
        square: float32 [n], the square of the scale, >= 0.
        step: distance of grid points, in scales; > 0.

    Returns:
        symbols: uint8 [n].
        sums: float64 [256] on the host, sum of x / sqrt(square) by symbol (0 for the escape).
        counts: float64 [256] on the host, number of elements of each symbol.

    Raises:
        BadArgumentError: other dtypes or shapes, or a step out of range.

    Example:
        >>> x, square = np.array([0.0, 2.2, -1.1], np.float32), np.full(3, 4, np.float32)
        >>> grid_symbols(x, square, 0.5)[0].tolist()
        [1, 5, 2]

    Source: the update m / sqrt(v) of Adam (Kingma and Ba 2015), through which an error in m acts on training.
    """
    array("x", x, ("float32",), 1)
    array("square", square, ("float32",), x.shape)
    same_device("x", x, "square", square)
    step = number("step", step, 0, np.inf, open_low=True, open_high=True)
    return back_end(x).grid_symbols(x, square, step)


def grid_values(symbols: Array, square: Array, table: np.ndarray[Any, np.dtype[np.float32]]) -> Array:
    """Values of grid symbols: `table[symbol] * sqrt(square)` in float32.

    Each operation is rounded once.

    Args:
        symbols: uint8 [n].
        square: float32 [n], as it was for `grid_symbols`.
        table: float32 [256] on the host: value of each symbol in scales.

    Raises:
        BadArgumentError: other dtypes or shapes.

    Example:
        >>> table = np.zeros(256, np.float32)
        >>> table[5] = 1.0
        >>> grid_values(np.array([1, 5], np.uint8), np.full(2, 4, np.float32), table).tolist()
        [0.0, 2.0]
    """
    array("symbols", symbols, ("uint8",), 1)
    array("square", square, ("float32",), symbols.shape)
    same_device("symbols", symbols, "square", square)
    check_table("table", table, "float32", (256,))
    return back_end(symbols).grid_values(symbols, square, table)


def grid_products(
    x: Array, square: Array, symbols: Array, table: np.ndarray[Any, np.dtype[np.float32]]
) -> tuple[float, float, float]:
    """Sums of x x, x y and y y over the elements that have a grid point.

    y is the element's `grid_values`.

        y = table[symbol] * sqrt(square)

    in float32, rounded once; the sums are in float64. With a gain g the squared error of g y is
    x x - 2 g x y + g**2 y y.

    Args:
        x: float32 [n].
        square: float32 [n].
        symbols: uint8 [n], as `grid_symbols` returned them.
        table: float32 [256] on the host: value of each symbol in scales.

    Raises:
        BadArgumentError: other dtypes or shapes.

    Example:
        >>> x, square = np.array([1.0, 2.0], np.float32), np.full(2, 4, np.float32)
        >>> grid_products(x, square, np.array([0, 3], np.uint8), np.full(256, 0.5, np.float32))
        (4.0, 2.0, 1.0)
    """
    array("x", x, ("float32",), 1)
    array("square", square, ("float32",), x.shape)
    array("symbols", symbols, ("uint8",), x.shape)
    same_device("x", x, "square", square)
    same_device("x", x, "symbols", symbols)
    check_table("table", table, "float32", (256,))
    norm, products, squares = back_end(x).grid_products(x, square, symbols, table)
    return float(norm), float(products), float(squares)
