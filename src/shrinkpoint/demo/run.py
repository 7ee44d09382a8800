"""The whole demo: the run that is killed, the baseline, their display, and the report."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..codec.extras import install
from . import SIZES, DemoError, Job, threads
from .report import curves, draw, summarize, tables
from .supervisor import Killer, supervise

if TYPE_CHECKING:
    from rich.console import Console

    from . import DemoConfig
    from .supervisor import Event

MB = 1e6
_HEAD = f"{'step':>7} {'raw MB':>9} {'stored MB':>10} {'ratio':>7} {'ms':>7}"
_READING_EVERY = 5
_MARK = ".shrinkpoint-demo"


def run_demo(config: DemoConfig, console: Console) -> dict[str, Any]:
    """Train, kill, resume, compare with a baseline, and report.

    The output folder then holds `store/` (the checkpoints), `results.json` (the result and the curves), `demo.png` and
    `trainer.log`.

    Args:
        config: as `demo_config` returns it.
        console: for progress and results.

    Returns:
        The result, plain JSON (see `report.summarize`); its `files` has the paths of the files written.

    Raises:
        DemoError: the output folder holds other files, or the trainer failed.
    """
    folder = Folder.fresh(config.out)
    size, preset = config.size, config.preset
    job = Job(config.steps, config.every, config.seed, size, threads(SIZES[size]), preset)
    with View(console, config.steps) as view:
        view.begin("run", f"Training, with compressed checkpoints in {folder.store}")
        killer = Killer(config.kills, config.steps, config.every, config.seed)
        run = supervise(replace(job, store=str(folder.store)), folder.log, view.event, killer)
        view.begin("baseline", "Training without compression and without kills")
        baseline = supervise(job, folder.log, view.event)
    result = summarize(config, run, baseline)
    lines = curves(run, baseline)
    result["files"] = {"store": str(folder.store), "results": str(folder.results)}
    if draw(result, lines, folder.picture):
        result["files"]["picture"] = str(folder.picture)
    folder.results.write_text(json.dumps({**result, "curves": lines}, indent=1) + "\n", encoding="utf-8")
    for table in tables(result):
        console.print(table)
    if "picture" not in result["files"]:
        console.print(f"no picture: matplotlib is missing ({install('report')})")
    for name, path in result["files"].items():
        console.print(f"{name}: {path}", soft_wrap=True, highlight=False)
    return result


class Folder(NamedTuple):
    """The files of a demo run."""

    store: Path
    log: Path
    results: Path
    picture: Path

    @staticmethod
    def fresh(root: Path) -> Folder:
        """Create an empty output folder at `root`, or clear that of a former demo run.

        Raises:
            DemoError: `root` is not a folder, or holds other files; nothing is removed then.
        """
        folder = Folder(root / "store", root / "trainer.log", root / "results.json", root / "demo.png")
        mark = root / _MARK
        if root.exists() and not root.is_dir():
            raise DemoError(f"{root} is a file; use --out with the name of a folder")
        if root.is_dir():
            found = sorted(root.iterdir())
            others = [path for path in found if path not in (*folder, mark)] if mark in found else found
            if others:
                raise DemoError(
                    f"{root} holds {others[0].name!r}, which is not from this demo and is not removed; "
                    "use --out with a new folder"
                )
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
        for path in folder:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return folder


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
