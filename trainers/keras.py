"""Keras 3 on the torch back end: a callback that saves compressed checkpoints at the end of epochs, and resumes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..codec.extras import install
from ..codec.state.kinds import Kind
from ..kernels.arguments import integer
from ..kernels.errors import BadArgumentError
from ..store.saver import Saver
from ..store.store import Store
from .fitting import differences, refuse
from .state import capture_rng, restore_rng

if TYPE_CHECKING:
    import keras
else:
    try:
        import keras
    except ImportError:
        raise ImportError(f"this adapter needs Keras 3: {install('keras')}, with KERAS_BACKEND=torch") from None


_FIRST = {"momentum", "m", "u"}
_SECOND = {"velocity", "velocity_hat", "v"}
"""As Adam, AdamW, Adamax, Nadam, Lamb, RMSprop and SGD of Keras call them."""
_PARTS = {"model", "optimizer", "epoch", "rng"}
_NUMBER = re.compile(r"_\d+(?=[/_:]|$)")
"""By what Keras tells the second layer without a name from the first one ("dense_1"), also in an optimizer's names."""


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
        self.saver = saver
        self.every = integer("every", every, 1)
        self._rng: Any = None

    def resume(self, model: Any, epoch: int | str | None = None) -> int:
        """Put a checkpoint into a built and compiled model; returns the epochs done, 0 for an empty store.

        Variables go by their names. Where a model is built anew, and Keras has numbered its layers otherwise ("dense_2"
        for "dense"), they go by their order, as with Keras's own `load_weights`.

        Args:
            model: as when it was saved.
            epoch: that one (or a tag) or an error; None: the newest that is intact.

        Raises:
            BadArgumentError: the model is not built or not compiled; the checkpoint is none of this callback; the
                variables are others (names, shapes, dtypes), which are listed. Nothing is changed then.
        """
        _check_model(model)
        store = self.saver.store if isinstance(self.saver, Saver) else self.saver
        if epoch is None and not store.steps():
            return 0
        state = store.load(epoch)
        if not isinstance(state, Mapping) or _PARTS - set(state):
            held = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__qualname__
            raise BadArgumentError(f"{store.url}: no checkpoint of CompressedBackup; it holds {held}")
        parts = _variables(model)
        saved = {part: _renumbered(state[part], mine) for part, mine in parts.items()}
        lines = []
        for part, mine in parts.items():
            arrays = {name: variable.value for name, variable in mine.items()}
            lines += [f"{part}: {line}" for line in differences(saved[part], arrays, dtypes=True)]
        refuse(lines, store.url)
        with torch.no_grad():
            for part, mine in parts.items():
                for name, variable in mine.items():
                    variable.assign(saved[part][name])
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


def _check_model(model: Any) -> None:
    """Refuse what has no variables yet, or no optimizer."""
    if not isinstance(model, keras.Model):
        raise BadArgumentError(f"model must be a keras.Model, not {type(model).__qualname__}")
    if not model.built or getattr(model, "optimizer", None) is None:
        todo = "compiled (model.compile)" if model.built else "built (give its input's shape, or say model.build)"
        raise BadArgumentError(f"the model {model.name} is not {todo}: it has no variables to save or to load yet")


def _variables(model: Any) -> dict[str, dict[str, Any]]:
    """Variables by their paths; of several of one path (Keras allows it) the later ones have a number.

    Those that an optimizer keeps for a parameter stand below the parameter's path: `net/first/kernel/velocity`.
    """
    optimizer = model.optimizer
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    # As Keras makes names of them: "adam/net_first_kernel_velocity"; the longest that fits is meant.
    owners = {v.path.replace("/", "_"): v.path for v in model.trainable_variables}
    table: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for part, found in (("model", model.variables), ("optimizer", optimizer.variables)):
        for variable in found:
            path = variable.path if part == "model" else _owned(variable.path, owners)
            name, number = path, 1
            while name in table[part]:
                number += 1
                name = f"{path}:{number}"
            table[part][name] = variable
    return table


def _renumbered(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved part under the names it has here, where these differ only in Keras's own numbers; else as it is."""
    if set(saved) == set(mine):
        return saved
    before, now = ([_NUMBER.sub("", name) for name in table] for table in (saved, mine))
    return dict(zip(mine, saved.values(), strict=True)) if before == now else saved


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
