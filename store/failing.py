"""A failure that is found when the program is over: it changes the exit status, and nothing else."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def fail_at_exit() -> None:
    """Let this process end with status 120, Python's own for an error of the clean-up after the program.

    Exceptions of exit handlers are printed and change nothing, and `os._exit` in one of them would cut off those that
    are to run after it. What Python does look at is whether the standard streams could be flushed at the very end, so
    there, after all handlers, one of them says that it could not. An exception that nobody caught has a status already
    and keeps it; one that was given to `sys.exit` becomes 120.
    """
    if getattr(sys, "last_value", None) is not None:
        return
    for stream, first in ((sys.stderr, sys.__stderr__), (sys.stdout, sys.__stdout__)):
        if first is not stream:
            _refuse_at_the_end(first)  # redirected now, it may be the one again by then
        if _refuse_at_the_end(stream):
            return


def _refuse_at_the_end(stream: Any, frame: Any = sys._getframe) -> bool:
    if stream is None or getattr(stream, "closed", False):
        return False
    flush = getattr(stream, "flush", lambda: None)

    def refuse() -> None:
        flush()
        # Python's finalization calls this from no Python code; whoever else wants to flush may.
        if frame().f_back is None and getattr(sys, "last_value", None) is None:
            raise OSError("a save failed")

    with contextlib.suppress(AttributeError, TypeError):
        stream.flush = refuse
        return True
    return False
