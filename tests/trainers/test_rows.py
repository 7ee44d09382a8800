"""The row tracker marks every changed row, and reports tables that it cannot track."""

from __future__ import annotations

import copy
import gc
import io
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shrinkpoint as sp
from shrinkpoint.kernels.packing import unpack_mask
from shrinkpoint.trainers.rows import _Hook, _Table

from . import rows_ranks
from .rows_ranks import Chain, ids, one_table

# Torch says so of its own optimizers' sparse tensors.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
ROWS, COLUMNS = 200, 16


class Model(nn.Module):
    """Two tables under a small dense network."""

    def __init__(self, sparse: bool = False, **table: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users = nn.Embedding(ROWS, COLUMNS, sparse=sparse, **table)
        self.items = nn.EmbeddingBag(ROWS, COLUMNS, mode="sum", sparse=sparse, **table)
        self.top = nn.Sequential(nn.Linear(2 * COLUMNS, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(torch.cat([self.users(users), self.items(items)], dim=1))
        return out


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids by a power law."""
    g = torch.Generator().manual_seed(step)
    ids = (torch.rand(size, 4, generator=g) ** 3 * ROWS).long()
    return ids[:, 0], ids[:, 1:]


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.zero_grad()
        loss = (model(*batch(step)) - 1).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for one in optimizer if isinstance(optimizer, list) else [optimizer]:
            one.step()
        losses.append(loss.item())
    return losses


def marked(kinds: dict[str, sp.Kind], name: str, base: bool = False) -> set[int]:
    bits = kinds[name].rows_since_base if base else kinds[name].rows
    rows: set[int] = set(np.flatnonzero(unpack_mask(bits, ROWS)).tolist())
    return rows


def committed(tracker: sp.RowTracker, base: bool = True) -> None:
    """Report a completed save to the tracker."""
    tracker.kinds()
    tracker.saved(base)


# ------------------------------------------------------------------ marked rows


def test_before_the_first_save_every_row_counts_as_touched() -> None:
    model = Model()
    with sp.RowTracker(model) as tracker:
        kinds = tracker.kinds()
        assert marked(kinds, "users.weight") == marked(kinds, "users.weight", base=True) == set(range(ROWS))
        assert kinds["users.weight"].rows.size == ROWS // 8
        assert kinds["users.weight"] == sp.Kind("embedding", "weight", "users.weight")
        assert kinds["top.0.weight"].rows is None
        assert set(kinds) == set(sp.kinds(model))
        # Saved as a delta over something older: what changed since the base is still not known.
        tracker.saved(base=False)
        kinds = tracker.kinds()
        assert marked(kinds, "users.weight") == set()
        assert marked(kinds, "users.weight", base=True) == set(range(ROWS))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_look_ups_of_every_form(dtype: torch.dtype) -> None:
    table, bag = nn.Embedding(ROWS, 4), nn.EmbeddingBag(ROWS, 4, mode="sum", include_last_offset=True)
    tensor = lambda *ids: torch.tensor(ids, dtype=dtype)  # noqa: E731
    with sp.RowTracker(nn.ModuleDict({"table": table, "bag": bag})) as tracker:
        committed(tracker)
        table(tensor(1, 2))
        table(input=tensor([3, 4], [5, 199]))
        table(tensor(7))
        table(torch.empty(0, dtype=dtype))
        table(tensor([[8, 9, 10], [11, 12, 13]])[..., ::2])
        bag(tensor(20, 21, 22), tensor(0, 2, 3), per_sample_weights=torch.ones(3))
        bag(tensor([30], [31]))
        bag(input=tensor(40), offsets=tensor(0, 1))
        kinds = tracker.kinds()
    assert marked(kinds, "table.weight") == {1, 2, 3, 4, 5, 199, 7, 8, 10, 11, 13}
    assert marked(kinds, "bag.weight") == {20, 21, 22, 30, 31, 40}


def test_look_ups_without_a_gradient_do_not_count() -> None:
    model = nn.ModuleDict({"a": nn.Embedding(ROWS, 4), "frozen": nn.Embedding(ROWS, 4)})
    model["frozen"].weight.requires_grad_(False)
    with sp.RowTracker(model) as tracker:
        committed(tracker)
        with torch.no_grad():
            model["a"](torch.tensor([1]))
        with torch.inference_mode():
            model["a"](torch.tensor([2]))
        model["frozen"](torch.tensor([3]))
        model.eval()
        model["a"](torch.tensor([4]))  # a model in evaluation mode may still be trained
        kinds = tracker.kinds()
    assert marked(kinds, "a.weight") == {4}
    assert marked(kinds, "frozen.weight") == set()


def test_renormed_rows_change_as_they_are_read() -> None:
    table = nn.Embedding(ROWS, 4, max_norm=0.1, padding_idx=0)
    with sp.RowTracker(nn.ModuleDict({"t": table})) as tracker:
        committed(tracker)
        before = table.weight.detach().clone()
        with torch.no_grad():
            table(torch.tensor([5, 6]))
        assert marked(tracker.kinds(), "t.weight") == {5, 6}
        assert not torch.equal(table.weight[5], before[5])


def test_the_padding_row_is_not_trained() -> None:
    model = Model(padding_idx=0)
    with sp.RowTracker(model, torch.optim.SGD(model.parameters(), 0.1)) as tracker:
        committed(tracker)
        model(torch.tensor([0, 5]), torch.tensor([[0, 1], [2, 0]])).sum().backward()
        kinds = tracker.kinds()
    assert marked(kinds, "users.weight") == {5}
    assert marked(kinds, "items.weight") == {1, 2}
    # Row 0 is padding to one module and a word to another.
    first, second = nn.Embedding(ROWS, 4, padding_idx=0), nn.Embedding(ROWS, 4)
    second.weight = first.weight
    with sp.RowTracker(nn.ModuleList([first, second])) as tracker:
        committed(tracker)
        second(torch.tensor([0]))
        assert marked(tracker.kinds(), "0.weight") == {0}


def test_ids_of_no_bag_do_no_harm() -> None:
    """Ids beyond the last offset of an EmbeddingBag do not write out of bounds."""
    bag = nn.EmbeddingBag(ROWS, 4, mode="sum", include_last_offset=True)
    with sp.RowTracker(nn.ModuleList([bag])) as tracker:
        committed(tracker)
        try:
            bag(torch.tensor([1, 10**9]), torch.tensor([0, 1]))
        except (IndexError, RuntimeError):
            return
        assert 1 in marked(tracker.kinds(), "0.weight")


def test_activation_checkpointing_marks() -> None:
    from torch.utils.checkpoint import checkpoint

    table = nn.Embedding(ROWS, 4)
    for reentrant in (True, False):
        with sp.RowTracker(nn.ModuleList([table])) as tracker:
            committed(tracker)
            scale = torch.ones((), requires_grad=True)
            out = checkpoint(lambda s: table(torch.tensor([9])) * s, scale, use_reentrant=reentrant)
            out.sum().backward()
            assert marked(tracker.kinds(), "0.weight") == {9}


# ------------------------------------------------------------------ no row that changed goes unmarked


OPTIMIZERS: dict[str, tuple[bool, Any]] = {
    "SGD": (False, lambda p: torch.optim.SGD(p, 0.05)),
    "SGD sparse": (True, lambda p: torch.optim.SGD(p, 0.05)),
    "Adagrad": (False, lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01)),
    "Adagrad sparse": (True, lambda p: torch.optim.Adagrad(p, 0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_row_that_changes_is_marked(name: str) -> None:
    sparse, make = OPTIMIZERS[name]
    model = Model(sparse)
    optimizer = make(model.parameters())
    with sp.RowTracker(model, optimizer) as tracker:
        committed(tracker)
        assert tracker.untracked == {}
        before = copy.deepcopy([model.state_dict(), optimizer.state_dict()["state"]])
        train(model, optimizer, range(5))
        kinds = tracker.kinds()
        after = [model.state_dict(), optimizer.state_dict()["state"]]
        for table in ("users.weight", "items.weight"):
            changed = (after[0][table] != before[0][table]).any(dim=1).nonzero()[:, 0]
            assert 0 < len(changed) < ROWS / 2
            assert set(changed.tolist()) <= marked(kinds, table)
            assert marked(kinds, table) == marked(kinds, table, base=True)
        if "Adagrad" in name:
            for number, table in ((0, "users.weight"), (1, "items.weight")):
                changed = (after[1][number]["sum"] != before[1][number]["sum"]).any(dim=1).nonzero()[:, 0]
                assert set(changed.tolist()) <= marked(kinds, f"state/{number}/sum") == marked(kinds, table)
                assert kinds[f"state/{number}/step"].rows is None


def test_sparse_adam_beside_a_dense_optimizer() -> None:
    """Moments of two optimizers follow the rows, by their names in the state."""
    model = Model(sparse=True)
    tables = [model.users.weight, model.items.weight]
    sparse = torch.optim.SparseAdam(tables, 0.05)
    dense = torch.optim.AdamW(model.top.parameters())

    def state() -> dict[str, Any]:
        return {
            "model": dict(model.state_dict()),
            "sparse": {"state": dict(sparse.state_dict()["state"])},
            "dense": {"state": dict(dense.state_dict()["state"])},
        }

    cfg = sp.presets.check_n_run(4, moment_bits=8)
    with sp.RowTracker(model, {"sparse": sparse, "dense": dense}) as tracker:
        train(model, [sparse, dense], range(3))
        base = sp.compress(state(), None, cfg, kinds=tracker.kinds())
        tracker.saved(base=True)
        train(model, [sparse, dense], range(3, 6))
        kinds = tracker.kinds()
        assert tracker.untracked == {}
        assert kinds["sparse/state/0/exp_avg"].optimizer == "SparseAdam"
        assert kinds["dense/state/0/exp_avg"].layer == "linear"
        assert marked(kinds, "sparse/state/1/exp_avg_sq") == marked(kinds, "items.weight")
        assert kinds["dense/state/0/exp_avg"].rows is None
        with_marks = sp.compress(state(), base, cfg, kinds=kinds)
        without = sp.compress(state(), base, cfg, kinds={k: sp.Kind(v.layer, v.role) for k, v in kinds.items()})
        assert with_marks.to_bytes() == without.to_bytes()
        found = {r.path: r for r in with_marks.summary()}
        assert found["sparse/state/0/exp_avg"].codec == "rows"
        assert found["sparse/state/0/exp_avg"].measure == "relative L2"
        assert found["dense/state/0/exp_avg"].measure == "exact"


@pytest.mark.parametrize("policy", ["intermittent", "one_shot", "consecutive"])
def test_a_store_with_marks_is_a_store_without(policy: str, tmp_path: Path) -> None:
    """Files with marks equal those by comparison, after failed saves too."""
    cfg = sp.presets.check_n_run(4, policy=policy)
    model = Model(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    marks, compared = sp.Store(tmp_path / "marks", cfg), sp.Store(tmp_path / "compared", cfg)
    rng = random.Random(0)
    with sp.RowTracker(model, optimizer) as tracker:
        for step in range(8):
            train(model, optimizer, range(step * 3, step * 3 + 3))
            state = {"model": dict(model.state_dict())}
            kinds = tracker.kinds()
            if rng.random() < 0.3:
                continue  # this one was lost on its way
            saved = marks.save(step, state, kinds=kinds)
            tracker.saved(base=not saved.is_delta)
            plain = {name: sp.Kind(k.layer, k.role) for name, k in kinds.items()}
            assert compared.save(step, state, kinds=plain).checkpoint.to_bytes() == saved.checkpoint.to_bytes()
    assert any(step for step in marks.steps())
    last = marks.load()["model"]
    for name, value in model.state_dict().items():
        if "top" in name:
            assert torch.equal(last[name], value)
        else:
            assert torch.linalg.norm(last[name] - value) < 0.12 * torch.linalg.norm(value)


class Wrapped(torch.optim.Optimizer):
    """An optimizer like ZeroRedundancyOptimizer, around another one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_within_a_step_is_read_once(closure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    monkeypatch.setattr(_Table, "read", lambda self, everywhere: reads.append(self.name))
    model = Model()
    optimizer = Wrapped(Wrapped(torch.optim.SGD(model.parameters(), 0.05)))
    with sp.RowTracker(model):
        for step in range(3):
            reads.clear()
            model(*batch(step)).sum().backward()
            reads.clear()
            optimizer.step((lambda step=step: model(*batch(step)).sum()) if closure else None)
            assert reads == ["users.weight", "items.weight"]


def test_a_table_that_joins_a_group_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    monkeypatch.setattr(_Table, "read", lambda self, everywhere: reads.append(self.name))
    model = Model(sparse=True)
    optimizer = torch.optim.SGD([model.users.weight], 0.05)
    with sp.RowTracker(model, optimizer):
        optimizer.step()
        assert reads == ["users.weight"]
        optimizer.param_groups[0]["params"].append(model.items.weight)
        reads.clear()
        optimizer.step()
        assert reads == ["users.weight", "items.weight"]


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_optimizer_made_anew_marks_as_the_last(wrapped: bool) -> None:
    model = Model(sparse=True)
    make = lambda: torch.optim.SGD(model.parameters(), 0.05)  # noqa: E731
    optimizer: torch.optim.Optimizer = make()
    with sp.RowTracker(model, optimizer) as tracker:
        committed(tracker)
        before = copy.deepcopy(model.state_dict())
        for number in range(4):
            optimizer = Wrapped(make()) if wrapped else make()
            train(model, optimizer, range(number, number + 1))
        kinds = tracker.kinds(optimizer.inner if isinstance(optimizer, Wrapped) else optimizer)
        for table in ("users.weight", "items.weight"):
            changed = (model.state_dict()[table] != before[table]).any(dim=1).nonzero()[:, 0]
            assert 0 < len(changed) < ROWS / 2
            assert set(changed.tolist()) <= marked(kinds, table)
            assert len(marked(kinds, table)) < ROWS / 2


def test_losses_are_those_of_a_run_without() -> None:
    def run(tracked: bool) -> tuple[list[float], dict[str, Any]]:
        model = Model(sparse=True)
        optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
        if not tracked:
            return train(model, optimizer, range(100)), model.state_dict()
        losses: list[float] = []
        prev = None
        with sp.RowTracker(model, optimizer) as tracker:
            for start in range(0, 100, 10):
                losses += train(model, optimizer, range(start, start + 10))
                cfg = sp.presets.check_n_run(2)
                prev = sp.compress({"m": dict(model.state_dict())}, prev, cfg, kinds=tracker.kinds())
                tracker.saved(base=not prev.is_delta)
        return losses, model.state_dict()

    (a, x), (b, y) = run(True), run(False)
    assert a == b
    assert all(torch.equal(x[k], y[k]) for k in x)


# ------------------------------------------------------------------ rows that move without a look-up of their own


def backward(model: nn.ModuleDict, rows: torch.Tensor, how: str = "module") -> None:
    """Set a gradient of 2 in each of these rows."""
    table = model["t"]
    if how == "module":
        out = table(rows)
    elif how == "functional":
        out = F.embedding(rows, table.weight, sparse=table.sparse)
    else:
        out = table.weight[rows]
    (2 * out.sum()).backward()


def stepper(model: nn.ModuleDict, how: str) -> tuple[Any, Callable[[], Any], torch.optim.Optimizer]:
    """Return the tracker's optimizer, the function that changes rows, and an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1)

    def by_hand() -> None:
        with torch.no_grad():
            model["t"].weight -= model["t"].weight.grad

    told = optimizer if how == "optimizer" else None
    return told, by_hand if how == "by hand" else optimizer.step, optimizer


STEPPERS = pytest.mark.parametrize("stepping", ["optimizer", "not given", "by hand"])
GRADIENTS = pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])


@STEPPERS
@GRADIENTS
def test_a_save_between_backward_and_step(sparse: bool, stepping: str) -> None:
    model = one_table(sparse)
    told, step, optimizer = stepper(model, stepping)
    with sp.RowTracker(model, told) as tracker:
        chain = Chain(model, tracker)
        for number in range(3):
            optimizer.zero_grad()
            backward(model, ids(number))
            assert chain.save() == 0
            step()
            assert chain.save() == 40
        # Micro-batches on both sides of a save.
        optimizer.zero_grad()
        backward(model, ids(3))
        assert chain.save() == 0
        backward(model, ids(4))
        step()
        assert 75 <= chain.save() <= 80


@STEPPERS
@GRADIENTS
def test_gradients_that_are_never_zeroed(sparse: bool, stepping: str) -> None:
    model = one_table(sparse)
    told, step, _ = stepper(model, stepping)
    with sp.RowTracker(model, told) as tracker:
        chain = Chain(model, tracker)
        so_far: set[int] = set()
        for number in range(4):
            backward(model, ids(number))
            so_far |= set(ids(number).tolist())
            step()
            assert chain.save() == len(so_far)
        # And without a backward pass at all.
        if stepping != "by hand":
            step()
            assert chain.save() == len(so_far)


@STEPPERS
@GRADIENTS
@pytest.mark.parametrize("how", ["functional", "index"])
def test_look_ups_past_the_module(sparse: bool, stepping: str, how: str) -> None:
    model = one_table(sparse, padding_idx=6)
    told, step, optimizer = stepper(model, stepping)
    with sp.RowTracker(model, told) as tracker:
        chain = Chain(model, tracker)
        for number in range(3):
            for more in range(3):
                optimizer.zero_grad()
                # Past the module nothing knows of padding.
                backward(model, torch.cat([ids(10 * number + more), torch.tensor([6])]), how)
                if more == 1:
                    backward(model, ids(10 * number + 9))
                step()
            assert chain.save() > 120


@GRADIENTS
def test_a_step_by_a_closure(sparse: bool) -> None:
    model = one_table(sparse)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with sp.RowTracker(model, optimizer) as tracker:
        chain = Chain(model, tracker)
        for number, how in enumerate(("module", "functional")):

            def closure(number: int = number, how: str = how) -> float:
                optimizer.zero_grad()
                backward(model, ids(number), how)
                return 0.0

            optimizer.step(closure)
            assert chain.save() == 40


def test_what_the_tracker_does_not_see_is_stored_and_counted() -> None:
    """Changed rows without a mark are stored and counted in the note."""
    model = one_table()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    with sp.RowTracker(model, optimizer) as tracker:
        chain = Chain(model, tracker)
        for number, how in ((0, "module"), (1, "functional")):
            optimizer.zero_grad()
            backward(model, ids(number), how)
            optimizer.step()
        assert chain.save(unmarked=40) == 80
        # A manual edit of one row among all.
        with torch.no_grad():
            model["t"].weight[123_457] += 1
        assert chain.save(unmarked=1) == 1
        assert chain.save() == 0
        # Now and again they are read all the same.
        for number in range(65):
            optimizer.zero_grad()
            backward(model, ids(number), "functional" if number == 64 else "module")
            optimizer.step()
        assert chain.save() > 2000


def test_dense_gradients_are_read_rarely_unless_rows_turn_up_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from shrinkpoint.trainers import rows

    read: list[int] = []
    real = rows._with_gradient
    monkeypatch.setattr(rows, "_with_gradient", lambda g: read.append(len(read)) or real(g))
    model = one_table()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)

    def steps(count: int, how: str) -> int:
        before = len(read)
        for number in range(count):
            optimizer.zero_grad()
            backward(model, ids(number), how)
            optimizer.step()
        return len(read) - before

    with sp.RowTracker(model, optimizer) as tracker:
        assert steps(5, "module") == 0  # before the first save all rows count anyway
        committed(tracker)
        assert steps(100, "module") == 2
        committed(tracker)
        assert steps(5, "module") == 1
        committed(tracker)
        assert steps(5, "functional") == 1  # found: from then on all rows count, until the next save
        assert marked_share(tracker) == 1
        committed(tracker)
        assert steps(5, "functional") == 5
        assert 0 < marked_share(tracker) < 0.01


def marked_share(tracker: sp.RowTracker) -> float:
    return tracker.shares()["t.weight"][1]


def test_two_processes_each_of_which_sees_its_own_look_ups(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.trainers.rows_ranks"]
    home = Path(rows_ranks.__file__).parents[2]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=home, stderr=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=900)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


def test_an_accumulated_gradient_of_a_frozen_and_a_thawed_table() -> None:
    model = one_table()
    model["t"].weight.requires_grad_(False)
    with sp.RowTracker(model) as tracker:
        chain = Chain(model, tracker)
        model["t"].weight.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        backward(model, ids(1), "functional")
        optimizer.step()
        assert chain.save() == 40


# ------------------------------------------------------------------ snapshots and commits


def look_up(model: nn.ModuleDict, *ids: int) -> None:
    model["t"](torch.tensor(ids))


@pytest.fixture
def one() -> nn.ModuleDict:
    return nn.ModuleDict({"t": nn.Embedding(ROWS, 4)})


def test_what_is_looked_up_while_a_save_is_under_way_belongs_to_the_next(one: nn.ModuleDict) -> None:
    with sp.RowTracker(one) as tracker:
        committed(tracker)
        look_up(one, 1)
        assert marked(tracker.kinds(), "t.weight") == {1}
        look_up(one, 2)
        tracker.saved(base=False)
        look_up(one, 3)
        kinds = tracker.kinds()
        assert marked(kinds, "t.weight") == {2, 3}
        assert marked(kinds, "t.weight", base=True) == {1, 2, 3}
        tracker.saved(base=True)
        look_up(one, 4)
        kinds = tracker.kinds()
        assert marked(kinds, "t.weight") == marked(kinds, "t.weight", base=True) == {4}
        assert tracker.shares() == {"t.weight": (1 / ROWS, 1 / ROWS)}


def test_saves_that_failed_or_were_skipped_lose_nothing(one: nn.ModuleDict) -> None:
    with sp.RowTracker(one) as tracker:
        committed(tracker)
        look_up(one, 1)
        first = tracker.kinds()
        look_up(one, 2)
        second = tracker.kinds()
        assert marked(second, "t.weight") == {1, 2}
        look_up(one, 3)
        tracker.saved(base=False)  # which of the two? The first, to be safe.
        third = tracker.kinds()
        assert marked(third, "t.weight") == {2, 3}
        tracker.saved(base=False, kinds=third)
        assert marked(tracker.kinds(), "t.weight") == set()
        tracker.saved(base=True, kinds=first)  # long settled: nothing is taken back
        assert marked(tracker.kinds(), "t.weight", base=True) == {1, 2, 3}


def test_against_a_model_of_commits_in_any_order(one: nn.ModuleDict) -> None:
    """In any order of look-ups and commits, marks include all uncommitted rows."""
    rng = random.Random(1)
    for _ in range(30):
        with sp.RowTracker(one) as tracker:
            committed(tracker)
            since_last: set[int] = set()  # looked up since the newest committed snapshot
            since_base: set[int] = set()
            open_: list[tuple[Any, set[int], set[int]]] = []  # kinds, looked up since then, and before
            for _ in range(40):
                how = rng.random()
                if how < 0.5:
                    row = rng.randrange(ROWS)
                    look_up(one, row)
                    since_last.add(row)
                    since_base.add(row)
                    for _, after in [(k, a) for k, a, _ in open_]:
                        after.add(row)
                elif how < 0.8:
                    kinds = tracker.kinds()
                    assert marked(kinds, "t.weight") >= since_last
                    assert marked(kinds, "t.weight", base=True) >= since_base
                    if not open_:
                        assert marked(kinds, "t.weight") == since_last
                    open_.append((kinds, set(), set()))
                    open_ = open_[:8]  # the tracker remembers no more either
                elif open_:
                    i = rng.randrange(len(open_))
                    kinds, after, _ = open_[i]
                    base = rng.random() < 0.3
                    tracker.saved(base, kinds=kinds)
                    since_last = set(after)
                    if base:
                        since_base = set(after)
                    open_ = open_[i + 1 :]


def test_many_saves_that_nobody_reports_take_no_memory(one: nn.ModuleDict) -> None:
    with sp.RowTracker(one) as tracker:
        for row in range(50):
            look_up(one, row)
            kinds = tracker.kinds()
        assert len(tracker._pending) <= 8
        tracker.saved(base=True)
        assert marked(tracker.kinds(), "t.weight") >= set(range(1, 50))
        tracker.saved(base=True, kinds=kinds)


def test_a_commit_without_a_snapshot_is_a_mistake(one: nn.ModuleDict) -> None:
    with sp.RowTracker(one) as tracker:
        with pytest.raises(sp.BadArgumentError, match="no snapshot"):
            tracker.saved(base=True)
        committed(tracker)
        with pytest.raises(sp.BadArgumentError, match="no snapshot"):
            tracker.saved(base=True)


# ------------------------------------------------------------------ where marks are not enough


class OwnSGD(torch.optim.SGD):
    """A subclass of SGD, which the tracker does not know."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), "momentum 0.9"),
        (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01), "weight_decay 0.01"),
        (lambda p: torch.optim.Adagrad(p, 0.1, weight_decay=0.01), "weight_decay 0.01"),
        (lambda p: torch.optim.AdamW(p, 0.1), "AdamW"),
        (lambda p: torch.optim.RMSprop(p, 0.1), "RMSprop"),
        (lambda p: OwnSGD(p, 0.1), "OwnSGD"),
    ],
)
def test_optimizers_that_move_other_rows_are_compared(make: Any, reason: str) -> None:
    model = Model()
    optimizer = make(model.parameters())
    cfg = sp.presets.check_n_run(4, policy="consecutive")

    def save(prev: Any, kinds: Any) -> sp.Checkpoint:
        return sp.compress({"model": dict(model.state_dict())}, prev, cfg, kinds=kinds)

    with sp.RowTracker(model, optimizer) as tracker:
        train(model, optimizer, range(3))
        base = save(None, tracker.kinds())
        tracker.saved(base=True)
        train(model, optimizer, range(3, 6))
        kinds = tracker.kinds()
        assert set(tracker.untracked) == {"users.weight", "items.weight"}
        assert all(reason in why for why in tracker.untracked.values())
        assert all(kind.rows is None for kind in kinds.values())
        assert save(base, kinds).to_bytes() == save(base, sp.kinds(model, optimizer)).to_bytes()
        # Of another optimizer nothing of that is said.
        tracker.kinds(torch.optim.SGD(model.parameters(), 0.1))
        assert tracker.untracked == {}


def test_a_table_that_is_also_an_output_layer_is_compared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte = nn.Embedding(ROWS, 16)
            self.twin = nn.Embedding(ROWS, 16)
            self.again = nn.Embedding(ROWS, 16)
            self.again.weight = self.twin.weight
            self.head = nn.Linear(16, ROWS, bias=False)
            self.head.weight = self.wte.weight

    model = Tied()
    with sp.RowTracker(model, torch.optim.SGD(model.parameters(), 0.1)) as tracker:
        committed(tracker)
        kinds = tracker.kinds()
        assert tracker.untracked == {"wte.weight": "also the parameter head.weight"}
        assert kinds["wte.weight"].rows is None
        assert kinds["head.weight"].rows is None
        # Tied among tables: marked by either.
        model.twin(torch.tensor([1]))
        model.again(torch.tensor([2]))
        kinds = tracker.kinds()
        assert marked(kinds, "twin.weight") == marked(kinds, "again.weight") == {1, 2}


def test_a_table_in_none_of_the_optimizers_is_compared() -> None:
    model = Model()
    with sp.RowTracker(model, torch.optim.SGD(model.top.parameters(), 0.1)) as tracker:
        kinds = tracker.kinds()
        assert tracker.untracked["users.weight"] == "in none of the optimizers"
        assert kinds["users.weight"].rows is None


def test_a_resized_table_is_refused(one: nn.ModuleDict) -> None:
    with sp.RowTracker(one) as tracker:
        committed(tracker)
        one["t"].weight = nn.Parameter(torch.zeros(300, 4))
        look_up(one, 250)
        with pytest.raises(sp.BadArgumentError, match=r"t\.weight.*from 200 to 300 rows"):
            tracker.kinds()
    with sp.RowTracker(one) as tracker:
        committed(tracker)
        one["t"].weight.data = torch.zeros(20, 4)
        look_up(one, 5)
        with pytest.raises(sp.BadArgumentError, match="from 300 to 20 rows"):
            tracker.kinds()


@pytest.mark.parametrize("rows", [ROWS + 5, ROWS + 100, ROWS - 1])
@pytest.mark.parametrize("module", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_in_the_place_of_another_of_another_size_is_refused(
    one: nn.ModuleDict, rows: int, module: type[nn.Module]
) -> None:
    """A table replaced by one of another size is refused."""
    one["t"] = nn.Embedding(ROWS + 1, 4)
    with sp.RowTracker(one) as tracker:
        committed(tracker)
        one["t"] = module(rows, 4)  # type: ignore[call-arg]
        for _ in range(2):
            with pytest.raises(sp.BadArgumentError, match=rf"t\.weight.*from {ROWS + 1} to {rows} rows"):
                tracker.kinds()


@GRADIENTS
def test_a_table_in_the_place_of_another_is_followed(sparse: bool) -> None:
    """A replaced table of equal size is stored whole, then tracked."""
    model = one_table(sparse)
    with sp.RowTracker(model) as tracker:
        chain = Chain(model, tracker)
        tracker.kinds()  # a save that nobody reports
        old = weakref.ref(model["t"])
        model["t"] = copy.deepcopy(model["t"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        for number in range(3):
            optimizer.zero_grad()
            backward(model, ids(number), "functional" if number == 2 else "module")
            optimizer.step()
            assert chain.save() == 40
        # The last gradient is still there, and might be stepped by again.
        assert marked_share(tracker) == 40 / len(model["t"].weight)
        gc.collect()
        assert old() is None


def test_tables_that_come_and_go_and_are_tied() -> None:
    model = nn.ModuleDict({name: nn.Embedding(ROWS, 4) for name in ("a", "b", "c", "d")})
    model["b"].weight = model["a"].weight
    with sp.RowTracker(model) as tracker:
        committed(tracker)
        model["a"](torch.tensor([1]))
        model["c"](torch.tensor([3]))
        # One of two tied tables is replaced, one is removed, one is not a table any more, one is new.
        model["b"] = nn.Embedding(ROWS, 4)
        del model["d"]
        model["new"] = nn.Embedding(10, 4)
        kinds = tracker.kinds()
        assert marked(kinds, "a.weight") == {1}
        assert marked(kinds, "b.weight") == set(range(ROWS))
        assert marked(kinds, "c.weight") == {3}
        assert "d.weight" not in kinds
        assert kinds["new.weight"].rows.tolist() == [255, 3]
        tracker.saved(base=True)
        model["c"] = nn.Linear(4, ROWS)
        model["head"] = nn.Linear(4, ROWS, bias=False)
        model["head"].weight = model["a"].weight
        kinds = tracker.kinds()
        assert kinds["c.weight"].rows is None
        assert tracker.untracked == {"a.weight": "also the parameter head.weight"}
        assert marked(kinds, "b.weight") == set()


def test_loading_and_replacing_forgets(one: nn.ModuleDict) -> None:
    def replace() -> None:
        one["t"].weight = nn.Parameter(torch.ones(ROWS, 4))

    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    changes = [
        lambda: one.load_state_dict(copy.deepcopy(one.state_dict())),
        lambda: one["t"].load_state_dict(copy.deepcopy(one["t"].state_dict())),
        lambda: one.load_state_dict(copy.deepcopy(one.state_dict()), assign=True),
        lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        replace,
        lambda: tracker.forget(),
    ]
    with sp.RowTracker(one, optimizer) as tracker:
        for change in changes:
            committed(tracker)
            assert tracker.shares()["t.weight"] == (0, 0)
            change()
            kinds = tracker.kinds(torch.optim.SGD(one.parameters(), 0.1))
            assert marked(kinds, "t.weight") == marked(kinds, "t.weight", base=True) == set(range(ROWS))
            tracker.saved(base=True)
            look_up(one, 3)
            assert marked(tracker.kinds(torch.optim.SGD(one.parameters(), 0.1)), "t.weight") == {3}
            tracker.saved(base=True)


def test_edits_by_hand_are_noticed_by_what_is_compared_anyway(one: nn.ModuleDict) -> None:
    cfg = sp.presets.check_n_run(4)
    table = nn.Embedding(2000, 16)
    with sp.RowTracker(nn.ModuleDict({"t": table})) as tracker:
        base = sp.compress({"t.weight": table.weight}, None, cfg, kinds=tracker.kinds())
        tracker.saved(base=True)
        with torch.no_grad():
            table.weight.mul_(0.99)
        delta = sp.compress({"t.weight": table.weight}, base, cfg, kinds=tracker.kinds())
    assert "not marked" in delta.summary()[0].note
    assert delta.summary()[0].error < 0.12


# ------------------------------------------------------------------ hooks


def test_hooks_are_gone_after_closing(one: nn.ModuleDict) -> None:
    optimizer = torch.optim.SGD(one.parameters(), 0.1)
    from torch.optim import optimizer as hooks

    every = hooks._global_optimizer_pre_hooks, hooks._global_optimizer_post_hooks
    before = [len(table) for table in every]
    tracker = sp.RowTracker(one, optimizer)
    assert one["t"]._forward_hooks
    assert [len(table) for table in every] == [n + 1 for n in before]
    with tracker:
        pass
    tracker.close()
    assert not one["t"]._forward_hooks
    assert not one["t"]._load_state_dict_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    assert [len(table) for table in every] == before
    # One that nobody holds any more goes by itself.
    tracker = sp.RowTracker(one)
    gone = weakref.ref(tracker)
    assert [len(table) for table in every] == [n + 1 for n in before]
    del tracker
    gc.collect()
    assert gone() is None
    assert [len(table) for table in every] == before
    tracker = sp.RowTracker(one, optimizer)
    tracker.close()
    look_up(one, 1)
    for call in (tracker.kinds, lambda: tracker.saved(base=True), tracker.shares):
        with pytest.raises(sp.BadArgumentError, match="closed"):
            call()


def test_copies_and_pickles_of_the_module_are_free(one: nn.ModuleDict) -> None:
    with sp.RowTracker(one) as tracker:
        committed(tracker)
        twin = copy.deepcopy(one)
        buffer = io.BytesIO()
        torch.save(one, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert buffer.getbuffer().nbytes < ROWS * 4 * 4 + 5000
        for other in (twin, loaded):
            assert not any(isinstance(hook, _Hook) for hook in other["t"]._forward_hooks.values())
            look_up(other, 9)
            other.load_state_dict(one.state_dict())
        assert tracker.shares() == {"t.weight": (0, 0)}
        look_up(one, 8)
        assert marked(tracker.kinds(), "t.weight") == {8}


def test_under_the_compiler(one: nn.ModuleDict) -> None:
    with sp.RowTracker(one) as tracker:
        committed(tracker)
        compiled = torch.compile(one["t"], backend="eager")
        compiled(torch.tensor([1, 2]))
        compiled(torch.tensor([3, 150]))
        with torch.no_grad():
            compiled(torch.tensor([9]))
        assert marked(tracker.kinds(), "t.weight") == {1, 2, 3, 150}
    torch.compiler.reset()


def test_arguments() -> None:
    with pytest.raises(sp.BadArgumentError, match="module"):
        sp.RowTracker([1])  # type: ignore[arg-type]
    for bad in (1, [1], {"a": 1}, {1: torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)}):
        with pytest.raises(sp.BadArgumentError, match="optimizer"):
            sp.RowTracker(Model(), bad)  # type: ignore[arg-type]
    with sp.RowTracker(nn.Linear(3, 3)) as tracker:
        assert tracker.kinds() == sp.kinds(nn.Linear(3, 3))
        tracker.saved(base=True)
        assert "no tables" in repr(tracker)
