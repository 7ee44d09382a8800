"""Sensitivity: an exponential average of the gradients of the batches before a checkpoint, kept on the host.

A gradient is read when the optimizer is about to step: then it is accumulated over micro-batches, averaged over
processes (DDP, FSDP2), unscaled (AMP) and clipped, and a step that AMP skips is not seen. A training loop that updates
its weights by hand, without a `torch.optim` optimizer, is followed by post-accumulate hooks instead. On a GPU, reading
is a copy to pinned memory on a stream of its own beside the optimizer's step, and a thread forms the average on the
CPU. No gradient, parameter or random number generator is touched: the losses of a run are bit-identical with and
without the tracker.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..codec.base import check_range
from ..codec.errors import BadArgumentError


class SensitivityTracker:
    """Gradient averages of the last batches before each checkpoint, for `compress(grads=)` and `search(grads=)`.

    EMA_t = beta * g_t + (1 - beta) * EMA_(t-1), EMA_0 = 0, over the last `window` batches before every `every`-th; beta
    weighs the newest gradient. The sensitivity of a weight is then |EMA w|.

    Args:
        model: the module whose `state_dict` is saved; its parameters are followed by their names.
        every: batches (optimizer steps) from one checkpoint to the next, 1 or more; the tracker must know the schedule,
            so that it records only before checkpoints. None: every batch is recorded.
        beta: weight of the newest gradient, in (0, 1]; default 0.9.
        window: batches recorded before a checkpoint, 1 or more; default 50.
        done: batches the run has done already, as after a resume; default 0.
        squares: also average g**2 (the empirical Fisher information's diagonal), see `squares`; default False.

    Raises:
        BadArgumentError: an argument out of range, or a model without trainable parameters.

    Example:
        >>> model = nn.Linear(3, 1, bias=False)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with SensitivityTracker(model, every=10) as tracker:
        ...     for _ in range(10):
        ...         optimizer.zero_grad()
        ...         model(torch.ones(1, 3)).sum().backward()
        ...         optimizer.step()
        ...     grads = tracker.grads()
        >>> grads["weight"].tolist()
        [[1.0, 1.0, 1.0]]

    Source: Inshrinkerator, sections 4.1 and 4.5.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int | None,
        *,
        beta: float = 0.9,
        window: int = 50,
        done: int = 0,
        squares: bool = False,
    ) -> None:
        for name, value, least in (("every", every, 1), ("window", window, 1), ("done", done, 0)):
            if not (value is None and name == "every") and (type(value) is not int or value < least):
                raise BadArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}")
        check_range("beta", beta, 0, 1, open_low=True)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if not named:
            raise BadArgumentError("model has no parameter that requires a gradient")
        self._every, self._window, self._beta, self._squares = every, window, beta, squares
        self._names = {id(p): n for n, p in named}
        self._averages: dict[str, _Average] = {}
        self._device = _Device()
        self._done = done
        self._batches: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._members: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[Tensor]]] = weakref.WeakKeyDictionary()
        self._stepped = False
        self._backwards = done - 1
        self._fired: set[int] = set()
        # Weak, so that a tracker nobody holds any more goes away and takes its hooks along.
        fired, before, after = (_weak(m) for m in (self._accumulated, self._before_step, self._after_step))
        self._fire_handles: list[Any] = [
            p.register_post_accumulate_grad_hook(fired)  # type: ignore[no-untyped-call]
            for _, p in named
        ]
        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        self._unhook = weakref.finalize(self, _remove, [*self._fire_handles, *handles])

    def grads(self) -> dict[str, Tensor] | None:
        """The averages by parameter name, float32 or float64, on the host; None if no batch was recorded.

        Of sharded parameters (DTensor) they are DTensors with the parameter's placement: reading them whole is a
        collective, as `compress` does it.
        """
        return self._read("mean")

    def squares(self) -> dict[str, Tensor] | None:
        """The averages of g**2 by parameter name, as `grads`.

        Raises:
            BadArgumentError: the tracker was not asked to keep them.
        """
        if not self._squares:
            raise BadArgumentError("squares is False: the tracker keeps no averages of squares")
        return self._read("square")

    @property
    def batch(self) -> int:
        """Batches done so far."""
        if not self._stepped:
            return max(self._done, self._backwards + 1)
        return max(self._batches.values(), default=self._done)

    @property
    def recorded(self) -> int:
        """Batches in the averages, of the parameter with the most."""
        self._device.wait()
        return max((a.batches for a in self._averages.values()), default=0)

    def remove(self) -> None:
        """Take all hooks off the model and the optimizers; what was recorded stays readable."""
        self._unhook()
        self._device.close()

    def __enter__(self) -> SensitivityTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _read(self, which: str) -> dict[str, Tensor] | None:
        self._device.wait()
        found = self._averages
        return {n: found[n].read(which) for n in self._names.values() if n in found} or None

    # ------------------------------------------------------------------ hooks

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """An optimizer is about to step: the gradients of its parameters are what they will be used as."""
        own = self._own(optimizer)
        if not own:
            return
        if not self._stepped:
            # What the parameters' hooks took for batches may have been micro-batches; from here on a step is a batch.
            self._stepped = True
            self._averages.clear()
            _remove(self._fire_handles)
        batch = self._batches.get(optimizer, self._done)
        self._batches[optimizer] = batch + 1
        self._record(own, batch, getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The step is done: whatever comes next may change the gradients, so it must come after the copy."""
        self._device.hold_back()

    def _accumulated(self, parameter: Tensor) -> None:
        """A backward pass is through with a parameter; where no optimizer steps, each pass is a batch."""
        if self._stepped or id(parameter) not in self._names:
            return
        if id(parameter) in self._fired or self._backwards < self._done:
            self._backwards += 1
            self._fired.clear()
        self._fired.add(id(parameter))
        self._record([parameter], self._backwards, None, None)
        self._device.hold_back()

    def _own(self, optimizer: Optimizer) -> list[Tensor]:
        """The parameters of an optimizer that are this model's."""
        groups = len(optimizer.param_groups)
        found = self._members.get(optimizer)
        if found is None or found[0] != groups:
            found = groups, [p for g in optimizer.param_groups for p in g["params"] if id(p) in self._names]
            self._members[optimizer] = found
        return found[1]

    # ------------------------------------------------------------------ averages

    def _record(self, parameters: Sequence[Tensor], batch: int, scale: Any, skipped: Any) -> None:
        """Take the gradients into the averages, if the batch is within the window before a checkpoint."""
        if self._every is not None and self._every > self._window:
            into = batch % self._every - (self._every - self._window)
            if into < 0:
                return
            if into == 0:
                self._device.wait()
                for p in parameters:
                    self._averages.pop(self._names[id(p)], None)
        pairs: list[tuple[_Average, Tensor]] = []
        for p in parameters:
            if p.grad is not None:
                name = self._names[id(p)]
                if name not in self._averages:
                    self._averages[name] = _Average(p, self._squares)
                pairs.append((self._averages[name], _local(p.grad.detach())))
        for average, _ in pairs:
            average.batches += 1
        with torch.no_grad():
            self._device.fold(pairs, self._beta, scale, skipped)


class _Average:
    """The running averages of one parameter's gradient, on the host."""

    def __init__(self, parameter: Tensor, squares: bool) -> None:
        local = _local(parameter.detach())
        dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
        self.mean = torch.zeros(local.shape, dtype=dtype)
        self.square = torch.zeros(local.shape, dtype=dtype) if squares else None
        self.batches = 0
        self.pinned: Tensor | None = None
        self._like = parameter if _is_sharded(parameter) else None

    def add(self, gradient: Tensor, beta: float, scale: float) -> None:
        """One more batch; `gradient` is on the host, multiplied by `scale`."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        gradient = gradient.to(self.mean.dtype)
        if scale != 1.0:
            gradient = gradient / scale
        self.mean.lerp_(gradient, beta)
        if self.square is not None:
            self.square.lerp_(gradient * gradient, beta)

    def read(self, which: str) -> Tensor:
        """A copy, sharded as the parameter is."""
        found: Tensor = getattr(self, which).clone()
        if self._like is None:
            return found
        from torch.distributed.tensor import DTensor

        like: Any = self._like
        return DTensor.from_local(
            found.to(_local(like.detach()).device),
            like.device_mesh,
            like.placements,
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )


class _Device:
    """Gets gradients from where they are to the host: at once on the CPU, else beside the training."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._future: Future[None] | None = None
        self._copied: list[tuple[Any, Any]] = []
        self._streams: dict[Any, Any] = {}

    def fold(self, pairs: Sequence[tuple[_Average, Tensor]], beta: float, scale: Any, skipped: Any) -> None:
        """Take gradients into their averages; `scale` and `skipped` are those of AMP, or None."""
        on_host = [(a, g) for a, g in pairs if g.device.type != "cuda"]
        on_gpu = [(a, g) for a, g in pairs if g.device.type == "cuda"]
        if on_host:
            _fold([(a, g.cpu()) for a, g in on_host], beta, scale, skipped)
        if on_gpu:
            self.wait()  # the pinned memory of the last batch must have been read
            work = [self._copy(d, on_gpu, scale, skipped) for d in dict.fromkeys(g.device for _, g in on_gpu)]
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="sensitivity")
            self._future = self._thread.submit(_fold_copied, work, beta)

    def _copy(self, device: Any, pairs: Sequence[tuple[_Average, Tensor]], scale: Any, skipped: Any) -> tuple[Any, ...]:
        """Start copying the gradients on one device to pinned memory, on a stream of its own."""
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
        """Let the training's streams go on only once the gradients are copied; the host does not wait."""
        for device, done in self._copied:
            torch.cuda.current_stream(device).wait_event(done)
        self._copied.clear()

    def wait(self) -> None:
        """Wait until all that was started is in the averages."""
        if self._future is not None:
            future, self._future = self._future, None
            future.result()

    def close(self) -> None:
        """Finish, and end the thread."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _fold(pairs: Sequence[tuple[_Average, Tensor]], beta: float, scale: Any, skipped: Any) -> None:
    if skipped is not None and float(skipped) > 0:
        for average, _ in pairs:
            average.batches -= 1
        return
    factor = 1.0 if scale is None else float(scale)
    for average, gradient in pairs:
        average.add(gradient, beta, factor)


def _fold_copied(work: Sequence[tuple[Any, ...]], beta: float) -> None:
    """What the thread does: wait for the copies, then average."""
    with torch.no_grad():
        for done, copied, scale, skipped in work:
            done.synchronize()
            _fold(copied, beta, scale, skipped)


def _pinned_copy(value: Tensor) -> Tensor:
    copy = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    return copy.copy_(value, non_blocking=True)


def _is_sharded(value: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local(value: Any) -> Any:
    """This process's part of a sharded tensor; any other as it is."""
    return value.to_local() if _is_sharded(value) else value


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """The method, called only as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
