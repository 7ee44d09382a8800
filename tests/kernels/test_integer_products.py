"""Low-rank products: exact against 64-bit NumPy, for every phase, beyond 32-bit sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.prediction import MOST_RANK, column_products, product_classes, row_products
from shrinkpoint.kernels.prediction import reference as oracle
from shrinkpoint.kernels.prediction.cpu import SHORT

if TYPE_CHECKING:
    from .conftest import BackEnd

NpArray = np.ndarray[Any, Any]
SIZES = [0, 1, 6, 7, 8, 100, 999]
COLUMNS = [1, 2, 7, 64, 1500]
ROUNDINGS = [(1, 1), (4, 6), (11, 127), (20, 2)]
"""Shift and most: from every sum beyond the last class to every sum near zero."""


def small(rng: np.random.Generator, *shape: int) -> NpArray:
    """Return integers of one byte, including the extremes."""
    return rng.integers(-128, 128, shape).astype(np.int8)


def padded(values: NpArray, columns: int, phase: int) -> NpArray:
    """Return the values within their whole int64 matrix, with zeros elsewhere."""
    whole = np.zeros(-(-(phase + values.size) // columns) * columns, np.int64)
    whole[phase : phase + values.size] = values
    return whole.reshape(-1, columns)


def classes(rows: NpArray, columns: NpArray, shift: int, most: int) -> NpArray:
    """Divide products by 2**shift, round halves upwards, and return classes."""
    both = np.floor((rows.astype(np.int64) @ columns.T.astype(np.int64)) / 2**shift + 0.5)
    found: NpArray = (np.clip(both, -most, most) + most).astype(np.uint8).reshape(-1)
    return found


@pytest.mark.parametrize("columns", COLUMNS)
def test_products_and_classes(sequential_back_end: BackEnd, fresh: np.random.Generator, columns: int) -> None:
    module, array = sequential_back_end.module("prediction"), sequential_back_end.array
    for n in SIZES:
        for phase in {0, columns // 2, columns - 1}:
            values = small(fresh, n)
            matrix = padded(values, columns, phase)
            for rank in (1, 3, MOST_RANK):
                rows, across = small(fresh, matrix.shape[0], rank), small(fresh, columns, rank)
                found = module.row_products(array(values), array(across), phase)
                right = matrix @ across.astype(np.int64)
                np.testing.assert_array_equal(sequential_back_end.numpy(found), right, strict=True)
                found = module.column_products(array(values), array(rows), columns, phase)
                right = matrix.T @ rows.astype(np.int64)
                np.testing.assert_array_equal(sequential_back_end.numpy(found), right, strict=True)
                for shift, most in ROUNDINGS:
                    found = module.product_classes(array(rows), array(across), n, phase, shift, most)
                    right = classes(rows, across, shift, most)[phase : phase + n]
                    np.testing.assert_array_equal(sequential_back_end.numpy(found), right, strict=True)


def test_every_phase(fresh: np.random.Generator) -> None:
    values, across = small(fresh, 60), small(fresh, 13, 2)
    for phase in range(13):
        matrix = padded(values, 13, phase)
        rows = small(fresh, matrix.shape[0], 2)
        np.testing.assert_array_equal(row_products(values, across, phase), matrix @ across.astype(np.int64))
        np.testing.assert_array_equal(column_products(values, rows, 13, phase), matrix.T @ rows.astype(np.int64))
        found = product_classes(rows, across, 60, phase, shift=9, most=20)
        np.testing.assert_array_equal(found, classes(rows, across, 9, 20)[phase : phase + 60])


@pytest.mark.parametrize("columns", [SHORT - 1, SHORT, SHORT + 1, 2 * SHORT + 5, 3, 1])
def test_rows_longer_than_a_part(fresh: np.random.Generator, columns: int) -> None:
    """Rows are summed in parts; each position counts once, for every phase."""
    values, across = small(fresh, 3 * SHORT + 77), small(fresh, columns, 2)
    for phase in {0, columns // 2, columns - 1}:
        matrix = padded(values, columns, phase)
        rows = small(fresh, matrix.shape[0], 2)
        np.testing.assert_array_equal(row_products(values, across, phase), matrix @ across.astype(np.int64))
        found = column_products(values, rows, columns, phase)
        np.testing.assert_array_equal(found, matrix.T @ rows.astype(np.int64))
        found = product_classes(rows, across, values.size, phase, shift=10, most=9)
        np.testing.assert_array_equal(found, classes(rows, across, 10, 9)[phase : phase + values.size])


@pytest.mark.parametrize("other", [-128, 127])
def test_sums_beyond_thirty_two_bits(other: int) -> None:
    """Sums of 2**17 products of 2**14, of both signs, exceed an int32."""
    n = 1 << 18
    values = np.full(n, -128, np.int8)
    for columns in (1, n):
        rows, across = np.full((n // columns, 1), other, np.int8), np.full((columns, 1), other, np.int8)
        assert abs(-128 * other * n) >= 2**31
        assert (row_products(values, across) == -128 * other * columns).all()
        assert (column_products(values, rows, columns) == -128 * other * (n // columns)).all()


@pytest.mark.parametrize("shift", [1, 18, 19, 20])
def test_the_largest_estimates(shift: int) -> None:
    """The largest products and steps do not overflow."""
    rows = np.asarray([[-128] * MOST_RANK, [127] * MOST_RANK], np.int8)
    found = product_classes(rows, rows, 4, shift=shift, most=127)
    np.testing.assert_array_equal(found, classes(rows, rows, shift, 127))


def test_halves_go_upwards() -> None:
    rows, columns = np.asarray([[1]], np.int8), np.arange(-6, 7, dtype=np.int8)[:, None]
    found = product_classes(rows, columns, 13, shift=2, most=9).astype(int) - 9
    assert found.tolist() == [-1, -1, -1, -1, 0, 0, 0, 0, 1, 1, 1, 1, 2]


def test_any_layout(fresh: np.random.Generator) -> None:
    """Slices, transposed and read-only arrays are accepted."""
    values, factor = small(fresh, 41)[1::2], small(fresh, 2, 10).T[::2]
    values.flags.writeable = factor.flags.writeable = False
    matrix = padded(values, 5, 0)
    np.testing.assert_array_equal(row_products(values, factor), matrix @ factor.astype(np.int64))
    rows = factor[: matrix.shape[0]]
    np.testing.assert_array_equal(column_products(values, rows, 5), matrix.T @ rows.astype(np.int64))
    found = product_classes(rows, factor, 20, shift=9, most=20)
    np.testing.assert_array_equal(found, classes(rows, factor, 9, 20))


def test_strict_arrays(fresh: np.random.Generator) -> None:
    """The oracle and the compiled kernel accept a library with only the standard's functions."""
    strict = pytest.importorskip("array_api_strict")
    values, rows, across = small(fresh, 50), small(fresh, 8, 3), small(fresh, 7, 3)
    v, r, a = (strict.asarray(x) for x in (values, rows, across))
    for found, public, right in (
        (oracle.row_products(v, a, 3), row_products(v, a, 3), row_products(values, across, 3)),
        (oracle.column_products(v, r, 7, 3), column_products(v, r, 7, 3), column_products(values, rows, 7, 3)),
        (
            oracle.product_classes(r, a, 50, 3, 9, 20),
            product_classes(r, a, 50, 3, shift=9, most=20),
            product_classes(rows, across, 50, 3, shift=9, most=20),
        ),
    ):
        for one in (found, public):
            np.testing.assert_array_equal(np.asarray(one._array), right, strict=True)


