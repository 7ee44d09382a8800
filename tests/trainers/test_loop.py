"""The plain loop: a killed and resumed run equals an uninterrupted one."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.saver.saver import SaverWarning
from shrinkpoint.trainers.loader import Loader
from shrinkpoint.trainers.loop import PartNotRestoredWarning, RanksChangedWarning
from shrinkpoint.trainers.model_state import StateMismatchWarning
from shrinkpoint.trainers.state import like

from ..codec.common import difference
from ..forking import Script
from . import rows_run
from .killing import run_and_kill
from .loop_run import main

# Torch says so of its own optimizers' sparse tensors.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
RUN = Path(__file__).with_name("loop_run.py")
TRACKED = Path(rows_run.__file__)
MULTI = Path(__file__).with_name("loop_ranks.py")


def kill_at(at: int, script: Path, folder: Path, losses: Path, *more: int) -> None:
    """Kill a long run after `at` steps."""
    once = lambda: losses.exists() and len(losses.read_text().splitlines()) >= at  # noqa: E731
    with Script(script) as forking:
        run_and_kill(forking, folder, losses, 100_000, *more, once=once)


def by_step(losses: Path) -> list[str]:
    """Return the lines of a run by step, after a check that repeated ones are equal."""
    lines = [line for line in losses.read_text().splitlines() if line.endswith("]")]
    found: dict[int, str] = {}
    for line in lines:
        assert found.setdefault(int(line.split()[0]), line) == line
    return [found[step] for step in sorted(found)]


@pytest.mark.slow
def test_a_killed_run_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    workers = 2
    kill_at(17, RUN, tmp_path / "killed", tmp_path / "killed.txt", 3, workers)
    done = len(by_step(tmp_path / "killed.txt"))
    steps = done + 15
    assert len(sp.Store(tmp_path / "killed").steps()) >= 3
    main(str(tmp_path / "killed"), str(tmp_path / "killed.txt"), steps, 3, workers)
    main(str(tmp_path / "whole"), str(tmp_path / "whole.txt"), steps, 10**6, workers)
    assert by_step(tmp_path / "killed.txt") == by_step(tmp_path / "whole.txt")
    finals = [(tmp_path / f"{name}.txt.final").read_bytes() for name in ("killed", "whole")]
    assert finals[0] == finals[1]
    epoch = [line.split("[")[1].strip("]").split(", ") for line in by_step(tmp_path / "whole.txt")[:10]]
    assert sorted(int(i) for batch in epoch for i in batch) == list(range(37))


def notes(store: sp.Store, step: int) -> list[str]:
    return [row.note for row in store.read(step).summary() if row.note]


@pytest.mark.slow
def test_a_killed_run_with_a_tracker_resumed_loses_no_row(tmp_path: Path) -> None:
    """Deltas hold all changed rows before a kill, over the resume and after it."""
    folder, log = tmp_path / "run", tmp_path / "log.txt"
    kill_at(20, TRACKED, folder, log)
    done = max(sp.Store(folder).steps())
    rows_run.main(str(folder), str(log), done + 12)
    store = sp.Store(folder)
    assert store.steps() == list(range(3, done + 13, 3))
    assert [store.describe(step).since_base for step in store.steps()] == list(range(len(store.steps())))
    assert store.verify() == {}
    rows = {step: {r.path: r for r in store.read(step).summary()} for step in store.steps()}
    for step in store.steps():
        assert notes(store, step) == []
        for path in ("model/users.weight", "model/items.weight", "optimizer/state/users.weight/sum"):
            assert rows[step][path].codec == "rows"
            assert rows[step][path].error < 0.01
            # Of the sums, nearly all 0, a base is small, too.
            share = rows[step][path].stored_bytes / rows[3][path].stored_bytes
            assert step == 3 or share < (0.1 if "model" in path else 2)
    # One more run from the same checkpoint computes the same.
    whole = [line.split() for line in log.read_text().splitlines()]
    losses = {int(step): loss for step, loss in whole}
    again = tmp_path / "again.txt"
    store.copy(tmp_path / "copy", [s for s in store.steps() if s <= done])
    rows_run.main(str(tmp_path / "copy"), str(again), done + 12)
    repeated = dict(line.split() for line in again.read_text().splitlines())
    assert {int(s): loss for s, loss in repeated.items()} == {s: losses[s] for s in range(done + 1, done + 13)}


def test_a_run_with_a_tracker_is_exact_where_all_is(tmp_path: Path) -> None:
    """With lossless storage a tracker changes nothing, resumed or not."""
    exact = sp.presets.lossless()
    for name, stops in (("resumed", (5, 9, 14)), ("whole", (14,))):
        for stop in stops:
            rows_run.main(str(tmp_path / name), str(tmp_path / f"{name}.txt"), stop, 1, exact)
    assert (tmp_path / "resumed.txt").read_text() == (tmp_path / "whole.txt").read_text()


@pytest.mark.parametrize("background", [False, True], ids=["store", "saver"])
def test_a_tracker_is_told_of_what_becomes_of_saves(
    tmp_path: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = rows_run.Model()
    dense = torch.optim.SGD(model.top.parameters(), lr=0.1, momentum=0.9)
    sparse = torch.optim.Adagrad([model.users.weight, model.items.weight], lr=0.1)
    store = sp.Store(tmp_path / "s", sp.presets.check_n_run(8, policy="consecutive"))
    saver: Any = sp.Saver(store, mode="thread") if background else store
    given: list[dict[str, Any]] = []
    save = saver.save
    monkeypatch.setattr(saver, "save", lambda *a, **k: given.append(k["kinds"]) or save(*a, **k))
    with sp.RowTracker(model) as tracker:

        def touched(step: int, metric: float | None = None) -> tuple[int, int]:
            """Train and save; return the marked rows since the base and since the last save."""
            for one in (dense, sparse):
                one.zero_grad()
            model(torch.full((4, 4), step)).sum().backward()
            for one in (dense, sparse):
                one.step()
                one.zero_grad()
            since = tracker.shares()["users.weight"]
            trainers.save(saver, step, model, [dense, sparse], tracker=tracker, metric=metric)
            if background:
                saver.wait()
            return round(since[0] * rows_run.ROWS), round(since[1] * rows_run.ROWS)

        assert touched(1) == (rows_run.ROWS, rows_run.ROWS)
        assert touched(2) == (1, 1)
        assert touched(3) == (2, 1)
        # Without the marks rows would be compared, and the files the same.
        table = given[-1]["users.weight"]
        assert [int(np.unpackbits(x).sum()) for x in (table.rows_since_base, table.rows)] == [2, 1]
        assert tracker.untracked == {}
        # Rows of a failed save belong to the next one.
        with pytest.raises(sp.BadArgumentError, match="metric"):
            touched(4, metric=float("nan"))
        assert touched(5) == (4, 2)
        if background:
            saver.close()
        found = {r.path: r for r in store.read(5).summary()}
        assert found["optimizer/state/users.weight/sum"].codec == "rows"
        assert found["optimizer/state/users.weight/sum"].stored_bytes < 300
        assert notes(store, 5) == []
        # After a resume every row counts, once.
        other = rows_run.Model()
        tables = torch.optim.Adagrad([other.users.weight, other.items.weight])
        optimizers = [torch.optim.SGD(other.top.parameters(), 0.1, 0.9), tables]
        with sp.RowTracker(other) as fresh:
            trainers.save(sp.Store(tmp_path / "t"), 1, other, tracker=fresh)
            assert trainers.resume(store, other, optimizers, tracker=fresh) == 5
            assert fresh.shares()["users.weight"] == (1, 1)
            saved = trainers.save(store, 6, other, optimizers, tracker=fresh)
            assert saved is not None
            assert saved.is_delta  # type: ignore[union-attr]
            assert fresh.shares()["users.weight"] == (1, 0)
        assert {r.path: r for r in store.read(6).summary()}["model/users.weight"].stored_bytes < 50


def test_a_save_that_fails_in_the_background_settles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rows_run.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    store = sp.Store(tmp_path / "s", sp.presets.check_n_run(8))
    with sp.RowTracker(model, optimizer) as tracker:
        saver = sp.Saver(store, mode="thread")
        trainers.save(saver, 1, model, optimizer, tracker=tracker).result()  # type: ignore[union-attr]
        assert tracker.shares()["users.weight"] == (0, 0)
        model(torch.full((4, 4), 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("disk full")

        with monkeypatch.context() as patched:
            patched.setattr(type(store.session), "save", fail)
            failed = trainers.save(saver, 2, model, optimizer, tracker=tracker)
            assert isinstance(failed.exception(), OSError)  # type: ignore[union-attr]
        assert tracker.shares()["users.weight"] == (1 / rows_run.ROWS, 1 / rows_run.ROWS)
        with pytest.raises(OSError, match="disk full"):
            saver.close()


def test_trackers_that_do_not_fit(store: sp.Store) -> None:
    model, other = rows_run.Model(), rows_run.Model()
    with sp.RowTracker(other) as tracker, sp.RowTracker(nn.DataParallel(model)) as wrapped:
        for one in (tracker, wrapped):
            with pytest.raises(sp.BadArgumentError, match="not the bare model"):
                trainers.save(store, 1, model, tracker=one)
            with pytest.raises(sp.BadArgumentError, match="not the bare model"):
                trainers.resume(store, model, tracker=one)
    with sp.RowTracker(model) as tracker:
        trainers.save(store, 1, nn.DataParallel(model), tracker=tracker)
        with pytest.raises(sp.BadArgumentError, match="tracker must be a RowTracker, not int"):
            trainers.save(store, 1, model, tracker=3)  # type: ignore[arg-type]
        fresh = sp.RowTracker(other)
        with pytest.raises(sp.BadArgumentError, match="no snapshot"):
            fresh.follow(store.save(9, {"weight": 1}))
    with pytest.raises(sp.BadArgumentError, match="closed"):
        trainers.save(store, 2, model, tracker=tracker)


class Job:
    """A model with optimizer, scheduler and scaler."""

    def __init__(self, seed: int, width: int = 48, optimizer: str = "AdamW", **names: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential()
        self.model.add_module(names.get("first", "first"), nn.Linear(6, width))
        self.model.add_module("last", nn.Linear(width, 48))
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self) -> float:
        loss = self.model(torch.rand(3, 6)).square().sum()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return float(loss.detach())

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
        }

    def state(self) -> Any:
        state = trainers.TrainingState(**self.parts()).tree(0)
        return sp.decompress(sp.compress(state, cfg=sp.presets.lossless()))


@pytest.fixture
def store(tmp_path: Path) -> sp.Store:
    return sp.Store(tmp_path / "s", cfg=sp.presets.lossless())


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "Rprop", "NAdam"])
def test_everything_comes_back_in_one_call(store: sp.Store, optimizer: str) -> None:
    job = Job(1, optimizer=optimizer)
    for _ in range(3):
        job.step()
    trainers.save(store, 3, **job.parts())
    expected = [job.step() for _ in range(5)]
    other = Job(2, optimizer=optimizer)
    other.step()
    assert trainers.resume(store, **other.parts()) == 3
    assert [other.step() for _ in range(5)] == expected
    assert difference(job.state(), other.state()) == ""


@pytest.mark.parametrize("background", [False, True])
def test_one_save_compressed_otherwise(tmp_path: Path, background: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(128, 128)
    store = sp.Store(tmp_path / "s", cfg=sp.presets.inshrinkerator())
    with contextlib.ExitStack() as stack:
        to = stack.enter_context(sp.Saver(store, mode="thread")) if background else store
        for step, cfg in enumerate((None, sp.presets.lossless(), None)):
            done = trainers.save(to, step, model, cfg=cfg)
            if background:
                done.result()  # type: ignore[union-attr]
    exact = [torch.equal(store.load(step)["model"]["weight"], model.weight) for step in range(3)]
    assert exact == [False, True, False]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "Rprop"])
def test_saving_before_the_first_step_changes_nothing(store: sp.Store, optimizer: str) -> None:
    plain = Job(1, optimizer=optimizer)
    expected = [plain.step() for _ in range(4)]
    job = Job(1, optimizer=optimizer)
    trainers.save(store, 0, **job.parts())
    assert [job.step() for _ in range(4)] == expected
    other = Job(2, optimizer=optimizer)
    assert trainers.resume(store, **other.parts()) == 0
    assert [other.step() for _ in range(4)] == expected


def test_an_empty_store_is_the_beginning(store: sp.Store) -> None:
    job = Job(1)
    before, drawn = job.state(), torch.get_rng_state()
    assert trainers.resume(store, **job.parts()) == 0
    assert difference(before, job.state()) == ""
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("kind", [np.int64, torch.tensor])
def test_a_step_may_be_an_integer_of_numpy_or_torch(store: sp.Store, kind: Any) -> None:
    """A step may be an integer of NumPy or torch."""
    job = Job(1)
    trainers.save(store, kind(7), **job.parts())
    assert type(trainers.TrainingState(job.model).tree(kind(7))["step"]) is int  # type: ignore[index]
    assert trainers.resume(store, **Job(2).parts()) == 7
    with pytest.raises(sp.BadArgumentError, match=r"step is 3\.0; it must be an integer"):
        trainers.save(store, 3.0, job.model)  # type: ignore[arg-type]


def test_a_saver_takes_it_in_the_background(tmp_path: Path) -> None:
    job = Job(1)
    with sp.Saver(sp.Store(tmp_path / "s", cfg=sp.presets.lossless()), mode="thread") as saver:
        assert trainers.resume(saver, **job.parts()) == 0
        job.step()
        done = trainers.save(saver, 1, **job.parts(), metric=0.5)
        before = job.state()
        job.step()
    assert done is not None
    assert done.result().status == "saved"  # type: ignore[union-attr]
    assert saver.store.describe(1).metric == 0.5
    other = Job(2)
    assert trainers.resume(saver, **other.parts()) == 1
    assert difference(before["model"], other.state()["model"]) == ""


@pytest.mark.parametrize("wrap", [lambda m: torch.compile(m, backend="eager"), nn.DataParallel])
def test_names_are_those_of_the_bare_model(store: sp.Store, wrap: Any) -> None:
    job = Job(1)
    job.step()
    wrapped: nn.Module = wrap(job.model)
    trainers.save(store, 1, wrapped, job.optimizer)
    state = store.load()
    assert list(state["model"]) == ["first.weight", "first.bias", "last.weight", "last.bias"]
    assert sorted(state["optimizer"]["state"]) == sorted(state["model"])
    other = Job(2)
    trainers.resume(store, wrap(other.model), other.optimizer)
    assert torch.equal(other.model[0].weight, job.model[0].weight)
    third = Job(3)
    trainers.resume(store, third.model, third.optimizer)
    assert torch.equal(third.model[0].weight, job.model[0].weight)


def test_two_optimizers_of_which_one_has_not_stepped(store: sp.Store) -> None:
    def make(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
        return model, [torch.optim.SGD(model[0].parameters(), 0.1, 0.9), torch.optim.Adam(model[1].parameters())]

    model, (first, second) = make(1)
    model(torch.ones(3)).sum().backward()
    first.step()
    trainers.save(store, 1, model, [first, second])
    other, both = make(2)
    assert trainers.resume(store, other, both) == 1
    assert not both[1].state
    buffers = [both[0].state[p]["momentum_buffer"] for p in other[0].parameters()]  # type: ignore[index]
    assert all(torch.equal(b, first.state[p]["momentum_buffer"]) for b, p in zip(buffers, model[0].parameters()))  # type: ignore[index]  # noqa: B905


def test_frozen_and_tied_parameters(store: sp.Store) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[2].weight = model[1].weight
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    trainers.save(store, 1, model, optimizer)
    other, fresh = make()
    trainers.resume(store, other, fresh)
    assert other[2].weight is other[1].weight  # type: ignore[index]
    assert difference(optimizer.state_dict(), fresh.state_dict()) == ""


def test_renamed_and_resized_parameters_are_listed_and_nothing_changes(store: sp.Store) -> None:
    job = Job(1)
    job.step()
    trainers.save(store, 1, **job.parts())
    other = Job(2, width=32, first="begin")
    before = other.state()
    with pytest.raises(sp.BadArgumentError) as caught:
        trainers.resume(store, **other.parts())
    for line in (
        "begin.weight: not in the checkpoint",
        "first.bias: not in the model",
        "last.weight: shape (48, 48) in the checkpoint, (48, 32) in the model",
        "optimizer: group 0: begin.bias: not in the checkpoint",
        "optimizer: group 0: first.weight: not in the optimizer",
    ):
        assert line in str(caught.value)
    assert "last.bias" not in str(caught.value)
    assert difference(before, other.state()) == ""


def test_what_fits_is_loaded_if_asked(store: sp.Store) -> None:
    job = Job(1)
    job.step()
    trainers.save(store, 1, **job.parts())
    other = Job(2, width=32, first="begin")
    other.step()
    kept = other.state()["model"]
    with pytest.warns(StateMismatchWarning, match=r"begin\.weight: not in the checkpoint"):
        assert trainers.resume(store, **other.parts(), strict=False) == 1
    assert torch.equal(other.model.last.bias, job.model.last.bias)  # type: ignore[union-attr, arg-type]
    for name in ("begin.weight", "begin.bias", "last.weight"):
        assert torch.equal(other.model.state_dict()[name], kept[name])
    held = {n: p in other.optimizer.state for n, p in other.model.named_parameters()}
    assert held == {"begin.weight": False, "begin.bias": False, "last.weight": False, "last.bias": True}
    other.step()


def test_a_resized_parameter_has_no_state_of_any_optimizer(store: sp.Store) -> None:
    job = Job(1, optimizer="Adagrad")
    job.step()
    trainers.save(store, 1, job.model, job.optimizer)
    other = Job(2, width=32, optimizer="Adagrad")
    with pytest.warns(StateMismatchWarning, match=r"last\.weight: shape"):
        trainers.resume(store, other.model, other.optimizer, strict=False)
    assert [float(other.optimizer.state[p]["step"]) for p in other.model.parameters()] == [0, 0, 0, 1]
    other.step()


class Counting(nn.Linear):
    """A module with extra state."""

    seen: Any = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_extra_state_of_modules(store: sp.Store) -> None:
    model, other = nn.Sequential(Counting(3, 3)), nn.Sequential(Counting(3, 3))
    model[0].seen = 7
    trainers.save(store, 1, model)
    assert trainers.resume(store, other) == 1
    assert other[0].seen == 7
    with pytest.raises(sp.BadArgumentError, match=r"0\._extra_state: not in the model"):
        trainers.resume(store, nn.Sequential(nn.Linear(3, 3)))


def test_a_model_without_storage_is_refused(store: sp.Store) -> None:
    trainers.save(store, 1, Job(1).model)
    with torch.device("meta"):
        empty = Job(1).model
    with pytest.raises(sp.BadArgumentError, match=r"first\.weight and 3 more are on the meta device"):
        trainers.resume(store, empty)
    trainers.resume(store, empty.to_empty(device="cpu"))
    assert torch.equal(empty.first.weight, Job(1).model.first.weight)  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_that_cannot_make_an_empty_step(store: sp.Store, name: str) -> None:
    def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.EmbeddingBag(50, 8, sparse=True) if name == "SparseAdam" else nn.Linear(6, 8)
        return model, getattr(torch.optim, name)(model.parameters())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        x = torch.arange(12).reshape(2, 6)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            found: torch.Tensor = model(x if name == "SparseAdam" else x.float()).square().mean()
            found.backward()
            return found

        optimizer.step(loss)  # type: ignore[call-overload]
        return next(model.parameters()).detach().clone()

    model, optimizer = make(1)
    train(model, optimizer)
    trainers.save(store, 1, model, optimizer)
    other, fresh = make(2)
    trainers.resume(store, other, fresh)
    assert torch.equal(train(model, optimizer), train(other, fresh))


class Counted(torch.optim.AdamW):
    """An optimizer with additional state."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "steps"})


