"""A resumable training of an embedding with a row tracker, for the tests.

`python rows_run.py FOLDER LOG STEPS`. Each line of LOG is a step, its loss in hexadecimal, and the notes of its tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint import trainers

ROWS = 20_000


class Model(nn.Module):
    """A table and a bag under a line."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, 16, sparse=True)
        self.items = nn.EmbeddingBag(ROWS, 16, mode="sum", sparse=True)
        self.top = nn.Linear(32, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.top(torch.cat([self.users(ids[:, 0]), self.items(ids[:, 1:])], dim=1))
        return out


def main(folder: str, log: str, steps: int, every: int = 3, cfg: sp.Config | None = None) -> None:
    """Train to `steps`, saving at every `every`-th."""
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    cfg = sp.presets.check_n_run(8, policy="consecutive") if cfg is None else cfg
    with sp.Saver(sp.Store(folder, cfg=cfg), mode="thread") as saver, sp.RowTracker(model, optimizer) as tracker:
        step = trainers.resume(saver, model, optimizer, tracker=tracker)
        with Path(log).open("a") as out:
            while step < steps:
                ids = (torch.rand(32, 4, generator=torch.Generator().manual_seed(step)) ** 3 * ROWS).long()
                loss = (model(ids) - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                out.write(f"{step} {float(loss.detach()).hex()}\n")
                out.flush()
                if step % every == 0:
                    trainers.save(saver, step, model, optimizer, tracker=tracker)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
