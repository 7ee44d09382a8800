"""`search`: the smallest configuration within the threshold, in few evaluations; errors."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import rich.progress
import torch
from threadpoolctl import threadpool_info, threadpool_limits

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.searching.cube import Cube, Point, normal
from shrinkpoint.searching.estimate import Estimate, Estimator
from shrinkpoint.searching.result import SearchResult, Trial
from shrinkpoint.searching.sample import energy

from .calls import search
from .common import Chain, brute_force, clicks, convolutional, optimum, perceptron

SMALL = Cube(bins=(4, 8, 16, 32, 64), prune=(0.0, 0.2), protect=(0.0005, 0.005))
State = dict[str, Any]


def random_state(seed: int = 0, **more: Any) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {f"{i}.weight": torch.randn(48, 64, generator=generator) for i in range(3)} | more


class Loss:
    """One plus `scale` times the mean squared relative error; counts its calls."""

    def __init__(self, exact: State, scale: float = 1.0, sign: float = 1.0) -> None:
        self.exact = {k: x.clone() for k, x in exact.items() if isinstance(x, torch.Tensor)}
        self.scale, self.sign, self.calls = scale, sign, 0

    def __call__(self, restored: State) -> float:
        self.calls += 1
        errors = [float(((restored[k] - x) ** 2).mean() / (x**2).mean()) for k, x in self.exact.items()]
        return 1.0 + self.sign * self.scale * sum(errors) / len(errors)


# ---------------------------------------------------------------------- the choice


@pytest.mark.parametrize(
    ("chain", "number", "cube", "thresholds"),
    [
        (perceptron, 1, Cube(prune=(0.0, 0.2, 0.4), protect=(0.0005, 0.01)), (0.01, 0.03, 0.1)),
        (perceptron, 2, Cube(), (0.03, 0.1)),
        (convolutional, 1, Cube(prune=(0.0, 0.3), protect=(0.0005, 0.01)), (0.005, 0.02, 0.05)),
        (clicks, 1, Cube(prune=(0.0, 0.3), protect=(0.0005, 0.01)), (0.002, 0.01, 0.05)),
    ],
    ids=["perceptron", "perceptron, delta", "convolutions, delta", "embeddings, delta"],
)
def test_the_choice_is_within_three_percent_of_brute_force(
    chain: Callable[[], Chain], number: int, cube: Cube, thresholds: tuple[float, ...]
) -> None:
    made = chain()
    prev = None
    if chain is not perceptron or number == 2:
        published = Point(16, 0.0, "magnitude", 0.0005, 0.0, 32).config()
        prev = sp.compress(made.states[number - 1], cfg=published, grads=made.grads[number - 1])
    measured = brute_force(made, number, cube, prev)
    # Points that prune nothing are there twice.
    assert len(measured) == len(cube) - len(cube.bins) * len(cube.protect)
    baseline = made.evaluate(made.states[number])
    for threshold in thresholds:
        found = sp.search(
            made.states[number],
            made.evaluate,
            threshold,
            prev=prev,
            grads=made.grads[number],
            options=sp.SearchOptions(cube=cube),
        )
        best = optimum(measured, baseline, threshold)
        assert best is not None
        assert found.met
        assert found.is_exhaustive
        # What a user gets who compresses with the result.
        ckpt = sp.compress(made.states[number], prev, found.config, grads=made.grads[number])
        assert ckpt.nbytes <= 1.03 * best
        assert ckpt.nbytes == pytest.approx(found.nbytes, rel=1e-3)
        quality = made.evaluate(sp.decompress(ckpt))
        assert (quality - baseline) / baseline <= threshold
        assert found.degradation == pytest.approx((quality - baseline) / baseline)
        assert found.evaluations <= 12


def test_in_the_steady_state_two_evaluations_are_enough() -> None:
    chain = perceptron()
    last, prev = None, None
    counts = []
    for number in (1, 2, 3):
        state, grads = chain.states[number], chain.grads[number]
        last = sp.search(state, chain.evaluate, 0.05, prev=prev, last=last, grads=grads)
        assert last.met
        counts.append(last.evaluations)
        prev = sp.compress(state, prev, last.config, grads=grads)
    assert last is not None
    assert last.method == "neighbourhood"
    assert counts[0] <= 12
    assert counts[2] <= 2


def test_the_same_arguments_give_the_same_trials_and_the_search_changes_nothing() -> None:
    state = random_state()
    before = {k: x.clone() for k, x in state.items()}
    found = [sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL)) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].seconds != found[1].seconds
    assert all(torch.equal(state[k], x) for k, x in before.items())


def test_evaluate_gets_what_a_reader_would_see_and_may_keep_it() -> None:
    state = random_state(step=7, ids=np.arange(5), tied=None)
    state["tied"] = state["0.weight"]
    state["optimizer"] = {"state": {0: {"exp_avg": torch.randn(48, 64), "exp_avg_sq": torch.rand(48, 64)}}}
    seen: list[State] = []

    def evaluate(restored: State) -> float:
        seen.append(restored)
        value = Loss({"0.weight": state["0.weight"]})(restored)
        restored["1.weight"].zero_()
        restored["optimizer"]["state"][0]["exp_avg"].zero_()
        return value

    kinds = {f"{i}.weight": "linear" for i in range(3)}
    found = sp.search(state, evaluate, 0.02, kinds=kinds, options=sp.SearchOptions(cube=SMALL))
    assert torch.equal(seen[0]["0.weight"], state["0.weight"])
    for trial, restored in zip(found.trials, seen, strict=True):
        if trial.point is None:
            continue
        ckpt = sp.compress(state, cfg=trial.point.config(), kinds=kinds)
        back = sp.decompress(ckpt)
        assert torch.equal(restored["0.weight"], back["0.weight"])
        assert restored["tied"] is restored["0.weight"]
        assert torch.equal(restored["optimizer"]["state"][0]["exp_avg_sq"], back["optimizer"]["state"][0]["exp_avg_sq"])
        assert restored["step"] == 7
        assert trial.nbytes == pytest.approx(ckpt.nbytes, rel=0.02)


def test_arrays_of_numpy() -> None:
    state = {"weight": np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)}

    def evaluate(restored: State) -> float:
        assert isinstance(restored["weight"], np.ndarray)
        return 1.0 + float(((restored["weight"] - state["weight"]) ** 2).mean())

    assert sp.search(state, evaluate, 0.02, options=sp.SearchOptions(cube=SMALL)).met


def test_the_published_system() -> None:
    state = random_state()
    cube = dataclasses.replace(SMALL, system="inshrinkerator")
    found = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=cube))
    assert found.point is not None
    assert found.config == found.point.config()
    assert found.config.rules[0].codec.coder == "published"  # type: ignore[attr-defined]


def test_rate_is_an_axis_like_the_others() -> None:
    state = random_state()
    moments = {"state": {i: {"exp_avg_sq": torch.rand(48, 64) ** 4} for i in range(3)}}
    cube = Cube(bins=(16, 64), prune=(0.0,), protect=(0.0005,), rate=(0.0, 0.02))
    found = sp.search(state | {"optimizer": moments}, Loss(state), 0.02, options=sp.SearchOptions(cube=cube))
    assert 0.02 in {t.point.rate for t in found.trials if t.point is not None}
    assert found.met


# ---------------------------------------------------------------------- quality


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_direction_is_inferred_and_stated(sign: float) -> None:
    state = random_state()
    found = sp.search(state, Loss(state, sign=sign), 0.02, options=sp.SearchOptions(cube=SMALL))
    assert found.direction == ("lower" if sign > 0 else "higher")
    assert not found.direction_given
    assert any("as inferred" in note for note in found.notes)
    assert found.met
    assert 0 <= (found.degradation or 0.0) <= 0.02
    given = sp.search(
        state, Loss(state, sign=sign), 0.02, options=sp.SearchOptions(cube=SMALL, direction=found.direction)
    )
    assert given.direction_given
    assert given.point == found.point
    again = sp.search(state, Loss(state, sign=sign), 0.02, last=given)
    assert (again.direction, again.direction_given) == (given.direction, True)


def test_where_the_first_trials_tell_nothing_a_ruined_state_tells_the_direction() -> None:
    state = random_state()
    exact = Loss(state)

    def helped_a_little(restored: State) -> float:
        # A little compression is a gain, as early in training; much is a loss.
        error = exact(restored) - 1.0
        return 1.0 + error - 0.5 * math.sqrt(error) if error > 0.5 else 1.0 - 0.02 * math.sqrt(error)

    found = sp.search(state, helped_a_little, 0.001, options=sp.SearchOptions(cube=SMALL))
    assert found.direction == "lower"
    tried = [t for t in found.trials if t.point is not None]
    # The ruined state comes first, and is never chosen.
    assert tried[0].point is not None
    assert (tried[0].point.bins, tried[0].point.prune) == (2, 0.9)
    assert not tried[0].passed
    assert sum(t.point is not None and t.point.bins == 2 for t in tried) == 1
    # A gain is not a failure.
    assert all(t.passed for t in tried[1:])
    assert (found.met, found.nbytes) == (True, min(t.nbytes for t in found.trials if t.passed and t.nbytes))


def test_a_wrong_direction_makes_every_loss_a_gain() -> None:
    state = random_state()
    found = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL, direction="higher"))
    assert found.degradation is not None
    assert found.degradation < 0
    # The given direction holds, but such gains are reported.
    assert any("better than the state itself by" in note for note in found.notes)


def test_what_makes_no_difference_is_taken_at_its_smallest() -> None:
    state = random_state()
    found = sp.search(state, lambda restored: 3.0, 0.01, options=sp.SearchOptions(cube=SMALL))
    assert found.direction is None
    assert found.within_spread
    # A ruined point makes no difference either, but is never chosen.
    assert found.nbytes == min(t.nbytes for t in found.trials if t.point is not None and t.point.bins != 2)
    assert any("not known" in note for note in found.notes)
    assert any("has 4 bins, an end of the cube" in note for note in found.notes)


def test_a_spread_is_measured_and_reported() -> None:
    state = random_state()
    loss = Loss(state, scale=0.0)
    noise = iter([0.0, 0.004] + [0.002] * 20)
    found = sp.search(state, lambda restored: loss(restored) + next(noise), 0.02, options=sp.SearchOptions(cube=SMALL))
    assert found.spread == pytest.approx(0.004)
    assert found.within_spread
    assert any("within the spread" in note for note in found.notes)


def test_as_many_restores_as_expected_together_stay_within_the_threshold() -> None:
    """The degradations of all expected restores add up to at most the threshold."""
    together = {}
    for restores in (None, 0.3, 4):
        last, total = None, 0.0
        for seed in range(4):
            state = random_state(seed)
            last = sp.search(
                state, Loss(state), 0.04, last=last, options=sp.SearchOptions(cube=SMALL, expected_restores=restores)
            )
            total += Loss(state)(sp.decompress(sp.compress(state, cfg=last.config))) - 1.0
            assert last.threshold == (0.01 if restores == 4 else 0.04)
        together[restores] = total
    assert 0.0 < together[4] <= 0.04
    # Fewer than one is one; and without it each may take all.
    assert together[0.3] == together[None] > 0.04


def test_without_evaluate_it_is_an_error_target() -> None:
    state = random_state()
    found = sp.search(state, None, 0.03)
    assert found.method == "error target"
    assert found.evaluations == 0
    assert found.config.max_rel_error == 0.03
    assert all(row.error <= 0.03 for row in sp.compress(state, cfg=found.config).summary())
    published = sp.search(state, None, 0.03, options=sp.SearchOptions(cube=Cube(system="inshrinkerator")))
    assert published.config.rules[0].codec.solver == "kmeans++"  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- neighbourhood


def searched(state: State, point: Point, **more: Any) -> SearchResult:
    """Return a result as if the last search had chosen this point."""
    found = sp.search(state, Loss(state), 0.05, options=sp.SearchOptions(cube=more.pop("cube", SMALL)))
    return dataclasses.replace(found, point=point, config=point.config(), trials=(), **more)


def test_the_neighbourhood_is_never_more_aggressive_unless_relaxed() -> None:
    state = random_state()
    last = searched(state, Point(32, 0.0, "magnitude", 0.0005, 0.0, 32))
    held = sp.search(state, Loss(state), 0.05, last=last)
    assert (held.method, held.evaluations, held.point) == ("neighbourhood", 2, last.point)
    relaxed = sp.search(state, Loss(state), 0.05, last=last, options=sp.SearchOptions(relax=True))
    assert relaxed.point is not None
    assert relaxed.nbytes < held.nbytes
    assert not relaxed.point.at_least(held.point or relaxed.point)


def test_where_the_last_choice_passes_nothing_else_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    state, asked = random_state(), set()
    last = searched(state, Point(32, 0.0, "magnitude", 0.0005, 0.0, 32))
    estimate = Estimator.__call__

    def listed(self: Estimator, points: Sequence[Point]) -> list[Estimate]:
        asked.update(points)
        return estimate(self, points)

    monkeypatch.setattr(Estimator, "__call__", listed)
    assert sp.search(state, Loss(state), 0.05, last=last).point == last.point
    assert asked == {last.point}


def test_milder_neighbours_by_falling_ratio() -> None:
    state = random_state()
    last = searched(state, Point(8, 0.2, "magnitude", 0.0005, 0.0, 32))
    found = sp.search(state, Loss(state), 0.02, last=last)
    assert (found.method, found.fell_back) == ("neighbourhood", False)
    tried = [t for t in found.trials if t.point is not None]
    assert tried[0].point == last.point
    assert [t.passed for t in tried] == [False] * (len(tried) - 1) + [True]
    assert [t.nbytes for t in tried] == sorted(t.nbytes for t in tried)
    assert all(t.point is not None and t.point.at_least(last.point) for t in tried if last.point is not None)


def test_where_no_neighbour_fits_the_whole_cube_is_searched() -> None:
    state = random_state()
    last = searched(state, Point(4, 0.2, "magnitude", 0.0005, 0.0, 32))
    found = sp.search(state, Loss(state), 0.002, last=last, options=sp.SearchOptions(steps=1))
    assert (found.method, found.fell_back, found.met) == ("exhaustive", True, True)
    # In the middle of a run the first that passes is taken.
    assert [t.passed for t in found.trials if t.point is not None].count(True) == 1
    assert found.trials[-1].passed
    assert found.point is not None
    assert found.point.bins >= 32


@pytest.mark.parametrize(("other", "same", "switched"), [(0.02, 0.04, True), (0.038, 0.04, False), (0.01, 0.0, False)])
def test_the_other_metric_is_switched_to_only_on_a_stated_improvement(
    other: float, same: float, switched: bool
) -> None:
    state = random_state()
    grads = {k: torch.randn(x.shape, generator=torch.Generator().manual_seed(5)) for k, x in state.items()}
    origin = Point(32, 0.2, "magnitude", 0.0005, 0.0, 32)
    last = searched(state, origin)
    # The baseline, the other metric, the last choice again: in this order.
    values = iter([1.0, 1.0 + other, 1.0 + same])
    found = sp.search(state, lambda restored: next(values), 0.05, last=last, grads=grads)
    twin = dataclasses.replace(origin, metric="sensitivity")
    assert [t.point for t in found.trials] == [None, twin, origin]
    assert found.point == (twin if switched else origin)
    assert any("switched to sensitivity" in note for note in found.notes) == switched
    # A tried point is not tried again immediately.
    assert found.patience > 0
    values = iter([1.0, 1.01])
    following = sp.search(state, lambda restored: next(values), 0.05, last=found, grads=grads)
    assert following.patience == found.patience - 1
    assert following.evaluations == 2


def test_the_other_metric_is_not_tried_where_it_is_expected_to_fail() -> None:
    state = random_state()
    grads = {k: torch.randn(x.shape, generator=torch.Generator().manual_seed(5)) for k, x in state.items()}
    origin = Point(32, 0.2, "magnitude", 0.0005, 0.0, 32)
    values = iter([1.0, 1.001])
    found = sp.search(state, lambda restored: next(values), 0.002, last=searched(state, origin), grads=grads)
    assert [t.point for t in found.trials] == [None, origin]
    assert found.met
    # It is tried as soon as it may pass.
    assert found.patience == 0


def test_neighbours_that_are_expected_to_fail_are_left_to_the_whole_cube() -> None:
    state = random_state()
    last = searched(state, Point(8, 0.2, "magnitude", 0.0005, 0.0, 32))
    found = sp.search(state, Loss(state), 0.005, last=last)
    assert [t.point for t in found.trials][:3] == [None, last.point, None]
    assert (found.method, found.fell_back, found.met) == ("exhaustive", True, True)
    assert found.evaluations <= 5


def test_without_gradients_nothing_is_pruned_by_sensitivity_and_that_is_said() -> None:
    state = random_state()
    found = sp.search(state, Loss(state), 0.05)
    assert all(t.point is None or not t.point.prune or t.point.metric == "magnitude" for t in found.trials)
    assert any("without gradients" in note for note in found.notes)
    grads = {k: torch.randn_like(x) for k, x in state.items()}
    known = sp.search(state, Loss(state), 0.05, grads=grads)
    assert not any("without gradients" in note for note in known.notes)
    # A last choice by sensitivity is of no use without gradients.
    last = searched(state, Point(32, 0.2, "sensitivity", 0.0005, 0.0, 32), cube=Cube())
    assert sp.search(state, Loss(state), 0.05, last=last).is_exhaustive


@pytest.mark.parametrize("method", ["planned", "published"])
def test_embeddings_have_their_own_bins(method: str) -> None:
    options = sp.SearchOptions(cube=SMALL, method=method, budget=40)
    state = {"embedding.weight": torch.randn(256, 64), "0.weight": torch.randn(64, 64)}
    body = Loss({"0.weight": state["0.weight"]})
    coarse = sp.search(state, body, 0.02, options=options)
    assert coarse.point is not None
    assert coarse.point.embedding_bins == 16

    def careful(restored: State) -> float:
        return body(restored) + 4 * (Loss({"e": state["embedding.weight"]})({"e": restored["embedding.weight"]}) - 1)

    fine = sp.search(state, careful, 0.02, options=options)
    assert fine.point is not None
    assert fine.point.embedding_bins == 32
    following = sp.search(state, careful, 0.02, last=coarse)
    assert following.point is not None
    assert following.point.embedding_bins == 32


# ---------------------------------------------------------------------- interruptions, reports, records


def test_an_interrupted_search_goes_on_where_it_stopped() -> None:
    state = random_state()
    whole = Loss(state)
    expected = sp.search(state, whole, 0.02, options=sp.SearchOptions(cube=SMALL))
    for until in range(whole.calls):
        done: list[Trial] = []
        loss = Loss(state)

        def stopping(restored: State, loss: Loss = loss, until: int = until) -> float:
            if loss.calls == until:
                raise KeyboardInterrupt
            return loss(restored)

        with pytest.raises(KeyboardInterrupt):
            sp.search(state, stopping, 0.02, options=sp.SearchOptions(cube=SMALL, progress=done.append))
        assert len(done) == until
        later = Loss(state)
        kept = [Trial.from_json(json.loads(json.dumps(t.to_json()))) for t in done]
        new: list[Trial] = []
        assert (
            sp.search(state, later, 0.02, options=sp.SearchOptions(cube=SMALL, resume=kept, progress=new.append))
            == expected
        )
        assert tuple(done + new) == expected.trials
        assert later.calls == whole.calls - until
    other = random_state(seed=1)
    with pytest.raises(BadArgumentError, match="another state"):
        sp.search(other, Loss(other), 0.02, options=sp.SearchOptions(cube=SMALL, resume=expected.trials))


def test_results_go_through_json() -> None:
    state = random_state()
    for found in (
        sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL)),
        sp.search(state, Loss(state, scale=1e9), 0.02, options=sp.SearchOptions(cube=SMALL)),
        sp.search(
            state,
            lambda r: 1.0 if (r["0.weight"] == state["0.weight"]).all() else math.nan,
            0.1,
            options=sp.SearchOptions(cube=SMALL),
        ),
        sp.search(state, None, 0.1),
    ):
        text = json.dumps(found.to_json(), allow_nan=False)
        assert SearchResult.from_json(json.loads(text)) == found
    plain = found.to_json()
    wrong = ({"more": 1}, {"trials": [3]}, {"nbytes": "3"}, {"spread": None}, {"baseline": []}, {"met": 1})
    for bad in (None, {}, *({**plain, **change} for change in wrong)):
        with pytest.raises(BadArgumentError):
            SearchResult.from_json(bad)


def test_every_trial_is_recorded_with_its_reason() -> None:
    state = random_state()
    loss = Loss(state)
    found = sp.search(state, loss, 0.02, options=sp.SearchOptions(cube=SMALL))
    assert found.evaluations == len(found.trials) == loss.calls
    assert [t.point for t in found.trials[:2]] == [None, None]
    for trial in found.trials[2:]:
        if trial.point is None:
            assert trial.reason == "the state itself"
            continue
        assert trial.passed == (trial.degradation <= 0.02)
        assert trial.reason.startswith("passes" if trial.passed else "fails")
        assert trial.quality is not None
        assert trial.degradation == pytest.approx(trial.quality - 1.0)
        assert trial.nbytes == pytest.approx(trial.estimated, rel=0.05)
        assert trial.seconds > 0
    passing = [t.nbytes for t in found.trials if t.passed and t.point is not None]
    assert found.nbytes == min(passing)
    points = len({normal(p) for p in SMALL if p.metric == "magnitude"})
    untried = points - len({t.point for t in found.trials if t.point is not None and t.point.embedding_bins == 32})
    assert sum(found.discarded.values()) == untried


def test_a_log_line_a_trial(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    state = random_state()
    with caplog.at_level(logging.INFO, logger="shrinkpoint.search"):
        found = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL))
    lines = [r.getMessage() for r in caplog.records]
    assert sum("quality" in line and "bytes" in line for line in lines) == found.evaluations
    assert "lower quality is better" in lines
    assert lines[-1] == f"search: {found}"
    assert capsys.readouterr() == ("", "")


class Bar:
    """Stand-in for rich's progress bar, which records calls."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, *columns: Any, console: Any, transient: bool) -> None:
        assert console.stderr
        assert transient
        self.total, self.events = 0, []  # type: int, list[str]
        Bar.made.append(self)

    def add_task(self, description: str, total: int) -> int:
        self.total = total
        return 0

    def start(self) -> None:
        self.events.append("start")

    def stop(self) -> None:
        self.events.append("stop")

    def update(self, task: int, advance: int, description: str) -> None:
        assert (task, advance) == (0, 1)
        self.events.append(description)