def test_what_an_optimizer_keeps_beside_its_entries(store: sp.Store) -> None:
    job = Job(1)
    both = [Counted(job.model[0].parameters()), Counted(job.model[1].parameters())]
    for optimizer, steps in zip(both, (1, 3), strict=True):
        for _ in range(steps):
            job.model(torch.rand(3, 6)).square().sum().backward()
            optimizer.step()
    trainers.save(store, 1, job.model, both)
    other = Job(2)
    fresh = [Counted(other.model[0].parameters()), Counted(other.model[1].parameters())]
    trainers.resume(store, other.model, fresh)
    assert [one.steps for one in fresh] == [1, 3]


def test_how_an_optimizer_computes_is_its_own(store: sp.Store) -> None:
    job = Job(1)
    job.step()
    job.optimizer.param_groups[0] |= {"capturable": True, "fused": True, "lr": 0.5}
    trainers.save(store, 1, job.model, job.optimizer)
    other = Job(2)
    trainers.resume(store, other.model, other.optimizer)
    group = other.optimizer.param_groups[0]
    assert (group["capturable"], group["fused"], group["lr"]) == (False, None, 0.5)
    other.step()


def test_another_dtype_is_not_converted_silently(store: sp.Store) -> None:
    job = Job(1)
    trainers.save(store, 1, job.model)
    with pytest.raises(sp.BadArgumentError, match=r"torch.float32 in the checkpoint, torch.bfloat16 in the model"):
        trainers.resume(store, Job(1).model.bfloat16())


