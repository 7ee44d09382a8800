"""Sharded checkpoints in a store: one commit a step, shared files, retention, copies."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shrinkpoint as sp
from shrinkpoint.store.files import StoreWarning
from shrinkpoint.store.store import SkippedCheckpointWarning
from shrinkpoint.trainers.dcp import ParentNotUsedWarning, Reader, Writer
from tests.face.test_cli import bad, good

# Torch says so where DCP is used without processes.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state_at(step: int) -> dict[str, Any]:
    w = torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    w[step % 64] += step
    return {"model": {"w": w, "b": torch.full((48,), float(step))}, "run": {"step": step}}


def save(writer: Writer, *steps: int) -> None:
    for step in steps:
        dcp.save(state_at(step), storage_writer=writer, checkpoint_id=str(step), no_dist=True)


def load(reader: Reader) -> dict[str, Any]:
    state = {"model": {"w": torch.zeros(64, 48), "b": torch.zeros(48)}, "run": {"step": -1}}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def holds(state: dict[str, Any], step: int) -> bool:
    expected = state_at(step)
    return (
        state["run"] == expected["run"]
        and torch.equal(state["model"]["w"], expected["model"]["w"])
        and torch.equal(state["model"]["b"], expected["model"]["b"])
    )


@pytest.fixture(params=["disk", "objects"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "run") if request.param == "disk" else f"memory://{uuid.uuid4()}"


def opened(url: str) -> sp.Store:
    return sp.Store(url, sp.presets.lossless())


def test_steps_share_their_files(url: str) -> None:
    """Deltas write only changes, and every step can be loaded by any reader."""
    store = opened(url)
    save(Writer(store), 10, 20, 30)
    assert store.steps() == [10, 20, 30]
    assert [store.describe(step).is_delta for step in (10, 20, 30)] == [False, True, True]
    assert len(store.describe(30).shards) == 3
    sizes = [store.describe(step).stored_nbytes for step in (10, 20, 30)]
    assert sum(sizes) == store.disk_usage().steps == store.disk_usage().total
    assert max(sizes[1:]) < sizes[0] / 2
    reader = Reader(opened(url))
    assert holds(load(reader), 30)
    assert reader.step == 30
    for step in (10, 20):
        assert holds(load(Reader(opened(url), step)), step)
    with pytest.raises(sp.BadArgumentError, match=r"step 30 .* several ranks.*Reader\(store, 30\)"):
        store.load()
    with pytest.raises(sp.BadArgumentError, match="several ranks"):
        store.load(10, "model/*")


def test_a_run_continues_its_chain_after_a_restart(url: str) -> None:
    save(Writer(opened(url)), 1, 2)
    store = opened(url)
    load(Reader(store))
    save(Writer(store), 3)
    assert len(store.describe(3).shards) == 3
    save(Writer(opened(url)), 4)
    assert not store.describe(4).is_delta, "nothing was loaded: a base"
    save(Writer(opened(url), parent=3), 5)
    assert len(store.describe(5).shards) == 4
    assert holds(load(Reader(opened(url))), 5)


def test_retention_by_the_writer_and_by_the_store(url: str) -> None:
    store = opened(url)
    store_cfg = sp.presets.lossless()
    writer = Writer(sp.Store(url, store_cfg), keep=sp.Retention(last=2))
    save(writer, 1, 2, 3, 4)
    assert store.steps() == [3, 4]
    assert store.verify() == {}
    assert holds(load(Reader(opened(url), 3)), 3)
    store.tag("best", 3)
    save(writer, 5, 6)
    assert store.steps() == [3, 5, 6]
    store.untag("best")
    assert store.gc(sp.Retention(last=1))
    assert store.steps() == [6]
    assert holds(load(Reader(opened(url))), 6)
    store.drop(6)
    store.gc()
    assert store.disk_usage() == (0, 0)
    with pytest.warns(ParentNotUsedWarning, match="gone; a base is written"):
        save(writer, 7)
    assert holds(load(Reader(opened(url))), 7)


def test_collection_waits_for_a_save(url: str) -> None:
    """`gc` waits for a save from its plan to its commit."""
    store, writer = opened(url), Writer(opened(url))
    save(writer, 1)
    writer.target.move("2")
    writer.target.begin(is_coordinator=True, alone=None)
    with pytest.raises(TimeoutError):
        store.gc(timeout=0.1)
    save(writer, 2)
    store.gc(timeout=0.1)
    assert holds(load(Reader(store)), 2)


def test_a_step_without_a_file_is_passed_over(url: str) -> None:
    store = opened(url)
    save(Writer(store), 1)
    save(Writer(opened(url)), 2)
    name = next(name for name, _ in store.describe(2).shards)
    store._files.remove([f"data/{name}"])
    assert list(store.verify()) == [2]
    with pytest.warns(SkippedCheckpointWarning, match=name):
        assert holds(load(Reader(store)), 1)
    with pytest.raises(dcp.CheckpointException, match="is missing"):
        load(Reader(store, 2))
    store.gc(sp.Retention(last=1))
    assert store.steps() == [1, 2], "it is not kept in the place of an intact one"
    writer = Writer(opened(url))
    save(writer, 3)
    data = bytearray(store._files.read(f"data/{next(n for n, _ in store.describe(3).shards)}"))
    data[len(data) // 2] ^= 1
    store._files.write(f"data/{next(n for n, _ in store.describe(3).shards)}", bytes(data))
    assert list(store.verify()) == [2, 3]


def test_copies_and_the_command_line(tmp_path: Path) -> None:
    store = opened(str(tmp_path / "run"))
    save(Writer(store), 1, 2, 3)
    other = store.copy(tmp_path / "copy", [3])
    assert other.verify() == {}
    assert holds(load(Reader(other)), 3)
    plain = sp.Store(tmp_path / "plain")
    plain.save(1, {"w": torch.zeros(3)})
    with pytest.raises(sp.BadArgumentError, match="saved by one process"):
        Reader(plain).read_metadata()
    found = [json.loads(good("ls", store.url, "--json")), json.loads(good("verify", store.url, "--json"))]
    assert [(row["step"], row["delta"]) for row in found[0]["steps"]] == [(1, False), (2, True), (3, True)]
    assert [row["nbytes"] for row in found[0]["steps"]] == [store.describe(s).stored_nbytes for s in (1, 2, 3)]
    assert "0 not intact" in good("verify", store.url)
    bad(2, "several ranks", "restore", store.url, tmp_path / "out.pt")
    assert "rank 0" in good("info", store.url)
    good("gc", store.url, "--keep-last", 1)
    assert store.steps() == [3]


def test_a_run_that_goes_back(url: str) -> None:
    save(Writer(opened(url)), 10, 20, 30)
    store = opened(url)
    load(Reader(store, 10))
    with pytest.warns(StoreWarning, match="step 15 continues from step 10 and leaves steps 20, 30 behind"):
        save(Writer(store), 15)
    reader = Reader(opened(url))
    assert holds(load(reader), 15)
    assert reader.step == 15


class Named(Writer):
    """A writer of another class."""


def test_copies_of_a_writer_are_other_objects_of_its_class(tmp_path: Path) -> None:
    writer = Named(tmp_path / "a")
    first, second = copy.deepcopy(writer), copy.deepcopy(writer)
    first.reset(tmp_path / "b")
    assert {type(first), type(pickle.loads(pickle.dumps(writer)))} == {Named}
    assert [w.target.place for w in (writer, first, second)] == [str(tmp_path / name) for name in "aba"]


def test_a_writer_that_is_pickled_again_leaves_no_steps_of_its_own_behind(tmp_path: Path) -> None:
    """Its store's session in the other process knows the steps that were saved there."""
    store = sp.Store(tmp_path)
    for step in range(1, 8):
        dcp.save({"w": torch.full((3,), float(step))}, storage_writer=Writer(store), checkpoint_id=str(step))
    resumed = sp.Store(tmp_path)
    dcp.load({"w": torch.zeros(3)}, storage_reader=Reader(resumed, 2))
    writer = Writer(resumed)

    def save(step: int) -> None:
        received = pickle.loads(pickle.dumps(writer))
        dcp.save({"w": torch.full((3,), step / 2)}, storage_writer=received, checkpoint_id=str(step))

    with pytest.warns(StoreWarning, match="leaves steps 4, 5, 6, 7 behind"):
        save(3)
    save(4)
    save(5)
    assert sp.Store(tmp_path).candidates() == [5, 4, 3, 2, 1, 7, 6]


