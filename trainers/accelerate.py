"""Accelerate: `save_state` and `load_state` with weights and optimizers compressed, through their own hooks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from ..kernels.errors import BadArgumentError
from ..store.store import Store
from .pointers import drop, load_at, read_pointer, save_at
from .state import plain

POINTER = "shrinkpoint.json"


class CompressedStates:
    """The hooks of one Accelerator; `remove` takes them off again. Made by `compress_states`."""

    def __init__(self, accelerator: Any, store: Store) -> None:
        self.accelerator = accelerator
        self.store = store
        self._handles = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]

    def remove(self) -> None:
        """Take the hooks off; may be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        if len(weights) != len(self.accelerator._models):
            raise BadArgumentError("FSDP, DeepSpeed and Megatron save their states themselves; use their own formats")
        optimizers = self.accelerator._optimizers
        if self.accelerator.is_main_process:
            state = {
                "models": [plain(one) for one in weights],
                "optimizers": [plain(one.state_dict()) for one in optimizers],
            }
            save_at(os.path.join(output_dir, POINTER), self.store, state)
            self._rotate(output_dir)
        # What is taken off the list is not written raw.
        weights.clear()
        for one in optimizers:
            _once(one, "state_dict", lambda: {"shrinkpoint": POINTER})

    def _rotate(self, output_dir: str) -> None:
        """Follow Accelerate's `total_limit`, which has removed folders by now."""
        project = self.accelerator.project_configuration
        if not project.automatic_checkpoint_naming or project.total_limit is None:
            return
        home = os.path.dirname(os.path.abspath(output_dir))
        folders = [name for name in os.listdir(home) if re.fullmatch(r"checkpoint_[0-9]+", name)]
        found = [read_pointer(os.path.join(home, name, POINTER)) for name in folders]
        drop(self.store, set(self.store.steps()) - {pointer.step for pointer in found if pointer is not None})

    def _load(self, models: list[Any], input_dir: str) -> None:
        path = os.path.join(input_dir, POINTER)
        if read_pointer(path) is None:
            return
        state = load_at(path, store=self.store)
        optimizers = self.accelerator._optimizers
        for name, mine in (("models", models), ("optimizers", optimizers)):
            if len(state[name]) != len(mine):
                raise BadArgumentError(f"{path}: {len(state[name])} {name} were saved, {len(mine)} are prepared")
        for model, saved in zip(models, state["models"], strict=True):
            model.load_state_dict(saved)
        models.clear()
        for one, saved in zip(optimizers, state["optimizers"], strict=True):
            _once(one, "load_state_dict", lambda _file, one=one, saved=saved: one.load_state_dict(saved))


def compress_states(accelerator: Any, store: Store) -> CompressedStates:
    """Let an Accelerator's `save_state` put weights and optimizers into a store, and `load_state` take them from it.

    The folder that `save_state` writes then holds a pointer to a step of the store, and what is small (schedulers,
    scaler, samplers, random number generators) as ever. Folders without a pointer are loaded as before. With automatic
    naming and a `total_limit` the store belongs to that project alone: what is rotated out is removed from it.

    Args:
        accelerator: an `accelerate.Accelerator`.
        store: where to; not inside the folder `checkpoints` of an automatically named project.

    Returns:
        The hooks, to be removed by `remove()`.

    Raises:
        BadArgumentError: not an Accelerator, or not a Store.

    Example:
        >>> compress_states(None, None)
        Traceback (most recent call last):
        ...
        shrinkpoint.kernels.errors.BadArgumentError: accelerator must be an accelerate.Accelerator, not NoneType
    """
    if not hasattr(accelerator, "register_save_state_pre_hook"):
        raise BadArgumentError(f"accelerator must be an accelerate.Accelerator, not {type(accelerator).__qualname__}")
    if not isinstance(store, Store):
        raise BadArgumentError(f"store must be a Store, not {type(store).__qualname__}")
    return CompressedStates(accelerator, store)


def _once(thing: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let the next call of a method be answered by something else; Accelerate's hooks cover models alone."""

    def stand_in(*args: Any, **keywords: Any) -> Any:
        del thing.__dict__[name]
        return replacement(*args, **keywords)

    thing.__dict__[name] = stand_in