def test_another_optimizer_is_refused(store: sp.Store) -> None:
    job = Job(1)
    trainers.save(store, 1, job.model, job.optimizer)
    other = Job(1, optimizer="Adagrad")
    with pytest.raises(sp.BadArgumentError, match="AdamW in the checkpoint, Adagrad here"):
        trainers.resume(store, other.model, other.optimizer)
    groups = [{"params": [p]} for p in other.model.parameters()]
    with pytest.raises(sp.BadArgumentError, match="1 parameter groups in the checkpoint, 4 here"):
        trainers.resume(store, other.model, torch.optim.AdamW(groups))


@pytest.mark.parametrize(("before", "now"), [("AdamW", "SGD"), ("SGD", "AdamW")])
def test_the_state_of_another_optimizer_is_left_out_if_asked(store: sp.Store, before: str, now: str) -> None:
    def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(6, 4)
        more = {"momentum": 0.9} if name == "SGD" else {}
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.25, **more)

    model, optimizer = make(before)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    trainers.save(store, 1, model, optimizer)
    other, fresh = make(now)
    with pytest.warns(StateMismatchWarning, match=f"optimizer: {before} in the checkpoint, {now} here"):
        trainers.resume(store, other, fresh, strict=False)
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.25
    other(torch.ones(2, 6)).sum().backward()
    fresh.step()


