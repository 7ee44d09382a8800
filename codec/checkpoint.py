"""A checkpoint: its bytes, its header, and, if resolved, the reference for the next delta."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

from blake3 import blake3

from ..kernels.backend.arguments import no_device
from ..kernels.backend.arrays import on_gpu
from .base import Reference
from .display import Row, Summary, html_fields, size
from .entropy.blocks import decoding_near
from .errors import BadArgumentError, CorruptDataError, MissingParentError
from .format import container
from .format.fields import Bytes, Piece, parts_of
from .format.ranged import Ranged, ranged_over
from .groups import BytesReference, Coded, FilledReference, joined_bytes, joined_spec
from .outputs import copy_parts, device_memory, host_memory, new_outputs, outputs_of, placed, write_to
from .parallel import map_arrays, map_chunks, own_arithmetic
from .records import ArrayRecord, Group, Records, records_of
from .state import tree
from .state.casting import FLOATS
from .state.leaves import Array, LeafSpec, as_bytes, build_leaf, check_memory, from_bytes, import_libraries

_HASH = re.compile("[0-9a-f]{64}")


_NEXT_TO_NOTHING = 0.9
"""Relative L2 error from which an array counts as lost."""


def _lost(record: ArrayRecord) -> str:
    """Return a note for an array that is restored as almost zero (relative L2 error near 1)."""
    lost = record.measure == "relative L2" and record.error >= _NEXT_TO_NOTHING
    return f"as good as zero when restored (relative L2 error {record.error:.2g})" if lost else ""


def content_hash(blocks: Iterable[Bytes]) -> str:
    """Return the BLAKE3 hash of the bytes of a file, 64 hexadecimal digits.

    Args:
        blocks: the bytes, in order.

    Example:
        >>> content_hash([b"a", b"b"]) == content_hash([b"ab"])
        True
    """
    digest = blake3()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def _spans(group: Group, numbers: Collection[int]) -> list[tuple[int, int]]:
    """Return offset and length of some pieces in the body."""
    starts = list(itertools.accumulate(group.lengths, initial=group.offset))
    return [(starts[i], group.lengths[i]) for i in numbers]


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
        "_by_key",
        "_data",
        "_groups",
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
        file = data if isinstance(data, Ranged) else container.Buffers([data])
        where = container.layout(file)
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
        self._set(file, where, records, references, claimed)
        if records.nbytes != self._body.nbytes:
            raise CorruptDataError("header: the pieces do not fill the file")
        if parent is None and any(group.is_delta for group in self._groups):
            raise CorruptDataError("header: a delta array in a base")
        if sum(r.spec.nbytes for r in self._records) != raw:
            raise CorruptDataError("header: the arrays are not as large as it says")

    def _set(
        self,
        data: container.Buffers | Ranged,
        where: container.Layout,
        records: Records,
        references: dict[str, Reference] | None,
        claimed: str = "",
    ) -> None:
        self._data = data
        self._header = where.header
        self._body = container.Body(data, where)
        self._id = claimed if isinstance(data, Ranged) else ""
        self._kept = references
        self._nodes = where.header["tree"]
        self._records, self._groups = records.arrays, records.groups
        self._by_key = {r.key: r for r in records.arrays}
        self._last: tuple[Group, dict[str, Reference]] | None = None

    @staticmethod
    def written(
        header: dict[str, Any],
        records: Records,
        pieces: Sequence[Piece],
        references: dict[str, Reference],
        *,
        arrays: Sequence[Any] = (),
        is_spooled: bool = False,
    ) -> Checkpoint:
        """Write a checkpoint, and return it without reading its header again.

        Args:
            header: as `docs/format.md` has it.
            records: of its arrays and groups.
            pieces: of all arrays, in order.
            references: what later deltas need, by key.
            arrays: the caller's, which may change; pieces in their memory are copied.
            is_spooled: whether the pieces are in a `Spool` and stay there, so that the file is never joined in memory.
        """
        made = Checkpoint.__new__(Checkpoint)
        front, where = container.write_front(header, pieces)
        if not is_spooled:
            parts = itertools.chain.from_iterable(map(parts_of, pieces))
            made._set(container.Buffers([front, *container.apart_from(parts, arrays)]), where, records, references)
            return made
        file = ranged_over(front, pieces)
        made._set(file, where, records, references, content_hash(file.blocks()))
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
        return self._data.joined() if isinstance(self._data, container.Buffers) else bytes(self._data[:])

    def blocks(self) -> Iterator[Bytes]:
        """Yield the bytes of the file in order, in buffers, as they are in memory or fetched."""
        return self._data.blocks()

    @property
    def id(self) -> str:
        """Content hash (BLAKE3, 64 hexadecimal digits) of the bytes; a delta names its parent by it."""
        # Computed on demand, for hashing takes a third of the time of exact decoding.
        if not self._id and self.is_in_memory:
            self._id = content_hash(self._data.blocks())
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

    def reference_of(self, record: ArrayRecord, prev: Checkpoint | None = None) -> Reference:
        """Decode one array, or return its reference from memory; a delta needs `prev`.

        All arrays of a group are decoded together, and kept until an array of another group is requested.
        """
        if self._kept is not None and record.key in self._kept:
            return self._kept[record.key]
        group, last = record.group, self._last
        if len(group.members) == 1:
            return self.references_of(group, prev)[0]
        if last is None or last[0] is not group:
            keys = [member.key for member in self.members_of(group)]
            last = self._last = group, dict(zip(keys, self.references_of(group, prev), strict=True))
        return last[1][record.key]

    def references_of(
        self,
        group: Group,
        prev: Checkpoint | None = None,
        pairs: Mapping[int, Array] | None = None,
        out: Array | None = None,
    ) -> list[Reference]:
        """Decode the arrays of a group, or return their references from memory.

        Args:
            group: the group.
            prev: the parent, for a delta.
            pairs: decoded flat values, by number, of arrays that the records name, if they are known.
            out: memory for the values, on the host of a group of one array; see `Coded.out`.
        """
        return self.kept_references(group) or self._decoded_references(group, prev, pairs, out)

    def kept_references(self, group: Group) -> list[Reference]:
        """Return the references of a group from memory; nothing unless all are there."""
        keys, known = [record.key for record in self.members_of(group)], self._kept or {}
        return [known[key] for key in keys] if all(key in known for key in keys) else []

    def _decoded_references(
        self, group: Group, prev: Checkpoint | None, pairs: Mapping[int, Array] | None, out: Array | None = None
    ) -> list[Reference]:
        """Decode the arrays of a group; arguments as of `references_of`."""
        members = self.members_of(group)
        coded = replace(self._coded(group, prev, pairs or {}), out=out)
        try:
            return list(group.format.decode(coded))
        except CorruptDataError as e:
            more = f" and {len(members) - 1} more" if len(members) > 1 else ""
            raise CorruptDataError(f"{members[0].path}{more}: {e}") from None

    def _coded(self, group: Group, prev: Checkpoint | None, pairs: Mapping[int, Array]) -> Coded:
        """Return what decodes a group."""
        members = self.members_of(group)
        parents: list[Reference | None] = [None] * len(members)
        if group.is_delta:
            parents = [None if prev is None else prev.parent_reference(r.key, r.spec) for r in members]
            for record, parent in zip(members, parents, strict=True):
                if parent is None:
                    raise MissingParentError(f"{record.path}: a delta, and the parent has no such array")
        pieces, pair = self._pieces(group), None
        if group.format.pair is not None:
            others = [self._pair_of(record) for record in members]
            known = self._together([o for r, o in zip(members, others, strict=True) if r.pair not in pairs], prev)
            values = [
                pairs[r.pair] if r.pair is not None and r.pair in pairs else known[other.key]
                for r, other in zip(members, others, strict=True)
            ]
            spec = joined_spec([other.spec for other in others])
            if any(other.spec.dtype != spec.dtype for other in others):
                raise CorruptDataError(f"header: {members[0].path}: the pairs of its group have several dtypes")
            joined = values[0] if len(values) == 1 else from_bytes(joined_bytes(values, there=True), spec)
            pair = group.format.pair(joined, spec)
        return Coded([r.spec for r in members], group.meta, pieces, parents, pair)

    def _pair_of(self, record: ArrayRecord) -> ArrayRecord:
        other = self._records[record.pair or 0]
        if (other.spec.library, other.spec.shape) != (record.spec.library, record.spec.shape):
            raise CorruptDataError(f"header: {record.path}: its pair {other.path} has another library or shape")
        if other.spec.dtype not in FLOATS:
            raise CorruptDataError(f"header: {record.path}: its pair {other.path} is of dtype {other.spec.dtype}")
        return other

    def _together(self, records: Sequence[ArrayRecord], prev: Checkpoint | None) -> dict[str, Array]:
        """Return the decoded flat values of arrays by key; each of their groups is decoded once."""
        by_group = sorted(records, key=lambda record: record.group.number)
        return {record.key: self.values_of(record, prev) for record in by_group}

    @own_arithmetic()
    def values_of(self, record: ArrayRecord, prev: Checkpoint | None = None) -> Array:
        """Return the decoded flat values of one array; arguments as in `reference_of`."""
        reference = self.reference_of(record, prev)
        is_kept = record.key in (self._kept or {}) or len(record.group.members) > 1
        return _values(reference, record.spec, lends=not is_kept)

    def members_of(self, group: Group) -> list[ArrayRecord]:
        """Return the records of the arrays of a group."""
        return [self._records[i] for i in group.members]

    def pieces_of(self, record: ArrayRecord) -> list[memoryview]:
        """Return the pieces of the group of an array, with verified checksums."""
        return self._pieces(record.group)

    def fetch(self, wanted: Iterable[tuple[ArrayRecord, Collection[int]]]) -> None:
        """Fetch these pieces of arrays, by number, if the file is remote."""
        self._body.fetch(span for record, numbers in wanted for span in _spans(record.group, numbers))

    def some_pieces(self, record: ArrayRecord, numbers: Collection[int]) -> dict[int, memoryview]:
        """Return some pieces of an array, by number, with verified checksums."""
        spans = _spans(record.group, numbers)
        return {i: self._body.piece(*span) for i, span in zip(numbers, spans, strict=True)}

    def _pieces(self, group: Group) -> list[memoryview]:
        return [self._body.piece(*span) for span in _spans(group, range(len(group.lengths)))]

    @property
    def groups(self) -> tuple[Group, ...]:
        """Records of the groups in the header."""
        return self._groups

    def jobs(self) -> list[list[Group]]:
        """Return lists of groups, in which each array follows its pair."""
        job_of: dict[int, list[Group]] = {}
        following, jobs = [], []
        for group in self._groups:
            if group.format.pair is None:
                jobs.append([group])
                job_of |= dict.fromkeys(group.members, jobs[-1])
            else:
                following.append(group)
        for group in following:
            job_of[self._records[group.members[0]].pair or 0].append(group)
        return jobs

    def _decoded(self, wanted: Collection[ArrayRecord], prev: Checkpoint | None) -> dict[str, Reference]:
        """Decode the references of these arrays, by key."""
        import_libraries(r.spec for r in wanted)
        keys = {r.key for r in wanted}

        def one(group: Group) -> dict[str, Reference]:
            members = self.members_of(group)
            try:
                references = self.references_of(group, prev)
            except MemoryError:
                raise _too_large(members[0]) from None
            return {r.key: own for r, own in zip(members, references, strict=True) if r.key in keys}

        groups = {r.group.number: r.group for r in wanted}
        return {key: reference for found in map_chunks(one, groups.values()) for key, reference in found.items()}

    @own_arithmetic()
    def decode(self, wanted: Collection[ArrayRecord], prev: Checkpoint | None) -> None:
        """Decode these arrays, keep their references, and fetch only their pieces."""
        check_memory(sum(r.spec.memory for r in wanted), "the selected arrays")
        self._body.fetch((r.group.offset, r.group.nbytes) for r in wanted)
        for has_pair in (False, True):
            now = [r for r in wanted if (r.pair is not None) == has_pair]
            self._kept = (self._kept or {}) | self._decoded(now, prev)
        self._body.forget()

    def with_needed(self, keys: Collection[str]) -> list[ArrayRecord]:
        """Return the records of the arrays with these keys, and of those that decoding needs.

        Those are pairs and the other members of a group.
        """
        numbers = {i for r in self._records if r.key in keys for i in r.group.members}
        numbers |= {i for n in numbers if (pair := self._records[n].pair) is not None for i in self._mates(pair)}
        return [self._records[i] for i in sorted(numbers)]

    def _mates(self, number: int) -> tuple[int, ...]:
        return self._records[number].group.members

    @property
    def is_in_memory(self) -> bool:
        """Return whether all bytes of the file are in memory."""
        return isinstance(self._data, container.Buffers)

    def read_from(self, file: Ranged) -> None:
        """Read the bytes from this copy of the file from now on; the references stay."""
        self._data, self._body = file, self._body.over(file)

    def release(self, key: str) -> None:
        """Free the reference of an array, which a delta against it would need."""
        if self._kept is not None:
            self._kept.pop(key, None)

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
            members = self.members_of(record.group)
            self._kept |= zip((r.key for r in members), self.references_of(record.group), strict=True)
        return self._kept[key]

    @own_arithmetic()
    def _resolve(self, parent: Checkpoint) -> dict[str, Reference]:
        wanted = [r for r in self._records if r.format.has_deltas]
        needed = sum(r.spec.nbytes if r.format.is_wide else r.spec.size for r in wanted)
        check_memory(needed, "what a delta needs")

        return self._decoded(wanted, parent)


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
        out: a tree with an array of the same dtype and shape at the place of each array, writable and dense in memory
            (contiguous or permuted) of its own: values are decoded into these arrays, which the result contains. Each
            place of a tied array may have one. All are checked before any is written.

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
    targets, further = (new_outputs(records), {}) if out is None else outputs_of(out, ckpt._nodes, records)
    jobs = ckpt.jobs()
    sizes = [sum(records[i].spec.size for group in job for i in group.members) for job in jobs]
    reader = Reader(ckpt, prev, targets)
    with decoding_near(targets.values()):
        decoded = map_arrays(lambda j: reader.decode(jobs[j]), range(len(jobs)), lambda j: sizes[j])
    arrays = {i: x for found in decoded for i, x in found.items()}
    return tree.unflatten(ckpt._nodes, placed(arrays, further), rebuild=True)


def _values(reference: Reference, spec: LeafSpec, *, lends: bool) -> Array:
    """Return flat values of a reference; with `lends` they may be its own memory."""
    if lends and isinstance(reference, BytesReference):
        return from_bytes(reference.data, spec)
    return reference.values(spec)


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
                values = self._straight(group, known) or self._there(group, known) or self._values(group, known)
            except MemoryError:
                raise _too_large(self.ckpt.records[group.members[0]]) from None
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
            data = as_bytes(_values(reference, spec, lends=True))
            if data.ctypes.data != memory.ctypes.data:  # it was not decoded there
                memory[:] = data
        if number in self.named:
            known[number] = from_bytes(memory, spec)
        return [target]

    def _place(self, group: Group) -> Any:
        """Return the GPU on which the caller's tensors of a group are; None if not on one."""
        first = device_memory(self.targets.get(group.members[0]))
        if first is None:
            return None
        others = (device_memory(self.targets.get(i)) for i in group.members[1:])
        return first.device if all(x is not None and x.device == first.device for x in others) else None

    def _there(self, group: Group, known: dict[int, Array]) -> list[Array]:
        """Decode a group into the caller's tensors on a GPU; return nothing if it cannot be.

        The tensors of a group of several are filled from one, in a single launch. Values that other arrays need
        elsewhere are not made there.
        """
        if (place := self._place(group)) is None:
            return []
        records = self.ckpt.records
        named = {records[j].group.number for i in group.members for j in self.named.get(i, ())}
        if any(self._place(self.ckpt.groups[number]) != place for number in named):
            return []
        targets, specs = [self.targets[i] for i in group.members], [records[i].spec for i in group.members]
        rooms: list[Array] = [device_memory(target) for target in targets]
        room = rooms[0] if len(rooms) == 1 else rooms[0].new_empty(sum(spec.size for spec in specs))
        kept = self.ckpt.kept_references(group)
        is_filled = group.format.decodes_there and not kept
        references = kept or self.ckpt._decoded_references(group, self.prev, known, room if is_filled else None)
        if not is_filled:
            group.format.fill_there(specs, references, room)
        if len(rooms) > 1:
            copy_parts(room, rooms)
        known.update((i, x) for i, x in zip(group.members, rooms, strict=True) if i in self.named)
        return targets

    def _values(self, group: Group, known: dict[int, Array]) -> list[Array]:
        """Return the flat values of a group on the host."""
        records, kept = self.ckpt.members_of(group), self.ckpt.kept_references(group)
        specs = [record.spec for record in records]
        references = kept or self.ckpt._decoded_references(group, self.prev, known)
        if len(records) > 1 and not isinstance(references[0], BytesReference):
            return group.format.values(specs, references)
        return [
            _values(reference, spec, lends=(len(records) == 1 and not kept) or i in self.targets)
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
