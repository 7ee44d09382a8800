"""Groups: arrays of one library and dtype that are coded together, or one large array.

The arrays of a group are joined end to end and share streams and tables, so that a small array needs no table and no
kernel call of its own. Each array keeps its own steps, codebooks, factors and bounds.

References of exact arrays hold the bytes, or the parent's bytes and the changes.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..kernels.backend.arrays import bytes_of, is_torch, on_gpu, placed_with, write
from . import entropy
from .base import Leaf, Parents, Reference
from .format.fields import Piece
from .state.leaves import SCALARS, Array, LeafSpec, NpArray, as_bytes, from_bytes

Patch = tuple[int, NpArray | None, NpArray]
"""First byte of a part, positions of items in it (None: all of its bytes), and the new items there."""
MOST_BYTES = 1 << 22
"""Most raw bytes of a group of several arrays, and so the most that is decoded to read one of them."""


@dataclass(frozen=True, slots=True)
class Coded:
    """A group as a file holds it, for the decoder of its stream format.

    Args:
        specs: of its arrays.
        meta: the stream's metadata.
        pieces: bytes, in order.
        parents: the references that a delta is coded against; None for each array of a base.
        pair: the result of `Stream.pair` for the arrays that the records name, if any.
        out: memory of the caller for the decoded values: bytes (uint8) on the host, which a decoder may use, or, of a
            format with `Stream.decodes_there`, a flat tensor of the dtype on a GPU, which it fills. None: it takes its
            own.
    """

    specs: Sequence[LeafSpec]
    meta: dict[str, Any]
    pieces: Sequence[memoryview]
    parents: Parents
    pair: Array | None = None
    out: Array | None = None

    @property
    def spec(self) -> LeafSpec:
        """Spec of the arrays joined end to end; of one array its own."""
        return joined_spec(self.specs)

    @property
    def parent(self) -> Reference | None:
        """Parent of the only array of a group of one."""
        return self.parents[0]

    @property
    def there(self) -> Array | None:
        """The tensor on a GPU that a decoder fills; None if it decodes on the host."""
        return None if self.out is None or not on_gpu(self.out) else self.out

    def room(self) -> Array:
        """Return memory for the decoded values, as `out` is."""
        return np.empty(self.spec.nbytes, np.uint8) if self.out is None else self.out


def sent_values(data: NpArray, room: Array) -> Array:
    """Return values on the GPU of a tensor and in its dtype, from their bytes on the host."""
    return placed_with(data, room).view(room.dtype) if data.size else room[:0]


def spread(values: NpArray, counts: Sequence[int] | NpArray, room: Array) -> Array:
    """Return each integer as many times as counted, in order, int64, on the GPU of a tensor."""
    numbers, times = (placed_with(np.asarray(x, np.int64), room) for x in (values, counts))
    return numbers.repeat_interleave(times, output_size=int(np.sum(counts)))


class FilledReference(ABC):
    """A reference that writes the bytes of its values into given memory."""

    __slots__ = ()

    @abstractmethod
    def fill(self, spec: LeafSpec, out: NpArray) -> None:
        """Write the bytes of the decoded values, part by part."""

    def fill_there(self, spec: LeafSpec, out: Array) -> None:
        """Write the decoded values to a flat tensor on a GPU.

        Here they come from the host, or were decoded there.
        """
        values = self.values(spec)
        if values is not out:
            out.copy_(placed_with(values, out))

    def values(self, spec: LeafSpec) -> Array:
        """Return the decoded array, flat."""
        data = np.empty(spec.nbytes, np.uint8)
        self.fill(spec, data)
        return from_bytes(data, spec)


@dataclass(frozen=True, slots=True)
class BytesReference(FilledReference):
    """Reference that holds the bytes of an array.

    Args:
        data: uint8, on the host; of an array decoded into a tensor on a GPU, there.
    """

    data: Array

    def fill(self, spec: LeafSpec, out: NpArray) -> None:
        """Write the bytes, unless they were decoded there."""
        if self.data.ctypes.data != out.ctypes.data:
            out[:] = self.data

    def fill_there(self, spec: LeafSpec, out: Array) -> None:
        """Send the bytes to a flat tensor on a GPU."""
        write(bytes_of(out), self.data)


class PatchedReference(BytesReference):
    """The parent's bytes and the changes, which are applied at the first access.

    The changes are written to the parent's memory if nothing else refers to it, as in a run whose checkpoints follow
    one another; otherwise to a copy.

    Args:
        before: uint8 [n], the parent's bytes.
        patches: the changes.
    """

    __slots__ = ("_bytes", "_lock", "_patches")
    __setattr__ = object.__setattr__  # that of a frozen class refuses

    def __init__(self, before: NpArray, patches: Sequence[Patch]) -> None:
        self._bytes, self._patches, self._lock = before, tuple(patches), threading.Lock()

    @property
    def data(self) -> NpArray:
        """The bytes, uint8 [n]."""
        with self._lock:
            if self._patches:
                if not self._is_alone():
                    self._bytes = self._bytes.copy()
                for start, positions, items in self._patches:
                    if positions is None:
                        self._bytes[start : start + items.size] = items
                    else:
                        self._bytes[start:].view(items.dtype)[positions] = items
                self._patches = ()
            return self._bytes

    def _is_alone(self) -> bool:
        """Return whether the memory belongs to the array, and only this object refers to it."""
        alone = _referrers(self) <= _ALONE  # first: the flags refer to the array, too
        flags = self._bytes.flags
        return alone and bool(flags.owndata and flags.writeable)


def _referrers(reference: PatchedReference) -> int:
    """Count the references to the parent's bytes, including those of the count itself."""
    return sys.getrefcount(reference._bytes) if hasattr(sys, "getrefcount") else sys.maxsize


