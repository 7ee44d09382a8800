"""Rate-distortion-optimised levels: the level whose error and bits together cost least, not merely the nearest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import check_arrays, shown
from .arrays import back_end, dtype_name
from .errors import BadArgumentError
from .floats import format_named
from .planes import same_device

if TYPE_CHECKING:
    from .arrays import Array


def rate_distortion_levels(
    x: Array,
    levels: Array,
    previous: Array,
    codebook: Array,
    prices: np.ndarray[Any, np.dtype[np.float32]],
    importance: Array | None = None,
) -> Array:
    """For each quantized element the cheapest of its nearest level, that level's neighbours, and its previous level.

        cost(l) = s * (x - c[l - 2])**2 + prices[p, l],   p = previous level, s = importance (1 without)

    in float32, each operation rounded once (no fused multiply-add). Candidates are tried in the order nearest,
    nearest - 1, nearest + 1, previous, and a later one is taken only if strictly cheaper. Levels 0 and 1 (pruned,
    protected) stay, and are never chosen.

    Args:
        x: values, shape (n,); float16, bfloat16, float32, or float64 (rounded to float32 first).
        levels: uint8, shape (n,): what `assign` gave.
        previous: uint8, shape (n,): levels of the same elements in the parent; any context below `prices.shape[0]`.
        codebook: float32 [K] on the host, ascending.
        prices: float32 [contexts, K + 2] on the host: lambda times the bits of level l in context p; finite, >= 0.
        importance: float32, shape (n,), >= 0, in the library and on the device of x: what a squared error of each
            element costs; None: 1 for all.

    Returns:
        uint8, shape (n,), the library and device of x.

    Raises:
        BadArgumentError: shapes or dtypes do not fit.

    Example:
        >>> prices = np.zeros((4, 4), np.float32)
        >>> prices[2, 3] = 0.5  # leaving level 2 is dear
        >>> x = np.array([0.6, 0.6], np.float32)
        >>> levels, previous = np.array([3, 3], np.uint8), np.array([2, 3], np.uint8)
        >>> rate_distortion_levels(x, levels, previous, np.array([0, 1], np.float32), prices).tolist()
        [2, 3]

    Source: entropy-constrained scalar quantization (Chou, Lookabaugh and Gray 1989), with the parent as context.
    """
    check_arrays(x=x, levels=levels, previous=previous)
    format_named(dtype_name(x))
    for name, array in (("levels", levels), ("previous", previous)):
        if dtype_name(array) != "uint8" or tuple(array.shape) != tuple(x.shape) or len(x.shape) != 1:
            raise BadArgumentError(
                f"{name} is {dtype_name(array)} {tuple(array.shape)}; uint8 {tuple(x.shape)} is needed"
            )
        same_device("x", x, name, array)
    if importance is not None:
        check_arrays(importance=importance)
        if dtype_name(importance) != "float32" or tuple(importance.shape) != tuple(x.shape):
            raise BadArgumentError(
                f"importance is {dtype_name(importance)} {tuple(importance.shape)}; float32 {tuple(x.shape)} is needed"
            )
        same_device("x", x, "importance", importance)
    for name, table in (("codebook", codebook), ("prices", prices)):
        if not isinstance(table, np.ndarray) or table.dtype != np.float32:
            raise BadArgumentError(f"{name} is {shown(table)}; a float32 NumPy array is needed")
    if codebook.ndim != 1 or prices.ndim != 2 or prices.shape[1] != codebook.size + 2 or not np.isfinite(prices).all():
        raise BadArgumentError(
            f"codebook has shape {codebook.shape}, prices {prices.shape}; [K] and finite [contexts, K + 2] are needed"
        )
    return back_end(x, "ratedistortion").rate_distortion_levels(x, levels, previous, codebook, prices, importance)
