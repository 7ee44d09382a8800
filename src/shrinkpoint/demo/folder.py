"""The output folder of the demo, cleared of a former demo's files only."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .config import DemoError

if TYPE_CHECKING:
    from pathlib import Path

_MARK = ".shrinkpoint-demo"


@dataclass(frozen=True)
class Folder:
    """The files of a demo run."""

    root: Path

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def log(self) -> Path:
        return self.root / "trainer.log"

    @property
    def results(self) -> Path:
        return self.root / "results.json"

    @property
    def picture(self) -> Path:
        return self.root / "demo.png"

    @staticmethod
    def fresh(root: Path) -> Folder:
        """Create an empty output folder at `root`, or clear that of a former demo run.

        Raises:
            DemoError: `root` is not a folder, or holds other files; nothing is removed then.
        """
        folder = Folder(root)
        own = (folder.store, folder.log, folder.results, folder.picture)
        mark = root / _MARK
        if root.exists() and not root.is_dir():
            raise DemoError(f"{root} is a file; use --out with the name of a folder")
        if root.is_dir():
            found = sorted(root.iterdir())
            others = [path for path in found if path not in (*own, mark)] if mark in found else found
            if others:
                raise DemoError(
                    f"{root} holds {others[0].name!r}, which is not from this demo and is not removed; "
                    "use --out with a new folder"
                )
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
        for path in own:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return folder