def test_a_bar_goes_on_with_every_trial_and_away_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rich.progress, "Progress", Bar)
    monkeypatch.setattr(Bar, "made", [])
    state = random_state()
    found = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL, progress=True, budget=9))
    (bar,) = Bar.made
    assert bar.total == 9
    assert bar.events == ["start", *(t.reason for t in found.trials), "stop"]
    with pytest.raises(BadArgumentError):
        sp.search(state, lambda s: 1 / 0, 0.02, options=sp.SearchOptions(cube=SMALL, progress=True))
    assert Bar.made[-1].events == ["start", "stop"]
    # None without a terminal, nor for those who take the trials themselves.
    sp.search(state, Loss(state), 0.1, options=sp.SearchOptions(cube=SMALL))
    sp.search(state, Loss(state), 0.1, options=sp.SearchOptions(cube=SMALL, progress=False))
    sp.search(state, Loss(state), 0.1, options=sp.SearchOptions(cube=SMALL, progress=lambda trial: None))
    assert len(Bar.made) == 2


def test_the_cost_is_reported_as_a_share_of_training_time() -> None:
    state = random_state()
    first = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL))
    assert first.share is None
    training = 1e6  # so that the seconds which a busy machine adds do not count
    later = sp.search(state, Loss(state), 0.02, last=dataclasses.replace(first, finished=first.finished - training))
    assert later.share == pytest.approx(later.seconds / training, rel=0.1)
    assert "of training time" in str(later)


