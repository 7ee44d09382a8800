"""Durable files: bytes that are on the disk before they count, and names that appear in one atomic step.

On a local disk a file is written under a temporary name, synced, renamed, and its folder synced: after a crash or a
power loss the name either does not exist or holds the whole file. Object stores make a whole object visible at once by
themselves.
"""

from __future__ import annotations

import os
import posixpath
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

if TYPE_CHECKING:
    from collections.abc import Sequence

TEMPORARY = ".tmp-"


class Files:
    """The files of one folder on any fsspec file system; names are relative, with `/`."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self.fs: Any
        self.root: str
        self.fs, self.root = fsspec.core.url_to_fs(os.fspath(url))
        self.root = self.root.rstrip("/") or "/"
        self.local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        """Full path of a name."""
        return posixpath.join(self.root, name)

    def read(self, name: str) -> bytes:
        """All bytes of a file; FileNotFoundError where there is none."""
        data: bytes = self.fs.cat_file(self.path(name))
        return data

    def list(self, folder: str) -> Sequence[str]:
        """Names of the files in a folder, sorted, temporary ones too; empty where there is no such folder."""
        self.fs.invalidate_cache()
        try:
            found = self.fs.ls(self.path(folder), detail=False)
        except FileNotFoundError:
            return []
        return sorted(posixpath.basename(p.rstrip("/")) for p in found)

    def remove(self, name: str) -> None:
        """Remove a file, which must be there."""
        self.fs.rm_file(self.path(name))
        if self.local:
            _sync_folder(posixpath.dirname(self.path(name)))

    def write(self, name: str, data: bytes) -> bool:
        """Write a file: when this returns, its bytes and name are durable; when it raises, no new name is there.

        Returns:
            Whether the name is new, rather than replaced.
        """
        target = self.path(name)
        new = not self.fs.exists(target)
        if not self.local:
            self.fs.pipe_file(target, data)
            return new
        folder, base = posixpath.split(target)
        _make_folder(folder)
        temporary = posixpath.join(folder, f"{TEMPORARY}{os.getpid()}-{base}")
        try:
            with open(temporary, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, target)
            _sync_folder(folder)
        except BaseException:
            for leftover in (temporary, target) if new else (temporary,):
                if os.path.lexists(leftover):
                    os.unlink(leftover)
            raise
        return new


def _make_folder(folder: str) -> None:
    """Create a folder and its parents, each made durable in the one above it."""
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        os.makedirs(path, exist_ok=True)
        _sync_folder(os.path.dirname(path))


def _sync_folder(folder: str) -> None:
    """Make the names in a folder durable. Windows has no such call and does it by itself."""
    if os.name == "nt":
        return
    fd = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
