"""Stand-in for a GPU whose streams do their work as late as CUDA's rules allow.

Nothing that is put on a stream happens before somebody waits for it, and each stream alone is in order. So what reads
without waiting for an event reads what was there before, and a stream that was not told to wait overtakes another.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

DEVICE, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)


class Stream:
    """A queue of a device's work that is done, in order, only by `run`."""

    def __init__(self, gpu: Gpu, device: torch.device = DEVICE) -> None:
        self.gpu, self.work, self.done, self.device = gpu, list[Callable[[], object]](), 0, device

    def put(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def run(self, until: int | None = None) -> None:
        """Do the queued work up to a point."""
        if not self.gpu.lock.acquire(timeout=20):
            raise TimeoutError("the device stands still")
        try:
            while self.done < (len(self.work) if until is None else until):
                self.done += 1
                self.work[self.done - 1]()
        finally:
            self.gpu.lock.release()

    def wait_stream(self, other: Stream) -> None:
        until = len(other.work)
        self.put(lambda: other.run(until))

    def wait_event(self, event: Event) -> None:
        self.put(event.synchronize)


class Event:
    """A point of a stream."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.until = 0

    def record(self, stream: Stream) -> None:
        self.stream, self.until = stream, len(stream.work)

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.run(self.until)


class OnGpu(torch.Tensor):
    """Values in a device's memory; copies from it are work of the device's current stream."""

    gpu: Gpu
    device = DEVICE

    def record_stream(self, stream: Any) -> None:
        self.gpu.recorded.append(stream)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            target, source = args
            assert kwargs == {"non_blocking": True}
            assert target.data_ptr() in cls.gpu.pinned
            with torch._C.DisableTorchFunctionSubclass():
                values = source.as_subclass(torch.Tensor)
            cls.gpu.current[source.device].put(lambda: target.copy_(values))
            return target
        return super().__torch_function__(function, types, args, kwargs or {})


class OnOther(OnGpu):
    """Values in the memory of the second device."""

    device = OTHER


class Gpu:
    """Two devices; `main` is the stream of the training on the first."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.current = {device: Stream(self, device) for device in (DEVICE, OTHER)}
        self.main = self.current[DEVICE]
        self.pinned: dict[int, Tensor] = {}
        self.recorded: list[Stream] = []

    def tensor(self, values: Tensor, device: torch.device = DEVICE) -> Any:
        """Move values to a device's memory."""
        return values.clone().as_subclass(OnGpu if device == DEVICE else OnOther)

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current[stream.device] = self.current[stream.device], stream
        yield
        self.current[stream.device] = before

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace `torch.cuda`; pinned memory holds NaN until it is written."""
        real = torch.empty

        def empty(*args: Any, pin_memory: bool = False, **named: Any) -> Tensor:
            out: Tensor = real(*args, **named)
            if pin_memory:
                self.pinned[out.fill_(torch.nan).data_ptr()] = out
            return out

        OnGpu.gpu = self
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(self, device))
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", self.current.__getitem__)
