"""Pointer files to steps of a store, and saves behind them, at once or in the background.

The file that a framework names is such a pointer. So checkpoints can be deltas of one another, and each can still be
listed, rotated and removed by its own path. A pointer is a small JSON file; it names a store next to it or above it by
its relative path, so that a run's folder can be moved as a whole.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import posixpath
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..codec.checkpoint import Checkpoint
from ..codec.config import Config
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, NewerFormatError, ShrinkpointError
from ..codec.evidence.kind import kinds_for
from ..codec.format.bounded_json import loads
from ..codec.state.leaves import is_array
from ..codec.state.tree import flatten
from ..kernels.backend.arguments import number, or_none
from ..store.files import DAMAGE
from ..store.local import LocalFiles, read_file
from ..store.manifest import Manifest
from ..store.saver.exit import EXIT_CLEANUP
from ..store.saver.saver import Saver, SaveResult
from ..store.store import Store
from ..store.urls import one_name, textual_name
from .processes import rank
from .save_timing import store_behind, timed

PathLike: TypeAlias = str | os.PathLike[str]
FOLDER, POINTER = "shrinkpoint", "shrinkpoint.json"
"""Names that adapters give the store of a run, and a pointer file in the folder of a checkpoint."""
_FORMAT = "shrinkpoint pointer"
_VERSION = 1
_LARGEST = 1 << 16
_LARGEST_PLACEHOLDER = 1 << 12


class PendingPointer:
    """A pointer file whose checkpoint is being saved, and the calls that wait for it.

    Args:
        path: of the file.
        url: of the store.
        is_read: whether `read_pointer` in this process waits for the file; default True.
    """

    def __init__(self, path: PathLike, url: str, *, is_read: bool = True) -> None:
        self.url = url
        self.done: Future[None] = Future()
        """Done when the file is written and the waiting calls are made, or the save has failed."""
        self._key = key_of(fsspec.core.url_to_fs(os.fspath(path))[1])
        self._calls: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        if is_read:
            in_flight[self._key] = self

    def wait(self) -> None:
        """Wait until the save is done.

        Raises:
            ChildProcessError: the saver's worker is stopped, see `Saver`.
        """
        EXIT_CLEANUP.wait_for(one_name(self.url))
        concurrent.futures.wait([self.done])

    def then(self, call: Callable[[], object]) -> bool:
        """Make a call once the file is written, never if the save fails; False: the save has ended."""
        with self._lock:
            if self.done.done():
                return False
            self._calls.append(call)
            return True

    def finish(self, write: Callable[[], object]) -> None:
        """Write the file, then make the waiting calls."""
        try:
            write()
            in_flight.pop(self._key, None)  # the waiting calls may read the file
            while (call := self._next()) is not None:
                call()
        except BaseException as e:
            in_flight.pop(self._key, None)
            with self._lock:
                self._calls = []
                self.done.set_exception(e)

    def _next(self) -> Callable[[], object] | None:
        """Return the next waiting call; without one, end the save."""
        with self._lock:
            if not self._calls:
                self.done.set_result(None)
                return None
            return self._calls.pop(0)


in_flight: dict[str, PendingPointer] = {}
"""Pointer files of this process whose checkpoints are being saved, by `key_of` their names."""


@dataclass(frozen=True, slots=True)
class Pointer:
    """Contents of a pointer file.

    Args:
        store: path or URL of the store; a relative path is relative to the file's folder.
        step: step in the store.
        identity: of the checkpoint, so that another checkpoint of the same step is recognised.
    """

    store: str
    step: int
    identity: str

    def to_bytes(self) -> bytes:
        """Return the contents of the file as JSON."""
        fields = {"format": _FORMAT, "version": _VERSION, "store": self.store, "step": self.step}
        return (json.dumps({**fields, "identity": self.identity}) + "\n").encode()


def key_of(name: str) -> str:
    """Return the key of a file in `in_flight`: its path without links."""
    return os.path.realpath(name)


def wait_for_files() -> None:
    """Wait until no checkpoint of this process is being saved behind a pointer file.

    Raises:
        Exception: the error of such a save.
    """
    for pending in list(in_flight.values()):
        pending.wait()
        pending.done.result()


def read_pointer(path: PathLike) -> Pointer | None:
    """Read the pointer in a file; None if the file is missing or something else.

    The call waits for a pointer file that this process is saving in the background.
    """
    fs, name = fsspec.core.url_to_fs(os.fspath(path))
    pending = in_flight.get(key_of(name)) if in_flight else None
    if pending is not None:
        pending.wait()
    return _read(fs, name, path)


def _read(fs: Any, name: str, path: PathLike) -> Pointer | None:
    """Read a pointer file as it is now."""
    try:
        if not fs.isfile(name) or fs.size(name) > _LARGEST:
            return None
        fields = loads(fs.cat_file(name))
    except (ValueError, FileNotFoundError):
        return None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        return None
    version = fields.get("version")
    if type(version) is int and version > _VERSION:
        raise NewerFormatError(
            f"{os.fspath(path)}: a pointer of version {str(version)[:20]}; this reader knows up to {_VERSION}"
        )
    store, step, identity = fields.get("store"), fields.get("step"), fields.get("identity")
    is_known = type(version) is int and version == _VERSION
    if not is_known or type(step) is not int or not isinstance(store, str) or type(identity) is not str:
        raise CorruptDataError(f"{os.fspath(path)}: a pointer that is malformed")
    if not _is_name(store):
        raise CorruptDataError(f"{os.fspath(path)}: a pointer that is malformed: its store cannot be a path")
    return Pointer(store, step, identity)


def _is_name(text: str) -> bool:
    """Return whether a file system could have this path."""
    with contextlib.suppress(UnicodeEncodeError):
        return b"\0" not in os.fsencode(text)
    return False


def is_placeholder(path: PathLike) -> bool:
    """Return whether a local file only names the pointer file of its contents."""
    if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST_PLACEHOLDER:
        return False
    return POINTER.encode() in read_file(os.fspath(path), _LARGEST_PLACEHOLDER)


def save_at(
    path: PathLike,
    store: Store,
    state: Any,
    *,
    grads: Any = None,
    kinds: Mapping[str, Any] | None = None,
    cfg: Config | str | None = None,
) -> Pointer:
    """Save a state as the store's next step, and let a file point to it."""
    before, saved = _save(path, store, state, grads, kinds, cfg)
    return point_to(path, store, saved.step, saved.checkpoint.identity, before)


