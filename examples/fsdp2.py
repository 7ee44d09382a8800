"""FSDP2 with compressed checkpoints: each rank saves its shards; any number resumes.

torchrun --nproc-per-node 2 examples/fsdp2.py run/
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shrinkpoint.trainers.dcp import Reader, Writer


def main(folder: str, steps: int = 60) -> float:
    """Train a small network from the newest checkpoint of the folder; return the last loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 1)).to(device)
    fully_shard(model, mesh=init_device_mesh(device, (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = 0
    # A folder without `.metadata` is one of a save that was interrupted.
    newest = max(Path(folder).glob("step-*/.metadata"), default=None)
    if newest is not None:
        # Only now: of an optimizer that has not stepped, torch makes and counts a step.
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        dcp.load(state, storage_reader=Reader(newest.parent))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        step = state["step"]
    writer = Writer(parent=None if newest is None else newest.parent)
    if dist.get_rank() == 0:
        print(f"resumed at step {step}")

    loss = torch.zeros(())
    while step < steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(32, 64, device=device)
        loss = (model(x) - x[:, :1].sin()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 20 == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            dcp.save(state, storage_writer=writer, checkpoint_id=f"{folder}/step-{step:06d}")
    dist.destroy_process_group()
    return float(loss.detach())


if __name__ == "__main__":
    if "RANK" not in os.environ:
        sys.exit("usage: torchrun --nproc-per-node N fsdp2.py [FOLDER] (torchrun tells each process its rank)")
    main(sys.argv[1] if len(sys.argv) > 1 else "run")
