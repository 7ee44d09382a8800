"""The command line: results, messages, exit codes, refused input."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import shrinkpoint as sp
from shrinkpoint.__main__ import app
from shrinkpoint.commands.convert import compress
from shrinkpoint.commands.inputs import config
from shrinkpoint.commands.interchange import load_state, save_state
from shrinkpoint.commands.outputs import printable, size, write_file, write_folder
from shrinkpoint.demo import presets
from shrinkpoint.store.files import StoreWarning
from tests.codec.common import difference

# Torch says so where DCP is used without processes.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
RUNNER = CliRunner()
Run = tuple[int, str, str]


def run(*words: object) -> Run:
    """Run a command; return exit code, standard output, standard error."""
    result = RUNNER.invoke(app, [str(w) for w in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def good(*words: object) -> str:
    """Return the standard output of a command that must succeed."""
    code, out, err = run(*words)
    assert code == 0, err
    return out


def parsed(*words: object) -> Any:
    """Return the JSON of a command that must succeed."""
    return json.loads(good(*words, "--json"))


def bad(code: int, says: str, *words: object) -> None:
    """Check that a command fails with this code and one matching line on standard error."""
    got, out, err = run(*words)
    assert (got, out) == (code, ""), err
    assert re.search(says, err), err
    assert err.startswith("shrinkpoint: ")
    assert err.count("\n") == 1


def shell(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run the command line in a new process."""
    command = [sys.executable, "-m", "shrinkpoint", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **more)


def state(step: int = 1) -> dict[str, Any]:
    """Return a training state with many types of values, which change with the step."""
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.normal(size=(48, 64)).astype(np.float32))
    drift = torch.from_numpy(rng.normal(size=(48, 64)).astype(np.float32)) * 0.01 * step
    moment = (weight * 0.01 + drift).abs()
    return {
        "model": {"fc.weight": weight + drift, "fc.bias": torch.arange(64.0) + step},
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": moment - 0.005, "exp_avg_sq": moment**2}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        },
        "rng": [torch.arange(8, dtype=torch.uint8), torch.ones(3, dtype=torch.bfloat16)],
        "step": step,
        "name": "a run",
    }


def weights(step: int = 1) -> dict[str, torch.Tensor]:
    return dict(state(step)["model"])


@pytest.fixture(scope="module")
def model_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "store"
    made = sp.Store(path, sp.presets.lossless())
    for step in (10, 20, 30):
        made.save(step, state(step), metric=1 / step)
    return path


@pytest.fixture
def store(model_store: Path, tmp_path: Path) -> sp.Store:
    """Return a new store of three steps."""
    return sp.Store(shutil.copytree(model_store, tmp_path / "store"), sp.presets.lossless())


def data_file(store: sp.Store, step: int) -> Path:
    return Path(store.url) / "data" / store.describe(step).file


def break_step(store: sp.Store, step: int) -> None:
    file = data_file(store, step)
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


# --- contents of a store ---


def test_ls(store: sp.Store) -> None:
    store.pin(10)
    store.tag("best", 30)
    lines = good("ls", store.url).splitlines()
    assert [line.split()[:2] for line in lines[1:4]] == [["10", "base"], ["20", "delta"], ["30", "delta"]]
    assert lines[1].endswith("pinned")
    assert lines[3].endswith("best")
    found = parsed("ls", store.url)
    assert [s["step"] for s in found["steps"]] == [10, 20, 30]
    assert [s["nbytes"] for s in found["steps"]] == [data_file(store, s).stat().st_size for s in (10, 20, 30)]
    assert found["steps"][1]["metric"] == 0.05
    assert found["restores"] == 0


def test_ls_shows_the_bytes_of_its_steps_and_those_of_the_folder(store: sp.Store) -> None:
    """`ls` counts a removed step's file in the folder until `gc`."""
    occupied = sum(p.stat().st_size for p in Path(store.url).rglob("*") if p.is_file())
    assert parsed("ls", store.url)["folder_nbytes"] == occupied
    before = sum(s["nbytes"] for s in parsed("ls", store.url)["steps"])
    good("drop", store.url, 10)
    found = parsed("ls", store.url)
    own = sum(s["nbytes"] for s in found["steps"])
    assert own < before < found["folder_nbytes"]
    last = good("ls", store.url).splitlines()[-1]
    sums = f"2 steps, {size(own)} in their own files, {size(found['folder_nbytes'])} in the folder"
    assert last == f"{sums}; restored 0 times"
    memory = store.copy("memory://face-ls-folder")
    assert parsed("ls", memory.url)["folder_nbytes"] > 0


def test_ls_tells_of_a_step_it_cannot_read(store: sp.Store) -> None:
    (Path(store.url) / "steps" / "000000000020.json").write_bytes(b"{}")
    code, out, err = run("ls", store.url)
    assert code == 1
    assert "step 20: its manifest is malformed" in err
    assert [line.split()[1] for line in out.splitlines()[1:4]] == ["base", "unreadable", "delta"]


def test_info_of_a_step(store: sp.Store) -> None:
    out = good("info", store.url, "--step", 20)
    assert "step 20: delta of" in out
    found = parsed("info", store.url, "--step", 20)
    ckpt = store.read(20)
    assert found["rows"] == json.loads(json.dumps([dict(r) for r in ckpt.summary()]))
    assert found["id"] == ckpt.id
    assert found["step"] == 20
    assert all(row["path"] in out for row in found["rows"])
    assert parsed("info", store.url)["step"] == 30


def test_info_reads_only_the_header_of_a_step(store: sp.Store) -> None:
    """`info` works with a missing base and a damaged body."""
    break_step(store, 20)
    data_file(store, 10).unlink()
    assert parsed("info", store.url, "--step", 20)["arrays"] == 7


def test_info_chooses_and_sorts(store: sp.Store) -> None:
    rows = parsed("info", store.url, "--paths", "model/*", "--paths", "*exp_avg")["rows"]
    assert [r["path"] for r in rows] == ["model/fc.weight", "model/fc.bias", "optimizer/state/0/exp_avg"]
    by_bytes = [r["stored_bytes"] for r in parsed("info", store.url, "--sort", "bytes")["rows"]]
    assert by_bytes == sorted(by_bytes, reverse=True)
    bad(2, "no array matches", "info", store.url, "--paths", "nothing*")
    bad(2, "--sort is 'size'; it must be one of path, bytes, error", "info", store.url, "--sort", "size")


