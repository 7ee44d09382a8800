"""The folders that a release wrote stay readable: stores, published versions, DCP folders."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash

import shrinkpoint as sp
from shrinkpoint import trainers
from shrinkpoint.codec.format import container
from shrinkpoint.commands import seal as integrity
from shrinkpoint.store.files import StoreWarning, seal, unseal
from shrinkpoint.trainers.dcp import ParentNotUsedWarning, Reader, Writer
from shrinkpoint.trainers.hub import load_pretrained
from shrinkpoint.trainers.pointers import load_at
from shrinkpoint.trainers.publishing.subscriber import published_tensors

from ..golden import make_folders as made
from ..golden.make import fingerprint
from ..golden.make_folders import FOLDERS, KINDS, RELEASES

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
KNOWN = {
    "store": {"data", "left", "lock", "pins", "restores", "steps", "tags"},
    "compacted": {"data", "lock", "steps"},
    "training": {"data", "frozen", "lock", "steps"},
    "sharded": {"data", "lock", "steps"},
    "published": {"data", "versions"},
    "sliced": {"data", "versions"},
    "dcp": {"alone", "step-1", "step-2"},
    "model": {"README.md", "model.safetensors.spt"},
    "tuned": {"README.md", "model.safetensors.spt"},
    "pointer": {"shrinkpoint.json"},
}
"""The entries of each folder; a kind of file that a later release adds needs a golden folder of that release."""


@pytest.fixture(params=RELEASES)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a release's folders: opening a store may write to it."""
    return Path(shutil.copytree(FOLDERS / request.param, tmp_path / "golden"))


def expected(golden: Path, name: str) -> dict[str, str]:
    """Step or version -> hash of its restored state."""
    found: dict[str, str] = json.loads((golden / "index.json").read_text())[name]
    return found


def zeros(step: int = 0) -> dict[str, Any]:
    """A state of the golden DCP folders to load into."""
    tree = made.sharded(step)
    return {"model": {k: torch.zeros_like(v) for k, v in tree["model"].items()}, "run": {"step": -1}}


def loaded(reader: Reader) -> dict[str, Any]:
    state = zeros()
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize("release", RELEASES)
def test_no_golden_file_is_missing_altered_or_added(release: str, tmp_path: Path) -> None:
    folder = FOLDERS / release
    assert integrity.differences(folder, integrity.read_seal(folder)) == []
    assert {p.name: {q.name for q in p.iterdir()} for p in folder.iterdir() if p.is_dir()} == KNOWN
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    next((copy / "store" / "steps").glob("*.json")).unlink()
    assert [d.kind for d in integrity.differences(copy, integrity.read_seal(copy))] == ["missing"]


def test_folders_of_every_release_are_tested() -> None:
    assert sorted(p.name for p in FOLDERS.iterdir()) == sorted(RELEASES)
    assert RELEASES[0] == "0.2.0"


def test_golden_folders_are_never_overwritten() -> None:
    with pytest.raises(SystemExit, match="not overwritten"):
        made.main()


def test_every_step_of_a_store_restores_to_the_bit(golden: Path) -> None:
    store = sp.Store(golden / "store")
    assert store.steps() == [10, 30, 35, 40]
    assert store.verify() == {}
    assert store.verify_labels() == {}
    for step, hashed in expected(golden, "store").items():
        assert fingerprint(store.load(int(step), count=False)) == hashed
        exact, restored = made.state(int(step)), store.load(int(step), count=False)
        assert restored["step"] == int(step)
        assert torch.equal(restored["model"]["fc.bias"], exact["model"]["fc.bias"])
        error = (restored["model"]["fc.weight"] - exact["model"]["fc.weight"]).norm()
        assert 0 < error < 0.1 * exact["model"]["fc.weight"].norm()
    assert {step: store.describe(step).is_delta for step in store.steps()} == {10: False, 30: True, 35: True, 40: True}


