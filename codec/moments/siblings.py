"""Which first moment stands beside which second moment."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import Leaf
from ..state.kinds import is_update, moment_place


def siblings(leaves: Sequence[Leaf]) -> dict[int, int]:
    """For each first moment the number of the second moment beside it: same place and shape, a dtype grids take."""
    seconds = {(moment_place(leaf.path).owner, leaf.spec): j for j, leaf in _moments(leaves, "second moment")}
    found = {}
    for i, leaf in _moments(leaves, "first moment"):
        j = seconds.get((moment_place(leaf.path).owner, leaf.spec))
        if j is None or leaf.spec.dtype not in ("float32", "bfloat16"):
            continue
        if is_update(leaf.path, leaf.kind, leaves[j].path):
            found[i] = j
    return found


def _moments(leaves: Sequence[Leaf], role: str) -> list[tuple[int, Leaf]]:
    return [(i, leaf) for i, leaf in enumerate(leaves) if leaf.kind.role == role]
