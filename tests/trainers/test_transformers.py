"""The released Transformers: its Trainer, killed and resumed from compressed checkpoints."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp

pytest.importorskip("transformers", reason="transformers is not installed; `make frameworks` has it")
pytest.importorskip("accelerate", reason="accelerate is not installed; `make frameworks` has it")

from transformers import AutoModelForCausalLM, Trainer

from shrinkpoint.trainers import transformers as adapter
from shrinkpoint.trainers.pointers import drop_unreferenced
from shrinkpoint.trainers.transformers import (
    POINTER,
    CompressCallback,
    CompressedCheckpoints,
    IncompleteCheckpointWarning,
    expand,
    newest_complete,
)

from ..forking import Script
from .killing import by_step, run_and_kill
from .transformers_run import BackgroundTrainer, SmallTrainer, make
from .watching import bounds_handed_to_savers

pytestmark = pytest.mark.filterwarnings("ignore")
RUN = Path(__file__).with_name("transformers_run.py")
RAW = {"model.safetensors", "optimizer.pt", "scheduler.pt", "pytorch_model.bin"}


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script(RUN) as found:
        yield found


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["background"]])
def test_a_killed_run_resumed_equals_one_that_was_not(script: Script, tmp_path: Path, how: list[str]) -> None:
    # So many steps that the run cannot end before it is killed; the learning rate depends on the number.
    killed = tmp_path / "killed"
    begun = lambda: (killed / "losses.txt").exists() and len(by_step(killed)) >= 13  # noqa: E731
    run_and_kill(script, killed, 5000, *how, once=begun)
    steps = len(by_step(tmp_path / "killed")) + 6

    for folder, resume in (("killed", True), ("whole", None)):
        trainer = make(tmp_path / folder, 5000, BackgroundTrainer if how else SmallTrainer, [_stop_at(steps)])
        trainer.train(resume_from_checkpoint=resume)
    assert by_step(tmp_path / "killed") == by_step(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["background"]])
def test_two_processes_go_on_where_they_were(script: Script, tmp_path: Path, how: list[str]) -> None:
    """Two DDP processes resume with their own batches and dropout."""
    for folder, steps in (("half", 8), ("half", 16), ("whole", 16)):
        script.together(2, tmp_path / folder, steps, "ranks", *how)
    for rank in "01":
        half, whole = (by_step(tmp_path / folder / rank) for folder in ("half", "whole"))
        assert half == whole
        assert len(whole) == 16
    assert len(sp.Store(tmp_path / "half" / "shrinkpoint").steps()) == 2


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


def test_in_the_background_all_is_durable_in_the_end(tmp_path: Path) -> None:
    more = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True, "learning_rate": 5e-2}
    trainer = make(tmp_path / "run", 16, BackgroundTrainer, metric_for_best_model="loss", save_total_limit=2, **more)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint).name
    held = {name for name in names(tmp_path / "run") if name.startswith("checkpoint")}
    # The best and the newest one, which may be the same: then the one before is the second.
    assert held == ({best, "checkpoint-16"} if best != "checkpoint-16" else {"checkpoint-12", "checkpoint-16"})
    store = sp.Store(tmp_path / "run" / "shrinkpoint")
    assert len(store.steps()) == 2
    for name in held:
        assert not names(tmp_path / "run" / name) & RAW
    args = torch.load(tmp_path / "run" / best / "training_args.bin", weights_only=False)
    assert args.save_total_limit == trainer.args.save_total_limit == 2


def test_chains_are_compacted_between_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = bounds_handed_to_savers(monkeypatch, adapter)

    class Compacting(BackgroundTrainer):
        compact = 1.0
        compression = sp.presets.lossless(chain=sp.ChainPolicy(None))

    make(tmp_path / "run", 24, Compacting, save_total_limit=2).train()
    make(tmp_path / "run", 32, Compacting, save_total_limit=2).train(resume_from_checkpoint=True)
    assert bounds == [1.0, 1.0]
    store = sp.Store(tmp_path / "run" / "shrinkpoint")
    assert len(store.steps()) == 2
    assert store.verify() == {}
    again = make(tmp_path / "other", 32)
    for step in (28, 32):
        again._load_from_checkpoint(str(tmp_path / "run" / f"checkpoint-{step}"))

    class Alone(Compacting):
        background = False

    with pytest.raises(sp.BadArgumentError, match=r"compact: .* say background=True"):
        make(tmp_path / "alone", 4, Alone).train()


def test_a_save_cut_off_leaves_the_folder_before_it(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Freeze(TrainerCallback):
        """Stop the worker before the second save, and kill it after the next step."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            saver = trainer._saver
            if saver is None or state.global_step not in (7, 10):
                return
            saver.wait() if state.global_step == 7 else None
            os.kill(saver._saver.pid, signal.SIGSTOP if state.global_step == 7 else signal.SIGKILL)

    trainer = make(tmp_path / "run", 16, BackgroundTrainer, [Freeze()], save_total_limit=1)
    with pytest.raises(ChildProcessError):
        trainer.train()
    assert {"checkpoint-4", "checkpoint-8"} <= names(tmp_path / "run")
    assert "shrinkpoint.json" not in names(tmp_path / "run" / "checkpoint-8")
    again = make(tmp_path / "run", 16, BackgroundTrainer, save_total_limit=1)
    with pytest.warns(IncompleteCheckpointWarning, match="resumed from checkpoint-4; the saves of checkpoint-8"):
        again.train(resume_from_checkpoint=True)
    make(tmp_path / "whole", 16).train()
    assert by_step(tmp_path / "run") == by_step(tmp_path / "whole")
    assert [n for n in names(tmp_path / "run") if n.startswith("checkpoint")] == ["checkpoint-16"]


