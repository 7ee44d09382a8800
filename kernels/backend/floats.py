"""Float formats as integers: field widths, bit patterns, and log buckets.

The array API cannot read bit patterns, so each library has its own function. Patterns are int64 arrays of the float's
library, so the rest of the oracle is plain array API arithmetic: `0 ... 2**width - 1` for formats of 16 and 32 bits,
two's complement for float64.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BadArgumentError
from .arguments import instance, number
from .arrays import Array, dtype_name, is_torch


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary interchange format: `width` bits = sign + `exponent` bits + `mantissa` bits."""

    name: str
    width: int
    exponent: int
    mantissa: int

    @property
    def bias(self) -> int:
        """Exponent bias; also the largest unbiased exponent of a finite value."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def lowest_exponent(self) -> int:
        """Unbiased exponent of the smallest subnormal: value `2**lowest_exponent`."""
        return 1 - self.bias - self.mantissa

    @property
    def octaves(self) -> int:
        """Number of octaves from the smallest subnormal to the largest finite value."""
        return self.bias - self.lowest_exponent + 1

    def buckets(self, bits: int) -> int:
        """Number J of nonzero magnitude buckets with `2**bits` linear sub-buckets an octave."""
        return self.octaves << bits


FORMATS: dict[str, FloatFormat] = {
    f.name: f
    for f in (
        FloatFormat("float16", 16, 5, 10),
        FloatFormat("bfloat16", 16, 8, 7),
        FloatFormat("float32", 32, 8, 23),
        FloatFormat("float64", 64, 11, 52),
    )
}


def format_named(name: str) -> FloatFormat:
    """Return the format of dtype `name`; raise BadArgumentError if it has no log buckets."""
    if not isinstance(name, str) or name not in FORMATS:
        raise BadArgumentError(f"dtype {name} has no log buckets; one of {', '.join(FORMATS)} is needed")
    return FORMATS[name]


def bits_for(alpha: float, fmt: FloatFormat) -> int:
    """Smallest number of sub-bucket bits that keeps the relative error within `alpha`.

    That is the smallest b with `2**-(b + 1) <= alpha`, capped at the mantissa.

    Args:
        alpha: relative error asked for, 0 < alpha < 1; 0.01 gives b = 6.
        fmt: the float format; at `b == fmt.mantissa` a bucket holds one value and the error is zero.

    Raises:
        BadArgumentError: alpha is not in (0, 1).
    """
    alpha = number("alpha", alpha, 0, 1, open_low=True, open_high=True)
    instance("fmt", fmt, FloatFormat)
    exponent = math.frexp(alpha)[1]  # 2**(exponent - 1) <= alpha, and no greater power of two
    return min(max(-exponent, 0), fmt.mantissa)


def to_bits(x: Array) -> Array:
    """Bit pattern of each float as int64, in the shape, library and device of x.

    x has a dtype of `floats.FORMATS`.
    """
    width = format_named(dtype_name(x)).width
    if isinstance(x, (np.ndarray, np.generic)):
        return np.ascontiguousarray(x).view(f"uint{width}").reshape(x.shape).astype(np.int64)
    if is_torch(x):
        import torch

        signed = x.contiguous().view(getattr(torch, f"int{width}")).to(torch.int64)
        return signed if width == 64 else signed & ((1 << width) - 1)
    if _is_strict(x):
        return sys.modules["array_api_strict"].asarray(to_bits(x._array))
    return x.__array_namespace__().asarray(to_bits(np.asarray(x)))  # JAX; needs jax_enable_x64 for its int64


def from_bits(bits: Array, dtype: str) -> Array:
    """Floats of a dtype with the given bit patterns, in the library of `bits`.

    Patterns are int64 as `to_bits` gives them; dtype is a name.
    """
    width = format_named(dtype).width
    if isinstance(bits, np.ndarray):
        unsigned = bits.astype(f"uint{width}")
        if dtype == "bfloat16":
            import ml_dtypes

            return unsigned.view(ml_dtypes.bfloat16)
        return unsigned.view(dtype)
    if is_torch(bits):
        import torch

        half = 1 << (width - 1)
        signed = bits if width == 64 else ((bits + half) & ((1 << width) - 1)) - half
        return signed.to(getattr(torch, f"int{width}")).view(getattr(torch, dtype))
    if _is_strict(bits):
        return sys.modules["array_api_strict"].asarray(from_bits(bits._array, dtype))
    return bits.__array_namespace__().asarray(from_bits(np.asarray(bits), dtype))


def sign_and_magnitude(x: Array) -> tuple[Array, Array]:
    """Return the sign bit of each float (bool), and its pattern without sign (int64, >= 0)."""
    width = format_named(dtype_name(x)).width
    bits = to_bits(x)
    return (bits >> (width - 1)) & 1 == 1, bits & ((1 << (width - 1)) - 1)


def _is_strict(x: Any) -> bool:
    return type(x).__module__.split(".")[0] == "array_api_strict"
