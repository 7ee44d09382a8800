"""Array functions that know nothing of checkpoints: histograms, quantizers, entropy coders.

Each subject is a folder: its contract (`__init__.py`: checks, documentation, choice of the back end), the oracle
(`reference.py`) and the back ends (`cpu.py`: Numba; `gpu.py`: Triton). `backend/` holds the shared parts. A back end is
imported when one of its functions is first used. `docs/kernels.md` describes the subjects.

Example:
    >>> from shrinkpoint.kernels import log_histogram, assign, huffman_encode
"""

from types import ModuleType as _Module

from .backend.floats import FORMATS, FloatFormat, bits_for
from .cluster import Clusters, cluster_dequantize, cluster_quantize
from .error_sums import Distortion, distortion, distortion_many
from .errors import BadArgumentError, CorruptDataError, ShrinkpointError
from .exponent import (
    Buckets,
    Promotion,
    exponent_buckets,
    exponent_dequantize,
    exponent_differences,
    exponent_quantize,
    exponent_sums,
    merge_buckets,
    promote,
)
from .histogram import (
    Histogram,
    bucket_index,
    bucket_value,
    kept_histogram,
    kept_histogram_many,
    log_histogram,
    log_histogram_many,
    merge,
    quantile,
    used_buckets_many,
)
from .huffman import huffman_codes, huffman_decode, huffman_encode, huffman_lengths, pack_lengths, unpack_lengths
from .kmeans import bucket_weights, least_losses, prepare, quantization_loss, weighted_kmeans, weighted_kmeans_many
from .levels import delta, joint_counts, merge_by_level, split_by_level, undelta
from .moment_grid import grid_products, grid_symbols, grid_values
from .multiples import square_sum, step_multiples, step_values
from .packing import changed_mask, gather, pack_bits, pack_mask, scatter, unpack_bits, unpack_mask
from .planes import difference, join_categories, merge_planes, split_categories, split_planes, undifference
from .prediction import low_rank_differences, low_rank_factors, low_rank_predictions, unzigzag, zigzag
from .quantizer import (
    Thresholds,
    assign,
    boundaries,
    dequantize,
    magnitude_bits,
    uniform_levels_many,
    uniform_values_many,
)
from .rans import (
    coding_cost,
    entropy_bits,
    pack_frequencies,
    rans_decode,
    rans_encode,
    rans_frequencies,
    unpack_frequencies,
)
from .rate_distortion import Unsettled, extrapolate, rate_distortion_levels, settled_bounds, unsettled
from .rows import row_dequantize, row_kmeans, row_lookup, row_quantize
from .runlength import rle_decode, rle_encode
from .scales import (
    Octaves,
    class_sums,
    factor_sums,
    factors_many,
    join_octaves,
    pattern_classes,
    residual_factors,
    residual_symbols,
    residual_symbols_many,
    residual_values,
    residual_values_many,
    row_column_sums,
    split_octaves,
)
from .sparse_delta import (
    SparseDelta,
    apply_changes,
    collect_and_locate,
    collect_changes,
    gap_shifts,
    join_changes,
    locate_changes,
    split_changes,
)

__all__ = sorted(name for name, value in globals().items() if name[0] != "_" and not isinstance(value, _Module))
