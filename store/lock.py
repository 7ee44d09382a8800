"""Who may work on a store at once: any number of savers and compactors together, a collector of garbage alone.

Whoever adds files holds the lock *shared* from before it looks at its parents until its manifest is there; `gc` holds
it *alone*, so nothing is removed that a manifest about to be written will name. Readers need no lock.

On a local disk the lock is `flock`, which the system releases when a process dies. Elsewhere holders are objects:
`locks/shared-*`, one a holder, and `locks/alone`, made by a conditional put. Each side writes its own object before it
looks for the other's, so of two that begin at once at least one sees the other. What a crashed holder leaves behind
counts for nothing after `STALE` seconds by the storage's own clock (no other clock is asked).
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import time
import uuid
from collections.abc import Iterator
from typing import Any, Protocol

from .files import Files
from .local import make_folder

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

FOLDER = "locks"
STALE = 3600.0
"""Seconds after which an object that a lock consists of is taken for a crashed process's; a holder renews its own."""
_FILE = "lock"
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_SHORT_OF_LOCKS = 1.0
"""Seconds for which ENOLCK is taken for a moment's want of memory, and not for a file system that has no locks: of two
processes of which only one fell back to lock files neither would see the other."""
_without: set[int] = set()
"""Devices of which that was waited for in vain."""


class InUseError(TimeoutError):
    """Others held the lock all the time that it was waited for."""


class Lease:
    """A lock that is held."""

    def renew(self) -> None:
        """Tell others that the holder lives; TimeoutError if it was taken for dead in the meantime."""


class Lock(Protocol):
    """A lock with two modes; both raise InUseError when it cannot be had in time."""

    def shared(self) -> contextlib.AbstractContextManager[Lease]:
        """Held beside other shared holders."""
        ...

    def alone(self, timeout: float) -> contextlib.AbstractContextManager[Lease]:
        """Held by nobody else."""
        ...


_descriptors: set[int] = set()
"""Descriptors of this process's locks. A forked process (a data loader's worker) has them too, and would hold the locks
for as long as it lives, even where this process was killed."""


def _let_go() -> None:
    """In a process just forked: close the locks of the one it is from, which holds them as before."""
    while _descriptors:
        with contextlib.suppress(OSError):
            os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


def open_lock(files: Files) -> Lock:
    """The lock of a store."""
    return FileLock(files) if files.local and fcntl is not None else ObjectLock(files)


class FileLock:
    """`flock` on a file of the store's folder; where the file system has none, lock files as on an object store."""

    def __init__(self, files: Files) -> None:
        self._files = files

    @contextlib.contextmanager
    def shared(self) -> Iterator[Lease]:
        """Held beside other shared holders; waits as long as it takes."""
        with self._held(fcntl.LOCK_SH, None) as lease:
            yield lease

    @contextlib.contextmanager
    def alone(self, timeout: float) -> Iterator[Lease]:
        """Held by nobody else."""
        with self._held(fcntl.LOCK_EX, timeout) as lease:
            yield lease

    @contextlib.contextmanager
    def _held(self, mode: int, timeout: float | None) -> Iterator[Lease]:
        path = self._files.path(_FILE)
        make_folder(posixpath.dirname(path))
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        fd = os.open(path, flags, 0o666)
        _descriptors.add(fd)
        try:
            if not _flock(fd, mode, timeout, path):
                other = ObjectLock(self._files)
                with other.shared() if mode == fcntl.LOCK_SH else other.alone(timeout or 0.0) as lease:
                    yield lease
                return
            try:
                yield Lease()
            finally:
                if fd in _descriptors:
                    # Before it is closed: a process that is being forked just now has the same lock open.
                    fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            if fd in _descriptors:
                _descriptors.discard(fd)
                os.close(fd)


