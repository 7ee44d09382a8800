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
CONTEXTS = [(0, 256, 1), (3, 16, 16), (250, 5, 256), (255, 1, 256)]
"""Base, classes, and other contexts: up to where the sums of both wrap around."""


@pytest.mark.parametrize("columns", COLUMNS)
def test_sums_and_classes(sequential_back_end: BackEnd, fresh: np.random.Generator, columns: int) -> None:
    module = sequential_back_end.module("scales")
    for n in SIZES:
        for phase in {0, columns // 2, columns - 1}:
            values = fresh.integers(0, 256, n).astype(np.uint8)
            row, column = np.divmod(phase + np.arange(n), columns)
            count = -(-(phase + n) // columns)
            beside = fresh.integers(0, 256, n).astype(np.uint8)
            for origin, most in ((0, 255), (100, 255), (255, 8), (beside, 255), (beside, 1), (beside, 0)):
                distance = np.minimum(np.abs(values.astype(int) - origin), most)
                given = origin if isinstance(origin, int) else sequential_back_end.array(origin)
                sums = module.row_column_sums(sequential_back_end.array(values), columns, phase, given, most)
                expected = np.bincount(row, distance, count), np.bincount(column, distance, columns)
                for found, right in zip(sums, expected, strict=True):
                    np.testing.assert_array_equal(sequential_back_end.numpy(found), right.astype(np.int64), strict=True)
            r, c = (fresh.integers(0, 256, k).astype(np.uint8) for k in (count, columns))
            both = r.astype(int)[row] + c[column]
            for base, classes, contexts in CONTEXTS:
                context = fresh.integers(0, contexts, n)
                beside = sequential_back_end.array(context.astype(np.uint8))
                own = np.clip(both - base, 0, classes - 1)
                for given, right in ((None, own), (beside, own + classes * context)):
                    found = module.class_sums(
                        sequential_back_end.array(r), sequential_back_end.array(c), n, phase, base, classes, given
                    )
                    wrapped = (right % 256).astype(np.uint8)
                    np.testing.assert_array_equal(sequential_back_end.numpy(found), wrapped, strict=True)


def test_sums_beyond_thirty_two_bits() -> None:
    """Sums beyond 32 bits are right for long and for many rows."""
    values = np.full(200_000, 255, np.uint8)
    for columns in (1, 2, 100_000, 200_000):
        for origin in (0, np.zeros_like(values)):
            rows, sums = row_column_sums(values, columns, origin=origin)
            assert (rows == 255 * columns).all()
            assert (sums == 255 * (200_000 // columns)).all()


@pytest.mark.parametrize("columns", [SHORT - 1, SHORT, SHORT + 1, 2 * SHORT + 5, 3])
def test_rows_longer_than_a_part(fresh: np.random.Generator, columns: int) -> None:
    """Rows are summed in parts; each position counts once, for every phase."""
    n = 3 * SHORT + 77
    values, beside = fresh.integers(0, 256, (2, n)).astype(np.uint8)
    for phase in (0, columns - 1, columns // 2):
        row, column = np.divmod(phase + np.arange(n), columns)
        for origin in (7, beside):
            distance = np.minimum(np.abs(values.astype(int) - origin), 100)
            rows, sums = row_column_sums(values, columns, phase, origin=origin, most=100)
            np.testing.assert_array_equal(rows, np.bincount(row, distance))
            np.testing.assert_array_equal(sums, np.bincount(column, distance, columns))


def test_an_origin_of_any_integer_type() -> None:
    values = np.arange(6, dtype=np.uint8)
    assert row_column_sums(values, 3, origin=np.int64(4))[0].tolist() == [9, 2]


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
    beside = values[::-1].copy()
    for origin, given in ((0, 0), (99, 99), (beside, strict.asarray(beside))):
        found = oracle.row_column_sums(strict.asarray(values), 7, 3, given, 90)
        for one, right in zip(found, row_column_sums(values, 7, 3, origin=origin, most=90), strict=True):
            assert np.asarray(one._array).tolist() == right.tolist()
    for context, given in ((None, None), (beside, strict.asarray(beside))):
        both = oracle.class_sums(strict.asarray(values[:8]), strict.asarray(values[:7]), 50, 3, 60, 9, given)
        right = class_sums(values[:8], values[:7], 50, 3, base=60, classes=9, context=context)
        assert np.asarray(both._array).tolist() == right.tolist()


def test_bad_arguments() -> None:
    v = np.zeros(6, np.uint8)
    for call in (
        lambda: row_column_sums(v, 0),
        lambda: row_column_sums(v, 3, 3),
        lambda: row_column_sums(v, 3, -1),
        lambda: row_column_sums(v.astype(np.int8), 3),
        lambda: row_column_sums(v, 3, origin=-1),
        lambda: row_column_sums(v, 3, origin=256),
        lambda: row_column_sums(v, 3, origin=v[:5]),
        lambda: row_column_sums(v, 3, origin=v.astype(np.int64)),
        lambda: row_column_sums(v, 3, origin=v.reshape(2, 3)),
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
        lambda: class_sums(v[:2], v[:3], 6, context=v[:5]),
        lambda: class_sums(v[:2], v[:3], 6, context=v.astype(np.int64)),
        lambda: pattern_classes(v.view(np.uint16), 15, v[:1]),
        lambda: pattern_classes(v.view(np.uint16), 16, v[:1]),
        lambda: pattern_classes(np.zeros(2, np.uint64), 39, v),
        lambda: pattern_classes(v, 1, v),
    ):
        with pytest.raises(BadArgumentError):
            call()
