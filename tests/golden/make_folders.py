"""Write the golden folders of a release.

    python -m tests.golden.make_folders      (from the root)

A folder of a store or publisher holds more than `.spt` files: manifests, tags, records, metadata. These are in
`folders/RELEASE`, together with the hashes of the restored states (`index.json`) and a seal, which shows a missing or
altered file. Some names in them are random, so that they are written once and never compared with new ones.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.commands import seal as integrity
from shrinkpoint.trainers.dcp import Writer
from shrinkpoint.trainers.hub import save_pretrained
from shrinkpoint.trainers.pointers import write_pointer

from .make import bell, fingerprint

FOLDERS = Path(__file__).parent / "folders"
RELEASES = ["0.2.0"]
"""Those whose folders are kept: all from 0.2.0 on that added a kind of file."""
KINDS = {"model/fc.weight": "linear"}
EXACT = sp.presets.lossless()
WORLD = 2


def state(step: int) -> dict[str, Any]:
    """A training state: a matrix with its moments, a bias, and values."""
    w = 0.1 * bell(1536, 1) + 0.0002 * step * bell(1536, 2)
    m, v = 1e-3 * bell(1536, 100 + step), (1e-3 * bell(1536, 3)) ** 2
    moments = {"step": torch.tensor(float(step)), "exp_avg": matrix(m), "exp_avg_sq": matrix(v)}
    model = {"fc.weight": matrix(w), "fc.bias": torch.from_numpy(bell(32, 4 + step).astype(np.float32))}
    return {"model": model, "optimizer": {"state": {0: moments}}, "step": step}


def matrix(values: Any) -> torch.Tensor:
    """32 rows of float32."""
    return torch.from_numpy(values.astype(np.float32).reshape(32, 48))


def published(version: int) -> dict[str, torch.Tensor]:
    """The tensors of a published version; a few change with each."""
    w = bell(600, 5)
    w[10 * version : 10 * version + 5] += 1
    return {
        "w": torch.from_numpy(w).bfloat16().reshape(20, 30),
        "b": torch.from_numpy(bell(30, 6).astype(np.float32)),
        "steps": torch.tensor([version, 7]),
    }


def sharded(step: int) -> dict[str, Any]:
    """Return a state whose rows are sharded over the ranks; their number is odd."""
    w = torch.from_numpy((bell(31 * 40, 7) + step * (np.arange(1240) % 9 == 0)).astype(np.float32))
    return {"model": {"w": w.reshape(31, 40), "b": torch.full((5,), float(step))}, "run": {"step": step}}


def network(seed: int) -> nn.Module:
    """A module with a frozen layer and one that trains."""
    model = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 4))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            values = bell(parameter.numel(), 10 + 10 * seed * (i > 1) + i)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)).reshape(parameter.shape))
    model[0].requires_grad_(False)
    return model


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def write_stores(folder: Path) -> None:
    """Stores of one process: a run with everything that a store writes, and a compacted one."""
    store = sp.Store(folder / "store")
    for step in (10, 20, 30, 40):
        store.save(step, state(step), kinds=KINDS)
    store.rate(30, 0.25)
    store.pin(10)
    store.tag("best", 30)
    store.drop(20)
    store.load(30)
    store.save(35, state(35), kinds=KINDS)
    write_pointer(folder / "pointer" / "shrinkpoint.json", store, 35, store.describe(35).identity)

    compacted = sp.Store(folder / "compacted")
    for step in (1, 2, 3):
        compacted.save(step, state(step), kinds=KINDS)
    compacted.compact(max_cost=1.5)
    compacted.gc(sp.Retention(last=3))


def write_training(folder: Path) -> None:
    """A run that `trainers.save` stored, whose frozen layer is stored once."""
    torch.manual_seed(0)
    store, model = sp.Store(folder / "training", EXACT), network(0)
    training = optimizer(model)
    model(torch.ones(1, 48)).sum().backward()
    training.step()
    trainers.save(store, 1, model, training, frozen="once")


def write_published(folder: Path) -> None:
    """Write versions with a base, deltas, and one with both; and versions with readable slices."""
    publisher = sp.Publisher(folder / "published", base_every=3)
    for version in (1, 2, 3, 4):
        publisher.publish(version, published(version))
    publisher = sp.Publisher(folder / "sliced", sliced=True)
    for version in (1, 2):
        publisher.publish(version, published(version))


def write_models(folder: Path) -> None:
    """Write a model's folder, and one that is coded against it."""
    save_pretrained(network(0), folder / "model")
    save_pretrained(network(1), folder / "tuned", base=folder / "model")


def write_sharded(rank: int, meeting: str, folder: Path) -> None:
    """Write folders and steps of torch.distributed.checkpoint, on each rank."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    in_folders, in_store = Writer(cfg=EXACT), Writer(sp.Store(folder / "sharded", EXACT))
    for step in (1, 2):
        tree = sharded(step)
        tree["model"] = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in tree["model"].items()}
        dcp.save(tree, storage_writer=in_folders, checkpoint_id=folder / "dcp" / f"step-{step}")
        dcp.save(tree, storage_writer=in_store, checkpoint_id=str(step))
    dist.destroy_process_group()


def write_alone(folder: Path) -> None:
    """Write a folder of torch.distributed.checkpoint whose ranks do not communicate.

    Each rank has its own metadata.
    """
    path = folder / "dcp" / "alone"
    dcp.save(sharded(3), storage_writer=Writer(path, EXACT), no_dist=True, use_collectives=False)


def expected(folder: Path) -> dict[str, dict[str, str]]:
    """Return, by folder and step, the hash of the state that the writing release restored."""
    found = {}
    for name in ("store", "compacted", "training"):
        store = sp.Store(folder / name)
        found[name] = {str(step): fingerprint(sp.decompress(store.read(step))) for step in store.steps()}
    for name in ("published", "sliced"):
        versions = sorted((folder / name / "versions").iterdir())
        found[name] = {str(int(path.stem)): fingerprint(published(int(path.stem))) for path in versions}
    found["sharded"] = {str(step): fingerprint(sharded(step)) for step in (1, 2)}
    found["dcp"] = {f"step-{step}": fingerprint(sharded(step)) for step in (1, 2)} | {"alone": fingerprint(sharded(3))}
    return found


def main() -> None:
    folder = FOLDERS / RELEASES[-1]
    if folder.exists():
        raise SystemExit(f"{folder} exists; golden folders are not overwritten")
    folder.mkdir(parents=True)
    warnings.simplefilter("ignore")
    os.umask(0o022)
    write_stores(folder)
    write_training(folder)
    write_published(folder)
    write_models(folder)
    write_alone(folder)
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.spawn(write_sharded, (f"{meeting}/file", folder), nprocs=WORLD)
    rows = expected(folder)
    (folder / "index.json").write_text(json.dumps(rows, indent=1) + "\n")
    seal = integrity.make_seal(folder)
    integrity.seal_path(folder).write_bytes(integrity.to_bytes(seal))
    print(f"{len(seal.files)} files, {sum(f.size for f in seal.files.values())} bytes in {folder}")


if __name__ == "__main__":
    main()
