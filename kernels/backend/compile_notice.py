"""A log message for long compilations, so that a first call does not seem to hang."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from numba.core import event

LOG = logging.getLogger("shrinkpoint")
PATIENCE = 2.0
"""Total seconds of compilation after which the message is logged."""


class CompileNotice(event.Listener):
    """Log one warning per process when Numba has compiled for `PATIENCE` seconds.

    Kernels that are read from the disk cache do not count, and neither does time between two compilations.
    """

    def __init__(self) -> None:
        self._depth, self._spent, self._begin = 0, 0.0, 0.0
        self._timer: threading.Timer | None = None
        self._logged = False

    def on_start(self, event: Any) -> None:
        """Note the begin of a compilation, which may be nested in another one."""
        self._depth += 1
        if self._depth == 1 and not self._logged:
            self._begin = time.monotonic()
            self._timer = threading.Timer(max(PATIENCE - self._spent, 0.0), self._log)
            self._timer.daemon = True
            self._timer.start()

    def on_end(self, event: Any) -> None:
        """Note the end of a compilation."""
        self._depth -= 1
        if self._depth == 0 and self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._spent += time.monotonic() - self._begin

    def _log(self) -> None:
        if not self._logged:
            self._logged = True
            LOG.warning("Compiling kernels, once per machine: up to 40 s; `shrinkpoint warm` does it ahead of time")

    def restart(self) -> None:
        """Reset the state in a forked process, which has no timer thread."""
        self._depth, self._timer = 0, None


def install() -> None:
    """Watch the compilations of this process."""
    listener = CompileNotice()
    event.register("numba:compile", listener)  # type: ignore[no-untyped-call]
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=listener.restart)
