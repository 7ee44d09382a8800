"""Executors of the saves of a `Saver`: a worker process, or a thread of this process."""

from __future__ import annotations

import builtins
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, fields
from typing import Any, Protocol

from ...codec import errors
from ...codec.config import Config
from ...codec.errors import ShrinkpointError, ShrinkpointWarning
from ...codec.evidence.kind import Kind
from ...codec.parallel import Stopped, stoppable
from ...kernels.backend.arrays import imported
from ..chain import ChainHead
from ..compaction import MAX_COST
from ..history import Loaded
from ..lock import InUseError
from ..manifest import Entry
from ..retention import Retention
from ..session import Begun, Saved, Session
from ..store import Store
from .channel import above_standard_streams, close_all, receive, send, start_worker
from .snapshot import Arena, Plan, Snapshot, anonymous, rebuild, take

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
        unread: its entry, if it was loaded and its references were not read yet.
        back: the run has gone back to it: this save builds on it even if it is not the first.
    """

    step: int
    identity: str
    head: ChainHead | None = None
    unread: Entry | None = None
    back: bool = False


@dataclass(slots=True)
class Job:
    """A save that is handed over; its state is in a snapshot.

    Args:
        step: training step.
        origin: what the first save of an executor builds on, and so does one that goes back to it.
        loaded: what the caller's store had loaded last at that time.
        future: of the result.
        begin: when the call began, by `time.perf_counter`.
        waited: seconds of waiting for the save before it.
        stall: seconds of the trainer's time.
    """

    step: int
    origin: Origin | None
    loaded: Loaded | None
    future: Future[Any]
    begin: float
    waited: float
    stall: float = 0.0

    @property
    def is_durable(self) -> bool:
        """Return whether the save is done, and neither failed nor cancelled."""
        return self.future.done() and self.future.exception() is None and self.future.result().status == "saved"


class Executor(Protocol):
    """Interface of executors, which do the saves of a `Saver` one after another."""

    arena: Arena
    on_device: bool
    pid: int
    """Id of the process that executes the saves."""

    def take(self, job: Job, planned: Plan, trees: Mapping[str, Any]) -> Snapshot:
        """Take what `hand` and `run` need of a state. When this returns, the live arrays may change.

        Args:
            job: the save.
            planned: the arrays of the state.
            trees: the same arrays in their trees.

        Raises:
            MemoryError: too little memory.
        """
        return take(planned, self.arena, on_device=self.on_device)

    def hand(self, job: Job, snapshot: Snapshot) -> None:
        """Hand over a save, which a worker process finishes even if this process is killed.

        `run` must follow with the same arguments, also if this call was interrupted or failed, which does no harm.
        """

    def run(self, job: Job, snapshot: Snapshot) -> tuple[dict[str, Any], list[Warned]]:
        """Finish the save handed over; return its outcome and warnings, or raise its error."""

    def maintain(self) -> list[Warned]:
        """Do the maintenance between saves, until the next save or `cancel`.

        Called by the thread that calls `run`.
        """

    def cancel(self) -> None:
        """Ask the save in progress, or the maintenance, to stop; called from another thread."""

    def is_stopped(self) -> bool:
        """Return whether the executor is stopped until a signal lets it continue."""
        return False

    def close(self) -> None:
        """Free all resources; no save is in progress."""
        self.arena.close()


class ThreadExecutor(Executor):
    """Executor in the calling thread; GPU arrays are quantized on their device."""

    on_device = True

    def __init__(self, store: Store, maintenance: Maintenance) -> None:
        # A store of its own: the caller's session is not changed by these saves.
        self._store = open_store(store_options(store))
        self.session = self._store.session
        self.session.spools = True
        self._maintainer = Maintainer(self._store, maintenance)
        self._stop = self.handed = False
        self.arena = Arena()
        self.pid = os.getpid()

    def hand(self, job: Job, snapshot: Snapshot) -> None:
        """See Executor."""
        self.handed, self._stop = True, False

    def run(self, job: Job, snapshot: Snapshot) -> tuple[dict[str, Any], list[Warned]]:
        """See Executor."""
        self.handed = False
        self.adopt(job.origin)
        return outcome(perform(self.session, job.step, snapshot, self.arena, lambda: self._stop, alone=True)), []

    def adopt(self, origin: Origin | None) -> bool:
        """Continue from the head of the caller's store if that is due.

        Returns:
            Whether its references are shared.
        """
        if origin is None or not (origin.back or self.session.head is None):
            return False
        if origin.head is not None:
            self.session.adopt(origin.head)
        elif origin.unread is not None:
            self.session.resume_later(origin.unread)
        return origin.head is not None

    def maintain(self) -> list[Warned]:
        """See Executor."""
        self._maintainer.run(lambda: self._stop or self.handed, alone=True)
        return []

    def cancel(self) -> None:
        """See Executor."""
        self._stop = True


class CompressingExecutor(ThreadExecutor):
    """Executor that compresses a state while the trainer waits, so that no copy of it is made.

    A thread writes the coded bytes, which wait on the disk of the store. `cancel` only stops the maintenance; a state
    that is compressed is saved.
    """

    def __init__(self, store: Store, maintenance: Maintenance) -> None:
        super().__init__(store, maintenance)
        self._begun: Begun | None = None

    def take(self, job: Job, planned: Plan, trees: Mapping[str, Any]) -> Snapshot:
        """See Executor."""
        # References that the trainer's own store has, too, are not freed.
        self.session.consumes = not self.adopt(job.origin)
        self._begun = self.session.begin(job.step, trees["state"], **save_options(trees), last=True)
        return Snapshot({}, [], [])

    def run(self, job: Job, snapshot: Snapshot) -> tuple[dict[str, Any], list[Warned]]:
        """See Executor."""
        begun, self._begun = self._begun, None
        assert begun is not None
        self.handed = False
        return outcome(self.session.finish(begun)), []


class ProcessExecutor(Executor):
    """Executor in a worker process, which shares only the snapshot with this process.

    Args:
        store: the store to save to.
        maintenance: of chains and old steps, between saves.
        nice: its niceness relative to this process.
        threads: how many it computes with.
        consumes: whether a save frees references of its parent while it runs; one that fails after that, or is
            cancelled, costs the next one a restore of the chain.

    Raises:
        OSError: it cannot be started.
    """

    on_device = False

    def __init__(self, store: Store, maintenance: Maintenance, *, nice: int, threads: int, consumes: bool) -> None:
        self.arena = Arena()
        self._text = anonymous("shrinkpoint-job")
        self._given: tuple[int, ...] = ()
        self._number = 0
        self._begun = self._handed = False
        self._sending = threading.Lock()
        self._log = above_standard_streams(anonymous("shrinkpoint-log"))
        ours, theirs = (socket.socket(fileno=above_standard_streams(s.detach())) for s in socket.socketpair())
        self._sock = ours
        try:
            with theirs:
                self._process = start_worker(theirs.fileno(), self._log, threads)
            self.pid = self._process.pid
            options = {"store": store_options(store), "maintenance": asdict(maintenance), "nice": nice}
            options["consumes"] = consumes
            # A worker that died at once is noticed when it is first waited for.
            with contextlib.suppress(ConnectionError):
                send(ours, {**options, "modules": ["torch"] if imported("torch") else []})
        except BaseException:
            ours.close()
            close_all((self._log, self._text))
            self.arena.close()
            raise

    @property
    def alive(self) -> bool:
        """Return whether the worker process runs."""
        return self._process.poll() is None

    def hand(self, job: Job, snapshot: Snapshot) -> None:
        """See Executor. The message is short, so that it fits while the worker does not read.

        The worker reads the origin's chain from storage, because its memory is not shared.
        """
        assert self.arena.fd is not None
        self.arena.stop = False
        origin = None if job.origin is None else [job.origin.step, job.origin.identity, job.origin.back]
        fields = {"step": job.step, "snapshot": snapshot.to_json(), "origin": origin}
        text = memoryview(json.dumps(fields, check_circular=False).encode())
        at = 0
        while at < len(text):
            at += os.pwrite(self._text, text[at:], at)
        message = {"do": "save", "number": self._number, "size": self.arena.size, "words": len(text)}
        shared = (self.arena.fd, self._text)
        with self._sending:
            # From here on it may have been sent, even if this is interrupted: answers come in the order of messages.
            self._begun = True
            send(self._sock, message, () if self._given == shared else shared)
            self._given = shared
            self._handed = True

    def run(self, job: Job, snapshot: Snapshot) -> tuple[dict[str, Any], list[Warned]]:
        """See Executor.

        Raises:
            ChildProcessError: the worker has ended.
        """
        with self._explained():
            try:
                if not self._handed:
                    # If it did arrive, the worker recognizes it by its number and does it once.
                    self.hand(job, snapshot)
                answer, _ = receive(self._sock)
            finally:
                self._begun = self._handed = False
        self._number += 1
        return answer, _warnings(answer, f"saving step {job.step}")

    def maintain(self) -> list[Warned]:
        """See Executor.

        Raises:
            ChildProcessError: the worker has ended.
        """
        with self._explained():
            with self._sending:
                if self._begun:
                    return []
                send(self._sock, {"do": "maintain"})
            answer, _ = receive(self._sock)
        return _warnings(answer, "between two saves")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise ChildProcessError with the reason if the worker has ended."""
        try:
            yield
        except (EOFError, ConnectionError):
            raise ChildProcessError(self.epitaph()) from None

    def epitaph(self) -> str:
        """Say how the worker ended."""
        try:
            status = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return f"the saver's worker (process {self.pid}) no longer answers"
        how = f"ended with status {status}"
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
        close_all((self._log, self._text))
        self._log = self._text = -1


