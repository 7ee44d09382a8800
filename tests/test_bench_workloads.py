"""Trainings of the benches on a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.bench.devices import threads
from shrinkpoint.bench.studies import workloads
from shrinkpoint.bench.studies.faults import InStore, end_of, endure
from shrinkpoint.bench.studies.workloads import Run, Workload
from shrinkpoint.codec.compress import compress_inputs
from shrinkpoint.codec.inputs import Inputs
from shrinkpoint.store import session

SPACING = 2
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def tiny(steps: int = 400) -> Workload:
    """Return the GPT with small numbers and less held-out data."""
    made = workloads.gpt(layers=1, width=32, heads=2, steps=steps)
    return dataclasses.replace(made, held_out=lambda: made.held_out()[:20])


def tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor))


def test_parameters_are_counted_without_making_them() -> None:
    for make in workloads.WORKLOADS.values():
        assert make().parameters == sum(p.numel() for p in make().model().parameters())


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

    Run(dataclasses.replace(tiny(), loss=loss), 0, device="meta").loss(torch.zeros(2, 3))
    assert seen == ["meta"]


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
        first, second = (end_of(tiny(8), 0) for _ in range(2))
        assert first == second
        assert first != end_of(tiny(8), 1)


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
    exact = end_of(workload, 0)
    assert exact == end_of(workload, 0)
    found = endure(workload, 0, InStore(sp.presets.lossless()), failures=2, exact=exact.loss, spacing=SPACING)
    assert (found.degradation, found.at_restore) == (0.0, 0.0)
    assert workload.where.startswith("gpu, ")