def test_errors_of_info_compare(tmp_path: Path) -> None:
    """The largest relative error is at least the relative L2 error."""
    cfg = sp.Config([("a", sp.LogBuckets(0.05)), ("b", sp.Quantize(bins=8)), ("c", sp.Exact())])
    arrays = {name: torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) + 0.1 for name in "abc"}
    ckpt = sp.compress(arrays, cfg=cfg)
    (tmp_path / "x.spt").write_bytes(ckpt.to_bytes())
    rows = {row.path: row for row in ckpt.summary()}
    assert [rows[name].measure for name in "abc"] == ["relative", "relative L2", "exact"]
    restored = sp.decompress(ckpt)["a"]
    assert float((restored - arrays["a"]).norm() / arrays["a"].norm()) <= rows["a"].error
    out = good("info", tmp_path / "x.spt")
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert f"<= {rows['a'].error:.3g}  " in lines["a"]
    assert lines["a"].split().count(f"{rows['a'].error:.3g}") == 2
    assert f"  {rows['b'].error:.3g}" in lines["b"]
    assert "<=" not in lines["b"]
    assert "  exact" in lines["c"]
    order = [line.split()[0] for line in good("info", tmp_path / "x.spt", "--sort", "error").splitlines()[-3:]]
    assert order == sorted("abc", key=lambda name: -rows[name].error)


def test_info_of_a_file(store: sp.Store) -> None:
    found = parsed("info", data_file(store, 30))
    assert found["delta"]
    assert found["parent"] == store.read(20).identity
    bad(2, "is a file, not a store", "info", data_file(store, 30), "--step", 1)


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    hostile = "a\x1b]0;pwned\x07\r\u202eb\n"
    sp.Store(tmp_path / "s").save(1, {hostile: torch.zeros(3), "v": "\x1b[2J"})
    sp.Store(tmp_path / "s").save(2, {hostile: torch.zeros(4), "v": "\x1b[3J"})
    for words in (("info", tmp_path / "s"), ("diff", tmp_path / "s", 1, 2)):
        out = good(*words)
        assert "\\x1b]0;pwned\\x07\\r\\u202eb\\n" in out
        assert not set("\x1b\x07\r\u202e") & set(out)
    _, _, err = run("info", tmp_path / "\x1b[31m")
    assert "\x1b" not in err


