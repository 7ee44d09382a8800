"""`Preemption`: save and exit when a scheduler announces the end of the process."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..codec.errors import BadArgumentError, ShrinkpointError
from ..kernels.backend.arguments import integer, number
from ..store.saver.saver import Saver
from ..store.store import Store
from .loop import save
from .processes import explaining, on_rank_0, rank, world
from .rows import RowTracker
from .save_timing import SaveTiming, store_behind, timing_of
from .sensitivity import SensitivityTracker
from .training_state import Optimizers, TrainingState

LOG = logging.getLogger("shrinkpoint.trainers")
MARGIN = 1.5
"""A save is started only if this multiple of the longest recent save fits into the time left."""


class Preempted(SystemExit):
    """Exit of the process after a scheduler's signal; has the exit code and the step."""

    def __init__(self, code: int, step: int) -> None:
        super().__init__(code)
        self.step = step


@dataclass(frozen=True, slots=True)
class Choice:
    """The decision how to use the remaining time.

    Args:
        what: "save" (a new save), "running" (wait for the save in flight) or "last" (exit at once).
        why: the measured seconds that decided, for the report.
    """

    what: str
    why: str


def choose(
    timing: SaveTiming, step: int | None, left: float, types: tuple[bool | None, bool | None] = (None, None)
) -> Choice:
    """Return what will be durable in time: a new save, the save in flight, or the last one.

    A new save is tried if no save was measured yet: an interrupted save damages no other one.

    Args:
        timing: of the store.
        step: training step, to recognise a state that is saved already; None: unknown.
        left: seconds until the process is killed.
        types: whether the save in flight is a delta, and whether the next one will be; None: unknown, then the longer
            of both types is expected.

    Example:
        >>> timing = SaveTiming()
        >>> timing.add(10, True, 1.0)
        >>> choose(timing, 20, 30.0).what, choose(timing, 20, 0.5).what
        ('save', 'last')
    """
    running = timing.running
    if running is not None and running.step == step:
        return Choice("running", f"step {step} is being saved")
    if running is None and timing.durable == step and step is not None:
        return Choice("last", f"step {step} is durable")
    wait = 0.0
    if running is not None:
        wait = max(0.0, MARGIN * (timing.expected(types[0]) or 0.0) - running.elapsed)
    longest = timing.expected(types[1])
    if longest is None:
        return Choice("save", "no save was measured yet")
    need = wait + MARGIN * longest
    kind = {True: "a delta", False: "a base", None: "a save"}[types[1]]
    why = f"{kind} takes up to {need:.2f} s, {max(0.0, left):.2f} s are left"
    if need <= left:
        return Choice("save", why)
    if running is not None and wait <= left:
        return Choice("running", f"{why}; the save in flight needs up to {wait:.2f} s")
    return Choice("last", why)


