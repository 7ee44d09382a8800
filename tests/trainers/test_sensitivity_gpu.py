"""The gradient tracker on a GPU or a stand-in: asynchronous copies and averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shrinkpoint as sp
from shrinkpoint.trainers.sensitivity import SensitivityWarning

from .fake_cuda import OTHER, Gpu, Stream
from .test_sensitivity import Grads, average, close

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    found.install(monkeypatch)
    return found


class Overwriting(torch.optim.SGD):
    """An SGD that overwrites the gradients on the device's stream."""

    def __init__(self, model: nn.Module, gpu: Gpu) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.gpu = gpu

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.gpu.main.put(lambda memory=p.grad: memory.fill_(1e9))


def backward(model: nn.Module, gpu: Gpu, seed: int) -> Grads:
    """Set gradients that the device writes later, in memory with NaN until then."""
    torch.manual_seed(seed)
    used = {}
    for name, p in model.named_parameters():
        values = torch.randn_like(p)
        memory = gpu.tensor(torch.full_like(p, torch.nan).detach())
        gpu.main.put(lambda memory=memory, values=values: memory.copy_from(values))
        p.grad = memory
        used[name] = values
    return used


def write(memory: Tensor, values: Tensor) -> None:
    memory.as_subclass(Tensor).copy_(values)


@pytest.fixture(autouse=True)
def _writing(monkeypatch: pytest.MonkeyPatch) -> None:
    from . import fake_cuda

    monkeypatch.setattr(fake_cuda.OnGpu, "copy_from", write, raising=False)


@pytest.mark.parametrize("ahead", [True, False], ids=["training runs ahead", "copies run ahead"])
def test_gradients_are_copied_before_the_step_and_averaged_after_the_copy(gpu: Gpu, ahead: bool) -> None:
    model = nn.Linear(4, 4)
    history = []
    with sp.SensitivityTracker(model, every=None, beta=0.5) as tracker:
        optimizer = Overwriting(model, gpu)
        for number in range(5):
            history.append(backward(model, gpu, number))
            optimizer.step()
            if ahead:
                gpu.main.run()
        found = tracker.grads()
    # Pinned memory holds NaN until it is written: everything was there when it was read.
    assert tracker.not_finite == 0
    assert tracker.recorded == 5
    assert close(found, average(history, 0.5))
    # One buffer a parameter for any number of batches, and no gradient's memory is used again too early.
    assert len(gpu.pinned) == 2
    assert len(gpu.recorded) == 10
    assert gpu.main not in gpu.recorded


