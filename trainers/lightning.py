"""Lightning: compressed checkpoints with `Trainer` and `ModelCheckpoint` as they are.

`Trainer(plugins=[CompressedIO()])` is all. Needs `lightning` (or `pytorch_lightning`).
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import fsspec
import torch

from ..codec.config import Config, check_config
from ..codec.kinds import kinds
from ..kernels.errors import BadArgumentError
from ..store.store import Store
from .background import Background
from .pointers import PathLike, drop, load_at, read_pointer, save_at, store_of
from .sensitivity import SensitivityTracker
from .state import capture_rng, plain, restore_rng

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.fabric.plugins.io import CheckpointIO
    from lightning.pytorch.callbacks import Callback
else:
    try:
        import lightning.pytorch as pl
        from lightning.fabric.plugins.io import CheckpointIO
        from lightning.pytorch.callbacks import Callback
    except ImportError:
        try:
            import pytorch_lightning as pl
            from lightning_fabric.plugins.io import CheckpointIO
            from pytorch_lightning.callbacks import Callback
        except ImportError:
            raise ImportError("this adapter needs Lightning: pip install 'shrinkpoint[lightning]'") from None

FOLDER = "shrinkpoint"
Module = TypeVar("Module")


class CompressedIO(CheckpointIO):  # type: ignore[misc]
    """Lightning's checkpoint plugin: what `ModelCheckpoint` saves goes to a store beside its files, as deltas.

    `dir/epoch=1-step=20.ckpt` is a small file that points into the store `dir/shrinkpoint`. Removing it (`save_top_k`)
    removes its checkpoint there; others that are coded against it stay readable. A checkpoint that Lightning wrote
    without the plugin is loaded as it is.

    With `background=True` a `Saver` takes a copy, and training goes on at once. The file appears when its checkpoint is
    durable, and only then is removed what Lightning removes after it: a run that is killed at any moment has one to go
    on from. When `fit` returns, all of it is there. Lightning's `AsyncCheckpointIO` removes before it has saved.

    Args:
        cfg: how to compress; default `Config()`.
        background: whether training goes on meanwhile; default False.

    Raises:
        UnsupportedLeafError: on saving, hyperparameters or a callback's state that cannot be stored without pickle;
            the path is named.

    Example:
        >>> CompressedIO().cfg == Config()
        True
    """

    def __init__(self, cfg: Config | None = None, *, background: bool = False) -> None:
        super().__init__()
        self.cfg = Config() if cfg is None else check_config(cfg)
        self.background = background
        self._savers: dict[str, Background] = {}
        self.kinds: dict[str, Any] | None = None
        self.grads: Any = None
        self._stores: dict[str, Store] = {}

    def _store(self, path: PathLike) -> Store:
        url = os.path.join(os.path.dirname(os.fspath(path)), FOLDER)
        if url not in self._stores:
            self._stores[url] = Store(url, self.cfg)
        return self._stores[url]

    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Called by Lightning."""
        if storage_options is not None:
            raise BadArgumentError("storage_options: there are none; give a URL as dirpath")
        grads = None if self.grads is None else {"state_dict": self.grads}
        store = self._store(path)
        if not self.background:
            save_at(path, store, plain(checkpoint), grads=grads, kinds=self.kinds)
            return
        if store.url not in self._savers:
            self._savers[store.url] = Background(store)
        self._savers[store.url].save(path, plain(checkpoint), grads=grads, kinds=self.kinds)

    def teardown(self) -> None:
        """Called by Lightning when it is done; what is in flight is durable afterwards."""
        savers, self._savers = self._savers, {}
        for saver in savers.values():
            saver.close()

    def load_checkpoint(
        self, path: PathLike, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Called by Lightning. Nothing in a compressed checkpoint needs pickle, whatever `weights_only` is."""
        pointer = read_pointer(path)
        if pointer is None:
            if not os.path.exists(path) and "://" not in os.fspath(path):
                raise FileNotFoundError(f"Checkpoint file not found: {os.fspath(path)}")
            return _torch_load(path, map_location, weights_only)
        store = self._store(path)
        if store.url != store_of(path, pointer).url:
            store = store_of(path, pointer)
        state: dict[str, Any] = load_at(path, store=store)
        found: dict[str, Any] = _moved(state, map_location)
        return found

    def remove_checkpoint(self, path: PathLike) -> None:
        """Called by Lightning: `ModelCheckpoint(save_top_k=...)`."""
        saver = self._savers.get(self._store(path).url)
        if saver is None:
            _remove(path)
        else:
            saver.then(lambda: _remove(path))


class CompressedCheckpoints(Callback):  # type: ignore[misc]
    """Beside `CompressedIO`: random number generators in the checkpoint, layer types and sensitivity for the codec.

    Lightning itself does not save random number generators. With them, a run resumed from a checkpoint at the end of
    an epoch computes the numbers of one that was not interrupted.

    Args:
        rng: save and restore the generators of torch, Python and NumPy; default True.
        sensitivity: average gradients, for codecs that ask for `grads`, before every so many optimizer steps: those at
            which checkpoints are saved. None (default): none.

    Example:
        >>> CompressedCheckpoints().rng
        True

    Source: Inshrinkerator, section 4.1 (sensitivity).
    """

    def __init__(self, *, rng: bool = True, sensitivity: int | None = None) -> None:
        super().__init__()
        self.rng = rng
        self.sensitivity = sensitivity
        self._tracker: SensitivityTracker | None = None
        self._restored: Any = None

    @staticmethod
    def _io(trainer: pl.Trainer) -> Any:
        found: Any = trainer.strategy.checkpoint_io
        while found is not None and not isinstance(found, CompressedIO):
            found = getattr(found, "checkpoint_io", None)  # AsyncCheckpointIO and its like
        return found

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called by Lightning."""
        io_plugin = self._io(trainer)
        if io_plugin is not None:
            io_plugin.kinds = dict(kinds(pl_module))
        if self.sensitivity is not None:
            self._tracker = SensitivityTracker(pl_module, self.sensitivity, done=trainer.global_step)
        if self._restored is not None:
            # Before the loop draws the order of the epoch, which it does before `on_train_start`.
            restore_rng(self._restored)
            self._restored = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Called by Lightning."""
        io_plugin = self._io(trainer)
        if io_plugin is not None and self._tracker is not None:
            io_plugin.grads = self._tracker.grads()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Called by Lightning."""
        self._close(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Called by Lightning."""
        self._close(trainer)

    def _close(self, trainer: pl.Trainer) -> None:
        io_plugin = self._io(trainer)
        if io_plugin is not None:
            io_plugin.grads = None
        if self._tracker is not None:
            self._tracker.remove()
            self._tracker = None

    def state_dict(self) -> dict[str, Any]:
        """Called by Lightning."""
        return {"rng": capture_rng()} if self.rng else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called by Lightning."""
        self._restored = state_dict.get("rng") if self.rng else None


def load_from_checkpoint(cls: type[Module], path: PathLike, **keywords: Any) -> Module:
    """`Model.load_from_checkpoint` for compressed checkpoints: that method knows no plugins.

    Args:
        cls: a LightningModule or LightningDataModule class.
        path: what `ModelCheckpoint` calls it.
        keywords: as for `cls.load_from_checkpoint`.

    Raises:
        BadArgumentError: not a compressed checkpoint.
        MissingParentError, CorruptDataError: see `Store.load`.
    """
    # Lightning reads checkpoints by torch.load alone, but also from memory.
    buffer = io.BytesIO()
    torch.save(load_at(path), buffer)
    buffer.seek(0)
    loader: Any = cls
    found: Module = loader.load_from_checkpoint(buffer, **{"weights_only": False, **keywords})
    return found


def _remove(path: PathLike) -> None:
    """Remove a checkpoint's file, and from its store what no other file points to."""
    pointer = read_pointer(path)
    fs, name = fsspec.core.url_to_fs(os.fspath(path))
    if fs.exists(name):
        fs.rm(name, recursive=True)
    if pointer is not None and not _shared(path, pointer.step):
        drop(store_of(path, pointer), [pointer.step])


def _shared(path: PathLike, step: int) -> bool:
    """Whether another file of the folder points to the same step (`save_last="link"`)."""
    folder = Path(os.path.dirname(os.fspath(path)) or ".")
    if not folder.is_dir():
        return False
    for other in folder.glob("*.ckpt"):
        found = read_pointer(other)
        if found is not None and found.step == step:
            return True
    return False


def _torch_load(path: PathLike, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    from_torch: Any = _torch_io()
    keywords = {} if map_location is None else {"map_location": map_location}
    found: dict[str, Any] = from_torch.load_checkpoint(path, weights_only=weights_only, **keywords)
    return found


def _torch_io() -> Any:
    try:
        from lightning.fabric.plugins.io import TorchCheckpointIO
    except ImportError:
        from lightning_fabric.plugins.io import TorchCheckpointIO
    return TorchCheckpointIO()


def _moved(tree: Any, map_location: Any) -> Any:
    """Tensors on the device that is asked for; they were loaded to the CPU."""
    if map_location is None or callable(map_location):
        return tree
    device = map_location.get("cpu", "cpu") if isinstance(map_location, dict) else map_location
    if isinstance(tree, dict):
        return {key: _moved(value, device) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_moved(value, device) for value in tree)
    return tree.to(device) if isinstance(tree, torch.Tensor) else tree
