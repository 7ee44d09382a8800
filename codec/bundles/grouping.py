"""Selection of arrays to code together: small ones of one codec, role and dtype."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from ...kernels.backend.arrays import is_torch
from ..base import Codec, Leaf, Reference
from ..entropy.row_column_classes import columns_of
from ..lossless.exact import Exact
from ..lossless.reference import BytesReference
from ..moments.firstmoment import FirstMoment
from ..moments.logbuckets import LogBuckets
from ..moments.secondmoment import SecondMoment, matrix_shape
from ..weights.planning import SMALL
from ..weights.quantize import Quantize
from .exact import exact_together
from .joined import MOST_BYTES, Together
from .levels import levels_together
from .moments import first_moments_together, log_buckets_together, second_moments_together

if TYPE_CHECKING:
    from ..plan import ArrayPlan

FEWEST = 8
"""Least number of arrays that are coded together; in a smaller group each array has a stream of its own."""
_GRID_DTYPES = ("float32", "bfloat16")


def bundled(planned: Sequence[ArrayPlan], firsts: dict[int, int]) -> list[list[int]]:
    """Return the groups of arrays to code together, without first moments.

    Raw bytes of a group are at most `MOST_BYTES`. First moments follow their second moments, see `can_follow`.

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
    spec = leaf.spec
    if not 0 < spec.nbytes <= SMALL or leaf.touched is not None or getattr(codec, "max_error", None) is not None:
        return None
    matrix = isinstance(codec, SecondMoment) and matrix_shape(spec) is not None
    if isinstance(codec, Quantize):
        able = codec.coder == "smallest"
    else:
        able = matrix or isinstance(codec, Exact | LogBuckets)
        able = able or (isinstance(codec, SecondMoment) and spec.dtype in _GRID_DTYPES)
    if not able:
        return None
    device = str(leaf.flat.device) if is_torch(leaf.flat) else ""
    kind = BytesReference if isinstance(parent, BytesReference) else type(parent)
    return (codec, leaf.kind.role, spec.library, spec.dtype, device, columns_of(spec.shape), matrix, kind)


def can_follow(p: ArrayPlan) -> bool:
    """Return whether a first moment may be coded in a bundle with others of its group."""
    codec = p.codec
    return isinstance(codec, FirstMoment) and p.leaf.spec.dtype in _GRID_DTYPES and 0 < p.leaf.spec.nbytes <= SMALL


def encode_together(
    codec: Codec, leaves: Sequence[Leaf], parents: Sequence[Reference | None], plans: Sequence[Any]
) -> Together:
    """Encode a group of arrays of one codec together."""
    if isinstance(codec, Exact):
        return exact_together(leaves, parents)
    if isinstance(codec, Quantize):
        return levels_together(codec, leaves, parents, plans)
    if isinstance(codec, SecondMoment):
        return second_moments_together(codec, leaves, parents)
    if isinstance(codec, LogBuckets):
        return log_buckets_together(codec, leaves, parents)
    assert isinstance(codec, FirstMoment)
    return first_moments_together(codec, leaves)
