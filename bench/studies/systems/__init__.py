"""The bench `systems`: the tables of four papers at small scale, next to their figures."""

from __future__ import annotations

import re
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
_PANELS = (
    (
        "LC-Checkpoint, figure 3",
        "times less rework, 2 bits",
        r"LC-Checkpoint rework on (.*) over LC-Checkpoint, 2 bits",
    ),
    ("Inshrinkerator, table 7", "bins for 1 % degradation", r"Inshrinkerator bins on (.*): 1 % degradation(, .*)"),
    ("Exact ratio", "times smaller", r"lossless ratio: (.*), the best"),
)
"""Title and axis of each panel of the picture, and the rows that it shows; the groups are the bars' labels."""


def run(options: Options) -> list[Row]:
    """Return the rows of the experiments that `--only` names; fewer with `--quick`."""
    return [row for one in EXPERIMENTS if options.wanted(one.name) for row in options.done(one.rows(options))]


def plot(rows: list[Row], path: Path) -> None:
    """Draw rework at equal size, bins for 1 %, and exact ratios with the best peer's marked, a panel each."""
    panels = []
    for title, axis, pattern in _PANELS:
        found = [(re.fullmatch(pattern, row.row), row) for row in rows]
        mark = [None if row.unit == "bins" else row.peer_value for row in rows]
        bars = [("".join(m.groups()), r.value, at) for (m, r), at in zip(found, mark, strict=True) if m and r.value]
        panels += [Bars(title, axis, bars)] if bars else []
    draw(path, panels or [Bars("no drawn experiment was run", "", [])])
