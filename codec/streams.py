"""Table of the stream formats by name, with decoders and properties."""

from __future__ import annotations

from .deduplication import decode_copy
from .embeddings.rows import Rows, decode_rows, rebase_rows
from .groups import Stream as Stream
from .lossless.changed import Changed, decode_changed, rebase_changed
from .lossless.exact import Exact, decode_bytes, rebase_bytes
from .moments.clusters import Clusters, decode_clusters
from .moments.firstmoment import FirstMoment, decode_grid, decode_own_grid, square_of
from .moments.logbuckets import LogBuckets, decode_log_buckets
from .moments.secondmoment import SecondMoment, decode_rank_one, fill_rank_one, rank_one_values, rebase_rank_one
from .registry import STREAMS as STREAMS
from .state.leaves import Array, LeafSpec
from .weights.exponent import ExponentDelta, decode_exponent, rebase_exponent
from .weights.levels import decode_levels, fill_levels, level_values, rebase_levels
from .weights.quantize import Quantize
from .weights.uniform_quantizer import decode_multiples, rebase_multiples


def _as_it_is(values: Array, _: LeafSpec) -> Array:
    return values


STREAMS.update(
    {
        "bytes": Stream(decode_bytes, Exact.id, rebase_bytes, is_wide=True, is_shared=True, decodes_there=True),
        "levels": Stream(
            decode_levels,
            Quantize.id,
            rebase_levels,
            values=level_values,
            fill_there=fill_levels,
            is_shared=True,
            decodes_there=True,
        ),
        "multiples": Stream(decode_multiples, Quantize.id, rebase_multiples, is_wide=True),
        "log-buckets": Stream(decode_log_buckets, LogBuckets.id, is_shared=True, decodes_there=True),
        "rank-one": Stream(
            decode_rank_one,
            SecondMoment.id,
            rebase_rank_one,
            values=rank_one_values,
            fill_there=fill_rank_one,
            is_shared=True,
        ),
        "grid": Stream(decode_grid, FirstMoment.id, pair=square_of, is_shared=True, decodes_there=True),
        "own-grid": Stream(decode_own_grid, FirstMoment.id, decodes_there=True),
        "copy": Stream(decode_copy, Exact.id, pair=_as_it_is),
        "exponent": Stream(decode_exponent, ExponentDelta.id, rebase_exponent, is_wide=True, decodes_there=True),
        "changed": Stream(decode_changed, Changed.id, rebase_changed, is_wide=True, decodes_there=True),
        "clusters": Stream(decode_clusters, Clusters.id, decodes_there=True),
        "rows": Stream(decode_rows, Rows.id, rebase_rows),
    }
)
