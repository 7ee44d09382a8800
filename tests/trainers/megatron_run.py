"""Ranks that save and load through Megatron-Core: `python megatron_run.py FOLDER`."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException

import shrinkpoint as sp
from shrinkpoint.trainers.dcp import Reader
from shrinkpoint.trainers.dcp.megatron import CompressedLoad, CompressedSave

ROWS, COLUMNS = 128, 96


def whole(step: int) -> dict[str, torch.Tensor]:
    """Return a weight, its moments and a bias, before sharding."""
    torch.manual_seed(7)
    weight, gradient = torch.randn(ROWS, COLUMNS), torch.randn(ROWS, COLUMNS)
    return {
        "decoder.weight": weight + 1e-3 * step * gradient,
        "decoder.bias": torch.arange(float(COLUMNS)) + step,
        "optimizer.state.exp_avg.decoder.weight": gradient * (1 + 0.1 * step),
        "optimizer.state.exp_avg_sq.decoder.weight": gradient.square() * (1 + 0.1 * step),
    }


def sharded(step: int, rank: int, world: int, fill: bool, columns: int = COLUMNS) -> dict[str, Any]:
    """The state of a rank: matrices cut by rows, the bias replicated."""
    state: dict[str, Any] = {"step": step, "extra": ShardedObject("extra", {"n": step}, (1,), (0,), replica_id=rank)}
    for name, value in whole(step).items():
        tensor = value if fill else torch.zeros_like(value)
        if value.ndim == 2:
            part = tensor[:, :columns].chunk(world)[rank].contiguous()
            state[name] = ShardedTensor.from_rank_offsets(name, part, (0, rank, world))
        else:
            state[name] = ShardedTensor.from_rank_offsets(name, tensor, replica_id=rank)
    return state


def same(found: dict[str, Any], step: int, rank: int, world: int) -> None:
    for name, value in whole(step).items():
        part = value.chunk(world)[rank] if value.ndim == 2 else value
        assert torch.equal(found[name], part), name
    assert found["step"] == step


def both(folder: Path, rank: int) -> None:
    """Save twice, and load the second checkpoint."""
    strategy = CompressedSave(sp.presets.lossless())
    rough = CompressedSave()
    for step in (1, 2):
        for name, saving in (("exact", strategy), ("rough", rough)):
            where = folder / f"{name}-{step}"
            if rank == 0:
                where.mkdir()
            dist.barrier()
            dist_checkpointing.save(sharded(step, rank, 2, True), str(where), saving)
    found = dist_checkpointing.load(sharded(0, rank, 2, False), str(folder / "exact-2"), CompressedLoad())
    same(found, 2, rank, 2)
    if rank == 0:
        print("two ranks: same")
        files = Reader(folder / "exact-2").read_metadata().storage_data.files
        assert [len(file.chain) for file in files] == [2, 2]
        assert files[0].chain[0][1] < files[0].chain[1][1]
        print("delta: smaller")
        name = Reader(folder / "rough-1").read_metadata().storage_data.files[1].chain[0][0]
        rows = {
            r.path: r.stream for r in sp.Checkpoint.from_bytes((folder / "rough-1/data" / name).read_bytes()).summary()
        }
        assert rows["decoder.weight"] == "levels", rows
        assert rows["optimizer/state/decoder.weight/exp_avg"] == "grid", rows
        assert rows["optimizer/state/decoder.weight/exp_avg_sq"] == "rank-one", rows
        print("moments: known")


def alone(folder: Path, rank: int) -> None:
    """Load on one rank, and refuse a model of another shape."""
    found = dist_checkpointing.load(sharded(0, 0, 1, False), str(folder / "exact-2"), CompressedLoad())
    same(found, 2, 0, 1)
    print("one rank: same")
    with pytest.raises(CheckpointException, match="shape mismatch"):
        dist_checkpointing.load(sharded(0, 0, 1, False, columns=50), str(folder / "exact-2"), CompressedLoad())
    print("other shape: refused")


def main(folder: Path) -> None:
    """Fork the ranks of each part."""
    for part, world in ((both, 2), (alone, 1)):
        pids = []
        for rank in range(world):
            sys.stdout.flush()
            pids.append(os.fork())
            if not pids[-1]:
                try:
                    meet = f"file://{folder}/meet-{part.__name__}"
                    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
                    part(folder, rank)
                    dist.barrier()
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                sys.stdout.flush()
                os._exit(0)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * world


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