def test_a_parameter_of_two_optimizers_is_refused(store: sp.Store) -> None:
    model = nn.Linear(3, 3)
    both = [torch.optim.SGD(model.parameters()), torch.optim.SGD([model.weight])]
    with pytest.raises(sp.BadArgumentError, match="weight is a parameter of two optimizers"):
        trainers.save(store, 1, model, both)


def test_a_scaler_that_was_disabled(store: sp.Store) -> None:
    model = nn.Linear(3, 3)
    trainers.save(store, 1, model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    scaler = torch.amp.GradScaler("cpu")
    assert trainers.resume(store, model, scaler=scaler) == 1
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("other", [{"model": 3}, {"ranks": []}, {"ranks": [{}]}, {"step": "x"}])
def test_a_state_of_something_else_changes_nothing(store: sp.Store, other: dict[str, Any]) -> None:
    model = nn.Linear(3, 3)
    trainers.save(store, 1, model)
    store.save(2, store.load(1) | other)
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(sp.BadArgumentError, match=r"not a checkpoint of trainers\.save"):
        trainers.resume(store, model)
    assert not model.weight.any()


def test_missing_parts_are_named(store: sp.Store) -> None:
    job = Job(1)
    trainers.save(store, 1, job.model)
    with pytest.raises(sp.BadArgumentError, match=r"has no optimizer, scheduler, scaler; nothing was changed"):
        trainers.resume(store, **job.parts())
    with pytest.raises(sp.BadArgumentError, match="has no more/x, generators/g, loader"):
        trainers.resume(
            store, job.model, more={"x": job.scaler}, generators={"g": torch.Generator()}, loader=trainers.Loader([1])
        )
    store.save(2, {"something": 1})
    with pytest.raises(sp.BadArgumentError, match=r"not a checkpoint of trainers.save; it holds something"):
        trainers.resume(store, job.model)


def test_bad_arguments(store: sp.Store) -> None:
    job = Job(1)
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(7))])
    for arguments, why in (
        ((3, job.model), "saver must be a Saver or a Store, not int"),
        ((store, job.optimizer), "model must be a torch.nn.Module, not AdamW"),
        ((store, job.model, job.model), "optimizer must be a torch.optim.Optimizer, not Linear"),
        ((store, job.model, 3), "optimizer must be a torch.optim.Optimizer, not int"),
    ):
        saving: Any = (arguments[0], 1, *arguments[1:])
        with pytest.raises(sp.BadArgumentError, match=why):
            trainers.save(*saving)
    with pytest.raises(sp.BadArgumentError, match=r"parameter 0 of group 0, of shape \(7,\), is not the model's"):
        trainers.save(store, 1, job.model, stranger)
    with pytest.raises(sp.BadArgumentError, match="scheduler is a int, without state_dict"):
        trainers.save(store, 1, job.model, scheduler=3)  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="more must map names"):
        trainers.resume(store, job.model, more=[job.scaler])  # type: ignore[arg-type]
    assert store.steps() == []


