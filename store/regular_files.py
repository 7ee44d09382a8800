"""Files in folders that others may have written: no pipes, and no links that lead out."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from ..codec.memory_limit import NEVER_TOO_LARGE, total_memory
from ..kernels.errors import BadArgumentError

_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)  # without it the opening of a pipe waits for a writer
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
MOST_JSON = 1 << 26
"""Bytes of a file of JSON."""


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
