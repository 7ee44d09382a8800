"""Cases of the codebook kernels: the exact optimum on buckets against k-means on raw data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from . import peers
from .elementwise import BITS, Place, oracle
from .harness import Case, CheckFailed, Job, Options, Peer, Row, at_least, at_most, same

CODES = 32
LOSS = f"codebook loss K = {CODES}"
_LOSS_POINTS = 200_000
_QUICK = 1 << 22
"""Elements up to which a run is a short one."""
_RAW_POINTS = (100_000, 1_000_000)
"""Points on which the whole way is held against k-means on raw data: in a short run, and otherwise."""
SAME_POINTS = ", the same points"
"""What ends the rows that say nothing of a rate: on few points ours takes what its codebook takes."""
_WAY = "sketch, and the exact codebook of its buckets"


def cases(at: Place) -> list[Case]:
    """Cases that solve the buckets of a tensor, and that go from raw data to a codebook."""
    raw = ("scikit-learn", "faiss")
    rows = [
        Case(
            solved(k),
            at.n,
            "ms",
            _solve(at, k),
            at.device.name,
            at_most(3.0) if k == CODES else None,
            ("k-means++",),
        )
        for k in (8, 16, CODES, 254)
    ]
    name = f"raw data to codebook K = {CODES}"
    rows.append(at.case(name, _from_raw))
    few = Place(at.device, at.sample, min(at.n, _RAW_POINTS[at.n > _QUICK]))
    rows.append(few.case(name + SAME_POINTS, _against_raw, None, raw))
    return rows


def solved(k: int) -> str:
    """Row name of a codebook with k entries."""
    return f"exact codebook K = {k}"


def problem(values: npt.NDArray[np.float32], sigma: float = 0.2) -> tuple[Any, Any]:
    """Return bucket values and weights of raw data."""
    from shrinkpoint.kernels.histogram import log_histogram
    from shrinkpoint.kernels.kmeans import bucket_weights

    histogram = log_histogram(values, BITS, signed=True)
    centers = histogram.values()
    return centers, bucket_weights(histogram.counts[:-1], centers, sigma)


def _solve(at: Place, k: int) -> Callable[[], Job]:
    def make() -> Job:
        from shrinkpoint.kernels.kmeans import quantization_loss, weighted_kmeans

        centers, weights = problem(at.sample.before(at.n))

        def check() -> str:
            few = 2000 if k <= CODES else 800  # the oracle is a Python loop: fewer buckets, but more than codes
            small, small_weights = problem(at.sample.before(min(at.n, few)))
            if np.count_nonzero(small_weights) <= k < at.n // 4:
                raise CheckFailed(f"{np.count_nonzero(small_weights)} buckets are too few to check {k} codes")
            expected = oracle("kmeans").weighted_kmeans(
                small, small_weights, k, method="exact", initial=None, seed=0, iterations=50
            )
            same("codebook", weighted_kmeans(small, small_weights, k), expected)
            exact = quantization_loss(centers, weights, weighted_kmeans(centers, weights, k))
            seeded = quantization_loss(centers, weights, weighted_kmeans(centers, weights, k, method="kmeans++"))
            if exact > seeded * (1 + 1e-12):
                raise CheckFailed(f"loss {exact} is above k-means++'s, {seeded}")
            filled = int(np.count_nonzero(small_weights))
            return f"K = {k} on {filled:,} buckets = oracle, loss {exact / seeded:.4f} x k-means++'s"

        heuristic = Peer(
            "k-means++",
            lambda: lambda: weighted_kmeans(centers, weights, k, method="kmeans++"),
            note="ours, with Lloyd",
        )
        filled = int(np.count_nonzero(weights))
        note = f"{filled:,} buckets; data {at.sample.origin}"
        return Job(lambda: weighted_kmeans(centers, weights, k), check, 1.0, [heuristic], note)

    return make


def _from_raw(at: Place) -> Job:
    values = at.sample.before(at.n)
    return at.job(lambda: _fitted(values), lambda: _check_fit(values), 4, note=_WAY)


def _against_raw(at: Place) -> Job:
    """Job of fitting a codebook to raw points, with k-means on the same points as peers."""
    values = at.sample.before(at.n)
    others = peers.raw_kmeans(values, CODES, at_least(1000))
    note = f"{_WAY}; all from the same {at.n:,} points"
    return at.job(lambda: _fitted(values), lambda: _check_fit(values), 4, others, note=note)


def _fitted(values: npt.NDArray[np.float32]) -> Any:
    """Fit a codebook of least squares to raw data (sigma = 1)."""
    from shrinkpoint.kernels.kmeans import weighted_kmeans

    return weighted_kmeans(*problem(values, 1.0), CODES)


def _check_fit(values: npt.NDArray[np.float32]) -> str:
    """Check that Lloyd's k-means gains at most a thousandth and `assign` takes the nearest code."""
    from shrinkpoint.kernels.quantizer import Thresholds, assign

    codebook = np.asarray(_fitted(values), np.float64)
    some = values[:_LOSS_POINTS]
    mine = loss(some, _fitted(some))
    better = _refined(np.asarray(_fitted(some), np.float64), some.astype(np.float64))
    if not 0 < mine <= 1.001 * loss(some, better):
        raise CheckFailed(f"loss {mine} on the raw data; 20 more iterations bring it to {loss(some, better)}")
    few = values[:10_000].astype(np.float64)
    nearest = np.abs(few[:, None] - codebook[None, :]).argmin(axis=1)
    same("levels", assign(values[:10_000], Thresholds(), codebook), (2 + nearest).astype(np.uint8))
    return f"loss within 1.001 of 20 iterations more on {some.size:,} points, {few.size:,} levels the nearest"