def test_where_a_run_begins_or_goes_on(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "none") is None
    for name, files in {
        "checkpoint-1": {"trainer_state.json": "{}", "model.safetensors": ""},
        "checkpoint-20": {"trainer_state.json": "{}"},
        "checkpoint-3": {"trainer_state.json": "{", "model.safetensors": ""},
        "other-40": {"trainer_state.json": "{}", "model.safetensors": ""},
    }.items():
        (tmp_path / name).mkdir()
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    with pytest.warns(IncompleteCheckpointWarning, match="from checkpoint-1; the saves of checkpoint-3, checkpoint-20"):
        assert newest_complete(tmp_path) == str(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "trainer_state.json").unlink()
    assert newest_complete(tmp_path) is None


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
    trainer = make(tmp_path / "run", 4, save_only_model=True)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(sp.BadArgumentError, match="save_only_model is not for DeepSpeed"):
        trainer.train()


def test_copies_by_another_name_are_not_rotated_away(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    class Copy(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                shutil.copytree(tmp_path / "run" / "checkpoint-4", tmp_path / "run" / "best")

    make(tmp_path / "run", 16, callbacks=[Copy()], save_total_limit=1).train()
    assert not (tmp_path / "run" / "checkpoint-4").exists()
    assert len(sp.Store(tmp_path / "run" / "shrinkpoint").steps()) == 2
    again = make(tmp_path / "run", 16)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "best"))
    make(tmp_path / "whole", 16).train()
    assert by_step(tmp_path / "run") == by_step(tmp_path / "whole")
    # Once the copy is gone, so is its step.
    shutil.rmtree(tmp_path / "run" / "best")
    store = sp.Store(tmp_path / "run" / "shrinkpoint")
    drop_unreferenced(store, POINTER)
    assert len(store.steps()) == len(list((tmp_path / "run").glob("checkpoint-*")))


def test_a_resized_model_is_refused_with_a_list(tmp_path: Path) -> None:
    make(tmp_path / "run", 4).train()
    other = make(tmp_path / "run", 8)
    other.model.resize_token_embeddings(60)
    before = {n: p.detach().clone() for n, p in other.model.named_parameters()}
    with pytest.raises(sp.BadArgumentError, match=r"wte\.weight: shape \(50, 32\) in the checkpoint, \(60, 32\)"):
        other.train(resume_from_checkpoint=True)
    assert all(torch.equal(p, before[n]) for n, p in other.model.named_parameters())
