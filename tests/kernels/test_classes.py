"""Row, column and pattern classes: exact against the definition at every place, for every phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shrinkpoint.kernels.classes import class_sums, pattern_classes, row_column_sums
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.reference import classes as oracle

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 6, 7, 8, 100, 999]
COLUMNS = [1, 2, 7, 64, 1500]


@pytest.mark.parametrize("columns", COLUMNS)
def test_sums_and_classes(sequential_back_end: BackEnd, fresh: np.random.Generator, columns: int) -> None:
    module = sequential_back_end.module("classes")
    for n in SIZES:
        for phase in {0, columns // 2, columns - 1}:
            values = fresh.integers(0, 256, n).astype(np.uint8)
            row, column = np.divmod(phase + np.arange(n), columns)
            count = -(-(phase + n) // columns)
            rows, sums = module.row_column_sums(sequential_back_end.array(values), columns, phase)
            expected = np.bincount(row, values, count), np.bincount(column, values, columns)
            for found, right in zip((rows, sums), expected, strict=True):
                np.testing.assert_array_equal(sequential_back_end.numpy(found), right.astype(np.int64), strict=True)
            r, c = (fresh.integers(0, 256, k).astype(np.uint8) for k in (count, columns))
            classes = module.class_sums(sequential_back_end.array(r), sequential_back_end.array(c), n, phase)
            right = np.minimum(r.astype(int)[row] + c[column], 255).astype(np.uint8)
            np.testing.assert_array_equal(sequential_back_end.numpy(classes), right, strict=True)


def test_sums_beyond_thirty_two_bits() -> None:
    """More rows, and longer ones, than are summed in 32 bits at once."""
    values = np.full(200_000, 255, np.uint8)
    for columns in (1, 2, 100_000, 200_000):
        rows, sums = row_column_sums(values, columns)
        assert (rows == 255 * columns).all()
        assert (sums == 255 * (200_000 // columns)).all()


@pytest.mark.parametrize("shift", [0, 7, 8, 31, 52])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_pattern_classes(sequential_back_end: BackEnd, fresh: np.random.Generator, dtype: str, shift: int) -> None:
    width = int(dtype[4:])
    if not 0 < width - shift <= 24:
        shift = width - 9
    values = fresh.integers(0, 1 << width, 300, dtype=np.uint64).astype(dtype)
    table = fresh.integers(0, 256, 1 << (width - shift)).astype(np.uint8)
    found = sequential_back_end.module("classes").pattern_classes(
        sequential_back_end.array(values), shift, sequential_back_end.array(table)
    )
    right = table[[v >> shift for v in values.tolist()]]
    np.testing.assert_array_equal(sequential_back_end.numpy(found), right, strict=True)


def test_oracle_on_strict(fresh: np.random.Generator) -> None:
    strict = pytest.importorskip("array_api_strict")
    values = fresh.integers(0, 256, 50).astype(np.uint8)
    rows, sums = oracle.row_column_sums(strict.asarray(values), 7, 3)
    assert int(strict.sum(rows)) == int(strict.sum(sums)) == int(values.sum())
    both = oracle.class_sums(strict.asarray(values[:8]), strict.asarray(values[:7]), 50, 3)
    assert np.asarray(both._array).tolist() == class_sums(values[:8], values[:7], 50, 3).tolist()


def test_bad_arguments() -> None:
    v = np.zeros(6, np.uint8)
    for call in (
        lambda: row_column_sums(v, 0),
        lambda: row_column_sums(v, 3, 3),
        lambda: row_column_sums(v, 3, -1),
        lambda: row_column_sums(v.astype(np.int8), 3),
        lambda: class_sums(v[:2], v[:0], 0),
        lambda: class_sums(v[:2], v[:3], 7),
        lambda: class_sums(v[:3], v[:3], 6),
        lambda: class_sums(v[:2], v[:3], 6, 1),
        lambda: class_sums(v[:2], v[:3], -1),
        lambda: pattern_classes(v.view(np.uint16), 15, v[:1]),
        lambda: pattern_classes(v.view(np.uint16), 16, v[:1]),
        lambda: pattern_classes(np.zeros(2, np.uint64), 39, v),
        lambda: pattern_classes(v, 1, v),
    ):
        with pytest.raises(BadArgumentError):
            call()
