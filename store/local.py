"""A folder on a local disk, such that a crash or a power loss at any instant leaves whole files or none.

A file is written under a temporary name, synced, renamed (or linked, where the name must be new), and its folder
synced: before that last sync nothing counts. Links inside the store are never followed, neither to read nor to write.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence

from .files import TEMPORARY

_READ = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)  # a pipe in the place of a file must not hang its reader
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""What file systems without hard links answer."""


class LocalFiles:
    """The files below a folder of this machine."""

    local = True

    def __init__(self, root: str) -> None:
        self.root = root

    def path(self, name: str) -> str:
        """Full path of a name."""
        return posixpath.join(self.root, name)

    def _folder(self, folder: str) -> str:
        """Full path of a folder, which may be missing but must be no link: what it holds may be removed one day."""
        path = self.path(folder)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(os.lstat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "a symbolic link in the place of a folder", path)
        return path

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        folder, base = posixpath.split(name)
        fd = os.open(posixpath.join(self._folder(folder), base), _READ)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "no regular file", self.path(name))
            yield fd
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes:
        """All bytes of a file; FileNotFoundError where there is none."""
        with self._opened(name) as fd:
            return _read(fd, os.fstat(fd).st_size)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start..stop of a file; fewer where it ends before."""
        with self._opened(name) as fd:
            os.lseek(fd, start, os.SEEK_SET)
            return _read(fd, min(stop, os.fstat(fd).st_size) - start)

    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError where there is none."""
        with self._opened(name) as fd:
            return os.fstat(fd).st_size

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return os.path.lexists(self.path(name))

    def modified(self, name: str) -> float:
        """When a file was written, in seconds by the clock of its file system."""
        return os.lstat(self.path(name)).st_mtime

    def list(self, folder: str) -> Sequence[str]:
        """Names of the files in a folder, sorted, temporary ones too; empty where there is no such folder."""
        try:
            return sorted(os.listdir(self._folder(folder)))
        except FileNotFoundError:
            return []

    def write(self, name: str, data: bytes) -> None:
        """Write a file, over another if need be: durable when this returns, as before or whole when it raises."""
        target = self.path(name)
        with self._temporary(name, data) as temporary:
            os.replace(temporary, target)
        sync_folder(posixpath.dirname(target))

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not be there; False if it is, with other bytes. Of two that race, one succeeds."""
        target = self.path(name)
        try:
            with self._temporary(name, data) as temporary:
                link(temporary, target)
        except FileExistsError:
            return self._holds(name, data)
        try:
            sync_folder(posixpath.dirname(target))
        except BaseException:
            # What is not durable must not be seen to be there.
            _discard(target)
            raise
        return True

    def _holds(self, name: str, data: bytes) -> bool:
        """Whether a file that was there a moment ago has these bytes; it may be gone again."""
        try:
            return self.read(name) == data
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _temporary(self, name: str, data: bytes) -> Iterator[str]:
        """A synced file of these bytes beside the name it is for; gone afterwards if it is still there."""
        below, base = posixpath.split(name)
        folder = self._folder(below)
        make_folder(folder)
        for number in itertools.count():
            temporary = posixpath.join(folder, f"{TEMPORARY}{number}-{base}")
            try:
                # Never an existing file, nor through a link: another writer may be at this very name.
                file = open(temporary, "xb")  # noqa: SIM115 - closed before it is renamed
                break
            except FileExistsError:
                continue
        try:
            with file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException as error:
            _discard(temporary)
            if isinstance(error, OSError):
                # A full disk is met in a write, which does not know what it writes to.
                error.filename = error.filename or self.path(name)
            raise
        try:
            yield temporary
        finally:
            _discard(temporary)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files of one folder, durably; those that are not there are passed over."""
        touched = ""
        for name in names:
            self._folder(posixpath.dirname(name))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(name))
                touched = posixpath.dirname(self.path(name))
        if touched:
            sync_folder(touched)


def _read(fd: int, n: int) -> bytes:
    """The next n bytes, fewer only at the end of the file; the system gives at most 2 GiB at once."""
    parts = []
    while n > 0 and (part := os.read(fd, min(n, 1 << 30))):
        parts.append(part)
        n -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def link(temporary: str, target: str) -> None:
    """Give a file its name, which must be new (FileExistsError)."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        raise
    except OSError as e:
        if e.errno not in _NO_LINKS:
            raise
        # Without hard links two writers that commit the same step at the same instant cannot be told apart.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "exists", target) from None
        os.replace(temporary, target)


def _discard(path: str) -> None:
    """Remove a file if it is there and that can be done; what is left behind is garbage and does no harm."""
    with contextlib.suppress(OSError):
        if os.path.lexists(path):
            os.unlink(path)


def make_folder(folder: str) -> None:
    """Create a folder and its parents, each made durable in the one above it."""
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(os.path.dirname(path))


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable. Windows has no such call and does it by itself."""
    if os.name == "nt":
        return
    fd = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
