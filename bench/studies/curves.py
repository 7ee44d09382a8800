"""The picture of `bench ratio`: bytes against loss, a panel a model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    _legend(axes.flat[0])
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


def _draw(axis: Any, panel: Panel) -> None:
    ours = [*panel.curve, *panel.others]
    most = reach(ours, [*panel.presets, *panel.libraries])
    own: list[Point] = [(f"{setting}, one delta", *point) for setting, point in panel.own.items()]
    labels = []
    for points, colour, marker, hollow in (
        (panel.curve, OURS, "o", False),
        (panel.others, OURS, "s", False),
        (panel.presets, PRESET, "o", False),
        (own, OURS, "o", True),
        (panel.libraries, LIBRARY, "D", True),
    ):
        for name, x, loss in points:
            label, y, edge = placed(name, x, loss, most)
            style = "none" if hollow else "full"
            axis.plot(x, y, edge or marker, color=colour, fillstyle=style, markersize=6 if hollow else 5)
            labels.append((label, x, y, colour))
    drawn = [(x, y) for _, x, y in panel.curve if y is not None]
    axis.plot([x for x, _ in drawn], [y for _, y in drawn], color=OURS, linewidth=1)
    axis.plot([x for _, x in panel.exact], [0.0 for _ in panel.exact], "D", color=LIBRARY, fillstyle="none")
    heights = [0.0, *(y for _, _, y, _ in labels)]
    low, high = min(heights), max(heights)
    room = high - low
    axis.set_ylim(low - 0.5 * room, high + 0.1 * room)
    if panel.exact:
        names = "\n".join(f"{label} {x:.2f} x" for label, x in sorted(panel.exact, key=lambda one: one[1]))
        corner = {"xycoords": "axes fraction", "fontsize": 6.5, "color": LIBRARY, "va": "bottom"}
        axis.annotate(f"exact, one delta:\n{names}", (0.01, 0.015), **corner)
    _write(axis, labels)


def _write(axis: Any, labels: Sequence[tuple[str, float, float, str]]) -> None:
    """Put each label next to its point where it hides neither a point nor a label."""
    axis.figure.canvas.draw()
    renderer = axis.figure.canvas.get_renderer()
    taken = [_box(axis.transData.transform((x, y)), 4) for _, x, y, _ in labels]
    taken += [text.get_window_extent(renderer).extents for text in axis.texts]
    inside = axis.get_window_extent(renderer).extents
    for label, x, y, colour in sorted(labels, key=lambda one: one[1], reverse=True):
        text = axis.annotate(label, (x, y), textcoords="offset points", xytext=(0, 0), fontsize=7, color=colour)
        best: tuple[float, tuple[float, float], str, Any] | None = None
        for (dx, dy), side in _PLACES:
            text.set_position((dx, dy))
            text.set_ha(side)
            box = text.get_window_extent(renderer).extents
            hidden = sum(_overlap(box, other) for other in taken) + 1000 * _outside(box, inside)
            if best is None or hidden < best[0]:
                best = hidden, (dx, dy), side, box
            if hidden == 0:
                break
        if best is not None:
            text.set_position(best[1])
            text.set_ha(best[2])
            taken.append(best[3])
            if abs(best[1][1]) > 14:
                axis.annotate(
                    "", (x, y), textcoords="offset points", xytext=best[1],
                    arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4},
                )  # fmt: skip


_PLACES = [
    ((dx, dy), side)
    for dy in (-3, 7, -13, 17, -23, 27, -33, 37, -43, 47, 57, -53, 67, 77)
    for dx, side in ((7, "left"), (-7, "right"))
]


def _box(at: Sequence[float], half: float) -> tuple[float, float, float, float]:
    return at[0] - half, at[1] - half, at[0] + half, at[1] + half


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """Area that two boxes (left, lower, right, upper) share."""
    width, height = (min(a[i + 2], b[i + 2]) - max(a[i], b[i]) for i in (0, 1))
    return max(width, 0.0) * max(height, 0.0)


def _outside(box: Sequence[float], frame: Sequence[float]) -> float:
    whole = (box[2] - box[0]) * (box[3] - box[1])
    return whole - _overlap(box, frame)


def _legend(axis: Any) -> None:
    from matplotlib.lines import Line2D

    kinds: Mapping[str, tuple[str, str, str]] = {
        "Config(rate=...), chain": ("o", OURS, "full"),
        "the same, other bins": ("s", OURS, "full"),
        "published preset, chain": ("o", PRESET, "full"),
        "ours, one delta": ("o", OURS, "none"),
        "other library, one delta": ("D", LIBRARY, "none"),
    }
    handles = [
        Line2D([], [], linestyle="", marker=m, color=c, fillstyle=f, markersize=5, label=label)  # type: ignore[arg-type]
        for label, (m, c, f) in kinds.items()
    ]
    axis.figure.legend(handles=handles, loc="outside upper right", fontsize=8, ncols=len(handles), frameon=False)
