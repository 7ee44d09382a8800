"""The plan of trials as a pure function: exclusions, next trials, number of rounds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.searching.cube import Cube, Point, normal
from shrinkpoint.searching.planning import (
    SAMPLES,
    Candidate,
    Known,
    chances,
    degradations,
    distinct,
    draws,
    milder,
    next_trials,
    open_points,
    signed_scale,
    undominated,
)


def candidate(point: Point) -> Candidate:
    """Return a point with the error of a Gaussian's quantizer plus that of pruning."""
    inside = 2.0 / point.bins**2 * (1 - 5 * point.protect)
    pruned = point.prune**3
    return Candidate(point, 1000 * point.expected_bits(), inside + pruned, pruned / (inside + pruned))


BUDGET = 10
CANDIDATES = [candidate(p) for p in dict.fromkeys(normal(p) for p in Cube())]


def truth(c: Candidate, level: float, slope: float, extra: float) -> float:
    return math.exp(level) * c.error**slope * math.exp(extra * c.pruned * (c.point.metric == "sensitivity"))


def run(level: float, slope: float, extra: float, threshold: float, at_once: int = 1) -> tuple[list[Known], int]:
    """Search with degradations that follow the law; return trials and rounds."""
    by_point = {c.point: c for c in CANDIDATES}
    worth, known, rounds = undominated(CANDIDATES), [], 0
    while rounds < BUDGET:
        points = next_trials(worth, known, threshold, at_once=at_once, left=BUDGET - rounds)
        if not points:
            break
        assert len(points) <= at_once
        assert len(set(points)) == len(points)
        rounds += 1
        for point in points:
            assert point not in {k.candidate.point for k in known}
            loss = truth(by_point[point], level, slope, extra)
            known.append(Known(by_point[point], loss, loss <= threshold))
    return known, rounds


@settings(max_examples=25)
@given(
    level=st.floats(-3, 1),
    slope=st.floats(0.7, 1.2),
    extra=st.floats(-1, 0.5),
    threshold=st.floats(0.002, 0.2),
    at_once=st.sampled_from([1, 2, 4, 8]),
)
def test_the_smallest_passing_point_is_found_in_few_trials(
    level: float, slope: float, extra: float, threshold: float, at_once: int
) -> None:
    known, rounds = run(level, slope, extra, threshold, at_once)
    passing = [c.nbytes for c in CANDIDATES if truth(c, level, slope, extra) <= threshold]
    found = [k.candidate.nbytes for k in known if k.passed]
    assert bool(found) == bool(passing)
    if passing:
        assert min(found) <= 1.1 * min(passing)
    assert rounds <= BUDGET


def test_over_many_models_nearly_all_choices_are_within_three_percent() -> None:
    rng = np.random.default_rng(0)
    ratios, rounds = [], []
    for _ in range(25):
        level, slope, extra = rng.uniform(-3, 1), rng.uniform(0.7, 1.2), rng.uniform(-1, 0.5)
        threshold = float(np.exp(rng.uniform(np.log(0.002), np.log(0.2))))
        known, count = run(level, slope, extra, threshold)
        passing = [c.nbytes for c in CANDIDATES if truth(c, level, slope, extra) <= threshold]
        found = [k.candidate.nbytes for k in known if k.passed]
        if passing:
            ratios.append(min(found) / min(passing))
            rounds.append(count)
    assert np.mean(np.array(ratios) <= 1.03) >= 0.9
    assert np.mean(rounds) <= 7


def test_trials_beside_each_other_take_fewer_rounds() -> None:
    rounds = {n: run(0.0, 0.9, -0.5, 0.02, n)[1] for n in (1, 8)}
    assert rounds[8] <= 3 < rounds[1]


def test_the_plan_is_deterministic() -> None:
    known = [Known(CANDIDATES[50], 0.3, False), Known(CANDIDATES[150], 0.001, True)]
    first = next_trials(CANDIDATES, known, 0.01, at_once=4)
    assert first == next_trials(CANDIDATES, known, 0.01, at_once=4)
    assert len(first) == 4


def test_a_clear_failure_rules_out_what_is_more_aggressive_and_a_near_miss_does_not() -> None:
    middle = next(c for c in CANDIDATES if c.point == Point(12, 0.2, "magnitude", 0.005, 0.0, 32))
    for loss, ruled_out in ((0.1, True), (0.0101, False)):
        state = open_points(CANDIDATES, [Known(middle, loss, False)], 0.01, 0.01, 1e-4)
        for c, out in zip(CANDIDATES, state.ruled_out, strict=True):
            assert out == (ruled_out and milder(middle, c))
    assert milder(middle, candidate(Point(8, 0.3, "magnitude", 0.0005, 0.0, 32)))
    assert not milder(middle, candidate(Point(8, 0.3, "sensitivity", 0.0005, 0.0, 32)))
    assert milder(candidate(Point(32, 0.0, "magnitude", 0.005, 0.0, 32)), middle)


