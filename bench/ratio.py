"""`python -m bench ratio`: bytes against loss, on chains of checkpoints of real trainings.

A training is run once; every 10 steps its state goes into the chain of each system (a base every 20 checkpoints). At
7/9 of the schedule the systems are restored: held-out loss at once, and after up to 200 further steps, against the
training that was never interrupted, on the same batches and the same held-out set. *Staleness* is the second
difference in steps of the uninterrupted training: how long it would take to make it good. *Late* is the last third.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shrinkpoint as sp

from . import workloads
from .devices import threads
from .harness import Options, Row
from .workloads import Run, State, Workload

TITLE = "bytes against held-out loss, on chains of checkpoints of real trainings"
SPACING, RESTART, FURTHER = 10, 7 / 9, 200
SYSTEMS: dict[str, Callable[[], sp.Config]] = {
    "default": sp.Config,
    "rate 0.0003": lambda: sp.Config(rate=0.0003),
    "rate 0.001": lambda: sp.Config(rate=0.001),
    "rate 0.002": lambda: sp.Config(rate=0.002),
    "rate 0.004": lambda: sp.Config(rate=0.004),
    "rate 0.01": lambda: sp.Config(rate=0.01),
    "inshrinkerator 16": lambda: sp.presets.inshrinkerator(16),
    "inshrinkerator 32": lambda: sp.presets.inshrinkerator(32),
    "lossless": sp.presets.lossless,
}
PUBLISHED = "inshrinkerator 32"
SEEDS = 3
PAIRS = ((0.5, 80.0, 300.0), (0.1, 30.0, 70.0))
"""Loss change in percent after further steps; ratio of the chain and of late deltas wanted there."""


@dataclass
class Bytes:
    """Sums over some checkpoints of one chain."""

    stored: int = 0
    raw: int = 0
    weights: int = 0
    weight_elements: int = 0

    def add(self, ckpt: sp.Checkpoint) -> None:
        rows = [row for row in ckpt.summary() if row.path.startswith("model/")]
        self.stored += ckpt.nbytes
        self.raw += ckpt.raw_nbytes
        self.weights += sum(row.stored_bytes for row in rows)
        self.weight_elements += sum(row.raw_bytes for row in rows) // 4

    @property
    def ratio(self) -> float:
        return self.raw / self.stored if self.stored else 0.0

    @property
    def weight_bits(self) -> float:
        return 8 * self.weights / self.weight_elements if self.weight_elements else 0.0


@dataclass
class Chain:
    """One system on one training."""

    config: sp.Config
    head: sp.Checkpoint | None = None
    count: int = 0
    whole: Bytes = field(default_factory=Bytes)
    late: Bytes = field(default_factory=Bytes)
    bases: Bytes = field(default_factory=Bytes)
    restored: State | None = None
    at_once: float = 0.0
    later: float = 0.0

    def add(self, state: State, late: bool) -> None:
        """Compress the next checkpoint."""
        every = self.config.chain.base_every or 1 << 60
        is_base = self.count % every == 0
        self.head = sp.compress(state, None if is_base else self.head, self.config)
        self.count += 1
        self.whole.add(self.head)
        if is_base:
            self.bases.add(self.head)
        elif late:
            self.late.add(self.head)


@dataclass(frozen=True)
class Outcome:
    """A system on one training: ratios, bits, loss changes in percent, staleness in steps."""

    chain: float
    late: float
    base: float
    weight_bits: float
    at_once: float
    later: float
    staleness: float


def outcomes(
    workload: Workload, seed: int, systems: dict[str, sp.Config], say: Callable[[str], None]
) -> dict[str, Outcome]:
    """Train once, compress its checkpoints by every system, restore each and train on."""
    run = Run(workload, seed)
    chains = {name: Chain(config) for name, config in systems.items()}
    restart = round(workload.steps * RESTART / SPACING) * SPACING
    end = min(restart + FURTHER, workload.steps)
    exact = {}
    for step in range(SPACING, workload.steps + 1, SPACING):
        run.train(step)
        state = run.state()
        say(f"{workload.name}, seed {seed}: step {step} of {workload.steps}")
        for chain in chains.values():
            chain.add(state, step > 2 * workload.steps // 3)
            if step == restart and chain.head is not None:
                chain.restored = sp.decompress(chain.head)
        if step in (restart, end):
            exact[step] = run.held_out_loss()
    slope = (exact[restart] - exact[end]) / (end - restart)
    found = {}
    for name, chain in chains.items():
        say(f"{workload.name}, seed {seed}: {name}, restored and trained on")
        again = Run(workload, seed)
        again.restore(chain.restored or {})
        at_once = again.held_out_loss()
        again.train(end)
        later = again.held_out_loss()
        found[name] = Outcome(
            chain.whole.ratio,
            chain.late.ratio,
            chain.bases.ratio,
            chain.late.weight_bits,
            100 * (at_once / exact[restart] - 1),
            100 * (later / exact[end] - 1),
            (later - exact[end]) / slope if slope > 0 else float("nan"),
        )
    return found


def run(options: Options) -> list[Row]:
    """All rows: a few of one small model with `--quick`."""
    names = ["MLP"] if options.quick else list(workloads.WORKLOADS)
    systems = {name: make() for name, make in SYSTEMS.items() if not options.quick or name in _QUICK}
    rows: list[Row] = []
    shares = []
    for name in names:
        workload = workloads.WORKLOADS[name]()
        if options.quick:
            workload = dataclasses.replace(workload, steps=270)
        if not options.wanted(name):
            continue
        with threads(1):
            seeds = [outcomes(workload, s, systems, options.say) for s in range(1 if options.quick else SEEDS)]
        size = sum(p.numel() for p in workload.model().parameters())
        by_system = {system: [found[system] for found in seeds] for system in systems}
        rows += [row for system, found in by_system.items() for row in _rows(name, system, size, found)]
        best = _smallest(by_system, _mean(by_system[PUBLISHED], "later"), "weight_bits", least=True)
        if best:
            ours, theirs = (_mean(by_system[s], "weight_bits") for s in (best, PUBLISHED))
            shares.append(theirs / ours)
            losses = " against ".join(_text(by_system[s], "later") for s in (best, PUBLISHED))
            note = f"ours: {best}; loss later {losses} %"
            rows.append(
                _row(f"{name}: late weight deltas at no more loss", size, ours, "bits", PUBLISHED, theirs, note)
            )
        for loss, chain, late in PAIRS:
            best = _smallest(by_system, loss, "chain")
            for what, target in (("chain", chain), ("late", late)):
                rows.append(_target_row(name, size, what, loss, target, best, by_system))
    if shares and not options.quick:
        median = statistics.median(shares)
        note = "median over models of the rows above"
        rows.append(
            Row(
                "late weight deltas at no more loss",
                _DEVICE,
                0,
                median,
                "x",
                PUBLISHED,
                1.0,
                median,
                ">= 4 x",
                median >= 4,
                note,
            )
        )
    return rows


_QUICK = ("default", "rate 0.004", "inshrinkerator 32")
_DEVICE = "cpu, 1 thread"


def _mean(found: list[Outcome], what: str) -> float:
    return statistics.fmean(getattr(o, what) for o in found)


def _text(found: list[Outcome], what: str) -> str:
    """Mean and range over the seeds."""
    values = [getattr(o, what) for o in found]
    spread = f" ({min(values):+.2f} ... {max(values):+.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.2f}{spread}"


def _smallest(found: dict[str, list[Outcome]], loss: float, what: str, *, least: bool = False) -> str | None:
    """Of our own systems that lose no more than `loss` percent later, the best in `what`."""
    own = [s for s in found if s.startswith(("default", "rate")) and _mean(found[s], "later") <= loss]
    return (min if least else max)(own, key=lambda s: _mean(found[s], what), default=None)


def _row(row: str, size: int, value: float | None, unit: str, peer: str | None, other: float | None, note: str) -> Row:
    ratio = other / value if value and other else None
    return Row(row, _DEVICE, size, value, unit, peer, other, ratio, None, None, note)


def _rows(name: str, system: str, size: int, found: list[Outcome]) -> list[Row]:
    losses = (
        f"loss at once {_text(found, 'at_once')} %, later {_text(found, 'later')} %, "
        f"staleness {_mean(found, 'staleness'):+.1f} steps, {len(found)} seeds"
    )
    table = (
        ("whole state, chain with its bases", "chain", "x"),
        ("whole state, late deltas", "late", "x"),
        ("whole state, bases", "base", "x"),
        ("weights, late deltas", "weight_bits", "bits"),
        ("loss change at once", "at_once", "%"),
        ("loss change later", "later", "%"),
    )
    return [
        _row(f"{name}, {system}: {label}", size, _mean(found, what), unit, None, None, losses)
        for label, what, unit in table
    ]


def _target_row(
    name: str, size: int, what: str, loss: float, target: float, best: str | None, found: dict[str, list[Outcome]]
) -> Row:
    row = f"{name}: whole state, {'chain with its bases' if what == 'chain' else 'late deltas'}, loss <= {loss:g} %"
    if best is None:
        return Row(
            row, _DEVICE, size, None, "x", None, None, None, f">= {target:g} x", False, "no setting loses so little"
        )
    value = _mean(found[best], what)
    note = f"{best}; loss later {_text(found[best], 'later')} %, staleness {_mean(found[best], 'staleness'):+.1f} steps"
    return Row(row, _DEVICE, size, value, "x", None, None, None, f">= {target:g} x", value >= target, note)


def plot(rows: list[Row], path: Path) -> None:
    """Loss change later against the ratio of the whole chain: a curve of ours, a point for every other system."""
    from shrinkpoint.kernels.errors import BadArgumentError

    try:
        import matplotlib
    except ImportError:
        raise BadArgumentError("--plot needs Matplotlib: pip install 'shrinkpoint[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        where, _, what = row.row.partition(": ")
        name, _, system = where.partition(", ")
        if system and row.value is not None:
            points.setdefault(name, {}).setdefault(system, {})[what] = row.value
    figure, axes = pyplot.subplots(
        1, len(points), figsize=(4.6 * len(points), 4.2), layout="constrained", squeeze=False
    )
    for axis, (name, systems) in zip(axes[0], points.items(), strict=True):
        curve = []
        for system, values in systems.items():
            x, y = values["whole state, chain with its bases"], values["loss change later"]
            ours = system.startswith(("default", "rate"))
            if ours:
                curve.append((x, y))
            axis.plot(x, y, "o", color="#2a6f97" if ours else "#b5651d")
            axis.annotate(system, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
        axis.plot(*zip(*sorted(curve), strict=True), color="#2a6f97", linewidth=1)
        axis.axhline(0, color="#999999", linewidth=0.6)
        axis.set_xscale("log")
        axis.set_title(name, loc="left")
        axis.set_xlabel("times smaller, chain with its bases")
    axes[0][0].set_ylabel(f"held-out loss after {FURTHER} further steps, change in %")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
