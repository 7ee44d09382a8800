"""`python -m bench ratio`: bytes against loss, on chains of checkpoints of real trainings.

A training is run once; every 10 steps its state goes into the chain of each system (a base every 20 checkpoints). At
7/9 of the schedule the systems are restored: held-out loss at once, and after up to 200 further steps, against the
training that was never interrupted, on the same batches and the same held-out set. *Staleness* is the second
difference in steps of the uninterrupted training: how long it would take to make it good. *Late* is the last third.

Weights are compared with the published pipeline's beside equal moments ("weights, ..."), and coded alone, with no
parent ("alone, ..."). Other libraries code the checkpoints at the restart, 10 steps apart, of the first seed.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shrinkpoint as sp
from shrinkpoint.codec.config import Rule
from shrinkpoint.codec.quantize import Quantize

from . import workloads
from .devices import threads
from .harness import Options, Row
from .lossypeers import LOSSY, floats_of, with_floats
from .systems.lossless import PEERS
from .workloads import Run, State, Workload

TITLE = "bytes against held-out loss, on chains of checkpoints of real trainings"
SPACING, RESTART, FURTHER = 10, 7 / 9, 200


def _weights(rate: float, bins: int = 24) -> sp.Config:
    """Our weights beside the moments of the published pipeline, which the paper is silent on."""
    weights = Rule("weight", Quantize(bins=bins))
    return sp.Config(rules=[weights, *sp.presets.inshrinkerator().rules], rate=rate)


SYSTEMS: dict[str, Callable[[], sp.Config]] = {
    "default": sp.Config,
    "rate 0.001": lambda: sp.Config(rate=0.001),
    "rate 0.002": lambda: sp.Config(rate=0.002),
    "rate 0.004": lambda: sp.Config(rate=0.004),
    "rate 0.01": lambda: sp.Config(rate=0.01),
    "weights, rate 0": lambda: _weights(0.0),
    "weights, rate 0.001": lambda: _weights(0.001),
    "weights, rate 0.0003, 48 bins": lambda: _weights(0.0003, 48),
    "weights, rate 0.004": lambda: _weights(0.004),
    "inshrinkerator 16": lambda: sp.presets.inshrinkerator(16),
    "inshrinkerator 32": lambda: sp.presets.inshrinkerator(32),
    "lossless": sp.presets.lossless,
}
PUBLISHED = ("inshrinkerator 16", "inshrinkerator 32")
"""The preset's own bins, and twice as many."""
ALONE = (8, 10, 12, 16, 24)
"""Bins at which weights are coded alone."""
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


@dataclass(frozen=True)
class Alone:
    """Something stored by itself or beside its parent: ratios, loss changes in percent."""

    single: float
    delta: float
    at_once: float = 0.0
    later: float = 0.0


