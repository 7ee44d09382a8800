"""Choice of the back end of a call, by the device of its array."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import first_calls
from .arrays import on_gpu
from .imported import back_end_module

if TYPE_CHECKING:
    from types import ModuleType

    from .arrays import Array


def back_end(x: Array, subject: str) -> Any:
    """Return `kernels.SUBJECT.gpu` or `kernels.SUBJECT.cpu`, by the device of x.

    For the first calls on the CPU see `first_calls`.
    """
    return compiled_back_end(subject, "gpu") if on_gpu(x) else first_calls.cpu(subject)


@lru_cache(None)
def compiled_back_end(subject: str, name: str = "cpu") -> ModuleType:
    """Return the module of a back end, whose functions may also write to given memory."""
    return back_end_module(subject, name)
