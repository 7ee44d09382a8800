"""Trainings that are killed and restored: systems, studies, rows, targets, picture."""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import shrinkpoint as sp
from shrinkpoint.searching.cube import Cube

from ..harness import Options, Row, at_least, at_most, held
from . import workloads
from .faults import End, InStore, Outcome, Peer, Reshuffled, Searching, System, Uncompressed, end_of, endure, warm_up
from .workloads import Workload

DEVICE = "cpu, 1 thread"
YARDSTICK = "no compression, other batches"
EXACT = ("no compression", "lossless")
"""What must end where the uninterrupted training does, to the bit."""
OWN = ("default", "rate")
"""What the names of this project's own settings begin with."""
ONE_BASE = sp.ChainPolicy(base_every=None)
RARE = sp.ChainPolicy(base_every=100)

Make = Callable[[int], System]
"""A new system, for checkpoints at so many steps from each other."""


def _config(make: Callable[[], sp.Config], *, grads: bool = False, searching: Searching | None = None) -> Make:
    return lambda spacing: InStore(make(), grads=grads, spacing=spacing, searching=searching)


def _often_killed(bins: int, step: float = 1.25, octaves: float = 3, rate: float = 0.02) -> Make:
    """Return coarse weights extrapolated by their drift, with finer first moments.

    "Finer moments" are a grid of 1 and second moments in cells of one octave, which whole states can afford.
    """
    moments = (("*/exp_avg", sp.FirstMoment(step=step)), ("*/exp_avg_sq", sp.SecondMoment(octaves=octaves)))
    rules = (("weight", sp.Quantize(bins=bins)), *moments)
    return _config(lambda: sp.Config(rules, rate=rate, chain=RARE))


def _baseline(name: str) -> Make:
    def make(_: int) -> System:
        from .baselines import BASELINES

        return Peer(BASELINES[name]())

    return make


BASELINES = ("QD-compressor", "naive 8-bit", "ExCP")
SYSTEMS: dict[str, Make] = {
    "default": _config(sp.Config),
    "rate 0.0005": _config(lambda: sp.Config(rate=0.0005)),
    "rate 0.002": _config(lambda: sp.Config(rate=0.002)),
    "rate 0.002, 16 bins": _config(lambda: sp.Config([("weight", sp.Quantize(bins=16))], rate=0.002)),
    "rate 0, 12 bins, ahead": _config(lambda: sp.Config([("weight", sp.Quantize(bins=12))], ahead=True)),
    "rate 0.02, 12 bins, first moments 1.25, bases every 100": _often_killed(12),
    "rate 0.02, 10 bins, first moments 1.25, bases every 100": _often_killed(10),
    "rate 0.02, 10 bins, finer moments, bases every 100": _often_killed(10, 1.0, 1),
    "rate 0.0005, one base": _config(lambda: sp.Config(rate=0.0005, chain=ONE_BASE)),
    "inshrinkerator": _config(sp.presets.inshrinkerator, grads=True),
    "inshrinkerator, one base": _config(lambda: sp.presets.inshrinkerator(chain=ONE_BASE), grads=True),
    "lc_checkpoint": _config(sp.presets.lc_checkpoint),
    "check_n_run": _config(sp.presets.check_n_run),
    "bitsnap": _config(sp.presets.bitsnap),
    "lossless": _config(sp.presets.lossless),
    **{name: _baseline(name) for name in BASELINES},
    "no compression": lambda _: Uncompressed(),
    YARDSTICK: lambda _: Reshuffled(),
}
"""The systems. "One base": no base after the first, as in the paper; otherwise every 20 checkpoints."""


def _coarse(rate: float, bins: int) -> Make:
    return _config(lambda: sp.Config([("weight", sp.Quantize(bins=bins))], rate=rate, chain=RARE))


