"""`python -m bench ratio`: bytes against loss, on chains of checkpoints of real trainings.

A training is run once; every 10 steps its state goes into the chain of each system (a base every 20 checkpoints, or as
a published preset has it). At 7/9 of the schedule the systems are restored: held-out loss at once, and after up to 200
further steps, against the training that was never interrupted, on the same batches and the same held-out set.
*Staleness* is the second difference in steps of the uninterrupted training: how long it would take to make it good.
*Late* is the last third.

Weights are compared with the published pipeline's next to equal moments ("weights, ..."), and coded alone, with no
parent ("alone, ..."). Other libraries code the checkpoint at the restart, alone and over the one 10 steps before: bit
for bit on the first seed, with a loss on all of them. Rows are made in `outcomes.py`; `merge.py` puts those
of some systems into a result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shrinkpoint as sp
from shrinkpoint.codec.config import Rule
from shrinkpoint.codec.moments.logbuckets import LogBuckets
from shrinkpoint.codec.weights.quantize import Quantize

from ..data import layers_kinds
from ..harness import Options, Row, lacking, threads
from ..plot import pyplot
from . import workloads
from .faults import InStore, Size, ratio
from .outcomes import (
    CASES,
    FURTHER,
    RUINED,
    Outcome,
    Pair,
    Restored,
    System,
    alone_rows,
    lost_later,
    medians,
    missing_row,
    peer_rows,
    setting_of,
    summary_rows,
    system_rows,
    to_json,
)
from .systems.others import LOSSY, PEERS, floats_of, with_floats
from .workloads import Run, State, Workload

TITLE = "bytes against held-out loss, on chains of checkpoints of real trainings"
SPACING, RESTART = 10, 7 / 9


def _coarse(rate: float, bins: int) -> sp.Config:
    return sp.Config(rules=[("weight", Quantize(bins=bins))], rate=rate)


def _weights(rate: float, bins: int = 24) -> sp.Config:
    """Return our weights with moments as near to the published pipeline's as possible."""
    weights = Rule("weight", Quantize(bins=bins))
    return sp.Config(rules=[weights, *sp.presets.inshrinkerator().rules], rate=rate, ahead=False)


SYSTEMS: dict[str, Callable[[], sp.Config]] = {
    "default": sp.Config,
    **{f"rate {rate:g}": partial(sp.Config, rate=rate) for rate in (0.0005, 0.002, 0.004)},
    **{f"rate {rate:g}, {n} bins": partial(_coarse, rate, n) for rate, n in ((0.0005, 16), (0.001, 12), (0.004, 12))},
    **{
        f"weights, rate {rate:g}" + (f", {n} bins" if n != 24 else ""): partial(_weights, rate, n)
        for rate, n in ((0.0, 24), (0.0, 16), (0.0, 10), (0.0003, 16), (0.0003, 48), (0.001, 24), (0.001, 12))
    },
    **{f"inshrinkerator {n}": partial(sp.presets.inshrinkerator, n) for n in (16, 32)},
    "lc_checkpoint": sp.presets.lc_checkpoint,
    "check_n_run": sp.presets.check_n_run,
    "bitsnap": sp.presets.bitsnap,
    "lossless": sp.presets.lossless,
}


def _fine(bins: int, **moments: LogBuckets) -> sp.Config:
    """More bins than the default has, and moments to a relative error of each element."""
    kinds = [(f"{name} moment", codec) for name, codec in moments.items()]
    return sp.Config(rules=[("weight", Quantize(bins=bins)), *kinds])


BESIDE_LOSSY: dict[str, Callable[[], sp.Config]] = {
    "default": sp.Config,
    "fine": lambda: _fine(128, second=LogBuckets(alpha=1 / 4)),
    "finer": lambda: _fine(128, first=LogBuckets(alpha=1 / 8), second=LogBuckets(alpha=1 / 8)),
    "finest": lambda: _fine(254, first=LogBuckets(alpha=1 / 16), second=LogBuckets(alpha=1 / 16)),
    "lossless": sp.presets.lossless,
}
"""Our settings next to libraries that lose something: the smallest that loses no more than such a library counts."""
ALONE = (8, 10, 12, 16, 24)
"""Bins at which weights are coded alone."""
SEEDS = 3
"""Trainings of each model."""
PARTS = ("alone", "peers")
"""What else than systems there is to measure."""
_QUICK = ("default", "rate 0.004", "inshrinkerator 32")