def test_bad_arguments() -> None:
    v, f, wide = np.zeros(6, np.int8), np.zeros((3, 2), np.int8), np.zeros((3, MOST_RANK + 1), np.int8)
    for call in (
        lambda: row_products(v, f, 3),
        lambda: row_products(v, f, -1),
        lambda: row_products(v, f[:0]),
        lambda: row_products(v, f[:, :0]),
        lambda: row_products(v, wide),
        lambda: row_products(v, f.reshape(-1)),
        lambda: row_products(v, f.astype(np.int16)),
        lambda: row_products(v.view(np.uint8), f),
        lambda: row_products(f, f),
        lambda: column_products(v, f[:2], 0),
        lambda: column_products(v, f[:2], 2**53),
        lambda: column_products(v, f[:2], 3, 3),
        lambda: column_products(v, f[:2], 3, 1),
        lambda: column_products(v, f, 3),
        lambda: column_products(v, f[:2, :0], 3),
        lambda: column_products(v, wide[:2], 3),
        lambda: column_products(v, f[:2].astype(np.int64), 3),
        lambda: column_products(v.astype(np.int64), f[:2], 3),
        lambda: product_classes(f[:2], f, -1, shift=1, most=1),
        lambda: product_classes(f[:2], f, 7, shift=1, most=1),
        lambda: product_classes(f, f, 6, shift=1, most=1),
        lambda: product_classes(f[:2], f, 6, 1, shift=1, most=1),
        lambda: product_classes(f[:2], f, 3, 3, shift=1, most=1),
        lambda: product_classes(f[:2], f, 6, shift=0, most=1),
        lambda: product_classes(f[:2], f, 6, shift=21, most=1),
        lambda: product_classes(f[:2], f, 6, shift=1, most=0),
        lambda: product_classes(f[:2], f, 6, shift=1, most=128),
        lambda: product_classes(f[:2, :1], f, 6, shift=1, most=1),
        lambda: product_classes(wide[:2], wide, 6, shift=1, most=1),
        lambda: product_classes(f[:2].view(np.uint8), f, 6, shift=1, most=1),
        lambda: product_classes(f[:2], f.view(np.uint8), 6, shift=1, most=1),
        lambda: product_classes(f, f[:0], 3, shift=1, most=1),
        lambda: product_classes(f[:0], f[:0], 0, shift=1, most=1),
    ):
        with pytest.raises(BadArgumentError):
            call()
