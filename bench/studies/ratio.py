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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fsspec
import torch

import shrinkpoint as sp
from shrinkpoint.codec.config import Rule
from shrinkpoint.codec.moments.logbuckets import LogBuckets
from shrinkpoint.codec.weights.quantize import Quantize

from ..data import layers_kinds
from ..devices import threads
from ..harness import Options, Row, lacking
from . import workloads
from .curves import plot
from .faults import Size, ratio
from .lossypeers import LOSSY, floats_of, with_floats
from .outcomes import (
    FURTHER,
    Outcome,
    Pair,
    Restored,
    System,
    alone_rows,
    medians,
    missing_row,
    peer_rows,
    summary_rows,
    system_rows,
    to_json,
)
from .systems.lossless import PEERS
from .workloads import Run, State, Workload

__all__ = ["TITLE", "plot", "run"]

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


@dataclass
class Chain:
    """Chain of checkpoints of one system along one training."""

    config: sp.Config
    head: sp.Checkpoint | None = None
    sizes: list[Size] = field(default_factory=list)
    late: list[Size] = field(default_factory=list)
    """Of the deltas of the last third."""
    restored: State | None = None

    def __post_init__(self) -> None:
        self.store = sp.Store(f"memory://bench-ratio-{id(self)}", self.config)

    def add(self, step: int, state: State, late: bool, kinds: Mapping[str, Any]) -> None:
        """Save the next checkpoint."""
        self.head = self.store.save(step, state, kinds=kinds).checkpoint
        self.sizes.append(Size.of(self.head))
        self.late += self.sizes[-1:] if late and self.head.is_delta else []

    def close(self) -> None:
        """Free the memory of the chain's files."""
        fsspec.filesystem("memory").rm(self.store.url, recursive=True)

    def outcome(self, found: Restored) -> Outcome:
        """Return the outcome, given the losses of its restored state."""
        bases = [size for size in self.sizes if not size.is_delta]
        chain, late, base = (ratio(sizes) for sizes in (self.sizes, self.late, bases))
        return Outcome(chain, late, base, 32 / ratio(self.late, "weights"), found.at_once, found.later, found.staleness)


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
        base = sp.compress(self.state, cfg=config)
        delta = sp.compress(self.state, sp.compress(self.before, cfg=config), config)
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
    chains = {name: Chain(config) for name, config in systems.items()}
    for step in range(SPACING, workload.steps + 1, SPACING):
        run.train(step)
        state, kinds = run.state(), sp.kinds(run.model, run.optimizer)
        say(f"{workload.name}, seed {seed}: step {step} of {workload.steps}")
        for chain in chains.values():
            chain.add(step, state, step > 2 * workload.steps // 3, kinds)
            if step == training.restart and chain.head is not None:
                chain.restored = sp.decompress(chain.head)
        if step == training.restart - SPACING:
            training.before = state
        if step == training.restart:
            training.state = state
        if step in (training.restart, training.end):
            training.exact[step] = run.held_out_loss()
    for name, chain in chains.items():
        say(f"{workload.name}, seed {seed}: {name}, restored and trained on")
        chain.close()
        training.systems[name] = chain.outcome(training.resumed(chain.restored or {}, ratio(chain.sizes)))
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
