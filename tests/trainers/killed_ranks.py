"""Trainings whose ranks are killed during a save.

`python -m tests.trainers.killed_ranks FOLDER` runs them.
Two ranks train and save; in the third save one of them is ended by SIGKILL at a chosen point, for real. What is left is
copied, and one, two or four ranks go on from each copy. Ranks are forked from one process that has imported everything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.store import local as local_files
from shrinkpoint.trainers.dcp import Reader, Writer
from shrinkpoint.trainers.loop import RanksChangedWarning

from ..forking import import_late

LAST, FATAL = 6, 3
"""Steps of the whole training, a save each; the save in which a rank is killed."""
LIMIT = 600.0
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True)
class Kill:
    """The point at which a rank dies.

    Args:
        how: "dcp", a folder a step; "dcp again", one folder for all; "loop", `trainers.save` to a store.
        rank: which.
        at: "data" or "commit", a file that it writes; or "gather", while rank 0 collects the state.
        when: "torn": the file is written under its temporary name, not synced; "there": it is durable.
    """

    how: str
    rank: int
    at: str
    when: str = "torn"

    @property
    def newest(self) -> int:
        """The step of the newest committed checkpoint afterwards."""
        return FATAL if (self.at, self.when) == ("commit", "there") else FATAL - 1

    @property
    def worlds(self) -> tuple[int, ...]:
        """Numbers of ranks that continue; the original number only once for each way of saving."""
        return (1, 2, 4) if self.when == "there" else (1, 4)

    @property
    def name(self) -> str:
        """Name of folders and test ids."""
        return f"{self.how}-rank{self.rank}-{self.at}-{self.when}".replace(" ", "-")


KILLS = [
    Kill("dcp", 1, "data", "torn"),
    Kill("dcp", 0, "commit", "torn"),
    Kill("dcp", 0, "commit", "there"),
    Kill("dcp again", 1, "data", "there"),
    Kill("loop", 1, "gather"),
    Kill("loop", 0, "data", "torn"),
    Kill("loop", 0, "commit", "there"),
]


class Net(nn.Module):
    """A few layers with dropout between them; rows do not divide by four."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(24, 90)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(90, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


class Training:
    """A training by FSDP2 with DCP, or DDP with `trainers.save`, on all ranks."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder, self.done = how, folder, 0
        self.model: Any = Net()
        if how == "loop":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        else:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        x = torch.randn(16 * LAST, 24, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, torch.sin(2 * x))
        self.loader = trainers.Loader(torch.utils.data.DataLoader(data, 16, shuffle=True))
        self.batches: Iterator[Any] = iter(())
        self.writer = Writer(cfg=sp.presets.lossless())
        self.store = sp.Store(folder, cfg=sp.presets.lossless()) if how == "loop" else None
        torch.manual_seed(7)

    def step(self) -> float:
        """Train one step on a batch that all ranks share."""
        if self.how != "loop":
            torch.manual_seed(100 + self.done)
            x = torch.randn(16, 24)
            batch = [x, torch.sin(2 * x)]
        else:
            # Shuffled by, and dropout from, generators that are in the checkpoint.
            batch = next(self.batches, None)
            if batch is None:
                self.batches = iter(self.loader)
                batch = next(self.batches)
        loss = (self.model(batch[0]) - batch[1]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.done += 1
        return float(loss.detach())

    def place(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder if self.how == "dcp again" else self.folder / f"step-{step}"

    def state(self) -> dict[str, Any]:
        """Return the state for DCP."""
        weights, moments = get_state_dict(self.model, self.optimizer, options=FLAT)
        return {"model": weights, "optim": moments, "run": {"step": self.done}}

    def save(self) -> None:
        """Save a checkpoint."""
        if self.store is not None:
            trainers.save(self.store, self.done, self.model, self.optimizer, loader=self.loader)
        else:
            dcp.save(self.state(), storage_writer=self.writer, checkpoint_id=self.place(self.done))

    def resume(self) -> None:
        """Resume from the newest committed checkpoint."""
        if self.store is not None:
            self.done = trainers.resume(self.store, self.model, self.optimizer, loader=self.loader)
            return
        steps = [s for s in range(LAST + 1) if (self.place(s) / ".metadata").exists()]
        where = self.place(max(steps))
        state = self.state()
        dcp.load(state, storage_reader=Reader(where))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=FLAT,
        )
        self.done = state["run"]["step"]
        self.writer = Writer(cfg=sp.presets.lossless(), parent=where)

    def whole(self) -> dict[str, torch.Tensor]:
        """Return weights and moments, gathered on each rank."""
        weights, moments = get_state_dict(self.model, self.optimizer, options=FLAT)
        found = {**weights, **{k: v for k, v in moments.items() if isinstance(v, torch.Tensor)}}
        return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach().clone() for k, v in found.items()}


def die() -> Any:
    """Kill this process by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def fatal(kill: Kill) -> Iterator[None]:
    """Kill this rank at the chosen point of its writes or messages."""
    names = {"write": local_files.LocalFiles.write, "create": local_files.LocalFiles.create}
    synced, gathered = os.fsync, dist.gather_object

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(files: Any, name: str, data: bytes) -> Any:
            if name.startswith("data/") != (kill.at == "data"):
                return original(files, name, data)
            if kill.when == "torn":
                os.fsync = lambda _: die()
            original(files, name, data)
            return die()

        return call

    if kill.at == "gather":
        dist.gather_object = lambda *_: die()
    else:
        for name, original in names.items():
            setattr(local_files.LocalFiles, name, deadly(original))
    try:
        yield
    finally:
        os.fsync, dist.gather_object = synced, gathered
        for name, original in names.items():
            setattr(local_files.LocalFiles, name, original)


