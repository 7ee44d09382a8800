"""Searches of weights that are coded ahead of their drift: what is evaluated is what is stored."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError
from shrinkpoint.search.cube import Cube
from shrinkpoint.search.result import SearchResult

from ..store import test_trail

CUBE = Cube(bins=(8, 16, 32), prune=(0.0,), metric=("magnitude",), protect=(0.0005,), rate=(0.0, 0.002))
CHAIN = sp.ChainPolicy(base_every=None)


def drifting(step: int) -> Any:
    return test_trail.drifting(step, (300, 400))


class Loss:
    """One plus the mean squared error; keeps the last state that it was given."""

    def __init__(self, exact: Any) -> None:
        self.exact = exact["model"]["w"]
        self.given: Any = None

    def __call__(self, restored: Any) -> float:
        self.given = restored
        return 1.0 + float(((restored["model"]["w"] - self.exact) ** 2).mean())


def searched(store: sp.Store, step: int, last: SearchResult | None = None, **more: Any) -> tuple[SearchResult, Loss]:
    state = drifting(step)
    loss = Loss(state)
    more = {"prev": store.parent, "earlier": store.earlier(state, step), "cube": CUBE, **more}
    return sp.search(state, loss, 0.02, last=last, direction="lower", progress=False, **more), loss


@pytest.mark.parametrize("rate", [0.0, 0.002])
def test_what_is_evaluated_is_what_is_stored(rate: float) -> None:
    store = sp.Store(f"memory://search-ahead-{rate}", sp.Config(chain=CHAIN, ahead=True))
    found, aims = None, []
    cube = dataclasses.replace(CUBE, rate=(rate,))
    for step in range(10, 80, 10):
        found, loss = searched(store, step, found, cube=cube)
        assert found.config.ahead
        stored = store.save(step, drifting(step), cfg=found.config).checkpoint
        assert stored.nbytes == found.nbytes
        chosen = [trial for trial in found.trials if trial.point == found.point]
        assert chosen[-1].estimated == pytest.approx(found.nbytes, rel=0.004)
        if found.trials[-1] is chosen[-1]:
            assert (loss.given["model"]["w"] == store.load(step)["model"]["w"]).all()
        aims.append(stored.parent_memory(*next((r.key, r.spec) for r in stored.records if r.path == "model/w")).aim)
    assert min(aims[2:]) > 0.02  # or nothing of this was coded ahead


def test_where_nothing_is_said_of_earlier_weights_nothing_is_ahead() -> None:
    store = sp.Store("memory://search-not-ahead", sp.Config(chain=CHAIN))
    for step in (10, 20, 30):
        found, _ = searched(store, step, earlier=None)
        assert found.config.ahead is False
        assert store.save(step, drifting(step), cfg=found.config).checkpoint.nbytes == found.nbytes


def test_without_evaluate() -> None:
    store = sp.Store("memory://search-error-ahead", sp.Config(chain=CHAIN))
    for earlier in (store.earlier(drifting(10), 10), None):
        found = sp.search(drifting(10), None, 0.05, earlier=earlier)
        assert found.config.ahead is (earlier is not None)


def test_trials_made_before_other_weights_are_of_no_use() -> None:
    store = sp.Store("memory://search-resumed-ahead", sp.Config(chain=CHAIN, rate=0.002))
    for step in (10, 20, 30):
        store.save(step, drifting(step))
    found, _ = searched(store, 40)
    again, loss = searched(store, 40, resume=found.trials)
    assert loss.given is None  # not one of them was made again
    assert again == found
    for other in (None, sp.Earlier(store.earlier(drifting(40), 40).weights, 7), {"w": drifting(0)["model"]["w"]}):
        with pytest.raises(BadArgumentError, match="is of another state than this one"):
            searched(store, 40, resume=found.trials, earlier=other)


@pytest.mark.parametrize(
    ("earlier", "message"),
    [
        ({"v": np.zeros((300, 400), "f4")}, "earlier/v: the state has no such weight"),
        ({"w": np.zeros((400, 300), "f4")}, r"model/w: earlier/w has shape \(400, 300\)"),
        (3, "earlier must be a tree"),
    ],
)
def test_earlier_weights_that_fit_nothing(earlier: Any, message: str) -> None:
    with pytest.raises(BadArgumentError, match=message):
        sp.search(drifting(1), lambda _: 1.0, 0.1, earlier=earlier)
