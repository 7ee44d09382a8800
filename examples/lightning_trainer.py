"""Lightning with compressed checkpoints, saved in the background by one plugin.

pip install '.[lightning]'                       # in a checkout
python examples/lightning_trainer.py run/
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from shrinkpoint.codec.extras import install

try:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
except ImportError:
    sys.exit(f"this example needs Lightning: {install('lightning')}")

from shrinkpoint.trainers.lightning import CompressedCheckpoints, CompressedIO, load_from_checkpoint


class Model(pl.LightningModule):
    """A small network."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.GELU(), torch.nn.Linear(width, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        """Squared error."""
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters())


def main(folder: str, epochs: int = 3) -> Model:
    """Train, resuming from the newest checkpoint of the folder."""
    x = torch.randn(1024, 32)
    data = DataLoader(TensorDataset(x, x.square().sum(1, keepdim=True)), batch_size=64, shuffle=True)
    newest = max(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime, default=None)
    keep = ModelCheckpoint(folder, save_top_k=2, monitor="epoch", mode="max")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        plugins=[CompressedIO(background=True)],
        callbacks=[keep, CompressedCheckpoints()],
    )
    trainer.fit(Model(), data, ckpt_path=newest)
    return load_from_checkpoint(Model, keep.best_model_path)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "run")
