"""Folders that inference engines read hold the published tensors, bit for bit."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors.torch import load_file, save_file

import shrinkpoint as sp
from shrinkpoint.codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from shrinkpoint.trainers.publishing import tensors as module
from shrinkpoint.trainers.publishing.checkpoint_folder import MARKER, CheckpointFolder
from shrinkpoint.trainers.publishing.delta_folders import DeltaFolders, DeltaReader

from .test_publishing import same, state, step


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def marked(folder: Path) -> Any:
    return json.loads((folder / MARKER).read_text())["version"]


@pytest.mark.parametrize("there", ["nothing", "two files"])
def test_a_folder_follows(tmp_path: Path, there: str) -> None:
    now, folder = state(), tmp_path / "folder"
    publisher = sp.Publisher(tmp_path / "url")
    publisher.publish(1, now)
    if there == "two files":
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        names = list(now)
        for i, own in enumerate((names[:5], names[5:])):
            save_file({n: torch.zeros_like(now[n]) for n in own}, folder / f"model-{i}.safetensors")
    follower = CheckpointFolder(tmp_path / "url", folder)
    for version in range(1, 4):
        assert follower.update() == version == follower.version == marked(folder)
        assert same(loaded(folder), now)
        now = step(now, 0.01, version)
        publisher.publish(version + 1, now)
    again = CheckpointFolder(tmp_path / "url", folder)
    assert again.version == 3  # by its hash
    assert again.update(version=4) == 4
    assert same(loaded(folder), now)
    assert there == "nothing" or (folder / "config.json").read_text() == "{}"
    if there == "nothing":  # another account may read it
        assert (folder / "model.safetensors").stat().st_mode == (folder / MARKER).stat().st_mode


SAVED = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
SAVED += [getattr(torch, name) for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)]


def test_every_dtype_of_safetensors(tmp_path: Path) -> None:
    now = {str(d): torch.randint(0, 256, (40, 16), dtype=torch.uint8).view(d) for d in SAVED}
    publisher = sp.Publisher(tmp_path / "url")
    publisher.publish(1, now)
    folder, numbered = (
        CheckpointFolder(tmp_path / "url", tmp_path / "c"),
        DeltaFolders(tmp_path / "url", tmp_path / "n"),
    )
    local = {n: torch.zeros(40, 16, dtype=torch.uint8).view(t.dtype) for n, t in now.items()}
    for version in (1, 2):
        assert folder.update() == numbered.update() == DeltaReader(tmp_path / "n", local).update() == version
        assert same(loaded(tmp_path / "c"), now)
        assert same(local, now)
        now = {n: t.view(torch.uint8).clone() for n, t in now.items()}
        for t in now.values():
            t[3, 5] ^= 1
        now = {n: t.view(d) for (n, t), d in zip(now.items(), SAVED, strict=True)}
        publisher.publish(version + 1, now)
    assert len({path.stat().st_mode for path in (tmp_path / "n").rglob("*") if path.is_file()}) == 1
    sp.Publisher(tmp_path / "complex").publish(1, {"w": torch.zeros(3, dtype=torch.complex128)})
    with pytest.raises(BadArgumentError, match=r"safetensors cannot hold torch\.complex128"):
        CheckpointFolder(tmp_path / "complex", tmp_path / "d")
    with pytest.raises(BadArgumentError, match=r"safetensors cannot hold torch\.complex128"):
        DeltaFolders(tmp_path / "complex", tmp_path / "e").update()


def test_versions_that_begin_again(tmp_path: Path) -> None:
    """The marker names the version of the files; without a version no folder is written."""
    now = {"w": torch.randn(300)}
    sp.Publisher(tmp_path / "url").publish(12, now)
    assert CheckpointFolder(tmp_path / "url", tmp_path / "c").update() == marked(tmp_path / "c") == 12
    numbered = DeltaFolders(tmp_path / "url", tmp_path / "n")
    shutil.rmtree(tmp_path / "url")
    assert numbered.update() == 0
    assert not list((tmp_path / "n").iterdir())
    sp.Publisher(tmp_path / "url").publish(1, now)
    again = CheckpointFolder(tmp_path / "url", tmp_path / "c")
    assert again.version == 1
    assert not (tmp_path / "c" / MARKER).exists()
    assert again.update() == marked(tmp_path / "c") == 1
    assert numbered.update() == 1
    assert same(loaded(tmp_path / "n" / "weight_v000001"), now)


def test_a_folder_without_its_marker_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"a": torch.randn(3000), "b": torch.randn(3000)}
    publisher, folder = sp.Publisher(tmp_path / "url"), tmp_path / "folder"
    publisher.publish(1, now)
    follower = CheckpointFolder(tmp_path / "url", folder)
    follower.update()
    now = step(now, 0.01, 1)
    publisher.publish(2, now)
    real, calls = module.write, []

    def failing(tensor: torch.Tensor, patch: Any) -> None:
        calls.append((folder / MARKER).exists())
        if len(calls) == 2:
            raise RuntimeError("stopped")
        real(tensor, patch)

    monkeypatch.setattr(module, "write", failing)
    with pytest.raises(RuntimeError, match="stopped"):
        follower.update()
    assert calls == [False, False]
    assert not (folder / MARKER).exists()
    monkeypatch.setattr(module, "write", real)
    again = CheckpointFolder(tmp_path / "url", folder)
    assert again.version is None
    assert again.update() == marked(folder) == 2
    assert same(loaded(folder), now)


def test_folders_that_cannot_be_followed(tmp_path: Path) -> None:
    with pytest.raises(MissingParentError, match="nothing has been published"):
        CheckpointFolder(tmp_path / "url", tmp_path / "folder")
    sp.Publisher(tmp_path / "url").publish(1, {"w": torch.ones(4)})
    folder = tmp_path / "folder"
    save_file({"w": torch.zeros(5)}, folder / "model.safetensors")
    with pytest.raises(BadArgumentError, match=r"float32 \(5,\) is here"):
        CheckpointFolder(tmp_path / "url", folder).update()
    assert not loaded(folder)["w"].any()
    save_file({"w": torch.zeros(4)}, folder / "other.safetensors")
    with pytest.raises(BadArgumentError, match="w is in another file"):
        CheckpointFolder(tmp_path / "url", folder)
    for blob in (b"", b"\xff" * 20, b"\x02" + bytes(7) + b"[]", (folder / "other.safetensors").read_bytes()[:-1]):
        (folder / "other.safetensors").write_bytes(blob)
        with pytest.raises(CorruptDataError, match=r"other\.safetensors"):
            CheckpointFolder(tmp_path / "url", folder)


def pull(local: dict[str, torch.Tensor], source: Path, start: int, target: int) -> None:
    """Read numbered folders as slime's documentation describes."""
    for number in range(start + 1, target + 1):
        folder = source / f"weight_v{number:06d}"
        index_file = folder / "model.safetensors.index.json"
        if not index_file.exists():
            local.clear()
            local.update(loaded(folder))
            continue
        index = json.loads(index_file.read_text())
        assert int(index["metadata"]["base_version"]) == number - 1
        assert int(index["metadata"]["version"]) == number
        is_xor = index["metadata"]["delta_encoding"] == "xor"
        for file in folder.glob("*.safetensors"):
            blob = file.read_bytes()
            length = int.from_bytes(blob[:8], "little")
            checksums = json.loads(blob[8 : 8 + length])["__metadata__"]
            for name, packed in load_file(file).items():
                assert index["weight_map"][name] == file.name
                data = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed.numpy().tobytes()), np.uint8)
                own = local[name].reshape(-1).view(torch.uint8).numpy()
                if is_xor:
                    own ^= data
                else:
                    count = int.from_bytes(data[:4].tobytes(), "little")
                    own[np.frombuffer(data[4 : 4 + 4 * count].tobytes(), "<u4")] = data[4 + 4 * count :]
                assert xxhash.xxh3_128_hexdigest(own) == checksums[name]


