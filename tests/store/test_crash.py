"""Writers killed at random moments and at every system call leave valid steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_module(name: str, *args: str, timeout: float = 1800) -> dict[str, Any]:
    """Run a test module in its own process; return the JSON that it prints."""
    env = {**os.environ, "SHRINKPOINT_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.store.{name}", *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
        env=env,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def why_no_strace() -> str | None:
    """Return why calls cannot be injected here, or None."""
    if sys.platform != "linux":
        return "strace is for Linux"
    if shutil.which("strace") is None:
        return "strace is not installed (Debian: apt-get install strace)"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        command = ["timeout", "60", "strace", "-p", str(child.pid), "-o", os.devnull]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
            assert tracer.stderr is not None
            said = tracer.stderr.readline()  # once it is attached, or may not be; it ends with the child
            child.communicate(b"\n")
    finally:
        child.kill()
        child.wait()
    return None if "attached" in said else f"strace may not attach here: {said[-200:]}"


@pytest.fixture(scope="module")
def strace() -> None:
    reason = why_no_strace()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if possible, where fsync takes no time."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")
def test_killed_at_random_moments(tmp_path: Path) -> None:
    found = run_module("random_kills", str(tmp_path / "run"), "25")
    assert found["last_step"] > 3, found
    assert found["trials"] >= 25, found
    assert found["killed_in_a_write"] > 0, f"no kill hit anything: {found}"


PLANS = {
    "killed": [
        *((name, "KILL", 0.5) for name in ("first save", "save a delta", "save a step again", "gc", "gc of a chain")),
        *((name, "KILL", 0.15) for name in ("save against the base", "compact", "compact to bases", "labels")),
        ("save by a worker", "KILL", 0.25),
        ("upkeep by a worker", "KILL", 0.1),
    ],
    "disk full or broken": [
        *((name, mode, 0.5) for name in ("save a base",) for mode in ("ENOSPC", "EIO")),
        *(
            (name, mode, 0.1)
            for name in ("compact", "labels", "first save", "save a step again")
            for mode in ("ENOSPC", "EIO")
        ),
        ("gc", "EIO", 0.25),
        *(("save by a worker", mode, 0.12) for mode in ("ENOSPC", "EIO")),
        ("upkeep by a worker", "EIO", 0.05),
    ],
}
"""Operations, faults, and the share of their system calls that each run draws; `campaign.py` takes all of them."""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.usefixtures("strace")
def test_at_every_call(plan: str, in_memory: Path) -> None:
    """A random part of the injections of `campaign.py` leaves valid stores."""
    found = run_module("injection", str(in_memory), json.dumps(PLANS[plan]))
    assert found["failures"] == []
    assert len(found["rows"]) == len(PLANS[plan])
    for row in found["rows"]:
        assert row["hit"] == row["planned"] > 0, row
