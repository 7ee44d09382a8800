"""`try`: its figures are those of the codec, its advice works, and it writes nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import shrinkpoint as sp
from shrinkpoint.commands import trials
from shrinkpoint.commands.outputs import size
from shrinkpoint.commands.trials import measure
from shrinkpoint.kernels.backend import dispatch

from .test_cli import bad, good, on_terminal, parsed, run, state, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")
LEVELS: dict[str, Callable[[], sp.Config]] = {
    "lossless": sp.presets.lossless,
    "exact_weights": sp.presets.exact_weights,
    "precise": sp.presets.precise,
    "default": sp.Config,
    "compact": sp.presets.compact,
}
PACKAGES = [name for name, module in (("zstd", "zstandard"), ("zipnn", "zipnn")) if importlib.util.find_spec(module)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with checkpoints, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(dispatch, "PATIENCE", dispatch.PATIENCE)
    for step in (1, 2):
        torch.save(state(step), tmp_path / f"step_{step}.pt")
    save_file(weights(), tmp_path / "weights.safetensors")
    return tmp_path


def rows(*words: object) -> dict[str, dict[str, Any]]:
    return {row["level"]: row for row in parsed("try", *words)["levels"]}


def relative(old: torch.Tensor, new: torch.Tensor) -> float:
    return float((new - old).double().norm() / old.double().norm())


def test_figures_are_those_of_the_codec() -> None:
    found, before, after = rows("step_1.pt", "step_2.pt"), state(1), state(2)
    assert list(found) == [*LEVELS, *PACKAGES]
    for name, level in LEVELS.items():
        ckpt = sp.compress(before, cfg=level())
        restored = sp.decompress(ckpt)
        entries = [tree["optimizer"]["state"][0] for tree in (before, restored)]
        row = found[name]
        assert (row["nbytes"], row["ratio"]) == (ckpt.nbytes, ckpt.ratio)
        assert row["weight_error"] == pytest.approx(
            relative(before["model"]["fc.weight"], restored["model"]["fc.weight"]), rel=1e-4
        )
        assert row["moment_error"] == pytest.approx(
            max(relative(entries[0][key], entries[1][key]) for key in ("exp_avg", "exp_avg_sq")), rel=1e-4
        )
        delta = sp.compress(after, ckpt, level())
        assert (row["delta_nbytes"], row["delta_ratio"]) == (delta.nbytes, delta.ratio)
        assert row["compress_seconds"] > 0 < row["restore_seconds"]
        assert row["peak_nbytes"] is None or row["peak_nbytes"] >= 0
    assert found["lossless"]["moment_error"] == 0 == found["exact_weights"]["weight_error"]
    assert found["exact_weights"]["moment_error"] > 0 < found["default"]["weight_error"]
    assert found["zstd"]["ratio"] == pytest.approx(found["lossless"]["ratio"], rel=0.5)
    assert found["zstd"]["delta_nbytes"] is None


def test_nothing_is_written(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    good("try", "step_1.pt", "step_2.pt")
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (120, 1)])
def test_the_table_fits_the_terminal(width: int, tables: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = good("try", "step_1.pt", "step_2.pt").splitlines()
    assert sum(line.startswith("level ") for line in lines) == tables
    assert all(len(line) <= width for line in lines if not line.startswith("command line"))
    (default,) = [line for line in lines if line.startswith("default")][:1]
    assert default.split()[1:3] == size(sp.compress(state()).nbytes).split()
    assert sum(line.startswith("zstd") for line in lines) == 1


def test_what_stays_exact_takes_three_lines() -> None:
    lines = good("try", "step_1.pt").splitlines()
    start = next(i for i, line in enumerate(lines) if "exact at the default level" in line)
    end = lines.index("", start)
    assert end - start <= 4
    assert lines[start + 1].endswith("bias")
    exact = [row for row in sp.compress(state()).summary() if row.measure == "exact" and row.raw_bytes]
    assert sum(int(line.split()[2]) for line in lines[start + 1 : end]) == len(exact)
    found = parsed("try", "step_1.pt")["exact"]
    assert sum(reason["arrays"] for reason in found) == len(exact)
    assert found[0]["share"] == pytest.approx(64 * 4 / sp.compress(state()).raw_nbytes)


@pytest.mark.no_evidence
def test_a_file_without_an_optimizer_gains_nothing_and_says_what_helps() -> None:
    found = parsed("try", "weights.safetensors")
    sizes = [row["nbytes"] for row in found["levels"][:4]]
    assert max(sizes) - min(sizes) < 100
    assert found["levels"][0]["moment_error"] is None
    said = found["advice"]
    assert said[0].startswith("Nothing is gained by the lossy levels: all arrays are exact")
    assert "optimizer's state in the same checkpoint" in said[1]
    assert "--config FILE.json" in said[1]
    assert "presets.lossless()" in found["calls"]["Python"][1]
    suggested = re.search(r"cfg=(sp\.Config\(.*?\)\]\))", said[1])
    assert suggested is not None
    cfg = eval(suggested[1], {"sp": sp})
    assert [row.path for row in sp.compress(weights(), cfg=cfg).summary() if row.measure != "exact"] == ["fc.weight"]
    Path("rule.json").write_text(json.dumps(cfg.to_json()))
    assert parsed("compress", "weights.safetensors", "w.spt", "--config", "rule.json")["worst_errors"]
    assert "Nothing is gained" in good("try", "weights.safetensors")


def test_an_optimizer_that_fits_no_parameter_needs_kinds() -> None:
    changed = state()
    changed["model"]["more.weight"] = torch.randn(48, 64)
    changed["optimizer"]["state"][0] |= {"exp_avg": torch.randn(48, 64), "exp_avg_sq": torch.rand(48, 64)}
    torch.save(changed, "two.pt")
    said = " ".join(parsed("try", "two.pt")["advice"])
    assert "More could be gained: nothing says what" in said
    assert "kinds=sp.kinds(model, optimizer)" in said
    assert "same checkpoint" not in said


def test_checkpoints_that_are_not_near_each_other() -> None:
    torch.manual_seed(1)
    for name in ("one", "other"):
        torch.save({"model": {"fc.weight": torch.randn(256, 256)}}, f"{name}.pt")
    assert "not near each other" in " ".join(parsed("try", "one.pt", "other.pt")["advice"])
    assert not parsed("try", "step_1.pt", "step_1.pt")["advice"]


def test_folders(folder: Path) -> None:
    """DCP, a model's safetensors, and what Transformers' Trainer saves, are read."""
    whole = rows("step_1.pt")["default"]["nbytes"]
    dcp.save(state(), checkpoint_id=folder / "dcp", no_dist=True)
    assert rows("dcp")["default"]["nbytes"] == pytest.approx(whole, rel=0.05)
    model = folder / "checkpoint-1"
    model.mkdir()
    (model / "config.json").write_text("{}")
    for name, tensor in weights().items():
        save_file({name: tensor}, model / f"{name}.safetensors")
    found = parsed("try", model)
    assert found["raw_nbytes"] == sum(tensor.nbytes for tensor in weights().values())
    run_lines(found["calls"]["Python"])
    assert sp.load_pretrained(f"{model}-small").keys() == weights().keys()
    torch.save(state()["optimizer"], model / "optimizer.pt")
    found = parsed("try", model)
    assert found["levels"][2]["weight_error"] > 0 < found["levels"][2]["moment_error"]
    assert "CompressCallback(sp.presets.exact_weights())" in found["calls"]["Python"][-1]


def run_lines(lines: list[str], **names: Any) -> None:
    exec("\n".join(lines), names)


def test_the_lines_to_paste_work(folder: Path) -> None:
    calls = parsed("try", "step_1.pt", "step_2.pt")["calls"]
    (words,) = map(shlex.split, calls["command line"])
    good(*words[1:])
    run_lines(calls["Python"], step=3, state=state())
    assert sp.Store("run").steps() == [1, 2, 3]
    os.rename("step_1.pt", "a file.pt")
    (words,) = map(shlex.split, parsed("try", "a file.pt")["calls"]["command line"])
    good(*words[1:])
    assert parsed("info", "a file.spt")["ratio"] == rows("a file.pt")["exact_weights"]["ratio"]


def test_values_that_cannot_be_stored_are_left_out_and_named() -> None:
    torch.save(state() | {"config": {"device": torch.device("cpu"), "sizes": [1, torch.Size([2])], "lr": 0.1}}, "x.pt")
    found = parsed("try", "x.pt")
    assert found["levels"][3]["nbytes"] == pytest.approx(rows("step_1.pt")["default"]["nbytes"], rel=0.1)
    assert "config/device: torch.device" in found["advice"][-1]
    assert "config/sizes/1: torch.Size" in found["advice"][-1]
    assert list(found["calls"]) == ["Python"]


def test_a_tuple_with_values_that_cannot_be_stored() -> None:
    torch.save((state()["model"], torch.device("cpu"), (torch.ones(3), torch.eye(3).to_sparse())), "x.pt")
    found = parsed("try", "x.pt")
    assert found["arrays"] == len(state()["model"]) + 1
    assert "1: torch.device" in found["advice"][-1]
    assert "2/1: " in found["advice"][-1]


def test_a_folder_of_shards(folder: Path) -> None:
    """An index names all shards; checkpoints in folders below are others."""
    model = folder / "model"
    (model / "checkpoint-1").mkdir(parents=True)
    names = {name: f"{number}.safetensors" for number, name in enumerate(weights())}
    for name, file in names.items():
        save_file({name: weights()[name]}, model / file)
    save_file(weights(), model / "checkpoint-1" / "model.safetensors")
    for index in (model / "model.safetensors.index.json", model / "checkpoint-1" / "model.safetensors.index.json"):
        index.write_text(json.dumps({"weight_map": names}))
    assert parsed("try", model)["arrays"] == len(names)
    (model / "0.safetensors").unlink()
    bad(1, r"model: 0\.safetensors is missing, which an index", "try", model)
    save_file(weights(), model / "1.safetensors")
    save_file(weights(), model / "0.safetensors")
    bad(2, "is in several files; choose one of them", "try", model)


# --- --eval ---

METRICS = """
print("the module prints")
def norm(state):
    print("the function prints")
    state["model"]["fc.weight"] += 1
    return state["model"]["fc.weight"].norm().requires_grad_()
