"""Where the work of a `Saver` is done: a worker process, or a thread of this one. Both look the same to it."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from ..codec import errors
from ..codec.errors import ShrinkpointError
from .channel import close_all, high, receive, send
from .head import Head
from .snapshot import Arena, Snapshot, anonymous
from .store import Store
from .upkeep import Keeper, Upkeep
from .worker import Warned, described, open_store, perform, store_options

_PATIENCE = 10.0
"""Seconds a worker has to end once it is told to and has nothing to do."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What the first save of a place builds on.

    Args:
        step: which.
        identity: `Manifest.identity` that it must have.
        head: the same in this process's memory, where it is there.
        back: the run has gone back to it: this save builds on it, too, if it is not the first.
    """

    step: int
    identity: str
    head: Head | None = None
    back: bool = False


class Place(Protocol):
    """What does the saves of a `Saver`, one after another."""

    arena: Arena
    on_device: bool

    def hand(self, step: int, snapshot: Snapshot, origin: Origin | None) -> None:
        """Give it a save to do; from now on it is done whatever becomes of this process, if the place is another one.

        `run` must follow, with the same arguments; also if this was interrupted or failed, which does no harm.
        """
        ...

    def run(self, step: int, snapshot: Snapshot, origin: Origin | None) -> tuple[dict[str, Any], list[Warned]]:
        """Finish that save; what came of it and the warnings nobody has seen. Raises what it raised.

        The first one builds on `origin`, and so does one that goes back to it.
        """
        ...

    def tend(self) -> list[Warned]:
        """Do what is due between saves, until the next one is handed over or `cancel` is called; raises what it raised.

        Called by who calls `run`.
        """
        ...

    def cancel(self) -> None:
        """Ask the save in progress to stop, or what is done between two; called from another thread."""
        ...

    def close(self) -> None:
        """Free everything; nothing is in progress."""
        ...


class ThreadPlace:
    """Saves in the calling thread and no other; GPU arrays are quantized where they are."""

    on_device = True

    def __init__(self, store: Store, upkeep: Upkeep) -> None:
        # A store of its own: the caller's goes on from what the caller does with it.
        self._store = open_store(store_options(store))
        self._keeper = Keeper(self._store, upkeep)
        self._stop = self._handed = False
        self.arena = Arena()

    def hand(self, step: int, snapshot: Snapshot, origin: Origin | None) -> None:
        """See Place."""
        self._handed = True
        self._stop = False

    def run(self, step: int, snapshot: Snapshot, origin: Origin | None) -> tuple[dict[str, Any], list[Warned]]:
        """See Place."""
        self._handed = False
        if origin is not None and origin.head is not None and (origin.back or self._store.head is None):
            self._store.go_on(origin.head)
        return described(perform(self._store, step, snapshot, self.arena, lambda: self._stop, alone=True)), []

    def tend(self) -> list[Warned]:
        """See Place."""
        self._keeper.tend(lambda: self._stop or self._handed, alone=True)
        return []

    def cancel(self) -> None:
        """See Place."""
        self._stop = True

    def close(self) -> None:
        """See Place."""
        self.arena.close()


class ProcessPlace:
    """Saves in a process of its own that shares nothing with this one but the snapshot.

    Args:
        store: what it saves to.
        nice: its niceness beside this process's.
        threads: how many it works with.
        upkeep: what it does between saves.

    Raises:
        OSError: it cannot be started.
    """

    on_device = False

    def __init__(self, store: Store, *, nice: int, threads: int, upkeep: Upkeep) -> None:
        self.arena = Arena()
        self._words = anonymous("shrinkpoint-job")
        self._given: tuple[int, ...] = ()
        self._number = 0
        self._begun = self._handed = False
        self._telling = threading.Lock()
        with tempfile.TemporaryFile() as log:
            self._log = high(os.dup(log.fileno()))
        ours, theirs = (socket.socket(fileno=high(s.detach())) for s in socket.socketpair())
        self._sock = ours
        try:
            with theirs:
                self._process = _start(theirs.fileno(), self._log, threads)
            modules = ["torch"] if "torch" in sys.modules else []
            # A worker that died at once shows when it is first waited for.
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                first = {"store": store_options(store), "nice": nice, "modules": modules, "upkeep": upkeep.to_json()}
                send(ours, first)
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
        """Whether it runs."""
        return self._process.poll() is None

    def hand(self, step: int, snapshot: Snapshot, origin: Origin | None) -> None:
        """See Place. What crosses the socket is short, so that it fits though the worker may not read it for long.

        The worker reads the origin's chain anew, for its memory is not shared.
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
        with self._telling:
            # From here on it may be on its way, whatever interrupts this: answers come in the order of what was said.
            self._begun = True
            send(self._sock, job, () if self._given == shared else shared)
            self._given = shared
            self._handed = True

    def run(self, step: int, snapshot: Snapshot, origin: Origin | None) -> tuple[dict[str, Any], list[Warned]]:
        """See Place.

        Raises:
            ChildProcessError: the worker is no more.
        """
        try:
            if not self._handed:
                # If it came across all the same, the worker knows it by its number and does it once.
                self.hand(step, snapshot, origin)
            answer, _ = receive(self._sock)
        except (EOFError, ConnectionError, BrokenPipeError):
            raise ChildProcessError(self.epitaph()) from None
        finally:
            self._begun = self._handed = False
        self._number += 1
        return answer, _warnings(answer, f"saving step {step}")

    def tend(self) -> list[Warned]:
        """See Place.

        Raises:
            ChildProcessError: the worker is no more.
        """
        try:
            with self._telling:
                if self._begun:
                    return []
                send(self._sock, {"do": "tend"})
            answer, _ = receive(self._sock)
        except (EOFError, ConnectionError, BrokenPipeError):
            raise ChildProcessError(self.epitaph()) from None
        return _warnings(answer, "between two saves")

    def epitaph(self) -> str:
        """How the worker ended, in words."""
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
        """See Place."""
        self.arena.stop = True

    def close(self) -> None:
        """See Place."""
        with contextlib.suppress(OSError):
            send(self._sock, {"do": "end"})
        self._sock.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # Bounded: a Ctrl-C inside `Popen.poll` may have left its lock taken, and then no wait ever ends.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_PATIENCE)
        self.arena.close()
        close_all((self._log, self._words))