def test_a_damaged_newest_step_is_passed_over(store: sp.Store, tmp_path: Path) -> None:
    job = Job(1)
    for step in (1, 2):
        job.step()
        trainers.save(store, step, **job.parts())
    newest = max((tmp_path / "s" / "data").iterdir())
    newest.write_bytes(newest.read_bytes()[:-1])
    other = Job(2)
    with pytest.warns(UserWarning, match="skipped step 2"):
        assert trainers.resume(sp.Store(tmp_path / "s"), **other.parts()) == 1


def test_ranks_gone_start_their_random_numbers_anew(store: sp.Store) -> None:
    job = Job(1)
    trainers.save(store, 4, job.model)
    state = store.load()
    store.save(4, state | {"ranks": state["ranks"] * 2})
    with pytest.warns(RanksChangedWarning, match="saved by 2 processes, resumed by 1"):
        assert trainers.resume(store, job.model) == 4


def test_a_counter_in_a_state_stays_one(store: sp.Store) -> None:
    """`MultiStepLR` keeps its milestones in a Counter."""

    def begun() -> tuple[dict[str, Any], Any]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        rates = torch.optim.lr_scheduler
        parts = [rates.LinearLR(optimizer, total_iters=2), rates.MultiStepLR(optimizer, [1, 1, 3])]
        scheduler = rates.SequentialLR(optimizer, parts, milestones=[4])
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}, scheduler

    def rates(parts: dict[str, Any]) -> Iterator[float]:
        for _ in range(8):
            parts["optimizer"].step()
            parts["scheduler"].step()
            yield parts["optimizer"].param_groups[0]["lr"]

    job, _ = begun()
    trainers.save(store, 1, **job)
    expected = list(rates(job))
    again, scheduler = begun()
    trainers.resume(store, **again)
    assert type(scheduler._schedulers[1].milestones) is Counter
    assert list(rates(again)) == expected