def _outcome(sizes: Sequence[Size], late: Sequence[Size], found: Restored) -> Outcome:
    """Return the outcome of a chain by its sizes and the losses of its restored state."""
    deltas, bases = [size for size in late if size.is_delta], [size for size in sizes if not size.is_delta]
    chain, last, base = (ratio(some) for some in (sizes, deltas, bases))
    return Outcome(chain, last, base, 32 / ratio(deltas, "weights"), found.at_once, found.later, found.staleness)


@dataclass
class Training:
    """A training: exact states and losses around the restart, and results of the systems."""

    workload: Workload
    seed: int
    before: State = field(default_factory=dict)
    state: State = field(default_factory=dict)
    exact: dict[int, float] = field(default_factory=dict)
    systems: dict[str, Outcome] = field(default_factory=dict)

    @property
    def restart(self) -> int:
        """Step from which all restored trainings continue."""
        return round(self.workload.steps * RESTART / SPACING) * SPACING

    @property
    def end(self) -> int:
        """Last step of the continued trainings."""
        return min(self.restart + FURTHER, self.workload.steps)

    def resumed(self, state: State, ratio: float) -> Restored:
        """Train on from a restored state, and return its loss changes."""
        again = Run(self.workload, self.seed)
        again.restore(state)
        at_once = 100 * (again.held_out_loss() / self.exact[self.restart] - 1)
        again.train(self.end)
        later = 100 * (again.held_out_loss() / self.exact[self.end] - 1)
        slope = (self.exact[self.restart] / self.exact[self.end] - 1) / (self.end - self.restart)
        return Restored(ratio, at_once, later, later / 100 / slope if slope > 0 else float("nan"))

    def judged(self, state: State, ratio: float) -> Restored:
        """Like `resumed`, but without training for a state that was restored exactly."""
        return Restored(ratio, 0.0, 0.0, 0.0) if same_bits(state, self.state) else self.resumed(state, ratio)

    def alone(self, bins: int) -> Restored:
        """Code the weights without a parent and the rest exactly, then resume."""
        weights = self.state["model"]
        ckpt = sp.compress({"model": weights}, cfg=_coarse(0.0, bins), kinds=layers_kinds(weights))
        return self.judged({**self.state, **sp.decompress(ckpt)}, ckpt.ratio)

    def ours(self, config: sp.Config) -> Pair:
        """Code the two states with one of our configurations, as other libraries do."""
        kinds = Run(self.workload, self.seed).kinds()
        base = sp.compress(self.state, cfg=config, kinds=kinds)
        delta = sp.compress(self.state, sp.compress(self.before, cfg=config, kinds=kinds), config, kinds=kinds)
        return Pair(self.judged(sp.decompress(base), base.ratio), self.judged(sp.decompress(delta), delta.ratio))

    def lossless_peer(self, name: str) -> Pair:
        """Code the two states by another library, which restores every bit."""
        before, state = floats_of(self.before), floats_of(self.state)
        raw = sum(4 * x.numel() for x in state.values())
        return Pair(*(Restored(raw / PEERS[name](state, of)[0], 0.0, 0.0, 0.0) for of in (None, before)))

    def lossy_peer(self, name: str) -> Pair:
        """Restore both states by another library; its delta refers to its restored first state."""
        before, state = floats_of(self.before), floats_of(self.state)
        raw = sum(4 * x.numel() for x in state.values())
        found = [LOSSY[name](state, given) for given in (None, LOSSY[name](before, None)[1])]
        return Pair(*(self.judged(with_floats(self.state, floats), raw / size) for size, floats in found))


def same_bits(state: State, other: State) -> bool:
    """Return whether two states of equal structure are equal bit for bit."""
    pairs = zip(*(torch.utils._pytree.tree_leaves(s) for s in (state, other)), strict=True)
    return all(a.numpy().tobytes() == b.numpy().tobytes() if torch.is_tensor(a) else a == b for a, b in pairs)


