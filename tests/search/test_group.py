"""Groups: an argument or plan that differs between members is an error on all."""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError, ShrinkpointError
from shrinkpoint.searching import Cube, Point, methods
from shrinkpoint.searching.estimate import Estimate, Estimator

from .calls import search
from .concurrent_searches import searches
from .test_search import SMALL, Loss, random_state

STATE = random_state()


def given(**more: Any) -> dict[str, Any]:
    return {"state": STATE, "evaluate": Loss(STATE), "threshold": 0.02, "cube": SMALL, "direction": "lower"} | more


def first(**more: Any) -> sp.SearchResult:
    return search(**given(**more), progress=False)


KINDS = dict.fromkeys(STATE, "linear") | {"0.weight": "embedding"}
BASE = sp.compress(STATE, kinds=dict.fromkeys(STATE, "linear"))
OTHER: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.03},
    "direction": {"direction": None},
    "expected_restores": {"expected_restores": 3},
    "steps": {"steps": 1},
    "relax": {"relax": True},
    "budget": {"budget": 4},
    "cube": {"cube": Cube()},
    "prev": {"prev": BASE},
    "grads": {"grads": {k: torch.ones_like(x) for k, x in STATE.items()}},
    "kinds": {"kinds": KINDS},
    "evaluate": {"evaluate": None},
    "state": {"state": {**STATE, "step": 1}},
}


@pytest.mark.parametrize("name", OTHER)
def test_an_argument_that_differs_is_named_on_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = searches(monkeypatch, 2, lambda rank: given(**(OTHER[name] if rank else {})))
    for error in found:
        assert isinstance(error, BadArgumentError)
        assert f"do not have the same {name}: rank 1 differs from rank 0" in str(error)


@pytest.mark.parametrize("name", ["last", "resume"])
def test_what_went_before_differs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = first()
    more = {name: before if name == "last" else before.trials}
    for error in searches(monkeypatch, 2, lambda rank: given(**(more if rank else {}))):
        assert isinstance(error, BadArgumentError)
        assert f"do not have the same {name}" in str(error)


def test_how_long_the_last_search_took_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    before = first()
    found = searches(
        monkeypatch, 2, lambda rank: given(last=dataclasses.replace(before, seconds=rank, finished=1e9 + rank))
    )
    assert isinstance(found[0], sp.SearchResult)
    assert found[0] == found[1]


def test_the_last_bit_of_an_estimate_is_each_process_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates that differ in the last bit give equal results on all members."""
    estimate, owner = Estimator.__call__, threading.local()

    def rough(self: Estimator, points: Any) -> list[Estimate]:
        up = math.inf if owner.rank else -math.inf
        return [
            dataclasses.replace(e, nbytes=math.nextafter(e.nbytes, up), error=math.nextafter(e.error, up))
            for e in estimate(self, points)
        ]

    def mine(rank: int, **more: Any) -> dict[str, Any]:
        owner.rank = rank  # called in the thread of the member
        return given(direction=None, **more)

    monkeypatch.setattr(Estimator, "__call__", rough)
    last, again = searches(monkeypatch, 2, mine)
    assert isinstance(last, sp.SearchResult)
    assert last == again
    found = searches(monkeypatch, 2, lambda rank: mine(rank, last=last))
    assert isinstance(found[0], sp.SearchResult)
    assert found[0] == found[1]
    assert found[0].rounds == 2


def test_trials_that_differ_in_the_last_bit_of_an_estimate_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    before = first()
    rough = [dataclasses.replace(t, error=math.nextafter(t.error, 1.0)) for t in before.trials]
    found = searches(monkeypatch, 2, lambda rank: given(resume=rough if rank else before.trials))
    assert isinstance(found[0], sp.SearchResult)
    assert found[0] == found[1]
    worse = [dataclasses.replace(t, nbytes=t.nbytes + 1) for t in before.trials]
    for error in searches(monkeypatch, 2, lambda rank: given(resume=worse if rank else before.trials)):
        assert "do not have the same resume" in str(error)


def test_a_plan_that_differs_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, count = methods.next_trials, iter(range(100))

    def elsewhere(*args: Any, **named: Any) -> list[Point]:
        # Another order of sums on another machine would do the same.
        chosen = plan(*args, **named)
        return chosen if next(count) % 2 else chosen[::-1]

    monkeypatch.setattr(methods, "next_trials", elsewhere)
    found = searches(monkeypatch, 2, lambda rank: given())
    for error in found:
        assert isinstance(error, ShrinkpointError)
        assert "have diverged" in str(error)


def test_one_that_cannot_begin_stops_all_before_anything_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = Loss(STATE)
    bad = {"kinds": {"0.weight": "nonsense"}}
    found = searches(monkeypatch, 2, lambda rank: given(evaluate=loss) | (bad if rank else {}))
    assert "failed on rank 1" in str(found[0])
    assert "nonsense" in str(found[1])
    assert loss.calls == 0


def test_of_those_that_pass_beside_each_other_the_smallest_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest of several points that pass in one round is chosen."""
    last = dataclasses.replace(first(), point=Point(8, 0.0, "magnitude", 0.0005, 0.0, 32), trials=())
    baseline = 1.0

    def fickle(restored: dict[str, Any]) -> float:
        # The last choice fails; finer points pass, at any size.
        return baseline + (Loss(STATE)(restored) - 1.0 > 0.012) * 0.05

    found = searches(monkeypatch, 8, lambda rank: given(evaluate=fickle, last=last, relax=False, steps=4))
    result = found[0]
    assert isinstance(result, sp.SearchResult)
    assert all(other == result for other in found)
    assert result.method == "neighbourhood"
    passing = [t for t in result.trials if t.point is not None and t.passed]
    sizes = [t.nbytes for t in passing]
    assert len({t.round for t in passing}) == 1
    assert len(sizes) >= 2
    assert result.nbytes == min(sizes)
    # A larger one that passed stood before it, so that the first to pass would not do.
    queue = methods._queue
    order: list[int] = []

    def turned(*args: Any, **named: Any) -> Any:
        points, discarded = queue(*args, **named)
        order.append(len(points))
        return points[::-1], discarded

    monkeypatch.setattr(methods, "_queue", turned)
    again = searches(monkeypatch, 8, lambda rank: given(evaluate=fickle, last=last, relax=False, steps=4))[0]
    assert isinstance(again, sp.SearchResult)
    passing = [t for t in again.trials if t.point is not None and t.passed]
    assert passing[0].nbytes > min(t.nbytes for t in passing)
    assert again.nbytes == min(t.nbytes for t in passing)