RARE_BASES: dict[str, Make] = {
    "rate 0.004, 12 bins, bases every 100": _coarse(0.004, 12),
    "rate 0.01, 12 bins, bases every 100": _coarse(0.01, 12),
    "rate 0.002, 12 bins, finer moments, bases every 100": _often_killed(12, 1.0, 1, 0.002),
    "rate 0.005, 10 bins, finer moments, bases every 100": _often_killed(10, 1.0, 1, 0.005),
}
"""Systems of `FURTHER` alone. In chains of hundreds of checkpoints bases take more bytes than late deltas, so
these have fewer bases and fewer bins. A model that gains more at a rate, and loses more by it, has lower rates."""

THRESHOLDS = (0.001, 0.01, 0.05)
OWN_CUBE = Cube(
    bins=(8, 12, 16, 24, 32, 64, 128),
    prune=(0.0,),
    metric=("magnitude",),
    protect=(0.0005,),
    rate=(0.0, 0.0005, 0.001, 0.002, 0.004),
)
"""The space of the default: its coder over bins and rates."""
PAPER_CUBE = Cube(system="inshrinkerator")


def searched(threshold: float) -> dict[str, Make]:
    """Return the systems whose configuration is searched for at each checkpoint."""
    return {
        f"default, searched for {threshold:.1%}": _config(sp.Config, searching=Searching(threshold, OWN_CUBE)),
        f"default, searched for {threshold:.1%}, ahead": _config(
            sp.Config, searching=Searching(threshold, OWN_CUBE, ahead=True)
        ),
        f"inshrinkerator, searched for {threshold:.1%}": _config(
            sp.presets.inshrinkerator, grads=True, searching=Searching(threshold, PAPER_CUBE)
        ),
    }


@dataclass(frozen=True)
class Study:
    """Amount of measurement for one model: seeds, systems, schedule.

    Args:
        seeds: of the failures.
        systems: of the failures; None: all.
        few: systems run with 5 and 20 failures, too.
        thresholds: seeds of the searched systems; 0: none.
        ablation: seeds of the ablation; 0: none.
        spacing: steps from one checkpoint to the next.
        batches: of the held-out set, for losses along the way.
        every: checkpoints from one of these losses to the next.
        steps: length of the schedule; None: the workload's own.
        make: the training; None: the workload of the name's first word.
    """

    seeds: int
    systems: tuple[str, ...] | None = None
    few: tuple[str, ...] = ()
    thresholds: int = 0
    ablation: int = 0
    spacing: int = 10
    batches: int = 2
    every: int = 1
    steps: int | None = None
    make: Callable[[], Workload] | None = None


_FEW = ("default", "rate 0.0005", "inshrinkerator")
_OFTEN_KILLED = tuple(name for name in SYSTEMS if "moments" in name)
_SHORTEST = (*_FEW, "rate 0.002, 16 bins", *_OFTEN_KILLED, "QD-compressor", YARDSTICK)
_SHORT = (*_SHORTEST, "rate 0, 12 bins, ahead", "rate 0.0005, one base", "lc_checkpoint", "check_n_run", "ExCP")
STUDIES = {
    "MLP": Study(6, None, _FEW, thresholds=3, ablation=2),
    "embedding": Study(4, _SHORT),
    "CNN": Study(6, _SHORT, thresholds=1),
    "ViT": Study(3, _SHORT),
    "GPT": Study(2, _SHORTEST, batches=1, every=3),
}
COARSE = (*[name for name in RARE_BASES if "moments" not in name], _OFTEN_KILLED[0])
_WIDER_SYSTEMS = ("default", *[name for name in RARE_BASES if "moments" in name], *_OFTEN_KILLED, YARDSTICK)
_LONG_SYSTEMS = ("default", *COARSE, "inshrinkerator, one base", "QD-compressor", YARDSTICK)
FURTHER = {
    "MLP long": Study(3, ("default", *COARSE, "QD-compressor", YARDSTICK), batches=1, steps=3600),
    "MLP longer": Study(2, (*COARSE, YARDSTICK), batches=1, every=3, steps=10_800),
    "embedding long": Study(2, _LONG_SYSTEMS, batches=1, every=3, steps=4500),
    "GPT long": Study(1, ("default", *COARSE, YARDSTICK), batches=1, every=3, steps=1800),
    "GPT wider": Study(1, _WIDER_SYSTEMS, batches=1, every=3, make=workloads.gpt_wider),
}
"""Schedules several times as long, with as many failures: a restore weighs less, as it does in trainings of days. And a
model that is ten times the size of the others."""
QUICK = Study(1, ("default", "rate 0.0005", "inshrinkerator", "lossless", YARDSTICK), steps=120)
FAILURES = (10, 5, 20)
QUICK_FAILURES = 3

