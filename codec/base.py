"""The interface of codecs: a frozen configuration that encodes, and a stream that decodes.

What was *asked* is the codec's dataclass, kept in `Config`. What was *chosen* is in the stream: its format's name, a
little metadata and its pieces, enough to decode without ever seeing the configuration.
"""

from __future__ import annotations

import dataclasses
import decimal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from .errors import BadArgumentError
from .other_packages import missing, package_of

if TYPE_CHECKING:
    from .evidence.entries import Entry
    from .evidence.kind import Kind
    from .format.fields import Piece
    from .state.leaves import LeafSpec

Array = Any
CHUNK = 1 << 22
"""Elements coded at once: bounds the memory in use and is the unit of parallel work inside one large array."""


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
        stream: name of the stream format in `codec.streams`.
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


Decoder: TypeAlias = (
    "Callable[[LeafSpec, dict[str, Any], Sequence[memoryview], Reference | None, Array | None], Reference]"
)
"""From spec, metadata, pieces, the parent's reference, and the result of `Stream.pair` for the pair."""
Rebaser: TypeAlias = (
    "Callable[[LeafSpec, dict[str, Any], Reference, Reference | None], tuple[dict[str, Any], Sequence[Piece]]]"
)
"""From spec, metadata, the reference to encode again and the new parent's reference: new metadata and pieces."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream format: its decoder and its properties.

    Args:
        decode: function that makes an array's reference from its pieces.
        codec: id of the codec that writes it, unless the record names another.
        rebase: function that encodes a reference against another parent, or on its own. None: no delta is coded
            against such an array, so that a resolved checkpoint does not keep its reference.
        pair: function that computes the decoder's last argument from the decoded values and the spec of the pair
            that the record names. None: no array is named.
        is_wide: whether a reference takes as much memory as the array; else about a byte an element.
    """

    decode: Decoder
    codec: str
    rebase: Rebaser | None = None
    pair: Callable[[Array, LeafSpec], Array] | None = None
    is_wide: bool = False

    @property
    def has_deltas(self) -> bool:
        """Return whether later checkpoints can store differences to arrays of this format."""
        return self.rebase is not None


class Codec(Protocol):
    """A configuration of how to encode arrays; frozen, hashable, with a JSON form."""

    id: ClassVar[str]

    def prepare(self, leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Sequence[Any]:
        """Return a plan for each array, after a look at all arrays of this codec."""
        ...

    def encode(self, leaf: Leaf, parent: Reference | None, plan: Any) -> Stored:
        """Encode one array, as a delta against `parent` if that is given and makes it smaller."""
        ...


Prepare: TypeAlias = Callable[[Sequence[Leaf], Sequence[Reference | None]], Sequence[Any]]
"""A codec's `prepare`, or its replacement."""


def to_json(codec: Codec) -> dict[str, Any]:
    """Return a codec as plain JSON: its id and its fields."""
    fields = dataclasses.asdict(codec)  # type: ignore[call-overload]
    return {"id": codec.id, **fields}


def from_json(table: Mapping[str, type[Codec]], data: Any) -> Codec:
    """Return the codec that `to_json` described.

    Raises:
        BadArgumentError: an unknown id or field.
        MissingCodecError: the id is that of another package, which does not provide it here.
    """
    if not isinstance(data, Mapping) or data.get("id") not in table:
        if isinstance(data, Mapping) and package_of(str(data.get("id"))):
            raise missing(str(data["id"]))
        raise BadArgumentError(f"{str(data)[:80]} is not a codec; ids are {', '.join(table)}")
    fields = {k: v for k, v in data.items() if k != "id"}
    try:
        return table[data["id"]](**fields)
    except TypeError as e:
        raise BadArgumentError(f"codec {data['id']}: {e}") from None


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
