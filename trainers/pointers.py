"""Checkpoints of frameworks that name files themselves: the data is in a store, their file only points to a step there.

So checkpoints can be deltas of one another, and each can still be listed, rotated and removed by its own path. A
pointer is a small JSON file; it names the store by its relative path where that is beside or above it, so that a run's
folder can be moved as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import fsspec

from ..codec.config import Config
from ..codec.errors import CorruptDataError, MissingParentError
from ..kernels.errors import BadArgumentError
from ..store.store import Store
from .parts import rank

PathLike: TypeAlias = str | os.PathLike[str]
_FORMAT = "shrinkpoint pointer"
_LARGEST = 1 << 16


@dataclass(frozen=True, slots=True)
class Pointer:
    """What a pointer file says.

    Args:
        store: path or URL of the store; a relative path is relative to the file's folder.
        step: which step of it.
        identity: of the checkpoint there, so that another one of that number is not taken for it.
    """

    store: str
    step: int
    identity: str

    def to_bytes(self) -> bytes:
        """JSON."""
        fields = {"format": _FORMAT, "version": 1, "store": self.store, "step": self.step, "identity": self.identity}
        return (json.dumps(fields) + "\n").encode()


def read_pointer(path: PathLike) -> Pointer | None:
    """The pointer in a file; None if the file is something else, or is not there."""
    fs, name = fsspec.core.url_to_fs(os.fspath(path))
    try:
        if not fs.isfile(name) or fs.size(name) > _LARGEST:
            return None
        fields = json.loads(fs.cat_file(name))
    except (ValueError, RecursionError, FileNotFoundError):
        return None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        return None
    store, step, identity = fields.get("store"), fields.get("step"), fields.get("identity")
    if fields.get("version") != 1 or type(step) is not int or not isinstance(store, str) or type(identity) is not str:
        raise CorruptDataError(f"{os.fspath(path)}: a pointer that is malformed, or of a newer version")
    return Pointer(store, step, identity)


def save_at(
    path: PathLike, store: Store, state: Any, *, grads: Any = None, kinds: Mapping[str, Any] | None = None
) -> Pointer:
    """Save a state as the store's next step, then let a file point to it; what it pointed to before is dropped."""
    before = read_pointer(path)
    steps = store.steps()
    saved = store.save(steps[-1] + 1 if steps else 0, state, grads=grads, kinds=kinds)
    fs, name = fsspec.core.url_to_fs(os.fspath(path))
    where = store.url
    if "://" not in where:
        where = os.path.relpath(where, os.path.dirname(os.path.abspath(name)))
    pointer = Pointer(where, saved.step, saved.checkpoint.identity)
    fs.makedirs(os.path.dirname(name), exist_ok=True)
    if "file" in (fs.protocol if isinstance(fs.protocol, tuple) else (fs.protocol,)):
        with open(f"{name}.tmp", "wb") as file:
            file.write(pointer.to_bytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{name}.tmp", name)
    else:
        fs.pipe_file(name, pointer.to_bytes())
    if before is not None and store_of(path, before).url == store.url:
        drop(store, [before.step])
    return pointer


def store_of(path: PathLike, pointer: Pointer, cfg: Config | None = None) -> Store:
    """The store that a pointer file names."""
    if "://" in pointer.store or os.path.isabs(pointer.store):
        return Store(pointer.store, cfg)
    folder = os.path.dirname(os.fspath(path))
    return Store(os.path.normpath(os.path.join(folder or ".", pointer.store)), cfg)


def load_at(path: PathLike, paths: str | None = None, *, store: Store | None = None) -> Any:
    """The state that a file points to.

    Args:
        path: the pointer file.
        paths: see `Store.load`.
        store: the store it is known to be in: the next save can then be a delta over what is loaded. None: that which
            the file names.

    Raises:
        BadArgumentError: not a pointer.
        MissingParentError: the store does not have it (any more): the file was copied without it, or it was removed.
        CorruptDataError: it is not readable.
    """
    pointer = read_pointer(path)
    if pointer is None:
        raise BadArgumentError(f"{os.fspath(path)}: not a checkpoint of shrinkpoint")
    if store is None:
        store = store_of(path, pointer)
    if pointer.step not in store.steps() or store.describe(pointer.step).identity != pointer.identity:
        raise MissingParentError(
            f"{os.fspath(path)}: points to step {pointer.step} of {store.url}, which has no such checkpoint; "
            "a checkpoint is copied or moved together with its store"
        )
    # All processes of a run load; that is one restore.
    return store.load(pointer.step, paths, count=paths is None and rank() == 0)


def drop(store: Store, steps: Iterable[int]) -> None:
    """Remove steps that nothing points to any more, and what only they needed."""
    gone = sorted(set(steps) & set(store.steps()) - set(store.pins()) - set(store.tags().values()))
    if gone:
        store.drop(*gone)
        store.gc()
