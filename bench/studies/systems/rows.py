"""Check-N-Run's figures 5, 6 and 9 to 17 on the embedding model, and its row tracker.

The model is `workloads.embedding` (four tables of 10,000 x 32, ids by a power law), trained with Adagrad, which leaves
rows that no batch has looked up as they are. An interval is as long as it takes to modify about 26 % of the model, as
30 minutes did in the paper.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

import shrinkpoint as sp
from shrinkpoint.kernels.rows import row_dequantize, row_kmeans, row_lookup, row_quantize

from ...harness import Options, Row, Rows, interleave, one_thread_clock, threads, times_smaller
from .. import overhead, workloads
from ..workloads import Run, State
from .table import FIGURES, Experiment, mean, restored

Floats = npt.NDArray[np.float32]
METHODS = ("symmetric", "asymmetric", "adaptive", "k-means")
BITS = (2, 3, 4, 8)
INTERVAL, INTERVALS = 8, 12
"""Steps of 1,024 samples; how many."""
RATE = 0.05


class AdagradRun(Run):
    """The embedding model under Adagrad."""

    def __init__(self, seed: int, steps: int) -> None:
        how: dict[str, Any] = {"rate": RATE, "optimizer": torch.optim.Adagrad, "decay": 0.0}
        super().__init__(dataclasses.replace(workloads.embedding(steps), **how), seed)

    def tables(self) -> Floats:
        """All rows of all tables."""
        found: Floats = torch.cat([w.detach() for n, w in self.model.named_parameters() if "tables" in n]).numpy()
        return found


class SparseRun(AdagradRun):
    """The embedding model with sparse gradients, whose step time is independent of table size."""

    def __init__(self, seed: int, steps: int) -> None:
        super().__init__(seed, steps)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Embedding):
                module.sparse = True

    def train(self, until: int) -> Self:
        """Train up to step `until`, and return the run."""
        while self.step < until:
            batch = self.workload.batch(np.random.default_rng([self.seed, self.step]))
            self.optimizer.zero_grad(set_to_none=True)
            self.workload.loss(self.model, batch).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.step += 1
        return self


@cache
def _trained(steps: int) -> Floats:
    """The tables of a short training."""
    return AdagradRun(0, steps).train(steps).tables().copy()


def mean_error(x: Floats, restored: Floats) -> float:
    """Mean over rows of the l2 distance."""
    return float(np.linalg.norm(x.astype(np.float64) - restored, axis=1).mean())


def quantized(x: Floats, bits: int, method: str, **how: Any) -> Floats:
    """Quantize rows and return the restored ones."""
    if method == "k-means":
        found: Floats = row_lookup(*row_kmeans(x, bits))
    else:
        found = row_dequantize(*row_quantize(x, bits, method, **how))  # type: ignore[arg-type]
    return found


# ---------------------------------------------------------------------------------------------------- figures 9 to 13


def _tables(options: Options) -> tuple[Floats, str]:
    """Rows to quantize (a tenth of them with `quick`), and a note of their origin."""
    steps = 30 if options.quick else 300
    x = _trained(steps)
    x = x[:4000] if options.quick else x
    return x, f"{len(x):,} rows of {x.shape[1]} after {steps} steps of Adagrad"


def methods(name: str, options: Options) -> list[Row]:
    """Figure 9: mean l2 error of the four quantizers, next to the asymmetric one."""
    x, note = _tables(options)
    rows = Rows(name)
    for bits in BITS:
        errors = {method: mean_error(x, quantized(x, bits, method)) for method in METHODS}
        peer = "asymmetric", errors["asymmetric"]
        for method, value in errors.items():
            rows.add(
                f"{bits} bits, {method}", value, "mean l2", peer, note, ratio=times_smaller(value, peer[1]), size=x.size
            )
    return rows


def search(name: str, options: Options) -> list[Row]:
    """Figures 10 to 13: gain and cost of the greedy search by bins and by ratio."""
    x, note = _tables(options)
    rows = Rows(name)
    bins = (5, 25, 45) if options.quick else (5, 10, 15, 20, 25, 30, 35, 40, 45, 50)
    points: list[tuple[int | None, float]] = [(count, 1.0) for count in bins]
    points += [(None, ratio) for ratio in ((0.2, 0.6) if options.quick else (0.2, 0.4, 0.6, 0.8))]
    for bits in (2, 3, 4):
        plain = mean_error(x, quantized(x, bits, "asymmetric"))
        for asked, ratio in points:
            count = asked or (25 if bits <= 3 else 45)
            value = mean_error(x, quantized(x, bits, "adaptive", num_bins=count, ratio=ratio))
            what = f"{bits} bits, {count} bins, ratio {ratio:g}: error over the asymmetric one's"
            rows.add(what, 100 * (1 - value / plain), "% less", note=note, size=x.size)
    calls = {"asymmetric": partial(quantized, x, 4, "asymmetric")}
    for asked, ratio in points:
        call = partial(quantized, x, 4, "adaptive", num_bins=asked or 45, ratio=ratio)
        calls[f"{asked or 45} bins, ratio {ratio:g}"] = call
    with threads(1):
        timings = interleave({label: (call, 1) for label, call in calls.items()}, clock=one_thread_clock(), budget=0.0)
    said = f"process time of one core, there and back; {note}"
    peer = "asymmetric", timings["asymmetric"].median
    for label, timing in timings.items():
        ratio_ = times_smaller(timing.median, peer[1])
        rows.add(f"seconds, 4 bits, {label}", timing.median, "s", peer, said, ratio=ratio_, size=x.size)
    return rows


# ---------------------------------------------------------------------------------------------------- figures 5 and 6


def modified(name: str, options: Options) -> list[Row]:
    """Figures 5 and 6: rows that changed, against samples from three starts, and by interval."""
    count = 4 if options.quick else INTERVALS
    starts = (0, count // 3, 2 * count // 3)
    run = AdagradRun(0, INTERVAL * count * 2)
    at: dict[int, Floats] = {}
    share: dict[tuple[int, int], float] = {}
    single, before = [], run.tables().copy()
    with threads(1):
        for interval in range(2 * count):
            if interval in starts:
                at[interval] = run.tables().copy()
            now = run.train((interval + 1) * INTERVAL).tables()
            single.append(float((now != before).any(axis=1).mean()))
            before = now.copy()
            for start, old in at.items():
                share[start, interval + 1 - start] = float((now != old).any(axis=1).mean())
    rows = Rows(name)
    for length in sorted({1, 2, count // 2, count}):
        found = [100 * share[start, length] for start in starts]
        note = f"from three starts {', '.join(f'{value:.1f}' for value in found)}; {INTERVAL} steps of 1,024 samples"
        paper = ("Check-N-Run, figure 6", 26.0) if length == 1 else (None, None)
        what = f"share after {length} intervals"
        rows.add(what, statistics.fmean(found), "% of the rows", paper, note, size=run.tables().size)
    low, high = 100 * min(single[1:]), 100 * max(single[1:])
    note = f"{low:.1f} to {high:.1f} %; figure 6: almost the same in all"
    rows.add("share of single intervals, largest less smallest", high - low, "points", note=note)
    return rows


# ---------------------------------------------------------------------------------------------------- figure 14


STEPS, LONGER = 160, 1600
"""Steps of the trainings; the longer ones are restored as often as the paper allows at each width."""


def restores(name: str, options: Options) -> list[Row]:
    """Figure 14: loss and accuracy at the end by the number of restores and the width, of short and longer runs."""
    enough = {2: 1, 3: 3, 4: 20, 8: 100}
    runs = [(STEPS, bits, count) for bits in BITS for count in (1, 3, 10, 20)]
    runs += [(LONGER, bits, enough[bits]) for bits in (2, 3, 4)]
    runs = [(20, bits, 1) for bits in (2, 8)] if options.quick else runs
    found: dict[tuple[int, int, int], list[tuple[float, float]]] = {run: [] for run in runs}
    with threads(1):
        for seed, steps in itertools.product(range(1 if options.quick else 3), dict.fromkeys(run[0] for run in runs)):
            exact = AdagradRun(seed, steps).train(steps)
            loss, right = exact.held_out_loss(), exact.accuracy()
            for length, bits, count in runs:
                if length == steps:
                    options.say(f"{name}: seed {seed}, {steps} steps, {bits} bits, {count} restores")
                    run = _resumed(seed, steps, bits, count)
                    changes = 100 * (run.held_out_loss() / loss - 1), 100 * (1 - run.accuracy() / right)
                    found[length, bits, count].append(changes)
    rows, size = Rows(name), AdagradRun(0, 1).tables().size
    for (steps, bits, count), seeds in found.items():
        figure = 0.01 if count <= enough[bits] else None
        paper = f"Check-N-Run, section 6.2: below 0.01 % up to {enough[bits]} restores", figure
        longer = f", {steps:,} steps" if steps == LONGER else ""
        for place, (what, unit) in enumerate((("", "% loss"), (", accuracy lost", "% of it"))):
            values = mean([changes[place] for changes in seeds])
            note = f"{values}; on held-out samples after {steps:,} steps of 1,024, against no restore"
            rows.add(f"{bits} bits, {count} restores{longer}{what}", values.mean, unit, paper, note, size=size)
    return rows


def _resumed(seed: int, steps: int, bits: int, count: int) -> AdagradRun:
    """Train with `count` evenly spread restores from quantized checkpoints."""
    config = sp.presets.check_n_run(bits)
    run = AdagradRun(seed, steps)
    for i in range(1, count + 1):
        run.train(steps * i // (count + 1))
        run.restore(restored(run.state(), config, run.kinds()))
    return run.train(steps)


# ---------------------------------------------------------------------------------------------------- figures 15 to 17


Interval = tuple[State, dict[str, Any]]
"""Weights at its end and their kinds."""


def _intervals(count: int) -> list[Interval]:
    """Return the tables of one training after each interval."""
    run = AdagradRun(0, INTERVAL * count * 2)
    return [({"model": run.train((i + 1) * INTERVAL).state()["model"]}, run.kinds()) for i in range(count)]


def _chain(bits: int, policy: str, intervals: Sequence[Interval]) -> list[tuple[bool, int, int]]:
    """(is a delta, bytes, raw bytes) of each interval's checkpoint, through a store."""
    with tempfile.TemporaryDirectory() as folder:
        store = sp.Store(folder, sp.presets.check_n_run(bits, policy=policy))
        saved = [store.save(INTERVAL * i, state, kinds=kinds) for i, (state, kinds) in enumerate(intervals, 1)]
    return [(done.is_delta, done.nbytes, done.raw_nbytes) for done in saved]


