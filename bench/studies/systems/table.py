"""Experiments, their rows, and means with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import shrinkpoint as sp

from ...harness import Options, Row
from ..workloads import State

DEVICE = "cpu, 1 thread"
_STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262, 15: 2.145, 20: 2.093, 30: 2.045}
"""Two-sided 95 % quantiles of Student's t by sample size; between two the one of the smaller size counts."""


Figure = tuple[str | None, float | None]
"""A source and its figure."""


@dataclass(frozen=True)
class Experiment:
    """An experiment; its name begins the names of its rows, and `--only` selects by it.

    Args:
        name: system and subject.
        run: gives its rows; an ImportError becomes a row with the missing package.
    """

    name: str
    run: Callable[[str, Options], list[Row]]

    def rows(self, options: Options) -> list[Row]:
        """Return its rows, or one with the reason for a missing measurement."""
        options.say(self.name)
        try:
            return self.run(self.name, options)
        except ImportError as error:
            rows = Rows(self.name)
            rows.add("", None, "", note=f"not measured: {error.name or error} is not installed")
            return rows


class Rows(list[Row]):
    """The rows of an experiment, without targets: the papers used other models and data."""

    def __init__(self, experiment: str) -> None:
        super().__init__()
        self.experiment = experiment

    def add(
        self, what: str, value: float | None, unit: str, peer: Figure = (None, None), note: str = "", *,
        ratio: float | None = None, size: int = 0,
    ) -> None:  # fmt: skip
        """Add a row, with the paper's or a peer's figure next to it."""
        name = f"{self.experiment}: {what}" if what else self.experiment
        self.append(Row(name, DEVICE, size, value, unit, *peer, ratio, note=note))


@dataclass(frozen=True)
class Mean:
    """Mean of a sample and half the width of its 95 % confidence interval."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3g}" + (f" +- {self.half:.2g} (95 %, n = {self.n})" if self.n > 1 else " (one run)")


def mean(values: Sequence[float]) -> Mean:
    """Mean and confidence interval, by Student's t.

    Example:
        >>> print(mean([1.0, 2.0, 3.0]))
        2 +- 2.5 (95 %, n = 3)
    """
    n = len(values)
    if n < 2:
        return Mean(float(values[0]) if values else math.nan, math.nan, n)
    t = _STUDENT[max(size for size in _STUDENT if size <= n)]
    return Mean(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n), n)


def times(ours: float, theirs: float) -> float | None:
    """Ratio of theirs to ours; None if ours is zero."""
    return theirs / ours if ours else None


def stored_bytes(ckpt: sp.Checkpoint, *ends: str, start: str = "") -> int:
    """Return the stored bytes of arrays by start and end of their paths (with an end: matrices)."""
    return sum(part.stored_bytes for part in _parts(ckpt, ends, start))


def raw_bytes(ckpt: sp.Checkpoint, *ends: str, start: str = "") -> int:
    """Raw bytes of the same arrays."""
    return sum(part.raw_bytes for part in _parts(ckpt, ends, start))


def l2_errors(exact: State, restored: State) -> dict[str, float]:
    """Relative l2 error of weights and of moments, all arrays of a role together."""
    from ..baselines.parts import parts

    sums: dict[str, list[float]] = {}
    for a, b in zip(parts(exact).arrays, parts(restored).arrays, strict=True):
        if a.role != "state" and a.spec.dtype == "float32":
            found = sums.setdefault(f"{a.role}s", [0.0, 0.0])
            found[0] += float(np.square(a.values.astype(np.float64) - b.values).sum())
            found[1] += float(np.square(a.values.astype(np.float64)).sum())
    return {role: (wrong / total) ** 0.5 for role, (wrong, total) in sums.items()}


def _parts(ckpt: sp.Checkpoint, ends: tuple[str, ...], start: str) -> list[Any]:
    parts = [part for part in ckpt.summary() if part.path.startswith(start)]
    return [part for part in parts if part.path.endswith(ends) and len(part.shape) > 1] if ends else parts
