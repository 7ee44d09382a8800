"""A small resumable Accelerate run: `python accelerate_run.py FOLDER STEPS [background]`.

It resumes if it can.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import shrinkpoint as sp
from shrinkpoint.trainers.accelerate import compress_states


def main(folder: Path, steps: int, limit: int | None = None, background: bool = False) -> tuple[Accelerator, sp.Store]:
    """Train to `steps`, saving every third; write each loss to `folder/losses.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(cpu=True, project_config=project)
    store = sp.Store(folder / "store", cfg=sp.presets.lossless())
    hooks = compress_states(accelerator, sp.Saver(store) if background else store)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    step = 0
    saved = sorted(
        int(p.parent.name.split("_")[1])
        for p in (folder / "checkpoints").glob("checkpoint_*/random_states_0.pkl")
        if (p.parent / "shrinkpoint.json").exists()
    )
    if saved:
        accelerator.load_state(str(folder / "checkpoints" / f"checkpoint_{saved[-1]}"))
        step = 3 * (saved[-1] + 1)
        project.iteration = saved[-1] + 1
    with (folder / "losses.txt").open("a") as out:
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
    return accelerator, store


if __name__ == "__main__":
    if sys.argv[3:]:
        main(Path(sys.argv[1]), int(sys.argv[2]), 2, True)
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
