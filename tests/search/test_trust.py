"""Checks of a search: direction, comparable numbers, an `evaluate` without side effects."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench.studies.workloads import WORKLOADS, Run
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.searching import run
from shrinkpoint.searching.cube import Cube, Point
from shrinkpoint.searching.search_state import TreeHashes

from .calls import search
from .concurrent_searches import searches
from .test_search import SMALL, Loss, State, random_state

WRECK = Point(2, 0.9, "magnitude", 0.0)
MILDER = Point(2, 0.5, "magnitude", 0.0)


def points(found: sp.SearchResult) -> list[Point | None]:
    return [t.point for t in found.trials]


# ---------------------------------------------------------------------- whether it looks at all


@pytest.mark.parametrize("direction", [None, "lower", "higher"])
def test_an_evaluate_that_does_not_look_at_what_it_is_given(
    direction: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """An `evaluate` that ignores its argument gives a warning in each search."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    last = None
    for value in (0.7, 0.6):  # the model goes on: another number, as little worth
        caplog.clear()
        last = sp.search(
            {"weight": x},
            lambda _, v=value: v,
            0.01,
            last=last,
            options=sp.SearchOptions(direction=direction, progress=False),
        )
        assert last.met
        assert any("Does it load the state that it is given?" in note for note in last.notes)
        assert any("Does it load the state that it is given?" in text for text in caplog.messages)
        assert WRECK in points(last)


def test_where_nothing_can_be_wrecked_nothing_is_said_of_evaluate() -> None:
    """No warning if the state is zero and every trial gives the same number."""
    x = torch.zeros(128, 128)

    def loss(restored: State) -> float:
        return 1.0 + float((restored["weight"] ** 2).sum())

    found = sp.search({"weight": x}, loss, 0.01, options=sp.SearchOptions(direction="lower", progress=False))
    assert found.met
    assert not any("Does it load" in note for note in found.notes)


def test_an_accuracy_that_stays_is_asked_for_its_worth_every_other_time() -> None:
    """An accuracy that does not change is checked in every other search."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))

    def accuracy(restored: State) -> float:
        return 0.9 if float(((restored["weight"] - x) ** 2).mean()) < 0.3 else 0.1

    found = [sp.search({"weight": x}, accuracy, 0.01, options=sp.SearchOptions(direction="higher", progress=False))]
    for _ in range(3):
        found.append(
            sp.search(
                {"weight": x},
                accuracy,
                0.01,
                last=found[-1],
                options=sp.SearchOptions(direction="higher", progress=False),
            )
        )
    assert [(f.met, f.degradation) for f in found] == 4 * [(True, 0.0)]
    assert [WRECK in points(f) for f in found] == [True, False, True, False]
    assert [f.evaluations for f in found[1:]] == [2, 3, 2]


# ---------------------------------------------------------------------- the direction


def test_a_first_trial_that_gains_by_chance_does_not_turn_the_scale() -> None:
    """A chance gain of the first trial does not change the direction."""
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))

    def loss(restored: State) -> float:
        error = float(((restored["weight"] - x) ** 2).mean() / (x**2).mean())
        return 0.97 if abs(error - 0.1177) < 0.004 else 1 + error

    found = sp.search({"weight": x}, loss, 0.01, options=sp.SearchOptions(progress=False))
    assert found.direction == "lower"
    assert found.met
    restored = sp.decompress(sp.compress({"weight": x}, cfg=found.config))
    assert loss(restored) - 1.0 <= 0.01
    assert found.evaluations <= 12


@pytest.mark.parametrize(("name", "steps"), [("CNN", (40, 60)), ("MLP", (40, 150))])
def test_early_in_a_training_the_threshold_holds(name: str, steps: tuple[int, int]) -> None:
    """Early in a training, where compression may help, the threshold holds."""
    workload = WORKLOADS[name]()
    training = Run(workload, 0)
    probe = copy.deepcopy(training.model).eval()
    batches = workload.held_out()[:4]

    @torch.no_grad()
    def loss(state: State) -> float:
        probe.load_state_dict(state["model"])
        return statistics.fmean(float(workload.loss(probe, batch)) for batch in batches)

    last = None
    for step in steps:
        training.train(step)
        state = {"model": copy.deepcopy(training.model.state_dict())}
        last = sp.search(state, loss, 0.01, last=last, options=sp.SearchOptions(progress=False))
        restored = sp.decompress(sp.compress(state, cfg=last.config))
        assert last.direction == "lower"
        assert loss(restored) / loss(state) - 1 <= 0.01
        assert last.evaluations <= 12


def test_a_gain_that_is_more_than_the_wreck_loses_leaves_the_direction_open() -> None:
    state = random_state()
    exact = Loss(state)

    def odd(restored: State) -> float:
        error = exact(restored) - 1.0
        return 1.05 if error > 0.4 else (1.0 if error == 0.0 else 0.8)

    found = sp.search(state, odd, 0.01, options=sp.SearchOptions(cube=SMALL))
    assert found.direction is None
    assert not found.met
    assert any("differs too much to the other side" in note for note in found.notes)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_model_that_ruin_does_good_keeps_its_threshold(seed: int) -> None:
    """A model whose loss falls when ruined keeps its direction and threshold."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    inputs, probe = torch.randn(64, 64), copy.deepcopy(model).eval()

    @torch.no_grad()
    def loss(restored: State) -> float:
        probe.load_state_dict(restored["model"])
        return float((probe(inputs) - inputs).square().mean())

    state = {"model": model.state_dict()}
    found = sp.search(state, loss, 0.01, options=sp.SearchOptions(progress=False))
    restored = sp.decompress(sp.compress(state, cfg=found.config))
    assert found.direction != "higher"
    assert loss(restored) / loss(state) - 1 <= 0.01