@dataclass
class Training:
    """One training: the exact states before and at the restart, exact losses there and at the end, what systems did."""

    workload: Workload
    seed: int
    before: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    exact: dict[int, float] = field(default_factory=dict)
    systems: dict[str, Outcome] = field(default_factory=dict)

    @property
    def restart(self) -> int:
        """The step from which all go on."""
        return round(self.workload.steps * RESTART / SPACING) * SPACING

    @property
    def end(self) -> int:
        """The step up to which they go on."""
        return min(self.restart + FURTHER, self.workload.steps)

    def resumed(self, state: State, *, further: bool = True) -> tuple[float, float]:
        """Loss changes in percent of going on with another state, at once and, if wanted, at the end."""
        again = Run(self.workload, self.seed)
        again.restore(state)
        at_once = 100 * (again.held_out_loss() / self.exact[self.restart] - 1)
        if not further:
            return at_once, float("nan")
        again.train(self.end)
        return at_once, 100 * (again.held_out_loss() / self.exact[self.end] - 1)

    def alone(self, bins: int) -> Alone:
        """The weights coded without a parent."""
        ckpt = sp.compress({"model": self.state["model"]}, cfg=sp.Config(rules=[("weight", Quantize(bins=bins))]))
        at_once, _ = self.resumed({**self.state, **sp.decompress(ckpt)}, further=False)
        return Alone(ckpt.ratio, float("nan"), at_once)

    def ours(self, config: sp.Config) -> Alone:
        """A configuration on the two states alone, as other libraries have them."""
        base = sp.compress(self.before, cfg=config)
        ckpt = sp.compress(self.state, base, config)
        return Alone(base.ratio, ckpt.ratio, *self.resumed(sp.decompress(ckpt)))

    def lossless_peer(self, name: str) -> Alone:
        """Another library on the two states, to the bit."""
        before, state = floats_of(self.before), floats_of(self.state)
        raw = sum(4 * x.numel() for x in state.values())
        return Alone(raw / PEERS[name](state, None), raw / PEERS[name](state, before))

    def lossy_peer(self, name: str) -> Alone:
        """Another library on the two states, and its loss; the second against what came back of the first."""
        before, state = floats_of(self.before), floats_of(self.state)
        raw = sum(4 * x.numel() for x in state.values())
        size, restored = LOSSY[name](before, None)
        later_size, found = LOSSY[name](state, restored)
        return Alone(raw / size, raw / later_size, *self.resumed(with_floats(self.state, found)))


