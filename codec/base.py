"""The interface of codecs: a frozen configuration that encodes, and a stream that decodes.

What was *asked* is the codec's dataclass, kept in `Config`. What was *chosen* is in the stream: its format's name, a
little metadata and its pieces, enough to decode without ever seeing the configuration.
"""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

if TYPE_CHECKING:
    from .evidence.entries import Entry
    from .evidence.kind import Kind
    from .format.fields import Piece
    from .state.leaves import LeafSpec

Array = Any
CHUNK = 1 << 22
"""Elements coded at once: bounds the memory in use and is the unit of parallel work inside one large array."""
PART = CHUNK // 4
"""Elements whose decoded values are computed at once."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array to encode: its flat values, and its properties.

    Args:
        path: keys joined by "/".
        key: unique name of its place in the tree.
        spec: library, dtype, shape.
        kind: layer type and role.
        flat: values.
        gradient: gradient average of the same size, where one was given.
        pair: of a first moment, the *decoded* second moment of the same parameter (float32 on the host), if any.
        importance: of a weight, the second moment of the same parameter, flat, if the state holds it; else the square
            of its gradient, if that is given.
        earlier: of a weight, its past values, flat, if they are given.
        lead: further movement that an exact first moment would cause, as a part of the way since `earlier`.
        touched: packed bits, 1 for each row that may have changed since the parent; None: not known.
        entry: the optimizer entry that the array is, or None.
    """

    path: str
    key: str
    spec: LeafSpec
    kind: Kind
    flat: Array
    gradient: Array | None = None
    pair: Array | None = None
    importance: Array | None = None
    earlier: Array | None = None
    lead: float = 0.0
    touched: Array | None = None
    entry: Entry | None = None


class Reference(Protocol):
    """The decoded data of an array, against which a later delta is coded."""

    def values(self, spec: LeafSpec) -> Array:
        """The decoded array, flat, as NumPy or torch on the host."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """An encoded array.

    Args:
        stream: name of the stream format in `codec.registry`.
        meta: metadata that the decoder needs in addition to the pieces; plain JSON, numbers and strings only.
        pieces: bytes, in order, or what holds them.
        reference: for a later delta; None where this codec makes none.
        error: achieved error (0.0 when exact), in the measure `measure`.
        measure: "exact", "relative L2" or "relative" (largest |x~ - x| / |x|).
        note: why the codec deviated from its configuration, or "".
        pair: number of the other array that decoding needs, or None.
        decoded: function that returns the restored values, if that is cheaper than decoding the pieces.
    """

    stream: str
    meta: dict[str, Any]
    pieces: Sequence[Piece]
    reference: Reference | None
    error: float = 0.0
    measure: str = "exact"
    note: str = ""
    pair: int | None = None
    decoded: Callable[[], Array] | None = None


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """Several arrays that were coded together.

    Args:
        members: their numbers, ascending.
        stream: name of the stream format.
        meta: what the decoder needs in addition to the pieces; plain JSON.
        pieces: bytes, in order.
        is_delta: whether decoding needs the parents of all members.
        stored: reference, error and note of each member, without pieces; empty in a plan that is encoded.
    """

    members: Sequence[int]
    stream: str
    meta: dict[str, Any]
    pieces: Sequence[Piece]
    is_delta: bool
    stored: Sequence[Stored]

    @property
    def only(self) -> Stored:
        """Return the only member, with the pieces."""
        return dataclasses.replace(self.stored[0], meta=self.meta, pieces=self.pieces)


@dataclass(frozen=True, slots=True)
class EncodedGroups:
    """Result of coding several arrays together, which are numbered from 0.

    Args:
        groups: the arrays that were coded together.
        alone: the arrays for which that was not possible, already encoded, or None if the caller has to encode them.
    """

    groups: Sequence[EncodedGroup] = ()
    alone: Mapping[int, Stored | None] = field(default_factory=dict)


Parents: TypeAlias = "Sequence[Reference | None]"
"""The parent's reference of each array of a group; None where it does not exist."""


class Codec(Protocol):
    """A configuration of how to encode arrays; frozen, hashable, with a JSON form.

    With `by_kind = False` it does not use the layer type and role of an array (`Leaf.kind`): an array of another
    kind may then be stored as a copy of an equal one.
    """

    id: ClassVar[str]

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Sequence[Any]:
        """Return a plan for each array, after a look at all arrays of this codec."""
        ...

    def encode(self, leaf: Leaf, parent: Reference | None, plan: Any) -> Stored:
        """Encode one array, as a delta against `parent` if that is given and makes it smaller."""
        ...


class Unplanned:
    """Base of codecs that look at neither the other arrays nor the kind of a weight."""

    __slots__ = ()
    by_kind: ClassVar[bool] = False

    def prepare(self, leaves: Sequence[Leaf], parents: Parents) -> Sequence[None]:
        """Return None for each array."""
        return [None] * len(leaves)


class GroupCodec(Codec, Protocol):
    """A codec that can code several arrays together."""

    def groups(self, leaf: Leaf) -> Hashable | None:
        """Return what arrays that are coded together have in common; None: coded alone."""
        ...

    def encode_group(self, leaves: Sequence[Leaf], parents: Parents, plans: Sequence[Any]) -> EncodedGroups:
        """Encode arrays of one library, dtype and role together."""
        ...


Prepare: TypeAlias = Callable[[Sequence[Leaf], Sequence[Reference | None]], Sequence[Any]]
"""A codec's `prepare`, or its replacement."""


def rounded_error(error: float, *, up: bool) -> float:
    """Round an error to three digits, as summaries state it.

    An achieved error is rounded up, so that the statement is never below it. An error target is rounded down, so that
    an error within the statement is within the target.

    Example:
        >>> rounded_error(0.051234, up=True), rounded_error(0.051234, up=False)
        (0.0513, 0.0512)
    """
    rounding = decimal.ROUND_CEILING if up else decimal.ROUND_FLOOR
    return float(decimal.Context(prec=3, rounding=rounding).create_decimal_from_float(min(error, 1e300)))
