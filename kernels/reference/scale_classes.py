"""Oracle of the row and column classes: a padded matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from array_api_compat import array_namespace

from ..arrays import to_numpy

if TYPE_CHECKING:
    from ..arrays import Array


def row_column_sums(values: Array, columns: int, phase: int, origin: int | Array, most: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.scale_classes.row_column_sums`."""
    xp = array_namespace(values)
    n = values.shape[0]
    rows = -(-(phase + n) // columns)
    beside = origin if isinstance(origin, int) else xp.astype(origin, xp.int64)
    v = xp.clip(xp.abs(xp.astype(values, xp.int64) - beside), 0, most)
    after = xp.zeros(rows * columns - phase - n, dtype=xp.int64)
    matrix = xp.reshape(xp.concat([xp.zeros(phase, dtype=xp.int64), v, after]), (rows, columns))
    return xp.sum(matrix, axis=1, dtype=xp.int64), xp.sum(matrix, axis=0, dtype=xp.int64)


def class_sums(
    rows: Array, columns: Array, n: int, phase: int, base: int, classes: int, context: Array | None
) -> Array:
    """See `shrinkpoint.kernels.scale_classes.class_sums`."""
    xp = array_namespace(rows)
    both = xp.expand_dims(xp.astype(rows, xp.int64), axis=1) + xp.expand_dims(xp.astype(columns, xp.int64), axis=0)
    own = xp.reshape(xp.clip(both - base, 0, classes - 1), (-1,))[phase : phase + n]
    if context is not None:
        own = (own + classes * xp.astype(context, xp.int64)) % 256
    return xp.astype(own, xp.uint8)


def pattern_classes(patterns: Array, shift: int, table: Array) -> Array:
    """See `shrinkpoint.kernels.scale_classes.pattern_classes`."""
    xp = array_namespace(patterns)
    upper = [u >> shift for u in to_numpy(patterns).tolist()]  # torch converts no uint64 above 2**63
    return xp.take(table, xp.asarray(upper, dtype=xp.int64))
