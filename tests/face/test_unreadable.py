"""Files that are no checkpoints: each command says which file, and why, in one line."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench import data
from shrinkpoint.bench.__main__ import main as bench
from shrinkpoint.commands.foreign import load_state

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


STATE = {"w": torch.arange(100.0)}
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
@pytest.mark.parametrize("read", [load_state, lambda p: data.read(p)], ids=["compress", "bench"])
def test_what_is_no_file_of_torch_is_said_to_be_none(name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    path = tmp_path / "junk.pt"
    path.write_bytes(UNREADABLE[name])
    with pytest.raises(sp.CorruptDataError) as caught:
        read(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: cannot be ")
    assert "torch.save" in said or "without pickle" in said
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
    assert bench(["kernels", "--quick", "--state", str(path)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "cannot be read as a file of torch.save" in said.replace("tor ch", "torch")
    path.write_bytes(saved([torch.zeros(3)]))
    with pytest.raises(sp.BadArgumentError, match="holds a list; a dict of tensors is needed"):
        data.read(path)
