"""Sensitivity: gradient averages over the batches before a checkpoint, on the host.

A gradient is read just before the optimizer's step: it is then accumulated over micro-batches, averaged over processes
(DDP, FSDP2), unscaled (AMP) and clipped, and a step that AMP skips is not recorded. If `step` is given a closure
(Lightning, LBFGS), the gradient is read after the closure's first evaluation. For a training loop without a
`torch.optim` optimizer, post-accumulate hooks are used instead. On a GPU, a gradient is copied to pinned memory without
the host waiting, and a thread computes the average on the CPU. Gradients, parameters and random number generators are
not changed: the losses of a run are bit-identical with and without the tracker.

Batches are counted by the optimizer's steps. Only the training loop knows of batches without a step (skipped by AMP);
it reports them with `at`.
"""

from __future__ import annotations

import functools
import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..codec.errors import BadArgumentError, ShrinkpointWarning
from ..codec.evidence.module import canonical_name
from ..codec.state.leaves import is_sharded, local_part
from ..kernels.backend.arguments import integer, number, or_none
from .optimizer_hooks import Nesting, after_closure, closure_of, remove, weak

_NEGLIGIBLE, _FEWEST_BATCHES = 40, 12
_EVERY = 16
"""Number of gradients from one search for values that are not finite to the next; a search after each gradient would
double the cost of averaging."""


class SensitivityWarning(ShrinkpointWarning):
    """Gradient averages are outdated, or had values that are not finite.

    Each tracker says either once.
    """


@dataclass(slots=True)
class _Clock:
    """Count of the batches of some parameters."""

    done: int
    window: int = -1
    """Number of the window that was entered last."""


@dataclass(slots=True)
class _Followed:
    """An optimizer's parameters of the model, with their clocks."""

    state: tuple[int, ...]
    parameters: list[Tensor]
    ids: frozenset[int]
    clocks: list[_Clock]


def batches_that_count(window: int, beta: float) -> int:
    """Return the number of last batches that an average in float32 depends on.

    What came n batches before the end weighs (1 - beta)**n of the average then; from 2**-40 on that is less than a
    hundred-thousandth of float32's last place. No fewer than twelve are read, so that an average is there for a
    checkpoint that comes some batches early.

    Args:
        window: batches, 1 or more.
        beta: weight of the newest gradient, in (0, 1].

    Example:
        >>> batches_that_count(50, 0.9), batches_that_count(50, 0.1), batches_that_count(5, 0.9)
        (13, 50, 5)
    """
    forgotten = math.inf if beta == 1 else -math.log1p(-beta) / math.log(2)  # bits a batch
    return math.ceil(min(window, max(_FEWEST_BATCHES, _NEGLIGIBLE / forgotten)))


