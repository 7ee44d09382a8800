"""Progress of a search: a log line for each trial, and a bar on a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from .result import Trial

LOG = logging.getLogger("shrinkpoint.search")
Progress = bool | Callable[[Trial], None] | None


class ProgressReport:
    """Report trials and notes of a search; as a context manager, remove the bar at the end.

    Args:
        progress: True: a bar on standard error; False: no bar; None: a bar if standard error is a terminal; a callable:
            called with every trial when it is done, without a bar.
        total: maximum number of trials.
        silent: neither bar nor log, because another process reports.
    """

    def __init__(self, progress: Progress, total: int, silent: bool) -> None:
        self._call = progress if callable(progress) else None
        self._silent = silent
        shown = sys.stderr.isatty() if progress is None else progress is True
        self._bar: Any = None
        if shown and not silent:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("search"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("baseline", total=total)

    def __enter__(self) -> ProgressReport:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def trial(self, trial: Trial) -> None:
        """Report a trial that is done."""
        if self._call is not None:
            self._call(trial)
        if not self._silent:
            what = str(trial.point or trial.level or "baseline")
            quality = "nan" if trial.quality is None else f"{trial.quality:.6g}"
            found = f"quality {quality}, degradation {trial.degradation:+.3%}, {trial.nbytes} bytes"
            LOG.info("%s: %s, %.2f s: %s", what, found, trial.seconds, trial.reason)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=trial.reason)

    def say(self, text: str, *, warn: bool = False) -> None:
        """Log a line, as a warning if `warn`, unless the report is silent."""
        if not self._silent:
            LOG.log(logging.WARNING if warn else logging.INFO, "%s", text)
