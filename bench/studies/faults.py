"""A training that is killed repeatedly and resumes from its last compressed checkpoint.

A checkpoint is taken every `spacing` steps; kills are spread evenly over the schedule, each half way between two
checkpoints. After a kill only the stored bytes are left: a new model and optimizer are built, the store is opened
again, its newest checkpoint (with the chain below it) is decoded, and training goes on *from the lossy state*; the next
delta is taken against the checkpoint that was restored. The data of a step depend on seed and step alone, so a run that
is restored exactly ends where the uninterrupted one does, bit for bit; systems that claim to be exact are checked.

Seconds are processor time of this process, on one thread. `warm_up` has to come first, or the first system of a process
pays for compilation.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch

import shrinkpoint as sp
from shrinkpoint.searching.cube import Cube

from ..harness import Row
from .workloads import Run, State, Workload

_RESHUFFLE = 1_000


@dataclass(frozen=True)
class Size:
    """Stored and raw bytes of one checkpoint: of the weights, and of everything."""

    weights: int
    whole: int
    raw_weights: int
    raw_whole: int
    is_delta: bool = False

    @classmethod
    def of(cls, ckpt: sp.Checkpoint) -> Size:
        """Return the sizes of a checkpoint."""
        weights = [row for row in ckpt.summary() if row.path.startswith("model/")]
        stored, raw = sum(row.stored_bytes for row in weights), sum(row.raw_bytes for row in weights)
        return cls(stored, ckpt.nbytes, raw, ckpt.raw_nbytes, ckpt.is_delta)


def ratio(sizes: Sequence[Size], part: str = "whole") -> float:
    """Raw over stored bytes of some checkpoints, of the weights or the whole; NaN without any."""
    stored = sum(getattr(size, part) for size in sizes)
    return sum(getattr(size, f"raw_{part}") for size in sizes) / stored if stored else math.nan


class System:
    """Storage for the checkpoints of one training; what needs nothing does nothing."""

    def begin(self, run: Any) -> None:
        """Notify the system that a process begins to train `run`."""

    def save(self, run: Any) -> Size | None:
        """Store the run's state, and return its size."""
        raise NotImplementedError

    def restore(self) -> State:
        """Return the newest state from stored bytes alone."""
        raise NotImplementedError

    def end(self) -> None:
        """Release what the system holds."""


# ------------------------------------------------------------------------------------------------------------ systems


def raw_size(state: State) -> tuple[int, int]:
    """Bytes of the arrays of a state: of the weights, and of all."""
    weights, everything = (
        sum(x.nbytes for x in torch.utils._pytree.tree_leaves(part) if isinstance(x, torch.Tensor))
        for part in (state["model"], state)
    )
    return weights, everything


@dataclass(frozen=True)
class Searching:
    """Settings of searches along a training: threshold, cube, data, and interval.

    Args:
        threshold: degradation a checkpoint may have, relative.
        cube: the candidates.
        batches: of the held-out set, that `evaluate` sees.
        by: "loss" or "accuracy": what may degrade by the threshold.
    """

    threshold: float
    cube: Cube
    batches: int = 5
    by: str = "loss"


def quality(run: Run, batches: int, by: str = "loss", first: int = 0) -> Callable[[State], float]:
    """Return the function that a search evaluates: mean loss, or accuracy, of a restored state.

    Args:
        run: of the workload; its own model stays as it is.
        batches: how many of the held-out set.
        by: "loss" or "accuracy".
        first: number of the first batch.
    """
    probe = run.workload.model().eval()
    chosen = run.workload.held_out()[first : first + batches]

    @torch.no_grad()
    def evaluate(restored: State) -> float:
        probe.load_state_dict(restored["model"])
        if by == "accuracy":
            return run.accuracy(batches, probe, first)
        return statistics.fmean(float(run.loss(batch, probe)) for batch in chosen)

    return evaluate


_numbers = itertools.count()