@pytest.mark.parametrize("encoding", ["overwrite", "xor"])
def test_numbered_folders(tmp_path: Path, encoding: str) -> None:
    now, local = state(), dict[str, torch.Tensor]()
    publisher, source = sp.Publisher(tmp_path / "url"), tmp_path / "source"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    publisher.publish(10, now)
    folders = DeltaFolders(tmp_path / "url", source, encoding=encoding, model=tmp_path / "model")
    reader = DeltaReader(source, {name: torch.zeros_like(t) for name, t in now.items()})
    at = 0
    for version in (20, 30, 40):
        number = folders.update()
        assert folders.update() == number == at + 1  # nothing new, no folder
        pull(local, source, at, number)
        assert same(local, now)
        assert reader.update() == number
        assert same(dict(reader._tensors), now)
        at, now = number, step(now, 0.01, version)
        publisher.publish(version, now)
    folders = DeltaFolders(tmp_path / "url", source, model=tmp_path / "model")  # a new process: a whole checkpoint
    assert folders.version is None
    assert folders.update() == 4
    pull(local, source, at, 4)
    assert same(local, now)
    whole = sorted(p.parent.name for p in source.glob("*/config.json"))
    assert whole == ["weight_v000001", "weight_v000004"]
    sizes = [sum(p.stat().st_size for p in (source / f"weight_v{n:06d}").iterdir()) for n in (1, 2)]
    assert sizes[1] < sizes[0] / 4


