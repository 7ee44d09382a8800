"""Writer and reader for torch.distributed.checkpoint, on several ranks and on one."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import shrinkpoint as sp
from shrinkpoint.codec.compress import compress_inputs
from shrinkpoint.codec.format import container
from shrinkpoint.store.local import LocalFiles
from shrinkpoint.trainers.dcp import (
    CompressedCheckpoints,
    LoadPlanner,
    ParentNotUsedWarning,
    PartialLoadWarning,
    Reader,
    Writer,
)
from shrinkpoint.trainers.dcp import metadata as metadata_module
from shrinkpoint.trainers.dcp import reader as reader_module
from shrinkpoint.trainers.dcp import writer as writer_module
from shrinkpoint.trainers.dcp.metadata import FOLDER, Entry, Index, Layout, RankFile, Shard, build, parse, place

from ..store.common import spied_folders
from . import dcp_worker

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch"),
]
EXACT = sp.presets.lossless()
Tree = dict[str, Any]


def save(state: Tree, folder: Any, writer: Writer | None = None, **options: Any) -> None:
    dcp.save(state, storage_writer=writer or Writer(cfg=EXACT), checkpoint_id=folder, no_dist=True, **options)


def load(state: Tree, folder: Any, **options: Any) -> Tree:
    dcp.load(state, storage_reader=Reader(folder), no_dist=True, **options)
    return state


def index_of(folder: Path) -> Index:
    return parse((folder / ".metadata").read_bytes(), "test")


def everything(reader: Any) -> Tree:
    """Load all entries of a checkpoint in this process."""
    return _load_state_dict_from_keys(storage_reader=reader)


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from flat(value, f"{path}/{key}")
    else:
        yield path, tree


def same(a: Any, b: Any) -> None:
    left, right = dict(flat(a)), dict(flat(b))
    assert left.keys() == right.keys()
    for path, value in left.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == right[path].dtype, path
            assert torch.equal(value, right[path]), path
        else:
            assert (type(value), value) == (type(right[path]), right[path]), path


def trained(steps: int = 1, width: int = 64) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: Any, optimizer: Any, flattened: bool = False) -> Tree:
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    weights, moments = get_state_dict(model, optimizer, options=options)
    return {"model": weights, "optim": moments}


# ---- several ranks


@pytest.mark.parametrize("permuted", [True, False])
def test_permuted_tensors_are_loaded_into_tensors_of_any_order(permuted: bool, tmp_path: Path) -> None:
    """As in torch, the loaded tensor keeps its own strides."""
    w = torch.arange(2160.0).reshape(20, 12, 3, 3).to(memory_format=torch.channels_last)
    writer = Writer(cfg=EXACT)
    for step, state in enumerate(({"w": w, "m": w[:, :, 0, 0].T}, {"w": w.contiguous(), "m": w[:, :, 0, 0].T + 1})):
        save(state, tmp_path / f"{step}", writer)
        target = {n: torch.zeros_like(x) if permuted else torch.zeros(x.shape) for n, x in state.items()}
        strides = {n: x.stride() for n, x in target.items()}
        load(target, tmp_path / f"{step}")
        assert all(torch.equal(target[n], x) and target[n].stride() == strides[n] for n, x in state.items())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any) -> tuple[Path, dict[str, Any]]:
    """Run the scenarios of `dcp_worker.py`; return their folder and results."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", dcp_worker.__name__, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2700)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    return folder, {run["scenario"]: run for run in runs}


def test_ranks_save_and_reshard(ranks: Any) -> None:
    _, runs = ranks
    for scenario in ("save", "reshard"):
        assert set(runs[scenario]["codes"]) == {0}, "\n".join(runs[scenario]["logs"])


@pytest.mark.parametrize("kind", dcp_worker.KINDS)
def test_every_kind_of_state_is_loaded_as_from_torchs_own_files(ranks: Any, kind: str) -> None:
    found = ranks[1]["beside"]
    assert set(found["codes"]) == {0}, "\n".join(found["logs"])
    assert all(f"beside torch: {kind}" in log for log in found["logs"]), found["logs"]


def test_collectives_are_those_of_the_page(ranks: Any) -> None:
    """docs/scaling.md: a gather and a broadcast in addition to torch's four collectives."""
    (line,) = [line for line in ranks[1]["beside"]["logs"][0].splitlines() if line.startswith("collectives: ")]
    found = json.loads(line.removeprefix("collectives: "))
    assert found == {"ours save": 6, "ours load": 3, "torch save": 4, "torch load": 3}


def test_metadata_is_as_large_as_the_page_predicts(ranks: Any) -> None:
    """docs/scaling.md: (2 n + 40) E + 26 R L + (100 + 41 C) R bytes."""
    folder, _ = ranks
    index = index_of(folder / "exact-2")
    names = sum(map(len, index.entries)) / len(index.entries)
    cut = sum(len(layout.shards) > 1 for layout in index.layouts)
    world, chain = len(index.files), len(index.files[0].chain)
    predicted = (2 * names + 40) * len(index.entries) + 26 * world * cut + (100 + 41 * chain) * world
    assert predicted == pytest.approx((folder / "exact-2" / ".metadata").stat().st_size, rel=0.2)


def test_a_save_to_a_folder_of_its_own_makes_folders_durable_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, state = Writer(), {"weight": torch.ones(3)}
    save(state, tmp_path / "step-1", writer)
    synced = spied_folders(monkeypatch)
    save(state, tmp_path / "step-2", writer)
    # The new folder for its data and for its metadata, its data, and the folders above once.
    own = {name: synced.count(str(tmp_path / name)) for name in (".", "step-2", f"step-2/{FOLDER}")}
    assert own == {".": 1, "step-2": 2, f"step-2/{FOLDER}": 1}


def test_one_process_loads_what_two_ranks_saved(ranks: Any) -> None:
    folder, _ = ranks
    for ours, theirs in (("exact-2", "torch"), ("tp", "tp-torch")):
        found = everything(Reader(folder / ours))
        same(found, everything(dcp.FileSystemReader(folder / theirs)))
    assert found["run"]["betas"] == (0.9, 0.95)
    found = everything(Reader(folder / "ddp"))
    assert torch.equal(found["weight"], torch.arange(4096.0).view(64, 64))
    assert found["n"] == 3


def test_each_checkpoint_of_a_chain_stands_alone(ranks: Any, tmp_path: Path) -> None:
    folder, _ = ranks
    expected = everything(Reader(folder / "exact-2"))
    shutil.copytree(folder / "exact-2", tmp_path / "moved")
    same(everything(Reader(tmp_path / "moved")), expected)
    index = index_of(folder / "exact-2")
    assert [(f.rank, len(f.chain), f.since_base) for f in index.files] == [(0, 3, 2), (1, 3, 2)]
    for file in index.files:
        assert file.chain[0][1] < file.chain[-1][1]
        base = folder / "exact-2" / "data" / file.chain[-1][0]
        assert base.samefile(folder / "exact-0" / "data" / file.chain[-1][0])


def test_lossy_shards_hold_their_bound(ranks: Any) -> None:
    folder, _ = ranks
    exact, lossy = everything(Reader(folder / "exact-2")), everything(Reader(folder / "lossy"))
    weight, rough = exact["model"]["up.weight"], lossy["model"]["up.weight"]
    assert 0 < float((weight - rough).norm() / weight.norm()) < 0.15
    assert torch.equal(exact["model"]["norm.weight"], lossy["model"]["norm.weight"])
    spent = [sum(f.chain[0][1] for f in index_of(folder / name).files) for name in ("lossy", "exact-2")]
    assert 4 * spent[0] < spent[1]
    # One container a rank and step, deltas and base, and none of the earlier files.
    assert len(os.listdir(folder / "lossy" / "data")) == 6


