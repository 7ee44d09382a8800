"""Accelerate: `save_state` and `load_state` with compressed weights and optimizers."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..codec.errors import BadArgumentError, MissingParentError
from ..store.frozen_sets import Frozen
from ..store.saver.saver import Saver
from ..store.store import Store
from . import model_state
from .fully_sharded import ShardedSaves, check_version, load_sharded, pointer_to_shards, sharded_state
from .pointers import POINTER, PointedSaves, WholeSaves, drop, is_placeholder, load_at, read_pointer, steps_in_use
from .preemption import Preemption
from .save_timing import store_behind
from .state import load_optimizer, plain

_STAND_IN = "optimizer.bin"
"""Name of the placeholder that replaces an optimizer's state."""


class CompressedStates:
    """The hooks of one Accelerator, as `compress_states` returns them."""

    def __init__(self, accelerator: Any, saver: Saver | Store, frozen: str | None = None) -> None:
        self.accelerator = accelerator
        self.store = store_behind(saver)
        self._saves = WholeSaves(saver)
        self._is_background = isinstance(saver, Saver)
        self.frozen = model_state.check_frozen(frozen)
        self._shards: ShardedSaves | None = None
        self._files: Any = None
        self._hidden: tuple[list[Any], list[Any]] = ([], [])
        self._failed: Exception | None = None
        self._strict = True
        self._stand_ins: list[tuple[Any, str]] = []
        self._handles = [
            accelerator.register_save_state_pre_hook(self._save),
            accelerator.register_load_state_pre_hook(self._load),
        ]
        accelerator.save_state = self._save_state
        accelerator.load_state = self._load_state

    def remove(self) -> None:
        """Remove the hooks, once nothing is in flight; may be called twice."""
        self.wait()
        for handle in self._handles:
            handle.remove()
        if self._handles:
            del self.accelerator.save_state, self.accelerator.load_state
        self._handles = []

    def wait(self) -> None:
        """Wait until all saves are durable.

        Raises:
            Exception: what the save raised.
        """
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed
        for saves in (self._saves, self._shards, self._files):
            if saves is not None:
                saves.wait()

    @property
    def _is_sharded(self) -> bool:
        """Return whether models are sharded by FSDP2; refuse what cannot be saved then."""
        if getattr(self.accelerator.distributed_type, "value", None) != "FSDP":
            return False
        check_version(self.accelerator.state.fsdp_plugin)
        if self.frozen is not None:
            raise BadArgumentError("frozen is not for sharded checkpoints, as those of FSDP are")
        return True

    def _engine_files(self) -> Any:
        """Return the compressed files of the DeepSpeed engine; None without DeepSpeed."""
        if getattr(self.accelerator.distributed_type, "value", None) != "DEEPSPEED":
            return None
        if self.frozen is not None or len(self.accelerator._models) != 1:
            raise BadArgumentError("with DeepSpeed one model is needed, and frozen must be None")
        from .deepspeed import attach

        engine = self.accelerator._models[0]
        if self._files is None or self._files.engine is not engine:
            settings = {"in_tag": False, "waits": True, "background": self._is_background}
            self._files = attach(engine, lambda _: self.store, **settings)
        return self._files

    @contextlib.contextmanager
    def _hiding(self) -> Iterator[None]:
        """Hide sharded models and optimizers from Accelerate, which would save or load them itself."""
        accelerator = self.accelerator
        if not self._is_sharded:
            yield
            return
        self._hidden = accelerator._models, accelerator._optimizers
        accelerator._models, accelerator._optimizers = [], []
        try:
            yield
        finally:
            accelerator._models, accelerator._optimizers = self._hidden

    def _pairs(self, models: list[Any], optimizers: list[Any]) -> list[tuple[Any, Any]]:
        """Return each model with its optimizer; Accelerate pairs them by their order."""
        if len(optimizers) > len(models):
            raise BadArgumentError(f"{len(optimizers)} optimizers of {len(models)} sharded models; one each is needed")
        bare = [getattr(one, "optimizer", one) for one in optimizers]
        whole = [self.accelerator.unwrap_model(one, keep_torch_compile=False) for one in models]
        return list(itertools.zip_longest(whole, bare))

    def _save_shards(self, output_dir: str) -> ShardedSaves:
        """Save the shards of all ranks, after Accelerate has written the rest of the folder."""
        if self._shards is None:
            self._shards = ShardedSaves(self.store, background=self._is_background)
        self._shards.save(os.path.join(output_dir, POINTER), sharded_state(self._pairs(*self._hidden)))
        return self._shards

    def _load_shards(self, input_dir: str) -> None:
        """Load a checkpoint into the hidden models, compressed or as Accelerate writes it."""
        path, (sharded, optimizers) = os.path.join(input_dir, POINTER), self._hidden
        if read_pointer(path) is not None:
            if pointer_to_shards(path, self.store) is None:
                raise BadArgumentError(f"{path}: this checkpoint was saved without FSDP; load it without FSDP")
            load_sharded(path, self.store, self._pairs(sharded, optimizers))
            return
        from accelerate.utils import load_fsdp_model, load_fsdp_optimizer

        plugin = self.accelerator.state.fsdp_plugin
        for number, model in enumerate(sharded):
            load_fsdp_model(plugin, self.accelerator, model, input_dir, number)
        for number, one in enumerate(optimizers):
            load_fsdp_optimizer(plugin, self.accelerator, one, sharded[number], input_dir, number)

    def _save_state(self, *args: Any, **keywords: Any) -> Any:
        """Run `save_state` after pending saves, because it removes old folders first."""
        self.wait()
        project = self.accelerator.project_configuration
        if project.automatic_checkpoint_naming and project.total_limit and self.accelerator.is_main_process:
            _remove_interrupted(os.path.join(self.accelerator.project_dir, "checkpoints"))
        self.accelerator.wait_for_everyone()  # each process looks whether the new folder exists
        files = self._engine_files()
        try:
            with self._hiding():
                folder = type(self.accelerator).save_state(self.accelerator, *args, **keywords)
            saves: PointedSaves = self._saves
            if self._is_sharded:
                saves = self._save_shards(folder)
            elif files is not None:
                saves = files.finish()
            if self.accelerator.is_main_process:
                saves.then(lambda store: self._rotate(store, folder))
            return folder
        finally:
            self._clear()

    def _load_state(self, *args: Any, **keywords: Any) -> Any:
        """Run `load_state`, and then restore the optimizers' own methods, even after an error.

        The main process saves, and the others may not look before it has. The next save raises the error of a failed
        one: a load can still use the folders that exist, and no process is left waiting.
        """
        try:
            self.wait()
        except Exception as e:
            self._failed = e
        self.accelerator.wait_for_everyone()
        self._strict = bool(keywords.get("strict", True))
        self._engine_files()
        try:
            with self._hiding():
                return type(self.accelerator).load_state(self.accelerator, *args, **keywords)
        finally:
            self._strict = True
            self._clear()

    def _frozen_of(self, model: Any, tree: Any) -> dict[str, Any]:
        """Return the frozen parameters of a checkpoint: the model's own, if they are the same."""
        found = Frozen.of_tree({"frozen": tree})
        if found is None:
            return {}
        if model_state.frozen_digest(model, found.names) != found.digest:
            return model_state.load_frozen(self.store, found)
        own = model.state_dict()
        return {name: own[name] for name in found.names if name in own}

    def check(self, preemption: Preemption, step: int, output_dir: str | None = None) -> None:
        """Save and exit if a scheduler's signal has come; call it after each training step.

        Args:
            preemption: signals, grace and exit code.
            step: training steps done.
            output_dir: as for `save_state`.

        Raises:
            Preempted: a SystemExit, once the checkpoint that was chosen is durable.
        """
        preemption.finish(self.store, step, lambda: self.accelerator.save_state(output_dir), self.wait)

    def _replace_once(self, thing: Any, name: str, replacement: Callable[..., Any]) -> None:
        """Replace the next call of a method, because Accelerate's hooks cover models only."""

        def stand_in(*args: Any, **keywords: Any) -> Any:
            del thing.__dict__[name]
            return replacement(*args, **keywords)

        thing.__dict__[name] = stand_in
        self._stand_ins.append((thing, name))

    def _clear(self) -> None:
        """Remove replacements of methods that Accelerate did not call."""
        for thing, name in self._stand_ins:
            thing.__dict__.pop(name, None)
        self._stand_ins = []

    def _save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        if self._is_sharded:  # the shards are saved when the rest is written
            for number in range(len(self._hidden[1]) if self.accelerator.is_main_process else 0):
                name = _STAND_IN if number == 0 else _STAND_IN.replace(".", f"_{number}.")
                torch.save({"shrinkpoint": POINTER}, os.path.join(output_dir, name))
            self.accelerator.wait_for_everyone()  # a folder with anything in it has the placeholder
            return
        if self._files is not None:
            return
        if len(weights) != len(self.accelerator._models):
            raise BadArgumentError(
                f"{len(weights)} of {len(self.accelerator._models)} models were handed over: Megatron saves "
                "its state itself (use its own format), or another hook took the weights"
            )
        optimizers = self.accelerator._optimizers
        kept_out = [model_state.frozen_record(model, self.frozen) for model in self.accelerator._models]
        for model, found in zip(self.accelerator._models, kept_out, strict=True):
            model_state.store_once(self.store, model, found)
        if self.accelerator.is_main_process:
            state = {
                "models": [plain(model_state.without_frozen(*pair)) for pair in zip(weights, kept_out, strict=True)],
                "optimizers": [plain(one.state_dict()) for one in optimizers],
            }
            if any(found is not None for found in kept_out):
                state["frozen"] = [None if found is None else found.to_tree() for found in kept_out]
            self._saves.save(os.path.join(output_dir, POINTER), state)
        # Accelerate does not write weights that are removed from this list.
        weights.clear()
        for one in optimizers:
            self._replace_once(one, "state_dict", lambda: {"shrinkpoint": POINTER})

    def _rotate(self, store: Store, output_dir: str) -> None:
        """Remove steps whose folders Accelerate's `total_limit` has removed."""
        project = self.accelerator.project_configuration
        if not project.automatic_checkpoint_naming or project.total_limit is None:
            return
        home = Path(os.path.abspath(output_dir)).parent
        # Also renamed copies of folders, and saves to other places in the project.
        found = [path for above in (home, home.parent) for path in above.glob(f"*/{POINTER}")]
        drop(store, set(store.steps()) - steps_in_use(store, found))

    def _load(self, models: list[Any], input_dir: str) -> None:
        if self._files is not None:  # the engine has loaded it
            return
        path = os.path.join(input_dir, POINTER)
        if self._is_sharded and (read_pointer(path) is not None or not _is_interrupted(input_dir)):
            self._load_shards(input_dir)
            return
        if read_pointer(path) is None:
            if _is_interrupted(input_dir):
                raise MissingParentError(f"{input_dir}: no {POINTER} in it: its save was cut off; load the one before")
            return
        optimizers = self.accelerator._optimizers
        if pointer_to_shards(path, self.store) is not None:
            load_sharded(path, self.store, self._pairs(models, optimizers))
            models.clear()
            for one in optimizers:
                self._replace_once(one, "load_state_dict", lambda _file: None)
            return
        state = load_at(path, store=self.store)
        for name, mine in (("models", models), ("optimizers", optimizers)):
            if len(state[name]) != len(mine):
                raise BadArgumentError(f"{path}: {len(state[name])} {name} were saved, {len(mine)} are prepared")
        lines = []
        for number, (one, saved) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
            lines += [f"optimizer {number}: {line}" for line in model_state.group_differences(saved, one.state_dict())]
        model_state.refuse(lines, path)
        trees = zip(models, state["models"], state.get("frozen", [None] * len(models)), strict=True)
        parts = [(model, one | self._frozen_of(model, found)) for model, one, found in trees]
        lines = []
        for model, saved in parts:
            lines += model_state.differences(saved, model.state_dict(), names=self._strict)
        model_state.load_states(parts, lines, path, strict=self._strict)
        models.clear()
        for one, saved in zip(optimizers, state["optimizers"], strict=True):
            self._replace_once(one, "load_state_dict", lambda _file, one=one, saved=saved: load_optimizer(one, saved))


