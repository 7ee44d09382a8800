"""The target of a `Writer`: a folder for each checkpoint, or the steps of a store."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ...codec.checkpoint import Checkpoint, decompress
from ...codec.compress import compress
from ...codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointError
from ...store.chain import check, missing, read
from ...store.files import TEMPORARY, Files, StoreWarning
from ...store.lock import InUseError
from ...store.manifest import MAX_STEP, Manifest
from ...store.manifest import data_name as step_data_name
from ...store.retention import Retention
from ...store.saver.executors import open_store, store_options
from ...store.session import SharedSave
from ...store.store import SkippedCheckpointWarning, Store
from .chain import carry, open_folder, read_index
from .metadata import FOLDER, MAX_BYTES, Index, RankFile, data_name, is_data, metadata_name, parse

_INDEX = "index"
"""Path of the metadata in the container that a sharded step's manifest names."""


class Target(Protocol):
    """Interface of a writer's target, which also has the parents of deltas.

    A *place* is one checkpoint: the path of a folder, or the number of a step as text.
    """

    place: str | None

    def move(self, place: Any) -> None:
        """Let the next save go to this place."""
        ...

    def begin(self, *, is_coordinator: bool, alone: int | None) -> None:
        """Begin a save; `alone` is the rank if it saves without the others, else None."""
        ...

    def files(self, place: str | None = None) -> Files:
        """Return the files of a place; None: of the next save."""
        ...

    def file_name(self, rank: int, ckpt: Checkpoint) -> str:
        """Return the name of a rank's container."""
        ...

    def parent(self) -> str | None:
        """Return the place whose checkpoint the first save continues, if there is one there."""
        ...

    def exists(self, place: str, alone: int | None) -> bool:
        """Return whether a place has a checkpoint."""
        ...

    def index(self, place: str, alone: int | None) -> Index:
        """Return the metadata of a place."""
        ...

    def provide(self, place: str, file: RankFile) -> bool:
        """Provide the next save with the containers that a delta over `file` needs.

        Returns False if one is missing.
        """
        ...

    def commit(self, index: Index, alone: int | None) -> None:
        """Write the metadata, which makes the checkpoint exist."""
        ...


class Folders:
    """A folder or URL for each checkpoint, or one that each save replaces."""

    def __init__(self, place: str | os.PathLike[str] | None) -> None:
        self.place: str | None = None
        if place is not None:
            self.move(place)

    def move(self, place: Any) -> None:
        """See Target."""
        open_folder(place)
        self.place = os.fspath(place)

    def begin(self, *, is_coordinator: bool, alone: int | None) -> None:
        """See Target."""
        self.files()

    def files(self, place: str | None = None) -> Files:
        """See Target."""
        return open_folder(self.place if place is None else place)

    def file_name(self, rank: int, ckpt: Checkpoint) -> str:
        """See Target."""
        return data_name(rank, ckpt.id)

    def parent(self) -> str | None:
        """See Target."""
        return self.place

    def exists(self, place: str, alone: int | None) -> bool:
        """See Target."""
        return open_folder(place).exists(metadata_name(alone))

    def index(self, place: str, alone: int | None) -> Index:
        """See Target."""
        return read_index(open_folder(place), alone)

    def provide(self, place: str, file: RankFile) -> bool:
        """See Target."""
        return carry(open_folder(place), self.files(), file)

    def commit(self, index: Index, alone: int | None) -> None:
        """See Target; then remove the containers of former checkpoints in this folder."""
        files, name = self.files(), metadata_name(alone)
        needed, there = {file for rank in index.files for file, _ in rank.chain}, files.list(FOLDER)
        if gone := missing(files, needed.difference(there)):
            raise MissingParentError(
                f"{files.path(f'{FOLDER}/{min(gone)}')} is gone: another job has saved to this folder meanwhile, or "
                "the ranks do not see one folder"
            )
        files.write(name, index.to_bytes())
        garbage = [f"{FOLDER}/{n}" for n in there if is_data(n, alone) and n not in needed]
        if alone is None:
            garbage += [f"{FOLDER}/{n}" for n in there if n.startswith(TEMPORARY)]
            garbage += [n for n in files.list("") if n.startswith(TEMPORARY) and n.endswith(name)]
        files.remove(garbage)


_stores: dict[str, StoreSteps] = {}
"""Targets that arrived again in this process, which `async_save` pickles for every save: the first of each is kept,
because its session remembers which steps were left behind."""


