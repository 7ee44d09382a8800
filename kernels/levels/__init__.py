"""Levels of two checkpoints: cyclic differences, grouping by previous level, pair counts.

All arrays are uint8, any shape, taken in flat (row-major) order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from ..backend.arguments import array, integer, same_device
from ..backend.arrays import Array
from ..backend.dispatch import Dispatch
from ..errors import BadArgumentError


class BackEnd(Protocol):
    """Functions that every back end of this subject has."""

    def delta(self, previous: Array, current: Array, size: int) -> Array: ...
    def undelta(self, previous: Array, delta: Array, size: int) -> Array: ...
    def split_by_level(self, values: Array, keys: Array, size: int) -> tuple[Array, Array]: ...
    def merge_by_level(self, grouped: Array, keys: Array, size: int) -> Array: ...
    def joint_counts(self, previous: Array, current: Array, previous_size: int, current_size: int) -> Array: ...


back_end = Dispatch[BackEnd]("levels")

if TYPE_CHECKING:
    from . import cpu, gpu, reference

    _EVERYWHERE: tuple[BackEnd, ...] = (reference, cpu, gpu)

MAX_SIZE = 256
"""Largest number of levels that a byte can hold."""


def _checked(size: int, **arrays: Array) -> int:
    """Return the checked size; all arrays must be uint8, of one length, on one device."""
    size = integer("size", size, 2, MAX_SIZE)
    (first_name, first), *others = arrays.items()
    for name, x in arrays.items():
        array(name, x, ("uint8",))
    for name, x in others:
        number, wanted = math.prod(x.shape), math.prod(first.shape)
        if number != wanted:
            raise BadArgumentError(f"{name} has {number} elements; as many as {first_name}, {wanted}, are needed")
        same_device(name, x, first_name, first)
    return size


def delta(previous: Array, current: Array, size: int) -> Array:
    """Cyclic difference `(previous - current) mod size` of each element.

    Args:
        previous: uint8 levels, each below size.
        current: uint8 levels, each below size, as many elements as `previous`.
        size: number of levels, the two special ones included, 2 ... 256; the larger of both checkpoints.

    Returns:
        uint8, shape of `current`.

    Raises:
        BadArgumentError: size out of range, lengths differ, or a level is not below size.

    Example:
        >>> import numpy as np
        >>> delta(np.array([2, 3, 0], dtype=np.uint8), np.array([2, 4, 1], dtype=np.uint8), 5).tolist()
        [0, 4, 4]

    Source: Inshrinkerator, section 6 (delta encoding of quantized checkpoints).
    """
    size = _checked(size, current=current, previous=previous)
    return back_end(current).delta(previous, current, size)


def undelta(previous: Array, delta: Array, size: int) -> Array:
    """Inverse of `delta`: `current = (previous - delta) mod size`.

    Args:
        previous: uint8 levels, each below size.
        delta: uint8, each below size, as many elements as `previous`.
        size: as given to `delta`.

    Returns:
        uint8, shape of `delta`.

    Raises:
        BadArgumentError: size out of range or lengths differ.
        CorruptDataError: an element of either array is not below size.

    Example:
        >>> import numpy as np
        >>> undelta(np.array([2, 3, 0], dtype=np.uint8), np.array([0, 4, 4], dtype=np.uint8), 5).tolist()
        [2, 4, 1]
    """
    size = _checked(size, delta=delta, previous=previous)
    return back_end(delta).undelta(previous, delta, size)


def split_by_level(values: Array, keys: Array, size: int) -> tuple[Array, Array]:
    """Group values by their key in ascending order (a stable counting sort).

    Within a group the original order is kept.

    Args:
        values: uint8.
        keys: uint8, each below size, as many elements as `values`.
        size: number of groups, 2 ... 256.

    Returns:
        grouped: uint8 [n], the values of key 0, then of key 1, ...
        counts: int64 [size], elements of each group (JAX without `jax_enable_x64`: int32).

    Raises:
        BadArgumentError: size out of range, lengths differ, or a key is not below size.

    Example:
        >>> import numpy as np
        >>> u8 = lambda *v: np.array(v, dtype=np.uint8)
        >>> grouped, counts = split_by_level(u8(7, 8, 9, 10), u8(1, 0, 1, 0), 3)
        >>> grouped.tolist(), counts.tolist()
        ([8, 10, 7, 9], [2, 2, 0])

    Source: Inshrinkerator, section 6 (rearrangement by the previous bucket).
    """
    size = _checked(size, values=values, keys=keys)
    return back_end(values).split_by_level(values, keys, size)


def merge_by_level(grouped: Array, keys: Array, size: int) -> Array:
    """Inverse of `split_by_level`: each element takes the next value of its key's group.

    Args:
        grouped: uint8 [n], as `split_by_level` returns it.
        keys: uint8 [n elements], each below size.
        size: number of groups, 2 ... 256.

    Returns:
        uint8, shape of `keys`.

    Raises:
        BadArgumentError: size out of range or lengths differ.
        CorruptDataError: a key is not below size.

    Example:
        >>> import numpy as np
        >>> u8 = lambda *v: np.array(v, dtype=np.uint8)
        >>> merge_by_level(u8(8, 10, 7, 9), u8(1, 0, 1, 0), 3).tolist()
        [7, 8, 9, 10]
    """
    size = _checked(size, grouped=grouped, keys=keys)
    return back_end(grouped).merge_by_level(grouped, keys, size)


def joint_counts(previous: Array, current: Array, previous_size: int, current_size: int) -> Array:
    """Count how often each pair (previous level, current level) occurs.

    Args:
        previous: uint8 levels, each below `previous_size`.
        current: uint8 levels, each below `current_size`, as many elements as `previous`.
        previous_size: 2 ... 256.
        current_size: 2 ... 256.

    Returns:
        int64 [previous_size, current_size], library and device of `current` (JAX without `jax_enable_x64`: int32).

    Raises:
        BadArgumentError: a size out of range, lengths differ, or a level is not below its size.

    Example:
        >>> import numpy as np
        >>> u8 = lambda *v: np.array(v, dtype=np.uint8)
        >>> joint_counts(u8(0, 1, 1), u8(1, 1, 1), 2, 2).tolist()
        [[0, 1], [0, 2]]
    """
    current_size = integer("current_size", current_size, 2, MAX_SIZE)
    previous_size = integer("previous_size", previous_size, 2, MAX_SIZE)
    _checked(previous_size, current=current, previous=previous)
    return back_end(current).joint_counts(previous, current, previous_size, current_size)
