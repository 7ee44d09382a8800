"""On-disk cache of compiled functions in which any damage counts as a miss, never an error.

Numba's own cache is an index with numbered files. A file truncated by a power loss or a full disk makes the function
raise an error, and so do two processes that choose the same number. Here each signature has its own file, which holds
its key and a checksum and is renamed to its final name only when it is complete. A mark in the cache says that all
kernels of a purpose are compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
import pickle
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import llvmlite  # type: ignore[import-untyped]
import numba
import numpy as np
from numba.core import caching
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

_DIGEST = 16
loaded: set[str] = set()
"""Files whose compiled code this process has loaded."""
stored: set[str] = set()
"""Files for code that this process has compiled, whether they could be written or not."""


def folder_of(function: Callable[..., object]) -> str:
    """Return the folder for compiled code of a function.

    Raises:
        RuntimeError: no cache folder can be written.
    """
    return str(_Implementation(function).locator.get_cache_path())  # type: ignore[no-untyped-call]


def _folders(function: Callable[..., object]) -> list[str]:
    """Return the folders that may hold compiled code of a function, in Numba's order."""
    own = bool(numba.config.CACHE_DIR)  # type: ignore[attr-defined]
    locators: list[Any] = (
        [caching.UserProvidedCacheLocator] if own else [caching.InTreeCacheLocator, caching.UserWideCacheLocator]
    )
    source = inspect.getfile(function)
    return [str(locator(function, source).get_cache_path()) for locator in locators]


class _ReadOnlyLocator(caching.InTreeCacheLocator):
    """A read-only folder with compiled code, as in an image with kernels compiled in advance."""

    @classmethod
    def from_function(cls, py_func: Any, py_file: Any) -> Any:
        """Return the locator, or None if no folder can be read; Numba ignores read-only folders."""
        found = [folder for folder in _folders(py_func) if os.path.isdir(folder)]
        if not found:
            return None
        self: Any = cls(py_func, py_file)
        self._cache_path = found[0]
        return self


class _Implementation(caching.CompileResultCacheImpl):
    """Numba's choice of a folder, with read-only folders as the last choice."""

    _locator_classes = [*caching.CompileResultCacheImpl._locator_classes, _ReadOnlyLocator]  # noqa: RUF012 - as Numba has it


class Kept(caching.FunctionCache):
    """Numba's cache of one function, in files that may be damaged, missing or not writeable.

    Code is read from every folder that Numba knows, including read-only ones.

    Raises:
        RuntimeError: no cache folder can be written.
    """

    _impl_class = _Implementation

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        stamp = self._impl.locator.get_source_stamp(), _common_stamp()
        files = _Files(self.cache_path, self._impl.filename_base, stamp, _folders(function))
        self._cache_file = files  # type: ignore[assignment]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled function of a signature; None if it is missing or unusable."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # a damaged pickle may raise anything; the file is replaced when the function is compiled
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store a compiled function if possible."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except Exception as error:
            reason = f"{self.cache_path}: {error}"
        else:
            return
        warn_uncached(reason)


class _Files:
    """The cache files of one function, one file per signature, so no index is needed.

    A file is a digest of the rest, then the pickled source stamp, key and contents. Its name depends on signature,
    machine and versions. If two keys have the same name, the file belongs to the later one, and the other is a miss.
    """

    def __init__(self, folder: str, base: str, stamp: Any, others: Sequence[str] = ()) -> None:
        self._folder, self._base, self._stamp = folder, base, stamp
        self._others = [other for other in others if other != folder]

    def flush(self) -> None:
        """Delete all cached versions of this function."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if name.startswith(f"{self._base}.") and name.endswith(".nbc"):
                    os.unlink(os.path.join(self._folder, name))

    def load(self, key: Any) -> Any:
        """Return the data saved under this key in any folder; None if they are missing or damaged."""
        name = os.path.basename(self._path(key))
        for folder in (self._folder, *self._others):
            path = os.path.join(folder, name)
            if (data := self._read(path, key)) is not None:
                loaded.add(path)
                return data
        return None

    def _read(self, path: str, key: Any) -> Any:
        try:
            with open(path, "rb") as file:
                digest, contents = file.read(_DIGEST), file.read()
        except OSError:
            return None
        if digest != checksum(contents):
            return None
        stamp, found, data = pickle.loads(contents)
        return data if (stamp, found) == (self._stamp, key) else None

    def save(self, key: Any, data: Any) -> None:
        """Store data under this key, replacing older data."""
        contents = dumps((self._stamp, key, data))  # type: ignore[no-untyped-call]
        path = self._path(key)
        stored.add(path)
        temporary = f"{path}.{uuid.uuid4().hex[:16]}"
        try:
            with open(temporary, "wb") as file:
                file.write(checksum(contents))
                file.write(contents)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _path(self, key: Any) -> str:
        signature, machine, *_ = key
        versions = (numba.__version__, llvmlite.__version__)
        name = checksum(repr((versions, signature, machine)).encode()).hex()
        return os.path.join(self._folder, f"{self._base}.{name}.nbc")


_COMPILED_INTO = ("instructions.py", "jit.py")
"""Modules that decide what the code of every cached function is."""


@functools.cache
def _common_stamp() -> tuple[tuple[float, int], ...] | None:
    """Return the source stamps of the modules on which all cached functions depend."""
    try:
        found = [os.stat(os.path.join(os.path.dirname(__file__), name)) for name in _COMPILED_INTO]
    except OSError:  # installed without sources
        return None
    return tuple((one.st_mtime, one.st_size) for one in found)


def checksum(contents: bytes) -> bytes:
    """Return a checksum of bytes."""
    return hashlib.blake2b(contents, digest_size=_DIGEST).digest()


_warned = False


def warn_uncached(reason: str) -> None:
    """Warn once per process that compiled functions cannot be cached, and why."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled kernels cannot be stored on disk, so every process compiles them again "
            f"({reason}); set NUMBA_CACHE_DIR to a writable folder",
            RuntimeWarning,
            stacklevel=3,
        )


KERNELS = 137
"""Number of kernels that `shrinkpoint warm` compiles; shown as a total before it is known."""


def is_warmed() -> bool:
    """Return whether the cache has a mark of any purpose."""
    folder = _folder()
    return folder is not None and any(folder.glob("warmed.*.nbc"))


def kernels_of(purpose: str) -> int:
    """Return the number of kernels that a purpose needs; 0 if not all are compiled."""
    path = _path(purpose)
    if path is None:
        return 0
    try:
        files = json.loads(path.read_text())
        return len(files) if all(map(os.path.exists, files)) else 0
    except (OSError, ValueError):
        return 0


def mark_warmed(purpose: str) -> None:
    """Note that all kernels of a purpose are compiled: those that this process has used."""
    path, files = _path(purpose), sorted(loaded | stored)
    if path is not None and files:
        temporary = path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(files))
            os.replace(temporary, path)


def _folder() -> Path | None:
    try:
        return Path(folder_of(is_warmed))
    except (RuntimeError, OSError):
        return None


def _path(purpose: str) -> Path | None:
    """Return the file of a mark, whose name depends on all that kernels depend on.

    Removing `*.nbc` removes it, too."""
    folder = _folder()
    machine = cpu_target.target_context.codegen().magic_tuple()
    versions = (sys.version, numba.__version__, llvmlite.__version__, np.__version__)
    name = checksum(repr((purpose, machine, versions)).encode()).hex()
    return None if folder is None else folder / f"warmed.{name}.nbc"