def test_labels_records_and_counts_of_a_store_are_read(golden: Path) -> None:
    store = sp.Store(golden / "store")
    assert store.tags() == {"best": 30}
    assert store.pins() == [10]
    assert store.describe("best").metric == 0.25
    assert store.restores() == 1
    assert store.candidates() == [35, 30, 10, 40], "step 40 was left behind"
    with pytest.warns(StoreWarning, match="loaded step 35; skipped step 40"):
        assert store.load()["step"] == 35
    assert store.gc(sp.Retention(last=1), dry_run=True) == []
    store.untag("best")
    store.unpin(10)
    store.drop(40)
    assert any("000000000030" in name for name in store.gc(sp.Retention(last=1)))
    assert store.steps() == [35]
    assert fingerprint(store.load(35)) == expected(golden, "store")["35"]


def test_a_save_continues_the_chain_of_a_store(golden: Path) -> None:
    before = {p.name for p in (golden / "store" / "data").iterdir()}
    store = sp.Store(golden / "store")
    store.load(35)
    saved = store.save(50, made.state(50), kinds=KINDS)
    assert saved.checkpoint.is_delta
    assert set(store.describe(50).parents) < before
    again = sp.Store(golden / "store")
    assert again.verify() == {}
    assert fingerprint(again.load(50)) == fingerprint(sp.decompress(saved.checkpoint))
    compacted = again.compact(max_cost=1.5)
    assert 50 in compacted
    for step, hashed in expected(golden, "store").items():
        assert fingerprint(again.load(int(step))) == hashed


def test_a_compacted_store_is_read_and_continued(golden: Path) -> None:
    store = sp.Store(golden / "compacted")
    assert store.verify() == {}
    assert store.describe(3).identity != store.describe(3).id
    for step, hashed in expected(golden, "compacted").items():
        assert fingerprint(store.load(int(step))) == hashed
    assert store.save(4, made.state(4), kinds=KINDS).checkpoint.is_delta
    assert store.verify() == {}


def test_a_training_run_is_resumed_with_its_frozen_layer(golden: Path) -> None:
    fresh = made.network(1)
    with torch.no_grad():
        fresh[0].weight.zero_()
    optimizer = made.optimizer(fresh)
    store = sp.Store(golden / "training", made.EXACT)
    assert fingerprint(store.load(1, count=False)) == expected(golden, "training")["1"]
    rng = torch.get_rng_state()
    try:
        assert trainers.resume(store, fresh, optimizer) == 1
    finally:
        torch.set_rng_state(rng)
    model = made.network(0)
    assert torch.equal(fresh[0].weight, model[0].weight)
    training = made.optimizer(model)
    model(torch.ones(1, 48)).sum().backward()
    training.step()
    assert torch.allclose(fresh[1].weight, model[1].weight, rtol=0, atol=1e-6), "one step of AdamW, on this machine"
    assert optimizer.state_dict()["state"][0]["step"] == 1
    trainers.save(store, 2, fresh, optimizer, frozen="once")
    assert store.describe(2).is_delta
    assert store.verify() == {}


@pytest.mark.parametrize("held", [None, 1, 3])
def test_a_subscriber_follows_published_versions(golden: Path, held: int | None) -> None:
    model = {name: t.clone() for name, t in made.published(held or 0).items()}
    subscriber = sp.Subscriber(golden / "published", model)
    assert subscriber.version == held
    assert subscriber.update() == 4
    assert fingerprint(model) == expected(golden, "published")["4"]
    assert subscriber.last is not None
    assert (subscriber.last.from_base, subscriber.last.links) == {
        None: (True, 1),
        1: (False, 3),
        3: (False, 1),
    }[held]
    for version, hashed in expected(golden, "published").items():
        assert subscriber.update(version=int(version)) == int(version)
        assert fingerprint(model) == hashed


def test_a_publisher_continues_with_deltas(golden: Path) -> None:
    model = {name: t.clone() for name, t in made.published(4).items()}
    subscriber = sp.Subscriber(golden / "published", model)
    done = sp.Publisher(golden / "published").publish(5, made.published(5))
    assert done.base_bytes == 0
    assert subscriber.update() == 5
    assert subscriber.last is not None
    assert not subscriber.last.from_base
    assert fingerprint(model) == fingerprint(made.published(5))