def test_asynchronous_saves_are_of_the_state_as_it_was(ranks: Any) -> None:
    folder, _ = ranks
    for step in range(2):
        found = everything(Reader(folder / f"thread-{step}"))
        assert torch.equal(found["weight"], torch.arange(4096.0).view(64, 64) + step)
        assert torch.equal(found["s"], torch.arange(8192.0).view(128, 64) + step)
        found = everything(Reader(folder / f"process-{step}"))
        assert torch.equal(found["weight"], torch.full((2048,), 1.5 + step))
        assert found["step"] == step
    for kind in ("thread", "process"):
        assert {len(f.chain) for f in index_of(folder / f"{kind}-1").files} == {2}


def test_a_rank_that_dies_leaves_the_former_checkpoint(ranks: Any, tmp_path: Path) -> None:
    folder, runs = ranks
    assert runs["killed"]["codes"] == [0, 17], runs["killed"]["logs"]
    assert "noticed: " in runs["killed"]["logs"][0]
    shutil.copytree(folder / "killed", tmp_path / "c")
    whole = torch.arange(8192.0).view(128, 64)
    assert torch.equal(load({"s": torch.zeros(128, 64)}, tmp_path / "c")["s"], whole)
    assert len(os.listdir(tmp_path / "c" / "data")) == 4
    # Another world size goes on in the same place: what the dead one left is swept away.
    with pytest.warns(ParentNotUsedWarning, match="another mesh"):
        save({"s": whole + 2}, tmp_path / "c")
    assert torch.equal(load({"s": torch.zeros(128, 64)}, tmp_path / "c")["s"], whole + 2)
    assert len(os.listdir(tmp_path / "c" / "data")) == 1


def limits(folder: Path) -> dict[str, set[Any]]:
    """Return the thresholds of each quantized array, equal on all ranks."""
    found: dict[str, set[Any]] = {}
    for file in index_of(folder).files:
        ckpt = sp.Checkpoint.from_bytes((folder / "data" / file.chain[0][0]).read_bytes())
        for record in ckpt.records:
            if record.stream == "levels":
                found.setdefault(record.path, set()).add(tuple(record.meta["t"][0]))
    return found


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", list(dcp_worker.GLOBAL))
def test_thresholds_are_those_of_one_process_with_the_whole_state(ranks: Any, name: str, world: int) -> None:
    folder, runs = ranks
    assert set(runs[f"thresholds of {world}"]["codes"]) == {0}, "\n".join(runs[f"thresholds of {world}"]["logs"])
    parent = None
    for step in range(2):
        state = {"model": dcp_worker.uneven(step)}
        parent = sp.compress(state, parent, dcp_worker.GLOBAL[name])
        expected = {r.path: {tuple(r.meta["t"][0])} for r in parent.records if r.stream == "levels"}
        assert len(expected) == 4
        where = folder / f"{name}-{world}-{step}"
        assert limits(where) == expected
        # The decoded values follow them.
        found = everything(Reader(where))["model"]
        for path, weight in state["model"].items():
            ((protect, _, prune, _),) = expected[f"model/{path}"]
            size = weight.abs()
            assert not found[path][size < prune].any(), path
            if protect is not None:
                large = size >= protect
                assert torch.equal(found[path][large], weight[large].bfloat16().to(weight.dtype)), path
        pruned = {"inshrinkerator": 0.15, "default": 0.0, "two": 0.05}[name]
        assert float((state["model"]["up.weight"].abs() < prune_of(expected)).float().mean()) >= pruned


def prune_of(limits: dict[str, set[Any]]) -> float:
    ((_, _, prune, _),) = limits["model/up.weight"]
    return float(prune)


def test_a_thread_agrees_over_the_group_it_is_given_and_over_no_other(ranks: Any) -> None:
    folder, _ = ranks
    for world in (2, 4):
        ckpt = sp.compress({"model": dcp_worker.uneven(1)}, cfg=dcp_worker.GLOBAL["two"])
        expected = {r.path: {tuple(r.meta["t"][0])} for r in ckpt.records if r.stream == "levels"}
        assert limits(folder / f"aside-{world}") == expected
        alone = limits(folder / f"alone-{world}")
        assert len(alone["model/up.weight"]) == world


def test_a_group_of_some_of_the_ranks(ranks: Any) -> None:
    folder, _ = ranks
    ckpt = sp.compress({"weight": dcp_worker.uneven(0)["up.weight"]})
    (expected,) = (tuple(r.meta["t"][0]) for r in ckpt.records)
    assert limits(folder / "pair") == {"weight": {expected}}
    assert len(limits(folder / "pair-unsaid")["weight"]) == 2


def test_a_rank_that_cannot_store_its_state_stops_all_at_once(ranks: Any) -> None:
    _, runs = ranks
    assert set(runs["refused"]["codes"]) == {0}, "\n".join(runs["refused"]["logs"])


def test_fsdp1_is_saved_in_chains_and_goes_on_in_fsdp2(ranks: Any) -> None:
    folder, runs = ranks
    assert runs["flat"]["codes"] == [0, 0], "\n".join(runs["flat"]["logs"])
    for kind in ("flat-False", "flat-True"):
        assert [len(file.chain) for file in index_of(folder / kind / "1").files] == [2, 2]


@pytest.mark.parametrize(("scenario", "code", "said"), [("gone", 17, "remote worker"), ("stalled", -9, "timeout")])
def test_a_rank_lost_within_a_collective_is_noticed(ranks: Any, scenario: str, code: int, said: str) -> None:
    folder, runs = ranks
    assert runs[scenario]["codes"] == [0, code], "\n".join(runs[scenario]["logs"])
    assert said.lower() in runs[scenario]["logs"][0].lower()
    assert int(runs[scenario]["logs"][0].split("noticed after ")[1].split()[0]) < dcp_worker.LIMIT / 2
    # The checkpoint before it is whole.
    assert everything(Reader(folder / scenario))["s"].shape == (128, 64)


def test_a_missing_shard_is_named(ranks: Any, tmp_path: Path) -> None:
    folder, _ = ranks
    shutil.copytree(folder / "exact-2", tmp_path / "c")
    name = index_of(tmp_path / "c").files[1].chain[-1][0]
    (tmp_path / "c" / "data" / name).unlink()
    with pytest.raises(dcp.CheckpointException, match=rf"MissingParentError.*rank 1.*{name} is gone"):
        everything(Reader(tmp_path / "c"))


def test_only_what_is_needed_is_read(ranks: Any, monkeypatch: Any) -> None:
    folder, _ = ranks
    read = []
    monkeypatch.setattr(
        LocalFiles,
        "read_range",
        lambda self, name, start, stop, f=LocalFiles.read_range: read.append(name) or f(self, name, start, stop),
    )
    monkeypatch.setattr("shrinkpoint.codec.format.ranged.FRONT", 1 << 12)
    decoded = []
    monkeypatch.setattr(
        "shrinkpoint.codec.checkpoint.Checkpoint.decode",
        lambda self, wanted, prev, f=sp.Checkpoint.decode: (
            decoded.extend(r.path for r in wanted) or f(self, wanted, prev)
        ),
    )
    first_rows = torch.zeros(130)
    load({"model": {"norm.weight": first_rows}}, folder / "exact-2")
    assert set(decoded) == {"model/norm.weight"}
    assert len(decoded) == 6
    assert {Path(name).parent.name for name in read} == {"data"}


