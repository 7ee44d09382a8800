"""Work on several cores: threads over kernels that release the GIL, results in order.

The arithmetic settings of all these threads are the library's own, independent of the caller's.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..kernels.backend.arguments import integer, or_none
from ..kernels.backend.arrays import device_of, imported, on_gpu
from .base import CHUNK, Leaf
from .errors import BadArgumentError

_NUMPY: Any = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""NumPy's default reactions to floating-point errors; `np.seterr(all="raise")` of the caller has no effect."""
_LEAST, _HALF = sys.float_info.min, 0.5


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Keep subnormal numbers and NumPy's default error handling within a `with` block.

    A thread may be set to treat subnormal numbers as zero, by `torch.set_flush_denormal(True)` or by a library that
    was compiled for speed and sets it when it is loaded. Files would then depend on the setting, and values would be
    lost. The caller's settings are restored at the end.

    Example:
        >>> import torch
        >>> flushes = torch.set_flush_denormal(True)
        >>> with own_arithmetic():
        ...     print(sys.float_info.min * np.random.default_rng(0).random() > 0)
        True
        >>> restored = torch.set_flush_denormal(False)
    """
    with np.errstate(**_NUMPY), subnormal_numbers():
        yield


@contextmanager
def subnormal_numbers() -> Iterator[None]:
    """Keep subnormal numbers in this thread within a `with` block.

    This is the part of `own_arithmetic` that a thread does not inherit from the one that started it.
    """
    # Not a constant expression: it is the thread's own product.
    if _LEAST * _HALF != 0.0:
        yield
        return
    import torch

    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)


def current_streams() -> list[Callable[[], AbstractContextManager[Any]]]:
    """Return contexts in which a thread uses the GPU streams of this one.

    A thread begins with default streams, which do not wait for others.
    """
    torch: Any = imported("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    used = [(torch.cuda.current_stream(i), torch.cuda.default_stream(i)) for i in range(torch.cuda.device_count())]
    return [partial(torch.cuda.stream, stream) for stream, default in used if stream != default]


A = TypeVar("A")
B = TypeVar("B")

LEAST_BESIDE = 1 << 18
"""Elements from which a thread for an array pays: most of the work on a smaller one is Python code, which runs in one
thread at a time (measured on two cores: 1 M parameters in small arrays take longer on two threads than on one)."""
VARIABLE = "SHRINKPOINT_THREADS"
MOST = 4
"""Threads unless more are asked for: others wait for the interpreter. A GPT's AdamW state of 1 GB on an H200, with 16
cores, takes 2.4, 1.1, 1.2, 1.6 and 1.7 s on 1, 2, 4, 8 and 16 threads, and on the host 4.2, 1.9, 1.4, 1.3 and 1.4 s."""
_limit: int | None = None
"""The bound on threads; 0: the usual number; None: the environment was not read yet."""
_inside: ContextVar[bool] = ContextVar("inside a worker thread", default=False)
_stop: ContextVar[Callable[[], bool] | None] = ContextVar("asks whether to give up", default=None)
_lock = threading.Lock()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def threads() -> int:
    """Number of threads of `compress` and `decompress`: the usable cores, at most four.

    Raises:
        BadArgumentError: the environment variable SHRINKPOINT_THREADS is not a valid number of threads.
    """
    global _limit
    if _limit is None:
        _limit = _from_environment()
    if _limit:
        return _limit
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST)


def set_threads(n: int | None) -> None:
    """Set the number of threads; None goes back to the usable cores, at most four.

    Args:
        n: at least 1. The environment variable SHRINKPOINT_THREADS says it for a whole process (unset or empty: the
            usual number), until this is called.

    Raises:
        BadArgumentError: n is not an integer of at least 1.
    """
    global _limit
    _limit = or_none("threads", n, integer, 1) or 0


def _from_environment() -> int:
    """Return the number of threads set in the environment; 0 if none is set."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text)):
        raise BadArgumentError(
            f"the environment variable {VARIABLE} is {text[:40]!r}; it must be an integer of at least 1"
        )
    return int(text)


class Stopped(Exception):
    """Work was stopped by request."""


