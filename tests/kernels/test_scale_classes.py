"""Row, column and pattern classes: exact against the definition for every phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.scales import class_sums, pattern_classes, row_column_sums
from shrinkpoint.kernels.scales import reference as oracle
from shrinkpoint.kernels.scales.cpu import SHORT

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 6, 7, 8, 100, 999]
COLUMNS = [1, 2, 7, 64, 1500]
CLASSES = [(0, 256), (3, 16), (250, 5), (255, 1)]
"""Base and classes."""


@pytest.mark.parametrize("columns", COLUMNS)
def test_sums_and_classes(sequential_back_end: BackEnd, fresh: np.random.Generator, columns: int) -> None:
    module = sequential_back_end.module("scales")
    for n in SIZES:
        for phase in {0, columns // 2, columns - 1}:
            values = fresh.integers(0, 256, n).astype(np.uint8)
            row, column = np.divmod(phase + np.arange(n), columns)
            count = -(-(phase + n) // columns)
            for most in (255, 8, 1, 0):
                clipped = np.minimum(values, most)
                sums = module.row_column_sums(sequential_back_end.array(values), columns, phase, most)
                expected = np.bincount(row, clipped, count), np.bincount(column, clipped, columns)
                for found, right in zip(sums, expected, strict=True):
                    np.testing.assert_array_equal(sequential_back_end.numpy(found), right.astype(np.int64), strict=True)
            r, c = (fresh.integers(0, 256, k).astype(np.uint8) for k in (count, columns))
            both = r.astype(int)[row] + c[column]
            for base, classes in CLASSES:
                right = np.clip(both - base, 0, classes - 1).astype(np.uint8)
                found = module.class_sums(
                    sequential_back_end.array(r), sequential_back_end.array(c), n, phase, base, classes
                )
                np.testing.assert_array_equal(sequential_back_end.numpy(found), right, strict=True)


def test_sums_beyond_thirty_two_bits() -> None:
    """Sums beyond 32 bits are right for long and for many rows."""
    values = np.full(200_000, 255, np.uint8)
    for columns in (1, 2, 100_000, 200_000):
        rows, sums = row_column_sums(values, columns)
        assert (rows == 255 * columns).all()
        assert (sums == 255 * (200_000 // columns)).all()


@pytest.mark.parametrize("columns", [SHORT - 1, SHORT, SHORT + 1, 2 * SHORT + 5, 3])
def test_rows_longer_than_a_part(fresh: np.random.Generator, columns: int) -> None:
    """Rows are summed in parts; each position counts once, for every phase."""
    n = 3 * SHORT + 77
    values = fresh.integers(0, 256, n).astype(np.uint8)
    for phase in (0, columns - 1, columns // 2):
        row, column = np.divmod(phase + np.arange(n), columns)
        clipped = np.minimum(values, 100)
        rows, sums = row_column_sums(values, columns, phase, most=100)
        np.testing.assert_array_equal(rows, np.bincount(row, clipped))
        np.testing.assert_array_equal(sums, np.bincount(column, clipped, columns))


@pytest.mark.parametrize("shift", [0, 7, 8, 31, 52])
@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_pattern_classes(sequential_back_end: BackEnd, fresh: np.random.Generator, dtype: str, shift: int) -> None:
    width = int(dtype[4:])
    if not 0 < width - shift <= 24:
        shift = width - 9
    values = fresh.integers(0, 1 << width, 300, dtype=np.uint64).astype(dtype)
    table = fresh.integers(0, 256, 1 << (width - shift)).astype(np.uint8)
    found = sequential_back_end.module("scales").pattern_classes(
        sequential_back_end.array(values), shift, sequential_back_end.array(table)
    )
    right = table[[v >> shift for v in values.tolist()]]
    np.testing.assert_array_equal(sequential_back_end.numpy(found), right, strict=True)


def test_oracle_on_strict(fresh: np.random.Generator) -> None:
    strict = pytest.importorskip("array_api_strict")
    values = fresh.integers(0, 256, 50).astype(np.uint8)
    found = oracle.row_column_sums(strict.asarray(values), 7, 3, 90)
    for one, right in zip(found, row_column_sums(values, 7, 3, most=90), strict=True):
        assert np.asarray(one._array).tolist() == right.tolist()
    both = oracle.class_sums(strict.asarray(values[:8]), strict.asarray(values[:7]), 50, 3, 60, 9)
    assert np.asarray(both._array).tolist() == class_sums(values[:8], values[:7], 50, 3, base=60, classes=9).tolist()


def test_bad_arguments() -> None:
    v = np.zeros(6, np.uint8)
    for call in (
        lambda: row_column_sums(v, 0),
        lambda: row_column_sums(v, 3, 3),
        lambda: row_column_sums(v, 3, -1),
        lambda: row_column_sums(v.astype(np.int8), 3),
        lambda: row_column_sums(v, 3, most=-1),
        lambda: row_column_sums(v, 3, most=256),
        lambda: class_sums(v[:2], v[:0], 0),
        lambda: class_sums(v[:2], v[:3], 7),
        lambda: class_sums(v[:3], v[:3], 6),
        lambda: class_sums(v[:2], v[:3], 6, 1),
        lambda: class_sums(v[:2], v[:3], -1),
        lambda: class_sums(v[:2], v[:3], 6, base=-1),
        lambda: class_sums(v[:2], v[:3], 6, base=256),
        lambda: class_sums(v[:2], v[:3], 6, classes=0),
        lambda: class_sums(v[:2], v[:3], 6, classes=257),
        lambda: pattern_classes(v.view(np.uint16), 15, v[:1]),
        lambda: pattern_classes(v.view(np.uint16), 16, v[:1]),
        lambda: pattern_classes(np.zeros(2, np.uint64), 39, v),
        lambda: pattern_classes(v, 1, v),
    ):
        with pytest.raises(BadArgumentError):
            call()
