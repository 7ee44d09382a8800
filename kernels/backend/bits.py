"""Bit patterns of floats, which the array API cannot read: one function per library.

Patterns are int64 arrays of the float's own library, so the rest of the oracle is plain array API arithmetic:
`0 ... 2**width - 1` for formats of 16 and 32 bits, two's complement for float64.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from .arrays import Array, dtype_name, is_torch
from .floats import format_named


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