# ---------------------------------------------------------------------- bad input


def test_a_threshold_that_nothing_meets_means_exact_weights_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    state = random_state()
    found = sp.search(state, Loss(state, scale=1e6), 0.01, options=sp.SearchOptions(cube=SMALL))
    assert not found.met
    assert found.point is None
    assert found.config == sp.presets.exact_weights()
    assert any("presets.exact_weights() is used; the cube ends at 64 bins" in note for note in found.notes)
    assert str(found).startswith(f"exact weights: {found.nbytes} bytes, ")
    assert [(t.level, t.passed) for t in found.trials[-2:]] == [("precise", False), ("exact weights", True)]
    assert any(r.levelno == logging.WARNING and "exact weights" in r.getMessage() for r in caplog.records)
    assert found.rounds < 12
    # The next search has no neighbourhood to start from.
    assert sp.search(state, Loss(state), 0.05, last=found).is_exhaustive


def test_where_no_point_passes_the_levels_are_tried_from_the_smallest() -> None:
    state = random_state()
    found = sp.search(state, Loss(state, scale=3e3), 0.01, options=sp.SearchOptions(cube=SMALL))
    assert (found.met, found.point, found.config) == (True, None, sp.presets.precise())
    ckpt = sp.compress(state, cfg=found.config)
    assert found.nbytes == pytest.approx(ckpt.nbytes, rel=0.01)
    assert found.degradation == Loss(state, scale=3e3)(sp.decompress(ckpt)) - 1
    assert found.restored().spent == found.degradation
    assert str(found).startswith("precise: ")
    assert SearchResult.from_json(json.loads(json.dumps(found.to_json()))) == found
    again = search(state, Loss(state, scale=3e3), 0.01, cube=SMALL, resume=found.trials)
    assert (again.config, again.evaluations) == (found.config, found.evaluations)


