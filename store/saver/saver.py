"""`Saver`: the trainer copies its state; a worker process compresses and writes the copy."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import math
import os
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ...codec.config import Config
from ...codec.display import html_fields, size
from ...codec.errors import BadArgumentError, ShrinkpointError, ShrinkpointWarning
from ...codec.evidence.kind import check_kinds, check_used
from ...codec.inputs import by_weights
from ...codec.memory_limit import check_room
from ...codec.named_presets import check_config
from ...codec.state import tree
from ...codec.state.leaves import is_array
from ...kernels.backend.arguments import choice, instance, integer, number, or_none
from ..manifest import check_metric, check_step
from ..retention import Retention
from ..store import Store
from ..urls import is_of_this_process, one_name
from . import executors, host_copy
from .executors import Executor, Job, Origin, ProcessExecutor, Warned
from .exit import EXIT_CLEANUP
from .snapshot import Plan, Snapshot, plan

ON_BUSY = ("wait", "skip", "cancel")
MODES = ("process", "thread")
SNAPSHOTS = ("copy", "compressed")
STOPPED = 30.0
"""Seconds that a stopped worker (SIGSTOP) is waited for, by a save and at exit."""
_NESTED = (
    "a saver was called within one of its own calls, for example by a signal handler: let the handler set a flag, and "
    "save between two steps"
)
_MOST_DEATHS = 2
"""After this number of successive workers that died before their first save, the next one starts a new chain, because
reading the old one may have killed them."""
_WORK = 0.3
"""Share of a state's bytes that compressing it takes in addition to its snapshot, references included."""
_LOOK = 1.0
"""Seconds between two looks at a worker that is waited for."""


class SaverWarning(ShrinkpointWarning):
    """A warning of the worker, or of the saver itself."""


_savers: weakref.WeakSet[Saver] = weakref.WeakSet()
"""The Savers of this process."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of one `Saver.save`; a failure is an exception instead.

    Args:
        step: training step.
        status: "saved" (durable), "skipped" (another save was in flight) or "cancelled" (a later save replaced it).
        path: of the data file; "" unless saved.
        id: content hash of the checkpoint; "" unless saved.
        nbytes: stored bytes.
        raw_nbytes: bytes of the state.
        is_delta: whether it was stored as a delta.
        seconds: from the end of the snapshot until it was durable.
        stall: seconds that `save` took of the trainer's time, `waited` included.
        waited: seconds of these spent waiting for the save before it.
    """

    step: int
    status: str
    path: str = ""
    id: str = ""
    nbytes: int = 0
    raw_nbytes: int = 0
    is_delta: bool = False
    seconds: float = 0.0
    stall: float = 0.0
    waited: float = 0.0

    @property
    def ratio(self) -> float:
        """`raw_nbytes / nbytes`; 0 unless saved."""
        return self.raw_nbytes / self.nbytes if self.nbytes else 0.0

    def _repr_html_(self) -> str:
        cells = {"step": str(self.step), "status": self.status, "file": self.path}
        cells |= {"stored": f"{size(self.nbytes)} of {size(self.raw_nbytes)}", "ratio": f"{self.ratio:.1f}"}
        cells |= {"training waited": f"{1e3 * self.stall:.1f} ms", "durable after": f"{self.seconds:.2f} s"}
        return html_fields("SaveResult", cells)


@dataclass(slots=True)
class _Results:
    """The newest results of a Saver, over all its workers."""

    last: SaveResult | None = None
    saved: SaveResult | None = None


