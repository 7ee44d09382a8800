"""Ranks that save sharded steps, randomly killed: `URL WORLD RUNS SEED FOLDER`.

In each run WORLD ranks resume, check what they loaded, and save step after step until SIGKILL ends one of them at a
random moment. Then another process checks that no step is lost that was reported durable, and collects garbage. Ranks
are forked from one process that has imported everything and opened nothing.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shrinkpoint as sp
from shrinkpoint.store import lock
from shrinkpoint.trainers.dcp import Reader, Writer

LIMIT = 60.0
KEEP = sp.Retention(last=3)
WORLDS = (1, 2, 4, 8)
"""Numbers of ranks that load the last step, after all kills."""


def full(step: int) -> dict[str, torch.Tensor]:
    """Return the weights of a step; four does not divide their rows."""
    w = torch.randn(202, 128, generator=torch.Generator().manual_seed(0))
    w[:: 1 + step % 5] += step
    return {"w": w, "b": torch.full((6,), float(step))}


def state_of(step: int | None, mesh: Any = None) -> dict[str, Any]:
    """The state of a step, or zeros to load into; on a mesh sharded by rows."""
    tensors = {k: v if step is not None else torch.zeros_like(v) for k, v in full(step or 0).items()}
    if mesh is not None:
        tensors = {k: distribute_tensor(v, mesh, [Shard(0)]) for k, v in tensors.items()}
    return {"model": tensors, "run": {"step": -1 if step is None else step}}


def check(state: dict[str, Any], step: int) -> None:
    """Raise unless a loaded state is that of its step."""
    assert state["run"]["step"] == step
    for name, value in full(step).items():
        found = state["model"][name]
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        assert torch.equal(found, value), (step, name)


def resumed(store: sp.Store, mesh: Any) -> int:
    """Load the newest step as shards of these ranks, and check each tensor; return the step."""
    reader, state = Reader(store), state_of(None, mesh)
    dcp.load(state, storage_reader=reader)
    check(state, reader.step or 0)
    return reader.step or 0


def load(url: str) -> None:
    """Resume only."""
    store = sp.Store(url, sp.presets.lossless())
    assert resumed(store, init_device_mesh("cpu", (dist.get_world_size(),))) == store.steps()[-1]


def train(url: str, log: Path) -> None:
    """Resume and save until killed."""
    store = sp.Store(url, sp.presets.lossless())
    mesh, writer = init_device_mesh("cpu", (dist.get_world_size(),)), Writer(store, keep=KEEP)
    step = resumed(store, mesh) if store.steps() else 0
    while True:
        step += 1
        dcp.save(state_of(step, mesh), storage_writer=writer, checkpoint_id=str(step))
        if dist.get_rank() == 0:
            with log.open("a") as file:
                print(step, store.describe(step).is_delta, file=file, flush=True)


def inspect(url: str, log: Path) -> None:
    """Check that durable steps are there, all steps load, and no other files are left."""
    lock.STALE = 0.0  # all others are dead
    store = sp.Store(url, sp.presets.lossless())
    durable = [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []
    steps = store.steps()
    if not durable and not steps:
        return
    # A step may be committed whose rank 0 was killed before it could report it.
    assert steps[-1] in (durable[-1:] or [0])[0] + torch.arange(2), (steps, durable[-3:])
    assert set(durable[-3:]) <= set(steps) or len(steps) >= 3, (steps, durable[-3:])
    assert store.verify() == {}
    for step in steps:
        state = state_of(None)
        dcp.load(state, storage_reader=Reader(store, step), no_dist=True)
        check(state, step)
    store.gc(KEEP)
    needed = {name for manifest in store.manifests()[0].values() for name in manifest.files}
    assert set(store._files.list("data")) == needed


def forked(work: Callable[[], None], log: Path) -> int:
    """Run in a child; return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 0
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        try:
            work()
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return pid


def rank(work: Callable[[], None], number: int, world: int, folder: Path) -> None:
    """Run as one rank."""
    meeting = f"file://{folder}/meeting"
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=meeting, rank=number, world_size=world, timeout=limit)
    work()


def main(url: str, world: int, runs: int, seed: int, folder: Path) -> None:
    """Run, kill and check repeatedly; then resume with other numbers of ranks."""
    chance, log = random.Random(seed), folder / "durable"
    for number in range(runs):
        (folder / "meeting").unlink(missing_ok=True)
        ranks = world if number < runs - 1 else (1 if world == 2 else 2)
        pids = []
        for i in range(ranks):
            work = lambda i=i, ranks=ranks: rank(lambda: train(url, log), i, ranks, folder)  # noqa: E731
            pids.append(forked(work, folder / f"{number}-{i}.log"))
        begun, before = time.monotonic(), log.stat().st_size if log.exists() else 0
        while (log.stat().st_size if log.exists() else 0) == before:
            assert time.monotonic() < begun + LIMIT, texts(folder, number)
            assert not os.waitpid(pids[0], os.WNOHANG)[0], texts(folder, number)
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 1.0))
        os.kill(chance.choice(pids), signal.SIGKILL)
        for pid in pids:
            end = time.monotonic() + LIMIT
            while not os.waitpid(pid, os.WNOHANG)[0]:
                assert time.monotonic() < end, texts(folder, number)
                time.sleep(0.01)
        _, status = os.waitpid(forked(lambda: inspect(url, log), folder / f"{number}-check.log"), 0)
        assert status == 0, texts(folder, number)
    for ranks in WORLDS:
        (folder / "meeting").unlink(missing_ok=True)
        name = f"load{ranks}"
        works = [lambda i=i, ranks=ranks: rank(lambda: load(url), i, ranks, folder) for i in range(ranks)]
        pids = [forked(work, folder / f"{name}-{i}.log") for i, work in enumerate(works)]
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks, texts(folder, name)
    print(f"{runs} runs killed, {len(log.read_text().splitlines())} steps durable, loaded by {WORLDS} ranks")


def texts(folder: Path, number: int | str) -> str:
    """Return the output of a run's processes."""
    return "\n".join(f"{p.name}: {p.read_text()[-3000:]}" for p in sorted(folder.glob(f"{number}-*.log")))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
