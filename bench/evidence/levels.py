"""Losses and ratios of the quality levels, and the front of the default: `bench harm`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..plot import pyplot
from ..studies import overview as study
from ..studies.harm.campaign import RESULTS
from ..studies.harm.families import SET_ASIDE
from ..studies.harm.groups import ALL as FAMILIES
from ..studies.harm.groups import HELD_BACK, REGRESSIONS, SENSITIVE
from ..studies.harm.settings import PARTS
from ..studies.harm.summary import Campaign, Effect
from .cells import markdown, number
from .results import rows_of

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


TASKS = {
    "classifiers, language models": tuple(name for name in FAMILIES if name not in (*REGRESSIONS, "PINN")),
    "regression, autoencoders": REGRESSIONS,
    "physics (PINN)": ("PINN",),
}
"""Families by kind of task, whose losses a level changes differently."""


def levels() -> str:
    """Return a line a level, each figure that of the worst family, and the names of these families."""
    lines, named = [], []
    for level, name in NAMES.items():
        ratios = {family: ratio for family in FAMILIES if (ratio := _ratio_of(family, level)) is not None}
        figures = [_answers(level), *(_end(level, families) for families in TASKS.values())]
        mean, least = _MISSING, (_MISSING, "")
        if ratios:
            smallest = min(ratios, key=ratios.__getitem__)
            mean, least = f"{statistics.fmean(ratios.values()):.3g} x", (f"{ratios[smallest]:.3g} x", smallest)
        lines.append([name, mean, least[0], *(cell for cell, _ in figures)])
        if worst := [family for _, family in [least, *figures] if family]:
            named.append(f"{name} {', '.join(worst)}")
    head = ["level", "times smaller, mean", "times smaller", "same answers after a restore"]
    table = markdown([*head, *(f"loss after ten kills, bound: {task}" for task in TASKS)], lines)
    said = "Each figure but the mean is that of the worst family. These are, from left to right:"
    return f"{table}\n\n{said} {'; '.join(named)}."


def _answers(level: str) -> tuple[str, str]:
    """Return the share of the same answers right after a restore, with the worst family."""
    if level in ("lossless", "exact_weights"):
        return "100 %", ""
    found = {family: one for family in FAMILIES if (one := campaign().found(family, level)) is not None}
    answers = {family: one.agreement for family, one in found.items() if one.agreement is not None}
    if not answers:
        return _MISSING, ""
    least = min(answers, key=answers.__getitem__)
    return f"{answers[least]:.2f} %", least


def _end(level: str, families: Iterable[str] = tuple(FAMILIES)) -> tuple[str, str]:
    """Return the bound of the loss after ten kills, with the worst of the families."""
    if level == "lossless":
        return "equal", ""
    found = {
        family: one.loss for family in families if (one := campaign().found(family, level)) is not None and one.loss
    }
    if not found:
        return _MISSING, ""
    worst = max(found, key=lambda family: found[family].bound or -math.inf)
    return _bound(found[worst]), worst


def overview() -> str:
    """Return the costs of a checkpoint of the demo's model by level, and the loss after kills."""
    values = {row["row"]: row["value"] for row in rows_of("overview.json")}
    lines = []
    for level in (study.SAVED, *(level for level in study.LEVELS if level != "compact")):
        cells = [
            f"{number(values[f'{level}: {what}'])} {unit}" if f"{level}: {what}" in values else _MISSING
            for what, unit in study.WHAT.items()
        ]
        lost = "equal" if level == study.SAVED else _end(level, TASKS["classifiers, language models"])[0]
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


def _bound(found: Effect | None, unit: str = " %") -> str:
    return _MISSING if found is None or found.bound is None else change(found.bound, unit)


def _ratio_of(family: str, level: str) -> float | None:
    """Return the ratio of a chain of whole states, of killed trainings if there are any."""
    found = campaign().found(family, level)
    if found is not None:
        return found.ratio
    return next((row["ratio"] for row in campaign().of("chain", family, level).values()), None)


