"""Seconds and peak memory of a call."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_RESET = "/proc/self/clear_refs"
_COMPILING = 0.05
"""Share of a call's seconds spent on loading and compiling kernels from which the call is repeated."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds and peak memory of one call.

    Args:
        seconds: wall time.
        peak_nbytes: peak of the process's memory above the memory before the call; None where the system does not
            measure it.
    """

    seconds: float
    peak_nbytes: int | None


def measure(call: Callable[[], T]) -> tuple[T, Usage]:
    """Return the result of a call, and its usage without compilation.

    A call that spends much of its time on loading and compiling kernels is repeated.
    """
    from numba.core import event

    with event.install_listener("numba:compiler_lock", event.RecordingListener()) as listener:  # type: ignore[no-untyped-call]
        result, usage = _once(call)
    if _locked_seconds(listener.buffer) > _COMPILING * usage.seconds:
        del result
        result, usage = _once(call)
    return result, usage


def peak(call: Callable[[], object]) -> int | None:
    """Return the bytes of the peak of a call above those held before; None without Linux."""
    gc.collect()
    return _once(call)[1].peak_nbytes


def _once(call: Callable[[], T]) -> tuple[T, Usage]:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: free memory that it keeps would hide new allocations
    is_known = os.access(_RESET, os.W_OK)
    if is_known:
        Path(_RESET).write_text("5", encoding="ascii")
    before = _status("VmRSS") if is_known else 0
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    return result, Usage(seconds, max(0, _status("VmHWM") - before) if is_known else None)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _locked_seconds(events: list[tuple[float, Any]]) -> float:
    """Seconds in which any thread held or awaited Numba's compiler."""
    total, depth, start = 0.0, 0, 0.0
    for when, one in events:
        if one.is_start:
            start = start if depth else when
            depth += 1
        elif depth:
            depth -= 1
            total += 0.0 if depth else when - start
    return total