def trained(workload: Workload, seed: int, systems: dict[str, sp.Config], say: Callable[[str], None]) -> Training:
    """Train once, compress its checkpoints by every system, restore each and train on."""
    run, training = Run(workload, seed), Training(workload, seed)
    chains = {name: InStore(config) for name, config in systems.items()}
    sizes: dict[str, list[Size]] = {name: [] for name in systems}
    restored: dict[str, State] = {}
    for step in range(SPACING, workload.steps + 1, SPACING):
        run.train(step)
        say(f"{workload.name}, seed {seed}: step {step} of {workload.steps}")
        for name, chain in chains.items():
            sizes[name].append(chain.save(run))
            if step == training.restart and chain.head is not None:
                restored[name] = sp.decompress(chain.head)
        if step == training.restart - SPACING:
            training.before = run.state()
        if step == training.restart:
            training.state = run.state()
        if step in (training.restart, training.end):
            training.exact[step] = run.held_out_loss()
    for name, chain in chains.items():
        say(f"{workload.name}, seed {seed}: {name}, restored and trained on")
        chain.end()
        found, late = training.resumed(restored[name], ratio(sizes[name])), 2 * workload.steps // 3 // SPACING
        training.systems[name] = _outcome(sizes[name], sizes[name][late:], found)
    return training


@dataclass
class Measured:
    """Measurements of one model: rows, and the outcomes behind them."""

    rows: list[Row] = field(default_factory=list)
    size: int = 0
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def named(self, model: str) -> dict[str, list[Outcome]]:
        """Outcomes in the form of a result's JSON."""
        return {f"{model}, {system}": found for system, found in self.outcomes.items()}


def measured(
    workload: Workload,
    systems: Collection[str],
    parts: Collection[str],
    say: Callable[[str], None],
    *,
    seeds: int = SEEDS,
    alone: Sequence[int] = ALONE,
) -> Measured:
    """Measure systems and parts of one model, each seed trained once."""
    name, found = workload.name, Measured()
    with threads(1):
        configs = {system: SYSTEMS[system]() for system in systems}
        trainings = [trained(workload, seed, configs, say) for seed in range(seeds)]
        found.size = sum(p.numel() for p in workload.model().parameters())
        found.outcomes = {system: [t.systems[system] for t in trainings] for system in configs}
        for system, outcomes in found.outcomes.items():
            found.rows += system_rows(name, system, found.size, outcomes)
        if "alone" in parts:
            say(f"{name}: weights alone")
            found.rows += alone_rows(name, found.size, {b: [t.alone(b) for t in trainings] for b in alone})
        if "peers" in parts:
            found.rows += _peer_rows(name, found.size, trainings, say)
    return found


def _peer_rows(name: str, size: int, trainings: list[Training], say: Callable[[str], None]) -> list[Row]:
    """Compare our presets with lossless and lossy libraries on the same two states."""
    rows = []
    measures: tuple[tuple[Collection[str], Collection[str], Callable[[Training, str], Pair], list[Training]], ...] = (
        (["lossless"], PEERS, Training.lossless_peer, trainings[:1]),
        (BESIDE_LOSSY, LOSSY, Training.lossy_peer, trainings),
    )
    for settings, peers, measure, seeds in measures:
        ours = {setting: [t.ours(BESIDE_LOSSY[setting]()) for t in seeds] for setting in settings}
        for peer in peers:
            say(f"{name}: {peer}")
            try:
                theirs = [measure(t, peer) for t in seeds]
            except ImportError as error:
                rows.append(missing_row(name, size, peer, lacking(error.name or str(error))))
                continue
            rows += peer_rows(name, size, peer, ours, theirs)
    return rows


