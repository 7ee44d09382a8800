"""The overhead of an observed training: measured, or left open within the noise."""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from bench.studies import overhead
from bench.studies.overhead import Overhead


class Training:
    """Stand-in for a `Run` whose step times come from `clock`."""

    def __init__(self) -> None:
        self.model, self.step, self.watched = nn.Linear(2, 2), 0, False
        nn.init.ones_(self.model.weight)
        nn.init.zeros_(self.model.bias)

    def train(self, until: int) -> None:
        self.step = until
        seen.append(self.watched)


seen: list[bool] = []


@contextlib.contextmanager
def watch(run: Any) -> Iterator[None]:
    run.watched = True
    yield
    run.watched = False


def clock(percent: float, noise: float, *, placed: float = 0.0, drift: float = 0.0) -> Callable[..., float]:
    """Make a clock of steps: longer if observed, with noise, placement and drift."""
    rng = random.Random(0)
    first: list[Any] = []
    count = 0

    def time(call: Callable[[], object], times: int) -> float:
        nonlocal count
        call()
        count += 1
        run = call.__closure__[0].cell_contents  # type: ignore[attr-defined]
        first.append(run)
        seconds = 0.01 * (1 + percent / 100 * run.watched) * (1 + drift * count)
        return seconds * (1 + placed / 100 * (run is first[0])) * (1 + noise / 100 * rng.gauss(0, 1))

    return time


def measured(percent: float, noise: float, **more: float) -> Overhead:
    seen.clear()
    return overhead.of_steps(Training, watch, block=16, clock=clock(percent, noise, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("percent", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("more", [{}, {"placed": 3.0}, {"drift": 1e-4}], ids=["", "placed", "drift"])
def test_half_a_percent_is_told_from_one(percent: float, more: dict[str, float]) -> None:
    """An overhead of half a percent is distinguished from one percent under noise of 3 %."""
    found = measured(percent, 3.0, **more)
    assert found.share == pytest.approx(percent, abs=3 * found.error)
    assert 0.02 < found.error <= 0.2
    assert found.met(1.0) == (percent < 1)
    assert f"standard error of the median {found.error:.2f}" in found.note
    assert sum(seen) == pytest.approx(len(seen) / 2, abs=10)


def test_quick_watches_one_training_and_says_how_sure_it_is() -> None:
    found = overhead.of_steps(Training, watch, block=16, quick=True, clock=clock(2.0, 3.0))  # type: ignore[arg-type]
    said = re.search(r"(\d+) blocks .* differences ([+-][\d.]+) and ([+-][\d.]+) %", found.note)
    assert said is not None
    blocks, low, high = int(said[1]), float(said[2]), float(said[3])
    assert blocks >= 2
    assert found.error == pytest.approx(1.2533 * (high - low) / 1.349 / math.sqrt(blocks), abs=0.02)
    assert found.share == pytest.approx(2.0, abs=max(3 * found.error, 1.0))


def test_what_is_not_resolved_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "BUDGET", 0.0)
    found = measured(0.9, 30.0)
    assert found.error > 0.3
    assert found.met(1.0) is None
    assert found.times(0.01).met(1.0) is True
    assert found.met(50.0) is True


def test_limits() -> None:
    assert [Overhead(s, 0.1, "").met(1.0) for s in (-0.5, 0.79, 0.81, 1.19, 1.21)] == [True, True, None, None, False]


def test_a_training_that_is_changed_is_red() -> None:
    @contextlib.contextmanager
    def harm(run: Any) -> Iterator[None]:
        with torch.no_grad():
            run.model.weight += 1
        yield

    found = overhead.of_steps(Training, harm, block=2, quick=True, clock=clock(0, 1))  # type: ignore[arg-type]
    assert (found.share, found.met(1.0), found.note[:12]) == (None, False, "CHECK FAILED")


def test_the_tracker_is_held_to_its_target_within_the_window_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.harness import Options
    from bench.studies import search, workloads

    monkeypatch.setattr(overhead, "of_steps", lambda *args, **named: Overhead(3.0, 0.1, "checked"))
    found = {r.row: r for r in search.tracker_cost(workloads.mlp(), 90, Options())}
    assert list(found) == [
        f"MLP: tracker, {what}" for what in ("batches that are read", "13 of 90 batches", "13 of 500 batches")
    ]
    assert [row.value for row in found.values()] == pytest.approx([3.0, 3.0 * 13 / 90, 3.0 * 13 / 500])
    assert [row.target for row in found.values()] == ["<= 1 %"] * 3
    assert [row.met for row in found.values()] == [False, True, True]
    # Where checkpoints are nearer than that, every batch is read.
    assert [r.value for r in search.tracker_cost(workloads.mlp(), 10, Options())][1] == 3.0


# Torch says so of its own optimizers' sparse tensors.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_real_training() -> None:
    from bench.harness import Options
    from bench.studies.systems.rows import tracker

    rows = tracker("Check-N-Run row tracker", Options(quick=True))
    assert [r.row for r in rows] == [
        "Check-N-Run row tracker: of a step",
        "Check-N-Run row tracker: of a step, sparse gradients",
    ]
    for row in rows:
        assert row.value is not None
        assert -20 < row.value < 50
        assert "weights equal to the bit" in row.note
