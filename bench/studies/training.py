"""The bench `training`: losses of trainings that are killed and restored compressed, and of fine-tunings.

Inshrinkerator's table 5 (here, over `faults.py`): small models are killed ten times and end by accuracy and loss; its
section 9.2 (`transfer.py`): a compressed model is fine-tuned. The five levels have a bench of their own, `harm`.
`--only "table 5 MLP 900 steps"` takes one training (without commas), `--only "transfer CNN"` one model.

The paper searches for a configuration before every checkpoint and gives the change of the final *accuracy* (of the loss
for its GPT-2). Here each system ends with both. "Fixed" systems keep one configuration; those "searched at each
checkpoint" take the smallest that passes a threshold of the loss or of the accuracy on a part of the held-out set, with
the search spaces of the paper's tables 9 to 11. Every system has a base every 20 checkpoints.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import shrinkpoint as sp
from shrinkpoint.searching.cube import Cube

from ..harness import ONE_THREAD, Options, Row, threads
from . import transfer, workloads
from .baselines.quantizers import Ladder, adaptive_ladder, uniform_ladder
from .faults import End, InStore, Outcome, Peer, Reshuffled, Searching, Size, System, Trainings, of_seeds, quality
from .workloads import Run, Workload

TITLE = "accuracy, loss and ratio of trainings that are killed and restored; transfer"


OWN_CUBE = Cube(
    bins=(8, 12, 16, 24, 32, 64, 128),
    prune=(0.0,),
    metric=("magnitude",),
    protect=(0.0005,),
    rate=(0.0, 0.0005, 0.001, 0.002, 0.004),
)
"""The space of the default: its coder over bins and rates."""
PAPER_CUBE = Cube(system="inshrinkerator")

PREFIX = "table 5, "
FAILURES = 10
BASE_EVERY = 20
THRESHOLDS = (0.01, 0.05)
BY = ("loss", "accuracy")
OTHER_BATCHES = "no compression, other batches"

Make = Callable[["Study"], System]


class SearchedPeer(Peer):
    """A baseline whose configuration is searched for at each checkpoint.

    A choice is never more aggressive than the one before.

    Args:
        ladder: its configurations.
        threshold: degradation a checkpoint may have, relative.
        by: "loss" or "accuracy".
        batches: of the held-out set, for the search.
    """

    def __init__(self, ladder: Ladder, threshold: float, by: str, batches: int) -> None:
        super().__init__(None, BASE_EVERY)
        self.ladder, self.threshold, self.by, self.batches = ladder, threshold, by, batches
        self.floor: tuple[float, ...] = ()
        self.evaluations = self.unmet = 0

    def save(self, run: Run) -> Size:
        """Search, then store with the choice."""
        state = run.state()
        evaluate = quality(run, self.batches, self.by)
        exact, sign = evaluate(state), -1 if self.by == "accuracy" else 1
        previous = None if len(self.chain) == self.base_every else self.previous
        self.evaluations += 1
        for place, baseline in self.ladder(state):
            if place < self.floor:
                continue
            self.baseline = baseline
            restored = baseline.decode(baseline.encode(state, previous), previous)
            self.evaluations += 1
            if sign * (evaluate(restored) / exact - 1) <= self.threshold:
                self.floor = place
                break
        else:
            self.unmet += 1
        return super().save(run)


def _fixed(config: Callable[[], sp.Config], *, grads: bool = False) -> Make:
    return lambda study: InStore(config(), grads=grads, spacing=study.spacing)


def _searched(config: Callable[[], sp.Config], threshold: float, by: str) -> Make:
    cube, grads = (PAPER_CUBE, True) if config is sp.presets.inshrinkerator else (OWN_CUBE, False)

    def make(study: Study) -> System:
        searching = Searching(threshold, cube, study.batches, by)
        return InStore(config(), grads=grads, spacing=study.spacing, searching=searching)

    return make


def _searched_peer(ladder: Ladder, threshold: float, by: str) -> Make:
    return lambda study: SearchedPeer(ladder, threshold, by, study.batches)


def _name(system: str, threshold: float, by: str) -> str:
    return f"{system}, searched at each checkpoint for {100 * threshold:g} % of the {by}"


_SEARCHED = list(itertools.product(BY, THRESHOLDS))
_LADDERS = (("Adaptive", adaptive_ladder), ("Uniform", uniform_ladder))
SYSTEMS: dict[str, Make] = {
    "Inshrinkerator, fixed, 16 bins": _fixed(sp.presets.inshrinkerator, grads=True),
    "Inshrinkerator, fixed, 32 bins": _fixed(lambda: sp.presets.inshrinkerator(32), grads=True),
    **{_name("Inshrinkerator", t, by): _searched(sp.presets.inshrinkerator, t, by) for by, t in _SEARCHED},
    "Config(), fixed": _fixed(sp.Config),
    **{_name("Config()", t, by): _searched(sp.Config, t, by) for by, t in _SEARCHED},
    **{_name(n, 0.05, by): _searched_peer(ladder, 0.05, by) for n, ladder in _LADDERS for by in BY},
    OTHER_BATCHES: lambda _: Reshuffled(),
}


@dataclass(frozen=True)
class Study:
    """A training of the table.

    Args:
        make: the workload.
        steps: of its schedule.
        spacing: steps from one checkpoint to the next.
        seeds: how many.
        batches: of the held-out set, for searches and for losses along the way.
    """

    make: Callable[[], Workload]
    steps: int
    spacing: int
    seeds: int
    batches: int = 5

    @property
    def workload(self) -> Workload:
        """Workload of this training, with its number of steps."""
        return dataclasses.replace(self.make(), steps=self.steps)


STUDIES = {
    "MLP, 900 steps": Study(workloads.mlp, 900, 10, 3),
    "MLP, 3,600 steps": Study(workloads.mlp, 3600, 40, 2),
    "CNN, 900 steps": Study(workloads.cnn, 900, 10, 2, batches=3),
    "ViT, 3,600 steps": Study(workloads.vit, 3600, 40, 1, batches=2),
    "GPT, 900 steps": Study(workloads.gpt, 900, 10, 1, batches=2),
}
QUICK = Study(workloads.mlp, 80, 10, 1, batches=2)
QUICK_FAILURES = 2

COLUMNS: tuple[tuple[str, str, Callable[[Outcome, End], float]], ...] = (
    ("accuracy lost at the end", "%", lambda o, exact: 100 * (1 - o.accuracy / exact.accuracy)),
    ("degradation of the loss at the end", "%", lambda o, _: o.degradation),
    ("accuracy lost at a restore", "%", lambda o, _: o.accuracy_lost),
    ("loss change at a restore", "%", lambda o, _: o.at_restore),
    ("weights, all checkpoints", "x", lambda o, _: o.weights),
    ("whole state, all checkpoints", "x", lambda o, _: o.whole),
    ("weights, smallest checkpoint", "x", lambda o, _: o.peak_weights),
    ("seconds a save", "s", lambda o, _: o.save),
    ("runtime overhead", "%", lambda o, _: o.overhead),
)


def table5(options: Options) -> list[Row]:
    """All rows; with `--quick` those of a short training, where asked for."""
    studies = STUDIES if not options.quick else {"MLP, quick": QUICK} if options.only is not None else {}
    found: list[Row] = []
    for name, study in studies.items():
        model = Trainings(study.workload)
        for system, make in SYSTEMS.items():
            if options.wanted(f"{PREFIX}{name} {system}".replace(",", "")):
                found += options.done(_of_system(name, study, system, make, model, options))
    return found


def _of_system(name: str, study: Study, system: str, make: Make, model: Trainings, options: Options) -> list[Row]:
    options.seeds.update(range(study.seeds))
    options.say(f"{PREFIX}{name}, {system}")
    failures = QUICK_FAILURES if options.quick else FAILURES
    found = model.outcomes(lambda: make(study), range(study.seeds), failures, study.spacing, study.batches)
    columns = (
        (label, unit, [of(outcome, model.exact[seed]) for seed, outcome in enumerate(found)])
        for label, unit, of in COLUMNS
    )
    about = _about(study, found, model.exact, failures)
    return of_seeds(f"{PREFIX}{name}, {system}", (ONE_THREAD, model.workload.parameters), columns, about)


def _about(study: Study, outcomes: Sequence[Outcome], exact: Mapping[int, End], failures: int) -> str:
    """Return the note of all rows of a system."""
    seeds = range(len(outcomes))
    whole, loss = (statistics.fmean(getattr(exact[seed], what) for seed in seeds) for what in ("accuracy", "loss"))
    killed = statistics.fmean(outcome.accuracy for outcome in outcomes)
    about = f"seeds 0 to {len(outcomes) - 1}; {study.steps:,} steps, a checkpoint every {study.spacing}"
    about += f", killed {failures} times; accuracy {100 * whole:.2f} % uninterrupted, {100 * killed:.2f} % killed"
    about += f"; loss {loss:.4f} uninterrupted"
    calls, unmet = (sum(getattr(o, what) for o in outcomes) for what in ("evaluations", "unmet"))
    searches = f"; {calls} calls of evaluate on {study.batches} batches, {unmet} searches found nothing that passes"
    return about + (searches if calls else "")


def run(options: Options) -> list[Row]:
    """All rows; a few of one small model with `--quick`."""
    with threads(1):
        return table5(options) + transfer.rows(options)
