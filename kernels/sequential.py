"""What the public modules of the sequential coders share: the checks of their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .arguments import check_arrays
from .arrays import dtype_name, on_gpu, to_numpy
from .errors import BadArgumentError

if TYPE_CHECKING:
    from .arrays import Array

UNSIGNED = ("uint8", "uint16", "uint32")


def vector(name: str, x: Array, dtypes: tuple[str, ...], ndim: int = 1, *, anywhere: bool = False) -> Array:
    """x itself if it has `ndim` axes and one of `dtypes`; raises BadArgumentError otherwise.

    The coders are sequential and run on the CPU only, so an array on a GPU is refused, not copied, unless it may be
    `anywhere`.
    """
    check_arrays(**{name: x})
    if dtype_name(x) not in dtypes:
        raise BadArgumentError(f"{name} has dtype {dtype_name(x)}; {' or '.join(dtypes)} is needed")
    if len(x.shape) != ndim:
        raise BadArgumentError(f"{name} has shape {tuple(x.shape)}; {ndim} axes are needed")
    if not anywhere and on_gpu(x):
        raise BadArgumentError(f"{name} is on a GPU; this runs on the CPU only, so move it there first")
    return x


def stored_bytes(x: Array | bytes | bytearray | memoryview, *, anywhere: bool = False) -> Array:
    """Stored bytes as a uint8 array: an array stays what it is, a bytes-like object becomes NumPy without a copy."""
    if isinstance(x, bytes | bytearray | memoryview):
        return np.frombuffer(x, dtype=np.uint8)
    return vector("data", x, ("uint8",), anywhere=anywhere)


def compiled(x: Array) -> np.ndarray[Any, Any]:
    """x as a contiguous NumPy array that may be written to: Numba would compile anew for a read-only one."""
    array = to_numpy(x)
    return array if array.flags.writeable else array.copy()
