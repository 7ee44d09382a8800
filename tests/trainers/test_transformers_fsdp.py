"""Trainer with FSDP2: ranks killed at random, resumed on other numbers of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shrinkpoint as sp

pytest.importorskip("transformers", reason="transformers is not installed; `make frameworks` has it")
pytest.importorskip("accelerate", reason="accelerate is not installed; `make frameworks` has it")

from transformers import TrainerCallback

from shrinkpoint.trainers.transformers import newest_complete

from ..forking import Script
from .killing import equal_states, kill_together, resumed_as_if_never_killed
from .transformers_run import SmallTrainer, make

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
RUN = Path(__file__).with_name("transformers_fsdp_run.py")


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


@pytest.mark.parametrize("how", [[], ["background"]], ids=["waits", "background"])
def test_killed_ranks_go_on_where_they_were(script: Script, tmp_path: Path, how: list[str]) -> None:
    rng, killed = random.Random(len(how)), tmp_path / "killed"
    for kill in range(3):
        kill_together(script, 2, killed, 4000, *how, after=rng.uniform(0, 1.5), alone=kill % 2 == 0)
    store = sp.Store(killed / "shrinkpoint")
    assert store.verify() == {}
    resumed_as_if_never_killed(script, tmp_path, *how)
    assert len([p for p in killed.iterdir() if p.name.startswith("checkpoint-")]) <= 2
    steps_of_store = sp.Store(killed / "shrinkpoint").steps()
    assert len(steps_of_store) <= 3  # of a run that was killed between a commit and its pointer, one more
    assert all(sp.Store(killed / "shrinkpoint").describe(step).shards for step in steps_of_store)


def test_other_numbers_of_ranks_load_the_same(script: Script, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script.together(2, run, 8)
    for world in (1, 4, 2):
        saved = torch.load(run / "end.pt")
        (run / "begin.pt").unlink()
        script.together(world, run, 8, "small")
        assert equal_states(torch.load(run / "begin.pt"), saved), world


def test_a_trainer_without_fsdp_resumes(script: Script, tmp_path: Path) -> None:
    run = tmp_path / "run"
    script.together(2, run, 8)
    saved = torch.load(run / "end.pt")
    trainer = make(run, 8, SmallTrainer, [Stop()])
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=newest_complete(run))
    own = trainer.model.state_dict()
    assert all(torch.equal(own[name], value) for name, value in saved["model"].items())
    names = {p: name for name, p in trainer.model.named_parameters()}
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert all(equal_states(entry, saved["optimizer"][names[p]]) for p, entry in optimizer.state.items())


class Stop(TrainerCallback):
    """Ends a training before its first step."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("what", ["frozen", "compact"])
def test_what_sharded_checkpoints_lack_is_refused(what: str) -> None:
    class Sharded(SmallTrainer):
        is_fsdp_enabled = True

    class Plugin:
        fsdp_version = 2

    class State:
        fsdp_plugin = Plugin()

    class Accelerator:
        state = State()

    trainer = Sharded.__new__(Sharded)
    trainer.accelerator = Accelerator()
    assert trainer._is_sharded
    setattr(trainer, what, "once" if what == "frozen" else 2.0)
    trainer.background, trainer.args = True, SimpleNamespace(save_strategy="steps")
    with pytest.raises(sp.BadArgumentError, match=f"{what} is not for sharded checkpoints"):
        trainer.train()
    with pytest.raises(sp.BadArgumentError, match=f"{what} is not for sharded checkpoints"):
        _ = trainer._is_sharded
    Plugin.fsdp_version = 1
    with pytest.raises(sp.BadArgumentError, match="FSDP is of version 1; compressed checkpoints need fsdp_version 2"):
        _ = trainer._is_sharded
