"""`Run`: one object for a training loop that saves, resumes and stops cleanly."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from ..codec.config import Config
from ..kernels.backend.arguments import integer, or_none
from ..kernels.errors import BadArgumentError
from ..store.saver.saver import Saver, SaveResult
from ..store.store import Store
from .loader import Loader
from .loop import _state_of, resume, save
from .preemption import Preempted, Preemption
from .state import Stateful
from .training_state import Optimizers, TrainingState

LOG = logging.getLogger("shrinkpoint.trainers")


class Run:
    """Checkpoints of a training loop: resume at the start, save when due, stop on SIGTERM.

        with sp.Run("runs/a", model, optimizer, data=loader, every=500) as run:
            for batch in run.batches(epochs=3):
                loss = ...
                run.step(loss=loss)

    Entering resumes from the newest checkpoint of the store, if it has one. Leaving saves the last step and waits until
    it is durable. If the block raises an error, nothing more is saved: the newest checkpoint stays the last one that
    was due. With several processes (DDP, FSDP2) all of them run the same loop, and rank 0 writes.

    Args:
        store: folder or URL of the checkpoints, a `Store`, or a `Saver` with settings of its own (retention).
        model: the module, wrapped or not; or a `TrainingState` with all parts of the run, for a gradient scaler, an
            averaged model, generators and others; then leave out `optimizer` and `scheduler`.
        optimizer: one optimizer or several.
        scheduler: learning-rate scheduler, which the loop steps itself.
        data: what `batches` iterates once an epoch: a `DataLoader`, a `Loader`, torchdata's `StatefulDataLoader`, or
            any other iterable. None: the loop has its own data.
        level: a `Config` or the name of a preset, such as "lossless" or "exact_weights"; only with a folder or URL.
            Default "default".
        every: optimizer steps from one save to the next, 1 or more; default 500. None: only `save` and the end save.
        preemption: True (default): SIGTERM and SIGUSR1 save and exit with code 75, see `Preemption`, which gives other
            signals and limits. False: signals are not handled. In a thread other than the main one they cannot be.

    Raises:
        BadArgumentError: an argument of the wrong type or out of range; an unknown level.

    Example:
        >>> import torch
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> data = [torch.ones(2, 4), torch.zeros(2, 4)]
        >>> with Run("memory://docs-run", model, optimizer, data=data, every=3) as run:
        ...     for x in run.batches(epochs=2):
        ...         optimizer.zero_grad()
        ...         loss = model(x).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         run.step(loss=loss)
        >>> run.steps, run.store.steps()
        (4, [3, 4])
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | Store | Saver,
        model: nn.Module | TrainingState,
        optimizer: Optimizers | None = None,
        *,
        scheduler: Stateful | None = None,
        data: Iterable[Any] | None = None,
        level: Config | str = "default",
        every: int | None = 500,
        preemption: Preemption | bool = True,
    ) -> None:
        if isinstance(store, nn.Module):
            raise BadArgumentError("store is a module; a folder comes first: Run(folder, model, optimizer)")
        if not isinstance(preemption, (bool, Preemption)):
            raise BadArgumentError(f"preemption must be True, False or a Preemption, not {preemption!r}")
        state = _state_of(model, optimizer, scheduler)
        self.every = or_none("every", every, integer, 1)
        if data is not None and state.loader is not None:
            raise BadArgumentError("data and the loader of the TrainingState are both given; give one of them")
        given = state.loader if data is None else data
        self._data = None if given is None else _counted(given)
        self.state = dataclasses.replace(state, loader=self._data)
        """The parts of the run, as `save` and `resume` take them."""
        self.state.check()
        self._is_own = not isinstance(store, Saver)
        self.saver = store if isinstance(store, Saver) else Saver(_opened(store, level))
        self.steps = 0
        """Optimizer steps done."""
        self._preemption, self._saved, self._entered = preemption, -1, False

    @property
    def store(self) -> Store:
        """The store of the checkpoints."""
        return self.saver.store

    @property
    def epoch(self) -> int:
        """Number of whole epochs done."""
        return 0 if self._data is None else self._data.epoch

    def __enter__(self) -> Run:
        if self._entered:
            raise BadArgumentError("this run was entered before; make another Run to go on")
        self._entered = True
        with contextlib.ExitStack() as undo:
            if self._is_own:
                undo.push(self.saver)
            if self._preemption is True and threading.current_thread() is threading.main_thread():
                self._preemption = Preemption()
            if isinstance(self._preemption, Preemption):
                undo.push(self._preemption)
            self.steps = self._saved = resume(self.saver, self.state)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None and self._saved != self.steps:
                self.save()
        finally:
            if isinstance(self._preemption, Preemption) and not isinstance(error, Preempted):
                self._preemption.close()
            if self._is_own:
                self.saver.__exit__(kind, error, trace)
            elif error is None:
                self.saver.wait()

    def batches(self, epochs: int) -> Iterator[Any]:
        """Yield the batches of the rest of the run; a resumed run repeats none.

        An epoch that is left early by `break` has ended, as with a `Loader`.

        Args:
            epochs: of the whole run, those before a resume included; 0 or more.

        Raises:
            BadArgumentError: the run has no `data`, or was not entered.
        """
        integer("epochs", epochs, 0)
        self._check()
        if self._data is None:
            raise BadArgumentError(
                "batches: this run has no data; give data= to Run, or call run.step in your own loop"
            )
        self._data._leave()
        while self._data.epoch < epochs:
            yield from self._data

    def step(self, loss: Any = None) -> None:
        """Count one optimizer step; save if it is due; save and exit after a scheduler's signal.

        Call it after `optimizer.step()` (and after that of the scheduler), once an optimizer step: with gradient
        accumulation only for the last of the accumulated batches.

        Args:
            loss: quality of the model, for `Retention(best=...)`: a number or a tensor with one element, which is read
                only when a save is due. A loss that is not finite is not recorded.

        Raises:
            Preempted: a SystemExit, once the checkpoint is durable.
            Exception: see `Saver.save`.
        """
        self._check()
        self.steps += 1
        if self.every is not None and self.steps % self.every == 0:
            self.save(loss=loss)
        if isinstance(self._preemption, Preemption):
            self._preemption.check(self.saver, self.steps, self.state)

    def save(self, loss: Any = None) -> Future[SaveResult] | None:
        """Save now; return the future of `Saver.save`, or None on ranks other than 0.

        Args:
            loss: as for `step`.
        """
        self._check()
        metric = None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        if metric is not None and not math.isfinite(metric):
            LOG.warning("step %d: the loss is %s; it is not recorded", self.steps, metric)
            metric = None
        found = save(self.saver, self.steps, self.state, metric=metric)
        self._saved = self.steps
        return found

    def _check(self) -> None:
        if not self._entered:
            raise BadArgumentError("this run was not entered: use it as `with sp.Run(...) as run:`")


