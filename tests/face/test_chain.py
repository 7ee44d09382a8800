"""A command that turns a series of files into a chain; permissions of its outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.commands.convert import steps_from_names

from .test_cli import bad, good, parsed, run

WEIGHTS = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def series(folder: Path, *names: str) -> list[Path]:
    for number, name in enumerate(names):
        torch.save({"w": WEIGHTS * (1 + number / 1000)}, folder / name)
    return [folder / name for name in names]


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["epoch_10.pt", "epoch_9.pt"], [9, 10]),
        (["epoch=3-step=900.ckpt", "epoch=0-step=300.ckpt"], [300, 900]),
        (["checkpoint-500", "checkpoint-1000"], [500, 1000]),
        (["iter_0000100", "iter_0000200"], [100, 200]),
        (["global_step12.pt"], [12]),
        (["model.7.safetensors"], [7]),
        (["run2-ckpt-40.pt"], [40]),
        (["Step 5.bin"], [5]),
    ],
)
def test_steps_are_read_from_names(names: list[str], steps: list[int]) -> None:
    found = steps_from_names([Path("folder-77") / name for name in names])
    assert list(found) == steps
    assert sorted(p.name for p in found.values()) == sorted(names)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["best.pt"], "best.pt has no number in its name"),
        (["model-00001-of-00003.safetensors"], "has several numbers in its name, and none of them follows"),
        (["epoch_1.pt", "epoch_01.pt"], "epoch_1.pt and epoch_01.pt are both step 1"),
    ],
)
def test_names_without_a_step_are_refused(names: list[str], says: str) -> None:
    with pytest.raises(sp.BadArgumentError, match=says):
        steps_from_names([Path(name) for name in names])


def test_a_series_of_files_becomes_a_chain(tmp_path: Path) -> None:
    files = series(tmp_path, "epoch_1.pt", "epoch_2.pt", "epoch_10.pt")
    # A shell sorts names as text.
    found = parsed("compress", *sorted(files), tmp_path / "run", "--step-from-name", "--preset", "lossless")
    assert [(s["step"], s["delta"]) for s in found["steps"]] == [(1, False), (2, True), (10, True)]
    store = sp.Store(tmp_path / "run")
    assert found["steps"][2]["parent"] == found["steps"][1]["id"]
    for step, file in zip((1, 2, 10), files, strict=True):
        assert torch.equal(store.load(step)["w"], torch.load(file)["w"])
    # Later files go on from the newest step.
    more = series(tmp_path, "epoch_11.pt")
    out = good("compress", *more, tmp_path / "run", "--step-from-name")
    assert out.splitlines()[0].endswith("delta: " + f"{tmp_path / 'run'}, 11")
    bad(
        2, "already has steps 1, 2, 10; --force replaces them", "compress", *files, tmp_path / "run", "--step-from-name"
    )


def test_mistakes_with_several_files_save_nothing(tmp_path: Path) -> None:
    files = series(tmp_path, "epoch_1.pt", "epoch_2.pt")
    bad(2, "2 sources are given; several need --step-from-name", "compress", *files, tmp_path / "run", "--step", 1)
    bad(2, "neither --step nor --metric", "compress", *files, tmp_path / "run", "--step", 1, "--step-from-name")
    bad(2, "--step-from-name: the target .* is a single file", "compress", *files, "x.spt", "--step-from-name")
    bad(1, "No such file", "compress", *files, tmp_path / "epoch_3.pt", tmp_path / "run", "--step-from-name")
    assert not (tmp_path / "run").exists()


def test_a_file_that_cannot_be_read_ends_the_series_after_those_before_it(tmp_path: Path) -> None:
    files = series(tmp_path, "epoch_1.pt", "epoch_2.pt", "epoch_3.pt")
    files[1].write_bytes(b"junk")
    code, out, err = run("compress", *files, tmp_path / "run", "--step-from-name", "--preset", "lossless")
    assert code == 1
    assert "epoch_2.pt" in err
    assert sp.Store(tmp_path / "run").steps() == [1]
    assert out.count("\n") == 2


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
@pytest.mark.parametrize("name", ["o.pt", "o.safetensors", "o.spt", "dcp"])
def test_outputs_follow_the_umask(mask: int, name: str, tmp_path: Path) -> None:
    (tmp_path / "a.spt").write_bytes(sp.compress({"w": WEIGHTS}, cfg=sp.presets.lossless()).to_bytes())
    (source,) = series(tmp_path, "a.pt")
    before = os.umask(mask)
    try:
        if name == "o.spt":
            good("compress", source, tmp_path / name, "--preset", "lossless")
        else:
            good("restore", tmp_path / "a.spt", tmp_path / name, "--to", name.removeprefix("o."))
    finally:
        os.umask(before)
    path = tmp_path / name
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    assert files
    assert {p.stat().st_mode & 0o777 for p in files} == {0o666 & ~mask}
    assert not list(tmp_path.rglob(".tmp-*"))


def test_expanded_models_follow_the_umask(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "m").mkdir()
    save_file({"w": WEIGHTS}, tmp_path / "m" / "model.safetensors")
    sp.save_pretrained(tmp_path / "m", tmp_path / "small")
    before = os.umask(0o027)
    try:
        sp.load_pretrained(tmp_path / "small", to=tmp_path / "whole")
    finally:
        os.umask(before)
    assert (tmp_path / "whole" / "model.safetensors").stat().st_mode & 0o777 == 0o640
