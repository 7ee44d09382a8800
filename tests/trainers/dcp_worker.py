"""Ranks of the DCP tests.

`python -m tests.trainers.dcp_worker FOLDER` prints one JSON line a scenario.
Ranks are forked from one process that has imported everything and computed nothing: imports take longer than the tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.checkpoint_utils import with_checkpoint_logging, with_temp_dir

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.trainers.dcp import LoadPlanner, ParentNotUsedWarning, Reader, Writer

from ..forking import import_late

warnings.filterwarnings("ignore", category=UserWarning, module="torch")
warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
LIMIT = 300.0
"""Seconds after which a rank gives up the others: long, for where others have the cores they are far apart."""
TIMEOUT = 2 * LIMIT
RANK, WORLD = 0, 1


class Net(nn.Module):
    """A network with rows that four does not divide, a norm and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(67, 64)
        self.up = nn.Linear(64, 130)
        self.norm = nn.LayerNorm(130)
        self.down = nn.Linear(130, 64, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(torch.relu(self.up(self.emb(ids)))))


def sharded(mesh: Any, plan: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model on a mesh, by FSDP2 ("fsdp"), tensor parallel ("tp") or both ("2d")."""
    model = Net()
    if plan in ("tp", "2d"):
        tp = mesh["tp"] if plan == "2d" else mesh
        # A norm over a sharded dimension is not for this test: what matters is how the weights lie.
        parallelize_module(
            model,
            tp,
            {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())},
        )
    if plan in ("fsdp", "2d"):
        fully_shard(model, mesh=mesh["dp"] if plan == "2d" else mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    torch.manual_seed(100 + step)
    optimizer.zero_grad()
    loss = model(torch.randint(0, 67, (32,))).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def state_of(model: nn.Module, optimizer: Any, step: int, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": moments, "run": {"step": step, "betas": (0.9, 0.95), "names": ["a", "b"]}}


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors(tree: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in tensors(value, f"{path}/{key}").items()}
    return {path: local(tree).detach().clone()} if isinstance(tree, torch.Tensor) else {}


def same(a: Any, b: Any) -> None:
    left, right = tensors(a), tensors(b)
    assert left.keys() == right.keys()
    assert left
    for name in left:
        assert torch.equal(left[name], right[name]), name


def cleared(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with other values."""

    def one(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: one(v) for k, v in value.items()}
        if isinstance(value, list) and any(isinstance(v, dict) for v in value):
            return [one(v) for v in value]
        return torch.full_like(value, 7) if isinstance(value, torch.Tensor) else None

    return {k: one(v) for k, v in state.items()}


def save(folder: Path) -> None:
    """Save on two ranks: FSDP2 in chains, tensor parallel, replicated, both kinds of async."""
    mesh = init_device_mesh("cpu", (WORLD,))
    model, optimizer = sharded(mesh, "fsdp")
    exact, lossy = Writer(cfg=sp.presets.lossless()), Writer(folder / "lossy", sp.Config())
    for step in range(3):
        train(model, optimizer, step)
        state = state_of(model, optimizer, step, flat=True)
        dcp.save(state, storage_writer=exact, checkpoint_id=folder / f"exact-{step}")
        dcp.save(state, storage_writer=lossy)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "torch"))
    back = cleared(state)
    dcp.load(back, storage_reader=Reader(folder / "exact-2"))
    same(back, state)
    assert back["run"] == state["run"]
    # A state of the same model from a fresh start, and the same next step to the bit.
    again, other = sharded(mesh, "fsdp")
    train(again, other, 99)
    weights, moments = get_state_dict(again, other, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.load({"model": weights, "optim": moments}, storage_reader=Reader(folder / "exact-2"))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=moments, options=options)
    assert train(again, other, 3) == train(model, optimizer, 3)

    tp, of_tp = sharded(init_device_mesh("cpu", (WORLD,)), "tp")
    train(tp, of_tp, 0)
    # Nested optimizer state, with the parameters' names as keys; a rank's own tensors next to sharded ones.
    state = state_of(tp, of_tp, 0, flat=False)
    dcp.save(state, storage_writer=Writer(folder / "tp", sp.presets.lossless()))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "tp-torch"))
    replicated = {"weight": torch.arange(4096.0).view(64, 64), "n": torch.tensor(3)}
    dcp.save(replicated, storage_writer=Writer(folder / "ddp", sp.presets.lossless()))

    writer = Writer(cfg=sp.presets.lossless())
    for step in range(2):
        state = {"weight": replicated["weight"] + step}
        state["s"] = distribute_tensor(torch.arange(8192.0).view(128, 64) + step, mesh, [Shard(0)])
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=folder / f"thread-{step}")
        state["weight"] += 1000
        future.result()
    for step in range(2):
        train(model, optimizer, 10 + step)
        plain = {"weight": torch.full((2048,), 1.5 + step), "step": step, **state_of(model, optimizer, step, flat=True)}
        future = dcp.async_save(
            plain,
            storage_writer=writer,
            checkpoint_id=folder / f"process-{step}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        plain["weight"] += 1000
        future.result()
    back = cleared(plain)
    dcp.load(back, storage_reader=Reader(folder / "process-1"))
    same(back["model"], plain["model"])
    same(back["optim"], plain["optim"])


def reshard(folder: Path) -> None:
    """Load on four ranks what two saved, and continue."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, optimizer = sharded(mesh, "2d")
    train(model, optimizer, 99)
    for ours, theirs in (("exact-2", "torch"), ("tp", "tp-torch")):
        state = state_of(model, optimizer, 0, flat=ours != "tp")
        a, b = cleared(state), cleared(state)
        dcp.load(a, storage_reader=Reader(folder / ours))
        dcp.load(b, storage_reader=dcp.FileSystemReader(folder / theirs))
        same(a, b)
        assert not torch.equal(local(a["model"]["up.weight"]), torch.full_like(local(a["model"]["up.weight"]), 7))
    train(model, optimizer, 100)
    state = state_of(model, optimizer, 1, flat=True)
    writer = Writer(folder / "on", sp.presets.lossless(), parent=folder / "exact-2")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", ParentNotUsedWarning)
        dcp.save(state, storage_writer=writer)
    # Ranks 0 and 1 had other shards then, ranks 2 and 3 had none: a base, and a word about it.
    assert [w.category for w in seen].count(ParentNotUsedWarning) == 1
    dcp.save(state, storage_writer=writer)
    back = cleared(state)
    dcp.load(back, storage_reader=Reader(folder / "on"))
    same(back, state)
    renamed = {"model": {"up.weight": state["model"]["up.weight"], "new": torch.zeros(2), "norm.bias": torch.zeros(3)}}
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.load(renamed, storage_reader=Reader(folder / "on"), planner=LoadPlanner())
    assert "model.new is not in the checkpoint" in str(caught.value)
    assert "model.norm.bias is (130,) in the checkpoint and (3,) here" in str(caught.value)


def killed(folder: Path) -> None:
    """Check that rank 0 notices when rank 1 dies after writing its container."""
    mesh = init_device_mesh("cpu", (WORLD,))
    whole = torch.arange(8192.0).view(128, 64)
    writer = Writer(folder / "killed", sp.presets.lossless())
    dcp.save({"s": distribute_tensor(whole, mesh, [Shard(0)])}, storage_writer=writer)
    if RANK == 1:
        written = writer.write_data

        def die(*args: Any) -> Any:
            written(*args)
            os._exit(17)

        writer.write_data = die  # type: ignore[method-assign]
    try:
        dcp.save({"s": distribute_tensor(whole + 1, mesh, [Shard(0)])}, storage_writer=writer)
    except Exception as e:
        print(f"noticed: {type(e).__name__}: {e}"[:500], flush=True)
        os._exit(0)
    raise AssertionError("a rank died and the save went through")


def uneven(step: int) -> dict[str, torch.Tensor]:
    """Return weights whose ranks would have different thresholds."""
    torch.manual_seed(step)
    scale = torch.linspace(0.1, 3.0, 128)[:, None]
    return {
        "embedding.weight": torch.randn(128, 64) * scale,
        "up.weight": torch.randn(128, 160) * scale,
        "half.weight": (torch.randn(128, 96) * scale).bfloat16(),
        "alike.weight": torch.randn(40, 40),
    }


GLOBAL = {
    "inshrinkerator": sp.presets.inshrinkerator(protect=0.01, prune=0.2),
    "default": sp.Config(),
    "two": sp.Config([("*up*", sp.Quantize(protect=0.02, prune=0.1)), ("*half*", sp.Quantize(protect=0.0))]),
}


TRAINED = {"embedding.weight": "embedding", "up.weight": "linear", "half.weight": "linear", "alike.weight": "linear"}


def thresholds(folder: Path) -> None:
    """Save the same weights in shards by each configuration, also in a thread."""
    mesh = init_device_mesh("cpu", (WORLD,))
    group = dist.new_group(backend="gloo")
    for name, cfg in GLOBAL.items():
        writer = Writer(cfg=cfg, kinds=TRAINED)
        for step in range(2):
            state = {
                n: w if n.startswith("alike") else distribute_tensor(w, mesh, [Shard(0)])
                for n, w in uneven(step).items()
            }
            dcp.save({"model": state}, storage_writer=writer, checkpoint_id=folder / f"{name}-{WORLD}-{step}")
    aside = Writer(folder / f"aside-{WORLD}", GLOBAL["two"], kinds=TRAINED, process_group=group)
    dcp.async_save({"model": state}, storage_writer=aside, process_group=group).result()
    if WORLD == 4:
        # Two of the ranks alone, with and without a word to the writer: nobody waits for the other two.
        pair = dist.new_group([2, 3], backend="gloo")
        cut = init_device_mesh("cpu", (2, 2), mesh_dim_names=("which", "rows"))["rows"]
        if RANK >= 2:
            part = {"weight": distribute_tensor(uneven(0)["up.weight"], cut, [Shard(0)])}
            kinds = {"weight": "linear"}
            dcp.save(part, storage_writer=Writer(folder / "pair-unsaid", kinds=kinds), process_group=pair)
            known = Writer(folder / "pair", kinds=kinds, process_group=pair)
            dcp.save(part, storage_writer=known, process_group=pair)
    alone = Writer(folder / f"alone-{WORLD}", GLOBAL["default"], kinds=TRAINED)
    dcp.async_save({"model": state}, storage_writer=alone).result()


def refused(folder: Path) -> None:
    """Check that a state that rank 1 cannot store is an error on both ranks, without a wait."""
    mesh = init_device_mesh("cpu", (WORLD,))
    writer = Writer(folder / "refused")
    state = {"s": distribute_tensor(torch.randn(128, 64), mesh, [Shard(0)])}
    for _ in range(2):
        dcp.save(state, storage_writer=writer)
    begin = time.monotonic()
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(state | ({"hook": object()} if RANK == 1 else {}), storage_writer=writer)
    assert time.monotonic() - begin < LIMIT / 2
    for part in ("rank 1: UnsupportedLeafError: @values/hook", "nothing was written, since another rank could not"):
        assert part in str(caught.value)
    dcp.save(state, storage_writer=writer)


def gone(folder: Path) -> None:
    """Check that rank 0 notices when rank 1 dies within the collective."""
    mesh = init_device_mesh("cpu", (WORLD,))
    state = {"s": distribute_tensor(torch.randn(128, 64), mesh, [Shard(0)])}
    writer = Writer(folder / "gone")
    dcp.save(state, storage_writer=writer)
    if RANK == 1:
        writer._state = lambda *_: os._exit(17)  # type: ignore[assignment, method-assign, return-value]
    notice(state, writer)


def stalled(folder: Path) -> None:
    """Check that rank 0 gives up after the timeout of the process group."""
    mesh = init_device_mesh("cpu", (WORLD,))
    impatient = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT))
    state = {"s": distribute_tensor(torch.randn(128, 64), mesh, [Shard(0)])}
    writer = Writer(folder / "stalled", process_group=impatient)
    dcp.save(state, storage_writer=writer)
    if RANK == 1:
        writer._state = lambda *_: time.sleep(3600) or os._exit(17)  # type: ignore[assignment, method-assign]
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=10), impatient)
    notice(state, writer, process_group=impatient)


def notice(state: dict[str, Any], writer: Writer, **options: Any) -> None:
    """Save although the other rank is lost; print the error and its time."""
    begin = time.monotonic()
    try:
        dcp.save(state, storage_writer=writer, **options)
    except Exception as e:
        print(f"noticed after {time.monotonic() - begin:.0f} s: {type(e).__name__}: {e}"[:2000], flush=True)
        os._exit(0)
    raise AssertionError("a rank was lost and the save went through")


class Beside:
    """States of many kinds, saved and loaded by our classes and by torch's."""

    temp_dir: str

    def state(self, kind: str, step: int) -> dict[str, Any]:
        """Return a state of one kind, with values that depend on the step."""
        torch.manual_seed(step)
        line = init_device_mesh("cpu", (WORLD,))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def cut(shape: tuple[int, ...], mesh: Any, *placements: Any, dtype: torch.dtype = torch.float32) -> DTensor:
            return distribute_tensor(torch.randn(shape).to(dtype), mesh, list(placements))

        if kind == "replicated":
            whole = {"weight": torch.randn(64, 32), "half": torch.randn(40).bfloat16(), "n": torch.tensor(step)}
            return whole | {"on a mesh": cut((8, 8), line, Replicate()), "ids": torch.arange(7) + step}
        if kind == "sharded":
            return {
                "rows": cut((66, 48), line, Shard(0)),
                "columns": cut((48, 66), line, Shard(1)),
                "double": cut((13,), line, Shard(0), dtype=torch.float64),
            }
        if kind == "2-d mesh":
            both = {f"{a}{b}": cut((34, 30), square, Shard(a), Shard(b)) for a in range(2) for b in range(2)}
            return both | {"half": cut((34, 30), square, Replicate(), Shard(1), dtype=torch.float16)}
        if kind == "tensor parallel":
            model, optimizer = sharded(line, "tp")
            for number in range(step + 1):
                train(model, optimizer, number)
            return state_of(model, optimizer, step, flat=True)
        if kind == "values":
            plain = {"step": step, "text": "a/b.c", "none": None, "pair": (1.5, True), "list": [step, "x"]}
            return {
                "run": plain,
                "weight": torch.randn(5),
                f"of {RANK}": torch.full((3,), RANK + step),
                "bytes": b"\0\xff",
            }
        assert kind == "empty shards"
        # Fewer rows than ranks, none at all, and a tensor without elements.
        few = {f"{n} rows": cut((n, 20), line, Shard(0)) for n in range(3)}
        return few | {"empty": torch.empty(0, 4), "scalar": torch.tensor(0.5 + step)}

    @with_checkpoint_logging
    @with_temp_dir
    def same(self, kind: str) -> None:
        """Check that both readers give the same state."""
        writer = Writer(cfg=sp.presets.lossless())
        for step in range(2):
            state = self.state(kind, step)
            dcp.save(state, storage_writer=writer, checkpoint_id=f"{self.temp_dir}/ours-{step}")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(f"{self.temp_dir}/theirs"))
        ours, theirs = cleared(state), cleared(state)
        dcp.load(ours, storage_reader=Reader(f"{self.temp_dir}/ours-1"))
        dcp.load(theirs, storage_reader=dcp.FileSystemReader(f"{self.temp_dir}/theirs"))
        same(ours, theirs)
        same(ours, state)
        assert values(ours) == values(theirs) == values(state)
        ours, theirs = (
            reader.read_metadata()
            for reader in (Reader(f"{self.temp_dir}/ours-1"), dcp.FileSystemReader(f"{self.temp_dir}/theirs"))
        )
        assert shapes(ours) == shapes(theirs)
        print(f"beside torch: {kind}", flush=True)
        dist.barrier()  # the helper removes the folder on each rank

    @with_temp_dir
    def count(self) -> None:
        """Count the collectives of a save and a load by both."""
        torch.manual_seed(0)
        state = {"w.weight": distribute_tensor(torch.randn(256, 64), init_device_mesh("cpu", (WORLD,)), [Shard(0)])}
        found: dict[str, int] = {}
        for who, writer, reader in (
            ("ours", Writer(f"{self.temp_dir}/ours"), Reader(f"{self.temp_dir}/ours")),
            ("torch", *(make(f"{self.temp_dir}/torch") for make in (dcp.FileSystemWriter, dcp.FileSystemReader))),
        ):
            with counted() as calls:
                dcp.save(state, storage_writer=writer)
                found[f"{who} save"] = len(calls)
                dcp.load(dict(state), storage_reader=reader)
                found[f"{who} load"] = len(calls) - found[f"{who} save"]
        print("collectives:", json.dumps(found), flush=True)
        dist.barrier()


