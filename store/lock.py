"""Locks of a store: savers and compactors share it, garbage collection holds it alone.

A process that adds files holds the lock *shared* from before it reads the parents until its manifest exists; `gc` holds
it *alone*, so that it removes nothing that a future manifest will name. Readers need no lock.

On a local disk the lock is `flock`, which the system releases when a process dies. Elsewhere holders are objects:
`locks/shared-*`, one per holder, and `locks/alone`, made by a conditional put. Each side writes its own object before
it looks for the other's, so that at least one of two that begin together sees the other. The object of a crashed holder
is ignored after `STALE` seconds by the storage's own clock; no other clock is used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import time
import uuid
from collections.abc import Iterator

from .files import Files
from .local import make_folder

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

FOLDER = "locks"
STALE = 3600.0
"""Age in seconds from which a lock object is attributed to a crashed process; holders renew theirs."""
_FILE = "lock"
_NO_FLOCK = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_SHORT_OF_LOCKS = 1.0
"""Seconds for which ENOLCK counts as a temporary lack of memory, not as a file system without locks: if only one of two
processes used lock files instead, they would not see each other."""
_devices_without_locks: set[int] = set()
"""Devices that still answered ENOLCK after this time."""


class InUseError(TimeoutError):
    """Others held the lock for the whole time of waiting."""


class Lease:
    """A lock that is held."""

    def renew(self) -> None:
        """Show that the holder is alive; TimeoutError if the lock was taken away meanwhile."""


_descriptors: set[int] = set()
"""Descriptors of this process's locks. A forked process (a data loader's worker) inherits them and would hold the locks
as long as it lives, even after this process was killed."""


def _close_inherited() -> None:
    """Close the inherited locks in a forked process; the parent still holds them."""
    while _descriptors:
        with contextlib.suppress(OSError):
            os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)


def open_lock(files: Files) -> FileLock | ObjectLock:
    """Return the lock of a store."""
    return FileLock(files) if files.local and fcntl is not None else ObjectLock(files)


class FileLock:
    """Lock by `flock` on a file of the store's folder, or by lock files without `flock`."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def shared(self) -> contextlib.AbstractContextManager[Lease]:
        """Hold the lock together with other shared holders; waits without a limit."""
        return self._held(fcntl.LOCK_SH, None)

    def alone(self, timeout: float) -> contextlib.AbstractContextManager[Lease]:
        """Hold the lock alone."""
        return self._held(fcntl.LOCK_EX, timeout)

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
                with other.shared() if timeout is None else other.alone(timeout) as lease:
                    yield lease
                return
            try:
                yield Lease()
            finally:
                if fd in _descriptors:
                    # Before it is closed: a process that is just being forked has the same lock open.
                    fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            if fd in _descriptors:
                _descriptors.discard(fd)
                os.close(fd)


def _flock(fd: int, mode: int, timeout: float | None, path: str) -> bool:
    """Take the lock; False if the file system has no locks."""
    try:
        if timeout is None:
            _flock_once(fd, mode)
            return True
        for _ in _attempts(timeout, path):
            try:
                _flock_once(fd, mode | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
    except OSError as e:
        if isinstance(e, TimeoutError) or e.errno not in _NO_FLOCK:
            raise
    return False


def _flock_once(fd: int, mode: int) -> None:
    device = os.fstat(fd).st_dev
    end = time.monotonic() + (0.0 if device in _devices_without_locks else _SHORT_OF_LOCKS)
    while True:
        try:
            fcntl.flock(fd, mode)
        except OSError as e:
            if e.errno != errno.ENOLCK:
                raise
            if time.monotonic() >= end:
                _devices_without_locks.add(device)
                raise
            time.sleep(0.05)
        else:
            _devices_without_locks.discard(device)
            return


def _attempts(timeout: float, path: str, first: float = 0.005) -> Iterator[None]:
    """Yield between pauses of growing length, until InUseError."""
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
        self._written = time.monotonic()

    def renew(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._files.read(self._name).startswith(self._token):
                if time.monotonic() - self._written > STALE / 60:
                    # Other bytes each time: the Hub ignores a file that is as it was.
                    self._files.write(self._name, self._token + uuid.uuid4().bytes)
                    self._written = time.monotonic()
                return
        message = f"this process was silent for over {STALE:g} s and lost its lock"
        raise TimeoutError(errno.ETIMEDOUT, message, self._name)


class ObjectLock:
    """Lock by lock objects in the store.

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
        """Hold the lock together with other shared holders."""
        token = uuid.uuid4().hex
        name = f"{FOLDER}/shared-{token}"
        try:
            for _ in _attempts(self._patience, self._files.path(self._alone), self._poll):
                self._files.write(name, token.encode())
                if "alone" not in self._files.list(FOLDER):
                    break
                if self._is_stale(self._alone, name):
                    # If its holder is alive after all, it will find that the lock is lost.
                    self._files.remove([self._alone])
                    break
                # Withdrawing lets the other side finish instead of waiting for this one.
                self._files.remove([name])
            yield _ObjectLease(self._files, name, token.encode())
        finally:
            # An object that cannot be removed becomes stale. Network libraries have errors that are not an OSError.
            with contextlib.suppress(Exception):
                self._files.remove([name])

    @contextlib.contextmanager
    def alone(self, timeout: float) -> Iterator[Lease]:
        """Hold the lock alone."""
        token = uuid.uuid4().hex.encode()
        for _ in _attempts(timeout, self._files.path(self._alone), self._poll):
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
            for _ in _attempts(timeout, self._files.path(FOLDER), self._poll):
                if not self._live_holders():
                    break
            yield _ObjectLease(self._files, self._alone, token)
        finally:
            # It may be another holder's now, if this one was considered dead. An object that remains becomes stale.
            with contextlib.suppress(Exception):
                if self._files.read(self._alone).startswith(token):
                    self._files.remove([self._alone])

    def _live_holders(self) -> list[str]:
        """Return the live shared holders, and remove the lock objects of dead ones."""
        holders = [f"{FOLDER}/{name}" for name in self._files.list(FOLDER) if name.startswith("shared-")]
        dead = [name for name in holders if self._is_stale(name, self._alone)]
        self._files.remove(dead)
        return [name for name in holders if name not in dead]

    def _is_stale(self, name: str, now: str) -> bool:
        """Return whether an object is `STALE` seconds older than a new one."""
        with contextlib.suppress(NotImplementedError, KeyError):
            try:
                then = self._files.modified(name)
            except FileNotFoundError:
                return True
            with contextlib.suppress(FileNotFoundError):  # its age is unknown without the other object
                return self._files.modified(now) - then > STALE
        return False