class Point(NamedTuple):
    x: int
    y: Any


class Items(MutableMapping[str, Any]):
    """A mapping whose shallow copy has the same items."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_of = items

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


def test_the_live_state_that_gives_the_classes_is_not_changed() -> None:
    live = Items({"a": 1})
    made = like({"a": 2, "b": 3}, live)
    assert (type(made), dict(made), dict(live)) == (Items, {"a": 2, "b": 3}, {"a": 1})


class Odd:
    """A part whose state has containers that no checkpoint holds."""

    def __init__(self, n: int = 0) -> None:
        self.counts: Any = defaultdict(int, {"a": n})
        self.at: Any = [Point(n, OrderedDict(b=1, a=n)), torch.Size([n]), {"later": Point(n, 0)} if n else {}]

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts, self.at = state["counts"], state["at"]


@pytest.mark.parametrize("name", ["scheduler", "scaler", "loader", "more"])
def test_containers_of_other_classes_stay_what_they_are(name: str, store: sp.Store) -> None:
    """They became dict and tuple: counting failed, and so did a field by name."""

    def part(n: int) -> tuple[Odd, dict[str, Any]]:
        odd = Odd(n)
        return odd, {name: {"p": odd} if name == "more" else odd}

    trainers.save(store, 1, nn.Linear(2, 1), **part(3)[1])
    again, parts = part(0)
    with pytest.warns(PartNotRestoredWarning, match=r"at/2/later was a Point$"):
        trainers.resume(store, nn.Linear(2, 1), **parts)
    again.counts["new"] += 1
    assert again.counts == {"a": 3, "new": 1}
    assert (again.at[0].x, again.at[1]) == (3, (3,))
    assert list(again.at[0].y.items()) == [("b", 1), ("a", 3)]
    assert type(again.at[0].y) is OrderedDict
    assert again.at[2] == {"later": (3, 0)}


def test_a_loader_that_refuses_its_position_leaves_all_as_it_was(store: sp.Store) -> None:
    job, other = Job(1), Job(2)
    loader = Loader([1, 2, 3])
    next(iter(loader))
    trainers.save(store, 1, job.model, job.optimizer, loader=loader)
    before = copy.deepcopy((other.model.state_dict(), other.optimizer.state_dict()))
    with pytest.raises(sp.BadArgumentError, match="not the same batches"):
        trainers.resume(store, other.model, other.optimizer, loader=Loader([1, 2]))
    assert difference(before, (other.model.state_dict(), other.optimizer.state_dict())) == ""


@pytest.fixture(scope="module")
def two() -> Iterator[Script]:
    with Script(MULTI) as found:
        yield found


@pytest.mark.slow
def test_two_processes(two: Script, tmp_path: Path) -> None:
    """A run by two processes (DDP, FSDP2) is resumed exactly by two, and by one."""
    ranks = [two.start(tmp_path, rank) for rank in (0, 1)]
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.trouble for rank in ranks]
    # However many processes load, that is one restore of the run.
    assert [sp.Store(tmp_path / name).restores() for name in ("ddp", "fsdp2", "pointed")] == [1, 1, 1]
    for kind in ("ddp", "fsdp2"):
        for rank in (0, 1):
            expected, resumed = ((tmp_path / f"{kind}-{phase}-{rank}.txt").read_text() for phase in ("first", "second"))
            assert expected == resumed != ""
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RanksChangedWarning)
            warnings.simplefilter("ignore", PartNotRestoredWarning)  # the position in the data
            assert trainers.resume(sp.Store(tmp_path / kind), model, torch.optim.AdamW(model.parameters())) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), [("lost", "peer"), ("stalled", "Timed out")])
def test_a_process_that_is_lost_while_the_state_comes_together(
    two: Script, tmp_path: Path, how: str, said: str
) -> None:
    ranks = [two.start(tmp_path, rank, how) for rank in (0, 1)]
    assert ranks[0].wait() == 3, ranks[0].trouble
    ranks[1].kill()
    assert said in ranks[0].said
    assert "rank 0 of 2: step 5 was not saved; another process is gone or does not answer" in ranks[0].said


def test_fsdp2_in_one_process(tmp_path: Path, store: sp.Store) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    def make(sharded: bool) -> tuple[Any, torch.optim.Optimizer]:
        model: Any = nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 3))
        if sharded:
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def train(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        found = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
        return [p.detach().clone() for p in found]

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        model, optimizer = make(True)
        train(model, optimizer)
        trainers.save(store, 1, model, optimizer)
        optimizer.zero_grad()
        expected = train(model, optimizer)
        for sharded in (True, False):
            other, fresh = make(sharded)
            assert trainers.resume(store, other, fresh) == 1
            for a, b in zip(expected, train(other, fresh), strict=True):
                assert torch.equal(a, b)
    finally:
        dist.destroy_process_group()


class Held:
    """A part whose state is an array."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize("value", [torch.arange(5.0), np.arange(5), torch.zeros(()), [], 0, "", None])
