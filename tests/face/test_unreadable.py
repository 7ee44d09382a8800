"""Files that are not checkpoints: each command reports the file and the reason in one line."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shrinkpoint as sp
from shrinkpoint.commands.interchange import load_state, unreadable

from .test_cli import run


def saved(state: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def zipped(name: str, contents: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, contents)
    return file.getvalue()


STATE = {"weight": torch.arange(100.0)}
WHOLE, LEGACY = saved(STATE), saved(STATE, _use_new_zipfile_serialization=False)
UNREADABLE = {
    "text": b"junk\n",
    "empty": b"",
    "one byte": b"\x80",
    "zeros": bytes(1000),
    "random": bytes((i * 7919 >> 3) & 255 for i in range(4096)),
    "cut to half": WHOLE[: len(WHOLE) // 2],
    "cut at the end": WHOLE[:-10],
    "old format, cut": LEGACY[: len(LEGACY) // 2],
    "old format, cut early": LEGACY[:40],
    "another zip": zipped("notes.txt", b"nothing"),
    "a zip with a wrong pickle": zipped("archive/data.pkl", b"junk"),
}


@pytest.mark.parametrize("name", list(UNREADABLE))
def test_what_is_no_file_of_torch_is_said_to_be_none(name: str, tmp_path: Path) -> None:
    path = tmp_path / "junk.pt"
    path.write_bytes(UNREADABLE[name])
    with pytest.raises(sp.CorruptDataError) as caught:
        load_state(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: cannot be ")
    assert "torch.save" in said or "without pickle" in said or "empty" in said
    reason = said.partition(": ")[2].partition(": ")[2].strip()
    assert len(reason) > 10
    assert not reason.isdigit()


@pytest.mark.parametrize("contents", [b"junk\n", b"", bytes(1000), b"\xff" * 8 + b"{" + b"x" * 99])
def test_what_is_no_safetensors_file_is_said_to_be_none(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "junk.safetensors"
    path.write_bytes(contents)
    with pytest.raises(sp.CorruptDataError, match=r"junk\.safetensors: .*[a-z]{4}"):
        load_state(path)


def test_the_commands_end_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "junk.pt"
    path.write_bytes(b"junk\n")
    code, out, err = run("compress", path, tmp_path / "run", "--step", 1)
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert "junk.pt: cannot be read as a file of torch.save: it is neither its archive nor a pickle (KeyError" in err
    assert not (tmp_path / "run").exists()


def onnx() -> bytes:
    """Return the beginning of an ONNX model: format version 8 and its producer."""
    return b"\x08\x08\x12\x07pytorch\x1a\x052.1.0" + bytes(100)


FOREIGN: dict[str, tuple[bytes, str]] = {
    "pointer.pt": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 123\n", "a Git LFS pointer"),
    "pointer.safetensors": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "a Git LFS pointer",
    ),
    "empty.pt": (b"", "the file is empty"),
    "empty.safetensors": (b"", "the file is empty"),
    "model.gguf": (b"GGUF" + bytes(60), "a GGUF file"),
    "model.onnx": (onnx(), "an ONNX model"),
    "onnx.bin": (onnx(), "an ONNX model"),
    "page.pt": (b"\n<!DOCTYPE html>\n<html>404</html>", "an HTML page"),
    "page.safetensors": (b"<html><body>404</body></html>", "an HTML page"),
    "s3.bin": (b'<?xml version="1.0"?><Error><Code>NoSuchKey</Code></Error>', "an XML document"),
    "answer.pt": (b'{"error": "Repository not found"}', "a JSON document"),
    "weights.h5": (b"\x89HDF\r\n\x1a\n" + bytes(50), "an HDF5 file"),
    "a.npy": (b"\x93NUMPY" + bytes(50), "a NumPy .npy file"),
    "a.pt.gz": (b"\x1f\x8b" + bytes(50), "a gzip file: unpack it first"),
    "a.npz": (zipped("w.npy", b"\x93NUMPY"), "a NumPy .npz file"),
    "truncated.pt": (WHOLE[: len(WHOLE) // 2], "the file is truncated or damaged"),
    "old.pt": (LEGACY[: len(LEGACY) - 10], "the file is truncated"),
    "script.pt": (zipped("m/constants.pkl", b""), "a TorchScript archive"),
}


@pytest.mark.parametrize("name", list(FOREIGN))
def test_files_of_other_types_are_named(name: str, tmp_path: Path) -> None:
    contents, says = FOREIGN[name]
    path = tmp_path / name
    path.write_bytes(contents)
    for words in (("compress", path, tmp_path / "x.spt"), ("diff", path, path)):
        code, out, err = run(*words)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert says in err
    assert not (tmp_path / "x.spt").exists()


def test_a_truncated_safetensors_file_is_named_with_its_sizes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(1000.0)}, path)
    whole = path.read_bytes()
    for size, says in (
        (len(whole) - 1, f"it has {len(whole) - 1} of {len(whole)} bytes"),
        (1000, f"it has 1000 of {len(whole)} bytes"),
        (20, "its header has 64 bytes, and the file 20"),
        (5, "5 bytes are less than any safetensors header"),
    ):
        path.write_bytes(whole[:size])
        code, _, err = run("compress", path, tmp_path / "x.spt")
        assert code == 1
        assert f"model.safetensors: cannot be read: the file is truncated: {says}" in err


@pytest.mark.parametrize("length", [0x120108, 0x8B1F, 0x685A42], ids=["ONNX", "gzip", "bzip2"])
@pytest.mark.parametrize("name", ["m.safetensors", "m.bin"])
def test_a_length_of_safetensors_is_not_taken_for_another_type(length: int, name: str, tmp_path: Path) -> None:
    """The length of a safetensors header may look like the first bytes of another format."""
    header = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'.ljust(length)
    (tmp_path / name).write_bytes(length.to_bytes(8, "little") + header + bytes(8))
    assert unreadable(tmp_path / name) is None
    assert torch.equal(load_state(tmp_path / name)["w"], torch.zeros(2))


def test_a_sparse_tensor_is_named(tmp_path: Path) -> None:
    torch.save({"m": {"s": torch.eye(3).to_sparse()}}, tmp_path / "sparse.pt")
    code, _, err = run("compress", tmp_path / "sparse.pt", tmp_path / "x.spt")
    assert code == 1
    assert "m/s: " in err
    assert "sparse" in err
    assert "cannot be read" not in err


def test_a_pickled_module_is_named(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    code, _, err = run("compress", tmp_path / "module.pt", tmp_path / "x.spt")
    assert code == 1
    assert "a pickled object of torch.nn.modules.linear.Linear" in err
    assert "save the state_dict() of a module" in err


def test_a_folder_names_the_files_in_it_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    code, _, err = run("compress", tmp_path / "hub", tmp_path / "x.spt")
    assert code == 1
    assert err.endswith("a .pt or safetensors file or a DCP folder is needed here\n")
    for name in "abcd":
        (tmp_path / "hub" / f"{name}.safetensors").touch()
    err = run("compress", tmp_path / "hub", tmp_path / "x.spt")[2]
    assert err.endswith("such as its a.safetensors, b.safetensors, c.safetensors and 1 more\n")


@pytest.mark.parametrize("options", [{}, {"_use_new_zipfile_serialization": False}])
def test_files_of_torch_are_not_taken_for_others(options: dict[str, Any], tmp_path: Path) -> None:
    """Files of torch are recognised by their structure, not by their first bytes."""
    for number, state in enumerate([{}, STATE, [STATE], {"GGUF": torch.zeros(2)}]):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(saved(state, **options))
        assert unreadable(path) is None
        assert type(load_state(path)) is type(state)