def flat(folder: Path) -> None:
    """Check FSDP1, whose shards are `ShardedTensor`s: a chain, a resume, a load in FSDP2."""

    def wrapped(keep: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=keep)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    for keep in (False, True):
        name = folder / f"flat-{keep}"
        model, optimizer = wrapped(keep)
        writer = Writer(cfg=sp.presets.lossless())
        for step in range(2):
            train(model, optimizer, step)
            dcp.save(
                state_of(model, optimizer, step, flat=False), storage_writer=writer, checkpoint_id=name / str(step)
            )
        wanted = [train(model, optimizer, step) for step in (2, 3)]
        for again, other in (wrapped(keep), wrapped(not keep), sharded(init_device_mesh("cpu", (WORLD,)), "fsdp")):
            train(again, other, 99)
            state = state_of(again, other, 0, flat=False)
            dcp.load(state, storage_reader=Reader(name / "1"))
            set_state_dict(again, other, model_state_dict=state["model"], optim_state_dict=state["optim"])
            assert [train(again, other, step) for step in (2, 3)] == wanted
    with pytest.raises(sp.BadArgumentError, match=r"FullyShardedDataParallel \(FSDP1\) in it; take fully_shard"):
        trainers.save(sp.Store(folder / "loop"), 1, model, optimizer)
    with pytest.raises(sp.BadArgumentError, match="FSDP1"):
        trainers.resume(sp.Store(folder / "loop"), nn.Sequential(model))


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Count calls of object collectives by name."""
    names = ("gather_object", "scatter_object_list", "broadcast_object_list", "all_gather_object", "barrier")
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name, original in {name: getattr(dist, name) for name in names}.items():

            def call(*args: Any, _name: str = name, _original: Any = original, **named: Any) -> Any:
                calls.append(_name)
                return _original(*args, **named)

            patch.setattr(dist, name, call)
        yield calls


KINDS = ("replicated", "sharded", "2-d mesh", "tensor parallel", "values", "empty shards")


def values(tree: Any, path: str = "") -> dict[str, Any]:
    """Return leaves that are not tensors, by path."""
    if isinstance(tree, dict):
        return {k: v for key, value in tree.items() for k, v in values(value, f"{path}/{key}").items()}
    return {} if isinstance(tree, torch.Tensor) else {path: tree}


def shapes(metadata: Any) -> dict[str, Any]:
    """Return size, dtype and shards of each tensor in the metadata."""

    def one(entry: Any) -> Any:
        if not hasattr(entry, "size"):
            return None
        chunks = {(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if 0 not in c.sizes}
        return tuple(entry.size), entry.properties.dtype, chunks

    return {name: one(entry) for name, entry in metadata.state_dict_metadata.items()}


def beside(_: Path) -> None:
    """Run all kinds of states on four ranks."""
    for kind in KINDS:
        Beside().same(kind)
    Beside().count()


def rank(scenario: str, number: int, world: int, root: Path) -> None:
    """Run as one rank."""
    global RANK, WORLD
    RANK, WORLD = number, world
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous-{scenario}",
        rank=number,
        world_size=world,
        timeout=timedelta(seconds=LIMIT),
    )
    SCENARIOS[scenario][0](root)
    dist.barrier()
    dist.destroy_process_group()


def run(scenario: str, world: int, root: Path) -> bool:
    """Fork the ranks and wait for them; return True in a finished child."""
    pids = []
    for number in range(world):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            log = os.open(root / f"{scenario}-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            try:
                rank(scenario, number, world, root)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            return True
        pids.append(pid)
    deadline, codes = time.monotonic() + TIMEOUT, {}
    while len(codes) < world and time.monotonic() < deadline:
        if scenario == "stalled" and codes.get(pids[0]) == 0 and pids[1] not in codes:
            os.kill(pids[1], signal.SIGKILL)
        for pid in [p for p in pids if p not in codes]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for pid in [p for p in pids if p not in codes]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    logs = [(root / f"{scenario}-{number}.log").read_text(errors="replace")[-3000:] for number in range(world)]
    print(json.dumps({"scenario": scenario, "codes": [codes.get(p) for p in pids], "logs": logs}), flush=True)
    return False


SCENARIOS = {
    "save": (save, 2),
    "reshard": (reshard, 4),
    "killed": (killed, 2),
    "thresholds of 2": (thresholds, 2),
    "thresholds of 4": (thresholds, 4),
    "refused": (refused, 2),
    "gone": (gone, 2),
    "stalled": (stalled, 2),
    "beside": (beside, 4),
    "flat": (flat, 2),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    import_late()
    for name in sys.argv[2:] or SCENARIOS:
        if run(name, SCENARIOS[name][1], Path(sys.argv[1])):
            break