COLUMNS = (
    ("degradation at the end", "degradation", "%"),
    ("loss change at a restore", "at_restore", "%"),
    ("rework", "rework", "steps"),
    ("staleness", "staleness", "steps"),
    ("weights, all checkpoints", "weights", "x"),
    ("whole state, all checkpoints", "whole", "x"),
    ("weights, smallest checkpoint", "peak_weights", "x"),
    ("whole state, smallest checkpoint", "peak_whole", "x"),
    ("late weight deltas", "weight_bits", "bits"),
    ("seconds a save", "save", "s"),
    ("runtime overhead", "overhead", "%"),
    ("seconds a restore", "restore", "s"),
)

BOUND = 0.5
"""Percent of degradation at which ratios are wanted."""
WANTED = 80.0
PUBLISHED = {
    "ResNet-152": (0.50, 39.09, 0.35),
    "ViT L32": (-0.46, 26.19, 0.51),
    "BERT Base": (0.80, 29.25, 0.58),
    "GPT-2 M": (0.61, 29.81, 0.32),
    "ResNet-152, threshold 1 %": (0.0, 21.82, None),
}
"""Inshrinkerator, table 5 and figure 1, at 5 % unless named: degradation %, ratio of the weights, overhead %."""


def over_seeds(values: Sequence[float]) -> str:
    """Mean, and the range over several seeds.

    Example:
        >>> over_seeds([1.0, 2.0]), over_seeds([0.5])
        ('+1.50 (+1.00 ... +2.00)', '+0.50')
    """
    spread = f" ({min(values):+.2f} ... {max(values):+.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):+.2f}{spread}"


@dataclass
class Model:
    """A workload, and the results of its uninterrupted trainings by seed."""

    workload: Workload
    exact: dict[int, End] = dataclasses.field(default_factory=dict)

    def outcomes(
        self, make: Make, seeds: Sequence[int], failures: int, spacing: int, batches: int, every: int = 1
    ) -> list[Outcome]:
        """Train once for each seed, after a warm-up, and return the outcomes."""
        found = []
        warm_up(self.workload, min(seeds, default=0), make(spacing), spacing)
        how = {"failures": failures, "spacing": spacing, "batches": batches, "every": every}
        for seed in seeds:
            if seed not in self.exact:
                self.exact[seed] = end_of(self.workload, seed)
            found.append(endure(self.workload, seed, make(spacing), exact=self.exact[seed].loss, **how))
        return found


def title(name: str) -> str:
    """Return the column title of a study of `FURTHER`: model, size if another, steps.

    Example:
        >>> title("MLP long"), title("GPT wider")
        ('MLP, 3,600 steps', 'GPT, 10.7 M, 900 steps')
    """
    made = workload_of(name, FURTHER[name])
    size = f"{made.parameters / 1e6:.1f} M, " if FURTHER[name].make else ""
    return f"{name.partition(' ')[0]}, {size}{made.steps:,} steps"


def workload_of(name: str, study: Study) -> Workload:
    """Return the workload of a study, with the study's name and length."""
    made = (study.make or workloads.WORKLOADS[name.partition(" ")[0]])()
    return dataclasses.replace(made, name=name, steps=study.steps or made.steps)


def failures_of(model: Model, study: Study, options: Options) -> list[Row]:
    rows: list[Row] = []
    for failures in (QUICK_FAILURES,) if options.quick else FAILURES if study.few else FAILURES[:1]:
        chosen = SYSTEMS if failures in (10, QUICK_FAILURES) else {name: SYSTEMS[name] for name in study.few}
        if study.systems is not None:
            chosen = {name: make for name, make in (chosen | RARE_BASES).items() if name in study.systems}
        asked = [name for name in chosen if options.wanted(f"{model.workload.name} failures {name}")]
        rows += measured(model, study, {name: chosen[name] for name in asked}, study.seeds, failures, options)
    return rows


