"""A small Transformers run: `python transformers_run.py FOLDER STEPS [background]`.

`python -m torch.distributed.run --nproc_per_node 2 transformers_run.py FOLDER STEPS ranks [background]`: resumes if it
can; losses in `FOLDER/RANK/losses.txt`.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import shrinkpoint as sp
from shrinkpoint.trainers.transformers import CompressedCheckpoints, newest_complete


class Text(torch.utils.data.Dataset[Any]):
    """Rows of numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(12) * (i + 1)) % 50
        return {"input_ids": ids, "labels": ids}


class Losses(TrainerCallback):
    """Appends a hash of the weights and the loss of each step to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        weights = sum(float(p.detach().double().sum()) for p in model.parameters())
        with self.path.open("a") as out:
            print(state.global_step, weights.hex(), file=out)


class SmallTrainer(CompressedCheckpoints, Trainer):  # type: ignore[misc]
    """Trainer with the mixin, every bit kept."""

    compression = sp.presets.lossless()


class BackgroundTrainer(SmallTrainer):
    """A `SmallTrainer` that saves in the background."""

    background = True


def make(folder: Path, steps: int, cls: type[Trainer] = SmallTrainer, callbacks: Any = (), **more: Any) -> Trainer:
    """Return a trainer of a tiny GPT-2 with dropout."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=50, n_positions=12, bos_token_id=0, eos_token_id=0)
    settings: dict[str, Any] = {
        "save_strategy": "steps",
        "save_steps": 4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "max_steps": steps,
    }
    arguments = TrainingArguments(str(folder), **{**settings, **more})
    home = folder / os.environ.get("RANK", "")
    extra = [Losses(home / "losses.txt"), *callbacks]
    home.mkdir(parents=True, exist_ok=True)
    return cls(GPT2LMHeadModel(config), arguments, train_dataset=Text(), eval_dataset=Text(), callbacks=extra)


def one_of_several(folder: Path, steps: int, kind: type[Trainer]) -> None:
    """Train in the process of one rank."""
    settings: dict[str, Any] = {"save_total_limit": 2, "lr_scheduler_type": "constant_with_warmup"}
    trainer = make(folder, steps, kind, ddp_backend="gloo", **settings)
    trainer.train(resume_from_checkpoint=newest_complete(folder))


if __name__ == "__main__":
    if sys.argv[3:4] == ["ranks"]:
        one_of_several(Path(sys.argv[1]), int(sys.argv[2]), BackgroundTrainer if sys.argv[4:] else SmallTrainer)
        # Threads of gloo that live on may abort a process that ends (PyTorch issue 190489).
        gc.collect()
        torch.distributed.destroy_process_group()
    elif sys.argv[3:]:
        make(Path(sys.argv[1]), int(sys.argv[2]), BackgroundTrainer, save_total_limit=1).train()
    else:
        make(Path(sys.argv[1]), int(sys.argv[2])).train()
