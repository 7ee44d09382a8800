"""Outcomes of trainings over several seeds, as rows."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..harness import Row
from .faults import End, Outcome, System, end_of, endure, warm_up
from .workloads import Workload


def over_seeds(values: Sequence[float]) -> str:
    """Mean, and the range over several seeds.

    Example:
        >>> over_seeds([1.0, 2.0]), over_seeds([0.5])
        ('+1.50 (+1.00 ... +2.00)', '+0.50')
    """
    spread = f" ({min(values):+.2f} ... {max(values):+.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.2f}{spread}"


@dataclass
class Trainings:
    """A workload, and the results of its uninterrupted trainings by seed."""

    workload: Workload
    exact: dict[int, End] = dataclasses.field(default_factory=dict)

    def outcomes(
        self, make: Callable[[], System], seeds: Sequence[int], failures: int, spacing: int, batches: int
    ) -> list[Outcome]:
        """Train once for each seed, after a warm-up, and return the outcomes."""
        warm_up(self.workload, min(seeds, default=0), make(), spacing)
        for seed in seeds:
            if seed not in self.exact:
                self.exact[seed] = end_of(self.workload, seed)
        how = {"failures": failures, "spacing": spacing, "batches": batches}
        return [endure(self.workload, seed, make(), exact=self.exact[seed].loss, **how) for seed in seeds]


def of_seeds(
    name: str, where: tuple[str, int], columns: Iterable[tuple[str, str, Sequence[float]]], about: str, wrong: str = ""
) -> list[Row]:
    """Return one row a column: mean over the seeds, with the range in the note.

    Args:
        name: what the names of the rows begin with.
        where: device and number of parameters.
        columns: label, unit and values by seed.
        about: what the notes end with.
        wrong: the fault, if a check failed; then no row has a value.
    """
    rows = []
    for label, unit, values in columns:
        note = f"CHECK FAILED: {wrong}; {about}" if wrong else f"{over_seeds(values)}; {about}"
        value = None if wrong else statistics.fmean(values)
        rows.append(Row(f"{name}: {label}", *where, value, unit, note=note))
    return rows
