"""A resumed loader skips no batch and repeats none, with or without prefetching."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

import shrinkpoint as sp
from shrinkpoint.trainers import Loader
from shrinkpoint.trainers.state import capture_rng, restore_rng


class Loads(Dataset[int]):
    """A dataset that counts loaded items, and draws a random number for each."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, float]:  # type: ignore[override]
        self.loaded.append(i)
        return i, float(torch.rand(()))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(worker, 23, workers))


class Shuffled:
    """A loader shuffled with the global generators during iteration."""

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(11).tolist()
        random.shuffle(order)
        for i in order:
            yield [i]


class PythonOrder(Sampler[int]):
    """A sampler that shuffles with the generators of Python and NumPy."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        for i in random.sample(range(self.n), self.n):
            yield (i + int(np.random.randint(3))) % self.n  # noqa: NPY002

    def __len__(self) -> int:
        return self.n


def numbers(batch: Any) -> Any:
    """Return the samples of a batch without their random numbers."""
    if isinstance(batch, (list, tuple)) and isinstance(batch[0], torch.Tensor):
        batch = batch[0]
    return (
        batch.tolist() if isinstance(batch, torch.Tensor) else batch[0] if isinstance(batch, (list, tuple)) else batch
    )


def make(kind: str, workers: int = 0) -> Any:
    more: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    data = Loads(23)
    if kind == "shuffle":
        return DataLoader(data, batch_size=4, shuffle=True, **more)
    if kind == "own generator":
        return DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(7), **more)
    if kind == "replacement":
        return DataLoader(data, batch_size=3, sampler=WeightedRandomSampler([1.0] * 23, 40), **more)
    if kind == "chunks of draws":
        generator = torch.Generator().manual_seed(1)
        return DataLoader(
            data, sampler=RandomSampler(data, replacement=True, num_samples=70, generator=generator), **more
        )
    if kind == "no batches":
        return DataLoader(data, batch_size=None, sampler=PythonOrder(23), **more)
    if kind == "python":
        return DataLoader(data, batch_size=4, sampler=PythonOrder(23), drop_last=True, **more)
    if kind == "distributed":
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 1, shuffle=True), **more)
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4, **more)
    if kind == "shuffled":
        return Shuffled()
    return [[i, i + 1] for i in range(9)]


KINDS = ["shuffle", "own generator", "replacement", "chunks of draws", "no batches", "python", "distributed", "stream"]


def drawn(loader: Loader, epochs: int, stop: int | None = None) -> list[Any]:
    """Return batches with epoch and random numbers, up to `stop`."""
    seen: list[Any] = []
    while loader.epoch < epochs:
        epoch = loader.epoch
        for batch in loader:
            seen.append((epoch, numbers(batch), random.random(), float(torch.rand(()))))
            if len(seen) == stop:
                return seen
    return seen


def through_a_checkpoint(state: Any) -> Any:
    return sp.decompress(sp.compress(state, cfg=sp.presets.lossless()))


@pytest.mark.parametrize("kind", [*KINDS, "shuffled", "list"])
def test_a_resumed_loader_goes_on_with_the_next_batch(kind: str) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    expected = drawn(Loader(make(kind)), 3)
    first_epoch = sum(1 for epoch, *_ in expected if epoch == 0)
    for stop in (1, 2, first_epoch - 1, first_epoch, first_epoch + 1, len(expected) - 1, len(expected)):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
        loader = Loader(make(kind))
        assert drawn(loader, 3, stop) == expected[:stop]
        state = through_a_checkpoint({"loader": loader.state_dict(), "rng": capture_rng()})
        torch.manual_seed(9), random.seed(9), np.random.seed(9)  # noqa: NPY002
        again = Loader(make(kind))
        again.load_state_dict(state["loader"])
        restore_rng(state["rng"])
        assert drawn(again, 3) == expected[stop:], stop


@pytest.mark.parametrize("kind", ["shuffle", "own generator", "no batches", "stream"])
def test_what_workers_prefetched_is_not_consumed(kind: str) -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
    expected = drawn(Loader(make(kind, 2)), 2)
    for stop in (3, len(expected) - 2):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)  # noqa: NPY002
        loader = Loader(make(kind, 2))
        drawn(loader, 2, stop)
        state = through_a_checkpoint({"loader": loader.state_dict(), "rng": capture_rng()})
        again = Loader(make(kind, 2))
        again.load_state_dict(state["loader"])
        restore_rng(state["rng"])
        assert drawn(again, 2) == expected[stop:], stop


@settings(max_examples=30)
@given(
    n=st.integers(1, 30), size=st.integers(1, 7), stops=st.lists(st.integers(1, 12), max_size=5), seed=st.integers(0, 9)
)
def test_any_number_of_interruptions_shows_each_sample_once_an_epoch(
    n: int, size: int, stops: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    seen: list[list[int]] = [[], []]
    state: Any = None
    for stop in [*stops, None]:
        loader = Loader(DataLoader(range(n), batch_size=size, shuffle=True))  # type: ignore[arg-type]
        if state is not None:
            loader.load_state_dict(state)
        taken = 0
        while loader.epoch < 2 and taken != stop:
            epoch = loader.epoch
            for batch in loader:
                seen[epoch] += batch.tolist()
                taken += 1
                if taken == stop:
                    break
        state = loader.state_dict()
    assert [sorted(epoch) for epoch in seen] == [list(range(n))] * 2


def test_consumed_batches_are_not_loaded_again() -> None:
    loader = Loader(make("shuffle"))
    drawn(loader, 1, 4)
    again = make("shuffle")
    resumed = Loader(again)
    resumed.load_state_dict(loader.state_dict())
    rest = drawn(resumed, 1)
    assert again.dataset.loaded == [i for _, batch, *_ in rest for i in batch]
    assert len(again.dataset.loaded) == 23 - 16


def test_distributed_samplers_are_told_the_epoch() -> None:
    loader = make("distributed")
    wrapped = Loader(loader)
    orders = [[i for b in wrapped for i in numbers(b)] for _ in range(3)]
    assert orders[0] != orders[1] != orders[2]
    for epoch, order in enumerate(orders):
        loader.sampler.set_epoch(epoch)
        assert order == list(loader.sampler)


def test_the_order_does_not_depend_on_workers() -> None:
    orders = []
    for workers in (0, 2):
        torch.manual_seed(4)
        orders.append([batch for _, batch, *_ in drawn(Loader(make("shuffle", workers)), 1)])
    assert orders[0] == orders[1]


def test_a_sampler_that_follows_training_is_asked_in_time() -> None:
    hard: list[int] = [0]

    class Hardest(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for _ in range(5):
                yield hard[-1]

    seen = []
    for batch in Loader(DataLoader(range(9), sampler=Hardest())):  # type: ignore[arg-type]
        seen += batch.tolist()
        hard.append(len(seen))
    assert seen == [0, 1, 2, 3, 4]


def test_another_global_generator_of_numpy() -> None:
    before = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        assert sorted(int(batch) for batch in Loader(DataLoader(range(4), shuffle=True))) == [0, 1, 2, 3]  # type: ignore[arg-type]
    finally:
        np.random.set_bit_generator(before)  # type: ignore[attr-defined]


def test_an_epoch_left_early_has_ended() -> None:
    loader = Loader(DataLoader(range(6), batch_size=2))  # type: ignore[arg-type]
    for _ in loader:
        break
    assert (loader.epoch, loader.batch) == (0, 1)
    assert [b.tolist() for b in loader] == [[0, 1], [2, 3], [4, 5]]
    assert (loader.epoch, loader.batch, len(loader)) == (2, 0, 3)


def test_two_loops_at_once_are_refused() -> None:
    loader = Loader(DataLoader(range(6)))  # type: ignore[arg-type]
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(sp.BadArgumentError, match="iterated again"):
        next(first)


def test_other_batches_than_those_consumed_are_refused() -> None:
    loader = Loader(DataLoader(range(12), batch_size=2))  # type: ignore[arg-type]
    for _ in zip(loader, range(3), strict=False):
        pass
    state = loader.state_dict()
    for other, why in (
        (DataLoader(range(12), batch_size=3), "length 6; it is 4"),  # type: ignore[arg-type]
        (DataLoader(range(11), batch_size=1, drop_last=True), "it is 11"),  # type: ignore[arg-type]
        (DataLoader(Stream(), batch_size=2), "length"),
    ):
        with pytest.raises(sp.BadArgumentError, match=why):
            Loader(other).load_state_dict(state)
    own = DataLoader(range(12), batch_size=2, generator=torch.Generator())  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="generators of its own"):
        Loader(own).load_state_dict(state)
    for bad in ({}, None, [1]):
        with pytest.raises(sp.BadArgumentError, match="not a position"):
            Loader([1]).load_state_dict(bad)  # type: ignore[arg-type]


def test_other_data_of_as_many_batches_is_refused_within_an_epoch_and_taken_after_it() -> None:
    def made(n: int, **more: Any) -> Loader:
        return Loader(DataLoader(range(n), batch_size=4, **more))  # type: ignore[arg-type]

    others = [
        (made(14, shuffle=True), "with samples 15; it is 14 now"),
        (made(15), "with sampler RandomSampler, BatchSampler; it is SequentialSampler, BatchSampler now"),
        (made(15, sampler=WeightedRandomSampler([1.0] * 15, 15)), "it is WeightedRandomSampler, BatchSampler now"),
    ]
    loader = made(15, shuffle=True)
    for _ in zip(loader, range(2), strict=False):
        pass
    state = through_a_checkpoint(loader.state_dict())
    for other, why in others:
        with pytest.raises(sp.BadArgumentError, match=why):
            other.load_state_dict(state)
        assert (other.epoch, other.batch) == (0, 0)
    made(15, shuffle=True, num_workers=1).load_state_dict(state)
    ended = made(15, shuffle=True)
    for _ in ended:
        pass
    for other, _ in others:
        other.load_state_dict(through_a_checkpoint(ended.state_dict()))
        assert (other.epoch, other.batch) == (1, 0)


def test_a_stream_that_became_shorter_is_an_error() -> None:
    class Lines:
        def __init__(self, n: int) -> None:
            self.n = n

        def __iter__(self) -> Iterator[int]:
            return iter(range(self.n))

    loader = Loader(Lines(9))
    drawn(loader, 1, 5)
    again = Loader(Lines(3))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(sp.BadArgumentError, match="5 batches of this epoch were consumed, and it has only 3"):
        iter(again)


def test_bad_loaders_are_refused() -> None:
    with pytest.raises(sp.BadArgumentError, match="only once"):
        Loader(iter([1]))
    with pytest.raises(sp.BadArgumentError, match="must be iterable, not int"):
        Loader(3)  # type: ignore[arg-type]
    with pytest.raises(sp.BadArgumentError, match="in_order"):
        Loader(DataLoader(range(4), num_workers=1, in_order=False))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no length"):
        len(Loader(DataLoader(Stream())))
