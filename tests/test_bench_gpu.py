"""Rehearsal of `python -m bench gpu` without a GPU.

Triton's interpreter runs the kernels on torch's CPU tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shrinkpoint.bench import data, harness, kernels
from shrinkpoint.bench import gpu as bench_gpu
from shrinkpoint.bench.__main__ import main
from shrinkpoint.bench.harness import Device, Options, Row, is_red, measure, wall_clock
from shrinkpoint.bench.kernels.place import Place
from shrinkpoint.codec.parallel import set_threads
from shrinkpoint.kernels.backend.arrays import is_torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the bench itself runs on a GPU")
SIZE = 6000
LEFT_OUT = ("quantize a state", "copy to new memory", "100 exact codebooks", "500 tensors", "row_kmeans")
"""Rows that are plain copies, or take minutes in the interpreter; so do those of adaptive rows."""


class Rehearsal(Device):
    """A device whose arrays are torch tensors, as a GPU's, on the host."""

    def array(self, x: Any) -> Any:
        return torch.from_numpy(x.copy())

    def copy(self, nbytes: int, target: Any = None) -> Any:
        return harness.cpu().copy(nbytes, target)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Device:
    for name, module in list(sys.modules.items()):
        if name.startswith("shrinkpoint.") and hasattr(module, "on_gpu"):
            monkeypatch.setattr(module, "on_gpu", is_torch)
    monkeypatch.setattr(harness, "MOST_ROUNDS", 1)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda x: x)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 20))
    set_threads(1)  # Triton's interpreter runs one kernel at a time
    monkeypatch.setattr(harness, "repetitions", lambda call, clock: 1)
    return Rehearsal("gpu, rehearsed", True, wall_clock)


def test_every_row_of_a_kernel_is_checked_and_timed(card: Device) -> None:
    place = Place(card, data.Sample(SIZE), SIZE)
    cases = [case for case in kernels.cases(place) if not case.row.startswith(LEFT_OUT)]
    assert len(cases) > 40
    for case in cases:
        if "adaptive" in case.row:
            continue
        rows = measure(case, Options(rounds=2), wall_clock)
        assert not any(is_red(row) for row in rows), rows[0].note
        assert rows[0].value is not None, rows[0].note


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, calls = tmp_path / "gpu.json", list[str]()

    def found(options: Options) -> list[Row]:
        def make(name: str) -> Any:
            def job() -> harness.Job:
                calls.append(name)
                if name == "second" and len(calls) == 2:
                    raise KeyboardInterrupt
                return harness.Job(lambda: None, lambda: "nothing", 1.0, [])

            return job

        cases = [harness.Case(name, 1, "ms", make(name)) for name in ("first", "second")]
        return harness.run_cases(cases, options, wall_clock)

    monkeypatch.setattr(bench_gpu, "run", found)
    assert main(["gpu", "--json", str(out)]) == 130
    assert [row["row"] for row in json.loads(out.read_text())["rows"]] == ["first"]
    assert main(["gpu", "--json", str(out)]) == 0
    assert calls == ["first", "second", "second"]
    assert [row["row"] for row in json.loads(out.read_text())["rows"]] == ["first", "second"]
    out.unlink()
    assert main(["gpu", "--json", str(out), "--minutes", "1e-9"]) == 0
    assert {row["note"] for row in json.loads(out.read_text())["rows"]} == {"not measured: the time was up"}


@pytest.mark.parametrize("config", ["default", "inshrinkerator", "default, coded there"])
def test_states_are_trained_checked_and_counted(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = data.trained_gpt(data.SMALL, "cpu")
    assert pair.parameters > 100_000
    here = Device("as if it were a gpu", False, wall_clock)
    monkeypatch.setattr(bench_gpu, "gpu", lambda: here)
    rows = bench_gpu.rows(pair, "small", Options(rounds=2), (config,)) + bench_gpu.stall(pair, "small", Options())
    assert [row.row.split(",")[0] for row in rows] == [
        *(["compress base from a GPU"] * 2),
        *(["compress delta from a GPU"] * 2),
        "stall of Saver.save from a GPU",
    ]
    assert all(row.value is not None and not is_red(row) for row in rows), rows