@given(st.text())
def test_printable_is_printable(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()
    if text.isprintable():
        assert shown == text


@given(st.integers(0, 10**17))
def test_sizes_keep_three_digits(nbytes: int) -> None:
    number, unit = size(nbytes).split()
    assert float(number) < 1000
    assert len(number.replace(".", "")) <= 3
    scale = 1000 ** ("B", "kB", "MB", "GB", "TB", "PB").index(unit)
    assert float(number) * scale == pytest.approx(nbytes, rel=0.006, abs=0.5)


# --- verify ---


def test_verify_a_store(store: sp.Store) -> None:
    code, out, err = run("verify", store.url)
    assert code == 0
    assert out == "3 checkpoints checked, 0 not intact\n"
    assert [line.rpartition(": ")[2] for line in err.splitlines()] == [
        "step 10 (1 of 3)",
        "step 20 (2 of 3)",
        "step 30 (3 of 3)",
    ]
    break_step(store, 20)
    code, out, _ = run("verify", store.url)
    assert code == 1
    assert "NOT INTACT: step 20:" in out
    assert "3 checkpoints checked, 2 not intact" in out
    code, out, err = run("verify", store.url, "--json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert not found["intact"]
    assert [p["step"] for p in found["problems"]] == [20, 30]


def test_verify_files(store: sp.Store) -> None:
    files = [data_file(store, s) for s in (30, 10, 20)]
    assert [c["how"] for c in parsed("verify", *files)["checked"]] == ["decoded"] * 3
    assert [c["how"] for c in parsed("verify", files[0], files[1])["checked"]] == ["checksums", "decoded"]
    assert parsed("verify", files[0], "--parent", files[1], "--parent", files[2])["checked"][0]["how"] == "decoded"
    break_step(store, 10)
    code, out, _ = run("verify", *files)
    assert code == 1
    assert f"NOT INTACT: {files[1]}: chunk 0" in out
    assert "3 checkpoints checked, 1 not intact" in out
    ids = {str(file): sp.Checkpoint.from_bytes(file.read_bytes()).id for file in (files[0], files[2])}
    files[0].write_bytes(b"\x89PNG")
    assert run("verify", files[0])[0] == 1
    found = {c["file"]: c for c in json.loads(run("verify", *files, "--json")[1])["checked"]}
    assert [found[str(file)]["how"] for file in files] == ["not decoded", "not decoded", "checksums"]
    assert [found[str(file)]["id"] for file in files] == [None, None, ids[str(files[2])]]


def test_many_steps_are_told_in_few_lines(tmp_path: Path) -> None:
    made = sp.Store(tmp_path, sp.presets.lossless())
    for step in range(45):
        made.save(step, [torch.tensor(step)])
    _, _, err = run("verify", tmp_path)
    assert len(err.splitlines()) <= 20
    assert err.splitlines()[-1].endswith("(45 of 45)")


# --- compress and restore ---


def save_pt(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("kind", ["pt", "safetensors", "dcp"])
def test_there_and_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    """A .pt file converted to a store, each format and back is unchanged."""
    first = state()
    if kind == "dcp":  # which has no other keys than text
        first["optimizer"]["state"] = {"0": first["optimizer"]["state"][0]}
    good("compress", save_pt(first, tmp_path / "a.pt"), tmp_path / "s", "--step", 5, "--preset", "lossless")
    out = tmp_path / ("out" if kind == "dcp" else f"out.{kind}")
    good("restore", tmp_path / "s", out, "--to", kind)
    good("compress", out, tmp_path / "b.spt", "--preset", "lossless")
    good("restore", tmp_path / "b.spt", tmp_path / "b.pt")
    again = torch.load(tmp_path / "b.pt", weights_only=True)
    assert difference(first, again) == ""
    assert parsed("diff", tmp_path / "a.pt", tmp_path / "b.spt", "--changed")["values"] == []


def test_others_read_what_is_restored(store: sp.Store, tmp_path: Path) -> None:
    good("restore", store.url, tmp_path / "m.safetensors", "--under", "model", "--step", 20)
    assert difference(load_file(tmp_path / "m.safetensors"), dict(sorted(weights(20).items()))) == ""
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    good("restore", store.url, tmp_path / "d", "--to", "dcp", "--step", 20)
    into = {"model": {name: torch.zeros_like(t) for name, t in weights().items()}, "step": 0}
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "d"), no_dist=True)
    assert difference(into["model"], weights(20)) == ""
    assert into["step"] == 20


def test_numbers_in_a_foreign_byte_order_become_tensors(tmp_path: Path) -> None:
    sp.Store(tmp_path / "s").save(1, {"weight": np.arange(5, dtype=">f4"), "n": np.arange(3, dtype=">i8")})
    good("restore", tmp_path / "s", tmp_path / "o.safetensors")
    found = load_file(tmp_path / "o.safetensors")
    assert (found["weight"].tolist(), found["weight"].dtype) == ([0.0, 1.0, 2.0, 3.0, 4.0], torch.float32)
    assert (found["n"].tolist(), found["n"].dtype) == ([0, 1, 2], torch.int64)


def test_safetensors_keeps_the_whole_tree(tmp_path: Path) -> None:
    tied = torch.arange(4.0)
    odd = {"a": (tied, tied, {}), 3: [None, b"\x00", float("nan"), "x"], "n": np.arange(3), "z": torch.zeros(0, 2)}
    save_state(odd, tmp_path / "x.safetensors", "safetensors", False)
    again = load_state(tmp_path / "x.safetensors")
    odd["n"] = torch.arange(3)
    assert difference(odd, again) == ""


def test_two_arrays_of_one_path_are_refused(tmp_path: Path) -> None:
    made = {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(sp.BadArgumentError, match="two arrays have the path 'a/b'"):
        save_state(made, tmp_path / "x.safetensors", "safetensors", False)
    assert list(tmp_path.iterdir()) == []


def test_compress_along_a_store(tmp_path: Path) -> None:
    files = {step: save_pt(state(step), tmp_path / f"{step}.pt") for step in (1, 2, 3, 4)}
    done = {s: parsed("compress", files[s], tmp_path / "s", "--step", s, "--metric", s) for s in (1, 2, 3)}
    assert [found["step"] for found in done.values()] == [1, 2, 3]
    assert [done[s]["delta"] for s in done] == [False, True, True]
    store = sp.Store(tmp_path / "s")
    assert store.describe(3).chain == (*(store.describe(s).file for s in (3, 2, 1)),)
    assert store.describe(2).metric == 2
    assert store.restores() == 0
    assert not parsed("compress", files[4], tmp_path / "s", "--step", 4, "--base")["delta"]
    good("compress", files[4], tmp_path / "s", "--step", 5, "--against", 2)
    assert len(store.describe(5).chain) == 3
    bad(2, "already has step 3; --force replaces it", "compress", files[1], tmp_path / "s", "--step", 3)
    with warnings.catch_warnings():
        warnings.simplefilter("default", StoreWarning)  # said on stderr, as a user sees it
        code, _, said = run("compress", files[1], tmp_path / "s", "--step", 3, "--force", "--base")
    assert code == 0
    assert "step 3 is saved below steps 4, 5" in said
    assert store.load(3)["step"] == 1
    assert store.verify() == {}


def test_compress_files_along_a_chain(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_pt(state(step), tmp_path / f"{step}.pt")
    a, b, c = (tmp_path / f"{n}.spt" for n in "abc")
    good("compress", tmp_path / "1.pt", a, "--preset", "lossless")
    good("compress", tmp_path / "2.pt", b, "--parent", a, "--preset", "lossless")
    good("compress", tmp_path / "3.pt", c, "--parent", b, "--parent", a, "--preset", "lossless")
    good("restore", c, tmp_path / "o.pt", "--parent", a, "--parent", b)
    assert difference(torch.load(tmp_path / "o.pt", weights_only=True), state(3)) == ""
    wanted = rf"c\.spt: needs the checkpoint {sp.Checkpoint.from_bytes(b.read_bytes()).id[:16]}\.\.\."
    bad(
        1,
        wanted + ", and it is not among the given files; use --parent FILE",
        "restore",
        c,
        tmp_path / "p.pt",
        "--parent",
        a,
    )
    bad(1, wanted + "; use --parent FILE", "restore", c, tmp_path / "p.pt")
    ours, theirs = (parsed("diff", *pair) for pair in ((a, b), (tmp_path / "1.pt", tmp_path / "2.pt")))
    assert [(c["path"], c["what"]) for c in ours["arrays"]] == [(c["path"], c["what"]) for c in theirs["arrays"]]
    bad(1, wanted, "diff", a, c)
    assert parsed("diff", a, c, "--parent", b)["arrays"]
    assert not (tmp_path / "p.pt").exists()
    assert (
        c.read_bytes()
        == sp.compress(
            state(3),
            sp.Checkpoint.from_bytes(b.read_bytes(), sp.Checkpoint.from_bytes(a.read_bytes())),
            sp.presets.lossless(),
        ).to_bytes()
    )


@pytest.mark.parametrize("preset", sorted(presets()))
def test_every_preset(preset: str, tmp_path: Path) -> None:
    option = typing.get_type_hints(compress, include_extras=True)["preset"].__metadata__[0]
    assert preset in option.help
    good("compress", save_pt(state(), tmp_path / "a.pt"), tmp_path / "a.spt", "--preset", preset)
    assert (tmp_path / "a.spt").read_bytes() == sp.compress(state(), cfg=presets()[preset]()).to_bytes()


def test_configurations(tmp_path: Path) -> None:
    save_pt(state(), tmp_path / "a.pt")
    cfg = sp.Config([("model/*", sp.Quantize(bins=8))], rate=0.5, ahead=False)
    (tmp_path / "c.json").write_text(json.dumps(cfg.to_json()))

    def made(*words: object) -> bytes:
        good("compress", tmp_path / "a.pt", tmp_path / "a.spt", "--force", *words)
        return (tmp_path / "a.spt").read_bytes()

    assert made("--config", tmp_path / "c.json") == sp.compress(state(), cfg=cfg).to_bytes()
    other = sp.Config(cfg.rules, rate=0.25, max_rel_error=0.2)
    assert config(None, tmp_path / "c.json", rate=0.25) == dataclasses.replace(cfg, rate=0.25)
    both = made("--config", tmp_path / "c.json", "--rate", 0.25, "--max-rel-error", 0.2)
    assert both == sp.compress(state(), cfg=other).to_bytes()
    compress = ("compress", tmp_path / "a.pt", tmp_path / "b.spt")
    bad(2, "must be one of default, lossless", *compress, "--preset", "best")
    bad(2, "use one of them", *compress, "--preset", "default", "--config", tmp_path / "c.json")
    bad(2, r"max_rel_error is 2\.0", *compress, "--max-rel-error", 2)
    bad(2, "rate is -1", *compress, "--rate", -1)
    (tmp_path / "c.json").write_text('{"rules": []}')
    bad(2, r"c\.json: no configuration", *compress, "--config", tmp_path / "c.json")
    (tmp_path / "c.json").write_text("[" * 100_000)
    bad(2, r"c\.json: not JSON", *compress, "--config", tmp_path / "c.json")
    bad(1, r"none\.json: No such file", *compress, "--config", tmp_path / "none.json")
    assert not (tmp_path / "b.spt").exists()


@pytest.mark.filterwarnings("default::shrinkpoint.codec.plan.UnknownArraysWarning")
@pytest.mark.parametrize("preset", ["default", "compact"])
def test_arrays_without_evidence_are_named_with_an_option_that_works(preset: str, tmp_path: Path) -> None:
    torch.save({"u[0]": torch.randn(64, 64)}, tmp_path / "a.pt")
    code, _, said = run("compress", tmp_path / "a.pt", tmp_path / "a.spt", "--preset", preset)
    assert code == 0
    assert "stay exact" in said
    assert "sp." not in said
    advice, _, text = said.partition("--config FILE.json")
    assert advice.endswith("pass it as ")
    (tmp_path / "rules.json").write_text(text[text.index("{") :])
    code, _, said = run("compress", tmp_path / "a.pt", tmp_path / "b.spt", "--config", tmp_path / "rules.json")
    assert (code, said) == (0, "")
    assert sp.Checkpoint.from_bytes((tmp_path / "b.spt").read_bytes()).summary()[0].measure != "exact"
    assert config(None, tmp_path / "rules.json").rules[1:] == presets()[preset]().rules


def test_a_part_of_a_state(store: sp.Store, tmp_path: Path) -> None:
    good("restore", store.url, tmp_path / "o.pt", "--under", "optimizer/state/0")
    assert sorted(torch.load(tmp_path / "o.pt")) == ["exp_avg", "exp_avg_sq", "step"]
    good("restore", store.url, tmp_path / "w.pt", "--under", "model/fc.weight")
    assert list(torch.load(tmp_path / "w.pt")) == ["fc.weight"]
    good("restore", store.url, tmp_path / "p.pt", "--paths", "model/*.bias", "--paths", "step")
    found = torch.load(tmp_path / "p.pt")
    assert (list(found), list(found["model"])) == (["model", "step"], ["fc.bias"])
    bad(
        2,
        "there is no such part; the keys here are fc.weight, fc.bias",
        "restore",
        store.url,
        tmp_path / "q.pt",
        "--under",
        "model/x",
    )


def test_restore_passes_over_what_is_broken(store: sp.Store, tmp_path: Path) -> None:
    break_step(store, 30)
    code, out, err = run("restore", store.url, tmp_path / "o.pt", "--json")
    assert code == 0
    assert json.loads(out)["step"] == 20
    assert "warning: skipped step 30:" in err
    assert torch.load(tmp_path / "o.pt")["step"] == 20
    bad(1, "step 30:.*checksum", "restore", store.url, tmp_path / "p.pt", "--step", 30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.pt", "store"]


def test_restoring_is_not_counted(store: sp.Store, tmp_path: Path) -> None:
    good("restore", store.url, tmp_path / "o.pt")
    assert store.restores() == 0


def test_numpy_arrays(tmp_path: Path) -> None:
    """NumPy arrays of numbers in .pt files are read; arrays of objects are refused."""
    made = {"keys": np.arange(7, dtype=np.uint32), "x": np.float64(2.5), "weight": np.ones((2, 3), np.float16)}
    good("compress", save_pt(made, tmp_path / "a.pt"), tmp_path / "a.spt")
    code, _, err = run("restore", tmp_path / "a.spt", tmp_path / "b.pt")
    assert code == 0
    assert "3 NumPy arrays" in err
    assert difference(torch.load(tmp_path / "b.pt", weights_only=False), made) == ""
    save_pt({"x": np.array([{}, 1], object)}, tmp_path / "c.pt")
    bad(1, r"c\.pt: ", "compress", tmp_path / "c.pt", tmp_path / "c.spt")


def test_what_dcp_does_not_keep_is_told(store: sp.Store, tmp_path: Path) -> None:
    made = sp.Store(tmp_path / "s")
    made.save(1, {"a": {1: torch.ones(2)}, "b": {}})
    code, _, err = run("restore", tmp_path / "s", tmp_path / "d", "--to", "dcp")
    assert code == 0
    assert "1 keys that are not text become text" in err
    assert "omitted: b" in err
    made.save(2, {"a": {1: torch.ones(2), "1": 3}})
    bad(2, "two keys become the same text", "restore", tmp_path / "s", tmp_path / "e", "--to", "dcp")
    made.save(3, [torch.ones(2)])
    bad(2, "a DCP folder holds a dict", "restore", tmp_path / "s", tmp_path / "e", "--to", "dcp")


# --- refused input ---


class Malicious:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("where", ["pt", "legacy", "metadata", "value"])
def test_nothing_in_a_file_is_executed(where: str, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = tmp_path / "evil"
    if where == "pt":
        evil = save_pt({"weight": torch.zeros(2), "x": Malicious(mark)}, tmp_path / "evil.pt")
    elif where == "legacy":
        evil.write_bytes(pickle.dumps({"x": Malicious(mark)}, 2))
    elif where == "metadata":
        evil.mkdir()
        (evil / ".metadata").write_bytes(pickle.dumps(Malicious(mark)))
    else:
        dcp.save(
            {"weight": torch.zeros(2), "x": Malicious(mark)}, storage_writer=dcp.FileSystemWriter(evil), no_dist=True
        )
    bad(1, "evil.*(holds|names .*Path|without pickle)", "compress", evil, tmp_path / "o.spt")
    assert not mark.exists()
    assert not (tmp_path / "o.spt").exists()
    if where != "value":
        return
    into = {"x": None}
    dcp.load(into, storage_reader=dcp.FileSystemReader(evil), no_dist=True)
    assert mark.exists()  # what torch does with the same folder


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "link", "", "."])
def test_a_dcp_folder_reads_nothing_outside_itself(path: str, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    save_state({"weight": torch.zeros(4)}, folder, "dcp", False)
    (file,) = folder.glob("*.distcp")
    (tmp_path / "secret").write_bytes(file.read_bytes())
    (folder / "link").symlink_to(tmp_path / "secret")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    bad(1, "is not in the folder", "compress", folder, tmp_path / "o.spt")


def test_a_dcp_folder_cannot_ask_for_all_memory(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    save_state({"weight": torch.zeros(4)}, folder, "dcp", False)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["weight"].size = torch.Size([1 << 50])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    bad(1, "needs .* bytes, this machine or container has", "compress", folder, tmp_path / "o.spt")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"state_dict_metadata", b"suate_dict_metadata", "Metadata has no state_dict_metadata"),
        (b"planner_data", b"plan-er_data", "Metadata has no planner_data"),
        (b"properties", b"propertiez", "TensorStorageMetadata has no properties"),
        (b"save_id", b"save_ie", "StorageMeta has no save_id"),
    ],
)
def test_renamed_fields_of_dcp_metadata_are_damage(old: bytes, new: bytes, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    save_state({"weight": torch.zeros(4)}, folder, "dcp", False)
    data = (folder / ".metadata").read_bytes()
    assert old in data
    (folder / ".metadata").write_bytes(data.replace(old, new))
    bad(1, says, "compress", folder, tmp_path / "o.spt")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.state_dict_metadata.update(b=m.state_dict_metadata.pop("a")), "'.' in one of its tables only"),
        (lambda m: m.planner_data.pop("a"), "'a' in one of its tables only"),
        (lambda m: setattr(m, "planner_data", 3), "a table of it is not a dict"),
        (lambda m: setattr(next(iter(m.storage_data.values())), "offset", "0"), "offset of _StorageInfo is '0'"),
    ],
)
def test_contradictions_of_dcp_metadata_are_damage(change: Any, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    save_state({"a": torch.zeros(4), "c": 3}, folder, "dcp", False)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    bad(1, says, "compress", folder, tmp_path / "o.spt")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("way", ["file", "store", "pt"])
def test_texts_of_a_safetensors_header_survive(nested: bool, way: str, tmp_path: Path) -> None:
    texts = {"ss_network_dim": "8", "modelspec.title": "a style, \u03c0", "format": "np" if nested else "pt"}
    source, between, target = tmp_path / "a.safetensors", tmp_path / "a.spt", tmp_path / "b.safetensors"
    tensors: dict[str, Any] = {"unet.down.weight": torch.randn(8, 64), "unet.alpha": torch.tensor(4.0)}
    if nested:
        save_state({"model": tensors, "step": 3, "__metadata__": texts}, source, "safetensors", False)
    else:
        save_file(tensors, source, texts)
    if way == "pt":
        good("compress", source, between)
        assert "'__metadata__'" in run("restore", between, tmp_path / "a.pt")[2]
        loaded = torch.load(tmp_path / "a.pt")
        assert loaded.pop("__metadata__") == {k: v for k, v in texts.items() if (k, v) != ("format", "pt")}
        source, between = tmp_path / "a.pt", tmp_path / "b.spt"
    if way == "store":
        good("compress", source, tmp_path / "run", "--step", 1)
        good("compress", source, tmp_path / "run", "--step", 2)
        good("restore", tmp_path / "run", target)
    else:
        good("compress", source, between)
        good("restore", between, target)
    with safe_open(target, "pt") as file:
        assert {k: v for k, v in file.metadata().items() if k != "shrinkpoint.tree"} == texts
        assert sorted(file.keys()) == sorted(f"model/{k}" if nested else k for k in tensors)
    again = load_state(target)
    assert (again["model"]["unet.alpha"] if nested else again["unet.alpha"]) == 4.0


@pytest.mark.parametrize("entry", [{}, {"a": 1}, {"shrinkpoint.tree": "[]"}, {"a": "\ud800"}, "text"])
def test_another_entry_of_that_name_stays_in_the_state(entry: Any, tmp_path: Path) -> None:
    state = {"weight": torch.ones(3), "__metadata__": entry}
    save_state(state, tmp_path / "a.safetensors", "safetensors", False)
    assert load_state(tmp_path / "a.safetensors")["__metadata__"] == entry


@pytest.mark.parametrize("kind", ["pt", "safetensors", "dcp", "spt"])
def test_damaged_files_are_told_plainly(kind: str, tmp_path: Path) -> None:
    """Damaged files give an error of one line, never a traceback."""
    path = tmp_path / ("f" if kind == "dcp" else f"f.{kind}")
    if kind == "spt":
        good("compress", save_pt(weights(), tmp_path / "a.pt"), path)
    else:
        save_state(state(), path, kind, False)
    target = path / ".metadata" if kind == "dcp" else path
    if kind == "dcp":  # it names its folder and a random id: the same bytes are damaged in each run
        metadata = pickle.loads(target.read_bytes())
        metadata.storage_meta.checkpoint_id, metadata.storage_meta.save_id = "folder", "id"
        target.write_bytes(pickle.dumps(metadata))
    data = target.read_bytes()
    reads = (path, tmp_path / "o.spt") if kind != "spt" else (path, tmp_path / "o.pt")
    rng = np.random.default_rng(1)
    failed = 0
    for number in range(18):
        at = int(rng.integers(len(data) if number % 2 else min(len(data), 600)))
        changed = data[:at] if number % 3 == 0 else data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]
        target.write_bytes(changed)
        code, _, err = run("restore" if kind == "spt" else "compress", *reads, "--force")
        assert code in (0, 1, 2), err
        if code:
            failed += 1
            assert err.count("\n") == 1
            assert str(tmp_path) in err
    assert failed >= 6
    target.write_bytes(b"")
    assert run("restore" if kind == "spt" else "compress", *reads, "--force")[0] == 1


