"""Keras 3 on the torch back end: a callback that saves compressed checkpoints at the end of epochs, and resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..codec.kinds import Kind
from ..kernels.errors import BadArgumentError
from ..store.saver import Saver
from ..store.store import Store
from .state import capture_rng, restore_rng

if TYPE_CHECKING:
    import keras
else:
    try:
        import keras
    except ImportError:
        raise ImportError("this adapter needs Keras 3: pip install keras, with KERAS_BACKEND=torch") from None


_FIRST = {"momentum", "m", "u"}
_SECOND = {"velocity", "velocity_hat", "v"}
"""As Adam, AdamW, Adamax, Nadam, Lamb, RMSprop and SGD of Keras call them."""


class CompressedBackup(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the variables of model and optimizer and the random number generators at the end of each epoch.

    `model.fit(..., callbacks=[backup], initial_epoch=backup.resume(model))` goes on where the newest checkpoint is.

    Args:
        saver: a Saver, in the background; or a Store.
        every: epochs from one save to the next, 1 or more.

    Raises:
        BadArgumentError: another back end than torch; an argument of the wrong kind.
    """

    def __init__(self, saver: Saver | Store, every: int = 1) -> None:
        super().__init__()
        if keras.backend.backend() != "torch":
            raise BadArgumentError(f"the Keras back end is {keras.backend.backend()}; set KERAS_BACKEND=torch")
        if not isinstance(saver, (Saver, Store)):
            raise BadArgumentError(f"saver must be a Saver or a Store, not {type(saver).__qualname__}")
        if type(every) is not int or every < 1:
            raise BadArgumentError(f"every is {every!r}; it must be an integer of at least 1")
        self.saver = saver
        self.every = every
        self._rng: Any = None

    def resume(self, model: Any, epoch: int | str | None = None) -> int:
        """Put a checkpoint into a built and compiled model; returns the epochs done, 0 for an empty store.

        Args:
            model: as when it was saved.
            epoch: that one (or a tag) or an error; None: the newest that is intact.

        Raises:
            BadArgumentError: the variables are others, which are listed; nothing is changed then.
        """
        store = self.saver.store if isinstance(self.saver, Saver) else self.saver
        if epoch is None and not store.steps():
            return 0
        state = store.load(epoch)
        parts = _variables(model)
        lines = []
        for part, mine in parts.items():
            saved = state[part]
            lines += [f"{part}: {name}: not in the checkpoint" for name in mine if name not in saved]
            lines += [f"{part}: {name}: not in the model" for name in saved if name not in mine]
            for name, variable in mine.items():
                if name in saved and tuple(variable.shape) != tuple(saved[name].shape):
                    before, now = tuple(saved[name].shape), tuple(variable.shape)
                    lines.append(f"{part}: {name}: shape {before} in the checkpoint, {now} in the model")
        if lines:
            shown = "\n  ".join(lines[:20])
            raise BadArgumentError(f"{store.url}: the checkpoint does not fit; nothing was changed\n  {shown}")
        with torch.no_grad():
            for part, mine in parts.items():
                for name, variable in mine.items():
                    variable.assign(state[part][name])
        self._rng = state["rng"]
        return int(state["epoch"])

    def on_train_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        if (epoch + 1) % self.every:
            return
        parts = {
            part: {name: variable.value.detach() for name, variable in mine.items()}
            for part, mine in _variables(self.model).items()
        }
        state = {**parts, "epoch": epoch + 1, "rng": capture_rng()}
        self.saver.save(epoch + 1, state, kinds=_kinds(parts["optimizer"], _class_of(self.model.optimizer)))

    def on_train_end(self, logs: Any = None) -> None:
        """Called by Keras; what is in flight is durable afterwards."""
        if isinstance(self.saver, Saver):
            self.saver.wait()


def _variables(model: Any) -> dict[str, dict[str, Any]]:
    """Variables by their paths; of several of one path (Keras allows it) the later ones have a number.

    Those that an optimizer keeps for a parameter stand below the parameter's path: `net/first/kernel/velocity`.
    """
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    # As Keras makes names of them: "adam/net_first_kernel_velocity"; the longest that fits is meant.
    owners = {v.path.replace("/", "_"): v.path for v in model.trainable_variables}
    table: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for part, found in (
        ("model", model.variables),
        ("optimizer", optimizer.variables if optimizer is not None else []),
    ):
        for variable in found:
            path = variable.path if part == "model" else _owned(variable.path, owners)
            name, number = path, 1
            while name in table[part]:
                number += 1
                name = f"{path}:{number}"
            table[part][name] = variable
    return table


def _owned(path: str, owners: dict[str, str]) -> str:
    last = path.rpartition("/")[2]
    fitting = [flat for flat in owners if last.startswith(flat + "_")]
    if not fitting:
        return path
    flat = max(fitting, key=len)
    return f"{owners[flat]}/{last[len(flat) + 1 :]}"


def _class_of(optimizer: Any) -> str:
    """Name of an optimizer's class, of the one within where its loss is scaled."""
    return type(getattr(optimizer, "inner_optimizer", optimizer)).__name__


def _kinds(optimizer: dict[str, Any], owner: str) -> dict[str, Kind]:
    """What is a moment of which parameter; everything else of an optimizer is exact."""
    table = {}
    for name in optimizer:
        parameter, _, entry = name.rpartition("/")
        role = "first moment" if entry in _FIRST else "second moment" if entry in _SECOND else "state"
        table[f"optimizer/{name}"] = Kind("other", role, parameter, owner)
    return table
