"""Exact conversion of 16-bit floats to float32 on the CPU, subnormals included.

NumPy's conversion of float16 takes three times as long, and twenty times for subnormal values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .jit import njit_in_place

NARROW = frozenset({"float16", "bfloat16"})
"""The formats that are widened."""
_FEW = 1 << 10
"""Elements between the two passes over a float16's result: they stay in the first-level cache."""
_UNIT = np.float32(2.0**-24)
"""The smallest subnormal of float16."""


@njit_in_place
def _from_float16(u: Any, out: Any, bits: Any) -> None:
    """Convert the exponents of all numbers except subnormals, then convert the subnormals.

    Infinities and NaNs get the largest exponent. The cast is needed for speed: sums of uint32 are 64 bits wide in
    Numba, which takes twice as long.
    """
    kind = np.uint32
    move, fraction = kind(112 << 23), kind(13)
    for at in range(0, u.size, _FEW):
        n = min(_FEW, u.size - at)
        own, values, patterns = u[at : at + n], out[at : at + n], bits[at : at + n]
        for i in range(n):
            h = kind(own[i])
            m = kind(h & kind(0x7FFF))
            pattern = kind(kind(m << fraction) + move)
            pattern = kind(pattern + move) if m >= kind(0x7C00) else pattern
            patterns[i] = kind(pattern | kind(kind(h - m) << kind(16)))
        for i in range(n):
            whole = np.int32(own[i])  # signed numbers become floats in one instruction
            magnitude = np.int32(whole & np.int32(0x7FFF))
            low = np.float32(magnitude) * _UNIT
            low = -low if whole != magnitude else low
            values[i] = low if magnitude < np.int32(0x400) else values[i]


@njit_in_place
def _from_bfloat16(u: Any, bits: Any) -> None:
    for i in range(u.size):
        bits[i] = np.uint32(u[i]) << np.uint32(16)


def widened(values: np.ndarray[Any, Any], dtype: str, buffer: np.ndarray[Any, Any] | None = None) -> Any:
    """Convert flat values to float32; float32 and float64 stay as they are.

    `dtype` is the name of a float format; bfloat16 comes as bit patterns.

    Args:
        values: [n], contiguous.
        dtype: name of their dtype, because NumPy has no bfloat16.
        buffer: float32 [n or more] for the result of a 16-bit format; default: new memory.
    """
    if dtype not in NARROW:
        return values
    out = np.empty(values.size, np.float32) if buffer is None else buffer[: values.size]
    if dtype == "float16":
        _from_float16(values.view(np.uint16), out, out.view(np.uint32))
    else:
        _from_bfloat16(values, out.view(np.uint32))
    return out
