"""Exact arrays that are coded together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base import Leaf, Reference, Stored
from ..lossless.exact import copied_pieces, decode_bytes, pieces_of
from ..lossless.reference import BytesReference
from ..state.leaves import Array, LeafSpec
from .joined import Joined, JoinedBytes, Pieces, StoredBundle, Together, join_bytes, joined_bytes, joined_spec


def exact_together(leaves: Sequence[Leaf], parents: Sequence[Reference | None]) -> Together:
    """Encode exact arrays of one dtype as one bundle."""
    specs = [leaf.spec for leaf in leaves]
    before = join_bytes(parents, specs)
    source = joined_bytes([leaf.flat for leaf in leaves])
    parent = None if before is None else BytesReference(before.joined)
    pieces, reference = copied_pieces(source, joined_spec(specs), parent)
    stored = [Stored("bytes", {}, (), own) for own in JoinedBytes(reference.data, specs).split()]
    return Together([StoredBundle(range(len(leaves)), "bytes", {}, pieces, parent is not None, stored)], {})


def decode_exact(
    specs: Sequence[LeafSpec],
    meta: dict[str, Any],
    pieces: Sequence[memoryview],
    before: Joined | None,
    square: Array | None,
) -> JoinedBytes:
    """Decode exact arrays that were coded together."""
    parent = None if before is None else BytesReference(before.data())
    return JoinedBytes(decode_bytes(joined_spec(specs), meta, pieces, parent).data, specs)


def rebase_exact(joined: Joined, before: Joined | None) -> Pieces:
    """Encode the bytes of a bundle as a base or against another parent."""
    assert isinstance(joined, JoinedBytes)
    parent = None if before is None else BytesReference(before.data())
    return {}, pieces_of(joined.joined, joined_spec(joined.specs), parent)
