"""Arrays joined end to end, and the joined references that decoding them returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...kernels.backend.arrays import is_torch
from .. import entropy
from ..base import Leaf, Reference, Stored
from ..entropy.row_column_classes import columns_of
from ..format.fields import Piece
from ..lossless.reference import BytesReference
from ..moments.logbuckets import ValuesReference
from ..state.leaves import SCALARS, Array, LeafSpec, NpArray, as_bytes, from_bytes

MOST_BYTES = 1 << 20
"""Most raw bytes of a bundle, and so the most that is decoded to read one of its arrays."""


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """An encoded bundle.

    Args:
        members: numbers of its arrays, ascending.
        stream: name of the stream format.
        meta: what the decoder needs in addition to the pieces; plain JSON.
        pieces: bytes, in order.
        is_delta: whether decoding needs the parents of all members.
        stored: reference, error and note of each member, without pieces.
    """

    members: Sequence[int]
    stream: str
    meta: dict[str, Any]
    pieces: Sequence[Piece]
    is_delta: bool
    stored: Sequence[Stored]


@dataclass(frozen=True, slots=True)
class Together:
    """Result of coding a group of arrays together.

    Arrays are identified by their places in the group.

    Args:
        bundles: the arrays that were coded together.
        alone: the arrays for which that was not possible, already encoded, or None if the caller has to encode them.
    """

    bundles: Sequence[StoredBundle]
    alone: Mapping[int, Stored | None]


class Joined(Protocol):
    """The references of the arrays of a bundle, joined."""

    def split(self) -> list[Reference]:
        """Return the reference of each array."""
        ...

    def data(self) -> NpArray:
        """Return the bytes of all decoded values, one array after another, uint8."""
        ...


Pieces = tuple[dict[str, Any], Sequence[Piece]]


@dataclass(frozen=True, slots=True)
class BundleStream:
    """Stream format of a bundle: its decoder and its properties.

    Args:
        join: function that joins the references of arrays with these specs; returns None if one is of another stream.
        decode: function that makes joined references from specs, metadata, pieces, the parents' joined references
            and, for first moments, the joined squares of their scales.
        rebase: function that returns metadata and pieces of joined references relative to others, or on their own.
            None: no delta is coded against such arrays.
    """

    join: Callable[[Sequence[Reference | None], Sequence[LeafSpec]], Joined | None]
    decode: Callable[[Sequence[LeafSpec], dict[str, Any], Sequence[memoryview], Joined | None, Array | None], Joined]
    rebase: Callable[[Joined, Joined | None], Pieces] | None = None


def joined_spec(specs: Sequence[LeafSpec]) -> LeafSpec:
    """Return the spec of arrays of one library and dtype that are joined end to end.

    It is a matrix if the rows of all arrays have one length, else a vector.
    """
    first = specs[0]
    size = sum(spec.size for spec in specs)
    columns = columns_of(first.shape)
    if columns and all(columns_of(spec.shape) == columns for spec in specs[1:]):
        shape: tuple[int, ...] = (size // columns, columns)
    else:
        shape = (size,)
    library = "numpy" if first.library in SCALARS else first.library
    return LeafSpec(library, first.dtype, shape)


def matrix_of(specs: Sequence[LeafSpec], numbers: entropy.Numbers | None = None) -> entropy.Matrix:
    """Return the place of the elements of arrays that are joined end to end."""
    columns = columns_of(joined_spec(specs).shape)
    return entropy.Matrix(columns, 0, [spec.size // columns for spec in specs], numbers) if columns else entropy.ALONE


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


def joined_bytes(flats: Sequence[Array]) -> NpArray:
    """Join the bytes of flat arrays of one dtype on the host; from a GPU in a single copy."""
    if is_torch(flats[0]):
        import torch

        return as_bytes(torch.cat(list(flats)))
    return np.concatenate([as_bytes(flat) for flat in flats])


def joined_leaf(leaves: Sequence[Leaf]) -> Leaf:
    """Join several arrays to one."""
    spec = joined_spec([leaf.spec for leaf in leaves])
    first = leaves[0]
    return Leaf(first.path, first.key, spec, first.kind, from_bytes(joined_bytes([leaf.flat for leaf in leaves]), spec))


@dataclass(frozen=True, slots=True)
class JoinedBytes:
    """Bytes of exact arrays."""

    joined: NpArray
    specs: Sequence[LeafSpec]

    def split(self) -> list[Reference]:
        """See `Joined`."""
        return [BytesReference(part) for part in parts(self.joined, self.specs, self.specs[0].itemsize)]

    def data(self) -> NpArray:
        """See `Joined`."""
        return self.joined


def join_bytes(references: Sequence[Reference | None], specs: Sequence[LeafSpec]) -> JoinedBytes | None:
    """See `BundleStream.join`."""
    found = []
    for reference, spec in zip(references, specs, strict=True):
        if not isinstance(reference, BytesReference) or reference.data.size != spec.nbytes:
            return None
        found.append(reference.data)
    return JoinedBytes(np.concatenate(found), specs)


@dataclass(frozen=True, slots=True)
class JoinedValues:
    """Decoded values that no delta refers to."""

    joined: NpArray
    specs: Sequence[LeafSpec]

    def split(self) -> list[Reference]:
        """See `Joined`."""
        found = parts(self.joined, self.specs, self.specs[0].itemsize)
        return [ValuesReference(from_bytes(x.copy(), spec)) for x, spec in zip(found, self.specs, strict=True)]

    def data(self) -> NpArray:
        """See `Joined`."""
        return self.joined


def join_values(references: Sequence[Reference | None], specs: Sequence[LeafSpec]) -> JoinedValues | None:
    """See `BundleStream.join`."""
    found = []
    for reference in references:
        if not isinstance(reference, ValuesReference):
            return None
        found.append(as_bytes(reference.flat))
    return JoinedValues(np.concatenate(found), specs)