def _flock(fd: int, mode: int, timeout: float | None, path: str) -> bool:
    """Take the lock; False where the file system knows none."""
    try:
        if timeout is None:
            _have(fd, mode)
            return True
        for _ in _patience(timeout, path):
            try:
                _have(fd, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
    except OSError as e:
        if isinstance(e, TimeoutError) or e.errno not in _NO_FLOCK:
            raise
    return False


def _have(fd: int, mode: int) -> None:
    device = os.fstat(fd).st_dev
    end = time.monotonic() + (0.0 if device in _without else _SHORT_OF_LOCKS)
    while True:
        try:
            fcntl.flock(fd, mode)
        except OSError as e:
            if e.errno != errno.ENOLCK:
                raise
            if time.monotonic() >= end:
                _without.add(device)
                raise
            time.sleep(0.05)
        else:
            _without.discard(device)
            return


def _patience(timeout: float, path: str, first: float = 0.005) -> Iterator[None]:
    """Turns of waiting, ever longer ones, until InUseError."""
    end = time.monotonic() + timeout
    pause = first
    while True:
        yield
        left = end - time.monotonic()
        if left <= 0:
            raise InUseError(errno.ETIMEDOUT, f"the store is in use; waited {timeout:g} s for it", path)
        time.sleep(min(pause, left))
        pause = min(2 * pause, 1.0)


class _ObjectLease(Lease):
    def __init__(self, files: Files, name: str, token: bytes) -> None:
        self._files, self._name, self._token = files, name, token

    def renew(self) -> None:
        try:
            mine = self._files.read(self._name) == self._token
        except FileNotFoundError:
            mine = False
        if not mine:
            raise TimeoutError(
                errno.ETIMEDOUT, f"this process was silent for over {STALE:g} s and lost its lock", self._name
            )
        self._files.write(self._name, self._token)


class ObjectLock:
    """Lock objects in the store.

    Args:
        files: of the store.
        patience: seconds that a shared holder waits for `alone` to be released; default 600.
        poll: seconds between two looks; default 0.05.
    """

    def __init__(self, files: Files, *, patience: float = 600.0, poll: float = 0.05) -> None:
        self._files, self._patience, self._poll = files, patience, poll
        self._alone = f"{FOLDER}/alone"

    @contextlib.contextmanager
    def shared(self) -> Iterator[Lease]:
        """Held beside other shared holders."""
        token = uuid.uuid4().hex
        name = f"{FOLDER}/shared-{token}"
        try:
            for _ in _patience(self._patience, self._files.path(self._alone), self._poll):
                self._files.write(name, token.encode())
                if "alone" not in self._files.list(FOLDER):
                    break
                if self._is_stale(self._alone, name):
                    # Should its holder wake up after all, it finds that the lock is lost.
                    self._files.remove([self._alone])
                    break
                # Stepping back lets the other side finish instead of waiting for this one.
                self._files.remove([name])
            yield _ObjectLease(self._files, name, token.encode())
        finally:
            # What cannot be removed now grows stale; network libraries have errors that are no OSError.
            with contextlib.suppress(Exception):
                self._files.remove([name])

    @contextlib.contextmanager
    def alone(self, timeout: float) -> Iterator[Lease]:
        """Held by nobody else."""
        token = uuid.uuid4().hex.encode()
        for _ in _patience(timeout, self._files.path(self._alone), self._poll):
            if self._files.create(self._alone, token):
                break
            probe = f"{FOLDER}/probe-{token.decode()}"
            self._files.write(probe, b"")
            try:
                if self._is_stale(self._alone, probe):
                    self._files.remove([self._alone])
            finally:
                self._files.remove([probe])
        try:
            for _ in _patience(timeout, self._files.path(FOLDER), self._poll):
                if not self._others():
                    break
            yield _ObjectLease(self._files, self._alone, token)
        finally:
            # Of a holder that was taken for dead another one's may stand there now. What stays grows stale.
            with contextlib.suppress(Exception):
                if self._files.read(self._alone) == token:
                    self._files.remove([self._alone])

    def _others(self) -> list[str]:
        """Shared holders that live; the objects of dead ones are removed."""
        alive = []
        for base in self._files.list(FOLDER):
            name = f"{FOLDER}/{base}"
            if not base.startswith("shared-"):
                continue
            if self._is_stale(name, self._alone):
                self._files.remove([name])
            else:
                alive.append(name)
        return alive

    def _is_stale(self, name: str, now: str) -> bool:
        """Whether an object is so much older than one written just now, both by the storage's clock."""
        try:
            then: Any = self._files.modified(name)
        except FileNotFoundError:
            return True
        except (NotImplementedError, KeyError):
            return False
        try:
            return bool(self._files.modified(now) - then > STALE)
        except (FileNotFoundError, NotImplementedError, KeyError):
            return False  # without what it is compared with nothing is known of its age
