"""Asynchronous saves of Megatron-Core and SIGKILL: `megatron_async_run.py FOLDER SEED`."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException

import shrinkpoint as sp
from shrinkpoint.codec.errors import MissingParentError
from shrinkpoint.trainers.dcp import Reader
from shrinkpoint.trainers.dcp.megatron import CompressedLoad, CompressedSave

ROWS, COLUMNS, LAST, EVERY = 1024, 512, 24, 6
LIMIT = 120.0
"""Seconds."""
FIRST, SECOND = "optimizer.state.exp_avg.weight", "optimizer.state.exp_avg_sq.weight"


class Training:
    """A matrix cut by rows over all ranks, and Adam, which changes its tensors in place."""

    def __init__(self) -> None:
        self.rank, self.world, self.done = dist.get_rank(), dist.get_world_size(), 0
        generator = torch.Generator().manual_seed(1)
        whole = torch.randn(ROWS, COLUMNS, generator=generator)
        self.shards = {"weight": whole.chunk(self.world)[self.rank].clone()}
        self.shards |= {name: torch.zeros_like(self.shards["weight"]) for name in (FIRST, SECOND)}
        self.bias = torch.zeros(COLUMNS)

    def step(self) -> float:
        """Train one step on data that the number of the step gives."""
        generator = torch.Generator().manual_seed(100 + self.done)
        x = torch.randn(8 * self.world, ROWS, generator=generator).chunk(self.world)[self.rank]
        weight, first, second = self.shards.values()
        parts = [torch.empty_like(weight) for _ in range(self.world)]
        dist.all_gather(parts, weight)
        whole, bias = torch.cat(parts).requires_grad_(), self.bias.clone().requires_grad_()
        loss = (torch.tanh(x @ whole / 32 + bias) - x[:, :COLUMNS]).square().mean()
        loss.backward()
        total = loss.detach().clone()
        for value in (whole.grad, bias.grad, total):
            dist.all_reduce(value)
        gradient = whole.grad.chunk(self.world)[self.rank]
        first.mul_(0.9).add_(gradient, alpha=0.1)
        second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        weight.addcdiv_(first, second.sqrt() + 1e-8, value=-1e-3)
        self.bias.add_(bias.grad, alpha=-0.1)
        self.done += 1
        return float(total)

    def sharded(self) -> dict[str, Any]:
        """Return the state for Megatron-Core; its tensors are those of training."""
        cut = (0, self.rank, self.world)
        state: dict[str, Any] = {n: ShardedTensor.from_rank_offsets(n, v, cut) for n, v in self.shards.items()}
        state["bias"] = ShardedTensor.from_rank_offsets("bias", self.bias, replica_id=self.rank)
        return state | {"step": self.done}

    def load(self, folder: Path) -> None:
        """Load a checkpoint."""
        found = dist_checkpointing.load(self.sharded(), str(folder), CompressedLoad())
        self.shards, self.done = {name: found[name] for name in self.shards}, found["step"]
        self.bias = found["bias"]

    def copy(self) -> dict[str, torch.Tensor]:
        """Return a copy of this rank's tensors."""
        return {name: value.clone() for name, value in (*self.shards.items(), ("bias", self.bias))}

    def check(self, home: Path) -> None:
        """Compare with the states that the ranks of the whole training had at this step."""
        ranks = [torch.load(home / f"expected-{self.done}-{rank}.pt") for rank in range(2)]
        for name, value in self.copy().items():
            whole = ranks[0][name] if name == "bias" else torch.cat([state[name] for state in ranks])
            expected = whole if name == "bias" else whole.chunk(self.world)[self.rank]
            assert torch.equal(value, expected), (name, self.done)


class Saves:
    """Asynchronous saves, as Megatron-LM schedules and finalizes them."""

    def __init__(self, home: Path) -> None:
        self.home, self.queue, self.steps = home, AsyncCallsQueue(), list[int]()
        self.strategy = CompressedSave(sp.presets.lossless())

    def begin(self, training: Training) -> Path:
        """Schedule a save."""
        folder = self.home / f"step-{training.done}"
        if training.rank == 0:
            folder.mkdir()
        dist.barrier()
        request = dist_checkpointing.save(training.sharded(), str(folder), self.strategy, async_sharded_save=True)
        self.queue.schedule_async_request(request)
        self.steps.append(training.done)
        return folder

    def finish(self, *, blocking: bool = False) -> list[int]:
        """Finalize the saves that the workers have written; record them as durable."""
        done = [self.steps.pop(0) for _ in self.queue.maybe_finalize_async_calls(blocking)]
        for step in done:
            (self.home / f"durable-{step}").touch()
        return done


def say(line: str) -> None:
    """Print a line on one rank."""
    if dist.get_rank() == 0:
        print(line)


def worker() -> int:
    """The process id of this rank's worker."""
    running = _async_process_executor._CHECKPOINT_PROCESS
    assert running is not None
    found: int = running._save_process.pid
    return found


