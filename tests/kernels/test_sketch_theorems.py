"""Theorems of Inshrinkerator's section 4 and appendix A.3, tested on the kernels.

X are points in [0, 1], X~ their buckets' values by `log_histogram`: `|x - x~| <= alpha x` with `alpha = 2**-(b + 1)`.
M* is the optimal clustering of X, M~* that of X~; L is the mean absolute and phi the mean squared distance.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.histogram import log_histogram
from shrinkpoint.kernels.kmeans import bucket_weights, quantization_loss, weighted_kmeans

Points = np.ndarray[Any, np.dtype[np.float64]]
BITS = st.integers(0, 6)
FEW = st.lists(st.floats(2**-20, 1, width=32), min_size=4, max_size=12)
MANY = st.lists(st.floats(2**-20, 1, width=32), min_size=20, max_size=80)


def sketched(points: list[float], bits: int) -> tuple[Points, Points, Points, float]:
    """Return X, ascending; the values and weights (shares of points) of its buckets; and alpha."""
    x = np.sort(np.asarray(points, np.float32))
    histogram = log_histogram(x, bits)
    values = histogram.values()
    return x.astype(np.float64), values, bucket_weights(histogram.counts[:-1], values, sigma=1.0), 2.0 ** -(bits + 1)


def spread_out(values: Points, weights: Points, n: int) -> Points:
    """Return X~: each bucket's value as often as it has points."""
    return np.repeat(values, np.rint(weights * n).astype(int))


def least_absolute(x: Points, k: int) -> float:
    """Return L of the optimal clustering: the least over all cuts into k runs."""
    return (
        min(
            sum(float(np.abs(x[a:b] - np.median(x[a:b])).sum()) for a, b in itertools.pairwise((0, *cuts, x.size)))
            for cuts in itertools.combinations(range(1, x.size), k - 1)
        )
        / x.size
    )


@given(FEW, BITS, st.integers(1, 4))
def test_optimal_losses_of_points_and_sketch_differ_by_at_most_alpha(points: list[float], bits: int, k: int) -> None:
    """Optimal losses of points and sketch differ by at most alpha times the points' mean."""
    x, values, weights, alpha = sketched(points, bits)
    near = spread_out(values, weights, x.size)
    assert near.size == x.size
    assert (np.abs(x - near) <= alpha * x).all()
    difference = abs(least_absolute(x, k) - least_absolute(near, k))
    assert difference <= alpha * x.mean() + 1e-12 <= alpha + 1e-12


@given(MANY, BITS, st.integers(1, 8))
def test_the_exact_codebook_keeps_the_bound_in_squares(points: list[float], bits: int, k: int) -> None:
    """The exact codebook of the sketch keeps the bound for squared distances.

    `|sqrt(phi(M*)) - sqrt(phi_q(M~*))| <= alpha sqrt(mean(x**2))`, by the triangle inequality of the L2 norm.
    """
    x, values, weights, alpha = sketched(points, bits)
    share = np.full(x.size, 1 / x.size)
    exact = quantization_loss(x, share, weighted_kmeans(x, share, k))
    on_sketch = quantization_loss(values, weights, weighted_kmeans(values, weights, k))
    room = alpha * math.sqrt(float(np.square(x).mean()))
    assert abs(math.sqrt(exact) - math.sqrt(on_sketch)) <= room + 1e-9


def seeding_losses(values: Points, weights: Points, k: int, draws: int) -> Points:
    """Return the losses of `draws` seedings by squared distance, without Lloyd's rounds."""
    seedings = (weighted_kmeans(values, weights, k, "kmeans++", seed=seed, iterations=0) for seed in range(draws))
    return np.array([quantization_loss(values, weights, codes) for codes in seedings])


@given(MANY, BITS, st.integers(1, 8))
def test_loss_of_seeding_by_squared_distance(points: list[float], bits: int, k: int) -> None:
    """Seeding by squared distance keeps the bound on its expected loss.

    `E[phi_q] <= 8 (ln k + 2) phi_q(M~*) <= 16 (ln k + 2) (phi(M*) + alpha**2)`. One unlikely seeding can cost a
    thousand times the rest, so the mean of a few does not estimate E. By Markov's inequality a loss exceeds 4 E with a
    probability of at most 1/4: 18 of 24 do so with less than 1e-6.
    """
    x, values, weights, alpha = sketched(points, bits)
    share = np.full(x.size, 1 / x.size)
    on_sketch = quantization_loss(values, weights, weighted_kmeans(values, weights, k))
    exact = quantization_loss(x, share, weighted_kmeans(x, share, k))
    factor = 8 * (math.log(k) + 2)
    assert (seeding_losses(values, weights, k, 24) > 4 * factor * on_sketch + 1e-12).sum() < 18
    assert factor * on_sketch <= 2 * factor * (exact + alpha**2) + 1e-12


@pytest.mark.parametrize("ratio", [1.1, 2, 16], ids=str)
def test_mean_loss_of_seeding_by_squared_distance(ratio: float) -> None:
    """The mean loss over 2000 seedings keeps the bound on its expectation."""
    points = [1.0] * 13 + [ratio**-n for n in range(1, 9)]
    _, values, weights, _ = sketched(points, 6)
    for k in (2, 4, 7):
        best = quantization_loss(values, weights, weighted_kmeans(values, weights, k))
        assert seeding_losses(values, weights, k, 2000).mean() <= 8 * (math.log(k) + 2) * best


@given(st.integers(2, 5), st.integers(4, 8), st.data())
def test_separate_clusters_are_those_of_the_sketch(k: int, bits: int, data: st.DataObject) -> None:
    """Well-separated clusters are found equally from points and sketch."""
    alpha = 2.0 ** -(bits + 1)
    if 16 * alpha * k > 0.9:
        bits, alpha = 8, 2.0**-9
    radius = data.draw(st.floats(alpha, 0.9 / (16 * k)))
    places = st.lists(st.floats(-1, 1), min_size=6, max_size=6)
    clusters = [[(16 * j + 2 + place) * radius for place in data.draw(places)] for j in range(k)]
    x, values, weights, _ = sketched([point for cluster in clusters for point in cluster], bits)
    parts = x.reshape(k, -1)
    width = float((parts[:, -1] - parts[:, 0]).max())
    split = float((parts[1:, 0] - parts[:-1, -1]).min())
    assert alpha < (split - width) / 4
    share = np.full(x.size, 1 / x.size)
    near = spread_out(values, weights, x.size)
    of_points, of_sketch = (
        np.abs(found[:, None] - weighted_kmeans(found_values, found_weights, k)).argmin(1)
        for found, found_values, found_weights in ((x, x, share), (near, values, weights))
    )
    if of_points.max() + 1 == k:
        assert of_points.tolist() == of_sketch.tolist() == np.repeat(np.arange(k), 6).tolist()


@pytest.mark.parametrize("bits", range(7))
def test_no_smaller_alpha_holds(bits: int) -> None:
    """A point at the lower edge of a bucket reaches the bound alpha."""
    x, values, weights, alpha = sketched([0.5], bits)
    assert abs(float(spread_out(values, weights, 1)[0]) - x[0]) > 0.99 * alpha * x[0]
