"""A training under `sp.Run`: `python run_run.py FOLDER LOSSES EPOCHS EVERY [LEVEL]`.

Each line of LOSSES.RANK is a step, the loss in hexadecimal, and the samples of the batch. Under torchrun it is a rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import shrinkpoint as sp
from shrinkpoint import trainers


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """37 samples; batches of 4 leave a short one."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(8.0) * (index + 1))


def main(folder: str, losses: str, epochs: int, every: int, level: str = "lossless") -> None:
    """Train for `epochs` of ten batches, two batches an optimizer step."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if ranks > 1 else 0
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    wrapped: Any = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizers = [torch.optim.AdamW(matrices, lr=0.01), torch.optim.SGD(vectors, lr=0.01, momentum=0.9)]
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizers[0], 200)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=5)
    sampler: Any = DistributedSampler(Numbers(), ranks, rank) if ranks > 1 else None
    data = DataLoader(Numbers(), batch_size=4, shuffle=sampler is None, sampler=sampler)
    state = trainers.TrainingState(wrapped, optimizers, scheduler, scaler=scaler, ema=ema)
    with Path(f"{losses}.{rank}").open("a") as out, sp.Run(folder, state, data=data, every=every, level=level) as run:
        out.write(f"begin {os.getpid()} {run.steps}\n")
        out.flush()
        for number, (index, x) in enumerate(run.batches(epochs)):
            loss = (wrapped(x) - 1).square().mean()
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if number % 2 == 0:
                continue
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            scheduler.step()
            ema.update_parameters(model)
            out.write(f"{run.steps + 1} {float(loss.detach()).hex()} {index.tolist()}\n")
            out.flush()
            run.step(loss=loss)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
