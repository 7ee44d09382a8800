"""Trainings in processes of their own, killed once they have got so far, or several together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

PATIENCE = 600.0
"""Seconds until a run must have got there. Where others have the cores, importing a framework alone takes a minute."""


def run_and_kill(script: Path, *arguments: object, once: Callable[[], bool], every: float = 0.005) -> None:
    """Start a script and kill it, with all that it has started, once something is so; it must not end by itself before.

    Args:
        script: what Python runs.
        arguments: its own.
        once: asked again and again.
        every: seconds between two questions.
    """
    command = [sys.executable, str(script), *map(str, arguments)]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, start_new_session=True, stdout=said, stderr=said)
        try:
            end = time.monotonic() + PATIENCE
            while not once():
                assert process.poll() is None, _end_of(said)
                assert time.monotonic() < end, f"it did not get so far: {_end_of(said)}"
                time.sleep(every)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def torchrun(world: int, script: Path, *arguments: object) -> None:
    """Run a script in so many processes, which must all end well."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(world),
        str(script),
    ]
    with tempfile.TemporaryFile() as said:
        done = subprocess.run([*command, *map(str, arguments)], stdout=said, stderr=said, timeout=PATIENCE, check=False)
        assert done.returncode == 0, _end_of(said)


def _end_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")[-3000:]
