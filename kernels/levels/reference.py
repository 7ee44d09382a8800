"""Oracle of the level functions: remainders, stable sorts and binary searches."""

from __future__ import annotations

from array_api_compat import array_namespace

from ..backend.arrays import Array
from ..errors import BadArgumentError, CorruptDataError, ShrinkpointError


def _flat(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.astype(xp.reshape(x, (-1,)), xp.int64)


def _check(x: Array, size: int, error: type[ShrinkpointError]) -> None:
    xp = array_namespace(x)
    if bool(xp.any(xp.astype(x, xp.int64) >= size)):
        raise error(f"a level is not below size, {size}")


def _difference(previous: Array, other: Array, size: int, error: type[ShrinkpointError]) -> Array:
    xp = array_namespace(other)
    _check(previous, size, error)
    _check(other, size, error)
    result = xp.astype((_flat(previous) - _flat(other)) % size, xp.uint8)
    return xp.reshape(result, tuple(other.shape))


def delta(previous: Array, current: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.delta`."""
    return _difference(previous, current, size, BadArgumentError)


def undelta(previous: Array, delta: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.undelta`.

    Subtracting the difference again gives the current level.
    """
    return _difference(previous, delta, size, CorruptDataError)


def _counts(x: Array, size: int) -> Array:
    """Count how often each of 0 ... size - 1 occurs in x (int64)."""
    xp = array_namespace(x)
    ordered = xp.sort(x)
    every = xp.arange(size, dtype=xp.int64)
    return xp.searchsorted(ordered, every, side="right") - xp.searchsorted(ordered, every, side="left")


def split_by_level(values: Array, keys: Array, size: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.levels.split_by_level`."""
    xp = array_namespace(values)
    _check(keys, size, BadArgumentError)
    flat = _flat(keys)
    return xp.take(xp.reshape(values, (-1,)), xp.argsort(flat, stable=True)), _counts(flat, size)


def merge_by_level(grouped: Array, keys: Array, size: int) -> Array:
    """See `shrinkpoint.kernels.levels.merge_by_level`."""
    xp = array_namespace(grouped)
    _check(keys, size, CorruptDataError)
    order = xp.argsort(_flat(keys), stable=True)
    place = xp.argsort(order, stable=True)  # the inverse permutation: where each element went
    return xp.reshape(xp.take(xp.reshape(grouped, (-1,)), place), tuple(keys.shape))


def joint_counts(previous: Array, current: Array, previous_size: int, current_size: int) -> Array:
    """See `shrinkpoint.kernels.levels.joint_counts`."""
    xp = array_namespace(current)
    _check(previous, previous_size, BadArgumentError)
    _check(current, current_size, BadArgumentError)
    pairs = _flat(previous) * current_size + _flat(current)
    return xp.reshape(_counts(pairs, previous_size * current_size), (previous_size, current_size))
