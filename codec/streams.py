"""Stream formats by name: how the pieces of an array become its memory again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .base import Memory
from .exact import decode_bytes
from .leaves import LeafSpec
from .moments import decode_log_buckets
from .quantize import decode_levels

Decoder = Callable[[LeafSpec, dict[str, Any], Sequence[memoryview], Memory | None], Memory]

STREAMS: dict[str, Decoder] = {
    "bytes": decode_bytes,
    "levels": decode_levels,
    "log-buckets": decode_log_buckets,
}
DELTA_STREAMS = frozenset({"bytes", "levels"})
"""Formats whose memory a later delta is coded against: a resolved checkpoint keeps it."""