# ---- one process


def test_states_come_back_to_the_bit(tmp_path: Path) -> None:
    state: Tree = {
        "model": {
            "bf": torch.randn(70, 30).bfloat16(),
            "half": torch.randn(5).half(),
            "int": torch.arange(7),
            "bool": torch.tensor([True, False]),
            "zero": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.zeros(0, 4),
            "strided": torch.randn(20, 30).t(),
        },
        "lists": [{"x": torch.ones(2)}, {"x": torch.zeros(2), "lr": 0.1}],
        "plain": {"s": "text", "none": None, "t": (1, (2.5, b"x")), "big": 1 << 80, "nan": float("inf"), "e": []},
        "mixed": (torch.arange(3), "a"),
    }
    state["model"]["tied"] = state["model"]["bf"]
    save(state, tmp_path)

    def cleared(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {k: cleared(v) for k, v in tree.items()}
        if isinstance(tree, list) and tree and isinstance(tree[0], dict):
            return [cleared(v) for v in tree]
        return torch.ones_like(tree) if isinstance(tree, torch.Tensor) else 0

    back = load(cleared(state), tmp_path)
    assert torch.equal(back["mixed"][0], state["mixed"][0])
    back["mixed"] = state["mixed"] = None
    same(back, state)
    found = everything(Reader(tmp_path))
    assert found["plain"] == state["plain"]


def test_same_input_same_bytes(tmp_path: Path) -> None:
    state = state_of(*trained())
    for name in "ab":
        save(state, tmp_path / name, Writer())
    files = [{p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*.*")} for n in "ab"]
    assert files[0] == files[1]
    assert len(files[0]) == 2


@pytest.mark.parametrize("form", ["nested", "flattened", "bare"])
def test_optimizer_entries_are_known_by_their_names(tmp_path: Path, form: str) -> None:
    model, optimizer = trained(width=128)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["factor"] = torch.randn(parameter.shape)
    state = state_of(model, optimizer, flattened=form != "nested")
    save(state | state.pop("optim") if form == "bare" else state, tmp_path, Writer())
    (name,) = os.listdir(tmp_path / "data")
    rows = {r.path: r for r in sp.Checkpoint.from_bytes((tmp_path / "data" / name).read_bytes()).summary()}
    entries = "state/0.weight" if form == "bare" else "optim/state/0.weight"
    assert rows["model/0.weight"].stream == "levels"
    assert rows["model/1.weight"].stream == "bytes"
    assert rows[f"{entries}/exp_avg_sq"].stream == "rank-one"
    assert rows[f"{entries}/exp_avg"].codec == "first moment"
    assert rows[f"{entries}/factor"].stream == "bytes"


def test_rules_and_kinds_are_heeded(tmp_path: Path) -> None:
    model, optimizer = trained(width=128)
    cfg = sp.Config([("model/2.*", sp.Exact()), ("embedding", sp.Exact())])
    save(state_of(model, optimizer), tmp_path, Writer(cfg=cfg, kinds={"0.weight": "embedding"}))
    (name,) = os.listdir(tmp_path / "data")
    rows = {r.path: r for r in sp.Checkpoint.from_bytes((tmp_path / "data" / name).read_bytes()).summary()}
    assert rows["model/0.weight"].stream == rows["model/2.weight"].stream == "bytes"


@pytest.mark.parametrize("how", ["nested", "flat"])
def test_kinds_of_no_tensor_are_refused(tmp_path: Path, how: str) -> None:
    model, optimizer = trained(width=16)
    state = state_of(model, optimizer)
    if how == "flat":
        state = {f"model.{name}": value for name, value in state["model"].items()}
    right = {"0.weight": "embedding", "state/nowhere/exp_avg": sp.Kind("other", "state")}
    save(state, tmp_path / "right", Writer(kinds=right))
    with pytest.raises(dcp.CheckpointException, match=r"kinds: none of its 1 paths \(0\.wieght\) is that of an array"):
        save(state, tmp_path / "wrong", Writer(kinds={"0.wieght": "embedding"}))
    assert not (tmp_path / "wrong" / ".metadata").exists()


def chain(folder: Path) -> int:
    (file,) = index_of(folder).files
    assert set(os.listdir(folder / "data")) == {name for name, _ in file.chain}
    return len(file.chain)


def test_saving_to_one_place_again_and_again(tmp_path: Path) -> None:
    w = torch.randn(64, 64)
    writer = Writer(tmp_path, sp.Config(EXACT.rules, chain=sp.ChainPolicy(3)))
    lengths = []
    for step in range(5):
        dcp.save({"weight": w + step}, storage_writer=writer, no_dist=True)
        lengths.append(chain(tmp_path))
        assert torch.equal(load({"weight": torch.zeros(64, 64)}, tmp_path)["weight"], w + step)
    assert lengths == [1, 2, 3, 1, 2]
    against_base = Writer(tmp_path, sp.Config(EXACT.rules, chain=sp.ChainPolicy(4, against="base")))
    lengths = []
    for step in range(5):
        # The first is a delta over what the other writer left: a chain of three.
        dcp.save({"weight": w + step}, storage_writer=against_base, no_dist=True)
        lengths.append(chain(tmp_path))
    assert lengths == [3, 3, 1, 2, 2]
    assert torch.equal(load({"weight": torch.zeros(64, 64)}, tmp_path)["weight"], w + 4)


@pytest.mark.parametrize("against", ["previous", "base"])
def test_a_delta_that_spares_nothing_is_a_base_instead(tmp_path: Path, against: Any, monkeypatch: Any) -> None:
    """After a jump of the weights a base is stored; few states are compressed twice."""
    made: list[sp.Checkpoint] = []
    monkeypatch.setattr(writer_module, "compress_inputs", lambda *a: made.append(compress_inputs(*a)) or made[-1])
    w = torch.randn(200, 200)
    writer, redrawn, lengths = Writer(cfg=sp.Config(EXACT.rules, chain=sp.ChainPolicy(None, against))), {2, 3}, []
    for step in range(6):
        w = torch.randn(200, 200) if step in redrawn else w.clone()
        w[step] += 0.1
        save({"weight": w, "step": step}, tmp_path / str(step), writer)
        lengths.append(chain(tmp_path / str(step)))
        assert torch.equal(load({"weight": torch.zeros(200, 200)}, tmp_path / str(step))["weight"], w)
    assert lengths == ([1, 2, 1, 1, 2, 3] if against == "previous" else [1, 2, 1, 1, 2, 2])
    assert len(made) == 6 + len(redrawn)
    large = Writer(cfg=sp.Config(EXACT.rules, chain=sp.ChainPolicy(None, against, only_smaller=False)))
    for step in range(2):
        save({"weight": torch.randn(200, 200)}, tmp_path / f"large-{step}", large)
    assert chain(tmp_path / "large-1") == 2


def test_a_run_that_starts_anew_goes_on_with_deltas(tmp_path: Path) -> None:
    w = torch.randn(64, 64)
    save({"weight": w}, tmp_path / "1")
    save({"weight": w + 1}, tmp_path / "2", Writer(cfg=EXACT, parent=tmp_path / "1"))
    assert chain(tmp_path / "2") == 2
    save({"weight": w + 2}, tmp_path / "2")
    assert chain(tmp_path / "2") == 3
    shutil.rmtree(tmp_path / "1")
    assert torch.equal(load({"weight": torch.zeros(64, 64)}, tmp_path / "2")["weight"], w + 2)
    with pytest.raises(dcp.CheckpointException, match=r"MissingParentError.*no checkpoint"):
        save({"weight": w}, tmp_path / "3", Writer(cfg=EXACT, parent=tmp_path / "1"))
    assert not (tmp_path / "3").exists()


def test_a_parent_that_is_damaged_or_gone(tmp_path: Path) -> None:
    w = torch.randn(64, 64)
    writer = Writer(cfg=EXACT)
    save({"weight": w}, tmp_path / "1", writer)
    (name,) = os.listdir(tmp_path / "1" / "data")
    file = tmp_path / "1" / "data" / name
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match=r"CorruptDataError.*checksum"):
        save({"weight": w}, tmp_path / "2", Writer(cfg=EXACT, parent=tmp_path / "1"))
    # Unrelated files in the target folder do not prevent a save.
    with pytest.warns(ParentNotUsedWarning, match="checksum"):
        save({"weight": w}, tmp_path / "1")
    shutil.rmtree(tmp_path / "1")
    with pytest.warns(ParentNotUsedWarning, match="gone"):
        save({"weight": w + 1}, tmp_path / "2", writer)
    assert chain(tmp_path / "2") == 1
    with pytest.warns(ParentNotUsedWarning, match="another mesh"):
        save({"v": torch.randn(64, 64)}, tmp_path / "3", Writer(cfg=EXACT, parent=tmp_path / "2"))


def test_a_save_that_fails_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    writer = Writer(cfg=EXACT)
    state = {"weight": torch.ones(2000), "run": {"step": 1}}
    save(state, tmp_path, writer)
    with pytest.raises(dcp.CheckpointException, match=r"UnsupportedLeafError: @values/run\.hook: builtins\.object"):
        save({"weight": torch.zeros(2000), "run": {"hook": object()}}, tmp_path, writer)
    before = load({"weight": torch.zeros(2000)}, tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("shrinkpoint.trainers.dcp.writer.build", lambda *_: 1 / 0)
        with pytest.raises(dcp.CheckpointException, match="ZeroDivisionError"):
            save({"weight": torch.zeros(2000)}, tmp_path, writer)
    same(load({"weight": torch.zeros(2000)}, tmp_path), before)
    save({"weight": torch.full((2000,), 3.0)}, tmp_path, writer)
    assert torch.equal(load({"weight": torch.zeros(2000)}, tmp_path)["weight"], torch.full((2000,), 3.0))
    chain(tmp_path)


@pytest.mark.parametrize("name", [".metadata", "data/"])
def test_a_disk_that_cannot_read_the_former_checkpoint_stops_no_save(
    name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """A bad sector counts as damage, as a wrong checksum does: the next save is a base."""
    save({"weight": torch.zeros(2000)}, tmp_path)
    read = LocalFiles.read

    def failing(files: LocalFiles, path: str) -> bytes:
        if path.startswith(name):
            raise OSError(errno.EIO, os.strerror(errno.EIO), files.path(path))
        return read(files, path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "read", failing)
        with pytest.warns(ParentNotUsedWarning, match="cannot be read: OSError: .*Errno 5"):
            save({"weight": torch.ones(2000)}, tmp_path)
    assert torch.equal(load({"weight": torch.zeros(2000)}, tmp_path)["weight"], torch.ones(2000))
    assert chain(tmp_path) == 1


def test_a_former_file_that_cannot_be_removed_fails_no_save(tmp_path: Path, monkeypatch: Any) -> None:
    """Once the metadata is written the checkpoint exists; the next save removes old files."""
    cfg = replace(EXACT, chain=sp.ChainPolicy(base_every=1))

    def denied(files: LocalFiles, names: list[str]) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), *names[:1])

    save({"weight": torch.zeros(2000)}, tmp_path, Writer(cfg=cfg))
    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "remove", denied)
        save({"weight": torch.ones(2000)}, tmp_path, Writer(cfg=cfg))
    assert torch.equal(load({"weight": torch.zeros(2000)}, tmp_path)["weight"], torch.ones(2000))
    assert len(list((tmp_path / "data").iterdir())) == 2
    save({"weight": torch.zeros(2000)}, tmp_path, Writer(cfg=cfg))
    assert len(list((tmp_path / "data").iterdir())) == 1


class Halves(DefaultSavePlanner):
    """A planner that saves each matrix as two shards of one rank."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for item in super().create_local_plan().items:
            if item.tensor_data is None or len(item.tensor_data.size) != 2:
                items.append(item)
                continue
            rows, columns = item.tensor_data.size
            for begin, end in ((0, rows // 3), (rows // 3, rows)):
                chunk = ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([end - begin, columns]))
                data = TensorWriteData(chunk, item.tensor_data.properties, item.tensor_data.size)
                items.append(
                    WriteItem(MetadataIndex(item.index.fqn, [begin, 0]), WriteItemType.SHARD, tensor_data=data)
                )
        return SavePlan(items, planner_data=self.mappings)

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if index.offset is None or len(index.offset) != 2:
            return value
        begin, third = index.offset[0], value.shape[0] // 3
        return value[third:] if begin else value[:third]


def test_several_shards_of_one_tensor_on_a_rank(tmp_path: Path) -> None:
    state = {"a": {"weight": torch.randn(30, 40), "b": torch.randn(3)}, "n": 5}
    writer = Writer(cfg=EXACT)
    for step in range(2):
        state["a"]["weight"] += step
        save(state, tmp_path, writer, planner=Halves())
    assert len(index_of(tmp_path).layouts) == 2
    back = load({"a": {"weight": torch.zeros(30, 40), "b": torch.zeros(3)}, "n": 0}, tmp_path)
    same(back, state)


class Pickles(dcp.SavePlanner):
    """A planner without nesting that gives other values as torch's pickles."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.inner = DefaultSavePlanner(flatten_state_dict=False)
        self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        return self.inner.create_local_plan()

    def create_global_plan(self, all_plans: Any) -> Any:
        return self.inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.inner.resolve_data(write_item)


class Armed:
    """An object whose unpickling has an effect."""

    def __reduce__(self) -> Any:
        return os.system, ("echo armed > /dev/null",)


def test_other_planners(tmp_path: Path) -> None:
    save({"weight": torch.arange(5.0), "n": [1, 2]}, tmp_path, planner=Pickles())
    back = load({"weight": torch.zeros(5), "n": None}, tmp_path)
    assert back["n"] == [1, 2]
    assert back["weight"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(dcp.CheckpointException, match="UnsupportedLeafError: n: cannot be stored without pickle"):
        save({"n": Armed()}, tmp_path, planner=Pickles())
    with pytest.raises(dcp.CheckpointException, match="UnsupportedLeafError"):
        save({"n": Armed()}, tmp_path)


def test_cached_plans(tmp_path: Path) -> None:
    writer = Writer(cfg=EXACT)
    try:
        for step in range(3):
            state = {"weight": torch.full((2000,), float(step)), "n": step}
            save(state, tmp_path / str(step), writer, planner=DefaultSavePlanner(enable_plan_caching=True))
            same(load({"weight": torch.zeros(2000), "n": 9}, tmp_path / str(step)), state)
    finally:
        for name in [n for n in vars(dcp.SavePlanner) if n.startswith("_cached_")]:
            getattr(dcp.SavePlanner, name).clear()
    assert chain(tmp_path / "2") == 3


def test_ranks_that_do_not_talk_write_their_own_metadata(tmp_path: Path) -> None:
    save({"weight": torch.arange(5.0)}, tmp_path, use_collectives=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["__0.metadata", "data"]
    assert load({"weight": torch.zeros(5)}, tmp_path)["weight"].tolist() == [0, 1, 2, 3, 4]


def test_other_file_systems(tmp_path: Path) -> None:
    writer = Writer(cfg=EXACT)
    for step in range(2):
        save({"weight": torch.arange(2000.0) + step}, f"memory://dcp/{step}", writer)
    assert torch.equal(load({"weight": torch.zeros(2000)}, "memory://dcp/1")["weight"], torch.arange(2000.0) + 1)
    (file,) = index_of_memory("memory://dcp/1").files
    assert len(file.chain) == 2
    assert Writer.validate_checkpoint_id("memory://x")
    assert not Reader.validate_checkpoint_id("nosuch://x")
    for bad in ("nosuch://x", "", 3):
        with pytest.raises(sp.BadArgumentError):
            Writer(bad)
        with pytest.raises(sp.BadArgumentError):
            Reader(bad)
    with pytest.raises(dcp.CheckpointException, match="BadArgumentError: None is not a path"):
        dcp.save({"weight": torch.ones(1)}, storage_writer=Writer(), no_dist=True)


def index_of_memory(url: str) -> Index:
    import fsspec

    with fsspec.open(f"{url}/.metadata") as file:
        return parse(file.read(), url)


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    save({"a": torch.ones(3), "b": torch.ones(4), "n": 1, "old": torch.ones(2)}, tmp_path)
    state = {"a": torch.zeros(3), "b": torch.zeros(5), "n": torch.zeros(1), "new": torch.zeros(2)}
    with pytest.raises(dcp.CheckpointException) as caught:
        load(dict(state), tmp_path, planner=LoadPlanner())
    for part in (
        r"b is (4,) in the checkpoint and (5,) here",
        "n is no tensor",
        "new is not in",
        "not in the state: old",
    ):
        assert part in str(caught.value)
    with pytest.warns(PartialLoadWarning, match=r"new is not in the checkpoint"):
        back = load(dict(state), tmp_path, planner=LoadPlanner(strict=False))
    assert back["a"].tolist() == [1, 1, 1]
    assert back["b"].tolist() == [0] * 5
    assert load({"a": torch.zeros(3)}, tmp_path, planner=LoadPlanner())["a"].tolist() == [1, 1, 1]


def test_arrays_are_decoded_in_batches(tmp_path: Path, monkeypatch: Any) -> None:
    state = {f"w{i}": torch.randn(50, 50) for i in range(6)}
    save(state, tmp_path)
    batches = []
    monkeypatch.setattr(
        reader_module, "decode_only", lambda f, c, g=reader_module.decode_only: batches.append(1) or g(f, c)
    )
    monkeypatch.setattr(reader_module, "BATCH", 25_000)
    same(load({name: torch.zeros(50, 50) for name in state}, tmp_path), state)
    assert len(batches) == 3


def test_moments_that_belong_together_are_decoded_together(tmp_path: Path, monkeypatch: Any) -> None:
    names = [f"w{i}" for i in range(5)]
    moments = {n: {"exp_avg": torch.randn(64, 64) * 1e-3, "exp_avg_sq": torch.rand(64, 64) * 1e-6} for n in names}
    state = {"model": {n: torch.randn(64, 64) for n in names}, "optim": {"state": moments}}
    save(state, tmp_path, Writer(cfg=sp.Config()))
    whole = load(dcp_worker.cleared(state), tmp_path)
    chosen = []

    def decode(files: Any, choose: Any, original: Any = reader_module.decode_only) -> Any:
        def noted(top: Any) -> Any:
            records = choose(top)
            siblings = {top.records[r.pair].key for r in records if r.pair is not None}
            chosen.append(len(siblings))
            assert siblings <= {r.key for r in records}
            return records

        return original(files, noted)

    monkeypatch.setattr(reader_module, "decode_only", decode)
    monkeypatch.setattr(reader_module, "BATCH", 3 * 64 * 64 * 4)
    same(load(dcp_worker.cleared(state), tmp_path), whole)
    assert len(chosen) > 3
    assert sum(chosen) == 5


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="memory is measured as Linux tells it")
def test_memory_of_a_load_is_bounded_beside_what_it_fills(tmp_path: Path) -> None:
    command = [sys.executable, str(Path(dcp_worker.__file__).with_name("dcp_memory.py")), str(tmp_path)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # Measured: 1.5 batches. A batch as large as the state would be more than half of the state.
    assert found["own"] > 5 * reader_module.BATCH
    assert found["growth"] < 3 * reader_module.BATCH


# ---- hostile metadata


@pytest.fixture(scope="module")
def sample(tmp_path_factory: Any) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    save({"m": {"weight": torch.randn(30, 40), "b": torch.randn(3)}, "n": 5, "l": [{"x": torch.ones(2)}]}, folder)
    return folder


def sealed(fields: Any) -> bytes:
    body = json.dumps({k: v for k, v in fields.items() if k != "checksum"}, separators=(",", ":")).encode()
    return b'{"checksum":"%s",' % xxhash.xxh3_128_hexdigest(body).encode() + body[1:]


def test_every_altered_byte_of_the_metadata_is_noticed(sample: Path) -> None:
    data = (sample / ".metadata").read_bytes()
    assert sealed(json.loads(data)) == data
    assert parse(data, "x").to_bytes() == data
    for i in range(len(data)):
        for mask in (1, 128):
            changed = data[:i] + bytes([data[i] ^ mask]) + data[i + 1 :]
            with pytest.raises(sp.CorruptDataError):
                parse(changed, "x")
        with pytest.raises(sp.CorruptDataError):
            parse(data[:i], "x")


def put(fields: Any, path: str, value: Any) -> Any:
    *above, last = [int(k) if k.isdigit() else k for k in path.split("/")]
    node = fields
    for key in above:
        node = node[key]
    node[last] = value
    return fields


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("files/0/chain/0/0", "../../etc/passwd", "not names of data files"),
        ("files/0/chain/0/0", "000000-0123456789abcdef.spt/../x", "not names of data files"),
        ("files/0/chain", [], "not names of data files"),
        ("files/0/rank", -1, "the file of rank"),
        ("files/0/chain/0/1", 1.5, "the file of rank"),
        ("layouts/0/0/1", [20, 40], "a shard is missing or there twice"),
        ("layouts/0/0/0", [1, 0], "out of bounds"),
        ("layouts/0/0/0", [-1, 0], "not a shape"),
        ("layouts/0/0/2", 1, "number 1 of 1"),
        ("layouts/0", [[[0, 0], [20, 40], 0], [[10, 0], [10, 40], 0]], "overlap"),
        ("layouts/0", [[[0, 0], [30, 40], 0], [[0], [0], 0]], "overlap"),
        ("entries/m.weight/s", [1 << 50, 40], "not a shape"),
        ("entries/m.weight/d", "load", "no dtype"),
        ("entries/m.weight/l", 99, "number 99"),
        ("entries/l.0.x/p", ["l", 1 << 40, "x"], "its path"),
        ("entries/l.0.x/p", [0, 1, "x"], "its path"),
        ("entries/n/b", 7, "number 7"),
        ("partial", 1, "partial"),
        ("version", 0, "version 0"),
        ("format", "pickle", "pickle"),
        ("entries", [], "malformed"),
    ],
)
def test_metadata_that_lies_is_refused(sample: Path, path: str, value: Any, match: str) -> None:
    fields = put(json.loads((sample / ".metadata").read_bytes()), path, value)
    with pytest.raises(sp.CorruptDataError, match=match):
        parse(sealed(fields), "x")


def test_newer_metadata_is_refused_by_name(sample: Path) -> None:
    fields = put(json.loads((sample / ".metadata").read_bytes()), "version", 2)
    with pytest.raises(sp.NewerFormatError, match="version 2"):
        parse(sealed(fields), "x")


@given(st.data())
def test_random_metadata_never_surprises(sample: Path, data: st.DataObject) -> None:
    fields = json.loads((sample / ".metadata").read_bytes())
    node: Any = fields
    while True:
        key = data.draw(st.sampled_from(list(node)) if isinstance(node, dict) else st.integers(0, len(node) - 1))
        below = node[key]
        if not isinstance(below, dict | list) or not below or data.draw(st.booleans()):
            break
        node = below
    leaves = st.none() | st.booleans() | st.integers(-2, 1 << 60) | st.text(max_size=4) | st.floats()
    node[key] = data.draw(
        st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x), max_leaves=5)
    )
    try:
        index = parse(sealed(fields), "x")
    except (sp.CorruptDataError, sp.NewerFormatError):
        return
    index.to_torch()
    assert parse(index.to_bytes(), "x").to_bytes() == index.to_bytes()


