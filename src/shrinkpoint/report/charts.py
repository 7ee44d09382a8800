"""The charts of the report as SVG for HTML; the same input gives the same text."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..codec.errors import ShrinkpointError
from ..codec.extras import install
from .collect import HEADER, Run

if TYPE_CHECKING:
    from .collect import StepRow

INK, FAINT, GRID, RED = "#22252b", "#9aa3af", "#e6e8eb", "#c8102e"
VARIABLES = {"ink": INK, "faint": FAINT, "grid": GRID, "red": RED}
"""Colours that the page replaces in its dark form, by their names in its style sheet."""
_WIDTH = 5.4
"""Width of a figure in inches; its text is about as large as that of a page on a telephone."""
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#7a5195", "#999999", "#44aa99")
"""Colours distinguishable with colour blindness (Okabe and Ito), in the order of use."""
PLAIN: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
"""Style of pictures: lines and grid in the background."""
_STYLE = PLAIN | {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,
}
_ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}


def sizes(run: Run) -> str:
    """Bytes and ratio of each step, bases marked."""

    def draw(figure: Any) -> None:
        top, bottom = figure.subplots(2, 1, sharex=True)
        saved = [s.manifest for s in run.steps]
        steps, stored = [m.step for m in saved], [m.stored_nbytes / 1e6 for m in saved]
        top.plot(steps, [m.raw_nbytes / 1e6 for m in saved], color=FAINT, label="state")
        top.plot(steps, stored, color=COLOURS[0], marker=".", label="stored")
        bases = [(m.step, nbytes) for m, nbytes in zip(saved, stored, strict=True) if not m.is_delta]
        top.plot([step for step, _ in bases], [n for _, n in bases], "s", color=COLOURS[1], label="stored as a base")
        _log_axis(top)
        top.set_ylabel("MB")
        top.legend(**_ABOVE)
        bottom.plot(steps, [m.ratio for m in saved], color=COLOURS[0], marker=".")
        bottom.set_ylim(bottom=0)
        bottom.set_ylabel("ratio")
        for axes in (top, bottom):
            _mark_restores(axes, run)
        _step_axis(bottom)
        bottom.set_xlabel("step" + (" (dashed: restored from)" if run.restored else ""))

    return _svg(draw, "sizes", 4.6)


def parts(run: Run) -> str:
    """Stored bytes of each step by kind of array."""
    names = categories(run.steps)

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        places = list(range(len(run.steps)))
        below = [0.0] * len(places)
        for number, name in enumerate(names):
            heights = [s.parts.get(name, 0) / 1e6 for s in run.steps]
            axes.bar(places, heights, 0.9, bottom=below, color=COLOURS[number % len(COLOURS)], label=name)
            below = [a + b for a, b in zip(below, heights, strict=True)]
        shown = places[:: max(1, -(-len(places) // 12))]
        axes.set_xticks(shown, [str(run.steps[i].step) for i in shown])
        axes.set_xlabel("step")
        axes.set_ylabel("stored MB")
        axes.grid(axis="x", visible=False)
        axes.legend(**_ABOVE)

    return _svg(draw, "parts", 2.6 + 0.12 * len(names))


def errors(run: Run) -> str:
    """Median and largest error of the arrays of each role; "" if all are exact.

    Each measure has a chart of its own.
    """
    measures: dict[str, list[tuple[str, str]]] = {}
    for key in sorted({key for s in run.steps for key in s.errors}):
        measures.setdefault(key[1], []).append(key)
    if not measures:
        return ""
    colours = dict(zip(itertools.chain(*measures.values()), itertools.cycle(COLOURS), strict=False))

    def draw(figure: Any) -> None:
        charts = figure.subplots(len(measures), 1, sharex=True, squeeze=False)[:, 0]
        for axes, (measure, keys) in zip(charts, measures.items(), strict=True):
            for key in keys:
                found = [(s.step, s.errors[key]) for s in run.steps if key in s.errors]
                steps = [step for step, _ in found]
                medians, largest = [e.median for _, e in found], [e.largest for _, e in found]
                axes.plot(steps, medians, color=colours[key], marker=".", label=f"{key[0]}: median")
                axes.plot(steps, largest, color=colours[key], ls=":", label=f"{key[0]}: largest")
            if any(s.errors[key].median > 0 for s in run.steps for key in keys if key in s.errors):
                _log_axis(axes)
            axes.set_ylabel(f"{measure} error")
            _step_axis(axes)
            axes.legend(**_ABOVE)
        charts[-1].set_xlabel("step")

    return _svg(draw, "errors", 0.6 + 2.8 * len(measures))


def quality(run: Run) -> str:
    """Draw the metric of the steps and the demo's held-out losses; "" if neither exists."""
    rated = [(s.step, s.manifest.metric) for s in run.steps if s.manifest.metric is not None]
    if not rated and not run.curves:
        return ""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        if rated:
            axes.plot(*zip(*rated, strict=True), color=COLOURS[0], marker=".", label="metric of the step")
        for number, (name, points) in enumerate(run.curves.items(), 1):
            axes.plot(*zip(*points, strict=True), color=COLOURS[number], label=f"held-out loss, {name}")
        _mark_restores(axes, run)
        _step_axis(axes)
        axes.set_xlabel("step" + (" (dashed: restored from)" if run.restored else ""))
        axes.legend(**_ABOVE)

    return _svg(draw, "quality", 3.0)


def categories(steps: Sequence[StepRow]) -> list[str]:
    """All categories, the largest first, the header last."""
    total: dict[str, int] = {}
    for step in steps:
        for name, nbytes in step.parts.items():
            total[name] = total.get(name, 0) + nbytes
    return sorted(total, key=lambda name: (name == HEADER, -total[name], name))


def _log_axis(axes: Any) -> None:
    """Make the axis logarithmic with plain numbers, because mathematical text is disabled."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _step_axis(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _mark_restores(axes: Any, run: Run) -> None:
    for step in sorted(set(run.restored)):
        axes.axvline(step, color=RED, lw=1, ls="--")


def _svg(draw: Callable[[Any], None], name: str, height: float) -> str:
    """Draw a figure and return it as an SVG element, with `name` in front of its ids."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ShrinkpointError(f"the report needs Matplotlib: {install('report')}") from None
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    out = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', lambda match: f"{match.group(1)}{name}-", text)
    for variable, colour in VARIABLES.items():
        text = text.replace(f": {colour}", f": var(--{variable})")
    return re.sub(
        r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>",
        rf'<svg class="chart" role="img" aria-label="{name}" \1>',
        text,
        count=1,
    )
