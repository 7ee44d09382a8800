"""Paths and fsspec URLs: how to open them, and whether two of them are the same place."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ..codec.errors import BadArgumentError
from .files import Files
from .local import LocalFiles
from .objects import PREFIX, HubFiles, ObjectFiles, RepositoryFiles, open_client

UNOPENED = (ValueError, ImportError, AttributeError, TypeError, KeyError, NotImplementedError)
"""Errors of fsspec and its file systems for an invalid URL."""


def one_name(url: str) -> str:
    """Return one spelling for all spellings of a path or URL: links, `..`, relative paths.

    A URL that cannot be opened here is returned as it is.

    Example:
        >>> from shrinkpoint.store.urls import one_name
        >>> one_name("/a/../b/"), one_name("memory://aa/")
        ('/b', 'memory:///aa')
    """
    url = without_client(url)
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except UNOPENED:
        return url.rstrip("/") or url
    return os.path.realpath(root) if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(root.rstrip("/")))


def textual_name(url: str) -> str:
    """Return one spelling of a path or URL without opening its file system.

    Opening one may send requests. Paths are resolved as `one_name` does; a URL only by its text.

    Example:
        >>> from shrinkpoint.store.urls import textual_name
        >>> textual_name("/a/../b/"), textual_name("memory:///aa/x/../"), textual_name("file:///a")
        ('/b', 'memory://aa', '/a')
    """
    url = without_client(url)
    if "::" in url:
        return url.rstrip("/")
    protocol, marked, rest = url.partition("://")
    if not marked:
        return os.path.realpath(os.path.expanduser(url))
    if protocol in ("file", "local"):
        return os.path.realpath(rest)
    with contextlib.suppress(ValueError, ImportError):  # a protocol of several names, such as s3 and s3a
        known = fsspec.get_filesystem_class(protocol).protocol
        protocol = known if isinstance(known, str) else known[0]
    rest = rest.strip("/")
    return f"{protocol}://{posixpath.normpath(rest) if rest else ''}"


def without_client(url: str) -> str:
    """Return a URL without the prefix that chooses a client: the same place by fsspec."""
    return url.removeprefix(PREFIX)


def is_of_this_process(url: str) -> bool:
    """Return whether a URL is in this process's memory, which no other process finds."""
    *_, lowest = _chained(fsspec.core.url_to_fs(without_client(url))[0])
    return isinstance(lowest, MemoryFileSystem)


def _chained(fs: Any) -> Iterator[Any]:
    """Yield a file system and those below it: of a cache, an archive, a folder."""
    while fs is not None:
        yield fs
        fs = getattr(fs, "fs", None)


def open_files(url: str | os.PathLike[str]) -> Files:
    """Return the files below a path or an fsspec URL.

    Raises:
        ValueError, ImportError: an unknown kind of URL, a file system that is not installed, or a cache.
    """
    text = os.fspath(url)
    if text.startswith(PREFIX):
        return ObjectFiles(*open_client(text))
    fs, root = fsspec.core.url_to_fs(text)
    root = root.rstrip("/") or "/"
    if any(isinstance(layer, CachingFileSystem) for layer in _chained(fs)):
        raise ValueError("it contains a cache, which returns old contents; a step may be replaced")
    # fsspec leaves `~nobody` as it is.
    if not isinstance(fs, LocalFileSystem):
        if type(fs).__module__.startswith("huggingface_hub."):
            return (HubFiles if root.startswith("buckets/") else RepositoryFiles)(fs, root)
        return ObjectFiles(fs, root)
    return LocalFiles(root if os.path.isabs(root) else os.path.join(os.getcwd(), root))


def opened(url: Any) -> Files:
    """Check a user's path or URL and return its files, see `open_files`.

    Raises:
        BadArgumentError: not a path or URL, one that cannot be opened, or the path of something else than a folder.
    """
    text = os.fspath(url) if isinstance(url, (str, os.PathLike)) else url
    if not isinstance(text, str):
        raise BadArgumentError(f"url must be a path or an fsspec URL, not {type(url).__qualname__}")
    if not text or "\0" in text:
        raise BadArgumentError(f"url is {text!r:.200}; it must name a folder, or be an fsspec URL")
    try:
        files = open_files(text)
    except (*UNOPENED, FileNotFoundError, IsADirectoryError, NotADirectoryError) as e:  # of archives
        raise BadArgumentError(f"url {text!r}: {e}") from None
    if files.local:
        _check_folder(text, files.root)
    return files


def _check_folder(url: str, root: str) -> None:
    """Raise BadArgumentError unless a path is a folder or does not exist yet."""
    if "::" in without_client(url):
        # fsspec would take the first part for a file system.
        raise BadArgumentError(f"url {url!r}: '::' chains file systems; a folder name cannot contain it here")
    path = root
    while path != os.path.dirname(path):
        try:
            mode = os.stat(path).st_mode
        except UnicodeEncodeError as e:
            raise BadArgumentError(f"url {url!r}: a file cannot have this name here: {e}") from None
        except OSError as e:
            is_missing = isinstance(e, (FileNotFoundError, NotADirectoryError))
            if os.path.islink(path) and (is_missing or e.errno == errno.ELOOP):
                target = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
                problem = "which does not exist" if is_missing else "in a circle"
                raise BadArgumentError(f"url {url!r}: {path} is a link to {target}, {problem}") from None
            if not is_missing:
                return  # reading or writing will raise it
            path = os.path.dirname(path)
            continue
        if not stat.S_ISDIR(mode):
            raise BadArgumentError(f"url {url!r}: {path} is not a folder")
        return