@pytest.mark.parametrize("which", [0, 1])
def test_a_container_of_a_newer_version_among_others_is_refused_by_name(tmp_path: Path, which: int) -> None:
    """A container of a newer version is refused by its name."""
    w = torch.randn(64, 64)
    writer = Writer(cfg=EXACT)
    for step in range(2):
        save({"weight": w + step}, tmp_path, writer)
    name, _ = index_of(tmp_path).files[0].chain[which]
    path = tmp_path / "data" / name
    data = bytearray(path.read_bytes())
    assert int.from_bytes(data[8:12], "little") == container.VERSION
    data[8:12] = (container.VERSION + 1).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match=rf"NewerFormatError: rank 0: .*{name}.*version 3"):
        load({"weight": torch.zeros(64, 64)}, tmp_path)
    with pytest.raises(dcp.CheckpointException, match=rf"NewerFormatError: rank 0: .*{name}"):
        save({"weight": w}, tmp_path / "next", Writer(cfg=EXACT, parent=tmp_path))


def test_torch_pickles_are_not_unpickled(tmp_path: Path) -> None:
    tmp_path.joinpath(".metadata").write_bytes(pickle.dumps(Armed()))
    with pytest.raises(dcp.CheckpointException, match="no metadata of a shrinkpoint checkpoint"):
        load({"weight": torch.ones(1)}, tmp_path)
    with pytest.raises(dcp.CheckpointException, match="no checkpoint, or one that was not completed"):
        load({"weight": torch.ones(1)}, tmp_path / "nothing")


