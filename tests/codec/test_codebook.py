"""Uniform codebooks: as accurate as exact ones with less entropy; reuse of the parent's."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec.weights.codebook import MOST, Fit, fit, multiples, spacing, to_8_bits
from shrinkpoint.kernels.histogram import log_histogram

from .common import through_bytes


def _fit(x: np.ndarray, solver: str, bins: int, parent: np.ndarray | None = None) -> tuple[np.ndarray, str]:
    return fit(log_histogram(x, 6, signed=True), Fit(bins, 1.0, solver, "frozen", 1.05, 0), parent)


def _coded(x: np.ndarray, codebook: np.ndarray) -> tuple[float, float]:
    """Mean squared error and entropy of the nearest levels."""
    middle = (codebook[1:] + codebook[:-1]) / 2
    level = np.searchsorted(middle, x)
    p = np.bincount(level, minlength=codebook.size) / x.size
    return float(((x - codebook[level]) ** 2).mean()), float(-(p[p > 0] * np.log2(p[p > 0])).sum())


@pytest.mark.parametrize("bins", [8, 16, 24, 64])
@pytest.mark.parametrize("shape", ["normal", "laplace", "mixture"])
def test_as_good_as_the_exact_codebook_with_less_entropy(bins: int, shape: str) -> None:
    rng = np.random.default_rng(bins)
    x = {
        "normal": lambda: rng.standard_normal(200_000),
        "laplace": lambda: rng.laplace(size=200_000),
        "mixture": lambda: rng.standard_normal(200_000) * rng.lognormal(0, 0.5, 200_000),
    }[shape]()
    ours, exact = _coded(x, _fit(x.astype("f4"), "uniform", bins)[0]), _coded(x, _fit(x.astype("f4"), "exact", bins)[0])
    assert ours[0] < 1.02 * exact[0]
    assert ours[1] < exact[1]


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1e-30, 1.0, 1e30]), st.integers(2, 254), st.integers(1, 3000))
def test_entries_are_multiples_of_one_step_and_cover_the_values(seed: int, scale: float, bins: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    x = (scale * rng.standard_normal(n) * rng.lognormal(0, 1, n)).astype("f4")
    codebook, reason = _fit(x, "uniform", bins)
    assert reason == "new"
    assert 1 <= codebook.size <= MOST
    distinct = np.unique(log_histogram(x, 6, signed=True).counts.nonzero()[0]).size
    if codebook.size < 3 or distinct <= bins:
        return
    step = spacing(codebook)
    np.testing.assert_array_equal(codebook, np.round(codebook / step) * step)
    assert codebook[0] - step <= x.min() + abs(x.min()) / 64
    assert codebook[-1] + step >= x.max() - abs(x.max()) / 64


def test_a_parent_is_kept_while_it_is_about_as_good() -> None:
    x = np.random.default_rng(0).standard_normal(100_000).astype("f4")
    first, _ = _fit(x, "uniform", 24)
    assert _fit(x * np.float32(1.001), "uniform", 24, first) == (pytest.approx(first), "frozen")
    coarse, why = _fit(x * np.float32(0.8), "uniform", 24, first)
    assert why.startswith("refit: the parent's gives ")
    assert spacing(coarse) < spacing(first)
    _, why = _fit(x * np.float32(1.5), "uniform", 24, first)
    assert why.startswith("refit: the parent's step is 0.")


def test_few_distinct_values_are_kept_exactly() -> None:
    x = np.random.default_rng(0).choice(np.array([-0.7, 0.1, 0.30000001, 1e6], "f4"), (50, 50))
    ckpt = sp.compress({"weight": x}, cfg=sp.Config([("*", sp.Quantize(alpha=2.0**-13, protect=0.0))]))
    assert ckpt.summary()[0].error < 1e-3
    ones = np.full((50, 50), 0.1, "f4")
    assert (through_bytes(sp.compress({"weight": ones}))["weight"] == ones).all() or sp.compress(
        {"weight": ones}
    ).summary()[0].error < 0.01


@pytest.mark.parametrize("torches", [False, True])
@pytest.mark.parametrize("values", [[1.0], [20.0], [-0.3, 0.0, 0.3], [0.1 * i for i in range(24)]])
def test_few_values_are_kept_to_the_bit(values: list[float], torches: bool) -> None:
    """A matrix with few distinct values is restored exactly, in a base and in a delta."""
    prev = None
    for factor in (1.0, 1.0, 1.7):
        x = np.resize(np.float32(values), (64, 64)) * np.float32(factor)
        prev = sp.compress({"weight": torch.from_numpy(x) if torches else x}, prev)
        assert prev.summary()[0].stream == "levels"
        assert prev.summary()[0].error == 0.0
        np.testing.assert_array_equal(np.asarray(sp.decompress(prev)["weight"]), x)


def test_few_values_are_no_more_than_what_was_asked_for_embeddings() -> None:
    x = np.resize(np.float32([-0.3, 0.1, 0.7]), (64, 64))
    cfg = sp.Config([("embedding", sp.Quantize(bins=32, embedding_bins=2))])
    ckpt = sp.compress({"weight": x}, cfg=cfg, kinds={"weight": "embedding"})
    assert np.unique(sp.decompress(ckpt)["weight"]).size > 1
    assert ckpt.summary()[0].error > 0
    assert sp.compress({"weight": x}, cfg=cfg, kinds={"weight": "linear"}).summary()[0].error == 0


@pytest.mark.parametrize(("step", "up", "expected"), [(1.0, False, 1.0), (1.001, False, 1.0), (1.001, True, 1.0078125)])
def test_a_step_of_8_bits(step: float, up: bool, expected: float) -> None:
    assert to_8_bits(step, up=up) == expected


@pytest.mark.parametrize("step", [np.inf, float(np.finfo(np.float64).max)])
def test_a_step_that_is_no_number_stays_infinite(step: float) -> None:
    assert to_8_bits(step, up=True) == np.inf
    ends = np.finfo(np.float64).max * np.array([-1.0, 1.0] * 600)
    restored = sp.decompress(
        sp.compress({"weight": ends}, cfg=sp.Config([("weight", sp.Quantize(bins=2, solver="exact"))]))
    )
    np.testing.assert_array_equal(restored["weight"], ends)


@pytest.mark.parametrize("target", [None, 0.05])
@pytest.mark.parametrize(("scale", "few"), [(1e-170, 1e150), (1e-300, 1.0), (1e-3, 1.7e308), (1.0, 0.0)])
def test_float64_over_the_widest_range_is_compressed(scale: float, few: float, target: float | None) -> None:
    values = np.random.default_rng(0).lognormal(size=4096) * scale
    values[:5] = few * (np.arange(1, 6) / 5)
    values[0] = max(values[0], 1.7e308 * (few == 0.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ckpt = sp.compress({"weight": values.reshape(64, 64)}, cfg=sp.Config(max_rel_error=target))
    found = sp.decompress(ckpt)["weight"]
    assert np.isfinite(found).all()
    (row,) = ckpt.summary()
    # Of one huge value among small ones the error is too small for a float, and not 0 all the same.
    assert (row.error > 0) == bool((found.reshape(-1) != values).any())
    assert target is None or row.error <= target


def _uneven(kind: str) -> tuple[torch.Tensor, slice]:
    """Return weights with parts of very different scales, and the small part."""
    draw = torch.Generator().manual_seed(0)
    if kind == "flat parameters":  # an embedding, then layers of a hundredth of its scale
        w = torch.randn(250_000, generator=draw)
        w[100_000:] *= 0.01
        return w, slice(100_000, None)
    w = 0.02 * torch.randn(256, 256, generator=draw)
    if kind == "large rows":
        w[:25] *= 50
        return w, slice(25, None)
    w[:3, 0] = 6e4
    return w, slice(3, None)


@pytest.mark.parametrize("kind", ["flat parameters", "large rows", "outliers"])
@pytest.mark.parametrize(
    "cfg",
    [
        sp.Config([("weight", sp.Quantize(bins=24))]),
        sp.Config([("weight", sp.Quantize(bins=24))], rate=0.002),
        sp.Config(max_rel_error=0.05),
    ],
    ids=["24 bins", "24 bins, rate 0.002", "target"],
)
def test_no_part_of_an_array_is_lost_beside_a_larger_one(kind: str, cfg: sp.Config) -> None:
    w, small = _uneven(kind)
    kinds = {"weight": "linear"}
    base = sp.compress({"weight": w}, cfg=cfg, kinds=kinds)
    delta = sp.compress({"weight": w * 1.001}, base, cfg, kinds=kinds)
    for ckpt, stored in ((base, w), (delta, w * 1.001)):
        found = through_bytes(ckpt, base if ckpt.is_delta else None)["weight"]
        assert float((found[small] - stored[small]).norm() / stored[small].norm()) < 0.15
        (row,) = ckpt.summary()
        if row.stream != "levels":  # outliers alone may be protected
            assert "by a common step" in row.note
            assert row.error <= (cfg.max_rel_error or 0.125)


def test_a_chain_of_levels_does_not_change_its_coding_at_the_half() -> None:
    """Heavy tails come and go about it; either way costs as much as a base."""
    rng = np.random.default_rng(0)
    scale = np.ones((200, 200), np.float32)
    cfg = sp.Config([("weight", sp.Quantize(bins=12, protect=0.0))], rate=0.01)

    def state(small: int) -> dict[str, np.ndarray]:
        """Return weights in which `small` of 200 rows are a thousand times smaller."""
        factors = scale.copy()
        factors[:small] /= 1000
        return {"weight": w * factors}

    w = rng.standard_normal((200, 200)).astype(np.float32)
    (alone,) = sp.compress(state(110), cfg=cfg).summary()
    assert alone.stream == "log-buckets"
    ckpt = sp.compress(state(40), cfg=cfg)
    sizes = []
    for small in (90, 110, 90):
        ckpt = sp.compress(state(small), ckpt, cfg)
        (row,) = ckpt.summary()
        assert row.stream == "levels"
        sizes.append(ckpt.nbytes)
    assert "of it are as good as zero" in sp.compress(state(110), ckpt, cfg).summary()[0].note
    (far,) = sp.compress(state(170), ckpt, cfg).summary()
    assert far.stream == "log-buckets"
    assert max(sizes) < alone.stored_bytes / 2


def test_bins_of_embeddings_count_for_embeddings() -> None:
    w, _ = _uneven("large rows")
    cfg = sp.Config([("*", sp.Quantize(bins=6, embedding_bins=24))])
    rows = sp.compress({"a": w, "b": w * 2}, cfg=cfg, kinds={"a": "embedding", "b": "linear"}).summary()
    assert [row.stream for row in rows] == ["log-buckets", "levels"]


def test_of_few_bins_it_is_said_what_is_lost() -> None:
    w, _ = _uneven("large rows")
    (row,) = sp.compress({"weight": w}, cfg=sp.Config([("weight", sp.Quantize(bins=6))])).summary()
    assert row.stream == "levels"
    assert re.search(r"[89]\d% of it are as good as zero", row.note)


@pytest.mark.parametrize("error", [7e-6, 1e-6, 1e-300, 1e-310, 5e-324])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_target_finer_than_log_buckets_is_met_or_the_array_exact(dtype: torch.dtype, error: float) -> None:
    w = 1e-3 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    w[:4] = torch.where(w[:4] < 0, -1e6, 1e6)
    state = {
        "weight": w.to(dtype),
        "optimizer": {"state": {0: {"exp_avg": w.to(dtype), "exp_avg_sq": (w * w).to(dtype)}}},
    }
    for row in sp.compress(state, cfg=sp.Config(max_rel_error=error)).summary():
        assert row.error <= error


@pytest.mark.parametrize("largest", [1e38, 1e39, -np.finfo(np.float64).max])
@pytest.mark.parametrize("cfg", [sp.Config(rate=0.0005), sp.Config(rate=0.0005, max_rel_error=0.01)], ids=str)
def test_a_rate_leaves_levels_alone_that_float32_does_not_hold(cfg: sp.Config, largest: float) -> None:
    w = np.random.default_rng(0).integers(0, 2, (64, 64)).astype(np.float64)
    w[3, 4] = largest
    base = sp.compress({"weight": w}, cfg=cfg)
    delta = sp.compress({"weight": w}, base, cfg)
    for found in (through_bytes(base)["weight"], through_bytes(delta, base)["weight"]):
        assert np.isfinite(found).all()
        assert abs(found[3, 4] / largest - 1) < 0.01
    assert base.summary()[0].stream == "levels"


@pytest.mark.parametrize("bins", [2, 12, 24])
@pytest.mark.parametrize("solver", ["uniform", "exact", "kmeans++"])
def test_zeros_have_no_weight_where_only_magnitudes_count(solver: str, bins: int) -> None:
    w = np.random.default_rng(0).standard_normal((64, 64)).astype("f4")
    w[0] = 0
    errors = []
    for sigma in (0.0, 1e-300):
        cfg = sp.Config([("*", sp.Quantize(bins=bins, solver=solver, sigma=sigma, protect=0.0))])
        errors.append(sp.compress({"weight": w}, cfg=cfg).summary()[0].error)
    assert errors[0] == errors[1]


def test_earlier_weights_of_another_dtype_make_no_warning() -> None:
    w = np.random.default_rng(0).standard_normal((64, 64)) * 1e-150
    earlier = sp.PastWeights({"weight": np.ones((64, 64), np.float32)}, 10)
    assert sp.compress({"weight": w}, cfg=sp.Config(rate=0.002), earlier=earlier).summary()[0].stream == "levels"


@pytest.mark.parametrize("kind", ["worn", "filled"])
def test_what_is_negligible_stays_levels_and_is_told(kind: str) -> None:
    w = 0.02 * torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    if kind == "worn":  # rows that weight decay has worn away
        w[50:] *= 1e-12
    else:  # more than are protected
        w[:16] = -1e9
    (row,) = sp.compress({"weight": w}).summary()
    assert row.stream == "levels"
    assert re.search(r"(8|9|10)\d% of it are as good as zero", row.note)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("low", [-1.795937575160302e308, -1.794182015458288e308])
def test_entries_beyond_the_largest_float64_are_clipped(low: float) -> None:
    """Half a step beyond the largest number is not infinite, and no warning is shown."""
    entries = multiples(low, 9.0, 7.954879899750849e305)
    assert np.isfinite(entries).all()
    weight = np.zeros((64, 64))
    weight.flat[:12] = [low, 0, 0, 0, 0, 2, 4, 5, 6, 7, 8, 9]
    state = {"weight": weight}
    restored = sp.decompress(sp.compress(state, cfg=sp.Config([("weight", sp.Quantize(bins=64))])))["weight"]
    assert np.isfinite(restored).all()
