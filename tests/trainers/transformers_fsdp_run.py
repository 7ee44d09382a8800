"""A Transformers run whose model FSDP2 shards over the ranks.

Arguments: `FOLDER STEPS [background]`.
It resumes if it can. The sum of all weights after each step is in `FOLDER/RANK/losses.txt`; the states of model and
optimizer before the first and after the last step, put together, are in `FOLDER/begin.pt` and `end.pt`.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import torch
import transformers_run
from fsdp_on_cpu import offer_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from shrinkpoint.trainers.transformers import newest_complete

FSDP = {"version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]}


class Whole(transformers_run.Losses):
    """Writes the sum of the weights of all shards."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        weights = sum(float(p.detach().double().sum()) for p in parts)
        with self.path.open("a") as out:
            print(state.global_step, weights.hex(), file=out)

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        put_together(given["model"], given["optimizer"], folder / "begin.pt")


def put_together(model: Any, optimizer: Any, path: Path) -> None:
    """Write the states of model and optimizer on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, entries = get_state_dict(model, getattr(optimizer, "optimizer", optimizer), options=options)
    if torch.distributed.get_rank() == 0:
        torch.save({"model": weights, "optimizer": entries["state"]}, path)


if __name__ == "__main__":
    offer_fsdp()
    folder, steps, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    transformers_run.Losses = Whole  # type: ignore[misc]
    kind = transformers_run.BackgroundTrainer if "background" in how else transformers_run.SmallTrainer
    settings: dict[str, Any] = {"save_total_limit": 2, "lr_scheduler_type": "constant_with_warmup"}
    settings |= {"per_device_train_batch_size": 1} if "small" in how else {}
    trainer = transformers_run.make(folder, steps, kind, ddp_backend="gloo", fsdp=True, fsdp_config=FSDP, **settings)
    trainer.train(resume_from_checkpoint=newest_complete(folder))
    put_together(trainer.model, trainer.optimizer, folder / "end.pt")
    del trainer
    gc.collect()  # threads of gloo that live on may abort a process that ends (PyTorch issue 190489)
    torch.distributed.destroy_process_group()
