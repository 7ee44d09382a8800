"""What happens to Savers that nobody closed: their saves are finished and their errors shown, at exit or before."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import weakref
from typing import Any, Protocol

from .failing import fail_at_exit


class Work(Protocol):
    """What of a Saver is left when it is gone. It knows nothing of the Saver."""

    pid: int

    def close(self) -> None:
        """Finish, and free everything."""
        ...

    def take_error(self) -> BaseException | None:
        """What nobody was told of yet."""
        ...


class Unclosed:
    """The work of a process's Savers that are not closed.

    The collector of garbage may find a Saver in any thread, within anything: an import, the start of a thread, the work
    itself. To wait there might be for ever, so it goes to a thread that is there for it. That one may be cut off at
    exit, where all that is left is finished by the main thread.
    """

    def __init__(self) -> None:
        self._begin()
        atexit.register(self._end)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Of a process: nothing of its parent's, one of whose threads may hold the lock."""
        self._open: dict[Work, None] = {}
        self._turn = threading.RLock()
        self._collected: queue.SimpleQueue[Work] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, saver: object, work: Work) -> weakref.finalize[Any, Any]:
        """Until `remove`, or until it is done here."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait, name="shrinkpoint-unclosed", daemon=True)
            self._thread.start()
        self._open[work] = None
        found = weakref.finalize(saver, self._hand, work)
        found.atexit = False
        return found

    def remove(self, finalizer: weakref.finalize[Any, Any], work: Work) -> None:
        """Whoever closes the Saver does what is to be done."""
        finalizer.detach()
        self._open.pop(work, None)

    def _hand(self, work: Work) -> None:
        if work.pid == os.getpid():
            self._collected.put(work)

    def _wait(self) -> None:
        while True:
            self._finish(self._collected.get())

    def _end(self) -> None:
        for work in list(self._open):
            self._finish(work)

    def _finish(self, work: Work) -> None:
        """Whatever it raises is shown, and keeps nobody from the others."""
        with self._turn:
            if work not in self._open:
                return
            error: BaseException | None
            try:
                work.close()
                error = work.take_error()
            except Exception as e:  # a warning that was made an error, too
                error = e
            finally:
                self._open.pop(work, None)
            if error is not None:
                fail_at_exit()
                # Raised by an exit handler it would be shown without its notes.
                sys.excepthook(type(error), error, error.__traceback__)
