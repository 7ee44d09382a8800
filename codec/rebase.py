"""`rebase`: the same checkpoint as a base, or as a delta over another parent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .arithmetic import own_arithmetic
from .base import Reference
from .checkpoint import ArrayRecord, Checkpoint, check_resolved
from .format.fields import Piece
from .parallel import map_chunks


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

    def one(record: ArrayRecord) -> tuple[dict[str, Any], Sequence[Piece], bool, Reference | None]:
        restated = record.format.restate
        if restated is None:
            return record.meta, [bytes(piece) for piece in ckpt.pieces_of(record)], False, None
        memory = ckpt.reference_of(record)
        parent = None if prev is None else prev.parent_reference(record.key, record.spec)
        meta, pieces = restated(record.spec, record.meta, memory, parent)
        return meta, pieces, parent is not None, memory

    stated = map_chunks(one, ckpt.records)
    rows = []
    for row, (meta, pieces, is_delta, _) in zip(ckpt.header["arrays"], stated, strict=True):
        new = {k: v for k, v in row.items() if k not in ("m", "p")} | {"b": [len(piece) for piece in pieces]}
        if meta:
            new["m"] = meta
        if is_delta:
            new["p"] = True
        rows.append(new)
    header = {
        "parent": None if prev is None else prev.identity,
        "as": ckpt.identity,
        "raw": ckpt.raw_nbytes,
        "tree": ckpt.header["tree"],
        "arrays": rows,
    }
    if "why" in ckpt.header:
        header["why"] = ckpt.header["why"]
    memories = {r.key: m for r, (_, _, _, m) in zip(ckpt.records, stated, strict=True) if m is not None}
    keys = [(r.path, r.key) for r in ckpt.records]
    return Checkpoint.written(header, keys, [piece for _, pieces, _, _ in stated for piece in pieces], memories)
