"""Messages for what users try first."""

from __future__ import annotations

import argparse
import datetime
import enum
import re
import subprocess
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp


def command(*words: str) -> tuple[int, str]:
    ran = subprocess.run([sys.executable, "-m", "shrinkpoint", *words], capture_output=True, text=True, check=False)
    return ran.returncode, ran.stderr.strip()


def test_compress_without_a_destination(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "a.pt")
    code, said = command("compress", str(tmp_path / "a.pt"))
    assert code == 2
    assert said.startswith(f"shrinkpoint: the destination is missing: shrinkpoint compress {tmp_path / 'a.pt'} DESTI")


@pytest.mark.parametrize(("word", "meant"), [("decompress", "restore"), ("save", "compress"), ("list", "ls")])
def test_other_names_of_commands(word: str, meant: str) -> None:
    code, said = command(word, "a.spt", "b.pt")
    assert (code, said) == (2, f"shrinkpoint: there is no command {word!r}; did you mean {meant!r}?")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("bins", r"Quantize has: Config\(\[\('weight', Quantize\(bins=...\)\)\]\)"),
        ("step", "FirstMoment has: Config"),
        ("octaves", "SecondMoment has: Config"),
        ("alphas", "Quantize has: Config"),
        ("clusters", r"Clusters has: Config\(\[\('second moment', Clusters\(clusters=...\)\)\]\)"),
        ("expected_restores", r"Rows has: Config\(\[\('embedding', Rows\(expected_restores=...\)\)\]\)"),
        ("rates", r"did you mean 'rate'\?"),
        ("level", "its arguments are rules, max_rel_error, rate, chain and ahead"),
    ],
)
def test_an_argument_of_a_codec_given_to_config(name: str, advice: str) -> None:
    arguments: dict[str, Any] = {name: 64}
    with pytest.raises(sp.BadArgumentError, match=f"Config has no argument '{name}'; {advice}"):
        sp.Config(**arguments)


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("log-bucket", r"did you mean LogBuckets\(\)"),
        ("Row", r"did you mean Rows\(\)"),
        ("cluster", r"did you mean Clusters\(\)"),
        (sp.Quantize, r"write Quantize\(\)"),
        ("zip", "is not a codec$"),
    ],
)
def test_what_is_not_a_codec_in_a_rule(given: Any, advice: str) -> None:
    with pytest.raises(sp.BadArgumentError, match=f"is not a codec.*{advice}|{advice}"):
        sp.Config([("weight", given)])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("decompres", "decompress"),
        ("stor", "Store"),
        ("log_buckets", "LogBuckets"),
        ("restore", "Store(folder).load(), or decompress(ckpt)"),
        ("save", "Store(folder).save(step, state), or trainers.save"),
        ("CheckpointManager", "Run(folder, model, optimizer), or Store(folder)"),
        ("Preemption", "trainers.Preemption"),
        ("exactweights", "presets.exact_weights()"),
    ],
)
def test_names_that_are_not_there(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(sp, name)
    assert str(caught.value) == f"module 'shrinkpoint' has no attribute {name!r}; did you mean {meant}?"


def test_every_name_in_such_a_hint_exists() -> None:
    for call in sp._MEANT.values():
        for name in re.findall(r"(?:^|or )(\w+(?:\.\w+)*)", call):
            found: Any = sp
            for part in name.split("."):
                found = getattr(found, part)
    with pytest.raises(AttributeError, match=r"has no attribute 'zzz'$"):
        sp.zzz  # noqa: B018


def test_a_device_for_a_load(tmp_path: Path) -> None:
    store = sp.Store(tmp_path)
    ckpt = store.save(1, {"w": np.zeros(3)}).checkpoint
    device: dict[str, Any] = {"device": "cuda"}
    for function, call in (
        ("load", lambda: store.load(**device)),
        ("decompress", lambda: sp.decompress(ckpt, **device)),
    ):
        with pytest.raises(
            sp.BadArgumentError, match=f"{function} has no argument 'device'; arrays come back on the CPU"
        ):
            call()
    with pytest.raises(sp.BadArgumentError, match=r"load has no argument 'strict'$"):
        store.load(strict=True)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (argparse.Namespace(lr=1), "pass vars"),
        (types.SimpleNamespace(lr=1), "pass vars"),
        (Path("a"), "pass str"),
        (torch.nn.Linear(1, 1), "pass its state_dict"),
        (torch.device("cpu"), r"pass str\(value\)"),
        (np.dtype("f4"), r"pass str\(value\)"),
        ({1, 2}, r"pass sorted\(value\)"),
        (datetime.datetime(2026, 1, 1), r"pass value.isoformat\(\)"),
        (enum.Enum("Phase", "A")["A"], "pass value.value"),
        (torch.Generator(), r"pass its get_state\(\)"),
        (types.MappingProxyType({}), "bytes and None$"),
    ],
)
def test_values_that_are_one_call_away_from_being_stored(value: Any, advice: str) -> None:
    with pytest.raises(sp.UnsupportedLeafError, match=f"^run/args: .*{advice}"):
        sp.compress({"run": {"args": value}})


