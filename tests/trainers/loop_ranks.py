"""One of two processes that train together, for the tests: `python loop_ranks.py FOLDER RANK`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.trainers.pointers import load_at, save_at


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
    """One step; the loss to the bit."""
    loss = (model(torch.rand(5, 6)) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return f"{target} {float(loss.detach()).hex()}"


if __name__ == "__main__":
    home, number = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{home}/meet", rank=number, world_size=2)
    for wrapper in ("ddp", "fsdp2"):
        for part in ("first", "second"):
            train(wrapper, part, home, number)
            dist.barrier()
    if number == 0:
        save_at(home / "pointer.json", sp.Store(home / "pointed"), {"w": torch.arange(4.0)})
    dist.barrier()
    assert load_at(home / "pointer.json")["w"].tolist() == [0, 1, 2, 3]
    dist.barrier()
    dist.destroy_process_group()
