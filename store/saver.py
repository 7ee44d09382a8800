"""`Saver`: saves that cost the trainer one copy of its state; a worker process compresses and writes them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import os
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from ..codec.config import Config, check_config
from ..codec.errors import BadArgumentError, ShrinkpointError, ShrinkpointWarning
from ..codec.evidence.kind import check_kinds, check_used
from ..codec.inputs import by_weights
from ..codec.state import tree
from ..codec.state.leaves import is_array
from ..kernels.arguments import choice, instance, integer, number, or_none
from . import copying
from .files import is_of_this_process
from .head import Head
from .manifest import check_metric, check_step
from .process import Origin, Place, ProcessPlace, ThreadPlace
from .retention import Retention
from .snapshot import Snapshot, plan, take
from .store import Store
from .unclosed import Unclosed
from .upkeep import Upkeep
from .worker import Warned, kinds_tree

P = ParamSpec("P")
R = TypeVar("R")
ON_BUSY = ("wait", "skip", "cancel")
MODES = ("process", "thread")
_WITHIN = (
    "a saver was called within one of its own calls, as by a signal handler: let the handler take a note, and save "
    "between two steps"
)
_BARREN = 2
"""After so many workers in a row that died before they had saved anything the next one begins anew: reading the chain
may be what they died of."""


class SaverWarning(ShrinkpointWarning):
    """The worker was warned while it saved, or the saver has something to say that is no error."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What came of one `Saver.save`; what failed is an exception instead.

    Args:
        step: training step.
        status: "saved" (durable), "skipped" (another save was in flight) or "cancelled" (a later save replaced it).
        path: of the data file; "" unless saved.
        id: content hash of the checkpoint; "" unless saved.
        nbytes: stored bytes.
        raw_nbytes: bytes of the state.
        is_delta: whether it was stored as a delta.
        seconds: from the snapshot's end until it was durable.
        stall: seconds that `save` kept the trainer, `waited` included.
        waited: seconds of these for the save before it.
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


@dataclass(slots=True)
class _Job:
    step: int
    snapshot: Snapshot
    future: Future[SaveResult]
    begin: float
    waited: float
    origin: Origin | None
    stall: float = 0.0


@dataclass(frozen=True, slots=True)
class _Handed:
    """A save that was handed over: its step, the store's head then, and what comes of it."""

    step: int
    head: Head | None
    future: Future[SaveResult]

    @property
    def is_durable(self) -> bool:
        """Whether it is done, and neither lost nor cancelled."""
        return self.future.done() and self.future.exception() is None and self.future.result().status == "saved"


