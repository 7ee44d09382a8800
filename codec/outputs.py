"""The arrays to decode into: new ones, or those of the caller, which are checked first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..kernels.backend.arrays import is_torch, on_gpu
from .errors import BadArgumentError
from .state import tree
from .state.leaves import (
    SCALARS,
    Array,
    NpArray,
    as_bytes,
    build_leaf,
    from_bytes,
    is_sharded,
    is_stored_as_array,
    memory_order,
    read_leaf,
)

if TYPE_CHECKING:
    from .records import ArrayRecord

_SHARED = 1 << 25
"""Bytes of memory that new arrays share. Linux clears memory of this size in huge pages; clearing it in pages of 4 KiB
takes as long as decoding."""
_LARGE = 1 << 17
_ALIGNMENT = 64


def new_outputs(records: Sequence[ArrayRecord]) -> dict[int, Array]:
    """Return new arrays for the large arrays of a checkpoint, by number.

    The others are made where they are decoded. Neighbours share memory, which is freed with the last of them.
    """
    arrays: dict[int, Array] = {}
    sizes = {
        i: -(-r.spec.nbytes // _ALIGNMENT) * _ALIGNMENT
        for i, r in enumerate(records)
        if r.spec.library in ("torch", "numpy") and not r.spec.order and len(r.group.members) == 1
        if r.spec.nbytes >= _LARGE
    }
    left, memory, used = sum(sizes.values()), np.empty(0, np.uint8), 0
    for i, size in sizes.items():
        if used + size > memory.size:
            try:
                memory = np.empty(max(size, min(left, _SHARED)) + _ALIGNMENT, np.uint8)
            except MemoryError:
                return arrays  # the decoder of an array says which one does not fit
            used = -memory.ctypes.data % _ALIGNMENT
        spec = records[i].spec
        arrays[i] = build_leaf(from_bytes(memory[used : used + spec.nbytes], spec), spec)
        used, left = used + size, left - size
    return arrays


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


def device_memory(target: Array | None) -> Array | None:
    """Return an output tensor on a GPU, flat; None if it is elsewhere, or not row by row."""
    if target is None or not on_gpu(target) or is_sharded(target) or not target.numel() or not target.is_contiguous():
        return None
    return target.detach().view(-1)


def copy_parts(joined: Array, rooms: list[Array]) -> None:
    """Copy the parts of a tensor on a GPU to flat tensors there, in one launch.

    Bits are copied as integers: torch would copy 16-bit floats by way of float32, which changes NaNs, and has no such
    copy for some dtypes.
    """
    import torch

    kind = getattr(torch, f"int{8 * min(joined.element_size(), 8)}")
    parts = joined.split([room.numel() for room in rooms])
    torch._foreach_copy_([room.view(kind) for room in rooms], [part.view(kind) for part in parts])


def write_to(target: Array, values: Array) -> None:
    """Copy decoded values, in the output's shape, to the output."""
    if is_torch(target):
        target.detach().copy_(values)
    else:
        target[...] = values
