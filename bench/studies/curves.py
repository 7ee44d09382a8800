"""The picture of `bench ratio`: bytes against loss, a panel a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..harness import Row
from ..plot import pyplot
from .outcomes import CASES, FURTHER, RUINED, lost_later, setting_of

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
