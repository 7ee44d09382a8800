"""Trainings that are killed once a condition is met."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

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


def kill_together(script: Script, world: int, *arguments: object, after: float, alone: bool) -> None:
    """Start all ranks, and kill them, or the last one first, some time after the first step."""
    losses = Path(str(arguments[0])) / "0" / "losses.txt"
    before = losses.read_text() if losses.exists() else ""
    with script.ranks(world, *arguments) as runs:
        end = time.monotonic() + PATIENCE
        while not losses.exists() or losses.read_text() == before:
            assert runs[0].code is None, runs[0].trouble
            assert time.monotonic() < end, runs[0].trouble
            time.sleep(0.01)
        time.sleep(after)
        if alone:
            runs[-1].kill()
            time.sleep(0.2)


def equal_states(a: Any, b: Any) -> bool:
    """Return whether two states have the same tensors, to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
