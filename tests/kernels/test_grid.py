"""Grids: the oracle, the bounds, the escapes."""

from __future__ import annotations

import numpy as np
import pytest

from shrinkpoint.kernels import moment_grid as grid
from shrinkpoint.kernels.errors import BadArgumentError

from .conftest import BackEnd
from .patterns import over_all_octaves

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the data overflow on purpose
SIZES = [0, 1, 5, 1000, 40000]


@pytest.mark.parametrize("n", SIZES)
def test_grid_agrees_with_the_oracle(back_end: BackEnd, n: int, fresh: np.random.Generator) -> None:
    x, square = over_all_octaves(fresh, n), np.abs(over_all_octaves(fresh, n))
    square[~np.isfinite(square)] = 0
    module = back_end.module("moment_grid")
    symbols, sums, counts = module.grid_symbols(back_end.array(x), back_end.array(square), 0.5)
    with np.errstate(all="ignore"):
        scale = np.sqrt(square)
        u = np.where(scale > 0, x / scale, np.where(x == 0, 0, np.inf)).astype(np.float32)
        q = np.rint(u / np.float32(0.5))
    on = np.abs(q) <= grid.FARTHEST
    k = np.where(on, q, 0).astype(int)
    expected = np.where(on, 1 + 2 * np.abs(k) - (k < 0), 0).astype(np.uint8)
    np.testing.assert_array_equal(back_end.numpy(symbols), expected)
    np.testing.assert_array_equal(counts, np.bincount(expected, minlength=256))
    for s in np.unique(expected[expected > 0]):
        assert sums[s] == pytest.approx(u[expected == s].astype(np.float64).sum(), rel=1e-9, abs=1e-12)
    assert sums[0] == 0
    table = fresh.normal(size=256).astype(np.float32)
    values = back_end.numpy(module.grid_values(symbols, back_end.array(square), table))
    np.testing.assert_array_equal(values, table[expected] * scale)
    error, norm = module.grid_error(back_end.array(x), back_end.array(square), symbols, table)
    with np.errstate(all="ignore"):
        difference = np.where(on, table[expected] * scale - x.astype(np.float64), 0)
    assert error == pytest.approx((difference**2).sum(), rel=1e-12)
    assert norm == pytest.approx((np.where(on, x, 0).astype(np.float64) ** 2).sum(), rel=1e-12)


def test_a_grid_point_is_within_half_a_step(fresh: np.random.Generator) -> None:
    x = np.clip(fresh.normal(size=10000), -3, 3).astype(np.float32)  # no more than 127 steps out
    square = (fresh.random(10000) + 0.01).astype(np.float32)
    table = np.zeros(256, np.float32)
    for s in range(1, 256):
        table[s] = 0.25 * (s // 2) * (-1 if s % 2 == 0 else 1)
    symbols, _, _ = grid.grid_symbols(x, square, 0.25)
    restored = grid.grid_values(symbols, square, table)
    assert (np.abs(restored - x) <= 0.1251 * np.sqrt(square)).all()
    with pytest.raises(BadArgumentError, match="step"):
        grid.grid_symbols(x, square, 0.0)
    with pytest.raises(BadArgumentError, match="square"):
        grid.grid_symbols(x, square[:5], 0.5)
