"""A writer that races another for each generation of a step's manifest.

    python -m tests.store.racing URL FOLDER WHO TURNS

WHO is 0 or 1; the two meet in FOLDER. It prints how often it lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import shrinkpoint as sp
from shrinkpoint.store.manifest import STEPS
from tests.store.common import lossless, same, state

ROOT = Path(__file__).resolve().parents[2]
STEP = 5


class Meeting:
    """Two processes that wait for each other."""

    def __init__(self, folder: Path, who: int) -> None:
        self.folder, self.who = folder, who

    def at(self, point: str, patience: float = 300.0) -> None:
        """Wait until both are here."""
        (self.folder / f"{point}-{self.who}").touch()
        end = time.monotonic() + patience
        while not (self.folder / f"{point}-{1 - self.who}").exists():
            if time.monotonic() > end:
                raise TimeoutError(f"the other one never came to {point}")
            time.sleep(0.001)


def number(who: int, turn: int) -> int:
    """Number of the state that a writer saves in a turn."""
    return 100 * (who + 1) + turn


def main() -> None:
    """Run one writer."""
    url, meeting, turns = sys.argv[1], Meeting(Path(sys.argv[2]), int(sys.argv[3])), int(sys.argv[4])
    store = sp.Store(url, lossless(base_every=1))
    files, refused = store._files, 0
    real = files.create
    waiting = ""

    def create(name: str, data: bytes) -> bool:
        nonlocal refused, waiting
        if name.startswith(f"{STEPS}/") and waiting:
            meeting.at(waiting)
            waiting = ""
        done = real(name, data)
        refused += not done
        return done

    files.create = create  # type: ignore[method-assign]
    for turn in range(turns):
        waiting = f"put-{turn}"
        store.save(STEP, state(number(meeting.who, turn)))
        meeting.at(f"saved-{turn}")
    print(refused)


def race(url: str, folder: Path, turns: int = 6) -> None:
    """Let two writers race; each generation is won by one, and the other takes the next."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.store.racing", url, str(folder)]
    environment = {**os.environ, "SHRINKPOINT_THREADS": "1"}
    running = [
        subprocess.Popen([*command, str(who), str(turns)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        for who in (0, 1)
    ]
    told = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum(map(int, told)) == turns, f"{told}: of two that put one name one must lose"
    store = sp.Store(url)
    assert store._catalog.generations() == {STEP: [2 * turns - 1]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = store.load(count=False)
    assert any(same(found, number(who, turns - 1)) for who in (0, 1))
    store.gc()
    assert store.verify() == {}
    assert len(store._files.list("data")) == 1


if __name__ == "__main__":
    main()