class _Runner:
    """The thread that hands jobs to a place and fulfils their futures. It knows nothing of its Saver."""

    def __init__(self, place: Place, upkeep: bool) -> None:
        self.place = place
        self.errors: deque[BaseException] = deque()
        self.tending: Future[None] | None = None
        self.last: SaveResult | None = None
        self.saved: SaveResult | None = None
        self.future: Future[SaveResult] | None = None
        self.warned: list[str] = []
        self.ended = False
        self._failed = ""
        self._said: list[Warned] = []
        self.pid = os.getpid()
        self._upkeep = upkeep
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shrinkpoint-saver", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self.future is not None and not self.future.done()

    def submit(self, job: _Job) -> None:
        """Hand a job to the place; when this returns it no longer depends on this process."""
        self.future = job.future
        try:
            # What failed here is tried once more, and told, by the thread.
            with contextlib.suppress(Exception):
                self.place.hand(job.step, job.snapshot, job.origin)
            job.stall = time.perf_counter() - job.begin
        finally:
            self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            begin = time.perf_counter()
            try:
                answer, warned = self.place.run(job.step, job.snapshot, job.origin)
            except BaseException as e:
                self.errors.append(e)
                job.future.set_exception(e)
                continue
            answer["seconds"] = time.perf_counter() - begin
            self.last = SaveResult(step=job.step, stall=job.stall, waited=job.waited, **answer)
            if self.last.status == "saved":
                self.saved = self.last
            # What a save before this one said already is not said again at each.
            self.warned += [f"step {job.step}: {c}: {m}" for c, m in warned if (c, m) not in self._said]
            self._said = warned
            done: Future[None] = Future()
            if tend := self._upkeep and self.last.status == "saved":
                self.tending = done
            job.future.set_result(self.last)
            if tend:
                self._tend(job.step)
                done.set_result(None)

    def _tend(self, step: int) -> None:
        """What is due after a save, unless there is another one to do."""
        if not self._jobs.empty():
            return
        failed = ""
        try:
            self.warned += [f"after step {step}: {c}: {m}" for c, m in self.place.tend()]
        except ChildProcessError as e:
            self.errors.append(e)
        except Exception as e:
            # No state is lost by it: it must not take the place of a save. Told again when it has changed.
            failed = f"{type(e).__name__}: {e}"
            if failed != self._failed:
                self.warned.append(f"after step {step}, compact= and keep= could not be done: {failed}")
        self._failed = failed

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is in flight; errors are left for `take_error`."""
        if self.busy:
            self.check_elsewhere("be waited for")
        if self.future is not None and not concurrent.futures.wait([self.future], timeout).done:
            raise TimeoutError(f"a save is still in flight after {timeout:g} s")

    def take_error(self, stacklevel: int = 5) -> BaseException | None:
        """The newest error that nobody was told of yet, those before it as notes; warnings are passed on here."""
        while self.warned:
            warnings.warn(self.warned.pop(0), SaverWarning, stacklevel=stacklevel)
        error = self.errors.pop() if self.errors else None
        while error is not None and self.errors:
            before = self.errors.popleft()
            error.add_note(f"Before that: {type(before).__name__}: {before}")
        return error

    @property
    def is_here(self) -> bool:
        """Whether the caller is the thread itself: a callback of a future."""
        return threading.current_thread() is self._thread

    def check_elsewhere(self, what: str) -> None:
        """Refuse to a callback what waits for the thread that it runs in."""
        if self.is_here:
            raise ShrinkpointError(f"a saver cannot {what} by a callback of its future, which is part of a save")

    def close(self) -> None:
        """Wait, end the thread, free the place. In a forked child there is nothing to end."""
        if os.getpid() != self.pid:
            return
        self.wait()
        self.ended = True
        self.place.cancel()  # what is done between saves
        self._jobs.put(None)
        self._thread.join()
        self.place.close()


_UNCLOSED = Unclosed()


def _one_at_a_time(method: Callable[Concatenate[Saver, P], R]) -> Callable[Concatenate[Saver, P], R]:
    """Other threads wait for their turn; a call within a call of the same thread fails, and one in a forked process."""

    @functools.wraps(method)
    def call(self: Saver, /, *args: P.args, **options: P.kwargs) -> R:
        self._check_own()
        with self._turn(), self._lock:
            if self._inside:
                self._refused = True
                raise ShrinkpointError(_WITHIN)
            try:
                self._inside, self._refused = True, False
                result = method(self, *args, **options)
            finally:
                self._inside = False
            if self._refused:  # and whoever raised was not heard
                warnings.warn(f"refused meanwhile: {_WITHIN}", SaverWarning, stacklevel=2)
            return result

    return call


class Saver:
    """Saves to a store while training goes on; one save is in flight at a time.

    `save` copies the state and returns. A worker, a fresh process with a low priority, compresses the copy and commits
    it to the store, as `Store.save` would: the files are the same. It keeps what the next delta needs, so only the copy
    of the state crosses. The first save goes on from what `store` has saved or loaded by then, as `store.save` would:
    after `state = store.load()` with a delta, with an untouched store with a base. So does a save whose step is not
    above the last one's, where `store` has loaded one meanwhile: the run has gone back.

    What goes wrong with a save is raised by the next call of `save`, `wait` or `close`, and by the future that `save`
    returned; what goes wrong between saves (`compact`, `keep`) is a SaverWarning. If the worker is killed that is a
    ChildProcessError; the save after it starts another one, which reads the chain of the last save and goes on with it.
    An error of the last save that no call was left to raise is printed at exit, and the exit status is 120.

    With a process, a state counts as saved once `save` has returned: the worker has all of it, and finishes the save
    even if the trainer is killed at once.

    Memory: one copy of the state (with `grads`), made at the first save and used again, and the worker's own: see
    docs/saver.md.

    Args:
        store: where to, and what the first save builds on. The Saver opens it anew: what it saves does not change what
            `store.save` builds on.
        on_busy: what `save` does while a save is in flight: "wait" for it (default); "skip", so that the new state is
            not saved; "cancel", which gives the older one up if it is not compressed yet, and saves the new one.
        mode: "process"; or "thread", in this process: its Python code then takes turns with the trainer's, and GPU
            arrays are copied and quantized on their device. Default: a process, but a thread where the URL lives in
            this process's memory (`memory://`) and on Windows.
        nice: how much the worker stands back for other processes, 0 to 19; default 10.
        threads: how many the worker computes with, default 1.
        compact: shorten chains between saves: once restoring a step takes so many times the bytes of a base, those of
            over 2.5 are compacted, see `Store.compact`, and what was in their place is removed; in [1, 1e6]. None
            (default): never.
        keep: remove all other steps between saves, see `Store.gc`; None (default): keep all. Adapters whose own files
            point to steps (Accelerate, Orbax) refuse it: they remove what they replace.

    Raises:
        BadArgumentError: an argument out of range.
        OSError: the worker cannot be started.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> store = sp.Store("memory://docs-saver")
        >>> with sp.Saver(store) as saver:
        ...     done = saver.save(10, {"w": np.arange(6.0)})
        >>> done.result().status, store.steps()
        ('saved', [10])

    Source: Check-N-Run section 3 (decoupled snapshot), BitSnap section 3.2 (asynchronous agent).
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
    ) -> None:
        if not isinstance(store, Store):
            raise BadArgumentError(f"store must be a Store, not {type(store).__qualname__}")
        on_busy, mode = choice("on_busy", on_busy, ON_BUSY), or_none("mode", mode, choice, MODES)
        nice, threads = integer("nice", nice, 0, 19), integer("threads", threads, 1)
        compact = or_none("compact", compact, number, 1, 1e6)
        keep = or_none("keep", keep, instance, Retention)
        in_memory = is_of_this_process(store.url)
        if mode == "process" and (in_memory or os.name != "posix"):
            why = f"{store.url} lives in this process's memory" if in_memory else f"there is none on {os.name}"
            raise BadArgumentError(f"mode is 'process', but {why}; use mode='thread'")
        self.store = store
        self.on_busy = on_busy
        self.keep = keep
        self.mode = mode or ("thread" if in_memory or os.name != "posix" else "process")
        self._upkeep = upkeep = Upkeep(compact, keep)
        self._place: Callable[[], Place] = (
            (lambda: ThreadPlace(store, upkeep))
            if self.mode == "thread"
            else (lambda: ProcessPlace(store, nice=nice, threads=threads, upkeep=upkeep))
        )
        self._lock = threading.RLock()
        self._inside = self._refused = self._closing = False
        self._pid = os.getpid()
        self._closed = False
        self._known: set[str] = set()
        self._runner: _Runner | None = None
        self._last: SaveResult | None = None
        self._saved: SaveResult | None = None
        self._barren = 0
        self._handed: _Handed | None = None
        self._durable: _Handed | None = None
        self._start()

    def __repr__(self) -> str:
        doing = "closed" if self._is_closed else "busy" if self.busy else "idle"
        return f"<Saver to {self.store.url}, {self.mode}, {doing}>"

    def _start(self) -> _Runner:
        runner = _Runner(self._place(), bool(self._upkeep))
        self._runner = runner
        self._finalizer = _UNCLOSED.add(self, runner)
        return runner

    def _turn(self) -> contextlib.AbstractContextManager[Any]:
        """Before the lock: a future's callback does not wait for whoever closes the saver, and so for its own end."""
        if self._runner is None or not self._runner.is_here:
            return contextlib.nullcontext()
        while not self._lock.acquire(timeout=0.05):
            if self._closing:
                raise BadArgumentError("the saver is being closed")
        held = contextlib.ExitStack()
        held.callback(self._lock.release)
        return held

    @property
    def _is_closed(self) -> bool:
        """Also at exit, by `Unclosed`."""
        return self._closed or (self._runner is not None and self._runner.ended)

    @property
    def _is_foreign(self) -> bool:
        """Whether it belongs to the process that this one was forked from; a thread there may have held the lock."""
        return self._pid != os.getpid()

    def _check_own(self) -> None:
        if self._is_foreign:
            raise ShrinkpointError(f"this saver belongs to process {self._pid}; open one of your own after a fork")

    @property
    def busy(self) -> bool:
        """Whether a save is in flight."""
        return self._runner is not None and self._runner.busy

    @property
    def last(self) -> SaveResult | None:
        """Result of the newest finished save; None before the first."""
        return (self._runner.last if self._runner is not None else None) or self._last

    @property
    def nbytes(self) -> int:
        """Bytes of memory that hold the snapshot."""
        return self._runner.place.arena.size if self._runner is not None else 0

    @property
    def pid(self) -> int | None:
        """Process id of the worker; None where there is none, as after `close`."""
        place = self._runner.place if self._runner is not None and not self._is_closed else None
        return place.pid if isinstance(place, ProcessPlace) else None

    @_one_at_a_time
    def save(
        self,
        step: int,
        state: Any,
        *,
        grads: Any = None,
        kinds: Mapping[str, Any] | None = None,
        metric: float | None = None,
        cfg: Config | None = None,
    ) -> Future[SaveResult]:
        """Copy a state and see to its being saved; when this returns, training may go on and change it.

        Args:
            step: training step, see `Store.save`.
            state: see `compress`.
            grads: see `compress`.
            kinds: see `compress`.
            metric: see `Store.save`.
            cfg: see `Store.save`.

        Returns:
            A future of what comes of it: done at once for a skipped save.

        Raises:
            BadArgumentError, UnsupportedLeafError: see `compress`; nothing was started.
            ShrinkpointError: called within a call of the same Saver, as by a signal handler; in a forked process; or by
                a callback of a save's future that would have to wait for another save.
            ChildProcessError: the worker was killed; say `save` again for a new one.
            MemoryError: there is no memory for the snapshot.
            Exception: what the save before this one raised. The state given now is not saved then.
        """
        begin = time.perf_counter()
        runner = self._ready()
        step = check_step(step)
        metric = check_metric(metric)
        check_kinds(kinds)
        self._check_names(state, grads, kinds)
        asked = None if cfg is None else json.dumps(check_config(cfg).to_json())
        future: Future[SaveResult] = Future()
        future.set_running_or_notify_cancel()
        if runner.busy and self.on_busy == "skip":
            future.set_result(SaveResult(step, "skipped", stall=time.perf_counter() - begin))
            return future
        planned = plan({"state": state, "beside": [grads, metric, asked], "kinds": kinds_tree(kinds)})
        waiting = time.perf_counter()
        if runner.busy:
            if self.on_busy == "cancel":
                runner.place.cancel()
            runner.wait()
            self._raise(runner)
        waited = time.perf_counter() - waiting
        if self._handed is not None and self._handed.is_durable:
            self._durable = self._handed
        snapshot = take(planned, runner.place.arena, on_device=runner.place.on_device)
        runner.submit(_Job(step, snapshot, future, begin, waited, self._origin(step)))
        self._handed = _Handed(step, self.store.head, future)
        if planned.nbytes >= copying.STREAMED:
            copying.load_beside()
        return future

    def _check_names(self, state: Any, grads: Any, kinds: Mapping[str, Any] | None) -> None:
        """Refuse at once, not by way of the worker at the next save, what belongs to no array of the state.

        Kinds are looked at where their names are new, for spelling the paths of all arrays takes as long as the plan.
        """
        if grads is None and (kinds is None or set(kinds) == self._known):
            return
        _, found = tree.flatten(state, is_array)
        check_used(kinds, [node.path for node in found])
        by_weights(grads, found, "grads")
        self._known = set() if kinds is None else set(kinds)

    def _origin(self, step: int) -> Origin | None:
        """What a worker that has saved nothing yet builds on: the last save of the one before, or the store's head.

        The latter for any worker where the run has gone back: the store has loaded a step since the newest save, and
        this one's is not above that. (What is loaded to be looked at is followed by a higher one.) It has not while the
        save that would have told of it is lost, so the newest one that is durable is asked, too.
        """
        head = self.store.head
        barren = self._barren >= _BARREN and (self._runner is None or self._runner.saved is None)
        if not barren and head is not None and self.store.loaded is not None:
            for before in (self._handed, self._durable):
                if before is not None and step <= before.step and head is not before.head:
                    return Origin(head.last.step, head.last.identity, head, back=True)
        if self._barren >= _BARREN:
            return None
        if self._saved is not None:
            return Origin(self._saved.step, self._saved.id)
        return None if head is None else Origin(head.last.step, head.last.identity, head)

    @_one_at_a_time
    def wait(self, timeout: float | None = None) -> SaveResult | None:
        """Wait until nothing is in flight.

        Args:
            timeout: seconds; None: as long as it takes.

        Returns:
            Result of the newest save; None where there was none.

        Raises:
            TimeoutError: it takes longer; the save goes on.
            ShrinkpointError: see `save`.
            Exception: what the save raised.
        """
        if self._runner is not None and not self._is_closed:
            self._runner.wait(timeout)
            self._raise(self._runner)
        return self.last

    def rest(self) -> None:
        """Wait for the save in flight, and give up what is done between saves, until the next one.

        For who is about to remove steps: while chains are compacted `Store.drop` and `Store.gc` wait.

        Raises:
            ShrinkpointError: called by a callback of a save's future, which comes before that work.
        """
        if self._runner is not None:
            self._runner.check_elsewhere("rest")
        if not self._is_foreign:
            self._rest()

    @_one_at_a_time
    def _rest(self) -> None:
        runner = self._runner
        if self._is_closed or runner is None:
            return
        runner.wait()
        if runner.tending is not None and not runner.tending.done():
            runner.place.cancel()
            runner.tending.result()

    def close(self) -> None:
        """Wait for the save in flight, end the worker and free the memory; again and again if you like.

        Raises:
            ShrinkpointError: called within a call of the same Saver, as by a signal handler.
            Exception: what the last save raised, if nobody was told yet.
        """
        if self._runner is not None:
            self._runner.check_elsewhere("be closed")
        if self._is_foreign:
            self._closed = True
        else:
            self._close()

    @_one_at_a_time
    def _close(self) -> None:
        runner = self._runner
        if self._is_closed or runner is None:
            self._closed = True
            return
        self._closing = True
        try:
            runner.wait()
            self._closed = True
            _UNCLOSED.remove(self._finalizer, runner)
            runner.close()
        finally:
            self._closing = False
        self._last = runner.last or self._last
        error = runner.take_error()
        if error is not None:
            raise error

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The caller's exception is what matters; what became of the save is said beside it.
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

    def _ready(self) -> _Runner:
        """The running worker; what went wrong since the last call is raised first."""
        if self._is_closed:
            raise BadArgumentError("the saver is closed")
        runner = self._runner
        if runner is None:
            return self._start()
        self._raise(runner, stacklevel=6)
        return runner

    def _raise(self, runner: _Runner, stacklevel: int = 5) -> None:
        """Raise what a finished save raised, or that the worker died meanwhile; such a worker is put away."""
        if runner.busy:
            return
        error = runner.take_error(stacklevel)
        place = runner.place
        if isinstance(place, ProcessPlace) and not place.alive:
            if error is None:
                error = ChildProcessError(place.epitaph())
            error.add_note("Nothing is in flight now; the next save starts a new worker that goes on with the chain.")
            self._last = runner.last or self._last
            self._saved = runner.saved or self._saved
            self._barren = 0 if runner.saved is not None else self._barren + 1
            _UNCLOSED.remove(self._finalizer, runner)
            self._runner = None
            runner.close()
        if error is not None:
            raise error