@pytest.mark.parametrize("bad", [float("inf"), float("-inf")])
def test_an_overflow_of_the_wreck_tells_as_well(bad: float) -> None:
    state = random_state()
    loss = Loss(state)
    found = sp.search(state, lambda r: bad if loss(r) > 1.4 else 1.0, 0.01, options=sp.SearchOptions(cube=SMALL))
    assert found.direction == ("lower" if bad > 0 else "higher")


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_where_the_wreck_is_no_number_a_milder_one_tells(
    sign: float, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = random_state()
    exact = Loss(state)

    def evaluate(restored: State) -> float:
        error = exact(restored) - 1.0
        return math.nan if error > 0.4 else 1.0 + sign * error

    def searched(last: sp.SearchResult | None) -> sp.SearchResult:
        given = {"state": state, "evaluate": evaluate, "threshold": 0.02, "cube": SMALL, "last": last}
        found = searches(monkeypatch, members, lambda rank: given)[0]
        assert isinstance(found, sp.SearchResult)
        return found

    first = searched(None)
    assert [p for p in points(first) if p in (WRECK, MILDER)] == [WRECK, MILDER]
    assert first.direction == ("lower" if sign > 0 else "higher")
    assert first.met
    assert first.rounds <= 12
    assert any(f"({WRECK}) is not a number" in note for note in first.notes)
    assert not first.probed_in_vain
    # The next search has the direction from this one.
    second = searched(first)
    assert second.direction == first.direction
    assert second.rounds == 2


def test_where_no_wreck_is_a_number_later_searches_do_not_ask_again() -> None:
    state = random_state()
    exact = Loss(state)

    def evaluate(restored: State, size: float = 1.0) -> float:
        error = exact(restored) - 1.0
        return math.nan if error > 0.1 else size * (1.0 + error)

    last = sp.search(state, evaluate, 0.02, options=sp.SearchOptions(cube=SMALL))
    assert [p for p in points(last) if p in (WRECK, MILDER)] == [WRECK, MILDER]
    for _ in range(3):
        last = sp.SearchResult.from_json(json.loads(json.dumps(last.to_json())))
        assert (last.direction, last.probed_in_vain, last.met) == (None, True, True)
        assert any("is not inferred again" in note for note in last.notes)
        last = sp.search(state, evaluate, 0.02, last=last)
        assert last.evaluations == 2
    # Unless `evaluate` is another one.
    last = sp.search(state, lambda restored: evaluate(restored, 5.0), 0.02, last=last)
    assert WRECK in points(last)


def test_the_milder_wreck_leaves_a_call_for_the_trial() -> None:
    state = random_state()
    exact = Loss(state)
    nothing = lambda restored: 1.0 if exact(restored) == 1.0 else math.nan  # noqa: E731
    for budget in (3, 4, 5, 6):
        found = sp.search(state, nothing, 0.02, options=sp.SearchOptions(cube=SMALL, budget=budget))
        assert found.rounds <= budget
        assert any(p not in (None, WRECK, MILDER) for p in points(found))


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("direction", [None, "lower"])
@pytest.mark.parametrize("bins", [(2,), (2, 4)])
def test_a_wreck_that_is_a_point_of_the_cube_is_a_point_as_any(
    bins: tuple[int, ...], direction: str | None, members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ruined point of the cube is tried once, and chosen if it passes."""
    state = random_state()
    anything: tuple[Any, ...] = (None,)
    cube = Cube(bins=bins, prune=(0.9,), metric=("magnitude",), protect=(0.0,), embedding_bins=anything)
    for factor, met in ((1.0, False), (1e-3, True)):
        given = {
            "state": state, "evaluate": Loss(state, scale=factor), "threshold": 0.02, "cube": cube,
            "direction": direction,
        }  # fmt: skip
        found = searches(monkeypatch, members, lambda rank, given=given: given)[0]
        assert isinstance(found, sp.SearchResult)
        assert points(found).count(WRECK) == 1
        assert found.rounds <= 6
        # `precise` passes where the ruined points fail.
        assert found.met
        assert found.point == (WRECK if met else None)
        assert met or found.config == sp.presets.precise()


def test_an_evaluate_of_the_other_direction_is_noticed_by_its_size() -> None:
    """A changed direction is noticed by the size of the baseline."""
    state = random_state()
    loss = Loss(state)
    last = sp.search(state, lambda r: 0.3 * loss(r), 0.02, options=sp.SearchOptions(cube=SMALL))
    assert last.direction == "lower"
    accuracy = lambda r: 0.9 * (2 - loss(r))  # noqa: E731
    found = sp.search(state, accuracy, 0.02, last=last)
    assert points(found)[1] == WRECK
    assert found.direction == "higher"
    assert any("is inferred again" in note for note in found.notes)
    assert found.degradation is not None
    assert 0 <= found.degradation <= 0.02
    # As long as it stays, nothing more is spent on it.
    assert sp.search(state, accuracy, 0.02, last=found).evaluations == 2


def test_an_evaluate_of_the_other_direction_is_noticed_by_its_gains(caplog: pytest.LogCaptureFixture) -> None:
    """A changed direction is noticed by an impossible gain."""
    state = random_state()
    loss = Loss(state)
    last = sp.search(state, loss, 0.02, options=sp.SearchOptions(cube=SMALL))
    accuracy = lambda r: 1.0 - 5 * (loss(r) - 1.0)  # noqa: E731
    found = sp.search(state, accuracy, 0.02, last=last)
    assert WRECK in points(found)
    assert (found.direction, found.direction_given) == ("higher", False)
    assert any("higher quality is better, not lower" in r.getMessage() for r in caplog.records)
    restored = sp.decompress(sp.compress(state, cfg=found.config))
    assert accuracy(restored) >= 0.98
    # A direction that the caller gave is kept, with a note.
    said = sp.search(state, accuracy, 0.02, last=last, options=sp.SearchOptions(direction="lower"))
    assert WRECK not in points(said)
    assert any("the direction or `evaluate` is wrong" in note for note in said.notes)


def test_without_calls_left_for_it_the_direction_is_open_and_any_difference_a_loss() -> None:
    state = random_state()
    found = sp.search(state, Loss(state, scale=5.0, sign=-1.0), 0.01, options=sp.SearchOptions(cube=SMALL, budget=3))
    assert found.direction is None
    assert found.rounds == 3
    assert all(t.degradation >= 0 for t in found.trials)


# ---------------------------------------------------------------------- numbers that do not compare


def noisy(state: State, deviation: float, seed: int) -> Callable[[State], float]:
    """Return a loss with noise from its own generator."""
    loss, rng = Loss(state), np.random.default_rng(seed)
    return lambda restored: loss(restored) + deviation * float(rng.standard_normal())


def test_noise_that_comes_later_is_noticed_before_chance_decides() -> None:
    """New noise is noticed, and points far over the threshold are not chosen."""
    state = random_state()
    exact = Loss(state)
    last = sp.search(state, exact, 0.02, options=sp.SearchOptions(cube=SMALL))
    refused = bad = 0
    for seed in range(30):
        try:
            found = sp.search(
                state, noisy(state, 0.05, seed), 0.02, last=last, options=sp.SearchOptions(progress=False)
            )
        except BadArgumentError:
            refused += 1
            continue
        loss = exact(sp.decompress(sp.compress(state, cfg=found.config))) - 1.0 if found.met else 0.0
        bad += loss > 0.04
        # If more than the points milder than the last choice were tried, the state itself was evaluated again.
        assert found.method == "neighbourhood" or found.spread > 0
    assert bad == 0
    assert refused >= 1


def test_a_gain_that_cannot_be_has_the_state_itself_evaluated_again() -> None:
    state = random_state()
    last = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL, direction="lower"))
    values = iter([1.2, 1.0, 1.0])
    with pytest.raises(BadArgumentError, match=r"not comparable between calls: the same state gave 1 and 1\.2"):
        sp.search(state, lambda restored: next(values), 0.02, last=last)
    values = iter([1.2, 1.0, 1.2])
    found = sp.search(state, lambda restored: next(values), 0.02, last=last)
    assert points(found) == [None, last.point, None]
    assert found.met
    assert any("better than the state itself by 16.667%" in note for note in found.notes)


@pytest.mark.parametrize("drift", [-0.004, 0.004])
def test_an_evaluate_that_drifts_is_noticed_at_the_first_search(drift: float) -> None:
    state = random_state()
    loss = Loss(state, scale=0.2)

    def drifting(restored: State) -> float:
        value = loss(restored)
        return value + drift * loss.calls

    with pytest.raises(BadArgumentError, match="not comparable between calls"):
        sp.search(state, drifting, 0.01, options=sp.SearchOptions(cube=SMALL))


def test_the_usual_search_takes_no_more_calls_for_it() -> None:
    state = random_state()
    last = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL))
    assert [p is None for p in points(last)[:3]] == [True, True, False]
    assert points(last)[-1] is None
    assert last.evaluations <= 12
    assert sp.search(state, Loss(state), 0.02, last=last).evaluations == 2


# ---------------------------------------------------------------------- nothing is changed


def test_what_evaluate_draws_is_put_back() -> None:
    state = random_state()
    loss = Loss(state)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
    data = torch.utils.data.DataLoader(torch.arange(16.0).view(2, 8), shuffle=True)  # type: ignore[arg-type]

    def drawing(restored: State) -> float:
        _ = [net(batch) for batch in data]
        random.random()
        np.random.rand(3)  # noqa: NPY002
        return loss(restored)

    def numbers() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand())]  # noqa: NPY002

    def seeded() -> None:
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)  # noqa: NPY002

    seeded()
    expected = numbers()
    seeded()
    sp.search(state, drawing, 0.02, options=sp.SearchOptions(cube=SMALL, progress=False))
    assert numbers() == expected

    def failing(restored: State) -> float:
        drawing(restored)
        raise RuntimeError("out of luck")

    seeded()
    with pytest.raises(BadArgumentError, match="out of luck"):
        sp.search(state, failing, 0.02, options=sp.SearchOptions(cube=SMALL, progress=False))
    assert numbers() == expected


def grown(state: State, _: State) -> None:
    state["more"] = 1


def popped(state: State, _: State) -> None:
    del state["deep"]["list"]


def counted(state: State, _: State) -> None:
    state["step"] = 99


def retyped(state: State, _: State) -> None:
    state["step"] = 3.0


def replaced(state: State, _: State) -> None:
    state["1.weight"] = torch.zeros(48, 64)


def within(state: State, _: State) -> None:
    state["deep"]["list"][1] += 1


def graded(_: State, grads: State) -> None:
    grads["0.weight"].mul_(2)


def ungraded(_: State, grads: State) -> None:
    del grads["2.weight"]


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (grown, "more"),
        (popped, "deep/list"),
        (counted, "step"),
        (retyped, "step"),
        (replaced, "1.weight"),
        (within, "deep/list/1"),
        (graded, "grads/0.weight"),
        (ungraded, "grads/2.weight"),
    ],
)
def test_an_evaluate_that_changes_anything_is_told_what(change: Callable[..., None], path: str) -> None:
    state = random_state(step=3, deep={"list": [1, 2]})
    grads = {k: torch.ones_like(x) for k, x in random_state().items()}
    loss = Loss(state)

    def evaluate(restored: State) -> float:
        if loss.calls == 2:
            change(state, grads)
        return loss(restored)

    with pytest.raises(BadArgumentError, match=f"evaluate changed {path}"):
        sp.search(state, evaluate, 0.02, grads=grads, options=sp.SearchOptions(cube=SMALL, progress=False))


# ---------------------------------------------------------------------- arguments and records


def test_without_evaluate_arguments_are_checked_too() -> None:
    state = random_state()
    delta = sp.Checkpoint.from_bytes(sp.compress(state, sp.compress(state)).to_bytes())
    for more, message in (
        ({"prev": 3}, "prev"),
        ({"kinds": {"0.weight": "nonsense"}}, "nonsense"),
        ({"grads": {"nothing": torch.ones(3)}}, "grads/nothing"),
        ({"grads": {"0.weight": torch.ones(3)}}, r"grads/0\.weight has shape"),
        ({"relax": "no"}, "relax"),
    ):
        with pytest.raises(BadArgumentError, match=message):
            search(state, None, 0.1, **more)  # type: ignore[arg-type]
    with pytest.raises(sp.MissingParentError):
        sp.search(state, None, 0.1, prev=delta)
    with pytest.raises(sp.ShrinkpointError, match="object"):
        sp.search({"weight": object()}, None, 0.1)


def test_without_evaluate_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `evaluate` no hashes of the state are computed."""
    state = random_state()

    def never(*args: Any) -> TreeHashes:
        raise AssertionError(args)

    with monkeypatch.context() as context:
        context.setattr(TreeHashes, "of", never)
        alone = sp.search(state, None, 0.1, grads={k: torch.ones_like(x) for k, x in state.items()})
    assert alone.method == "error target"
    given = {"evaluate": None, "threshold": 0.1}
    same = searches(monkeypatch, 2, lambda rank: {"state": state, **given})
    assert same == [alone, alone]
    for error in searches(monkeypatch, 2, lambda rank: {"state": random_state(rank), **given}):
        assert "do not have the same state" in str(error)


def test_the_time_between_two_processes_is_not_all_training(monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state()
    last = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL))
    stored = json.dumps(dataclasses.replace(last, finished=time.time() - 1e6).to_json())
    here = sp.search(state, Loss(state), 0.02, last=sp.SearchResult.from_json(json.loads(stored)))
    assert here.share == pytest.approx(here.seconds / 1e6, rel=0.1)
    monkeypatch.setattr(run, "_PROCESS", "another")
    elsewhere = sp.search(state, Loss(state), 0.02, last=sp.SearchResult.from_json(json.loads(stored)))
    assert elsewhere.share is None
    assert elsewhere == here
    assert sp.search(state, Loss(state), 0.02, last=elsewhere).share is not None


def test_a_result_of_before_is_read_without_what_it_did_not_say() -> None:
    state = random_state()
    found = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL))
    old = found.to_json()
    del old["process"], old["probed_in_vain"]
    again = sp.SearchResult.from_json(old)
    assert again == found
    assert again.process == ""
    assert sp.search(state, Loss(state), 0.02, last=again).share is None
    del old["spread"]
    with pytest.raises(BadArgumentError, match="it lacks spread"):
        sp.SearchResult.from_json(old)
