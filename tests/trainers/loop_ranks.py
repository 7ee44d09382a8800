"""A rank of a training by two: `python loop_ranks.py FOLDER RANK [lost | stalled]`."""

from __future__ import annotations

import datetime
import errno
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.trainers.model_state import StateMismatchWarning
from shrinkpoint.trainers.pointers import load_at, save_at


def wrapped(kind: str, width: int = 16, first: str = "first") -> Any:
    """Return a wrapped model; the name and width of its first layer may differ."""
    model: Any = nn.Sequential()
    model.add_module(first, nn.Linear(6, width))
    model.add_module("drop", nn.Dropout(0.3))
    model.add_module("last", nn.Linear(width, 64))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    return model


def whole(value: Any) -> torch.Tensor:
    """Return a copy of a whole tensor, sharded or not."""
    found: torch.Tensor = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
    return found


def named(model: Any) -> dict[str, Any]:
    return {name.removeprefix("module."): p for name, p in model.named_parameters()}


def halves(model: Any) -> list[torch.optim.Optimizer]:
    first, second = list(model.parameters())[:2], list(model.parameters())[2:]
    return [torch.optim.SGD(first, 0.1, 0.9), torch.optim.AdamW(second)]


def changed(kind: str, folder: Path, rank: int) -> None:
    """Check a resume into other parameters: refused on every rank, or partly loaded."""
    store = sp.Store(folder / f"changed-{kind}", cfg=sp.presets.lossless())
    model = wrapped(kind)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
    step(model, optimizer, 1)
    trainers.save(store, 1, model, optimizer)
    other = wrapped(kind, 12, "begin")
    fresh = torch.optim.Adagrad(other.parameters(), lr=0.01)
    before = {name: whole(p) for name, p in named(other).items()}
    with pytest.raises(sp.BadArgumentError, match=r"begin\.weight: not in the checkpoint") as refused:
        trainers.resume(store, other, fresh)
    assert "last.weight: shape (64, 16) in the checkpoint, (64, 12) in the model" in str(refused.value)
    assert all(torch.equal(whole(p), before[name]) for name, p in named(other).items())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert trainers.resume(store, other, fresh, strict=False) == 1
    assert sum(w.category is StateMismatchWarning for w in caught) == (rank == 0)
    for name, p in named(other).items():
        assert torch.equal(whole(p), whole(named(model)[name]) if name == "last.bias" else before[name])
        assert float(fresh.state[p]["step"]) == (name == "last.bias")
    table = fresh.state[named(other)["last.bias"]]
    assert torch.equal(whole(table["sum"]), whole(optimizer.state[named(model)["last.bias"]]["sum"]))
    step(other, fresh, 1)


