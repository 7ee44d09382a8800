"""The bench `search`: the cost of a search, its distance to brute force, and lost quality.

Each workload is trained once, with a `SensitivityTracker`; at ten checkpoints from early to late its weights are
searched for thresholds of 0.1, 1 and 5 %, each search starting from the last one's choice and counting sizes as deltas
against the checkpoint before, as a trainer would. `evaluate` sees one part of the held-out data; the loss on
another part is reported next to it. Both are measured on the restored checkpoint, not taken from the search. The
time of later searches is also shown as a share of the training between the checkpoints, which is short here: ninety
steps of a small model. At the first checkpoint and at one in the middle (of all models but the GPT) every
point of the cube is compressed, restored and evaluated: brute force. Its evaluations serve all thresholds. The
search misses the points that pass and are smaller than its choice. The note counts them, and those that pass by a
larger margin than their losses differ between the two parts of the data; without any of the latter, the miss is
within the spread. All calls of `evaluate` are counted, including those with the state itself. The states hold weights
only, because moments would hide differences in size.
"""

from __future__ import annotations

import copy
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import shrinkpoint as sp
from shrinkpoint.searching.cube import Cube, Point, normal
from shrinkpoint.trainers.sensitivity import batches_that_count

from ..harness import Options, Row, Rows, at_most, threads
from . import overhead, workloads
from .faults import quality
from .workloads import Run, State, Workload

TITLE = "evaluations, seconds and size of searched configurations, and losses after a restore"
THRESHOLDS = (0.001, 0.01, 0.05)
CHECKPOINTS = 10
MIDDLE = 5
FIXED = "Config()"
_WITHIN = 1.03
_BATCHES = {"GPT": 6}
"""Batches of the held-out set that `evaluate` sees; by default half of them."""


@dataclass(frozen=True)
class Checkpoint:
    """A state along a training, its gradient averages, and the training seconds before it."""

    step: int
    state: State
    grads: dict[str, torch.Tensor] | None
    seconds: float = 0.0


@dataclass(frozen=True)
class Training:
    """A workload's checkpoints, and its loss on two parts of the held-out data."""

    name: str
    size: int
    checkpoints: list[Checkpoint]
    evaluate: Callable[[State], float]
    elsewhere: Callable[[State], float]
    kinds: Mapping[str, Any]


