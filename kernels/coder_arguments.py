"""What the public modules of the sequential coders share: the checks of their arguments."""

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

UNSIGNED = ("uint8", "uint16", "uint32")
COUNTS = ("int64", "int32", "int16", "int8", *UNSIGNED)
"""What int64 holds exactly, for libraries without it."""
PLAUSIBLE = 1 << 32
"""Elements that a machine may well have room for."""


def stored_bytes(x: Array | bytes | bytearray | memoryview, *, anywhere: bool = False) -> Array:
    """Stored bytes as a uint8 array: an array stays what it is, a bytes-like object becomes NumPy without a copy."""
    if isinstance(x, bytes | bytearray | memoryview):
        return np.frombuffer(x, dtype=np.uint8)
    return array("data", x, ("uint8",), 1, host=not anywhere)


@contextmanager
def room_for(n: int) -> Iterator[None]:
    """Raise BadArgumentError, not MemoryError, where n elements were asked for that no machine has room for.

    That fewer do not fit is no matter of the argument, and stays a MemoryError.
    """
    try:
        yield
    except MemoryError:
        if n <= PLAUSIBLE:
            raise
        raise BadArgumentError(f"n is {n}; there is no memory for so many elements") from None


def compiled(x: Array, dtype: type[np.generic] | None = None) -> np.ndarray[Any, Any]:
    """x as a contiguous NumPy array that may be written to: Numba would compile anew for a read-only one.

    Args:
        x: any array on the CPU.
        dtype: what to convert it to, if it is anything else; default: as it is.
    """
    found = to_numpy(x)
    if dtype is not None:
        found = found.astype(dtype, copy=False)
    return found if found.flags.writeable else found.copy()
