"""States of one GPT late in its training, a few steps apart, that several tables share."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

import shrinkpoint as sp

from .. import workloads
from ..workloads import Run, State, Workload

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
        kinds: of their arrays.
    """

    name: str
    step: int
    rate: float
    after: dict[int, State]
    kinds: dict[str, sp.Kind]

    def where(self) -> str:
        """Name of the workload and step, for notes."""
        return f"{self.name} after {self.step} steps"


def _workload(quick: bool) -> Workload:
    return workloads.mlp(100) if quick else workloads.gpt(steps=360)


def _onwards(run: Run) -> States:
    """Train a run on, and return its states after some steps."""
    start, rate, after = run.step, run.learning_rate(), {}
    for apart in APART:
        run.train(start + apart)
        after[apart] = run.state()
    return States(run.workload.name, start, rate, after, run.kinds())


@cache
def states(quick: bool) -> States:
    """Return states of a GPT at nine tenths of 360 steps; with `quick` of an MLP, of 100 steps."""
    workload = _workload(quick)
    run = Run(workload, 0)
    run.train(workload.steps * 9 // 10)
    return _onwards(run)


@cache
def slowed(quick: bool, times: int) -> States:
    """Continue the training of `states` at a learning rate divided by `times`."""
    workload = _workload(quick)
    run = Run(dataclasses.replace(workload, rate=workload.rate / times), 0)
    run.restore(states(quick).after[0])
    return _onwards(run)