def test_a_part_whose_state_is_no_dict(store: sp.Store, value: Any) -> None:
    job, part, other = Job(1), Held(value), Held("other")
    beside: dict[str, Any] = {"scheduler": part, "ema": part, "more": {"x": part}}
    trainers.save(store, 1, job.model, **beside)
    beside = {"scheduler": other, "ema": other, "more": {"x": other}}
    assert trainers.resume(store, job.model, **beside) == 1
    assert type(other.value) is type(value)
    assert np.array_equal(np.asarray(other.value), np.asarray(value))


def test_the_loop_of_the_readme_has_at_most_six_added_lines() -> None:
    blocks = (Path(__file__).parents[2] / "README.md").read_text().split("```")
    (loop,) = [block for block in blocks if "sp.Run(" in block]
    assert 0 < sum("run." in line or "sp.Run" in line for line in loop.splitlines()) <= 6


@pytest.mark.parametrize("make", [torch.nn.Dropout, torch.nn.Identity, torch.nn.Sequential])
def test_a_model_without_any_state(make: Any, store: sp.Store) -> None:
    """A model without state is saved with generators and the data position."""
    trainers.save(store, 1, make())
    assert trainers.resume(store, make()) == 1
    with pytest.raises(sp.BadArgumentError, match="does not fit"):
        trainers.resume(store, torch.nn.Linear(2, 2))


