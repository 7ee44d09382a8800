"""Which arrays are worked on beside each other, and that work stops when it is asked to."""

from __future__ import annotations

import threading

import pytest

from shrinkpoint.codec.base import CHUNK
from shrinkpoint.codec.parallel import LEAST_BESIDE, Stopped, map_arrays, map_chunks, stoppable

from .common import threads

SIZES = [1, LEAST_BESIDE, 7, CHUNK, LEAST_BESIDE - 1, CHUNK + 1, 0]


def test_small_arrays_and_those_of_several_chunks_stay_in_the_calling_thread() -> None:
    here, both = threading.get_ident(), threading.Barrier(2)

    def work(size: int) -> tuple[int, bool]:
        if LEAST_BESIDE <= size <= CHUNK:
            both.wait(timeout=30)  # passes only if two are in work at once
        return size, threading.get_ident() == here

    with threads(2):
        done = map_arrays(work, SIZES, lambda size: size)
    assert [size for size, _ in done] == SIZES
    assert all(own for size, own in done if not LEAST_BESIDE <= size <= CHUNK)


def test_a_large_array_has_all_threads_for_its_chunks() -> None:
    both = threading.Barrier(2)

    def work(_: int) -> list[int]:
        return map_chunks(lambda _: both.wait(timeout=30), range(2))

    with threads(2):
        assert sorted(map_arrays(work, [CHUNK + 1], lambda size: size)[0]) == [0, 1]


@pytest.mark.parametrize("size", [1, LEAST_BESIDE, CHUNK + 1])
def test_nothing_is_begun_after_it_is_asked_to_stop(size: int) -> None:
    begun = []
    with threads(2), stoppable(lambda: bool(begun)), pytest.raises(Stopped):
        map_arrays(begun.append, [size] * 9, lambda size: size)
    assert len(begun) <= 2