def test_a_slice_of_a_published_version_is_read(golden: Path) -> None:
    model = {"part": torch.zeros(5, 30, dtype=torch.bfloat16)}
    select = {"part": ("w", (slice(10, 15), slice(0, 30)))}
    subscriber = sp.Subscriber(golden / "sliced", model, select=select)
    assert subscriber.update(version=1) == 1
    assert subscriber.update() == 2
    assert torch.equal(model["part"], made.published(2)["w"][10:15])
    whole = published_tensors(golden / "sliced")
    assert sp.Subscriber(golden / "sliced", whole).update() == 2
    assert fingerprint(made.published(2) | whole) == expected(golden, "sliced")["2"]


def test_dcp_folders_are_read_and_continued(golden: Path) -> None:
    for name, hashed in expected(golden, "dcp").items():
        assert fingerprint(loaded(Reader(golden / "dcp" / name))) == hashed, name
    alone = golden / "dcp" / "alone"
    writer = Writer(cfg=made.EXACT, parent=alone)
    dcp.save(made.sharded(4), storage_writer=writer, checkpoint_id=alone, no_dist=True, use_collectives=False)
    assert fingerprint(loaded(Reader(alone))) == fingerprint(made.sharded(4))


def test_sharded_steps_of_a_store_are_read_and_continued(golden: Path) -> None:
    store = sp.Store(golden / "sharded", made.EXACT)
    assert store.steps() == [1, 2]
    assert store.verify() == {}
    assert store.describe(2).is_delta
    for step, hashed in expected(golden, "sharded").items():
        assert fingerprint(loaded(Reader(store, int(step)))) == hashed
    with pytest.warns(ParentNotUsedWarning):  # one rank has other shards than two had
        dcp.save(made.sharded(3), storage_writer=Writer(store), checkpoint_id="3", no_dist=True)
    assert fingerprint(loaded(Reader(store))) == fingerprint(made.sharded(3))
    assert store.verify() == {}


def test_a_pointer_finds_its_step(golden: Path) -> None:
    state = load_at(golden / "pointer" / "shrinkpoint.json")
    assert fingerprint(state) == expected(golden, "store")["35"]


def test_model_folders_are_read(golden: Path) -> None:
    alone = load_pretrained(golden / "model")
    tuned = load_pretrained(golden / "tuned", base=golden / "model")
    for found, seed in ((alone, 0), (tuned, 1)):
        weights = made.network(seed).state_dict()
        assert fingerprint({name: found[name] for name in weights}) == fingerprint(dict(weights))
        assert found.keys() == weights.keys()


def newer_manifest(golden: Path) -> Path:
    path = golden / "store" / "steps" / "000000000010.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 4'))
    return path


def newer_published(golden: Path) -> Path:
    for path in (golden / "published" / "versions").iterdir():
        path.write_bytes(path.read_bytes().replace(b'"format": 2', b'"format": 3'))
    return path


def newer_metadata(golden: Path) -> Path:
    path = golden / "dcp" / "step-1" / ".metadata"
    rest = re.sub(rb'^{"checksum":"[0-9a-f]{32}",', b"{", path.read_bytes()).replace(b'"version":1', b'"version":2')
    path.write_bytes(b'{"checksum":"%s",' % xxhash.xxh3_128_hexdigest(rest).encode() + rest[1:])
    return path


def newer_pointer(golden: Path) -> Path:
    path = golden / "pointer" / "shrinkpoint.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    return path


@pytest.mark.parametrize(
    ("write", "read", "match"),
    [
        (newer_manifest, lambda p: sp.Store(p / "store").load(10), "step 10: manifest version 4; .* up to 3"),
        (
            newer_published,
            lambda p: sp.Subscriber(p / "published", made.published(0)).update(version=4),
            "version 4: its file has format 3; this reader knows up to 2",
        ),
        (
            newer_published,
            lambda p: sp.Subscriber(p / "published", made.published(0)).update(),
            "no version can be read: .* format 3",
        ),
        (newer_published, lambda p: published_tensors(p / "published"), "format 3; this reader knows up to 2"),
        (
            newer_metadata,
            lambda p: Reader(p / "dcp" / "step-1").read_metadata(),
            r"\.metadata: metadata version 2; this reader knows up to 1",
        ),
        (newer_pointer, lambda p: load_at(p / "pointer" / "shrinkpoint.json"), "a pointer of version 2"),
    ],
    ids=["manifest", "published version", "all published", "published tensors", "dcp metadata", "pointer"],
)
def test_a_newer_version_is_refused_by_name(
    golden: Path, write: Callable[[Path], Path], read: Callable[[Path], Any], match: str
) -> None:
    write(golden)
    with pytest.raises(sp.NewerFormatError, match=match):
        read(golden)


