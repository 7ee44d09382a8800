"""`rebase`: storage of a checkpoint as a base or as a delta against another parent."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .arithmetic import own_arithmetic
from .base import Reference
from .checkpoint import Checkpoint, check_resolved
from .format.fields import Piece
from .format.schema import StoredArray, StoredGroup, groups_to_json
from .parallel import map_chunks
from .partial import without_arrays
from .records import Group, Records
from .state.leaves import import_libraries


@own_arithmetic()
def rebase(ckpt: Checkpoint, prev: Checkpoint | None = None, without: Collection[int] = ()) -> Checkpoint:
    """Return a resolved checkpoint as a delta over another parent, or as a base.

    Nothing is quantized again.

    The result restores to the same bits, and leaves the same reference, so deltas over `ckpt` decode over it too: it
    answers to the same `identity`.

    Args:
        ckpt: a resolved checkpoint.
        prev: the new parent, resolved: the result is a delta over it (a super-step, where `ckpt` is several deltas
            away). None: the result is a base.
        without: numbers of arrays to leave out, see `thinning.moments`; the others keep their bits and references.

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

    kept = [i for i in range(len(ckpt.records)) if i not in without]
    place = {number: at for at, number in enumerate(kept)}
    parts = [(group, [i for i in group.members if i in place]) for group in ckpt.groups]
    made = map_chunks(lambda part: _group(ckpt, *part, prev), [part for part in parts if part[1]])
    arrays = []
    for record, row in ((ckpt.records[i], ckpt.header["arrays"][i]) for i in kept):
        stored = StoredArray.from_json(row, record.path)
        arrays.append(dataclasses.replace(stored, pair=None if stored.pair is None else place[stored.pair]))
    groups = [dataclasses.replace(one.record, members=[place[i] for i in one.record.members]) for one in made]
    header = {
        "parent": None if prev is None else prev.identity,
        "as": ckpt.identity,
        "raw": sum(ckpt.records[i].spec.nbytes for i in kept),
        "tree": without_arrays(ckpt.header["tree"], without) if without else ckpt.header["tree"],
        "arrays": [one.to_json() for one in arrays],
        "groups": groups_to_json(groups),
    }
    texts = ckpt.header.get("why", [])
    if texts:
        header["why"] = texts
    references = {key: reference for one in made for key, reference in one.references.items()}
    keys, specs = [(ckpt.records[i].path, ckpt.records[i].key) for i in kept], [ckpt.records[i].spec for i in kept]
    records = Records.of(keys, specs, arrays, groups, texts)
    return Checkpoint.written(header, records, [piece for one in made for piece in one.pieces], references)


@dataclass(frozen=True, slots=True)
class _Rebased:
    """A group encoded against another parent.

    Args:
        record: of the group.
        pieces: bytes, in order.
        references: what a later delta needs, by key.
    """

    record: StoredGroup
    pieces: Sequence[Piece]
    references: dict[str, Reference]


def _group(ckpt: Checkpoint, group: Group, numbers: Sequence[int], prev: Checkpoint | None) -> _Rebased:
    """Return a group with these of its members."""
    records, rebase = [ckpt.records[i] for i in numbers], group.format.rebase
    if rebase is None:
        copies = [bytes(piece) for piece in ckpt.pieces_of(records[0])]
        return _Rebased(StoredGroup(numbers, group.stream, group.lengths, group.meta), copies, {})
    kept = set(numbers)
    references = [r for i, r in zip(group.members, ckpt.references_of(group), strict=True) if i in kept]
    parents = [None if prev is None else prev.parent_reference(r.key, r.spec) for r in records]
    is_delta = None not in parents
    parents = parents if is_delta else [None] * len(records)
    meta, pieces = rebase([r.spec for r in records], references, parents)
    record = StoredGroup(numbers, group.stream, [len(piece) for piece in pieces], meta, is_delta)
    return _Rebased(record, pieces, dict(zip((r.key for r in records), references, strict=True)))