def test_modules_among_more_come_back_or_are_listed(store: sp.Store) -> None:
    model, teacher = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    trainers.save(store, 1, model, more={"teacher": teacher})
    other = torch.nn.Linear(3, 2)
    assert trainers.resume(store, model, more={"teacher": other}) == 1
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), teacher.parameters(), strict=True))
    with pytest.raises(sp.BadArgumentError, match=r"more\['teacher'\]: weight: shape \(2, 3\) in the checkpoint"):
        trainers.resume(store, model, more={"teacher": torch.nn.Linear(4, 2)})
    with pytest.raises(sp.BadArgumentError, match="more must map names"):
        trainers.save(store, 2, model, more=[teacher])  # type: ignore[arg-type]


def test_parts_that_resume_was_not_given_are_named(store: sp.Store) -> None:
    job = Job(1)
    trainers.save(store, 1, **job.parts())
    with pytest.warns(PartNotRestoredWarning, match=r"not restored, .*: optimizer, scheduler"):
        trainers.resume(store, job.model)


def test_a_similar_folder_with_checkpoints_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    trainers.save(sp.Store(tmp_path / "run-large"), 1, model)
    with caplog.at_level("INFO", logger="shrinkpoint.trainers"):
        assert trainers.resume(sp.Store(tmp_path / "run-larger"), model) == 0
        assert trainers.resume(sp.Store(tmp_path / "other"), model) == 0
    first, second = caplog.records
    assert (first.levelname, second.levelname) == ("WARNING", "INFO")
    assert "the folder run-large next to it has checkpoints" in first.getMessage()


def test_resume_waits_for_a_save_in_flight(tmp_path: Path) -> None:
    """`resume` waits for a save in flight of another Saver of this process."""
    model = nn.Linear(256, 256)
    with sp.Saver(sp.Store(tmp_path)) as first:
        for step in (1, 2):
            trainers.save(first, step, model)
        with pytest.warns(SaverWarning, match="has an open Saver"):
            second = sp.Saver(sp.Store(tmp_path))
        with second:
            assert trainers.resume(second, model) == 2


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("step", [None, 1])
def test_resume_waits_for_a_stopped_worker_within_a_limit(
    step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shrinkpoint.store.saver.saver.STOPPED", 1.0)
    model = nn.Linear(4, 4)
    with sp.Saver(sp.Store(tmp_path)) as saver:
        if step is not None:
            trainers.save(saver, step, model).result()  # type: ignore[union-attr]
        os.kill(saver.pid, signal.SIGSTOP)
        try:
            trainers.save(saver, 2, model)
            with pytest.warns(StoreWarning, match=rf"worker \(process {saver.pid}\) has been stopped for 1 s"):
                assert trainers.resume(sp.Store(tmp_path), model) == (step or 0)
        finally:
            os.kill(saver.pid, signal.SIGCONT)
    assert trainers.resume(sp.Store(tmp_path), model) == 2


def test_the_whole_state_as_one_object(store: sp.Store) -> None:
    job, again = Job(1), Job(2)
    trainers.save(store, 1, trainers.TrainingState(**job.parts()))
    assert trainers.resume(store, trainers.TrainingState(**again.parts())) == 1
    with pytest.raises(sp.BadArgumentError, match="give no other part in addition"):
        trainers.save(store, 2, trainers.TrainingState(job.model), job.optimizer)
