"""Sharded steps: several processes write the files of one step, and one process commits it."""

from __future__ import annotations

import contextlib

from ..codec.checkpoint import Checkpoint
from ..codec.errors import MissingParentError
from .chain import FOLDER, missing
from .files import Files
from .manifest import Manifest
from .store import Store


class SharedSave:
    """The save of a sharded step, in the process that commits it.

    It holds the store's lock from its creation until `close`. Meanwhile `gc` removes neither the files that other
    processes have written for this step, nor the parents of these files. So create it before the others begin.

    Args:
        store: the store to save to.

    Raises:
        TimeoutError: garbage collection did not end in time.
    """

    def __init__(self, store: Store) -> None:
        self._session, self._files = store.session, files_of(store)
        self._stack = contextlib.ExitStack()
        self._lease = self._stack.enter_context(store._lock.shared())

    def commit(self, manifest: Manifest, index: Checkpoint) -> None:
        """Write the index of the shards, then commit the step in one atomic operation.

        Raises:
            MissingParentError: a file of a rank is missing; nothing is committed.
            OSError: the bytes could not be written; nothing is committed.
        """
        if gone := missing(self._files, [name for name, _ in manifest.shards]):
            path = self._files.path(f"{FOLDER}/{min(gone)}")
            raise MissingParentError(
                f"step {manifest.step}: {path} is missing: removed, or the ranks do not see one store"
            )
        self._files.write(f"{FOLDER}/{manifest.file}", index.to_bytes())
        with contextlib.ExitStack() as undo:
            self._session.commit(manifest, self._lease, undo)
            undo.pop_all()

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        self._stack.close()


def files_of(store: Store) -> Files:
    """Return the files of a store."""
    return store._files
