"""A checkpoint: its bytes, its header, and, if resolved, the reference for the next delta."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from blake3 import blake3

from .arithmetic import own_arithmetic
from .base import Reference
from .errors import BadArgumentError, CorruptDataError, MissingParentError
from .evidence.reasons import REASONS
from .format import container
from .format.fields import Piece
from .format.ranged import Ranged
from .lossless.reference import BytesReference
from .outputs import decoded_into, outputs_of, write_to
from .parallel import map_arrays, map_chunks
from .registry import missing, package_of
from .state import tree
from .state.leaves import Array, LeafSpec, build_leaf, check_memory, from_bytes, spec_from_header
from .streams import STREAMS, Stream

_HASH = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ArrayRecord:
    """One array of a checkpoint, as its header describes it.

    Args:
        path: keys joined by "/".
        key: unique name of the place in the tree; what a delta matches parents by.
        spec: library, dtype, shape.
        stream: stream format.
        meta: the stream's metadata.
        offset: where its pieces start in the body.
        lengths: bytes of each piece.
        error: achieved error, in the measure `measure`.
        measure: "exact", "relative L2" or "relative".
        note: what the codec has to say, or "".
        delta: whether decoding needs the parent's memory of the same array.
        sibling: number of the array whose values decoding needs, or None.
        codec: id of the codec that was chosen for it.
        why: the rule or the evidence that chose the codec, or why the array is exact.
    """

    path: str
    key: str
    spec: LeafSpec
    stream: str
    meta: dict[str, Any]
    offset: int
    lengths: tuple[int, ...]
    error: float
    measure: str
    note: str
    delta: bool
    sibling: int | None
    codec: str
    why: str

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(self.lengths)

    @property
    def format(self) -> Stream:
        """What is to be known of its stream."""
        return STREAMS[self.stream]


_NEXT_TO_NOTHING = 0.9
"""Relative L2 error from which an array counts as lost."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of `Checkpoint.summary()`: one array and how it is stored.

    Args:
        path: keys joined by "/".
        codec: the codec that was chosen for it ("quantize", "exact", "first moment"), as a rule may name it.
        stream: the stream format that the codec wrote ("levels", "bytes", "grid").
        raw_bytes: bytes of the array.
        stored_bytes: bytes in the file, without header and checksums.
        bits_per_element: stored bits an element; 0 for an empty array.
        error: achieved error, 0 when exact.
        measure: what `error` is: "exact", "relative L2", or "relative" (largest |x~ - x| / |x|).
        dtype: dtype of the array.
        shape: its shape.
        note: what the codec has to say: why a codebook was refit, why an array is exact though it was not asked, that
            next to nothing of it is restored (a relative L2 error of 0.9 or more).
        why: the rule or the evidence that chose the codec, or why the array is exact.
    """

    path: str
    codec: str
    stream: str
    raw_bytes: int
    stored_bytes: int
    bits_per_element: float
    error: float
    measure: str
    dtype: str
    shape: tuple[int, ...]
    note: str
    why: str

    def keys(self) -> tuple[str, ...]:
        """Names of the columns, so that `dict(row)` is a row of a table."""
        return tuple(f.name for f in fields(self))

    def __getitem__(self, column: str) -> Any:
        if column not in self.keys():
            raise KeyError(column)
        return getattr(self, column)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())


def _lost(record: ArrayRecord) -> str:
    """Return a note for an array that is restored as almost zero (relative L2 error near 1)."""
    lost = record.measure == "relative L2" and record.error >= _NEXT_TO_NOTHING
    return f"as good as zero when restored (relative L2 error {record.error:.2g})" if lost else ""


def _records(header: Mapping[str, Any], keys: list[tuple[str, str]]) -> tuple[ArrayRecord, ...]:
    """The array records of a header; `keys` are (path, key) in the order of the array nodes."""
    rows, others = header.get("arrays"), header.get("why", [])
    if not isinstance(others, list) or not all(isinstance(reason, str) for reason in others):
        raise CorruptDataError("header: its reasons are malformed")
    reasons = [*REASONS, *others]
    if not isinstance(rows, list) or len(rows) != len(keys):
        raise CorruptDataError("header: arrays and tree do not fit")
    records = []
    offset = 0
    for row, (path, key) in zip(rows, keys, strict=True):
        if not isinstance(row, dict):
            raise CorruptDataError(f"header: {path}: no record")
        stream, meta, lengths = row.get("f", ""), row.get("m", {}), row.get("b", 0)
        error, measure, note = row.get("e", 0.0), row.get("q", "exact"), row.get("n", "")
        reason, codec = row.get("y"), row.get("c")
        if isinstance(stream, str) and stream not in STREAMS and package_of(stream):
            raise missing(stream, path)
        ok = (
            isinstance(stream, str)
            and stream in STREAMS
            and isinstance(meta, dict)
            and isinstance(lengths, list)
            and all(type(n) is int and n >= 0 for n in lengths)
            and type(error) is float
            and isinstance(measure, str)
            and isinstance(note, str)
            and (reason is None or (type(reason) is int and 0 <= reason < len(reasons)))
            and isinstance(codec, str | None)
            and _sibling_fits(row.get("v"), stream, rows)
        )
        if not ok:
            raise CorruptDataError(f"header: {path}: its record is malformed")
        spec = spec_from_header(row.get("l", "torch"), row.get("d"), row.get("s"))
        records.append(
            ArrayRecord(
                path,
                key,
                spec,
                stream,
                meta,
                offset,
                tuple(lengths),
                float(error),
                measure,
                note,
                bool(row.get("p")),
                row.get("v"),
                STREAMS[stream].codec if codec is None else codec,
                "" if reason is None else reasons[reason],
            )
        )
        offset += sum(lengths)
    return tuple(records)


def _sibling_fits(number: Any, stream: Any, rows: list[Any]) -> bool:
    """A sibling is named by exactly those streams that need one, and needs none itself, so there is no circle."""
    if not _has_sibling(stream):
        return number is None
    if type(number) is not int or not 0 <= number < len(rows) or not isinstance(rows[number], dict):
        return False
    other = rows[number].get("f")
    return isinstance(other, str) and not _has_sibling(other)


def _has_sibling(stream: Any) -> bool:
    return stream in STREAMS and STREAMS[stream].beside is not None


class Checkpoint:
    """A compressed state, made by `compress` or `Checkpoint.from_bytes`; it is immutable.

    A *resolved* checkpoint (from `compress`, a base, or read with its resolved parent) carries what the next delta
    needs: about a byte a quantized weight and a byte a second moment, the bytes themselves of exact arrays.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> ckpt = sp.compress({"weight": np.ones((64, 64), np.float32)})
        >>> sp.Checkpoint.from_bytes(ckpt.to_bytes()).raw_nbytes
        16384
    """

    __slots__ = ("_body", "_by_key", "_data", "_header", "_id", "_memory", "_nodes", "_records")

    @own_arithmetic()
    def __init__(self, data: bytes | Ranged, memory: dict[str, Reference] | None, claimed: str = "") -> None:
        """Use `compress` or `from_bytes`; this only takes bytes apart.

        The content hash of a file that is only partly available cannot be computed: it is the one that is claimed.
        """
        view = data if isinstance(data, Ranged) else memoryview(data)
        where = container.layout(view)
        nodes = where.header.get("tree")
        raw, parent = where.header.get("raw"), where.header.get("parent")
        if not isinstance(nodes, list) or type(raw) is not int or raw < 0:
            raise CorruptDataError("header: no tree")
        for what, value in (("the parent's hash", parent), ("the hash it stands for", where.header.get("as"))):
            if value is not None and not (isinstance(value, str) and _HASH.fullmatch(value)):
                raise CorruptDataError(f"header: {what} is malformed")
        keys: dict[int, tuple[str, str]] = {}

        def note(number: int, place: Callable[[], tuple[str, str]]) -> None:
            # A tied array is named by its first place.
            if number not in keys:
                keys[number] = place()

        tree.unflatten(nodes, note)
        if set(keys) != set(range(len(keys))):
            raise CorruptDataError("header: arrays are missing from the tree")
        self._set(data, where, _records(where.header, [keys[i] for i in range(len(keys))]), memory, claimed)
        if sum(r.nbytes for r in self._records) != self._body.nbytes:
            raise CorruptDataError("header: the pieces do not fill the file")
        if parent is None and any(r.delta for r in self._records):
            raise CorruptDataError("header: a delta array in a base")
        if sum(r.spec.nbytes for r in self._records) != raw:
            raise CorruptDataError("header: the arrays are not as large as it says")

    def _set(
        self,
        data: bytes | Ranged,
        where: container.Layout,
        records: tuple[ArrayRecord, ...],
        memory: dict[str, Reference] | None,
        claimed: str = "",
    ) -> None:
        self._data = data
        self._header = where.header
        self._body = container.Body(data if isinstance(data, Ranged) else memoryview(data), where)
        self._id = claimed if isinstance(data, Ranged) else ""
        self._memory = memory
        self._nodes = where.header["tree"]
        self._records = records
        self._by_key = {r.key: r for r in records}

    @staticmethod
    def written(
        header: dict[str, Any], keys: list[tuple[str, str]], pieces: Iterable[Piece], memory: dict[str, Reference]
    ) -> Checkpoint:
        """Write a checkpoint, and return it without reading its header again.

        Args:
            header: as `docs/format.md` has it.
            keys: path and key of each array.
            pieces: of all arrays, in order.
            memory: what later deltas need, by key.
        """
        data, where = container.write(header, pieces)
        made = Checkpoint.__new__(Checkpoint)
        made._set(data, where, _records(header, keys), memory)
        return made

    @staticmethod
    def from_bytes(data: bytes | bytearray | memoryview, prev: Checkpoint | None = None) -> Checkpoint:
        """Read a checkpoint; the inverse of `to_bytes`.

        Every checksum is verified. A base comes back resolved, a delta only with its resolved parent.

        Args:
            data: the bytes of one checkpoint, no more and no less.
            prev: the parent, resolved; None for a base, or to read a delta that will be no parent itself.

        Raises:
            CorruptDataError: truncated, altered, or no checkpoint.
            NewerFormatError: written by a newer version.
            MissingParentError: `prev` is not the parent, or is not resolved.
        """
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise BadArgumentError(f"data must be bytes, not {type(data).__qualname__}")
        ckpt = Checkpoint(bytes(data), None)
        ckpt._body.check_all()
        if prev is not None:
            if ckpt.is_delta:
                ckpt._memory = ckpt._resolve(check_parent(ckpt, prev))
            else:
                raise MissingParentError("the checkpoint is a base: it has no parent, and one was given as prev")
        return ckpt

    def to_bytes(self) -> bytes:
        """The file: what `from_bytes` reads."""
        return self._data if isinstance(self._data, bytes) else bytes(self._data[:])

    @property
    def id(self) -> str:
        """Content hash (BLAKE3, 64 hexadecimal digits) of the bytes; a delta names its parent by it."""
        if not self._id:  # found when it is asked for: hashing takes a third of the time of exact decoding
            self._id = blake3(self.to_bytes()).hexdigest()
        return self._id

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Checkpoint) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def identity(self) -> str:
        """The name by which deltas refer to this checkpoint: `id`, or the original's after compaction."""
        identity: str = self._header.get("as") or self.id
        return identity

    @property
    def parent_id(self) -> str | None:
        """The parent's `identity`; None for a base."""
        parent: str | None = self._header.get("parent")
        return parent

    @property
    def is_delta(self) -> bool:
        """Whether a parent is needed to read it from its bytes."""
        return self.parent_id is not None

    @property
    def is_resolved(self) -> bool:
        """Whether it can be the parent of a delta."""
        return self._memory is not None or not self.is_delta

    @property
    def nbytes(self) -> int:
        """Bytes of the file, everything included."""
        return len(self._data)

    @property
    def raw_nbytes(self) -> int:
        """Bytes of the arrays of the state, tied ones once."""
        return int(self._header["raw"])

    @property
    def ratio(self) -> float:
        """`raw_nbytes / nbytes`."""
        return self.raw_nbytes / self.nbytes

    @property
    def header(self) -> Mapping[str, Any]:
        """The header as it was read; not to be changed."""
        return self._header

    @property
    def records(self) -> tuple[ArrayRecord, ...]:
        """What the header says of each array."""
        return self._records

    def summary(self) -> list[Row]:
        """One row an array: path, codec, raw bytes, stored bytes, bits an element, achieved error."""
        return [
            Row(
                r.path,
                r.codec,
                r.stream,
                r.spec.nbytes,
                r.nbytes,
                8 * r.nbytes / r.spec.size if r.spec.size else 0.0,
                r.error,
                r.measure,
                r.spec.dtype,
                r.spec.shape,
                "; ".join(filter(None, (r.note, _lost(r)))),
                r.why,
            )
            for r in self._records
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied as its bytes, and what the next delta needs."""
        return Checkpoint, (self.to_bytes(), self._memory)

    def __repr__(self) -> str:
        kind = "delta" if self.is_delta else "base"
        return f"<Checkpoint {self.id[:12]} {kind} {self.raw_nbytes} -> {self.nbytes} bytes, ratio {self.ratio:.1f}>"

    # ------------------------------------------------------------------ used by the codec, not by users

    def reference_of(
        self, record: ArrayRecord, prev: Checkpoint | None = None, sibling: Array | None = None
    ) -> Reference:
        """Decode one array, or return its kept reference; a delta needs its parent.

        `sibling` are the decoded values of the array that the record names, where somebody has them.
        """
        if self._memory is not None and record.key in self._memory:
            return self._memory[record.key]
        pieces = self.pieces_of(record)
        parent = prev.parent_reference(record.key, record.spec) if record.delta and prev is not None else None
        if record.delta and parent is None:
            raise MissingParentError(f"{record.path}: a delta, and the parent has no such array")
        if record.sibling is not None:
            other = self._records[record.sibling]
            if (other.spec.library, other.spec.shape) != (record.spec.library, record.spec.shape):
                raise CorruptDataError(f"header: {record.path}: {other.path} beside it is of another kind")
            if sibling is None:
                sibling = self.values_of(other, prev)
            if record.format.beside is not None:
                sibling = record.format.beside(sibling, other.spec)
        try:
            return record.format.decode(record.spec, record.meta, pieces, parent, sibling)
        except CorruptDataError as e:
            raise CorruptDataError(f"{record.path}: {e}") from None

    @own_arithmetic()
    def values_of(self, record: ArrayRecord, prev: Checkpoint | None = None, sibling: Array | None = None) -> Array:
        """The decoded values of one array, flat; arguments as `reference_of` has them."""
        known = self._memory or {}
        reference = self.reference_of(record, prev, sibling)
        if isinstance(reference, BytesReference) and record.key not in known:
            return from_bytes(reference.data, record.spec)  # decoded just now, and kept nowhere: no copy
        return reference.values(record.spec)

    def pieces_of(self, record: ArrayRecord) -> list[memoryview]:
        """The bytes of one array, their checksums verified."""
        starts = itertools.accumulate(record.lengths, initial=record.offset)
        return [self._body.piece(start, length) for start, length in zip(starts, record.lengths, strict=False)]

    @own_arithmetic()
    def decode(self, wanted: Collection[ArrayRecord], prev: Checkpoint | None) -> None:
        """Decode these arrays for `reference_of` and keep the result; fetch no other part of the file."""
        check_memory(sum(r.spec.nbytes for r in wanted), "what was asked for")
        self._body.fetch((r.offset, r.nbytes) for r in wanted)
        for with_sibling in (False, True):
            now = [r for r in wanted if (r.sibling is not None) == with_sibling]
            memories = map_chunks(lambda r: self.reference_of(r, prev), now)
            self._memory = (self._memory or {}) | {r.key: m for r, m in zip(now, memories, strict=True)}

    def let_go(self) -> None:
        """Forget what `decode` decoded and fetched; the header stays."""
        self._memory = None
        self._body.forget()

    def record_at(self, key: str) -> ArrayRecord | None:
        """The array at a place of the tree."""
        return self._by_key.get(key)

    def parent_reference(self, key: str, spec: LeafSpec) -> Reference | None:
        """Return the reference for a delta of the array at `key`; None if it is new or has changed."""
        record = self._by_key.get(key)
        if record is None or not record.format.has_deltas:
            return None
        if record.spec.shape != spec.shape or record.spec.dtype != spec.dtype:
            return None
        memory = self.reference_of(record)
        # A base read from bytes is decoded when first needed, and once.
        if self._memory is None:
            self._memory = {}
        self._memory[key] = memory
        return memory

    @own_arithmetic()
    def _resolve(self, parent: Checkpoint) -> dict[str, Reference]:
        wanted = [r for r in self._records if r.format.has_deltas]
        needed = sum(r.spec.nbytes if r.format.is_wide else r.spec.size for r in wanted)
        check_memory(needed, "what a delta needs")

        def one(record: ArrayRecord) -> Reference:
            try:
                return self.reference_of(record, parent)
            except MemoryError:
                raise _too_large(record) from None

        decoded = map_chunks(one, wanted)
        return {r.key: m for r, m in zip(wanted, decoded, strict=True)}


def _too_large(record: ArrayRecord) -> CorruptDataError:
    return CorruptDataError(f"{record.path}: {record.spec.nbytes} bytes are more than can be had here")


def check_parent(ckpt: Checkpoint, prev: Checkpoint) -> Checkpoint:
    """`prev` if it is the resolved parent of `ckpt`; else MissingParentError says what is wrong."""
    check_resolved(prev)
    if prev.identity != ckpt.parent_id:
        raise MissingParentError(f"the parent is {str(ckpt.parent_id)[:12]}...; prev is {prev.identity[:12]}...")
    return prev


def check_resolved(prev: Any) -> Checkpoint:
    """`prev` if it can be a parent."""
    if not isinstance(prev, Checkpoint):
        hint = "; a configuration goes to cfg=" if type(prev).__qualname__ == "Config" else ""
        raise BadArgumentError(f"prev must be a Checkpoint, not {type(prev).__qualname__}{hint}")
    if not prev.is_resolved:
        raise MissingParentError(
            f"checkpoint {prev.id[:12]}... is a delta read without its parent; use from_bytes(blob, prev=parent)"
        )
    return prev


@own_arithmetic()
def decompress(ckpt: Checkpoint, prev: Checkpoint | None = None, *, out: Any = None) -> Any:
    """The state a checkpoint holds: the same tree, keys, dtypes and shapes.

    Arrays come back in the library they were stored from; torch tensors on the CPU. Tied arrays are one array again.

    Args:
        ckpt: the checkpoint.
        prev: its resolved parent; needed for a delta that was read without it, checked wherever it is given.
        out: a tree with an array of the same dtype and shape at the place of each array, contiguous and writable:
            values are decoded into these, and they stand in the result. All are checked before the first is written.

    Raises:
        BadArgumentError: the arrays of `out` do not fit.
        MissingParentError: a delta without its parent, or with another.
        CorruptDataError: the bytes are not what was written; `out` may then hold a part of it.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> state = {"step": 7, "ids": np.arange(5)}
        >>> sp.decompress(sp.compress(state))["ids"].tolist()
        [0, 1, 2, 3, 4]
    """
    if not isinstance(ckpt, Checkpoint):
        raise BadArgumentError(f"ckpt must be a Checkpoint, not {type(ckpt).__qualname__}")
    if prev is not None and ckpt.is_delta:
        check_parent(ckpt, prev)
    elif prev is not None:
        raise MissingParentError("the checkpoint is a base: it has no parent, and one was given as prev")
    elif not ckpt.is_resolved:
        raise MissingParentError(f"a delta needs its parent {str(ckpt.parent_id)[:12]}... as prev")

    check_memory(ckpt.raw_nbytes, "the state")

    records = ckpt.records
    targets = {} if out is None else outputs_of(out, records)
    beside: dict[int | None, list[int]] = {}
    for number, record in enumerate(records):
        beside.setdefault(record.sibling, []).append(number)

    def values(record: ArrayRecord, sibling: Array | None = None) -> Array:
        try:
            return ckpt.values_of(record, prev, sibling)
        except MemoryError:
            raise _too_large(record) from None

    def one(number: int) -> dict[int, Array]:
        """An array and those that are decoded with it at hand."""
        record = records[number]
        if number in targets and number not in beside and (record.key not in (ckpt._memory or {})):
            parent = prev.parent_reference(record.key, record.spec) if record.delta and prev is not None else None
            fits = parent is not None or not record.delta
            if fits and decoded_into(record, ckpt.pieces_of(record), parent, targets[number]):
                return {number: targets[number]}
        first = values(record)
        found = {number: first} | {i: values(records[i], first) for i in beside.get(number, [])}
        built = {i: build_leaf(x, records[i].spec) for i, x in found.items()}
        for i in built.keys() & targets.keys():
            write_to(targets[i], built[i])
            built[i] = targets[i]
        return built

    decoded = map_arrays(one, beside.get(None, []), lambda number: records[number].spec.size)
    arrays = {i: x for found in decoded for i, x in found.items()}
    return tree.unflatten(ckpt._nodes, lambda number, _place: arrays[number], rebuild=True)
