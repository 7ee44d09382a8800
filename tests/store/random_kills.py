"""Writers killed at random moments while they save, compact and collect.

    python -m tests.store.random_kills FOLDER TRIALS [SEED]

A process without threads forks the writers, so a trial costs milliseconds; a writer reports its saves through a pipe.
How many kills hit a write depends on the speed of disk and processor, and how far the writers get on the load of the
machine: where none of TRIALS has torn a write, or the writers got no farther than `FAR` steps, more
follow, `PATIENCE` times as many at most.
"""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("SHRINKPOINT_THREADS", "1")

import numpy as np

import shrinkpoint as sp
from shrinkpoint.store.retention import Retention
from tests.store.common import leftovers, lossless

POLICIES = ((3, "previous"), (5, "base"), (20, "previous"), (None, "previous"))
KEPT = Retention(last=8, every=50)
PATIENCE, FAR = 20, 3


def state(step: int) -> dict[str, Any]:
    """Return a distinct state for each step, large enough that writing takes time."""
    g = np.random.default_rng(step)
    return {"step": step, "weight": g.standard_normal(60_000), "i": np.arange(2000) * step}


def right(found: dict[str, Any]) -> bool:
    """Return whether a state is the saved one."""
    expected = state(found["step"])
    return all(np.array_equal(found[k], expected[k]) for k in expected)


def write_on(root: Path, seed: int, told: int) -> None:
    """Save, compact and collect until killed; report each saved step through a pipe."""
    rng = random.Random(seed)
    every, against = rng.choice(POLICIES)
    store = sp.Store(root, lossless(against=against, base_every=every))
    step = store.load(count=False)["step"]
    os.write(told, struct.pack("<q", -1))
    while True:
        step += 1
        store.save(step, state(step))
        os.write(told, struct.pack("<q", step))
        if rng.random() < 0.15:
            store.compact(rng.choice([1.0, 2.0, 3.0]))
        if rng.random() < 0.15:
            store.gc(KEPT)


def kept_by(steps: list[int]) -> set[int]:
    """Return the steps that `KEPT` must keep."""
    return set(steps[-KEPT.last :]) | {s for s in steps if s % 50 == 0}


def main() -> None:
    """Run the trials, and print their row."""
    root, trials = Path(sys.argv[1]), int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    pace = 0.0  # seconds of a save; measured here, because the first save of a writer may load or compile kernels
    for against, cost in (("previous", 2.0), ("base", 1.0)):  # compiled here once, not in each writer
        warm = sp.Store(f"{root}-warm-{against}", lossless(against=against))
        for step in (0, 1, 2, 3, 32, 33, 34):  # from 33 the integers need more than 16 bits: other code
            begin = time.monotonic()
            warm.save(step, state(step))
            pace = time.monotonic() - begin
        assert right(warm.load())
        warm.compact(cost)
        warm.gc(KEPT)
    store = sp.Store(root, lossless())
    store.save(0, state(0))
    warnings.simplefilter("error")
    newest, tried, torn, garbage, loaded = 0, 0, 0, 0, 0
    for trial in range(PATIENCE * trials):
        if trial >= trials and torn and newest > FAR:
            break
        before, litter = store.steps(), set(leftovers(root))
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                write_on(root, rng.randrange(1 << 32), into)
            except BaseException as e:
                print("writer:", repr(e), file=sys.stderr, flush=True)
            os._exit(1)
        rng.random()
        os.close(into)
        assert os.read(out, 8) == struct.pack("<q", -1), f"seed {seed}, trial {trial}: the writer did not begin"
        if trial == 0:
            assert os.read(out, 8) == struct.pack("<q", 1), f"seed {seed}: the first writer saved nothing"
            newest = 1
        time.sleep(rng.choice([1, 2, 5]) * rng.random() * pace)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"seed {seed}, trial {trial}: the writer ended by itself"
        told = b""
        while part := os.read(out, 1 << 16):
            told += part
        os.close(out)
        if told:  # whole numbers only: a write of eight bytes to a pipe is not torn
            newest = struct.unpack("<q", told[-8:])[0]
        reader = sp.Store(root)
        found = reader.load(count=False)
        where = f"seed {seed}, trial {trial}"
        assert right(found), f"{where}: step {found['step']} is wrong"
        assert newest <= found["step"] <= newest + 1, f"{where}: {newest} was saved, {found['step']} is there"
        newest = found["step"]
        steps = reader.steps()
        lost = kept_by(sorted({*before, *range(before[-1], newest + 1)})) - set(steps)
        assert not lost, f"{where}: lost {sorted(lost)}"
        torn += bool(set(leftovers(root)) - litter)
        for step in rng.sample(steps, min(3, len(steps))):
            assert right(reader.load(step, count=False)), f"{where}: step {step} is wrong"
            loaded += 1
        if trial % 5 == 4:
            assert reader.verify() == {}, where
            garbage += len(reader.gc(timeout=0.0))
            assert leftovers(root) == []
            assert reader.verify() == {}, where
            assert reader.steps() == steps, where
        tried = trial + 1
    final = sp.Store(root)
    steps = final.steps()
    assert all(right(final.load(step, count=False)) for step in steps)
    result = {"seed": seed, "trials": tried, "last_step": newest, "steps_left": len(steps)}
    print(json.dumps({**result, "killed_in_a_write": torn, "garbage_files": garbage, "checked": loaded + len(steps)}))


if __name__ == "__main__":
    main()