def fails(state):
    return state["missing"]
def text(state):
    return "much"
def leaves(state):
    raise SystemExit(0)
number = 3
"""


@pytest.fixture
def metrics(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current folder."""
    (folder / "metrics_of_try.py").write_text(METRICS)
    (folder / "broken_of_try.py").write_text("import json\n1 / 0\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "metrics_of_try", None)
    del sys.modules["metrics_of_try"]
    return "metrics_of_try"


def test_eval_measures_each_restored_state(metrics: str) -> None:
    assert "eval" not in rows("step_1.pt")["default"]
    assert os.getcwd() not in sys.path
    code, out, err = run("try", "step_1.pt", "--eval", f"{metrics}:norm", "--json")
    assert code == 0
    assert err.count("the function prints") == len(LEVELS)
    found = {row["level"]: row for row in json.loads(out)["levels"]}
    for name, level in LEVELS.items():
        restored = sp.decompress(sp.compress(state(), cfg=level()))["model"]["fc.weight"]
        assert found[name]["eval"] == pytest.approx(float((restored + 1).norm()))
    assert found["zstd"]["eval"] is None
    assert found["default"]["weight_error"] < 0.2
    header = next(line for line in good("try", "step_1.pt", "--eval", f"{metrics}:norm").splitlines() if "eval" in line)
    assert header.startswith("level")


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("metrics_of_try:fails", r"failed on the state restored from lossless: KeyError: 'missing' \(.*, line 8\)"),
        ("metrics_of_try:leaves", "failed on the state restored from lossless: SystemExit: 0"),
        ("metrics_of_try:text", "returned str; it must be a number"),
        ("metrics_of_try:none", "has no function 'none'"),
        ("metrics_of_try:number", "has int, not a function, 'number'"),
        (
            "broken_of_try:norm",
            r"cannot be imported: ZeroDivisionError: division by zero \(.*broken_of_try.py, line 2\)",
        ),
        ("missing_of_try:norm", "cannot be imported: ModuleNotFoundError: No module named 'missing_of_try'"),
        ("metrics_of_try", "must be module:function"),
        (":norm", "must be module:function"),
    ],
)
def test_eval_that_does_not_work(function: str, says: str, metrics: str) -> None:
    code, out, err = run("try", "step_1.pt", "--eval", function)
    assert (code, out) == (2, "")
    assert re.search(says, err.splitlines()[-1])


