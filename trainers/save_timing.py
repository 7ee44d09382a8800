"""The store behind a saver, and the durations of this process's last saves to each store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..codec.errors import BadArgumentError
from ..store.saver.saver import Saver
from ..store.store import Store
from ..store.urls import one_name

R = TypeVar("R")
_REMEMBERED = 5
"""Saves of each type, base or delta, whose seconds are remembered."""


@dataclass(frozen=True, slots=True)
class Running:
    """A save in flight.

    Args:
        step: training step.
        begin: `time.monotonic()` when the state was copied.
        future: done when the checkpoint is durable, or the save has failed.
    """

    step: int
    begin: float
    future: Future[Any]

    @property
    def elapsed(self) -> float:
        """Seconds since the save began."""
        return time.monotonic() - self.begin


@dataclass(slots=True)
class SaveTiming:
    """Measured seconds of the saves to one store, until they were durable."""

    deltas: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    bases: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    durable: int | None = None
    """Step of the newest save of this process that became durable."""
    running: Running | None = None
    _first: deque[float] | None = None

    def expected(self, is_delta: bool | None) -> float | None:
        """Return the seconds of the longest of the last saves; None: no save.

        Args:
            is_delta: of this type, if there was one; None: of both types.

        Example:
            >>> timing = SaveTiming()
            >>> timing.add(10, False, 0.75)
            >>> timing.expected(True)
            0.75
        """
        own = {True: self.deltas, False: self.bases, None: ()}[is_delta]
        return max(own or [*self.deltas, *self.bases], default=None)

    def add(self, step: int, is_delta: bool, seconds: float) -> None:
        """Record a save that became durable.

        The first one of a process also loads kernels, so it counts only until there is another one of its type.
        """
        found = self.deltas if is_delta else self.bases
        if self._first is found:
            found.clear()
            self._first = None
        elif not self.deltas and not self.bases:
            self._first = found
        found.append(seconds)
        self.durable = step

    def begin(self, running: Running) -> None:
        """Record a save that was handed over; it is added when it is durable."""
        self.running = running
        running.future.add_done_callback(lambda future: self._end(running, future))

    def _end(self, running: Running, future: Future[Any]) -> None:
        if self.running is running:
            self.running = None
        if not future.cancelled() and future.exception() is None and future.result().status == "saved":
            done = future.result()
            # Without the wait for the save before it: `stall` has that, too.
            self.add(running.step, done.is_delta, done.seconds + done.stall - done.waited)


_timings: dict[str, SaveTiming] = {}


def timing_of(url: str) -> SaveTiming:
    """Return the record of a store."""
    return _timings.setdefault(one_name(url), SaveTiming())


def store_behind(saver: Any) -> Store:
    """Return a store, or the one of a Saver; BadArgumentError for other objects."""
    if isinstance(saver, Saver):
        return saver.store
    if isinstance(saver, Store):
        return saver
    raise BadArgumentError(f"saver must be a Saver or a Store, not {type(saver).__qualname__}")


def timed(saver: Any, step: int, save: Callable[[], R]) -> R:
    """Call `save` of a Saver or Store, and record the seconds until its checkpoint is durable."""
    timing, begin = timing_of(store_behind(saver).url), time.monotonic()
    result: Any = save()
    if isinstance(result, Future):
        timing.begin(Running(step, time.monotonic(), result))
    else:
        timing.add(step, result.is_delta, time.monotonic() - begin)
    found: R = result
    return found
