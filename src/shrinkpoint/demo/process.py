"""A trainer in a child process: its events as they come, and a way to kill it."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any, Self

from ..store.saver.channel import module_folders
from .config import DemoError, Job

if TYPE_CHECKING:
    from pathlib import Path

Event = dict[str, Any]
PATIENCE = 900.0
"""Seconds without an event after which a trainer counts as hung, far more than any step or compilation takes."""


class TrainerProcess:
    """Start the trainer; use it in a `with` statement, which ends the process.

    Args:
        job: what to do.
        log: file that the trainer's standard error is appended to.
    """

    def __init__(self, job: Job, log: Path) -> None:
        self._log = log
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._ended = False
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                # Not with the modules of the current folder.
                [sys.executable, "-P", "-m", "shrinkpoint.demo.trainer", json.dumps(asdict(job))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                # Threads that wait actively would slow training down many times on a busy machine.
                env={"OMP_WAIT_POLICY": "passive", **os.environ, "PYTHONPATH": os.pathsep.join(module_folders())},
            )
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def next(self, timeout: float = PATIENCE) -> Event | None:
        """The next event, or None once the trainer has ended.

        Raises:
            TimeoutError: none came in `timeout` seconds.
        """
        if self._ended:
            return None
        try:
            event = self._events.get(timeout=max(0.0, timeout))
        except queue.Empty:
            raise TimeoutError(f"the trainer sent no event for {timeout:.0f} seconds") from None
        self._ended = event is None
        return event

    def kill(self) -> None:
        """Kill the trainer with SIGKILL; events that it sent before can still be read."""
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def check(self) -> None:
        """Raise DemoError unless the trainer ended by itself with exit code 0."""
        code = self._process.wait()
        if code:
            tail = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            how = f"exit status {code}" if code > 0 else f"killed by signal {-code}, perhaps because memory ran out"
            raise DemoError(f"the trainer failed ({how}): {' '.join(tail) or 'no message'}; see {self._log}")

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for line in pipe:
                if line.endswith(b"\n"):  # the last line of a killed trainer may be cut
                    self._events.put(json.loads(line))
        self._events.put(None)
