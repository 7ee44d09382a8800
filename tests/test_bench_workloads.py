"""Trainings of the benches on a device, and the large one in a small form on the CPU."""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench.devices import threads
from shrinkpoint.bench.harness import Options, Row
from shrinkpoint.bench.studies import endurance, faults, large, training, workloads
from shrinkpoint.bench.studies.faults import InStore, Uncompressed, endure, uninterrupted
from shrinkpoint.bench.studies.workloads import Run, State, Workload
from shrinkpoint.codec.compress import compress_inputs
from shrinkpoint.codec.inputs import Inputs
from shrinkpoint.store import session

SPACING = 2
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def tiny(steps: int = 400) -> Workload:
    """Return the large workload with small numbers and less held-out data."""
    made = workloads.gpt_large(layers=1, width=32, heads=2, context=32, batch=2, steps=steps)
    return dataclasses.replace(made, held_out=lambda: made.held_out()[:20])


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor))


def test_parameters_are_counted_without_making_them() -> None:
    for make in workloads.WORKLOADS.values():
        assert make().parameters == sum(p.numel() for p in make().model().parameters())
    assert workloads.gpt_large().parameters >= 100_000_000


def test_a_run_is_where_its_workload_says_or_where_it_is_told() -> None:
    workload = dataclasses.replace(tiny(), device="meta")
    assert Run(workload, 0).device.type == "meta"
    assert {p.device.type for p in Run(workload, 0).model.parameters()} == {"meta"}
    assert Run(workload, 0, device="cpu").device.type == "cpu"
    assert Run(tiny(), 0).device.type == "cpu"


def test_batches_follow_the_model() -> None:
    seen = []

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch.device.type)
        return torch.zeros(())

    Run(dataclasses.replace(tiny(), loss=loss, half=False), 0, device="meta").loss(torch.zeros(2, 3))
    assert seen == ["meta"]


def test_half_precision_is_of_the_forward_pass_alone() -> None:
    with threads(1):
        half, full = Run(tiny(), 0), Run(dataclasses.replace(tiny(), half=False), 0)
        for run in (half, full):
            run.train(3)
    losses = [run.held_out_loss() for run in (half, full)]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
    assert {x.dtype for x in tensors(half.state())} == {torch.float32}


