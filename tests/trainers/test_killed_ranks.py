"""A rank is killed during a save, and other numbers of ranks resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from . import killed_ranks
from .killed_ranks import KILLS, Kill

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow]
Runs = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: Any) -> Runs:
    """Run `killed_ranks.py`; return its folder and results."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-m", killed_ranks.__name__, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2700)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return folder, {line["name"]: line for line in lines}


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: kill.name)
def test_one_rank_dies_and_the_other_notices(runs: Runs, kill: Kill) -> None:
    found = runs[1][kill.name]
    assert found["codes"][kill.rank] == -9, found["logs"]
    assert found["codes"][1 - kill.rank] == 3, found["logs"]
    assert "noticed" in found["logs"][1 - kill.rank]


@pytest.mark.parametrize(
    ("kill", "world"),
    [(kill, world) for kill in KILLS for world in kill.worlds],
    ids=lambda value: value.name if isinstance(value, Kill) else str(value),
)
def test_others_go_on_from_the_newest_committed_state(runs: Runs, kill: Kill, world: int) -> None:
    folder, found = runs
    name = f"{kill.name}-{world}"
    assert set(found[name]["codes"]) == {0}, "\n".join(found[name]["logs"])
    # And end where the training that was not killed did.
    whole = f"{kill.how}-whole".replace(" ", "-")
    assert set(found[whole]["codes"]) == {0}, found[whole]["logs"]
    after, expected = torch.load(folder / name / "after.pt"), torch.load(folder / whole / "expected-6.pt")
    assert after.keys() == expected.keys()
    losses = json.loads((folder / whole / "losses.json").read_text())[kill.newest :]
    resumed = json.loads((folder / name / "losses.json").read_text())
    assert len(resumed) == len(losses)
    if world == 2:
        assert resumed == losses
        assert all(torch.equal(after[key], value) for key, value in expected.items())
    elif kill.how != "loop":
        # Other sums of the gradients: rounding differs.
        assert resumed == pytest.approx(losses, rel=1e-4)
        for key, value in expected.items():
            assert torch.allclose(after[key], value, rtol=1e-2, atol=1e-4), key
    else:
        # Other batches and other dropout.
        assert resumed[-1] < 1.2 * losses[-1]
