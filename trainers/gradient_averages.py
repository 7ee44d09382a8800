"""Running averages of gradients on the host, also sharded; the copies from the device."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..codec.state.leaves import is_sharded, local_part

_EVERY = 16
"""Number of gradients from one search for values that are not finite to the next; a search after each gradient would
double the cost of averaging."""


class Average:
    """The running averages of one parameter's gradient, on the host.

    `batches` gradients are in them; `newest` is the number of batches that were done after the last of these. An
    element that is not finite would stay so: it is reset to zero, and is counted in `not_finite`.
    """

    def __init__(self, parameter: Tensor, squares: bool) -> None:
        local = local_part(parameter.detach())
        dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
        self.mean = torch.zeros(local.shape, dtype=dtype)
        self.square = torch.zeros(local.shape, dtype=dtype) if squares else None
        self.batches = self.newest = self.not_finite = 0
        self.pinned: Tensor | None = None
        self.pending: Future[None] | None = None
        self._like = parameter if is_sharded(parameter) else None

    def add(self, gradient: Tensor, beta: float, scale: float, batch: int) -> None:
        """Add the gradient of one more batch.

        Args:
            gradient: on the host, multiplied by `scale`.
            beta: weight of it.
            scale: factor that it was multiplied by.
            batch: its number, from 0.
        """
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        gradient = gradient.to(self.mean.dtype)
        if scale != 1.0:
            gradient = gradient / scale
        self.mean.lerp_(gradient, beta)
        if self.square is not None:
            self.square.lerp_(gradient * gradient, beta)
        self.batches += 1
        self.newest = batch + 1
        if self.batches % _EVERY == 0:
            self.mend()

    def mend(self) -> None:
        """Reset the elements that are not finite."""
        for values in (self.mean, self.square):
            # The sum takes one pass without memory. If it is not finite, which large values may cause, search again.
            if values is not None and not math.isfinite(float(values.sum())):
                bad = ~values.isfinite()
                self.not_finite += int(bad.sum())
                values[bad] = 0

    @property
    def is_sharded(self) -> bool:
        """Return whether this process has only a part of the parameter."""
        return self._like is not None

    def read(self, which: str) -> Tensor:
        """Return a copy of `mean` or `square`, sharded as the parameter, on the host."""
        self.mend()
        found: Tensor = getattr(self, which).clone()
        if self._like is None:
            return found
        from .gradient_averages import on_host

        return on_host(found, self._like)


class Transfer:
    """Worker that adds gradients to averages, on a GPU without stopping the training.

    On a GPU a gradient is copied to pinned memory on a separate stream, without the host waiting, and a thread computes
    the average once the copy is complete. Each parameter has one pinned buffer, so the host waits only if the last
    gradient of a parameter is not averaged yet, which happens if averaging takes longer than a training step.
    """

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._futures: list[Future[None]] = []
        self._copied: list[tuple[Any, Any]] = []
        self._streams: dict[Any, Any] = {}

    def fold(
        self, pairs: Sequence[tuple[Average, Tensor]], beta: float, scale: Any, skipped: Any, batch: int = 0
    ) -> None:
        """Add a batch's gradients to their averages."""
        on_host = [(a, g) for a, g in pairs if g.device.type != "cuda"]
        on_gpu = [(a, g) for a, g in pairs if g.device.type == "cuda"]
        if on_host:
            self._average([(a, g.cpu()) for a, g in on_host], beta, scale, skipped, batch)
        if on_gpu:
            for future in dict.fromkeys(a.pending for a, _ in on_gpu if a.pending is not None):
                future.result()  # the contents of the pinned memory must have been read
            work = [self._copy(d, on_gpu, scale, skipped) for d in dict.fromkeys(g.device for _, g in on_gpu)]
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="sensitivity")
            future = self._thread.submit(self._average_copied, work, beta, batch)
            for average, _ in on_gpu:
                average.pending = future
            self._futures = [*(one for one in self._futures if not one.done() or one.exception()), future]

    def _copy(self, device: Any, pairs: Sequence[tuple[Average, Tensor]], scale: Any, skipped: Any) -> tuple[Any, ...]:
        """Start copying the gradients on one device to pinned memory, on a separate stream."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        copied = []
        with torch.cuda.stream(stream):
            for average, gradient in pairs:
                if gradient.device != device:
                    continue
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                if average.pinned is None or average.pinned.dtype != dense.dtype:
                    average.pinned = torch.empty(dense.shape, dtype=dense.dtype, pin_memory=True)
                average.pinned.copy_(dense, non_blocking=True)
                dense.record_stream(stream)
                copied.append((average, average.pinned))
            small = [None if t is None else _pinned_copy(t) for t in (scale, skipped)]
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        self._copied.append((device, done))
        return done, copied, *small

    def hold_back(self) -> None:
        """Let the device wait until the gradients are copied; the host does not wait.

        To be called before the optimizer steps, for some write into the gradients: SGD with Nesterov's momentum, fused
        ones as they unscale under AMP, hooks that clip.
        """
        for device, done in self._copied:
            torch.cuda.current_stream(device).wait_event(done)
        self._copied.clear()

    def _average_copied(self, work: Sequence[tuple[Any, ...]], beta: float, batch: int) -> None:
        """Wait for the copies in the thread, then average."""
        with torch.no_grad():
            for done, copied, scale, skipped in work:
                done.synchronize()
                self._average(copied, beta, scale, skipped, batch)

    def _average(
        self, pairs: Sequence[tuple[Average, Tensor]], beta: float, scale: Any, skipped: Any, batch: int
    ) -> None:
        """Add gradients on the host to their averages, unless AMP skips the step."""
        if skipped is not None and float(skipped) > 0:
            return
        factor = 1.0 if scale is None else float(scale)
        for average, gradient in pairs:
            average.add(gradient, beta, factor, batch)

    def wait(self) -> None:
        """Wait until all gradients handed over are in the averages."""
        futures, self._futures = self._futures, []
        for future in futures:
            future.result()

    def close(self) -> None:
        """Wait for all gradients, and end the thread."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def gradient_of(parameter: Any) -> Any:
    """Return this process's part of a parameter's gradient, or None.

    Under tensor parallelism that of a replicated parameter may still be one term of a sum, which no optimizer can use.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    gradient = gradient.detach()
    if not is_sharded(gradient):
        return gradient
    if any(place.is_partial() for place in gradient.placements):
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def _pinned_copy(value: Tensor) -> Tensor:
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return copy.copy_(value, non_blocking=True)


def on_host(local: Tensor, like: Any) -> DTensor:
    """Return a DTensor laid out as another one, with its local part on the CPU.

    When it is gathered, it is moved through the device of its mesh, which an ordinary DTensor refuses. So a model's
    gradient averages take device memory only for one tensor at a time, when `compress` gathers it.
    """
    meta = TensorMeta(like.shape, like.stride(), local.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    make: Any = DTensor
    found: Any = make(local, spec, requires_grad=False)
    found.full_tensor = functools.partial(_whole, local, spec)
    return found  # type: ignore[no-any-return]


def _whole(local: Tensor, spec: DTensorSpec, *, grad_placements: Any = None) -> Tensor:
    """Gather the whole tensor on the device of the mesh; a collective."""
    there = DTensor.from_local(
        local.to(spec.mesh.device_type),
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=spec.shape,
        stride=spec.stride,
    )
    return there.full_tensor(grad_placements=grad_placements)
