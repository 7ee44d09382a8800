"""`shrinkpoint demo`: train a small GPT that is killed and resumes from its checkpoints.

Here are the configuration of a run, and the sizes of its model and data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..kernels.errors import BadArgumentError, ShrinkpointError

CHECKPOINTS = 25
"""Number of checkpoints of a run when `every` is not given."""


class DemoError(ShrinkpointError):
    """The demo cannot run here, or its trainer failed; the message says what to do."""


@dataclass(frozen=True)
class Size:
    """Model, batch, held-out set and default duration of one demo size."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    full_steps: int
    learning_rate: float
    quick_windows: int  # held-out windows of the curve, one reading per checkpoint
    probe_windows: int  # held-out windows for comparing a restored model with the exact one
    final_windows: int  # held-out windows of the final comparison
    threads: int  # more threads do not help


SIZES = {
    "small": Size(
        layers=4, width=256, heads=4, context=128, batch=4, steps=300, full_steps=1000, learning_rate=2e-3,
        quick_windows=32, probe_windows=256, final_windows=512, threads=4,
    ),
    "tiny": Size(
        layers=2, width=64, heads=2, context=64, batch=4, steps=60, full_steps=200, learning_rate=3e-3,
        quick_windows=8, probe_windows=32, final_windows=64, threads=1,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class DemoConfig:
    """Settings of one demo run, made and checked by `demo_config`."""

    out: Path
    steps: int
    every: int
    kills: int
    seed: int
    preset: str
    size: str


@dataclass(frozen=True)
class Job:
    """The work of one trainer process; without `store` it saves nothing (the baseline)."""

    steps: int
    every: int
    seed: int
    size: str
    threads: int
    preset: str
    store: str | None = None


def demo_config(
    out: Path | str = "demo-out",
    *,
    steps: int | None = None,
    every: int | None = None,
    kills: int = 2,
    seed: int = 0,
    preset: str = "default",
    size: str = "small",
    full: bool = False,
) -> DemoConfig:
    """Check the arguments of a demo run and fill in the defaults.

    Args:
        out: folder for the store, the results and the picture.
        steps: training steps, >= 2, default by size.
        every: steps between checkpoints, 1 to steps; default: about 25 checkpoints.
        kills: number of times the trainer is killed, from 0 to one less than the number of checkpoints.
        seed: seed of the model, the order of the data and the times of the kills, 0 to 2**32 - 1.
        preset: a name of `presets()`.
        size: a name of `SIZES`.
        full: whether the default of `steps` is that of a long run; not together with `steps`.

    Raises:
        BadArgumentError: an argument is out of its range.

    Example:
        >>> demo_config(full=True).every
        40
    """
    _check("size", size, size in SIZES, f"one of {', '.join(SIZES)}")
    _check("full", full, not full or steps is None, "False, if steps is given")
    default = SIZES[size].full_steps if full else SIZES[size].steps
    steps = default if steps is None else steps
    _check("steps", steps, steps >= 2, "at least 2")
    every = max(1, steps // CHECKPOINTS) if every is None else every
    _check("every", every, 1 <= every <= steps, f"between 1 and steps = {steps}")
    most = len(checkpoint_steps(steps, every)) - 1
    _check("kills", kills, 0 <= kills <= most, f"between 0 and {most}, one less than the number of checkpoints")
    _check("seed", seed, 0 <= seed < 2**32, "between 0 and 2**32 - 1")
    _check("preset", preset, preset in presets(), f"one of {', '.join(presets())}")
    return DemoConfig(Path(out), steps, every, kills, seed, preset, size)


def checkpoint_steps(steps: int, every: int) -> list[int]:
    """The steps after which a checkpoint is saved: every `every` steps, and the last one.

    Example:
        >>> checkpoint_steps(10, 4)
        [4, 8, 10]
    """
    return [*range(every, steps, every), steps]


def presets() -> dict[str, Callable[[], Any]]:
    """Preset name, as the command line writes it -> function that returns its `Config`."""
    from ..codec.named_presets import NAMED

    return {name.replace("_", "-"): preset for name, preset in NAMED.items()}


def threads(size: Size) -> int:
    """Number of threads of the trainer: its processors, limited by the size of the model."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(size.threads, len(affinity(0)) if affinity else os.cpu_count() or 1)


def _check(name: str, value: object, fine: bool, limit: str) -> None:
    if not fine:
        raise BadArgumentError(f"{name} is {value!r}; it must be {limit}")
