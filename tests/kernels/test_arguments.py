"""Wrong arguments: each public function refuses a wrong value of each argument."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shrinkpoint import kernels as k
from shrinkpoint.kernels.backend import arguments
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.rows import search_steps

N = 37
RNG = np.random.default_rng(0)
X = RNG.normal(size=N).astype(np.float32)
SQUARE = X * X
LEVELS = RNG.integers(0, 6, N).astype(np.uint8)
CODES = np.sort(RNG.normal(size=4)).astype(np.float32)
PRICES = np.ones((6, 6), np.float32)
CENTERS, WEIGHTS = np.sort(RNG.normal(size=N)), np.abs(RNG.normal(size=N))
THRESHOLDS = k.Thresholds(protect_magnitude=3.0, prune_magnitude=0.01)
COUNTS = np.array([5, 3, 1, 1, 7, 2], np.int64)
LENGTHS = k.huffman_lengths(COUNTS)
TABLE = k.rans_frequencies(np.tile(COUNTS, (3, 1)), 12)
CONTEXTS = RNG.integers(0, 3, N).astype(np.uint8)
FLAGS = X > 0
MASK = k.pack_mask(FLAGS)
BUCKETS = k.exponent_buckets(X)
PROMOTION = k.promote(BUCKETS, 2)
FORMAT = k.FORMATS["float32"]
J = FORMAT.buckets(4)
INDEX = k.bucket_index(X, 4)
OCTAVES = k.split_octaves(INDEX, 4, J)
HISTOGRAM = k.log_histogram(X, 4, signed=True)
MATRIX = RNG.normal(size=(5, 8)).astype(np.float32)
ROWS, COLUMNS = np.abs(MATRIX[:, 0]), np.abs(MATRIX[0])
FACTORS = np.ones(256, np.float32)
ENDS, SHAPES = np.array([20, N]), np.array([[4, 8], [5, 1]])
OF_ROWS, OF_COLUMNS = np.abs(X[:9]), np.abs(X[9:18])
SMALL, FACTOR = RNG.integers(-128, 128, N).astype(np.int8), RNG.integers(-128, 128, (16, 8)).astype(np.int8)
SHORTS = RNG.integers(0, 60000, N).astype(np.uint16)
CATEGORIES, EXTRA = k.split_categories(SHORTS, 2)
CLUSTERS = k.cluster_quantize(X, 4)
ROW_CODES, SCALE, MINIMUM = k.row_quantize(MATRIX, 4)
K_CODES, K_TABLE = k.row_kmeans(MATRIX, 3)
MOVED = np.where(np.arange(N) % 9, X, np.nextafter(X, np.float32(9)))
SPARSE = k.collect_changes(MOVED, X)
assert SPARSE is not None
SHIFTS = k.gap_shifts(SPARSE)
SPLIT = k.split_changes(SPARSE, SHIFTS)

CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (k.assign, {"x": X, "thresholds": THRESHOLDS, "codebook": CODES, "gradient": X}),
    (k.dequantize, {"levels": LEVELS, "codebook": CODES, "protected": X[LEVELS == 1]}),
    (k.boundaries, {"codebook": CODES, "dtype": "float32"}),
    (k.magnitude_bits, {"threshold": 1.5, "fmt": FORMAT}),
    (k.Thresholds, {"protect_magnitude": 3.0, "prune_sensitivity": 0.5}),
    (k.pack_bits, {"values": LEVELS, "width": 3}),
    (k.unpack_bits, {"data": k.pack_bits(LEVELS, 3), "width": 3, "n": N, "dtype": "uint8"}),
    (k.split_categories, {"values": SHORTS, "bits": 2}),
    (k.join_categories, {"categories": CATEGORIES, "extra": EXTRA, "bits": 2, "dtype": "uint16"}),
    (k.row_column_sums, {"values": LEVELS, "columns": 3, "phase": 1}),
    (k.row_column_sums, {"values": LEVELS, "columns": 3, "most": 4}),
    (k.class_sums, {"rows": LEVELS[:13], "columns": LEVELS[:3], "n": N, "phase": 1}),
    (k.class_sums, {"rows": LEVELS[:13], "columns": LEVELS[:3], "n": N, "phase": 1, "base": 2, "classes": 4}),
    (k.low_rank_factors, {"numbers": SMALL, "heights": np.array([13]), "columns": 3, "phase": 1}),
    (
        k.low_rank_differences,
        {
            "numbers": SMALL,
            "rows": FACTOR[:13],
            "columns": FACTOR[13:16],
            "heights": np.array([13]),
            "phase": 1,
        },
    ),
    (k.zigzag, {"numbers": SMALL}),
    (k.unzigzag, {"symbols": LEVELS}),
    (
        k.low_rank_predictions,
        {"rows": FACTOR[:13], "columns": FACTOR[13:16], "heights": np.array([13]), "n": N, "phase": 1},
    ),
    (k.pattern_classes, {"patterns": SHORTS, "shift": 12, "table": LEVELS[:16]}),
    (k.cluster_quantize, {"x": X, "clusters": 4}),
    (k.cluster_dequantize, CLUSTERS._asdict()),
    (k.distortion, {"x": X, "y": X}),
    (k.distortion_many, {"x": X, "y": X, "ends": ENDS}),
    (k.used_buckets_many, {"x": X, "ends": ENDS, "bits": 4}),
    (k.least_losses, {"centers": CENTERS, "weights": WEIGHTS, "ends": np.array([len(CENTERS)]), "k": 3}),
    (k.factors_many, {"x": X, "shapes": SHAPES}),
    (
        k.residual_symbols_many,
        {"x": X, "rows": OF_ROWS, "columns": OF_COLUMNS, "shapes": SHAPES, "octaves": 0.5, "previous": LEVELS},
    ),
    (
        k.residual_values_many,
        {"symbols": LEVELS, "rows": OF_ROWS, "columns": OF_COLUMNS, "shapes": SHAPES, "table": FACTORS},
    ),
    (
        k.uniform_levels_many,
        {"x": X, "ends": ENDS, "steps": np.full(2, 0.5), "firsts": ENDS - ENDS, "sizes": ENDS, "limit": 4.0},
    ),
    (k.uniform_values_many, {"levels": LEVELS, "ends": ENDS, "steps": np.full(2, 0.5), "firsts": ENDS}),
    (k.extrapolate, {"x": X, "earlier": SQUARE, "factor": 0.5}),
    (k.exponent_buckets, {"x": X}),
    (k.promote, {"buckets": BUCKETS, "bits": 2}),
    (k.merge_buckets, {"first": BUCKETS}),
    (k.exponent_quantize, {"x": X, "promotion": PROMOTION}),
    (k.exponent_dequantize, {"levels": LEVELS, "codebook": np.arange(6, dtype=np.uint32)}),
    (k.exponent_differences, {"current": X, "previous": SQUARE}),
    (k.exponent_sums, {"previous": X, "levels": LEVELS, "codebook": np.arange(6, dtype=np.uint32)}),
    (k.Promotion, {"codebook": PROMOTION.codebook, "table": PROMOTION.table, "format": "float32"}),
    (k.bits_for, {"alpha": 0.01, "fmt": FORMAT}),
    (k.grid_symbols, {"x": X, "square": SQUARE, "step": 0.5}),
    (k.grid_values, {"symbols": LEVELS, "square": SQUARE, "table": FACTORS}),
    (k.grid_products, {"x": X, "square": SQUARE, "symbols": LEVELS, "table": FACTORS}),
    (k.square_sum, {"x": X}),
    (k.step_multiples, {"x": X, "step": 0.5, "dtype": "int16"}),
    (k.step_values, {"multiples": SHORTS.view(np.int16), "step": 0.5, "dtype": "float32"}),
    (k.log_histogram, {"x": X, "bits": 4, "signed": True}),
    (k.log_histogram, {"x": X, "bits": 4, "gradient": X}),
    (k.kept_histogram, {"x": X, "thresholds": THRESHOLDS, "bits": 4, "gradient": X}),
    (k.log_histogram_many, {"xs": [X, SQUARE], "bits": 4, "signed": True}),
    (k.log_histogram_many, {"xs": [X, SQUARE], "bits": 4, "gradients": [X, X]}),
    (k.kept_histogram_many, {"xs": [X, X], "thresholds": 2 * [THRESHOLDS], "bits": 4, "gradients": [X, SQUARE]}),
    (k.quantile, {"histogram": HISTOGRAM, "q": 0.5}),
    (k.huffman_lengths, {"counts": COUNTS, "limit": 15}),
    (k.huffman_codes, {"lengths": LENGTHS}),
    (k.huffman_encode, {"symbols": LEVELS, "lengths": LENGTHS, "streams": 4}),
    (k.huffman_decode, {"data": k.huffman_encode(LEVELS, LENGTHS), "lengths": LENGTHS, "n": N, "dtype": "uint8"}),
    (k.pack_lengths, {"lengths": LENGTHS}),
    (k.unpack_lengths, {"data": np.frombuffer(k.pack_lengths(LENGTHS), np.uint8), "S": 6}),
    (k.bucket_weights, {"counts": SHORTS, "values": CENTERS, "sigma": 0.2}),
    (k.prepare, {"centers": CENTERS, "weights": WEIGHTS}),
    (k.weighted_kmeans, {"centers": CENTERS, "weights": WEIGHTS, "k": 3, "seed": 1, "iterations": 5}),
    (k.weighted_kmeans, {"centers": CENTERS, "weights": WEIGHTS, "k": 3, "method": "kmeans++", "seed": 1}),
    (k.weighted_kmeans, {"centers": CENTERS, "weights": WEIGHTS, "k": 3, "initial": CENTERS[:3]}),
    (k.weighted_kmeans_many, {"problems": 3 * [(CENTERS, WEIGHTS)], "k": 3, "seed": 1, "iterations": 5}),
    (k.quantization_loss, {"centers": CENTERS, "weights": WEIGHTS, "codebook": CENTERS[:3]}),
    (k.delta, {"previous": LEVELS, "current": LEVELS, "size": 6}),
    (k.undelta, {"previous": LEVELS, "delta": LEVELS, "size": 6}),
    (k.split_by_level, {"values": LEVELS, "keys": LEVELS, "size": 6}),
    (k.merge_by_level, {"grouped": LEVELS, "keys": LEVELS, "size": 6}),
    (k.joint_counts, {"previous": LEVELS, "current": LEVELS, "previous_size": 6, "current_size": 7}),
    (k.bucket_index, {"x": X, "bits": 4}),
    (k.bucket_value, {"index": INDEX, "bits": 4, "dtype": "float32"}),
    (k.changed_mask, {"current": X, "previous": X}),
    (k.pack_mask, {"mask": FLAGS}),
    (k.unpack_mask, {"data": MASK, "n": N}),
    (k.gather, {"x": X, "mask_bits": MASK}),
    (k.scatter, {"base": X, "mask_bits": MASK, "values": X[FLAGS]}),
    (k.split_octaves, {"index": INDEX, "bits": 4, "buckets": J}),
    (k.join_octaves, {"octaves": OCTAVES, "bits": 4, "buckets": J}),
    (k.split_planes, {"x": X}),
    (k.merge_planes, {"planes": k.split_planes(X), "dtype": "float32"}),
    (k.difference, {"current": X, "previous": X, "method": "xor", "dtype": "float32"}),
    (k.undifference, {"diff": X.view(np.uint32), "previous": X, "method": "arithmetic"}),
    (k.rans_frequencies, {"counts": np.tile(COUNTS, (3, 1)), "precision": 12, "exact": False}),
    (k.rans_encode, {"symbols": LEVELS, "contexts": CONTEXTS, "frequencies": TABLE, "precision": 12}),
    (
        k.rans_decode,
        {
            "data": k.rans_encode(LEVELS, CONTEXTS, TABLE, 12),
            "contexts": CONTEXTS,
            "frequencies": TABLE,
            "precision": 12,
            "n": N,
        },
    ),
    (k.coding_cost, {"counts": np.tile(COUNTS, (3, 1)), "frequencies": TABLE, "precision": 12}),
    (k.entropy_bits, {"counts": np.tile(COUNTS, (3, 1))}),
    (k.pack_frequencies, {"frequencies": TABLE, "precision": 12}),
    (
        k.unpack_frequencies,
        {"data": np.frombuffer(k.pack_frequencies(TABLE, 12), np.uint8), "C": 3, "S": 6, "precision": 12},
    ),
    (
        k.rate_distortion_levels,
        {
            "x": X,
            "levels": LEVELS,
            "previous": LEVELS,
            "codebook": CODES,
            "prices": PRICES,
            "importance": SQUARE,
        },
    ),
    (k.settled_bounds, {"codebook": CODES, "prices": PRICES, "slack": 0.5}),
    (
        k.unsettled,
        {
            "x": X,
            "levels": LEVELS,
            "previous": LEVELS,
            "bounds": k.settled_bounds(CODES, PRICES),
            "importance": SQUARE,
        },
    ),
    (k.factor_sums, {"x": X, "columns": N}),
    (
        k.residual_symbols,
        {"x": np.abs(X), "rows": ROWS, "columns": COLUMNS, "start": 0, "octaves": 0.5, "previous": LEVELS},
    ),
    (k.residual_values, {"symbols": LEVELS, "rows": ROWS, "columns": COLUMNS, "start": 0, "table": FACTORS}),
    (k.residual_factors, {"sums": np.ones(256), "counts": np.ones(256), "octaves": 0.5}),
    (k.row_quantize, {"x": MATRIX, "bits": 4, "method": "adaptive", "num_bins": 10, "ratio": 0.5}),
    (k.row_dequantize, {"codes": ROW_CODES, "scale": SCALE, "minimum": MINIMUM}),
    (k.row_kmeans, {"x": MATRIX, "bits": 3, "iterations": 3}),
    (k.row_lookup, {"codes": K_CODES, "codebook": K_TABLE}),
    (k.rle_encode, {"values": LEVELS}),
    (k.rle_decode, {"tokens": k.rle_encode(LEVELS), "n": N}),
    (search_steps, {"num_bins": 10, "ratio": 0.5}),
    (k.collect_and_locate, {"current": MOVED, "previous": X, "edges": (), "limit": N}),
    (k.collect_changes, {"current": MOVED, "previous": X, "edges": (), "limit": N}),
    (k.locate_changes, {"previous": X, "delta": SPARSE, "edges": (), "method": "arithmetic"}),
    (k.apply_changes, {"previous": X, "delta": SPARSE, "edges": (), "method": "arithmetic"}),
    (k.gap_shifts, {"delta": SPARSE}),
    (k.split_changes, {"delta": SPARSE, "shifts": SHIFTS}),
    (
        k.join_changes,
        {"counts": SPARSE.counts, "shifts": SHIFTS, "n": N, "symbols": SPLIT[0], "extra": SPLIT[1], "large": SPLIT[2]},
    ),
]
NO_ARRAYS: list[Any] = [
    None,
    [1.0] * N,
    1.5,
    np.float32(1.5),
    np.float32,
    "float32",
    {},
    object(),
    torch.empty(N, device="meta"),
    torch.zeros(N).to_sparse(),
    np.zeros(N, "S3"),
    np.zeros(N, object),
    np.zeros(N, np.complex64),
    torch.zeros(N, dtype=torch.complex64),
]
NO_INTEGERS: list[Any] = [
    1.5,
    math.nan,
    math.inf,
    "2",
    [2],
    np.ones(2, int),
    np.float32(2),
    torch.ones(2),
    True,
    np.True_,
    torch.tensor(True),
    2**70,
]
NO_NUMBERS: list[Any] = [math.nan, -1.0, None, "0.5", [0.5], np.full(2, 0.5), torch.tensor(0.5), 10**400, True]
NO_NAMES: list[Any] = [None, 3, "float8", ["float32"], {}, np.zeros(2), object(), torch.zeros(2)]
NO_FLAGS: list[Any] = [None, 1, "no", [], np.zeros(2), torch.zeros(2)]


def wrong(name: str, value: Any) -> list[Any]:
    """Return values that an argument of that name and kind must refuse."""
    if name == "problems":
        return [None, 3, [CENTERS], [(CENTERS, [1.0])], [(CENTERS,)]]
    if isinstance(value, list):
        return [None, 3, X, [3, 4], [value[0], "x"], *([] if name == "xs" else [value[:1]])]
    if isinstance(value, np.ndarray):
        # Bytes are data and None means no gradient; the others are not arrays.
        return NO_ARRAYS if name in ("data", "extra") or value is SPLIT[0] else [*NO_ARRAYS, b"xyz"]
    if isinstance(value, bool):
        return NO_FLAGS
    if isinstance(value, int):
        return NO_INTEGERS[:-1] if name in ("seed", "limit") else NO_INTEGERS
    if isinstance(value, float):
        return NO_NUMBERS
    if isinstance(value, str):
        return NO_NAMES
    if type(value) is tuple:
        return [None, 3, 1.5, ("2",), (1.5,), (-1,), (2**70,)]
    assert dataclasses.is_dataclass(value) or isinstance(value, k.SparseDelta)
    return [None, 3, X, {}, FORMAT if value is not FORMAT else OCTAVES]


def cases() -> Iterator[Any]:
    """Return every argument of every call."""
    for function, arguments_ in CALLS:
        title = getattr(function, "__name__", "").rsplit(".", 1)[-1]
        for name in arguments_:
            yield pytest.param(function, arguments_, name, id=f"{title}-{name}")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("function", "right", "name"), list(cases()))
def test_each_argument_is_checked(function: Callable[..., Any], right: dict[str, Any], name: str) -> None:
    function(**right)
    may_be_none = name == "contexts" or inspect.signature(function).parameters[name].default is None
    for value in wrong(name, right[name]):
        if value is None and may_be_none:
            continue
        with pytest.raises(BadArgumentError):
            function(**{**right, name: value})


def test_every_public_function_is_called_here() -> None:
    called = {id(function) for function, _ in CALLS}
    own = {"merge"}  # of any number of histograms
    missing = [n for n in k.__all__ if n not in own and inspect.isfunction(f := getattr(k, n)) and id(f) not in called]
    assert not missing


@pytest.mark.parametrize("value", [None, 3, X, BUCKETS])
def test_what_is_merged_must_be_a_histogram(value: Any) -> None:
    for call in (lambda: k.merge(value), lambda: k.merge(HISTOGRAM, value)):
        with pytest.raises(BadArgumentError, match="histogram is"):
            call()


def test_the_message_names_argument_value_and_limit() -> None:
    for call, message in (
        (lambda: k.row_quantize(MATRIX, 1.5), r"bits is 1\.5; it must be an integer in \[1, 8\]"),  # type: ignore[arg-type]
        (lambda: k.row_quantize(MATRIX, 9), r"bits is 9; it must be an integer in \[1, 8\]"),
        (
            lambda: k.row_quantize(MATRIX, 2**1000),
            r"bits is an integer of 1001 bits; it must be an integer in \[1, 8\]",
        ),
        (lambda: k.row_quantize(MATRIX, 4, ratio=1.5), r"ratio is 1\.5; it must be a number in \(0, 1\]"),
        (lambda: k.log_histogram(X, np.ones(3)), r"bits is float64 \(3,\)"),  # type: ignore[arg-type]
        (lambda: k.split_planes([1.0]), r"x is a list, not an array"),
        (lambda: k.split_planes(torch.empty(2, device="meta")), r"x is a torch tensor .* device meta; a dense one"),
        (lambda: k.split_planes(torch.zeros(2).to_sparse()), r"x is a torch tensor of layout torch.sparse_coo"),
        (lambda: k.merge_planes(k.split_planes(X), np.float32), r"dtype is .*float32.*; the name of one of"),  # type: ignore[arg-type]
        (lambda: k.scatter(X, MASK, None), r"values is None, not an array"),
    ):
        with pytest.raises(BadArgumentError, match=message):
            call()


@pytest.mark.parametrize("array", [X.astype(">f4"), SHORTS.astype(">u2")])
def test_foreign_byte_order_is_refused(array: np.ndarray) -> None:
    for call in (
        lambda: k.distortion(array, X),
        lambda: k.distortion(X, array),
        lambda: k.extrapolate(array, X, 1.0),
        lambda: k.extrapolate(X, array, 1.0),
        lambda: k.exponent_dequantize(LEVELS, array),
        lambda: k.split_planes(array),
    ):
        with pytest.raises(BadArgumentError):
            call()


def test_integers_of_any_library_are_integers() -> None:
    for value in (3, np.int64(3), np.uint8(3), np.array(3), torch.tensor(3)):
        assert type(arguments.integer("n", value, 1, 3)) is int
    for value in (0.5, np.float16(0.5), np.float32(0.5), np.float64(0.5), np.longdouble(0.5)):
        assert type(arguments.number("alpha", value, 0, 1)) is float
    assert arguments.number("q", 1, 0, 1) == 1.0


def test_a_tensor_whose_storage_was_freed_is_refused() -> None:
    freed = torch.zeros(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(BadArgumentError, match="x is a torch tensor whose storage was freed"):
        k.log_histogram(freed, 6)
