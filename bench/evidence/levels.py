"""Losses and ratios of the quality levels, and the front of the default: `bench harm`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from ..plot import pyplot
from ..studies import overview as study
from ..studies.harm.campaign import PARTS, RESULTS, Campaign, Effect, Found
from ..studies.harm.families import CHOSE, SENSITIVE, SET_ASIDE
from ..studies.harm.held_back import ALL as FAMILIES
from ..studies.harm.held_back import HELD_BACK
from .results import markdown, number, rows_of

NAMES = {
    "lossless": "`presets.lossless()`",
    "exact_weights": "`presets.exact_weights()`",
    "precise": "`presets.precise()`",
    "default": "`Config()`",
    "compact": "`presets.compact()`",
}
_MISSING = "not measured"
_BASES = 20
"""Checkpoints from one base to the next."""


@cache
def campaign() -> Campaign:
    """Return the committed rows of the campaign."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return Campaign(json.loads(line) for line in lines)


_REGRESSIONS = ("autoencoder", "regression", "VAE", "diffusion, EMA")
"""Families whose outputs are values, without the physics-informed network."""
_ALONE = ("PINN", "grokking")
_LABELS = "classifiers, language models"
TASKS = {
    _LABELS: tuple(name for name in FAMILIES if name not in (*_REGRESSIONS, *_ALONE)),
    "regression, generative": _REGRESSIONS,
    "physics (PINN)": ("PINN",),
    "learnt late (grokking)": ("grokking",),
}
"""Families by kind of task, whose losses a level changes differently."""
GROUPS = {"chose settings": CHOSE, "chose nothing": tuple(HELD_BACK)}
"""Families by use."""
_EXACT_MODELS = ("lossless", "exact_weights")
_OLD = "before 2026-11-27"
"""When rows were measured that do not name their commit."""


def levels() -> str:
    """Return a line a level with the figures of its worst families, and their names."""
    lines, named = [], []
    for level, name in NAMES.items():
        mean, least = _ratios(level, tuple(FAMILIES))
        answers = _worst(level, TASKS[_LABELS], "agreement")
        rms = _worst(level, TASKS[_LABELS], "rms")
        figures = [least, answers, rms, *(_end(level, families) for families in TASKS.values())]
        lines.append([name, mean, *(cell for cell, _ in figures)])
        if worst := [family for _, family in figures if family]:
            named.append(f"{name} {'; '.join(worst)}")
    head = ["level", "times smaller, mean", "times smaller", "same answers after a restore"]
    head.append(f"loss change at a restore, rms: {_LABELS}")
    table = markdown([*head, *(f"loss after ten kills, bound: {task}" for task in TASKS)], lines)
    said = "Each figure but the mean is that of the worst family. These are, from left to right: "
    return f"{table}\n\n{said}{'. '.join(named)}."


def levels_by_group() -> str:
    """Return a line a level and group of families: ratios, ends, number of seeds."""

    def cells(level: str, families: Sequence[str]) -> list[str]:
        mean, (least, _) = _ratios(level, families)
        tasks = [[family for family in of if family in families] for of in TASKS.values()]
        ends = [_end(level, of)[0] if of else "-" for of in tasks]
        return [str(len(families)), _seeds(level, families), mean, least, *ends]

    head = ["number", "seeds", "times smaller, mean", "times smaller"]
    return _by_group(cells, [*head, *(f"loss after ten kills, bound: {task}" for task in TASKS)])


def evaluation() -> str:
    """Return a line a level and group: changes of the loss at a restore, by kind of task."""

    def cells(level: str, families: Sequence[str]) -> list[str]:
        tasks = [[family for family in of if family in families] for of in TASKS.values()]
        return [_worst(level, of, what)[0] if of else "-" for of in tasks for what in ("rms", "worst")]

    return _by_group(cells, [f"{task}: {what}" for task in TASKS for what in ("rms", "worst")])


def _by_group(cells: Callable[[str, Sequence[str]], list[str]], head: list[str]) -> str:
    lines = [
        [name, group, *cells(level, families)] for level, name in NAMES.items() for group, families in GROUPS.items()
    ]
    return markdown(["level", "families", *head], lines)