def written(source: Path, number: int, before: Any, after: Any, encoding: str, checksum: str = "adler32") -> Path:
    """Write changes as slime's documentation describes."""
    folder = source / f"weight_v{number:06d}"
    folder.mkdir(parents=True)
    packed, sums = {}, {}
    for name in after:
        old, new = (t[name].reshape(-1).view(torch.uint8).numpy() for t in (before, after))
        at = np.flatnonzero(old != new).astype("<u4")
        plain = (
            (old ^ new).tobytes()
            if encoding == "xor"
            else np.uint32(at.size).tobytes() + at.tobytes() + new[at].tobytes()
        )
        packed[name] = torch.frombuffer(bytearray(zstandard.ZstdCompressor(level=1).compress(plain)), dtype=torch.uint8)
        sums[name] = f"{zlib.adler32(new):08x}" if checksum == "adler32" else xxhash.xxh3_128_hexdigest(new)
    save_file(packed, folder / "model-00000-of-00001.safetensors", metadata=sums)
    fields = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}", "delta_encoding": encoding}
    metadata = {**fields, "compression_format": "zstd", "checksum_format": checksum}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
    return folder


@pytest.mark.parametrize(("encoding", "checksum"), [("xor", "adler32"), ("overwrite", "xxh3-128")])
def test_a_trainer_that_writes_the_other_format(tmp_path: Path, encoding: str, checksum: str) -> None:
    """Its servers may follow a Publisher: only one side moves."""
    names = ("torch.bfloat16", "torch.float8_e4m3fn", "torch.int64")
    start = {name: t for name, t in state().items() if name in names}
    before, after = start, step(start, 0.01, 1)
    local, served = ({name: t.clone() for name, t in start.items()} for _ in range(2))
    reader = DeltaReader(tmp_path / "folders", local)
    publisher, subscriber = sp.Publisher(tmp_path / "url"), sp.Subscriber(tmp_path / "url", served)
    for number in (1, 2, 3):
        written(tmp_path / "folders", number, before, after, encoding, checksum)
        before, after = after, step(after, 0.01, number)
        if number != 1:  # two folders at once
            publisher.publish(reader.update(), local)
            assert subscriber.update() == number
            assert same(served, before)


@pytest.mark.parametrize("how", ["other values", "cut", "bomb", "missing", "number", "encoding", "position", "name"])
def test_folders_of_the_other_format_that_are_damaged(tmp_path: Path, how: str) -> None:
    start = {"w": torch.randn(300).bfloat16()}
    after, local = step(start, 0.05, 1), {"w": start["w"].clone()}
    written(tmp_path, 1, start, after, "xor")
    second = written(tmp_path, 2, after, step(after, 0.05, 2), "overwrite" if how == "position" else "xor")
    file, index = second / "model-00000-of-00001.safetensors", second / "model.safetensors.index.json"
    if how == "other values":
        local["w"][0] += 1
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-9])
    elif how == "missing":
        file.unlink()
        index.unlink()
        second.rmdir()
        written(tmp_path, 3, after, after, "xor")
    elif how in ("number", "encoding"):
        old, new = ("000001", "000000") if how == "number" else ('"xor"', '"zip"')
        index.write_text(index.read_text().replace(old, new))
    else:
        text = {"bomb": bytes(1 << 24), "position": np.array([1, 600], "<u4").tobytes() + b"x", "name": b""}[how]
        packed = torch.frombuffer(bytearray(zstandard.ZstdCompressor(level=1).compress(text)), dtype=torch.uint8)
        save_file({"v" if how == "name" else "w": packed}, file, metadata={"w": "0"})
    before = local["w"].clone()
    reader = DeltaReader(tmp_path, local)
    with pytest.raises(CorruptDataError, match="weight_v00000"):
        reader.update()
    assert torch.equal(local["w"].view(torch.int16), before.view(torch.int16))
    assert reader.number == 0