def first(kill: Kill | None, how: str, home: Path) -> None:
    """Train from the beginning and save at each step, up to the kill or to the end."""
    run = Training(how, home / "run")
    losses = []
    for _ in range(LAST):
        losses.append(run.step())
        found = run.whole()
        if dist.get_rank() == 0:
            torch.save(found, home / f"expected-{run.done}.pt")
        if kill is not None and run.done == FATAL:
            with fatal(kill) if dist.get_rank() == kill.rank else contextlib.nullcontext():
                try:
                    run.save()
                except Exception as e:
                    print(f"noticed: {type(e).__name__}: {e}"[:300], *getattr(e, "__notes__", []), flush=True)
                    os._exit(3)
            # A rank that had nothing to wait for sees at the next collective that it is alone.
            try:
                run.whole()
                dist.barrier()
            except Exception as e:
                print(f"noticed later: {type(e).__name__}"[:300], flush=True)
                os._exit(3)
            raise AssertionError("a rank was killed and nobody noticed")
        run.save()
    if dist.get_rank() == 0:
        (home / "losses.json").write_text(json.dumps(losses))


def second(kill: Kill, home: Path) -> None:
    """Resume exactly from the committed state, and train to the end."""
    run = Training(kill.how, home / "run")
    before = run.whole()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", RanksChangedWarning)
        run.resume()
    changed = kill.how == "loop" and dist.get_world_size() != 2
    assert any(w.category is RanksChangedWarning for w in seen) == changed
    assert run.done == kill.newest, run.done
    expected, found = torch.load(home / f"expected-{run.done}.pt"), run.whole()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert any(not torch.equal(found[name], value) for name, value in before.items())
    losses = []
    while run.done < LAST:
        losses.append(run.step())
        run.save()
    after = run.whole()
    again = Training(kill.how, home / "run")
    again.resume()
    assert again.done == LAST
    for name, value in again.whole().items():
        assert torch.equal(value, after[name]), name
    if dist.get_rank() == 0:
        torch.save(after, home / "after.pt")
        (home / "losses.json").write_text(json.dumps(losses))


def rank(work: Callable[[], None], number: int, world: int, home: Path) -> None:
    """Run as one rank."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{home}/rendezvous",
        rank=number,
        world_size=world,
        timeout=timedelta(seconds=LIMIT / 2),
    )
    work()
    dist.barrier()
    dist.destroy_process_group()


def run(work: Callable[[], None], world: int, home: Path) -> dict[str, Any]:
    """Fork the ranks and wait; return their exit codes and output."""
    (home / "rendezvous").unlink(missing_ok=True)
    pids = []
    sys.stdout.flush()
    for number in range(world):
        pid = os.fork()
        if pid == 0:
            log = os.open(home / f"{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            code = 0
            try:
                rank(work, number, world, home)
            except BaseException:
                traceback.print_exc()
                code = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        pids.append(pid)
    deadline, codes = time.monotonic() + LIMIT, {}
    while len(codes) < world and time.monotonic() < deadline:
        for pid in [p for p in pids if p not in codes]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in [p for p in pids if p not in codes]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    logs = [(home / f"{number}.log").read_text(errors="replace")[-3000:] for number in range(world)]
    return {"codes": [codes.get(p) for p in pids], "logs": logs}


def main(root: Path) -> None:
    """Run every kill with every later number of ranks; print a line of JSON each."""

    def made(name: str) -> Path:
        home = root / name
        home.mkdir()
        return home

    def say(name: str, found: dict[str, Any]) -> None:
        print(json.dumps({"name": name} | found), flush=True)

    for how in sorted({kill.how for kill in KILLS}):
        home = made(f"{how}-whole".replace(" ", "-"))
        say(home.name, run(lambda how=how, home=home: first(None, how, home), 2, home))
    for kill in KILLS:
        home = made(kill.name)
        say(kill.name, run(lambda kill=kill, home=home: first(kill, kill.how, home), 2, home))
        for world in kill.worlds:
            copy = root / f"{kill.name}-{world}"
            shutil.copytree(home, copy)
            say(copy.name, run(lambda kill=kill, copy=copy: second(kill, copy), world, copy))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    import_late()
    main(Path(sys.argv[1]))