def _save(path: PathLike, saver: Saver | Store, state: Any, grads: Any, kinds: Any, cfg: Any) -> tuple[Any, Any]:
    """Save a state as the next step; return the pointer that the file has, and the result."""
    before, step = read_pointer(path), next_step(store_behind(saver))
    known, averages = kinds_within(state, kinds), grads_within(state, grads)
    return before, timed(saver, step, lambda: saver.save(step, state, grads=averages, kinds=known, cfg=cfg))


def point_to(path: PathLike, store: Store, step: int, identity: str, before: Pointer | None) -> Pointer:
    """Let a file point to a step that was saved for it, and drop the step it pointed to before.

    If the file cannot be written, the new step is dropped, because no file would point to it.
    """
    try:
        pointer = write_pointer(path, store, step, identity)
    except BaseException:
        with contextlib.suppress(Exception):  # the error that is under way says more
            fs, name = fsspec.core.url_to_fs(os.fspath(path))
            if _read(fs, name, path) == before:
                drop(store, [step])
        raise
    drop_replaced(path, store, before)
    return pointer


def kinds_within(state: Any, kinds: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the kinds that belong to arrays of a framework's state."""
    return kinds_for(kinds, (node.path for node in flatten(state, is_array)[1])) if kinds else kinds


def grads_within(state: Any, grads: Any) -> Any:
    """Return the gradients that belong to arrays of a framework's state, or None."""
    if grads is None:
        return None
    found = {node.path: node.value for node in flatten(grads, is_array)[1]}
    return kinds_for(found, (node.path for node in flatten(state, is_array)[1])) or None


def next_step(store: Store) -> int:
    """Return the number after the store's last step."""
    steps = store.steps()
    return steps[-1] + 1 if steps else 0


def write_pointer(path: PathLike, store: Store, step: int, identity: str) -> Pointer:
    """Write a pointer file durably, and atomically if possible."""
    fs, name = fsspec.core.url_to_fs(os.fspath(path))
    where = store.url
    if "://" not in where and isinstance(fs, LocalFileSystem):
        where = os.path.relpath(where, os.path.dirname(os.path.abspath(name)))
    pointer = Pointer(where, step, identity)
    folder, base = os.path.split(name)
    if isinstance(fs, LocalFileSystem):
        LocalFiles(folder).write(base, pointer.to_bytes())
    else:
        fs.makedirs(folder, exist_ok=True)
        fs.pipe_file(name, pointer.to_bytes())
    return pointer


def drop_replaced(path: PathLike, store: Store, before: Pointer | None) -> None:
    """Remove the step that a rewritten file pointed to, if no other file does.

    A step that was gone from the store is left out: a new one may have its number.
    """
    if before is None or not points_to(path, before, store) or is_shared(path, before):
        return
    with contextlib.suppress(*DAMAGE):  # a damaged step is not a new one
        if manifest_of(store, before) is None:
            return
    drop(store, [before.step])


def is_shared(path: PathLike, pointer: Pointer) -> bool:
    """Return whether another file (a link or a copy) points to the same step.

    The other files in its folder are read, and the files of the same name in sibling folders. The call does not wait
    for saves: a file that is being saved in the background points to its former step until the new one exists.
    """
    fs, name = fsspec.core.url_to_fs(os.fspath(path))
    fs.invalidate_cache()
    folder, base = os.path.split(name)
    places = _places(path, pointer)
    others = [entry["name"] for entry in _entries(fs, folder) if entry["type"] == "file"]
    others += [f"{entry['name'].rstrip('/')}/{base}" for entry in _entries(fs, os.path.dirname(folder))]
    for other in others:
        if os.path.normpath(other) == os.path.normpath(name):
            continue
        url = fs.unstrip_protocol(other)
        try:
            found = _read(fs, other, url)
        except (CorruptDataError, NewerFormatError):  # its step is unknown, so no step may be removed
            return True
        if found is not None and found.step == pointer.step and places & _places(url, found):
            return True
    return False


def _entries(fs: Any, folder: str) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = fs.ls(folder or ".", detail=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return found


def _named(path: PathLike, pointer: Pointer) -> list[tuple[str, str]]:
    """Return the places that a pointer may name, each with the folder of the pointer.

    There are two if the file is reached by links: seen from the given path, and from where the file really is.
    """
    text = os.fspath(path)
    text = text.partition("://")[2] if text.startswith(("file://", "local://")) else text
    if "://" in text:
        protocol, _, name = text.partition("://")
        folder = f"{protocol}://{posixpath.dirname(name)}"
        is_whole = "://" in pointer.store or os.path.isabs(pointer.store)
        return [(pointer.store if is_whole else f"{folder}/{pointer.store}", folder)]
    folders = dict.fromkeys((os.path.dirname(os.path.abspath(text)), os.path.dirname(os.path.realpath(text))))
    if "://" in pointer.store:
        return [(pointer.store, folder) for folder in folders]
    return [(os.path.normpath(os.path.join(folder, pointer.store)), folder) for folder in folders]


def _places(path: PathLike, pointer: Pointer) -> set[str]:
    return {textual_name(place) for place, _ in _named(path, pointer)}


def points_to(path: PathLike, pointer: Pointer, store: Store) -> bool:
    """Return whether a pointer names this store. No other store is opened for it."""
    return textual_name(store.url) in _places(path, pointer)


def store_of(path: PathLike, pointer: Pointer, *, is_item: bool = False) -> Store:
    """Return the store that a pointer file names, which must be below its folder or next to it.

    A file may come from anybody: a name that leads elsewhere, also by a link, could open any URL, and any store.

    Args:
        path: the file.
        pointer: its contents.
        is_item: whether the folder of the checkpoint is the one above that of the file.

    Raises:
        BadArgumentError: the store is elsewhere.
    """

    def is_near(place: str, folder: str) -> bool:
        whole = textual_name(folder)
        return _is_near(textual_name(place), posixpath.dirname(whole) if is_item else whole)

    inside = [place for place, folder in _named(path, pointer) if is_near(place, folder)]
    if not inside:
        raise BadArgumentError(
            f"{os.fspath(path)}: points to the store {pointer.store[:200]!r}, which is neither below nor next to the "
            "folder of this file; open it by yourself, if you know it, and give it as store="
        )
    return Store(next(filter(os.path.isdir, inside), inside[0]))


def _is_near(place: str, folder: str) -> bool:
    """Return whether a place is below a folder or next to it, within a bucket or host."""
    above = posixpath.dirname(folder)
    is_below = place.startswith(f"{folder.rstrip('/')}/")
    is_next = posixpath.dirname(place) == above and place != folder and "/" in above
    return "::" not in place and (is_below or is_next)


def pointer_at(path: PathLike) -> Pointer:
    """Return the pointer in a file; BadArgumentError if the file is missing or something else."""
    pointer = read_pointer(path)
    if pointer is None:
        raise BadArgumentError(f"{os.fspath(path)}: not a checkpoint of shrinkpoint")
    return pointer


def manifest_of(store: Store, pointer: Pointer) -> Manifest | None:
    """Return the manifest that a pointer names; None if the store does not have it."""
    found = store.describe(pointer.step) if pointer.step in store.steps() else None
    return found if found is not None and found.identity == pointer.identity else None


def load_at(
    path: PathLike, paths: str | Sequence[str] | None = None, *, store: Store | None = None, first: bool | None = None
) -> Any:
    """Load the state that a file points to.

    Args:
        path: the pointer file.
        paths: see `Store.load`.
        store: the store it is known to be in: the next save can then be a delta over the loaded state, and the restore
            is counted there. None: the store that the file names, which is only read, see `store_of`.
        first: whether this process is the one of a run that counts its restores. None: rank 0 of torch's.

    Raises:
        BadArgumentError: not a pointer, or one to a store elsewhere.
        MissingParentError: the store does not have it (any more): the file was copied without it, or it was removed.
        CorruptDataError: it is not readable.
    """
    pointer = pointer_at(path)
    is_own = store is not None
    store = store_of(path, pointer) if store is None else store
    if manifest_of(store, pointer) is None:
        raise MissingParentError(
            f"{os.fspath(path)}: points to step {pointer.step} of {store.url}, which has no such checkpoint; "
            "a checkpoint is copied or moved together with its store"
        )
    # All processes of a run load; that is one restore.
    first = rank() == 0 if first is None else first
    return store.load(pointer.step, paths, count=is_own and paths is None and first)


def steps_in_use(store: Store, paths: Iterable[PathLike]) -> set[int]:
    """Return the steps of a store that some of these files point to."""
    found = set()
    for path in paths:
        pointer = read_pointer(path)
        if pointer is not None and points_to(path, pointer, store):
            found.add(pointer.step)
    return found


def drop(store: Store, steps: Iterable[int]) -> None:
    """Remove unprotected steps that no file points to, and the files that only they needed."""
    gone = sorted(set(steps) & set(store.steps()) - set(store.pins()) - set(store.tags().values()))
    if gone:
        store.drop(*gone)
        store.gc()


def drop_unreferenced(store: Store, pointer: str) -> None:
    """Remove the steps that no pointer file of this name next to the store points to."""
    fs, name = fsspec.core.url_to_fs(store.url)
    fs.invalidate_cache()
    folders = (entry["name"].rstrip("/") for entry in _entries(fs, os.path.dirname(name.rstrip("/"))))
    drop(store, set(store.steps()) - steps_in_use(store, (fs.unstrip_protocol(f"{f}/{pointer}") for f in folders)))


def refuse_keep(saver: Saver) -> Saver:
    """Refuse a Saver that removes steps by itself.

    Raises:
        BadArgumentError: it would remove what files still point to.
    """
    if saver.keep is not None:
        raise BadArgumentError(
            "saver: with keep= it would remove steps that checkpoints of the framework point to; leave keep= out and "
            "let the framework's own rotation (total_limit, max_to_keep) decide which are kept"
        )
    return saver


def check_compact(compact: float | None, *, background: bool) -> float | None:
    """Check the bound for compaction between saves; raise BadArgumentError if it has no use.

    Raises:
        BadArgumentError: saves are not in the background, or it is out of range.
    """
    if compact is not None and not background:
        raise BadArgumentError("compact: it is done between saves in the background; say background=True, too")
    return or_none("compact", compact, number, 1, 1e6)


class PointedSaves:
    """Saves behind pointer files; one is in flight at a time.

    Removals (`then`) wait until the checkpoint exists, so that a run that is killed at any moment has the one before.
    """

    _saver: Saver | None = None

    def __init__(self, store: Store) -> None:
        self.store = store
        self._pending: PendingPointer | None = None

    def then(self, work: Callable[[Store], object]) -> None:
        """Call `work` with the store once the save in flight is durable; never if the save fails.

        Without a save in flight it is called at once. The saver's maintenance between saves starts after the call, or
        is stopped for it: otherwise a call that removes steps would wait for a compaction.
        """
        if self._saver is None and self._pending is None:
            work(self.store)
            return
        store = self._another_store()
        if self._pending is None or not self._pending.then(lambda: work(store)):
            if self._saver is not None:
                self._saver.rest()
            work(store)

    def _another_store(self) -> Store:
        """Return another object than training uses in its thread."""
        return Store(self.store.url, self.store.cfg)

    def _point_to(self, path: PathLike, step: int, before: Pointer | None) -> None:
        store = self._another_store()
        point_to(path, store, step, store.describe(step).identity, before)


class WholeSaves(PointedSaves):
    """Saves of whole states behind pointer files.

    Args:
        saver: a Store: a save returns when its checkpoint is durable. A Saver, which the caller closes: when the state
            is copied.
        background: save to a Store by a new Saver, which `close` ends.
        compact: of that one, see `Saver`.

    Raises:
        BadArgumentError: a Saver with `keep`.
    """

    def __init__(self, saver: Saver | Store, *, background: bool = False, compact: float | None = None) -> None:
        super().__init__(store_behind(saver))
        self._own = background
        saver = Saver(self.store, compact=compact) if background else saver
        self._saver = refuse_keep(saver) if isinstance(saver, Saver) else None

    def parent(self) -> Checkpoint | None:
        """Parent of the next save, as `Store.parent`, once nothing is in flight.

        None, too, if the parent was removed since, so that only the worker still has it.

        Raises:
            Exception: the error of the save in flight.
        """
        self.wait()
        done = None if self._saver is None else self._saver.last
        if done is None:
            return self.store.parent
        if done.step not in self.store.steps():
            return None
        self.store.follow(done.step)
        return self.store.parent

    def save(
        self,
        path: PathLike,
        state: Any,
        *,
        grads: Any = None,
        kinds: Mapping[str, Any] | None = None,
        cfg: Config | str | None = None,
    ) -> None:
        """Save a state as the store's next step, and let a file point to that.

        Raises:
            Exception: what this save raised; in the background, what the save before this one raised, see `Saver.save`;
                this one was not begun then.
        """
        self.wait()
        if self._saver is None:
            save_at(path, self.store, state, grads=grads, kinds=kinds, cfg=cfg)
            return
        fs, name = fsspec.core.url_to_fs(os.fspath(path))
        fs.makedirs(os.path.dirname(name), exist_ok=True)
        before, future = _save(path, self._saver, state, grads, kinds, cfg)
        self._pending = pending = PendingPointer(path, self.store.url)
        future.add_done_callback(
            lambda saved: pending.finish(lambda: self._write_pointer(saved.result(), path, before))
        )

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            ChildProcessError: the saver's worker is stopped, see `Saver`; the save is still in flight.
            Exception: what the save raised.
        """
        pending = self._pending
        if pending is not None and self._saver is not None:
            pending.wait()
            self._pending = None
            self._saver.wait()
            pending.done.result()

    def close(self) -> None:
        """Wait, and end the worker."""
        try:
            self.wait()
        finally:
            if self._own and self._saver is not None:
                self._saver.close()

    def _write_pointer(self, result: SaveResult, path: PathLike, before: Pointer | None) -> None:
        if result.status != "saved":
            raise ShrinkpointError(f"{os.fspath(path)}: the save of step {result.step} was {result.status}")
        fs, name = fsspec.core.url_to_fs(os.fspath(path))
        if isinstance(fs, LocalFileSystem) and not fs.isdir(os.path.dirname(name)):
            # The folder was removed meanwhile, and the checkpoint with it.
            drop(self._another_store(), [result.step])
            return
        self._point_to(path, result.step, before)
