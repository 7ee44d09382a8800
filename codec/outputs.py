"""The arrays to decode into: new ones, or those of the caller, which are checked first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..kernels.backend.arrays import is_torch, on_gpu
from .errors import BadArgumentError, UnsupportedLeafError
from .state import tree
from .state.leaves import (
    SCALARS,
    Array,
    LeafSpec,
    NpArray,
    as_bytes,
    build_leaf,
    from_bytes,
    is_array,
    is_sharded,
    is_stored_as_array,
    memory_order,
    read_leaf,
    same_storage_key,
)

if TYPE_CHECKING:
    from .records import ArrayRecord

Key = TypeVar("Key", bound=Hashable)
Placed = Callable[[int, Callable[[], tuple[str, str]]], Array]
"""Function that returns the array at a place of a tree, by number, as `tree.unflatten` calls it."""
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


def outputs_of(
    out: Any, nodes: Sequence[Any], records: Sequence[ArrayRecord], *, is_whole: bool = True
) -> tuple[dict[int, Array], dict[str, Array]]:
    """Return the array of `out` for each record, and those at further places of tied arrays.

    Args:
        out: a tree with an array at the place of each record; other values are ignored, and further places of tied
            arrays may lack one.
        nodes: of the checkpoint's tree.
        records: of the checkpoint.
        is_whole: False: arrays that are missing or do not fit are left out.

    Returns:
        By number of the record, and by key of the place.

    Raises:
        BadArgumentError: an array is missing, has another dtype or shape, cannot be written in place, or shares memory
            with another; nothing was written.
    """
    _, found = tree.flatten(out, lambda x: is_stored_as_array(x) or not isinstance(x, dict | list | tuple), name="out")
    given = {node.key: node.value for node in found}
    lines, targets, names = [], dict[str, Array](), dict[str, int]()
    places = [(number, record.path, record.key) for number, record in enumerate(records)]
    if sum(isinstance(node, dict) and "a" in node for node in nodes) > len(places):
        places = []
        tree.unflatten(nodes, lambda number, place: places.append((number, *place())))
    for number, path, key in places:
        first = targets.get(records[number].key)
        if records[number].spec.library in SCALARS or (key not in given and key != records[number].key):
            continue
        if line := _misfit(given.get(key), records[number]):
            lines.append(f"{path}: {line}")
        elif first is None or same_storage_key(given[key]) != same_storage_key(first):
            targets[key], names[key] = given[key], number
    shared = overlapping(targets)
    lines += [f"{path}: an array in out that shares memory with another" for _, path, key in places if key in shared]
    if lines and is_whole:
        shown = "\n  ".join(lines[:20])
        raise BadArgumentError(f"out does not fit the checkpoint; nothing was written\n  {shown}")
    further = {key: x for key, x in targets.items() if key not in shared and records[names[key]].key != key}
    return {names[key]: x for key, x in targets.items() if key not in shared and key not in further}, further


def _misfit(target: Any, record: ArrayRecord) -> str:
    """Return why an array cannot be decoded into, or ""."""
    if not is_array(target):
        return "not in out"
    with contextlib.suppress(UnsupportedLeafError):
        spec = read_leaf(target, record.path, in_memory=True)[0]
        if (spec.dtype, spec.shape) != (record.spec.dtype, record.spec.shape):
            return f"{record.spec.dtype} {record.spec.shape}, in out {spec.dtype} {spec.shape}"
        if not is_sharded(target) and _is_writable(target):
            return ""
    return f"a {type(target).__qualname__} in out that is not dense and writable"


def overlapping(arrays: Mapping[Key, Array]) -> set[Key]:
    """Return the keys of dense arrays that share memory with others."""
    shared: set[Key] = set()
    last, end = None, ("", 0)
    spans = {k: (str(x.device), x.data_ptr()) if is_torch(x) else ("cpu", x.ctypes.data) for k, x in arrays.items()}
    for key in sorted((key for key, x in arrays.items() if x.nbytes), key=spans.__getitem__):
        if last is not None and spans[key] < end:
            shared |= {last, key}
        last, end = key, max(end, (spans[key][0], spans[key][1] + arrays[key].nbytes))
    return shared


def placed(arrays: Mapping[int, Array], further: Mapping[str, Array]) -> Placed:
    """Return what gives decoded arrays to a tree, and fills those at further places."""

    def array(number: int, place: Callable[[], tuple[str, str]]) -> Array:
        target = further.get(place()[1]) if further else None
        if target is None:
            return arrays[number]
        write_to(target, arrays[number])
        return target

    return array


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
        return as_bytes(_flat(target))
    return as_bytes(target.reshape(-1)) if target.size and target.flags.c_contiguous else None


def device_memory(target: Array | None) -> Array | None:
    """Return an output tensor on a GPU, flat; None if it is elsewhere, or not row by row."""
    if target is None or not on_gpu(target) or not target.numel() or not target.is_contiguous():
        return None
    return _flat(target)


def _flat(target: Array) -> Array:
    """Return a contiguous tensor as a vector; `view(-1)` keeps the stride of a single element."""
    return target.detach().as_strided((target.numel(),), (1,))


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
    """Copy values, in the output's shape, to the output."""
    if is_torch(target) != is_torch(values):
        spec, flat = read_leaf(values, "")
        library = "torch" if is_torch(target) else "numpy"
        values = from_bytes(as_bytes(flat), LeafSpec(library, spec.dtype, spec.shape)).reshape(spec.shape)
    if is_torch(target):
        target.detach().copy_(values.detach())
    else:
        target[...] = values