def test_a_target_that_is_pickled_is_one_object_in_the_other_process(tmp_path: Path) -> None:
    """A pickled writer keeps its store's session in the other process."""
    store = opened(str(tmp_path))
    save(Writer(store), 10, 20)
    load(Reader(store, 10))
    writer = Writer(store, keep=sp.Retention(last=3))
    writer.reset("12")
    received = pickle.loads(pickle.dumps(writer))
    assert received.target.store.loaded == 10
    assert received.target.keep == sp.Retention(last=3)
    assert received.checkpoint_id == "12"
    with pytest.warns(StoreWarning, match="leaves step 20 behind"):
        save(received, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", StoreWarning)
        again = pickle.loads(pickle.dumps(writer))
        assert again.target.store is received.target.store
        save(again, 13)
    assert len(opened(str(tmp_path)).describe(13).shards) == 3


def test_arguments(tmp_path: Path) -> None:
    store = sp.Store(tmp_path)
    with pytest.raises(sp.BadArgumentError, match="must be a step"):
        Writer(store).reset("run/step-10")
    with pytest.raises(sp.BadArgumentError, match="keep is for a Store"):
        Writer(tmp_path, keep=sp.Retention())
    with pytest.raises(sp.BadArgumentError, match="it is for a Store"):
        Reader(tmp_path, 10)
    with pytest.raises(dcp.CheckpointException, match="holds no checkpoint"):
        load(Reader(store))
    with pytest.raises(dcp.CheckpointException, match="give the step as checkpoint_id"):
        dcp.save(state_at(1), storage_writer=Writer(store), no_dist=True)
    assert not os.listdir(tmp_path) or store.steps() == []


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_killed_at_random(world: int, tmp_path: Path) -> None:
    """Ranks killed at random lose no durable step on a local disk; 1, 2, 4 and 8 ranks load equal tensors."""
    program = Path(__file__).with_name("sharded_ranks.py")
    command = [sys.executable, str(program), str(tmp_path / "run"), str(world), "3", "1", str(tmp_path)]
    done = subprocess.run(command, cwd=program.parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 runs killed" in done.stdout
    assert "loaded by (1, 2, 4, 8) ranks" in done.stdout


def test_obstore_as_a_client() -> None:
    pytest.importorskip("obstore")
    url = f"obstore::memory://bucket/{uuid.uuid4()}"
    store = opened(url)
    save(Writer(store, keep=sp.Retention(last=2)), 1, 2, 3)
    assert holds(load(Reader(opened(url))), 3)
    assert store.verify() == {}
    assert store.steps() == [2, 3]
    files = store._files
    assert files._conditional  # type: ignore[attr-defined]
    files.write("data/x", b"abc")
    assert [files.read_range("data/x", *r) for r in ((1, 2), (1, 9), (1, 1), (5, 9))] == [b"b", b"bc", b"", b""]


def test_urls_for_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sp.BadArgumentError, match="takes URLs of s3, gs, az"):
        sp.Store("obstore::http://host/run")
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(sp.BadArgumentError, match="pip install 'obstore"):
        sp.Store(f"obstore::s3://b{uuid.uuid4().hex}/run")
