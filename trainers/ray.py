"""Ray Train: `report` and `restore` with compressed checkpoints.

    state = restore()                     # of the newest checkpoint, on every worker; None at the start
    report({"loss": loss}, {"model": model.state_dict(), "step": step})

A checkpoint is a folder with a pointer to a step of the store `shrinkpoint` in the folder of the experiment. Ray
decides which folders it keeps (`num_to_keep`); the steps of the others are removed at the next save.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from typing import Any

from ..codec.config import Config
from ..kernels.errors import BadArgumentError
from ..store.store import Store
from . import required
from .pointers import FOLDER, POINTER, drop_unreferenced, load_at, save_at

with required("this adapter needs Ray Train", 'pip install "ray[train]"'):
    from ray import train

_PROTOCOLS = {"local": "", "s3": "s3://", "gcs": "gs://"}


def report(
    metrics: dict[str, Any],
    state: Any,
    *,
    cfg: Config | str | None = None,
    kinds: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> None:
    """Report metrics and a compressed checkpoint, as `ray.train.report`; call it on all workers.

    The worker of rank 0 saves its state, and the call returns on it when the checkpoint is durable.

    Args:
        metrics: as for Ray.
        state: a tree of arrays and plain values; read on rank 0 only.
        cfg: how to compress, the same in each call.
        kinds: of the state's arrays, see `shrinkpoint.kinds`.
        keywords: other arguments of `ray.train.report`.

    Raises:
        BadArgumentError: an upload in the background, during which training would change the state; a storage that is
            not local, on S3 or on Google Cloud.
    """
    if keywords.get("checkpoint_upload_mode", train.CheckpointUploadMode.SYNC) != train.CheckpointUploadMode.SYNC:
        raise BadArgumentError("checkpoint_upload_mode must be SYNC: training would change the state that is saved")
    context = train.get_context()
    if context.get_world_rank() != 0:
        train.report(metrics, checkpoint=None, **keywords)
        return
    storage = context.get_storage()

    def save(_: Any, name: str) -> Any:
        path = storage.build_checkpoint_path_from_name(name)
        store = _store(_url(storage.storage_filesystem, storage.experiment_fs_path), cfg)
        save_at(f"{_url(storage.storage_filesystem, path)}/{POINTER}", store, state, kinds=kinds)
        drop_unreferenced(store, POINTER)
        return train.Checkpoint(path, storage.storage_filesystem)

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as empty:
        train.report(metrics, train.Checkpoint.from_directory(empty), checkpoint_upload_fn=save, **keywords)


def restore(cfg: Config | str | None = None) -> Any:
    """Return the state of the newest checkpoint, or None.

    The next save is a delta if `cfg` is that of `report`.

    Raises:
        BadArgumentError: the checkpoint was not saved by `report`.
        MissingParentError, CorruptDataError: see `Store.load`.
    """
    checkpoint = train.get_checkpoint()
    if checkpoint is None:
        return None
    home = train.get_context().get_storage().experiment_fs_path
    url = _url(checkpoint.filesystem, checkpoint.path)
    return load_at(f"{url}/{POINTER}", store=_store(_url(checkpoint.filesystem, home), cfg))


def _url(filesystem: Any, path: str) -> str:
    if filesystem.type_name not in _PROTOCOLS:
        raise BadArgumentError(f"storage_path: {filesystem.type_name} is not one of {', '.join(_PROTOCOLS)}")
    return _PROTOCOLS[filesystem.type_name] + path


@functools.lru_cache(maxsize=1)
def _store(home: str, cfg: Config | str | None) -> Store:
    """Return the store of an experiment, the same one each time: deltas need the session."""
    return Store(f"{home}/{FOLDER}", cfg or Config())
