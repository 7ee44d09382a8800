"""Copies of the newest checkpoints in shared memory, which outlive the trainer.

A folder per store in `/dev/shm` holds whole data files under their names, and an index of the steps that need them:

    /dev/shm/shrinkpoint-1000/0123456789abcdef0123456789abcdef/000000000010-0123456789abcdef.spt

A file is used only if its contents have the hash that its name gives; everything else is read from storage.

Source: BitSnap section 3.2 (in-memory redundancy).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from blake3 import blake3

from ..codec.errors import BadArgumentError, ShrinkpointWarning
from ..codec.memory_limit import available_memory
from ..kernels.backend.arguments import integer
from .files import Files, seal, unseal
from .manifest import is_content, is_data
from .urls import is_of_this_process, one_name

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

SHARED = "/dev/shm"
FORGOTTEN = 24 * 3600.0
"""Seconds without a save after which the next store that this user opens removes a folder of copies."""
_INDEX, _LOCK, _TEMPORARY = "index.json", "lock", ".tmp-"
Index = list[tuple[int, str, tuple[str, ...]]]
"""Step, data file, and the files of the chain below it; the newest last."""


class InMemoryWarning(ShrinkpointWarning):
    """A checkpoint is in storage but not in memory, or in memory only."""


def check_keep(keep: Any, url: str) -> int:
    """Check `in_memory=`, the number of checkpoints to keep in memory."""
    kept = integer("in_memory", keep, 0, 1000)
    if kept and (fcntl is None or not os.path.isdir(SHARED)):
        raise BadArgumentError(f"in_memory is {kept}; this system has no {SHARED}, so it must be 0")
    if kept and is_of_this_process(url):
        raise BadArgumentError(f"in_memory is {kept}; {url} exists in this process only, so copies outlive nothing")
    return kept


def user_folder() -> str:
    """Return the path of this user's folder of copies."""
    return f"{SHARED}/shrinkpoint-{os.getuid()}"


class MemoryCopies:
    """The copies of one store.

    Args:
        url: of the store, in any spelling.
        keep: how many of the newest checkpoints are held, 1 or more, each with all files that restoring it needs.

    Example:
        >>> from shrinkpoint.store.memory_copies import MemoryCopies
        >>> MemoryCopies("runs/a", keep=2).get("000000000010-0123456789abcdef.spt") is None
        True
    """

    def __init__(self, url: str, keep: int = 2) -> None:
        self.keep = keep
        self.folder = f"{user_folder()}/{blake3(os.fsencode(one_name(url))).hexdigest()[:32]}"

    def clean(self) -> None:
        """Remove files of crashed processes, and folders of stores without a save for a day."""
        with contextlib.suppress(OSError):
            _check_private(user_folder())
            for name in os.listdir(user_folder()):
                folder = f"{user_folder()}/{name}"
                with contextlib.suppress(OSError):
                    if folder != self.folder and time.time() - os.stat(folder).st_mtime > FORGOTTEN:
                        shutil.rmtree(folder)
            with self._locked(create=False):
                self._write(self._index())

    def put(self, step: int, file: str, needs: Sequence[str], data: bytes) -> bool:
        """Hold a checkpoint; remove the oldest ones beyond `keep`, or if memory is short.

        Args:
            step: its training step.
            file: name of its data file.
            needs: names of the data files of the chain below it.
            data: bytes of the file.

        Returns:
            Whether the checkpoint is held; if not, an InMemoryWarning gives the reason.
        """
        try:
            with self._locked(create=True):
                index = [e for e in self._index() if e[0] != step]
                index = index[max(0, len(index) + 1 - self.keep) :]
                self._write(index, needs)
                while (room := _room()) < len(data):
                    if not index:
                        raise MemoryError(f"{len(data)} bytes; {room} are free in {SHARED}")
                    del index[0]
                    self._write(index, needs)
                self._write_file(file, data)
                self._write([*index, (step, file, tuple(needs))])
            return True
        except (OSError, MemoryError) as e:
            warnings.warn(f"step {step} is not kept in memory: {type(e).__name__}: {e}", InMemoryWarning, stacklevel=4)
            return False

    def get(self, file: str) -> bytes | None:
        """Return the bytes of a data file; None without a copy."""
        try:
            return self._read(file)
        except OSError:
            return None

    def _read(self, file: str) -> bytes:
        _check_private(user_folder(), self.folder)
        with open(f"{self.folder}/{file}", "rb") as f:
            return f.read()

    def steps(self) -> list[int]:
        """Steps held, ascending."""
        return sorted({step for step, *_ in self._index()})

    def drop(self, steps: Sequence[int]) -> None:
        """Remove the copies of some steps."""
        with contextlib.suppress(OSError), self._locked(create=False):
            self._write([e for e in self._index() if e[0] not in steps])

    def clear(self) -> None:
        """Remove all copies."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def _locked(self, *, create: bool) -> Iterator[None]:
        """Hold the lock of the folder, so that one process at a time changes it."""
        for folder in (user_folder(), self.folder):
            with contextlib.suppress(FileExistsError):
                if create:
                    os.mkdir(folder, 0o700)
            _check_private(folder)
        fd = os.open(f"{self.folder}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _index(self) -> Index:
        """Return the steps that have copies; none if the index is damaged."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return [(int(step), str(file), tuple(needs)) for step, file, needs in unseal(self._read(_INDEX))["steps"]]
        return []

    def _write_file(self, file: str, data: bytes) -> None:
        temporary = f"{self.folder}/{_TEMPORARY}{os.getpid()}"
        with open(temporary, "wb") as f:
            f.write(data)
        os.replace(temporary, f"{self.folder}/{file}")

    def _write(self, index: Index, also: Sequence[str] = ()) -> None:
        """Replace the index, and remove the files that neither it nor `also` names."""
        self._write_file(_INDEX, seal({"steps": index}))
        needed = {_INDEX, _LOCK, *also, *(name for _, file, needs in index for name in (file, *needs))}
        for name in os.listdir(self.folder):
            if name not in needed:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self.folder}/{name}")


def _check_private(*folders: str) -> None:
    """Raise PermissionError unless only this user can enter these folders."""
    for folder in folders:
        info = os.lstat(folder)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
            raise PermissionError(f"{folder} must be a folder that only user {os.getuid()} can enter")


def _room() -> int:
    """Return the bytes that can be put into shared memory."""
    info, available = os.statvfs(SHARED), available_memory()
    free = info.f_bavail * info.f_frsize
    return free if available is None else min(free, available)


class CopyReader:
    """A function that reads a data file of a store from memory if an intact copy exists.

    `hits` counts the files that were read from memory.
    """

    def __init__(self, files: Files, copies: MemoryCopies) -> None:
        self._files, self._copies, self.hits = files, copies, 0

    def __call__(self, name: str) -> bytes:
        """Return all bytes of a file; FileNotFoundError if it does not exist."""
        base = name.rpartition("/")[2]
        data = self._copies.get(base) if is_data(base) else None
        if data is not None and is_content(base, data):
            self.hits += 1
            return data
        if data is not None:
            message = f"{self._files.path(name)}: its copy in memory is damaged; read from storage"
            warnings.warn(message, InMemoryWarning, stacklevel=2)
        return self._files.read(name)


def reader_of_copies(files: Files, url: str) -> CopyReader | None:
    """Return the reader of the copies of a store; None without any copy."""
    if fcntl is None or is_of_this_process(url):
        return None
    copies = MemoryCopies(url)
    return CopyReader(files, copies) if copies.steps() else None
