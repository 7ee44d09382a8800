"""Compiled functions on disk, as a help that may fail: whatever is wrong there is a miss, and never an error.

Numba's own cache is an index and numbered files beside it. A file cut off by a loss of power, a full disk, or two
processes that number their files alike at once then stop the function itself. Here each signature has a file of its
own, whose contents say what they are and carry a checksum; it takes its name only when it is whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
import uuid
import warnings
from typing import TYPE_CHECKING, Any

import llvmlite  # type: ignore[import-untyped]
import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

if TYPE_CHECKING:
    from collections.abc import Callable

_DIGEST = 16


class Kept(FunctionCache):
    """Numba's cache of one function, in files that may be damaged, missing, or impossible to write.

    Raises:
        RuntimeError: there is no folder to keep anything in.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        stamp = self._impl.locator.get_source_stamp(), _hint_stamp()
        files = _Files(self.cache_path, self._impl.filename_base, stamp)
        self._cache_file = files  # type: ignore[assignment]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled function of a signature; None where it is not there, or cannot be used."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception:  # a damaged pickle may raise anything; the file is replaced when the function is compiled
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled function, if that can be done."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except Exception as error:
            reason = f"{self.cache_path}: {error}"
        else:
            return
        warn_uncached(reason)


class _Files:
    """The files of one function, as Numba's `Cache` uses them: one a signature, so that none needs an index.

    A file is a digest of the rest, then the pickled source stamp, key and contents. Its name tells signatures,
    machines and versions apart; of two keys that share a name the later one has the file, and the other misses.
    """

    def __init__(self, folder: str, base: str, stamp: Any) -> None:
        self._folder, self._base, self._stamp = folder, base, stamp

    def flush(self) -> None:
        """Forget all that is kept of this function."""
        with contextlib.suppress(OSError):
            for name in os.listdir(self._folder):
                if name.startswith(f"{self._base}.") and name.endswith(".nbc"):
                    os.unlink(os.path.join(self._folder, name))

    def load(self, key: Any) -> Any:
        """What was saved under this key; None where there is nothing, or it is not what it was."""
        try:
            with open(self._path(key), "rb") as file:
                digest, contents = file.read(_DIGEST), file.read()
        except OSError:
            return None
        if digest != _digest(contents):
            return None
        stamp, found, data = pickle.loads(contents)
        return data if (stamp, found) == (self._stamp, key) else None

    def save(self, key: Any, data: Any) -> None:
        """Keep data under this key, in the place of what was there."""
        contents = dumps((self._stamp, key, data))  # type: ignore[no-untyped-call]
        path = self._path(key)
        temporary = f"{path}.{uuid.uuid4().hex[:16]}"
        try:
            with open(temporary, "wb") as file:
                file.write(_digest(contents))
                file.write(contents)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _path(self, key: Any) -> str:
        signature, machine, *_ = key
        versions = (numba.__version__, llvmlite.__version__)
        name = _digest(repr((versions, signature, machine)).encode()).hex()
        return os.path.join(self._folder, f"{self._base}.{name}.nbc")


def _hint_stamp() -> tuple[float, int] | None:
    """What changes with `prefetch`, the one thing that cached functions take from a module not their own."""
    try:
        found = os.stat(os.path.join(os.path.dirname(__file__), "prefetch.py"))
    except OSError:  # no sources beside what is installed
        return None
    return found.st_mtime, found.st_size


def _digest(contents: bytes) -> bytes:
    return hashlib.blake2b(contents, digest_size=_DIGEST).digest()


_warned = False


def warn_uncached(reason: str) -> None:
    """Say once in a process that compiled functions are not kept, and why."""
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"compiled kernels cannot be kept on disk, so every process compiles anew "
            f"({reason}); set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=3,
        )