def test_levels_whose_moments_fail_leave_lossless() -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    moments = state["optimizer"]["state"][0]["exp_avg"].clone()

    def loss(restored: State) -> float:
        return 1.0 + float((restored["optimizer"]["state"][0]["exp_avg"] != moments).any())

    found = search(state, loss, 0.01, cube=SMALL, direction="lower", kinds=sp.kinds(model, optimizer))
    assert (found.met, found.config) == (False, sp.presets.lossless())
    assert [t.level for t in found.trials][-2:] == ["precise", "exact weights"]
    assert any("presets.lossless() is used" in note for note in found.notes)


def test_a_trial_that_is_no_number_fails_and_the_search_goes_on() -> None:
    state = random_state()
    loss = Loss(state)

    def overflowing(restored: State) -> float:
        value = loss(restored)
        return value if value < 1.02 else (math.nan if loss.calls % 2 else math.inf)

    found = sp.search(state, overflowing, 0.01, options=sp.SearchOptions(cube=SMALL))
    assert found.met
    bad = [t for t in found.trials if t.quality is None or not math.isfinite(t.quality)]
    assert bad
    assert all(not t.passed and t.degradation == math.inf for t in bad)
    assert {t.quality for t in bad} <= {None, math.inf}


@pytest.mark.parametrize(
    ("evaluate", "message"),
    [
        (lambda s: 1 / 0, "evaluate raised ZeroDivisionError at the state itself"),
        (lambda s: math.nan, "returned nan for the state itself"),
        (lambda s: math.inf, "returned inf for the state itself"),
        (lambda s: 0.0, "returned 0 for the state itself"),
        (lambda s: None, "returned None"),
        (lambda s: "0.3", "returned 0.3, a str, at the state itself; it must return a number"),
        (lambda s: True, "returned True"),
        (lambda s: 1j, "returned 1j"),
        (lambda s: torch.ones(3), "must return a number"),
        (lambda s: {"loss": 1.0}, "must return a number"),
        (lambda s: torch.ones((), device="meta"), "evaluate raised RuntimeError at the state itself"),
        (lambda s: SimpleNamespace(shape=(1,)), "a SimpleNamespace, at the state itself; it must return a number"),
        (lambda s: SimpleNamespace(shape=1), "a SimpleNamespace, at the state itself; it must return a number"),
    ],
)
def test_an_evaluate_that_is_of_no_use(evaluate: Any, message: str) -> None:
    with pytest.raises(BadArgumentError, match=message):
        sp.search(random_state(), evaluate, 0.01)


