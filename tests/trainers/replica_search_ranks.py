"""Two processes with different trees, for the tests of searches.

`python -m torch.distributed.run --nproc_per_node 2 replica_search_ranks.py FOLDER`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shrinkpoint as sp
from shrinkpoint.searching.arguments import ProcessGroup
from shrinkpoint.trainers.processes import of_first, on_all, on_rank_0


def tree(rank: int) -> dict[str, Any]:
    """Return equal weights, and buffers, generators and scalars that differ between ranks."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(64, 32, generator=generator)
    own = torch.Generator().manual_seed(rank)
    return {
        "weight": w,
        "tied": w,
        "half": torch.randn(8, generator=generator).bfloat16(),
        "mean": torch.randn(64, generator=own).bfloat16(),
        "rng": [np.arange(5) + rank, torch.randn(3, generator=own)][: 2 - rank],
        "step": torch.tensor(7),
        "zeros": torch.zeros(3, dtype=(torch.float32, torch.int32)[rank]),
        "name": f"rank {rank}",
        ("a", 1): {"time": rank / 3, "none": None, "empty": torch.empty(0, 2)},
    }


def interrupted_together(rank: int) -> None:
    """Check that an interrupt of one rank is an error on all, which then continue."""

    def interrupted(at: int) -> int:
        if rank == at:
            raise KeyboardInterrupt
        return rank

    expected = (KeyboardInterrupt, sp.ShrinkpointError) if rank == 0 else (sp.ShrinkpointError, KeyboardInterrupt)
    with pytest.raises(expected[0], match="KeyboardInterrupt" if rank else ""):
        on_rank_0(lambda: interrupted(0), "nothing was written")
    for at in (0, 1):
        with pytest.raises(expected[at], match="" if rank == at else f"rank {at}: KeyboardInterrupt"):
            on_all(lambda at=at: interrupted(at), lambda x: x)
    assert on_all(lambda: rank, lambda x: x) == (rank, [0, 1])


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    rank, group = dist.get_rank(), dist.group.WORLD
    team = ProcessGroup(group)
    mine, sent = tree(rank), []
    broadcast = dist.broadcast_object_list
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast_object_list", lambda o, *a, **k: (sent.append(1), broadcast(o, *a, **k)))
        found = of_first(team, mine, group)
    assert len(sent) == 4, "the mean, two generators, zeros of another dtype"
    assert found is mine or rank == 1
    expected = tree(0)
    same = sp.compress([found], cfg=sp.presets.lossless()).id == sp.compress([expected], cfg=sp.presets.lossless()).id
    assert same
    assert found["weight"] is found["tied"]
    assert found["weight"] is mine["weight"]
    assert found["name"] == "rank 0"
    assert isinstance(found["rng"][0], np.ndarray)
    assert of_first(team, [None if rank else 3, mine], group)[0] == 3
    # What one process cannot give is an error on both, and they go on together.
    wrong = tree(rank) | ({"path": Path("x")} if rank else {})
    with pytest.raises(sp.ShrinkpointError, match=r"path: .*cannot be stored without pickle"):
        of_first(team, wrong, group)
    parts = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(sp.BadArgumentError, match="weight: each process has a part of it"):
        of_first(team, {"weight": parts}, group)
    interrupted_together(rank)
    dist.barrier()
    (folder / f"{rank}.done").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
