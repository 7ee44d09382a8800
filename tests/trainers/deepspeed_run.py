"""A run whose model DeepSpeed's ZeRO shards over the ranks.

Arguments: `FOLDER STEPS plain|accelerate|trainer STAGE [bf16] [background]`.
It resumes if it can. Losses are in `FOLDER/RANK/losses.txt`; masters and moments after the last step are in
`FOLDER/RANK/end.pt`.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import transformers_run
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import PartialState
from accelerate.utils import ProjectConfiguration
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

import shrinkpoint as sp
from shrinkpoint.trainers.accelerate import compress_states
from shrinkpoint.trainers.deepspeed import compress_checkpoints
from shrinkpoint.trainers.transformers import newest_complete

LOSSLESS = sp.presets.lossless()


def settings(stage: int, bf16: bool) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    adam = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    zero = {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": bf16},
        "optimizer": adam,
    }


def model() -> torch.nn.Module:
    """A network whose parameters do not fill partitions evenly."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.LayerNorm(65), torch.nn.Linear(65, 64))


def put_away(engine: Any, path: Path) -> None:
    """Write weights, masters and moments.

    Those of stage 3 are without the padding, which DeepSpeed never initializes.
    """
    found = [parameter.detach().clone() for parameter in engine.module.parameters()]
    if engine.zero_optimization_stage() < 3:
        torch.save([*found, *tensors(engine.optimizer.state_dict())], path)
        return
    for parameter in engine.module.parameters():
        found += [safe_get_full_fp32_param(parameter)]
        found += [safe_get_full_optimizer_state(parameter, entry) for entry in ("exp_avg", "exp_avg_sq")]
    torch.save([tensor for tensor in found if tensor.numel()], path)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of a tree."""
    if isinstance(tree, torch.Tensor):
        return [tree.detach().clone()]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for value in values for tensor in tensors(value)]


def newest(folder: Path, name: str) -> int | None:
    """Return the highest number of the complete checkpoints."""
    found = folder.glob(f"{name}*/shrinkpoint.json")
    return max((int(p.parent.name.removeprefix(name)) for p in found), default=None)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the inputs of this rank at a step."""
    seed = torch.Generator().manual_seed(2 * step + int(os.environ["RANK"]))
    return torch.randn(4, 33, generator=seed).to(dtype)


def plain(folder: Path, steps: int, stage: int, bf16: bool) -> Any:
    """Train by DeepSpeed's engine."""
    deepspeed.init_distributed("gloo")
    net = model()
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings(stage, bf16))[0]
    compress_checkpoints(engine, sp.Store(folder / "store", cfg=LOSSLESS))
    step = newest(folder, "step") or 0
    torch.distributed.barrier()
    if step:
        _, client = engine.load_checkpoint(folder, tag=f"step{step}")
        assert client["done"] == step
    home = folder / os.environ["RANK"]
    with (home / "losses.txt").open("a") as out:
        while step < steps:
            loss = engine(batch(step, torch.bfloat16 if bf16 else torch.float32)).float().square().mean()
            engine.backward(loss)
            engine.step()
            step += 1
            print(step, float(loss.detach()).hex(), file=out, flush=True)
            if step % 3 == 0:
                engine.save_checkpoint(folder, tag=f"step{step}", client_state={"done": step})
    return engine


def by_accelerate(folder: Path, steps: int, stage: int, background: bool) -> Any:
    """Train by Accelerate."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3)
    config = settings(stage, False)
    del config["optimizer"]
    accelerator = Accelerator(project_config=project, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    store = sp.Store(folder / "store", cfg=LOSSLESS)
    hooks = compress_states(accelerator, sp.Saver(store) if background else store)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    engine, optimizer = accelerator.prepare(net, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    saved, step = newest(folder / "checkpoints", "checkpoint_"), 0
    torch.distributed.barrier()
    if saved is not None:
        accelerator.load_state(str(folder / "checkpoints" / f"checkpoint_{saved}"))
        step, project.iteration = 3 * (saved + 1), saved + 1
    home = folder / os.environ["RANK"]
    with (home / "losses.txt").open("a") as out:
        while step < steps:
            inputs = batch(step, torch.float32) + 0.01 * torch.rand(4, 33)  # generators are restored, too
            loss = engine(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            print(step, float(loss.detach()).hex(), file=out, flush=True)
            if step % 3 == 0:
                accelerator.save_state()
    hooks.wait()
    return engine


class Whole(transformers_run.Losses):
    """Writes the sum of the weights, also of those that are sharded."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            super().on_step_end(args, state, control, model)


def by_trainer(folder: Path, steps: int, stage: int, background: bool) -> Any:
    """Train by Transformers."""
    transformers_run.Losses = Whole  # type: ignore[misc]
    config = settings(stage, False)
    del config["optimizer"]
    more: dict[str, Any] = {"save_total_limit": 2, "use_cpu": False, "lr_scheduler_type": "constant_with_warmup"}
    kind = transformers_run.BackgroundTrainer if background else transformers_run.SmallTrainer
    trainer: Any = transformers_run.make(folder, steps, kind, deepspeed=config, **more)
    trainer.train(resume_from_checkpoint=newest_complete(folder))
    return trainer.deepspeed


def join_ranks_on_cpu() -> None:
    """Let Accelerate, which expects accelerators for DeepSpeed, find the ranks on the CPU."""
    begin = PartialState.__init__

    def begin_on_cpu(self: PartialState, cpu: bool = False, **keywords: Any) -> None:
        begin(self, True, **keywords)

    PartialState.__init__ = begin_on_cpu


def main(folder: Path, steps: int, way: str, stage: int, *how: str) -> None:
    """Train to `steps`."""
    home = folder / os.environ["RANK"]
    home.mkdir(parents=True, exist_ok=True)
    join_ranks_on_cpu()
    if way == "plain":
        engine = plain(folder, steps, stage, "bf16" in how)
    else:
        engine = (by_trainer if way == "trainer" else by_accelerate)(folder, steps, stage, "background" in how)
    put_away(engine, home / "end.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), *sys.argv[5:])
    gc.collect()  # threads of gloo that live on may abort a process that ends (PyTorch issue 190489)
    torch.distributed.destroy_process_group()
