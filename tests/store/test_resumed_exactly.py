"""A training resumed from exact deltas equals the uninterrupted one, bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import shrinkpoint as sp

from ..forking import Script

TRAINER = Path(__file__).parent / "exact_trainer.py"
KILLED, AFTER = 117, 100
"""The step after which it is killed, and how many are compared after the restore."""


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(TRAINER) as found:
        yield found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_steps_after_a_kill_are_the_same_to_the_last_bit(dtype: str, script: Script, tmp_path: Path) -> None:
    def run(*arguments: object) -> tuple[int, list[list[str]]]:
        """Return the trainer's exit code and its lines."""
        done = script.start(*arguments)
        return done.wait(), [line.split() for line in done.said.splitlines()]

    last = KILLED - KILLED % 10 + AFTER
    end, never_stopped = run("-", dtype, last)
    assert end == 0
    end, lines = run(tmp_path, dtype, last, KILLED)
    assert end == -signal.SIGKILL
    assert int(lines[-1][0]) == KILLED
    kinds = [kind for line in lines for kind in line[2:]]
    # It was saved in chains of deltas, and it goes on from one that has several below it.
    assert kinds.count("base") == 1
    assert kinds.count("delta") == KILLED // 10 - 1
    store = sp.Store(tmp_path)
    manifest = store.describe(store.steps()[-1])
    assert manifest.step == KILLED - KILLED % 10
    assert len(manifest.parents) == manifest.step // 10 - 1

    end, resumed = run(tmp_path, dtype, last)
    assert end == 0
    assert len(resumed) == AFTER + 1
    assert [line[:2] for line in resumed] == never_stopped[-AFTER - 1 :]
    # Losses that say something: they fall, and no two steps have the same.
    losses = [float.fromhex(line[1]) for line in never_stopped[:-1]]
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    assert len(set(losses)) > 0.95 * len(losses)
