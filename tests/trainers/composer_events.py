"""The part of Composer that a callback meets, after its documentation (0.32): events, their order, `State`."""

from __future__ import annotations

import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from .composer_run import data, network, write


class Callback:
    """Every event is a method that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda state, logger: None


def modules() -> dict[str, types.ModuleType]:
    """What `from composer.core import Callback` finds."""
    core = types.ModuleType("composer.core")
    core.Callback = Callback  # type: ignore[attr-defined]
    return {"composer": types.ModuleType("composer"), "composer.core": core}


class Timestamp:
    """Counts, and durations as timedelta."""

    def __init__(self) -> None:
        self.batch = self.epoch = self.batch_in_epoch = 0
        self.total_wct = timedelta()

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert isinstance(state["total_wct"], timedelta)
        vars(self).update(state)


def fit(callback: Any, folder: Path, batches: int) -> None:
    """As `Trainer(...)` and then `fit` go: seeded after AFTER_LOAD, batches passed over, checkpoints after the ends."""
    folder.mkdir(parents=True, exist_ok=True)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    now = Timestamp()
    state = types.SimpleNamespace(model=model, optimizers=(optimizer,), schedulers=(scheduler,), timestamp=now)

    def event(name: str) -> None:
        getattr(callback, name)(state, None)

    event("init")
    event("before_load")
    event("after_load")
    torch.manual_seed(3)
    event("fit_start")
    loader = data()
    while now.batch < batches:
        loader.sampler.set_epoch(now.epoch)  # type: ignore[attr-defined]
        event("epoch_start")
        for number, (x, y) in enumerate(loader):
            if number < now.batch_in_epoch:
                continue
            event("after_dataloader")
            event("batch_start")
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            now.batch += 1
            now.batch_in_epoch += 1
            now.total_wct += timedelta(milliseconds=1.5)
            event("batch_end")
            write(folder / "losses.txt", now.batch, float(loss.detach()))
            event("batch_checkpoint")
            if now.batch >= batches:
                break
        else:
            now.epoch += 1
            now.batch_in_epoch = 0
            event("epoch_end")
            event("epoch_checkpoint")
    event("fit_end")
    event("close")