@pytest.mark.parametrize("value", [torch.tensor(2.5), torch.tensor([[2.5]]), np.float32(2.5), np.array([2.5]), 2])
def test_one_number_in_any_wrapping(value: Any) -> None:
    found = sp.search(random_state(), lambda s: value, 0.01, options=sp.SearchOptions(cube=SMALL))
    assert found.baseline == float(np.ravel(value)[0])


def test_an_evaluate_that_changes_the_state_is_told_where() -> None:
    model = torch.nn.Linear(64, 64)
    state = {"model": model.state_dict(), "step": 3}

    def evaluate(restored: State) -> float:
        model.load_state_dict(restored["model"])
        return float(model.weight.detach().sum())

    with pytest.raises(BadArgumentError, match="evaluate changed model/weight of the state"):
        sp.search(state, evaluate, 0.01, options=sp.SearchOptions(cube=SMALL))


def test_an_evaluate_that_is_not_comparable_between_calls() -> None:
    values = iter([1.0, 1.05])
    with pytest.raises(BadArgumentError, match="not comparable between calls"):
        sp.search(random_state(), lambda s: next(values), 0.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": math.nan}, "threshold"),
        ({"threshold": "1 %"}, "threshold"),
        ({"evaluate": None, "threshold": 1.0}, "threshold"),
        ({"evaluate": 3}, "evaluate"),
        ({"direction": "down"}, "direction"),
        ({"expected_restores": -1}, "expected_restores"),
        ({"steps": -1}, "steps"),
        ({"budget": 2}, "budget"),
        ({"budget": 5.0}, "budget"),
        ({"last": Point(4, 0.0, "magnitude", 0.0)}, "last"),
        ({"cube": 216}, "cube"),
        ({"resume": [3]}, "resume"),
        ({"resume": None}, "resume"),
        ({"evaluate": lambda s: 10**400}, "returned inf for the state itself"),
        ({"progress": "yes"}, "progress"),
        ({"group": object()}, "group"),
        ({"state": 3}, "state"),
        ({"grads": {"nothing": torch.ones(3)}}, "grads/nothing"),
    ],
)
def test_bad_arguments(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"state": random_state(), "evaluate": lambda s: 1.0, "threshold": 0.01} | change
    with pytest.raises(BadArgumentError, match=message):
        search(**arguments)


