"""Pairs of moments: a first moment and the second moment of the same parameter."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import Leaf
from ..evidence.moments import is_update


def moment_pairs(leaves: Sequence[Leaf]) -> dict[int, int]:
    """Return for each first moment the number of its second moment, if grids take its dtype."""
    seconds = {
        (leaf.entry.owner, leaf.spec): j
        for j, leaf in enumerate(leaves)
        if leaf.kind.role == "second moment" and leaf.entry is not None
    }
    found = {}
    for i, leaf in enumerate(leaves):
        if leaf.kind.role != "first moment" or leaf.entry is None:
            continue
        j = seconds.get((leaf.entry.owner, leaf.spec))
        other = None if j is None else leaves[j].entry
        if j is None or other is None or leaf.spec.dtype not in ("float32", "bfloat16"):
            continue
        if is_update(leaf.entry, leaf.kind, other):
            found[i] = j
    return found
