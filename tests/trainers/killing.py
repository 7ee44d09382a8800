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


def resumed_as_if_never_killed(script: Script, folder: Path, *how: object, world: int = 2) -> Path:
    """Resume the killed ranks of `folder / "killed"`, and compare them with a run that was never killed.

    Losses of each rank, also those of repeated steps, and the states at the end are equal to the bit.

    Args:
        script: of the ranks; its arguments are a folder, the number of steps, and `how`.
        folder: where both runs stand.
        how: further arguments.
        world: number of ranks.

    Returns:
        Folder of the killed run.
    """
    killed, whole = folder / "killed", folder / "whole"
    steps = max(by_step(killed / "0")) + 5
    for run in (killed, whole):
        script.together(world, run, steps, *how)
    for rank in map(str, range(world)):
        assert by_step(killed / rank)[steps] == by_step(whole / rank)[steps]
    ends = [path.relative_to(whole) for path in whole.rglob("end.pt")]
    assert ends
    assert all(equal_states(torch.load(killed / end), torch.load(whole / end)) for end in ends)
    return killed


def equal_states(a: Any, b: Any) -> bool:
    """Return whether two states have the same tensors, to the bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
