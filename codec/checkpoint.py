"""A checkpoint: its bytes, its header, and, if resolved, the reference for the next delta."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Never

from blake3 import blake3

from ..kernels.backend.arguments import no_device
from .arithmetic import own_arithmetic
from .base import Reference
from .bundles.joined import Joined, joined_bytes, joined_spec, parts
from .bundles.streams import BUNDLE_STREAMS
from .display import html_fields, size
from .errors import BadArgumentError, CorruptDataError, MissingParentError
from .format import container
from .format.fields import Piece
from .format.ranged import Ranged
from .lossless.reference import BytesReference
from .outputs import decoded_into, outputs_of, write_to
from .parallel import map_arrays, map_chunks
from .records import ArrayRecord, Bundle, Records, Stretch, records_of
from .state import tree
from .state.leaves import Array, LeafSpec, build_leaf, check_memory, from_bytes, import_libraries
from .summary import Row, Summary

_HASH = re.compile("[0-9a-f]{64}")


_NEXT_TO_NOTHING = 0.9
"""Relative L2 error from which an array counts as lost."""


def _lost(record: ArrayRecord) -> str:
    """Return a note for an array that is restored as almost zero (relative L2 error near 1)."""
    lost = record.measure == "relative L2" and record.error >= _NEXT_TO_NOTHING
    return f"as good as zero when restored (relative L2 error {record.error:.2g})" if lost else ""


def _spans(stretch: Stretch, numbers: Collection[int]) -> list[tuple[int, int]]:
    """Return offset and length of some pieces in the body."""
    starts = list(itertools.accumulate(stretch.lengths, initial=stretch.offset))
    return [(starts[i], stretch.lengths[i]) for i in numbers]


class Checkpoint:
    """A compressed state, made by `compress` or `Checkpoint.from_bytes`; it is immutable.

    A *resolved* checkpoint (from `compress`, a base, or read with its resolved parent) carries what the next delta
    needs: about a byte a quantized weight and a byte a second moment, the bytes themselves of exact arrays.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> ckpt = sp.compress({"weight": np.ones((64, 64), np.float32)}, kinds={"weight": "linear"})
        >>> sp.Checkpoint.from_bytes(ckpt.to_bytes()).raw_nbytes
        16384
    """

    __slots__ = (
        "_body",
        "_bundles",
        "_by_key",
        "_data",
        "_header",
        "_id",
        "_kept",
        "_last",
        "_nodes",
        "_records",
    )

    @own_arithmetic()
    def __init__(self, data: bytes | Ranged, references: dict[str, Reference] | None, claimed: str = "") -> None:
        """Read the header of a file; use `compress` or `from_bytes` instead.

        The content hash of a file that is only partly available cannot be computed; `claimed` replaces it.
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
        records = records_of(where.header, [keys[i] for i in range(len(keys))])
        self._set(data, where, records, references, claimed)
        if records.nbytes != self._body.nbytes:
            raise CorruptDataError("header: the pieces do not fill the file")
        if parent is None and any(r.delta for r in self._records):
            raise CorruptDataError("header: a delta array in a base")
        if sum(r.spec.nbytes for r in self._records) != raw:
            raise CorruptDataError("header: the arrays are not as large as it says")

    def _set(
        self,
        data: bytes | Ranged,
        where: container.Layout,
        records: Records,
        references: dict[str, Reference] | None,
        claimed: str = "",
    ) -> None:
        self._data = data
        self._header = where.header
        self._body = container.Body(data if isinstance(data, Ranged) else memoryview(data), where)
        self._id = claimed if isinstance(data, Ranged) else ""
        self._kept = references
        self._nodes = where.header["tree"]
        self._records, self._bundles = records.arrays, records.bundles
        self._by_key = {r.key: r for r in records.arrays}
        self._last: tuple[int, dict[str, Reference]] | None = None

    @staticmethod
    def written(
        header: dict[str, Any], keys: list[tuple[str, str]], pieces: Iterable[Piece], references: dict[str, Reference]
    ) -> Checkpoint:
        """Write a checkpoint, and return it without reading its header again.

        Args:
            header: as `docs/format.md` has it.
            keys: path and key of each array.
            pieces: of all arrays, in order.
            references: what later deltas need, by key.
        """
        data, where = container.write(header, pieces)
        made = Checkpoint.__new__(Checkpoint)
        made._set(data, where, records_of(header, keys), references)
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
                ckpt._kept = ckpt._resolve(check_parent(ckpt, prev))
            else:
                raise MissingParentError("the checkpoint is a base: it has no parent, and one was given as prev")
        return ckpt

    def to_bytes(self) -> bytes:
        """Return the file, as `from_bytes` reads it."""
        return self._data if isinstance(self._data, bytes) else bytes(self._data[:])

    @property
    def id(self) -> str:
        """Content hash (BLAKE3, 64 hexadecimal digits) of the bytes; a delta names its parent by it."""
        # Computed on demand, for hashing takes a third of the time of exact decoding.
        if not self._id and isinstance(self._data, bytes):
            self._id = blake3(self._data).hexdigest()
        return self._id

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Checkpoint) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def identity(self) -> str:
        """Name by which deltas refer to this checkpoint: its id, or after compaction the original's."""
        identity: str = self._header.get("as") or self.id
        return identity

    @property
    def parent_id(self) -> str | None:
        """The parent's `identity`; None for a base."""
        parent: str | None = self._header.get("parent")
        return parent

    @property
    def is_delta(self) -> bool:
        """Return whether decoding the bytes needs a parent."""
        return self.parent_id is not None

    @property
    def is_resolved(self) -> bool:
        """Return whether this checkpoint can be the parent of a delta."""
        return self._kept is not None or not self.is_delta

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
        """The header as it was read, which must not be changed."""
        return self._header

    @property
    def records(self) -> tuple[ArrayRecord, ...]:
        """Records of the arrays in the header."""
        return self._records

    def summary(self) -> Summary:
        """Return one row for each array: path, codec, sizes, achieved error, and the reason."""
        return Summary(
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
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle or copy the checkpoint as its bytes and its references."""
        return Checkpoint, (self.to_bytes(), self._kept)

    def __repr__(self) -> str:
        kind = "delta" if self.is_delta else "base"
        return f"<Checkpoint {self.id[:12]} {kind} {self.raw_nbytes} -> {self.nbytes} bytes, ratio {self.ratio:.1f}>"

    def _repr_html_(self) -> str:
        cells = {"": "delta" if self.is_delta else "base", "id": self.id[:12], "arrays": str(len(self._records))}
        cells |= {"state": size(self.raw_nbytes), "stored": size(self.nbytes), "ratio": f"{self.ratio:.1f}"}
        return html_fields("Checkpoint", cells)

    # ------------------------------------------------------------------ used by the codec, not by users

    def reference_of(self, record: ArrayRecord, prev: Checkpoint | None = None, pair: Array | None = None) -> Reference:
        """Decode one array, or return its reference from memory; a delta needs `prev`.

        `pair` holds the decoded values of the array that the record names, if they are known. All arrays of a
        bundle are decoded together, and kept until an array of another bundle is requested.
        """
        if self._kept is not None and record.key in self._kept:
            return self._kept[record.key]
        if record.bundle is not None:
            last = self._last
            if last is None or last[0] != record.bundle:
                last = record.bundle, self._references(record.bundle, prev)
                self._last = last
            return last[1][record.key]
        pieces = self.pieces_of(record)
        parent = prev.parent_reference(record.key, record.spec) if record.delta and prev is not None else None
        if record.delta and parent is None:
            raise MissingParentError(f"{record.path}: a delta, and the parent has no such array")
        if record.pair is not None:
            other = self._sibling_of(record)
            if pair is None:
                pair = self.values_of(other, prev)
            if record.format.pair is not None:
                pair = record.format.pair(pair, other.spec)
        try:
            return record.format.decode(record.spec, record.meta, pieces, parent, pair)
        except CorruptDataError as e:
            raise CorruptDataError(f"{record.path}: {e}") from None

    def _sibling_of(self, record: ArrayRecord) -> ArrayRecord:
        other = self._records[record.pair or 0]
        if (other.spec.library, other.spec.shape) != (record.spec.library, record.spec.shape):
            raise CorruptDataError(f"header: {record.path}: its pair {other.path} has another library or shape")
        return other

    def _references(self, number: int, prev: Checkpoint | None) -> dict[str, Reference]:
        """Return the reference of each array of a bundle, by key."""
        members = [self._records[i] for i in self._bundles[number].members]
        return dict(zip((r.key for r in members), self.joined_of(number, prev).split(), strict=True))

    def joined_of(
        self, number: int, prev: Checkpoint | None = None, pairs: Mapping[int, Array] | None = None
    ) -> Joined:
        """Decode the arrays of a bundle, or join their references that are in memory.

        Args:
            number: of the bundle.
            prev: the parent, for a delta.
            pairs: decoded flat values, by number, of arrays that the records name, if they are known.
        """
        bundle = self._bundles[number]
        members, stretch = [self._records[i] for i in bundle.members], bundle.stretch
        specs, stream = [r.spec for r in members], BUNDLE_STREAMS[stretch.stream]
        known = self._kept
        if known is not None and all(r.key in known for r in members):
            joined = stream.join([known[r.key] for r in members], specs)
            if joined is not None:
                return joined
        before = None
        if stretch.delta:
            parents = [None if prev is None else prev.parent_reference(r.key, r.spec) for r in members]
            before = stream.join(parents, specs)
            if before is None:
                missing = next((r for r, p in zip(members, parents, strict=True) if p is None), members[0])
                raise MissingParentError(f"{missing.path}: a delta, and the parent has no such array")
        square = None
        of_pair = members[0].format.pair
        if of_pair is not None:
            others = [self._sibling_of(r) for r in members]
            decoded = pairs or {}
            values = [
                decoded[r.pair] if r.pair is not None and r.pair in decoded else self.values_of(other, prev)
                for r, other in zip(members, others, strict=True)
            ]
            spec = joined_spec([other.spec for other in others])
            if any(other.spec.dtype != spec.dtype for other in others):
                raise CorruptDataError(f"header: {members[0].path}: the pairs of its bundle have several dtypes")
            square = of_pair(from_bytes(joined_bytes(values), spec), spec)
        try:
            return stream.decode(specs, stretch.meta, self._pieces(stretch), before, square)
        except CorruptDataError as e:
            raise CorruptDataError(f"{members[0].path} and {len(members) - 1} more: {e}") from None

    @own_arithmetic()
    def values_of(self, record: ArrayRecord, prev: Checkpoint | None = None, pair: Array | None = None) -> Array:
        """Return the decoded flat values of one array; arguments as in `reference_of`."""
        known = self._kept or {}
        reference = self.reference_of(record, prev, pair)
        if isinstance(reference, BytesReference) and record.key not in known and record.bundle is None:
            return from_bytes(reference.data, record.spec)  # decoded just now, and kept nowhere: no copy
        return reference.values(record.spec)

    def pieces_of(self, record: ArrayRecord) -> list[memoryview]:
        """Return the pieces of an array, or of its whole bundle, with verified checksums."""
        return self._pieces(record.stretch)

    def fetch(self, wanted: Iterable[tuple[ArrayRecord, Collection[int]]]) -> None:
        """Fetch these pieces of arrays, by number, if the file is remote."""
        self._body.fetch(span for record, numbers in wanted for span in _spans(record.stretch, numbers))

    def some_pieces(self, record: ArrayRecord, numbers: Collection[int]) -> dict[int, memoryview]:
        """Return some pieces of an array, by number, with verified checksums."""
        spans = _spans(record.stretch, numbers)
        return {i: self._body.piece(*span) for i, span in zip(numbers, spans, strict=True)}

    def _pieces(self, stretch: Stretch) -> list[memoryview]:
        starts = itertools.accumulate(stretch.lengths, initial=stretch.offset)
        return [self._body.piece(start, length) for start, length in zip(starts, stretch.lengths, strict=False)]

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Records of the bundles in the header."""
        return self._bundles

    def units(self, wanted: Collection[ArrayRecord]) -> list[tuple[ArrayRecord, ...]]:
        """Group array records into units of decoding: single arrays and bundles."""
        found: dict[Any, list[ArrayRecord]] = {}
        for record in wanted:
            found.setdefault(record.key if record.bundle is None else record.bundle, []).append(record)
        return [tuple(unit) for unit in found.values()]

    def _memories(self, wanted: Collection[ArrayRecord], prev: Checkpoint | None) -> dict[str, Reference]:
        """Decode the references of these arrays."""
        import_libraries(r.spec for r in wanted)

        def one(unit: tuple[ArrayRecord, ...]) -> dict[str, Reference]:
            first = unit[0]
            try:
                if first.bundle is None:
                    return {first.key: self.reference_of(first, prev)}
                references = self._references(first.bundle, prev)
            except MemoryError:
                raise _too_large(first) from None
            return {record.key: references[record.key] for record in unit}

        return {key: reference for found in map_chunks(one, self.units(wanted)) for key, reference in found.items()}

    @own_arithmetic()
    def decode(self, wanted: Collection[ArrayRecord], prev: Checkpoint | None) -> None:
        """Decode these arrays, keep their references, and fetch only their pieces."""
        check_memory(sum(r.spec.memory for r in wanted), "the selected arrays")
        self._body.fetch((r.stretch.offset, r.stretch.nbytes) for r in wanted)
        for with_sibling in (False, True):
            now = [r for r in wanted if (r.pair is not None) == with_sibling]
            self._kept = (self._kept or {}) | self._memories(now, prev)

    def with_needed(self, keys: Collection[str]) -> list[ArrayRecord]:
        """Return the records of the arrays with these keys, and of those that decoding needs.

        Those are pairs and the other members of a bundle.
        """
        numbers = {i for i, r in enumerate(self._records) if r.key in keys}
        numbers |= self._mates(numbers)
        numbers |= {pair for i in numbers if (pair := self._records[i].pair) is not None}
        return [self._records[i] for i in sorted(numbers | self._mates(numbers))]

    def _mates(self, numbers: Collection[int]) -> set[int]:
        bundles = {bundle for i in numbers if (bundle := self._records[i].bundle) is not None}
        return {i for bundle in bundles for i in self._bundles[bundle].members}

    def let_go(self) -> None:
        """Free the references and the fetched bytes; the header stays."""
        self._kept = self._last = None
        self._body.forget()

    def record_at(self, key: str) -> ArrayRecord | None:
        """Return the record with this key, or None."""
        return self._by_key.get(key)

    def parent_reference(self, key: str, spec: LeafSpec) -> Reference | None:
        """Return the reference for a delta of the array at `key`; None if it is new or has changed."""
        record = self._by_key.get(key)
        if record is None or not record.format.has_deltas:
            return None
        if record.spec.shape != spec.shape or record.spec.dtype != spec.dtype:
            return None
        # A base read from bytes is decoded when first needed, and once.
        if self._kept is None:
            self._kept = {}
        if key not in self._kept:
            if record.bundle is None:
                self._kept[key] = self.reference_of(record)
            else:
                self._kept.update(self._references(record.bundle, None))
        return self._kept[key]

    @own_arithmetic()
    def _resolve(self, parent: Checkpoint) -> dict[str, Reference]:
        wanted = [r for r in self._records if r.format.has_deltas]
        needed = sum(r.spec.nbytes if r.format.is_wide else r.spec.size for r in wanted)
        check_memory(needed, "what a delta needs")

        return self._memories(wanted, parent)


def _too_large(record: ArrayRecord) -> CorruptDataError:
    return CorruptDataError(f"{record.path}: {record.spec.nbytes} bytes are more than can be had here")


def check_parent(ckpt: Checkpoint, prev: Checkpoint) -> Checkpoint:
    """Return `prev` if it is the resolved parent of `ckpt`, else raise MissingParentError."""
    check_resolved(prev)
    if prev.identity != ckpt.parent_id:
        raise MissingParentError(f"the parent is {str(ckpt.parent_id)[:12]}...; prev is {prev.identity[:12]}...")
    return prev


def check_resolved(prev: Any) -> Checkpoint:
    """Return `prev` if it can be a parent; raise an error otherwise."""
    if not isinstance(prev, Checkpoint):
        hint = "; a configuration goes to cfg=" if type(prev).__qualname__ == "Config" else ""
        raise BadArgumentError(f"prev must be a Checkpoint, not {type(prev).__qualname__}{hint}")
    if not prev.is_resolved:
        raise MissingParentError(
            f"checkpoint {prev.id[:12]}... is a delta read without its parent; use from_bytes(blob, prev=parent)"
        )
    return prev


@own_arithmetic()
def decompress(ckpt: Checkpoint, prev: Checkpoint | None = None, *, out: Any = None, **unknown: Never) -> Any:
    """Return the state that a checkpoint holds, with the same tree, keys, dtypes and shapes.

    Arrays come back in the library they were stored from; torch tensors on the CPU. Tied arrays are one array again.

    Args:
        ckpt: the checkpoint.
        prev: its resolved parent; needed for a delta that was read without it, and always checked if given.
        out: a tree with an array of the same dtype and shape at the place of each array, contiguous and writable:
            values are decoded into these arrays, which the result contains. All are checked before any is written.

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
    targets = {} if out is None else outputs_of(out, records)
    jobs = _jobs(ckpt)
    sizes = [sum(records[i].spec.size for unit in job for i in unit) for job in jobs]
    reader = _Reader(ckpt, prev, targets)
    decoded = map_arrays(lambda j: reader.decode(jobs[j]), range(len(jobs)), lambda j: sizes[j])
    arrays = {i: x for found in decoded for i, x in found.items()}
    return tree.unflatten(ckpt._nodes, lambda number, _place: arrays[number], rebuild=True)


Unit = tuple[int, ...]
"""Numbers of arrays that are decoded at once: one, or the members of a bundle."""


def _jobs(ckpt: Checkpoint) -> list[list[Unit]]:
    """Group units into jobs; an array is in the job of its pair, after it."""
    records = ckpt.records
    units = [bundle.members for bundle in ckpt.bundles]
    units += [(i,) for i, record in enumerate(records) if record.bundle is None]
    job_of: dict[int, list[Unit]] = {}
    following, jobs = [], []
    for unit in units:
        if records[unit[0]].pair is None:
            jobs.append([unit])
            job_of.update(dict.fromkeys(unit, jobs[-1]))
        else:
            following.append(unit)
    for unit in following:
        job_of[records[unit[0]].pair or 0].append(unit)
    return sorted(jobs)


class _Reader:
    """Decoder of a checkpoint's arrays in jobs, which may run in any thread.

    Args:
        ckpt: the checkpoint.
        prev: its parent, or None.
        targets: arrays of the caller to decode into, by number.
    """

    def __init__(self, ckpt: Checkpoint, prev: Checkpoint | None, targets: Mapping[int, Array]) -> None:
        self.ckpt, self.prev, self.targets = ckpt, prev, targets
        self.named = {record.pair for record in ckpt.records}

    def decode(self, job: Sequence[Unit]) -> dict[int, Array]:
        """Return the restored arrays of a job, by number."""
        built: dict[int, Array] = {}
        known: dict[int, Array] = {}
        for unit in job:
            first = self.ckpt.records[unit[0]]
            try:
                if first.bundle is not None:
                    self._bundle(unit, first.bundle, known, built)
                elif not self._straight(unit[0], built):
                    pair = None if first.pair is None else known.get(first.pair)
                    self._keep(unit[0], self.ckpt.values_of(first, self.prev, pair), known, built)
            except MemoryError:
                raise _too_large(first) from None
        return built

    def _straight(self, number: int, built: dict[int, Array]) -> bool:
        """Decode an exact array into the caller's array; return False if that is impossible."""
        record, prev = self.ckpt.records[number], self.prev
        if number not in self.targets or number in self.named or record.key in (self.ckpt._kept or {}):
            return False
        parent = prev.parent_reference(record.key, record.spec) if record.delta and prev is not None else None
        if record.delta and parent is None:
            return False
        if not decoded_into(record, self.ckpt.pieces_of(record), parent, self.targets[number]):
            return False
        built[number] = self.targets[number]
        return True

    def _bundle(self, unit: Unit, number: int, known: dict[int, Array], built: dict[int, Array]) -> None:
        joined = self.ckpt.joined_of(number, self.prev, known)
        specs = [self.ckpt.records[i].spec for i in unit]
        for i, spec, own in zip(unit, specs, parts(joined.data(), specs, specs[0].itemsize), strict=True):
            # A copy, for arrays of a state share no memory; into memory of the caller it is made there.
            self._keep(i, from_bytes(own if i in self.targets else own.copy(), spec), known, built)

    def _keep(self, number: int, values: Array, known: dict[int, Array], built: dict[int, Array]) -> None:
        if number in self.named:
            known[number] = values
        array = build_leaf(values, self.ckpt.records[number].spec)
        if number in self.targets:
            write_to(self.targets[number], array)
            array = self.targets[number]
        built[number] = array
