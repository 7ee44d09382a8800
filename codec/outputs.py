"""The caller's arrays to decode into, checked before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels.backend.arrays import is_torch
from .errors import BadArgumentError
from .state import tree
from .state.leaves import SCALARS, Array, NpArray, as_bytes, is_stored_as_array, memory_order, read_leaf

if TYPE_CHECKING:
    from .records import ArrayRecord


def outputs_of(out: Any, records: Sequence[ArrayRecord], *, is_whole: bool = True) -> dict[int, Array]:
    """Return the array of `out` for each record, by its number.

    Args:
        out: a tree with an array at the place of each record; other values are ignored.
        records: of the checkpoint.
        is_whole: False: arrays that are missing or do not fit are left out.

    Raises:
        BadArgumentError: an array is missing, has another dtype or shape, or cannot be written in place; nothing was
            written.
    """
    _, found = tree.flatten(out, is_stored_as_array, name="out")
    given = {node.key: node.value for node in found}
    lines, targets = [], {}
    for number, record in enumerate(records):
        if record.spec.library in SCALARS:
            continue
        if record.key not in given:
            lines.append(f"{record.path}: not in out")
            continue
        target = given[record.key]
        spec = read_leaf(target, record.path, in_memory=True)[0]
        if (spec.dtype, spec.shape) != (record.spec.dtype, record.spec.shape):
            lines.append(f"{record.path}: {record.spec.dtype} {record.spec.shape}, in out {spec.dtype} {spec.shape}")
        elif not _is_writable(target):
            lines.append(f"{record.path}: a {type(target).__qualname__} in out that is not dense and writable")
        else:
            targets[number] = target
    if lines and is_whole:
        shown = "\n  ".join(lines[:20])
        raise BadArgumentError(f"out does not fit the checkpoint; nothing was written\n  {shown}")
    return targets


def _is_writable(target: Any) -> bool:
    if is_torch(target):
        is_dense = target.is_contiguous() or memory_order(target)
        return bool(is_dense and not target.is_conj() and not target.is_neg())
    is_dense = isinstance(target, np.ndarray) and (target.flags.c_contiguous or memory_order(target))
    return bool(is_dense and target.flags.writeable)


def host_memory(target: Array) -> NpArray | None:
    """Return the writable bytes of an output array; None if not on the host, row by row."""
    if is_torch(target):
        if target.device.type != "cpu" or not target.numel() or not target.is_contiguous():
            return None
        return as_bytes(target.detach().view(-1))
    return as_bytes(target.reshape(-1)) if target.size and target.flags.c_contiguous else None


def write_to(target: Array, values: Array) -> None:
    """Copy decoded values, in the output's shape, to the output."""
    if is_torch(target):
        target.detach().copy_(values)
    else:
        target[...] = values
