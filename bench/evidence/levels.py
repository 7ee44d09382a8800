"""Losses and ratios of the quality levels, and the front of the default: `bench harm`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..plot import pyplot
from ..studies.harm.campaign import RESULTS
from ..studies.harm.families import FAMILIES, SET_ASIDE
from ..studies.harm.settings import PARTS
from ..studies.harm.summary import Campaign, Effect, Found
from .cells import markdown

NAMES = {
    "lossless": "`presets.lossless()`",
    "exact_weights": "`presets.exact_weights()`",
    "default": "`Config()`",
    "compact": "`presets.compact()`",
}
HOLDS = {
    "lossless": "every bit of every array",
    "exact_weights": "weights exact; moments as by `Config()`",
    "default": "weights of 64 bins; moments to a step of 0.5 and 0.5 octaves",
    "compact": "weights of 24 bins that move where it is worth the bits; moments to a step of 4 and 2 octaves",
}
_MISSING = "not measured"
_BASES = 20
"""Checkpoints from one base to the next."""


@cache
def campaign() -> Campaign:
    """Return the committed rows of the campaign."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.exists() else []
    return Campaign(json.loads(line) for line in lines)


def levels() -> str:
    """Return a line a level: the worst family at a restore and after ten kills, and ratios."""
    lines = []
    for level, name in NAMES.items():
        found = {family: campaign().found(family, level) for family in FAMILIES}
        there = {family: one for family, one in found.items() if one is not None}
        lines.append([name, HOLDS[level], _restore(level, there), _ends(level, there), _ratios(level)])
    head = ["level", "holds", "at a restore, worst family", "after ten kills, worst family", "whole state, chain"]
    return markdown(head, lines)


def _restore(level: str, found: dict[str, Found]) -> str:
    if level in ("lossless", "exact_weights"):
        return "nothing: the model is restored bit for bit"
    if not found:
        return _MISSING
    agreements = {family: one.agreement for family, one in found.items() if one.agreement is not None}
    least, loudest = min(agreements, key=agreements.__getitem__), max(found, key=lambda family: found[family].rms)
    return (
        f"{agreements[least]:.2f} % same answers ({least}); loss change {found[loudest].rms:.2f} % rms, "
        f"{found[loudest].worst:+.2f} % at worst ({loudest})"
    )


def _ends(level: str, found: dict[str, Found]) -> str:
    if level == "lossless":
        return "nothing: the same end, bit for bit"
    losses = {family: one.loss for family, one in found.items() if one.loss is not None}
    if not losses:
        return _MISSING
    worst = max(losses, key=lambda family: losses[family].mean)
    return f"loss {effect(losses[worst])} ({worst})"


def _ratio_of(family: str, level: str) -> float | None:
    """Return the ratio of a chain of whole states, of killed trainings if there are any."""
    found = campaign().found(family, level)
    if found is not None:
        return found.ratio
    return next((row["ratio"] for row in campaign().of("chain", family, level).values()), None)


def _ratios(level: str) -> str:
    ratios = {family: ratio for family in FAMILIES if (ratio := _ratio_of(family, level)) is not None}
    if not ratios:
        return _MISSING
    mean, least = statistics.fmean(ratios.values()), min(ratios, key=ratios.__getitem__)
    of = "" if len(ratios) == len(FAMILIES) else f"; {len(ratios)} of {len(FAMILIES)} families"
    return f"{mean:.3g} x mean, {ratios[least]:.3g} x ({least}){of}"


def effect(found: Effect | None, unit: str = "%") -> str:
    """Write a mean with its standard error and bound."""
    if found is None:
        return _MISSING
    if found.bound is None:
        return f"{found.mean:+.2f} {unit} (one seed)"
    return f"{found.mean:+.2f} +- {found.error:.2f} {unit}, bound {found.bound:+.2f} ({found.seeds} seeds)"


def level(name: str) -> str:
    """Return a line a family: the losses of one level there."""
    lines = []
    for family in FAMILIES:
        found = campaign().found(family, name)
        label = f"{family} (set aside)" if family in SET_ASIDE else family
        if found is None:
            lines.append([label, *[_MISSING] * 5])
            continue
        lines.append(
            [
                label,
                "-" if found.agreement is None else f"{found.agreement:.2f} %",
                f"{found.rms:.2f} %, {found.worst:+.2f} %",
                effect(found.loss),
                "-" if found.agreement is None else effect(found.accuracy, "points"),
                f"{found.ratio:.1f} x, {found.weights:.1f} x",
            ]
        )
    head = ["family", "same answers", "loss change at a restore: rms, worst", "loss after ten kills", "accuracy lost"]
    return markdown([*head, "whole state, weights"], lines)


def exact_levels() -> str:
    """Return a line a family for the two levels that restore the model bit for bit."""
    lines = []
    for family in FAMILIES:
        label = f"{family} (set aside)" if family in SET_ASIDE else family
        found, ratio = campaign().found(family, "exact_weights"), _ratio_of(family, "lossless")
        cells = [_MISSING if ratio is None else f"{ratio:.2f} x"]
        if found is None:
            cells += [_MISSING] * 3
        else:
            accuracy = "-" if found.agreement is None else effect(found.accuracy, "points")
            cells += [effect(found.loss), accuracy, f"{found.ratio:.2f} x"]
        lines.append([label, *cells])
    head = ["family", "lossless: whole state", "exact_weights: loss after ten kills", "accuracy lost", "whole state"]
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
            lines.append([part, value, *[_MISSING] * 4])
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
                f"{base:.2f}, {delta:.2f}, {bits:.2f}",
                f"{1e5 * far:.2f}",
                f"{changed:.2f} %",
                "" if slope is None else f"{1e5 * slope:.1f}",
            ]
        )
        kind, before = part, (bits, far)
    head = ["part", "setting", "bits: base, delta, over a chain", "divergence, 1e-5 nats", "answers changed"]
    return markdown([*head, "less divergence for a bit more"], lines)


def _geometric(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def measured() -> bool:
    """Return whether results of killed trainings exist to draw."""
    return any(campaign().found(family, "default") for family in FAMILIES)


def picture(path: Path) -> None:
    """Draw the loss after ten kills against the ratio, a point for each family and level."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for level, colour in (("exact_weights", "#6c757d"), ("default", "#2a6f97"), ("compact", "#b5651d")):
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
        for family in {*least, *worst}:
            at = there[family].ratio, ends[family].mean
            axes.annotate(family, at, (5, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="#b8bfc6", linewidth=1, zorder=0)
    axes.set_xscale("log")
    ticks = [4, 8, 16, 24, 32, 64, 96]
    axes.set_xticks(ticks, [f"{tick} x" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("whole AdamW state, times smaller over a chain with bases")
    axes.set_ylabel("loss after ten kills\nagainst the null, %")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)
