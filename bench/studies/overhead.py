"""The overhead of a training's observer: the same steps with and without it, in turn.

The noise of a shared machine in a single step is larger than a fraction of a percent. So each step is timed next to the
same step of the other training, and the two take turns in going first. The steps of a block are added up on both sides;
the number is the median of the blocks' differences, over enough blocks that its standard error is a fraction of the
target. The position of a training in memory changes its time by up to a percent, so the observer is attached to one
training for half of the blocks and to the other for the rest.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..harness import Clock, Row, one_thread_clock
from .workloads import Run

BLOCKS, MOST_BLOCKS = 20, 1000
"""Fewest blocks of each half, and most."""
ACCURACY = 0.2
"""Percent: no more blocks are taken once the standard error of a half is this small."""
BUDGET = 60.0
"""Seconds after which no more than the fewest blocks are taken."""
BLOCK = 0.05
"""Seconds that a block takes at least on either side, where its length is not given."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """Relative overhead of a step, with its standard error.

    Args:
        share: percent; None: the observer changed the training.
        error: standard error of it, in percent.
        note: how it was measured.
    """

    share: float | None
    error: float
    note: str

    def times(self, factor: float) -> Overhead:
        """Return the overhead if only this share of the steps is observed."""
        return Overhead(None if self.share is None else factor * self.share, factor * self.error, self.note)

    def row(self, name: str, size: int, limit: float = 1.0) -> Row:
        """Return the row of a benchmark, held against a limit in percent."""
        met, target = self.met(limit), f"<= {limit:g} %"
        return Row(name, "cpu, 1 thread", size, self.share, "%", target=target, met=met, note=self.note)

    def met(self, limit: float) -> bool | None:
        """Return whether it is at most `limit` percent; None if two standard errors leave it open."""
        if self.share is None:
            return False
        if abs(self.share - limit) <= 2 * self.error:
            return None
        return self.share <= limit


def of_steps(
    make: Callable[[], Run],
    watch: Callable[[Run], AbstractContextManager[Any]],
    *,
    block: int | None = None,
    quick: bool = False,
    clock: Clock | None = None,
) -> Overhead:
    """Measure how much more processor time an observed training step takes, in percent.

    Args:
        make: a training, not begun; the same one each time.
        watch: attaches the observer to a training, until its context is left.
        block: steps of a block, a multiple of the observer's period, if it has one; None: as many as take `BLOCK`
            seconds.
        quick: few blocks, and the observer is attached to one of the trainings only.
        clock: how to time; None: processor time of the process.
    """
    clock = one_thread_clock() if clock is None else clock
    one, other = make(), make()
    for run in (one, other):
        run.train(3)
    steps = block or max(2, math.ceil(BLOCK / max(_timed(one, clock), 1e-6)))
    other.train(one.step)
    halves = []
    seconds: list[float] = []
    collecting = gc.isenabled()
    gc.disable()
    try:
        for plain, watched in ((one, other),) if quick else ((one, other), (other, one)):
            with watch(watched):
                halves.append(_blocks(plain, watched, steps, quick, clock, seconds))
            pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
            if not all(torch.equal(a, b) for a, b in pairs):
                return Overhead(None, 0.0, "CHECK FAILED: what watches the training changed it")
    finally:
        if collecting:
            gc.enable()
    share = statistics.fmean(statistics.median(more) for more in halves)
    error = math.hypot(*map(_error, halves)) / len(halves)
    low, high = (statistics.fmean(statistics.quantiles(m, n=4, method="inclusive")[q] for m in halves) for q in (0, 2))
    note = (
        f"step {1e3 * statistics.median(seconds):.2f} ms of processor, {len(seconds)} blocks of {steps} steps on "
        f"either side in turn, quartiles of their differences {low:+.2f} and {high:+.2f} %, "
        f"standard error of the median {error:.2f}; checked: weights equal to the bit"
    )
    return Overhead(share, error, note)


def _blocks(plain: Run, watched: Run, steps: int, quick: bool, clock: Clock, seconds: list[float]) -> list[float]:
    """Measure blocks; return their overheads in percent, append seconds of a plain step."""
    begin = time.perf_counter()
    for run in (plain, watched):
        run.train(run.step + 1)
    least, budget = (2, 1.0) if quick else (BLOCKS, BUDGET)
    more: list[float] = []
    while len(more) < least or (
        len(more) < MOST_BLOCKS and _error(more) > ACCURACY and time.perf_counter() - begin < budget
    ):
        without = watching = 0.0
        for number in range(steps):
            if number % 2:
                without += _timed(plain, clock)
                watching += _timed(watched, clock)
            else:
                watching += _timed(watched, clock)
                without += _timed(plain, clock)
        more.append(100 * (watching / without - 1))
        seconds.append(without / steps)
    return more


def _timed(run: Run, clock: Clock) -> float:
    """Run the next step and return its seconds."""
    return clock(lambda: run.train(run.step + 1), 1)


def _error(values: list[float]) -> float:
    """Standard error of the median, estimated by the quartiles, which outliers do not change."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(values))
