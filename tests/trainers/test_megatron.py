"""Megatron-Core's `dist_checkpointing` through our strategies, by two ranks and by one."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run(script: str, *arguments: object) -> list[str]:
    """Run a script next to this one, and return the lines it prints."""
    pytest.importorskip("megatron.core", reason="Megatron-Core is not installed; `make frameworks` has it")
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name(script)), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{command[4:]}: {done.stderr[-3000:]}{done.stdout[-2000:]}"
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def said(tmp_path_factory: Any) -> list[str]:
    return run("megatron_run.py", tmp_path_factory.mktemp("megatron"))


@pytest.fixture(scope="module")
def said_of_killed(tmp_path_factory: Any) -> list[str]:
    """The rank and the moment of the kill are random; an error names their seed."""
    return run("megatron_async_run.py", tmp_path_factory.mktemp("asynchronous"), random.randrange(10**6))


@pytest.mark.parametrize(
    "line", ["two ranks: same", "one rank: same", "delta: smaller", "moments: known", "other shape: refused"]
)
def test_sharded_states_come_back(said: list[str], line: str) -> None:
    assert line in said


@pytest.mark.parametrize(
    "line",
    [
        "trained meanwhile",
        "equal to the state of its step",
        "a dead worker: an error on all ranks",
        "saved after that",
        "killed: one consistent step, and the same losses",
    ],
)
def test_asynchronous_saves_are_there_or_not(said_of_killed: list[str], line: str) -> None:
    assert line in said_of_killed
