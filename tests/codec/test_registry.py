"""Codecs of other packages are found by entry points, and named if missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shrinkpoint as sp
from shrinkpoint.codec.config import CODECS
from shrinkpoint.codec.lossless.exact import Exact
from shrinkpoint.codec.registry import STREAMS, from_json, register
from shrinkpoint.codec.weights.quantize import Quantize

HOME = Path(__file__).parents[2]
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "Example"
version = "1.2"
[tool.setuptools]
py-modules = ["tiny_codec"]
[project.entry-points."shrinkpoint.codecs"]
"example.rounded" = "tiny_codec:Rounded"
"""
WRITE = """
import sys, numpy as np, shrinkpoint as sp
from shrinkpoint.codec.registry import from_json
from shrinkpoint.codec.config import CODECS
assert "tiny_codec" not in sys.modules
w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
cfg = sp.Config([("weight", from_json(CODECS, {"id": "example.rounded", "bits": 5}))])
assert sp.Config.from_json(cfg.to_json()) == cfg
ckpt = sp.compress({"weight": w}, cfg=cfg, kinds={"weight": "linear"})
assert ckpt.summary()[0].codec == "example.rounded", ckpt.summary()
open(sys.argv[1], "wb").write(ckpt.to_bytes())
"""
READ = """
import sys, shrinkpoint as sp
ckpt = sp.Checkpoint.from_bytes(open(sys.argv[1], "rb").read())
print(sp.decompress(ckpt)["weight"].shape, sys.modules["tiny_codec"].Rounded().bits)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a distribution with the codec of examples/own_codec.py; return its folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    (source / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    code = (HOME / "examples" / "own_codec.py").read_text(encoding="utf-8")
    (source / "tiny_codec.py").write_text(code.replace("@register\n", ""), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-build-isolation", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(target), str(source)], capture_output=True, text=True)
    if done.returncode and "setuptools" in done.stderr:
        pytest.skip("setuptools is not installed here")
    assert not done.returncode, done.stderr
    return target


def python(code: str, *args: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    found = os.pathsep.join([*([str(path)] if path else []), str(HOME / "src")])
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": found})


def test_an_installed_codec_is_found_when_it_is_named(installed: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    wrote = python(WRITE, file, path=installed)
    assert not wrote.returncode, wrote.stderr
    read = python(READ, file, path=installed)
    assert read.stdout == "(64, 64) 7\n", read.stderr
    without = python(READ, file)
    assert "MissingCodecError: weight: 'example.rounded' is a codec of the package 'example'" in without.stderr
    assert without.stderr.endswith("it is not installed\n")
    (broken := installed / "tiny_codec.py").rename(installed / "gone.py")
    try:
        read = python(READ, file, path=installed)
    finally:
        (installed / "gone.py").rename(broken)
    assert "of the package 'Example' cannot be imported: ModuleNotFoundError" in read.stderr


def test_an_entry_point_is_of_its_own_package(installed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "other-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n", encoding="utf-8")
    points = folder / "entry_points.txt"
    code = "from shrinkpoint.codec.config import CODECS; CODECS['example.rounded']"
    for line, said in {
        "example.rounded = tiny_codec:Rounded": "of the package 'other': its name must begin with that of the package",
        "other.rounded = tiny_codec:Rounded": "of the package 'other': its id is 'example.rounded'",
        "other.more = tiny_codec:Rounded": "KeyError: 'other.rounded'",
    }.items():
        points.write_text(f"[shrinkpoint.codecs]\n{line}\n", encoding="utf-8")
        (tmp_path / "tiny_codec.py").write_text((installed / "tiny_codec.py").read_text("utf-8"), encoding="utf-8")
        asked = code if line.startswith("example") else code.replace("example", "other")
        assert said in python(asked, path=tmp_path).stderr


class Mine(Quantize):
    id = "mine.codec"


def test_a_codec_that_is_registered_has_the_name_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sp.BadArgumentError, match=r"its id must be PACKAGE\.NAME, not 'exact'"):
        register(Exact)
    try:
        assert register(Mine) is Mine is register(Mine)
        assert from_json(CODECS, {"id": "mine.codec"}) == Mine()
        other: Any = type("Other", (Quantize,), {"id": "mine.codec"})
        with pytest.raises(sp.BadArgumentError, match=r"the class Mine has this id already"):
            register(other)
        monkeypatch.setattr(Mine, "streams", {"yours": STREAMS["bytes"]}, raising=False)
        with pytest.raises(sp.BadArgumentError, match=r"stream 'yours' must be named mine\.codec or mine\.codec\.MORE"):
            register(Mine)
        with pytest.raises(sp.BadArgumentError, match="is not a codec"):
            sp.Config([("weight", other())])
    finally:
        CODECS.pop("mine.codec")


def test_a_codec_of_no_package_is_named() -> None:
    with pytest.raises(sp.MissingCodecError, match=r"'nowhere\.codec' is a codec of the package 'nowhere': it is not"):
        from_json(CODECS, {"id": "nowhere.codec"})
    with pytest.raises(sp.BadArgumentError):
        from_json(CODECS, {"id": "nowhere"})
    with pytest.raises(sp.MissingCodecError, match=r"numpy .* is installed, and has no such entry point"):
        from_json(CODECS, {"id": "numpy.codec"})
    assert ["bytes" in STREAMS, "none" in STREAMS, 3 in STREAMS] == [True, False, False]