class InStore(System):
    """Checkpoints of a `Config` in an `sp.Store` in memory; a restore decodes the chain.

    Args:
        config: how to compress, and when to take a base.
        grads: whether gradient averages of a `SensitivityTracker` go along.
        spacing: steps from one checkpoint to the next, for the tracker.
        searching: search for the configuration.
    """

    def __init__(
        self, config: sp.Config, *, grads: bool = False, spacing: int = 10, searching: Searching | None = None
    ):
        self.url = f"memory://bench-faults-{next(_numbers)}"
        self.store = sp.Store(self.url, config)
        self.grads, self.spacing, self.searching = grads, spacing, searching
        self.tracker: sp.SensitivityTracker | None = None
        self.run: Run | None = None
        self.head: sp.Checkpoint | None = None
        self.last: sp.SearchResult | None = None
        self.evaluations = self.unmet = 0

    def begin(self, run: Run) -> None:
        self.run = run
        if self.grads:
            self.tracker = sp.SensitivityTracker(run.model, self.spacing, done=run.step)

    def save(self, run: Run) -> Size:
        state = run.state()
        kinds = run.kinds()
        grads = self.tracker.grads() if self.tracker is not None else None
        if self.searching is not None:
            self.store.cfg = self._search(self.searching, run, state, grads=grads, kinds=kinds)
        self.head = self.store.save(run.step, state, grads=grads, kinds=kinds).checkpoint
        return Size.of(self.head)

    def _search(self, how: Searching, run: Run, state: State, **known: Any) -> sp.Config:
        """Return the configuration for the next checkpoints."""
        evaluate = quality(run, how.batches, how.by)
        direction = "higher" if how.by == "accuracy" else "lower"
        options = sp.SearchOptions(cube=how.cube, direction=direction, progress=False)
        chain: Any = {"prev": self.head, "last": self.last}
        found = sp.search(state, evaluate, how.threshold, options=options, **chain, **known)
        self.last = found
        self.evaluations += found.evaluations
        self.unmet += not found.met
        return dataclasses.replace(found.config, chain=self.store.cfg.chain)

    def restore(self) -> State:
        self._stop()
        self.store = sp.Store(self.url, self.store.cfg)
        state: State = self.store.load()
        if self.searching is not None:
            self.head = self.store.read(self.store.steps()[-1])
        return state

    def _stop(self) -> None:
        if self.tracker is not None:
            self.tracker.remove()

    def end(self) -> None:
        self._stop()
        import fsspec

        files = fsspec.filesystem("memory")
        root = self.url.removeprefix("memory:/")
        if files.exists(root):
            files.rm(root, recursive=True)


class Uncompressed(System):
    """`torch.save` of the whole state."""

    blob = b""

    def save(self, run: Run) -> Size:
        state, buffer = run.state(), io.BytesIO()
        torch.save(state, buffer)
        self.blob = buffer.getvalue()
        weights, whole = raw_size(state)
        return Size(weights, len(self.blob), weights, whole)

    def restore(self) -> State:
        state: State = torch.load(io.BytesIO(self.blob), weights_only=True)
        return state


class Reshuffled(Uncompressed):
    """Uncompressed checkpoints with other batches after each restore, as the noise of training."""

    begun = 0

    def begin(self, run: Run) -> None:
        run.seed += _RESHUFFLE * self.begun
        self.begun += 1


class Peer(System):
    """A published system from `bench/studies/baselines`, with a base every few checkpoints.

    Args:
        baseline: with `encode(state, previous)` -> an object with `weights` and `rest` in bytes, and
            `decode(saved, previous)` -> state; `previous` is the restored state of the checkpoint before, or None.
        base_every: as in `ChainPolicy`.
    """

    def __init__(self, baseline: Any, base_every: int = 20) -> None:
        self.baseline, self.base_every = baseline, base_every
        self.chain: list[Any] = []
        self.previous: State | None = None

    def save(self, run: Run) -> Size:
        state = run.state()
        if len(self.chain) == self.base_every:
            self.chain, self.previous = [], None
        saved = self.baseline.encode(state, self.previous)
        self.previous = self.baseline.decode(saved, self.previous)
        self.chain.append(saved)
        stored = len(saved.weights), len(saved.weights) + len(saved.rest)
        return Size(*stored, *raw_size(state), len(self.chain) > 1)

    def restore(self) -> State:
        previous: Any = None
        for saved in self.chain:
            previous = self.baseline.decode(saved, previous)
        self.previous = previous
        state: State = previous
        return state


@dataclass(frozen=True)
class Outcome:
    """Result of a training that was killed and restored: loss, accuracy, bytes, seconds.

    Args:
        degradation: held-out loss at the end against the uninterrupted training's, in percent.
        at_restore: change of the held-out loss by storing and restoring, in percent, mean over restores.
        weights: raw bytes over stored bytes of all checkpoints, bases included.
        whole: the same of the whole state.
        peak_weights: largest ratio of one checkpoint.
        save: seconds a save.
        overhead: seconds in saves against seconds in training, in percent.
        evaluations: of a search, in total.
        unmet: searches that found nothing good enough and took exact weights.
        accuracy: share of right predictions on the held-out set at the end; NaN for a task without accuracy.
        accuracy_lost: accuracy lost by storing and restoring, in percent of it, mean over restores.
    """

    degradation: float
    at_restore: float
    weights: float
    whole: float
    peak_weights: float
    save: float
    overhead: float
    evaluations: int = 0
    unmet: int = 0
    accuracy: float = math.nan
    accuracy_lost: float = math.nan


