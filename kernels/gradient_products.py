"""Float format and argument checks of gradient * value, the sensitivity of a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arguments import array, same_device
from .arrays import dtype_name
from .floats import FORMATS

if TYPE_CHECKING:
    from .arrays import Array


def product_format(x: Array, gradient: Array) -> str:
    """Format in which `gradient * x` is computed: float64 if either is float64, else float32."""
    return "float64" if "float64" in (dtype_name(x), dtype_name(gradient)) else "float32"


def check_gradient(x: Array, gradient: Array) -> None:
    """Raise BadArgumentError if the shape, dtype or device of a gradient does not fit x."""
    array("gradient", gradient, FORMATS, x.shape)
    same_device("gradient", gradient, "x", x)
