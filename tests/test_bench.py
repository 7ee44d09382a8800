"""Benchmarks run and report rows of one form; a wrong result gets no speed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench import codec, data, kernels, peers, whole_states
from shrinkpoint.bench import gpu as bench_gpu
from shrinkpoint.bench.__main__ import BENCHMARKS, main, result
from shrinkpoint.bench.evidence import speeds
from shrinkpoint.bench.harness import (
    Case,
    CheckFailed,
    Device,
    Job,
    Options,
    Peer,
    Row,
    at_least,
    at_most,
    better,
    interleave,
    is_red,
    measure,
    not_measured,
    same,
    wall_clock,
)
from shrinkpoint.bench.kernels import codebooks
from shrinkpoint.bench.kernels.place import Place

KEYS = ["row", "device", "size", "value", "unit", "peer", "peer_value", "ratio", "target", "met", "note"]


def job(check: Any = lambda: "a check", peers: tuple[Peer, ...] = (), amount: float = 1e6) -> Job:
    return Job(lambda: sum(range(2000)), check, amount, list(peers))


def peer(name: str, call: Any = lambda: sum(range(1000)), **more: Any) -> Peer:
    return Peer(name, lambda: call, **more)


def case(made: Job, **more: Any) -> Case:
    return Case("a row", 1000, more.pop("unit", "GB/s"), lambda: made, **more)


def test_quick_rows_and_json_have_the_agreed_shape(tmp_path: Path) -> None:
    out, picture = tmp_path / "rows.json", tmp_path / "rows.png"
    only = "joint_counts,rans_encode,500 tensors: log"
    assert main(["kernels", "--quick", "--only", only, "--json", str(out), "--plot", str(picture)]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["machine", "versions", "commit", "run", "rows"]
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["versions"]["numpy"] == np.__version__
    assert all(list(row) == KEYS for row in found["rows"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    here = {row["row"]: row for row in found["rows"] if row["peer"] == "memcpy"}
    assert set(here) == {
        "joint_counts",
        "assign + joint_counts",
        "rans_encode conditional",
        "500 tensors: log_histogram",
    }
    for row in found["rows"]:
        if row["value"] is not None and row["peer_value"] is not None:
            assert row["ratio"] == pytest.approx(row["value"] / row["peer_value"])
        assert row["met"] is None or row["target"] is not None
        assert row["device"] != "cpu, 1 thread" or "checked: " in row["note"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_its_rows_are_there_and_open() -> None:
    rows = [row for row in kernels.run(Options(quick=True, only="|g w|,one launch")) if row.device.startswith("gpu")]
    assert len(rows) == 2
    assert all(row.value is None and row.met is None and row.note == "not measured: no GPU" for row in rows)
    assert rows[1].target == "<= 5 ms"


def test_every_target_of_the_plan_has_a_row() -> None:
    at = Place(Device("cpu, 1 thread", False, wall_clock), data.Sample(1000), 1000)
    found = {c.row: c.target.text(c.unit) for c in kernels.cases(at) if c.target is not None}
    assert found == {
        "log_histogram": ">= 0.7 x",
        "assign": ">= 0.55 x",
        "assign + joint_counts": ">= 0.3 x",
        "split_by_level": ">= 0.45 x",
        "merge_by_level": ">= 0.45 x",
        "huffman_encode": ">= 0.85 Gsym/s",
        "huffman_decode": ">= 1.4 Gsym/s",
        "rans_encode conditional": ">= 0.5 Gsym/s",
        "rans_decode conditional": ">= 0.4 Gsym/s",
        "end to end encode": ">= 0.7 GB/s",
        "end to end decode": ">= 1.3 GB/s",
        "exact codebook K = 32": "<= 3 ms",
    }


def test_every_kernel_has_a_row_and_a_test() -> None:
    rows = {codebooks.LOSS}
    for name in ("cpu, 1 thread", "gpu"):
        device = Device(name, name == "gpu", wall_clock, "no GPU")
        rows |= {c.row for c in kernels.cases(Place(device, data.Sample(1000), 1000))}
    named = speeds.functions()
    without = (*speeds.SCALAR, *speeds.IN_STATES)
    assert {speeds.ROWS.get(name, name) for name in named if name not in without} <= rows
    assert set(speeds.ROWS) | set(without) <= set(named)
    lines = speeds.kernels().splitlines()[2:]
    assert len(lines) == len(named)
    assert all("[test]" in line for line in lines)


def test_a_table_gets_no_speed_if_it_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    at = Place(Device("cpu, 1 thread", False, wall_clock), data.Sample(5000), 5000)
    tables = [found for found in kernels.cases(at) if found.unit == "us"]
    assert len(tables) == 18
    for found in tables:
        name = found.row
        module = import_module(f"shrinkpoint.kernels.{speeds.functions()[name]}")
        right = getattr(module, name)
        with monkeypatch.context() as patched:
            patched.setattr(module, name, lambda *arguments, right=right: other(right(*arguments)))
            assert all(is_red(row) and row.value is None for row in measure(found, Options(), wall_clock)), name
        assert found.make().check()


def other(result: Any) -> Any:
    """Return a different result of the same type."""
    if isinstance(result, bytes):
        return bytes([result[0] ^ 1]) + result[1:]
    if isinstance(result, tuple):
        return tuple(other(part) for part in result)
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        changed = {
            f.name: other(v) for f in dataclasses.fields(result) if isinstance(v := getattr(result, f.name), np.ndarray)
        }
        return dataclasses.replace(result, **changed)
    if isinstance(result, np.ndarray):
        return np.roll(result, 1, axis=None)
    return result + 1


@pytest.mark.parametrize("row", ["assign", "rans_decode conditional"])
def test_a_wrong_kernel_gets_no_speed(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, name = ("quantizer", "assign") if row == "assign" else ("rans", "rans_decode")
    module = __import__(f"shrinkpoint.kernels.{subject}", fromlist=[name])
    right = getattr(module, name)

    def wrong(*arguments: Any, **named: Any) -> Any:
        out = right(*arguments, **named).copy()
        out[out.size // 3 % 1000] ^= 1
        return out

    monkeypatch.setattr(module, name, wrong)
    at = Place(Device("cpu, 1 thread", False, wall_clock), data.Sample(5000), 5000)
    (found,) = [c for c in kernels.cases(at) if c.row == row]
    rows = measure(found, Options(), wall_clock)
    assert all(is_red(r) and r.value is None and r.ratio is None and r.peer_value is None for r in rows)
    assert [r.met for r in rows if r.target] == [False]
    assert "elements differ" in rows[0].note


def test_a_red_check_makes_the_command_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def red() -> str:
        raise CheckFailed("three is not four")

    rows = measure(case(job(red), target=at_least(1), peers=("memcpy",)), Options(), wall_clock)
    monkeypatch.setattr(kernels, "run", lambda _: rows)
    assert main(["kernels"]) == 1
    said = capsys.readouterr().out
    assert "WRONG" in said
    assert "three is not four" in said


def test_peers_and_targets() -> None:
    def broken() -> Any:
        raise ImportError("No module named 'nothing'", name="nothing")

    def failing() -> Any:
        raise ValueError("no such argument")

    peers = (
        peer("memcpy"),
        Peer("missing", broken),
        peer("failing", failing),
        peer("slow", lambda: sum(range(20000)), amount=1e3, target=at_least(2), note="on a part"),
    )
    rows = measure(case(job(peers=peers), target=at_least(100), peers=("memcpy",)), Options(), wall_clock)
    assert [row.peer for row in rows] == ["memcpy", "missing", "failing", "slow"]
    assert rows[0].met is False
    assert rows[0].target == ">= 100 x"
    assert rows[1].note.startswith("not measured: nothing is not installed")
    assert rows[2].note.startswith("not measured: ValueError: no such argument")
    assert rows[1].peer_value is rows[1].ratio is rows[1].met is None
    assert rows[3].met is True
    assert "on a part" in rows[3].note
    assert len({row.value for row in rows}) == 1


def test_a_kernel_that_is_not_there_is_not_measured() -> None:
    def make() -> Job:
        raise ImportError("No module named 'shrinkpoint.kernels.later'")

    (row,) = measure(Case("later", 1, "GB/s", make, target=at_least(1)), Options(), wall_clock)
    assert (row.value, row.met) == (None, None)
    assert row.note.startswith("not measured: ")


def test_ratio_counts_how_many_times_better() -> None:
    assert better("GB/s", 6.0, 2.0) == 3.0
    assert better("ms", 2.0, 6.0) == 3.0
    assert at_most(3.0).met(2.9, None) is True
    assert at_most(3.0).met(None, None) is None
    assert at_least(0.7).met(None, 0.69) is False
    assert (at_least(0.7).text("GB/s"), at_most(3.0).text("ms")) == (">= 0.7 x", "<= 3 ms")


def test_at_least_five_rounds_in_turn() -> None:
    order: list[str] = []
    calls = {name: ((lambda name=name: order.append(name)), times) for name, times in (("a", 1), ("b", 2))}
    timings = interleave(calls, clock=wall_clock, budget=0.0)
    assert all(len(t.seconds) == 5 for t in timings.values())
    assert order == list("abb" * 5)
    assert timings["a"].spread >= 0


def test_same_sees_a_flipped_bit() -> None:
    x = np.array([0.0, 1.0])
    same("x", (x, 3), (x.copy(), 3))
    same("x", torch.from_numpy(x), x)
    for other in (np.array([-0.0, 1.0]), x.astype(np.float32), x[:1]):
        with pytest.raises(CheckFailed):
            same("x", x, other)


def test_unknown_names_list_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["nothing"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in BENCHMARKS)


def test_help_and_both_commands() -> None:
    for command in (["-m", "shrinkpoint.bench"], ["-m", "shrinkpoint", "bench"]):
        done = subprocess.run([sys.executable, *command, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert all(name in done.stdout for name in BENCHMARKS)
    done = subprocess.run([sys.executable, "-m", "shrinkpoint", "bench", "nothing"], capture_output=True, check=False)
    assert done.returncode == 2


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_word_that_no_row_has_is_an_error(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A word of `--only` without rows is an error that lists the names, and writes no results."""
    out = tmp_path / "rows.json"
    assert main([name, "--quick", "--only", "nonsense", "--json", str(out)]) == 2
    said = capsys.readouterr()
    assert "no row for 'nonsense' with --quick" in said.err
    names = [line.strip() for line in said.err.splitlines() if line.startswith("  ")]
    assert names
    assert "nonsense" not in " ".join(names)
    assert not said.out
    assert not out.exists()


