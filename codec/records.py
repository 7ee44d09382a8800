"""The records of a checkpoint's header: one for each array, and one for each group."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import CorruptDataError
from .evidence.kind import REASONS
from .format.schema import StoredArray, StoredGroup, groups_from_json
from .groups import MOST_BYTES, Stream
from .registry import STREAMS, missing, package_of
from .state.leaves import LeafSpec, spec_from_header


@dataclass(frozen=True, slots=True)
class Group:
    """Record of a group: one array, or several that were coded together.

    Args:
        number: of the group.
        members: numbers of its arrays.
        stream: stream format.
        meta: the stream's metadata.
        offset: where its pieces start in the body.
        lengths: bytes of each piece.
        is_delta: whether decoding needs the parents' references of the same arrays.
    """

    number: int
    members: tuple[int, ...]
    stream: str
    meta: dict[str, Any]
    offset: int
    lengths: tuple[int, ...]
    is_delta: bool

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(self.lengths)

    @property
    def format(self) -> Stream:
        """Description of the stream format."""
        return STREAMS[self.stream]


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """Record of one array in the header of a checkpoint.

    Args:
        path: keys joined by "/".
        key: unique name of the place in the tree; what a delta matches parents by.
        spec: library, dtype, shape.
        group: the group that it belongs to.
        nbytes: its share, by raw bytes, of the stored bytes of the group.
        error: achieved error, in the measure `measure`.
        measure: "exact", "relative L2" or "relative".
        note: remark of the codec, or "".
        pair: number of the array whose values decoding needs, or None.
        codec: id of the codec that was chosen for it.
        why: the rule or the evidence that chose the codec, or why the array is exact.
    """

    path: str
    key: str
    spec: LeafSpec
    group: Group
    nbytes: int
    error: float
    measure: str
    note: str
    pair: int | None
    codec: str
    why: str

    @property
    def stream(self) -> str:
        """Stream format."""
        return self.group.stream

    @property
    def meta(self) -> dict[str, Any]:
        """The stream's metadata."""
        return self.group.meta

    @property
    def is_delta(self) -> bool:
        """Return whether decoding needs the parent's reference of the same array."""
        return self.group.is_delta

    @property
    def format(self) -> Stream:
        """Description of the stream format."""
        return STREAMS[self.group.stream]


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a header.

    Args:
        arrays: in the order of the state.
        groups: in the order of the body.
        nbytes: of all pieces.
    """

    arrays: tuple[ArrayRecord, ...]
    groups: tuple[Group, ...]
    nbytes: int

    @staticmethod
    def of(
        keys: Sequence[tuple[str, str]],
        specs: Sequence[LeafSpec],
        arrays: Sequence[StoredArray],
        groups: Sequence[StoredGroup],
        texts: Sequence[str],
    ) -> Records:
        """Join the records of arrays and groups that a header holds.

        Args:
            keys: (path, key) of each array, in order.
            specs: of each array.
            arrays: record of each array.
            groups: records of the groups, of known stream formats; each array is in one.
            texts: reasons that have no fixed number.

        Raises:
            CorruptDataError: the records do not fit each other.
        """
        made, group_of, shares, offset = [], dict[int, Group](), dict[int, int](), 0
        for number, one in enumerate(groups):
            members = tuple(one.members)
            group = Group(number, members, one.stream, one.meta, offset, tuple(one.lengths), one.is_delta)
            _check(group, [specs[i] for i in members], keys[members[0]][0])
            made.append(group)
            group_of |= dict.fromkeys(members, group)
            shares |= _shares(group, specs)
            offset += group.nbytes
        reasons = [*REASONS, *texts]
        records = []
        for i, (array, (path, key)) in enumerate(zip(arrays, keys, strict=True)):
            if (array.reason or 0) >= len(reasons) or not _pair_fits(array.pair, group_of[i], group_of):
                raise CorruptDataError(f"header: {path}: its record is malformed")
            said = array.error, array.measure, array.note, array.pair
            codec, why = array.codec or group_of[i].format.codec, "" if array.reason is None else reasons[array.reason]
            records.append(ArrayRecord(path, key, specs[i], group_of[i], shares[i], *said, codec, why))
        return Records(tuple(records), tuple(made), offset)


def records_of(header: Mapping[str, Any], keys: Sequence[tuple[str, str]]) -> Records:
    """Read the records of a header.

    Args:
        header: parsed header, with a row for each array and each group.
        keys: (path, key) of each array, in order.

    Raises:
        CorruptDataError: a record is malformed.
        MissingCodecError: a stream is that of another package, which does not provide it here.
    """
    rows, texts = header.get("arrays"), header.get("why", [])
    if not isinstance(texts, list) or not all(isinstance(reason, str) for reason in texts):
        raise CorruptDataError("header: its reasons are malformed")
    if not isinstance(rows, list) or len(rows) != len(keys) or not all(isinstance(row, dict) for row in rows):
        raise CorruptDataError("header: arrays and tree do not fit")
    arrays = [StoredArray.from_json(row, path) for row, (path, _) in zip(rows, keys, strict=True)]
    specs = [
        spec_from_header(a.library, a.dtype, a.shape, a.order, path) for a, (path, _) in zip(arrays, keys, strict=True)
    ]
    groups = groups_from_json(header.get("groups", []), len(rows))
    for group in groups:
        if group.stream not in STREAMS:
            path = keys[group.members[0]][0]
            if package_of(group.stream):
                raise missing(group.stream, path)
            raise CorruptDataError(f"header: {path}: its record is malformed")
    return Records.of(keys, specs, arrays, groups, texts)


def _check(group: Group, specs: Sequence[LeafSpec], path: str) -> None:
    """Refuse several arrays that do not belong together, and deltas of a format without them.

    Reading one array decodes its group, so that `MOST_BYTES` bounds the cost.
    """
    kinds = {(spec.library, spec.dtype) for spec in specs}
    total = sum(spec.nbytes for spec in specs)
    if len(specs) > 1 and (
        len(kinds) > 1 or total > MOST_BYTES or not all(spec.size for spec in specs) or not group.format.is_shared
    ):
        raise CorruptDataError(
            f"header: {path}: a group of {len(specs)} arrays in {group.stream}, {total} bytes and {len(kinds)} dtypes"
        )
    if group.format.meta is not None and not group.meta.keys() <= set(group.format.meta):
        raise CorruptDataError(f"header: {path}: {group.stream} has no metadata {str(group.meta)[:60]}")
    if group.is_delta and not group.format.has_deltas:
        raise CorruptDataError(f"header: {path}: an array in {group.stream} is never a delta")


def _shares(group: Group, specs: Sequence[LeafSpec]) -> dict[int, int]:
    """Divide the stored bytes of a group among its arrays in proportion to raw bytes.

    The shares add up to its stored bytes exactly.
    """
    if len(group.members) == 1:
        return {group.members[0]: group.nbytes}
    found, before, stored = {}, 0, group.nbytes
    ends = list(itertools.accumulate(specs[i].nbytes for i in group.members))
    for i, end in zip(group.members, ends, strict=True):
        until = stored * end // ends[-1]
        found[i], before = until - before, until
    return found


def _pair_fits(number: int | None, group: Group, group_of: Mapping[int, Group]) -> bool:
    """Return whether the pair of an array is valid, and is there only if needed.

    The pair itself must not need one, so that references never form a cycle.
    """
    if group.format.pair is None:
        return number is None
    return number is not None and number in group_of and group_of[number].format.pair is None
