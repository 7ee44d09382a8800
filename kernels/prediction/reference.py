"""Oracle of the low-rank products: a padded matrix and sums over a third dimension."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace

from . import TOP

if TYPE_CHECKING:
    from ..backend.arrays import Array

NpArray = np.ndarray[Any, Any]


def _matrix(xp: Any, values: Array, columns: int, phase: int) -> Array:
    """Arrange a part of a matrix in rows, with zeros where it has no values; int64."""
    n = values.shape[0]
    after = xp.zeros(-(phase + n) % columns, dtype=xp.int64)
    padded = xp.concat([xp.zeros(phase, dtype=xp.int64), xp.astype(values, xp.int64), after])
    return xp.reshape(padded, (-(-(phase + n) // columns), columns))


def row_products(values: Array, factor: Array, phase: int) -> Array:
    """See `shrinkpoint.kernels.prediction.row_products`."""
    xp = array_namespace(values)
    matrix = _matrix(xp, values, factor.shape[0], phase)
    products = xp.expand_dims(matrix, axis=2) * xp.expand_dims(xp.astype(factor, xp.int64), axis=0)
    return xp.sum(products, axis=1, dtype=xp.int64)


def column_products(values: Array, factor: Array, columns: int, phase: int) -> Array:
    """See `shrinkpoint.kernels.prediction.column_products`."""
    xp = array_namespace(values)
    matrix = _matrix(xp, values, columns, phase)
    products = xp.expand_dims(matrix, axis=2) * xp.expand_dims(xp.astype(factor, xp.int64), axis=1)
    return xp.sum(products, axis=0, dtype=xp.int64)


def product_classes(rows: Array, columns: Array, n: int, phase: int, shift: int, most: int) -> Array:
    """See `shrinkpoint.kernels.prediction.product_classes`."""
    xp = array_namespace(rows)
    a, b = (xp.astype(x, xp.int64) for x in (rows, columns))
    products = xp.sum(xp.expand_dims(a, axis=1) * xp.expand_dims(b, axis=0), axis=2, dtype=xp.int64)
    classes = xp.clip((products + (1 << (shift - 1))) // (1 << shift), -most, most) + most
    return xp.astype(xp.reshape(classes, (-1,))[phase : phase + n], xp.uint8)


def orthogonal_directions(vectors: Array) -> Array:
    """See `shrinkpoint.kernels.prediction.orthogonal_directions`."""
    xp = array_namespace(vectors)
    shape = tuple(vectors.shape)
    whole = np.array([[[int(v) for v in line] for line in own] for own in vectors], np.int64).reshape(shape)
    sets = [_orthogonal(own) for own in whole]
    return xp.asarray(np.stack(sets) if sets else np.empty(shape, np.int8))


def _orthogonal(vectors: NpArray) -> NpArray:
    shift = max(0, int(np.abs(vectors).max(initial=0)).bit_length() - 15)
    x = vectors >> shift
    inverse = _inverse_root((x.T @ x).tolist())
    found = np.zeros(x.shape, np.int8)
    for k, own in enumerate(inverse):
        if own is None:
            continue
        total = x[:, 0] * own[0]
        for j in range(1, k + 1):
            total += x[:, j] * own[j]
        largest = float(np.abs(total).max())
        if largest > 0:
            found[:, k] = np.rint(total * (TOP / largest))
    return found


def _inverse_root(gram: list[list[int]]) -> list[list[float] | None]:
    """Return the combinations that make the vectors of a Gram matrix orthogonal, one by one.

    A vector that depends linearly on those before it gives None.

    Cholesky's factorization of the Gram matrix and the inverse of its triangle, in plain floats.
    """
    rank = len(gram)
    found: list[list[float] | None] = []
    for k in range(rank):
        row = []
        for j in range(k):
            own = found[j]
            row.append(0.0 if own is None else _total(own[i] * gram[i][k] for i in range(j + 1)))
        left = gram[k][k] - _total(a * a for a in row)
        if not left > 1e-6 * gram[k][k]:
            found.append(None)
            continue
        combined = [0.0] * (k + 1)
        combined[k] = 1.0
        for j in range(k):
            own = found[j]
            if own is not None:
                for i in range(j + 1):
                    combined[i] -= row[j] * own[i]
        length = math.sqrt(left)
        found.append([c / length for c in combined])
    return found


def _total(terms: Iterable[float]) -> float:
    """Return the sum, rounded after each term as `sum` does up to Python 3.11."""
    return reduce(add, terms, 0.0)
