"""Any order of saves, compactions, collections, pins and crashes leaves readable steps."""

from __future__ import annotations

import builtins
import contextlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import shrinkpoint as sp
from shrinkpoint.store import history, local
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.retention import Retention
from tests.store.common import data_path, leftovers, lossless, same, state

SIZE = 80
POLICIES = st.builds(
    lossless,
    against=st.sampled_from(["previous", "base"]),
    base_every=st.sampled_from([None, 1, 3, 20]),
    predictor=st.sampled_from([None, "size"]),
    max_restore_cost=st.sampled_from([None, 1.0, 2.5]),
)


class Dead(BaseException):
    """The simulated death of the process; no call works after it."""


class Mortal:
    """`os` for `store.local`, which fails for ever from the n-th change on."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def change(self) -> None:
        """Count a change, or raise `Dead`."""
        if self.left <= 0:
            raise Dead
        self.left -= 1

    def open_file(self, path: str, mode: str) -> Any:
        """Count a change, and open the file."""
        self.change()
        return builtins.open(path, mode)

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in ("fsync", "replace", "link", "unlink", "mkdir", "open"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self.change()
            return found(*args, **kwargs)

        return call


class StoreMachine(RuleBasedStateMachine):
    """Model of a store: state, pin, tag, metric and damage of each step."""

    def __init__(self) -> None:
        super().__init__()
        shm = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.root = Path(tempfile.mkdtemp(dir=shm))
        self.steps: dict[int, int] = {}
        self.metrics: dict[int, float | None] = {}
        self.pins: set[int] = set()
        self.tags: dict[str, int] = {}
        self.restores = 0
        self.saves = 0
        self.at: tuple[int, set[int]] | None = None
        self.beyond: set[int] = set()
        self.left: dict[tuple[int, int], bool] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @initialize(cfg=POLICIES)
    def begin(self, cfg: sp.Config) -> None:
        self.store = sp.Store(self.root, cfg)

    @rule(cfg=POLICIES)
    def reopen(self, cfg: sp.Config) -> None:
        self.store = sp.Store(self.root, cfg)
        self.at, self.beyond = None, set()

    def going_back(self, step: int) -> dict[tuple[int, int], bool]:
        """Return the steps that saving this step leaves behind, and whether `load` ignores them."""
        steps = set(self.steps)
        if not steps or step >= max(steps):
            return {}
        since, above = self.at or (step, set[int]())
        beyond = (above & steps) - {step} if since < step else set[int]()
        passed = max(beyond, default=0) > step
        if not passed:
            beyond = {s for s in steps if s > step}
        return {(s, self.steps[s]): passed for s in beyond - self.beyond}

    def leave(self, behind: dict[tuple[int, int], bool]) -> None:
        for which, passed in behind.items():
            self.left[which] = passed or self.left.get(which, False)
            self.beyond.add(which[0])

    def order(self) -> list[int]:
        """Return the steps in the order in which `load()` tries them."""
        return sorted(self.steps, key=lambda s: (not self.left.get((s, self.steps[s]), False), s), reverse=True)

    @rule(step=st.integers(0, 30), metric=st.none() | st.integers(0, 5).map(float))
    def save(self, step: int, metric: float | None) -> None:
        self.saves += 1
        behind = self.going_back(step)
        with pytest.warns(StoreWarning) if behind else contextlib.nullcontext():
            self.store.save(step, state(self.saves, SIZE), metric=metric)
        self.leave(behind)
        self.at = None
        self.steps[step], self.metrics[step] = self.saves, metric

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), paths=st.none() | st.sampled_from(["*", "ids"]))
    def load(self, data: st.DataObject, paths: str | None) -> None:
        step = data.draw(st.none() | st.sampled_from(sorted(self.steps)) | st.sampled_from([*sorted(self.tags), None]))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            found = self.store.load(step, paths)
        which = self.tags[step] if isinstance(step, str) else self.order()[0] if step is None else step
        number = self.steps[which]
        if paths is None:
            self.at = which, {s for s in self.steps if s > which}
        self.restores += paths is None
        assert found["ids"].tobytes() == state(number)["ids"].tobytes()
        assert paths == "ids" or same(found, number)

    @rule(cost=st.sampled_from([1.0, 2.0, 3.0]))
    def compact(self, cost: float) -> None:
        self.store.compact(cost)
        assert all(self.store.describe(step).restore_cost <= cost for step in self.steps)

    @rule()
    def collect(self) -> None:
        self.store.gc(timeout=0.0)
        assert leftovers(self.root) == []

    @rule(retention=st.builds(Retention, st.integers(1, 4), st.sampled_from([None, 4]), st.integers(0, 2)))
    def retain(self, retention: Retention) -> None:
        measured = any(m is not None for m in self.metrics.values())
        if retention.best and self.steps and not measured:
            with pytest.warns(StoreWarning, match="no step has a metric"):
                self.store.gc(retention, timeout=0.0)
            return
        self.store.gc(retention, timeout=0.0)
        live = {s: m for s, m in self.metrics.items() if (s, self.steps[s]) not in self.left}
        self._keep(retention.kept(self.metrics) | retention.kept(live) | self.pins | set(self.tags.values()))

    def _keep(self, kept: set[int]) -> None:
        self.steps = {s: n for s, n in self.steps.items() if s in kept}
        self.metrics = {s: m for s, m in self.metrics.items() if s in kept}

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), what=st.sampled_from(["pin", "unpin", "a", "b", "untag", "rate", "drop"]))
    def label(self, data: st.DataObject, what: str) -> None:
        step = data.draw(st.sampled_from(sorted(self.steps)))
        if what == "pin":
            self.store.pin(step)
            self.pins.add(step)
        elif what == "unpin":
            self.store.unpin(step)
            self.pins.discard(step)
        elif what in ("a", "b"):
            self.store.tag(what, step)
            self.tags[what] = step
        elif what == "untag":
            self.store.untag("a")
            self.tags.pop("a", None)
        elif what == "rate":
            self.store.rate(step, float(step))
            self.metrics[step] = float(step)
        elif step not in self.pins | set(self.tags.values()):
            self.store.drop(step)
            self._keep(set(self.steps) - {step})

    @rule(calls=st.integers(0, 40), what=st.sampled_from(["save", "compact", "gc"]), step=st.integers(0, 30))
    def crash(self, calls: int, what: str, step: int) -> None:
        """Die at a change of the folder; afterwards the old or the new state is there."""
        self.saves += 1
        died, behind = False, self.going_back(step) if what == "save" else {}
        mortal = Mortal(calls)
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setattr(local, "os", mortal)
            patch.setattr(local, "open", mortal.open_file, raising=False)
            try:
                if what == "save":
                    warnings.simplefilter("ignore", StoreWarning)
                    self.store.save(step, state(self.saves, SIZE))
                elif what == "compact":
                    self.store.compact(2.0)
                else:
                    self.store.gc(timeout=0.0)
            except Dead:
                died = True
        self.store = sp.Store(self.root, self.store.cfg)
        if what == "save":
            there = step in self.store.steps()
            assert there or (died and step not in self.steps)
            # Looked at through another: the new store has loaded nothing, so its next save goes on from nothing.
            if there and same(sp.Store(self.root).load(step, count=False), self.saves):
                self.steps[step], self.metrics[step] = self.saves, None
            else:
                assert died
        # The record comes first: killed in between the run has gone back and saved nothing.
        recorded = {(s, i) for r in history.read_rewinds(self.store._files) for s, i in r.left.items()}
        now = {s: (s, self.store.describe(s).identity) for s, _ in behind}
        if behind and all(pair in recorded for pair in now.values()):
            self.leave(behind)
        else:
            assert died or not behind
        self.at, self.beyond = None, set()

    @invariant()
    def all_is_there(self) -> None:
        if not hasattr(self, "store"):
            return
        other = sp.Store(self.root)
        assert other.steps() == sorted(self.steps)
        assert (other.pins(), other.tags()) == (sorted(self.pins), dict(sorted(self.tags.items())))
        assert other.restores() == self.restores
        assert other.verify() == {}
        assert other.candidates() == self.order()
        for step in sorted(self.steps)[-2:]:
            assert same(other.load(step, count=False), self.steps[step])
            assert other.describe(step).metric == self.metrics[step]
            assert data_path(self.root, step).stat().st_size == other.describe(step).nbytes

    @precondition(lambda self: len(self.steps) > 1)
    @rule(keep=st.booleans())
    def damage(self, keep: bool) -> None:
        """Truncate the newest step: `load()` falls back with a warning; then save the step again."""
        newest = max(self.steps)
        path = data_path(self.root, newest)
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        other = sp.Store(self.root)
        wrong = other.verify()
        assert newest in wrong
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            intact = [step for step in self.order() if step not in wrong]
            if intact:
                assert same(other.load(count=False), self.steps[intact[0]])
        path.write_bytes(whole)


StoreMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
