"""An Accelerate run whose model FSDP2 shards over the ranks.

Arguments: `FOLDER STEPS [background]`.
It resumes if it can. Losses are in `FOLDER/RANK/losses.txt`; the states of model and optimizer before the first and
after the last step, put together, are in `FOLDER/begin.pt` and `end.pt`.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import ProjectConfiguration
from fsdp_on_cpu import offer_fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import shrinkpoint as sp
from shrinkpoint.trainers.accelerate import compress_states


def put_together(model: Any, optimizer: Any, path: Path) -> None:
    """Write the states of model and optimizer on rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, entries = get_state_dict(model, getattr(optimizer, "optimizer", optimizer), options=options)
    if torch.distributed.get_rank() == 0:
        torch.save({"model": weights, "optimizer": entries["state"]}, path)


def newest(folder: Path) -> int | None:
    """Return the number of the newest complete checkpoint."""
    found = (folder / "checkpoints").glob("checkpoint_*/shrinkpoint.json")
    return max((int(p.parent.name.split("_")[1]) for p in found), default=None)


def main(folder: Path, steps: int, background: bool) -> None:
    """Train to `steps`, saving every third."""
    home = folder / os.environ["RANK"]
    home.mkdir(parents=True, exist_ok=True)
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=3)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100)
    accelerator = Accelerator(cpu=True, project_config=project, fsdp_plugin=plugin)
    store = sp.Store(folder / "store", cfg=sp.presets.lossless())
    hooks = compress_states(accelerator, sp.Saver(store) if background else store)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 65), torch.nn.Dropout(0.2), torch.nn.Linear(65, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    saved, step = newest(folder), 0
    torch.distributed.barrier()
    if saved is not None:
        accelerator.load_state(str(folder / "checkpoints" / f"checkpoint_{saved}"))
        step, project.iteration = 3 * (saved + 1), saved + 1
    put_together(model, optimizer, folder / "begin.pt")
    with (home / "losses.txt").open("a") as out:
        while step < steps:
            loss = (model(torch.rand(4, 8)) - 1).square().mean()
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            step += 1
            print(step, float(loss.detach()).hex(), file=out, flush=True)
            if step % 3 == 0:
                accelerator.save_state()
    hooks.wait()
    put_together(model, optimizer, folder / "end.pt")


if __name__ == "__main__":
    offer_fsdp()
    main(Path(sys.argv[1]), int(sys.argv[2]), "background" in sys.argv[3:])
    gc.collect()  # threads of gloo that live on may abort a process that ends (PyTorch issue 190489)
    torch.distributed.destroy_process_group()
