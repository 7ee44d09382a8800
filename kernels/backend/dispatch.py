"""Choice of the back end of a call, by the device of its array.

Each subject writes down the functions of its back ends as protocols, which the type checker compares with the modules
`reference`, `cpu` and `gpu` of the subject. `tests/kernels/test_dispatch.py` compares the default values.
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Generic, TypeVar, cast

from . import first_calls
from .arrays import Array, on_gpu
from .imported import back_end_module

B = TypeVar("B")


class Dispatch(Generic[B]):
    """The back ends of a subject that has one for each device.

    Args:
        subject: folder of the subject in `kernels/`.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def __call__(self, x: Array) -> B:
        """Return the module `gpu` or `cpu`, by the device of x; see `first_calls`."""
        return cast("B", compiled_back_end(self.subject, "gpu") if on_gpu(x) else first_calls.cpu(self.subject))


class OnHost(Generic[B]):
    """The back end of functions that run on the CPU only.

    Args:
        subject: folder of the subject in `kernels/`.
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject

    def __call__(self) -> B:
        """Return `cpu`; for the first calls see `first_calls`."""
        return cast("B", first_calls.cpu(self.subject))


@lru_cache(None)
def compiled_back_end(subject: str, name: str = "cpu") -> ModuleType:
    """Return the module of a back end, whose functions may also write to given memory."""
    return back_end_module(subject, name)
