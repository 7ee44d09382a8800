"""The whole demo: the run that is killed, the baseline, and the report."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

from ..codec.extras import install
from .config import SIZES, DemoError, Job, threads
from .kills import Killer
from .picture import draw
from .report import curves, summarize, tables
from .supervisor import supervise
from .view import View

if TYPE_CHECKING:
    from pathlib import Path

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


_MARK = ".shrinkpoint-demo"


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