def test_what_the_histograms_say_is_no_worse_is_not_ruled_out() -> None:
    # Among few bins the level for pruned weights lowers the error.
    some = Candidate(Point(4, 0.0, "magnitude", 0.0005), 100.0, 0.12, 0.0)
    better = Candidate(Point(4, 0.2, "magnitude", 0.0005), 110.0, 0.10, 0.2)
    state = open_points([some, better], [Known(some, 0.5, False)], 0.01, 0.01, 1e-4)
    assert state.ruled_out.tolist() == [True, False]
    assert undominated([some, better]) == [some, better]


def test_a_pass_leaves_only_what_is_smaller_by_more_than_the_tolerance() -> None:
    done = CANDIDATES[100]
    state = open_points(CANDIDATES, [Known(done, 0.001, True)], 0.01, 0.05, 1e-4)
    assert state.best == done.nbytes
    for c, alive in zip(CANDIDATES, state.alive, strict=True):
        assert alive == (c.nbytes < 0.95 * done.nbytes)


def test_dominated_points_are_left_out() -> None:
    a = Candidate(Point(8, 0.0, "magnitude", 0.005), 100.0, 0.02, 0.0)
    b = Candidate(Point(8, 0.1, "magnitude", 0.005), 101.0, 0.03, 0.1)  # larger, and more aggressive
    c = Candidate(Point(8, 0.2, "magnitude", 0.005), 99.0, 0.04, 0.2)
    assert undominated([a, b, c]) == [c, a]


def test_nothing_is_tried_where_nothing_can_pass() -> None:
    mildest = min(CANDIDATES, key=lambda c: c.error)
    assert next_trials(CANDIDATES, [Known(mildest, 5.0, False)], 0.001) == []


def test_the_model_learns_from_trials_and_less_from_stale_ones() -> None:
    target = next(c for c in CANDIDATES if c.point == Point(16, 0.0, "magnitude", 0.0005, 0.0, 32))
    near = next(c for c in CANDIDATES if c.point == Point(12, 0.0, "magnitude", 0.0005, 0.0, 32))
    before = degradations([target], [], 1e-4)[0]
    fresh = degradations([target], [Known(near, 0.2, False)], 1e-4)[0]
    stale = degradations([target], [Known(near, 0.2, False, stale=True)], 1e-4)[0]
    assert before < stale < fresh
    assert fresh == pytest.approx(0.2 * target.error / near.error, rel=0.3)


def test_candidates_that_come_to_the_same_are_tried_once() -> None:
    a = Candidate(Point(8, 0.0, "magnitude", 0.005), 100.0, 0.02, 0.0)
    same = Candidate(Point(8, 0.1, "sensitivity", 0.005), 100.0, 0.02, 0.0)  # the pruned elements were zero already
    other = Candidate(Point(8, 0.1, "magnitude", 0.005), 90.0, 0.03, 0.1)
    assert distinct([a, same, other]) == distinct([same, other, a]) == [other, a]


# ---------------------------------------------------------------------- the signed part


def patterned(errors: Sequence[Sequence[float]], bins: Sequence[int]) -> list[Candidate]:
    """Return candidates with errors of a few elements; E is the sum of squares."""
    found = []
    for row, b in zip(errors, bins, strict=True):
        pattern = np.asarray(row, np.float32)
        point = Point(b, 0.0, "magnitude", 0.0005, 0.0, 32)
        found.append(Candidate(point, 100.0 * b, float(pattern @ pattern), 0.0, pattern))
    return found


def test_a_gain_tells_of_points_with_the_same_errors() -> None:
    tried, alike, apart, against = patterned([(0.2, 0, 0), (0.19, 0.06, 0), (0, 0, 0.2), (-0.2, 0, 0)], (8, 7, 6, 5))
    gained = [Known(tried, -0.03, True)]
    plain = degradations([alike, apart, against], [], 1e-4)
    told = degradations([alike, apart, against], gained, 1e-4)
    assert told[0] < -0.01 < 0 < told[1] < told[2]
    assert told[2] > plain[2] + 0.01
    # Errors of an earlier checkpoint were others.
    assert degradations([alike], [dataclasses.replace(gained[0], stale=True)], 1e-4)[0] > -0.005


@pytest.mark.parametrize("size", [0.003, 0.03, 0.2])
def test_the_size_of_the_signed_part_is_learned(size: float) -> None:
    rng = np.random.default_rng(1)
    patterns = rng.standard_normal((12, 200)) * 0.015
    candidates = patterned(patterns.tolist(), range(4, 16))
    gradient = rng.standard_normal(200)
    known = []
    for c, pattern in zip(candidates, patterns, strict=True):
        loss = 0.1 * c.error + size * float(gradient @ pattern)
        known.append(Known(c, loss, loss <= 0.01))
    assert signed_scale(known, 1e-5) == pytest.approx(size, rel=0.7)
    assert signed_scale([], 1e-5) == pytest.approx(0.04, rel=0.5)


