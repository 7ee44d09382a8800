"""A folder on a local disk: a crash or power loss at any moment leaves whole files or none.

A file is written under a temporary name, synced, renamed (or linked, if the name must be new), and its folder is
synced: only then is it durable. Links inside the store are never followed, neither to read nor to write.

Files in folders that others may have written are opened by `regular`: no pipes, and no links that lead out.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import posixpath
import secrets
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

from ..codec.format.fields import Bytes
from ..codec.memory_limit import NEVER_TOO_LARGE, total_memory
from ..kernels.errors import BadArgumentError
from .files import TEMPORARY, Files, StoreWarning

MOST_JSON = 1 << 26
"""Bytes of a file of JSON."""
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""Errors of file systems without hard links."""
_NO_FOLDER_SYNC = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
"""Errors of file systems that cannot sync a folder, such as some network file systems."""
_unsynced = False


class LocalFiles(Files):
    """The files below a folder of this machine."""

    local = True

    def __init__(self, root: str) -> None:
        self.root = root
        self._durable: set[str] = set()
        """Folders whose own names this object has made durable."""

    def _folder(self, folder: str) -> str:
        """Return the full path of a folder, which may be missing but must not be a link."""
        path = self.path(folder)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISLNK(os.lstat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "a symbolic link in the place of a folder", path)
        return path

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        folder, base = posixpath.split(name)
        fd = unlinked(posixpath.join(self._folder(folder), base))
        try:
            yield fd
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes:
        """Return all bytes of a file; FileNotFoundError if it does not exist."""
        with self._opened(name) as fd:
            size = os.fstat(fd).st_size
            check_size(self.path(name), size, MOST_JSON if name.endswith(".json") else None)
            return _read(fd, size)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes start..stop of a file; fewer if it ends before."""
        with self._opened(name) as fd:
            os.lseek(fd, start, os.SEEK_SET)
            return _read(fd, min(stop, os.fstat(fd).st_size) - start)

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; FileNotFoundError if it does not exist."""
        with self._opened(name) as fd:
            return os.fstat(fd).st_size

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return os.path.lexists(self.path(name))

    def modified(self, name: str) -> float:
        """Return when a file was written, in seconds by the clock of its file system."""
        return os.lstat(self.path(name)).st_mtime

    def stamp(self, name: str) -> object:
        """Return a value that changes with a file or folder; None if it is missing."""
        with contextlib.suppress(OSError):
            status = os.lstat(self.path(name))
            return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return None

    def sizes(self, folder: str) -> dict[str, int]:
        """Return name -> size in bytes of the files in a folder; empty if it does not exist."""
        sizes = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder(folder)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        return sizes

    def list(self, folder: str) -> Sequence[str]:
        """Return the sorted names of the files in a folder; empty if it does not exist."""
        try:
            return sorted(os.listdir(self._folder(folder)))
        except FileNotFoundError:
            return []

    def below(self, folder: str) -> LocalFiles:
        """Return the files of a folder within this one; NotADirectoryError if it is a link."""
        return LocalFiles(self._folder(folder))

    def write(self, name: str, data: bytes | Iterable[Bytes]) -> None:
        """See Files."""
        target = self.path(name)
        with self._temporary(name, data) as temporary:
            os.replace(temporary, target)
        sync_folder(posixpath.dirname(target))

    def spool(self, folder: str) -> IO[bytes]:
        """See Files."""
        path = self._folder(folder)
        self._make_folder(path)
        return tempfile.TemporaryFile(dir=path, prefix=TEMPORARY, buffering=0)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not exist; False if it does, with other bytes."""
        target = self.path(name)
        try:
            with self._temporary(name, data) as temporary:
                link(temporary, target)
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                if self.read(name) == data:
                    self.sync([name])
                    return True
            return False
        try:
            sync_folder(posixpath.dirname(target))
        except BaseException:
            # A file that is not durable must not be visible.
            _discard(target)
            raise
        return True

    def link_from(self, source: LocalFiles, name: str) -> bool:
        """Give a file of another folder the same name here; False if the file system cannot link it.

        Raises:
            FileNotFoundError: the other folder has no such file.
        """
        self._make_folder(self._folder(posixpath.dirname(name)))
        try:
            os.link(source.path(name), self.path(name), follow_symlinks=False)
        except FileNotFoundError:
            raise
        except (OSError, NotImplementedError):
            return False
        return True

    def sync(self, names: Sequence[str]) -> None:
        """Make existing files of one folder durable.

        Another process may have made them, and been killed before they were durable.
        """
        for name in names:
            with self._opened(name) as fd:
                os.fsync(fd)
        if names:
            folder = self._folder(posixpath.dirname(names[0]))
            self._make_folder(folder)
            sync_folder(folder)

    def _make_folder(self, folder: str) -> None:
        """Create a folder, and make its name durable, and those above it, once for this object.

        A folder that exists may have been made by a process that was killed before it was durable.
        """
        folder = folder.rstrip("/") or "/"
        made = make_folder(folder)
        while folder not in self._durable and not os.path.ismount(folder):
            self._durable.add(folder)
            folder, is_synced = posixpath.dirname(folder), folder in made
            if not os.access(folder, os.R_OK | os.W_OK):  # no process with these rights has made a folder there
                break
            if not is_synced:
                sync_folder(folder)

    @contextlib.contextmanager
    def _temporary(self, name: str, data: bytes | Iterable[Bytes]) -> Iterator[str]:
        """A synced temporary file in the same folder; removed afterwards if it still exists."""
        below, base = posixpath.split(name)
        folder = self._folder(below)
        self._make_folder(folder)
        for number in itertools.count():
            temporary = posixpath.join(folder, f"{TEMPORARY}{number}-{base}")
            try:
                # Never an existing file or a link: another writer may use this name.
                file = open(temporary, "xb")  # noqa: SIM115 - closed before it is renamed
                break
            except FileExistsError:
                continue
        try:
            try:
                with file:
                    file.writelines([data] if isinstance(data, bytes) else data)
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                # The error of a full disk comes without a file name.
                error.filename = error.filename or self.path(name)
                raise
            yield temporary
        finally:
            _discard(temporary)

    def remove(self, names: Sequence[str]) -> None:
        """Remove files, durably; missing ones are skipped."""
        for name in names:
            self._folder(posixpath.dirname(name))
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(name))
        for folder in {posixpath.dirname(name) for name in names}:
            with contextlib.suppress(FileNotFoundError):  # missing files, too: others may have removed them just now
                sync_folder(self.path(folder))


def _read(fd: int, n: int) -> bytes:
    """Read the next n bytes, fewer only at the end of the file."""
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
        # Without hard links, two writers that commit the same step at the same moment cannot be distinguished.
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "exists", target) from None
        os.replace(temporary, target)


def _discard(path: str) -> None:
    """Remove a file if that is possible; otherwise it is garbage and does no harm."""
    with contextlib.suppress(OSError):
        if os.path.lexists(path):
            os.unlink(path)


def make_folder(folder: str) -> Sequence[str]:
    """Create a folder and its parents, each durable in the one above it; return the new ones."""
    missing = []
    while folder and not os.path.isdir(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        sync_folder(os.path.dirname(path))
    return missing


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable; does nothing on Windows, which does that itself.

    A warning, once per process, says where a file system cannot do that.
    """
    global _unsynced
    if os.name == "nt":
        return
    fd = os.open(folder or ".", os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno not in _NO_FOLDER_SYNC:
            raise
        if not _unsynced:
            _unsynced = True
            message = f"{folder}: this file system cannot sync folders ({e.strerror}): checkpoints are saved, but a "
            warnings.warn(f"{message}power loss may undo the newest of them", StoreWarning, stacklevel=2)
    finally:
        os.close(fd)


def follow_umask(path: str) -> None:
    """Give a file the permissions of a new file in its folder.

    They follow from the umask and the folder's default ACL.

    safetensors writes a private temporary file (mode 0600) and renames it; readers in other accounts would be locked
    out.

    Raises:
        OSError: the folder cannot be written to, or the file is not owned by this user.
    """
    folder = os.path.dirname(path) or "."
    probe = os.path.join(folder, f"{TEMPORARY}{secrets.token_hex(8)}")
    try:
        with open(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(probe)
    os.chmod(path, mode)


# ----------------------------------------------------------------------------------- files that others may have written


_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)  # without it the opening of a pipe waits for a writer
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)


