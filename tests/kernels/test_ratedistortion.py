"""Rate-distortion levels: the oracle, the limits lambda = 0 and infinity, and the bound on what it may cost."""

from __future__ import annotations

import numpy as np
import pytest

from shrinkpoint.kernels.assign import Thresholds, assign
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.ratedistortion import rate_distortion_levels

from .conftest import BackEnd


def _case(rng: np.random.Generator, n: int, k: int, price: float) -> tuple[np.ndarray, ...]:
    x = rng.normal(size=n).astype(np.float32)
    codebook = np.sort(rng.normal(size=k)).astype(np.float32)
    levels = assign(x, Thresholds(protect_magnitude=2.0, prune_magnitude=0.1), codebook)
    previous = rng.integers(0, k + 2, n).astype(np.uint8)
    prices = (rng.random((k + 2, k + 2)) * price).astype(np.float32)
    return x, levels, previous, codebook, prices


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(0, 4), (1, 1), (1023, 2), (1025, 31), (4096, 254)])
def test_agrees_with_the_oracle(back_end: BackEnd, dtype: str, n: int, k: int, fresh: np.random.Generator) -> None:
    x, levels, previous, codebook, prices = _case(fresh, n, k, 0.3)
    own = back_end.array(x, dtype)
    rounded = back_end.numpy(own)
    wide = (rounded.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else rounded.astype(np.float32)
    rate_distortion = back_end.module("ratedistortion").rate_distortion_levels
    given = own, back_end.array(levels), back_end.array(previous), codebook, prices
    expected = _slow(wide, levels, previous, codebook, prices, np.ones(n, np.float32))
    np.testing.assert_array_equal(back_end.numpy(rate_distortion(*given)), expected)
    importance = fresh.lognormal(0, 3, n).astype(np.float32)
    importance[::5] = 0
    weighted = back_end.numpy(rate_distortion(*given, back_end.array(importance)))
    np.testing.assert_array_equal(weighted, _slow(wide, levels, previous, codebook, prices, importance))


def _slow(
    x: np.ndarray,
    levels: np.ndarray,
    previous: np.ndarray,
    codebook: np.ndarray,
    prices: np.ndarray,
    importance: np.ndarray,
) -> np.ndarray:
    out = levels.copy()
    top = codebook.size + 1
    for i, (v, level, p) in enumerate(zip(x, levels.tolist(), previous.tolist(), strict=True)):
        if level < 2:
            continue
        candidates = [level, max(level - 1, 2), min(level + 1, top), min(p, top) if p >= 2 else level]
        costs = [importance[i] * np.float32(np.float32(v - codebook[c - 2]) ** 2) + prices[p, c] for c in candidates]
        out[i] = candidates[int(np.argmin(costs))]
    return out


def test_price_zero_changes_nothing_and_a_high_price_keeps_everything(fresh: np.random.Generator) -> None:
    x, levels, previous, codebook, _ = _case(fresh, 5000, 16, 0.0)
    free = np.zeros((18, 18), np.float32)
    np.testing.assert_array_equal(rate_distortion_levels(x, levels, previous, codebook, free), levels)
    dear = np.full((18, 18), 1e6, np.float32)
    np.fill_diagonal(dear, 0.0)
    kept = rate_distortion_levels(x, levels, previous, codebook, dear)
    quantized = (levels >= 2) & (previous >= 2)
    np.testing.assert_array_equal(kept[quantized], previous[quantized])
    np.testing.assert_array_equal(kept[levels < 2], levels[levels < 2])


def test_the_distortion_it_adds_is_at_most_the_price_it_saves(fresh: np.random.Generator) -> None:
    x, levels, previous, codebook, prices = _case(fresh, 20000, 16, 0.2)
    chosen = rate_distortion_levels(x, levels, previous, codebook, prices)
    at = np.flatnonzero(levels >= 2)

    def cost(of: np.ndarray) -> np.ndarray:
        d = x[at] - codebook[of[at].astype(int) - 2]
        return d * d + prices[previous[at], of[at]]

    assert (cost(chosen) <= cost(levels)).all()
    assert (chosen != levels).any()


def test_bad_arguments(fresh: np.random.Generator) -> None:
    x, levels, previous, codebook, prices = _case(fresh, 10, 4, 0.1)
    with pytest.raises(BadArgumentError, match="prices"):
        rate_distortion_levels(x, levels, previous, codebook, prices[:, :3])
    with pytest.raises(BadArgumentError, match="importance"):
        rate_distortion_levels(x, levels, previous, codebook, prices, x[:3])
    with pytest.raises(BadArgumentError, match="previous"):
        rate_distortion_levels(x, levels, previous[:3], codebook, prices)
    with pytest.raises(BadArgumentError, match="beyond"):
        rate_distortion_levels(x, levels, np.full(10, 200, np.uint8), codebook, prices)
