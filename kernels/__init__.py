"""Array functions that know nothing of checkpoints: histograms, quantizers, entropy coders.

The package imports a module only when one of its functions is first used, so importing the package is cheap.
`docs/kernels.md` lists the modules.

Example:
    >>> from shrinkpoint.kernels import log_histogram, assign, huffman_encode
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .approximation_error import Distortion, distortion, distortion_many
    from .bitpack import pack_bits, unpack_bits
    from .categories import join_categories, split_categories
    from .cluster import Clusters, cluster_dequantize, cluster_quantize
    from .errors import BadArgumentError, CorruptDataError, ShrinkpointError
    from .exponent import (
        Buckets,
        Promotion,
        exponent_buckets,
        exponent_dequantize,
        exponent_quantize,
        merge_buckets,
        promote,
    )
    from .extrapolation import extrapolate
    from .float_split import Octaves, join_octaves, split_octaves
    from .floats import FORMATS, FloatFormat, bits_for
    from .grid import grid_symbols, grid_values
    from .histogram import (
        Histogram,
        kept_histogram,
        kept_histogram_many,
        log_histogram,
        log_histogram_many,
        merge,
        quantile,
        used_buckets_many,
    )
    from .huffman import (
        huffman_codes,
        huffman_decode,
        huffman_encode,
        huffman_lengths,
        pack_lengths,
        unpack_lengths,
    )
    from .integer_products import column_products, orthogonal_directions, product_classes, row_products
    from .kmeans import (
        bucket_weights,
        least_losses,
        prepare,
        quantization_loss,
        weighted_kmeans,
        weighted_kmeans_many,
    )
    from .levels import delta, joint_counts, merge_by_level, split_by_level, undelta
    from .logbucket import bucket_index, bucket_value
    from .mask import changed_mask, gather, pack_mask, scatter, unpack_mask
    from .planes import difference, merge_planes, split_planes, undifference
    from .quantizer import Thresholds, assign, boundaries, dequantize, magnitude_bits
    from .rank_one import (
        factor_sums,
        factors_many,
        residual_factors,
        residual_symbols,
        residual_symbols_many,
        residual_values,
        residual_values_many,
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
    from .ratedistortion import Unsettled, rate_distortion_levels, settled_bounds, unsettled
    from .rows import row_dequantize, row_kmeans, row_lookup, row_quantize
    from .runlength import rle_decode, rle_encode
    from .scale_classes import class_sums, pattern_classes, row_column_sums
    from .sparse_changes import rare_decode, rare_encode
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
    from .uniform_levels import uniform_levels_many, uniform_values_many

_SUBJECTS = {
    "approximation_error": "Distortion distortion distortion_many",
    "bitpack": "pack_bits unpack_bits",
    "categories": "join_categories split_categories",
    "cluster": "Clusters cluster_dequantize cluster_quantize",
    "errors": "BadArgumentError CorruptDataError ShrinkpointError",
    "exponent": "Buckets Promotion exponent_buckets exponent_dequantize exponent_quantize merge_buckets promote",
    "extrapolation": "extrapolate",
    "float_split": "Octaves join_octaves split_octaves",
    "floats": "FORMATS FloatFormat bits_for",
    "grid": "grid_symbols grid_values",
    "histogram": "Histogram kept_histogram kept_histogram_many log_histogram "
    "log_histogram_many merge quantile used_buckets_many",
    "huffman": "huffman_codes huffman_decode huffman_encode huffman_lengths pack_lengths unpack_lengths",
    "integer_products": "column_products orthogonal_directions product_classes row_products",
    "kmeans": "bucket_weights least_losses prepare quantization_loss weighted_kmeans weighted_kmeans_many",
    "levels": "delta joint_counts merge_by_level split_by_level undelta",
    "logbucket": "bucket_index bucket_value",
    "mask": "changed_mask gather pack_mask scatter unpack_mask",
    "planes": "difference merge_planes split_planes undifference",
    "quantizer": "Thresholds assign boundaries dequantize magnitude_bits",
    "rank_one": "factor_sums factors_many residual_factors "
    "residual_symbols residual_symbols_many residual_values residual_values_many",
    "rans": "coding_cost entropy_bits pack_frequencies rans_decode rans_encode rans_frequencies unpack_frequencies",
    "ratedistortion": "Unsettled rate_distortion_levels settled_bounds unsettled",
    "rows": "row_dequantize row_kmeans row_lookup row_quantize",
    "runlength": "rle_decode rle_encode",
    "scale_classes": "class_sums pattern_classes row_column_sums",
    "sparse_changes": "rare_decode rare_encode",
    "sparse_delta": (
        "SparseDelta apply_changes collect_and_locate collect_changes gap_shifts join_changes locate_changes "
        "split_changes"
    ),
    "uniform_levels": "uniform_levels_many uniform_values_many",
}
_MODULE_OF = {name: subject for subject, names in _SUBJECTS.items() for name in names.split()}

__all__ = [
    "FORMATS",
    "BadArgumentError",
    "Buckets",
    "Clusters",
    "CorruptDataError",
    "Distortion",
    "FloatFormat",
    "Histogram",
    "Octaves",
    "Promotion",
    "ShrinkpointError",
    "SparseDelta",
    "Thresholds",
    "Unsettled",
    "apply_changes",
    "assign",
    "bits_for",
    "boundaries",
    "bucket_index",
    "bucket_value",
    "bucket_weights",
    "changed_mask",
    "class_sums",
    "cluster_dequantize",
    "cluster_quantize",
    "coding_cost",
    "collect_and_locate",
    "collect_changes",
    "column_products",
    "delta",
    "dequantize",
    "difference",
    "distortion",
    "distortion_many",
    "entropy_bits",
    "exponent_buckets",
    "exponent_dequantize",
    "exponent_quantize",
    "extrapolate",
    "factor_sums",
    "factors_many",
    "gap_shifts",
    "gather",
    "grid_symbols",
    "grid_values",
    "huffman_codes",
    "huffman_decode",
    "huffman_encode",
    "huffman_lengths",
    "join_categories",
    "join_changes",
    "join_octaves",
    "joint_counts",
    "kept_histogram",
    "kept_histogram_many",
    "least_losses",
    "locate_changes",
    "log_histogram",
    "log_histogram_many",
    "magnitude_bits",
    "merge",
    "merge_buckets",
    "merge_by_level",
    "merge_planes",
    "orthogonal_directions",
    "pack_bits",
    "pack_frequencies",
    "pack_lengths",
    "pack_mask",
    "pattern_classes",
    "prepare",
    "product_classes",
    "promote",
    "quantile",
    "quantization_loss",
    "rans_decode",
    "rans_encode",
    "rans_frequencies",
    "rare_decode",
    "rare_encode",
    "rate_distortion_levels",
    "residual_factors",
    "residual_symbols",
    "residual_symbols_many",
    "residual_values",
    "residual_values_many",
    "rle_decode",
    "rle_encode",
    "row_column_sums",
    "row_dequantize",
    "row_kmeans",
    "row_lookup",
    "row_products",
    "row_quantize",
    "scatter",
    "settled_bounds",
    "split_by_level",
    "split_categories",
    "split_changes",
    "split_octaves",
    "split_planes",
    "undelta",
    "undifference",
    "uniform_levels_many",
    "uniform_values_many",
    "unpack_bits",
    "unpack_frequencies",
    "unpack_lengths",
    "unpack_mask",
    "unsettled",
    "used_buckets_many",
    "weighted_kmeans",
    "weighted_kmeans_many",
]


def __getattr__(name: str) -> Any:
    """Import the module that defines `name` and return the function or class."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