@contextmanager
def stoppable(stop: Callable[[], bool], *, alone: bool = False) -> Iterator[None]:
    """Context in which `map_chunks` raises Stopped as soon as `stop()` returns true.

    Args:
        stop: cheap; asked before every piece, from any thread.
        alone: also do all work in the calling thread.
    """
    asks, inside = _stop.set(stop), _inside.set(_inside.get() or alone)
    try:
        yield
    finally:
        _inside.reset(inside)
        _stop.reset(asks)


def give_way() -> None:
    """Raise Stopped if `stoppable` requires it, for work outside `map_chunks`."""
    stop = _stop.get()
    if stop is not None and stop():
        raise Stopped


def _executor(n: int) -> ThreadPoolExecutor:
    """Return the shared pool; it is created again after a fork or a change of the bound."""
    global _pool
    with _lock:
        if _pool is None or _pool[0] != os.getpid() or _pool[1] != n:
            _pool = (os.getpid(), n, ThreadPoolExecutor(n, thread_name_prefix="shrinkpoint"))
        return _pool[2]


def map_chunks(work: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Return `[work(i) for i in items]`, using all threads; raise the first error at the end.

    Called from inside a worker it runs in place, so that nested use cannot wait for itself.

    Raises:
        Stopped: `stoppable` asks for it.
    """
    items = list(items)
    stop = _stop.get()

    def checked(item: A) -> B:
        if stop is not None and stop():
            raise Stopped
        return work(item)

    n = min(threads(), len(items))
    if n <= 1 or _inside.get():
        return [checked(i) for i in items]

    streams = current_streams()
    results: dict[int, B] = {}
    errors: dict[int, BaseException] = {}
    numbers = itertools.count()

    def run() -> None:
        """Process items until all are done or an error occurs; keep the first error."""
        token = _inside.set(True)
        try:
            with subnormal_numbers(), ExitStack() as stack:
                for stream in streams:
                    stack.enter_context(stream())
                while not errors and (i := next(numbers)) < len(items):
                    try:
                        results[i] = checked(items[i])
                    except BaseException as e:
                        errors[i] = e
        finally:
            _inside.reset(token)

    active: list[None] = []

    def assist() -> None:
        active.append(None)
        try:
            run()
        finally:
            active.pop()

    # The calling thread works too: little work is done before another thread has woken up, and never waits for it.
    try:
        helpers = [_executor(threads()).submit(copy_context().run, assist) for _ in range(n - 1)]
        run()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
    except BaseException as e:  # an interrupt: the other threads end before the caller goes on
        errors[len(items)] = e
        while active:
            time.sleep(1e-3)
    if errors:
        raise errors[min(errors)]
    return [results[i] for i in range(len(items))]


def map_arrays(work: Callable[[A], B], arrays: Sequence[A], size: Callable[[A], int]) -> list[B]:
    """Return `[work(a) for a in arrays]`, on threads according to the size of each array.

    Arrays above a chunk run one after another, each on all threads by its chunks. Arrays of `LEAST_BESIDE` elements
    and more run in parallel. Smaller ones run in the calling thread.
    """

    def is_shared(array: A) -> bool:
        return LEAST_BESIDE <= size(array) <= CHUNK

    shared = iter(map_chunks(work, [a for a in arrays if is_shared(a)]))
    return [next(shared) if is_shared(a) else map_chunks(work, [a])[0] for a in arrays]


def batches(leaves: Sequence[Leaf]) -> list[list[int]]:
    """Return the array numbers of each call: all arrays of a GPU, or one array on the host."""
    groups: dict[tuple[int, int] | int, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(device_of(leaf.flat) if on_gpu(leaf.flat) else i, []).append(i)
    return list(groups.values())


def map_batches(work: Callable[[list[int]], Sequence[B]], leaves: Sequence[Leaf]) -> list[B]:
    """Return the results of `work` in order; it is called with a batch's numbers on any thread."""
    groups = batches(leaves)
    done = map_chunks(work, groups)
    found = {
        i: result for group, results in zip(groups, done, strict=True) for i, result in zip(group, results, strict=True)
    }
    return [found[i] for i in range(len(leaves))]