def trained(workload: Workload, seed: int, systems: dict[str, sp.Config], say: Callable[[str], None]) -> Training:
    """Train once, compress its checkpoints by every system, restore each and train on."""
    run, told = Run(workload, seed), Training(workload, seed)
    chains = {name: Chain(config) for name, config in systems.items()}
    for step in range(SPACING, workload.steps + 1, SPACING):
        run.train(step)
        state = run.state()
        say(f"{workload.name}, seed {seed}: step {step} of {workload.steps}")
        for chain in chains.values():
            chain.add(state, step > 2 * workload.steps // 3)
            if step == told.restart and chain.head is not None:
                chain.restored = sp.decompress(chain.head)
        if step == told.restart - SPACING:
            told.before = state
        if step == told.restart:
            told.state = state
        if step in (told.restart, told.end):
            told.exact[step] = run.held_out_loss()
    slope = (told.exact[told.restart] / told.exact[told.end] - 1) / (told.end - told.restart)
    for name, chain in chains.items():
        say(f"{workload.name}, seed {seed}: {name}, restored and trained on")
        at_once, later = told.resumed(chain.restored or {})
        told.systems[name] = Outcome(
            chain.whole.ratio,
            chain.late.ratio,
            chain.bases.ratio,
            chain.late.weight_bits,
            at_once,
            later,
            later / 100 / slope if slope > 0 else float("nan"),
        )
    return told


def run(options: Options) -> list[Row]:
    """All rows: a few of one small model with `--quick`."""
    names = ["MLP"] if options.quick else list(workloads.WORKLOADS)
    systems = {name: make() for name, make in SYSTEMS.items() if not options.quick or name in _QUICK}
    rows: list[Row] = []
    for name in names:
        workload = workloads.WORKLOADS[name]()
        if options.quick:
            workload = dataclasses.replace(workload, steps=270)
        if not options.wanted(name):
            continue
        with threads(1):
            seeds = [trained(workload, s, systems, options.say) for s in range(1 if options.quick else SEEDS)]
            size = sum(p.numel() for p in workload.model().parameters())
            by_system = {system: [t.systems[system] for t in seeds] for system in systems}
            rows += [row for system, found in by_system.items() for row in _rows(name, system, size, found)]
            rows += _alone_rows(
                name, size, {b: [t.alone(b) for t in seeds] for b in ALONE[:: 4 if options.quick else 1]}
            )
            if not options.quick:
                rows += _peer_rows(name, size, seeds[0], options.say)
        for published in (p for p in PUBLISHED if p in by_system):
            rows.append(_weights_row(name, size, by_system, published))
        for loss, chain, late in PAIRS:
            best = _smallest(_own(by_system, loss), "chain")
            for what, target in (("chain", chain), ("late", late)):
                rows.append(_target_row(name, size, what, loss, target, best, by_system))
    return rows if options.quick or options.only else rows + medians(rows)


_EQUAL = "late weight deltas at no more loss than"


def medians(rows: Sequence[Row]) -> list[Row]:
    """How many times smaller our weights are than the published pipeline's at no more loss: medians over the models.

    Args:
        rows: of all models, from one run or several.
    """
    found = []
    for published in PUBLISHED:
        shares = [row.ratio for row in rows if row.row.endswith(f": {_EQUAL} {published}")]
        if shares:
            known = [share for share in shares if share is not None]
            # Where ours loses more whatever its setting, it is not smaller at equal loss: such a chain counts as 0.
            median = statistics.median(share or 0.0 for share in shares)
            note = f"median over {len(shares)} chains, {len(known)} of them with a setting that loses no more"
            name = f"{_EQUAL} {published}"
            found.append(Row(name, _DEVICE, 0, median, "x", published, 1.0, median, ">= 4 x", median >= 4, note))
    return found


_QUICK = ("default", "rate 0.004", "inshrinkerator 32")
_DEVICE = "cpu, 1 thread"


def _mean(found: list[Outcome], what: str) -> float:
    return statistics.fmean(getattr(o, what) for o in found)


def _text(found: list[Outcome], what: str) -> str:
    """Mean and range over the seeds."""
    values = [getattr(o, what) for o in found]
    spread = f" ({min(values):+.2f} ... {max(values):+.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.2f}{spread}"


def _own(found: dict[str, list[Outcome]], loss: float) -> dict[str, list[Outcome]]:
    """Our own settings for whole states that lose no more than `loss` percent later."""
    return {s: o for s, o in found.items() if s.startswith(("default", "rate")) and _mean(o, "later") <= loss}


def _weights_row(name: str, size: int, found: dict[str, list[Outcome]], published: str) -> Row:
    """Our smallest weights that lose no more than the published pipeline's, and how many times smaller they are."""
    row = f"{name}: {_EQUAL} {published}"
    theirs = _mean(found[published], "weight_bits")
    best = _smallest(_no_worse(found, published), "weight_bits", least=True)
    if best is None:
        note = f"no setting loses as little as {_text(found[published], 'later')} %"
        return _row(row, size, None, "bits", published, theirs, note)
    ours = _mean(found[best], "weight_bits")
    above = _difference(found[best], found[published])
    note = f"ours: {best}; loss later above the published one's by {above} points"
    return _row(row, size, ours, "bits", published, theirs, note)


def _no_worse(found: dict[str, list[Outcome]], published: str) -> dict[str, list[Outcome]]:
    """Our settings for weights whose mean loss later is no larger than the published pipeline's."""
    least = _mean(found[published], "later")
    return {s: o for s, o in found.items() if s.startswith("weights") and _mean(o, "later") <= least}


def _steps(own: list[Outcome], other: list[Outcome]) -> list[float]:
    return [a.later - b.later for a, b in zip(own, other, strict=True)]


def _error(values: list[float]) -> float:
    """Standard error of a mean."""
    return float(statistics.stdev(values) / len(values) ** 0.5)


def _difference(own: list[Outcome], other: list[Outcome]) -> str:
    steps = _steps(own, other)
    return f"{statistics.fmean(steps):+.2f}" + (f" +- {_error(steps):.2f}" if len(steps) > 1 else "")


def _smallest(found: dict[str, list[Outcome]], what: str, *, least: bool = False) -> str | None:
    """The best in `what`."""
    return (min if least else max)(found, key=lambda s: _mean(found[s], what), default=None)


def _alone_rows(name: str, size: int, found: dict[int, list[Alone]]) -> list[Row]:
    """Weights without a parent, at some numbers of bins, and the smallest that loses no more than a percent."""
    rows = []
    best: tuple[float, int, str] | None = None
    for bins, outcomes in found.items():
        ratio, loss = (statistics.fmean(getattr(o, what) for o in outcomes) for what in ("single", "at_once"))
        spread = f"{min(o.at_once for o in outcomes):+.2f} ... {max(o.at_once for o in outcomes):+.2f}"
        note = f"loss at once {loss:+.2f} ({spread}) %, {len(outcomes)} seeds"
        rows.append(_row(f"{name}, alone, {bins} bins: weights", size, ratio, "x", None, None, note))
        if loss <= 1 and (best is None or ratio > best[0]):
            best = ratio, bins, note
    value = None if best is None else best[0]
    note = "no setting loses so little" if best is None else f"{best[1]} bins, {best[2]}"
    what = f"{name}: weights alone, no parent, loss <= 1 %"
    return [*rows, Row(what, _DEVICE, size, value, "x", None, None, None, ">= 10 x", bool(value and value >= 10), note)]


def _peer_rows(name: str, size: int, told: Training, say: Callable[[str], None]) -> list[Row]:
    """Our lossless preset beside other lossless libraries, our default beside lossy ones, on the same two states."""
    rows = []
    for config, peers, measure in (
        (sp.presets.lossless(), PEERS, told.lossless_peer),
        (sp.Config(), LOSSY, told.lossy_peer),
    ):
        say(f"{name}: other libraries")
        ours = told.ours(config)
        for peer in peers:
            try:
                theirs = measure(peer)
            except ImportError as error:
                row = f"{name}, against {peer}: whole state"
                note = f"not measured: {error.name or error} is not installed"
                rows.append(Row(row, _DEVICE, size, None, "x", peer, None, None, ">= 1 x", None, note))
                continue
            losses = (
                f"ours loses {ours.at_once:+.2f} % at once, {ours.later:+.2f} % later; "
                f"theirs {theirs.at_once:+.2f} %, {theirs.later:+.2f} %"
            )
            for what in ("single", "delta"):
                own, other = getattr(ours, what), getattr(theirs, what)
                row = f"{name}, against {peer}: whole state, {'no parent' if what == 'single' else '10 steps apart'}"
                # Noise: a larger loss counts from a tenth of a percent on. A restore that ruins the training has none.
                met = own >= other and not theirs.later + 0.1 < ours.later
                rows.append(Row(row, _DEVICE, size, own, "x", peer, other, own / other, ">= 1 x", met, losses))
    return rows


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
    across = min(2, len(points))
    down = -(-len(points) // across)
    figure, axes = pyplot.subplots(
        down, across, figsize=(5.2 * across, 3.6 * down), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(points) :]:
        axis.remove()
    for axis, (name, systems) in zip(axes.flat, points.items(), strict=False):
        curve = []
        for number, (system, values) in enumerate(systems.items()):
            if "loss change later" not in values or system.startswith("weights"):
                continue
            x, y = values["whole state, chain with its bases"], values["loss change later"]
            ours = system.startswith(("default", "rate"))
            if ours:
                curve.append((x, y))
            axis.plot(x, y, "o", color="#2a6f97" if ours else "#b5651d")
            # Those of one preset lie near each other: one above, one below.
            lift = -3 if ours else 3 if number % 2 else -8
            axis.annotate(system, (x, y), textcoords="offset points", xytext=(6, lift), fontsize=7)
        axis.plot(*zip(*sorted(curve), strict=True), color="#2a6f97", linewidth=1)
        axis.axhline(0, color="#999999", linewidth=0.6)
        axis.set_xscale("log")
        axis.set_xlim(1, 400)
        axis.set_title(name, loc="left")
    figure.supxlabel("times smaller, chain with its bases", fontsize=10)
    figure.supylabel(f"held-out loss after {FURTHER} further steps, change in %", fontsize=10)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
