"""Megatron-Core's `dist_checkpointing` through our strategies, by two ranks and by one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).with_name("megatron_run.py")


@pytest.fixture(scope="module")
def said(tmp_path_factory: Any) -> list[str]:
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed; `make frameworks` has it")
    folder = tmp_path_factory.mktemp("megatron")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(RUN), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "line", ["two ranks: same", "one rank: same", "delta: smaller", "moments: known", "other shape: refused"]
)
def test_sharded_states_come_back(said: list[str], line: str) -> None:
    assert line in said
