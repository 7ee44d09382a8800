"""Functions of several concatenated arrays equal calls on each array, and the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint import kernels as k
from shrinkpoint.kernels.histogram import reference as histogram_oracle
from shrinkpoint.kernels.kmeans import reference as kmeans_oracle
from shrinkpoint.kernels.scales import reference as rank_one_oracle

NpArray = np.ndarray[Any, Any]
ODD = np.array([0.0, -0.0, 1e-44, -1e-39, 1e38, np.inf, -np.inf, np.nan], np.float32)
ZERO = np.zeros(1, np.int64)
LENGTHS = st.lists(st.integers(0, 40), max_size=6)


def drawn(seed: int, n: int) -> NpArray:
    """Return numbers of many sizes, with special values."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 6, n)).astype(np.float32)
    at = rng.random(n) < 0.1
    x[at] = rng.choice(ODD, int(at.sum()))
    return x


@given(LENGTHS, st.integers(0, 12), st.integers(0, 2**32))
def test_used_buckets_are_those_of_the_histograms(lengths: list[int], bits: int, seed: int) -> None:
    x, ends = drawn(seed, sum(lengths)), np.cumsum(lengths, dtype=np.int64)
    found = k.used_buckets_many(x, ends, bits)
    for ours, theirs in zip(found, histogram_oracle.used_buckets_many(x, ends, bits), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@given(LENGTHS, st.integers(0, 2**32))
def test_distortions_are_those_of_each_array(lengths: list[int], seed: int) -> None:
    x, y = (np.nan_to_num(drawn(seed + i, sum(lengths)), nan=1.0) for i in (0, 1))
    y = np.where(np.isfinite(x), x * np.float32(0.5), y)
    ends = np.cumsum(lengths, dtype=np.int64)
    for found, part in zip(k.distortion_many(x, y, ends), np.split(np.arange(x.size), ends)[:-1], strict=True):
        alone = k.distortion(x[part], y[part])
        assert found.largest_relative == alone.largest_relative
        assert found.squared_error == pytest.approx(alone.squared_error, rel=1e-12)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5), st.integers(0, 2**32))
def test_rank_one_of_several_matrices_is_that_of_each(shapes: list[tuple[int, int]], seed: int) -> None:
    of = np.array(shapes)
    n = int((of[:, 0] * of[:, 1]).sum())
    x = np.abs(drawn(seed, n))
    rows, columns = k.factors_many(x, of)
    for ours, theirs in zip((rows, columns), rank_one_oracle.factors_many(x, of), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    previous = np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8)
    for old in (None, previous):
        ours = k.residual_symbols_many(x, rows, columns, of, 0.5, old)
        theirs = rank_one_oracle.residual_symbols(x, rows, columns, of, 0, 4, old)
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a, b)
    table = np.linspace(0.5, 2, 256, dtype=np.float32)
    values = k.residual_values_many(ours[0], rows, columns, of, table)
    with np.errstate(all="ignore"):
        expected = rank_one_oracle.residual_values(ours[0], rows, columns, of, 0, table)
    np.testing.assert_array_equal(values, expected)


@given(st.integers(0, 2**32), st.integers(1, 60), st.lists(st.integers(0, 90), max_size=4))
def test_least_losses_are_the_oracles(seed: int, codes: int, lengths: list[int]) -> None:
    rng = np.random.default_rng(seed)
    x = np.concatenate([np.empty(0), *(np.sort(rng.standard_t(2, n)) for n in lengths)])
    w, ends = rng.integers(1, 9, x.size).astype(np.float64), np.cumsum(lengths, dtype=np.int64)
    found = k.least_losses(x, w, ends, codes)
    np.testing.assert_array_equal(found, kmeans_oracle.least_losses(x, w, ends, codes))


@pytest.mark.parametrize("shape", ["normal", "laplace", "student", "uniform", "two"])
@pytest.mark.parametrize("codes", [16, 64, 128])
def test_least_losses_are_those_of_the_best_codebooks(shape: str, codes: int) -> None:
    rng = np.random.default_rng(codes)
    values = {
        "normal": lambda: rng.standard_normal(4000),
        "laplace": lambda: rng.laplace(size=4000),
        "student": lambda: rng.standard_t(2, 4000),
        "uniform": lambda: rng.uniform(-1, 1, 4000),
        "two": lambda: np.concatenate([rng.normal(-1, 0.01, 2000), rng.normal(2, 0.3, 2000)]),
    }[shape]()
    h = k.log_histogram(values.astype(np.float32), 6, signed=True)
    used = h.counts[:-1] > 0
    x, w = h.values()[used], h.counts[:-1][used].astype(np.float64)
    best = k.quantization_loss(x, w, k.weighted_kmeans(x, w, codes))
    assert k.least_losses(x, w, np.array([x.size]), codes)[0] == pytest.approx(best, rel=0.02)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("ends are not ascending", lambda: k.used_buckets_many(ODD, np.array([9]), 4)),
        ("ends are not ascending", lambda: k.distortion_many(ODD, ODD, np.array([5, 3, 8]))),
        ("shapes have not", lambda: k.factors_many(ODD, np.array([[3, 3]]))),
        ("shapes have not", lambda: k.factors_many(ODD, np.array([[0, 3], [8, 1]]))),
        ("shapes have not", lambda: k.factors_many(ODD, np.array([[2**32, 2**32], [8, 1]]))),
        ("rows is", lambda: k.residual_symbols_many(ODD, ODD[:3], ODD[:2], np.array([[4, 2]]), 1)),
        (
            "a step is not",
            lambda: k.uniform_values_many(ODD.view(np.uint8), np.array([32]), np.zeros(1), np.zeros(1, int)),
        ),
        (
            "sizes are not",
            lambda: k.uniform_levels_many(ODD, np.array([8]), np.ones(1), np.array([0]), np.array([255]), 1.0),
        ),
        ("ends are not ascending", lambda: k.least_losses(np.ones(3), np.ones(3), np.array([2]), 1)),
    ],
)
def test_arguments_that_do_not_fit(message: str, call: Any) -> None:
    with pytest.raises(k.BadArgumentError, match=message):
        call()
