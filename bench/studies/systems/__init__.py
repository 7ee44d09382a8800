"""The bench `systems`: the tables of four papers at small scale, next to their figures."""

from __future__ import annotations

from ...harness import Options, Row
from .bitsnap import EXPERIMENTS as _BITSNAP
from .inshrinkerator import EXPERIMENTS as _INSHRINKERATOR
from .lc import EXPERIMENTS as _LC
from .others import EXPERIMENTS as _OTHERS
from .rows import EXPERIMENTS as _ROWS
from .table import Experiment

TITLE = "the published systems' tables on small trainings, the papers' figures next to ours"
EXPERIMENTS: tuple[Experiment, ...] = (*_INSHRINKERATOR, *_LC, *_ROWS, *_BITSNAP, *_OTHERS)


def run(options: Options) -> list[Row]:
    """Return the rows of the experiments that `--only` names; fewer with `--quick`."""
    return [row for one in EXPERIMENTS if options.wanted(one.name) for row in options.done(one.rows(options))]