_PAPER_POLICIES: dict[str, dict[str, float]] = FIGURES["check-n-run figures 15 and 16"]
"""What the text says of figures 15 and 16: above 50 % after 10 intervals; almost 4 models after 11."""


_PAPER_REDUCTIONS = {2: (17.0, 8.0), 8: (6.0, 2.5)}
"""Bandwidth and capacity of figure 17: one restore, which takes 2 bits, and more than 20, which take 8."""


def policies(name: str, options: Options) -> list[Row]:
    """Figures 15 to 17: size per interval and capacity of the three policies."""
    with threads(1):
        intervals = _intervals(3 if options.quick else INTERVALS)
        chains = {policy: _chain(8, policy, intervals) for policy in _PAPER_POLICIES}
        rows = [found for policy, chain in chains.items() for found in _policy(name, policy, chain)]
        rows.append(_less_written(name, chains))
        for bits in (2,) if options.quick else BITS:
            rows += _reductions(name, bits, _chain(bits, "intermittent", intervals))
    return rows


def _less_written(name: str, chains: dict[str, list[tuple[bool, int, int]]]) -> Row:
    """Row of how many percent less the consecutive policy writes than the intermittent one."""
    written = {policy: sum(nbytes for _, nbytes, _ in chain) for policy, chain in chains.items()}
    less = {other: 100 * (1 - written["consecutive"] / written[other]) for other in ("intermittent", "one_shot")}
    note = f"{len(chains['consecutive'])} intervals; than by one-shot {less['one_shot']:.0f} %"
    paper, rows = ("Check-N-Run, section 6.3.1: than by the others, 12 intervals", 33.0), Rows(name)
    rows.add("consecutive: written less than by intermittent", less["intermittent"], "% less", paper, note)
    return rows[0]


