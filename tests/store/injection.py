"""Processes killed, or given disk errors, at chosen system calls by strace.

A process without threads forks a child for each trial. The child waits until strace is attached to it, and does one
operation on a store: so code is compiled and imported once for all trials, and strace's count of calls, which it
keeps for each thread, begins with the operation. Run by `test_crash.py` and, for longer, by `campaign.py`:

    python -m tests.store.injection FOLDER all
    python -m tests.store.injection FOLDER '[[SCENARIO, MODE, SHARE], ...]'
"""

from __future__ import annotations

import collections
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("SHRINKPOINT_THREADS", "1")

import shrinkpoint as sp
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.retention import Retention
from shrinkpoint.store.store import RestoreNotCountedWarning
from tests.store.common import fill, leftovers, listing, lossless, same, state

CALLS = (
    *("write", "pwrite64", "writev", "fsync", "fdatasync", "ftruncate"),
    *("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat", "mkdir", "mkdirat"),
)
"""Everything that writes, syncs, renames, removes or makes a name."""
PATIENCE = 300.0
"""Seconds for what takes one or two where nothing else runs: a worker stands back for all others."""
ERRORS = {
    "ENOSPC": {"write", "link", "linkat", "rename", "renameat", "mkdir"},
    "EIO": {"write", "fsync", "rename", "renameat", "link", "linkat", "unlink", "unlinkat"},
}


@dataclass
class Scenario:
    """An operation on a prepared store, and the expected result.

    Args:
        prepare: fills a store; returns the steps in it.
        act: what the child does.
        beside: for what another process does, in place of `act`: it begins, and returns the process to be traced and
            what is left to do.
        saved: steps that the child saves before it is traced.
        adds: steps that may be there afterwards and must be if it ended well.
        drops: steps that may be gone afterwards.
    """

    prepare: Callable[[Path], None]
    act: Callable[[Path], None] = lambda root: None
    beside: Callable[[Path], tuple[int, Callable[[], None]]] | None = None
    saved: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()
    drops: tuple[int, ...] = ()
    replaced: dict[int, int] = field(default_factory=dict)


def _chain(root: Path) -> None:
    fill(sp.Store(root, lossless()), *range(6))


def _based(root: Path) -> None:
    fill(sp.Store(root, lossless(against="base", base_every=3)), *range(6))


def _compacted(root: Path) -> None:
    _chain(root)
    sp.Store(root).compact(2.0)


def _save_delta(root: Path) -> None:
    store = sp.Store(root, lossless())
    store.load(count=False)
    fill(store, 7)


def _save_again(root: Path) -> None:
    store = sp.Store(root, lossless())
    store.load(2, count=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)  # it goes back from step 5
        store.save(3, state(33))


def _worker(root: Path) -> tuple[int, Callable[[], None]]:
    store = sp.Store(root, lossless())
    store.load(count=False)
    saver = sp.Saver(store)
    for step in (7, 8):
        saver.save(step, state(step)).result(PATIENCE)
    assert saver.pid is not None
    # If it is killed that is a ChildProcessError, which is an OSError.
    return saver.pid, lambda: saver.save(9, state(9)).result(PATIENCE) and None


def _upkeep(root: Path) -> tuple[int, Callable[[], None]]:
    """Prepare a save that compacts the chain and removes the replaced files."""
    store = sp.Store(root, lossless())
    store.load(count=False)
    saver = sp.Saver(store, compact=8.5, keep=Retention(last=4))
    runner = saver._runner
    assert runner is not None
    for step in store.steps():
        store.pin(step)
    for step in (7, 8):
        saver.save(step, state(step)).result(PATIENCE)
        assert runner.maintaining is not None
        runner.maintaining.result(PATIENCE)

    def work() -> None:
        for step in (0, 3):
            store.unpin(step)
        saver.save(9, state(9)).result(PATIENCE)
        assert runner.maintaining is not None
        runner.maintaining.result(PATIENCE)
        saver.wait()

    assert saver.pid is not None
    return saver.pid, work


def _labels(root: Path) -> None:
    store = sp.Store(root)
    store.pin(3)
    store.tag("best", 4)
    store.tag("best", 5)
    store.rate(2, 0.5)
    store.unpin(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RestoreNotCountedWarning)
        store.load()


