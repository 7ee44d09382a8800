"""Commands on folders and files that were made to hang them or to take all memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import shrinkpoint as sp
from shrinkpoint.commands import seal as integrity
from shrinkpoint.trainers.dcp import Reader, Writer

from .test_cli import bad, good, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)"),
    pytest.mark.skipif(os.name != "posix", reason="pipes and devices of POSIX"),
]


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("trap", [fifo, zero])
def test_a_trap_in_a_sealed_folder(trap: Callable[[Path], None], tmp_path: Path) -> None:
    for name, data in (("a", b""), ("b", b"x")):
        (tmp_path / name).write_bytes(data)
    (tmp_path / integrity.SEAL).write_bytes(integrity.to_bytes(integrity.make_seal(tmp_path)))
    trap(tmp_path / "a")
    code, out, _ = run("verify", tmp_path)
    assert code == 1
    assert "a is altered (cannot be read: not a regular file)" in out


@pytest.mark.parametrize("command", ["compress", "info", "diff", "verify", "seal", "restore"])
@pytest.mark.parametrize("path", ["pipe", "/dev/zero"])
def test_a_trap_in_the_place_of_a_file(command: str, path: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    source = tmp_path / path
    more = {"compress": [tmp_path / "o.spt"], "diff": [source], "restore": [tmp_path / "o.pt"]}
    code, _, _ = run(command, source, *more.get(command, []))
    assert code == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "dcp"
    state = {"a": [torch.ones(3)], "n": {"x": 5}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    return path


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
@pytest.mark.parametrize("trap", [fifo, zero])
def test_a_trap_in_a_dcp_folder(name: str, trap: Callable[[Path], None], folder: Path, tmp_path: Path) -> None:
    trap(folder / name)
    bad(1, str(folder), "compress", folder, tmp_path / "o.spt")


def test_a_link_within_a_dcp_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "inside").symlink_to("__0_0.distcp")
    alter(folder, lambda m: m.update(storage_data=files(m, relative_path="inside", length=0)))
    bad(1, "[Ss]ymbolic link|Too many levels", "compress", folder, tmp_path / "o.spt")


def alter(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(vars(metadata))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def files(metadata: dict[str, Any], **changes: Any) -> dict[Any, Any]:
    return {index: replace(info, **changes) for index, info in metadata["storage_data"].items()}


def tensors(metadata: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        name: replace(entry, **changes) if hasattr(entry, "chunks") else entry
        for name, entry in metadata["state_dict_metadata"].items()
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m.update(planner_data=dict.fromkeys(m["planner_data"], ("a", 4_000_000_000))), "form a tree"),
        (lambda m: m.update(planner_data=dict.fromkeys(m["planner_data"], ("a",) * 65)), "form a tree"),
        (lambda m: m["planner_data"].update({"a.0": ("a", 1 << 17)}), "form a tree"),
        (lambda m: m["planner_data"].update({"a.0": ("n", "x", "y")}), "form a tree"),
        (lambda m: m["planner_data"].update({"a.0": ("n", "x")}), "form a tree"),
        (lambda m: m.update(planner_data=5), "is not a dict"),
        (lambda m: m.update(state_dict_metadata=tensors(m, chunks=[])), "do not fill it"),
        (lambda m: m.update(state_dict_metadata=tensors(m, size=(-3,))), "size of TensorStorageMetadata"),
        (
            lambda m: m.update(state_dict_metadata=tensors(m, size=(0, 1 << 62, 1 << 62))),
            "size of TensorStorageMetadata",
        ),
        (lambda m: m.update(state_dict_metadata=tensors(m, properties=None)), "properties of TensorStorageMetadata"),
        (lambda m: m.update(state_dict_metadata={5: None}), "not named"),
        (lambda m: m.update(storage_data=files(m, relative_path="a\0b")), "not in the folder"),
        (lambda m: m.update(storage_data=files(m, relative_path="a" * 5000)), "too long"),
        (lambda m: m.update(storage_data=files(m, length=1 << 40)), "the entries in them"),
        (lambda m: m.update(storage_data=files(m, offset=-1)), "malformed"),
        (lambda m: m.update(storage_data=dict.fromkeys(m["storage_data"])), "not in the folder"),
    ],
)
def test_dcp_metadata_that_lies(
    change: Callable[[dict[str, Any]], None], said: str, folder: Path, tmp_path: Path
) -> None:
    alter(folder, change)
    bad(1, said, "compress", folder, tmp_path / "o.spt")


_MANY = b"".join(b"\x8c\x03%03dN" % i for i in range(100))
_CLASS = b"ctorch.distributed.checkpoint.metadata\nBytesStorageMetadata\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x80\x04}q\x00(" + _MANY + b"u0" + _CLASS + b")\x81h\x00b.", "an object of more than 64 fields"),
        (b"\x80\x04ctorch\nSize\n(" + b"K\x01" * 100 + b"t\x85R.", "a shape of more than 64 dimensions"),
        (b"\x80\x04ccollections\nOrderedDict\n)\x85R.", "not DCP metadata"),
        (b"\x80\x04Nr\xff\xff\xff\x7f.", "not the metadata"),
        (b"\x80\x05\x96" + b"\0" * 5 + b"\1\0\0.", "not DCP metadata"),
    ],
)
def test_pickles_that_grow(data: bytes, said: str, folder: Path, tmp_path: Path) -> None:
    """Pickles of a few bytes: copies of one large collection, a large memo, an array of bytes."""
    (folder / ".metadata").write_bytes(data)
    bad(1, said, "compress", folder, tmp_path / "o.spt")


def test_lists_with_gaps_stay_flat(tmp_path: Path) -> None:
    """Metadata of our own whose lists would take memory for places that no entry has."""

    class Planner(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            self.mappings = {name: ("a" + name, *[65536] * 60) for name in self.mappings}

    state = {str(i): torch.full((1,), float(i)) for i in range(4)}
    dcp.save(state, storage_writer=Writer(tmp_path / "dcp"), planner=Planner(), no_dist=True)
    assert Reader(tmp_path / "dcp").read_metadata().planner_data is None
    good("compress", tmp_path / "dcp", tmp_path / "o.spt")
    found = sp.decompress(sp.Checkpoint.from_bytes((tmp_path / "o.spt").read_bytes()))
    assert found == state


def test_files_of_torch_that_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shrinkpoint.commands.dcp.MOST_VALUES", 1000)
    shared: list[Any] = [1]
    for _ in range(60):
        shared = [shared, shared]
    torch.save({"w": torch.ones(3), "x": shared}, tmp_path / "lists.pt")
    bad(1, "more than 1000 values", "compress", tmp_path / "lists.pt", tmp_path / "o.spt")
    torch.save({"w": torch.zeros(1).as_strided((1 << 44,), (0,))}, tmp_path / "expanded.pt")
    bad(1, "this machine or container has", "compress", tmp_path / "expanded.pt", tmp_path / "o.spt")