class Preemption:
    """Handler of a scheduler's signals: saves and exits before the process is killed.

    A signal only sets a flag. At the next step boundary all processes of the run agree on it (any of them may have
    received the signal), save once, wait until the checkpoint is durable, and exit. If the time left is too short
    according to the duration of the last saves, they wait for the save in flight, or exit with the last durable step;
    the report (logger `shrinkpoint.trainers`) says which. Call `check` at the end of each training step:

        preemption = trainers.Preemption(grace=30)
        ...
        preemption.check(saver, step, state)

    Lightning, Transformers and Accelerate: see docs/trainers/loop.md.

    Args:
        signals: names or numbers; default SIGTERM (spot instances, Kubernetes, torchrun) and SIGUSR1 (Slurm's
            `--signal=USR1@60`).
        grace: seconds from the signal until the process is killed, above 0; default 30.
        code: exit code, 0 to 255; default 75 (`EX_TEMPFAIL`: try again), which makes launchers restart the job.
        every: step boundaries from one agreement of the processes to the next, 1 or more; default 1. An agreement is
            an all-reduce of one number in the default group; it is left out if there is only one process. Where that
            group has NCCL only, each agreement waits for the GPU: `init_process_group("cpu:gloo,cuda:nccl")` avoids it.

    Raises:
        BadArgumentError: an argument out of range; not called in the main thread, which alone may handle signals.

    Example:
        >>> with Preemption(signals=("SIGUSR2",)) as preemption:
        ...     preemption.agreed() is None
        True
    """

    def __init__(
        self,
        signals: Iterable[str | int] = ("SIGTERM", "SIGUSR1"),
        *,
        grace: float = 30.0,
        code: int = 75,
        every: int = 1,
    ) -> None:
        self.signals = tuple(_signal_of(one) for one in ((signals,) if isinstance(signals, (str, int)) else signals))
        self.grace = number("grace", grace, 0, 1e9, open_low=True)
        self.code = integer("code", code, 0, 255)
        self.every = integer("every", every, 1)
        self._when: float | None = None
        self._which = ""
        self._calls = 0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}
        self.install()

    def install(self) -> None:
        """Register the signal handlers, again if a framework has registered its own."""
        if threading.current_thread() is not threading.main_thread():
            raise BadArgumentError("Preemption: signals can be handled in the main thread only; make it there")
        for one in self.signals:
            before = signal.signal(one, self._handle)
            self._before.setdefault(one, before)

    def close(self) -> None:
        """Restore the former signal handlers."""
        if os.getpid() == self._pid:
            for one, before in self._before.items():
                signal.signal(one, signal.SIG_DFL if before is None else before)
        self._before = {}

    def __enter__(self) -> Preemption:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # While a preempted process exits, a further signal must not kill it in the middle of a save.
        if not isinstance(error, Preempted):
            self.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked data loader worker: training needs it up to the step boundary, but it must end after that.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self.grace)
        elif self._when is None:
            self._when, self._which = time.monotonic(), signal.Signals(number).name

    @property
    def requested(self) -> bool:
        """Return whether this process has received a signal."""
        return self._when is not None

    def agreed(self) -> float | None:
        """Return the seconds left if any process has received a signal; None: training continues.

        With several processes a collective: all of them call it at the same step boundaries.
        """
        elapsed = -1.0 if self._when is None else time.monotonic() - self._when
        if world() > 1:
            self._calls += 1
            if self._calls % self.every:
                return None
            with explaining("no agreement on a preemption"):
                shared = torch.tensor([elapsed], dtype=torch.float64, device=_device())
                dist.all_reduce(shared, dist.ReduceOp.MAX)
            elapsed = float(shared)
        return None if elapsed < 0 else self.grace - elapsed

    def check(
        self,
        saver: Saver | Store,
        step: int,
        model: nn.Module | TrainingState,
        optimizer: Optimizers | None = None,
        *,
        tracker: RowTracker | None = None,
        sensitivity: SensitivityTracker | None = None,
        grads: Mapping[str, Any] | None = None,
    ) -> None:
        """Save and exit if a process has received a signal; call it after each training step.

        Args:
            saver, step, model, optimizer, tracker, sensitivity, grads: as for `save`.

        Raises:
            Preempted: a SystemExit with `code`, once the chosen checkpoint is durable.
            Exception: see `save`.
        """

        def write() -> Any:
            if isinstance(saver, Saver):
                # Otherwise the error of an earlier save would be raised, and this state not saved.
                _quietly(saver.wait)
            return save(saver, step, model, optimizer, tracker=tracker, sensitivity=sensitivity, grads=grads)

        wait = saver.wait if isinstance(saver, Saver) else lambda: None
        self.finish(store_behind(saver), step, write, wait, same=True)

    def finish(
        self, store: Store, step: int, save: Callable[[], object], wait: Callable[[], object], *, same: bool = False
    ) -> None:
        """Save and exit as `check` does, with another way to save, for adapters and other loops.

        Args:
            store: whose measured seconds decide.
            step: training steps done.
            save: saves the state; called on all processes, or on none.
            wait: waits until no save is in flight; called on rank 0.
            same: whether the store counts by training steps, so that a state that is saved already is recognised.

        Raises:
            Preempted: as `check`.
        """
        left = self.agreed()
        if left is None:
            return
        choice = self.choice(store, step if same else None, left)
        if choice.what == "save":
            save()
        self.leave(store, step, choice, wait)

    def choice(self, store: Store, step: int | None, left: float) -> Choice:
        """Return rank 0's choice on all processes."""
        return on_rank_0(lambda: _choose(store, step, left), "no choice was sent")

    def leave(self, store: Store, step: int, choice: Choice, wait: Callable[[], object]) -> NoReturn:
        """Wait as chosen, report and exit; errors of the new save are raised."""

        def settle() -> None:
            if choice.what == "save":
                wait()
            elif choice.what == "running":
                _quietly(wait)

        on_rank_0(settle, f"step {step}: the result of the last save could not be sent")
        if rank() == 0:
            LOG.warning(self._report(store, step, choice))
        raise Preempted(self.code, step)

    def _report(self, store: Store, step: int, choice: Choice) -> str:
        signalled = self._which or "a signal to another process"
        after = "" if self._when is None else f" {time.monotonic() - self._when:.2f} s after the signal"
        what = {
            "save": f"step {step} was saved and is durable{after}",
            "running": f"the save in flight has ended{after}",
            "last": "no save was begun",
        }[choice.what]
        newest = _newest(store)
        kept = "nothing is durable" if newest is None else f"number {newest} is the newest durable one"
        return (
            f"preempted by {signalled} after {step} steps: {what} ({choice.why}); {kept} in {store.url}; "
            f"exit code {self.code}"
        )


def _signal_of(one: str | int) -> signal.Signals:
    try:
        return signal.Signals[one] if isinstance(one, str) else signal.Signals(one)
    except (KeyError, ValueError):
        raise BadArgumentError(f"signals: {one!r} is not a signal of this system, such as 'SIGTERM'") from None


def _device() -> torch.device:
    """Return the device for collectives of the default group: the CPU if possible.

    Not a group of its own: after a restart by torchrun, gloo connects a second group to the addresses of the first run.
    """
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    return torch.device("cpu") if accelerator is None else accelerator


def _quietly(wait: Callable[[], object]) -> None:
    """Wait, and log the error of an older save instead of raising it."""
    try:
        wait()
    except Exception as e:
        LOG.warning("an earlier save failed: %s: %s", type(e).__name__, e)


def _choose(store: Store, step: int | None, left: float) -> Choice:
    timing = timing_of(store.url)
    in_flight = timing.running is not None
    return choose(timing, step, left, (_is_delta(store, 1), _is_delta(store, 2 if in_flight else 1)))


def _is_delta(store: Store, ahead: int) -> bool | None:
    """Return whether the save `ahead` of the newest durable one is a delta; None: unknown."""
    with contextlib.suppress(ShrinkpointError, OSError):
        steps, every = store.steps(), store.cfg.chain.base_every
        since = store.describe(steps[-1]).since_base + ahead if steps else ahead - 1
        return since > 0 and (every is None or since % every != 0)
    return None


def _newest(store: Store) -> int | None:
    with contextlib.suppress(ShrinkpointError, OSError):
        return max(store.steps(), default=None)
    return None
