"""The bench `systems`: the tables of four papers at small scale, next to their figures."""

from __future__ import annotations

from pathlib import Path

from ...harness import Options, Row
from ...plot import Bars, draw
from .bitsnap import EXPERIMENTS as _BITSNAP
from .inshrinkerator import EXPERIMENTS as _INSHRINKERATOR
from .lc import EXPERIMENTS as _LC
from .lossless import EXPERIMENTS as _LOSSLESS
from .priorart import EXPERIMENTS as _PRIOR_ART
from .rows import EXPERIMENTS as _ROWS
from .table import Experiment

TITLE = "the published systems' tables on small trainings, the papers' figures next to ours"
EXPERIMENTS: tuple[Experiment, ...] = (*_INSHRINKERATOR, *_LC, *_ROWS, *_BITSNAP, *_LOSSLESS, *_PRIOR_ART)
_Bar = tuple[str, float, float | None]


def run(options: Options) -> list[Row]:
    """Return the rows of the experiments that `--only` names; fewer with `--quick`."""
    return [row for one in EXPERIMENTS if options.wanted(one.name) for row in options.done(one.rows(options))]


def plot(rows: list[Row], path: Path) -> None:
    """Draw rework at equal size, bins for 1 %, and lossless ratios, a panel each."""
    panels = [
        Bars(title, axis, bars)
        for title, axis, bars in (
            ("LC-Checkpoint, figure 3", "iterations of rework, 2 bits", _rework(rows)),
            ("Inshrinkerator, table 7", "bins for 1 % degradation", _bins(rows)),
            ("Exact ratio", "times smaller", _lossless(rows)),
        )
        if bars
    ]
    draw(path, panels or [Bars("no drawn experiment was run", "", [])])


def _rework(rows: list[Row]) -> list[_Bar]:
    bars: list[_Bar] = []
    for row in rows:
        if row.row.endswith("iterations of rework, 2 bits") and row.value is not None and row.peer_value is not None:
            task = row.row.split(":")[0].rsplit(" on ", 1)[-1]
            if row.peer == "SCAR":
                bars.append((f"{task}: LC-Checkpoint", row.value, None))
            bars.append((f"vs {row.peer}", row.peer_value, None))
    return bars


def _bins(rows: list[Row]) -> list[_Bar]:
    bars: list[_Bar] = []
    for row in rows:
        if " bins on " in row.row and ": 1 % degradation, " in row.row and row.value is not None:
            model, system = row.row.split(" bins on ", 1)[1].split(": 1 % degradation, ")
            bars.append((f"{model}: {system}" if system.startswith("ours") else f"vs {system}", row.value, None))
    return bars


def _lossless(rows: list[Row]) -> list[_Bar]:
    bars: list[_Bar] = []
    for row in rows:
        label = row.row.removeprefix("lossless ratio: ")
        if label != row.row and row.peer_value is not None and not label.endswith("the best"):
            if row.value is not None and all(bar[0] != label for bar in bars):
                bars.append((label, row.value, None))
            bars.append((f"vs {row.peer}", row.peer_value, None))
    return bars
