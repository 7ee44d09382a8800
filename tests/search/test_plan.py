"""The plan as a pure function: what trials rule out, what is tried next, how soon it is over."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shrinkpoint.search.cube import Cube, Point, normal
from shrinkpoint.search.plan import (
    Candidate,
    Known,
    chances,
    degradations,
    luck,
    milder,
    next_trials,
    open_points,
    undominated,
)


def candidate(point: Point) -> Candidate:
    """A point as a well-behaved model would have it: error of a Gaussian's quantizer plus that of pruning."""
    inside = 2.0 / point.bins**2 * (1 - 5 * point.protect)
    pruned = point.prune**3
    return Candidate(point, 1000 * point.expected_bits(), inside + pruned, pruned / (inside + pruned))


BUDGET = 10
CANDIDATES = [candidate(p) for p in dict.fromkeys(normal(p) for p in Cube())]


def truth(c: Candidate, level: float, slope: float, extra: float) -> float:
    return math.exp(level) * c.error**slope * math.exp(extra * c.pruned * (c.point.metric == "sensitivity"))


def run(level: float, slope: float, extra: float, threshold: float, at_once: int = 1) -> tuple[list[Known], int]:
    """The trials of a search in which every degradation follows the law, and its rounds."""
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
        state = open_points(CANDIDATES, [Known(middle, loss, False)], 0.01, 0.01)
        for c, out in zip(CANDIDATES, state.ruled_out, strict=True):
            assert out == (ruled_out and milder(middle, c))
    assert milder(middle, candidate(Point(8, 0.3, "magnitude", 0.0005, 0.0, 32)))
    assert not milder(middle, candidate(Point(8, 0.3, "sensitivity", 0.0005, 0.0, 32)))
    assert milder(candidate(Point(32, 0.0, "magnitude", 0.005, 0.0, 32)), middle)


def test_what_the_histograms_say_is_no_worse_is_not_ruled_out() -> None:
    # Among few bins the level for pruned weights lowers the error.
    some = Candidate(Point(4, 0.0, "magnitude", 0.0005), 100.0, 0.12, 0.0)
    better = Candidate(Point(4, 0.2, "magnitude", 0.0005), 110.0, 0.10, 0.2)
    state = open_points([some, better], [Known(some, 0.5, False)], 0.01, 0.01)
    assert state.ruled_out.tolist() == [True, False]
    assert undominated([some, better]) == [some, better]


def test_a_pass_leaves_only_what_is_smaller_by_more_than_the_tolerance() -> None:
    done = CANDIDATES[100]
    state = open_points(CANDIDATES, [Known(done, 0.001, True)], 0.01, 0.05)
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


def test_where_trials_gained_by_compression_chance_is_reckoned_with() -> None:
    target = next(c for c in CANDIDATES if c.point == Point(6, 0.0, "magnitude", 0.0005, 0.0, 32))
    near = next(c for c in CANDIDATES if c.point == Point(8, 0.0, "magnitude", 0.0005, 0.0, 32))
    worse = next(c for c in CANDIDATES if c.point == Point(4, 0.0, "magnitude", 0.0005, 0.0, 32))
    failed = Known(target, 0.03, False)
    assert luck([failed, Known(near, 0.001, True)]) == 0.0
    gained = [failed, Known(near, -0.03, True)]
    assert luck(gained) == pytest.approx(math.sqrt(0.03**2 / near.error / 2))
    assert luck([Known(near, -0.02, True, stale=True)]) == 0.0
    # What is a little more aggressive than a failure may pass, and is not ruled out by it.
    assert open_points([worse], [failed], 0.01, 0.01).ruled_out.all()
    assert not open_points([worse], gained, 0.01, 0.01).ruled_out.any()
    plain = [failed, Known(near, 1e-4, True)]
    assert chances([worse], gained, 0.01, 1e-4)[0] > 2 * chances([worse], plain, 0.01, 1e-4)[0]


def test_chances_fall_with_aggressiveness_and_what_is_no_number_fails() -> None:
    known = [Known(CANDIDATES[100], math.inf, False), Known(CANDIDATES[0], 3.0, False)]
    odds = chances(CANDIDATES, known, 0.01, 1e-4)
    assert ((odds >= 0) & (odds <= 1)).all()
    by_error = [p for _, p in sorted(zip((c.error for c in CANDIDATES), odds, strict=True))]
    assert by_error[0] > by_error[-1]
    assert np.isfinite(odds).all()
