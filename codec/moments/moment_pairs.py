"""Pairs of moments: a first moment and the second moment of the same parameter."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import Leaf


def moment_pairs(leaves: Sequence[Leaf]) -> dict[int, int]:
    """Return for each first moment the number of its second moment, if grids take its dtype."""
    seconds = {
        (leaf.entry.owner, leaf.spec): j
        for j, leaf in enumerate(leaves)
        if leaf.kind.role == "second moment" and leaf.entry is not None
    }
    pairs = {}
    for i, leaf in enumerate(leaves):
        if leaf.entry is not None and leaf.entry.is_update and leaf.spec.dtype in ("float32", "bfloat16"):
            pairs[i] = seconds.get((leaf.entry.owner, leaf.spec))
    return {i: j for i, j in pairs.items() if j is not None}
