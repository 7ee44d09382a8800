"""Levels that minimize the error plus the price of bits, and linear extrapolation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..backend.arguments import array, check_table, number, same_device, shown
from ..backend.arrays import Array
from ..backend.dispatch import Dispatch, OnHost
from ..backend.floats import FORMATS
from ..errors import BadArgumentError


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def rate_distortion_levels(
        self, x: Array, levels: Array, previous: Array, codebook: Table, prices: Table, importance: Array | None = None
    ) -> Array: ...
    def unsettled(
        self, x: Array, levels: Array, previous: Array, bounds: Table, importance: Array | None = None
    ) -> tuple[Array, Array, Array, Array, Array | None]: ...
    def extrapolate(self, x: Array, earlier: Array, factor: float) -> Array: ...


class HostBackEnd(Protocol):
    """Functions that only the back ends on the host have."""

    def settled_bounds(self, codebook: Table, prices: Table, slack: float) -> Table: ...


back_end = Dispatch[BackEnd]("rate_distortion")
on_host = OnHost[HostBackEnd]("rate_distortion")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)
    _ON_HOST: tuple[HostBackEnd, ...] = (reference, cpu)

Table = np.ndarray[Any, np.dtype[np.float32]]


def rate_distortion_levels(
    x: Array,
    levels: Array,
    previous: Array,
    codebook: Array,
    prices: Table,
    importance: Array | None = None,
) -> Array:
    """Cheapest level of each element by squared error plus bits.

    Candidates are the nearest level, its two neighbours, and the element's previous level.

        cost(l) = s * (x - c[l - 2])**2 + prices[p, l],   p = previous level, s = importance (1 without)

    in float32, each operation rounded once (no fused multiply-add). Candidates are tried in the order nearest,
    nearest - 1, nearest + 1, previous, and a later one is taken only if strictly cheaper. Levels 0 and 1 (pruned,
    protected) stay, and are never chosen.

    Args:
        x: values, shape (n,); float16, bfloat16, float32, or float64 (rounded to float32 first).
        levels: uint8, shape (n,), as returned by `assign`.
        previous: uint8, shape (n,): levels of the same elements in the parent; any context below `prices.shape[0]`.
        codebook: float32 [K] on the host, ascending.
        prices: float32 [contexts, K + 2] on the host: lambda times the bits of level l in context p; finite, >= 0.
        importance: float32, shape (n,), >= 0, in the library and on the device of x: weight of each element's squared
            error; None: 1 for all.

    Returns:
        uint8, shape (n,), the library and device of x.

    Raises:
        BadArgumentError: shapes or dtypes do not fit.

    Example:
        >>> prices = np.zeros((4, 4), np.float32)
        >>> prices[2, 3] = 0.5  # a change from level 2 is expensive
        >>> x = np.array([0.6, 0.6], np.float32)
        >>> levels, previous = np.array([3, 3], np.uint8), np.array([2, 3], np.uint8)
        >>> rate_distortion_levels(x, levels, previous, np.array([0, 1], np.float32), prices).tolist()
        [2, 3]

    Source: entropy-constrained scalar quantization (Chou, Lookabaugh and Gray 1989), with the parent as context.
    """
    _check_elements(x, levels, previous, importance)
    _check_tables(codebook, prices)
    return back_end(x).rate_distortion_levels(x, levels, previous, codebook, prices, importance)


def settled_bounds(codebook: Table, prices: Table, slack: float = 0.0) -> Table:
    """Value ranges in which `rate_distortion_levels` certainly returns the nearest level.

    One range for each pair of previous and nearest level.

    Element x with nearest level n >= 2, previous level p and importance s certainly gets level n unless

        s * (x - b[0]) < b[1]   or   s * (b[2] - x) < b[3],   b = bounds[p, n]

    in float32. A candidate m whose price is lower by G = prices[p, n] - prices[p, m] is chosen from a distance of
    `G / (2 s |c[m] - c[n]|)` before the middle of c[n] and c[m]; any other candidate only after the middle. The bounds
    are a little stricter, because the costs are rounded. If several candidates are on one side, the strictest bound
    holds.

    Args:
        codebook: float32 [K], ascending.
        prices: float32 [contexts, K + 2], finite, >= 0; see `rate_distortion_levels`.
        slack: amount by which every G may grow while the bounds stay valid, in units of the prices, >= 0; default 0.

    Returns:
        float32 [contexts, K + 2, 4]; levels 0 and 1 are always settled.

    Raises:
        BadArgumentError: shapes or dtypes do not fit, codes do not ascend, or a price or `slack` is out of range.

    Example:
        >>> prices = np.zeros((4, 4), np.float32)
        >>> prices[2, 3] = 0.5
        >>> bounds = settled_bounds(np.array([0, 1], np.float32), prices)
        >>> bounds[2, 3].round(3).tolist()  # 0 is cheaper than 1 by 0.5: it is chosen up to 0.5 + 0.25 / s
        [0.5, 0.25, 5.0, 0.0]
        >>> bounds[3, 3].round(3).tolist()
        [0.5, 0.0, inf, 0.0]

    Source: own work; parabolas of one curvature cross once.
    """
    _check_tables(codebook, prices)
    if not np.isfinite(codebook).all() or (codebook[1:] < codebook[:-1]).any() or (prices < 0).any():
        raise BadArgumentError("codebook must be finite and ascending, and no price below 0")
    slack = number("slack", slack, 0, float(np.finfo(np.float32).max))
    return on_host().settled_bounds(codebook, prices, slack)


@dataclass(frozen=True, slots=True)
class Unsettled:
    """Elements that may get a level other than the nearest, in order.

    Args:
        at: int64, their positions.
        x: float32, their values.
        levels: uint8, their nearest levels.
        previous: uint8, their levels in the parent.
        importance: float32; None: 1 for all.
    """

    at: Array
    x: Array
    levels: Array
    previous: Array
    importance: Array | None


def unsettled(x: Array, levels: Array, previous: Array, bounds: Table, importance: Array | None = None) -> Unsettled:
    """Return the elements for which `rate_distortion_levels` may not choose the nearest level.

    Args:
        x, levels, previous, importance: as for `rate_distortion_levels`.
        bounds: float32 [contexts, K + 2, 4] on the host, as returned by `settled_bounds`.

    Returns:
        The elements outside the bounds, in the library and on the device of x.

    Raises:
        BadArgumentError: shapes or dtypes do not fit, or a level is beyond the bounds.

    Example:
        >>> prices = np.zeros((4, 4), np.float32)
        >>> prices[2, 3] = 0.5
        >>> bounds = settled_bounds(np.array([0, 1], np.float32), prices)
        >>> x = np.array([0.6, 0.9, 0.6], np.float32)
        >>> unsettled(x, np.full(3, 3, np.uint8), np.array([2, 2, 3], np.uint8), bounds).at.tolist()
        [0]

    Source: own work.
    """
    _check_elements(x, levels, previous, importance)
    check_table("bounds", bounds, "float32", 3)
    if bounds.shape[2] != 4:
        raise BadArgumentError(f"bounds is {shown(bounds)}; float32 NumPy [contexts, K + 2, 4] is needed")
    return Unsettled(*back_end(x).unsettled(x, levels, previous, bounds, importance))


def _check_elements(x: Array, levels: Array, previous: Array, importance: Array | None) -> None:
    array("x", x, FORMATS, 1)
    same_device("x", x, "levels", array("levels", levels, ("uint8",), x.shape))
    same_device("x", x, "previous", array("previous", previous, ("uint8",), x.shape))
    if importance is not None:
        same_device("x", x, "importance", array("importance", importance, ("float32",), x.shape))


def _check_tables(codebook: Table, prices: Table) -> None:
    check_table("codebook", codebook, "float32", 1)
    check_table("prices", prices, "float32", 2)
    if prices.shape[1] != codebook.size + 2 or not np.isfinite(prices).all():
        raise BadArgumentError(
            f"codebook has shape {codebook.shape}, prices {prices.shape}; [K] and finite [contexts, K + 2] are needed"
        )


_LARGEST = float(np.finfo(np.float32).max)


def extrapolate(x: Array, earlier: Array, factor: float) -> Array:
    """Continue the change from `earlier` to x by `factor` times its size.

        out = x + (x - earlier) * factor;  x itself where that is not finite

    in float64 if x is float64, else in float32. Both arrays and the factor are converted first (a float64 `earlier` of
    a narrower x is rounded to float32). Then each operation is rounded once, in this order, without fused multiply-add.
    A NaN in x becomes the positive quiet NaN; its payload is lost.

    Args:
        x: any shape, float16, bfloat16, float32 or float64.
        earlier: the same shape, any of these dtypes, on the same device.
        factor: 0 (x is returned) to the largest float32; 1 repeats the whole change.

    Returns:
        float32, float64 where x is, of the shape, library and device of x.

    Raises:
        BadArgumentError: another dtype, the shapes or devices differ, or a factor out of range.

    Example:
        >>> extrapolate(np.array([1.0, 2.0, np.inf]), np.array([0.5, 2.0, 0.0]), 3.0).tolist()
        [2.5, 2.0, inf]

    Source: the extrapolation of Nesterov 1983; used by an encoder that predicts where training moves the weights
        (docs/decisions/drift.md).
    """
    array("x", x, FORMATS)
    same_device("x", x, "earlier", array("earlier", earlier, FORMATS, x.shape))
    return back_end(x).extrapolate(x, earlier, number("factor", factor, 0, _LARGEST))
