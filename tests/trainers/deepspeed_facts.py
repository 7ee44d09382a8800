"""Two ranks of DeepSpeed that check one thing: `FOLDER WHAT [STAGE]`."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed_run
import pytest
import torch
from deepspeed_run import batch, model, settings, tensors

import shrinkpoint as sp
from shrinkpoint.trainers.deepspeed import compress_checkpoints, expand

import deepspeed  # isort: skip - its accelerator is chosen by the first import


class Odd:
    """An object that only pickle can store."""


def engine_of(stage: int, store: sp.Store | None = None, *, trained: int = 0) -> Any:
    """Return an engine, in bfloat16, after some steps."""
    net = model()
    engine = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=settings(stage, True))[0]
    if store is not None:
        compress_checkpoints(engine, store)
    for step in range(trained):
        engine.backward(engine(batch(step, torch.bfloat16)).float().square().mean())
        engine.step()
    return engine


def parts(engine: Any) -> dict[str, torch.Tensor]:
    """Return masters, moments and weights by name, put together."""
    if engine.zero_optimization_stage() < 3:  # done by its first step otherwise
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        found[f"{name}/master"] = deepspeed_run.safe_get_full_fp32_param(parameter)
        for entry in ("exp_avg", "exp_avg_sq"):
            found[f"{name}/{entry}"] = deepspeed_run.safe_get_full_optimizer_state(parameter, entry)
        with deepspeed.zero.GatheredParameters([parameter]):
            found[f"{name}/weight"] = parameter.detach().clone()
    return found


def only_moments_of_matrices_change(folder: Path, stage: int) -> None:
    """With a lossy configuration masters, biases and norms are exact.

    The next step makes the weights from the masters.
    """
    store = sp.Store(folder / "store")
    engine = engine_of(stage, store, trained=3)
    engine.save_checkpoint(folder)
    whole = parts(engine)
    again = engine_of(stage, store)
    again.load_checkpoint(folder)
    restored = parts(again)
    differ = {name for name, value in restored.items() if not torch.equal(value, whole[name])}
    moments = {f"{n}.weight/{entry}" for n in (0, 2) for entry in ("exp_avg", "exp_avg_sq")}
    assert moments <= differ <= moments | {f"{n}.weight/weight" for n in (0, 2)}, differ
    for name in differ:
        value = whole[name].double()
        assert (restored[name] - value).norm() < 0.4 * value.norm(), name
    again.backward(again(batch(3, torch.bfloat16)).float().square().mean())
    again.step()
    after = parts(again)
    assert all(torch.equal(after[f"{n}.weight/weight"], after[f"{n}.weight/master"].bfloat16()) for n in (0, 2))
    if torch.distributed.get_rank() == 0:
        files = [sp.Checkpoint.from_bytes(path.read_bytes()) for path in (folder / "store/data").iterdir()]
        paths = {row.path for file in files for row in file.summary()}
        assert any(path.endswith("state/2.weight/exp_avg") for path in paths), paths
        assert sum(store.describe(0).shards[i][1] for i in (0, 1)) < 0.6 * store.describe(0).raw_nbytes


def expanded_files_are_raw(folder: Path, stage: int) -> None:
    """DeepSpeed itself loads what `expand` has written; an engine with a store loads raw files."""
    engine = engine_of(stage, sp.Store(folder / "store", cfg="lossless"), trained=3)
    engine.save_checkpoint(folder, tag="a")
    if torch.distributed.get_rank() == 0:
        expand(folder / "a")
    torch.distributed.barrier()
    for store in (None, sp.Store(folder / "other")):
        again = engine_of(stage, store)
        again.load_checkpoint(folder, tag="a")
        assert all(torch.equal(a, b) for a, b in zip(parts(engine).values(), parts(again).values(), strict=True))


def refusals_leave_the_checkpoint_before(folder: Path, stage: int) -> None:
    """An object that needs pickle, and a save that was cut off."""
    store = sp.Store(folder / "store", cfg="lossless")
    engine = engine_of(stage, store, trained=2)
    engine.save_checkpoint(folder, tag="a", client_state={"number": 1})
    rank = torch.distributed.get_rank()
    with pytest.raises(sp.ShrinkpointError, match=r"cannot be stored without pickle"):
        engine.save_checkpoint(folder, tag="a", client_state={"odd": Odd()} if rank == 0 else {})
    assert store.steps() == [0]
    again = engine_of(stage, store)
    assert again.load_checkpoint(folder, tag="a")[1]["number"] == 1
    assert len(tensors(again.optimizer.state_dict())) == len(tensors(engine.optimizer.state_dict()))
    again.save_checkpoint(folder, tag="a", client_state={"number": 2})  # in the place of the former one
    torch.distributed.barrier()
    assert store.steps() == [1]
    assert store.describe(1).since_base == 1
    torch.distributed.barrier()
    if rank == 0:
        (folder / "a/shrinkpoint.json").unlink()
    torch.distributed.barrier()
    with pytest.raises(sp.MissingParentError, match="its save was cut off; load the one before"):
        engine_of(stage, store).load_checkpoint(folder, tag="a")


def saved(folder: Path, stage: int) -> None:
    """Save, for another number of ranks."""
    engine_of(stage, sp.Store(folder / "store"), trained=1).save_checkpoint(folder)


def another_number_is_refused(folder: Path, stage: int) -> None:
    """Load what another number of ranks saved."""
    with pytest.raises(Exception, match="world size"):
        engine_of(stage, sp.Store(folder / "store")).load_checkpoint(folder)


if __name__ == "__main__":
    deepspeed.init_distributed("gloo")
    os.chdir(sys.argv[1])
    globals()[sys.argv[2]](Path(sys.argv[1]), int(sys.argv[3]))
    gc.collect()  # threads of gloo that live on may abort a process that ends (PyTorch issue 190489)
    with contextlib.suppress(Exception):
        torch.distributed.destroy_process_group()
