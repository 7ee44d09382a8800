"""The whole demo: the run that is killed, the baseline, and the report."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ..codec.extras import install
from .config import SIZES, Job, threads
from .folder import Folder
from .kills import Killer
from .picture import draw
from .report import curves, summarize, tables
from .supervisor import supervise
from .view import View

if TYPE_CHECKING:
    from rich.console import Console

    from .config import DemoConfig


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
    job = Job(config.steps, config.every, config.seed, config.size, threads(SIZES[config.size]))
    with View(console, config.steps) as view:
        view.begin("run", f"Training, with compressed checkpoints in {folder.store}")
        killer = Killer(config.kills, config.steps, config.every, config.seed)
        run = supervise(job.with_store(folder.store, config.preset), folder.log, view.event, killer)
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
