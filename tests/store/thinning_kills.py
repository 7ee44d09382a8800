"""A process killed (SIGKILL) at every call that changes a file while it thins a store.

    python -m tests.store.thinning_kills FOLDER

A process without threads forks the victims, each with one more call than the one before, until one survives.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("SHRINKPOINT_THREADS", "1")

import shrinkpoint as sp
from shrinkpoint.store import local
from shrinkpoint.store.retention import Retention
from tests.store.common import leftovers, lossless
from tests.store.thinning_states import is_thinned, state

RULE = Retention(last=9, every=4, thin_after=2)
STEPS, KEPT, WHOLE = range(14), [0, 4, *range(5, 14)], {4, 12, 13}
"""Steps that are saved; those that `RULE` keeps; those that stay whole (4 is pinned)."""
CALLS = ("fsync", "replace", "link", "unlink")


class Deadly:
    """`os` for `store.local`, which kills the process before or after its n-th change."""

    def __init__(self, at: int, after: bool) -> None:
        self.left, self.after = at, after

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in CALLS:
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.left -= 1
            if not self.left and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            answer = found(*args, **options)
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        return call


def killed(root: Path, at: int, after: bool) -> bool:
    """Thin a store in a process that dies at a change; return whether it died."""
    child = os.fork()
    if child == 0:
        try:
            local.os = Deadly(at, after)  # type: ignore[assignment]
            sp.Store(root).gc(RULE)
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def main() -> None:
    """Kill a process at each change, check the store, thin it to the end; print a row."""
    root = Path(sys.argv[1])
    whole = root / "whole"
    store = sp.Store(whole, lossless(base_every=5))
    for step in STEPS:
        store.save(step, state(step))
    store.pin(4)
    warnings.simplefilter("ignore")
    kills, between = 0, Counter[int]()
    for after in (False, True):
        for at in range(1, 1000):
            copy = root / f"{after}-{at}"
            shutil.copytree(whole, copy)
            died = killed(copy, at, after)
            left = sp.Store(copy)
            assert left.verify() == {}, (at, after)
            assert set(KEPT) <= set(left.steps())
            before = {s for s in left.steps() if is_thinned(left, s)}
            assert not before & WHOLE, (at, after, before)
            left.gc(RULE)
            assert left.steps() == KEPT
            assert left.verify() == {}
            assert {s for s in KEPT if not is_thinned(left, s)} == WHOLE
            assert leftovers(copy) == []
            names = {name for m in left.manifests()[0].values() for name in m.files}
            assert {p.name for p in (copy / "data").iterdir()} == names
            shutil.rmtree(copy)
            if not died:
                break
            kills += 1
            between[len(before)] += 1
        else:
            raise AssertionError("no process survived")
    print(json.dumps({"kills": kills, "thinned_before_the_kill": dict(sorted(between.items()))}))


if __name__ == "__main__":
    main()