def origin() -> str:
    """Return a line a commit that measured rows of the campaign."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in campaign().rows.values():
        commit = row.get("commit")
        key = (f"`{commit[:7]}{'+' * commit.endswith('+')}`", row["torch"]) if commit else (_OLD, "-")
        found.setdefault(key, []).append(row["family"])
    lines = [[*key, str(len(rows)), "; ".join(dict.fromkeys(rows))] for key, rows in found.items()]
    return markdown(["commit", "torch", "rows", "families"], lines)


def _ratios(level: str, families: Iterable[str]) -> tuple[str, tuple[str, str]]:
    """Return the mean ratio of chains, and the least one with its family."""
    ratios = {family: ratio for family in families if (ratio := campaign().ratio(family, level)) is not None}
    if not ratios:
        return _MISSING, (_MISSING, "")
    smallest = min(ratios, key=ratios.__getitem__)
    return f"{statistics.fmean(ratios.values()):.3g} x", (f"{ratios[smallest]:.3g} x", smallest)


def _worst(level: str, families: Iterable[str], what: str) -> tuple[str, str]:
    """Return how much a restore changes the model, with the worst of the families.

    Args:
        level: its name.
        families: by name.
        what: "agreement", the share of equal answers; "rms" or "worst", of the change of the loss.
    """
    if level in _EXACT_MODELS:
        return ("100 %" if what == "agreement" else "equal"), ""
    found = {family: one for family in families if (one := campaign().found(family, level)) is not None}
    values = {family: value for family, one in found.items() if (value := getattr(one, what)) is not None}
    if not values:
        return _MISSING, ""
    family = (min if what == "agreement" else max)(values, key=values.__getitem__)
    cell = change(values[family]) if what == "worst" else f"{values[family]:.2f} %"
    return cell, family


def _end(level: str, families: Iterable[str] = tuple(FAMILIES)) -> tuple[str, str]:
    """Return the bound of the loss after ten kills, with the worst of the families."""
    if level == "lossless":
        changes = [abs(end) for family in families for end in campaign().ends(family, level, "loss").values()]
        return (change(max(changes)) if changes else _MISSING), ""
    found = {
        family: one.loss for family in families if (one := campaign().found(family, level)) is not None and one.loss
    }
    bounds = {family: loss.bound for family, loss in found.items() if loss.bound is not None}
    if not bounds:
        return _MISSING, ""
    worst = max(bounds, key=bounds.__getitem__)
    return change(bounds[worst]), worst


def _seeds(level: str, families: Iterable[str]) -> str:
    """Return the least and greatest number of seeds of the families' killed trainings."""
    counts = [len(campaign().ends(family, level, "loss")) for family in families]
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def overview() -> str:
    """Return the costs of a checkpoint of the demo's model by level, and the loss after kills."""
    values = {row["row"]: row["value"] for row in rows_of("overview.json")}
    lines = []
    for level in (study.SAVED, *(level for level in study.LEVELS if level != "compact")):
        cells = [
            f"{number(values[f'{level}: {what}'])} {unit}" if f"{level}: {what}" in values else _MISSING
            for what, unit in study.WHAT.items()
        ]
        lost = "equal" if level == study.SAVED else _end(level, TASKS[_LABELS])[0]
        lines.append([f"`{level}`", *cells, lost])
    return markdown(["", "a checkpoint", "training waits", "durable after", "a restore", "loss after ten kills"], lines)


def change(value: float, unit: str = " %") -> str:
    """Write a change of a loss, or accuracy lost, in words; positive is worse.

    Example:
        >>> change(0.741), change(-2.2, ""), change(0.001)
        ('0.74 % worse', '2.20 better', 'equal')
    """
    text = f"{abs(value):.2f}"
    return "equal" if float(text) == 0 else f"{text}{unit} {'worse' if value > 0 else 'better'}"


def _effect(found: Effect | None, unit: str = " %") -> list[str]:
    """Return the cells of a mean, its standard error and its bound."""
    if found is None:
        return [_MISSING] * 3
    error = _MISSING if found.error is None else f"{found.error:.2f}"
    return [change(found.mean, unit), error, _MISSING if found.bound is None else change(found.bound, unit)]


_EFFECT = ["+-", "95 % bound"]


def _label(family: str) -> str:
    if family in SENSITIVE:
        return f"{family} (chose precise)"
    return f"{family} (chose nothing)" if family in HELD_BACK or family in SET_ASIDE else family


def level(name: str) -> str:
    """Return a line a family: the losses of one level there."""
    lines = []
    for family in FAMILIES:
        found = campaign().found(family, name)
        if found is None:
            lines.append([_label(family), *[_MISSING] * 12])
            continue
        answers = "-" if found.agreement is None else f"{found.agreement:.2f} %"
        at_restore = [answers, f"{found.rms:.2f} %", change(found.worst)]
        seeds, ends = _ends(found)
        lines.append([_label(family), seeds, *at_restore, *ends, f"{found.ratio:.1f} x", f"{found.weights:.1f} x"])
    head = ["family", "seeds", "same answers", "loss change at a restore, rms", "worst", "loss after ten kills"]
    return markdown([*head, *_EFFECT, "accuracy", *_EFFECT, "whole state", "weights"], lines)


