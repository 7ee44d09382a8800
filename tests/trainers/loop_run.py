"""A small resumable run: `python loop_run.py FOLDER LOSSES STEPS EVERY [WORKERS]`.

Each line of LOSSES is a step, the loss in hexadecimal, and the samples of the batch.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import shrinkpoint as sp
from shrinkpoint import trainers


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """37 samples; batches of 4 leave a short one."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.sin(torch.arange(8.0) * (index + 1))


def main(folder: str, losses: str, steps: int, every: int, workers: int = 0) -> None:
    """Train to `steps`, saving at every `every`-th."""
    torch.manual_seed(3), random.seed(3), np.random.seed(3)  # noqa: NPY002
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    loader = trainers.Loader(
        DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    )
    generators = {"mine": np.random.default_rng(5)}
    parts = {"scheduler": scheduler, "ema": ema, "loader": loader, "generators": generators}
    with sp.Saver(sp.Store(folder, cfg=sp.presets.lossless()), mode="thread") as saver:
        step = trainers.resume(saver, model, optimizer, **parts)
        with Path(losses).open("a") as out:
            while step < steps:
                for index, x in loader:
                    noise = random.random() + np.random.random() + generators["mine"].random()  # noqa: NPY002
                    loss = (model(x) - noise).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                    ema.update_parameters(model)
                    step += 1
                    out.write(f"{step} {float(loss.detach()).hex()} {index.tolist()}\n")
                    out.flush()
                    if step % every == 0:
                        trainers.save(saver, step, model, optimizer, **parts)
                    if step >= steps:
                        break
        final = {"model": model.state_dict(), "ema": ema.state_dict(), "optimizer": optimizer.state_dict()}
        Path(losses + ".final").write_bytes(sp.compress(final, cfg=sp.presets.lossless()).to_bytes())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
