"""References of exact arrays: the bytes, or the parent's bytes and the changes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.backend.arrays import bytes_of, write
from ..base import Parents
from ..groups import FilledReference, parts
from ..state.leaves import Array, LeafSpec, NpArray

Patch = tuple[int, NpArray | None, NpArray]
"""First byte of a part, positions of items in it (None: all of its bytes), and the new items there."""


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