def compress_states(accelerator: Any, saver: Saver | Store, *, frozen: str | None = None) -> CompressedStates:
    """Let an Accelerator save weights and optimizers to a store, and load them from it.

    The folder that `save_state` writes then holds a pointer to a step of the store. Small parts (schedulers, scaler,
    samplers, random number generators) are written as usual. Folders without a pointer are loaded as usual. With
    automatic naming and a `total_limit` the store belongs to that project alone: steps of removed folders are removed
    from it, and folders of interrupted saves are removed before Accelerate counts them. With FSDP2 each rank writes its
    shards, and any number of ranks loads them, also without FSDP.

    Args:
        accelerator: an `accelerate.Accelerator`.
        saver: where to, not inside the folder `checkpoints` of an automatically named project. A Store: `save_state`
            returns when the checkpoint is durable. A Saver: `save_state` returns when the state is copied; the pointer
            appears when the checkpoint is durable, and the next `save_state` waits for that before Accelerate removes
            older folders.
        frozen: where frozen parameters are kept, see `TrainingState`; default None: in each checkpoint.

    Returns:
        The hooks, to be removed by `remove()`; `wait()` waits until all saves are durable.

    Raises:
        BadArgumentError: not an Accelerator, or one whose states are compressed already; no Saver or Store; a Saver
            with `keep`, which would remove steps that folders point to; a Saver with a `total_limit` of 1: Accelerate
            removes the old folder first, and a run that is then killed would have none.

    Example:
        >>> compress_states(None, None)
        Traceback (most recent call last):
        ...
        shrinkpoint.kernels.errors.BadArgumentError: accelerator must be an accelerate.Accelerator, not NoneType
    """
    if not hasattr(accelerator, "register_save_state_pre_hook"):
        raise BadArgumentError(f"accelerator must be an accelerate.Accelerator, not {type(accelerator).__qualname__}")
    if isinstance(getattr(accelerator.save_state, "__self__", None), CompressedStates):
        raise BadArgumentError("this accelerator's states are compressed already; say remove() to the hooks before")
    store_behind(saver)  # refuses other objects before the accelerator is changed
    project = accelerator.project_configuration
    if isinstance(saver, Saver) and project.automatic_checkpoint_naming and project.total_limit == 1:
        raise BadArgumentError("total_limit is 1; with a Saver it must be at least 2, for the old folder goes first")
    return CompressedStates(accelerator, saver, frozen)


def _remove_interrupted(home: str) -> None:
    """Remove folders of interrupted saves, which Accelerate would count as checkpoints."""
    names = os.listdir(home) if os.path.isdir(home) else []
    for folder in (os.path.join(home, name) for name in names if re.fullmatch(r"checkpoint_[0-9]+", name)):
        if read_pointer(os.path.join(folder, POINTER)) is None and _is_interrupted(folder):
            shutil.rmtree(folder)


def _is_interrupted(folder: str) -> bool:
    """Return whether a folder without a pointer file comes from an interrupted save."""
    files = [path for path in Path(folder).rglob("*") if path.is_file()]
    return not files or any(is_placeholder(path) for path in files if path.suffix in (".bin", ".pt"))