def _warnings(answer: dict[str, Any], when: str) -> list[Warned]:
    """Return the worker's warnings; raise its error if there was one.

    The error has its own type if that is known here.
    """
    warned = [(str(c), str(m)) for c, m in answer.pop("warnings", [])]
    if "error" not in answer:
        return warned
    kind, message = answer["error"], answer["message"]
    known = getattr(errors, kind) if kind in errors.__all__ else getattr(builtins, kind, None)
    error: BaseException
    if isinstance(known, type) and issubclass(known, OSError) and answer["errno"]:
        error = OSError(answer["errno"], message, answer["filename"])
    elif isinstance(known, type) and issubclass(known, (ShrinkpointError, ShrinkpointWarning, OSError, MemoryError)):
        error = known(message)
    else:
        error = ShrinkpointError(f"the saver's worker failed: {answer['qualname']}: {message}")
    error.add_note(f"In the saver's worker, {when}:\n{answer['trace']}")
    raise error


# ------------------------------------------------------------------------------------------ the work itself


def kinds_tree(kinds: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return `kinds=` as a tree of plain values and arrays, which is passed like the state."""
    return {
        path: kind if isinstance(kind, str) else {f.name: getattr(kind, f.name) for f in fields(kind)}
        for path, kind in (kinds or {}).items()
    }


def save_options(trees: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of `Session.save` in the trees of a snapshot."""
    grads, metric, asked = trees["options"]
    kinds = {path: kind if isinstance(kind, str) else Kind(**kind) for path, kind in trees["kinds"].items()} or None
    cfg = None if asked is None else Config.from_json(json.loads(asked))
    return {"grads": grads, "kinds": kinds, "metric": metric, "cfg": cfg}


def perform(
    session: Session, step: int, snapshot: Snapshot, arena: Arena, stop: Callable[[], bool], *, alone: bool
) -> Saved | None:
    """Save a snapshot; return None if `stop()` was true before anything was written.

    Args:
        session: whose next step it becomes.
        step: training step.
        snapshot: of {"state", "options": [grads, metric, configuration as JSON or None], "kinds"}.
        arena: the memory of the snapshot.
        stop: asked between pieces of work.
        alone: use this thread only.
    """
    trees = rebuild(snapshot, arena)
    options = save_options(trees)
    with contextlib.suppress(Stopped), stoppable(stop, alone=alone), contextlib.ExitStack() as streams:
        # Arrays that stayed on a GPU are read on a separate stream, after their copies are complete.
        for device, event in snapshot.ready:
            import torch

            stream = _stream_of_saves(device)
            stream.wait_event(event)
            streams.enter_context(torch.cuda.stream(stream))
        return session.save(step, trees["state"], **options)
    return None


@functools.cache
def _stream_of_saves(device: Any) -> Any:
    """Return the stream of a device on which saves read arrays.

    PyTorch keeps the memory that was used on each stream for that stream alone, so a new one for each save would take
    more and more of it.
    """
    import torch

    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def outcome(saved: Saved | None) -> dict[str, Any]:
    """Return the fields of a `SaveResult` that a save determines, as plain values."""
    if saved is None:
        return {"status": "cancelled"}
    fields = {name: getattr(saved, name) for name in ("path", "nbytes", "raw_nbytes", "is_delta")}
    return {**fields, "status": "saved", "id": saved.checkpoint.id}


def store_options(store: Store) -> dict[str, Any]:
    """Return the arguments for `open_store`, as plain values."""
    return {"url": store.url, "cfg": json.dumps(store.cfg.to_json()), "in_memory": store.in_memory}


def open_store(options: Mapping[str, Any]) -> Store:
    """Open the same store again, with a session of its own."""
    return Store(options["url"], Config.from_json(json.loads(options["cfg"])), in_memory=options["in_memory"])


@dataclass(frozen=True, slots=True)
class Maintenance:
    """The maintenance that was requested.

    Args:
        compact: restore cost of a step, in multiples of a base, above which chains are compacted; None: never.
        keep: which steps are kept; None: all.
    """

    compact: float | None = None
    keep: Retention | None = None

    def __bool__(self) -> bool:
        return self.compact is not None or self.keep is not None

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Maintenance:
        """Invert `dataclasses.asdict`."""
        return Maintenance(data["compact"], None if data["keep"] is None else Retention(**data["keep"]))


class Maintainer:
    """Maintenance of a store in the time between saves.

    Args:
        store: of the saves.
        maintenance: the work.
    """

    def __init__(self, store: Store, maintenance: Maintenance) -> None:
        self._store, self._maintenance = store, maintenance
        self._highest = self._remaining = 0.0
        self._moved = False

    def run(self, stop: Callable[[], bool], *, alone: bool) -> None:
        """Do the maintenance due after a save until `stop()` is true; continue after the next save.

        At every moment all steps can be loaded, as after a crash.

        Args:
            stop: asked between pieces of work.
            alone: use this thread only.
        """
        compact, head = self._maintenance.compact, self._store.head
        cost = head.last.restore_cost if head is not None else 0.0
        self._highest = max(self._highest, cost)
        if compact is not None and cost <= compact < self._remaining:
            self._remaining, self._highest = 0.0, cost  # a new chain
        with contextlib.suppress(Stopped), stoppable(stop, alone=alone):
            # First: old steps do not accumulate however little time there is, and fewer are left to compact.
            if self._maintenance.keep is not None:
                self._collect()
            # A chain that could not be compacted, because it is damaged, is tried again once it is twice as long.
            if compact is not None and self._highest > max(compact, 2 * self._remaining):
                self._moved = True
                moved = self._store.compact(min(compact, MAX_COST))
                is_left = cost > compact and head is not None and head.last.step not in moved
                self._remaining = cost if is_left else 0.0
                self._highest = 0.0
            if self._moved:
                self._collect()

    def _collect(self) -> None:
        """Remove old steps and garbage; while others write, it is left to the next save."""
        with contextlib.suppress(InUseError):
            self._store.gc(self._maintenance.keep, timeout=0.0)
            self._moved = False