def test_the_host_does_not_wait_for_the_device(gpu: Gpu) -> None:
    """The host waits for the device only before it uses a buffer again."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    ran: list[int] = []
    with sp.SensitivityTracker(nn.ModuleList([first, second]), every=None) as tracker:
        gpu.main.put(lambda: ran.append(1))
        for model in (first, second):
            optimizer = Overwriting(model, gpu)
            with gpu.lock:  # the device stands still: a wait for it fails after twenty seconds
                backward(model, gpu, 0)
                optimizer.step()
        assert tracker.recorded == 1
        assert ran == [1]


def test_under_amp_what_the_device_skips_is_left_out(gpu: Gpu) -> None:
    model = nn.Linear(4, 4)
    history = []
    with sp.SensitivityTracker(model, every=None) as tracker:
        optimizer: Any = Overwriting(model, gpu)
        for number in range(4):
            used = backward(model, gpu, number)
            optimizer.grad_scale = gpu.tensor(torch.tensor(8.0))
            optimizer.found_inf = gpu.tensor(torch.tensor(float(number == 1)))
            optimizer.step()
            if number != 1:
                history.append({n: g / 8 for n, g in used.items()})
        assert close(tracker.grads(), average(history, 0.9))
        assert (tracker.recorded, tracker.batch) == (3, 4)


def test_amp_on_another_device_is_waited_for(gpu: Gpu) -> None:
    """Gradients of a model on two devices are scaled by one tensor, which lies on one of them."""
    model = nn.Linear(4, 4)
    with sp.SensitivityTracker(model, every=None) as tracker:
        optimizer: Any = Overwriting(model, gpu)
        used = backward(model, gpu, 0)
        model.bias.grad = gpu.tensor(used["bias"], OTHER)
        optimizer.grad_scale, optimizer.found_inf = gpu.tensor(torch.tensor(8.0)), gpu.tensor(torch.tensor(0.0))
        optimizer.step()
        assert close(tracker.grads(), average([{n: g / 8 for n, g in used.items()}], 0.9))


def test_loops_without_an_optimizer(gpu: Gpu) -> None:
    model = nn.Linear(4, 4)
    with sp.SensitivityTracker(model, every=None) as tracker:
        used = backward(model, gpu, 0)
        for p in model.parameters():
            tracker._accumulated(p)
            gpu.main.put(lambda memory=p.grad: memory.fill_(1e9))
        gpu.main.run()
        assert close(tracker.grads(), average([used], 0.9))


def test_the_stand_in_notices_what_does_not_wait(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in detects a missing wait of the stream or of the thread."""
    from shrinkpoint.trainers.sensitivity import Transfer

    from . import fake_cuda

    model = nn.Linear(4, 4)
    used = backward(model, gpu, 0)
    with monkeypatch.context() as patch, sp.SensitivityTracker(model, every=None) as tracker:
        patch.setattr(Stream, "wait_event", lambda self, event: None)
        with gpu.lock:
            Overwriting(model, gpu).step()
            gpu.main.run()
        assert not close(tracker.grads(), average([used], 0.9))
    used = backward(model, gpu, 0)
    with monkeypatch.context() as patch, sp.SensitivityTracker(model, every=None) as tracker:
        patch.setattr(fake_cuda.Event, "synchronize", lambda self: None)
        patch.setattr(Transfer, "hold_back", lambda self: None)
        Overwriting(model, gpu).step()
        with pytest.warns(SensitivityWarning, match="20 elements"):
            tracker.grads()


# ---------------------------------------------------------------------------------------------------- on a GPU


def on_device(optimizer: Callable[[Any], Any], scaler: Any = None) -> tuple[Grads | None, list[Grads], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512)).cuda()
    made = optimizer(model.parameters())
    history = []
    with sp.SensitivityTracker(model, every=None) as tracker:
        for _ in range(6):
            made.zero_grad(set_to_none=False)
            loss = model(torch.randn(64, 512, device="cuda")).square().mean()
            factor = 1.0 if scaler is None else scaler.get_scale()
            (loss if scaler is None else scaler.scale(loss)).backward()
            history.append({n: p.grad.cpu() / factor for n, p in model.named_parameters() if p.grad is not None})
            if scaler is None:
                made.step()
            else:
                scaler.step(made)
                scaler.update()
        return tracker.grads(), history, tracker


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=needs_gpu) for n in ("nesterov", "fused", "fused under AMP", "AdamW")]
)
def test_averages_of_gradients_on_a_gpu(name: str) -> None:
    make: dict[str, Callable[[Any], Any]] = {
        "nesterov": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
        "fused": lambda p: torch.optim.AdamW(p, fused=True),
        "fused under AMP": lambda p: torch.optim.AdamW(p, fused=True),
        "AdamW": torch.optim.AdamW,
    }
    scaler = torch.amp.GradScaler("cuda") if "AMP" in name else None
    found, history, tracker = on_device(make[name], scaler)
    assert found is not None
    assert all(g.device.type == "cpu" for g in found.values())
    assert all(a.pinned is not None and a.pinned.is_pinned() for a in tracker._averages.values())
    assert close(found, average(history, 0.9))


@pytest.mark.parametrize("watched", [pytest.param(True, marks=needs_gpu)])
def test_no_device_memory_and_no_waiting_on_a_gpu(watched: bool) -> None:
    model = nn.Linear(2048, 2048).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def peak(batches: int) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(batches):
            optimizer.zero_grad()
            model(torch.ones(8, 2048, device="cuda")).sum().backward()
            torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    peak(3)
    alone = peak(5)
    with sp.SensitivityTracker(model, every=None) as tracker:
        assert peak(5) == alone
        assert tracker.recorded == 5