class SensitivityTracker:
    """Averages of gradients before checkpoints, for `compress` and `search` (`grads=`).

    EMA_t = beta * g_t + (1 - beta) * EMA_(t-1), EMA_0 = 0, over the last `window` batches before every `every`-th; beta
    weighs the newest gradient. The sensitivity of a weight is then |EMA w|. Only the last batches of the window are
    read, because earlier ones do not change the average in float32: 13 at the default beta, see `batches_that_count`.

    Names are those of the bare model, without the prefixes of DDP, `torch.compile` and other wrappers, as in
    `trainers.save` and torch's `get_state_dict`. An element of an average that is not finite is reset to zero, at the
    latest when it is read; `not_finite` counts these elements, and a SensitivityWarning is issued. Another warning says
    that the averages are outdated, mostly because the loop has counted batches without an optimizer's step, see `at`.

    A parameter that is frozen at first is averaged once it requires a gradient and belongs to an optimizer; without an
    optimizer, create a new tracker then. Complex parameters and parameters without gradients are left out.

    Args:
        model: the module whose weights are saved, wrapped or not.
        every: batches (optimizer steps) from one checkpoint to the next, 1 or more; the tracker must know the schedule,
            so that it records only before checkpoints. None: every batch is recorded.
        beta: weight of the newest gradient, in (0, 1]; default 0.9.
        window: batches averaged before a checkpoint, 1 or more; default 50. If `every` does not exceed the recorded
            part of it, every batch is recorded, and averages go on over checkpoints.
        done: batches the run has done already, as after a resume; default 0.
        squares: also average g**2 (the empirical Fisher information's diagonal), see `squares`; default False.

    Raises:
        BadArgumentError: an argument out of range, or a model without trainable parameters (complex ones do not count).

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
        every, window = or_none("every", every, integer, 1), integer("window", window, 1)
        done, beta = integer("done", done, 0), number("beta", beta, 0, 1, open_low=True)
        named = [(canonical_name(model, n), p) for n, p in model.named_parameters() if not p.is_complex()]
        trained = [p for _, p in named if p.requires_grad]
        if not trained:
            raise BadArgumentError("model has no parameter that requires a gradient, but for complex ones")
        self._every, self._window = every, batches_that_count(window, beta)
        self._beta, self._squares = beta, squares
        self._names = {id(p): n for n, p in named}
        # These distinguish a parameter from a later one with the same id.
        self._known = {id(p): weakref.ref(p) for _, p in named}
        self._averages: dict[str, Average] = {}
        self._transfer = Transfer()
        self._not_finite = 0
        self._began = self._done = done
        self._clocks: dict[int, _Clock] = {}
        self._passes: dict[int, _Clock] = {}
        self._followed: weakref.WeakKeyDictionary[Optimizer, _Followed] = weakref.WeakKeyDictionary()
        self._optimizers = 0
        self._nesting = Nesting()
        self._stepped = self._told = False
        self._backwards = done - 1
        self._fired: set[int] = set()
        self._said: set[str] = set()
        # Weak references, so that a tracker without other references is freed and its hooks are removed.
        fired, before, after = (weak(m) for m in (self._accumulated, self._before_step, self._after_step))
        self._fire_handles: list[Any] = [
            p.register_post_accumulate_grad_hook(fired)  # type: ignore[no-untyped-call]
            for p in trained
        ]
        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        self._unhook = weakref.finalize(self, remove, [*self._fire_handles, *handles])

    def grads(self, *, shards_only: bool = False) -> dict[str, Tensor] | None:
        """Return the averages by parameter name, on the host; None: no batch was recorded.

        The averages of sharded parameters (DTensor) are DTensors with the parameter's placement. Each process keeps its
        part on the host. Reading them whole, as `compress` does, is a collective that moves one after another through
        the device.

        Args:
            shards_only: leave out the parameters that are not sharded: a process that does not save is needed for
                the others alone.
        """
        return self._read("mean", shards_only)

    def squares(self) -> dict[str, Tensor] | None:
        """Return the averages of g**2 by parameter name, as `grads` does.

        Raises:
            BadArgumentError: the tracker was not asked to keep them.
        """
        if not self._squares:
            raise BadArgumentError("squares is False: the tracker keeps no averages of squares")
        return self._read("square")

    def at(self, done: int) -> None:
        """Set the number of batches that the run has done, from which the tracker counts on.

        `trainers.save(sensitivity=)` and the adapters call it. Other loops must call it for each batch if there are
        batches without an optimizer's step (skipped by `GradScaler`, if the optimizer is not fused), or more steps than
        batches. Otherwise the windows are too late or too early.

        Args:
            done: batches done, 0 or more, in the unit of `every`.

        Raises:
            BadArgumentError: no such number.
        """
        done = integer("done", done, 0)
        if not (self._told or self._averages or self._stepped):
            self._began = done
        self._told = True
        self._done = done
        for clock in self._clocks.values():
            clock.done = done
        self._backwards = done - 1
        self._fired.clear()

    def restart(self, done: int) -> None:
        """Restart after weights of an earlier step were loaded; forget all records.

        Args:
            done: batches done, 0 or more, in the unit of `every`.

        Raises:
            BadArgumentError: no such number.
        """
        self.at(done)
        self._drop(list(self._averages))
        self._began = self._done

    @property
    def batch(self) -> int:
        """Number of batches done so far."""
        if not self._stepped:
            return max(self._done, self._backwards + 1)
        return max((clock.done for clock in self._clocks.values()), default=self._done)

    @property
    def recorded(self) -> int:
        """Number of batches in the averages, for the parameter with the most."""
        self._transfer.wait()
        return max((a.batches for a in self._averages.values()), default=0)

    @property
    def not_finite(self) -> int:
        """Number of elements of averages that were reset because they were not finite."""
        self._transfer.wait()
        return self._not_finite + sum(a.not_finite for a in self._averages.values())

    def remove(self) -> None:
        """Remove all hooks from the model and the optimizers; the averages stay readable."""
        self._unhook()
        self._nesting.clear()
        self._transfer.close()

    def __enter__(self) -> SensitivityTracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _read(self, which: str, shards_only: bool = False) -> dict[str, Tensor] | None:
        self._transfer.wait()
        found = {n: a for n in self._names.values() if (a := self._averages.get(n)) is not None and a.batches}
        read = {n: a.read(which) for n, a in found.items() if a.is_sharded or not shards_only}
        for why in (self._outdated(found), self._reset_elements()):
            if why is not None and why[0] not in self._said:
                self._said.add(why[0])
                warnings.warn(why[1], SensitivityWarning, stacklevel=3)
        return read or None

    def _outdated(self, found: dict[str, Average]) -> tuple[str, str] | None:
        """Return the warnings about averages that are outdated, by name."""
        now, every, window = self.batch, self._every, self._window
        newest = max((a.newest for a in found.values()), default=None)
        into, end = 0, now
        if every is not None and every > window:
            into = now % every
            end = now - into if into <= every - window else now
        late = end > self._began and (newest is None or newest <= end - window)
        if not (late or (into and newest is not None)):
            return None
        there = "no gradient is there" if newest is None else f"the newest gradient there is of batch {newest}"
        when = "every batch is recorded" if every is None else f"checkpoints are expected every {every} batches"
        return "old", (
            f"gradients were asked for after batch {now}: {there}; {when}. If the loop counts batches in which no "
            "optimizer steps (AMP skips some), or is at another one, say tracker.at(batches done) in each batch"
        )

    def _reset_elements(self) -> tuple[str, str] | None:
        count = self.not_finite
        return ("mended", f"{count} elements of gradient averages were not finite, and were reset") if count else None

    def _drop(self, names: Iterable[str]) -> None:
        """Reset the averages."""
        self._transfer.wait()
        for name in names:
            dropped = self._averages.pop(name, None)
            self._not_finite += 0 if dropped is None else dropped.not_finite

    # ------------------------------------------------------------------ hooks

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Record gradients before an optimizer's step.

        A closure computes them again within the step: then they are read once it was evaluated.
        """
        followed = self._follow(optimizer)
        if not followed.parameters:
            return None
        own = self._nesting.enter(followed.parameters, followed.ids)
        if not own:
            return None
        if not self._stepped:
            # The batches counted by the parameters' hooks may have been micro-batches; from here on a step is a batch.
            self._stepped = True
            self._drop(list(self._averages))
            self._passes.clear()
            remove(self._fire_handles)
        batch = max(clock.done for clock in followed.clocks)
        for clock in followed.clocks:
            clock.done = batch + 1

        def record() -> None:
            found, scale = getattr(optimizer, "found_inf", None), getattr(optimizer, "grad_scale", None)
            self._record(own, followed.clocks, batch, scale, found)

        if closure_of(args, kwargs) is not None:
            return after_closure(args, kwargs, record)
        record()
        return None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End the record of an optimizer's step."""
        followed = self._followed.get(optimizer)
        if followed is not None and followed.parameters:
            self._nesting.leave(followed.parameters)

    def _accumulated(self, parameter: Tensor) -> None:
        """Record a gradient after a backward pass, for loops without an optimizer."""
        if self._stepped or not self._is_known(parameter):
            return
        if id(parameter) in self._fired or self._backwards < self._done:
            self._backwards += 1
            self._fired.clear()
        self._fired.add(id(parameter))
        clock = self._passes.setdefault(id(parameter), _Clock(self._done))
        self._record([parameter], [clock], self._backwards, None, None)

    def _is_known(self, parameter: Tensor) -> bool:
        known = self._known.get(id(parameter))
        return known is not None and known() is parameter

    def _follow(self, optimizer: Optimizer) -> _Followed:
        """Find the model's parameters in an optimizer, and the clock that counts their batches.

        Batches are counted for parameters, not for optimizers: a new optimizer continues the count of the last one.
        Optimizers of different parameters have separate counts, because some step more often than others.
        """
        groups = optimizer.param_groups
        first = groups[0]["params"] if groups else ()
        found = self._followed.get(optimizer)
        # The number of parameters, too, because an existing group may get more, for example when layers are unfrozen.
        count = sum(len(g["params"]) for g in groups)
        state = (self._optimizers, len(groups), count, id(first[0]) if first else 0)
        if found is not None and found.state == state:
            return found
        own = [p for g in groups for p in g["params"] if self._is_known(p)]
        clocks = list({id(c): c for p in own if (c := self._clocks.get(id(p))) is not None}.values())
        if own and (found is None or any(id(p) not in self._clocks for p in own)):
            # A new clock, which replaces the former clocks of these parameters.
            newest = max(clocks, key=lambda clock: clock.done, default=None)
            if newest is None:
                # Others may have stepped in this batch already.
                newest = _Clock(max([self._done, *(clock.done - 1 for clock in self._clocks.values())]))
            clock = _Clock(newest.done, newest.window)
            for p in own:
                self._clocks[id(p)] = clock
            clocks = [clock]
            self._optimizers += 1
        found = _Followed((self._optimizers, *state[1:]), own, frozenset(map(id, own)), clocks)
        self._followed[optimizer] = found
        return found

    # ------------------------------------------------------------------ averages

    def _record(
        self, parameters: Sequence[Tensor], clocks: Sequence[_Clock], batch: int, scale: Any, skipped: Any
    ) -> None:
        """Add gradients to the averages if the batch is within the window."""
        if self._every is not None and self._every > self._window:
            number, into = divmod(batch, self._every)
            if into < self._every - self._window:
                return
            if any(clock.window != number for clock in clocks):
                for clock in clocks:
                    clock.window = number
                self._drop(self._names[id(p)] for p in parameters)
        pairs: list[tuple[Average, Tensor]] = []
        with torch.no_grad():
            for p in parameters:
                gradient = gradient_of(p)
                if gradient is not None:
                    name = self._names[id(p)]
                    if name not in self._averages:
                        self._averages[name] = Average(p, self._squares)
                    pairs.append((self._averages[name], gradient))
            self._transfer.fold(pairs, self._beta, scale, skipped, batch)
            self._transfer.hold_back()


