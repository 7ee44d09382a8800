"""Two processes with Accelerate, for the tests.

`python -m torch.distributed.run --nproc_per_node 2 accelerate_ranks.py FOLDER [background]`. Each writes its result to
`FOLDER/RANK.json`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import shrinkpoint as sp
from shrinkpoint.trainers.accelerate import compress_states


class Slow(sp.Store):
    """A store whose saves take long, so that the other process is ahead."""

    def save(self, *args: Any, **keywords: Any) -> Any:
        """Save after a delay."""
        time.sleep(0.5)
        return super().save(*args, **keywords)


def main(folder: Path, background: bool) -> None:
    """Train, save at every other step, then save, change everything and load."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=True, project_config=project)
    torch.manual_seed(accelerator.process_index)
    bare = torch.nn.Linear(64, 20)
    data = torch.utils.data.DataLoader(torch.randn(32, 64), batch_size=4, shuffle=True)
    model, optimizer, batches = accelerator.prepare(bare, torch.optim.AdamW(bare.parameters(), lr=0.01), data)
    store = Slow(folder / "store", sp.presets.lossless())
    with sp.Saver(store) if background else contextlib.nullcontext(store) as saver:
        compress_states(accelerator, saver)
        for number, batch in enumerate(batches, start=1):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if number % 2 == 0:
                accelerator.save_state()
        before, moments = bare.weight.detach().clone(), optimizer.state_dict()["state"][0]["exp_avg"].clone()
        accelerator.save_state()
        drawn = torch.rand(3)
        with torch.no_grad():
            bare.weight.zero_()
            optimizer.state_dict()["state"][0]["exp_avg"].zero_()
        accelerator.load_state()
        found = {
            "weight": torch.equal(bare.weight, before),
            "moments": torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moments),
            "drawn": torch.equal(torch.rand(3), drawn),
            "sum": float(before.double().sum()),
            "own": drawn.tolist(),
        }
    (folder / f"{accelerator.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] == ["background"])
    # Threads of gloo that live on may abort a process that ends (PyTorch issue 190489).
    gc.collect()
    torch.distributed.destroy_process_group()
