"""A preempted run: `python preempted_run.py FOLDER LOG GRACE SIZE STEPS [store]`.

Each line of LOG.RANK is a step, its loss in hexadecimal, and the wall-clock time. The first line has the process id.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shrinkpoint as sp
from shrinkpoint import trainers


def main(folder: str, log: str, grace: float, size: int, steps: int, how: str = "saver") -> None:
    """Train to `steps`, saving every 5."""
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    rank = 0 if alone else dist.get_rank()
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(nn.Linear(8, size), nn.Tanh(), nn.Linear(size, size), nn.Linear(size, 1))
    wrapped = model if alone else nn.parallel.DistributedDataParallel(model)
    state = trainers.TrainingState(wrapped, torch.optim.AdamW(model.parameters(), lr=0.01))
    store = sp.Store(folder, cfg=sp.presets.lossless())
    with (
        trainers.Preemption(grace=grace) as preemption,
        sp.Saver(store) if how == "saver" and rank == 0 else _Nothing() as saver,
        Path(f"{log}.{rank}").open("a") as out,
    ):
        target = saver if isinstance(saver, sp.Saver) else store
        step = trainers.resume(target, state)
        out.write(f"begin {os.getpid()} {step}\n")
        out.flush()
        while step < steps:
            generator = torch.Generator().manual_seed(100 * step + rank)
            loss = (wrapped(torch.randn(4, 8, generator=generator)) - 1).square().mean()
            for optimizer in state.optimizers:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            step += 1
            out.write(f"{step} {float(loss.detach()).hex()} {time.time()}\n")
            out.flush()
            time.sleep(0.01)
            if step % 5 == 0:
                trainers.save(target, step, state)
            preemption.check(target, step, state)
    if not alone:
        dist.destroy_process_group()


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), *sys.argv[6:])
