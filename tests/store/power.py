"""Simulation of power losses: all states that unsynced writes of `store.local` may leave.

The calls that `store.local` makes are recorded with a model of what POSIX promises: a file's bytes are durable after
its fsync, a name in a folder (or its being gone) after the folder's. Before that each unsynced name may or may not have
reached the disk, in any order, and an unsynced file is empty.

A process may also be killed between two calls. Its names that are not synced stay so: the process that is started after
it finds them, and a power loss would still undo them.
"""

from __future__ import annotations

import builtins
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shrinkpoint.store import local


class Killed(BaseException):
    """The simulated end of a process: from then on no call of `store.local` has an effect."""


@dataclass(eq=False)
class _File:
    durable: bytes = b""


@dataclass(frozen=True)
class Image:
    """Folders and files after a power loss."""

    folders: frozenset[str]
    files: tuple[tuple[str, bytes], ...]

    def lay_out(self, origin: Path, target: Path) -> None:
        """Write the image to another folder."""
        target.mkdir(parents=True)
        for name in sorted(self.folders):
            (target / os.path.relpath(name, origin)).mkdir(parents=True, exist_ok=True)
        for name, data in self.files:
            (target / os.path.relpath(name, origin)).write_bytes(data)


@dataclass
class Disk:
    """Simulated disk; `seen` and `kept` are names in memory and on disk, None for a folder."""

    root: Path
    seen: dict[str, _File | None] = field(default_factory=dict)
    kept: dict[str, _File | None] = field(default_factory=dict)
    images: list[tuple[str, Image]] = field(default_factory=list)
    fds: dict[int, str] = field(default_factory=dict)
    calls_left: float = math.inf
    """Calls that change the disk until the process is killed."""

    def __post_init__(self) -> None:
        for path in sorted(self.root.rglob("*")):
            self.seen[str(path)] = None if path.is_dir() else _File(path.read_bytes())
        self.kept = dict(self.seen)

    def call(self) -> None:
        """Count a call that changes the disk; raise Killed if the process does not reach it."""
        if self.calls_left <= 0:
            raise Killed
        self.calls_left -= 1

    def event(self, what: str) -> None:
        """Record every image that a power loss at this moment may leave."""
        changed = sorted(
            n for n in self.seen.keys() | self.kept.keys() if self._at(self.seen, n) != self._at(self.kept, n)
        )
        choices = [set(), set(changed), *({c} for c in changed), *(set(changed) - {c} for c in changed)]
        for out in choices:
            names = dict(self.kept)
            for name in out:
                if name in self.seen:
                    names[name] = self.seen[name]
                else:
                    names.pop(name, None)
            image = self._image(names)
            if not any(image == known for _, known in self.images):
                self.images.append((what, image))

    @staticmethod
    def _at(names: dict[str, _File | None], name: str) -> Any:
        return names.get(name, "nothing")

    def _image(self, names: dict[str, _File | None]) -> Image:
        """Return the reachable files: names below a missing folder are left out."""
        top = str(self.root)
        folders = {top}
        for name in sorted(n for n, f in names.items() if f is None):
            if os.path.dirname(name) in folders:
                folders.add(name)
        files = ((n, f.durable) for n, f in sorted(names.items()) if f is not None and os.path.dirname(n) in folders)
        return Image(frozenset(folders), tuple(files))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls of `store.local` while they are executed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local, "os", _Os(self))
            patch.setattr(local, "open", self._open, raising=False)
            yield
        self.event("end")

    def _open(self, path: str, mode: str) -> Any:
        self.call()
        file = builtins.open(path, mode)  # noqa: SIM115 - the caller closes it
        self.seen[path] = _File()
        self.fds[file.fileno()] = path
        self.event(f"open {path}")
        return file


class _Os:
    """`os` with recorded calls."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, flags: int, *more: Any) -> int:
        fd = os.open(path, flags, *more)
        self._disk.fds[fd] = path
        return fd

    def fsync(self, fd: int) -> None:
        self._disk.call()
        os.fsync(fd)
        disk, path = self._disk, self._disk.fds[fd]
        disk.event(f"before fsync {path}")
        if os.path.isdir(path):
            for name in {n for n in disk.seen.keys() | disk.kept.keys() if os.path.dirname(n) == path}:
                if name in disk.seen:
                    disk.kept[name] = disk.seen[name]
                else:
                    disk.kept.pop(name, None)
        else:
            file = disk.seen[path]
            assert file is not None
            file.durable = Path(path).read_bytes()
        disk.event(f"after fsync {path}")

    def replace(self, source: str, target: str) -> None:
        self._disk.call()
        os.replace(source, target)
        self._disk.seen[target] = self._disk.seen.pop(source)
        self._disk.event(f"rename {target}")

    def link(self, source: str, target: str) -> None:
        self._disk.call()
        os.link(source, target)
        self._disk.seen[target] = self._disk.seen[source]
        self._disk.event(f"link {target}")

    def unlink(self, path: str) -> None:
        self._disk.call()
        os.unlink(path)
        del self._disk.seen[path]
        self._disk.event(f"unlink {path}")

    def mkdir(self, path: str) -> None:
        self._disk.call()
        os.mkdir(path)
        self._disk.seen[path] = None
        self._disk.event(f"mkdir {path}")