def exact_levels() -> str:
    """Return a line a family for the two levels that restore the model bit for bit."""
    lines = []
    for family in FAMILIES:
        found, ratio = campaign().found(family, "exact_weights"), campaign().ratio(family, "lossless")
        cells = [_MISSING] * 8
        if found is not None:
            seeds, ends = _ends(found)
            cells = [f"{found.ratio:.2f} x", seeds, *ends]
        lines.append([_label(family), _MISSING if ratio is None else f"{ratio:.2f} x", *cells])
    head = ["family", "lossless", "exact_weights", "seeds", "its loss after ten kills", *_EFFECT]
    return markdown([*head, "points of accuracy", *_EFFECT], lines)


def _ends(found: Found) -> tuple[str, list[str]]:
    """Return the number of seeds, and the cells of loss and accuracy after ten kills."""
    accuracy = ["-"] * 3 if found.agreement is None else _effect(found.accuracy, "")
    return "0" if found.loss is None else str(found.loss.seeds), [*_effect(found.loss), *accuracy]


def front() -> str:
    """Return a row for each setting of one part: bits, divergence, gain of a further bit."""
    lines, before = [], (0.0, 0.0)
    kind = ""
    for setting in PARTS:
        part, _, value = setting.partition(", ")
        rows = [row for family in FAMILIES for row in campaign().of("resumed", family, setting).values()]
        rows = [row for row in rows if row["after"]["0"]["changed"] is not None]
        if not rows:
            lines.append([part, value, *[_MISSING] * 6])
            continue
        base, delta = (statistics.fmean(row["bits"][of][part] for row in rows) for of in ("base", "delta"))
        bits = (base + (_BASES - 1) * delta) / _BASES
        steps = "0" if part == "weights" else "20"
        far = statistics.geometric_mean(row["after"][steps]["divergence"] for row in rows)
        slope = (before[1] - far) / (bits - before[0]) if part == kind and bits > before[0] else None
        changed = 100 * statistics.fmean(row["after"][steps]["changed"] for row in rows)
        sizes, gain = (f"{size:.2f}" for size in (base, delta, bits)), "" if slope is None else f"{1e5 * slope:.1f}"
        lines.append([part, value, *sizes, f"{1e5 * far:.2f}", f"{changed:.2f} %", gain])
        kind, before = part, (bits, far)
    head = ["part", "setting", "bits in a base", "in a delta", "in a chain", "divergence, 1e-5 nats", "answers changed"]
    return markdown([*head, "less divergence for a bit more"], lines)


_COLOURS = {"exact_weights": "#6c757d", "precise": "#3a7d44", "default": "#2a6f97", "compact": "#b5651d"}


def picture(path: Path) -> None:
    """Draw the loss after ten kills against the ratio, a point for each family and level."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for level, colour in _COLOURS.items():
        all_found = {family: campaign().found(family, level) for family in FAMILIES}
        there = {family: (one.ratio, one.loss) for family, one in all_found.items() if one and one.loss}
        ratios, losses = zip(*there.values(), strict=True)
        means, errors = [loss.mean for loss in losses], [loss.error or 0.0 for loss in losses]
        label = NAMES[level].strip("`")
        axes.errorbar(ratios, means, yerr=errors, fmt="o", color=colour, capsize=2, label=label)
        # The family with the smallest ratio is the same at every level.
        least = min(there, key=lambda family: there[family][0]) if level == "compact" else None
        worst = max(there, key=lambda family: there[family][1].mean)
        for family in filter(None, (least, worst)):
            ratio, loss = there[family]
            axes.annotate(family, (ratio, loss.mean), (5, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="#b8bfc6", linewidth=1, zorder=0)
    axes.set_yscale("symlog", linthresh=1)
    shown = (-10, -1, 0, 1, 10, 100)
    axes.set_yticks(shown, [f"{value:+d}" if value else "0" for value in shown])
    axes.set_xscale("log")
    ticks = [2, 4, 8, 16, 24, 32, 64, 96]
    axes.set_xticks(ticks, [f"{tick} x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("whole state, times smaller over a chain with bases")
    axes.set_ylabel("loss after ten kills,\n% above nearly exact restores")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