def _effect(found: Effect | None, unit: str = " %") -> list[str]:
    """Return the cells of a mean, its standard error and its bound."""
    if found is None:
        return [_MISSING] * 3
    error = _MISSING if found.error is None else f"{found.error:.2f}"
    return [change(found.mean, unit), error, _bound(found, unit)]


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
            lines.append([_label(family), *[_MISSING] * 11])
            continue
        accuracy = ["-"] * 3 if found.agreement is None else _effect(found.accuracy, "")
        answers = "-" if found.agreement is None else f"{found.agreement:.2f} %"
        at_restore = [answers, f"{found.rms:.2f} %", change(found.worst)]
        sizes = [f"{found.ratio:.1f} x", f"{found.weights:.1f} x"]
        lines.append([_label(family), *at_restore, *_effect(found.loss), *accuracy, *sizes])
    head = ["family", "same answers", "loss change at a restore, rms", "worst", "loss after ten kills", *_EFFECT]
    return markdown([*head, "accuracy", *_EFFECT, "whole state", "weights"], lines)


def exact_levels() -> str:
    """Return a line a family for the two levels that restore the model bit for bit."""
    lines = []
    for family in FAMILIES:
        found, ratio = campaign().found(family, "exact_weights"), _ratio_of(family, "lossless")
        cells = [_MISSING if ratio is None else f"{ratio:.2f} x"]
        if found is None:
            cells += [_MISSING] * 7
        else:
            accuracy = ["-"] * 3 if found.agreement is None else _effect(found.accuracy, "")
            cells += [f"{found.ratio:.2f} x", *_effect(found.loss), *accuracy]
        lines.append([_label(family), *cells])
    head = ["family", "lossless", "exact_weights", "its loss after ten kills", *_EFFECT, "points of accuracy", *_EFFECT]
    return markdown(head, lines)


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
        far = _geometric(row["after"][steps]["divergence"] for row in rows)
        slope = (before[1] - far) / (bits - before[0]) if part == kind and bits > before[0] else None
        changed = 100 * statistics.fmean(row["after"][steps]["changed"] for row in rows)
        lines.append(
            [
                part,
                value,
                *(f"{size:.2f}" for size in (base, delta, bits)),
                f"{1e5 * far:.2f}",
                f"{changed:.2f} %",
                "" if slope is None else f"{1e5 * slope:.1f}",
            ]
        )
        kind, before = part, (bits, far)
    head = ["part", "setting", "bits in a base", "in a delta", "in a chain", "divergence, 1e-5 nats", "answers changed"]
    return markdown([*head, "less divergence for a bit more"], lines)


def _geometric(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def measured() -> bool:
    """Return whether results of killed trainings exist to draw."""
    return any(campaign().found(family, "default") for family in FAMILIES)


_COLOURS = {"exact_weights": "#6c757d", "precise": "#3a7d44", "default": "#2a6f97", "compact": "#b5651d"}


def picture(path: Path) -> None:
    """Draw the loss after ten kills against the ratio, a point for each family and level."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for level, colour in _COLOURS.items():
        found = {family: campaign().found(family, level) for family in FAMILIES}
        there = {family: one for family, one in found.items() if one is not None and one.loss is not None}
        losses = [one.loss for one in there.values() if one.loss is not None]
        axes.errorbar(
            [one.ratio for one in there.values()],
            [loss.mean for loss in losses],
            yerr=[loss.error or 0.0 for loss in losses],
            fmt="o",
            color=colour,
            capsize=2,
            label=NAMES[level].strip("`"),
        )
        ends = dict(zip(there, losses, strict=True))
        least = sorted(there, key=lambda family: there[family].ratio)[:1]
        worst = sorted(ends, key=lambda family: ends[family].mean)[-1:]
        for family in dict.fromkeys((*least, *worst)):
            at = there[family].ratio, ends[family].mean
            axes.annotate(family, at, (5, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="#b8bfc6", linewidth=1, zorder=0)
    axes.set_yscale("symlog", linthresh=1)
    shown = (-10, -1, 0, 1, 10, 100)
    axes.set_yticks(shown, [f"{value:+d}" if value else "0" for value in shown])
    axes.set_xscale("log")
    ticks = [4, 8, 16, 24, 32, 64, 96]
    axes.set_xticks(ticks, [f"{tick} x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("whole AdamW state, times smaller over a chain with bases")
    axes.set_ylabel("loss after ten kills,\n% above nearly exact restores")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