def whole(home: Path) -> None:
    """Train to the end; look at the files while a worker is held, and after one is killed."""
    training, saves, losses = Training(), Saves(home), []
    while training.done < LAST:
        losses.append(training.step())
        if training.done % EVERY:
            continue
        torch.save(training.copy(), home / f"expected-{training.done}-{training.rank}.pt")
        held = training.done == 2 * EVERY
        if training.done in (2 * EVERY, 3 * EVERY) and training.rank == 1:
            os.kill(worker(), signal.SIGSTOP)
            if not held:
                # The next save meets this one.
                threading.Timer(1.0, os.kill, (worker(), signal.SIGCONT)).start()
        folder = saves.begin(training)
        if training.done == EVERY:
            # From here on the workers run.
            saves.finish(blocking=True)
        if held:
            losses += [training.step() for _ in range(3)]
            # A queue that waits for a worker that stands still would do so forever.
            signal.alarm(int(LIMIT))
            assert saves.finish() == []
            signal.alarm(0)
            assert not (folder / ".metadata").exists()
            assert not (folder / "metadata.json").exists()
            if training.rank == 1:
                os.kill(worker(), signal.SIGCONT)
            say("trained meanwhile")
            # The workers have written, but a checkpoint exists only after the commit.
            end = time.monotonic() + LIMIT
            while len(list(folder.glob("data/0*.spt"))) < 4:
                assert time.monotonic() < end
                time.sleep(0.02)
            time.sleep(0.2)
            assert not (folder / ".metadata").exists()
            assert saves.finish(blocking=True) == [folder_step(folder)]
            assert (folder / ".metadata").exists()
    saves.finish(blocking=True)
    for step in range(EVERY, LAST + 1, EVERY):
        training.load(home / f"step-{step}")
        training.check(home)
    files = Reader(home / f"step-{LAST}").read_metadata().storage_data.files
    assert [len(file.chain) for file in files] == [LAST // EVERY] * 2
    say("equal to the state of its step")
    (home / f"losses-{training.rank}.json").write_text(json.dumps(losses))
    training.step()
    if training.rank == 1:
        os.kill(worker(), signal.SIGSTOP)
    folder = saves.begin(training)
    if training.rank == 1:
        os.kill(worker(), signal.SIGKILL)
    with pytest.raises(CheckpointException, match="RANK 1"):
        saves.finish(blocking=True)
    with pytest.raises(MissingParentError):
        Reader(folder).read_metadata()
    say("a dead worker: an error on all ranks")
    dist_checkpointing.save(training.sharded(), str(folder), saves.strategy)
    before = training.copy()
    training.load(folder)
    assert all(torch.equal(value, before[name]) for name, value in training.copy().items())
    say("saved after that")


def folder_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def killed(home: Path) -> None:
    """Train and save until somebody kills this."""
    training, saves = Training(), Saves(home)
    while training.done < LAST:
        training.step()
        saves.finish()
        if training.done % EVERY == 0:
            saves.begin(training)
            (home / f"begun-{training.done}-{training.rank}").touch()
            if training.done == EVERY:
                # From here on the workers run.
                saves.finish(blocking=True)
    saves.finish(blocking=True)


def resumed(home: Path) -> None:
    """Load all complete checkpoints, and train from the newest to the end."""
    training, losses = Training(), []
    there = [p for p in home.glob("step-*") if (p / "metadata.json").exists()]
    for folder in sorted(home.glob("step-*"), key=folder_step):
        if folder not in there:
            with pytest.raises(CheckpointingException):
                training.load(folder)
    for durable in home.glob("durable-*"):
        assert home / durable.name.replace("durable", "step") in there
    for folder in sorted(there, key=folder_step):
        training.load(folder)
        training.check(home.parent / "whole")
    if training.world == 1:
        return
    begin = training.done
    while training.done < LAST:
        losses.append(training.step())
    expected = json.loads((home.parent / "whole" / f"losses-{training.rank}.json").read_text())
    assert losses == expected[begin:]
    training.check(home.parent / "whole")
    say(f"{home.name}: went on from step {begin}")


def start(part: Callable[[], None], home: Path, rank: int, world: int) -> int:
    """Fork a rank, which leads a process group of its own."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    try:
        meet = f"file://{home}/meet-{world}-{part.func.__name__}"  # type: ignore[attr-defined]
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
        part()
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    stop_worker()
    os._exit(0)


def stop_worker() -> None:
    """End this rank's worker, which would outlive a process that ends by `_exit`."""
    running = _async_process_executor._CHECKPOINT_PROCESS
    if running is not None:
        running._save_process.kill()


def run(part: Callable[[], None], home: Path, world: int) -> None:
    pids = [start(part, home, rank, world) for rank in range(world)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * world


def kill(home: Path, who: str, fatal: int, delay: float) -> None:
    """Kill ranks in a save: "all", "rank 1" with its worker, or "trainer 0" without its own."""
    pids = [start(partial(killed, home), home, rank, 2) for rank in range(2)]
    end = time.monotonic() + LIMIT
    try:
        while not all((home / f"begun-{fatal}-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end
            time.sleep(0.002)
        time.sleep(delay)
        if who == "all":
            for pid in pids:
                os.killpg(pid, signal.SIGKILL)
        elif who == "rank 1":
            os.killpg(pids[1], signal.SIGKILL)
        else:
            os.kill(pids[0], signal.SIGKILL)
        # The others may still write.
        time.sleep(1.0)
    finally:
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main(root: Path, seed: int) -> None:
    """Run everything; print a line for each thing that holds."""
    home = root / "whole"
    home.mkdir()
    run(partial(whole, home), home, 2)
    chance = random.Random(seed)
    home = root / "killed"
    home.mkdir()
    who = chance.choice(("trainer 0", "all", "rank 1"))
    kill(home, who, chance.choice((2, 3)) * EVERY, chance.uniform(0, 0.6))
    for world in (2, 1):
        run(partial(resumed, home), home, world)
    print("killed: one consistent step, and the same losses")


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Megatron-Core's queue asks for the GPU.
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    main(Path(sys.argv[1]), int(sys.argv[2]))
