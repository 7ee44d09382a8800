"""Trainings of the benches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shrinkpoint.bench.harness import threads
from shrinkpoint.bench.studies import workloads
from shrinkpoint.bench.studies.faults import end_of
from shrinkpoint.bench.studies.workloads import Workload

SPACING = 2
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def tiny(steps: int = 400) -> Workload:
    """Return the GPT with small numbers and less held-out data."""
    made = workloads.gpt(layers=1, width=32, heads=2, steps=steps)
    return dataclasses.replace(made, held_out=lambda: made.held_out()[:20])


def test_parameters_are_counted_without_making_them() -> None:
    for make in workloads.WORKLOADS.values():
        assert make().parameters == sum(p.numel() for p in make().model().parameters())


def test_the_same_run_again_ends_the_same() -> None:
    with threads(1):
        first, second = (end_of(tiny(8), 0) for _ in range(2))
        assert first == second
        assert first != end_of(tiny(8), 1)
