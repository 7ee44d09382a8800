"""Rate-distortion levels: the oracle, the limits lambda = 0 and infinity, the cost bound."""

from __future__ import annotations

import numpy as np
import pytest

from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.quantizer import Thresholds, assign
from shrinkpoint.kernels.rate_distortion import rate_distortion_levels, settled_bounds, unsettled

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
    rate_distortion = back_end.module("rate_distortion").rate_distortion_levels
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


@pytest.mark.parametrize("slack", [0.0, 0.05, 1e20])
@pytest.mark.parametrize("k", [0, 1, 2, 31])
def test_bounds_are_the_oracles(sequential_back_end: BackEnd, k: int, slack: float, fresh: np.random.Generator) -> None:
    _, _, _, codebook, prices = _case(fresh, 1, k, 0.3)
    codebook[k // 2 :][:1] = codebook[: k // 2][-1:].sum()  # two are equal
    codebook.sort()
    prices[k // 2] = prices[k // 2, 0]
    for unit, worth in ((1, 1), (1e-15, 1e-30), (1e15, 1e30), (1e19, 1), (1, 0)):
        codes, costs = codebook * np.float32(unit), prices * np.float32(worth)
        found = sequential_back_end.module("rate_distortion").settled_bounds(codes, costs, slack)
        np.testing.assert_array_equal(found, settled_bounds(codes, costs, slack), strict=True)
        assert not np.isnan(found).any()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize(("n", "k"), [(0, 4), (1, 1), (1023, 2), (70001, 31)])
def test_every_back_end_finds_the_same_elements(
    back_end: BackEnd, dtype: str, n: int, k: int, fresh: np.random.Generator
) -> None:
    x, levels, previous, codebook, prices = _case(fresh, n, k, 0.3)
    levels[::7] = fresh.integers(2, k + 2, levels[::7].size)  # nearest or not
    x[:2] = np.array([np.nan, np.inf])[: x[:2].size]
    importance = fresh.lognormal(0, 3, n).astype(np.float32)
    importance[::5] = 0
    own, bounds = back_end.array(x, dtype), settled_bounds(codebook, prices)
    rounded = back_end.numpy(own)
    wide = (rounded.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else rounded.astype(np.float32)
    for weights in (None, importance):
        low, low_worth, high, high_worth = np.moveaxis(bounds[previous, levels], -1, 0)
        s = np.float32(1) if weights is None else weights
        with np.errstate(invalid="ignore", over="ignore"):
            at = np.flatnonzero((s * (wide - low) < low_worth) | (s * (high - wide) < high_worth))
        given = own, back_end.array(levels), back_end.array(previous), bounds
        found = back_end.module("rate_distortion").unsettled(
            *given, None if weights is None else back_end.array(weights)
        )
        assert (found[4] is None) == (weights is None)
        expected = [at, wide[at], levels[at], previous[at], *([] if weights is None else [weights[at]])]
        for a, b in zip(found, expected, strict=False):
            np.testing.assert_array_equal(back_end.numpy(a), b, strict=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinities are part of the data
@pytest.mark.parametrize("k", [1, 2, 5, 40])
@pytest.mark.parametrize("unit", [1.0, 1e-18, 1e-6, 1e17])
def test_what_is_settled_keeps_its_level_at_all_prices_within_the_slack(
    k: int, unit: float, fresh: np.random.Generator
) -> None:
    """Values on the bounds and next to them, with codes far apart and nearly equal."""
    codebook = np.sort(fresh.normal(size=k) ** fresh.integers(1, 6)).astype(np.float32)
    codebook[k // 2 :] += codebook[k // 2] * np.float32(1e-6)
    codebook = np.sort(codebook * np.float32(unit))
    prices = (fresh.random((k + 2, k + 2)) ** 4 * (unit / k) ** 2).astype(np.float32)
    prices[::3] = 0
    least = np.float32(10.0 ** fresh.integers(-6, 3))
    for slack in (0.0, 0.1 * (unit / k) ** 2):
        bounds = settled_bounds(codebook, prices, slack)
        p, n = (a.reshape(-1) for a in np.meshgrid(np.arange(k + 2), np.arange(k + 2), indexing="ij"))
        own = codebook[np.maximum(n, 2) - 2]
        middles = [(own + codebook[np.clip(n + d, 2, k + 1) - 2]) / 2 for d in (-1, 1, 0)]
        edges = [bounds[p, n, 0] + bounds[p, n, 1] / least, bounds[p, n, 2] - bounds[p, n, 3] / least]
        drawn = own + np.float32(unit) * fresh.normal(size=own.size).astype(np.float32)
        x = np.concatenate(
            [np.nextafter(v, np.float32(way)) for v in (*middles, *edges, drawn) for way in (-9e37, v, 9e37)]
        )
        x = np.nan_to_num(x.astype(np.float32), posinf=3e38, neginf=-3e38)
        levels, previous = (np.tile(a, x.size // a.size).astype(np.uint8) for a in (n, p))
        importance = np.where(fresh.random(x.size) < 0.5, least, least * fresh.lognormal(0, 2, x.size)).astype(
            np.float32
        )
        importance[::11] = 0
        for weights in (None, importance):
            found = unsettled(x, levels, previous, bounds, weights)
            settled = np.setdiff1d(np.arange(x.size), found.at)  # none at all, where codes lie too close: see below
            for _ in range(3):
                # Where the level itself grows dearer by half the slack and others cheaper, G grows by no more than it.
                moved = prices + np.float32(0.49 * slack) * fresh.uniform(-1, 1, prices.shape).astype(np.float32)
                moved = np.maximum(moved, 0)
                chosen = rate_distortion_levels(x, levels, previous, codebook, moved, weights)
                np.testing.assert_array_equal(chosen[settled], levels[settled])


def test_most_elements_are_settled(fresh: np.random.Generator) -> None:
    """Weights that mostly stay: all of these are settled, and many of the others."""
    x = fresh.normal(size=50_000).astype(np.float32)
    codebook = np.linspace(-3, 3, 25, dtype=np.float32)
    previous = assign(x, Thresholds(), codebook)
    x += np.float32(0.03) * fresh.normal(size=x.size).astype(np.float32)
    levels = assign(x, Thresholds(), codebook)
    price = np.float32(0.001)
    prices = np.where(np.eye(27, dtype=bool), 0.2, 6.0).astype(np.float32) * price
    moved = float((levels != previous).mean())
    open_ = [unsettled(x, levels, previous, settled_bounds(codebook, prices, s)).at.size / x.size for s in (0, price)]
    chosen = rate_distortion_levels(x, levels, previous, codebook, prices)
    assert float((chosen != levels).mean()) <= open_[0] < open_[1] < 0.6 * moved


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
    bounds = settled_bounds(codebook, prices)
    with pytest.raises(BadArgumentError, match="bounds"):
        unsettled(x, levels, previous, bounds[..., :3])
    with pytest.raises(BadArgumentError, match="beyond"):
        unsettled(x, levels, np.full(10, 200, np.uint8), bounds)
    with pytest.raises(BadArgumentError, match="beyond"):
        unsettled(x, np.full(10, 6, np.uint8), previous, bounds)
    with pytest.raises(BadArgumentError, match="ascending"):
        settled_bounds(codebook[::-1].copy(), prices)
    with pytest.raises(BadArgumentError, match="price"):
        settled_bounds(codebook, -prices)


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_float32_are_infinite_without_a_warning() -> None:
    x, codebook, prices = np.array([1e300, 0.4]), np.float32([0.0, 1.0]), np.zeros((4, 4), np.float32)
    levels = np.array([1, 2], np.uint8)
    with np.errstate(all="warn"):
        assert rate_distortion_levels(x, levels, levels, codebook, prices).tolist() == [1, 2]
        assert unsettled(x, levels, levels, settled_bounds(codebook, prices)).at.size == 0