def test_a_copy_that_was_damaged_gives_a_whole_folder(tmp_path: Path) -> None:
    """A damaged local copy gives a full folder instead of changes."""
    now, local = {"w": torch.randn(3000)}, dict[str, torch.Tensor]()
    publisher = sp.Publisher(tmp_path / "url")
    publisher.publish(1, now)
    folders = DeltaFolders(tmp_path / "url", tmp_path / "source")
    pull(local, tmp_path / "source", 0, folders.update())
    later = {"w": now["w"].clone()}
    later["w"][:5] += 1
    folders._copy.tensors["w"].data[0] = later["w"][0]
    publisher.publish(2, later)
    pull(local, tmp_path / "source", 1, folders.update())
    assert same(local, later)


def test_a_folder_that_could_not_be_written_is_followed_by_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shrinkpoint.trainers.publishing import delta_folders

    now, local = {"w": torch.randn(3000)}, dict[str, torch.Tensor]()
    publisher, source = sp.Publisher(tmp_path / "url"), tmp_path / "source"
    publisher.publish(1, now)
    folders = DeltaFolders(tmp_path / "url", source)
    folders.update()
    now = step(now, 0.01, 1)
    publisher.publish(2, now)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(delta_folders.os, "rename", full)
        with pytest.raises(OSError, match="no space"):
            folders.update()
    with pytest.raises(CorruptDataError):
        folders.update(7)
    assert folders.update() == 2
    assert (source / "weight_v000002" / "model.safetensors").exists()
    pull(local, source, 0, 2)
    assert same(local, now)


def test_links_out_of_a_folder_are_neither_written_through_nor_copied(tmp_path: Path) -> None:
    now = {"a": torch.randn(300)}
    sp.Publisher(tmp_path / "url").publish(1, now)
    (tmp_path / "folder").mkdir()
    save_file({"a": torch.zeros(300)}, tmp_path / "mine.safetensors")
    (tmp_path / "mine.txt").write_text("mine")
    before = (tmp_path / "mine.safetensors").read_bytes()
    snapshot, blob = tmp_path / "models--m" / "snapshots" / "1", tmp_path / "models--m" / "blobs" / "ab"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(before)
    (snapshot / "model.safetensors").symlink_to(blob)
    with pytest.raises(BadArgumentError, match=r"links to .*/blobs/ab"):  # other revisions may share it
        CheckpointFolder(tmp_path / "url", snapshot)
    (tmp_path / "folder" / "model.safetensors").symlink_to(tmp_path / "mine.safetensors")
    with pytest.raises(BadArgumentError, match=r"model\.safetensors links to .*mine\.safetensors"):
        CheckpointFolder(tmp_path / "url", tmp_path / "folder")
    (tmp_path / "folder" / "model.safetensors").unlink()
    (tmp_path / "folder" / "shrinkpoint-version.tmp").symlink_to(tmp_path / "mine.txt")
    (tmp_path / "folder" / "model.tmp").symlink_to(tmp_path / "mine.safetensors")
    CheckpointFolder(tmp_path / "url", tmp_path / "folder").update()
    assert same(loaded(tmp_path / "folder"), now)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(BadArgumentError, match=r"config\.json links to .*mine\.txt"):
        DeltaFolders(tmp_path / "url", tmp_path / "out", model=tmp_path / "model").update()
    assert not list((tmp_path / "out").glob("weight_v*"))
    assert ((tmp_path / "mine.safetensors").read_bytes(), (tmp_path / "mine.txt").read_text()) == (before, "mine")
