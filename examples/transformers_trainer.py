"""Transformers with compressed checkpoints: a mixin before Trainer; nothing raw is written.

pip install '.[transformers]'                    # in a checkout
python examples/transformers_trainer.py run/
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import shrinkpoint as sp
from shrinkpoint.codec.extras import install

try:
    import accelerate  # noqa: F401 - Trainer asks for it later on
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
except ImportError:
    sys.exit(f"this example needs Transformers: {install('transformers')}")

from shrinkpoint.trainers.transformers import CompressedCheckpoints, newest_complete


class SmallTrainer(CompressedCheckpoints, Trainer):
    """Trainer; checkpoints are deltas of one another, and training goes on while they are saved."""

    compression = sp.Config(rate=0.003)
    background = True


class Text(torch.utils.data.Dataset[Any]):
    """Rows of numbers."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(32) * (i + 1)) % 100
        return {"input_ids": ids, "labels": ids}


def main(folder: str, steps: int = 40) -> Trainer:
    """Train, resuming from the newest checkpoint of the folder."""
    config = GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=100, n_positions=32, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        folder, max_steps=steps, save_steps=10, save_total_limit=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = SmallTrainer(GPT2LMHeadModel(config), arguments, train_dataset=Text())
    trainer.train(resume_from_checkpoint=newest_complete(folder))
    return trainer


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "run")
