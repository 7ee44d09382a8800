"""Devices of kernels: one CPU thread or the GPU, the copy that is the floor, and a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .harness import Clock, Peer, Target, cuda_clock, one_thread_clock

Array = Any
FLOORS = ("memcpy", "device copy")
"""The copy on the CPU, and on a GPU."""


@dataclass(frozen=True)
class Device:
    """A place to measure.

    Args:
        name: as in the table.
        gpu: whether arrays are CUDA tensors (else NumPy arrays).
        clock: how to time.
        missing: why nothing can be measured on it here, or "".
    """

    name: str
    gpu: bool
    clock: Clock
    missing: str = ""

    @property
    def floor(self) -> str:
        """Name of the copy every row is held against."""
        return FLOORS[self.gpu]

    def array(self, x: npt.NDArray[Any]) -> Array:
        """x on this device: a NumPy array as it is, or a CUDA tensor."""
        if not self.gpu:
            return x
        import torch

        return torch.from_numpy(x).cuda()

    def copy(self, nbytes: int, target: Target | None = None) -> Peer:
        """Peer that copies so many bytes, from and to memory that is mapped already: the floor."""
        return Peer(self.floor, lambda: self._copy(nbytes), amount=float(nbytes), target=target)

    def _copy(self, nbytes: int) -> Callable[[], object]:
        if self.gpu:
            import torch

            source = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
            into = torch.empty_like(source)
            return lambda: into.copy_(source)
        origin = np.ones(nbytes, np.uint8)
        place = np.ones(nbytes, np.uint8)
        return lambda: np.copyto(place, origin)


def cpu() -> Device:
    """The processor, restricted to one thread."""
    return Device("cpu, 1 thread", False, one_thread_clock())


def gpu() -> Device:
    """The current CUDA device, or a device on which nothing is measured."""
    import torch

    if not torch.cuda.is_available():
        return Device("gpu", True, cuda_clock, "no GPU")
    return Device(f"gpu, {torch.cuda.get_device_name()}", True, cuda_clock)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Bound the threads of this library, torch, and the pools that threadpoolctl knows."""
    import torch

    import shrinkpoint as sp

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    sp.set_threads(count)
    try:
        with _pools(count):
            yield
    finally:
        sp.set_threads(None)
        torch.set_num_threads(before)


@contextmanager
def _pools(count: int) -> Iterator[None]:
    try:
        from threadpoolctl import threadpool_limits  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        yield
        return
    with threadpool_limits(limits=count):
        yield