@pytest.mark.parametrize(
    ("code", "says", "words"),
    [
        (1, "nowhere: No such file or directory", "ls nowhere"),
        (1, "nowhere: No such file or directory", "verify nowhere"),
        (1, "nowhere: No such file or directory", "info nowhere"),
        (1, "nowhere: No such file or directory", "restore nowhere o.pt --parent a.pt"),
        (1, r"\.: not a store: it has no folder 'steps'", "ls ."),
        (1, "memory://nothing: holds no checkpoint", "gc memory://nothing"),
        (2, "url 'nosuch://x'", "ls nosuch://x"),
        (1, r"a\.pt: not a shrinkpoint file; `shrinkpoint try a\.pt` reads", "info a.pt"),
        (1, r"a\.pt: not a shrinkpoint file", "restore a.pt b.pt"),
        (2, "step 7 is not in .*; it has 10, 20, 30", "info store --step 7"),
        (2, "step 'best' is not in", "restore store o.pt --step best"),
        (2, "must end in one of", "restore store out"),
        (2, "is a URL; outputs are local", "compress a.pt s3://bucket/x.spt"),
        (2, "is a URL; outputs are local", "restore store s3://bucket/x.pt"),
        (2, "is a URL; outputs are local", "report store -o memory://r.html"),
        (2, "step '9+' is not in", f"info store --step {'9' * 5000}"),
        (2, "--to is 'zip'; it must be one of pt, safetensors, dcp", "restore store out --to zip"),
        (2, "exists; use --force", "restore store a.pt"),
        (2, "exists; use --force", "report store -o a.pt"),
        (2, "--step or --step-from-name is needed", "compress a.pt fresh"),
        (2, "--step: the target x.spt is a single file", "compress a.pt x.spt --step 3"),
        (2, "--parent: the target store is a store", "compress a.pt store --step 4 --parent x.spt"),
        (2, "--base and --against", "compress a.pt store --step 4 --base --against 10"),
        (2, "step is -1", "compress a.pt fresh --step -1"),
        (2, "--under 'no': there is no such part", "compress a.pt x.spt --under no"),
        (1, r"none\.pt: No such file", "compress none.pt x.spt"),
        (1, "is not a folder of torch.distributed.checkpoint; a .pt", "compress . x.spt"),
        (1, "store: is a store; a .pt or safetensors file", "compress store x.spt"),
        (1, "store: is a store; a .pt or safetensors file", "diff a.pt store"),
        (2, "url is ''; it must name a folder", "copy store ''"),
        (2, "timeout is nan; it must be a number in ", "gc store --timeout nan"),
        (2, "timeout is -1.0; it must be a number in ", "gc store --timeout -1"),
        (2, "step 7 is not in", "report store -o r.html --step 7"),
        (2, "4 arguments; give STORE OLD NEW", "diff a b c d"),
        (2, "max_cost is 0", "compact store --max-cost 0"),
        (2, "last is 0", "gc store --keep-last 0"),
        (2, "--largest has no effect", "gc store --largest"),
        (2, "20 is not pinned", "unpin store 20"),
        (2, "a tag is 1 to 100 letters", "tag store 7 10"),
        (2, "has no tag 'x'", "untag store x"),
        (2, "metric is nan", "rate store 10 nan"),
        (1, "store: not a search result", "report store -o r.html --search a.pt"),
    ],
)
def test_mistakes_are_told_plainly(
    code: int, says: str, words: str, store: sp.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_pt(state(), Path("a.pt"))
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    got, out, err = run(*shlex.split(words))
    assert got == (2 if "not a search result" in says else code), err
    assert re.search(says.removeprefix("store: "), err), err
    assert err.count("\n") == 1, err
    assert out == ""
    after = [p for p in sorted(str(p) for p in tmp_path.rglob("*")) if "/locks" not in p and "/lock" not in p]
    assert [p for p in after if p not in before] == []


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (r"stroe: No such file or directory; did you mean 'store'\?", "ls stroe"),
        (r"stroe/: No such file or directory; did you mean 'store'\?", "info stroe/"),
        (r"a\.pth: No such file or directory; did you mean 'a\.pt'\?", "compress a.pth x.spt"),
        (r"--paths 'modle/\*': no array matches; did you mean 'model'\?", "info store --paths 'modle/*'"),
        (r"--paths 'optimiser/state\*': no array matches; did you mean 'optimizer/state'\?",
         "info store --paths 'optimiser/state*'"),
        (r"--under 'modle': there is no such part; did you mean 'model'\?", "restore store o.pt --under modle"),
        (r"--preset is 'losless'; it must be one of .*; did you mean 'lossless'\?",
         "compress a.pt x.spt --preset losless"),
        (r"zzz: No such file or directory$", "verify zzz"),
    ],
)  # fmt: skip
def test_the_nearest_name_is_said(says: str, words: str, store: sp.Store, tmp_path: Path) -> None:
    save_pt(state(), tmp_path / "a.pt")
    with contextlib.chdir(tmp_path):
        code, _, err = run(*shlex.split(words))
    assert code in (1, 2)
    assert re.search(says, err.strip()), err


