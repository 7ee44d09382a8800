"""Transformers as it is on the registry: its Trainer, killed and resumed from compressed checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from transformers import AutoModelForCausalLM, Trainer

from shrinkpoint.trainers.transformers import CompressCallback, CompressedCheckpoints, expand

from .transformers_run import make

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).with_name("transformers_run.py")
RAW = {"model.safetensors", "optimizer.pt", "scheduler.pt", "pytorch_model.bin"}


def by_step(folder: Path) -> dict[int, str]:
    found: dict[int, str] = {}
    for line in (folder / "losses.txt").read_text().splitlines():
        assert found.setdefault(int(line.split()[0]), line) == line
    return found


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.mark.slow
def test_a_killed_run_resumed_equals_one_that_was_not(tmp_path: Path) -> None:
    # So many steps that the run cannot end before it is killed; the learning rate depends on the number.
    command = [sys.executable, str(RUN), str(tmp_path / "killed"), "5000"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 120
    while not (tmp_path / "killed" / "losses.txt").exists() or len(by_step(tmp_path / "killed")) < 13:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    steps = len(by_step(tmp_path / "killed")) + 6

    for folder, resume in (("killed", True), ("whole", None)):
        trainer = make(tmp_path / folder, 5000, callbacks=[_stop_at(steps)])
        trainer.train(resume_from_checkpoint=resume)
    assert by_step(tmp_path / "killed") == by_step(tmp_path / "whole")


def _stop_at(steps: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    return Stop()


def test_nothing_raw_is_written_and_rotation_reaches_the_store(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", 16, save_total_limit=2)
    trainer.train()
    assert names(tmp_path / "run") >= {"checkpoint-12", "checkpoint-16", "shrinkpoint"}
    assert not names(tmp_path / "run") & {"checkpoint-4", "checkpoint-8"}
    for step in (12, 16):
        held = names(tmp_path / "run" / f"checkpoint-{step}")
        assert not held & RAW
        assert held >= {"shrinkpoint.json", "config.json", "trainer_state.json", "rng_state.pth", "training_args.bin"}
    store = sp.Store(tmp_path / "run" / "shrinkpoint")
    assert len(store.steps()) == 2
    assert all(store.describe(step).is_delta for step in store.steps())
    found = store.load()["model"]
    for name, parameter in trainer.model.state_dict().items():
        assert torch.equal(found[name], parameter.cpu())


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "learning_rate": 5e-2}
    trainer = make(tmp_path / "run", 12, metric_for_best_model="loss", save_total_limit=1, **more)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert "shrinkpoint.json" in names(best)
    again = make(tmp_path / "other", 12)
    again._load_from_checkpoint(str(best))
    for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_alone_and_a_model_to_keep(tmp_path: Path) -> None:
    class Lossy(CompressedCheckpoints, Trainer):  # type: ignore[misc]
        compression = sp.Config()

    trainer = make(tmp_path / "run", 4, cls=Lossy, save_only_model=True)
    trainer.train()
    assert list(sp.Store(tmp_path / "run" / "shrinkpoint").load()) == ["model"]
    trainer.save_model(str(tmp_path / "final"))
    assert "model.safetensors" in names(tmp_path / "final")
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")


def test_raw_checkpoints_are_resumed_too(tmp_path: Path) -> None:
    make(tmp_path / "run", 4, cls=Trainer).train()
    trainer = make(tmp_path / "run", 8)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 8
    assert not names(tmp_path / "run" / "checkpoint-8") & RAW


def test_the_callback_replaces_what_trainer_wrote(tmp_path: Path) -> None:
    cfg = sp.presets.lossless()
    make(tmp_path / "run", 8, cls=Trainer, callbacks=[CompressCallback(cfg)], save_total_limit=1).train()
    folder = tmp_path / "run" / "checkpoint-8"
    assert not names(folder) & RAW
    make(tmp_path / "whole", 12, cls=Trainer, lr_scheduler_type="constant_with_warmup").train()
    make(
        tmp_path / "half", 8, cls=Trainer, callbacks=[CompressCallback(cfg)], lr_scheduler_type="constant_with_warmup"
    ).train()
    resumed = make(
        tmp_path / "half", 12, cls=Trainer, callbacks=[CompressCallback(cfg)], lr_scheduler_type="constant_with_warmup"
    )
    resumed.train(resume_from_checkpoint=expand(tmp_path / "half" / "checkpoint-8"))
    assert by_step(tmp_path / "half") == by_step(tmp_path / "whole")
    with pytest.raises(sp.BadArgumentError, match="load_best_model_at_end"):
        make(
            tmp_path / "best", 4, cls=Trainer, callbacks=[CompressCallback()], load_best_model_at_end=True,
            eval_strategy="steps", eval_steps=4,
        ).train()  # fmt: skip
    with pytest.raises(sp.BadArgumentError, match="not a checkpoint of shrinkpoint"):
        expand(tmp_path / "whole" / "checkpoint-8")


def test_what_cannot_be_compressed_is_refused(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", 4)
    trainer.is_fsdp_enabled = True
    with pytest.raises(sp.BadArgumentError, match="do not work with fsdp"):
        trainer._save(str(tmp_path / "run" / "checkpoint-1"))