def test_the_wrong_object_in_a_first_argument(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(sp.BadArgumentError, match=r"a folder comes first: Run\(folder, model, optimizer\)"):
        sp.Run(model, torch.optim.SGD(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match=r"must be a Store, as Store\(folder\), not str"):
        sp.Saver(str(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match=r"must be a Checkpoint \(from_bytes makes one\), not bytes"):
        sp.decompress(b"abc")  # type: ignore[arg-type]


def test_a_step_that_is_replaced(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    store = sp.Store(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"w": np.full(3, step)})
    assert not recwarn.list
    with pytest.warns(sp.StoreWarning, match="step 3 was stored with another state, which this save replaces"):
        store.save(3, {"w": np.full(3, 9)})
    assert store.load(3)["w"].tolist() == [9] * 3
    assert store.load(2)["w"].tolist() == [2] * 3


def test_a_run_that_went_back_replaces_steps_without_that_warning(tmp_path: Path) -> None:
    store = sp.Store(tmp_path)
    for step in (1, 2, 3):
        store.save(step, {"w": np.full(3, step)})
    store.load(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.save(2, {"w": np.full(3, 7)})
        store.save(3, {"w": np.full(3, 8)})
    assert len(caught) == 1
    assert "was stored with another state" not in str(caught[0].message)
    assert store.load(3)["w"].tolist() == [8] * 3


def test_completion_shows_the_api_only() -> None:
    names = {name for name in dir(sp) if not name.startswith("__")}
    assert names == {*sp.__all__, "codec", "kernels", "presets", "store", "trainers"}
    assert (sp.__doc__ or "").splitlines()[0].startswith("Compressed training checkpoints")


@pytest.mark.parametrize("fault", ["ENOSPC", "EROFS"])
def test_a_full_or_read_only_disk_loses_no_step(tmp_path: Path, fault: str) -> None:
    torch.save({"w": torch.zeros(3)}, tmp_path / "a.pt")
    words = ["shrinkpoint", "compress", str(tmp_path / "a.pt"), str(tmp_path / "store"), "--step"]
    store = sp.Store(tmp_path / "store")
    store.save(1, {"w": np.ones(3)})
    code = (
        "import errno, os, sys, shrinkpoint.__main__ as m\n"
        f"def fails(*_): raise OSError(errno.{fault}, os.strerror(errno.{fault}))\n"
        f"os.fsync = fails\nsys.argv = {[*words, '2']}\nm.main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert re.search(r"(No space left on device|Read-only file system)", ran.stderr)
    assert "no step that was saved before is lost" in ran.stderr
    again = sp.Store(tmp_path / "store")
    assert again.steps() == [1]
    assert again.load()["w"].tolist() == [1] * 3