def kills(steps: int, failures: int, spacing: int) -> list[int]:
    """Steps at which a training is killed: evenly spread, each half way between two checkpoints.

    Args:
        steps: of the whole training.
        failures: how many; at most as many as there are distances between checkpoints after the first.
        spacing: steps from one checkpoint to the next, 2 or more.

    Example:
        >>> kills(900, 2, 10)
        [305, 605]
    """
    return [max(1, i * steps // (failures + 1) // spacing) * spacing + spacing // 2 for i in range(1, failures + 1)]


@contextmanager
def _timed(seconds: list[float]) -> Iterator[None]:
    """Add the processor time of the context."""
    begin = time.process_time()
    yield
    seconds.append(time.process_time() - begin)


def probe(run: Run, batches: int) -> float:
    """Loss of a run on the first batches of the held-out set, in evaluation mode."""
    with torch.no_grad():
        run.model.eval()
        loss = statistics.fmean(float(run.loss(batch)) for batch in run.workload.held_out()[:batches])
        run.model.train()
    return loss


@dataclass(frozen=True)
class End:
    """Held-out loss and accuracy (NaN for a task without accuracy) at the end of a training."""

    loss: float
    accuracy: float


def end_of(workload: Workload, seed: int) -> End:
    """Return the end of an uninterrupted training."""
    run = Run(workload, seed, until=workload.steps)
    return End(run.held_out_loss(), run.accuracy())


J = TypeVar("J")


def warm_up(workload: Workload, seed: int, system: System, spacing: int) -> None:
    """Save, restore and save once more without measuring, so that kernels are compiled.

    Args:
        workload: what will be trained.
        seed: of the training.
        system: where its checkpoints go; not shared, because it is ended.
        spacing: steps from one checkpoint to the next.
    """
    run = Run(workload, seed)
    system.begin(run)
    try:
        for saves in (1, 2, 3):
            if saves == 3:
                state, run = system.restore(), Run(workload, seed)
                run.restore(state)
                system.begin(run)
            run.train(min(saves * spacing, workload.steps))
            system.save(run)
    finally:
        system.end()


@dataclass(frozen=True)
class KilledTraining(Generic[J]):
    """A training that was killed and restored, at its end.

    Args:
        run: after the last step.
        sizes: of all checkpoints.
        restores: step of each checkpoint that was restored, and the judgements before and after the restore.
        train, save: processor seconds of the steps and of the saves.
    """

    run: Any
    sizes: list[Size]
    restores: list[tuple[int, J, J]]
    train: list[float]
    save: list[float]


def killed_training(
    make: Callable[[], Any], steps: int, system: System, failures: int, spacing: int, judge: Callable[[Any], J] | None
) -> KilledTraining[J]:
    """Train to the end through evenly spread kills, as every study of kills does.

    Args:
        make: builds the training at its first step: a `Run`, or an object with the same methods.
        steps: of the whole training.
        system: where its checkpoints go; a new one.
        failures: how often it is killed, at least 1.
        spacing: steps from one checkpoint to the next.
        judge: looks at the run at each checkpoint that will be restored, and after the restore; None: nothing does.
    """
    due = kills(steps, failures, spacing)
    restores = {step // spacing * spacing for step in due}
    judged: dict[int, J] = {}
    run = make()
    found = KilledTraining[J](run, [], [], [], [])
    system.begin(run)
    try:
        while run.step < steps:
            with _timed(found.train):
                run.train(min(run.step // spacing * spacing + spacing, *due[:1], steps))
            if due and run.step == due[0]:
                due.pop(0)
                state, run = system.restore(), make()
                run.restore(state)
                system.begin(run)
                if judge is not None:
                    found.restores.append((run.step, judged[run.step], judge(run)))
            elif run.step % spacing == 0:
                with _timed(found.save):
                    size = system.save(run)
                found.sizes.extend([] if size is None else [size])
                if judge is not None and run.step in restores:
                    judged[run.step] = judge(run)
    finally:
        system.end()
    return dataclasses.replace(found, run=run)


def endure(
    workload: Workload, seed: int, system: System, *, failures: int, exact: float, spacing: int = 10, batches: int = 2
) -> Outcome:
    """Train through evenly spread failures, and return losses, bytes and seconds.

    Args:
        workload: the training.
        seed: of the training.
        system: where its checkpoints go; a new one.
        failures: how often it is killed, at least 1.
        exact: loss at the end of the uninterrupted training.
        spacing: steps from one checkpoint to the next.
        batches: of the held-out set, for losses at restores; the last loss is over all of it.
    """

    def judge(run: Run) -> End:
        return End(probe(run, batches), run.accuracy(batches))

    found = killed_training(partial(Run, workload, seed), workload.steps, system, failures, spacing, judge)
    run, sizes, ends = found.run, found.sizes, [(before, after) for _, before, after in found.restores]
    return Outcome(
        degradation=100 * (run.held_out_loss() / exact - 1),
        at_restore=statistics.fmean(100 * (after.loss / before.loss - 1) for before, after in ends),
        weights=ratio(sizes, "weights"),
        whole=ratio(sizes),
        peak_weights=max(ratio([size], "weights") for size in sizes),
        save=statistics.fmean(found.save),
        overhead=100 * sum(found.save) / sum(found.train),
        evaluations=getattr(system, "evaluations", 0),
        unmet=getattr(system, "unmet", 0),
        accuracy=run.accuracy(),
        accuracy_lost=statistics.fmean(100 * (1 - after.accuracy / before.accuracy) for before, after in ends),
    )


# --------------------------------------------------------------------------------------------------------- over seeds


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
    exact: dict[int, End] = field(default_factory=dict)

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
