"""Codebooks: the exact optimum on buckets against k-means on raw data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.kernels import kmeans as kernels
from shrinkpoint.kernels import quantizer

from .. import peers
from ..harness import Case, Job, Options, Peer, Row, at_least, at_most, held, lacking, same
from .histogram import filled, sketch
from .place import Place, numpy_peer, oracle, require

CODES = 32
LOSS = f"codebook loss K = {CODES}"
TENSORS = 100
TOGETHER = f"{TENSORS} exact codebooks K = {CODES}, one launch"
SAME_POINTS = ", the same points"
"""What ends the rows that say nothing of a rate: on few points ours takes what its codebook takes."""
_LOSS_POINTS = 200_000
_QUICK, _RAW_POINTS = 1 << 22, (100_000, 1_000_000)
"""Points on which the whole way is held against k-means on raw data: up to so many elements, and above."""
_WAY = "sketch, and the exact codebook of its buckets"
Floats = npt.NDArray[np.float32]


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject: buckets of a tensor, and raw data to a codebook."""
    raw, name = ("scikit-learn", "faiss"), f"raw data to codebook K = {CODES}"
    few, one_by_one = at.few(_RAW_POINTS[at.n > _QUICK]), ("cpu, one by one",)
    together = Place(at.device, at.sample, TENSORS)
    return [
        *(
            at.case(
                solved(k), partial(_solve, at, k), at_most(3.0) if k == CODES else None, ("k-means++",), unit="ms",
                on="cpu",
            )
            for k in (8, 16, CODES, 254)
        ),
        at.case(name, lambda: _from_raw(at, []), on="cpu"),
        few.case(name + SAME_POINTS, lambda: _from_raw(few, None), None, raw, on="cpu"),
        at.case("bucket_weights", lambda: weights(at), others=("NumPy",), unit="us", on="cpu"),
        at.case("prepare", lambda: prepared(at), unit="us", on="cpu"),
        together.case(TOGETHER, lambda: _together(at), at_most(5.0), one_by_one, unit="ms", on="gpu"),
    ]  # fmt: skip


def solved(k: int) -> str:
    """Row name of a codebook with k entries."""
    return f"exact codebook K = {k}"


def problem(values: Floats, sigma: float = 0.2) -> tuple[Any, Any]:
    """Return bucket values and weights of raw data."""
    histogram = sketch(values)
    centers = histogram.values()
    return centers, kernels.bucket_weights(histogram.counts[:-1], centers, sigma)


