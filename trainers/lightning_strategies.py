"""Lightning's sharded strategies, which bypass the plugin, and plain hyperparameters."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import torch

from ..codec.errors import BadArgumentError, ShrinkpointError, UnsupportedLeafError
from ..codec.extras import install
from ..codec.state.leaves import is_array
from ..codec.state.tree import flatten
from .pointers import PathLike, read_pointer
from .state import restore_dtypes

_OTHER = {"lightning.fabric": "lightning_fabric", "lightning.pytorch": "pytorch_lightning"}
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


def installed_classes(folder: str, module: str, name: str) -> tuple[type, ...]:
    """Return a class of Lightning from each installed copy of Lightning.

    `lightning.pytorch` and `pytorch_lightning` are two copies of one library. The package `lightning` brings both, and
    a Trainer of one copy accepts no objects of the other.
    """
    found = []
    for place in (folder, _OTHER[folder]):
        with contextlib.suppress(ImportError):
            found.append(getattr(import_module(f"{place}.{module}"), name))
    if not found:
        raise ImportError(f"this adapter needs Lightning: {install('lightning')}")
    return tuple(found)


def plugins(strategy: Any) -> list[Any]:
    """Return the checkpoint plugins of a strategy, outer wrappers first."""
    found: list[Any] = [strategy.checkpoint_io]
    while (inner := getattr(found[-1], "checkpoint_io", None)) is not None:
        found.append(inner)
    return found


@functools.cache
def wrap_strategies(plugin: type) -> None:
    """Wrap the strategies so that they use such a plugin, or are refused when fitting begins.

    A plugin knows neither the strategy nor what that saves without it, so the strategies' own methods are wrapped;
    a strategy without such a plugin is unchanged. FSDP2 puts the whole state together for the plugin, where asked
    to (`save_distributed_checkpoint=False`), but would read its file by `torch.load`, and not end it.

    Args:
        plugin: a class with `load_checkpoint`.

    Raises:
        BadArgumentError: when fitting begins, the strategy's states do not come to the plugin.
    """

    def is_meant(strategy: Any) -> bool:
        return any(isinstance(one, plugin) for one in plugins(strategy))

    def wrap(cls: Any, name: str, wrapper: Callable[..., Any]) -> None:
        before = getattr(cls, name)

        @functools.wraps(before)
        def method(strategy: Any, *args: Any, **named: Any) -> Any:
            if not is_meant(strategy):
                return before(strategy, *args, **named)
            return wrapper(functools.partial(before, strategy), strategy, *args, **named)

        setattr(cls, name, method)

    for cls in installed_classes("lightning.pytorch", "strategies", "Strategy"):
        wrap(cls, "connect", _connect)
        wrap(cls, "load_optimizer_state_dict", _load_optimizers)
    for name in _SHARDED:
        for cls in installed_classes("lightning.pytorch", "strategies", name):
            wrap(cls, "setup", _setup)
            if name == "ModelParallelStrategy":
                wrap(cls, "load_checkpoint", _load)
                wrap(cls, "teardown", _teardown)


def _connect(connect: Callable[..., None], strategy: Any, model: Any) -> None:
    """Report hyperparameters that cannot be stored before training, not at the first save."""
    connect(model)
    trainer = getattr(model, "_trainer", None)
    if trainer is None or trainer.state.fn != "fit":
        return
    lines = []
    for owner in (model, trainer.datamodule):
        lines += unstorable(getattr(owner, "hparams", None) or {})
    if lines:
        shown = "\n  ".join(lines)
        raise BadArgumentError(
            f"hyperparameters that cannot be stored (leave them out by save_hyperparameters(ignore=...)):\n  {shown}"
        )


def _load_optimizers(load: Callable[..., None], strategy: Any, checkpoint: Mapping[str, Any]) -> None:
    """Let the strategy load the optimizers, and restore the dtypes that torch converts."""
    load(checkpoint)
    for optimizer, saved in zip(strategy.optimizers, checkpoint["optimizer_states"], strict=False):
        restore_dtypes(optimizer, saved)


def _setup(setup: Callable[..., None], strategy: Any, trainer: Any) -> None:
    """Refuse a strategy that saves by itself."""
    whole = getattr(strategy, "_save_distributed_checkpoint", None) is False  # of ModelParallelStrategy alone
    if trainer.state.fn == "fit" and not whole:
        raise BadArgumentError(
            f"strategy: {type(strategy).__name__} writes or reads checkpoints by itself, past CompressedIO; take "
            "ModelParallelStrategy(save_distributed_checkpoint=False), which is FSDP2, or leave the plugin out"
        )
    setup(trainer)


def _load(
    load: Callable[..., dict[str, Any]], strategy: Any, checkpoint_path: PathLike, weights_only: bool | None = None
) -> dict[str, Any]:
    """Let the strategy load a raw file, which is written for the time of the call."""
    with _raw_file(strategy, strategy.broadcast(checkpoint_path)) as raw:
        return load(checkpoint_path, weights_only) if raw is None else load(raw, False)


@contextlib.contextmanager
def _raw_file(strategy: Any, path: PathLike) -> Iterator[str | None]:
    """Write a checkpoint as `torch.save` does, for the time of the context; None if it is raw."""
    raw, error, written = os.fspath(path) + ".raw", None, ""
    try:
        try:
            if strategy.is_global_zero and read_pointer(path) is not None:
                torch.save(strategy.checkpoint_io.load_checkpoint(path), raw)
                written = raw
        except Exception as e:
            error = e
        # What fails on the first process fails on all: they would wait for it.
        found, why = strategy.broadcast((written, f"{type(error).__name__}: {error}" if error is not None else ""))
        if error is not None:
            raise error
        if why:
            raise ShrinkpointError(f"{os.fspath(path)}: the first process cannot load it: {why}")
        yield found or None
        strategy.barrier()  # nobody reads it any more
    finally:
        if strategy.is_global_zero:
            with contextlib.suppress(FileNotFoundError):
                os.remove(raw)


def _teardown(teardown: Callable[[], None], strategy: Any) -> None:
    """Tear down the strategy and its plugin, which Lightning leaves out."""
    teardown()
    strategy.checkpoint_io.teardown()


def plain_form(value: Any) -> Any:
    """Return hyperparameters with enums, dataclasses and paths in plain form.

    An enum becomes its value, a dataclass a dict of its fields, a path a string.

    Example:
        >>> from pathlib import Path
        >>> plain_form({"data": Path("a/b"), "rates": (0.1, 0.2)})
        {'data': 'a/b', 'rates': (0.1, 0.2)}
    """
    if isinstance(value, enum.Enum):
        return plain_form(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_form(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {plain_form(key): plain_form(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        # Named tuples are refused with their path like any other class.
        return type(value)(map(plain_form, value)) if type(value) in (list, tuple) else value
    return value


def unstorable(parameters: Mapping[str, Any]) -> list[str]:
    """Return a line for each hyperparameter that cannot be stored without pickle.

    Example:
        >>> unstorable({"rate": 0.1, "names": {"a"}})[0].split(":")[0]
        'names'
    """
    lines = []
    for name, value in parameters.items():
        try:
            flatten({str(name): plain_form(value)}, is_array)
        except UnsupportedLeafError as e:
            lines.append(str(e))
    return lines
