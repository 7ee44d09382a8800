"""States of one GPT late in its training, a few steps apart, that several tables share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from .. import workloads
from ..workloads import Run, State

APART = (0, 1, 2, 5, 10)
"""Steps after the first."""


@dataclass(frozen=True)
class States:
    """States of one training.

    Args:
        name: of the workload.
        step: of the first.
        rate: learning rate there.
        after: by steps after the first.
    """

    name: str
    step: int
    rate: float
    after: dict[int, State]

    def where(self) -> str:
        """For notes."""
        return f"{self.name} after {self.step} steps"


@cache
def states(quick: bool) -> States:
    """A GPT at nine tenths of 360 steps; with `quick` an MLP at nine tenths of 100."""
    workload = workloads.mlp(100) if quick else workloads.gpt(steps=360)
    run = Run(workload, 0)
    start = workload.steps * 9 // 10
    run.train(start)
    rate, after = run.learning_rate(), {}
    for apart in APART:
        run.train(start + apart)
        after[apart] = run.state()
    return States(workload.name, start, rate, after)