def _policy(name: str, policy: str, found: list[tuple[bool, int, int]]) -> list[Row]:
    """Return sizes over that of the first checkpoint, at one width, as in figures 15 and 16."""
    shares = [100 * nbytes / found[0][1] for _, nbytes, _ in found]
    deltas = [share for share, (is_delta, _, _) in zip(shares, found, strict=True) if is_delta]
    bases = [str(i + 1) for i, (is_delta, _, _) in enumerate(found) if not is_delta]
    values: dict[str, float | None] = {"first difference": deltas[0], "largest difference": max(deltas)}
    values |= {"mean written an interval": statistics.fmean(shares)}
    values |= {"capacity at the end": 100 * _capacity(found, policy)[-1]}
    if policy == "intermittent":
        values["first full one again"] = float(bases[1]) if len(bases) > 1 else None
    note = f"intervals {', '.join(f'{share:.0f}' for share in shares)} %; full at {', '.join(bases)}"
    rows, figures = Rows(name), _PAPER_POLICIES[policy]
    for what, value in values.items():
        paper = "Check-N-Run, section 6.3.1" if what in figures else None, figures.get(what)
        unit = "interval" if what.startswith("first full") else "% of a full one"
        rows.add(f"{policy}: {what}", value, unit, paper, note)
    return rows