def run(options: Options) -> list[Row]:
    """Return all rows; with `--quick` a few of one small model.

    `--only "GPT rate 0.0005,GPT peers"` measures a system and the other libraries, to be merged into a result.
    """
    rows: list[Row] = []
    for name, make in workloads.WORKLOADS.items():
        if options.quick and name != "MLP":
            continue
        systems, parts = (
            [one for one in names if options.wanted(f"{name} {one}".replace(",", ""))]
            for names in ((_QUICK, ["alone"]) if options.quick else (SYSTEMS, PARTS))
        )
        if not systems and not parts:
            continue
        workload, seeds = make(), 1 if options.quick else SEEDS
        if options.quick:
            workload = dataclasses.replace(workload, steps=270)
        alone = ALONE[::4] if options.quick else ALONE
        found = measured(workload, systems, parts, options.say, seeds=seeds, alone=alone)
        options.seeds.update(range(seeds))
        compared = summary_rows(name, found.size, {s: System.of(o) for s, o in found.outcomes.items()})
        rows += options.done([*found.rows, *(compared if "default" in systems else [])])
        options.kept.setdefault("outcomes", {}).update(to_json(found.named(name)))
    return rows if options.quick or options.only else rows + medians(rows)


# -------------------------------------------------------------------------------------------------------- the picture

OURS, PRESET, LIBRARY = "#2a6f97", "#b5651d", "#6b7f3f"
APART = CASES[1]
Point = tuple[str, float, float | None]


@dataclass
class Panel:
    """Points of one model: (name, ratio, later loss or None for a ruined training).

    Args:
        curve: of the settings that differ in the rate alone, by ratio.
        others: further settings of ours.
        presets: published systems.
        libraries: one delta 10 steps apart.
        own: the same delta by our settings that were held against them.
        exact: libraries that lose nothing, and the ratio of that delta.
    """

    curve: list[Point] = field(default_factory=list)
    others: list[Point] = field(default_factory=list)
    presets: list[Point] = field(default_factory=list)
    libraries: list[Point] = field(default_factory=list)
    own: dict[str, tuple[float, float]] = field(default_factory=dict)
    exact: list[tuple[str, float]] = field(default_factory=list)


def panels(rows: Sequence[Row]) -> dict[str, Panel]:
    """Return the points to draw by model, from the rows of `bench ratio`."""
    found: dict[str, Panel] = {}
    points: dict[str, dict[str, dict[str, float | None]]] = {}
    for row in rows:
        where, _, what = row.row.partition(": ")
        model, _, system = where.partition(", ")
        if system.startswith("against ") and row.peer is not None:
            _library(found.setdefault(model, Panel()), row)
        elif system and not system.startswith(("weights", "alone")):
            points.setdefault(model, {}).setdefault(system, {})[what] = row.value
    for model, systems in points.items():
        panel = found.setdefault(model, Panel())
        for system, values in systems.items():
            times = values.get(_CHAIN)
            if times is None or _LATER not in values:
                continue
            point = system, times, values[_LATER]
            own = system.startswith(("default", "rate"))
            (panel.presets if not own else panel.others if "," in system else panel.curve).append(point)
        panel.curve.sort(key=lambda one: one[1])
    return {model: found[model] for model in points}


_CHAIN, _LATER = "whole state, chain with its bases", "loss change later"


