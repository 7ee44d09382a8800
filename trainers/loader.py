"""A data loader that counts consumed batches, so that a resumed run repeats none."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ..kernels.errors import BadArgumentError
from .state import capture_rng, restore_rng

_INDEPENDENT = (DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAWN_AT_ONCE = 64
Streams: TypeAlias = tuple[torch.Tensor, Any, Any]


class Loader:
    """Data loader that counts the batches it returns; its state is the position.

    A batch is consumed once the loop has received it; prefetched batches are not. Shuffling depends on one seed drawn
    from the global generator (or the loader's own) at the start of each epoch, so a resumed epoch has the order of the
    interrupted one. For a plain `DataLoader` over a map-style dataset the consumed batches are skipped in the sampler,
    without loading them. Everything else (an `IterableDataset`, a list, a loader of another class) is iterated from the
    start of the epoch, and the consumed batches are dropped. After a resume, loader workers draw other random numbers
    (augmentation); with `num_workers=0` the random numbers are the same.

    An epoch that the loop leaves early has ended: the next iteration begins a new epoch.

    Args:
        batches: iterable that is iterated once an epoch. If its sampler has a method `set_epoch`
            (`DistributedSampler`), it is called with the epoch's number.

    Raises:
        BadArgumentError: not iterable, an iterator that can be used only once, or a loader without a fixed order of
            batches (`in_order=False`).

    Example:
        >>> loader = Loader(DataLoader(list(range(6)), batch_size=2))
        >>> first = next(iter(loader))
        >>> again = Loader(DataLoader(list(range(6)), batch_size=2))
        >>> again.load_state_dict(loader.state_dict())
        >>> [batch.tolist() for batch in again], again.epoch
        ([[2, 3], [4, 5]], 1)

    Source: Check-N-Run, section 4.1 (the reader's state: batches that reached the trainer).
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        if not isinstance(batches, Iterable):
            raise BadArgumentError(f"batches must be iterable, not {type(batches).__qualname__}")
        if isinstance(batches, Iterator):
            raise BadArgumentError(
                f"batches is a {type(batches).__qualname__}, which can be gone through only once; give what makes it"
            )
        if not getattr(batches, "in_order", True) and getattr(batches, "num_workers", None):
            raise BadArgumentError("batches has in_order=False: which of its batches were consumed has no position")
        self.batches = batches
        """The iterable of batches that was given."""
        self.epoch = 0
        """Number of the current epoch, or of the next one between two."""
        self.batch = 0
        """Batches consumed in this epoch."""
        self._order: _Order | None = None
        self._inner: Iterable[Any] = batches
        if type(batches) is DataLoader and not isinstance(batches.dataset, IterableDataset):
            self._order = _Order(batches.sampler if batches.batch_sampler is None else batches.batch_sampler)
            self._seeds = torch.Generator()
            self._inner = _rebuilt(batches, self._order, self._seeds)
        self._generators = _generators(batches)
        self._start: dict[str, Any] | None = None
        self._resumed = False
        self._number = 0

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        length = _length(self.batches)
        if length is None:
            raise TypeError(f"{type(self.batches).__qualname__} has no length")
        return length

    def __iter__(self) -> Iterator[Any]:
        self._leave()
        self._resumed = False
        self._number += 1
        _set_epoch(self.batches, self.epoch)
        iterator = self._replayed() if self._order is None else self._ordered(self._order)
        return self._counted(iterator, self._number)

    def _leave(self) -> None:
        """End an epoch that the loop has left early; an epoch to be resumed stays."""
        if self._start is not None and not self._resumed:
            self._end()

    def _counted(self, iterator: Iterator[Any], number: int) -> Iterator[Any]:
        for batch in iterator:
            if number != self._number:
                raise BadArgumentError("this loader is already iterated again; batches are counted in one loop only")
            self.batch += 1
            yield batch
        if number == self._number:
            self._end()

    def _end(self) -> None:
        self.epoch, self.batch, self._start = self.epoch + 1, 0, None

    def _begin(self) -> dict[str, Any]:
        """Return the seed of this epoch's order: drawn now, or that of the interrupted epoch."""
        if self._start is not None:
            for generator, state in zip(self._generators, self._start["generators"], strict=True):
                generator.set_state(torch.as_tensor(state, dtype=torch.uint8, device="cpu"))
            return self._start
        start: dict[str, Any] = {"generators": [generator.get_state() for generator in self._generators]}
        if self._order is None:
            start["rng"] = capture_rng()
        else:
            start["seed"] = _draw(getattr(self.batches, "generator", None))
        self._start = start
        return start

    def _ordered(self, order: _Order) -> Iterator[Any]:
        resumed = self._start is not None
        start = self._begin()
        generator = getattr(self.batches, "generator", None)
        if resumed and generator is not None:
            _draw(generator)  # as the interrupted epoch did
        # A new stream, because workers would otherwise draw the same numbers as before the interruption.
        self._seeds.manual_seed((start["seed"] + self.batch) % (1 << 63))
        order.begin(start["seed"], self.batch)
        return iter(self._inner)

    def _replayed(self) -> Iterator[Any]:
        now = capture_rng() if self._start is not None else None
        start = self._begin()
        if now is None:
            return iter(self._inner)
        restore_rng(start["rng"])
        iterator = iter(self._inner)
        passed = sum(1 for _ in islice(iterator, self.batch))
        _check_passed(passed, self.batch)
        restore_rng(now)
        return iterator

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values and generator states."""
        return {"epoch": self.epoch, "batch": self.batch, "start": self._start, **_shape(self.batches)}

    def check(self, state: Any) -> None:
        """Refuse a position that `load_state_dict` would refuse."""
        mine = _shape(self.batches)
        if not isinstance(state, Mapping) or {"epoch", "batch", "start", *mine} - set(state):
            raise BadArgumentError("loader: this is not a position of a loader")
        start = state["start"]
        if start is not None and state["batch"]:
            for name, value in mine.items():
                if state[name] != value:
                    raise BadArgumentError(
                        f"loader: {state['batch']} batches of epoch {state['epoch']} were consumed with "
                        f"{name.replace('_', ' ')} {state[name]}; it is {value} now, so they are not the same batches"
                    )
        if start is not None and (("seed" in start) != (self._order is not None)):
            raise BadArgumentError("loader: the position is that of another kind of loader")
        if start is not None and len(start["generators"]) != len(self._generators):
            raise BadArgumentError(
                f"loader: saved with {len(start['generators'])} generators of its own; it has {len(self._generators)}"
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position: the next iteration begins with the batch after it.

        Raises:
            BadArgumentError: not what `state_dict` gives, or of a loader whose batches are others.
        """
        self.check(state)
        start = state["start"]
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self._start = None if start is None else dict(start)
        self._resumed = start is not None
        self._number += 1


class _Order:
    """Sampler with its own seeded random stream for each epoch.

    A sampler with no generator of its own draws from the global ones, and how far ahead workers prefetch would decide
    where these stand.
    """

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self._streams: Streams | None = None
        self._skip = 0
        # Several items are drawn at once, because swapping generators takes far longer than drawing an index. But a
        # sampler that may depend on the progress of the training must draw one item at a time.
        inner = sampler.sampler if type(sampler) is BatchSampler else sampler
        self._at_once = _DRAWN_AT_ONCE if type(inner) in _INDEPENDENT else 1

    def begin(self, seed: int, skip: int) -> None:
        """Seed the next iteration, and skip this many items."""
        outside = _streams()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # noqa: NPY002 - what samplers written with the global generator draw from
        self._streams, self._skip = _streams(), skip
        _set_streams(outside)

    def __iter__(self) -> Iterator[Any]:
        skip, self._skip = self._skip, 0
        iterator = self._with_own_streams(lambda: iter(self.sampler))
        passed = 0
        while items := self._with_own_streams(lambda: list(islice(iterator, self._at_once))):
            for item in items:
                if passed < skip:
                    passed += 1
                else:
                    yield item
        _check_passed(passed, skip)

    def _with_own_streams(self, work: Any) -> Any:
        outside = _streams()
        if self._streams is not None:
            _set_streams(self._streams)
        try:
            return work()
        finally:
            self._streams = _streams()
            _set_streams(outside)

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _streams() -> Streams:
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002


def _set_streams(streams: Streams) -> None:
    torch.set_rng_state(streams[0])
    random.setstate(streams[1])
    np.random.set_state(streams[2])  # noqa: NPY002


def _rebuilt(loader: DataLoader[Any], order: _Order, generator: torch.Generator) -> DataLoader[Any]:
    """Return the same loader with another sampler."""
    sampling: dict[str, Any] = {"batch_sampler": order}
    if loader.batch_sampler is None:
        sampling = {"sampler": order, "batch_size": None}
    return DataLoader(
        loader.dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **sampling,
    )


def _samplers(batches: Any) -> Iterator[Any]:
    """Yield a loader and the samplers within it."""
    yield batches
    for name in ("sampler", "batch_sampler"):
        sampler = getattr(batches, name, None)
        if sampler is not None and sampler is not batches:
            yield sampler
            inner = getattr(sampler, "sampler", None)
            if inner is not None:
                yield inner


def _generators(batches: Any) -> list[torch.Generator]:
    """Return the generators that a loader's order depends on, each once."""
    found = [getattr(one, "generator", None) for one in _samplers(batches)]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def _set_epoch(batches: Any, epoch: int) -> None:
    for one in {id(s): s for s in _samplers(batches)}.values():
        if callable(getattr(one, "set_epoch", None)):
            one.set_epoch(epoch)


def _shape(batches: Any) -> dict[str, Any]:
    """Return the properties that determine the batches of an epoch, as plain values."""
    inner = {id(s): type(s).__qualname__ for s in _samplers(batches) if s is not batches}
    return {
        "length": _length(batches),
        "batch_size": getattr(batches, "batch_size", None),
        "samples": _length(getattr(batches, "dataset", None)),
        "sampler": ", ".join(inner.values()),
    }


def _draw(generator: torch.Generator | None) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


def _length(batches: Any) -> int | None:
    if not isinstance(batches, Sized):
        return None
    try:
        return len(batches)
    except TypeError:  # a DataLoader over an IterableDataset has the method, and no length
        return None


def _check_passed(passed: int, consumed: int) -> None:
    if passed < consumed:
        raise BadArgumentError(f"loader: {consumed} batches of this epoch were consumed, and it has only {passed} now")
