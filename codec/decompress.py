"""`decompress`: decoding of a state into new arrays, or into those of the caller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

from ..kernels.backend.arguments import no_device
from ..kernels.backend.arrays import on_gpu
from .arithmetic import own_arithmetic
from .checkpoint import Checkpoint, check_parent, too_large, values_in
from .device_coding import decoding_near
from .errors import BadArgumentError, MissingParentError
from .groups import FilledReference
from .lossless.reference import BytesReference
from .outputs import device_memory, host_memory, new_outputs, outputs_of, write_to
from .parallel import map_arrays
from .records import Group
from .state import tree
from .state.leaves import Array, as_bytes, build_leaf, check_memory, from_bytes, import_libraries


@own_arithmetic()
def decompress(ckpt: Checkpoint, prev: Checkpoint | None = None, *, out: Any = None, **unknown: Never) -> Any:
    """Return the state that a checkpoint holds, with the same tree, keys, dtypes and shapes.

    Arrays come back in the library they were stored from; torch tensors on the CPU. Tied arrays are one array again.

    Args:
        ckpt: the checkpoint.
        prev: its resolved parent; needed for a delta that was read without it, and always checked if given.
        out: a tree with an array of the same dtype and shape at the place of each array, writable and dense in memory
            (contiguous or permuted): values are decoded into these arrays, which the result contains. All are checked
            before any is written.

    Raises:
        BadArgumentError: the arrays of `out` do not fit.
        MissingParentError: a delta without its parent, or with another.
        CorruptDataError: the bytes differ from those written; `out` may then hold a part of the state.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> state = {"step": 7, "ids": np.arange(5)}
        >>> sp.decompress(sp.compress(state))["ids"].tolist()
        [0, 1, 2, 3, 4]
    """
    no_device("decompress", unknown)
    if not isinstance(ckpt, Checkpoint):
        raise BadArgumentError(f"ckpt must be a Checkpoint (from_bytes makes one), not {type(ckpt).__qualname__}")
    if prev is not None and ckpt.is_delta:
        check_parent(ckpt, prev)
    elif prev is not None:
        raise MissingParentError("the checkpoint is a base: it has no parent, and one was given as prev")
    elif not ckpt.is_resolved:
        raise MissingParentError(f"a delta needs its parent {str(ckpt.parent_id)[:12]}... as prev")

    records = ckpt.records
    check_memory(sum(r.spec.memory for r in records), "the state")
    import_libraries(r.spec for r in records)
    targets = new_outputs(records) if out is None else outputs_of(out, records)
    jobs = ckpt.jobs()
    sizes = [sum(records[i].spec.size for group in job for i in group.members) for job in jobs]
    reader = Reader(ckpt, prev, targets)
    with decoding_near(targets.values()):
        decoded = map_arrays(lambda j: reader.decode(jobs[j]), range(len(jobs)), lambda j: sizes[j])
    arrays = {i: x for found in decoded for i, x in found.items()}
    return tree.unflatten(ckpt.header["tree"], lambda number, _place: arrays[number], rebuild=True)


class Reader:
    """Decoder of a checkpoint's arrays in jobs, which may run in any thread.

    Args:
        ckpt: the checkpoint.
        prev: its parent, or None.
        targets: arrays of the caller to decode into, by number.
    """

    def __init__(self, ckpt: Checkpoint, prev: Checkpoint | None, targets: Mapping[int, Array]) -> None:
        self.ckpt, self.prev, self.targets = ckpt, prev, targets
        self.named: dict[int, list[int]] = {}
        for i, record in enumerate(ckpt.records):
            if record.pair is not None:
                self.named.setdefault(record.pair, []).append(i)

    def decode(self, job: Sequence[Group]) -> dict[int, Array]:
        """Return the restored arrays of a job, by number."""
        built: dict[int, Array] = {}
        known: dict[int, Array] = {}
        for group in job:
            try:
                values = self._straight(group, known) or self._values(group, known)
            except MemoryError:
                raise too_large(self.ckpt.records[group.members[0]]) from None
            for i, flat in zip(group.members, values, strict=True):
                self._keep(i, flat, known, built)
        return built

    def _straight(self, group: Group, known: dict[int, Array]) -> list[Array]:
        """Decode one array into the caller's array on the host; return nothing if it cannot be."""
        number, target = group.members[0], self.targets.get(group.members[0])
        memory = None if target is None or len(group.members) > 1 or on_gpu(target) else host_memory(target)
        if memory is None:
            return []
        spec = self.ckpt.records[number].spec
        (reference,) = self.ckpt.references_of(group, self.prev, known, memory)
        if isinstance(reference, FilledReference):
            reference.fill(spec, memory)
        else:
            data = as_bytes(values_in(reference, spec, lends=True))
            if data.ctypes.data != memory.ctypes.data:  # it was not decoded there
                memory[:] = data
        if number in self.named:
            known[number] = from_bytes(memory, spec)
        return [target]

    def _room(self, number: int) -> Array | None:
        """Return the caller's tensor on a GPU, flat; None if other arrays need its values elsewhere."""
        room = device_memory(self.targets.get(number))
        if room is None:
            return None
        for i in self.named.get(number, ()):
            other = device_memory(self.targets.get(i))
            if other is None or other.device != room.device or len(self.ckpt.records[i].group.members) > 1:
                return None
        return room

    def _values(self, group: Group, known: dict[int, Array]) -> list[Array]:
        """Return the flat values of a group, or the caller's array on a GPU, with the values."""
        records, number = self.ckpt.members_of(group), group.members[0]
        room = None if len(records) > 1 else self._room(number)
        out, specs = room if group.format.decodes_there else None, [r.spec for r in records]
        references = self.ckpt.references_of(group, self.prev, known, out)
        if len(records) > 1 and not isinstance(references[0], BytesReference):
            return group.format.values(specs, references)
        reference = references[0]
        if room is not None and isinstance(reference, FilledReference):
            reference.fill_there(specs[0], room)
            if number in self.named:
                known[number] = room
            return [self.targets[number]]
        is_new = len(records) == 1 and not self.ckpt.keeps(records[0].key)
        return [
            values_in(reference, spec, lends=is_new or i in self.targets)
            for i, reference, spec in zip(group.members, references, specs, strict=True)
        ]

    def _keep(self, number: int, values: Array, known: dict[int, Array], built: dict[int, Array]) -> None:
        target = self.targets.get(number)
        if values is target:
            built[number] = target
            return
        if number in self.named:
            known[number] = values
        array = build_leaf(values, self.ckpt.records[number].spec)
        if target is not None:
            write_to(target, array)
            array = target
        built[number] = array
