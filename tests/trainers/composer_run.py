"""A small Composer run for the tests: `python composer_run.py FOLDER BATCHES`; it resumes if it can.

Without Composer the callback meets `composer_events`, which calls it as Composer's documentation says.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shrinkpoint as sp


def data() -> DataLoader[Any]:
    """Six batches of four, in an order that depends on the epoch alone, as Composer's own samplers have it."""
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    found = TensorDataset(x, x[:, :1] ** 2)
    return DataLoader(found, batch_size=4, sampler=DistributedSampler(found, 1, 0, seed=1))


def network() -> nn.Module:
    """Two layers with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Linear(64, 1))


def write(path: Path, batch: int, loss: float) -> None:
    """A line a batch."""
    with path.open("a") as out:
        print(batch, loss.hex(), file=out)


def main(folder: Path, batches: int, every: int | None = 4) -> None:
    """Train to so many batches under Composer itself."""
    from composer import Callback, Trainer
    from composer.models import ComposerModel

    from shrinkpoint.trainers.composer import CompressedCheckpoints

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return (outputs - batch[1]).square().mean()

    class Losses(Callback):  # type: ignore[misc]
        def batch_end(self, state: Any, logger: Any) -> None:
            write(folder / "losses.txt", int(state.timestamp.batch), float(state.loss.detach()))

    folder.mkdir(parents=True, exist_ok=True)
    model = Model()
    trainer = Trainer(
        model=model,
        train_dataloader=data(),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration=f"{batches}ba",
        callbacks=[CompressedCheckpoints(sp.Store(folder / "store", sp.presets.lossless()), every), Losses()],
        device="cpu",
        seed=3,
        progress_bar=False,
        log_to_console=False,
        loggers=[],
    )
    trainer.fit()
    trainer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
