"""Experiments, their rows, and means with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...harness import Options, Row

DEVICE = "cpu, 1 thread"
_STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262, 15: 2.145, 20: 2.093, 30: 2.045}
"""Two-sided 95 % quantiles of Student's t by sample size; between two the one of the smaller size counts."""


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
            return [row(self.name, "", None, "", note=f"not measured: {error.name or error} is not installed")]


def row(
    experiment: str,
    what: str,
    value: float | None,
    unit: str,
    *,
    peer: str | None = None,
    peer_value: float | None = None,
    ratio: float | None = None,
    size: int = 0,
    note: str = "",
) -> Row:
    """Return a row of an experiment, without a target: the papers used other models and data."""
    name = f"{experiment}: {what}" if what else experiment
    return Row(name, DEVICE, size, value, unit, peer, peer_value, ratio, None, None, note)


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
