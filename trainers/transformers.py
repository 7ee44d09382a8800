"""Transformers: a `Trainer` with compressed checkpoints.

`class MyTrainer(CompressedCheckpoints, Trainer)` writes no raw weights or moments. If subclassing is impossible, add
`CompressCallback()`, which compresses the files that Trainer has written. Needs `transformers` and `accelerate`.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..codec.config import Config
from ..codec.evidence.module import kinds
from ..codec.extras import install
from ..codec.format.bounded_json import check_limits
from ..codec.named_presets import check_config
from ..kernels.errors import BadArgumentError, ShrinkpointWarning
from ..store.files import is_damage
from ..store.frozen_sets import Frozen
from ..store.local import MOST_JSON, check_link, read_file
from ..store.store import Store
from . import model_state, pointers, required
from .fully_sharded import ShardedSaves, check_version, load_sharded, pointer_to_shards, sharded_state
from .pointers import FOLDER, POINTER, PathLike, WholeSaves, drop_unreferenced
from .preemption import Choice, Preemption
from .state import load_optimizer, plain

with required("this adapter needs Transformers", install("transformers")):
    from transformers import TrainerCallback

_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")
_WEIGHTS = "model.safetensors"
_MODEL = "[mf]*/*"
"""Paths below `model` and `frozen`: a glob of its own for `frozen` would be an error without such paths."""
_ADAPTER = "adapter_model.safetensors"
_PARTS = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt"}


class CompressedCheckpoints:
    """Mixin for `Trainer`: checkpoint folders point into the store `output_dir/shrinkpoint`.

    The rest of a folder (configuration, tokenizer, trainer state, random number generators) is as Trainer writes it;
    `trainer.train(resume_from_checkpoint=...)`, `save_total_limit`, `load_best_model_at_end` and `save_only_model`
    work. `save_model()` outside a checkpoint writes an ordinary model.

    With FSDP2 each rank writes its shards, and any number of ranks resumes, also without FSDP; with DeepSpeed the same
    number resumes. FSDP1, and `frozen` or `compact` with either, are refused.

    With a PEFT model each checkpoint holds the adapters and their optimizer; the base model is named by its hub name or
    folder, and its hash is compared on resume.

    With `background = True` a `Saver` copies the state, and training goes on at once. A folder is complete once the
    pointer is in it, and folders beyond `save_total_limit` are removed only then. When `train` returns, all checkpoints
    are durable. `resume_from_checkpoint=True` takes the newest complete folder, and warns of newer ones.

    Attributes:
        compression: configuration, a class attribute or one set before training; default `Config()`.
        background: whether training goes on during a save; default False.
        compact: in the background, shorten chains between saves, see `Saver`; default None: never.
        frozen: where frozen parameters are kept, see `TrainingState`; default None: in each checkpoint, but for a PEFT
            model by reference.

    Raises:
        BadArgumentError: when training begins, `compact` without `background`, or out of range.

    Example:
        >>> from transformers import Trainer
        >>> class SmallTrainer(CompressedCheckpoints, Trainer):
        ...     compression = Config(max_rel_error=0.05)
    """

    compression: Config = Config()
    background: bool = False
    compact: float | None = None
    frozen: str | None = None

    args: Any
    state: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any

    _store: Store | None = None
    _weights: dict[str, Any] | None = None
    _frozen: Frozen | None = None
    _saver: WholeSaves | ShardedSaves | None = None
    _files: Any = None
    _limit: int | None = None

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **keywords: Any) -> Any:
        """Train as Trainer does, then make the last save durable."""
        pointers.check_compact(self.compact, background=self.background)
        if getattr(self.args.save_strategy, "value", self.args.save_strategy) != "no":
            _ = self._is_sharded  # refuses before the first step what could not be saved after it
            if self._is_deepspeed:
                self._attach_engine()
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_complete(self.args.output_dir) or True
        trainer: Any = super()
        try:
            found = trainer.train(resume_from_checkpoint, *args, **keywords)
        except BaseException:
            self._end(quiet=True)
            raise
        self._end()
        return found

    def _end(self, quiet: bool = False) -> None:
        """Make the save in flight durable, and remove the steps whose folders Trainer has removed."""
        saver, self._saver = self._saver, None
        with contextlib.suppress(*[Exception] if quiet else []):
            if saver is not None:
                saver.close()
            if self._store is not None and self.args.should_save and self.args.save_total_limit:
                drop_unreferenced(self._store, POINTER)

    def _settle(self) -> None:
        if self._saver is not None:
            self._saver.wait()

    def _the_store(self, folder: PathLike) -> Store:
        """Return the store next to a checkpoint folder."""
        home = os.path.join(os.path.dirname(os.path.abspath(folder)), FOLDER)
        if self._store is None or self._store.url != home:
            self._store = Store(home, check_config(self.compression))
        return self._store

    def _bare(self) -> Any:
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    @property
    def _is_deepspeed(self) -> bool:
        return bool(getattr(self, "is_deepspeed_enabled", False))

    def _attach_engine(self) -> None:
        """Let the engine that Accelerate prepares save to the store."""
        from .deepspeed import attach

        def prepare(*args: Any, **keywords: Any) -> Any:
            found = type(self.accelerator).prepare(self.accelerator, *args, **keywords)
            engine = found[0] if isinstance(found, tuple) else found
            if hasattr(engine, "checkpoint_engine"):
                self._files = attach(engine, self._the_store, in_tag=False, background=self.background)
            return found

        self.accelerator.prepare = prepare

    @property
    def _is_sharded(self) -> bool:
        """Return whether the model is sharded by FSDP2 or DeepSpeed; refuse what cannot be saved."""
        if self._is_deepspeed:
            if self.args.save_only_model:
                raise BadArgumentError("save_only_model is not for DeepSpeed, whose engine saves all it has")
        elif getattr(self, "is_fsdp_enabled", False):
            check_version(self.accelerator.state.fsdp_plugin)
        else:
            return False
        for name in ("frozen", "compact"):
            if getattr(self, name) is not None:
                raise BadArgumentError(f"{name} is not for sharded checkpoints, as those of FSDP are")
        return True

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save the weights to the store; called by Trainer."""
        if output_dir is None or not _CHECKPOINT.fullmatch(os.path.basename(output_dir)):
            super()._save(output_dir, state_dict)  # type: ignore[misc]
            return
        is_sharded = self._is_sharded
        if not self.args.should_save:
            return
        self._settle()
        os.makedirs(output_dir, exist_ok=True)
        model = self._bare()
        configs: list[Any] = [getattr(model, name, None) for name in ("config", "generation_config")]
        for part in [*configs, *getattr(model, "peft_config", {}).values(), self._processing()]:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(output_dir)
        torch.save(self._args_as_given(), os.path.join(output_dir, "training_args.bin"))
        if is_sharded:  # the weights are saved together with the optimizer
            return
        self._frozen = model_state.frozen_record(model, self._frozen_source(model))
        model_state.store_once(self._the_store(output_dir), model, self._frozen)
        self._weights = plain(
            model_state.without_frozen(model.state_dict() if state_dict is None else state_dict, self._frozen)
        )
        if self.args.save_only_model:
            self._finish(output_dir, {})

    def _frozen_source(self, model: Any) -> str | None:
        """Return the argument `frozen`, or for PEFT the name of the base model."""
        if self.frozen is not None or not hasattr(model, "peft_config"):
            return self.frozen
        config = next(iter(model.peft_config.values()))
        revision = getattr(config, "revision", None)
        return f"{config.base_model_name_or_path or 'the base model'}{f'@{revision}' if revision else ''}"

    def _args_as_given(self) -> Any:
        """Return the arguments with the limit that is hidden from Trainer during a save."""
        found = copy.copy(self.args)
        found.save_total_limit = found.save_total_limit or self._limit
        return found

    def _processing(self) -> Any:
        trainer: Any = self
        processing = trainer.processing_class
        return processing if processing is not None else getattr(trainer.data_collator, "tokenizer", None)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the optimizer and the scheduler, after `_save`; called by Trainer."""
        if self._is_deepspeed:
            self._settle()
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            self._saver = self._files.saves
            return
        if self._is_sharded:
            self._save_shards(output_dir, self._bare_optimizer())
            return
        if not self.args.should_save:
            return
        rest = {"optimizer": plain(self.optimizer.state_dict())}
        if self.lr_scheduler is not None:
            rest["scheduler"] = plain(self.lr_scheduler.state_dict())
        self._finish(output_dir, rest)

    def _bare_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as Trainer does, but gather no sharded weights for a checkpoint."""
        if output_dir is None or not _CHECKPOINT.fullmatch(os.path.basename(output_dir)) or not self._is_sharded:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        self._settle()
        self._save(output_dir)
        if self.args.save_only_model:
            self._save_shards(output_dir, None)

    def _save_shards(self, output_dir: str, optimizer: Any) -> None:
        """Save the shards of all ranks, and the scheduler, which is the same on all."""
        store, model = self._the_store(output_dir), self._bare()
        if self.args.should_save and optimizer is not None and self.lr_scheduler is not None:
            os.makedirs(output_dir, exist_ok=True)
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _PARTS["scheduler"]))
        state, table = sharded_state([(model, optimizer)]), kinds(model, optimizer)
        self._saves_to(store).save(os.path.join(output_dir, POINTER), state, kinds=table)

    def _saves_to(self, store: Store) -> WholeSaves | ShardedSaves:
        """Return the saves to a store, once those to another one have ended."""
        if self._saver is None or self._saver.store is not store:
            if self._saver is not None:
                self._saver.close()
            if self._is_sharded:
                self._saver = ShardedSaves(store, background=self.background)
            else:
                self._saver = WholeSaves(store, background=self.background, compact=self.compact)
        return self._saver

    def _finish(self, output_dir: str, rest: dict[str, Any]) -> None:
        model, self._weights = self._weights, None
        table = kinds(self._bare(), self._bare_optimizer() if rest else None)
        state = {"model": model, **rest}
        if self._frozen is not None:
            state["frozen"] = self._frozen.to_tree()
            if hasattr(self._bare(), "peft_config"):
                state["adapter"] = _adapter_names(self._bare(), model or {})
        self._saves_to(self._the_store(output_dir)).save(os.path.join(output_dir, POINTER), state, kinds=table)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, and remove from the store what Trainer's rotation removed."""
        above: Any = super()
        limit = self.args.save_total_limit
        if self.background:  # Trainer would remove older folders while the new one is not complete
            self._limit, self.args.save_total_limit = limit, None
        try:
            above._save_checkpoint(model, trial)
        finally:
            self._limit, self.args.save_total_limit = None, limit
        if limit and self._saver is not None and self.args.should_save:
            if self.background:
                self._saver.then(_rotation(self, trial, limit))
            self._saver.then(lambda store: drop_unreferenced(store, POINTER))

    def _finalize_training(self, *args: Any, **keywords: Any) -> Any:
        """Finish saves before Trainer loads the best checkpoint and removes the others."""
        self._settle()
        above: Any = super()
        return above._finalize_training(*args, **keywords)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint folder; called by Trainer."""
        target = self._bare() if model is None else self.accelerator.unwrap_model(model, keep_torch_compile=False)
        if not self._load_compressed(resume_from_checkpoint, target):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_compressed(self, folder: str, model: Any) -> bool:
        """Load the weights of a checkpoint folder; False: it is not compressed."""
        pointer = os.path.join(folder, POINTER)
        if pointers.read_pointer(pointer) is None:
            return False
        store = self._the_store(folder)
        if self._has_shards(pointer, store):
            load_sharded(pointer, store, [(model, None)])
        else:
            self._load_weights(model, pointers.load_at(pointer, _MODEL, store=store), pointer, store)
        return True

    def _has_shards(self, pointer: str, store: Store) -> bool:
        """Return whether a checkpoint is sharded; refuse one that is not for a sharded model."""
        if pointer_to_shards(pointer, store) is not None:
            return True
        if self._is_sharded:
            raise BadArgumentError(
                f"{pointer}: this checkpoint was saved without FSDP; resume it without FSDP, or load its weights into "
                "the model before it is sharded"
            )
        return False

    def _load_weights(self, model: Any, state: Any, pointer: str, store: Store) -> None:
        """Load weights, with Trainer's warnings about names that only one side has."""
        weights, found = state["model"], Frozen.of_tree(state)
        if found is not None and model_state.frozen_digest(model, found.names) != found.digest:
            weights = weights | model_state.load_frozen(store, found)
        lines = model_state.differences(weights, model.state_dict(), names=False)
        (result,) = model_state.load_states([(model, weights)], lines, pointer, strict=False)
        for name in () if found is None else found.names:
            if name in result.missing_keys:  # it has its value already
                result.missing_keys.remove(name)
        trainer: Any = self
        trainer._issue_warnings_after_load(result)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint; called by Trainer on all processes."""
        self._settle()
        if self.background:
            self.accelerator.wait_for_everyone()
        if self._is_deepspeed or not self._load_compressed(self.state.best_model_checkpoint, self._bare()):
            super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the optimizer and the scheduler; called by Trainer."""
        pointer = None if checkpoint is None else os.path.join(checkpoint, POINTER)
        if self._is_deepspeed or pointer is None or pointers.read_pointer(pointer) is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        store, scheduler = self._the_store(str(checkpoint)), os.path.join(str(checkpoint), _PARTS["scheduler"])
        if self._has_shards(pointer, store):
            load_sharded(pointer, store, [(self._bare(), self._bare_optimizer())])
            if os.path.isfile(scheduler):
                self.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))
            return
        # Whole, so that the next save is a delta over it.
        state = pointers.load_at(pointer, store=store)
        if "optimizer" in state:
            load_optimizer(self.optimizer, state["optimizer"])
        if "scheduler" in state:
            self.lr_scheduler.load_state_dict(state["scheduler"])


class CompressCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that compresses a checkpoint folder after Trainer wrote it.

    To resume, give `expand(folder)` to `resume_from_checkpoint`. Not with `load_best_model_at_end`, which reads raw
    files; such a Trainer is refused. Trainer's rotation works; steps it removed leave the store at the next save.

    Args:
        cfg: how to compress; default `Config()`.

    Example:
        >>> CompressCallback().cfg == Config()
        True
    """

    def __init__(self, cfg: Config | str | None = None) -> None:
        self.cfg = Config() if cfg is None else check_config(cfg)
        self._store: Store | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Refuse `load_best_model_at_end`, which needs raw files; called by Trainer."""
        if args.load_best_model_at_end:
            raise BadArgumentError("load_best_model_at_end reads raw files; use the mixin CompressedCheckpoints")

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Compress the checkpoint that Trainer has written; called by Trainer."""
        if not args.should_save:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not (folder / _WEIGHTS).is_file():
            raise BadArgumentError(f"{folder}: no {_WEIGHTS}; sharded or foreign checkpoints need the mixin")
        from safetensors.torch import load_file

        tree: dict[str, Any] = {"model": load_file(folder / _WEIGHTS)}
        for part, name in _PARTS.items():
            if (folder / name).is_file():
                tree[part] = plain(torch.load(folder / name, map_location="cpu", weights_only=True))
        home = os.path.join(os.path.abspath(args.output_dir), FOLDER)
        if self._store is None or self._store.url != home:
            self._store = Store(home, self.cfg)
        pointers.save_at(folder / POINTER, self._store, tree)
        for name in (_WEIGHTS, *_PARTS.values()):
            (folder / name).unlink(missing_ok=True)
        if args.save_total_limit:
            drop_unreferenced(self._store, POINTER)


class IncompleteCheckpointWarning(ShrinkpointWarning):
    """A newer checkpoint folder was not resumed from, because its save was interrupted."""


def newest_complete(folder: PathLike) -> str | None:
    """Return the newest complete checkpoint folder of an `output_dir`, or None.

    `trainer.train(resume_from_checkpoint=newest_complete(output_dir))` starts or resumes a run. Folders of interrupted
    saves are skipped; an IncompleteCheckpointWarning names those newer than the returned one.
    """
    home = os.fspath(folder)
    if not os.path.isdir(home):
        return None
    names = sorted(filter(_CHECKPOINT.fullmatch, os.listdir(home)), key=lambda n: int(n.rpartition("-")[2]))
    for number, name in enumerate(reversed(names)):
        if _is_complete(os.path.join(home, name)):
            if number:
                passed = ", ".join(names[-number:])
                message = f"{home}: resumed from {name}; the saves of {passed} were cut off"
                warnings.warn(message, IncompleteCheckpointWarning, stacklevel=3)
            return os.path.join(home, name)
    return None


def _is_complete(folder: str) -> bool:
    """Return whether weights and trainer state, which Trainer writes last, are in a folder."""
    try:
        data = read_file(os.path.join(folder, "trainer_state.json"), MOST_JSON)
        check_limits(data)
        json.loads(data)  # a loss may be NaN
    except (FileNotFoundError, ValueError):
        return False
    except OSError as e:
        if not is_damage(e, local=True):
            raise
        return False
    path = os.path.join(folder, POINTER)
    pointer = pointers.read_pointer(path)
    if pointer is not None:
        return pointer.step in pointers.store_of(path, pointer).steps()
    return any(name.endswith((".safetensors", ".bin")) and "model" in name for name in os.listdir(folder))


def _rotation(trainer: Any, trial: Any, limit: int) -> Callable[[Store], object]:
    """Return Trainer's own removal of older folders, bound to its present settings."""
    home, best = trainer._get_output_dir(trial), trainer.state.best_model_checkpoint
    try:
        from transformers.trainer_utils import rotate_checkpoints
    except ImportError:
        return lambda _: trainer._rotate_checkpoints(use_mtime=False, output_dir=home)  # before version 5
    return lambda _: rotate_checkpoints(home, limit, best, use_mtime=True)