class Runner:
    """The thread that hands jobs to an executor and resolves their futures."""

    def __init__(self, executor: Executor, url: str, results: _Results, maintains: bool) -> None:
        self.executor, self.url = executor, url
        self.errors: deque[BaseException] = deque()
        self.maintaining: Future[None] | None = None
        self.future: Future[SaveResult] | None = None
        self.warned: list[str] = []
        self.has_saved = self.ended = False
        self.pid = os.getpid()
        self._results, self._maintains = results, maintains
        self._failed = ""
        self._stopped_at = math.inf
        self._reported: list[Warned] = []
        self._jobs: queue.SimpleQueue[tuple[Job, Snapshot] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shrinkpoint-saver", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self.future is not None and not self.future.done()

    def submit(self, job: Job, snapshot: Snapshot) -> None:
        """Hand a job to the executor, which finishes it even if this process ends."""
        self.future = job.future
        try:
            # If this fails, the thread tries once more and reports the error.
            with contextlib.suppress(Exception):
                self.executor.hand(job, snapshot)
            job.stall = time.perf_counter() - job.begin
        finally:
            self._jobs.put((job, snapshot))

    def _work(self) -> None:
        while (submitted := self._jobs.get()) is not None:
            job, snapshot = submitted
            begin = time.perf_counter()
            try:
                answer, warned = self.executor.run(job, snapshot)
            except BaseException as e:
                self.errors.append(e)
                job.future.set_exception(e)
                continue
            answer["seconds"] = time.perf_counter() - begin
            result = SaveResult(step=job.step, stall=job.stall, waited=job.waited, **answer)
            self._results.last = result
            # A warning that the save before this one gave is not repeated.
            self.warned += [f"step {job.step}: {c}: {m}" for c, m in warned if (c, m) not in self._reported]
            self._reported = warned
            done: Future[None] = Future()
            if is_saved := result.status == "saved":
                self._results.saved, self.has_saved = result, True
                self.maintaining = done if self._maintains else None
            job.future.set_result(result)
            if is_saved and self._maintains:
                self._maintain(job.step)
                done.set_result(None)

    def _maintain(self, step: int) -> None:
        """Do the maintenance after a save, unless another one is waiting."""
        if not self._jobs.empty():
            return
        failed = ""
        try:
            self.warned += [f"after step {step}: {c}: {m}" for c, m in self.executor.maintain()]
        except ChildProcessError as e:
            self.errors.append(e)
        except Exception as e:
            # No state is lost by it, so no save fails for it. Reported again when it has changed.
            failed = f"{type(e).__name__}: {e}"
            if failed != self._failed:
                self.warned.append(f"after step {step}, compact= and keep= could not be done: {failed}")
        self._failed = failed

    def wait(self, timeout: float | None = None) -> None:
        """Wait until nothing is in flight; errors are left for `take_error`.

        Raises:
            TimeoutError: it takes longer.
            ChildProcessError: the worker is stopped, see `_ended`.
        """
        if self.busy:
            self.check_elsewhere("be waited for")
        if self.future is not None and not self._ended(self.future, timeout):
            raise TimeoutError(f"a save is still in flight after {timeout:g} s")

    def rest(self) -> None:
        """Stop the maintenance between saves."""
        if self.maintaining is not None and not self.maintaining.done():
            self.executor.cancel()
            self._ended(self.maintaining)

    def _ended(self, future: Future[Any], timeout: float | None = None) -> bool:
        """Return whether some work ended in time.

        Raises:
            ChildProcessError: the worker has been stopped for `STOPPED` seconds, and may stay so forever.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            if concurrent.futures.wait([future], max(0.0, min(_LOOK, end - time.monotonic()))).done:
                return True
            now = time.monotonic()
            if now >= end:
                return False
            if not self.executor.is_stopped():
                self._stopped_at = math.inf
                continue
            self._stopped_at = min(self._stopped_at, now)
            if now - self._stopped_at >= STOPPED:
                pid = self.executor.pid
                raise ChildProcessError(
                    f"the saver's worker (process {pid}) has been stopped for {STOPPED:g} s, by SIGSTOP or a debugger; "
                    f"its save to {self.url} is not durable; `kill -CONT {pid}` lets it finish"
                )

    def take_error(self, stacklevel: int = 5) -> BaseException | None:
        """Return the newest pending error, with earlier ones as notes; issue pending warnings."""
        while self.warned:
            warnings.warn(self.warned.pop(0), SaverWarning, stacklevel=stacklevel)
        error = self.errors.pop() if self.errors else None
        while error is not None and self.errors:
            before = self.errors.popleft()
            error.add_note(f"Before that: {type(before).__name__}: {before}")
        return error

    @property
    def is_here(self) -> bool:
        """Return whether the caller runs in this thread, in a callback of a future."""
        return threading.current_thread() is self._thread

    def check_elsewhere(self, what: str) -> None:
        """Refuse a callback that would wait for the thread that it runs in."""
        if self.is_here:
            raise ShrinkpointError(f"a saver cannot {what} by a callback of its future, which is part of a save")

    def close(self) -> None:
        """Wait, end the thread and free the executor, also again; nothing in a forked child."""
        if os.getpid() != self.pid:
            return
        self.wait()
        self.ended = True
        self.rest()
        self._jobs.put(None)
        self._thread.join()
        self.executor.close()


class Saver:
    """Asynchronous saves to a store while training continues; one save is in flight at a time.

    `save` copies the state and returns. A worker, a fresh process with a low priority, compresses the copy and commits
    it to the store as `Store.save` would: the files are the same. The worker keeps what the next delta needs, so only
    the copy of the state is passed to it. The first save continues from what `store` has saved or loaded by then: after
    `state = store.load()` with a delta, with an untouched store with a base. So does a save whose step is not above the
    last one's if `store` has loaded a step in between: the run has gone back.

    An error of a save is raised by the next call of `save`, `wait` or `close`, and by the future that `save` returned;
    an error between saves (`compact`, `keep`) is a SaverWarning. A killed worker is a ChildProcessError; the save after
    it starts another worker, which reads the chain of the last save and continues it. A stopped worker (SIGSTOP) is
    waited for during 30 s; then a ChildProcessError names the process. An error that no call was left to raise is
    printed at exit, and the exit status is 120.

    A process has one Saver to a store; a SaverWarning names a store that has another open one.

    With a process, a state counts as saved once `save` has returned: the worker has all of it and finishes the save
    even if the trainer is killed at once.

    Memory: one copy of the state (with `grads`), allocated at the first save and reused, and the worker's own: see
    docs/saver.md.

    Args:
        store: where to save, and what the first save builds on. The Saver opens it again: its saves do not change what
            `store.save` builds on.
        on_busy: what `save` does while a save is in flight: "wait" for it (default); "skip", so that the new state is
            not saved; "cancel" the older one if it is not compressed yet, and save the new one.
        mode: "process"; or "thread", in this process: its Python code then takes turns with the trainer's, and GPU
            arrays are copied and quantized on their device. Default: a process, but a thread on Windows and if the URL
            is in this process's memory (`memory://`).
        nice: difference of the worker's priority to the trainer's, 0 to 19; default 10.
        threads: number of threads of the worker, default 1.
        compact: shorten chains between saves: once restoring a step costs this multiple of a base's bytes, chains that
            cost more than 2.5 are compacted (see `Store.compact`), and their former files are removed; in [1, 1e6].
            None (default): never.
        keep: remove all other steps between saves, see `Store.gc`; None (default): keep all. Adapters whose own files
            point to steps (Accelerate, Orbax) refuse it: they remove replaced steps themselves.
        snapshot: "copy" (default): the trainer waits for a copy of the state. "compressed": it waits until the state is
            compressed, by all threads, and a thread writes the result; no copy is made.

    Raises:
        BadArgumentError: an argument out of range.
        OSError: the worker cannot be started.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> store = sp.Store("memory://docs-saver")
        >>> with sp.Saver(store) as saver:
        ...     done = saver.save(10, {"weight": np.arange(6.0)})
        >>> done.result().status, store.steps()
        ('saved', [10])

    Source: Check-N-Run section 4.2 (decoupled snapshot), BitSnap section 3.2 (asynchronous agent).
    """

    def __init__(
        self,
        store: Store,
        *,
        on_busy: str = "wait",
        mode: str | None = None,
        nice: int = 10,
        threads: int = 1,
        compact: float | None = None,
        keep: Retention | None = None,
        snapshot: str = "copy",
    ) -> None:
        if not isinstance(store, Store):
            raise BadArgumentError(f"store must be a Store, as Store(folder), not {type(store).__qualname__}")
        on_busy, mode = choice("on_busy", on_busy, ON_BUSY), or_none("mode", mode, choice, MODES)
        nice, threads = integer("nice", nice, 0, 19), integer("threads", threads, 1)
        compact = or_none("compact", compact, number, 1, 1e6)
        keep = or_none("keep", keep, instance, Retention)
        in_memory = is_of_this_process(store.url)
        self.snapshot = choice("snapshot", snapshot, SNAPSHOTS)
        if mode == "process" and snapshot == "compressed":
            raise BadArgumentError("mode is 'process', but with snapshot='compressed' this process compresses")
        if mode == "process" and (in_memory or os.name != "posix"):
            why = f"{store.url} is in this process's memory" if in_memory else f"{os.name} has no worker processes"
            raise BadArgumentError(f"mode is 'process', but {why}; use mode='thread'")
        self.store, self.on_busy, self.keep = store, on_busy, keep
        is_here = in_memory or os.name != "posix" or snapshot == "compressed"
        self.mode = mode or ("thread" if is_here else "process")
        self._maintenance = executors.Maintenance(compact, keep)
        kind: Callable[..., Executor] = executors.ThreadExecutor
        if snapshot == "compressed":
            kind = executors.CompressingExecutor
        elif self.mode == "process":
            kind = functools.partial(ProcessExecutor, nice=nice, threads=threads, consumes=on_busy != "cancel")
        self._new_executor = functools.partial(kind, store, self._maintenance)
        self._lock = threading.RLock()
        self._inside = self._refused = self._closing = self._closed = False
        self._pid = os.getpid()
        self._known: set[str] = set()
        self._runner: Runner | None = None
        self._results = _Results()
        self._deaths = 0
        self._newest: Job | None = None
        self._durable: Job | None = None
        self._look_for_another()
        self._start()
        _savers.add(self)

    def __repr__(self) -> str:
        doing = "closed" if self._is_closed else "busy" if self.busy else "idle"
        return f"<Saver to {self.store.url}, {self.mode}, {doing}>"

    def _look_for_another(self) -> None:
        """Warn of an open Saver of this process to the same store.

        One that nothing refers to any more, and that was not closed, is waited for.
        """
        name = one_name(self.store.url)
        if any(one_name(o.store.url) == name for o in list(_savers) if not (o._is_closed or o._is_foreign)):
            message = (
                f"{self.store.url}: this process has an open Saver to this store. Two Savers save at the same time, so "
                "that a later step may come first, and each has a chain of its own: close() the other one before you "
                "make this one (a notebook's cell that runs twice makes two), or use only one"
            )
            warnings.warn(message, SaverWarning, stacklevel=3)
            return
        with contextlib.suppress(ChildProcessError):  # a stopped worker, which its own Saver reports
            EXIT_CLEANUP.wait_for(name)

    def _start(self) -> Runner:
        runner = Runner(self._new_executor(), one_name(self.store.url), self._results, bool(self._maintenance))
        self._runner = runner
        self._finalizer = EXIT_CLEANUP.add(self, runner)
        return runner

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Allow one call at a time; refuse a nested call, and one in a forked process."""
        if self._is_foreign:
            raise ShrinkpointError(f"this saver belongs to process {self._pid}; open one of your own after a fork")
        held = contextlib.ExitStack()
        if self._runner is not None and self._runner.is_here:
            # A callback never deadlocks with `close`.
            while not self._lock.acquire(timeout=0.05):
                if self._closing:
                    raise BadArgumentError("the saver is being closed")
            held.callback(self._lock.release)
        with held, self._lock:
            if self._inside:
                self._refused = True
                raise ShrinkpointError(_NESTED)
            try:
                self._inside, self._refused = True, False
                yield
            finally:
                self._inside = False
            if self._refused:  # and its exception may have been ignored
                warnings.warn(f"refused meanwhile: {_NESTED}", SaverWarning, stacklevel=4)

    @property
    def _is_closed(self) -> bool:
        """Return whether the saver is closed, by `close` or by `ExitCleanup`."""
        return self._closed or (self._runner is not None and self._runner.ended)

    @property
    def _is_foreign(self) -> bool:
        """Return whether the saver belongs to the parent of this forked process."""
        return self._pid != os.getpid()

    @property
    def busy(self) -> bool:
        """Return whether a save is in flight."""
        return self._runner is not None and self._runner.busy

    @property
    def last(self) -> SaveResult | None:
        """Result of the newest finished save; None before the first."""
        return self._results.last

    @property
    def nbytes(self) -> int:
        """Bytes of the snapshot's memory."""
        return self._runner.executor.arena.size if self._runner is not None else 0

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None without a worker process, as after `close`."""
        executor = self._runner.executor if self._runner is not None and not self._is_closed else None
        return executor.pid if isinstance(executor, ProcessExecutor) else None

    def save(
        self,
        step: int,
        state: Any,
        *,
        grads: Any = None,
        kinds: Mapping[str, Any] | None = None,
        metric: float | None = None,
        cfg: Config | str | None = None,
    ) -> Future[SaveResult]:
        """Copy a state and hand it over to be saved; then training may change the state.

        Args:
            step: training step, see `Store.save`.
            state: see `compress`.
            grads: see `compress`.
            kinds: see `compress`.
            metric: see `Store.save`.
            cfg: see `Store.save`.

        Returns:
            A future of the result, done at once for a skipped save.

        Raises:
            BadArgumentError, UnsupportedLeafError: see `compress`; nothing was started.
            ShrinkpointError: called within a call of the same Saver, as by a signal handler; in a forked process; or by
                a callback of a save's future that would have to wait for another save.
            ChildProcessError: the worker was killed (call `save` again for a new one) or is stopped.
            MemoryError: too little memory for the snapshot.
            Exception: the error of the save before this one. The state given now is not saved then.
        """
        begin = time.perf_counter()
        with self._alone():
            runner = self._ready()
            step, metric = check_step(step), check_metric(metric)
            check_kinds(kinds)
            self._check_names(state, grads, kinds)
            asked = None if cfg is None else json.dumps(check_config(cfg).to_json())
            future: Future[SaveResult] = Future()
            future.set_running_or_notify_cancel()
            if runner.busy and self.on_busy == "skip":
                future.set_result(SaveResult(step, "skipped", stall=time.perf_counter() - begin))
                return future
            trees = {"state": state, "options": [grads, metric, asked], "kinds": executors.kinds_tree(kinds)}
            planned = plan(trees)
            waiting = time.perf_counter()
            if runner.busy:
                if self.on_busy == "cancel":
                    runner.executor.cancel()
                runner.wait()
                self._raise(runner)
                # Other threads may have replaced arrays or freed their memory during the wait.
                planned = plan(trees)
            waited = time.perf_counter() - waiting
            if self._newest is not None and self._newest.is_durable:
                self._durable = self._newest
            self._check_memory(runner, planned)
            job = Job(step, self._origin(step), self.store.session.loaded, future, begin, waited)
            if self.snapshot == "compressed":
                runner.rest()
            snapshot = runner.executor.take(job, planned, trees)
            runner.submit(job, snapshot)
            self._newest = job
            if planned.nbytes >= host_copy.STREAMED:
                host_copy.load_in_thread()
            return future

    def _check_memory(self, runner: Runner, planned: Plan) -> None:
        """Refuse a save that needs more memory than this process may take, in a container too.

        Raises:
            MemoryError: with the need and the limit.
        """
        need = round(_WORK * planned.nbytes)
        if self.snapshot == "copy":
            need += max(0, planned.nbytes - runner.executor.arena.size)
        check_room(need, f"{self.store.url}: a save of a state of {planned.nbytes} bytes")

    def _check_names(self, state: Any, grads: Any, kinds: Mapping[str, Any] | None) -> None:
        """Refuse gradients and kinds that belong to no array.

        Now rather than in the worker, whose error comes with the next save. Kinds are checked if their names are new,
        because spelling the paths of all arrays takes as long as the plan.
        """
        if grads is None and (kinds is None or set(kinds) == self._known):
            return
        _, arrays = tree.flatten(state, is_array)
        check_used(kinds, [node.path for node in arrays])
        by_weights(grads, arrays, "grads")
        self._known = set() if kinds is None else set(kinds)

    def _origin(self, step: int) -> Origin | None:
        """Return the parent of a new worker's first save, or of one after a rewind.

        Any worker builds on the latter where the run has gone back: the store has loaded a step since the newest save,
        and this save's step is not above that one's. (A step that is loaded only to be inspected is followed by a
        higher one.) The newest save may be lost, so the newest durable one is compared too.
        """
        session, saved = self.store.session, self._results.saved
        newest, loaded = session.newest, session.loaded
        gives_up = self._deaths >= _MOST_DEATHS
        may_go_back = not gives_up or (self._runner is not None and self._runner.has_saved)
        if may_go_back and newest is not None and loaded is not None:
            for before in (self._newest, self._durable):
                if before is not None and step <= before.step and loaded is not before.loaded:
                    return Origin(newest.step, newest.identity, session.head, session.unread, back=True)
        if gives_up:
            return None
        if saved is not None:
            return Origin(saved.step, saved.id)
        return None if newest is None else Origin(newest.step, newest.identity, session.head, session.unread)

    def wait(self, timeout: float | None = None) -> SaveResult | None:
        """Wait until nothing is in flight.

        Args:
            timeout: seconds; None: without a limit.

        Returns:
            Result of the newest save; None if there was none.

        Raises:
            TimeoutError: it takes longer; the save continues.
            BadArgumentError: `timeout` is not a number.
            ShrinkpointError: see `save`.
            Exception: the error of the save.
        """
        timeout = or_none("timeout", timeout, number, -math.inf, math.inf)
        with self._alone():
            if self._runner is not None and not self._is_closed:
                self._runner.wait(timeout)
                self._raise(self._runner)
            return self.last

    def rest(self) -> None:
        """Wait for the save in flight, and stop the maintenance until the next one.

        To be called before steps are removed: while chains are compacted, `Store.drop` and `Store.gc` wait.

        Raises:
            ShrinkpointError: called by a callback of a save's future, which runs before the maintenance.
        """
        if self._runner is not None:
            self._runner.check_elsewhere("rest")
        if self._is_foreign:
            return
        with self._alone():
            if self._runner is not None and not self._is_closed:
                self._runner.wait()
                self._runner.rest()

    def close(self) -> None:
        """Wait for the save in flight, end the worker and free the memory; may be called again.

        Raises:
            ShrinkpointError: called within a call of the same Saver, as by a signal handler.
            Exception: the error of the last save, if it was not raised yet.
        """
        if self._runner is not None:
            self._runner.check_elsewhere("be closed")
        if self._is_foreign:
            self._closed = True
            return
        with self._alone():
            runner = self._runner
            if runner is None:
                self._closed = True
                return
            self._closing = True
            try:
                runner.wait()
                self._closed = True
                runner.close()
                EXIT_CLEANUP.remove(self._finalizer, runner)
                self._runner = None
            finally:
                self._closing = False
            if (error := runner.take_error(3)) is not None:
                raise error

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
            return
        # The caller's exception is raised; the result of the save is a note on it.
        runner = self._runner
        in_flight = runner.future if runner is not None and runner.busy and not self._is_foreign else None
        try:
            self.close()
        except Exception as e:
            error.add_note(f"The saver to {self.store.url} failed as well: {type(e).__name__}: {e}")
        else:
            if in_flight is not None:
                result = in_flight.result()
                error.add_note(f"Step {result.step} was in flight to {self.store.url}: it is {result.status}.")

    def _ready(self) -> Runner:
        """Return the running worker; errors since the last call are raised first."""
        if self._is_closed:
            raise BadArgumentError("the saver is closed")
        runner = self._runner
        if runner is None:
            return self._start()
        self._raise(runner, stacklevel=5)
        return runner

    def _raise(self, runner: Runner, stacklevel: int = 4) -> None:
        """Raise the error of a finished save, or an error if the worker has died."""
        if runner.busy:
            return
        error = runner.take_error(stacklevel)
        executor = runner.executor
        if isinstance(executor, ProcessExecutor) and not executor.alive:
            if error is None:
                error = ChildProcessError(executor.epitaph())
            error.add_note("Nothing is in flight now; the next save starts a new worker that continues the chain.")
            self._deaths = 0 if runner.has_saved else self._deaths + 1
            EXIT_CLEANUP.remove(self._finalizer, runner)
            self._runner = None
            runner.close()
        if error is not None:
            raise error
