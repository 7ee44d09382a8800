"""Exit status of a process whose failure is found only while it ends."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def fail_at_exit() -> None:
    """Let this process end with status 120, which Python uses for errors at exit.

    Exceptions of exit handlers are printed and change nothing, and `os._exit` in one of them would prevent the later
    ones. Python does check whether the standard streams can be flushed at the very end, so one of them raises an error
    there, after all handlers. An uncaught exception has set a status already and keeps it; one given to `sys.exit`
    becomes 120.
    """
    if getattr(sys, "last_value", None) is not None:
        return
    for stream, first in ((sys.stderr, sys.__stderr__), (sys.stdout, sys.__stdout__)):
        if first is not stream:
            _refuse_at_the_end(first)  # redirected now, it may be restored by then
        if _refuse_at_the_end(stream):
            return


def _refuse_at_the_end(stream: Any, frame: Any = sys._getframe) -> bool:
    if stream is None or getattr(stream, "closed", False):
        return False
    flush = getattr(stream, "flush", lambda: None)

    def refuse() -> None:
        flush()
        # Python's finalization calls this without a Python caller; all other callers just flush.
        if frame().f_back is None and getattr(sys, "last_value", None) is None:
            raise OSError("a save failed")

    with contextlib.suppress(AttributeError, TypeError):
        stream.flush = refuse
        return True
    return False