def thresholds_of(model: Model, study: Study, options: Options) -> list[Row]:
    systems = (searched(threshold) for threshold in THRESHOLDS)
    return [row for s in systems for row in measured(model, study, s, study.thresholds, FAILURES[0], options)]


def measured(
    model: Model, study: Study, systems: Mapping[str, Make], seeds: int, failures: int, options: Options
) -> list[Row]:
    """Return the rows of systems; those that need a missing package are open, and come last."""
    options.seeds.update(range(seeds))
    rows, missing = [], []
    for name, make in systems.items():
        options.say(f"{model.workload.name}, {failures} failures, {name}")
        of = range(1 if name in EXACT else seeds)
        try:
            found = model.outcomes(make, of, failures, study.spacing, study.batches, study.every)
            rows += options.done(of_system(model, name, found, failures, study))
        except ImportError as error:
            missing.append(missing_row(model, name, failures, f"not measured: {error}"))
    return rows + missing


def missing_row(model: Model, name: str, failures: int, why: str) -> Row:
    """Return the open row of a system that was not measured."""
    label, _, unit = COLUMNS[0]
    row = f"{model.workload.name}, {failures} failures, {name}: {label}"
    return Row(row, model.workload.where, model.workload.parameters, None, unit, note=why)


def of_system(model: Model, name: str, outcomes: Sequence[Outcome], failures: int, study: Study) -> list[Row]:
    """Return one row a column: mean over the seeds, range in the note."""
    about = f"seeds 0 to {len(outcomes) - 1}; {model.workload.steps} steps, a checkpoint every {study.spacing}"
    about += searched_note(outcomes)
    wrong = name in EXACT and any(o.degradation or o.at_restore for o in outcomes)
    why = f"{name} does not end where the uninterrupted training does" if wrong else ""
    columns = ((label, unit, [getattr(o, what) for o in outcomes]) for label, what, unit in COLUMNS)
    return of_seeds(f"{model.workload.name}, {failures} failures, {name}", model.workload.place, columns, about, why)