def _refined(codes: npt.NDArray[np.float64], x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Run 20 of Lloyd's iterations on raw points."""
    for _ in range(20):
        at = np.searchsorted(0.5 * (codes[1:] + codes[:-1]), x)
        counts, sums = np.bincount(at, minlength=codes.size), np.bincount(at, x, codes.size)
        codes = np.where(counts > 0, sums / np.maximum(counts, 1), codes)
    return codes


def loss(x: npt.NDArray[Any], codebook: npt.NDArray[Any]) -> float:
    """Mean squared distance of x to its nearest code."""
    codes = np.sort(np.asarray(codebook, np.float64).reshape(-1))
    values = np.asarray(x, np.float64)
    nearest = codes[np.searchsorted(0.5 * (codes[1:] + codes[:-1]), values)]
    return float(np.square(values - nearest).mean())


def loss_rows(at: Place, options: Options) -> list[Row]:
    """Loss on the raw data (sigma = 1) as a multiple of the optimum, which kmeans1d computes."""
    if not options.wanted(LOSS):
        return []
    options.say(LOSS)
    x = at.sample.before(min(at.n, _LOSS_POINTS // 4 if options.quick else _LOSS_POINTS))
    target = at_most(1.001)
    text = target.text("x optimum")
    try:
        _, centers = peers.library("kmeans1d").cluster(x.astype(np.float64), CODES)
    except ImportError as error:
        why = f"not measured: {error.name} is not installed"
        return [Row(LOSS, at.device.name, x.size, None, "x optimum", "kmeans1d", None, None, text, None, why)]
    best = loss(x, np.asarray(centers))
    mine = loss(x, _fitted(x)) / best
    said = f"sum of squares on the raw values, sigma 1, optimum by kmeans1d; data {at.sample.origin}"
    met = target.met(mine, None)
    rows = [Row(LOSS, at.device.name, x.size, mine, "x optimum", "kmeans1d", 1.0, 1 / mine, text, met, said)]
    for other, fitted in _others(x).items():
        try:
            theirs = loss(x, fitted()) / best
        except ImportError as error:
            why = f"not measured: {error.name} is not installed"
            rows.append(Row(LOSS, at.device.name, x.size, mine, "x optimum", other, None, None, None, None, why))
        else:
            rows.append(
                Row(LOSS, at.device.name, x.size, mine, "x optimum", other, theirs, theirs / mine, None, None, said)
            )
    return rows


def _others(x: npt.NDArray[np.float32]) -> dict[str, Callable[[], Any]]:
    points = np.ascontiguousarray(x[:, None])

    def sklearn() -> Any:
        return peers.library("sklearn.cluster").KMeans(CODES, n_init=1, random_state=0).fit(points).cluster_centers_

    def faiss() -> Any:
        one = peers.library("faiss").Kmeans(1, CODES, niter=20, seed=0, max_points_per_centroid=x.size)
        one.train(points)
        return one.centroids

    return {"scikit-learn": sklearn, "faiss": faiss}