def _reductions(name: str, bits: int, found: Sequence[tuple[bool, int, int]]) -> list[Row]:
    """Bytes written, and bytes kept at most, against a full float32 checkpoint at each interval."""
    raw, rows = found[0][2], Rows(name)
    bandwidth = raw * len(found) / sum(nbytes for _, nbytes, _ in found)
    capacity = 1 / max(value * found[0][1] / raw for value in _capacity(found, "intermittent"))
    note = f"{len(found)} intervals, the dense layers exact; rows of 32 carry two numbers of 4 bytes each"
    source = f"Check-N-Run, figure 17, {'one restore' if bits == 2 else 'over 20'}"
    figures = _PAPER_REDUCTIONS.get(bits, (None, None))
    for what, value, figure in zip(("bandwidth", "capacity"), (bandwidth, capacity), figures, strict=True):
        paper = source if figure else None, figure
        rows.add(f"{bits} bits, intermittent: {what} over full float32 checkpoints", value, "x less", paper, note)
    return rows


def _capacity(found: Sequence[tuple[bool, int, int]], policy: str) -> list[float]:
    """Bytes that restoring each interval needs, over those of the first."""
    kept: list[float] = []
    base = since = 0
    for is_delta, nbytes, _ in found:
        if not is_delta:
            base, since = nbytes, 0
        elif policy == "consecutive":
            since += nbytes
        else:
            since = nbytes
        kept.append((base + since) / found[0][1])
    return kept


@contextmanager
def _marked(run: Run) -> Iterator[None]:
    """Mark the rows of a training as after a first save."""
    with sp.RowTracker(run.model, run.optimizer) as tracker:
        tracker.kinds()
        tracker.saved(base=True)
        yield


def tracker(name: str, options: Options) -> list[Row]:
    """Rows of the time of a training step with row marks against one without."""
    rows = []
    for what, make in (("", AdagradRun), (", sparse gradients", SparseRun)):
        with threads(1):
            # Dense gradients are read once in 64 steps.
            found = overhead.of_steps(partial(make, 0, 3), _marked, block=64, quick=options.quick)
        rows.append(found.row(f"{name}: of a step{what}", make(0, 3).workload.parameters))
    return rows


EXPERIMENTS = (
    Experiment("Check-N-Run error of the quantizers", methods),
    Experiment("Check-N-Run greedy search", search),
    Experiment("Check-N-Run modified rows", modified),
    Experiment("Check-N-Run restores", restores),
    Experiment("Check-N-Run policies", policies),
    Experiment("Check-N-Run row tracker", tracker),
)