_ALONE = _referrers(PatchedReference(np.empty(1, np.uint8), ())) if hasattr(sys, "getrefcount") else 0
"""The count where nothing else refers to them."""


Rebaser: TypeAlias = Callable[
    [Sequence[LeafSpec], Sequence[Reference], Parents], tuple[dict[str, Any], Sequence[Piece]]
]
"""From specs, the references to encode again and the new parents: metadata and pieces."""


def values_of_each(specs: Sequence[LeafSpec], references: Sequence[Reference]) -> list[Array]:
    """Return the decoded values of each array, flat, in memory of its own."""
    return [reference.values(spec) for reference, spec in zip(references, specs, strict=True)]


def fill_each(specs: Sequence[LeafSpec], references: Sequence[Reference], out: Array) -> None:
    """Fill a flat tensor on a GPU with the values of references, of several in one copy."""
    first = references[0]
    if len(references) == 1 and isinstance(first, FilledReference):
        first.fill_there(specs[0], out)
    else:
        write(bytes_of(out), joined_bytes(values_of_each(specs, references)))


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream format of groups: its decoder and its properties.

    Args:
        decode: function that returns the reference of each array of a group.
        codec: id of the codec that writes it, unless the record names another.
        rebase: function that encodes references against other parents, or on their own. None: no delta is coded
            against such arrays, so that a resolved checkpoint does not keep their references.
        pair: function that computes `Coded.pair` from the decoded values and the spec of the pairs that the records
            name, joined. None: no array is named.
        values: function that returns the values of the references of a group.
        fill_there: function that fills a flat tensor on a GPU with them.
        is_wide: whether a reference takes as much memory as the array; else about a byte an element.
        is_shared: whether a group may have several arrays.
        decodes_there: whether `decode` fills a tensor on a GPU that it gets as `Coded.out`.
        meta: names of the metadata that a group may have; None: any.
    """

    decode: Callable[[Coded], Sequence[Reference]]
    codec: str
    rebase: Rebaser | None = None
    pair: Callable[[Array, LeafSpec], Array] | None = None
    values: Callable[[Sequence[LeafSpec], Sequence[Reference]], list[Array]] = values_of_each
    fill_there: Callable[[Sequence[LeafSpec], Sequence[Reference], Array], None] = fill_each
    is_wide: bool = False
    is_shared: bool = False
    decodes_there: bool = False
    meta: tuple[str, ...] | None = None

    @property
    def has_deltas(self) -> bool:
        """Return whether later checkpoints can store differences to arrays of this format."""
        return self.rebase is not None


def joined_spec(specs: Sequence[LeafSpec]) -> LeafSpec:
    """Return the spec of arrays of one library and dtype that are joined end to end.

    It is a matrix if the rows of all arrays have one length, else a vector; of one array its own.
    """
    first = specs[0]
    if len(specs) == 1:
        return first
    size = sum(spec.size for spec in specs)
    columns = first.columns
    if columns and all(spec.columns == columns for spec in specs[1:]):
        shape: tuple[int, ...] = (size // columns, columns)
    else:
        shape = (size,)
    library = "numpy" if first.library in SCALARS else first.library
    return LeafSpec(library, first.dtype, shape)


def matrix_of(specs: Sequence[LeafSpec], start: int = 0, numbers: entropy.Numbers | None = None) -> entropy.Matrix:
    """Return the place of the elements of joined arrays, from element `start` on."""
    columns = joined_spec(specs).columns
    if not columns:
        return entropy.ALONE
    heights = [spec.size // columns for spec in specs] if len(specs) > 1 else ()
    return entropy.Matrix(columns, start, heights, numbers)


def ends_of(specs: Sequence[LeafSpec]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the end of each array in the joined elements, int64."""
    return np.cumsum([spec.size for spec in specs], dtype=np.int64)