# --- what cannot be read ---


def test_other_files(folder: Path) -> None:
    (folder / "empty").mkdir()
    data = (folder / "step_1.pt").read_bytes()
    (folder / "cut.pt").write_bytes(data[: len(data) // 2])
    (folder / "flipped.safetensors").write_bytes(b"\xff" * 100)
    torch.save({"step": 1}, "plain.pt")
    (folder / "x.spt").write_bytes(sp.compress(state()).to_bytes())
    sp.Store("store").save(1, weights())
    bad(1, "empty: is not a folder of torch.distributed.checkpoint", "try", "empty")
    bad(1, "store: is a store", "try", "store")
    bad(1, "x.spt: cannot be read: a checkpoint file of shrinkpoint: `shrinkpoint restore`", "try", "x.spt")
    bad(1, "cut.pt: cannot be read: the file is truncated", "try", "cut.pt")
    bad(1, "flipped.safetensors: ", "try", "flipped.safetensors")
    bad(1, r"step_3.pt: No such file or directory; did you mean 'step_2.pt'\?", "try", "step_1.pt", "step_3.pt")
    bad(2, "plain.pt: it has no arrays", "try", "plain.pt")


# --- measuring ---


def test_a_bar_on_a_terminal_only() -> None:
    assert run("try", "step_1.pt")[2] == ""
    code, out, shown = on_terminal("try", "step_1.pt")
    assert code == 0
    assert out.startswith("step_1.pt: ")
    assert f"/{len(LEVELS) + len(PACKAGES)}".encode() in shown


def test_a_call_that_compiles_is_measured_again() -> None:
    import numba

    @numba.njit
    def double(x: int) -> int:
        return 2 * x

    calls: list[int] = []

    def call() -> int:
        calls.append(1)
        return int(double(len(calls)))

    result, usage = measure(call)
    assert result == 4
    assert usage.seconds < 0.05
    assert measure(call)[0] == 6


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="Linux measures the peak")
def test_the_peak_counts_memory_that_was_freed() -> None:
    peak = measure(lambda: torch.ones(1 << 24).sum())[1].peak_nbytes
    assert peak is not None
    assert 0.95 * (1 << 26) <= peak < 1.5 * (1 << 26)


def test_no_peak_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_RESET", "/proc/none")
    assert rows("step_1.pt")["default"]["peak_nbytes"] is None
    assert "n/a" in good("try", "step_1.pt")