def test_words_of_which_one_is_strange(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An unknown word of `--only` does not keep the rows of other words from being measured."""
    out = tmp_path / "rows.json"
    assert main(["systems", "--quick", "--only", "by changed values, nonsense", "--json", str(out)]) == 2
    assert "no row for 'nonsense'" in capsys.readouterr().err
    assert json.loads(out.read_text())["rows"]


def pair() -> data.Pair:
    """A small training state and the next one."""
    w = data.weights(1 << 16)
    states = []
    for x in (w, data.drifted(w)):
        weight = torch.from_numpy(x.reshape(256, 256).copy())
        moments = {"step": torch.tensor(3.0), "exp_avg": 0.1 * weight, "exp_avg_sq": weight.square()}
        states.append({"model": {"weight": weight}, "optimizer": {"state": {0: moments}}})
    return data.Pair(states[0], states[1], "a test")


def test_a_drawn_state_keeps_what_changed_between_the_two() -> None:
    small = pair()
    large = data.drawn_state(small, 300_000)
    assert large.parameters == pytest.approx(300_000, rel=0.3)
    before, after = (dict(data.arrays(state)) for state in (large.before, large.after))
    assert list(before) == list(after)
    source, moved = (dict(data.arrays(state))["model/weight"].reshape(-1) for state in (small.before, small.after))
    name = "model/blocks.0.mlp.up.weight"
    assert before[name].std() == pytest.approx(source.std(), rel=0.2)
    assert (after[name] - before[name]).std() == pytest.approx((moved - source).std(), rel=0.2)
    assert np.unique(before[name]).size > 0.99 * before[name].size
    still = data.drawn_state(data.Pair(small.before, small.before, "the same twice"), 300_000)
    same("weights", dict(data.arrays(still.after))[name], dict(data.arrays(still.before))[name])
    assert before["optimizer/state/2/exp_avg"].shape == before["model/blocks.0.attention.query_key_value.weight"].shape


@pytest.mark.parametrize("config", list(codec.CONFIGS))
def test_codec_rows(config: str) -> None:
    peers = {"base": ("zstd -1", "torch.save"), "delta": ("zstd -1",)}
    target = at_least(800, "value")
    plan = codec.Plan("test", pair, config, peers=peers, targets={("compress", "base", "memcpy"): target})
    rows = [row for c in plan.cases() for row in measure(c, Options(), wall_clock)]
    names = [f"{direction} {kind}" for kind in ("base", "delta") for direction in ("compress", "decompress")]
    found: dict[str, list[str | None]] = {name: [] for name in names}
    for row in rows:
        found[row.row.split(",")[0]].append(row.peer)
    assert list(found) == names
    assert [found[name] for name in names] == [
        ["memcpy", *peers["base"]],
        ["memcpy", "memcpy, fresh", *peers["base"]],
        ["memcpy", *peers["delta"]],
        ["memcpy", "memcpy, fresh", *peers["delta"]],
    ]
    assert all(row.value and row.peer_value and not is_red(row) for row in rows)
    assert [(row.row, row.peer, row.target) for row in rows if row.target] == [
        (f"compress base, {config}, test", "memcpy", ">= 800 MB/s")
    ]
    base, delta = plan.ratios(lambda _: True)
    assert (base.row, base.peer, delta.peer) == (f"size of the base, {config}, test", "zstd -1", "zstd -1")
    assert base.value
    assert base.peer_value
    assert base.ratio == base.value / base.peer_value
    assert f"ratio {base.value:.2f}" in rows[0].note


def _unused() -> data.Pair:
    raise AssertionError("a state is made before a row needs it")


def test_plans_hold_every_level_of_every_state_and_the_default_on_two_threads() -> None:
    found = codec.plans(_unused, codec.trained_states(Options()), quick=False)
    states = {plan.label for plan in found}
    assert {"GPT", "ViT", "ResNet-18", "192 matrices 256 x 256", "400 layers 64 x 64", "LoRA rank 16"} == states
    for state in states:
        plans = [(p.config, p.threads) for p in found if p.label == state]
        assert {(config, 1) for config in codec.CONFIGS} | {("default", 2)} <= set(plans)
        exact = next(p for p in found if (p.label, p.config, p.threads) == (state, "lossless", 1))
        assert {"zstd -1", "zipnn", "blosc2", "pcodec", "OpenZL"} <= set(exact.peers["base"])


@pytest.mark.parametrize("name", ["ViT", "ResNet-18"])
def test_models_that_see_are_trained(name: str) -> None:
    found = data.seeing(name, quick=True)
    before, after = (dict(data.arrays(state)) for state in (found.before, found.after))
    assert list(before) == list(after)
    moved = [path for path in before if data.role_of(path) and not np.array_equal(before[path], after[path])]
    assert {data.role_of(path) for path in moved} == {"weight", "exp_avg", "exp_avg_sq"}
    assert any(path.endswith("running_var") for path in before) is (name == "ResNet-18")


def test_a_coder_that_loses_a_bit_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = peers.Coder(lambda x: x.tobytes(), lambda stored: bytes(len(stored)))
    monkeypatch.setattr(peers, "CODERS", {**peers.CODERS, "lossy": lambda _: lossy})
    x = np.arange(300, dtype=np.float32)
    with pytest.raises(CheckFailed, match="lossy: other bytes come back"):
        peers.coded_size("lossy", [x])
    (row,) = measure(case(job(peers=tuple(peers.coder_peers([x], ["lossy"])))), Options(), wall_clock)
    assert row.peer_value is None
    assert "other bytes come back" in row.note


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # zipnn's import
@pytest.mark.parametrize("name", list(peers.CODERS))
@pytest.mark.parametrize("dtype", ["float32", "uint16", "int64", "uint8"])
def test_coders_of_other_libraries_return_the_bytes(name: str, dtype: str) -> None:
    x = (np.random.default_rng(0).standard_normal(3000) * 50).astype(dtype)
    try:
        assert 0 < peers.coded_size(name, [x, x[:7]]) < 3 * x.nbytes
    except ImportError as error:
        pytest.skip(str(error))


def test_file_peers_are_checked_and_their_files_counted() -> None:
    plan = codec.Plan("test", pair, "lossless", ways=("decompress",), kinds=("base",), peers={"base": ("safetensors",)})
    (row,) = plan.ratios(lambda _: True)
    assert row.peer_value == pytest.approx(1.0, rel=0.01)
    rows = [row for c in plan.cases() for row in measure(c, Options(), wall_clock)]
    assert [row.peer for row in rows if row.peer_value] == ["memcpy", "memcpy, fresh", "safetensors"]


def test_exact_coding_is_timed_both_ways_in_both_formats() -> None:
    rows = codec.run(Options(quick=True, only="float32 weights,bfloat16 weights"))
    timed = [row for row in rows if "size of" not in row.row]
    assert len({row.row for row in timed}) == 8
    for row in rows:
        assert row.device == "cpu, 1 thread"
        assert row.value is not None
        assert not is_red(row)
    assert all("arrays exact" in row.note for row in timed)
    assert {row.peer for row in timed} == {"memcpy", "memcpy, fresh", "torch.save", "zipnn"}
    targets = {(row.row.split(",")[0], row.peer): row.target for row in rows if row.target}
    assert targets == {
        ("compress base", "zipnn"): ">= 1 x",
        ("decompress base", "zipnn"): ">= 1 x",
        ("compress delta", "memcpy"): ">= 500 MB/s",
        ("decompress delta", "memcpy"): ">= 800 MB/s",
    }
    ratio = {row.row: row.value for row in rows if row.row.startswith("size of")}
    for dtype in ("float32", "bfloat16"):
        alone, step = (ratio[f"size of the {kind}, lossless, {dtype} weights"] for kind in ("base", "delta"))
        assert alone is not None
        assert step is not None
        assert 1 < alone < step


GPU_ROWS = [f"compress {kind} from a GPU, default, test" for kind in ("base", "delta")]


def test_states_of_a_gpu_are_held_against_copies_on_it_and_to_the_host() -> None:
    here = Device("as if it were a gpu", False, wall_clock)
    rows = [row for case in bench_gpu.cases(here, pair(), "test") for row in measure(case, Options(), wall_clock)]
    assert [row.row for row in rows] == [name for name in GPU_ROWS for _ in range(2)]
    for row in rows:
        assert row.value is not None
        assert row.peer_value is not None
        assert "within the stated error, same bytes again" in row.note
    assert [row.peer for row in rows] == 2 * ["memcpy", "copy to the host"]
    base, delta = (float(rows[i].note.partition("ratio ")[2].split(",")[0]) for i in (0, 2))
    assert delta > base


def test_without_a_gpu_its_states_have_rows_that_say_so() -> None:
    card = Device("gpu", True, wall_clock, "no GPU")
    rows = [row for case in bench_gpu.cases(card, pair(), "test") for row in not_measured(case, case.missing)]
    assert [row.row for row in rows] == [name for name in GPU_ROWS for _ in range(2)]
    assert {(row.device, row.value, row.note) for row in rows} == {("gpu", None, "not measured: no GPU")}


def test_a_state_that_breaks_its_bound_gets_no_speed_on_a_gpu_either(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: Any) -> str:
        raise CheckFailed("an array is not exact")

    monkeypatch.setattr(whole_states, "check_errors", wrong)
    case = bench_gpu.cases(Device("gpu", False, wall_clock), pair(), "test")[0]
    assert all(is_red(row) and row.value is None for row in measure(case, Options(), wall_clock))


def test_a_codec_that_breaks_its_bound_gets_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sp.decompress

    def wrong(*arguments: Any) -> Any:
        state = right(*arguments)
        state["model"]["weight"][0, 0] += 1.0
        return state

    monkeypatch.setattr(sp, "decompress", wrong)
    for config in codec.CONFIGS:
        plan = codec.Plan("test", pair, config, kinds=("base",))
        rows = [row for c in plan.cases() for row in measure(c, Options(), wall_clock)]
        assert all(is_red(row) and row.value is None for row in rows), config


def test_rows_become_plain_json() -> None:
    row = Row("a", "cpu", 1, 1.0, "GB/s", None, None, None, None, None, "")
    again = json.loads(json.dumps(result([row])))
    assert again["rows"] == [dataclasses.asdict(row)]
