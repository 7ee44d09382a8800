"""A process with arrays on two: `python orbax_ranks.py PORT FOLDER RANK`."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shrinkpoint as sp
from shrinkpoint.trainers.orbax import CompressedHandler, CompressedRestore, CompressedSave


def main(port: str, folder: Path, rank: int) -> None:
    """Save, restore with the same sharding, and restore with another."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"localhost:{port}", 2, rank)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    host = np.random.default_rng(0).normal(size=(64, 48)).astype(np.float32)

    def spread(values: np.ndarray, how: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(values.shape, how, lambda index: values[index])

    tree = {"rows": spread(host, rows), "whole": spread(host, whole), "host": np.arange(3), "step": 4}
    handler = CompressedHandler(sp.Store(folder / "shrinkpoint", cfg=sp.presets.lossless()))
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(folder, item_handlers=handler, options=options) as manager:
        for step in (1, 2, 3):
            manager.save(step, args=CompressedSave(tree))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        found = manager.restore(3, args=CompressedRestore(tree))
        assert found["rows"].sharding == rows
        for name in ("rows", "whole"):
            assert all(np.array_equal(s.data, host[s.index]) for s in found[name].addressable_shards)
        wanted = {**tree, "rows": jax.ShapeDtypeStruct(host.shape, host.dtype, sharding=whole)}
        found = manager.restore(2, args=CompressedRestore(wanted))
        assert all(np.array_equal(s.data, host) for s in found["rows"].addressable_shards)
    print("as it was")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
