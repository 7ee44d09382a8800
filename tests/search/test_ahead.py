"""Searches of extrapolated weights evaluate the stored state."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.searching.cube import Cube, Point
from shrinkpoint.searching.result import SearchResult

from ..store import test_weight_average
from .calls import search

CUBE = Cube(bins=(8, 16, 32), prune=(0.0,), metric=("magnitude",), protect=(0.0005,), rate=(0.0, 0.002))
CHAIN = sp.ChainPolicy(base_every=None)


def drifting(step: int) -> Any:
    return test_weight_average.drifting(step, (300, 400))


class Loss:
    """One plus the mean squared error; keeps the last given state."""

    def __init__(self, exact: Any) -> None:
        self.exact = exact["model"]["weight"]
        self.given: Any = None

    def __call__(self, restored: Any) -> float:
        self.given = restored
        return 1.0 + float(((restored["model"]["weight"] - self.exact) ** 2).mean())


def searched(store: sp.Store, step: int, last: SearchResult | None = None, **more: Any) -> tuple[SearchResult, Loss]:
    state = drifting(step)
    loss = Loss(state)
    more = {"prev": store.parent, "earlier": store.earlier(state, step), "cube": CUBE, **more}
    return search(state, loss, 0.02, last=last, **more, direction="lower", progress=False), loss


@pytest.mark.parametrize("rate", [0.0, 0.002])
def test_what_is_evaluated_is_what_is_stored(rate: float) -> None:
    store = sp.Store(f"memory://search-ahead-{rate}", sp.Config(chain=CHAIN, ahead=True))
    found, gains = None, []
    cube = dataclasses.replace(CUBE, rate=(rate,))
    for step in range(10, 80, 10):
        found, loss = searched(store, step, found, cube=cube)
        assert found.config.ahead
        stored = store.save(step, drifting(step), cfg=found.config).checkpoint
        assert stored.nbytes == found.nbytes
        chosen = [trial for trial in found.trials if trial.point == found.point]
        assert chosen[-1].estimated == pytest.approx(found.nbytes, rel=0.004, abs=80)
        if found.trials[-1] is chosen[-1]:
            assert (loss.given["model"]["weight"] == store.load(step)["model"]["weight"]).all()
        gains.append(
            stored.parent_reference(
                *next((r.key, r.spec) for r in stored.records if r.path == "model/weight")
            ).drift_gain
        )
    assert min(gains[2:]) > 0.02  # or nothing of this was coded ahead


def test_where_nothing_is_said_of_earlier_weights_nothing_is_ahead() -> None:
    store = sp.Store("memory://search-not-ahead", sp.Config(chain=CHAIN))
    for step in (10, 20, 30):
        found, _ = searched(store, step, earlier=None)
        assert found.config.ahead is False
        assert store.save(step, drifting(step), cfg=found.config).checkpoint.nbytes == found.nbytes


def test_without_evaluate() -> None:
    store = sp.Store("memory://search-error-ahead", sp.Config(chain=CHAIN))
    for earlier in (store.earlier(drifting(10), 10), None):
        found = sp.search(drifting(10), None, 0.05, options=sp.SearchOptions(earlier=earlier))
        assert found.config.ahead is (earlier is not None)


class Steady(Loss):
    """A loss that penalises extrapolated weights, unless it is lenient."""

    def __init__(self, exact: Any, earlier: Any) -> None:
        super().__init__(exact)
        self.drift = self.exact - earlier
        self.lenient = False
        self.calls = 0

    def __call__(self, restored: Any) -> float:
        self.calls += 1
        error = restored["model"]["weight"] - self.exact
        along = float((error * self.drift).sum() / (self.drift**2).sum())
        return super().__call__(restored) + 10 * max(0.0, along - 0.01) * (not self.lenient)


def test_where_nothing_passes_ahead_weights_are_coded_where_they_are_this_time() -> None:
    store = sp.Store("memory://search-fallen-back", sp.Config(chain=CHAIN, rate=0.002))
    for step in range(10, 60, 10):
        store.save(step, drifting(step))
    state, last = drifting(60), None
    earlier = store.earlier(state, 60)
    for lenient, ahead, method in (
        (True, True, "exhaustive"),
        (False, False, "neighbourhood"),
        (True, True, "neighbourhood"),
    ):
        loss = Steady(state, earlier.weights["model/weight"])
        loss.lenient = lenient
        more: Any = {"direction": "lower", "progress": False, "cube": CUBE, "last": last}
        found = search(state, loss, 0.02, prev=store.parent, **more, earlier=earlier)
        assert (found.met, found.config.ahead, found.method) == (True, ahead, method)
        ahead_of_it = [t for t in found.trials if t.ahead]
        assert ahead_of_it
        assert any(t.passed for t in ahead_of_it) is lenient
        assert any(t.point is not None and not t.ahead for t in found.trials) is not ahead
        assert any("weights are coded where they are" in note for note in found.notes) is not ahead
        assert SearchResult.from_json(found.to_json()) == found
        given = compressed(state, store, found, earlier)
        assert given.nbytes == found.nbytes
        # Trials of both kinds are used again, each with its kind.
        calls = loss.calls
        again = search(state, loss, 0.02, prev=store.parent, **more, earlier=earlier, resume=found.trials)
        assert again == found
        assert loss.calls == calls
        last = found


def compressed(state: Any, store: sp.Store, found: SearchResult, earlier: Any) -> sp.Checkpoint:
    return sp.compress(state, store.parent, found.config, earlier=earlier if found.config.ahead else None)


def test_of_what_may_pass_ahead_the_mildest_is_tried_before_all_else() -> None:
    store = sp.Store("memory://search-mildest", sp.Config(chain=CHAIN, rate=0.002))
    for step in range(10, 60, 10):
        store.save(step, drifting(step))
    state = drifting(60)
    earlier = store.earlier(state, 60)
    loss = Steady(state, earlier.weights["model/weight"])
    more: Any = {"direction": "lower", "progress": False, "cube": CUBE}
    found = search(state, loss, 0.02, prev=store.parent, **more, earlier=earlier)
    ahead_of_it = [t for t in found.trials if t.ahead]
    assert [t.point.bins for t in ahead_of_it if t.point is not None] == [32]
    assert found.met
    assert found.config.ahead is False


def test_moments_are_as_the_rate_of_a_point_has_them() -> None:
    point = Point(16, 0.0, "magnitude", 0.0005, 0.002)
    state = drifting(10)
    asked = sp.compress(state, cfg=sp.Config([("weight", sp.Quantize(bins=16, protect=0.0005))], rate=0.002))
    assert sp.compress(state, cfg=point.config()).nbytes == asked.nbytes
    found = sp.search(
        state,
        Loss(state),
        0.02,
        options=sp.SearchOptions(cube=dataclasses.replace(CUBE, bins=(16,), rate=(0.002,)), progress=False),
    )
    assert found.nbytes == asked.nbytes
    (tried,) = [t for t in found.trials if t.point == found.point]
    assert tried.estimated == pytest.approx(found.nbytes, rel=0.004)


def test_trials_made_before_other_weights_are_of_no_use() -> None:
    store = sp.Store("memory://search-resumed-ahead", sp.Config(chain=CHAIN, rate=0.002))
    for step in (10, 20, 30):
        store.save(step, drifting(step))
    found, _ = searched(store, 40)
    again, loss = searched(store, 40, resume=found.trials)
    assert loss.given is None  # not one of them was made again
    assert again == found
    for other in (
        None,
        sp.PastWeights(store.earlier(drifting(40), 40).weights, 7),
        {"weight": drifting(0)["model"]["weight"]},
    ):
        with pytest.raises(BadArgumentError, match="belongs to another state"):
            searched(store, 40, resume=found.trials, earlier=other)


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        ({"v": np.zeros((300, 400), "f4")}, "earlier/v: the state has no such weight"),
        ({"weight": np.zeros((400, 300), "f4")}, r"model/weight: earlier/weight has shape \(400, 300\)"),
        (3, "earlier must be a tree"),
    ],
)
def test_earlier_weights_that_fit_nothing(earlier: Any, message: str) -> None:
    with pytest.raises(BadArgumentError, match=message):
        sp.search(drifting(1), lambda _: 1.0, 0.1, options=sp.SearchOptions(earlier=earlier))


def test_where_the_last_choice_fails_the_mildest_is_not_all_that_is_left() -> None:
    """If the last choice fails, smaller passing points are still found."""
    store = sp.Store("memory://search-between", sp.Config(chain=CHAIN, rate=0.002))
    for step in range(10, 60, 10):
        store.save(step, drifting(step))
    state = drifting(60)
    spread = float(state["model"]["weight"].var())

    def loss(restored: Any) -> float:
        return 1.0 + float(((restored["model"]["weight"] - state["model"]["weight"]) ** 2).mean()) / spread

    more: Any = {"prev": store.parent, "earlier": store.earlier(state, 60), "cube": CUBE, "direction": "lower"}
    coarse = search(state, loss, 0.5, **more, progress=False)
    assert coarse.point is not None
    assert (coarse.point.bins, coarse.point.rate) == (8, 0.002)
    found = search(state, loss, 0.012, last=coarse, **more, steps=0, progress=False)
    assert found.fell_back
    assert found.config.ahead
    tried = [t for t in found.trials if t.point is not None and t.passed]
    assert len(tried) == 2
    assert found.nbytes == min(t.nbytes for t in tried) < max(t.nbytes for t in tried)
