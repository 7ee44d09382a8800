"""Trainings of a GPU's size, killed and restored: `bench training --only "GPT large"`.

The same code as for the small models (`faults.py`), with model, moments and batches on the GPU: a checkpoint's tensors
reach the codec there and are quantized there, and a restored state goes back there. `--minutes` says how long all of it
may take: a few steps, saves and restores are timed first, and the schedule is as long as fits, with a checkpoint every
`STUDY.spacing` steps. A system that the time does not suffice for has an open row, as all have without a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ..devices import threads
from ..harness import Options, Row, at_least, held
from . import endurance, workloads
from .endurance import FAILURES, Make, Model, Study, measured
from .workloads import Run, Workload

MINUTES = 30.0
"""How long it takes unless `--minutes` says otherwise."""
STUDY = Study(
    1,
    (*("default", "rate 0.0005", "no compression", "inshrinkerator"), endurance.COARSE[0], endurance.YARDSTICK),
    spacing=50,
)
"""In this order, so that a limit cuts the least wanted ones."""
_WARM, _TIMED = 3, 10
"""Steps before the clock and under it."""
_MARGIN = 0.85
"""Share of the limit that is planned for."""


@dataclass(frozen=True)
class Pace:
    """Seconds of one step, and of one save and one restore of each system."""

    step: float
    save: Mapping[str, float]
    restore: Mapping[str, float]

    def seconds(self, steps: int, failures: int, spacing: int) -> float:
        """Return the seconds of everything: one uninterrupted training and one a system.

        A failure costs half a distance between checkpoints again, and the losses by which its rework is found about as
        much as training does, for as long as the rework lasts: two distances together.
        """
        trainings = (1 + len(self.save)) * steps + len(self.save) * (2 * failures + 3) * spacing
        saves = (steps / spacing + 3) * sum(self.save.values())
        return trainings * self.step + saves + (failures + 1) * sum(self.restore.values())

    def steps(self, seconds: float, failures: int, spacing: int, most: int) -> int:
        """Return the longest schedule within `seconds`, a multiple of `spacing`; may be 0.

        Example:
            >>> Pace(0.1, {"a": 1.0}, {"a": 1.0}).steps(300.0, 10, 50, 4000)
            750
        """
        fixed = self.seconds(0, failures, spacing)
        each = self.seconds(spacing, failures, spacing) - fixed
        return min(most, max(0, math.floor((seconds - fixed) / each)) * spacing)


def pace(workload: Workload, systems: Mapping[str, Make], spacing: int, now: Callable[[], float]) -> Pace:
    """Time a few steps, and a delta and a restore of each system, after compilation."""
    run = Run(workload, 0)
    run.train(_WARM)
    begin = now()
    run.train(_WARM + _TIMED)
    step = (now() - begin) / _TIMED
    save, restore = {}, {}
    for name, make in systems.items():
        system = make(spacing)
        system.begin(run)
        try:
            for _ in range(3):
                run.train(run.step + 1)
                begin = now()
                system.save(run)
                save[name] = now() - begin
            for _ in range(2):
                begin = now()
                system.restore()
                restore[name] = now() - begin
        finally:
            system.end()
    return Pace(step, save, restore)


def device() -> str | None:
    """Device of these trainings; None without a GPU."""
    return "cuda" if torch.cuda.is_available() else None


def rows(options: Options) -> list[Row]:
    """Return all rows; with `--quick` only if `--only` names them."""
    if options.quick and options.only is None:
        return []
    found = []
    for name, make in workloads.LARGE.items():
        if options.wanted(f"{name} failures"):
            found += of_workload(make(), options)
    return found


def of_workload(workload: Workload, options: Options, study: Study = STUDY) -> list[Row]:
    """Measure outcomes and targets of one workload, as `bench training` does for small ones."""
    begin = time.monotonic()
    failures, minutes = FAILURES[0], MINUTES if options.minutes is None else options.minutes
    every = endurance.SYSTEMS | endurance.RARE_BASES
    systems = {name: every[name] for name in study.systems or every}
    here = device()
    if here is None:
        return _none(Model(dataclasses.replace(workload, device="cuda")), systems, "not measured: no GPU")
    workload = dataclasses.replace(workload, device=here)
    with threads(1 if here == "cpu" else os.cpu_count() or 1):
        options.say(f"{workload.name}: how long a step, a save and a restore take")
        found = pace(workload, systems, study.spacing, _clock(here))
        left = _MARGIN * 60 * minutes - (time.monotonic() - begin)
        steps = found.steps(left, failures, study.spacing, workload.steps)
        if steps < (failures + 2) * study.spacing:
            why = f"{minutes:g} minutes suffice for {steps} steps, too few for {failures} failures"
            return _none(Model(workload), systems, f"not measured: {why} between checkpoints {study.spacing} apart")
        model, rows = Model(dataclasses.replace(workload, steps=steps)), []
        for name, make in systems.items():
            if time.monotonic() - begin > 60 * minutes:
                why = f"not measured: the limit of {minutes:g} minutes was over"
                rows.append(endurance.missing_row(model, name, failures, why))
                continue
            rows += measured(model, study, {name: make}, study.seeds, failures, options)
    return rows + endurance.targets([row for row in rows if row.value is not None])


def _none(model: Model, systems: Mapping[str, Make], why: str) -> list[Row]:
    """Return rows without measurements, with their targets."""
    made, labels = model.workload, ("weights", "whole state")
    found = [endurance.missing_row(model, s, FAILURES[0], why) for s in systems if s not in endurance.EXACT]
    names = [endurance.bound_row(made.name, label) for label in labels]
    target = at_least(endurance.WANTED, "value")
    return found + [held(Row(name, made.where, made.parameters, None, "x", note=why), target) for name in names]


def _clock(here: str) -> Callable[[], float]:
    """Wall time in seconds, after the device has finished its work."""

    def now() -> float:
        if here != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    return now
