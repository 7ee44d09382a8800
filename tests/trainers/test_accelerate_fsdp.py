"""Accelerate with FSDP2: ranks killed at random, resumed on other numbers of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shrinkpoint as sp

pytest.importorskip("accelerate", reason="accelerate is not installed; `make frameworks` has it")

from accelerate import Accelerator

from shrinkpoint.trainers.accelerate import compress_states

from ..forking import Script
from .killing import equal_states, kill_together, resumed_as_if_never_killed

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
RUN = Path(__file__).with_name("accelerate_fsdp_run.py")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


@pytest.mark.parametrize("how", [[], ["background"]], ids=["waits", "background"])
def test_killed_ranks_go_on_where_they_were(script: Script, tmp_path: Path, how: list[str]) -> None:
    rng, killed = random.Random(len(how)), tmp_path / "killed"
    for kill in range(3):
        kill_together(script, 2, killed, 9000, *how, after=rng.uniform(0, 1), alone=kill % 2 == 0)
        assert sp.Store(killed / "store").verify() == {}
    resumed_as_if_never_killed(script, tmp_path, *how)
    store = sp.Store(killed / "store")
    assert len(store.steps()) <= 4  # of a run that was killed between a commit and its pointer, one more
    assert all(store.describe(step).shards for step in store.steps())


def test_other_numbers_of_ranks_load_the_same(script: Script, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script.together(2, run, 6)
    saved = torch.load(run / "end.pt")
    for world in (1, 4, 2):
        (run / "begin.pt").unlink()
        script.together(world, run, 6)
        assert equal_states(torch.load(run / "begin.pt"), saved), world


def test_without_fsdp_a_sharded_checkpoint_is_loaded(script: Script, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script.together(2, run, 6)
    saved = torch.load(run / "end.pt")
    accelerator = Accelerator(cpu=True)
    hooks = compress_states(accelerator, sp.Store(run / "store", cfg=sp.presets.lossless()))
    model = torch.nn.Sequential(torch.nn.Linear(8, 65), torch.nn.Dropout(0.2), torch.nn.Linear(65, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.load_state(str(run / "checkpoints" / "checkpoint_1"))
    assert equal_states(dict(model.state_dict()), dict(saved["model"]))
    names = {p: name for name, p in model.named_parameters()}
    assert all(equal_states(entry, saved["optimizer"][names[p]]) for p, entry in optimizer.optimizer.state.items())
    assert optimizer.optimizer.state
    hooks.remove()
