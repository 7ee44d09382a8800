"""Selection of the arrays that are coded together: small ones of one codec, role and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...kernels.arrays import is_torch
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
from .joined import Together
from .levels import levels_together
from .moments import first_moments_together, log_buckets_together, second_moments_together

if TYPE_CHECKING:
    from ..plan import ArrayPlan

MOST_BYTES = 1 << 20
"""Most raw bytes of a bundle, and so the most that is decoded to read one of its arrays."""
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
    groups: dict[Any, list[int]] = {}
    for i, p in enumerate(planned):
        if i not in paired and (key := _key(p)) is not None:
            first = planned[firsts[i]] if i in firsts else None
            groups.setdefault((*key, first is not None and (first.codec, first.leaf.spec.dtype)), []).append(i)
    return [part for group in groups.values() if len(group) >= FEWEST for part in _within(planned, group)]


def _within(planned: Sequence[ArrayPlan], group: list[int]) -> list[list[int]]:
    """Divide a group into parts of about equal size."""
    total = sum(planned[i].leaf.spec.nbytes for i in group)
    wanted = -(-total // (-(-total // (MOST_BYTES - SMALL)))) if total else 1
    found: list[list[int]] = [[]]
    size = 0
    for i in group:
        if size >= wanted:
            found.append([])
            size = 0
        found[-1].append(i)
        size += planned[i].leaf.spec.nbytes
    return found


def _key(p: ArrayPlan) -> tuple[Any, ...] | None:
    """Return a key that arrays coded together share; None for an array that is coded alone."""
    spec, codec = p.leaf.spec, p.codec
    if p.original is not None or not 0 < spec.nbytes <= SMALL or p.leaf.touched is not None:
        return None
    able = isinstance(codec, Exact | LogBuckets) or (
        isinstance(codec, SecondMoment) and (matrix_shape(spec) is not None or spec.dtype in _GRID_DTYPES)
    )
    if isinstance(codec, Quantize):
        able = codec.coder == "smallest"
    if not able or getattr(codec, "max_error", None) is not None:
        return None
    device = str(p.leaf.flat.device) if is_torch(p.leaf.flat) else ""
    matrix = isinstance(codec, SecondMoment) and matrix_shape(spec) is not None
    parent = BytesReference if isinstance(p.parent, BytesReference) else type(p.parent)
    return (codec, p.leaf.kind.role, spec.library, spec.dtype, device, columns_of(spec.shape), matrix, parent)


def can_follow(p: ArrayPlan) -> bool:
    """Whether a first moment may be coded in a bundle, together with others of the same group."""
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
