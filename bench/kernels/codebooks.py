"""Sketches of weights by log buckets, and codebooks of buckets and of raw data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from shrinkpoint.kernels import histogram as kernels
from shrinkpoint.kernels import kmeans, quantizer

from .. import peers
from ..harness import Case, Job, Options, Peer, Row, Rows, absent, at_least, at_most, same
from .place import BITS, Call, Place, comes_back, numpy_peer, oracle, require

TENSORS, SMALL = 500, 10_000
ONE, EACH = "one tensor", "a call each"


def cases(at: Place) -> list[Case]:
    """Return the cases of both subjects: of buckets, and of codebooks from buckets or raw data."""
    others: tuple[str, ...] = ("torch.histc", "torch.quantile")
    kept_many = lambda parts: kernels.kept_histogram_many(parts, [at.sample.thresholds] * TENSORS, BITS)  # noqa: E731
    others = (*others, "cupy.percentile") if at.device.gpu else ("np.histogram", "np.quantile", *others, "ddsketch")
    raw, name = ("scikit-learn", "faiss"), f"raw data to codebook K = {CODES}"
    fewer, together = at.few(_RAW_POINTS[at.n > _QUICK]), Place(at.device, at.sample, PROBLEMS)
    limits = {CODES: at_most(3.0)}
    of_kmeans = [
        *(at.case(solved(k), partial(_solve, at, k), limits.get(k), ("k-means++",), unit="ms") for k in _EACH_K),
        at.case(name, lambda: _from_raw(at, [])),
        fewer.case(name + SAME_POINTS, lambda: _from_raw(fewer, None), None, raw),
        at.case("bucket_weights", lambda: weights(at), others=("NumPy",), unit="us"),
        at.case("prepare", lambda: prepared(at), unit="us"),
    ]
    launch = together.case(TOGETHER, lambda: _together(at), at_most(5.0), ("cpu, one by one",), unit="ms", on="gpu")
    return [
        at.case("log_histogram", lambda: whole(at), at.target(0.70, 0.85), others),
        at.case("log_histogram bfloat16", lambda: halved(at)),
        at.case("log_histogram |g w|", lambda: sensitivity(at)),
        at.case("kept_histogram", lambda: at.compared(_kept(at), 4)),
        at.case("bucket_index", lambda: at.compared(Call("histogram.bucket_index", (at.pair()[0],), (1,)), 8)),
        at.case("bucket_value", lambda: values(at)),
        at.case("merge", lambda: merged(at), unit="us", on="cpu"),
        at.case("quantile", lambda: quantiles(at), unit="us", on="cpu"),
        many(at, "log_histogram", lambda parts: kernels.log_histogram_many(parts, BITS, signed=True), sketch),
        many(at, "kept_histogram", kept_many, lambda x: kernels.kept_histogram(x, at.sample.thresholds, BITS)),
        *(case.only("cpu") for case in of_kmeans),
        launch,
    ]


def sketch(x: Any) -> Any:
    """Return the signed histogram of values."""
    return kernels.log_histogram(x, BITS, signed=True)


def whole(at: Place) -> Job:
    """Count all elements; the counts must add up."""
    values = at.sample.before(at.n)
    (x,) = at.arrays(values)

    def check() -> str:
        expected = oracle("histogram").log_histogram(values[: at.prefix], BITS, signed=True)
        same("counts", sketch(x[: at.prefix]), expected)
        require(sketch(x).total == at.n, "counts do not add up to the number of elements")
        return at.says

    others = peers.gpu_quantiles(x, at_least(20)) if at.device.gpu else peers.host_quantiles(values)
    return at.job(lambda: sketch(x), check, 4, others)


def halved(at: Place) -> Job:
    """Count bfloat16 weights."""
    import torch

    values = torch.from_numpy(at.sample.before(at.n)).to(torch.bfloat16)
    x, p = values.cuda() if at.device.gpu else values, at.prefix
    expected = oracle("histogram").log_histogram(values[:p], BITS, signed=True)
    return at.job(lambda: sketch(x), comes_back("counts", lambda: sketch(x[:p]), expected, at.says), 2, width=2)


def sensitivity(at: Place) -> Job:
    """Count products of weights and gradients."""
    x, gradient = at.pair()
    return at.compared(Call("histogram.log_histogram", (x,), (BITS,), named={"gradient": gradient}), 8)


def _kept(at: Place) -> Call:
    limits = at.sample.thresholds
    return Call("histogram.kept_histogram", (at.sample.before(at.n),), (limits, BITS), named={"gradient": None})


def values(at: Place) -> Job:
    """Return the values of buckets."""
    index = kernels.bucket_index(at.sample.before(at.n), 1)
    return at.compared(Call("histogram.bucket_value", (index,), (1, "float32")), 8)


def filled(counts: Any) -> str:
    """Describe how many buckets of a sketch are filled."""
    return f"{np.count_nonzero(counts):,} of {counts.size:,} buckets"


def merged(at: Place) -> Job:
    """Merge the sketches of two parts."""
    x, total = at.sample.before(at.n), sketch(at.sample.before(at.n))
    parts = [sketch(x[: at.n // 3]), sketch(x[at.n // 3 :])]
    note = f"two sketches, {filled(total.counts)}"
    return at.table(lambda: kernels.merge(*parts), lambda: total, note, says="two parts = the whole")


def quantiles(at: Place) -> Job:
    """Read a quantile from a sketch, and five for the check."""
    x, found = at.sample.before(at.n), sketch(at.sample.before(at.n))

    def check() -> str:
        for q in (0.0, 0.01, 0.5, 0.999, 1.0):
            exact, value = float(np.quantile(x, q, method="lower")), kernels.quantile(found, q)
            require(abs(value - exact) <= 2.0 ** -(BITS + 1) * abs(exact), f"quantile {q} is {value}, in truth {exact}")
        return "five quantiles within their bound"

    note = f"{filled(found.counts)}; data {at.sample.origin}"
    return Job(lambda: kernels.quantile(found, 0.999), check, 1.0, (), note)


# --------------------------------------------------------------------------------------------- models of many tensors


def row(name: str) -> str:
    """Row name of a kernel on many tensors."""
    return f"{TENSORS} tensors: {name}"


def many(at: Place, name: str, together: Callable[[list[Any]], Any], single: Callable[[Any], Any]) -> Case:
    """Return a case of many tensors, next to one tensor and to a call for each.

    Args:
        at: where.
        name: of the kernel.
        together: counts all tensors in one call.
        single: counts one tensor.
    """
    step = min(SMALL, at.n // TENSORS)
    size = step * TENSORS

    def make() -> Job:
        (whole,) = at.arrays(at.sample.before(size))
        parts = [whole[i : i + step] for i in range(0, size, step)]

        def check() -> str:
            same("counts", kernels.merge(*together(parts)), single(whole))
            return "merged counts = counts of one tensor"

        one = Peer(ONE, lambda: lambda: single(whole), note="the same kernel, all elements in one tensor")
        each = Peer(EACH, lambda: lambda: [single(part) for part in parts], note=f"{TENSORS} calls of one tensor")
        note = f"one call with {TENSORS} tensors of {step:,} elements"
        return Job(lambda: together(parts), check, 4.0 * size, [one, each, at.device.copy(4 * size)], note)

    names = (ONE, EACH, at.device.floor)
    return Case(row(name), size, "GB/s", make, at.device.name, None, names, at.device.missing)


# ------------------------------------------------------------------------------------------------------------ codebooks

CODES = 32
LOSS = f"codebook loss K = {CODES}"
PROBLEMS = 100
TOGETHER = f"{PROBLEMS} exact codebooks K = {CODES}, one launch"
SAME_POINTS = ", the same points"
"""What ends the rows that say nothing of a rate: on few points ours takes what its codebook takes."""
_EACH_K = (8, 16, CODES, 254)
_LOSS_POINTS = 200_000
_QUICK, _RAW_POINTS = 1 << 22, (100_000, 1_000_000)
"""Points on which the whole way is held against k-means on raw data: up to so many elements, and above."""
_WAY = "sketch, and the exact codebook of its buckets"
Floats = npt.NDArray[np.float32]


def solved(k: int) -> str:
    """Row name of a codebook with k entries."""
    return f"exact codebook K = {k}"


def problem(values: Floats, sigma: float = 0.2) -> tuple[Any, Any]:
    """Return bucket values and weights of raw data."""
    histogram = sketch(values)
    centers = histogram.values()
    return centers, kmeans.bucket_weights(histogram.counts[:-1], centers, sigma)


def _solve(at: Place, k: int) -> Job:
    centers, weights = problem(at.sample.before(at.n))
    exact: Callable[[], Any] = lambda: kmeans.weighted_kmeans(centers, weights, k)  # noqa: E731
    seeded: Callable[[], Any] = lambda: kmeans.weighted_kmeans(centers, weights, k, method="kmeans++")  # noqa: E731

    def check() -> str:
        few = 2000 if k <= CODES else 800  # the oracle is a Python loop: fewer buckets, but more than codes
        small, shares = problem(at.sample.before(min(at.n, few)))
        filled = int(np.count_nonzero(shares))
        require(not filled <= k < at.n // 4, f"{filled} buckets are too few to check {k} codes")
        (expected,) = oracle("kmeans").weighted_kmeans_many([(small, shares)], [k], "exact", [None], 0, 50)
        same("codebook", kmeans.weighted_kmeans(small, shares, k), expected)
        own, other = (kmeans.quantization_loss(centers, weights, found()) for found in (exact, seeded))
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
    return kmeans.weighted_kmeans(*problem(values, 1.0), CODES)


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
    if not options.begins(LOSS):
        return []
    x = at.sample.before(min(at.n, _LOSS_POINTS // 4 if options.quick else _LOSS_POINTS))
    rows, target, unit = Rows(LOSS, x.size, at.device.name), at_most(1.001), "x optimum"
    try:
        _, centers = peers.library("kmeans1d").cluster(x.astype(np.float64), CODES)
    except ImportError as error:
        rows.add("", None, unit, ("kmeans1d", None), absent(error), target=target)
        return rows
    best = loss(x, np.asarray(centers))
    own = loss(x, _fitted(x)) / best
    said = f"sum of squares on the raw values, sigma 1, optimum by kmeans1d; data {at.sample.origin}"
    rows.add("", own, unit, ("kmeans1d", 1.0), said, ratio=1 / own, target=target)
    for peer in peers.raw_kmeans(x, CODES, iterations=300):
        try:
            theirs = loss(x, np.asarray(peer.make()())) / best
            rows.add("", own, unit, (peer.name, theirs), said, ratio=theirs / own)
        except ImportError as error:
            rows.add("", own, unit, (peer.name, None), absent(error))
    return rows


def weights(at: Place) -> Job:
    """Weigh buckets by frequency and magnitude."""
    histogram = sketch(at.sample.before(at.n))
    counts, values = histogram.counts[:-1], histogram.values()

    def plain() -> Any:
        size = np.abs(np.where(counts > 0, values, 0.0))
        return 0.2 * counts / counts.sum() + 0.8 * size / size.sum()

    call = lambda: kmeans.bucket_weights(counts, values)  # noqa: E731
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
        lambda: kmeans.prepare(values, weights), expected, filled(weights), seen=seen, within=1e-12, says=says
    )


def _together(at: Place) -> Job:
    """Solve a hundred codebooks in one launch."""
    step = min(at.n // PROBLEMS, 1_000_000)
    on_host = [problem(at.sample.before(at.n)[i * step : (i + 1) * step]) for i in range(PROBLEMS)]
    problems = [tuple(at.arrays(*given)) for given in on_host]

    def solve(given: Any) -> Callable[[], Any]:
        return lambda: kmeans.weighted_kmeans_many(given, CODES)

    def check() -> str:
        same("codebooks", solve(problems[:8])(), solve(on_host[:8])())
        return "8 codebooks = the CPU's"

    one_by_one = Peer("cpu, one by one", lambda: solve(on_host))
    note = f"problems of {on_host[0][0].size:,} buckets; data {at.sample.origin}"
    return Job(solve(problems), check, 1.0, [one_by_one], note)