def test_a_delta_needs_a_resolved_parent() -> None:
    state = random_state()
    base = sp.compress(state)
    loose = sp.Checkpoint.from_bytes(sp.compress(state, base).to_bytes())
    with pytest.raises(sp.MissingParentError):
        sp.search(state, Loss(state), 0.01, prev=loose)


def test_a_state_in_which_there_is_nothing_to_choose() -> None:
    found = sp.search({"step": 1, "bias": torch.ones(5)}, lambda s: 1 / 0, 0.01)
    assert (found.method, found.met, found.evaluations) == ("nothing to choose", True, 0)
    assert str(found).startswith("nothing to choose: size not measured")
    assert sp.compress({"step": 1, "bias": torch.ones(5)}, cfg=found.config).nbytes > 0


def test_the_least_budget_is_not_spent_on_what_will_fail() -> None:
    state = random_state()
    found = sp.search(state, Loss(state, scale=0.2), 0.01, options=sp.SearchOptions(budget=3))
    assert (found.met, found.rounds) == (True, 3)


def test_the_budget_is_kept_and_what_it_leaves_is_said() -> None:
    state = random_state()
    loss = Loss(state)
    found = sp.search(state, loss, 0.004, options=sp.SearchOptions(cube=SMALL, budget=5))
    assert loss.calls <= 5
    assert found.rounds <= 5
    assert found.met
    if found.rounds == 5:
        assert any("budget" in note for note in found.notes)


