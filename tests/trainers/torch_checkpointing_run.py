"""Ranks that use torch-checkpointing: `python torch_checkpointing_run.py FOLDER`."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.default_resharder import DefaultResharder, ReshardingReadStrategy
from torch_checkpointing.metadata_manager import DefaultMetadataManager

import shrinkpoint as sp
from shrinkpoint.trainers.torch_checkpointing import CompressedStorageConfig

WHOLE = torch.arange(66 * 128.0).view(66, 128)


def gathered(_: Any, data: Any, group: Any = None) -> dict[int, Any]:
    """Gather objects as the package does, without its GPU."""
    received = [None] * dist.get_world_size(group)
    dist.all_gather_object(received, data, group=group)
    return dict(enumerate(received))


def manager(read: ReshardingReadStrategy = ReshardingReadStrategy.AUTO) -> Any:
    config = CheckpointManager.Config.with_sync_save()
    config.items = {"model": ItemSpec(resharder=DefaultResharder(read_strategy=read))}
    config.storage_config = CompressedStorageConfig(cfg=sp.presets.lossless())
    return config.build()


def sharded(world: int, factor: float = 1.0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    tensors = {
        "rows": distribute_tensor(WHOLE * factor, mesh, [Shard(0)]),
        "columns": distribute_tensor(WHOLE * factor, mesh, [Shard(1)]),
    }
    return {"model": tensors | {"plain": WHOLE[:3] * factor}, "step": 4}


def load(folder: Path, world: int, read: ReshardingReadStrategy) -> None:
    """Load into zeros, and compare this rank's shards."""
    into, wanted = sharded(world, 0.0), sharded(world)
    found = manager(read).load(str(folder), into, strict=True)
    for name, value in wanted["model"].items():
        assert type(found["model"][name]) is type(value)
        mine = getattr(found["model"][name], "_local_tensor", found["model"][name])
        assert torch.equal(mine, getattr(value, "_local_tensor", value)), name
    assert found["step"] == 4


def both(folder: Path) -> None:
    """Save on two ranks, and load there."""
    manager().save(str(folder), sharded(2))
    dist.barrier()
    assert (folder / "model_1.pt").read_bytes()[1:4] == b"SPT"
    load(folder, 2, ReshardingReadStrategy.AUTO)
    if dist.get_rank() == 0:
        print("two ranks: same")


def alone(folder: Path) -> None:
    """Load on one rank, in both ways of the package."""
    for read in (ReshardingReadStrategy.OFFSET, ReshardingReadStrategy.FULL_FILE):
        load(folder, 1, read)
    print("one rank: same")


def main(root: Path) -> None:
    """Fork the ranks of each part."""
    for part, world in ((both, 2), (alone, 1)):
        pids = []
        for rank in range(world):
            sys.stdout.flush()
            pids.append(os.fork())
            if not pids[-1]:
                try:
                    meet = f"file://{root}/meet-{part.__name__}"
                    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world)
                    part(root / "saved")
                    dist.barrier()
                except BaseException:
                    traceback.print_exc()
                    sys.stderr.flush()
                    os._exit(1)
                sys.stdout.flush()
                os._exit(0)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * world


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    DefaultMetadataManager._all_gather_pickled_data = gathered
    main(Path(sys.argv[1]))
