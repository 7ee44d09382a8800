"""Codebooks: bit-equal on every back end, optimal where promised, safe at every scale."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.histogram import log_histogram
from shrinkpoint.kernels.kmeans import bucket_weights, prepare, quantization_loss, weighted_kmeans, weighted_kmeans_many
from shrinkpoint.kernels.kmeans import reference as oracle

if TYPE_CHECKING:
    from .conftest import BackEnd

Vector = np.ndarray[Any, np.dtype[np.float64]]


def problem(rng: np.random.Generator, m: int, kind: str = "normal") -> tuple[Vector, Vector]:
    """Return ascending centers with ties, and weights with zeros."""
    x = np.sort(rng.standard_normal(m))
    w = rng.random(m) ** 4
    w[rng.random(m) < 0.1] = 0.0
    if kind == "ties":
        x = np.sort(np.round(x * 4) / 4)
        w = np.round(w * 8) / 8
    elif kind == "huge":
        x, w = x * 1e307, w * 1e307
    elif kind == "tiny":
        x, w = x * 1e-310, w * 1e-310
    elif kind == "spread":
        x, w = np.sort(x * 10.0 ** rng.integers(-200, 200, m)), w * 10.0 ** rng.integers(-150, 150, m)
    return x, w


def solve(
    module: Any,
    x: Any,
    w: Any,
    k: int,
    *,
    method: str = "exact",
    initial: Any = None,
    seed: int = 0,
    iterations: int = 50,
) -> Any:
    """Solve one problem in a back end."""
    return module.weighted_kmeans_many([(x, w)], [k], method, [initial], seed, iterations)[0]


def optimal_loss(x: Vector, w: Vector, k: int) -> float:
    """Return the least loss over all cuts of the centers into k runs."""
    best = math.inf
    for cuts in itertools.combinations(range(1, x.size), min(k, x.size) - 1):
        loss = 0.0
        for start, end in itertools.pairwise((0, *cuts, x.size)):
            part, mass = x[start:end], w[start:end]
            if mass.sum() > 0.0:
                loss += float((mass * (part - (mass * part).sum() / mass.sum()) ** 2).sum())
        best = min(best, loss)
    return best


@pytest.mark.parametrize("size", [1, 15, 16, 17, 40])
def test_of_two_cuts_that_are_as_good_the_first_is_taken(back_end: BackEnd, size: int) -> None:
    # Three heaps of one weight: to part the left one from the others is as good as the right one, and all numbers on
    # the way are whole. The right one has as many centers as the others, so that a search may well begin at its cut.
    few, many = (2.0 * np.arange(n) - (n - 1) for n in (size, 2 * size))
    x = np.concatenate([few - 1000, few, many + 1000])
    w = np.concatenate([np.full(2 * size, 2.0), np.ones(2 * size)])
    codes = solve(back_end.module("kmeans"), back_end.array(x), back_end.array(w), 2, method="exact")
    assert back_end.numpy(codes).tolist() == [-1000.0, 500.0]


@pytest.mark.parametrize("kind", ["normal", "ties", "huge", "tiny", "spread"])
@pytest.mark.parametrize("method", ["exact", "kmeans++"])
def test_codebooks_match_the_oracle(back_end: BackEnd, fresh: np.random.Generator, method: str, kind: str) -> None:
    module = back_end.module("kmeans")
    seed = int(fresh.integers(0, 2**63))
    for m, k in ((0, 3), (1, 3), (2, 1), (5, 5), (40, 1), (97, 2), (130, 16)):
        x, w = problem(fresh, m, kind)
        codes = solve(module, back_end.array(x), back_end.array(w), k, method=method, seed=seed)
        expected = solve(oracle, x, w, k, method=method, seed=seed)
        np.testing.assert_array_equal(back_end.numpy(codes), expected, strict=True)
        assert (np.diff(expected) >= 0).all()
        assert np.isfinite(expected).all()
        if kind != "spread":
            assert expected.size == min(k, np.unique(x[w > 0]).size)
        if m and kind in ("normal", "ties") and expected.size:
            loss = module.quantization_loss(back_end.array(x), back_end.array(w), back_end.array(expected))
            assert loss == oracle.quantization_loss(x, w, expected)


@pytest.mark.parametrize(
    ("centers", "weights", "k"),
    [
        ([0.0, 0.1, 1.0, 5.0, 9.0], [1.0, 1e-20, 1.0, 1.0, 1.0], 3),  # a weight lost in the prefix sums
        ([0.0, 1.0, 2.0], [1e300, 1e-300, 1.0], 3),  # one that underflows next to the largest
        ([0.0, 1e-200, 2e-200, 3e-200, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0], 4),  # distances whose squares underflow
        ([0.0, 5e-324, 1.7e308], [1.0, 1.0, 1.0], 2),  # centers that meet when scaled
    ],
)
def test_extreme_problems(back_end: BackEnd, centers: list[float], weights: list[float], k: int) -> None:
    x, w = np.array(centers), np.array(weights)
    for method in ("exact", "kmeans++"):
        codes = solve(back_end.module("kmeans"), back_end.array(x), back_end.array(w), k, method=method)
        expected = solve(oracle, x, w, k, method=method)
        np.testing.assert_array_equal(back_end.numpy(codes), expected, strict=True)
        assert (np.diff(expected) > 0).all()
        assert x[0] <= expected[0]
        assert expected[-1] <= x[-1]


def test_warm_start_matches_the_oracle(back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = back_end.module("kmeans")
    x, w = problem(fresh, 120)
    for start in ([0.0], [-9.0, -8.0, 0.0, 0.1, 7.0], [-1.0, -1.0, 0.5, 0.5], list(np.linspace(-2, 2, 16))):
        for iterations in (0, 1, 50):
            initial = np.array(start)
            codes = solve(
                module, back_end.array(x), back_end.array(w), 16, initial=back_end.array(initial), iterations=iterations
            )
            expected = solve(oracle, x, w, 16, initial=initial, iterations=iterations)
            np.testing.assert_array_equal(back_end.numpy(codes), expected, strict=True)
            assert expected.size == initial.size
            if iterations == 0:
                np.testing.assert_array_equal(expected, initial)
    nothing = solve(module, back_end.array(x), back_end.array(w * 0), 4, initial=back_end.array(initial[:4]))
    np.testing.assert_array_equal(back_end.numpy(nothing), initial[:4])


@pytest.mark.parametrize("method", ["exact", "kmeans++"])
def test_many_equals_one_by_one(back_end: BackEnd, fresh: np.random.Generator, method: str) -> None:
    module = back_end.module("kmeans")
    problems = [problem(fresh, m) for m in (0, 1, 7, 64, 101)]
    ks = [4, 4, 3, 8, 11]
    starts = [None, None, np.array([0.0, 1.0]), None, np.array([-1.0, 1.0])]
    many = module.weighted_kmeans_many(
        [(back_end.array(x), back_end.array(w)) for x, w in problems],
        ks,
        method,
        [None if s is None else back_end.array(s) for s in starts],
        3,
        50,
    )
    assert len(many) == len(problems)
    for codes, (x, w), k, start in zip(many, problems, ks, starts, strict=True):
        expected = solve(oracle, x, w, k, method=method, initial=start, seed=3)
        np.testing.assert_array_equal(back_end.numpy(codes), expected, strict=True)


@pytest.mark.parametrize("starts", [False, True])
def test_problems_that_keep_too_many_cuts_take_several_launches(
    starts: bool, monkeypatch: pytest.MonkeyPatch, fresh: np.random.Generator
) -> None:
    """Problems that keep too many cuts take several launches on a GPU."""
    gpu = pytest.importorskip("shrinkpoint.kernels.kmeans.gpu")
    problems = [(np.sort(fresh.standard_normal(m)), 0.1 + fresh.random(m)) for m in (64, 40, 3, 90, 51)]
    ks = [8, 5, 3, 6, 4]
    initial = [None, np.array([-1.0, 1.0]) if starts else None, None, None, None]
    plan, launches = gpu._launches, []

    def seen(table: Any, numbers: Any) -> Any:
        for some, cuts in plan(table, numbers):
            launches.append(len(some))
            yield some, cuts

    monkeypatch.setattr(gpu, "_launches", seen)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs = [(torch.from_numpy(x).to(device), torch.from_numpy(w).to(device)) for x, w in problems]
    begin = [None if s is None else torch.from_numpy(s).to(device) for s in initial]
    for most, expected in ((1 << 20, [3 if starts else 4]), (65 * 9 + 91 * 7, [2, 1] if starts else [2, 2])):
        monkeypatch.setattr(gpu, "CUTS", most)
        launches.clear()
        for codes, (x, w), k, start in zip(
            gpu.weighted_kmeans_many(pairs, ks, "exact", begin, 0, 50), problems, ks, initial, strict=True
        ):
            np.testing.assert_array_equal(codes.cpu().numpy(), solve(oracle, x, w, k, initial=start), strict=True)
        assert launches == expected


@given(
    st.lists(st.tuples(st.integers(-30, 30), st.integers(0, 4)), min_size=1, max_size=9),
    st.integers(1, 5),
    st.floats(-1e3, 1e3),
)
def test_exact_is_optimal(points: list[tuple[int, int]], k: int, offset: float) -> None:
    points = sorted(points)
    x = np.array([p for p, _ in points]) + offset
    w = np.array([float(q) for _, q in points])
    codes = weighted_kmeans(x, w, k)
    if not w.any():
        assert codes.size == 0
        return
    loss, best = quantization_loss(x, w, codes), optimal_loss(x, w, k)
    assert loss <= best + 1e-9 * (1.0 + best)
    for method_loss in (
        quantization_loss(x, w, weighted_kmeans(x, w, k, method="kmeans++")),
        quantization_loss(x, w, weighted_kmeans(x, w, k, initial=codes)),
    ):
        assert method_loss >= best - 1e-9 * (1.0 + best)


def test_exact_beats_seeding_on_a_real_sketch(fresh: np.random.Generator) -> None:
    data = (fresh.standard_normal(100_000) * 0.02).astype(np.float32)
    h = log_histogram(data, 6, signed=True)
    w = bucket_weights(h.counts[:-1], h.values())
    exact = weighted_kmeans(h.values(), w, 16)
    for seed in range(3):
        seeded = weighted_kmeans(h.values(), w, 16, method="kmeans++", seed=seed)
        assert seeded.size == exact.size == 16
        assert quantization_loss(h.values(), w, exact) <= quantization_loss(h.values(), w, seeded) * (1 + 1e-12)
    moved = weighted_kmeans(h.values(), w, 16, initial=exact)
    np.testing.assert_allclose(moved, exact, rtol=1e-9, atol=1e-12)  # the optimum is a fixed point


def test_the_method_may_be_given_by_place(fresh: np.random.Generator) -> None:
    x, w = problem(fresh, 300)
    seeded = weighted_kmeans(x, w, 8, "kmeans++", seed=3)
    np.testing.assert_array_equal(seeded, weighted_kmeans(x, w, 8, method="kmeans++", seed=3))
    np.testing.assert_array_equal(seeded, weighted_kmeans_many([(x, w)], 8, "kmeans++", seed=3)[0])
    # Its iterations may reach the best codebook; its first entries are elements, and no means.
    first = weighted_kmeans(x, w, 8, "kmeans++", seed=3, iterations=0)
    assert (first != weighted_kmeans(x, w, 8, "exact")).any()


def test_seeding_depends_on_the_seed_alone(fresh: np.random.Generator) -> None:
    x, w = problem(fresh, 500)
    runs = {tuple(weighted_kmeans(x, w, 8, method="kmeans++", seed=s, iterations=0)) for s in (0, 1, 2, 3, 0, -1)}
    assert len(runs) == 5
    assert all(set(run) <= set(x[w > 0]) for run in runs)


def test_seeds_are_drawn_by_weight_and_squared_distance() -> None:
    x, w = np.array([0.0, 1.0, 3.0]), np.array([1.0, 2.0, 5.0])
    drawn = [tuple(weighted_kmeans(x, w, 2, "kmeans++", seed=seed, iterations=0)) for seed in range(4000)]
    expected = dict.fromkeys(itertools.combinations(x.tolist(), 2), 0.0)
    for i, j in itertools.permutations(range(3), 2):
        second = w * (x - x[i]) ** 2
        expected[min(x[i], x[j]), max(x[i], x[j])] += w[i] / w.sum() * second[j] / second.sum()
    assert {pair: drawn.count(pair) / 4000 for pair in expected} == pytest.approx(expected, abs=0.03)


def test_bucket_weights_follow_the_formula(fresh: np.random.Generator) -> None:
    counts = fresh.integers(0, 5, 50)
    values = np.sort(fresh.standard_normal(50))
    used = counts > 0
    for sigma in (0.0, 0.2, 1.0):
        expected = sigma * counts / counts.sum() + (1 - sigma) * abs(values) / abs(values[used]).sum() * used
        weights = bucket_weights(counts, values, sigma)
        np.testing.assert_allclose(weights, expected, rtol=1e-13)
        assert (weights[~used] == 0).all()
    order = fresh.permutation(50)
    np.testing.assert_array_equal(
        bucket_weights(counts[order], values[order])[np.argsort(order)], bucket_weights(counts, values)
    )
    assert bucket_weights(np.array([0, 3, 0]), np.array([-1.0, 0.0, 1.0])).tolist() == [0.0, 1.0, 0.0]
    assert bucket_weights(np.array([0, 0]), np.array([np.nan, 1.0])).tolist() == [0.0, 0.0]
    assert bucket_weights(np.array([1, 1]), np.array([-1.5e308, 1.5e308]), 0.0).tolist() == [0.5, 0.5]
    assert bucket_weights(np.array([1, 1]), np.array([5e-324, 5e-324]), 0.0).tolist() == [0.5, 0.5]


@given(
    st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), max_size=30),
    st.integers(-900, 900),
    st.integers(-900, 900),
)
def test_what_is_solved_is_the_problem_scaled(points: list[tuple[int, int]], octave: int, weighed: int) -> None:
    points.sort()
    centers = np.ldexp(np.array([x for x, _ in points], np.float64), octave)
    weights = np.ldexp(np.array([w for _, w in points], np.float64), weighed)
    x, w, exponent = prepare(centers, weights)
    own: dict[float, float] = {}
    for center, weight in zip(centers, weights, strict=True):
        if weight:
            own[center] = own.get(center, 0.0) + weight
    assert np.ldexp(x, exponent).tolist() == list(own)
    if not own:
        return
    assert np.abs(x).max() < 1.0
    assert np.abs(x).max() >= 0.5 or not any(own)
    scale = w[0] / next(iter(own.values()))
    assert math.frexp(scale)[0] == 0.5
    assert (w / scale).tolist() == list(own.values())


def test_bad_arguments() -> None:
    x, w = np.array([0.0, 1.0, 2.0]), np.ones(3)
    cases: list[tuple[str, Any]] = [
        ("k is", lambda: weighted_kmeans(x, w, 0)),
        ("method", lambda: weighted_kmeans(x, w, 2, method="nearest")),
        ("iterations", lambda: weighted_kmeans(x, w, 2, iterations=-1)),
        ("one length", lambda: weighted_kmeans(x, w[:2], 2)),
        ("ascending", lambda: weighted_kmeans(x[::-1].copy(), w, 2)),
        ("ascending", lambda: weighted_kmeans(np.array([0.0, np.nan, 1.0]), w, 2)),
        ("weights", lambda: weighted_kmeans(x, -w, 2)),
        ("weights", lambda: weighted_kmeans(x, w * np.inf, 2)),
        ("initial", lambda: weighted_kmeans(x, w, 2, initial=x)),
        ("initial", lambda: weighted_kmeans(x, w, 2, initial=np.array([1.0, 0.0]))),
        ("initial", lambda: weighted_kmeans(x, w, 2, initial=np.array([np.inf]))),
        ("2 values of k", lambda: weighted_kmeans_many([(x, w)], [1, 2])),
        ("codebook", lambda: quantization_loss(x, w, x[:0])),
        ("sigma", lambda: bucket_weights(np.ones(3, dtype=np.int64), x, 1.5)),
        ("one length", lambda: bucket_weights(np.ones(2, dtype=np.int64), x)),
        (">= 0", lambda: bucket_weights(np.array([1, -1, 1]), x)),
    ]
    for message, call in cases:
        with pytest.raises(BadArgumentError, match=message):
            call()
    assert weighted_kmeans_many([], 3) == []


@pytest.mark.parametrize("kind", ["normal", "huge", "tiny", "spread"])
@pytest.mark.parametrize("method", ["exact", "kmeans++"])
def test_the_error_state_of_the_caller_has_no_effect(kind: str, method: str, fresh: np.random.Generator) -> None:
    x, w = problem(fresh, 60, kind)
    counts = fresh.integers(0, 9, 60)
    expected = weighted_kmeans(x, w, 7, method=method)
    loss, weights = quantization_loss(x, w, expected), bucket_weights(counts, x)
    with np.errstate(all="raise"):
        np.testing.assert_array_equal(weighted_kmeans(x, w, 7, method=method), expected, strict=True)
        assert quantization_loss(x, w, expected) == loss
        np.testing.assert_array_equal(bucket_weights(counts, x), weights, strict=True)


def test_numbers_of_other_kinds() -> None:
    x, w = np.array([0.0, 1.0, 10.0]), np.ones(3)
    same = [weighted_kmeans(x, w, k).tolist() for k in (2, np.int64(2))]
    same += [
        weighted_kmeans_many([(x, w)], k)[0].tolist() for k in (2, np.int64(2), [2], (np.int64(2),), np.array([2]))
    ]
    assert all(codes == same[0] for codes in same)
    seeds = [weighted_kmeans(x, w, 2, method="kmeans++", seed=seed).tolist() for seed in (5, 5 + 2**64, 5 - 2**64)]
    assert seeds[0] == seeds[1] == seeds[2]
    for iterations in (math.nan, 1.5, 2**31):
        with pytest.raises(BadArgumentError, match="iterations is"):
            weighted_kmeans(x, w, 2, iterations=iterations)  # type: ignore[arg-type]
    with pytest.raises(BadArgumentError, match="centers is bfloat16"):  # whose bits would be taken for numbers
        weighted_kmeans(torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.ones(2), 1)


def test_what_has_no_weight_has_no_loss(back_end: BackEnd) -> None:
    """A center without weight has no loss, even if its squared distance underflows."""
    x, w = np.array([0.0, 1.0, 1e300]), np.array([1.0, 2.0, 0.0])
    module = back_end.module("kmeans")
    assert module.quantization_loss(back_end.array(x), back_end.array(w), back_end.array(np.array([0.5]))) == 0.75
