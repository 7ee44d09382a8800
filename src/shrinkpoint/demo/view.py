"""The display of a running demo: lines, and on a terminal a progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from .process import Event

MB = 1e6
_HEAD = f"{'step':>7} {'raw MB':>9} {'stored MB':>10} {'ratio':>7} {'ms':>7}"
_READING_EVERY = 5


class View:
    """Show the events of one run after the other. Use it in a `with` statement.

    Args:
        console: the output.
        steps: number of steps of each run.
    """

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps = console, steps
        self._smooth: float | None = None
        self._readings = 0
        self._name = ""
        self._killed: Event | None = None
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, name: str, title: str) -> None:
        """Begin a run with its short name, for the bar, and a line about it."""
        self._name, self._smooth, self._readings, self._killed = name, None, 0, None
        self._line(f"\n{title}", "bold")
        self._task = self._progress.add_task(name, total=self._steps, loss="")

    def event(self, event: Event) -> None:
        """Show an event of the trainer."""
        kind = event["event"]
        if kind == "step":
            self._smooth = event["loss"] if self._smooth is None else 0.95 * self._smooth + 0.05 * event["loss"]
            if self._task is not None:
                self._progress.update(self._task, completed=event["step"], loss=f"{self._smooth:.3f}")
        elif kind == "start":
            self._start(event)
        elif kind == "saved":
            self._saved(event)
        elif kind == "killed":
            self._killed = event
            moment = "in the middle of a save" if event["during"] == "save" else "between two saves"
            self._line(f"        killed after step {event['at']}, {moment}", "bold red")
        elif kind == "reading":
            self._readings += 1
            if self._name == "baseline" and (self._readings % _READING_EVERY == 0 or event["step"] == self._steps):
                self._line(f"{event['step']:>7}  held-out loss {event['loss']:.3f}")

    def _start(self, event: Event) -> None:
        for warning in event["warnings"]:
            self._line(f"        {warning}", "yellow")
        if event["resumed"] is not None:
            again = max(0, self._killed["at"] - event["resumed"]) if self._killed else 0
            self._line(
                f"        resumed from the checkpoint of step {event['resumed']} in {event['seconds']:.1f} s; "
                f"{again} steps to repeat",
                "bold green",
            )
        elif self._killed:
            self._line("        no checkpoint yet: started from the beginning", "bold green")
        else:
            self._line(f"        {event['parameters'] / MB:.2f} million parameters")
            if self._name != "baseline":
                self._line(_HEAD)

    def _saved(self, event: Event) -> None:
        raw, stored = event["raw"], event["stored"]
        self._line(
            f"{event['step']:>7} {raw / MB:9.2f} {stored / MB:10.2f} {raw / stored:7.2f} {event['ms']:7.0f}"
            f"{'' if event['delta'] else '  base'}"
        )

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)