SCENARIOS = {
    "first save": Scenario(lambda root: None, lambda root: fill(sp.Store(root, lossless()), 0) and None, adds=(0,)),
    "save a base": Scenario(_chain, lambda root: fill(sp.Store(root, lossless()), 7) and None, adds=(7,)),
    "save a delta": Scenario(_chain, _save_delta, adds=(7,)),
    "save against the base": Scenario(_based, _save_delta, adds=(7,)),
    "save a step again": Scenario(_chain, _save_again, replaced={3: 33}),
    "save by a worker": Scenario(_chain, beside=_worker, saved=(7, 8), adds=(9,)),
    "upkeep by a worker": Scenario(_chain, beside=_upkeep, saved=(7, 8), adds=(9,), drops=(0, 3)),
    "compact": Scenario(_chain, lambda root: sp.Store(root).compact(2.0) and None),
    "compact to bases": Scenario(_based, lambda root: sp.Store(root).compact(1.0) and None),
    "gc": Scenario(_compacted, lambda root: sp.Store(root).gc(Retention(last=2)) and None, drops=(0, 1, 2, 3)),
    "gc of a chain": Scenario(_chain, lambda root: sp.Store(root).gc(Retention(every=4)) and None, drops=(1, 2, 3, 5)),
    "labels": Scenario(_chain, _labels),
}
MODES = ("KILL", *ERRORS)


@dataclass
class Trial:
    """One run of the child.

    Args:
        counts: system call -> how often it was made.
        hit: whether strace confirms the injection.
        status: as of `os.waitpid`.
    """

    counts: dict[str, int]
    hit: bool
    status: int


_MADE = re.compile(r"^\d+ +(\w+)\(")