def parts(data: Array, specs: Sequence[LeafSpec], unit: int = 1) -> list[Array]:
    """Split joined data into the part of each array; an element is `unit` entries of `data`."""
    found, start = [], 0
    for spec in specs:
        end = start + unit * spec.size
        found.append(data[start:end])
        start = end
    return found


def own_parts(data: Array, specs: Sequence[LeafSpec]) -> list[Array]:
    """Split the bytes of joined arrays into flat arrays in memory of their own.

    Of values on a GPU they are parts.
    """
    if on_gpu(data):
        return parts(data, specs)
    if len(specs) == 1:
        return [from_bytes(data, specs[0])]
    found = parts(data, specs, specs[0].itemsize)
    return [from_bytes(part.copy(), spec) for part, spec in zip(found, specs, strict=True)]


def joined_bytes(flats: Sequence[Array], *, there: bool = False) -> Array:
    """Join the bytes of flat arrays of one dtype on the host, in a single copy from a GPU.

    With `there` they stay on it, unless they are on several devices.
    """
    if not is_torch(flats[0]) or (there and len({flat.device for flat in flats}) > 1):
        return as_bytes(flats[0]) if len(flats) == 1 else np.concatenate([as_bytes(flat) for flat in flats])
    import torch

    flat = flats[0] if len(flats) == 1 else torch.cat(list(flats))
    return flat.view(torch.uint8) if there and on_gpu(flat) else as_bytes(flat)


def joined_leaf(leaves: Sequence[Leaf]) -> Leaf:
    """Join arrays to one, on the host if they are several."""
    if len(leaves) == 1:
        return leaves[0]
    spec = joined_spec([leaf.spec for leaf in leaves])
    first = leaves[0]
    return Leaf(first.path, first.key, spec, first.kind, from_bytes(joined_bytes([leaf.flat for leaf in leaves]), spec))


def joined_parents(parents: Parents, specs: Sequence[LeafSpec]) -> BytesReference | None:
    """Join the bytes of the parents of arrays; None if one is of another stream or size."""
    found = []
    for parent, spec in zip(parents, specs, strict=True):
        if not isinstance(parent, BytesReference) or parent.data.size != spec.nbytes:
            return None
        found.append(parent)
    return found[0] if len(found) == 1 else BytesReference(np.concatenate([parent.data for parent in found]))


def split_reference(joined: BytesReference, specs: Sequence[LeafSpec]) -> list[BytesReference]:
    """Return the reference of each of several arrays, a part of the joined bytes."""
    if len(specs) == 1:
        return [joined]
    return [BytesReference(part) for part in parts(joined.data, specs, specs[0].itemsize)]
