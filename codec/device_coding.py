"""The setting that lets a GPU code the symbols of its arrays; it is off by default."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from ..kernels.backend.arrays import is_torch, on_gpu
from .errors import BadArgumentError

VARIABLE = "SHRINKPOINT_DEVICE_CODING"
LEAST = 1 << 16
"""Symbols from which a block is coded on a GPU: one takes as long there as thousands of others at the same time."""
_place: ContextVar[Any] = ContextVar("device that decodes blocks", default=None)
_is_on: bool | None = None
"""What `set_device_coding` set."""


def device_coding() -> bool:
    """Return whether a GPU codes the symbols of arrays on it.

    Raises:
        BadArgumentError: the environment variable SHRINKPOINT_DEVICE_CODING is neither 0 nor 1.
    """
    if _is_on is not None:
        return _is_on
    text = os.environ.get(VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise BadArgumentError(f"the environment variable {VARIABLE} is {text[:40]!r}; it must be 0 or 1")
    return text == "1"


def is_large(n: int) -> bool:
    """Return whether a GPU should work on n symbols by themselves."""
    return n >= LEAST


def is_block(n: int) -> bool:
    """Return whether n symbols are coded as a block that a GPU could code."""
    return is_large(n) and device_coding()


def set_device_coding(on: bool | None) -> None:
    """Set whether a GPU codes symbols.

    Blocks of 65,536 symbols and more of quantized weights and of moments are then coded by rANS with 64 states, or
    stored, wherever the array lies: the bytes depend on the setting, not on the device. Every reader reads them.

    Args:
        on: None goes back to the environment variable SHRINKPOINT_DEVICE_CODING.
    """
    global _is_on
    _is_on = on


@contextmanager
def decoding_near(outputs: Iterable[Any]) -> Iterator[None]:
    """Context in which blocks are decoded on the GPU of the first output that lies on one.

    Without such an output, or with the setting off, the host decodes them. All threads write to outputs on the default
    streams of their GPUs, after what the caller began there; at the end the outputs are complete.
    """
    devices = list(dict.fromkeys(x.device for x in outputs if is_torch(x) and on_gpu(x)))
    token = _place.set(devices[0] if devices and device_coding() else None)
    try:
        with _default_streams([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        _place.reset(token)


@contextmanager
def _default_streams(devices: Sequence[Any]) -> Iterator[None]:
    """Context in which this thread, as any new one, uses default streams; waits at both ends."""
    with ExitStack() as stack:
        for device in devices:
            import torch

            torch.cuda.synchronize(device)
            stack.callback(torch.cuda.synchronize, device)
            stack.enter_context(torch.cuda.stream(torch.cuda.default_stream(device)))
        yield


def decoding_device() -> Any:
    """Return the torch device that decodes blocks here; None: the host does."""
    return _place.get()
