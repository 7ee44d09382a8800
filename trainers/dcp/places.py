"""Places of checkpoints: folders or steps of a store, with their chains of containers."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from ...codec.checkpoint import Checkpoint, decompress
from ...codec.compress import compress
from ...codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointError
from ...codec.format.ranged import Ranged
from ...store.chain import check, missing, read
from ...store.files import TEMPORARY, Files, StoreWarning, read_error
from ...store.local import LocalFiles
from ...store.lock import InUseError
from ...store.manifest import MAX_STEP, Manifest
from ...store.manifest import data_name as step_data_name
from ...store.retention import Retention
from ...store.saver.executors import open_store, store_options
from ...store.session import SharedSave
from ...store.store import SkippedCheckpointWarning, Store
from ...store.urls import open_files
from .metadata import FOLDER, MAX_BYTES, Index, RankFile, data_name, is_data, metadata_name, parse

_INDEX = "index"
"""Path of the metadata in the container that a sharded step's manifest names."""


def open_folder(path: str | os.PathLike[str] | None) -> Files:
    """Open the files of a checkpoint folder.

    Raises:
        BadArgumentError: no path, or no such kind of URL.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise BadArgumentError(f"{path!r} is not a path; give one to the constructor, or as checkpoint_id")
    try:
        return open_files(path)
    except (ValueError, ImportError) as e:
        raise BadArgumentError(f"{os.fspath(path)!r}: {e}") from None


def is_place(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a path, or a URL of an installed file system."""
    try:
        open_folder(path)
    except BadArgumentError:
        return False
    return True


def read_index(files: Files, rank: int | None = None) -> Index:
    """Read the metadata of a checkpoint.

    Raises:
        MissingParentError: a completed checkpoint does not exist.
        CorruptDataError, NewerFormatError: it is not readable.
    """
    name = metadata_name(rank)
    where = files.path(name)
    try:
        size = files.size(name)
        if size > MAX_BYTES:
            raise CorruptDataError(f"{where}: {size} bytes; metadata has at most {MAX_BYTES}")
        return parse(files.read(name), where)
    except FileNotFoundError:
        raise MissingParentError(f"{where} is not there: no checkpoint, or one that was not completed") from None
    except OSError as e:
        raise read_error(files, where, e) from None


@contextlib.contextmanager
def _naming_errors(files: Files, file: RankFile, name: str) -> Iterator[None]:
    """Let the errors of reading a container name the rank and the path."""
    path = files.path(f"{FOLDER}/{name}")
    try:
        yield
    except FileNotFoundError:
        raise MissingParentError(
            f"rank {file.rank}: its file {path} is gone: removed, or the checkpoint was saved again while it was read"
        ) from None
    except OSError as e:
        raise read_error(files, f"rank {file.rank}: {path}", e) from None
    except ShrinkpointError as e:
        raise type(e)(f"rank {file.rank}: {path}: {e}") from None


def opener(files: Files, file: RankFile) -> Callable[[Checkpoint | None], Checkpoint]:
    """Return a function that opens a rank's containers from the newest, headers only."""
    chain = iter(file.chain)

    def open_next(above: Checkpoint | None) -> Checkpoint:
        name, nbytes = next(chain, ("", 0))
        if not name:
            raise MissingParentError(f"rank {file.rank}: its metadata names no parent of its last file")
        path = f"{FOLDER}/{name}"
        with _naming_errors(files, file, name):
            size = files.size(path)
            if size != nbytes:
                raise CorruptDataError(f"{size} bytes; the metadata says {nbytes}")
            # The hash is not computed: that would take all of the file. Its name has the beginning of it.
            claimed = "" if above is None else str(above.parent_id)
            if above is not None and not name.endswith(f"-{claimed[:16]}.spt"):
                raise MissingParentError(f"the parent of the container above it is {claimed[:16]}..., not this one")
            return Checkpoint(Ranged(size, lambda start, stop: files.read_range(path, start, stop)), None, claimed)

    return open_next


def resolve(files: Files, file: RankFile) -> Checkpoint:
    """Return a rank's resolved checkpoint: the parent of its next delta."""
    found: Checkpoint | None = None
    for name, _ in reversed(file.chain):
        with _naming_errors(files, file, name):
            found = Checkpoint.from_bytes(files.read(f"{FOLDER}/{name}"), found)
            if not name.endswith(f"-{found.id[:16]}.spt"):
                raise CorruptDataError("its content hash is not the one in its name")
    assert found is not None
    return found


def carry(source: Files, target: Files, file: RankFile) -> bool:
    """Link or copy the containers of a chain into another checkpoint's folder.

    On one local disk they are linked and take no further space; otherwise they are copied.

    Returns:
        Whether all of them exist now; False: one is missing.
    """
    for name, nbytes in file.chain:
        path = f"{FOLDER}/{name}"
        try:
            if _size(target, path) == nbytes:
                continue
            if source.root != target.root and not _linked(source, target, path):
                target.write(path, source.read(path))
            if _size(target, path) != nbytes:
                return False
        except FileNotFoundError:
            return False
    return True


