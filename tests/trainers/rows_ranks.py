"""Saves that check the marks of a `RowTracker`, and a training by two processes.

As a script it is one of the two: `python rows_ranks.py RANK FOLDER`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import shrinkpoint as sp
from shrinkpoint.kernels.packing import unpack_mask

ROWS, COLUMNS = 200_000, 16
CONFIG = sp.presets.check_n_run(8, policy="consecutive")


def one_table(sparse: bool = False, **table: Any) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"t": nn.Embedding(ROWS, COLUMNS, sparse=sparse, **table)})


class Chain:
    """Consecutive saves of `t.weight`, compared with the rows that really changed."""

    def __init__(self, model: nn.ModuleDict, tracker: sp.RowTracker) -> None:
        self.model, self.tracker = model, tracker
        self.prev: sp.Checkpoint | None = None
        self.before = torch.empty(0)
        self.note = ""
        self.save()

    def save(self, unmarked: int = 0) -> int:
        """Save and check; return the number of changed rows, `unmarked` of them without a mark."""
        weight = self.model["t"].weight.detach().clone()
        kinds = self.tracker.kinds()
        ckpt = sp.compress({"t.weight": weight}, self.prev, CONFIG, kinds=kinds)
        self.tracker.saved(base=not ckpt.is_delta, kinds=kinds)
        moved = np.ones(len(weight), bool)
        if self.prev is not None:
            moved = (weight != self.before).any(dim=1).numpy()
            marks = unpack_mask(kinds["t.weight"].rows, len(weight))
            assert int((moved & ~marks).sum()) == unmarked
        (row,) = ckpt.summary()
        note = f"{unmarked:,} rows changed that were not marked as touched; they are stored, too"
        assert row.note == (note if unmarked else "")
        assert row.error < 0.01
        restored = sp.decompress(ckpt)["t.weight"]
        # A step of 8 bits is 0.03 here, a step of the training at least 0.5.
        assert not ((restored - weight).abs() > 0.1).any()
        self.prev, self.before = ckpt, weight
        return int(moved.sum())


def ids(step: int, rank: int = 0, count: int = 40) -> torch.Tensor:
    """Return ids that differ by step and rank."""
    g = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randperm(ROWS // 2, generator=g)[:count] * 2 + rank


def marked_by_all(sparse: bool, how: str, rank: int) -> None:
    """Check that rows looked up by either process are marked on both."""
    model = one_table(sparse)
    ddp = nn.parallel.DistributedDataParallel(Wrapped(model))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1)

    def step() -> None:
        if how == "by hand":
            with torch.no_grad():
                model["t"].weight -= model["t"].weight.grad
        else:
            optimizer.step()

    with sp.RowTracker(model, optimizer if how == "optimizer" else None) as tracker:
        chain = Chain(model, tracker)
        for number in range(3):
            optimizer.zero_grad()
            ddp(ids(number, rank)).sum().backward()
            step()
            assert chain.save() == 80
        # A save between micro-batches, and one between backward and step.
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(ids(7, rank)).sum().backward()
        assert chain.save() == 0
        ddp(ids(8, rank)).sum().backward()
        assert chain.save() == 0
        step()
        assert 150 <= chain.save() <= 160


class Wrapped(nn.Module):
    def __init__(self, model: nn.ModuleDict) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner["t"](x)
        return 2 * out


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    for sparse in (False, True):
        for how in ("optimizer", "not given", "by hand"):
            marked_by_all(sparse, how, rank)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