def trained(workload: Workload, checkpoints: int) -> Training:
    """Train a workload to its end, keeping its weights at equal distances."""
    run = Run(workload, 0)
    every = workload.steps // checkpoints
    kept = []
    with sp.SensitivityTracker(run.model, every) as tracker:
        for step in range(every, every * checkpoints + 1, every):
            begin = time.perf_counter()
            run.train(step)
            seconds = time.perf_counter() - begin
            kept.append(Checkpoint(step, {"model": copy.deepcopy(run.model.state_dict())}, tracker.grads(), seconds))
    count = _BATCHES.get(workload.name, len(workload.held_out()) // 2)
    size = sum(p.numel() for p in run.model.parameters())
    kinds = sp.kinds(run.model, run.optimizer)
    return Training(workload.name, size, kept, quality(run, count), quality(run, count, first=count), kinds)


@dataclass(frozen=True)
class Step:
    """A search along a chain, and its result.

    Args:
        found: the search.
        stored: the checkpoint compressed with its choice.
        loss: how much higher the loss is when that is restored, relative, on the data that the search saw.
        elsewhere: the same on other held-out data.
        training: seconds of training since the checkpoint before.
    """

    found: sp.SearchResult
    stored: sp.Checkpoint
    loss: float
    elsewhere: float
    training: float


PUBLISHED = sp.SearchOptions(method="published", budget=1000, progress=False)
_PLANNED = sp.SearchOptions(progress=False)


def chain(
    training: Training, threshold: float, say: Callable[[str], None], options: sp.SearchOptions = _PLANNED
) -> list[Step]:
    """Search at every checkpoint, each from the last choice, and compress with the choice."""
    steps: list[Step] = []
    for checkpoint in training.checkpoints:
        say(f"{training.name}: {threshold:.1%} at step {checkpoint.step}")
        prev, last = (steps[-1].stored, steps[-1].found) if steps else (None, None)
        steps.append(searched(training, checkpoint, threshold, prev, last, options))
    return steps


def against_published(training: Training, threshold: float, own: list[Step], published: list[Step]) -> list[Row]:
    """Return rows of evaluations and bytes next to those of the published search."""
    calls = [[step.found.evaluations for step in steps] for steps in (own, published)]
    sizes = [[step.stored.nbytes for step in steps] for steps in (own, published)]
    rows = Rows(f"{training.name}, {threshold:.1%}", training.size)
    note = f"divide and conquer, then neighbours by decreasing ratio; {len(own)} checkpoints"
    for what, unit, (ours, theirs) in (
        ("evaluations, first checkpoint", "calls of evaluate", (of[0] for of in calls)),
        ("evaluations, later checkpoints", "mean calls", (statistics.fmean(of[1:]) for of in calls)),
        ("bytes, first checkpoint", "bytes", (of[0] for of in sizes)),
        ("bytes of the chain", "bytes", map(sum, sizes)),
    ):
        peer, name = ("published search", theirs), f"{what}, next to the published search"
        rows.add(name, ours, unit, peer, note, ratio=theirs / ours)
    return rows


def fixed(training: Training) -> int:
    """Bytes of the chain with the default configuration throughout."""
    prev, total = None, 0
    for checkpoint in training.checkpoints:
        prev = sp.compress(checkpoint.state, prev, grads=checkpoint.grads, kinds=training.kinds)
        total += prev.nbytes
    return total


@dataclass(frozen=True)
class Measured:
    """Bytes and loss increase of a point of the cube.

    Args:
        nbytes: of the checkpoint.
        loss: how much higher the loss is, relative, on the data that searches see.
        elsewhere: the same on other held-out data.
    """

    nbytes: int
    loss: float
    elsewhere: float


def brute_force(
    training: Training, number: int, prev: sp.Checkpoint | None, say: Callable[[str], None]
) -> list[Measured]:
    """Measure every point of the cube at one checkpoint."""
    checkpoint = training.checkpoints[number]
    on = training.evaluate, training.elsewhere
    exact = [f(checkpoint.state) for f in on]
    found = []
    for point in dict.fromkeys(normal(p) for p in Cube()):
        say(f"{training.name}: brute force at step {checkpoint.step}, {point}")
        ckpt = sp.compress(checkpoint.state, prev, point.config(), grads=checkpoint.grads, kinds=training.kinds)
        restored = sp.decompress(ckpt)
        found.append(Measured(ckpt.nbytes, *(f(restored) / e - 1 for f, e in zip(on, exact, strict=True))))
    return found


def missed(points: list[Measured], own: float | None, threshold: float) -> str:
    """Return a remark on smaller points that pass, or ""."""
    passing = [p for p in points if own is not None and _WITHIN * p.nbytes < own and p.loss <= threshold]
    if not passing:
        return ""
    # Points that fail are left out: the losses of a ruined model differ many times as much between the two parts.
    spread = statistics.fmean((p.loss - p.elsewhere) ** 2 for p in passing) ** 0.5
    sure = sum(p.loss + spread <= threshold for p in passing)
    said = f"; {len(passing)} smaller ones pass, {sure} by more than the {spread:.2%} their losses differ on other data"
    return said + ("" if sure else ": a miss within the spread of evaluate")


def against_brute_force(training: Training, say: Callable[[str], None]) -> list[Row]:
    """Return rows of the size chosen against the least that passes, of a base and a delta."""
    rows = Rows(size=training.size)
    for number, what in ((0, "first checkpoint"), (MIDDLE, "delta in the middle")):
        prev = None
        if number:
            before = training.checkpoints[number - 1]
            cfg = Point(16, 0.0, "magnitude", 0.0005).config()
            prev = sp.compress(before.state, cfg=cfg, grads=before.grads, kinds=training.kinds)
        points = brute_force(training, number, prev, say)
        for threshold in THRESHOLDS:
            step = searched(training, training.checkpoints[number], threshold, prev)
            found, passing = step.found, [p.nbytes for p in points if p.loss <= threshold]
            least = min(passing, default=None)
            size = found.nbytes if found.met and step.loss <= threshold else None
            share = size / least if size and least else None
            note = f"{found.evaluations} evaluations, not {len(points) + 1}; {len(passing)} points pass; {found.point}"
            note += missed(points, size, threshold)
            name, peer = f"{training.name}, {threshold:.1%}: size at the {what}", f"the least of {len(points)}"
            rows.add(name, size, "bytes", (peer, least), note, ratio=share, target=at_most(_WITHIN, "ratio"))
            rows[-1] = dataclasses.replace(rows[-1], met=None if least is None else bool(rows[-1].met))
    return rows


def of_chain(training: Training, threshold: float, steps: list[Step], default: int) -> list[Row]:
    """The rows of one chain of searches."""
    later = [step.found for step in steps[1:]]
    seconds, trained = [found.seconds for found in later], [step.training for step in steps[1:]]
    without = max(found.seconds - sum(trial.seconds for trial in found.trials) for found in later)
    exact = sum(not step.found.met for step in steps)
    note = f"{len(steps)} checkpoints" + (f", {exact} with exact weights, because no point passes" if exact else "")
    counts, elsewhere = [found.evaluations for found in later], [step.elsewhere for step in steps]
    share = sum(seconds) / sum(trained)
    beside = f"{sum(seconds):.2f} s of searches for {sum(trained):.2f} s of training between the same checkpoints"
    rows = Rows(f"{training.name}, {threshold:.1%}", training.size)

    def add(what: str, value: float, unit: str, most: float | None = None, more: str = note) -> None:
        rows.add(what, value, unit, note=more, target=None if most is None else at_most(most))

    add("evaluations, first checkpoint", steps[0].found.evaluations, "calls", 12)
    add("evaluations, later checkpoints", statistics.median(counts), "calls", 2, f"median; {_counted(counts)}")
    add("searches of the whole cube", sum(step.found.is_exhaustive for step in steps), "times", 3)
    add("seconds to the choice, first", steps[0].found.seconds, "s")
    said = f"median; without trials {without:.2f} at most"
    add("seconds to the choice, later", statistics.median(seconds), "s", more=said)
    add("later searches as a share of training time", 100 * share, "%", more=beside)
    add("largest loss on the data evaluated", 100 * max(step.loss for step in steps), "%", 100 * threshold)
    add("largest loss on other held-out data", 100 * max(elsewhere), "%", more=_spread(elsewhere))
    stored = sum(step.stored.nbytes for step in steps)
    rows.add("bytes of the chain", stored, "bytes", (FIXED, default), note, ratio=default / stored)
    return rows


def _counted(counts: list[int]) -> str:
    return f"mean {statistics.fmean(counts):.1f}, at most {max(counts)}, {len(counts)} checkpoints"


def _spread(values: list[float]) -> str:
    mean = 100 * statistics.fmean(values)
    return f"mean {mean:+.2f}, {100 * min(values):+.2f} ... {100 * max(values):+.2f} %, {len(values)} checkpoints"


def tracker_cost(workload: Workload, every: int, options: Options) -> list[Row]:
    """Time of a training step with the tracker recording, against one without, in turn.

    Only the batches that the tracker reads take longer. Their cost is spread over all batches from one checkpoint to
    the next, for the interval here and for one of 500 batches.
    """
    options.say(f"{workload.name}: cost of the tracker")
    found = overhead.of_steps(
        lambda: Run(workload, 0), lambda run: sp.SensitivityTracker(run.model, every=None), quick=options.quick
    )
    costs, read = {"batches that are read": found}, batches_that_count(50, 0.9)
    for batches in (every, 500):
        costs[f"{min(read, batches)} of {batches} batches"] = found.times(min(read, batches) / batches)
    return [cost.row(f"{workload.name}: tracker, {what}", workload.parameters) for what, cost in costs.items()]


def searches(workload: Workload, options: Options) -> list[Row]:
    """Searches through one training by threshold, and against brute force."""
    name = workload.name
    begin = time.perf_counter()
    options.say(f"training {name}")
    training = trained(workload, 4 if options.quick else CHECKPOINTS)
    options.say(f"trained in {time.perf_counter() - begin:.0f} s")
    default = fixed(training)
    rows: list[Row] = []
    for threshold in (0.01,) if options.quick else THRESHOLDS:
        found = chain(training, threshold, options.say)
        rows += options.done(of_chain(training, threshold, found, default))
        published = chain(training, threshold, options.say, PUBLISHED)
        rows += options.done(against_published(training, threshold, found, published))
    if not options.quick and name != "GPT":
        rows += options.done(against_brute_force(training, options.say))
    return rows


def run(options: Options) -> list[Row]:
    """Return all rows; with `--quick` of one small model without brute force."""
    rows: list[Row] = []
    for name in ("MLP",) if options.quick else ("MLP", "CNN", "embedding", "GPT"):
        workload = workloads.WORKLOADS[name]()
        if options.quick:
            workload = dataclasses.replace(workload, steps=80)
        with threads(1):
            if options.wanted(name):
                rows += searches(workload, options)
            if options.wanted(f"{name}: tracker"):
                every = workload.steps // (4 if options.quick else CHECKPOINTS)
                rows += options.done(tracker_cost(workload, every, options))
    return rows


def searched(
    training: Training,
    checkpoint: Checkpoint,
    threshold: float,
    prev: Any,
    last: Any = None,
    options: sp.SearchOptions = _PLANNED,
) -> Step:
    """Search at a checkpoint, compress with the choice, and measure what comes back.

    Losses are not taken from the search, which may be wrong about which direction is better.
    """
    how = {"grads": checkpoint.grads, "kinds": training.kinds}
    found = sp.search(checkpoint.state, training.evaluate, threshold, prev=prev, last=last, options=options, **how)
    stored = sp.compress(checkpoint.state, prev, found.config, **how)
    restored, on = sp.decompress(stored), (training.evaluate, training.elsewhere)
    seen, elsewhere = (evaluate(restored) / evaluate(checkpoint.state) - 1 for evaluate in on)
    return Step(found, stored, seen, elsewhere, checkpoint.seconds)
