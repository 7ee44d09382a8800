"""A small Lightning run for the tests: `python lightning_run.py FOLDER EPOCHS [background]`.

`python lightning_run.py FOLDER EPOCHS ddp [CHECKPOINT]`: two processes, losses in `FOLDER/RANK/losses.txt`.
`python lightning_run.py FOLDER EPOCHS search HOW [CHECKPOINT]`: the same with a search at each checkpoint; what each
process found is in `FOLDER/RANK/found.json`. HOW: none (no search), plain, ahead, background; fails, dies, alone,
elsewhere: what is wrong there.
`python lightning_run.py FOLDER EPOCHS average WHICH [CHECKPOINT]`: two processes, with an average of the weights.
`python lightning_run.py FOLDER EPOCHS sharded HOW [CHECKPOINT]`: two processes, each with a part of the model (FSDP2).
HOW: background, search; distributed (Lightning would save by itself).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

import shrinkpoint as sp
from shrinkpoint.searching import Cube
from shrinkpoint.trainers.lightning import CompressedCheckpoints, CompressedIO


class Model(pl.LightningModule):
    """Two layers with dropout."""

    def __init__(self, width: int, rate: float, log_to: str | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="log_to")
        self.first, self.last = torch.nn.Linear(8, width), torch.nn.Linear(width, 8)
        self.log_to = log_to

    def hidden(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.first(batch))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(self.hidden(batch[0]), 0.2)
        loss = (self.last(hidden) - batch[0].flip(1)).square().mean()
        self.log("loss", loss)
        if self.log_to is not None:
            with open(self.log_to, "a") as out:
                print(self.global_step, float(loss.detach()).hex(), batch[0][:, 0].tolist(), file=out)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Normed(Model):
    """A model whose buffers differ between processes."""

    def __init__(self, width: int, rate: float, log_to: str | None = None) -> None:
        super().__init__(width, rate, log_to)
        self.norm = torch.nn.BatchNorm1d(width)

    def hidden(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.first(batch)))


class Sharded(Model):
    """A model that is sharded over the processes."""

    def configure_model(self) -> None:
        for layer in (self.first, self.last):
            if not isinstance(layer, FSDPModule):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])  # type: ignore[index]


class Searching:
    """A search under a threshold that records its arguments and results."""

    def __init__(self, kind: type[Model] = Model, seed: int = 3) -> None:
        self.given: list[dict[str, Any]] = []
        self.found: list[sp.SearchResult] = []
        self.kind = kind
        self.data = torch.randn(64, 8, generator=torch.Generator().manual_seed(seed))

    def evaluate(self, state: dict[str, Any]) -> float:
        probe = self.kind(256, 0.01).eval()
        probe.load_state_dict(state["state_dict"])
        with torch.no_grad():
            return float((probe.last(probe.hidden(self.data)) - self.data.flip(1)).square().mean())

    def __call__(self, state: dict[str, Any], **given: Any) -> sp.SearchResult:
        cube = Cube(bins=(4, 8, 16, 32), prune=(0.0, 0.2), protect=(0.0005,))
        self.given.append(given)
        options = dataclasses.replace(given.get("options") or sp.SearchOptions(), cube=cube, progress=False)
        self.found.append(sp.search(state, self.evaluate, 0.05, **given | {"options": options}))
        return self.found[-1]


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
    strategy: Any = "ddp",
    width: int = 64,
    kind: type[Model] = Model,
    callbacks: Any = (),
) -> Model:
    """Train four steps an epoch, save after each epoch, and write losses to `folder/losses.txt`."""
    home = folder / os.environ.get("LOCAL_RANK", "0") if ddp else folder
    home.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = kind(width, 0.01, str(home / "losses.txt"))
    data = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4, shuffle=True)
    if ddp:  # each process drops others
        torch.manual_seed(1 + int(home.name))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2 if ddp else 1,
        strategy=strategy if ddp else "auto",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[plugin or CompressedIO(cfg or sp.presets.lossless())],
        callbacks=[
            checkpoint or ModelCheckpoint(folder, save_top_k=top, monitor="epoch", mode="max"),
            CompressedCheckpoints(rng=rng, sensitivity=sensitivity, search=search),
            *callbacks,
        ],
    )
    trainer.fit(model, data, ckpt_path=resume)
    return model


class Faulty(Searching):
    """A search with an error in one process, or without knowledge of the others."""

    how = ""

    def evaluate(self, state: dict[str, Any]) -> float:
        if os.environ.get("LOCAL_RANK") == "1" and len(self.given) == 2:
            if self.how == "fails":
                raise OSError("no data")
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().evaluate(state)

    def __call__(self, state: dict[str, Any], **given: Any) -> sp.SearchResult:
        if self.how == "alone":
            given["group"] = None
        return super().__call__(state, **given)


class Elsewhere(CompressedIO):
    """A plugin with a different store folder in each process."""

    def _root(self, path: Any) -> str:
        return os.path.join(super()._root(path), os.environ.get("LOCAL_RANK", "0"))


def search_together(folder: Path, epochs: int, how: str, resume: Path | None) -> None:
    """Search in two processes; write `found.json` and `error.txt` for each rank."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    home = folder / str(rank)
    searching = Faulty(Normed, 3 + rank * (how == "alone"))
    searching.how = how
    cfg = sp.Config(ahead=True) if how == "ahead" else None
    plugin = Elsewhere() if how == "elsewhere" else CompressedIO(cfg, background=how == "background")
    search = None if how == "none" else searching
    keep = ModelCheckpoint(folder, save_top_k=1, monitor="epoch", mode="max")
    try:
        fit(
            folder, epochs, resume, plugin=plugin, checkpoint=keep, search=search,
            sensitivity=4, ddp=True, width=256, kind=Normed,
        )  # fmt: skip
    except BaseException as e:
        (home / "error.txt").write_text(f"{type(e).__name__}: {e}")
        raise
    finally:
        (home / "found.json").write_text(json.dumps([one.to_json() for one in searching.found]))


