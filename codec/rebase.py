"""`rebase`: storage of a checkpoint as a base or as a delta against another parent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .arithmetic import own_arithmetic
from .base import Reference
from .bundles.streams import BUNDLE_STREAMS
from .checkpoint import Checkpoint, check_resolved
from .format.fields import Piece
from .format.schema import Record, StoredArray, StoredGroup
from .parallel import map_chunks
from .records import ArrayRecord
from .state.leaves import import_libraries


@own_arithmetic()
def rebase(ckpt: Checkpoint, prev: Checkpoint | None = None) -> Checkpoint:
    """Return a resolved checkpoint as a delta over another parent, or as a base.

    Nothing is quantized again.

    The result restores to the same bits, and leaves the same reference, so deltas over `ckpt` decode over it too: it
    answers to the same `identity`.

    Args:
        ckpt: a resolved checkpoint.
        prev: the new parent, resolved: the result is a delta over it (a super-step, where `ckpt` is several deltas
            away). None: the result is a base.

    Returns:
        A resolved checkpoint whose `identity` is that of `ckpt`.

    Raises:
        MissingParentError: one of the two is not resolved.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> base = sp.compress({"n": np.arange(5000)})
        >>> delta = sp.compress({"n": np.arange(5000) + 1}, prev=base)
        >>> alone = rebase(delta)
        >>> alone.is_delta, alone.identity == delta.id, bool((sp.decompress(alone)["n"] == np.arange(1, 5001)).all())
        (False, True, True)

    Source: LC-Checkpoint, section 4.3 (merging deltas into a super-step).
    """
    check_resolved(ckpt)
    if prev is not None:
        check_resolved(prev)
    import_libraries(record.spec for record in ckpt.records)

    bundled = map_chunks(lambda number: _bundle(ckpt, number, prev), range(len(ckpt.bundles)))
    alone = [record for record in ckpt.records if record.bundle is None]
    single = dict(
        zip((r.key for r in alone), map_chunks(lambda record: _array(ckpt, record, prev), alone), strict=True)
    )
    rows = []
    for row, record in zip(ckpt.header["arrays"], ckpt.records, strict=True):
        if record.bundle is None:
            row = single[record.key].record(StoredArray.from_json(row, record.path)).to_json()
        rows.append(row)
    header = {
        "parent": None if prev is None else prev.identity,
        "as": ckpt.identity,
        "raw": ckpt.raw_nbytes,
        "tree": ckpt.header["tree"],
        "arrays": rows,
    }
    if bundled:
        groups = (StoredGroup.from_json(row, len(rows)) for row in ckpt.header["bundles"])
        header["bundles"] = [made.record(group).to_json() for group, made in zip(groups, bundled, strict=True)]
    if "why" in ckpt.header:
        header["why"] = ckpt.header["why"]
    made = [*single.values(), *bundled]
    references = {key: reference for one in made for key, reference in one.references.items()}
    keys = [(r.path, r.key) for r in ckpt.records]
    return Checkpoint.written(header, keys, [piece for one in made for piece in one.pieces], references)


@dataclass(frozen=True, slots=True)
class _Rebased:
    """An array or a bundle encoded against another parent.

    Args:
        meta: the stream's metadata.
        pieces: bytes, in order.
        is_delta: whether decoding needs the parent.
        references: what a later delta needs, by key.
    """

    meta: dict[str, Any]
    pieces: Sequence[Piece]
    is_delta: bool
    references: dict[str, Reference]

    def record(self, stored: Record) -> Record:
        """Return a header record with new metadata and pieces."""
        lengths = [len(piece) for piece in self.pieces]
        return dataclasses.replace(stored, meta=self.meta, lengths=lengths, is_delta=self.is_delta)


def _array(ckpt: Checkpoint, record: ArrayRecord, prev: Checkpoint | None) -> _Rebased:
    rebase = record.format.rebase
    if rebase is None:
        return _Rebased(record.meta, [bytes(piece) for piece in ckpt.pieces_of(record)], False, {})
    reference = ckpt.reference_of(record)
    parent = None if prev is None else prev.parent_reference(record.key, record.spec)
    meta, pieces = rebase(record.spec, record.meta, reference, parent)
    return _Rebased(meta, pieces, parent is not None, {record.key: reference})


def _bundle(ckpt: Checkpoint, number: int, prev: Checkpoint | None) -> _Rebased:
    bundle = ckpt.bundles[number]
    members = [ckpt.records[i] for i in bundle.members]
    stream = BUNDLE_STREAMS[bundle.stretch.stream]
    if stream.rebase is None:
        return _Rebased(bundle.stretch.meta, [bytes(piece) for piece in ckpt.pieces_of(members[0])], False, {})
    joined = ckpt.joined_of(number)
    parents = [None if prev is None else prev.parent_reference(r.key, r.spec) for r in members]
    before = stream.join(parents, [r.spec for r in members])
    meta, pieces = stream.rebase(joined, before)
    return _Rebased(meta, pieces, before is not None, dict(zip((r.key for r in members), joined.split(), strict=True)))