def _solve(at: Place, k: int) -> Job:
    centers, weights = problem(at.sample.before(at.n))
    exact: Callable[[], Any] = lambda: kernels.weighted_kmeans(centers, weights, k)  # noqa: E731
    seeded: Callable[[], Any] = lambda: kernels.weighted_kmeans(centers, weights, k, method="kmeans++")  # noqa: E731

    def check() -> str:
        few = 2000 if k <= CODES else 800  # the oracle is a Python loop: fewer buckets, but more than codes
        small, shares = problem(at.sample.before(min(at.n, few)))
        filled = int(np.count_nonzero(shares))
        require(not filled <= k < at.n // 4, f"{filled} buckets are too few to check {k} codes")
        (expected,) = oracle("kmeans").weighted_kmeans_many([(small, shares)], [k], "exact", [None], 0, 50)
        same("codebook", kernels.weighted_kmeans(small, shares, k), expected)
        own, other = (kernels.quantization_loss(centers, weights, found()) for found in (exact, seeded))
        require(own <= other * (1 + 1e-12), f"loss {own} is above k-means++'s, {other}")
        return f"K = {k} on {filled:,} buckets = oracle, loss {own / other:.4f} x k-means++'s"

    heuristic = Peer("k-means++", lambda: seeded, note="ours, with Lloyd")
    note = f"{np.count_nonzero(weights):,} buckets; data {at.sample.origin}"
    return Job(exact, check, 1.0, [heuristic], note)


def _from_raw(at: Place, others: list[Peer] | None) -> Job:
    """Return the job of fitting a codebook to raw points, by default with k-means as peers."""
    values = at.sample.before(at.n)
    note = _WAY if others is not None else f"{_WAY}; all from the same {at.n:,} points"
    found = peers.raw_kmeans(values, CODES, at_least(1000)) if others is None else others
    return at.job(lambda: _fitted(values), lambda: _check_fit(values), 4, found, note=note)


def _fitted(values: Floats) -> Any:
    """Fit a codebook of least squares to raw data (sigma = 1)."""
    return kernels.weighted_kmeans(*problem(values, 1.0), CODES)


def _check_fit(values: Floats) -> str:
    """Check that Lloyd's k-means gains at most a thousandth and `assign` takes the nearest code."""
    codebook, some = np.asarray(_fitted(values), np.float64), values[:_LOSS_POINTS]
    codes = np.asarray(_fitted(some), np.float64)
    own, x = loss(some, codes), some.astype(np.float64)
    for _ in range(20):  # Lloyd's iterations on raw points
        at = np.searchsorted(0.5 * (codes[1:] + codes[:-1]), x)
        counts, sums = np.bincount(at, minlength=codes.size), np.bincount(at, x, codes.size)
        codes = np.where(counts > 0, sums / np.maximum(counts, 1), codes)
    refined = loss(some, codes)
    require(0 < own <= 1.001 * refined, f"loss {own} on the raw data; 20 more iterations bring it to {refined}")
    few = values[:10_000].astype(np.float64)
    nearest = (2 + np.abs(few[:, None] - codebook[None, :]).argmin(axis=1)).astype(np.uint8)
    same("levels", quantizer.assign(values[:10_000], quantizer.Thresholds(), codebook), nearest)
    return f"loss within 1.001 of 20 iterations more on {some.size:,} points, {few.size:,} levels the nearest"


def loss(x: npt.NDArray[Any], codebook: npt.NDArray[Any]) -> float:
    """Mean squared distance of x to its nearest code."""
    codes, values = np.sort(np.asarray(codebook, np.float64).reshape(-1)), np.asarray(x, np.float64)
    nearest = codes[np.searchsorted(0.5 * (codes[1:] + codes[:-1]), values)]
    return float(np.square(values - nearest).mean())


def loss_rows(at: Place, options: Options) -> list[Row]:
    """Loss on the raw data (sigma = 1) as a multiple of the optimum, which kmeans1d computes."""
    if not options.wanted(LOSS):
        return []
    options.say(LOSS)
    x = at.sample.before(min(at.n, _LOSS_POINTS // 4 if options.quick else _LOSS_POINTS))
    target, unit, where = at_most(1.001), "x optimum", (LOSS, at.device.name, x.size)
    try:
        _, centers = peers.library("kmeans1d").cluster(x.astype(np.float64), CODES)
    except ImportError as error:
        why = f"not measured: {lacking(str(error.name))}"
        return [held(Row(*where, None, unit, "kmeans1d", note=why), target)]
    best = loss(x, np.asarray(centers))
    own = loss(x, _fitted(x)) / best
    said = f"sum of squares on the raw values, sigma 1, optimum by kmeans1d; data {at.sample.origin}"
    rows = [held(Row(*where, own, unit, "kmeans1d", 1.0, 1 / own, note=said), target)]
    for peer in peers.raw_kmeans(x, CODES, iterations=300):
        try:
            theirs = loss(x, np.asarray(peer.make()())) / best
            rows.append(Row(*where, own, unit, peer.name, theirs, theirs / own, note=said))
        except ImportError as error:
            rows.append(Row(*where, own, unit, peer.name, note=f"not measured: {lacking(str(error.name))}"))
    return rows


def weights(at: Place) -> Job:
    """Weigh buckets by frequency and magnitude."""
    histogram = sketch(at.sample.before(at.n))
    counts, values = histogram.counts[:-1], histogram.values()

    def plain() -> Any:
        size = np.abs(np.where(counts > 0, values, 0.0))
        return 0.2 * counts / counts.sum() + 0.8 * size / size.sum()

    call = lambda: kernels.bucket_weights(counts, values)  # noqa: E731
    return at.table(call, plain, filled(counts), within=1e-12, says="= NumPy", others=[numpy_peer(plain)])


def prepared(at: Place) -> Job:
    """Bring buckets into the solver's form."""
    values, weights = problem(at.sample.before(at.n))
    met = weights > 0

    def seen(found: tuple[Any, Any, int]) -> tuple[Any, Any]:
        x, w, exponent = found
        return np.ldexp(x, exponent), w / w.sum()

    expected = lambda: (values[met].astype(np.float64), weights[met] / weights.sum())  # noqa: E731
    says = "centers and shares are those given"
    return at.table(
        lambda: kernels.prepare(values, weights), expected, filled(weights), seen=seen, within=1e-12, says=says
    )


def _together(at: Place) -> Job:
    """Solve a hundred codebooks in one launch."""
    step = min(at.n // TENSORS, 1_000_000)
    on_host = [problem(at.sample.before(at.n)[i * step : (i + 1) * step]) for i in range(TENSORS)]
    problems = [tuple(at.arrays(*given)) for given in on_host]

    def solve(given: Any) -> Callable[[], Any]:
        return lambda: kernels.weighted_kmeans_many(given, CODES)

    def check() -> str:
        same("codebooks", solve(problems[:8])(), solve(on_host[:8])())
        return "8 codebooks = the CPU's"

    one_by_one = Peer("cpu, one by one", lambda: solve(on_host))
    note = f"problems of {on_host[0][0].size:,} buckets; data {at.sample.origin}"
    return Job(solve(problems), check, 1.0, [one_by_one], note)
