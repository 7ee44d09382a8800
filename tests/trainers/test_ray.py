"""Ray Train on two workers: one is killed at a random step."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import shrinkpoint as sp

pytest.importorskip("ray", reason="ray is not installed: pip install ray[train]")

from .killing import by_step

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
RUN = Path(__file__).with_name("ray_run.py")


def test_killed_workers_go_on_where_they_were(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(RUN), str(tmp_path), "14", str(random.random())],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert list(tmp_path.glob("killed-*/killed"))
    for rank in "01":  # losses of repeated steps are compared by `by_step`
        assert by_step(tmp_path / f"killed-{rank}") == by_step(tmp_path / f"whole-{rank}")
    lines = (tmp_path / "killed-0/losses.txt").read_text().splitlines()
    assert sum(line.startswith("1 ") for line in lines) == 1  # resumed, not begun again
    for name, most in (("whole", 3), ("killed", 5)):  # a folder that Ray removes after a save is noticed at the next
        store = sp.Store(tmp_path / "storage" / name / "shrinkpoint")
        assert store.verify() == {}
        assert 2 <= len(store.steps()) <= most
        assert store.describe(store.steps()[-1]).since_base > 0
    assert "must be SYNC" in (tmp_path / "refusal.txt").read_text()
