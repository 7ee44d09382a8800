"""A rank of a training by two: `python sensitivity_worker.py RANK FOLDER`."""

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
from shrinkpoint import trainers

BATCHES = 4
SIZE = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 24))


def batch(number: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(number))


def train(
    net: nn.Module, tracker: sp.SensitivityTracker, rank: int | None, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Train on this process's half of every batch, or on all of it without a rank."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2) if optimizer is None else optimizer
    for number in range(BATCHES):
        part = batch(number) if rank is None else batch(number).chunk(SIZE)[rank]
        optimizer.zero_grad()
        net(part).square().mean().backward()
        optimizer.step()


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=SIZE, timeout=timedelta(seconds=600)
    )
    out: dict[str, Any] = {}
    inner = model()
    replicated = nn.parallel.DistributedDataParallel(inner)
    with sp.SensitivityTracker(replicated, every=None) as tracker:
        train(replicated, tracker, rank)
        out["ddp"] = tracker.grads()
        assert tracker.grads(shards_only=True) is None

    from torch.distributed.optim import ZeroRedundancyOptimizer

    inner = model()
    replicated = nn.parallel.DistributedDataParallel(inner)
    zero = ZeroRedundancyOptimizer(inner.parameters(), torch.optim.AdamW, lr=1e-2)
    with sp.SensitivityTracker(inner, every=None) as tracker:
        train(replicated, tracker, rank, zero)
        out["zero"], out["zero batches"] = tracker.grads(), (tracker.batch, tracker.recorded)

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = fully_shard(copy.deepcopy(model()), mesh=init_device_mesh("cpu", (SIZE,)))
    with sp.SensitivityTracker(sharded, every=None) as tracker:
        train(sharded, tracker, rank)
        grads = tracker.grads() or {}
        out["shards"] = list(tracker.grads(shards_only=True) or ())
        out["own part"] = sum(g.to_local().numel() for g in grads.values())  # type: ignore[attr-defined]
        out["fsdp"] = {name: g.full_tensor() for name, g in grads.items()}  # type: ignore[attr-defined]
        # A sharded state and its averages go into one checkpoint.
        state = {"model": sharded.state_dict()}
        ckpt = sp.compress(state, cfg=sp.presets.inshrinkerator(prune=0.3, prune_metric="sensitivity"), grads=grads)
        out["checkpoint"] = ckpt.id
        out["on the host"] = {g.to_local().device.type for g in grads.values()}  # type: ignore[attr-defined]
        # All processes save together, and the first one alone writes: sharded tensors are gathered before.
        cfg = sp.presets.inshrinkerator(prune=0.3, prune_metric="sensitivity")
        saved = trainers.save(sp.Store(str(folder / "store"), cfg), BATCHES, sharded, sensitivity=tracker)
        out["saved"] = saved is not None

    from torch.distributed.tensor import DTensor, Partial, Replicate

    # Of a replicated parameter each process may have a part of the gradient's sum, under tensor parallelism.
    mesh = init_device_mesh("cpu", (SIZE,))
    norm = nn.LayerNorm(4, bias=False)
    norm.weight = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
    with sp.SensitivityTracker(norm, every=None, beta=1.0) as tracker:
        norm.weight.grad = DTensor.from_local(torch.full((4,), rank + 1.0), mesh, [Partial()])
        torch.optim.SGD(norm.parameters(), lr=0.1).step()
        out["partial"] = (tracker.grads() or {})["weight"].to_local()  # type: ignore[attr-defined]
    torch.save(out, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
