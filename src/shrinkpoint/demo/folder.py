"""The output folder: made, or cleared of what a former demo left, and never of anything else."""

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
    """Where a demo run keeps its files."""

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
        """An empty output folder at `root`; only files of a former demo run are removed for it.

        Raises:
            DemoError: `root` is no folder, or holds something that no demo run put there; nothing is removed then.
        """
        folder = Folder(root)
        own = (folder.store, folder.log, folder.results, folder.picture)
        mark = root / _MARK
        if root.exists() and not root.is_dir():
            raise DemoError(f"{root} is a file; say --out with the name of a folder")
        if root.is_dir():
            found = sorted(root.iterdir())
            foreign = [path for path in found if path not in (*own, mark)] if mark in found else found
            if foreign:
                raise DemoError(
                    f"{root} holds {foreign[0].name!r}, which is not from this demo, and is left as it is; "
                    "say --out with a new folder"
                )
        root.mkdir(parents=True, exist_ok=True)
        mark.touch()
        for path in own:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        return folder