def plain(row: Row | Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as its JSON."""
    return dict(row) if isinstance(row, Mapping) else dataclasses.asdict(row)


def is_own(system: str) -> bool:
    """Return whether a system is one of our own lossy settings."""
    return system.startswith(OWN)


def is_searched(system: str) -> bool:
    """Return whether a system's configuration was searched for under a threshold."""
    return "searched for" in system


TARGET = f", {FAILURES[0]} failures: "
_AXES = (("weights", "weights, all checkpoints"), ("whole state", "whole state, all checkpoints"))


def targets(rows: Sequence[Any]) -> list[Row]:
    """Return targets: the ratio within a loss, and settings of ours that others beat.

    All measurements of a model with ten failures count: failures, thresholds, and from the ablation our complete
    settings and every variant of the published one. Means are compared over the seeds that were measured.

    Args:
        rows: `Row`s or their JSON, of one run or of all.
    """
    found = []
    for name, systems in table(rows).items():
        some = next(iter(next(iter(systems.values())).values()))
        where, every = (some["device"], some["size"]), standing(rows, name)
        ours = {system: columns for system, columns in systems.items() if is_own(system)}
        for label, column in _AXES:
            found += _at_the_bound((name, *where), ours, systems.get(YARDSTICK), (label, column))
            others = [s for s in every if is_other(s) and _standing(every[s], column)]
            if not others:
                continue
            beaten = beaten_on(every, column)
            note = "; ".join(f"{s} by {', '.join(by)}" for s, by in beaten.items())
            row = f"{name}{TARGET}settings beaten on both axes, {label}"
            made = Row(row, *where, float(len(beaten)), "settings", note=note or f"none by any of {', '.join(others)}")
            found.append(held(made, at_most(0)))
    return found


def is_target(row: Mapping[str, Any]) -> bool:
    """Return whether a row of a JSON document is one of `targets`."""
    return TARGET in row["row"]


def is_dropped(row: Mapping[str, Any]) -> bool:
    """Return whether a JSON row belongs to a system that is not compared any more.

    Example:
        >>> [is_dropped({"row": f"MLP, 10 failures, {of}: rework"}) for of in ("default", "best guess")]
        [False, True]
    """
    _, failures, system = row["row"].partition(": ")[0].partition(" failures, ")
    return bool(failures) and not is_searched(system) and system not in SYSTEMS | RARE_BASES


def is_other(system: str) -> bool:
    """Return whether a system is a lossy system of others."""
    return not is_own(system) and not system.startswith("ablation, own") and system not in (*EXACT, YARDSTICK)


def standing(rows: Sequence[Any], model: str) -> dict[str, dict[str, Any]]:
    """Return rows by system and column of everything that was killed ten times."""
    return {**table(rows).get(model, {}), **_ablated(rows, model)}


def beaten_on(systems: Mapping[str, Mapping[str, Any]], column: str) -> dict[str, list[str]]:
    """Return our settings that other systems beat, in means, with those systems.

    Args:
        systems: as `standing` has them.
        column: label of the ratio.
    """
    points = {s: point for s, columns in systems.items() if (point := _standing(columns, column))}
    found = {}
    for system, (ratio, loss) in points.items():
        if is_other(system) or system in (*EXACT, YARDSTICK):
            continue
        by = [s for s, (x, y) in points.items() if is_other(s) and x > ratio and y < loss]
        if by:
            found[system] = by
    return found


def _standing(columns: Mapping[str, Any], column: str) -> tuple[float, float] | None:
    """Ratio and degradation; None where either was not measured."""
    ratio, loss = (columns.get(label, {}).get("value") for label in (column, COLUMNS[0][0]))
    return None if ratio is None or loss is None else (ratio, loss)


def _ablated(rows: Sequence[Any], model: str) -> dict[str, dict[str, Any]]:
    """Return the ablation's systems: ours with all parts, and the published variants."""
    found: dict[str, dict[str, Any]] = {}
    for row in map(plain, rows):
        where, _, label = row["row"].partition(": ")
        name, _, variant = where.partition(" ablation, ")
        if name == model and (variant == "own, all parts" or variant.startswith("published, ")):
            found.setdefault(f"ablation, {variant}", {})[label] = row
    return found


def _at_the_bound(
    model: tuple[str, str, int],
    own: Mapping[str, Mapping[str, Any]],
    yardstick: Mapping[str, Any] | None,
    axis: tuple[str, str],
) -> list[Row]:
    """Return the largest ratio of ours that loses little enough."""
    (name, where, size), (label, column) = model, axis
    points = {s: point for s, columns in own.items() if (point := _standing(columns, column))}
    if not points:
        return []
    best = max((s for s, (_, loss) in points.items() if loss <= BOUND), key=lambda s: points[s][0], default=None)
    value = points[best][0] if best else None
    note = f"{best}: {_degradation(own[best])}" if best else "no setting degrades so little"
    if yardstick is not None and yardstick[COLUMNS[0][0]]["value"] is not None:
        note += f"; other batches after each restore, exact states: {_degradation(yardstick)}"
    row = held(Row(bound_row(name, label), where, size, value, "x", note=note), at_least(WANTED, "value"))
    return [dataclasses.replace(row, met=bool(row.met))]


def bound_row(name: str, label: str) -> str:
    """Return the name of the row of the ratio within a loss."""
    return f"{name}{TARGET}{label} at <= {BOUND:g} % degradation"


def _degradation(columns: Mapping[str, Any]) -> str:
    """Mean and range over the seeds, as the note of the row begins."""
    return f"{columns[COLUMNS[0][0]]['note'].split(';')[0]} %"


def table(rows: Sequence[Any], failures: int = 10) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of trainings as model -> system -> column's label -> row.

    Args:
        rows: `Row`s or their JSON.
        failures: of the trainings.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in map(plain, rows):
        where, _, label = row["row"].partition(": ")
        model, _, system = where.partition(f", {failures} failures, ")
        if system and label:
            found.setdefault(model, {}).setdefault(system, {})[label] = row
    return found


def plot(rows: Sequence[Any], path: Path, title_of: Callable[[str], str] = str) -> None:
    """Draw loss against ratio: a row a model, a column for weights and one for the whole state.

    Args:
        rows: of trainings with failures.
        path: the picture.
        title_of: returns a system's name in the legend.

    Raises:
        BadArgumentError: Matplotlib is not installed, or there is nothing to draw.
    """
    from shrinkpoint.kernels.errors import BadArgumentError

    from ..plot import pyplot

    models = {
        name: {system: columns for system, columns in systems.items() if not is_searched(system)}
        for failures in (FAILURES[0], QUICK_FAILURES)
        for name, systems in table(rows, failures).items()
    }
    if not models:
        raise BadArgumentError("no rows of trainings with failures to draw; take `--only failures`")
    plt = pyplot()
    markers = dict(zip(dict.fromkeys(s for systems in models.values() for s in systems), cycle(_MARKERS), strict=False))
    # A page shows it about 800 pixels wide: two panels side by side stay readable.
    figure, axes = plt.subplots(
        len(models), 2, squeeze=False, figsize=(8.5, 1.6 + 2.2 * len(models)), layout="constrained"
    )
    drawn: dict[str, Any] = {}
    for line, (name, systems) in zip(axes, models.items(), strict=True):
        for axis, label in zip(line, ("weights", "whole state"), strict=True):
            drawn |= _scatter(axis, systems, f"{label}, all checkpoints", markers)
        line[0].set_title(name, loc="left")
    for axis, label in zip(axes[-1], ("weights", "whole state"), strict=True):
        axis.set_xlabel(f"{label}: times smaller")
    figure.supylabel("held-out loss at the end, change in %")
    names = [title_of(system).replace("`", "") for system in drawn]
    figure.legend(drawn.values(), names, loc="outside lower center", ncols=2, fontsize=9)
    figure.savefig(path, dpi=110)
    plt.close(figure)


_MARKERS = "os^vDPX<>hp*d"
_COLORS = {"own": "#2a6f97", "other": "#b5651d", "exact": "#8a8f98"}


def _color(system: str) -> str:
    return _COLORS["own" if is_own(system) else "exact" if system in (*EXACT, YARDSTICK) else "other"]


def interval(row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the lowest and highest value over the seeds from the note of a row.

    Example:
        >>> interval({"value": 1.5, "note": "+1.50 (+1.00 ... -2.00); two seeds"})
        (1.0, -2.0)
    """
    found = re.match(r"[-+.\d]+ \(([-+.\d]+) \.\.\. ([-+.\d]+)\)", row["note"])
    return (float(found[1]), float(found[2])) if found else (row["value"], row["value"])


def _scatter(
    axis: Any, systems: Mapping[str, Mapping[str, Any]], label: str, markers: Mapping[str, str]
) -> dict[str, Any]:
    """Draw the points of a panel, and return them by system for the legend."""
    found = {}
    for system, columns in systems.items():
        x, y = (columns.get(what, {}).get("value") for what in (label, COLUMNS[0][0]))
        if x is None or y is None:
            continue
        axis.plot([x, x], interval(columns[COLUMNS[0][0]]), color=_color(system), linewidth=0.8)
        style = {"color": _color(system), "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.5}
        (found[system],) = axis.plot(x, y, markers[system], linestyle="none", **style)
    axis.axhline(0, color="#999999", linewidth=0.6)
    axis.axhline(BOUND, color="#999999", linewidth=0.6, linestyle=":")
    axis.set_xscale("log")
    axis.margins(x=0.08)
    axis.spines[["top", "right"]].set_visible(False)
    return found


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


def searched_note(outcomes: Sequence[Outcome], of: str = "", found: str = "took lossless") -> str:
    """Return the calls and the vain searches of searched systems, for a note; "" for others."""
    if not any(o.evaluations for o in outcomes):
        return ""
    calls, unmet = (sum(getattr(o, what) for o in outcomes) for what in ("evaluations", "unmet"))
    return f"; {calls} calls of evaluate{of}, {unmet} searches {found}"
