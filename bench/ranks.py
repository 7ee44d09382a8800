"""Saves of torch.distributed.checkpoint by several processes over gloo on this machine."""

from __future__ import annotations

import statistics
import time
import warnings
from pathlib import Path
from typing import Any

from . import processes

SAVES = 5
_LAYERS = 8


def measure(world: int, parameters: int) -> dict[str, Any]:
    """Return seconds, bytes and metadata bytes of a save by some ranks, ours and torch's.

    Args:
        world: number of processes, 1 or more.
        parameters: weights of the whole state; two moments each come on top.

    Raises:
        ValueError: a process failed; its last words are in the message.
    """
    found: dict[str, Any] = processes.ranks("shrinkpoint.bench.ranks:child", world, parameters, seconds=600)[0]
    return found


def child(meeting: str, world: int, rank: int, parameters: int) -> dict[str, Any] | None:
    """Run one rank; the first one returns the figures."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh

    from shrinkpoint.trainers.dcp import Reader, Writer

    warnings.simplefilter("ignore")
    folder, answer = Path(meeting), None
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    seconds: dict[str, list[float]] = {"ours": [], "own": []}
    writer = Writer()
    state = _first(mesh, parameters)
    for number in range(SAVES + 1):
        for how in ("ours", "own") if number % 2 else ("own", "ours"):
            where = folder / f"{how}-{number}"
            storage = writer if how == "ours" else FileSystemWriter(where)
            dist.barrier()
            begin = time.perf_counter()
            save(state, storage_writer=storage, checkpoint_id=where)
            slowest = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:  # the first is a base, and pays for loading
                seconds[how].append(float(slowest))
        _drift(state)
    if rank == 0:
        answer = dict[str, Any](saves=SAVES)
        for how, times in seconds.items():
            last = folder / f"{how}-{SAVES}"
            own = sum(p.stat().st_size for p in last.rglob("*") if p.is_file() and p.stat().st_nlink == 1)
            metadata = (last / ".metadata").stat().st_size
            answer[how] = {"seconds": statistics.median(times), "nbytes": own, "metadata": metadata}
        Reader(folder / f"ours-{SAVES}").read_metadata()
    dist.barrier()
    dist.destroy_process_group()
    return answer


def _first(mesh: Any, parameters: int) -> dict[str, Any]:
    """Return weights and moments of a few square matrices, cut by rows."""
    import torch
    from torch.distributed.tensor import Shard, distribute_tensor

    width = round((parameters / _LAYERS) ** 0.5)
    torch.manual_seed(0)
    state: dict[str, Any] = {"model": {}, "optim": {"state": {}}}
    for i in range(_LAYERS):
        gradient = torch.randn(width, width) * 1e-3
        made = {"weight": torch.randn(width, width) * 0.02, "exp_avg": gradient, "exp_avg_sq": gradient.square()}
        cut = {name: distribute_tensor(x, mesh, [Shard(0)]) for name, x in made.items()}
        state["model"][f"layer{i}.weight"] = cut.pop("weight")
        state["optim"]["state"][f"layer{i}.weight"] = cut
    return state


def _drift(state: dict[str, Any]) -> None:
    """Change the state as some training steps would."""
    import torch

    for name, weight in state["model"].items():
        here, moments = weight.to_local(), state["optim"]["state"][name]
        first, second = moments["exp_avg"].to_local(), moments["exp_avg_sq"].to_local()
        first.mul_(0.9).add_(torch.randn_like(first), alpha=1e-4)
        second.mul_(0.99).add_(first.square(), alpha=0.01)
        here.sub_(first / (second.sqrt() + 1e-8), alpha=1e-4)