def test_eight_members_in_the_steady_state_take_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    before = first()
    found = searches(monkeypatch, 8, lambda rank: given(last=before))
    assert all(isinstance(f, sp.SearchResult) and f == found[0] for f in found)
    assert isinstance(found[0], sp.SearchResult)
    assert (found[0].method, found[0].rounds, found[0].point) == ("neighbourhood", 2, before.point)
    assert found[0].nbytes == before.nbytes


def test_the_direction_is_looked_for_beside_the_first_points(monkeypatch: pytest.MonkeyPatch) -> None:
    found = searches(monkeypatch, 4, lambda rank: given(direction=None))[0]
    assert isinstance(found, sp.SearchResult)
    assert found.direction == "lower"
    beside = [t.point for t in found.trials if t.round == 1]
    assert len(beside) == 4
    assert sum(p is not None and p.bins == 2 for p in beside) == 1
    assert found.met


@pytest.mark.parametrize("what", ["value", "scalar", "name", "dtype", "order", "tied", "nan"])
def test_two_states_that_differ_in_anything_are_not_the_same(what: str) -> None:
    """A trial of one state is refused for a state that differs in any part."""
    x = STATE["0.weight"]
    other: dict[str, Any] = dict(STATE, step=1)
    state = dict(other)
    if what == "value":
        other["0.weight"] = torch.nextafter(x, torch.tensor(math.inf))
    elif what == "scalar":
        other["step"] = 1.0
    elif what == "name":
        other["3.weight"] = other.pop("2.weight")
    elif what == "dtype":
        other["0.weight"] = x.view(torch.int32)
    elif what == "order":
        other = dict(reversed(other.items()))
    elif what == "tied":
        state["again.weight"], other["again.weight"] = x, x.clone()
    else:
        other["step"] = math.nan
    done = sp.search(
        state, lambda restored: 1.0, 0.02, options=sp.SearchOptions(cube=SMALL, direction="lower", progress=False)
    ).trials
    sp.search(
        state,
        lambda restored: 1.0,
        0.02,
        options=sp.SearchOptions(cube=SMALL, direction="lower", progress=False, resume=done),
    )
    with pytest.raises(BadArgumentError, match="another state"):
        sp.search(
            other,
            lambda restored: 1.0,
            0.02,
            options=sp.SearchOptions(cube=SMALL, direction="lower", progress=False, resume=done),
        )


def test_trials_of_another_parent_or_other_gradients_or_kinds_are_not_taken() -> None:
    arguments = {"evaluate": lambda restored: 1.0, "threshold": 0.02, "cube": SMALL, "direction": "lower"}
    done = search(STATE, **arguments, progress=False).trials
    rows = np.array([1, 2, 3, 4, 5, 6], np.uint8)
    table = dataclasses.replace(sp.kinds(torch.nn.Embedding(48, 64))["weight"], rows=rows)
    for more in (
        OTHER["prev"],
        OTHER["grads"],
        {"kinds": KINDS},
        {"kinds": KINDS | {"0.weight": table}},
        {"kinds": KINDS | {"0.weight": dataclasses.replace(table, rows=rows + 1)}},
    ):
        with pytest.raises(BadArgumentError, match="another state"):
            search(STATE, **arguments, **more, progress=False, resume=done)
        done = search(STATE, **arguments, **more, progress=False).trials
