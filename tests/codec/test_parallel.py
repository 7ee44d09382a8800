"""Parallel work on arrays: its order, its number of threads, and its cancellation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from shrinkpoint.codec import parallel
from shrinkpoint.codec.base import CHUNK
from shrinkpoint.codec.errors import BadArgumentError
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


class Streams(threading.local):
    """Stand-in for `torch.cuda`: a thread's streams on two devices; 0 is the default."""

    def __init__(self) -> None:
        self.used = [0, 0]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "is_initialized": lambda: True,
            "device_count": lambda: 2,
            "current_stream": lambda device: (device, self.used[device]),
            "default_stream": lambda device: (device, 0),
            "stream": self.using,
        }.items():
            patch.setattr(torch.cuda, name, value)

    @contextmanager
    def using(self, stream: tuple[int, int]) -> Iterator[None]:
        before = self.used
        self.used = [stream[1] if device == stream[0] else used for device, used in enumerate(before)]
        yield
        self.used = before


def test_all_threads_use_the_streams_of_the_calling_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on a default stream would not wait for those of the caller's stream."""
    cuda, both = Streams(), threading.Barrier(2)
    cuda.install(monkeypatch)

    def work(_: int) -> list[int]:
        both.wait(timeout=30)
        return list(cuda.used)

    with threads(2):
        with cuda.using((1, 7)):
            assert map_chunks(work, range(2)) == [[0, 7]] * 2
        assert map_chunks(work, range(2)) == [[0, 0]] * 2


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="POSIX")
def test_nothing_is_written_after_an_interrupt_was_raised() -> None:
    """Another thread went on to decode into the caller's arrays."""
    here, done = threading.get_ident(), []

    def work(number: int) -> None:
        if threading.get_ident() != here:
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # when the calling thread waits
            time.sleep(0.5)
            done.append(number)
        while not signal.getitimer(signal.ITIMER_REAL)[0] and not done:
            time.sleep(0.01)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with threads(2), pytest.raises(KeyboardInterrupt):
            map_chunks(work, range(2))
        assert len(done) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def start(threads: str) -> subprocess.CompletedProcess[str]:
    """Run a process with SHRINKPOINT_THREADS set to `threads`."""
    code = (
        "import shrinkpoint as sp\n"
        "try: print(sp.threads())\n"
        "except sp.BadArgumentError as error: print(error)\n"
        "sp.set_threads(3); print(sp.threads())"
    )
    environment = {**os.environ, "SHRINKPOINT_THREADS": threads}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("value", ["two", "-3"])
def test_a_wrong_number_of_threads_in_the_environment_is_said_when_it_is_needed(value: str) -> None:
    done = start(value)
    said = f"the environment variable SHRINKPOINT_THREADS is '{value}'; it must be an integer of at least 1"
    assert (done.stdout.splitlines(), done.stderr) == ([said, "3"], "")


def test_an_empty_number_of_threads_in_the_environment_is_none() -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    done = start("")
    assert (done.stdout.splitlines(), done.stderr) == ([str(cores), "3"], "")


def test_which_numbers_of_threads_the_environment_may_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, right in (("1", 1), (" 2 ", 2), ("064", 64), ("", 0), ("  ", 0)):
        monkeypatch.setenv(parallel.VARIABLE, value)
        assert parallel._from_environment() == right
    for value in ("two", "1.5", "-3", "0", "1e3", "٣", "1_0", "9" * 5000):
        monkeypatch.setenv(parallel.VARIABLE, value)
        with pytest.raises(BadArgumentError, match=r"SHRINKPOINT_THREADS is '.{1,40}'; it must be"):
            parallel._from_environment()
