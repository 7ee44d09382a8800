"""Oracle of fixed-width packing: a table of single bits, reshaped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from array_api_compat import array_namespace

from ..errors import BadArgumentError, CorruptDataError

if TYPE_CHECKING:
    from ..arrays import Array


def pack_bits(values: Array, width: int) -> Array:
    """See `shrinkpoint.kernels.bitpack.pack_bits`."""
    xp = array_namespace(values)
    v = xp.astype(values, xp.int64)
    if bool(xp.any((v >> width) > 0)):
        raise BadArgumentError(f"values holds some that do not fit a width of {width} bits")
    bits = _bits(v, width)
    filler = xp.zeros(-bits.shape[0] % 8, dtype=xp.int64)
    return xp.astype(_numbers(xp.concat([bits, filler]), 8), xp.uint8)


def unpack_bits(data: Array, width: int, n: int, dtype: str = "uint8") -> Array:
    """See `shrinkpoint.kernels.bitpack.unpack_bits`."""
    xp = array_namespace(data)
    if data.shape[0] != (n * width + 7) // 8:
        raise CorruptDataError(f"{n} values of {width} bits do not take {data.shape[0]} bytes")
    bits = _bits(xp.astype(data, xp.int64), 8)
    if bool(xp.any(bits[n * width :] > 0)):
        raise CorruptDataError("bits are set after the last value")
    if width == 0:
        return xp.zeros(n, dtype=getattr(xp, dtype))
    return xp.astype(_numbers(bits[: n * width], width), getattr(xp, dtype))


def _bits(x: Array, width: int) -> Array:
    """Expand each number of x into `width` bits, the lowest first."""
    xp = array_namespace(x)
    columns = xp.arange(width, dtype=xp.int64)
    return xp.reshape((xp.expand_dims(x, axis=1) >> xp.expand_dims(columns, axis=0)) & 1, (-1,))


def _numbers(bits: Array, width: int) -> Array:
    """Join bits into numbers: the inverse of `_bits`."""
    xp = array_namespace(bits)
    table = xp.reshape(bits, (bits.shape[0] // width, width))
    weights = xp.asarray(1, dtype=xp.int64) << xp.arange(width, dtype=xp.int64)
    return xp.sum(table * weights, axis=1)