def test_containers_that_are_not_what_the_metadata_says(tmp_path: Path) -> None:
    w = torch.randn(64, 64)
    writer = Writer(cfg=EXACT)
    save({"weight": w}, tmp_path, writer)
    save({"weight": w + 1}, tmp_path, writer)
    (file,) = index_of(tmp_path).files
    top, base = (tmp_path / "data" / name for name, _ in file.chain)
    good = top.read_bytes(), base.read_bytes()
    for path, data, match in (
        (top, good[0][:-1], "bytes; the metadata says"),
        (top, good[0][:-1] + bytes([good[0][-1] ^ 1]), "checksum"),
        (base, good[1][:-1] + bytes([good[1][-1] ^ 1]), "checksum"),
        (base, b"x" * len(good[1]), "magic"),
    ):
        path.write_bytes(data)
        with pytest.raises(dcp.CheckpointException, match=rf"CorruptDataError: rank 0: .*{top.name}.*{match}"):
            load({"weight": torch.zeros(64, 64)}, tmp_path)
        top.write_bytes(good[0])
        base.write_bytes(good[1])
    fields = json.loads((tmp_path / ".metadata").read_bytes())
    for at, value, match in (
        ("entries/weight/d", "int32", "the metadata says int32"),
        ("files/0/chain/1/0", "000000-0123456789abcdef.spt", "is gone"),
        ("files/0/chain", fields["files"][0]["chain"][:1], "names no parent"),
        (
            "files/0/chain",
            [fields["files"][0]["chain"][0], ["000000-0123456789abcdef.spt", len(good[1])]],
            "the parent",
        ),
    ):
        (tmp_path / ".metadata").write_bytes(sealed(put(json.loads(json.dumps(fields)), at, value)))
        if match == "the parent":
            base.with_name("000000-0123456789abcdef.spt").write_bytes(good[1])
        with pytest.raises(dcp.CheckpointException, match=match):
            load({"weight": torch.zeros(64, 64)}, tmp_path)
    base.unlink()
    base.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(good[1])
    (tmp_path / ".metadata").write_bytes(sealed(fields))
    with pytest.raises(dcp.CheckpointException, match="OSError"):
        load({"weight": torch.zeros(64, 64)}, tmp_path)