def child_environment(threads: int) -> dict[str, str]:
    """Environment of a process of our own: it finds modules where this one finds them, and stays small."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(_module_folders()),
        "SHRINKPOINT_THREADS": str(threads),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        # All is in host memory: a context on the GPU would only take memory from the trainer.
        "CUDA_VISIBLE_DEVICES": "",
    }


def _module_folders() -> list[str]:
    """Where this process finds modules, "" as the folder that it stands in; Python passes over what is no string."""
    found = [entry for entry in sys.path if isinstance(entry, str)]
    if "" in found:
        here = ""
        with contextlib.suppress(OSError):  # that folder was removed
            here = os.getcwd()
        found = [entry or here for entry in found if entry or here]
    return found


def _start(fd: int, log: int, threads: int) -> subprocess.Popen[bytes]:
    """Start the worker; nothing of `__main__` runs again in it."""
    command = [sys.executable, "-P", "-m", "shrinkpoint.store.worker", str(fd), str(os.getpid())]
    # A group of its own: the terminal's Ctrl-C is the trainer's. Not a session: niceness counts within one only.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(fd,),
        env=child_environment(threads),
        process_group=0,
    )


def _warnings(answer: dict[str, Any], when: str) -> list[Warned]:
    """What the worker was warned of; raises its error, if there was one."""
    warned = [(str(c), str(m)) for c, m in answer.pop("warnings", [])]
    if "error" in answer:
        raise _rebuilt(answer, when)
    return warned


def _rebuilt(answer: dict[str, Any], when: str) -> BaseException:
    """The worker's error, of the same type where that is one of the library's own or a plain one of Python's."""
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