class _Positioned:
    """A loader with a position of its own, and its number of epochs done.

    Args:
        loader: has `state_dict` and `load_state_dict`; iterated once an epoch.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self.epoch, self._begun = loader, 0, False

    def __iter__(self) -> Iterator[Any]:
        self._leave()
        self._begun = True
        yield from self.loader
        self._leave()

    def _leave(self) -> None:
        """See `Loader._leave`."""
        self.epoch, self._begun = self.epoch + self._begun, False

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the number of epochs done."""
        return {"epoch": self.epoch, "position": self.loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position.

        Raises:
            BadArgumentError: the position is that of another kind of loader.
        """
        if set(state) != {"epoch", "position"}:
            raise BadArgumentError("data: the checkpoint's position is not one of a loader with its own state_dict")
        self.epoch, self._begun = int(state["epoch"]), False
        self.loader.load_state_dict(state["position"])


def _counted(data: Any) -> Loader | _Positioned:
    if isinstance(data, (Loader, _Positioned)):
        return data
    has_position = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
    return _Positioned(data) if has_position else Loader(data)


def _opened(store: Any, level: Config | str) -> Store:
    if not isinstance(store, Store):
        return Store(store, level)
    if level != "default":
        raise BadArgumentError("store is a Store, which has its configuration; give level= only with a folder or URL")
    return store
