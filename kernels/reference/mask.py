"""Oracle of the bit masks: flags in a table of eight columns, running counts for positions."""

from __future__ import annotations

from array_api_compat import array_namespace

from ..arrays import Array
from ..mask import trailing_bits_set, wrong_count
from .planes import patterns, unsigned, with_dtype_of


def changed_mask(current: Array, previous: Array) -> Array:
    """See `shrinkpoint.kernels.mask.changed_mask`."""
    return pack_mask(patterns(current) != patterns(previous))


def pack_mask(mask: Array) -> Array:
    """See `shrinkpoint.kernels.mask.pack_mask`."""
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
    """See `shrinkpoint.kernels.mask.unpack_mask`."""
    xp = array_namespace(data)
    data = xp.astype(data, xp.int64)
    flags = xp.reshape(xp.stack([(data >> q) & 1 for q in range(8)], axis=1), (-1,)) == 1
    if bool(xp.any(flags[n:])):
        raise trailing_bits_set()
    return flags[:n]


def gather(x: Array, mask_bits: Array) -> Array:
    """See `shrinkpoint.kernels.mask.gather`."""
    u = patterns(x)
    return with_dtype_of(u[unpack_mask(mask_bits, u.shape[0])], x)


def scatter(base: Array, mask_bits: Array, values: Array) -> Array:
    """See `shrinkpoint.kernels.mask.scatter`."""
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
