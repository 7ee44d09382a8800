"""Pictures of results: horizontal bars with their targets, and lines over size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shrinkpoint.codec.extras import install
from shrinkpoint.kernels.errors import BadArgumentError

from .harness import Row

_OURS, _MISSED, _PEER, _MARK = "#2a6f97", "#b5651d", "#b8bfc6", "#222222"


@dataclass(frozen=True)
class Bar:
    """A bar: label ("vs ..." is of a peer), length, target, and whether that is missed."""

    label: str
    value: float
    target: float | None = None
    missed: bool = False

    @property
    def color(self) -> str:
        return _PEER if self.label.startswith("vs ") else _MISSED if self.missed else _OURS


@dataclass(frozen=True)
class Bars:
    """Horizontal bars, cut at length `most`."""

    title: str
    axis: str
    bars: list[Bar] = field(default_factory=list)
    most: float = math.inf


@dataclass(frozen=True)
class Lines:
    """Lines by label, [(x, y), ...] each, on logarithmic axes."""

    title: str
    x_axis: str
    y_axis: str
    lines: dict[str, list[tuple[int, float]]]


def pyplot() -> Any:
    """Matplotlib's pyplot, for files.

    Raises:
        BadArgumentError: Matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise BadArgumentError(f"--plot needs Matplotlib: {install('report')}") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the values of rows and their peers, a panel a unit; marks are targets."""
    panels: dict[str, Bars] = {}
    last = None
    for row in rows:
        bars = panels.setdefault(row.unit, Bars(row.unit, row.unit)).bars
        if row.value is not None and (row.row, row.size) != last:
            bars.append(Bar(row.row, row.value, limit(row, row.unit), row.met is False))
        if row.peer_value is not None:
            bars.append(Bar(f"vs {row.peer}", row.peer_value))
        last = row.row, row.size
    measured = [panel for panel in panels.values() if panel.bars]
    if not measured:
        raise BadArgumentError("--plot: no row has a value")
    draw(path, measured)


def limit(row: Row, unit: str) -> float | None:
    """Return the number of a row's target if it is one in this unit."""
    return float(row.target.split()[1]) if row.target is not None and row.target.endswith(f" {unit}") else None


def draw(path: Path, panels: Sequence[Bars | Lines]) -> None:
    """Draw the panels side by side into a file; its ending says which kind.

    Raises:
        BadArgumentError: Matplotlib is not installed.
    """
    plt = pyplot()
    most = max((len(p.bars) for p in panels if isinstance(p, Bars)), default=0)
    size = (8.5 * len(panels), max(5.0, 1.0 + 0.27 * most))
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, panel in zip(axes[0], panels, strict=True):
        (_bars if isinstance(panel, Bars) else _lines)(axis, panel)
        axis.set_title(panel.title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, panel: Any) -> None:
    ends = [min(bar.value, panel.most) for bar in panel.bars]
    axis.barh(range(len(ends)), ends, color=[bar.color for bar in panel.bars], height=0.7)
    for place, bar in enumerate(panel.bars):
        number = f"{bar.value:,.0f}" if bar.value >= 100 else f"{bar.value:.2g}"
        axis.text(max(ends[place], bar.target or 0.0), place, f"  {number}", va="center", fontsize=8)
        if bar.target is not None:
            axis.plot([bar.target, bar.target], [place - 0.45, place + 0.45], color=_MARK, linewidth=2)
    axis.set_yticks(range(len(ends)), [bar.label for bar in panel.bars], fontsize=8)
    axis.set_ylim(len(ends) - 0.4, -0.6)
    shown = [0.0, *ends, *(bar.target or 0.0 for bar in panel.bars)]
    axis.set_xlim(1.12 * min(shown), 1.12 * max([*shown, 1e-9]))
    axis.set_xlabel(f"{panel.axis} (black mark: target; brown: missed)")


def _lines(axis: Any, panel: Any) -> None:
    styles = ("-", "--", ":")
    for number, (label, points) in enumerate(panel.lines.items()):
        x, y = zip(*points, strict=True)
        axis.loglog(x, y, marker="o", markersize=4, label=label, linestyle=styles[number // 10 % 3])
    axis.set_xlabel(panel.x_axis)
    axis.set_ylabel(panel.y_axis)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