class StoreSteps:
    """The steps of a store, which all ranks share.

    Args:
        store: of this rank.
        keep: which steps the coordinator keeps after each save; None: all.
    """

    def __init__(self, store: Store, keep: Retention | None = None) -> None:
        self.store, self.keep = store, keep
        self.place: str | None = None
        self._save: SharedSave | None = None
        self._token = os.urandom(16).hex()

    def __reduce__(self) -> tuple[Any, ...]:
        loaded = self.store.session.loaded
        return _received, (self._token, store_options(self.store), self.keep, loaded, self.place)

    def move(self, place: Any) -> None:
        """See Target."""
        text = os.fspath(place) if isinstance(place, (str, os.PathLike)) else str(place)
        if not text.isdecimal() or not text.isascii() or int(text) > MAX_STEP:
            raise BadArgumentError(f"checkpoint_id is {text!r:.80}; with a store it must be a step: 0 to {MAX_STEP}")
        self.place = str(int(text))

    @property
    def _step(self) -> int:
        if self.place is None:
            raise BadArgumentError("give the step as checkpoint_id: dcp.save(..., checkpoint_id=str(step))")
        return int(self.place)

    def begin(self, *, is_coordinator: bool, alone: int | None) -> None:
        """See Target. The coordinator takes the store's lock before other ranks get their plans."""
        _ = self._step
        if alone is not None:
            raise BadArgumentError("use_collectives=False: a step of a store is one commit for all ranks")
        self.end()
        if is_coordinator:
            self._save = SharedSave(self.store.session)

    def end(self) -> None:
        """Release the lock of a save that has ended, also without a commit."""
        if self._save is not None:
            self._save.close()
            self._save = None

    def files(self, place: str | None = None) -> Files:
        """See Target."""
        return self.store.session.catalog.files

    def file_name(self, rank: int, ckpt: Checkpoint) -> str:
        """See Target."""
        return step_data_name(self._step, ckpt.id)

    def parent(self) -> str | None:
        """See Target: the step that the store object has loaded."""
        return None if self.store.loaded is None else str(self.store.loaded)

    def exists(self, place: str, alone: int | None) -> bool:
        """See Target."""
        return int(place) in self.store.steps()

    def index(self, place: str, alone: int | None) -> Index:
        """See Target."""
        return read_step(self.store, int(place))

    def provide(self, place: str, file: RankFile) -> bool:
        """See Target."""
        return not missing(self.files(), [name for name, _ in file.chain])

    def commit(self, index: Index, alone: int | None) -> None:
        """See Target; then remove the steps that are not kept, unless others are writing."""
        if self._save is None or not index.files:
            raise BadArgumentError(f"step {self.place}: {'nothing was saved' if self._save else 'not the coordinator'}")
        table = compress({_INDEX: np.frombuffer(index.to_bytes(), np.uint8)})
        try:
            self._save.commit(_manifest(self._step, index, table), table)
        finally:
            self.end()
        if self.keep is not None:
            try:
                with contextlib.suppress(InUseError):
                    self.store.gc(self.keep, timeout=0.0)
            except (OSError, ShrinkpointError) as e:
                message = f"{self.store.url}: step {self.place} is saved, but older steps were not removed: {e}"
                warnings.warn(message, StoreWarning, stacklevel=3)


def _received(
    token: str, options: Mapping[str, Any], keep: Retention | None, loaded: Any, place: str | None
) -> StoreSteps:
    """Return the target of that token in this process."""
    if token not in _stores:
        made = StoreSteps(open_store(options), keep)
        made._token, made.store.session.loaded = token, loaded
        _stores[token] = made
    _stores[token].place = place
    return _stores[token]


def _manifest(step: int, index: Index, table: Checkpoint) -> Manifest:
    """Return the manifest of a sharded step."""
    ranks = index.files
    return Manifest(
        step,
        file=step_data_name(step, table.id),
        id=table.id,
        identity=table.identity,
        nbytes=table.nbytes,
        raw_nbytes=sum(rank.raw_nbytes for rank in ranks),
        parents=(),
        carried=sum(rank.carried for rank in ranks),
        since_base=max(rank.since_base for rank in ranks),
        base_nbytes=sum(rank.chain[-1][1] for rank in ranks),
        spent=sum(rank.spent for rank in ranks),
        shards=tuple(sorted({name: nbytes for rank in ranks for name, nbytes in rank.chain}.items())),
    )


def read_step(store: Store, step: int) -> Index:
    """Return the metadata of a sharded step.

    Raises:
        BadArgumentError: the step does not exist, or one process saved it.
        CorruptDataError, MissingParentError, NewerFormatError: it cannot be read, or files of ranks are missing.
    """
    manifest, files = store.describe(step), store.session.catalog.files
    if not manifest.shards:
        raise BadArgumentError(f"step {step} of {store.url} was saved by one process: load it by store.load({step})")
    table = read(files, step, manifest.file, None)
    check(manifest, table)
    where = files.path(f"{FOLDER}/{manifest.file}")
    if table.raw_nbytes > MAX_BYTES:
        raise CorruptDataError(f"{where}: {table.raw_nbytes} bytes of metadata; there may be {MAX_BYTES}")
    state = decompress(table)
    data = state.get(_INDEX) if isinstance(state, dict) else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8:
        raise CorruptDataError(f"{where}: has no metadata of shards")
    index = parse(data.tobytes(), where)
    if gone := missing(files, manifest.files):
        names = ", ".join(files.path(f"{FOLDER}/{name}") for name in sorted(gone)[:3])
        raise MissingParentError(f"step {step}: {names} is missing")
    return index


def newest_step(store: Store) -> tuple[int, Index]:
    """Return the newest step whose files all exist, in `Store.load` order, and its metadata.

    A SkippedCheckpointWarning names newer steps that were skipped.

    Raises:
        BadArgumentError: the store is empty, or the newest step was saved by one process.
        CorruptDataError: no step is intact.
    """
    skipped = []
    for step in store.candidates():
        try:
            found = read_step(store, step)
        except BadArgumentError:
            raise
        except ShrinkpointError as e:
            skipped.append(str(e))
            continue
        if skipped:
            message = f"{store.url}: loaded step {step}; skipped {'; '.join(skipped)}"
            warnings.warn(message, SkippedCheckpointWarning, stacklevel=3)
        return step, found
    if not skipped:
        raise BadArgumentError(f"{store.url} holds no checkpoint")
    raise CorruptDataError(f"{store.url}: no checkpoint is intact: {'; '.join(skipped)}")


__all__ = ["Folders", "StoreSteps", "Target", "newest_step", "read_step"]