# ---- parts


@given(
    size=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    cuts=st.tuples(st.lists(st.integers(0, 12), max_size=3), st.lists(st.integers(0, 12), max_size=3)),
)
def test_grids_fill_a_tensor_and_anything_moved_does_not(size: tuple[int, int], cuts: Any) -> None:
    edges = [sorted({0, n, *(c for c in cut if c < n)}) for n, cut in zip(size, cuts, strict=True)]
    boxes = [
        ((a, c), (b - a, d - c))
        for a, b in zip(edges[0], edges[0][1:], strict=False)
        for c, d in zip(edges[1], edges[1][1:], strict=False)
    ]
    layout = Layout(tuple(Shard(o, s, i, 0) for i, (o, s) in enumerate(boxes)))
    assert layout.problem(size, False) == ""
    assert not layout.overlap()
    assert layout.problem((size[0] + 1, size[1]), False)
    if len(boxes) > 1:
        assert Layout(layout.shards[1:]).problem(size, False)
        moved = Layout((Shard(boxes[1][0], boxes[1][1], 0, 0), *layout.shards[1:]))
        assert moved.overlap()
    assert sum(math.prod(s) for _, s in boxes) == math.prod(size)


@given(st.data())
def test_any_boxes_overlap_if_two_of_them_do(data: st.DataObject) -> None:
    """Cuts through the axes find the same overlaps as a comparison of all boxes."""
    dims = data.draw(st.integers(0, 3))
    numbers = st.lists(st.integers(0, 3), min_size=dims, max_size=dims).map(tuple)
    boxes = data.draw(st.lists(st.tuples(numbers, numbers), max_size=12))
    full = [(o, s) for o, s in boxes if math.prod(s)]
    meet = [
        all(a < b + n and b < a + m for a, m, b, n in zip(o, s, p, t, strict=True))
        for (o, s), (p, t) in itertools.combinations(full, 2)
    ]
    layout = Layout(tuple(Shard(o, s, i, 0) for i, (o, s) in enumerate(boxes)))
    assert layout.overlap() == any(meet)


