"""The arithmetic that files are written and read in, whatever the caller's thread is set to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

_NUMPY: Any = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
"""NumPy's own reactions to floating-point errors: `np.seterr(all="raise")` is no concern."""
_LEAST, _HALF = sys.float_info.min, 0.5


@contextmanager
def own_arithmetic() -> Iterator[None]:
    """Within, subnormal numbers count, and NumPy reacts to errors as it does by itself; afterwards all is as it was.

    A thread may be set to take subnormal numbers for zero: `torch.set_flush_denormal(True)`, or a library that was
    compiled for speed and sets it for whoever loads it. Files would then depend on it, and values would be lost.

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
    """Within, subnormal numbers count in this thread: the part of `own_arithmetic` that a thread has of the one that
    started it."""
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
