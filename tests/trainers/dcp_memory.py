"""Memory of a DCP load: `python dcp_memory.py FOLDER [BATCH]` prints bytes as JSON."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import shrinkpoint as sp
from shrinkpoint.trainers.dcp import Reader, Writer
from shrinkpoint.trainers.dcp import reader as reader_module

LAYERS, WIDTH = 16, 1024


def state_of(layers: int, value: float) -> dict[str, Any]:
    """Return weights and moments of 4 MiB each, with every page touched."""
    names = [f"layer{i}.weight" for i in range(layers)]

    def made() -> torch.Tensor:
        return torch.full((WIDTH, WIDTH), value)

    moments = {n: {"exp_avg": made(), "exp_avg_sq": made(), "step": torch.tensor(value)} for n in names}
    return {"model": {n: made() for n in names}, "optim": {"state": moments}}


def save(folder: Path) -> None:
    """Save a chain of three."""
    torch.manual_seed(0)
    state, writer = state_of(LAYERS, 0.0), Writer()
    for number in range(3):
        for name, weight in state["model"].items():
            moments = state["optim"]["state"][name]
            moments["exp_avg"].mul_(0.9).add_(torch.randn(WIDTH, WIDTH), alpha=1e-3)
            moments["exp_avg_sq"].mul_(0.9).add_(moments["exp_avg"].square())
            weight.add_(torch.randn(WIDTH, WIDTH) if number == 0 else moments["exp_avg"], alpha=0.02)
        dcp.save(state, storage_writer=writer, checkpoint_id=folder / str(number), no_dist=True)


def memory(line: str) -> int:
    """Return the resident bytes of this process."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(row.split()[1]) for row in rows if row.startswith(line))


def load(folder: Path) -> dict[str, int]:
    """Return the bytes of the loaded state, and the growth of the process."""
    first = {"model": {"layer0.weight": torch.zeros(WIDTH, WIDTH)}}
    dcp.load(first, storage_reader=Reader(folder / "2"), no_dist=True)  # compiles and imports first
    state = state_of(LAYERS, 1.0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is now the present
    before = memory("VmRSS")
    dcp.load(state, storage_reader=Reader(folder / "2"), no_dist=True)
    assert torch.equal(state["model"]["layer0.weight"], first["model"]["layer0.weight"])
    return {"own": 3 * LAYERS * WIDTH * WIDTH * 4, "growth": memory("VmHWM") - before}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sp.set_threads(1)
    place = Path(sys.argv[1])
    if len(sys.argv) > 2:
        reader_module.BATCH = int(sys.argv[2])
    if not (place / "2").exists():
        # In a process of its own, whose memory is then gone.
        if os.fork() == 0:
            save(place)
            os._exit(0)
        assert os.wait()[1] == 0
    print(json.dumps(load(place)))