def test_a_failure_by_chance_rules_out_nothing() -> None:
    target = next(c for c in CANDIDATES if c.point == Point(6, 0.0, "magnitude", 0.0005, 0.0, 32))
    near = next(c for c in CANDIDATES if c.point == Point(8, 0.0, "magnitude", 0.0005, 0.0, 32))
    worse = next(c for c in CANDIDATES if c.point == Point(4, 0.0, "magnitude", 0.0005, 0.0, 32))
    smooth = [Known(target, 0.03, False), *(Known(c, 0.5 * c.error, True) for c in CANDIDATES[-8:])]
    assert open_points([worse], smooth, 0.01, 0.01, 1e-4).ruled_out.all()
    gained = [Known(target, 0.03, False), Known(near, -0.03, True)]
    assert signed_scale(gained, 1e-4) > 2 * signed_scale(smooth, 1e-4)
    assert not open_points([worse], gained, 0.01, 0.01, 1e-4).ruled_out.any()
    assert chances([worse], gained, 0.01, 1e-4)[0] > 2 * chances([worse], smooth, 0.01, 1e-4)[0]


def signed(seed: int, size: float) -> tuple[list[Candidate], list[float]]:
    """Return candidates and degradations that also depend on the direction of errors."""
    rng = np.random.default_rng(seed)
    by_bins = {b: rng.standard_normal(64) for b in Cube().bins}
    gradient = rng.standard_normal(64)
    found, losses = [], []
    for c in CANDIDATES:
        own = rng.standard_normal(64) * (0.2 + 2 * c.point.prune)
        direction = by_bins[c.point.bins] + own
        pattern = (direction * math.sqrt(c.error) / np.linalg.norm(direction)).astype(np.float32)
        found.append(dataclasses.replace(c, pattern=pattern))
        losses.append(truth(c, -1.5, 0.9, 0.0) + size * float(gradient @ pattern))
    return found, losses


def searched(candidates: list[Candidate], losses: list[float], threshold: float) -> list[Known]:
    """Search with these losses; return the trials."""
    places = {c.point: i for i, c in enumerate(candidates)}
    known: list[Known] = []
    while len(known) < BUDGET:
        points = next_trials(distinct(candidates), known, threshold, left=BUDGET - len(known))
        if not points:
            break
        i = places[points[0]]
        assert not any(k.candidate.point == points[0] for k in known)
        known.append(Known(candidates[i], losses[i], losses[i] <= threshold))
    return known


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([0.0, 0.003, 0.01, 0.03, 0.1]),
    threshold=st.sampled_from([0.001, 0.01, 0.05]),
)
def test_with_losses_of_either_sign_something_is_found_wherever_much_passes(
    seed: int, size: float, threshold: float
) -> None:
    candidates, losses = signed(seed, size)
    known = searched(candidates, losses, threshold)
    assert len(known) <= BUDGET
    if sum(x <= threshold for x in losses) >= 0.4 * len(losses):
        assert any(k.passed for k in known)


def test_with_losses_of_either_sign_most_choices_are_near_the_least() -> None:
    ratios: dict[float, list[float]] = {}
    for size in (0.003, 0.01, 0.03):
        for seed in range(6):
            candidates, losses = signed(seed, size)
            passing = [c.nbytes for c, x in zip(candidates, losses, strict=True) if x <= 0.01]
            known = searched(candidates, losses, 0.01)
            found = [k.candidate.nbytes for k in known if k.passed]
            if passing:
                ratios.setdefault(size, []).append(min(found, default=math.inf) / min(passing))
    assert all(np.median(r) <= 1.03 for r in ratios.values())
    assert np.mean([x <= 1.03 for r in ratios.values() for x in r]) >= 2 / 3


def test_draws_follow_the_trials() -> None:
    candidates, losses = signed(3, 0.03)
    known = [Known(c, x, False) for c, x in zip(candidates[::20], losses[::20], strict=True)]
    found = draws([k.candidate for k in known], known, 1e-5)
    assert found.shape == (SAMPLES, len(known))
    assert (found == draws([k.candidate for k in known], known, 1e-5)).all()
    near = np.abs(np.median(found, axis=0) - [k.degradation for k in known])
    assert (near <= 0.2 * np.abs([k.degradation for k in known]) + 0.003).all()
    assert draws([], known, 1e-5).shape == (SAMPLES, 0)


def test_chances_fall_with_aggressiveness_and_what_is_no_number_fails() -> None:
    known = [Known(CANDIDATES[100], math.inf, False), Known(CANDIDATES[0], 3.0, False)]
    odds = chances(CANDIDATES, known, 0.01, 1e-4)
    assert ((odds >= 0) & (odds <= 1)).all()
    by_error = [p for _, p in sorted(zip((c.error for c in CANDIDATES), odds, strict=True))]
    assert by_error[0] > by_error[-1]
    assert np.isfinite(odds).all()
