"""One of two processes that train together: `python sensitivity_worker.py RANK FOLDER` writes averages to RANK.pt."""

from __future__ import annotations

import copy
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shrinkpoint as sp

BATCHES = 4
SIZE = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))


def batch(number: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(number))


def train(net: nn.Module, tracker: sp.SensitivityTracker, rank: int | None) -> None:
    """Each process its half of every batch; all of it where there is one process."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for number in range(BATCHES):
        part = batch(number) if rank is None else batch(number).chunk(SIZE)[rank]
        optimizer.zero_grad()
        net(part).square().mean().backward()
        optimizer.step()


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    out: dict[str, Any] = {}
    inner = model()
    replicated = nn.parallel.DistributedDataParallel(inner)
    with sp.SensitivityTracker(inner, every=None) as tracker:
        train(replicated, tracker, rank)
        out["ddp"] = tracker.grads()

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(copy.deepcopy(model()), mesh=init_device_mesh("cpu", (SIZE,)))
    with sp.SensitivityTracker(sharded, every=None) as tracker:
        train(sharded, tracker, rank)
        grads = tracker.grads() or {}
        out["own part"] = sum(g.to_local().numel() for g in grads.values())  # type: ignore[attr-defined]
        out["fsdp"] = {name: g.full_tensor() for name, g in grads.items()}  # type: ignore[attr-defined]
        # A sharded state and its averages go into one checkpoint.
        state = {"model": sharded.state_dict()}
        ckpt = sp.compress(state, cfg=sp.presets.inshrinkerator(prune=0.3, prune_metric="sensitivity"), grads=grads)
        out["checkpoint"] = ckpt.id
    torch.save(out, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
