"""Oracle of byte planes, differences and categories, on int64 and Python's integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array, dtype_name, is_torch, to_numpy
from ..backend.floats import FORMATS, from_bits, to_bits
from ..errors import CorruptDataError
from . import VALUE_WIDTHS as WIDTHS
from . import category_count, ordered_by_sign, width_of


def split_planes(x: Array, rotation: int = 0) -> Array:
    """See `shrinkpoint.kernels.planes.split_planes`."""
    width = width_of(dtype_name(x))
    u = _rotated(patterns(x), rotation, width)
    xp = array_namespace(u)
    return xp.stack([unsigned(u >> shift, 8) for shift in range(0, width, 8)])


def merge_planes(planes: Array, dtype: str, rotation: int = 0) -> Array:
    """See `shrinkpoint.kernels.planes.merge_planes`."""
    xp = array_namespace(planes)
    width = width_of(dtype)
    out = xp.zeros(planes.shape[1], dtype=xp.int64)
    for p in range(width // 8):
        out = out | (xp.astype(planes[p, :], xp.int64) << (8 * p))
    return unsigned(_rotated(out, width - rotation, width), width)


def _rotated(u: Array, bits: int, width: int) -> Array:
    """Rotate int64 patterns left; bits above `width` have no meaning."""
    return u if bits in (0, width) else (u << bits) | ((u >> (width - bits)) & ((1 << bits) - 1))


def difference(current: Array, previous: Array, method: str = "arithmetic", *, dtype: str | None = None) -> Array:
    """See `shrinkpoint.kernels.planes.difference`."""
    name = dtype or dtype_name(previous)
    width = width_of(name)
    c, p = patterns(current), patterns(previous)
    if method == "xor":
        out = c ^ p
    else:
        xp = array_namespace(c)
        d = _key(c, name) - _key(p, name)
        out = xp.where(_top_bit(d, width), ~(d << 1), d << 1)
    return array_namespace(out).reshape(unsigned(out, width), tuple(current.shape))


def undifference(diff: Array, previous: Array, method: str = "arithmetic", *, dtype: str | None = None) -> Array:
    """See `shrinkpoint.kernels.planes.undifference`."""
    name = dtype or dtype_name(previous)
    width = width_of(name)
    d, p = patterns(diff), patterns(previous)
    xp = array_namespace(d)
    if method == "xor":
        out = d ^ p
    else:
        half = (d >> 1) & ((1 << (width - 1)) - 1)
        step = xp.where(d & 1 == 1, ~half, half)
        out = _key(_key(p, name) + step, name)
    return xp.reshape(with_dtype_of(out, previous), tuple(previous.shape))


def patterns(x: Array) -> Array:
    """Bit patterns of any fixed-width dtype as flat int64.

    `0 ... 2**width - 1`, or two's complement for 64 bits.
    """
    xp = array_namespace(x)
    x = xp.reshape(x, (-1,))
    name = dtype_name(x)
    if name in FORMATS:
        return to_bits(x)
    if name.startswith("float8"):
        x = _view(x, "uint8")
    elif name == "uint64":
        return _view(x, "int64")
    u = xp.astype(x, xp.int64)
    width = width_of(name)
    return u if width == 64 else u & ((1 << width) - 1)


def unsigned(u: Array, width: int) -> Array:
    """The low `width` bits of int64 patterns as unsigned integers of that width."""
    xp = array_namespace(u)
    if width == 64:
        return _view(u, "uint64")
    return xp.astype(u & ((1 << width) - 1), getattr(xp, f"uint{width}"))


def with_dtype_of(u: Array, x: Array) -> Array:
    """View flat int64 patterns as values of x's dtype."""
    name = dtype_name(x)
    width = width_of(name)
    xp = array_namespace(u)
    if name in FORMATS:
        return from_bits(u if width == 64 else u & ((1 << width) - 1), name)
    bits = unsigned(u, width)
    if name == "bool":
        return bits != 0
    if name.startswith("uint"):
        return bits
    if name.startswith("float8"):
        return bits.view(x.dtype)
    signed = xp.where(_top_bit(u, width), u | -(1 << (width - 1)), u & ((1 << (width - 1)) - 1))
    return xp.astype(signed, x.dtype)


def _view(x: Array, dtype: str) -> Array:
    """Reinterpret x's bytes as another dtype of the same width.

    The standard has no such function; each library has its own.
    """
    if is_torch(x):
        import torch

        return x.view(getattr(torch, dtype))
    if isinstance(x, np.ndarray):
        return x.view(dtype)
    raw: Any = np.asarray(getattr(x, "_array", x)).view(dtype)
    return array_namespace(x).asarray(raw)


def _top_bit(u: Array, width: int) -> Array:
    return (u >> (width - 1)) & 1 == 1


def _key(u: Array, dtype: str) -> Array:
    """Map patterns to an order of integers; its own inverse."""
    if not ordered_by_sign(dtype):
        return u
    width = width_of(dtype)
    return array_namespace(u).where(_top_bit(u, width), u ^ ((1 << (width - 1)) - 1), u)


def split_categories(values: Array, bits: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.planes.split_categories`."""
    xp = array_namespace(values)
    categories, number, at = [], 0, 0
    for v in to_numpy(values).tolist():  # torch converts no uint64 above 2**63
        k = (v | 1 << bits).bit_length() - 1 - bits
        categories.append((k << bits) + (v >> k))
        number |= (v & (1 << k) - 1) << at
        at += k
    extra = list(number.to_bytes((at + 7) // 8, "little"))
    return xp.asarray(categories, dtype=xp.uint8), xp.asarray(extra, dtype=xp.uint8)


def join_categories(categories: Array, extra: Array, bits: int, dtype: str) -> Array:
    """See `shrinkpoint.kernels.planes.join_categories`."""
    xp = array_namespace(categories)
    number = int.from_bytes(bytes(int(extra[i]) for i in range(extra.shape[0])), "little")
    values, at = [], 0
    for i in range(categories.shape[0]):
        c = int(categories[i])
        if c >= category_count(WIDTHS[dtype], bits):
            raise CorruptDataError(f"category {c} is not a category of {dtype}")
        k = max((c >> bits) - 1, 0)
        values.append((c - (k << bits) << k) + (number >> at & (1 << k) - 1))
        at += k
    if extra.shape[0] != (at + 7) // 8 or number >> at:
        raise CorruptDataError(f"{extra.shape[0]} bytes are not the {at} bits that the categories leave open")
    return xp.asarray(values, dtype=getattr(xp, dtype))
