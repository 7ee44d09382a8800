"""Clean-up of Savers that were not closed: finish their saves and show their errors."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import sys
import threading
import weakref
from typing import Any, Protocol


class Runner(Protocol):
    """The part of a Saver that remains after the Saver was garbage-collected."""

    pid: int
    url: str

    @property
    def is_here(self) -> bool:
        """Return whether the caller runs in the thread that does the saves."""

    def wait(self) -> None:
        """Wait until no save is in flight."""

    def close(self) -> None:
        """Finish the saves, and free all resources."""

    def take_error(self) -> BaseException | None:
        """Return the error that was not raised yet."""


class ExitCleanup:
    """The runners of the Savers of this process that are not closed.

    Python's garbage collector may find a Saver in any thread, at any point: within an import, the start of a thread, or
    the work itself. Waiting there could last forever, so a thread of its own does it. That thread may be cut off at
    exit; then the main thread finishes the rest.
    """

    def __init__(self) -> None:
        self._begin()
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Reset the registry, also in a forked child, where a lock may be held by a missing thread."""
        self._open: dict[Runner, None] = {}
        self._turn = threading.RLock()
        self._collected: queue.SimpleQueue[Runner] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, saver: object, runner: Runner) -> weakref.finalize[Any, Any]:
        """Register a runner until it is removed or finished."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="shrinkpoint-unclosed", daemon=True)
            self._thread.start()
        self._open[runner] = None
        finalizer = weakref.finalize(saver, self._hand, runner)
        finalizer.atexit = False
        return finalizer

    def remove(self, finalizer: weakref.finalize[Any, Any], runner: Runner) -> None:
        """Remove a runner, because the caller closes the Saver."""
        finalizer.detach()
        self._open.pop(runner, None)

    def wait_for(self, url: str) -> None:
        """Wait for the saves in flight to a store; the Savers raise the errors.

        Raises:
            ChildProcessError: a worker is stopped, see `Runner.wait`.
        """
        for runner in list(self._open):
            if runner.url == url and not runner.is_here:
                runner.wait()

    def _hand(self, runner: Runner) -> None:
        if runner.pid == os.getpid():
            self._collected.put(runner)

    def _wait(self) -> None:
        while True:
            self._finish(self._collected.get())

    def _end(self) -> None:
        for runner in list(self._open):
            self._finish(runner)

    def _finish(self, runner: Runner) -> None:
        """Close a runner and show its error; an error does not stop the others from closing."""
        with self._turn:
            if runner not in self._open:
                return
            error: BaseException | None
            try:
                runner.close()
                error = runner.take_error()
            except Exception as e:  # also a warning that was made an error
                error = e
            finally:
                self._open.pop(runner, None)
            if error is not None:
                fail_at_exit()
                # Raised by an exit handler it would be shown without its notes.
                sys.excepthook(type(error), error, error.__traceback__)


EXIT_CLEANUP = ExitCleanup()
"""The one of this process."""


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
