"""Stream formats by name: how the pieces of an array become its memory again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .base import Memory
from .changed import decode_changed, restate_changed
from .clusters import decode_clusters
from .copies import decode_copy
from .exact import decode_bytes, restate_bytes
from .exponent import decode_exponent, restate_exponent
from .fields import Piece
from .firstmoment import decode_grid
from .leaves import Array, LeafSpec
from .levels import decode_levels, restate_levels
from .moments import decode_log_buckets
from .multiples import decode_multiples, restate_multiples
from .rows import decode_rows, restate_rows
from .secondmoment import decode_rank_one, restate_rank_one

Decoder = Callable[[LeafSpec, dict[str, Any], Sequence[memoryview], Memory | None, Array | None], Memory]
"""From spec, metadata, pieces, the parent's memory, and the decoded array that the record names as its sibling."""

STREAMS: dict[str, Decoder] = {
    "bytes": decode_bytes,
    "levels": decode_levels,
    "multiples": decode_multiples,
    "log-buckets": decode_log_buckets,
    "rank-one": decode_rank_one,
    "grid": decode_grid,
    "copy": decode_copy,
    "exponent": decode_exponent,
    "changed": decode_changed,
    "clusters": decode_clusters,
    "rows": decode_rows,
}
Restater = Callable[[LeafSpec, dict[str, Any], Memory, Memory | None], tuple[dict[str, Any], Sequence[Piece]]]
"""From spec, metadata, the memory to state anew and the new parent's memory: new metadata and pieces."""

RESTATE: dict[str, Restater] = {
    "bytes": restate_bytes,
    "levels": restate_levels,
    "multiples": restate_multiples,
    "rank-one": restate_rank_one,
    "exponent": restate_exponent,
    "changed": restate_changed,
    "rows": restate_rows,
}
DELTA_STREAMS = frozenset(RESTATE)
"""Formats whose memory a later delta is coded against: a resolved checkpoint keeps it."""
SIBLING_STREAMS = frozenset({"grid", "copy"})
"""Formats that are decoded with another array of the same checkpoint at hand."""
