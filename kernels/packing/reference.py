"""Oracle of packing and masks: tables of single bits, reshaped, and running counts."""

from __future__ import annotations

from array_api_compat import array_namespace

from ..backend.arrays import Array
from ..errors import BadArgumentError, CorruptDataError
from ..planes.reference import patterns, unsigned, with_dtype_of
from . import trailing_bits_set, wrong_count


def pack_bits(values: Array, width: int, *, checked: bool = True) -> Array:
    """See `shrinkpoint.kernels.packing.pack_bits`."""
    xp = array_namespace(values)
    v = xp.astype(values, xp.int64)
    if bool(xp.any((v >> width) > 0)):
        raise BadArgumentError(f"values holds some that do not fit a width of {width} bits")
    bits = _bits(v, width)
    filler = xp.zeros(-bits.shape[0] % 8, dtype=xp.int64)
    return xp.astype(_numbers(xp.concat([bits, filler]), 8), xp.uint8)


def unpack_bits(data: Array, width: int, n: int, dtype: str = "uint8") -> Array:
    """See `shrinkpoint.kernels.packing.unpack_bits`."""
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


def changed_mask(current: Array, previous: Array) -> Array:
    """See `shrinkpoint.kernels.packing.changed_mask`."""
    return pack_mask(patterns(current) != patterns(previous))


def pack_mask(mask: Array) -> Array:
    """See `shrinkpoint.kernels.packing.pack_mask`."""
    xp = array_namespace(mask)
    flags = xp.astype(xp.reshape(mask, (-1,)), xp.int64)
    rows = (flags.shape[0] + 7) // 8
    flags = xp.concat([flags, xp.zeros(8 * rows - flags.shape[0], dtype=xp.int64)])
    table = xp.reshape(flags, (rows, 8))
    out = xp.zeros(rows, dtype=xp.int64)
    for q in range(8):
        out = out | (table[:, q] << q)
    return unsigned(out, 8)


def unpack_mask(data: Array, n: int) -> Array:
    """See `shrinkpoint.kernels.packing.unpack_mask`."""
    xp = array_namespace(data)
    data = xp.astype(data, xp.int64)
    flags = xp.reshape(xp.stack([(data >> q) & 1 for q in range(8)], axis=1), (-1,)) == 1
    if bool(xp.any(flags[n:])):
        raise trailing_bits_set()
    return flags[:n]


def gather(x: Array, mask_bits: Array) -> Array:
    """See `shrinkpoint.kernels.packing.gather`."""
    u = patterns(x)
    return with_dtype_of(u[unpack_mask(mask_bits, u.shape[0])], x)


def scatter(base: Array, mask_bits: Array, values: Array) -> Array:
    """See `shrinkpoint.kernels.packing.scatter`."""
    u, v = patterns(base), patterns(values)
    xp = array_namespace(u)
    mask = unpack_mask(mask_bits, u.shape[0])
    before = xp.cumulative_sum(xp.astype(mask, xp.int64)) - 1  # position in `values`, right where the mask is set
    marked = int(before[-1]) + 1 if u.shape[0] else 0
    if marked != v.shape[0]:
        raise wrong_count(marked, v.shape[0])
    if marked:
        u = xp.where(mask, xp.take(v, xp.where(mask, before, 0)), u)
    return xp.reshape(with_dtype_of(u, base), tuple(base.shape))
