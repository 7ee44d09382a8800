"""One process of a group search: `python worker.py RANK SIZE FOLDER`, writes RANK.json."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shrinkpoint as sp
from shrinkpoint.searching import Cube

CUBE = Cube(bins=(4, 8, 16, 32, 64), prune=(0.0, 0.2), protect=(0.0005, 0.005))


def state(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {f"{i}.weight": torch.randn(48, 64, generator=generator) * (i + 1) for i in range(3)}


def evaluate(exact: dict[str, Any]) -> Callable[[dict[str, Any]], float]:
    """Return a loss: one plus the mean squared relative error."""

    def loss(restored: dict[str, Any]) -> float:
        errors = [float(((restored[k] - x) ** 2).mean() / (x**2).mean()) for k, x in exact.items()]
        return 1.0 + sum(errors) / len(errors)

    return loss


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except sp.ShrinkpointError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def search(exact: Any, *arguments: Any, **options: Any) -> sp.SearchResult:
    """Search with kinds which say that the weights are trained."""
    return sp.search(exact, *arguments, kinds=dict.fromkeys(exact, "linear"), **options)


def main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    sp.set_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=600)
    )
    group = dist.group.WORLD
    exact = state()
    loss = evaluate(exact)
    calls = 0

    def counted(restored: dict[str, Any]) -> float:
        nonlocal calls
        calls += 1
        return loss(restored)

    def broken(restored: dict[str, Any]) -> float:
        nonlocal calls
        calls += 1
        if rank == 1 and calls > 1:
            raise ValueError("out of luck")
        return loss(restored)

    out: dict[str, Any] = {}
    first = search(exact, counted, 0.02, group=group, options=sp.SearchOptions(cube=CUBE, progress=False))
    out["first"], out["calls"] = first.to_json(), calls
    out["next"] = search(exact, loss, 0.02, group=group, last=first).to_json()
    calls = 0
    out["broken"] = error_of(lambda: search(exact, broken, 0.02, group=group, options=sp.SearchOptions(cube=CUBE)))
    out["bad argument"] = error_of(lambda: search(exact, loss, -1.0 if rank == 1 else 0.02, group=group))
    mine = state(seed=rank)
    out["states"] = error_of(lambda: search(mine, loss, 0.02, group=group))
    uneven = lambda restored: loss(restored) + 0.1 * rank  # noqa: E731
    out["uneven"] = error_of(lambda: search(exact, uneven, 0.02, group=group))
    blind = lambda restored: 1.0 if rank == 1 else loss(restored)  # noqa: E731
    found = search(exact, blind, 0.02, group=group, options=sp.SearchOptions(cube=CUBE, progress=False))
    out["blind"], out["blind, next"] = (r.notes for r in (found, search(exact, blind, 0.02, group=group, last=found)))
    out["accurate"] = calls_of_an_accuracy(exact, loss, group)
    parts = in_parts(size, exact)
    out["sharded"] = search(parts, evaluate(exact), 0.02, group=group, options=sp.SearchOptions(cube=CUBE)).to_json()
    # One process that gives up before arrays are gathered must not leave the others waiting for its parts.
    for name, bad in (("threshold", {"threshold": -1.0}), ("kinds", {"kinds": {"0.weight": "nonsense"}})):
        arguments: dict[str, Any] = {"threshold": 0.02} | (bad if rank == 1 else {})
        out[f"sharded, bad {name}"] = error_of(lambda a=arguments: sp.search(parts, loss, group=group, **a))
    uneven_budget = 12 - rank
    out["sharded, other budget"] = error_of(
        lambda: sp.search(parts, loss, 0.02, group=group, options=sp.SearchOptions(budget=uneven_budget))
    )
    (folder / f"{rank}.json").write_text(json.dumps(out))

    def dying(restored: dict[str, Any]) -> float:
        if rank == 1:
            os._exit(3)
        return loss(restored)

    (folder / f"{rank}.gone").write_text(error_of(lambda: search(exact, dying, 0.02, group=group)))
    # Gloo may call std::terminate when a process leaves while a group that has lost a member still has threads.
    sys.stdout.flush()
    os._exit(0)


def calls_of_an_accuracy(exact: dict[str, Any], loss: Callable[[dict[str, Any]], float], group: Any) -> list[int]:
    """Return the calls of three successive searches of a step-shaped accuracy."""
    calls: list[int] = []

    def accuracy(restored: dict[str, Any]) -> float:
        calls[-1] += 1
        return float(loss(restored) < 1.3)

    last = None
    for _ in range(3):
        calls.append(0)
        last = sp.search(
            exact, accuracy, 0.02, group=group, last=last, options=sp.SearchOptions(cube=CUBE, progress=False)
        )
    return calls


def in_parts(size: int, exact: dict[str, Any]) -> dict[str, Any]:
    """Distribute the arrays over the processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size,))
    return {k: distribute_tensor(x, mesh, [Shard(0)]) for k, x in exact.items()}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