def test_a_newer_seal_is_refused_by_name(golden: Path) -> None:
    path = golden / "shrinkpoint-seal.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 2'))
    with pytest.raises(sp.CorruptDataError, match="it has version 2; this release reads version 1"):
        integrity.read_seal(golden)


def test_labels_and_records_of_a_newer_version_are_refused_by_name(golden: Path) -> None:
    """Nothing is removed then, because the steps that they protect are unknown."""
    for path, match in (
        (next((golden / "store" / "left").iterdir()), "version is 2, which this release does not know"),
        (golden / "store" / "tags" / "best.json", "version is 2, which this release does not know"),
    ):
        before = path.read_bytes()
        path.write_bytes(seal({**unseal(before), "version": 2}))
        store = sp.Store(golden / "store")
        with pytest.raises(sp.ShrinkpointError, match=match):
            store.gc(sp.Retention(last=1))
        assert store.steps() == [10, 30, 35, 40]
        path.write_bytes(before)


def test_a_newer_published_version_is_reported_while_an_older_one_serves(golden: Path) -> None:
    path = golden / "published" / "versions" / "000000000004.json"
    path.write_bytes(path.read_bytes().replace(b'"format": 2', b'"format": 3'))
    model = {name: t.clone() for name, t in made.published(3).items()}
    subscriber = sp.Subscriber(golden / "published", model)
    with pytest.warns(StoreWarning, match=r"version 4 cannot be read, and the model is at 3: .*format 3"):
        assert subscriber.update() == 3
    assert fingerprint(model) == expected(golden, "published")["3"]
    before = sorted(p.name for p in (golden / "published" / "data").iterdir())
    done = sp.Publisher(golden / "published", keep=1).publish(5, made.published(5))
    assert done.base_bytes
    assert sp.Publisher(golden / "published", keep=2).publish(6, made.published(6)).version == 6
    left = {p.name for p in (golden / "published" / "data").iterdir()}
    assert set(before) <= left, "what a version of a newer format needs is unknown"


def newer_container(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = (container.VERSION + 1).to_bytes(4, "little")
    path.write_bytes(data)


def test_a_published_file_of_a_newer_version_is_refused_by_name(golden: Path) -> None:
    for path in (golden / "published" / "data").glob("000000000004-*"):
        newer_container(path)
    model = {name: t.clone() for name, t in made.published(3).items()}
    with pytest.raises(sp.NewerFormatError, match=r"000000000004-d-.*\.spt: the file has format version 3"):
        sp.Subscriber(golden / "published", model).update(version=4)
    assert fingerprint(model) == expected(golden, "published")["3"]


def of_version_1(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8:12] = (1).to_bytes(4, "little")
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["step-1", "step-2"])
def test_a_dcp_folder_of_version_1_is_refused_by_its_containers(golden: Path, name: str) -> None:
    """The metadata have a version of their own: each folder has containers, which say theirs."""
    for path in (golden / "dcp" / name / "data").iterdir():
        of_version_1(path)
    with pytest.raises(dcp.CheckpointException, match=r"rank \d: .*\.spt: .*restore"):
        loaded(Reader(golden / "dcp" / name))


def test_a_store_of_version_1_is_refused_by_its_files(golden: Path) -> None:
    for path in (golden / "store" / "data").iterdir():
        of_version_1(path)
    with pytest.raises(sp.CorruptDataError, match=r"step 10: .*\.spt: .*restore"):
        sp.Store(golden / "store").load(10)