def regular(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Open a regular file to read; an `opener` of `open`.

    Raises:
        OSError: it cannot be opened, or is not a regular file.

    Example:
        >>> with open("/dev/zero", "rb", opener=regular) as file:
        ...     data = file.read()
        Traceback (most recent call last):
        ...
        OSError: [Errno 22] not a regular file: '/dev/zero'
    """
    fd = os.open(path, flags | _FLAGS)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))


def unlinked(path: str | os.PathLike[str], flags: int = 0) -> int:
    """Open a regular file as `regular` does, but no symbolic link."""
    return regular(path, flags | getattr(os, "O_NOFOLLOW", 0))


def read_file(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes.

    Without `most`, the limit is the memory of the machine.

    Raises:
        OSError: it is larger, or see `regular`.
    """
    with open(path, "rb", opener=regular) as file:
        size = os.fstat(file.fileno()).st_size
        check_size(path, size, most)
        return file.read(size)


def check_size(path: str | os.PathLike[str], size: int, most: int | None) -> None:
    """Raise OSError for a file of more than `most` bytes; None: than the machine has memory."""
    if most is None and size > NEVER_TOO_LARGE:
        most = total_memory()
    if most is not None and size > most:
        raise OSError(errno.EFBIG, f"{size} bytes; the limit is {most}", os.fspath(path))


_CACHED = ("models--", "datasets--", "spaces--")
"""Prefixes of the folders in a cache of the Hub."""


def check_link(path: Path, folder: Path, *, writes: bool = False) -> None:
    """Refuse a link that leads out of a folder, whose file could be anybody's.

    The cache of the Hugging Face Hub consists of links: from `snapshots/REVISION/...` to files in `blobs` next to
    `snapshots`. These are followed, but not written through, because other revisions share the files.

    Args:
        path: an entry of the folder, or of a folder in it.
        folder: the folder that the user has named; it may be a link itself.
        writes: whether the file will be written.

    Raises:
        BadArgumentError: the entry, or a folder above it, is a link that leads elsewhere.
    """
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real.is_relative_to(root):
        return
    snapshots = (p.parent for p in (root, *root.parents) if p.parent.name == "snapshots")
    caches = [p.parent / "blobs" for p in snapshots if p.parent.name.startswith(_CACHED)]
    if writes or real.parent not in caches:
        raise BadArgumentError(f"{path} links to {real}, which is outside of {folder}: put a copy in its place")
