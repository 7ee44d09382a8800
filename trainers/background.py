"""Saves in the background, whose pointer files appear when the checkpoints are durable."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from ..codec.checkpoint import Checkpoint
from ..codec.config import Config
from ..codec.errors import BadArgumentError, ShrinkpointError
from ..kernels.backend.arguments import number, or_none
from ..store.saver.saver import Saver, SaveResult
from ..store.store import Store
from .pointers import (
    PathLike,
    PendingPointer,
    Pointer,
    drop,
    grads_within,
    kinds_within,
    next_step,
    point_to,
    read_pointer,
)
from .save_timing import timed


def store_behind(saver: Any) -> Store:
    """Return a store, or the one of a Saver; BadArgumentError for other objects."""
    if isinstance(saver, Saver):
        return saver.store
    if isinstance(saver, Store):
        return saver
    raise BadArgumentError(f"saver must be a Saver or a Store, not {type(saver).__qualname__}")


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


class Background:
    """A `Saver` for pointer files; one save is in flight at a time.

    Removals (`then`) wait until the checkpoint exists, so that a run that is killed at any moment has the one before.

    Args:
        store: where to.
        saver: to save by, closed by the caller; None: a new one for that store, ended by `close`.
        compact: of that one, see `Saver`.

    Raises:
        BadArgumentError: a Saver with `keep`.
    """

    def __init__(self, store: Store, saver: Saver | None = None, *, compact: float | None = None) -> None:
        self.store = store
        self._own = saver is None
        self._saver = Saver(store, compact=compact) if saver is None else refuse_keep(saver)
        self._pending: PendingPointer | None = None

    def parent(self) -> Checkpoint | None:
        """Parent of the next save, as `Store.parent`, once nothing is in flight.

        None, too, if the parent was removed since, so that only the worker still has it.

        Raises:
            Exception: the error of the save in flight.
        """
        self.wait()
        done = self._saver.last
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
        """Copy a state, save it as the store's next step, and let a file point to that.

        Raises:
            Exception: what the save before this one raised, see `Saver.save`; this one was not begun then.
        """
        self.wait()
        before = read_pointer(path)
        fs, name = fsspec.core.url_to_fs(os.fspath(path))
        fs.makedirs(os.path.dirname(name), exist_ok=True)
        known, averages = kinds_within(state, kinds), grads_within(state, grads)
        step = next_step(self.store)
        future: Any = timed(
            self.store.url, step, lambda: self._saver.save(step, state, grads=averages, kinds=known, cfg=cfg)
        )
        self._pending = pending = PendingPointer(path, self.store.url)
        future.add_done_callback(
            lambda saved: pending.finish(lambda: self._write_pointer(saved.result(), path, before))
        )

    def then(self, work: Callable[[], object]) -> None:
        """Call `work` when the save in flight is durable, or at once; never if the save fails.

        The saver's maintenance between saves starts after the call, or is stopped for it: otherwise a call that removes
        steps would wait for a compaction.
        """
        if self._pending is None or not self._pending.then(work):
            self._saver.rest()
            work()

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            ChildProcessError: the saver's worker is stopped, see `Saver`; the save is still in flight.
            Exception: what the save raised.
        """
        pending = self._pending
        if pending is not None:
            pending.wait()
            self._pending = None
            self._saver.wait()
            pending.done.result()

    def close(self) -> None:
        """Wait, and end the worker."""
        try:
            self.wait()
        finally:
            if self._own:
                self._saver.close()

    def _write_pointer(self, result: SaveResult, path: PathLike, before: Pointer | None) -> None:
        if result.status != "saved":
            raise ShrinkpointError(f"{os.fspath(path)}: the save of step {result.step} was {result.status}")
        # Another object than training uses in its thread.
        store = Store(self.store.url, self.store.cfg)
        fs, name = fsspec.core.url_to_fs(os.fspath(path))
        if isinstance(fs, LocalFileSystem) and not fs.isdir(os.path.dirname(name)):
            drop(store, [result.step])  # the folder was removed meanwhile, and the checkpoint with it
            return
        point_to(path, store, result.step, store.describe(result.step).identity, before)
