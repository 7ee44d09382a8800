"""The cost of restores in a run's budget, and a given baseline."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.searching.result import SearchResult

from .concurrent_searches import searches
from .test_search import SMALL, Loss, State, random_state

BUDGET = 0.06
EVERY, STEPS = 5, 60
KILLS = (8, 12, 19, 27, 33, 38, 46, 52, 58)


def run_with_kills(folder: Path, expected: float | None, *, counting: bool = True) -> tuple[list[float], SearchResult]:
    """Save a random walk of weights as searched, with kills that lose the memory.

    Returns:
        The measured degradation of each restore; and the last search.
    """
    took: list[float] = []
    exact: dict[int, State] = {}
    left, last, live, step, store = list(KILLS), None, random_state(), 0, sp.Store(folder)
    while step < STEPS:
        if left and step == left[0]:
            left.pop(0)
            store = sp.Store(folder)
            state = store.load()
            step, live = state["step"], state["model"]
            took.append(Loss(exact[step])(live) - 1.0)
            last = SearchResult.from_json(json.loads(state["search"]))
            last = last.restored() if counting else last
        step += 1
        generator = torch.Generator().manual_seed(step)
        live = {k: x + 0.05 * torch.randn(x.shape, generator=generator) for k, x in live.items()}
        if step % EVERY == 0:
            loss = Loss(live)
            evaluate = lambda restored, loss=loss: loss(restored["model"])  # noqa: E731
            state = {"model": live, "step": step}
            found = sp.search(
                state,
                evaluate,
                BUDGET,
                prev=store.parent,
                last=last,
                options=sp.SearchOptions(cube=SMALL, expected_restores=expected),
            )
            last, exact[step] = found, live
            store.save(step, state | {"search": json.dumps(found.to_json())}, cfg=found.config)
    assert last is not None
    return took, last


@pytest.mark.parametrize("expected", [0.5, 3, 9, 20])
def test_over_a_run_with_kills_all_restores_together_keep_the_budget(expected: float, tmp_path: Path) -> None:
    took, last = run_with_kills(tmp_path / "counted", expected)
    assert len(took) == len(KILLS)
    assert sum(took) <= BUDGET
    assert last.restores == len(KILLS)
    assert last.spent == pytest.approx(sum(took))
    if expected < len(KILLS):
        # Taking a share of the initial budget repeatedly exceeds the budget.
        naive, _ = run_with_kills(tmp_path / "not counted", expected, counting=False)
        assert sum(naive) > BUDGET


def test_what_is_left_is_shared_by_the_restores_to_come() -> None:
    state = random_state()
    found = sp.search(state, Loss(state), BUDGET, options=sp.SearchOptions(cube=SMALL, expected_restores=3))
    assert found.threshold == BUDGET / 3
    assert (found.restores, found.spent) == (0, 0.0)
    for done in (1, 2, 3, 4, 5):
        before = found.restored()
        assert (before.restores, before.spent) == (done, found.spent + (found.degradation or 0.0))
        found = sp.search(state, Loss(state), BUDGET, last=before, options=sp.SearchOptions(expected_restores=3))
        share = (2, 1, 2, 2, 2)[done - 1]
        assert found.threshold == pytest.approx((BUDGET - before.spent) / share)
        assert (found.restores, found.spent) == (before.restores, before.spent)
        assert SearchResult.from_json(json.loads(json.dumps(found.to_json()))) == found
    # What the first ones left over is the later ones'.
    cheap = dataclasses.replace(found, restores=2, spent=0.0)
    assert (
        sp.search(state, Loss(state), BUDGET, last=cheap, options=sp.SearchOptions(expected_restores=3)).threshold
        == BUDGET
    )
    assert sp.search(state, Loss(state), BUDGET, last=before).threshold == BUDGET


def test_once_the_budget_is_spent_checkpoints_are_lossless() -> None:
    state = random_state()
    found = sp.search(state, Loss(state), BUDGET, options=sp.SearchOptions(cube=SMALL, expected_restores=1))
    for spent in (BUDGET, 2 * BUDGET, (1 - 1e-4) * BUDGET):
        last = dataclasses.replace(found, restores=1, spent=spent)
        done = sp.search(state, Loss(state), BUDGET, last=last, options=sp.SearchOptions(expected_restores=1))
        assert (done.met, done.point, done.evaluations, done.method) == (False, None, 0, "budget spent")
        assert done.config == sp.presets.lossless()
        assert done.spent == spent
        # Restores of these cost nothing, and a larger budget is searched with again.
        assert done.restored().spent == spent
        assert done.restored().restores == 2
        assert (
            sp.search(state, Loss(state), BUDGET, last=done, options=sp.SearchOptions(expected_restores=1)).method
            == "budget spent"
        )
        more = sp.search(state, Loss(state), 3 * BUDGET, last=done, options=sp.SearchOptions(expected_restores=1))
        assert more.met
        assert more.threshold == pytest.approx((3 * BUDGET - spent) / 2)
    # The remaining budget is less than the noise.
    noisy = dataclasses.replace(found, restores=1, spent=0.5 * BUDGET, spread=0.4 * BUDGET)
    assert (
        sp.search(state, Loss(state), BUDGET, last=noisy, options=sp.SearchOptions(expected_restores=1)).method
        == "budget spent"
    )


def test_what_restores_take_that_nobody_evaluated() -> None:
    state = random_state()
    exact = sp.search({"count": torch.arange(3)}, lambda _: 1.0, 0.1, options=sp.SearchOptions(expected_restores=1))
    assert exact.method == "nothing to choose"
    assert (exact.restored().restores, exact.restored().spent) == (1, 0.0)
    blind = sp.search(state, None, 0.1, options=sp.SearchOptions(expected_restores=4))
    assert blind.restored().spent == 0.025
    following = sp.search(state, None, 0.1, last=blind.restored(), options=sp.SearchOptions(expected_restores=4))
    assert following.config.max_rel_error == pytest.approx(0.025)
    gained = dataclasses.replace(
        sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL)), degradation=-0.01
    )
    assert gained.restored().spent == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("spent", value) for value in (-1.0, float("nan"), "inf", True, None)),
        *(("restores", value) for value in (-5, True, 1.5)),
    ],
)
def test_what_cannot_have_been_spent_is_no_search_result(name: str, value: Any) -> None:
    data = sp.search(random_state(), None, 0.1).to_json()
    assert SearchResult.from_json(data | {"spent": 0, "restores": 2}).restores == 2
    with pytest.raises(BadArgumentError, match=f"not a search result: its {name}"):
        SearchResult.from_json(data | {name: value})


# ---------------------------------------------------------------------- a baseline that is known


def test_a_known_baseline_saves_a_call() -> None:
    state = random_state()
    loss = Loss(state)
    plain = sp.search(state, loss, 0.02, options=sp.SearchOptions(cube=SMALL))
    known = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL, baseline=1.0))
    assert known.point == plain.point
    assert sum(t.point is None for t in known.trials) == sum(t.point is None for t in plain.trials) - 1
    later = sp.search(state, Loss(state), 0.02, last=known, options=sp.SearchOptions(baseline=1.0))
    assert [t.point for t in later.trials] == [known.point]
    assert later.degradation == known.degradation
    assert later.met


def test_a_baseline_that_is_not_what_evaluate_says_is_refused() -> None:
    state = random_state()
    with pytest.raises(BadArgumentError, match="not comparable between calls"):
        sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL, baseline=1.05))
    near = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL, baseline=1.004))
    assert near.spread == pytest.approx(0.004, rel=0.01)
    # Later it is checked if the earlier result cannot be used.
    with pytest.raises(BadArgumentError, match="not comparable between calls"):
        sp.search(state, Loss(state), 0.02, last=near, options=sp.SearchOptions(baseline=1.5))
    for bad in (0.0, float("nan"), float("inf"), "1"):
        with pytest.raises(BadArgumentError, match="baseline"):
            sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL, baseline=bad))  # type: ignore[arg-type]


def test_a_threshold_in_percent_is_told() -> None:
    state = random_state()
    with pytest.warns(sp.ShrinkpointWarning, match="threshold is 5, which is 500%; 5 % is 0.05"):
        sp.search(state, Loss(state), 5, options=sp.SearchOptions(cube=SMALL))


def test_processes_that_search_together_are_given_the_same_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state()
    last = sp.search(state, Loss(state), 0.02, options=sp.SearchOptions(cube=SMALL))
    given = {"state": state, "evaluate": Loss(state), "threshold": 0.02, "cube": SMALL}
    first = searches(monkeypatch, 2, lambda rank: {**given, "baseline": 1.0})[0]
    assert isinstance(first, SearchResult)
    # Each compares its own number with it.
    assert sum(t.point is None for t in first.trials) == 2
    later = searches(monkeypatch, 2, lambda rank: {**given, "baseline": 1.0, "last": last})[0]
    assert isinstance(later, SearchResult)
    assert all(t.point is not None for t in later.trials)
    # It is looked at where a trial gains what cannot be, as one process would.
    for error in searches(monkeypatch, 2, lambda rank: {**given, "baseline": 1.03, "last": last}):
        assert "not comparable between calls" in str(error)
    for error in searches(monkeypatch, 2, lambda rank: {**given, "baseline": 1.0 + 0.001 * rank}):
        assert "do not have the same baseline" in str(error)