def _size(files: Files, path: str) -> int:
    try:
        return files.size(path)
    except FileNotFoundError:
        return -1


def _linked(source: Files, target: Files, path: str) -> bool:
    return isinstance(source, LocalFiles) and isinstance(target, LocalFiles) and target.link_from(source, path)


class Folders:
    """The folders or URLs that a writer saves to.

    There is one for each checkpoint, or one that each save replaces.

    A *place* is one checkpoint: here the path of a folder.
    """

    def __init__(self, place: str | os.PathLike[str] | None) -> None:
        self.place: str | None = None
        self._files: Files | None = None
        """The files of the save in progress: one object, so that its folders are made durable once."""
        if place is not None:
            self.move(place)

    def move(self, place: Any) -> None:
        """Let the next save go to this place."""
        open_folder(place)
        self.place, self._files = os.fspath(place), None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.place,)

    def begin(self, *, is_coordinator: bool, alone: int | None) -> None:
        """Begin a save; `alone` is the rank if it saves without the others, else None."""
        self._files = open_folder(self.place)

    def files(self, place: str | None = None) -> Files:
        """Return the files of a place; None: of the next save."""
        return self._files if place is None and self._files is not None else open_folder(place or self.place)

    def file_name(self, rank: int, ckpt: Checkpoint) -> str:
        """Return the name of a rank's container."""
        return data_name(rank, ckpt.id)

    def parent(self) -> str | None:
        """Return the place whose checkpoint the first save continues, if there is one there."""
        return self.place

    def exists(self, place: str, alone: int | None) -> bool:
        """Return whether a place has a checkpoint."""
        return open_folder(place).exists(metadata_name(alone))

    def index(self, place: str, alone: int | None) -> Index:
        """Return the metadata of a place."""
        return read_index(open_folder(place), alone)

    def provide(self, place: str, file: RankFile) -> bool:
        """Provide the next save with the containers that a delta over `file` needs.

        Returns False if one is missing.
        """
        return carry(open_folder(place), self.files(), file)

    def commit(self, index: Index, alone: int | None) -> None:
        """Write the metadata, which makes the checkpoint exist; then remove former containers here."""
        files, name = self.files(), metadata_name(alone)
        needed, there = {file for rank in index.files for file, _ in rank.chain}, files.list(FOLDER)
        if gone := missing(files, needed.difference(there)):
            raise MissingParentError(
                f"{files.path(f'{FOLDER}/{min(gone)}')} is gone: another job has saved to this folder meanwhile, or "
                "the ranks do not see one folder"
            )
        files.write(name, index.to_bytes())
        garbage = [f"{FOLDER}/{n}" for n in there if is_data(n, alone) and n not in needed]
        # All errors are ignored, as by `Catalog`: the checkpoint exists, and the next save removes old files.
        with contextlib.suppress(Exception):
            if alone is None:
                garbage += [f"{FOLDER}/{n}" for n in there if n.startswith(TEMPORARY)]
                garbage += [n for n in files.list("") if n.startswith(TEMPORARY) and n.endswith(name)]
            files.remove(garbage)


class StoreSteps:
    """The steps of a store, which all ranks share; has the methods of `Folders`.

    A place is the number of a step as text.

    Args:
        store: of this rank.
        keep: which steps the coordinator keeps after each save; None: all.
    """

    def __init__(self, store: Store, keep: Retention | None = None) -> None:
        self.store, self.keep = store, keep
        self.place: str | None = None
        self._save: SharedSave | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (store_options(self.store), self.keep, self.store.session.loaded, self.place)

    def move(self, place: Any) -> None:
        """See Folders."""
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
        """See Folders. The coordinator takes the store's lock before other ranks get their plans."""
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
        """See Folders."""
        return self.store.session.catalog.files

    def file_name(self, rank: int, ckpt: Checkpoint) -> str:
        """See Folders."""
        return step_data_name(self._step, ckpt.id)

    def parent(self) -> str | None:
        """See Folders: the step that the store object has loaded."""
        return None if self.store.loaded is None else str(self.store.loaded)

    def exists(self, place: str, alone: int | None) -> bool:
        """See Folders."""
        return int(place) in self.store.steps()

    def index(self, place: str, alone: int | None) -> Index:
        """See Folders."""
        return read_step(self.store, int(place))

    def provide(self, place: str, file: RankFile) -> bool:
        """See Folders."""
        return not missing(self.files(), [name for name, _ in file.chain])

    def commit(self, index: Index, alone: int | None) -> None:
        """See Folders; then remove the steps that are not kept, unless others are writing."""
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


Target: TypeAlias = Folders | StoreSteps
"""Where a writer saves, which also has the parents of deltas."""


def _received(options: Mapping[str, Any], keep: Retention | None, loaded: Any, place: str | None) -> StoreSteps:
    """Return a target that was pickled in another process."""
    made = StoreSteps(open_store(options), keep)
    made.store.session.loaded, made.place = loaded, place
    return made


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