def expand(folder: PathLike, *, store: Store | None = None) -> str:
    """Write the raw files of a compressed checkpoint folder, for any Trainer.

    Args:
        folder: of the checkpoint.
        store: the store that it is in; None: the one that its pointer names, below or next to it.

    Raises:
        BadArgumentError: not a compressed checkpoint, or one in a store elsewhere; a file to write is a link out of the
            folder.
        MissingParentError, CorruptDataError: see `Store.load`.
    """
    from safetensors.torch import save_file

    path = Path(folder)
    for name in (_WEIGHTS, _ADAPTER, *_PARTS.values()):
        check_link(path / name, path, writes=True)
    pointer = path / POINTER
    state = pointers.load_at(pointer, store=store)
    seen: set[int] = set()
    # Tied weights once, as Transformers writes them.
    tensors = {}
    # The names by which PEFT reads an adapter; a model without one keeps its own.
    names, weights = state.get("adapter"), state["model"]
    if names is None and (found := Frozen.of_tree(state)) is not None:
        weights = weights | model_state.load_frozen(
            store or pointers.store_of(pointer, pointers.pointer_at(pointer)), found
        )
    for name, tensor in weights.items():
        if names is not None and name not in names:
            continue
        name = name if names is None else names[name]
        if tensor.numel() == 0 or tensor.data_ptr() not in seen:
            tensors[name] = tensor.contiguous()
        seen.add(tensor.data_ptr())
    save_file(tensors, path / (_WEIGHTS if names is None else _ADAPTER), {"format": "pt"})
    for part, name in _PARTS.items():
        if part in state:
            torch.save(state[part], path / name)
    return str(path)


