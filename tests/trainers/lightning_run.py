"""A small Lightning run for the tests: `python lightning_run.py FOLDER EPOCHS [background]`.

`python lightning_run.py FOLDER EPOCHS ddp [CHECKPOINT]`: two processes, losses in `FOLDER/RANK/losses.txt`.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import shrinkpoint as sp
from shrinkpoint.trainers.lightning import CompressedCheckpoints, CompressedIO


class Model(pl.LightningModule):
    """Two layers with dropout."""

    def __init__(self, width: int, rate: float, log_to: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="log_to")
        self.first, self.last = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)
        self.log_to = log_to

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(torch.tanh(self.first(batch[0])), 0.2)
        loss = (self.last(hidden) - batch[0].flip(1)).square().mean()
        self.log("loss", loss)
        if self.log_to is not None:
            with open(self.log_to, "a") as out:
                print(self.global_step, float(loss.detach()).hex(), batch[0][:, 0].tolist(), file=out)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def fit(
    folder: Path,
    epochs: int,
    resume: Path | None = None,
    *,
    cfg: sp.Config | None = None,
    plugin: Any = None,
    checkpoint: Any = None,
    sensitivity: int | None = None,
    search: Any = None,
    rng: bool = True,
    top: int = 2,
    ddp: bool = False,
    width: int = 64,
) -> Model:
    """Train, four steps an epoch, and save at the end of each; losses go to `folder/losses.txt`."""
    home = folder / os.environ.get("LOCAL_RANK", "0") if ddp else folder
    home.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Model(width, 0.01, str(home / "losses.txt"))
    data = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4, shuffle=True)
    if ddp:  # each process drops others
        torch.manual_seed(1 + int(home.name))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if ddp else 1,
        strategy="ddp" if ddp else "auto",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[plugin or CompressedIO(cfg or sp.presets.lossless())],
        callbacks=[
            checkpoint or ModelCheckpoint(folder, save_top_k=top, monitor="epoch", mode="max"),
            CompressedCheckpoints(rng=rng, sensitivity=sensitivity, search=search),
        ],
    )
    trainer.fit(model, data, ckpt_path=resume)
    return model


if __name__ == "__main__":
    place, number, *how = sys.argv[1:]
    if how[:1] == ["ddp"]:
        fit(Path(place), int(number), Path(how[1]) if how[1:] else None, ddp=True)
    else:
        in_background = CompressedIO(sp.presets.lossless(), background=True) if how else None
        fit(Path(place), int(number), plugin=in_background, top=1 if how else 2)
