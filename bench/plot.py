"""Pictures of results: horizontal bars with their targets, and lines over size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shrinkpoint.codec.extras import install
from shrinkpoint.kernels.errors import BadArgumentError

_OURS, _BELOW, _PEER, _MARK = "#2a6f97", "#b5651d", "#b8bfc6", "#222222"


@dataclass(frozen=True)
class Bars:
    """Bars of (label, value, target or None), cut at length `most`; "vs ..." labels are of peers."""

    title: str
    axis: str
    bars: Sequence[tuple[str, float, float | None]]
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
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, panel: Any) -> None:
    labels = [label for label, _, _ in panel.bars]
    values = [value for _, value, _ in panel.bars]
    colors = [_color(*bar) for bar in panel.bars]
    places = range(len(labels))
    lengths = [min(value, panel.most) for value in values]
    axis.barh(places, lengths, color=colors, height=0.7)
    for place, (_, value, target) in enumerate(panel.bars):
        number = f"{value:,.0f}" if value >= 100 else f"{value:.2g}"
        axis.text(max(lengths[place], target or 0.0), place, f"  {number}", va="center", fontsize=8)
        if target is not None:
            axis.plot([target, target], [place - 0.45, place + 0.45], color=_MARK, linewidth=2)
    axis.set_yticks(places, labels, fontsize=8)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_xlim(0, 1.12 * max([*lengths, *(t for _, _, t in panel.bars if t is not None), 1e-9]))
    axis.set_xlabel(panel.axis)
    axis.set_title(f"{panel.title}\n(black mark: target; brown: below it)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _color(label: str, value: float, target: float | None) -> str:
    if label.startswith("vs "):
        return _PEER
    return _BELOW if target is not None and value < target else _OURS


def _lines(axis: Any, panel: Any) -> None:
    styles = ("-", "--", ":")
    for number, (label, points) in enumerate(panel.lines.items()):
        x, y = zip(*points, strict=True)
        axis.plot(x, y, marker="o", markersize=4, label=label, linestyle=styles[number // 10 % 3])
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(panel.x_axis)
    axis.set_ylabel(panel.y_axis)
    axis.set_title(panel.title, fontsize=10)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axis.spines[["top", "right"]].set_visible(False)
