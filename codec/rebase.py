"""`rebase`: storage of a checkpoint as a base or as a delta against another parent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .arithmetic import own_arithmetic
from .base import Reference
from .bundles.streams import BUNDLE_STREAMS
from .checkpoint import Checkpoint, check_resolved
from .format.fields import Piece
from .parallel import map_chunks
from .records import ArrayRecord
from .state.leaves import import_libraries


@own_arithmetic()
def rebase(ckpt: Checkpoint, prev: Checkpoint | None = None) -> Checkpoint:
    """Return a resolved checkpoint as a delta over another parent, or as a base.

    Nothing is quantized again.

    The result restores to the same bits, and leaves the same memory, so deltas over `ckpt` decode over it too: it
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
        rows.append(row if record.bundle is not None else _restated(row, single[record.key]))
    header = {
        "parent": None if prev is None else prev.identity,
        "as": ckpt.identity,
        "raw": ckpt.raw_nbytes,
        "tree": ckpt.header["tree"],
        "arrays": rows,
    }
    if bundled:
        header["bundles"] = [_restated(*pair) for pair in zip(ckpt.header["bundles"], bundled, strict=True)]
    if "why" in ckpt.header:
        header["why"] = ckpt.header["why"]
    made = [*single.values(), *bundled]
    memories = {key: memory for one in made for key, memory in one.memories.items()}
    keys = [(r.path, r.key) for r in ckpt.records]
    return Checkpoint.written(header, keys, [piece for one in made for piece in one.pieces], memories)


@dataclass(frozen=True, slots=True)
class _Restated:
    """An array or a bundle encoded against another parent.

    Args:
        meta: the stream's metadata.
        pieces: bytes, in order.
        is_delta: whether decoding needs the parent.
        memories: what a later delta needs, by key.
    """

    meta: dict[str, Any]
    pieces: Sequence[Piece]
    is_delta: bool
    memories: dict[str, Reference]


def _restated(row: dict[str, Any], made: _Restated) -> dict[str, Any]:
    """Return a header record with new metadata and pieces."""
    new = {k: v for k, v in row.items() if k not in ("m", "p")} | {"b": [len(piece) for piece in made.pieces]}
    if made.meta:
        new["m"] = made.meta
    if made.is_delta:
        new["p"] = True
    return new


def _array(ckpt: Checkpoint, record: ArrayRecord, prev: Checkpoint | None) -> _Restated:
    restate = record.format.restate
    if restate is None:
        return _Restated(record.meta, [bytes(piece) for piece in ckpt.pieces_of(record)], False, {})
    memory = ckpt.reference_of(record)
    parent = None if prev is None else prev.parent_reference(record.key, record.spec)
    meta, pieces = restate(record.spec, record.meta, memory, parent)
    return _Restated(meta, pieces, parent is not None, {record.key: memory})


def _bundle(ckpt: Checkpoint, number: int, prev: Checkpoint | None) -> _Restated:
    bundle = ckpt.bundles[number]
    members = [ckpt.records[i] for i in bundle.members]
    stream = BUNDLE_STREAMS[bundle.stretch.stream]
    if stream.restate is None:
        return _Restated(bundle.stretch.meta, [bytes(piece) for piece in ckpt.pieces_of(members[0])], False, {})
    joined = ckpt.joined_of(number)
    parents = [None if prev is None else prev.parent_reference(r.key, r.spec) for r in members]
    before = stream.join(parents, [r.spec for r in members])
    meta, pieces = stream.restate(joined, before)
    return _Restated(meta, pieces, before is not None, dict(zip((r.key for r in members), joined.split(), strict=True)))