def afresh(kind: str, folder: Path) -> None:
    """Check two optimizers; one has not stepped, and stays without state."""
    store = sp.Store(folder / f"afresh-{kind}", cfg=sp.presets.lossless())
    model = wrapped(kind)
    first = halves(model)
    step(model, first[0], 1)
    trainers.save(store, 1, model, first)
    other = wrapped(kind)
    second = halves(other)
    assert trainers.resume(store, other, second) == 1
    assert not second[1].state
    for pair in ((model, first), (other, second)):
        torch.manual_seed(7)
        for optimizer in (*pair[1], *pair[1]):
            step(pair[0], optimizer, 2)
    assert all(torch.equal(whole(a), whole(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True))


class Broken:
    """A loader whose position cannot be read on one rank."""

    def state_dict(self) -> Any:
        if dist.get_rank() == 1:
            raise KeyError("position")

    def load_state_dict(self, state: Any) -> None: ...


def failing(folder: Path, rank: int) -> None:
    """Check that an error in one rank's part is raised on all."""
    store, model = sp.Store(folder / "failing"), wrapped("ddp")
    error, said = (KeyError, "position") if rank == 1 else (sp.ShrinkpointError, "rank 1: KeyError: 'position'")
    with pytest.raises(error, match=said):
        trainers.save(store, 1, model, loader=Broken())
    assert store.steps() == []


class Averages:
    """An average that is not a Module, as in other libraries."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [10 * p.detach() for p in model.parameters()]

    def state_dict(self) -> Any:
        return {"decay": 0.9, "shadow": self.shadow}

    def load_state_dict(self, state: Any) -> None: ...


class Says:
    """A part whose state differs on rank 1."""

    def __init__(self, first: Any, second: Any) -> None:
        self.value = first if dist.get_rank() == 0 else second

    def state_dict(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None: ...


def beside(folder: Path, rank: int) -> None:
    """Check sharded tensors of an average, and modules among `more`."""
    store, model, teacher = sp.Store(folder / "beside", cfg=sp.presets.lossless()), wrapped("fsdp2"), wrapped("fsdp2")
    teaches = [whole(p) for p in teacher.parameters()]
    trainers.save(store, 1, model, ema=Averages(model), more={"teacher": teacher})
    wanted = [10 * whole(p) for p in model.parameters()]
    if rank == 0:
        found = store.load(count=False)
        assert all(torch.equal(a, b) for a, b in zip(found["ema"]["shadow"], wanted, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(found["more"]["teacher"].values(), teaches, strict=True))
    dist.barrier()
    other = wrapped("fsdp2")
    assert trainers.resume(store, model, more={"teacher": other}) == 1
    assert all(torch.equal(whole(p), t) for p, t in zip(other.parameters(), teaches, strict=True))


def refused(folder: Path, rank: int) -> None:
    """Check that an invalid or different part of one rank is an error on all."""
    store, model = sp.Store(folder / "refused"), wrapped("fsdp2")
    broken = (i for i in range(3))
    for part, error, told in (
        (Says(1, ValueError("of rank 1")), ValueError, "rank 1: ValueError: of rank 1"),
        (Says(1, broken), sp.UnsupportedLeafError, "rank 1: UnsupportedLeafError: .*generator"),
        (Says(1, next(model.parameters())), sp.ShrinkpointError, "different sharded tensors"),
    ):
        with pytest.raises(error if rank == 1 else sp.ShrinkpointError, match=None if rank == 1 else told):
            trainers.save(store, 1, model, scheduler=part)
        with pytest.raises(error if rank == 1 else sp.ShrinkpointError):
            trainers.save(store, 1, model, more={"part": part})
    with pytest.raises(sp.BadArgumentError if rank == 1 else sp.ShrinkpointError, match="step is -1"):
        trainers.save(store, -rank, model)
    assert store.steps() == []
    trainers.save(store, 1, model)


def unwritten(folder: Path, rank: int) -> None:
    """Check that an error while rank 0 writes is raised on all, and later saves work."""
    for kind in ("ddp", "fsdp2"):
        store, model = sp.Store(folder / f"unwritten-{kind}", cfg=sp.presets.lossless()), wrapped(kind)
        with sp.Saver(store, mode="thread") as saver:
            for to in (store, saver):
                save, number = to.save, len(store.steps()) + 1

                def full(*_: Any, **__: Any) -> Any:
                    raise OSError(errno.ENOSPC, "No space left on device")

                to.save = full  # type: ignore[assignment, method-assign, union-attr]
                with pytest.raises(OSError, match="No space left") as caught:
                    trainers.save(to, number, model)
                assert caught.value.errno == errno.ENOSPC
                to.save = save  # type: ignore[method-assign, union-attr]
                model(torch.ones(2, 6)).square().sum().backward()
                trainers.save(to, number, model)
                if rank == 0:
                    saver.wait()
                dist.barrier()
                assert store.steps() == list(range(1, number + 1))


class Denied(OSError):
    """An error of object store clients, with two arguments and an unpicklable attribute."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(code, why)
        self.lock = threading.Lock()


def unread(folder: Path, rank: int) -> None:
    """Check that a read error that cannot be pickled is reported on all ranks."""
    store, model = sp.Store(folder / "unread"), wrapped("ddp")
    trainers.save(store, 1, model)
    dist.barrier()

    for error in (Denied(403, "go away"), sp.MissingParentError("go away")):

        def load(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        store.load = load  # type: ignore[method-assign]
        family = sp.ShrinkpointError if isinstance(error, Denied) and rank == 1 else type(error)
        with pytest.raises(family, match="go away"):
            trainers.resume(store, model)


def lost(how: str, folder: Path, rank: int) -> None:
    """Check a save while the other rank has ended or hangs."""
    store, model = sp.Store(folder / "run"), wrapped("ddp")
    dist.barrier()
    if rank == 1:
        if how == "stalled":
            time.sleep(3600)  # until it is killed
        os._exit(17)
    # From here on only: until they have met both take as long as the machine lets them.
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=4))
    try:
        trainers.save(store, 5, model)
    except RuntimeError as e:
        print(e, *e.__notes__, flush=True)
        assert store.steps() == []
        os._exit(3)


def train(kind: str, phase: str, folder: Path, rank: int) -> None:
    """Train three steps and save, or resume; then write the losses of three more."""
    torch.manual_seed(3 if phase == "first" else 4)
    model: Any = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.3), nn.Linear(16, 4))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    loader = trainers.Loader([[i] for i in range(9)])
    store = sp.Store(folder / kind, cfg=sp.presets.lossless())

    if phase == "first":
        assert trainers.resume(store, model, optimizer, loader=loader) == 0
        iterator = iter(loader)
        for _ in range(3):
            step(model, optimizer, next(iterator)[0] + rank)
        saved = trainers.save(store, 3, model, optimizer, loader=loader)
        assert (saved is None) == (rank == 1)
    else:
        assert trainers.resume(store, model, optimizer, loader=loader) == 3
        iterator = iter(loader)
    losses = [step(model, optimizer, next(iterator)[0] + rank) for _ in range(3)]
    (folder / f"{kind}-{phase}-{rank}.txt").write_text("\n".join(losses))


def step(model: Any, optimizer: torch.optim.Optimizer, target: int) -> str:
    """Train one step; return the loss in hexadecimal."""
    loss = (model(torch.rand(5, 6)) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return f"{target} {float(loss.detach()).hex()}"


def main(home: Path, number: int) -> None:
    """Run all scenarios without a lost rank."""
    for wrapper in ("ddp", "fsdp2"):
        for part in ("first", "second"):
            train(wrapper, part, home, number)
            dist.barrier()
        changed(wrapper, home, number)
        afresh(wrapper, home)
    for scene in (failing, beside, refused, unwritten, unread):
        scene(home, number)
        dist.barrier()
    if number == 0:
        save_at(home / "pointer.json", sp.Store(home / "pointed"), {"weight": torch.arange(4.0)})
    dist.barrier()
    assert load_at(home / "pointer.json", store=sp.Store(home / "pointed"))["weight"].tolist() == [0, 1, 2, 3]
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    place, mine, *scenario = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=mine, world_size=2, timeout=limit)
    if scenario:
        lost(scenario[0], place, mine)
    else:
        main(place, mine)
