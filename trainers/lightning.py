"""Lightning: compressed checkpoints with the ordinary `Trainer` and `ModelCheckpoint`.

`Trainer(plugins=[CompressedIO()])` is all. Needs `lightning` or `pytorch_lightning`, and goes with the Trainer of
either. Lightning's sharded strategies, which bypass its plugins, are wrapped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import new_class
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
import torch
import torch.distributed as dist

from ..codec.checkpoint import Checkpoint, decompress
from ..codec.compress import compress
from ..codec.config import Config
from ..codec.errors import BadArgumentError, MissingParentError, ShrinkpointError, UnsupportedLeafError
from ..codec.evidence.module import kinds, state_name
from ..codec.extras import install
from ..codec.format.bounded_json import loads
from ..codec.inputs import PastWeights
from ..codec.named_presets import check_config
from ..codec.presets import lossless
from ..codec.state.leaves import is_array
from ..codec.state.tree import flatten
from ..searching.arguments import ProcessGroup, SearchOptions
from ..searching.result import SearchResult
from ..store.store import Store
from ..store.weight_average import needs_average
from . import pointers
from .loop import ranks_changed
from .model_state import whole
from .pointers import FOLDER, PathLike, WholeSaves
from .preemption import Preemption
from .processes import agreed, from_all, of_first, rank, world
from .sensitivity import SensitivityTracker
from .state import capture_rng, plain, restore_dtypes, restore_rng

_OTHER = {"lightning.fabric": "lightning_fabric", "lightning.pytorch": "pytorch_lightning"}
_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


def _installed_classes(folder: str, module: str, name: str) -> tuple[type, ...]:
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


if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.io import CheckpointIO
    from lightning.pytorch.callbacks import Callback
else:
    CheckpointIO = new_class("CheckpointIO", _installed_classes("lightning.fabric", "plugins.io", "CheckpointIO"))
    Callback = new_class("Callback", _installed_classes("lightning.pytorch", "callbacks", "Callback"))

PREEMPTED = "last-preempted.ckpt"
"""Lightning finds files that begin with `last` by `ckpt_path="last"`."""
_TEMPORARY = re.compile(r"\.((lr_find|scale_batch_size)_[0-9a-f-]{36}|temp)\.ckpt")
"""Files by which Lightning puts a model back as it was: learning-rate and batch-size finder, spawned processes."""
_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
Module = TypeVar("Module")


class CompressedIO(CheckpointIO):  # type: ignore[misc]
    """Checkpoint plugin for Lightning that saves to a store, as deltas.

    `dir/epoch=1-step=20.ckpt` is a small file that points into the store `dir/shrinkpoint`. Removing it (`save_top_k`)
    removes its checkpoint from the store; deltas against that checkpoint stay readable. A checkpoint that Lightning
    wrote without the plugin is loaded as an ordinary one.

    With `background=True` a `Saver` copies the state, and training goes on at once. The file appears when its
    checkpoint is durable, and older files that Lightning removes are removed only then. So a run that is killed at any
    moment has a checkpoint to resume from. When `fit` returns, all checkpoints are durable. (Lightning's
    `AsyncCheckpointIO` removes old files before the new one is saved.)

    The only supported sharded strategy is FSDP2, `ModelParallelStrategy(save_distributed_checkpoint=False)`: the first
    process gets the whole state. Strategies that save by themselves are refused when fitting begins.

    The temporary files by which Lightning's tuner (`lr_find`, `scale_batch_size`) rolls a model back, and by which
    spawned processes return it, are exact with any `cfg`.

    Args:
        cfg: configuration of the compression; default `Config()`.
        background: whether training goes on during a save; default False.
        compact: in the background, shorten chains between saves, see `Saver`; default None: never.

    Raises:
        BadArgumentError: `compact` without `background`, or out of range.
        BadArgumentError: when fitting begins, in an `FSDPStrategy`, a `DeepSpeedStrategy`, or a `ModelParallelStrategy`
            that saves distributed checkpoints.
        BadArgumentError: when fitting begins, hyperparameters that cannot be stored without pickle; all are named.
            Enums, dataclasses and paths are stored as values, dicts and strings.
        UnsupportedLeafError: on saving, a callback's state that cannot be stored without pickle; the path is named.

    Example:
        >>> CompressedIO().cfg == Config()
        True
    """

    def __init__(
        self, cfg: Config | str | None = None, *, background: bool = False, compact: float | None = None
    ) -> None:
        super().__init__()
        _wrap_strategies()
        self.cfg = Config() if cfg is None else check_config(cfg)
        self.background = background
        self.compact = pointers.check_compact(compact, background=background)
        self._savers: dict[str, WholeSaves] = {}
        self.kinds: dict[str, Any] | None = None
        self.grads: Any = None
        self.chosen: Config | None = None
        self.roots: list[str] = []
        self._stores: dict[str, Store] = {}

    def _store(self, path: PathLike) -> Store:
        url = os.path.join(self._root(path), FOLDER)
        if url not in self._stores:
            self._stores[url] = Store(url, self.cfg)
        return self._stores[url]

    def _root(self, path: PathLike) -> str:
        """Return the folder whose store holds a file: a callback's `dirpath`, else that of the file.

        The name of a metric with a slash, as in `{val/loss}`, puts each file into a folder of its own below it.
        """
        folder = os.path.dirname(os.fspath(path))
        above = [root for root in self.roots if os.path.join(folder, "").startswith(os.path.join(root, ""))]
        return max(above, key=len, default=folder)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Save a checkpoint to the store and write its pointer file; called by Lightning."""
        if storage_options is not None:
            raise BadArgumentError("storage_options are not supported; give a URL as dirpath")
        hyperparameters = {key: _plain_form(checkpoint[key]) for key in _HYPERPARAMETERS if key in checkpoint}
        state = plain(checkpoint | hyperparameters)
        if _is_temporary(path):
            fs, name = fsspec.core.url_to_fs(os.fspath(path))
            fs.makedirs(os.path.dirname(name), exist_ok=True)
            fs.pipe_file(name, compress(state, cfg=lossless()).to_bytes())
            return
        store = self._store(path)
        if store.url not in self._savers:
            self._savers[store.url] = WholeSaves(store, background=self.background, compact=self.compact)
        saver = self._savers[store.url]
        saver.save(path, state, grads=self.gradients(state), kinds=self.kinds, cfg=self.chosen)

    def gradients(self, state: dict[str, Any]) -> Any:
        """Return gradient averages by their paths in the state, for `compress`.

        With `WeightAveraging` and `EMAWeightAveraging` the averaged weights are saved in place of the weights.
        """
        if self.grads is None:
            return None
        return {place: self.grads for place in ("state_dict", "current_model_state") if place in state}

    def parent(self, path: PathLike) -> Checkpoint | None:
        """Return the parent of a save to this path; None: it will be a base.

        Raises:
            Exception: what the save in flight raised.
        """
        store = self._store(path)
        saver = self._savers.get(store.url)
        return store.parent if saver is None else saver.parent()

    def parent_of_all(self, path: PathLike, team: ProcessGroup) -> Checkpoint | None:
        """Return the first process's `parent` on all processes, read from storage there.

        None, too, if the parent was removed meanwhile, so that only the first process still has it.

        Raises:
            MissingParentError: a process cannot read it.
            Exception: as `parent`.
        """
        found: list[Checkpoint | None] = [None]

        def leading() -> tuple[str, tuple[int, str] | None] | None:
            if team.rank:
                return None
            found[0] = self.parent(path)
            head = None if found[0] is None else self._store(path).head
            if head is None or head.last.step not in self._store(path).steps():
                found[0] = head = None
            return os.fspath(path), None if head is None else (head.last.step, head.last.identity)

        def following() -> None:
            if team.rank and at is not None:
                found[0] = self._followed(where, *at)

        where, at = team.all(leading)[0]
        team.all(following)
        return found[0]

    def earlier(self, path: PathLike, state: Any) -> PastWeights | None:
        """Return past weights if a save to this path extrapolates weights (`Config.ahead`).

        A search then does the same. None: it is not, or only the worker in the background knows them.
        """
        if self.background or not needs_average(self.cfg):
            return None
        store = self._store(path)
        return store.earlier(state, pointers.next_step(store))

    def _followed(self, path: PathLike, step: int, identity: str) -> Checkpoint:
        store = self._store(path)
        try:
            if store.head is None or (store.head.last.step, store.head.last.identity) != (step, identity):
                store.follow(step, identity)
        except (ShrinkpointError, OSError) as e:
            raise MissingParentError(
                f"search: process {rank()} cannot read step {step} of {store.url}, which this checkpoint is to be a "
                f"delta against; under several processes all must see the folder of the checkpoints ({e})"
            ) from e
        return store.head.checkpoint  # type: ignore[union-attr]  # that is what `follow` has set

    def teardown(self) -> None:
        """Make saves in flight durable; called by Lightning at the end."""
        savers, self._savers = self._savers, {}
        for saver in savers.values():
            saver.close()

    def load_checkpoint(
        self, path: PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint without pickle if it is compressed; called by Lightning."""
        if _is_temporary(path):
            fs, name = fsspec.core.url_to_fs(os.fspath(path))
            return _moved(decompress(Checkpoint.from_bytes(fs.cat_file(name))), map_location)
        pointer = pointers.read_pointer(path)
        if pointer is None:
            if not os.path.exists(path) and "://" not in os.fspath(path):
                raise FileNotFoundError(f"Checkpoint file not found: {os.fspath(path)}")
            return _torch_load(path, map_location, weights_only)
        store = self._store(path)
        is_own = pointers.points_to(path, pointer, store)
        return _moved(pointers.load_at(path, store=store if is_own else None), map_location)

    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint's file and its step; called by Lightning."""
        store, root = self._store(path), self._root(path)
        saver = None if _is_temporary(path) else self._savers.get(store.url)
        if saver is None:
            _remove(path, store, root)
        else:
            saver.then(lambda store: _remove(path, store, root))


class CompressedCheckpoints(Callback):  # type: ignore[misc]
    """Callback for `CompressedIO`: random numbers, layer types, sensitivity, preemption.

    Lightning itself does not save random number generators. With the saved generators of each process, a run resumed
    from a checkpoint at the end of an epoch computes the same numbers as an uninterrupted run. With another number of
    processes the generators start from their seeds, and a RanksChangedWarning says so.

    Args:
        rng: save and restore the generators of torch, Python and NumPy; default True.
        sensitivity: number of optimizer steps from one checkpoint to the next, before which gradients are averaged for
            codecs that need `grads`. None (default): no averages.
        search: function that chooses the configuration of each checkpoint, such as
            `functools.partial(sp.search, evaluate=..., threshold=0.01)`. It is called with the state and with `prev`,
            `last`, `grads` and `kinds` of `sp.search`. `evaluate` gets the whole checkpoint as it would be restored,
            with the weights under "state_dict". The result is stored in the checkpoint; a resumed run continues the
            search from it, and the restore counts (`SearchResult.restored`). With several processes (DDP) all search
            the first one's state together, and `group` is given too; `evaluate` must not communicate with the others.
            If weights are extrapolated (`Config.ahead`, or a rate) and saves are not in the background,
            `earlier` is given too. None (default): the configuration of `CompressedIO`.
        preemption: save `last-preempted.ckpt` next to the checkpoints and exit after a scheduler's signal; then
            `fit(ckpt_path="last")` resumes from it. Its handlers replace Lightning's. None (default): no handlers.

    Raises:
        BadArgumentError: when fitting begins, `search` without `CompressedIO`, or with it in an `AsyncCheckpointIO`,
            whose thread would search while training draws random numbers.

    Example:
        >>> CompressedCheckpoints().rng
        True

    Source: Inshrinkerator, sections 4.1 (sensitivity) and 5 (search).
    """

    def __init__(
        self,
        *,
        rng: bool = True,
        sensitivity: int | None = None,
        search: Callable[..., SearchResult] | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        super().__init__()
        self.rng = rng
        self.sensitivity = sensitivity
        self.search = search
        self.preemption = preemption
        self.found: SearchResult | None = None
        self._tracker: SensitivityTracker | None = None
        self._restored: Any = None
        self._fitting = False
        self._failed = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the plugins, and give them the kinds and the search; called by Lightning."""
        self._failed = False
        threads = _installed_classes("lightning.pytorch", "plugins.io", "AsyncCheckpointIO")
        if self.search is not None and any(isinstance(p, threads) for p in _plugins(trainer.strategy)):
            # It would search in a thread, and put the generators back by which training draws meanwhile.
            raise BadArgumentError("search: not within AsyncCheckpointIO; take CompressedIO(background=True) instead")
        io_plugin = _io_of(trainer.strategy)
        if io_plugin is not None:
            io_plugin.kinds = dict(kinds(pl_module))
            io_plugin.roots = [str(own.dirpath) for own in trainer.checkpoint_callbacks if own.dirpath]
            if self.search is not None:
                # The method of the class, because an earlier `fit` may have wrapped that of the object.
                save = type(trainer.strategy).save_checkpoint.__get__(trainer.strategy)
                trainer.strategy.save_checkpoint = functools.partial(self._save, self.search, io_plugin, save)
        elif self.search is not None:
            raise BadArgumentError("search: it needs CompressedIO, which is not among the plugins")
        self._fitting = True
        self._restore()

    def _restore(self) -> None:
        """Restore the generators before the loop draws the order of the epoch.

        It does so before `on_train_start`. The checkpoint of a sharded model is loaded after `on_fit_start`, that of
        others before.
        """
        if self._fitting and self._restored is not None:
            restore_rng(self._restored)
            self._restored = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install signal handlers and start the tracker; called after a checkpoint is loaded."""
        if self.preemption is not None:
            # Lightning's handler of SIGTERM talks to the other processes, which may not have got the signal.
            self.preemption.install()
        if self.sensitivity is not None:
            self._tracker = SensitivityTracker(pl_module, self.sensitivity, done=trainer.global_step)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Report the step count to the tracker; Lightning also counts steps that AMP skips."""
        if self._tracker is not None:
            self._tracker.at(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and exit if a scheduler's signal has come; called by Lightning."""
        if self.preemption is None:
            return
        io_plugin = _io_of(trainer.strategy)
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        path = os.path.join(folder, PREEMPTED)
        store = Store(os.path.join(folder, FOLDER)) if io_plugin is None else io_plugin._store(path)
        step, wait = trainer.global_step, pointers.wait_for_files
        self.preemption.finish(store, step, lambda: trainer.save_checkpoint(path), wait)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Give gradient averages to the plugin; called by Lightning."""
        io_plugin = _io_of(trainer.strategy)
        if io_plugin is not None and self._tracker is not None:
            self._tracker.at(trainer.global_step)
            grads = whole(self._tracker.grads()) or {}
            # A state of Lightning's has the names of `torch.compile`d layers as they are.
            io_plugin.grads = {state_name(pl_module, name): grad for name, grad in grads.items()} or None

    def _save(
        self,
        search: Callable[..., SearchResult],
        io_plugin: CompressedIO,
        save: Callable[..., None],
        checkpoint: dict[str, Any],
        filepath: PathLike,
        storage_options: Any = None,
    ) -> None:
        """Search, then call the strategy's `save_checkpoint`; called on all processes."""
        if _is_temporary(filepath):
            save(checkpoint, filepath, storage_options)
            return
        state = plain(checkpoint)
        # The others may be gone where this process failed: the last result must do.
        if world() == 1 or not self._failed:
            self.found = self._found(search, io_plugin, state, filepath)
        own = state.get("callbacks", {}).get(self.state_key)  # not there where only weights are saved
        if own is not None and self.found is not None:
            own["search"] = json.dumps(self.found.to_json())
        io_plugin.chosen = None if self.found is None else self.found.config
        try:
            save(state, filepath, storage_options)
        finally:
            io_plugin.chosen = None

    def _found(
        self, search: Callable[..., SearchResult], io_plugin: CompressedIO, state: dict[str, Any], path: PathLike
    ) -> SearchResult:
        """Search for a state, by all processes together."""
        group = dist.group.WORLD if world() > 1 else None
        team, grads = ProcessGroup(group), io_plugin.gradients(state)
        prev = io_plugin.parent(path) if group is None else io_plugin.parent_of_all(path, team)
        shared: list[Any] = [state, grads, None]

        def leading() -> None:
            earlier = None if rank() else io_plugin.earlier(path, state)
            shared[2] = earlier and [earlier.weights, earlier.steps]

        team.all(leading)
        state, grads, before = shared if group is None else of_first(team, shared, group)
        more: dict[str, Any] = {} if group is None else {"group": group}
        known = pointers.kinds_within(state, io_plugin.kinds)
        more |= {"prev": prev, "grads": pointers.grads_within(state, grads), "kinds": known}
        if before is not None:
            more["options"] = dataclasses.replace(_options_of(search), earlier=PastWeights(*before))
        return agreed(team, search(state, last=self.found, **more))

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the gradient tracker at the end of training; called by Lightning."""
        self._close(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Remove the gradient tracker, and let later saves avoid collectives; called by Lightning."""
        # The others may be gone: a checkpoint that is saved now (`OnExceptionCheckpoint`) must not wait for them.
        self._failed = True
        self._close(trainer)

    def _close(self, trainer: pl.Trainer) -> None:
        self._restored, self._fitting = None, False
        io_plugin = _io_of(trainer.strategy)
        if io_plugin is not None:
            io_plugin.grads = None
        if self._tracker is not None:
            self._tracker.remove()
            self._tracker = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save; Lightning calls this on all processes, and the first one saves."""
        # The result of the search is put in when it is saved; Lightning leaves a state out that is empty.
        own: dict[str, Any] = {} if self.search is None else {"search": None}
        if not self.rng:
            return own
        mine = capture_rng()
        return own | {"rng": (not self._failed and from_all(mine)) or [mine]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the search result and random numbers; called on all processes."""
        before = state_dict.get("search")
        if self.search is not None and before is not None:
            self.found = SearchResult.from_json(loads(before.encode())).restored()
        found = state_dict.get("rng") if self.rng else None
        if found is None:
            return
        if not ranks_changed(len(found), "random number generators"):
            self._restored = found[rank()]
            self._restore()


def load_from_checkpoint(cls: type[Module], path: PathLike, *, store: Store | None = None, **keywords: Any) -> Module:
    """Load a module class from a compressed checkpoint, as `Model.load_from_checkpoint` does.

    Args:
        cls: a LightningModule or LightningDataModule class.
        path: what `ModelCheckpoint` calls it.
        store: the store that it is in; None: the one that the file names, below or next to its folder.
        keywords: as for `cls.load_from_checkpoint`.

    Raises:
        BadArgumentError: not a compressed checkpoint, or one in a store elsewhere.
        MissingParentError, CorruptDataError: see `Store.load`.
    """
    # Lightning reads checkpoints by torch.load alone, but also from memory.
    buffer = io.BytesIO()
    torch.save(pointers.load_at(path, store=store), buffer)
    buffer.seek(0)
    loader: Any = cls
    found: Module = loader.load_from_checkpoint(buffer, **{"weights_only": False, **keywords})
    return found


def _options_of(search: Callable[..., SearchResult]) -> SearchOptions:
    """Return the options in a `functools.partial` of `search`; else the defaults."""
    held = search.keywords.get("options") if isinstance(search, functools.partial) else None
    return held if isinstance(held, SearchOptions) else SearchOptions()


def _is_temporary(path: PathLike) -> bool:
    """Return whether a file is one by which Lightning itself restores a model."""
    return _TEMPORARY.fullmatch(os.path.basename(os.fspath(path))) is not None


def _remove(path: PathLike, store: Store, root: str) -> None:
    """Remove a checkpoint's file, its empty folders below a root, and its unused step."""
    pointer = pointers.read_pointer(path)
    fs, name = fsspec.core.url_to_fs(os.fspath(path))
    if fs.exists(name):
        fs.rm(name, recursive=True)
    pointers.drop_replaced(path, store, pointer)
    folder, top = os.path.dirname(name), fsspec.core.url_to_fs(root)[1].rstrip("/")
    while len(folder) > len(top) and fs.isdir(folder) and not fs.ls(folder):
        fs.rmdir(folder)
        folder = os.path.dirname(folder)


def _torch_load(path: PathLike, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    from_torch: Any = _installed_classes("lightning.fabric", "plugins.io", "TorchCheckpointIO")[0]()
    keywords = {} if map_location is None else {"map_location": map_location}
    found: dict[str, Any] = from_torch.load_checkpoint(path, weights_only=weights_only, **keywords)
    return found


def _moved(tree: dict[str, Any], map_location: Any) -> dict[str, Any]:
    """Move tensors from the CPU to the requested device."""
    if map_location is None or callable(map_location):
        return tree
    device = map_location.get("cpu", "cpu") if isinstance(map_location, dict) else map_location
    moved: dict[str, Any] = plain(tree, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
    return moved


def _plugins(strategy: Any) -> list[Any]:
    """Return the checkpoint plugins of a strategy, outer wrappers first."""
    found: list[Any] = [strategy.checkpoint_io]
    while (inner := getattr(found[-1], "checkpoint_io", None)) is not None:
        found.append(inner)
    return found


def _io_of(strategy: Any) -> Any:
    """Return the `CompressedIO` among the plugins of a strategy, or None."""
    return next((plugin for plugin in _plugins(strategy) if isinstance(plugin, CompressedIO)), None)


@functools.cache
def _wrap_strategies() -> None:
    """Wrap the strategies so that they use a `CompressedIO`, or are refused when fitting begins.

    A plugin knows neither the strategy nor what that saves without it, so the strategies' own methods are wrapped;
    a strategy without such a plugin is unchanged. FSDP2 puts the whole state together for the plugin, where asked
    to (`save_distributed_checkpoint=False`), but would read its file by `torch.load`, and not end it.

    Raises:
        BadArgumentError: when fitting begins, the strategy's states do not come to the plugin.
    """

    def wrap(cls: Any, name: str, wrapper: Callable[..., Any]) -> None:
        before = getattr(cls, name)

        @functools.wraps(before)
        def method(strategy: Any, *args: Any, **named: Any) -> Any:
            if _io_of(strategy) is None:
                return before(strategy, *args, **named)
            return wrapper(functools.partial(before, strategy), strategy, *args, **named)

        setattr(cls, name, method)

    for cls in _installed_classes("lightning.pytorch", "strategies", "Strategy"):
        wrap(cls, "connect", _connect)
        wrap(cls, "load_optimizer_state_dict", _load_optimizers)
    for name in _SHARDED:
        for cls in _installed_classes("lightning.pytorch", "strategies", name):
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
        lines += _unstorable(getattr(owner, "hparams", None) or {})
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
            if strategy.is_global_zero and pointers.read_pointer(path) is not None:
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


def _plain_form(value: Any) -> Any:
    """Return hyperparameters with enums, dataclasses and paths in plain form.

    An enum becomes its value, a dataclass a dict of its fields, a path a string.

    Example:
        >>> from pathlib import Path
        >>> _plain_form({"data": Path("a/b"), "rates": (0.1, 0.2)})
        {'data': 'a/b', 'rates': (0.1, 0.2)}
    """
    if isinstance(value, enum.Enum):
        return _plain_form(value.value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain_form(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_plain_form(key): _plain_form(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        # Named tuples are refused with their path like any other class.
        return type(value)(map(_plain_form, value)) if type(value) in (list, tuple) else value
    return value


def _unstorable(parameters: Mapping[str, Any]) -> list[str]:
    """Return a line for each hyperparameter that cannot be stored without pickle.

    Example:
        >>> _unstorable({"rate": 0.1, "names": {"a"}})[0].split(":")[0]
        'names'
    """
    lines = []
    for name, value in parameters.items():
        try:
            flatten({str(name): _plain_form(value)}, is_array)
        except UnsupportedLeafError as e:
            lines.append(str(e))
    return lines