def pinwheels(count: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return boxes within one another that no cut through an axis separates."""
    boxes, width = [], 4 * count
    for i in range(count):
        low, n = 2 * i, width - 4 * i
        boxes += [((low, low), (n - 1, 1)), ((low + n - 1, low), (1, n - 1))]
        boxes += [((low + 1, low + n - 1), (n - 1, 1)), ((low, low + 1), (1, n - 1))]
    return boxes


def test_boxes_that_cuts_do_not_separate_are_compared() -> None:
    boxes = pinwheels(50)
    layout = Layout(tuple(Shard(o, s, i, 0) for i, (o, s) in enumerate(boxes)))
    assert [len(group) for group in layout.tangled] == [200]
    assert not layout.overlap()
    assert Layout((*layout.shards, Shard((100, 0), (1, 2), 0, 0))).overlap()


@pytest.mark.parametrize("grid", [(20_000, 1), (200, 100)])
def test_metadata_of_many_ranks_is_read_in_seconds(grid: tuple[int, int]) -> None:
    """What the ranks of a large job have written is not beyond the limits of a reader."""
    rows, columns = grid
    files = tuple(RankFile(r, ((f"{r:06d}-{r:016x}.spt", 1),), 1, 0, 0, 0) for r in range(rows * columns))
    layouts = tuple(
        Layout(tuple(Shard((n * (r // columns), r % columns), (n, 1), r, 0) for r in range(rows * columns)))
        for n in range(1, 5)
    )
    entries = {f"w{n}": Entry(None, "int8", (rows * (n + 1), columns), n) for n in range(len(layouts))}
    data = Index(len(files), False, files, layouts, entries).to_bytes()
    begin = time.process_time()
    assert parse(data, "x").layouts == layouts
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_PAIRS"])
def test_metadata_that_a_reader_refuses_is_not_committed(limit: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(metadata_module, limit, -1)
    with pytest.raises(dcp.CheckpointException, match="at most -1" if limit == "MAX_BYTES" else "more shards than"):
        save({"weight": torch.ones(3)}, tmp_path)
    assert not (tmp_path / ".metadata").exists()


def written(ranks: int, entries: int, rows: int = 1000) -> tuple[Metadata, list[RankFile]]:
    """Return the metadata and files of ranks that save row-sharded matrices."""
    each = -(-rows // ranks)
    edges = [min(rows, each * r) for r in range(ranks + 1)]
    boxes = [((a, 0), (b - a, 64)) for a, b in itertools.pairwise(edges)]
    chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]
    names = [f"model.layers.{i}.weight" for i in range(entries)]
    planned = {n: TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([rows, 64]), chunks) for n in names}
    files = [
        RankFile(r, ((f"{r:06d}-{r:016x}.spt", 10**6),), 10**7, 0, 0, 0, tuple((n, boxes[r][0]) for n in names))
        for r in range(ranks)
    ]
    return Metadata(planned), files


def test_metadata_grows_with_ranks_plus_entries() -> None:
    sizes = {(r, e): len(build(*written(r, e)).to_bytes()) for r in (4, 64) for e in (50, 500)}
    a_rank = (sizes[64, 50] - sizes[4, 50]) / 60
    assert a_rank < 200
    assert (sizes[64, 500] - sizes[4, 500]) / 60 == a_rank
    assert (sizes[64, 500] - sizes[64, 50]) / 450 < 100


@given(st.integers(1, 40), st.integers(1, 45))
def test_what_ranks_wrote_is_what_is_read(ranks: int, rows: int) -> None:
    index = build(*written(ranks, 2, rows))
    back = parse(index.to_bytes(), "x")
    assert (back.layouts, back.entries) == (index.layouts, index.entries)
    (layout,) = back.layouts
    assert layout.problem((rows, 64), False) == ""
    # Empty shards stand where the tensor ends, once.
    assert len(layout.by_offsets) == len(layout.shards)


def test_what_was_planned_and_not_written_is_not_committed() -> None:
    metadata, files = written(4, 2)
    with pytest.raises(sp.BadArgumentError, match=r"no rank wrote its shards at \[\(250, 0\)\]"):
        build(metadata, [files[0], *files[2:]])
    with pytest.raises(sp.BadArgumentError, match="ranks 0 and 9 wrote shard"):
        build(metadata, [*files, replace(files[0], rank=9)])
    with pytest.raises(sp.BadArgumentError, match="not planned"):
        build(metadata, [*files, replace(files[0], shards=(("model.layers.0.weight", (1, 0)),))])


@pytest.mark.parametrize(
    ("fqn", "path", "expected"),
    [
        ("model.fc.weight", ("model", "fc.weight"), "model/fc.weight"),
        ("fc.weight", None, "fc.weight"),
        ("state.fc.weight.exp_avg", None, "state/fc.weight/exp_avg"),
        ("optimizer.state.fc.weight.step", ("optimizer", "state.fc.weight.step"), "optimizer/state/fc.weight/step"),
        ("o.l.0.x", ("o", "l", 0, "x"), "o/l/0/x"),
        ("@values.x", ("@values", "x"), "@@values/x"),
        ("mystate.fc.w", None, "mystate.fc.w"),
    ],
)
def test_places(fqn: str, path: Any, expected: str) -> None:
    assert "/".join(place(fqn, path)) == expected


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (
            {"optim.state.w.exp_avg": torch.ones(2), "optim.state.exp_avg.w": torch.zeros(2)},
            "optim.state.exp_avg.w: another entry stands at optim/state/w/exp_avg or below it",
        ),
        (
            {"state": {"weight": torch.zeros(2)}, "state.weight.exp_avg": torch.ones(2)},
            "state.weight.exp_avg: another entry stands at state/weight/exp_avg or above it",
        ),
        (
            {"state.weight.exp_avg": torch.ones(2), "state": {"weight": torch.zeros(2)}},
            "state.weight: another entry stands at state/weight or below it",
        ),
    ],
)
def test_two_entries_of_one_place_are_refused(tmp_path: Path, state: Tree, why: str) -> None:
    """Two names of one nested path are refused."""
    with pytest.raises(dcp.CheckpointException, match=f"BadArgumentError: {why}; rename one of them"):
        save(state, tmp_path)
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_a_save_that_begins_within_another_is_refused(tmp_path: Path, kind: AsyncCheckpointerType) -> None:
    """Overlapping saves are refused, without silent loss or mixed values."""
    writer = Writer(cfg=EXACT)

    def begin(name: str, value: float, size: int = 1000) -> Any:
        state = {"weight": torch.full((size,), value)}
        more: Any = {"checkpoint_id": tmp_path / name, "async_checkpointer_type": kind}
        return dcp.async_save(state, storage_writer=writer, **more)

    try:
        begin("first", -1.0).result()
        futures, refused = list[Any](), 0
        # Three at once overlap, unless the machine lets this process wait between them for as long as a save takes.
        while len(futures) < 60 and not any(f.exception() for f in futures):
            futures += [begin(f"step-{i}", float(i), 3_000_000) for i in range(len(futures), len(futures) + 3)]
        for i, future in enumerate(futures):
            error = future.exception()
            refused += error is not None
            assert (tmp_path / f"step-{i}" / ".metadata").exists() == (error is None)
            if error is None:
                found = everything(Reader(tmp_path / f"step-{i}"))["weight"]
                assert torch.equal(found, torch.full((3_000_000,), float(i)))
            else:
                assert isinstance(error, sp.BadArgumentError)
                assert "another save by this writer is still in flight; wait for it" in str(error)
        assert refused
        # One that ended, well or not, is in nobody's way, whichever thread comes next.
        begin("next", 3.0).result()
        dcp.save({"weight": torch.ones(3)}, storage_writer=writer, checkpoint_id=tmp_path / "sync")
        with pytest.raises(dcp.CheckpointException, match="UnsupportedLeafError"):
            dcp.save({"weight": object()}, storage_writer=writer, checkpoint_id=tmp_path / "bad")
        begin("last", 4.0).result()
        assert everything(Reader(tmp_path / "last"))["weight"][0] == 4
    finally:
        _async_process_executor._CHECKPOINT_PROCESS = None


@pytest.mark.usefixtures("alone")
def test_a_save_of_a_job_that_is_gone_commits_nothing_over_that_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late save of an old job does not replace a newer job's."""
    writer = Writer(cfg=EXACT)
    save({"weight": torch.zeros(500)}, tmp_path, writer)
    (tmp_path / ".tmp-7-.metadata").write_bytes(b"of a rank that was killed")
    finish = Writer.finish

    def late(self: Writer, metadata: Any, results: Any) -> None:
        if self is writer:
            monkeypatch.setattr(Writer, "finish", finish)
            again = Writer(cfg=EXACT)
            for value in (10.0, 11.0):
                save({"weight": torch.full((500,), value)}, tmp_path, again)
        finish(self, metadata, results)

    monkeypatch.setattr(Writer, "finish", late)
    with pytest.raises(dcp.CheckpointException, match="is gone: another job has saved to this folder meanwhile"):
        save({"weight": torch.ones(500)}, tmp_path, writer)
    assert everything(Reader(tmp_path))["weight"][0] == 11
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []
    save({"weight": torch.full((500,), 12.0)}, tmp_path, Writer(cfg=EXACT))
    assert everything(Reader(tmp_path))["weight"][0] == 12


@pytest.mark.usefixtures("alone")
def test_a_listing_that_lags_fails_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose listing lags does not fail a save."""
    listed = LocalFiles.list
    monkeypatch.setattr(LocalFiles, "list", lambda files, folder: [] if folder == "data" else listed(files, folder))
    save({"weight": torch.ones(500)}, tmp_path)
    assert everything(Reader(tmp_path))["weight"][0] == 1


@pytest.mark.usefixtures("alone")
def test_more_writers_than_are_kept_go_on_from_their_last_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More pickled writers than are kept continue from their last folders."""
    monkeypatch.setattr(writer_module, "_MOST_KEPT", 2)

    def state(number: int, step: int) -> Tree:
        return {"weight": torch.arange(2000.0) * (number + 1) + step}

    for number in range(3):
        save(state(number, 0), tmp_path / f"start-{number}", Writer(cfg=EXACT))
    writers = [Writer(cfg=EXACT, parent=tmp_path / f"start-{number}") for number in range(3)]
    for step in (1, 2, 3):
        for number, writer in enumerate(writers):
            folder = tmp_path / f"{number}-{step}"
            save(state(number, step), folder, pickle.loads(pickle.dumps(writer)))
            assert len(index_of(folder).files[0].chain) == step + 1
        if step == 1:
            for number in range(3):
                shutil.rmtree(tmp_path / f"start-{number}")
    same(everything(Reader(tmp_path / "0-3")), state(0, 3))
    shutil.rmtree(tmp_path / "0-3")
    with pytest.warns(ParentNotUsedWarning, match="the checkpoint in .*0-3, which was saved last, is gone"):
        save(state(0, 4), tmp_path / "0-4", pickle.loads(pickle.dumps(writers[0])))
    same(everything(Reader(tmp_path / "0-4")), state(0, 4))


class Manager:
    """Stand-in for torchtitan's manager."""

    pg = None

    def __init__(self, model: Any) -> None:
        self.states = {"model": model}
        self.exported: list[str] = []

    def dcp_save(self, state_dict: Any, checkpoint_id: str, *rest: Any) -> None:
        self.exported.append(checkpoint_id)

    def dcp_load(self, state_dict: Any, checkpoint_id: str, *rest: Any) -> None:
        self.exported.append(checkpoint_id)


class Compressed(CompressedCheckpoints, Manager):
    compression = EXACT


def test_torchtitan_mix_in(tmp_path: Path) -> None:
    model, _ = trained()
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    first = Compressed(model)
    first.dcp_save(dict(model.state_dict()), str(tmp_path / "step-1"), "disabled")
    first.dcp_save(dict(model.state_dict()), str(tmp_path / "step-2"), "async", True).result()
    assert (tmp_path / "step-2" / ".metadata").is_file()
    second = Compressed(
        torch.nn.Sequential(*[type(m)(*a) for m, a in zip(model, [(32, 64), (64,), (64, 32)], strict=True)])
    )
    second.dcp_load({k: torch.zeros_like(v) for k, v in expected.items()}, str(tmp_path / "step-2"), False, False)
    same(second.states["model"].state_dict(), expected)
    second.dcp_save(expected, str(tmp_path / "step-3"), "disabled")
    assert chain(tmp_path / "step-3") == 3
    second.dcp_save(expected, "hf", "disabled", to_hf=True)
    second.dcp_load(expected, "hf", True, False)
    assert second.exported == ["hf", "hf"]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("alone")
def test_torchtitan_itself(tmp_path: Path) -> None:
    """The mix-in works with torchtitan's own manager: saves, retention, resume."""
    titan = pytest.importorskip("torchtitan.components.checkpointer.dcp")
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    class Optimizers:
        def state_dict(self) -> Tree:
            return get_state_dict(model, optimizer, options=options)[1]

        def load_state_dict(self, state: Tree) -> None:
            set_optimizer_state_dict(model, optimizer, state, options=options)

    class Mixed(CompressedCheckpoints, titan.CheckpointManager):  # type: ignore[misc, name-defined]
        compression = EXACT

        @dataclass(kw_only=True, slots=True)
        class Config(titan.CheckpointManager.Config):  # type: ignore[misc, name-defined]
            pass

    class Step:
        n = 0

        def state_dict(self) -> Tree:
            return {"n": self.n}

        def load_state_dict(self, state: Tree) -> None:
            self.n = state["n"]

    step, scheduler, data = Step(), Step(), Step()
    manager = Mixed(
        Mixed.Config(enable=True, folder="checkpoint", interval=1, keep_latest_k=2),
        dataloader=data,
        model_parts=[model],
        optimizers=Optimizers(),
        lr_schedulers=scheduler,
        states={"train_state": step},
        sd_adapter=None,
        base_folder=str(tmp_path),
    )
    for n in range(1, 5):
        step.n = n
        manager.save(n)
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    step.n = 0
    assert manager.load(step=-1)
    assert step.n == 4
    same(dict(model.state_dict()), expected)
    manager.close()
    assert chain(tmp_path / "checkpoint" / "step-4") == 4


def test_under_a_rate_what_is_loaded_is_not_behind(tmp_path: Path) -> None:
    """The writer's weight average keeps loaded weights from lagging, over bases too."""
    g = torch.Generator().manual_seed(0)
    w, way = torch.randn(2, 128, 128, generator=g)
    behind = {}
    for ahead in (True, False):
        cfg = sp.Config(rate=0.002, chain=sp.ChainPolicy(15), ahead=ahead)
        writer = Writer(cfg=cfg, kinds={"weight": "linear"})
        for number in range(40):
            now = w + 0.003 * number * way + 0.004 * torch.randn(128, 128, generator=g)
            save({"weight": now}, tmp_path / f"{ahead}{number}", writer)
        found = load({"weight": torch.zeros(128, 128)}, tmp_path / f"{ahead}39")["weight"]
        behind[ahead] = float(((now - found) * way).sum() / (0.03 * (way * way).sum()))
    assert behind[False] > 0.4
    assert abs(behind[True]) < 0.1
    save({"weight": w[:64]}, tmp_path / "half", writer)
    torch.testing.assert_close(
        load({"weight": torch.zeros(64, 128)}, tmp_path / "half")["weight"], w[:64], atol=0.5, rtol=0
    )
