"""A log message for long compilations, so that a first call does not seem to hang."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from numba.core import event

from . import cache

LOG = logging.getLogger("shrinkpoint")
PATIENCE = 2.0
"""Total seconds of compilation after which the message is logged."""
PERIOD = 10.0
"""Seconds of compilation between two messages."""


class CompileNotice(event.Listener):
    """Log how many kernels are compiled, after `PATIENCE` and then every `PERIOD` seconds.

    Kernels that are read from the disk cache take no such time, and neither does time between two compilations.
    """

    def __init__(self) -> None:
        self._depth, self._spent, self._begin = 0, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self._next: float | None = None

    def on_start(self, event: Any) -> None:
        """Note the begin of a compilation, which may be nested in another one."""
        self._depth += 1
        if self._depth == 1:
            self._begin = time.monotonic()
            if self._next is None:
                self._timer = threading.Timer(max(PATIENCE - self._spent, 0.0), self._log)
                self._timer.daemon = True
                self._timer.start()

    def on_end(self, event: Any) -> None:
        """Note the end of a compilation."""
        self._depth -= 1
        if self._depth == 0:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._spent += time.monotonic() - self._begin
            if self._next is not None and self._spent >= self._next:
                self._log()

    def _log(self) -> None:
        from .cache import KERNELS, is_warmed

        first = self._next is None
        self._next = (self._next or PATIENCE) + PERIOD
        done = len(cache.loaded | cache.stored)
        advice = "; `shrinkpoint warm` does it ahead of time" if first and not is_warmed() else ""
        LOG.warning(f"Compiling kernels, once per machine (up to 40 s): {done} of up to {max(done, KERNELS)}{advice}")

    def restart(self) -> None:
        """Reset the state in a forked process, which has no timer thread."""
        self._depth, self._timer = 0, None


def install() -> None:
    """Watch the compilations of this process."""
    listener = CompileNotice()
    event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=listener.restart)
