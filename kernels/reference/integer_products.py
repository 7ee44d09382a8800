"""Oracle of the low-rank products: a padded matrix and sums over a third dimension."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from array_api_compat import array_namespace

if TYPE_CHECKING:
    from ..arrays import Array


def _matrix(xp: Any, values: Array, columns: int, phase: int) -> Array:
    """Arrange a part of a matrix in rows, with zeros where it has no values; int64."""
    n = values.shape[0]
    after = xp.zeros(-(phase + n) % columns, dtype=xp.int64)
    padded = xp.concat([xp.zeros(phase, dtype=xp.int64), xp.astype(values, xp.int64), after])
    return xp.reshape(padded, (-(-(phase + n) // columns), columns))


def row_products(values: Array, factor: Array, phase: int) -> Array:
    """See `shrinkpoint.kernels.integer_products.row_products`."""
    xp = array_namespace(values)
    matrix = _matrix(xp, values, factor.shape[0], phase)
    products = xp.expand_dims(matrix, axis=2) * xp.expand_dims(xp.astype(factor, xp.int64), axis=0)
    return xp.sum(products, axis=1, dtype=xp.int64)


def column_products(values: Array, factor: Array, columns: int, phase: int) -> Array:
    """See `shrinkpoint.kernels.integer_products.column_products`."""
    xp = array_namespace(values)
    matrix = _matrix(xp, values, columns, phase)
    products = xp.expand_dims(matrix, axis=2) * xp.expand_dims(xp.astype(factor, xp.int64), axis=1)
    return xp.sum(products, axis=0, dtype=xp.int64)


def product_classes(rows: Array, columns: Array, n: int, phase: int, shift: int, most: int) -> Array:
    """See `shrinkpoint.kernels.integer_products.product_classes`."""
    xp = array_namespace(rows)
    a, b = (xp.astype(x, xp.int64) for x in (rows, columns))
    products = xp.sum(xp.expand_dims(a, axis=1) * xp.expand_dims(b, axis=0), axis=2, dtype=xp.int64)
    classes = xp.clip((products + (1 << (shift - 1))) // (1 << shift), -most, most) + most
    return xp.astype(xp.reshape(classes, (-1,))[phase : phase + n], xp.uint8)
