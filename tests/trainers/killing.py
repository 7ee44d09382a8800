"""Trainings that are killed once a condition is met."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ..forking import PATIENCE, Script


def run_and_kill(script: Script, *arguments: object, once: Callable[[], bool], every: float = 0.005) -> None:
    """Start a script, and kill it with its children once a condition is met.

    Args:
        script: what Python runs.
        arguments: its own.
        once: asked again and again.
        every: seconds between two questions.
    """
    run = script.start(*arguments)
    try:
        end = time.monotonic() + PATIENCE
        while not once():
            assert run.code is None, run.trouble
            assert time.monotonic() < end, f"it did not get so far: {run.trouble}"
            time.sleep(every)
    finally:
        run.kill()


def by_step(folder: Path) -> dict[int, str]:
    """Return the lines of `losses.txt` by step, after a check that repeated ones are equal."""
    found: dict[int, str] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        assert found.setdefault(int(line.split()[0]), line) == line
    return found