def weights(scale: float = 0.02, **more: float) -> dict[str, Any]:
    """Return a matrix, and others of other scales."""
    rng = np.random.default_rng(0)
    scales = {"a.weight": scale, **{f"{name}.weight": s for name, s in more.items()}}
    return {name: (rng.normal(size=(128, 96)) * s).astype(np.float32) for name, s in scales.items()}


def error_of(state: dict[str, Any], factor: float = 1.0) -> Any:
    """Return an evaluation: 1 plus the relative squared error of the first matrix."""
    exact = state["a.weight"].astype(np.float64)
    return lambda restored: 1.0 + factor * float(np.square(restored["a.weight"] - exact).sum() / np.square(exact).sum())


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    ("state", "factor"),
    [(weights(dead=1e-41), 0.1), (weights(), -1e155), (weights(), 1e300)],
    ids=["subnormals", "huge gain", "huge loss"],
)
def test_extremes_are_no_obstacle(state: dict[str, Any], factor: float) -> None:
    found = sp.search(state, error_of(state, factor), 0.02, options=sp.SearchOptions(direction="lower", progress=False))
    assert found.evaluations <= 12
    assert (found.point is not None) == (factor < 1)


def test_searches_beside_each_other_leave_threads_as_they_were() -> None:
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    state = weights()
    with threadpool_limits(2, "blas"):
        before = threads()
        searches = [
            threading.Thread(
                target=lambda: sp.search(
                    state, error_of(state), 0.02, options=sp.SearchOptions(direction="lower", progress=False)
                )
            )
            for _ in range(2)
        ]
        for one in searches:
            one.start()
        for one in searches:
            one.join()
        assert threads() == before


def test_sums_do_not_depend_on_threads() -> None:
    x = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    sums = set()
    for n in (1, 2):
        with threadpool_limits(n, "blas"):
            sums.add(energy(x))
    assert len(sums) == 1