def test_deterministic_algorithms_are_asked_for_on_a_gpu_alone_and_given_back() -> None:
    with workloads.deterministic(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    with workloads.deterministic(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert not settings.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert settings.fill_uninitialized_memory == fill


def test_the_same_run_again_ends_the_same() -> None:
    with threads(1):
        first, second = (uninterrupted(tiny(8), 0) for _ in range(2))
        assert first == second
        assert first != uninterrupted(tiny(8), 1)


# ---------------------------------------------------------------------------------------------------- its schedule


def test_what_a_schedule_takes() -> None:
    pace = large.Pace(0.5, {"a": 2.0, "b": 4.0}, {"a": 3.0, "b": 7.0})
    steps = 3 * 100 + 2 * (2 * 10 + 3) * 20  # two trainings and the uninterrupted one, rework and warm-up
    assert pace.seconds(100, 10, 20) == pytest.approx(0.5 * steps + (5 + 3) * 6.0 + 11 * 10.0)


@pytest.mark.parametrize("seconds", [0.0, 500.0, 700.0, 5000.0, 1e6])
def test_the_schedule_is_the_longest_that_fits(seconds: float) -> None:
    pace = large.Pace(0.1, {"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 1.0})
    steps = pace.steps(seconds, 10, 20, 4000)
    assert steps % 20 == 0
    assert 0 <= steps <= 4000
    assert steps == 0 or pace.seconds(steps, 10, 20) <= seconds
    assert steps == 4000 or pace.seconds(steps + 20, 10, 20) > seconds


class Slow(Uncompressed):
    """A system whose calls take a second of the test's clock, and the first calls a hundred."""

    def __init__(self, clock: list[float]) -> None:
        super().__init__()
        self.clock, self.saves, self.restores = clock, 0, 0

    def save(self, run: Run) -> faults.Size:
        self.saves += 1
        self.clock[0] += 100.0 if self.saves == 1 else 1.0
        return super().save(run)

    def restore(self) -> State:
        self.restores += 1
        self.clock[0] += 100.0 if self.restores == 1 else 2.0
        return super().restore()


def test_what_is_compiled_at_first_use_is_not_timed() -> None:
    clock = [0.0]
    with threads(1):
        found = large.pace(tiny(), {"slow": lambda _: Slow(clock)}, SPACING, lambda: clock[0])
    assert found == large.Pace(0.0, {"slow": 1.0}, {"slow": 2.0})


# ---------------------------------------------------------------------------------------------------- its rows


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> endurance.Study:
    """Return a study of two systems on the CPU."""
    monkeypatch.setattr(large, "device", lambda: "cpu")
    return endurance.Study(1, ("default", "no compression"), spacing=SPACING)


def named(rows: list[Row]) -> dict[str, Row]:
    return {row.row: row for row in rows}


def test_rows_of_a_large_training(study: endurance.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large.Pace, "steps", lambda *_: 24)
    rows = named(large.of_workload(tiny(), Options(), study))
    exact = rows["GPT large, 10 failures, no compression: degradation at the end"]
    assert (exact.value, exact.device, exact.size) == (0.0, "cpu, 1 thread", tiny().parameters)
    assert "24 steps, a checkpoint every 2" in exact.note
    ratio = rows["GPT large, 10 failures, default: whole state, all checkpoints"]
    assert ratio.value is not None
    assert ratio.value > 4
    for column, _, _ in endurance.COLUMNS:
        assert rows[f"GPT large, 10 failures, default: {column}"].value is not None
    assert rows["GPT large, 10 failures: whole state at <= 0.5 % degradation"].met in (True, False)


def test_the_limit_decides_how_long_the_schedule_is(study: endurance.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def steps(self: large.Pace, seconds: float, failures: int, spacing: int, most: int) -> int:
        asked.append((seconds, failures, spacing, most))
        return 20

    monkeypatch.setattr(large.Pace, "steps", steps)
    monkeypatch.setattr(large, "measured", lambda *_: [])
    large.of_workload(tiny(), Options(minutes=2.0), study)
    ((seconds, *rest),) = asked
    assert 30 < seconds <= 0.85 * 120
    assert rest == [10, SPACING, 400]


def test_what_the_time_does_not_suffice_for_says_so(study: endurance.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    found = named(large.of_workload(tiny(), Options(minutes=1e-6), study))
    row = found["GPT large, 10 failures, default: degradation at the end"]
    assert (row.value, row.met) == (None, None)
    assert row.note.startswith("not measured: 1e-06 minutes suffice for 0 steps, too few for 10 failures")

    monkeypatch.setattr(large.Pace, "steps", lambda *_: 24)
    ticks = itertools.count()
    monkeypatch.setattr(large, "time", types.SimpleNamespace(monotonic=lambda: 30.0 * next(ticks), perf_counter=float))
    found = named(large.of_workload(tiny(), Options(minutes=1.1), study))
    assert found["GPT large, 10 failures, default: degradation at the end"].value is not None
    late = found["GPT large, 10 failures, no compression: degradation at the end"]
    assert (late.value, late.note) == (None, "not measured: the limit of 1.1 minutes was over")


@NO_GPU
def test_without_a_gpu_there_is_a_row_that_says_so() -> None:
    rows = training.run(Options(only="GPT large"))
    assert {(row.device, row.value, row.met, row.note) for row in rows} == {("gpu", None, None, "not measured: no GPU")}
    assert {row.size for row in rows} == {workloads.gpt_large().parameters}
    assert any(row.target == ">= 80 x" for row in rows)
    assert large.rows(Options(quick=True)) == []


def test_every_system_of_it_is_one_of_the_bench() -> None:
    assert large.STUDY.systems is not None
    assert set(large.STUDY.systems) <= set(endurance.SYSTEMS | endurance.RARE_BASES)


# ---------------------------------------------------------------------------------------------------- on a GPU


def devices_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch, device: str) -> tuple[set[str], set[str]]:
    """Return the devices of a checkpoint's matrices in the codec, and after a restore."""
    stored: list[Any] = []

    def noted(inputs: Inputs, *rest: Any, **named: Any) -> sp.Checkpoint:
        stored.append({x.device.type for x in tensors([n.value for n in inputs.arrays]) if x.ndim >= 2})
        return compress_inputs(inputs, *rest, **named)

    monkeypatch.setattr(session, "compress_inputs", noted)
    workload = dataclasses.replace(tiny(), device=device)
    system, run = InStore(sp.Config()), Run(workload, 0)
    system.begin(run)
    try:
        run.train(3)
        system.save(run)
        again = Run(workload, 0)
        again.restore(system.restore())
        again.train(4)
    finally:
        system.end()
    return stored[0], {x.device.type for x in tensors(again.state()) if x.ndim >= 2}


def test_a_checkpoint_comes_from_its_device_and_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_of_a_checkpoint(monkeypatch, "cpu") == ({"cpu"}, {"cpu"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_checkpoint_comes_from_the_gpu_and_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices_of_a_checkpoint(monkeypatch, "cuda") == ({"cuda"}, {"cuda"})
    workload = dataclasses.replace(tiny(24), device="cuda")
    exact = uninterrupted(workload, 0)
    assert exact == uninterrupted(workload, 0)
    found = endure(workload, 0, InStore(sp.presets.lossless()), failures=2, exact=exact, spacing=SPACING)
    assert (found.degradation, found.at_restore) == (0.0, 0.0)
    assert workload.where.startswith("gpu, ")
