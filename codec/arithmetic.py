"""Arithmetic settings for writing and reading files, independent of the caller's settings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

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
