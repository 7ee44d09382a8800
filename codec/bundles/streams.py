"""Stream formats of bundles by name."""

from __future__ import annotations

from .exact import decode_exact, rebase_exact
from .joined import BundleStream, join_bytes, join_values
from .levels import decode_levels_together, join_levels, rebase_levels_together
from .moments import (
    decode_grid_together,
    decode_log_buckets_together,
    decode_rank_one_together,
    join_rank_one,
    rebase_rank_one_together,
)

BUNDLE_STREAMS: dict[str, BundleStream] = {
    "bytes": BundleStream(join_bytes, decode_exact, rebase_exact),
    "levels": BundleStream(join_levels, decode_levels_together, rebase_levels_together),
    "rank-one": BundleStream(join_rank_one, decode_rank_one_together, rebase_rank_one_together),
    "log-buckets": BundleStream(join_values, decode_log_buckets_together),
    "grid": BundleStream(join_values, decode_grid_together),
}
