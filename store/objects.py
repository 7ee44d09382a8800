"""Any fsspec file system but the local disk: objects that appear whole, conditional puts, retries with backoff."""

from __future__ import annotations

import errno
import inspect
import posixpath
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Answers that asking again does not change."""
_MISTAKES = (TypeError, ValueError, AttributeError, NotImplementedError, ImportError, MemoryError, RecursionError)


@dataclass(frozen=True, slots=True)
class Retry:
    """How often, and after how long, a failed request is made again.

    Args:
        attempts: requests at most, 1 or more; default 6.
        first: seconds before the second one, doubled each time; default 0.1 (3.1 s in all).
        sleep: how to wait.
    """

    attempts: int = 6
    first: float = 0.1
    sleep: Callable[[float], None] = time.sleep

    def __call__(self, request: Callable[[], T]) -> T:
        """The answer to a request that may be made more than once."""
        for attempt in range(self.attempts - 1):
            try:
                return request()
            except (*_FINAL, *_MISTAKES):
                raise
            # Network libraries have errors of their own that are no OSError.
            except Exception:
                self.sleep(self.first * 2**attempt)
        return request()


class ObjectFiles:
    """The files below a prefix of an fsspec file system.

    Writing an object is atomic. `create` is a conditional put (If-None-Match) where the file system has one (`mode=
    "create"`, as s3fs does); elsewhere two writers that commit the same step at the same instant cannot be told apart.
    """

    local = False

    def __init__(self, fs: Any, root: str, retry: Retry | None = None) -> None:
        self.fs, self.root = fs, root
        self._retry = Retry() if retry is None else retry
        put = getattr(fs, "_pipe_file", None) if getattr(fs, "async_impl", False) else fs.pipe_file
        self._conditional = put is not None and "mode" in inspect.signature(put).parameters

    def path(self, name: str) -> str:
        """Full path of a name."""
        return posixpath.join(self.root, name)

    def read(self, name: str) -> bytes:
        """All bytes of an object; FileNotFoundError where there is none."""
        return bytes(self._retry(lambda: self.fs.cat_file(self.path(name))))

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start..stop of an object; fewer where it ends before."""
        return bytes(self._retry(lambda: self.fs.cat_file(self.path(name), start=start, end=stop)))

    def size(self, name: str) -> int:
        """Bytes of an object; FileNotFoundError where there is none."""
        self.fs.invalidate_cache()
        return int(self._retry(lambda: self.fs.info(self.path(name)))["size"])

    def modified(self, name: str) -> float:
        """When an object was written, in seconds by the clock of the storage."""
        self.fs.invalidate_cache()
        return float(self._retry(lambda: self.fs.modified(self.path(name))).timestamp())

    def list(self, folder: str) -> Sequence[str]:
        """Names of the objects in a folder, sorted; empty where there is no such folder."""
        self.fs.invalidate_cache()
        try:
            found = self._retry(lambda: self.fs.ls(self.path(folder), detail=False))
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(p.rstrip("/")) for p in found)

    def write(self, name: str, data: bytes) -> None:
        """Put an object, over another if need be."""
        self._retry(lambda: self.fs.pipe_file(self.path(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Put an object that must not be there; False if it is, with other bytes.

        An answer may be lost on its way after the object was put; asked again, the store finds its own bytes.
        """

        def put() -> bool:
            try:
                self.fs.pipe_file(self.path(name), data, mode="create")
            except FileExistsError:
                return False
            except OSError as e:
                # s3fs gives a failed precondition as EINVAL where the server does not say which one failed.
                if e.errno != errno.EINVAL or not self._exists(name):
                    raise
                return False
            return True

        if self._conditional:
            placed = self._retry(put)
        elif placed := not self.exists(name):
            self.write(name, data)
        # Retried by itself: six tries are for one request, and not for this one with the put before it.
        return placed or self._retry(lambda: self._holds(name, data))

    def _holds(self, name: str, data: bytes) -> bool:
        """Whether an object that was there a moment ago has these bytes; it may be gone again."""
        try:
            return bytes(self.fs.cat_file(self.path(name))) == data
        except FileNotFoundError:
            return False

    def exists(self, name: str) -> bool:
        """Whether there is such an object."""
        return self._retry(lambda: self._exists(name))

    def _exists(self, name: str) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path(name)))

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are passed over."""
        for name in names:
            try:
                self._retry(lambda name=name: self.fs.rm_file(self.path(name)))  # type: ignore[misc]
            except FileNotFoundError:
                continue
