"""Executors of the saves of a `Saver`: a worker process, or a thread of this process."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from ...codec import errors
from ...codec.errors import ShrinkpointError
from ...kernels.backend.imported import imported
from ..chain_head import ChainHead
from ..store import Store
from .channel import close_all, high, receive, send, start_worker
from .jobs import Maintainer, Maintenance, open_store, outcome, perform, store_options
from .snapshot import Arena, Snapshot, anonymous

Warned = tuple[str, str]
"""Category and message of a warning."""
_PATIENCE = 10.0
"""Seconds that an idle worker has to end after it was asked to."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The parent of an executor's first save.

    Args:
        step: which.
        identity: `Manifest.identity` that it must have.
        head: the same in this process's memory, if it is there.
        back: the run has gone back to it: this save builds on it even if it is not the first.
    """

    step: int
    identity: str
    head: ChainHead | None = None
    back: bool = False


class Executor(Protocol):
    """Interface of executors, which do the saves of a `Saver` one after another."""

    arena: Arena
    on_device: bool

    @property
    def pid(self) -> int:
        """Id of the process that executes the saves."""

    def hand(self, step: int, snapshot: Snapshot, origin: Origin | None) -> None:
        """Hand over a save, which a worker process finishes even if this process is killed.

        `run` must follow with the same arguments, also if this call was interrupted or failed, which does no harm.
        """

    def run(self, step: int, snapshot: Snapshot, origin: Origin | None) -> tuple[dict[str, Any], list[Warned]]:
        """Finish the save handed over; return its outcome and warnings, or raise its error.

        The first save builds on `origin`, and so does one that goes back to it.
        """

    def maintain(self) -> list[Warned]:
        """Do the maintenance between saves, until the next save or `cancel`.

        Called by the thread that calls `run`.
        """

    def cancel(self) -> None:
        """Ask the save in progress, or the maintenance, to stop; called from another thread."""

    def is_stopped(self) -> bool:
        """Return whether the executor is stopped until a signal lets it continue."""

    def close(self) -> None:
        """Free all resources; no save is in progress."""


class ThreadExecutor:
    """Executor in the calling thread; GPU arrays are quantized on their device."""

    on_device = True

    def __init__(self, store: Store, maintenance: Maintenance) -> None:
        # A store of its own: the caller's session is not changed by these saves.
        self._store = open_store(store_options(store))
        self._maintainer = Maintainer(self._store, maintenance)
        self._stop = self._handed = False
        self.arena = Arena()
        self.pid = os.getpid()

    def hand(self, step: int, snapshot: Snapshot, origin: Origin | None) -> None:
        """See Executor."""
        self._handed = True
        self._stop = False

    def run(self, step: int, snapshot: Snapshot, origin: Origin | None) -> tuple[dict[str, Any], list[Warned]]:
        """See Executor."""
        self._handed = False
        session = self._store.session
        if origin is not None and origin.head is not None and (origin.back or session.head is None):
            session.adopt(origin.head)
        return outcome(perform(session, step, snapshot, self.arena, lambda: self._stop, alone=True)), []

    def maintain(self) -> list[Warned]:
        """See Executor."""
        self._maintainer.run(lambda: self._stop or self._handed, alone=True)
        return []

    def cancel(self) -> None:
        """See Executor."""
        self._stop = True

    def is_stopped(self) -> bool:
        """See Executor."""
        return False

    def close(self) -> None:
        """See Executor."""
        self.arena.close()


class ProcessExecutor:
    """Executor in a worker process, which shares only the snapshot with this process.

    Args:
        store: the store to save to.
        nice: its niceness relative to this process.
        threads: how many it computes with.
        maintenance: of chains and old steps, between saves.

    Raises:
        OSError: it cannot be started.
    """

    on_device = False

    def __init__(self, store: Store, *, nice: int, threads: int, maintenance: Maintenance) -> None:
        self.arena = Arena()
        self._words = anonymous("shrinkpoint-job")
        self._given: tuple[int, ...] = ()
        self._number = 0
        self._begun = self._handed = False
        self._sending = threading.Lock()
        self._log = high(anonymous("shrinkpoint-log"))
        ours, theirs = (socket.socket(fileno=high(s.detach())) for s in socket.socketpair())
        self._sock = ours
        try:
            with theirs:
                self._process = start_worker(theirs.fileno(), self._log, threads)
            modules = ["torch"] if imported("torch") else []
            first = {"store": store_options(store), "nice": nice, "modules": modules}
            # A worker that died at once is noticed when it is first waited for.
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                send(ours, {**first, "maintenance": maintenance.to_json()})
        except BaseException:
            ours.close()
            close_all((self._log, self._words))
            self.arena.close()
            raise

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether the worker process runs."""
        return self._process.poll() is None

    def hand(self, step: int, snapshot: Snapshot, origin: Origin | None) -> None:
        """See Executor. The message is short, so that it fits while the worker does not read.

        The worker reads the origin's chain from storage, because its memory is not shared.
        """
        assert self.arena.fd is not None
        self.arena.stop = False
        follows = None if origin is None else [origin.step, origin.identity, origin.back]
        words = {"step": step, "snapshot": snapshot.to_json(), "origin": follows}
        text = memoryview(json.dumps(words, check_circular=False).encode())
        at = 0
        while at < len(text):
            at += os.pwrite(self._words, text[at:], at)
        job = {"do": "save", "number": self._number, "size": self.arena.size, "words": len(text)}
        shared = (self.arena.fd, self._words)
        with self._sending:
            # From here on it may have been sent, even if this is interrupted: answers come in the order of messages.
            self._begun = True
            send(self._sock, job, () if self._given == shared else shared)
            self._given = shared
            self._handed = True

    def run(self, step: int, snapshot: Snapshot, origin: Origin | None) -> tuple[dict[str, Any], list[Warned]]:
        """See Executor.

        Raises:
            ChildProcessError: the worker has ended.
        """
        try:
            if not self._handed:
                # If it did arrive, the worker recognizes it by its number and does it once.
                self.hand(step, snapshot, origin)
            answer, _ = receive(self._sock)
        except (EOFError, ConnectionError, BrokenPipeError):
            raise ChildProcessError(self.epitaph()) from None
        finally:
            self._begun = self._handed = False
        self._number += 1
        return answer, _warnings(answer, f"saving step {step}")

    def maintain(self) -> list[Warned]:
        """See Executor.

        Raises:
            ChildProcessError: the worker has ended.
        """
        try:
            with self._sending:
                if self._begun:
                    return []
                send(self._sock, {"do": "maintain"})
            answer, _ = receive(self._sock)
        except (EOFError, ConnectionError, BrokenPipeError):
            raise ChildProcessError(self.epitaph()) from None
        return _warnings(answer, "between two saves")

    def epitaph(self) -> str:
        """Say how the worker ended."""
        try:
            status = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return f"the saver's worker (process {self.pid}) no longer answers"
        how = f"ended with status {status}"
        if status < 0:
            with contextlib.suppress(ValueError):
                how = f"was killed by {signal.Signals(-status).name}"
        size = os.fstat(self._log).st_size
        tail = os.pread(self._log, 4000, max(0, size - 4000)).decode(errors="replace").strip()
        return f"the saver's worker (process {self.pid}) {how}{': ' + tail if tail else ''}"

    def cancel(self) -> None:
        """See Executor."""
        self.arena.stop = True

    def is_stopped(self) -> bool:
        """See Executor: by SIGSTOP or a debugger, where the system says so (Linux)."""
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{self.pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
        return False

    def close(self) -> None:
        """See Executor."""
        with contextlib.suppress(OSError):
            send(self._sock, {"do": "end"})
        self._sock.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # With a limit: a Ctrl-C inside `Popen.poll` may have left its lock held, and then no wait ends.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        self.arena.close()
        close_all((self._log, self._words))


def _warnings(answer: dict[str, Any], when: str) -> list[Warned]:
    """Return the worker's warnings; raise its error if there was one."""
    warned = [(str(c), str(m)) for c, m in answer.pop("warnings", [])]
    if "error" in answer:
        raise _rebuilt(answer, when)
    return warned


def _rebuilt(answer: dict[str, Any], when: str) -> BaseException:
    """Rebuild the worker's error, with its type if that is known here."""
    kind, message = answer["error"], answer["message"]
    known = getattr(errors, kind, None) if kind in errors.__all__ else None
    plain = getattr(builtins, kind, None)
    made: BaseException
    if known is not None:
        made = known(message)
    elif isinstance(plain, type) and issubclass(plain, OSError):
        made = OSError(answer["errno"], message, answer["filename"]) if answer["errno"] else plain(message)
    elif plain is MemoryError:
        made = MemoryError(message)
    else:
        made = ShrinkpointError(f"the saver's worker failed: {answer['qualname']}: {message}")
    made.add_note(f"In the saver's worker, {when}:\n{answer['trace']}")
    return made