class Average:
    """The running averages of one parameter's gradient, on the host.

    `batches` gradients are in them; `newest` is the number of batches that were done after the last of these. An
    element that is not finite would stay so: it is reset to zero, and is counted in `not_finite`.
    """

    def __init__(self, parameter: Tensor, squares: bool) -> None:
        local = local_part(parameter.detach())
        dtype = torch.float64 if local.dtype == torch.float64 else torch.float32
        self.mean = torch.zeros(local.shape, dtype=dtype, device="cpu")
        self.square = torch.zeros_like(self.mean) if squares else None
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
        on_host = [(a, g) for a, g in pairs if not _is_on_gpu(g)]
        on_gpu = [(a, g) for a, g in pairs if _is_on_gpu(g)]
        if on_host:
            self._average([(a, g.cpu()) for a, g in on_host], beta, scale, skipped, batch)
        if on_gpu:
            for future in dict.fromkeys(a.pending for a, _ in on_gpu if a.pending is not None):
                future.result()  # the contents of the pinned memory must have been read
            rooms = [None if t is None else _room_for(t) for t in (scale, skipped)]
            given = zip(rooms, (scale, skipped), strict=True)
            small = [(room, t) for room, t in given if room is not None and _is_on_gpu(t)]
            # AMP's tensors may be on another device than a gradient, and are copied on a stream of their own device.
            devices = dict.fromkeys([*(g.device for _, g in on_gpu), *(t.device for _, t in small)])
            work = [self._copy(device, on_gpu, small) for device in devices]
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="sensitivity")
            future = self._thread.submit(self._average_copied, work, beta, rooms[0], rooms[1], batch)
            for average, _ in on_gpu:
                average.pending = future
            self._futures = [*(one for one in self._futures if not one.done() or one.exception()), future]

    def _copy(
        self, device: Any, pairs: Sequence[tuple[Average, Tensor]], small: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Any, list[tuple[Average, Tensor]]]:
        """Start copying tensors of one device to pinned memory, on a separate stream."""
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
                    average.pinned = _room_for(dense)
                average.pinned.copy_(dense, non_blocking=True)
                dense.record_stream(stream)
                copied.append((average, average.pinned))
            for room, value in small:
                if value.device == device:
                    room.copy_(value, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        self._copied.append((device, done))
        return done, copied

    def hold_back(self) -> None:
        """Let the device wait until the gradients are copied; the host does not wait.

        To be called before the optimizer steps, for some write into the gradients: SGD with Nesterov's momentum, fused
        ones as they unscale under AMP, hooks that clip.
        """
        for device, done in self._copied:
            torch.cuda.current_stream(device).wait_event(done)
        self._copied.clear()

    def _average_copied(
        self, work: Sequence[tuple[Any, ...]], beta: float, scale: Any, skipped: Any, batch: int
    ) -> None:
        """Wait for the copies in the thread, then average."""
        with torch.no_grad():
            for done, _ in work:
                done.synchronize()
            for _, copied in work:
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


def _is_on_gpu(value: Tensor | None) -> bool:
    return value is not None and value.device.type == "cuda"


def _room_for(value: Tensor) -> Tensor:
    """Return page-locked memory for a copy of a tensor on a GPU; a copy of another one."""
    if not _is_on_gpu(value):
        return value.clone()
    return torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)


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
    there = local.to(spec.mesh.device_type)
    sizes: dict[str, Any] = {"shape": spec.shape, "stride": spec.stride}
    whole = DTensor.from_local(there, spec.mesh, spec.placements, run_check=False, **sizes)
    return whole.full_tensor(grad_placements=grad_placements)
