"""Linear extrapolation of an array from two earlier states of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .arguments import array, number, same_device
from .arrays import back_end
from .floats import FORMATS

if TYPE_CHECKING:
    from .arrays import Array

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
    return back_end(x, "extrapolation").extrapolate(x, earlier, number("factor", factor, 0, _LARGEST))
