"""Selection of arrays to code together: small ones of one codec, role and dtype."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, cast

from ..kernels.backend.arrays import is_torch
from .base import Codec, Leaf, Reference
from .entropy.row_column_classes import columns_of
from .groups import MOST_BYTES
from .lossless.reference import BytesReference
from .weights.planning import SMALL

if TYPE_CHECKING:
    from .base import GroupCodec
    from .plan import ArrayPlan

FEWEST = 8
"""Least number of arrays that are coded together; in a smaller group each array has a stream of its own."""


def planned_groups(planned: Sequence[ArrayPlan], firsts: dict[int, int]) -> list[list[int]]:
    """Return the groups of arrays to code together, without first moments.

    Raw bytes of a group are at most `MOST_BYTES`. First moments follow their second moments.

    Args:
        planned: the plan of each array.
        firsts: number of the first moment by the number of its second moment.
    """
    paired = set(firsts.values())
    able = [i for i, p in enumerate(planned) if i not in paired and p.original is None]
    some = [planned[i] for i in able]
    following = [planned[firsts[i]] if i in firsts else None for i in able]
    firsts_of = [None if first is None else (first.codec, first.leaf.spec.dtype) for first in following]
    found = grouped([p.leaf for p in some], [p.codec for p in some], [p.parent for p in some], firsts_of)
    return [[able[at] for at in group] for group in found]


def grouped(
    leaves: Sequence[Leaf],
    codecs: Sequence[Codec],
    parents: Sequence[Reference | None],
    also: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Return the groups of arrays to code together, each at most `MOST_BYTES` of raw bytes.

    Args:
        leaves: the arrays.
        codecs: the codec of each.
        parents: what a delta of each is coded against, or None.
        also: what the arrays of a group have in common in addition; None: nothing.
    """
    keys = [_key(*one) for one in zip(leaves, codecs, parents, strict=True)]
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(keys):
        if key is not None:
            groups.setdefault((key, None if also is None else also[i]), []).append(i)
    large = [group for group in groups.values() if len(group) >= FEWEST]
    return [part for group in large for part in _within([leaf.spec.nbytes for leaf in leaves], group)]


def _within(sizes: Sequence[int], group: list[int]) -> list[list[int]]:
    """Divide a group into parts of about equal size."""
    total = sum(sizes[i] for i in group)
    wanted = -(-total // (-(-total // (MOST_BYTES - SMALL))))
    found: list[list[int]] = [[]]
    size = 0
    for i in group:
        if size >= wanted:
            found.append([])
            size = 0
        found[-1].append(i)
        size += sizes[i]
    return found


def _key(leaf: Leaf, codec: Codec, parent: Reference | None) -> Hashable | None:
    """Return a key that arrays coded together share; None for an array that is coded alone."""
    spec, common = leaf.spec, groups_of(codec, leaf)
    if common is None or leaf.touched is not None:
        return None
    device = str(leaf.flat.device) if is_torch(leaf.flat) else ""
    kind = BytesReference if isinstance(parent, BytesReference) else type(parent)
    return (codec, leaf.kind.role, spec.library, spec.dtype, device, columns_of(spec.shape), common, kind)


def groups_of(codec: Codec, leaf: Leaf) -> Hashable | None:
    """Return what an array has in common with others of its group; None: it is coded alone."""
    is_small = 0 < leaf.spec.nbytes <= SMALL and hasattr(codec, "encode_group")
    return cast("GroupCodec", codec).groups(leaf) if is_small else None