def _library(panel: Panel, row: Row) -> None:
    if not row.row.endswith(APART) or row.value is None or row.peer_value is None:
        return
    ours, theirs = lost_later(row.note)
    setting = setting_of(row.note)
    if setting == "lossless" and theirs == "+0.00":
        panel.exact.append((str(row.peer), row.peer_value))
        return
    panel.own[setting] = row.value, float(ours)
    panel.libraries.append((str(row.peer), row.peer_value, None if theirs == RUINED else float(theirs)))


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the later change of loss against the ratio.

    Filled: the chain with its bases, a curve of ours over the rate. Hollow: one delta 10 steps apart, ours and those of
    other libraries. A triangle at the edge: a loss beyond the axis, or a ruined training.
    """
    matplotlib = pyplot()
    found = panels(rows)
    across = min(2, len(found))
    down = -(-len(found) // across)
    figure, axes = matplotlib.subplots(
        down, across, figsize=(6.8 * across, 4.6 * down), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(found) :]:
        axis.remove()
    for axis, (name, panel) in zip(axes.flat, found.items(), strict=False):
        axis.set_xscale("log")
        axis.set_xlim(1, 1500)
        axis.set_xticks([1, 10, 100, 1000], ["1 x", "10 x", "100 x", "1,000 x"])
        axis.axhline(0, color="#999999", linewidth=0.6)
        axis.set_title(name, loc="left")
        _draw(axis, panel)
    handles, titles = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, titles, loc="outside upper right", fontsize=8, ncols=len(handles), frameon=False)
    figure.supxlabel("times smaller", fontsize=10)
    figure.supylabel(f"held-out loss after {FURTHER} further steps, change in %", fontsize=10)
    figure.savefig(path, dpi=120)
    matplotlib.close(figure)


def reach(ours: Sequence[Point], others: Sequence[Point] = ()) -> float:
    """Upper end of the axis of losses, a little beyond the points that must be shown.

    These are all points of ours, and those of others that lose at most twice as much as ours, or 0.2 %.
    """
    most = max([0.2, *(2 * abs(y) for _, _, y in ours if y is not None)])
    return 1.15 * max([0.05, *(abs(y) for _, _, y in (*ours, *others) if y is not None and abs(y) <= most)])


def placed(name: str, x: float, y: float | None, most: float) -> tuple[str, float, str]:
    """Return label, height and marker of a point; beyond `most` it stands at the edge."""
    if y is None:
        return f"{name}: {RUINED}", most, "^"
    if abs(y) > most:
        return f"{name}: {y:+.2f} %", math.copysign(most, y), "^" if y > 0 else "v"
    return name, y, ""


_KINDS = {
    "curve": ("Config(rate=...), chain", OURS, "o", "full"),
    "others": ("the same, other bins", OURS, "s", "full"),
    "presets": ("published preset, chain", PRESET, "o", "full"),
    "own": ("ours, one delta", OURS, "o", "none"),
    "libraries": ("other library, one delta", LIBRARY, "D", "none"),
}
"""Label, color, marker and filling of the points of a panel."""


def _draw(axis: Any, panel: Panel) -> None:
    most = reach([*panel.curve, *panel.others], [*panel.presets, *panel.libraries])
    points: dict[str, Sequence[Point]] = {kind: getattr(panel, kind) for kind in _KINDS if kind != "own"}
    points["own"] = [(f"{setting}, one delta", *point) for setting, point in panel.own.items()]
    labels = []
    for kind, (title, color, marker, style) in _KINDS.items():
        axis.plot([], [], marker, color=color, fillstyle=style, markersize=5, label=title)
        for name, x, loss in points[kind]:
            label, y, edge = placed(name, x, loss, most)
            axis.plot(x, y, edge or marker, color=color, fillstyle=style, markersize=5)
            labels.append((label, x, y, color))
    drawn = [(x, y) for _, x, y in panel.curve if y is not None]
    axis.plot([x for x, _ in drawn], [y for _, y in drawn], color=OURS, linewidth=1)
    axis.plot([x for _, x in panel.exact], [0.0 for _ in panel.exact], "D", color=LIBRARY, fillstyle="none")
    heights = [0.0, *(y for _, _, y, _ in labels)]
    room = max(heights) - min(heights)
    axis.set_ylim(min(heights) - 0.5 * room, max(heights) + 0.2 * room)
    if panel.exact:
        names = "\n".join(f"{label} {x:.2f} x" for label, x in sorted(panel.exact, key=lambda one: one[1]))
        corner = {"xycoords": "axes fraction", "fontsize": 6.5, "color": LIBRARY, "va": "bottom"}
        axis.annotate(f"exact, one delta:\n{names}", (0.01, 0.015), **corner)
    _write(axis, labels)


def _write(axis: Any, labels: Sequence[tuple[str, float, float, str]]) -> None:
    """Put each label to the right of its point, above the labels below that it would hide."""
    axis.figure.canvas.draw()
    scale = axis.figure.dpi / 72
    taken: list[tuple[float, float, float]] = []
    for label, x, y, color in sorted(labels, key=lambda one: one[2]):
        left, height = axis.transData.transform((x, y)) / scale
        right, low = left + 7 + 4.2 * len(label), height - 3
        low = max([low, *(top for start, end, top in taken if start < right and left < end and top < height + 40)])
        taken.append((left, right, low + 8))
        place = {"textcoords": "offset points", "xytext": (7, low - height), "fontsize": 7, "color": color}
        arrow = {"arrowstyle": "-", "color": color, "linewidth": 0.4} if low - height > 8 else None
        axis.annotate(label, (x, y), **place, arrowprops=arrow)
