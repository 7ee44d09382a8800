"""The records of a checkpoint's header: one for each array, and one for each bundle."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .bundles.joined import MOST_BYTES
from .bundles.streams import BUNDLE_STREAMS
from .errors import CorruptDataError
from .evidence.reasons import REASONS
from .format.schema import StoredArray, StoredGroup
from .other_packages import missing, package_of
from .state.leaves import LeafSpec, spec_from_header
from .streams import STREAMS, Stream


@dataclass(frozen=True, slots=True)
class Stretch:
    """Location and stream format of the pieces of an array or a bundle.

    Args:
        stream: stream format.
        meta: the stream's metadata.
        offset: where the pieces start in the body.
        lengths: bytes of each piece.
        delta: whether decoding needs the parent's reference of the same arrays.
    """

    stream: str
    meta: dict[str, Any]
    offset: int
    lengths: tuple[int, ...]
    delta: bool

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Bundle:
    """Record of arrays that were coded together.

    Args:
        members: their numbers.
        stretch: their pieces.
    """

    members: tuple[int, ...]
    stretch: Stretch


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """Record of one array in the header of a checkpoint.

    Args:
        path: keys joined by "/".
        key: unique name of the place in the tree; what a delta matches parents by.
        spec: library, dtype, shape.
        stretch: its pieces; for a member of a bundle, those of the bundle.
        nbytes: stored bytes; for a member of a bundle, its share by raw bytes.
        error: achieved error, in the measure `measure`.
        measure: "exact", "relative L2" or "relative".
        note: remark of the codec, or "".
        pair: number of the array whose values decoding needs, or None.
        codec: id of the codec that was chosen for it.
        why: the rule or the evidence that chose the codec, or why the array is exact.
        bundle: number of the bundle that it is a member of, or None.
    """

    path: str
    key: str
    spec: LeafSpec
    stretch: Stretch
    nbytes: int
    error: float
    measure: str
    note: str
    pair: int | None
    codec: str
    why: str
    bundle: int | None

    @property
    def stream(self) -> str:
        """Stream format."""
        return self.stretch.stream

    @property
    def meta(self) -> dict[str, Any]:
        """The stream's metadata."""
        return self.stretch.meta

    @property
    def lengths(self) -> tuple[int, ...]:
        """Bytes of each piece; the pieces of a bundle hold all of its members."""
        return self.stretch.lengths

    @property
    def delta(self) -> bool:
        """Return whether decoding needs the parent's reference of the same array."""
        return self.stretch.delta

    @property
    def format(self) -> Stream:
        """Description of the stream format."""
        return STREAMS[self.stretch.stream]


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a header.

    Args:
        arrays: in the order of the state.
        bundles: in the order of the body, after the pieces of all arrays outside bundles.
        nbytes: of all pieces.
    """

    arrays: tuple[ArrayRecord, ...]
    bundles: tuple[Bundle, ...]
    nbytes: int


def records_of(header: Mapping[str, Any], keys: Sequence[tuple[str, str]]) -> Records:
    """Read the records of a header.

    Args:
        header: parsed header, with a row for each array.
        keys: (path, key) of each array, in order.

    Raises:
        CorruptDataError: a record is malformed.
    """
    rows, groups, others = header.get("arrays"), header.get("bundles", []), header.get("why", [])
    if not isinstance(others, list) or not all(isinstance(reason, str) for reason in others):
        raise CorruptDataError("header: its reasons are malformed")
    if not isinstance(rows, list) or len(rows) != len(keys) or not all(isinstance(row, dict) for row in rows):
        raise CorruptDataError("header: arrays and tree do not fit")
    if not isinstance(groups, list):
        raise CorruptDataError("header: its bundles are malformed")
    stored_groups = [StoredGroup.from_json(row, len(rows)) for row in groups]
    bundle_of = {i: number for number, group in enumerate(stored_groups) for i in group.members}
    if len(bundle_of) != sum(len(group.members) for group in stored_groups):
        raise CorruptDataError("header: an array is in two bundles")
    arrays = [StoredArray.from_json(row, path) for row, (path, _) in zip(rows, keys, strict=True)]
    stretches: dict[int, Stretch] = {}
    offset = 0
    for i, (array, (path, _)) in enumerate(zip(arrays, keys, strict=True)):
        if (array.stream is None) != (i in bundle_of):
            where = "neither in a bundle nor with" if array.stream is None else "in a bundle, and with"
            raise CorruptDataError(f"header: {path}: {where} pieces of its own")
        if array.stream is not None:
            stretches[i] = _stretch(array, path, offset, STREAMS)
            offset += stretches[i].nbytes
    bundles = []
    for group in stored_groups:
        stretch = _stretch(group, f"a bundle of {len(group.members)} arrays", offset, BUNDLE_STREAMS)
        offset += stretch.nbytes
        bundles.append(Bundle(tuple(group.members), stretch))
        stretches.update(dict.fromkeys(group.members, stretch))
    specs = [spec_from_header(array.library, array.dtype, array.shape) for array in arrays]
    for bundle in bundles:
        _check_members(bundle, specs)
    shares = _shares(bundles, specs)
    streams = [stretches[i].stream for i in range(len(rows))]
    reasons = [*REASONS, *others]
    records = []
    for i, (array, (path, key)) in enumerate(zip(arrays, keys, strict=True)):
        pieces = stretches[i]
        if (array.reason or 0) >= len(reasons) or not _pair_fits(array.pair, pieces.stream, streams):
            raise CorruptDataError(f"header: {path}: its record is malformed")
        records.append(
            ArrayRecord(
                path,
                key,
                specs[i],
                pieces,
                shares.get(i, pieces.nbytes),
                array.error,
                array.measure,
                array.note,
                array.pair,
                array.codec or STREAMS[pieces.stream].codec,
                "" if array.reason is None else reasons[array.reason],
                bundle_of.get(i),
            )
        )
    return Records(tuple(records), tuple(bundles), offset)


def _stretch(stored: StoredArray | StoredGroup, path: str, offset: int, streams: Mapping[str, Any]) -> Stretch:
    stream = stored.stream or ""
    if stream not in streams:
        if package_of(stream):
            raise missing(stream, path)
        raise CorruptDataError(f"header: {path}: its record is malformed")
    return Stretch(stream, stored.meta, offset, tuple(stored.lengths), stored.is_delta)


def _check_members(bundle: Bundle, specs: Sequence[LeafSpec]) -> None:
    """Refuse a bundle of several dtypes or libraries, or of more than `MOST_BYTES` raw bytes.

    Reading one member decodes all of them, so that the limit bounds its cost.
    """
    own = [specs[i] for i in bundle.members]
    kinds = {(spec.library, spec.dtype) for spec in own}
    total = sum(spec.nbytes for spec in own)
    if len(kinds) > 1 or total > MOST_BYTES or not all(spec.size for spec in own):
        raise CorruptDataError(f"header: a bundle of {len(own)} arrays, {total} bytes and {len(kinds)} dtypes")
    if BUNDLE_STREAMS[bundle.stretch.stream].rebase is None and bundle.stretch.delta:
        raise CorruptDataError(f"header: a bundle of {bundle.stretch.stream} is never a delta")


def _shares(bundles: Sequence[Bundle], specs: Sequence[LeafSpec]) -> dict[int, int]:
    """Divide the stored bytes of each bundle among its members in proportion to raw bytes.

    The shares of a bundle add up to its stored bytes exactly.
    """
    found = {}
    for bundle in bundles:
        stored, total, before = bundle.stretch.nbytes, sum(specs[i].nbytes for i in bundle.members), 0
        for i, raw in zip(bundle.members, itertools.accumulate(specs[i].nbytes for i in bundle.members), strict=True):
            until = stored * raw // total
            found[i], before = until - before, until
    return found


def _pair_fits(number: int | None, stream: str, streams: Sequence[str]) -> bool:
    """Return whether the pair of a record is valid, and is there only if needed.

    The pair itself must not need one, so that references never form a cycle.
    """
    if STREAMS[stream].pair is None:
        return number is None
    return number is not None and number < len(streams) and STREAMS[streams[number]].pair is None
