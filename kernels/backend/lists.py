"""Conversion of arrays to lists of Python integers and back, for the sequential oracles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from array_api_compat import array_namespace

if TYPE_CHECKING:
    from .arrays import Array


def numbers(x: Array) -> list[int]:
    """Return the elements of an integer array as a list, row by row."""
    xp = array_namespace(x)
    flat = xp.reshape(xp.astype(x, xp.int64), (-1,))
    if hasattr(flat, "tolist"):  # not in the standard, but faster where it is
        return list(flat.tolist())
    return [int(flat[i]) for i in range(flat.shape[0])]


def array(values: list[int], dtype: str, like: Array) -> Array:
    """Return `values` as a one-dimensional array in the library of `like`."""
    xp = array_namespace(like)
    return xp.astype(xp.asarray(values, dtype=xp.int64), getattr(xp, dtype))