def run_traced(root: Path, scenario: Scenario, log: Path, inject: str | None) -> Trial:
    """Run an operation in a child under strace; exit status 0, or 3 after an OSError."""
    begin, go = os.pipe()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        code = 4
        try:
            os.close(go)
            pid, work = os.getpid(), partial(scenario.act, root)
            if scenario.beside is not None:
                pid, work = scenario.beside(root)
            os.write(tell, b"%d\n" % pid)
            os.read(begin, 1)
            work()
            code = 0
        except OSError:
            code = 3
        except BaseException as e:
            sys.__stderr__.write(f"unexpected {e!r}\n")
        finally:
            os._exit(code)
    os.close(begin)
    os.close(tell)
    traced = int(os.read(told, 20))
    os.close(told)
    command = ["strace", "-f", "-p", str(traced), "-o", str(log), "-e", "trace=" + ",".join(CALLS)]
    tracer = subprocess.Popen(
        command + (["-e", f"inject={inject}"] if inject else []), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert tracer.stderr is not None
    first = tracer.stderr.readline()
    assert b"attached" in first, first
    os.write(go, b"x")
    os.close(go)
    _, status = os.waitpid(child, 0)
    tracer.wait(PATIENCE)
    tracer.stderr.close()
    text = log.read_text(errors="replace")
    counts = collections.Counter(m.group(1) for m in map(_MADE.match, text.splitlines()) if m)
    killed = "+++ killed by SIGKILL +++" in text and (os.WIFSIGNALED(status) or traced != child)
    return Trial(dict(counts), "(INJECTED)" in text or killed, status)


def points(counts: dict[str, int], mode: str) -> Iterator[str]:
    """Yield every injection of a mode for these numbers of calls."""
    for call, n in sorted(counts.items()):
        for when in range(1, n + 1):
            if mode == "KILL":
                yield f"{call}:signal=KILL:when={when}"
            elif call in ERRORS[mode]:
                yield f"{call}:error={mode}:when={when}"


def check_labels(store: sp.Store, ended_well: bool) -> None:
    """Check that an interrupted `_labels` has done a prefix of its steps."""
    now = (store.pins(), store.tags(), store.describe(2).metric, store.restores())
    stages = [
        ([], {}, None, 0),
        ([3], {}, None, 0),
        ([3], {"best": 4}, None, 0),
        ([3], {"best": 5}, None, 0),
        ([3], {"best": 5}, 0.5, 0),
        ([], {"best": 5}, 0.5, 0),
        ([], {"best": 5}, 0.5, 1),
    ]
    # A restore that could not be counted is not an error.
    assert now in (stages[-2:] if ended_well else stages), now


def check(root: Path, before: set[int], scenario: Scenario, trial: Trial) -> None:
    """Check the store after an interrupted operation."""
    ended_well = os.WIFEXITED(trial.status) and os.WEXITSTATUS(trial.status) == 0
    store = sp.Store(root, lossless())
    if scenario is SCENARIOS["labels"]:
        check_labels(store, ended_well)
    steps = store.steps()
    assert set(steps) <= before | set(scenario.adds), steps
    assert before - set(scenario.drops) <= set(steps), f"{sorted(before - set(steps))} are gone"
    if ended_well:
        assert set(scenario.adds) <= set(steps), "it said that it had saved"
    for chosen in (steps, steps[:1]):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", ".*skipped", StoreWarning)
            newest = store.candidates()[0] if steps else -1
            assert not steps or store.load(count=False)["step"] in (newest, scenario.replaced.get(newest))
            assert newest == (max(scenario.replaced, default=steps[-1]) if ended_well and steps else newest)
        for step in chosen:
            found = store.load(step, count=False)
            is_new = same(found, scenario.replaced.get(step, step))
            assert is_new or same(found, step), f"step {step} is another one"
            assert is_new or not ended_well, f"step {step} is the old one"
        assert store.verify() == {}
        # A second time after the remains are removed.
        store.gc(timeout=0.0)
        assert store.steps() == steps
        assert leftovers(root) == []
    store.save(99, state(99))
    assert same(sp.Store(root).load(count=False), 99)


def warm_up(root: Path) -> None:
    """Compile and import what the children need."""
    for prepare in (_chain, _based):
        shutil.rmtree(root, ignore_errors=True)
        prepare(root)
        store = sp.Store(root, lossless())
        store.load(count=False)
        fill(store, 7)
        store.compact(2.5)
        store.compact(2.0)
        store.compact(1.0)
        store.gc(Retention())
    shutil.rmtree(root)


def _attempt(scenario: Scenario, origin: Path, root: Path, log: Path, inject: str | None) -> Trial:
    """Run one trial on a fresh copy of the prepared store."""
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(origin, root)
    return run_traced(root, scenario, log, inject)


Plan = list[tuple[str, str, float]]
EVERYTHING: Plan = [(name, mode, 1.0) for name in SCENARIOS for mode in MODES]


def campaign(folder: Path, plan: Plan, seed: int = 0) -> dict[str, Any]:
    """Inject all (or a random share of) errors of a mode; return planned, hit and failed."""
    warm_up(folder / "warm")
    rng = random.Random(seed)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in dict.fromkeys(name for name, _, _ in plan):
        scenario = SCENARIOS[name]
        origin, root, log = folder / "origin", folder / "run", folder / "log"
        shutil.rmtree(origin, ignore_errors=True)
        origin.mkdir(parents=True)
        scenario.prepare(origin)
        before = {*sp.Store(origin).steps(), *scenario.saved}
        kept = listing(origin)

        attempt = partial(_attempt, scenario, origin, root, log)
        plain = attempt(None)
        assert plain.status == 0, f"{name}: it fails by itself"
        check(root, before, scenario, plain)
        for mode, share in [(mode, share) for n, mode, share in plan if n == name]:
            possible = list(points(plain.counts, mode))
            planned = sorted(rng.sample(possible, math.ceil(share * len(possible))))
            row = {"scenario": name, "mode": mode, "calls": plain.counts, "planned": len(planned), "hit": 0, "wrong": 0}
            started = time.monotonic()
            for inject in planned:
                trial = attempt(inject)
                row["hit"] += trial.hit
                try:
                    assert trial.hit, "the injection was not hit"
                    assert not os.WIFEXITED(trial.status) or os.WEXITSTATUS(trial.status) in (0, 3), trial.status
                    if mode != "KILL" and scenario.adds and os.WEXITSTATUS(trial.status) == 3:
                        left = listing(root)
                        committed = sp.Store(root).steps() != sorted(before)
                        assert committed or {k: left.get(k) for k in kept} == kept, "a failed save changed something"
                    check(root, before, scenario, trial)
                except Exception as e:
                    row["wrong"] += 1
                    failures.append(f"{name}, {inject}: {type(e).__name__}: {e}")
            row["seconds"] = round(time.monotonic() - started, 1)
            rows.append(row)
    return {"rows": rows, "failures": failures}


def main() -> None:
    """Run injections, and write their rows."""
    plan = EVERYTHING if sys.argv[2] == "all" else json.loads(sys.argv[2])
    print(json.dumps(campaign(Path(sys.argv[1]), plan)))


if __name__ == "__main__":
    main()
