"""Argument checks that the public modules of the sequential coders share."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import array
from .arrays import to_numpy
from .errors import BadArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .arrays import Array

NumPy = np.ndarray[Any, Any]
UNSIGNED = ("uint8", "uint16", "uint32")
COUNTS = ("int64", "int32", "int16", "int8", *UNSIGNED)
"""Integer dtypes that int64 holds exactly, for libraries without int64."""
PLAUSIBLE = 1 << 32
"""Number of elements up to which a MemoryError is not reported as a wrong argument."""


def stored_bytes(x: Array | bytes | bytearray | memoryview, *, anywhere: bool = False) -> Array:
    """Return stored bytes as a uint8 array; bytes-like objects become NumPy without a copy."""
    if isinstance(x, bytes | bytearray | memoryview):
        return np.frombuffer(x, dtype=np.uint8)
    return array("data", x, ("uint8",), 1, host=not anywhere)


@contextmanager
def room_for(n: int) -> Iterator[None]:
    """Turn a MemoryError for an implausible number of elements n into a BadArgumentError.

    For a plausible n the MemoryError is raised unchanged.
    """
    try:
        yield
    except MemoryError:
        if n <= PLAUSIBLE:
            raise
        raise BadArgumentError(f"n is {n}; no machine has memory for so many elements") from None


def compiled(x: Array, dtype: type[np.generic] | None = None) -> np.ndarray[Any, Any]:
    """Return x as a contiguous, writeable NumPy array.

    Numba would compile a second version for a read-only array.

    Args:
        x: any array on the CPU.
        dtype: dtype to convert it to; default: no conversion.
    """
    found = to_numpy(x)
    if dtype is not None:
        found = found.astype(dtype, copy=False)
    return found if found.flags.writeable else found.copy()


def lent(x: NumPy) -> NumPy:
    """Return the same memory as a writeable array, for code that only reads it.

    Numba would compile a second version for a read-only array, and `compiled` would copy it.
    """
    if x.flags.writeable:
        return x
    interface = dict(x.__array_interface__)
    interface["data"] = (interface["data"][0], False)
    return np.asarray(_Memory(interface, x))


def host_memory(out: Array, n: int, dtype: str) -> NumPy:
    """Return `out` if it is a contiguous NumPy array of n elements that can be written to.

    Raises:
        BadArgumentError: it is not.
    """
    array("out", out, (dtype,), (n,))
    if not isinstance(out, np.ndarray) or not out.flags.c_contiguous or not out.flags.writeable:
        raise BadArgumentError("out must be a contiguous NumPy array that can be written to")
    return out


class _Memory:
    """Owner of memory that NumPy reads through the array interface."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self.owner = owner
