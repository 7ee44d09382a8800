"""Storage of a checkpoint again: as a base, against another parent, or without moments.

Which moments may be left out is decided by evidence only: by what the file records of an array, the kind or the
structure that chose its codec. Where a rule for all arrays chose it, as in lossless presets, the file does not record
the role; then the structure of the state decides, as it does in `compress`. An array whose role is unknown is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from .base import Reference
from .checkpoint import Checkpoint, check_resolved
from .evidence.entries import Outline, entries_of
from .evidence.gather import gather
from .evidence.kind import FIRST, SECOND, TINY_MOMENT
from .evidence.moments import Arrays
from .format.fields import Piece
from .format.schema import StoredArray, StoredGroup, groups_to_json
from .parallel import map_chunks, own_arithmetic
from .partial import without_arrays
from .records import ArrayRecord, Group, Records
from .state import tree
from .state.leaves import SEQUENCES, import_libraries


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
        without: numbers of arrays to leave out, see `moments`; the others keep their bits and references.

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

    Source: LC-Checkpoint, section 3.2 (merging deltas into a super-step).
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


ROLES = ("first moment", "second moment")
_RECORDED = {FIRST: ROLES[0], SECOND: ROLES[1]}
_RECORDED |= {reason: role for role in ROLES for reason in (f"kinds: {role}", f"rule {role!r}")}
"""Recorded reasons that state the role of an array."""
_TINY = f"exact: less than {TINY_MOMENT} elements"
"""Recorded reason of moments only, of both roles."""


def moments(ckpt: Checkpoint) -> dict[int, str]:
    """Return number -> role of the moments that can be left out of a checkpoint.

    A moment that decoding another array needs is not among them.

    Args:
        ckpt: the checkpoint, resolved.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> m = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64)
        >>> state = {"model": {"w": m}, "optimizer": {"state": {"w": {"exp_avg": m / 2, "exp_avg_sq": m * m}}}}
        >>> sorted(moments(sp.compress(state, cfg="lossless")).values())
        ['first moment', 'second moment']
    """
    named = _named(ckpt)
    found = {i: role for i, role in named.items() if not _is_by_path(ckpt.records[i])}
    if len(found) < len(named):
        for i, known in enumerate(gather(ckpt.header["tree"], _decoded(ckpt), None)):
            is_moment = known.source == "structure" and known.kind.role in ROLES
            if i in named and i not in found and is_moment and (not known.is_bound or known.why == _TINY):
                found[i] = known.kind.role
    return _separable(ckpt, found)


def has_moments(ckpt: Checkpoint) -> bool:
    """Return whether a checkpoint may have moments to leave out; only its header is read."""
    return bool(_named(ckpt))


def _named(ckpt: Checkpoint) -> dict[int, str]:
    """Return number -> role of the arrays that are called moments.

    By the recorded reason; where the file records no role, by place and name.
    """
    outline = Outline.of(tree.unflatten(ckpt.header["tree"], lambda _, place: None))
    found = {}
    for i, entry in enumerate(entries_of([record.path for record in ckpt.records], outline)):
        record = ckpt.records[i]
        role = _RECORDED.get(record.why, "state")
        if entry is not None and (record.why == _TINY or _is_by_path(record)):
            role = entry.role
        if role in ROLES:
            found[i] = role
    return found


def _is_by_path(record: ArrayRecord) -> bool:
    """Return whether a rule for paths chose the codec, so that the role is not recorded."""
    return record.why.startswith("rule ") and record.why not in _RECORDED


def _decoded(ckpt: Checkpoint) -> Arrays:
    """Return the arrays of a checkpoint, as `compress` reads those of a state."""
    records = ckpt.records
    specs = [record.spec for record in records]
    held = [spec.library in SEQUENCES for spec in specs]
    return Arrays([record.path for record in records], specs, [ckpt.values_of(record) for record in records], held)


def _separable(ckpt: Checkpoint, found: dict[int, str]) -> dict[int, str]:
    """Return the arrays without those that are needed to decode others."""
    found = dict(found)
    while True:
        needed = {r.pair for i, r in enumerate(ckpt.records) if i not in found and r.pair in found}
        for group in ckpt.groups:
            # Arrays of these formats are coded with others and cannot be coded again.
            if not group.format.has_deltas and not found.keys() >= set(group.members):
                needed |= found.keys() & set(group.members)
        if not needed:
            return found
        found = {i: role for i, role in found.items() if i not in needed}
