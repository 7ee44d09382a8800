"""Residuals of a rank-one estimate: the oracle, the bounds, elements without a cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shrinkpoint.kernels import scales as rank_one
from shrinkpoint.kernels.errors import BadArgumentError

from .conftest import BackEnd
from .patterns import over_all_octaves

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the data overflow on purpose


@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (1, 1), (7, 31), (5, 32), (3, 1000), (1000, 1), (64, 129)])
@pytest.mark.parametrize("finite", [True, False])
def test_factor_sums_are_those_of_what_is_finite(
    back_end: BackEnd, rows: int, columns: int, finite: bool, fresh: np.random.Generator
) -> None:
    x = fresh.normal(size=rows * columns).astype(np.float32) if finite else over_all_octaves(fresh, rows * columns)
    by_row, by_column = back_end.module("scales").factor_sums(back_end.array(x), columns)
    wide = np.where(np.isfinite(x), x, 0).astype(np.float64).reshape(rows, columns)
    for got, axis in ((by_row, 1), (by_column, 0)):
        assert isinstance(got, np.ndarray)
        # Each sum to the rounding of its largest terms.
        assert (np.abs(got - wide.sum(axis=axis)) <= 1e-12 * np.abs(wide).sum(axis=axis)).all()


def test_factor_sums_of_no_whole_rows() -> None:
    with pytest.raises(BadArgumentError, match="5 elements are not a whole number of rows of 2"):
        rank_one.factor_sums(np.zeros(5, np.float32), 2)


@pytest.mark.parametrize(("rows", "columns", "start"), [(1, 1, 0), (7, 13, 5), (3, 40000, 20000), (300, 1, 299)])
@pytest.mark.parametrize("eighths", [1, 2, 8, 24, 128])
def test_residual_agrees_with_the_oracle(
    back_end: BackEnd, rows: int, columns: int, start: int, eighths: int, fresh: np.random.Generator
) -> None:
    n = min(rows * columns - start, 50000)
    x = np.abs(over_all_octaves(fresh, n))
    x[: n // 3] *= -1
    r, c = np.abs(over_all_octaves(fresh, rows)), np.abs(over_all_octaves(fresh, columns))
    at = np.arange(start, start + n)
    with np.errstate(all="ignore"):
        estimate = (r[at // columns] * c[at % columns]).astype(np.float32)
        near = np.exp2(fresh.normal(size=n)).astype(np.float32) * estimate
        x = np.where(fresh.random(n) < 0.5, near, x)  # half of them within reach of fine cells
        ratio = x / estimate
    module, whole = back_end.module("scales"), np.array([[rows, columns]])
    symbols, sums, counts = module.residual_symbols(back_end.array(x), r, c, whole, start, eighths, None)
    patterns = [y.view(np.uint32).astype(np.int64) for y in (x, estimate, ratio)]
    distance = patterns[2] - (127 << 23)
    cell = eighths << 20
    k = (distance + cell // 2) // cell
    fits = np.all([(p >= 1 << 23) & (p < 255 << 23) for p in patterns], axis=0) & (np.abs(k) <= 126)
    expected = np.where(patterns[0] & 0x7FFFFFFF == 0, 0, np.where(fits, 128 + k, 1)).astype(np.uint8)
    np.testing.assert_array_equal(back_end.numpy(symbols), expected)
    np.testing.assert_array_equal(counts, np.bincount(expected, minlength=256))

    def sums_of(symbols: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with np.errstate(all="ignore"):
            roots = np.rint(np.sqrt(rank_one.cell_centers(eighths)[symbols] / ratio) * np.float32(2**15))
        return np.bincount(symbols, np.where(symbols >= 2, roots, 0).astype(np.float64), 256)

    np.testing.assert_array_equal(sums, sums_of(expected))
    # Symbols of an earlier time, most of them near: kept up to a quarter of a cell beyond their cell.
    previous = np.where(fresh.random(n) < 0.8, expected + fresh.integers(-1, 2, n), fresh.integers(0, 256, n))
    previous = previous.astype(np.uint8)
    beyond = np.abs(distance - (previous.astype(np.int64) - 128) * cell) - cell // 2
    settled = np.where((expected >= 2) & (previous >= 2) & (beyond <= cell // 4), previous, expected)
    again, moved, _ = module.residual_symbols(back_end.array(x), r, c, whole, start, eighths, back_end.array(previous))
    np.testing.assert_array_equal(back_end.numpy(again), settled)
    np.testing.assert_array_equal(moved, sums_of(settled))
    table = fresh.random(256).astype(np.float32)
    with np.errstate(all="ignore"):
        values = back_end.numpy(module.residual_values(symbols, r, c, whole, start, table))
        np.testing.assert_array_equal(values, estimate * table[expected])


@pytest.mark.parametrize("octaves", [0.125, 0.25, 0.5, 1, 3, 16])
def test_a_residual_is_within_its_cell(octaves: float, fresh: np.random.Generator) -> None:
    x = np.exp(fresh.normal(size=40 * 50) * 2).astype(np.float32)
    r, c = fresh.random(40).astype(np.float32) + 0.1, fresh.random(50).astype(np.float32) + 0.1
    symbols, sums, counts = rank_one.residual_symbols(x, r, c, 0, octaves)
    reached = symbols >= rank_one.FIRST
    assert reached.mean() > 0.9
    restored = rank_one.residual_values(symbols, r, c, 0, rank_one.residual_factors(sums, counts, octaves))[reached]
    x = x[reached]
    # A cell is so wide in the pattern of the ratio: a logarithm to within 0.09, and at most 1.45 times as steep.
    assert (np.abs(np.log2(restored / x)) <= min(1.45 * octaves, octaves + 0.18)).all()
    # An update m / sqrt(v) is neither longer nor shorter on average.
    root = np.sqrt((r[:, None] * c).reshape(-1)[reached].astype(np.float64))
    assert (root / np.sqrt(restored)).mean() == pytest.approx((root / np.sqrt(x)).mean(), rel=1e-4)


def test_out_of_range() -> None:
    x, r, c = np.ones(2000, np.float32), np.ones(40, np.float32), np.ones(50, np.float32)
    for octaves in (0, 0.0625, 0.3, 16.125, 17):
        with pytest.raises(BadArgumentError, match="octaves"):
            rank_one.residual_symbols(x, r, c, 0, octaves)
    with pytest.raises(BadArgumentError, match="within"):
        rank_one.residual_symbols(x, r, c, 1, 3)
    with pytest.raises(BadArgumentError, match="previous is uint8"):
        rank_one.residual_symbols(x, r, c, 0, 3, np.zeros(1999, np.uint8))
