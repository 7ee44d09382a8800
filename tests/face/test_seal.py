"""Seals: damage, missing and added files are found in checkpoints of any format."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shrinkpoint as sp
from shrinkpoint.commands import seal as integrity

from .test_cli import bad, good, parsed, run

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


class Evil:
    """An object whose unpickling creates a file."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)

    def __init__(self, path: Path) -> None:
        self.path = path


def save_dcp(path: Path) -> None:
    dcp.save({"model": {"w": torch.arange(5000.0), "b": torch.zeros(3)}}, checkpoint_id=path)


def save_pt(path: Path) -> None:
    torch.save({"w": torch.arange(5000.0)}, path)


def save_safetensors(path: Path) -> None:
    save_file({"w": torch.arange(5000.0)}, path)


def save_folder(path: Path) -> None:
    (path / "deep" / "deeper").mkdir(parents=True)
    (path / "deep" / "deeper" / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (path / "config.json").write_text("{}")
    (path / "empty").touch()


KINDS: dict[str, Callable[[Path], None]] = {
    "dcp": save_dcp,
    "model.pt": save_pt,
    "model.safetensors": save_safetensors,
    "folder": save_folder,
}


@pytest.fixture(params=list(KINDS))
def sealed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / request.param
    KINDS[request.param](path)
    good("seal", path)
    return path


def files_of(path: Path) -> list[Path]:
    inner = [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
    return [p for p in inner if not p.name.endswith(integrity.SEAL)]


def largest(path: Path) -> Path:
    return max(files_of(path), key=lambda p: p.stat().st_size)


def problems(path: Path) -> dict[str, str]:
    """Return the kind of damage by file from `verify --json`, whose exit code must agree."""
    code, out, _ = run("verify", path, "--json")
    found = json.loads(out)
    assert code == (1 if found["problems"] else 0)
    assert found["intact"] == (code == 0)
    return {p["file"]: p["kind"] for p in found["problems"]}


def test_an_intact_checkpoint_passes_wherever_it_is_moved(sealed: Path, tmp_path: Path) -> None:
    assert problems(sealed) == {}
    assert good("verify", sealed) == "1 checkpoints checked, 0 not intact\n"
    there = tmp_path / "elsewhere"
    there.mkdir()
    for path in [sealed] if sealed.is_dir() else [sealed, integrity.seal_path(sealed)]:
        shutil.move(path, there / path.name)
    assert problems(there / sealed.name) == {}


def test_every_flipped_bit_is_found(sealed: Path) -> None:
    for path in files_of(sealed):
        data = path.read_bytes()
        for at in sorted({0, 1, len(data) // 3, len(data) // 2, len(data) - 1} & set(range(len(data)))):
            for bit in (0, 7):
                changed = bytearray(data)
                changed[at] ^= 1 << bit
                path.write_bytes(changed)
                name = path.relative_to(sealed).as_posix() if sealed.is_dir() else path.name
                assert problems(sealed) == {name: "altered"}, (at, bit)
        path.write_bytes(data)
    assert problems(sealed) == {}


def test_torn_and_longer_files_are_named(sealed: Path) -> None:
    path = largest(sealed)
    name = path.relative_to(sealed).as_posix() if sealed.is_dir() else path.name
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert problems(sealed) == {name: "torn"}
    code, out, _ = run("verify", sealed)
    assert code == 1
    assert f"NOT INTACT: {sealed}: {name} is torn ({len(data) - 1} of {len(data)} bytes)\n" in out
    assert out.endswith("1 checkpoints checked, 1 not intact\n")
    path.write_bytes(b"")
    assert problems(sealed) == {name: "torn"}
    path.write_bytes(data + b"\0")
    assert problems(sealed) == {name: "altered"}


def test_missing_files_are_named(sealed: Path) -> None:
    path = largest(sealed)
    name = path.relative_to(sealed).as_posix() if sealed.is_dir() else path.name
    path.unlink()
    assert problems(sealed) == {name: "missing"}


def test_added_files_are_named(tmp_path: Path) -> None:
    save_dcp(tmp_path / "dcp")
    good("seal", tmp_path / "dcp")
    (tmp_path / "dcp" / "new").mkdir()
    (tmp_path / "dcp" / "new" / "file").write_bytes(b"x")
    (tmp_path / "dcp" / "link").symlink_to(tmp_path)  # a linked folder, which is not followed
    assert problems(tmp_path / "dcp") == {"new/file": "added", "link": "added"}


def test_a_damaged_seal_is_not_taken_for_a_damaged_checkpoint(sealed: Path) -> None:
    seal = integrity.seal_path(sealed)
    data = seal.read_bytes()
    for damaged in (
        b"",
        data[:-1],
        data[: len(data) // 2],
        data + b" ",
        b"[]",
        b"{}",
        data.replace(b'"size"', b'"sizf"', 1),
        data.replace(b'"version": 1', b'"version": 2'),
        *(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(0, len(data), 37)),
    ):
        assert damaged != data
        seal.write_bytes(damaged)
        code, out, err = run("verify", sealed)
        assert code == 1, (out, err)
        assert f"NOT INTACT: {seal}: the seal cannot be used: " in out
    seal.write_bytes(data)
    assert problems(sealed) == {}


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    torch.save(Evil(trap), tmp_path / "evil.pt")
    (tmp_path / "folder").mkdir()
    shutil.copy(tmp_path / "evil.pt", tmp_path / "folder" / ".metadata")
    for name in ("evil.pt", "folder"):
        good("seal", tmp_path / name)
        assert problems(tmp_path / name) == {}
    assert not trap.exists()


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    """Links to files are followed in the caches of model hubs, and refused where they lead elsewhere."""
    snapshot, blob = tmp_path / "models--m" / "snapshots" / "1", tmp_path / "models--m" / "blobs" / "ab"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_bytes(b"weights")
    (snapshot / "model.bin").symlink_to("../../blobs/ab")
    good("seal", snapshot)
    assert problems(snapshot) == {}
    blob.write_bytes(b"weightz")
    assert problems(snapshot) == {"model.bin": "altered"}
    blob.unlink()
    assert problems(snapshot) == {"model.bin": "altered"}
    (tmp_path / "secret").write_bytes(b"key")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes").symlink_to(tmp_path / "secret")
    bad(2, "notes links to .*/secret, which is outside of", "seal", tmp_path / "folder")


def test_a_seal_is_only_replaced_on_request(tmp_path: Path) -> None:
    save_folder(tmp_path / "f")
    found = parsed("seal", tmp_path / "f")["sealed"]
    assert [(e["files"], e["nbytes"]) for e in found] == [(3, 256 * 40 + 2)]
    bad(2, "exists; use --force", "seal", tmp_path / "f")
    (tmp_path / "f" / "config.json").write_text("{1}")
    assert problems(tmp_path / "f") == {"config.json": "torn"} or problems(tmp_path / "f") == {"config.json": "altered"}
    good("seal", tmp_path / "f", "--force")
    assert problems(tmp_path / "f") == {}


def test_mistakes(tmp_path: Path) -> None:
    bad(1, "none: No such file", "seal", tmp_path / "none")
    bad(1, "none: No such file", "verify", tmp_path / "none")
    (tmp_path / "empty").mkdir()
    bad(2, "holds no file to seal", "seal", tmp_path / "empty")
    save_folder(tmp_path / "f")
    bad(1, "it has no seal; `shrinkpoint seal .*f` writes one", "verify", tmp_path / "f")
    (tmp_path / "f" / "linked").symlink_to(tmp_path)
    bad(2, "linked: is neither a file nor a folder", "seal", tmp_path / "f")
    sp.Store(tmp_path / "store", sp.presets.lossless()).save(1, {"w": torch.zeros(3)})
    bad(2, "is a store, which has checksums of its own", "seal", tmp_path / "store")
    bad(2, "--newest takes one run folder, not 2", "verify", "--newest", tmp_path, tmp_path)
    bad(1, "holds no sealed checkpoint", "verify", "--newest", tmp_path / "empty")


def test_a_file_that_changes_while_it_is_sealed_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "growing"
    path.write_bytes(b"1" * 100)

    def grow(*_: object) -> None:
        path.write_bytes(b"2" * 101)

    with pytest.raises(OSError, match="changed while it was read"):
        integrity.make_seal(path, grow)


@pytest.mark.parametrize("names", [["checkpoint-9", "checkpoint-10", "checkpoint-100"], ["a", "c", "b"]])
def test_the_newest_intact_checkpoint_of_a_run(names: list[str], tmp_path: Path) -> None:
    """The newest intact checkpoint follows names' numbers, or else the time of sealing."""
    for age, name in enumerate(names):
        save_dcp(tmp_path / name)
        good("seal", tmp_path / name)
        os.utime(integrity.seal_path(tmp_path / name), (1000 + age, 1000 + age))
    (tmp_path / "unsealed-1000").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    code, out, err = run("verify", "--newest", tmp_path)
    assert (code, out) == (0, f"{tmp_path / names[2]}\n")
    assert err == "shrinkpoint: not sealed, and not considered: unsealed-1000\n"
    largest(tmp_path / names[2]).write_bytes(b"x")
    code, out, err = run("verify", "--newest", tmp_path)
    assert (code, out) == (0, f"{tmp_path / names[1]}\n")
    assert f"skipped: {tmp_path / names[2]}: " in err
    assert "is torn" in err
    assert parsed("verify", "--newest", tmp_path) == {"path": str(tmp_path / names[1])}
    integrity.seal_path(tmp_path / names[1]).write_bytes(b"junk")
    shutil.rmtree(tmp_path / names[0])
    code, out, err = run("verify", "--newest", tmp_path)
    assert (code, out) == (1, "")
    assert "none of its 2 checkpoints is intact" in err


def test_single_files_and_checkpoint_files_are_candidates(tmp_path: Path) -> None:
    save_pt(tmp_path / "step_1.pt")
    save_safetensors(tmp_path / "step_2.safetensors")
    good("seal", tmp_path / "step_1.pt", tmp_path / "step_2.safetensors")
    (tmp_path / "step_3.spt").write_bytes(sp.compress({"w": torch.arange(10.0)}).to_bytes())
    assert good("verify", "--newest", tmp_path) == f"{tmp_path / 'step_3.spt'}\n"
    (tmp_path / "step_3.spt").write_bytes((tmp_path / "step_3.spt").read_bytes()[:-3])
    assert run("verify", "--newest", tmp_path)[1] == f"{tmp_path / 'step_2.safetensors'}\n"
    (tmp_path / "step_2.safetensors").unlink()
    code, out, err = run("verify", "--newest", tmp_path)
    assert (code, out) == (0, f"{tmp_path / 'step_1.pt'}\n")
    assert "step_2.safetensors is missing" in err


def test_the_newest_intact_step_of_a_store(tmp_path: Path) -> None:
    store = sp.Store(tmp_path / "store", sp.presets.lossless())
    for step in (1, 2):
        store.save(step, {"w": torch.arange(10000.0) + step})
    assert good("verify", "--newest", tmp_path / "store") == "2\n"
    file = tmp_path / "store" / "data" / store.describe(2).file
    file.write_bytes(file.read_bytes()[:-1])
    assert run("verify", "--newest", tmp_path / "store")[:2] == (0, "1\n")
    assert parsed("verify", "--newest", tmp_path / "store") == {"store": str(tmp_path / "store"), "step": 1}


def test_seals_of_several_paths_are_verified_together(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_folder(tmp_path / name)
        good("seal", tmp_path / name)
    (tmp_path / "a" / "config.json").unlink()
    (tmp_path / "a" / "empty").unlink()
    code, out, _ = run("verify", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert out.endswith("2 checkpoints checked, 1 not intact\n")
    assert out.count("is missing") == 2


def test_a_seal_round_trips() -> None:
    seal = integrity.Seal({"b/ä\n": integrity.Sealed(3, "0" * 64), "a": integrity.Sealed(0, "f" * 64)}, 12.5)
    assert integrity.from_bytes(integrity.to_bytes(seal)) == seal