def test_wrong_options_are_usage() -> None:
    for words in (["nosuch"], ["ls"], ["ls", "x", "--nosuch"], ["compress", "a", "b", "--step", "x"]):
        assert run(*words)[0] == 2


def test_an_object_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    save_pt({"a": {"size": torch.Size([2])}, "weight": torch.zeros(2)}, tmp_path / "a.pt")
    bad(1, "a/size: torch.Size", "compress", tmp_path / "a.pt", tmp_path / "o.spt")
    save_pt(torch.zeros(2), tmp_path / "b.pt")
    bad(1, "holds a Tensor, not a dict", "compress", tmp_path / "b.pt", tmp_path / "o.spt")


# --- diff ---


def test_diff(store: sp.Store) -> None:
    found = parsed("diff", store.url, 10, 30)
    arrays = {c["path"]: c for c in found["arrays"]}
    a, b = weights(10)["fc.weight"].double(), weights(30)["fc.weight"].double()
    entry = arrays["model/fc.weight"]
    assert entry["relative_l2"] == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-9)
    assert entry["changed_share"] == float((a != b).double().mean())
    rows = {r.path: r.stored_bytes for r in store.read(30).summary()}
    assert entry["stored_new"] == rows["model/fc.weight"]
    assert (arrays["rng/0"]["what"], arrays["rng/0"]["relative_l2"]) == ("same", 0)
    assert found["values"] == [{"path": "step", "old": 10, "new": 30}]
    out = good("diff", store.url, 10, 30)
    assert "step: 10 -> 30" in out
    assert "5 changed, 2 same" in out
    assert "rng/0" not in good("diff", store.url, 10, 30, "--changed")