def sharded(folder: Path, epochs: int, how: str, resume: Path | None) -> None:
    """Train a sharded model in two processes; write `found.json` and `error.txt`."""
    home = folder / os.environ.get("LOCAL_RANK", "0")
    searching = Searching()
    plugin = CompressedIO(None if how == "search" else sp.presets.lossless(), background=how == "background")
    parts = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=how == "distributed"
    )
    try:
        fit(
            folder, epochs, resume, plugin=plugin, top=1 if how == "background" else 2, kind=Sharded, ddp=True,
            strategy=parts, sensitivity=2, width=256 if how == "search" else 64,
            search=searching if how == "search" else None,
        )  # fmt: skip
        assert not plugin._savers, "what is in flight is waited for"
    except BaseException as e:
        (home / "error.txt").write_text(f"{type(e).__name__}: {e}")
        raise
    finally:
        (home / "found.json").write_text(json.dumps([one.to_json() for one in searching.found]))


AVERAGES: dict[str, Any] = {
    "all": WeightAveraging,
    "ema": functools.partial(EMAWeightAveraging, decay=0.9),
    "swa": functools.partial(StochasticWeightAveraging, swa_lrs=0.005, swa_epoch_start=2, annealing_epochs=2),
}


def averaged(
    folder: Path, epochs: int, which: str, resume: Path | None = None, *, ddp: bool = False, **how: Any
) -> Model:
    """Train with one of Lightning's weight averages, and keep all checkpoints."""
    keep = ModelCheckpoint(folder, save_top_k=-1, monitor="epoch", mode="max")
    return fit(folder, epochs, resume, checkpoint=keep, callbacks=[AVERAGES[which]()], kind=Normed, ddp=ddp, **how)


if __name__ == "__main__":
    place, number, *how = sys.argv[1:]
    if how[:1] == ["search"]:
        search_together(Path(place), int(number), how[1], Path(how[2]) if how[2:] else None)
    elif how[:1] == ["sharded"]:
        sharded(Path(place), int(number), how[1], Path(how[2]) if how[2:] else None)
    elif how[:1] == ["average"]:
        averaged(Path(place), int(number), how[1], Path(how[2]) if how[2:] else None, ddp=True)
    elif how[:1] == ["ddp"]:
        fit(Path(place), int(number), Path(how[1]) if how[1:] else None, ddp=True)
    else:
        in_background = CompressedIO(sp.presets.lossless(), background=True) if how else None
        fit(Path(place), int(number), plugin=in_background, top=1 if how else 2)
