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

import math
import warnings
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..codec.errors import BadArgumentError, ShrinkpointWarning
from ..codec.evidence.module import canonical_name
from ..kernels.backend.arguments import integer, number, or_none
from .gradient_averages import Average, Transfer, gradient_of
from .optimizer_hooks import Nesting, after_closure, closure_of, remove, weak

_NEGLIGIBLE, _FEWEST_BATCHES = 40, 12


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