def _adapter_names(model: Any, weights: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that PEFT gives the weights of the first adapter in its own files."""
    from peft import get_peft_model_state_dict

    numbered = dict(weights)
    names = {id(value): name for name, value in numbered.items()}
    adapter = next(iter(model.peft_config))
    written = get_peft_model_state_dict(model, numbered, adapter_name=adapter, save_embedding_layers=False)
    return {names[id(value)]: name for name, value in written.items() if id(value) in names}


class PreemptionCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that saves and exits after a scheduler's signal.

    The checkpoint is the next `checkpoint-N` of Trainer, and `newest_complete` finds it.

    Args:
        preemption: signals, grace and exit code.

    Raises:
        Preempted: a SystemExit, once the checkpoint that was chosen is durable.

    Example:
        >>> from shrinkpoint.trainers import Preemption
        >>> with Preemption(("SIGUSR2",)) as preemption:
        ...     PreemptionCallback(preemption).preemption is preemption
        True
    """

    def __init__(self, preemption: Preemption) -> None:
        self.preemption = preemption
        self._choice: Choice | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        """Ask Trainer to save if a scheduler's signal has come; called by Trainer."""
        left = self.preemption.agreed()
        if left is None:
            return control
        choice = self.preemption.choice(self._store(args), None, left)
        if choice.what != "save":
            self.preemption.leave(self._store(args), state.global_step, choice, pointers.wait_for_files)
        self._choice = choice
        control.should_save, control.should_evaluate, control.should_log = True, False, False
        return control

    def on_save(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """Exit after the save that `on_step_end` requested; called by Trainer."""
        if self._choice is not None:
            self.preemption.leave(self._store(args), state.global_step, self._choice, pointers.wait_for_files)

    @staticmethod
    def _store(args: Any) -> Store:
        return Store(os.path.join(os.path.abspath(args.output_dir), FOLDER))