def test_diff_of_what_is_not_the_same_kind(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan"), 1.0, float("inf"), 0.0])
    old = {"gone": torch.zeros(2), "shape": torch.zeros(2), "dtype": torch.zeros(2), "nan": nan, "zero": torch.zeros(2)}
    new = {"shape": torch.zeros(3), "dtype": torch.zeros(2).double(), "nan": nan.clone(), "zero": torch.ones(2)}
    new |= {"fresh": torch.zeros(1), "b": torch.tensor([True])}
    old["b"] = torch.tensor([False])
    found = parsed("diff", save_pt(old, tmp_path / "a.pt"), save_pt(new, tmp_path / "b.pt"))
    what = {c["path"]: (c["what"], c["relative_l2"], c["changed_share"]) for c in found["arrays"]}
    assert what == {
        "shape": ("other", None, None),
        "dtype": ("other", None, None),
        "nan": ("same", 0.0, 0.0),
        "zero": ("changed", None, 1.0),  # infinitely far, which JSON does not have
        "fresh": ("added", None, None),
        "gone": ("removed", None, None),
        "b": ("changed", None, 1.0),
    }
    assert "inf" in good("diff", tmp_path / "a.pt", tmp_path / "b.pt")


# --- a store is changed ---


def test_housekeeping(store: sp.Store) -> None:
    assert parsed("pin", store.url, 10)["pins"] == [10]
    assert parsed("tag", store.url, "best", 20)["tags"] == {"best": 20}
    assert parsed("info", store.url, "--step", "best")["step"] == 20
    assert parsed("rate", store.url, "best", 0.25)["metric"] == 0.25
    assert store.describe(20).metric == 0.25
    assert parsed("gc", store.url)["removed_steps"] == []
    assert parsed("untag", store.url, "best")["tags"] == {}
    assert parsed("gc", store.url, "--keep-last", 1)["removed_steps"] == [20]
    assert store.steps() == [10, 30]
    assert parsed("unpin", store.url, 10)["pins"] == []
    assert good("gc", store.url, "--keep-best", 1, "--largest").startswith("0 steps")
    assert good("drop", store.url, 10) == "removed 10\n"
    assert store.steps() == [30]
    assert store.load(30)["step"] == 30


def test_a_damaged_tag_is_found_and_removed(store: sp.Store) -> None:
    store.tag("best", 20)
    store.tag("last", 30)
    (Path(store.url) / "tags" / "best.json").write_bytes(b"")
    code, out, _ = run("verify", store.url, "--json")
    found = json.loads(out)["problems"]
    assert code == 1
    assert [p["file"] for p in found] == ["tags/best.json"]
    assert "untag 'best'" in found[0]["problem"]
    (Path(store.url) / "tags" / "other.json").mkdir()
    code, out, _ = run("verify", store.url)
    assert (code, out.splitlines()[-1]) == (1, "3 checkpoints checked, 0 not intact, 2 tags or records damaged")
    code, out, err = run("untag", store.url, "best")
    assert code == 0
    assert "other.json: not a tag" in err
    (Path(store.url) / "tags" / "other.json").rmdir()
    assert parsed("ls", store.url)
    assert parsed("tag", store.url, "best", 20)["tags"] == {"best": 20, "last": 30}
    assert parsed("untag", store.url, "best")["tags"] == {"last": 30}
    assert parsed("verify", store.url)["problems"] == []


def test_compact(store: sp.Store) -> None:
    before = store.describe(30).restore_cost
    assert before > 1
    assert parsed("compact", store.url, "--max-cost", 1)["changed"] == [20, 30]
    assert store.describe(30).restore_cost == 1
    good("gc", store.url)
    assert difference(store.load(30), state(30)) == ""


def test_copy(store: sp.Store, tmp_path: Path) -> None:
    store.tag("best", 20)
    good("copy", store.url, tmp_path / "other", "--step", 20)
    other = sp.Store(tmp_path / "other")
    assert (other.steps(), other.tags()) == ([20], {"best": 20})
    assert difference(other.load(20), state(20)) == ""
    assert parsed("copy", store.url, tmp_path / "other")["steps"] == [10, 20, 30]
    other.save(40, state(4))
    bad(2, "step 50 is not in", "copy", store.url, tmp_path / "x", "--step", 50)


# --- output files ---


def test_an_output_is_whole_or_not_there(tmp_path: Path) -> None:
    def halfway(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def halfway_folder(path: Path) -> None:
        path.mkdir()
        halfway(path / "x")

    (tmp_path / "old").write_bytes(b"old")
    for name, force in (("new", False), ("old", True)):
        with pytest.raises(OSError, match="No space"):
            write_file(tmp_path / name, force, halfway)
        with pytest.raises(OSError, match="No space"):
            write_folder(tmp_path / name, force, halfway_folder)
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_bytes() == b"old"


@pytest.mark.parametrize("kind", ["pt", "safetensors", "dcp", "spt"])
def test_a_full_disk_is_told_plainly(kind: str, tmp_path: Path) -> None:
    """A full disk gives an error of one line in every format."""
    sp.Store(tmp_path / "store").save(1, {"weight": torch.zeros(1 << 20)})
    save_pt({"weight": torch.randint(1 << 40, (1 << 18,))}, tmp_path / "a.pt")
    restored = ("restore", tmp_path / "store", tmp_path / "out", "--to", kind)
    words = ("compress", tmp_path / "a.pt", tmp_path / "out.spt") if kind == "spt" else restored
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        code, out, err = run(*words)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (code, out) == (1, ""), err
    # Rust's and DCP's libraries do not say what the system said.
    why = "File too large" if kind in ("pt", "spt") else "(File too large|could not be written)"
    assert re.fullmatch(rf"shrinkpoint: .*{why}.*\n", err)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "store"]


def test_an_output_that_appears_meanwhile_is_left_alone(tmp_path: Path) -> None:
    def meanwhile(path: Path) -> None:
        path.write_bytes(b"ours")
        (tmp_path / "x").write_bytes(b"theirs")

    with pytest.raises(sp.BadArgumentError, match="--force"):
        write_file(tmp_path / "x", False, meanwhile)
    assert (tmp_path / "x").read_bytes() == b"theirs"

    def meanwhile_folder(path: Path) -> None:
        path.mkdir()
        (tmp_path / "y").mkdir()

    with pytest.raises(sp.BadArgumentError, match="--force"):
        write_folder(tmp_path / "y", False, meanwhile_folder)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("at", [1, 2])
def test_an_interrupt_between_the_names_loses_neither(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt between two renames loses neither file."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("precious")
    real, calls = os.rename, []

    def rename(source: Any, target: Any) -> None:
        real(source, target)
        calls.append(target)
        if len(calls) == at:
            raise KeyboardInterrupt

    def write(path: Path) -> None:
        path.mkdir()
        (path / "new").write_text("new")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "out", True, write)
    kept = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*"))
    assert kept == ["out", "out/old" if at == 1 else "out/new"]


def test_a_full_disk_is_told_with_the_name(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as told:
        write_file(tmp_path / "report.html", False, full)
    assert told.value.filename == str(tmp_path / "report.html")


def test_force_replaces_files_and_folders(store: sp.Store, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    good("restore", store.url, out, "--to", "dcp", "--force")
    (out / "x").write_text("x")
    good("restore", store.url, out, "--to", "dcp", "--force")
    assert not (out / "x").exists()
    assert load_state(out)["step"] == 30
    good("restore", store.url, tmp_path / "sub" / "deep" / "o.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "store", "sub"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("restore store store --to dcp", "store is also the input"),
        ("restore link store/../store --to dcp", "store is also the input"),
        ("restore store . --to dcp", "contains the input .*store"),
        ("restore store/data .. --to dcp", "contains the input .*data"),
        ("restore a.spt a.spt --to pt", "a.spt is also the input"),
        ("restore d.spt a.spt --parent a.spt --to pt", "a.spt is also the input"),
        ("restore a.spt store --to dcp", "store is a store, and --force does not replace it"),
        ("restore a.spt notes --to dcp", "notes is not a DCP folder, and --force does not replace it"),
        ("restore a.spt notes --to pt", "notes is a folder, and --force does not replace it"),
        ("restore a.spt pipe --to pt", "pipe is neither a file nor a folder, and --force does not replace it"),
        ("compress notes/a.pt pipe.spt", "pipe.spt is neither a file nor a folder, and --force does not replace it"),
    ],
)
def test_force_replaces_nothing_that_is_read_and_no_other_folder(
    words: str, says: str, store: sp.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = sp.compress(state())
    Path("a.spt").write_bytes(base.to_bytes())
    Path("d.spt").write_bytes(sp.compress(state(), base).to_bytes())
    Path("link").symlink_to("store")
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("mine")
    save_pt(state(), Path("notes/a.pt"))
    for name in ("pipe", "pipe.spt"):
        os.mkfifo(name)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    bad(2, says, *words.split(), "--force")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert Path("pipe").is_fifo()
    assert store.verify() == {}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex128])
def test_dtypes_that_safetensors_does_not_have(dtype: torch.dtype, tmp_path: Path) -> None:
    (tmp_path / "a.spt").write_bytes(sp.compress({"m": {"c": torch.ones(3).to(dtype)}}).to_bytes())
    bad(1, f"m/c: safetensors has no {dtype}; use --to pt", "restore", tmp_path / "a.spt", tmp_path / "a.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.spt"]


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_safetensors_does_not_have(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.spt").write_bytes(sp.compress({name: torch.ones(3)}).to_bytes())
    bad(2, "safetensors does not allow the array name", "restore", tmp_path / "a.spt", tmp_path / "a.safetensors")
    good("restore", tmp_path / "a.spt", tmp_path / "a.pt")
    assert torch.equal(load_state(tmp_path / "a.pt")[name], torch.ones(3))


def test_negative_metrics_and_tags_in_copies(store: sp.Store, tmp_path: Path) -> None:
    good("rate", store.url, 30, "-3.5")
    assert store.describe(30).metric == -3.5
    code, _, err = run("rate", store.url, 30, "-3.5", "--jsno")
    assert code == 2
    assert "--jsno" in err
    good("tag", store.url, "best", 20)
    good("copy", store.url, tmp_path / "copy", "--step", "best")
    assert sp.Store(tmp_path / "copy").steps() == [20]
    bad(2, "no tag|not in", "copy", store.url, tmp_path / "copy", "--step", "worst")


def test_a_copy_repairs_what_is_damaged_if_asked(store: sp.Store, tmp_path: Path) -> None:
    good("copy", store.url, tmp_path / "good")
    (file,) = Path(store.url).glob("data/000000000030-*")
    data = bytearray(file.read_bytes())
    data[400] ^= 1
    file.write_bytes(data)
    good("copy", tmp_path / "good", store.url)
    assert list(sp.Store(store.url).verify()) == [30]
    good("copy", tmp_path / "good", store.url, "--repair")
    assert sp.Store(store.url).verify() == {}


# --- the real thing ---


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "w.safetensors")
    done = shell("compress", "w.safetensors", "run", "--step", 1, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ratio"] > 1
    assert "nothing says what these arrays are" in done.stderr  # a name alone is no evidence
    wrong = shell("restore", "run", "w.safetensors", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "shrinkpoint: w.safetensors exists; use --force to replace it\n"


def test_ctrl_c_is_130(tmp_path: Path) -> None:
    """Ctrl-C while a file is read gives exit code 130."""
    torch.save({"weight": torch.zeros(3)}, tmp_path / "a.pt")
    os.mkfifo(tmp_path / "config.json")
    command = [sys.executable, "-m", "shrinkpoint", "compress", "a.pt", "o.spt", "--config", "config.json"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where the tests run in a shell's background it is ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    # The pipe has a writer as soon as the command has opened it.
    writer = os.open(tmp_path / "config.json", os.O_WRONLY)
    try:
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        os.close(writer)
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not (tmp_path / "o.spt").exists()


def test_a_reader_that_has_had_enough_is_no_error(store: sp.Store) -> None:
    command = [sys.executable, "-m", "shrinkpoint", "ls", store.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-"])
@pytest.mark.parametrize("words", ["verify", "gc", "ls"])
def test_a_closed_stream_changes_no_exit_status(closed: str, words: str, store: sp.Store) -> None:
    """Commands succeed with closed standard streams, as under cron."""
    command = f"{shlex.quote(sys.executable)} -m shrinkpoint {words} {shlex.quote(store.url)} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def on_terminal(*words: object) -> tuple[int, str, bytes]:
    """Run a command with a terminal as standard error.

    Returns exit code, standard output, and the bytes that the terminal received.
    """
    import pty

    main, side = pty.openpty()
    command = [sys.executable, "-m", "shrinkpoint", *map(str, words)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=side, text=True, env=environment)
    os.close(side)
    shown = b""
    while True:
        try:
            part = os.read(main, 4096)
        except OSError:  # the other side has been closed
            break
        if not part:
            break
        shown += part
    out, _ = process.communicate(timeout=60)
    os.close(main)
    return process.returncode, out, shown


def test_a_terminal_gets_a_progress_bar(store: sp.Store) -> None:
    code, out, shown = on_terminal("verify", store.url)
    assert code == 0
    assert out == "3 checkpoints checked, 0 not intact\n"
    assert b"3/3" in shown
    assert b"\x1b[" in shown


def test_shell_completion() -> None:
    environment = {
        **os.environ,
        "_SHRINKPOINT_COMPLETE": "complete_bash",
        "COMP_WORDS": "shrinkpoint ver",
        "COMP_CWORD": "1",
    }
    code = "import sys; sys.argv = ['shrinkpoint']; from shrinkpoint.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["verify"], done.stderr
    assert "--install-completion" in good("--help")


def test_every_command_has_help_and_is_documented() -> None:
    names = sorted(c.name or c.callback.__name__ for c in app.registered_commands if c.callback is not None)
    assert {"demo", "info", "ls", "verify", "restore", "compress", "diff", "compact", "gc", "report", "bench"} <= set(
        names
    )
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    for name in names:
        assert f"`{name}" in page
        if name != "bench":
            out = good(name, "--help")
            assert "--json" in out


def test_help_of_every_command_is_quick() -> None:
    """`--help` imports none of torch, Numba, Matplotlib and fsspec."""
    code = (
        "import sys, shrinkpoint.__main__ as m\n"
        "for name in ('compress', 'restore', 'info', 'report', 'gc'):\n"
        "    sys.argv = ['shrinkpoint', name, '--help']\n"
        "    try: m.main()\n    except SystemExit: pass\n"
        "assert not {'torch', 'numba', 'rich.progress', 'matplotlib', 'fsspec', 'safetensors'} & set(sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_an_internal_error_has_a_code_and_a_message_of_its_own(tmp_path: Path) -> None:
    """A fault of the program is not reported as damaged data."""
    save_pt(weights(), tmp_path / "a.pt")
    code = (
        "import sys, shrinkpoint.codec.compress as c, shrinkpoint.__main__ as m\n"
        "def compress(*given, **named): raise AttributeError('no attribute \\x1b[31m')\n"
        "c.compress = compress\n"
        f"sys.argv = ['shrinkpoint', 'compress', {str(tmp_path / 'a.pt')!r}, {str(tmp_path / 'o.spt')!r}]\n"
        "m.main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 70
    assert ran.stdout == ""
    last = ran.stderr.splitlines()[-1]
    assert last.startswith(
        r"shrinkpoint: this is a fault of shrinkpoint, the data is intact: AttributeError: no attribute"
    )
    assert "\x1b" not in last
    assert "in compress" in ran.stderr
    assert not (tmp_path / "o.spt").exists()


def test_warming_compiles_once_and_leaves_nothing_behind() -> None:
    """`warm` compiles each function once and leaves no files."""
    files = fsspec.filesystem("memory")
    before = files.find("/")
    said = [good("warm", "--preset", "lossless") for _ in range(2)]
    assert re.fullmatch(r"(\d+ of \d+ kernels compiled in \d+ s|all \d+ kernels are compiled)\n", said[0])
    assert re.fullmatch(r"all \d+ kernels are compiled\n", said[1])
    assert files.find("/") == before
    bad(2, "--preset is 'none'; it must be one of default, ", "warm", "--preset", "none")
