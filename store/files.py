"""The files of a store, on any file system: durable before they count, whole or not there at all.

Names are relative and have one folder (`steps/000000000010.json`). Two implementations: a local folder
(`local.LocalFiles`), where durability is made of temporary names, fsync of file and folder, rename and link; and any
other fsspec file system (`objects.ObjectFiles`), where an object appears whole or not at all.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import fsspec
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ..codec.errors import BadArgumentError, ShrinkpointWarning

TEMPORARY = ".tmp-"
"""How a file begins that is being written; what a crash leaves of it is garbage."""


UNOPENED = (ValueError, ImportError, AttributeError, TypeError, KeyError, NotImplementedError)
"""What fsspec and its file systems raise of a URL that they cannot make anything of."""


_OF_THE_FILE = {
    getattr(errno, name)
    for name in ("EIO", "EINVAL", "ELOOP", "ENXIO", "EBADMSG", "ENODATA", "EUCLEAN", "EOVERFLOW")
    if hasattr(errno, name)
}
"""What a disk answers of a file that it cannot read, or of what is no file."""


class StoreWarning(ShrinkpointWarning):
    """Something about a store that its user should know and that is no error."""


class Files(Protocol):
    """What a store needs of a file system."""

    root: str
    local: bool

    def path(self, name: str) -> str:
        """Full path of a name, for messages."""
        ...

    def read(self, name: str) -> bytes:
        """All bytes of a file; FileNotFoundError where there is none."""
        ...

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes start..stop of a file; fewer where it ends before."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError where there is none."""
        ...

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        ...

    def list(self, folder: str) -> Sequence[str]:
        """Names of the files in a folder, sorted, temporary ones too; empty where there is no such folder."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file, over another if need be: durable when this returns, as before or whole when it raises."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Write a file that must not be there; False if it is, with other bytes. Of two that race, one succeeds."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Remove files of one folder, durably; those that are not there are passed over."""
        ...

    def modified(self, name: str) -> float:
        """When a file was written, in seconds by the clock of the storage."""
        ...


def is_damage(error: OSError, *, local: bool) -> bool:
    """Whether an error of reading speaks of what stands there, and not of the way to it, which may be open again soon.

    Storage that is busy, too many open files, a host that cannot be reached say nothing of the bytes; nor does a code
    of an object store that its library does not know (s3fs makes an EIO of it).

    Args:
        error: none of a file that is not there.
        local: whether it is of a disk.
    """
    return isinstance(error, (IsADirectoryError, NotADirectoryError)) or (local and error.errno in _OF_THE_FILE)


def one_name(url: str) -> str:
    """The same for every spelling of a path or URL: links, `..`, a slash at the end, a relative path, another prefix.

    What is no URL that can be opened here is left as it is.

    Example:
        >>> from shrinkpoint.store.files import one_name
        >>> one_name("/a/../b/"), one_name("memory://aa/")
        ('/b', 'memory:///aa')
    """
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except UNOPENED:
        return url.rstrip("/") or url
    return os.path.realpath(root) if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(root.rstrip("/")))


def is_of_this_process(url: str) -> bool:
    """Whether what stands there is in this process's memory, where no other finds it."""
    *_, lowest = _chained(fsspec.core.url_to_fs(url)[0])
    return isinstance(lowest, MemoryFileSystem)


def _chained(fs: Any) -> Iterator[Any]:
    """A file system and those below it: of a cache, an archive, a folder."""
    while fs is not None:
        yield fs
        fs = getattr(fs, "fs", None)


def open_files(url: str | os.PathLike[str]) -> Files:
    """The files below a path or an fsspec URL.

    Raises:
        ValueError, ImportError: no such kind of URL, or its file system is not installed; or a cache is in it, which
            gives what was once under a name.
    """
    from .local import LocalFiles
    from .objects import ObjectFiles

    fs, root = fsspec.core.url_to_fs(os.fspath(url))
    root = root.rstrip("/") or "/"
    if any(isinstance(one, CachingFileSystem) for one in _chained(fs)):
        raise ValueError("a cache is in it, which gives what was once under a name; a step may be saved anew")
    # `~nobody` is no home of anyone's, and left as it is.
    if not isinstance(fs, LocalFileSystem):
        return ObjectFiles(fs, root)
    return LocalFiles(root if os.path.isabs(root) else os.path.join(os.getcwd(), root))


def opened(url: Any) -> Files:
    """As `open_files`, whatever it is given.

    Raises:
        BadArgumentError: no path and no URL, one that cannot be opened, or the path of something that is no folder.
    """
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else url
    if not isinstance(text, str):
        raise BadArgumentError(f"url must be a path or an fsspec URL, not {type(url).__qualname__}")
    if not text or "\0" in text:
        raise BadArgumentError(f"url is {text!r:.200}; it must name a folder, or be an fsspec URL")
    try:
        files = open_files(text)
    except (*UNOPENED, FileNotFoundError, IsADirectoryError, NotADirectoryError) as e:  # archives look for theirs
        raise BadArgumentError(f"url {text!r}: {e}") from None
    if files.local:
        _check_folder(text, files.root)
    return files


def _check_folder(url: str, root: str) -> None:
    """Raise BadArgumentError unless a path is that of a folder, or of nothing yet."""
    if "::" in url:
        # fsspec would take what stands before for a file system, and this for a folder of the rest's name.
        raise BadArgumentError(f"url {url!r}: '::' chains file systems; no folder on the disk can be named so here")
    path = root
    while path != os.path.dirname(path):
        try:
            mode = os.stat(path).st_mode
        except UnicodeEncodeError as e:
            raise BadArgumentError(f"url {url!r}: no file can have this name here: {e}") from None
        except (FileNotFoundError, NotADirectoryError):
            path = os.path.dirname(path)
            continue
        except OSError:
            return  # whoever reads or writes there is told
        if not stat.S_ISDIR(mode):
            raise BadArgumentError(f"url {url!r}: {path} is no folder")
        return
