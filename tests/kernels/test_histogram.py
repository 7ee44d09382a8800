"""Histograms: exact counts on every back end, thresholds, products, merging and quantiles."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.backend.floats import FORMATS
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.histogram import (
    Histogram,
    kept_histogram,
    kept_histogram_many,
    log_histogram,
    log_histogram_many,
    merge,
    quantile,
)
from shrinkpoint.kernels.histogram import cpu as compiled
from shrinkpoint.kernels.histogram import reference as oracle
from shrinkpoint.kernels.quantizer import Thresholds

from .conftest import BackEnd

DTYPES = ["float16", "bfloat16", "float32", "float64"]

# Neither pruning nor protection, each alone, both, values no format holds exactly, protection below pruning.
THRESHOLDS = [
    Thresholds(),
    Thresholds(prune_magnitude=0.1),
    Thresholds(protect_magnitude=1.7),
    Thresholds(protect_magnitude=math.pi / 2, prune_magnitude=math.e / 10, prune_sensitivity=0.01),
    Thresholds(protect_sensitivity=1.1, prune_sensitivity=1e-3),
    Thresholds(protect_magnitude=0.5, prune_magnitude=1.0),
    Thresholds(prune_magnitude=math.inf),
    Thresholds(protect_magnitude=0.0),
    Thresholds(protect_magnitude=1e300, prune_magnitude=1e-300, protect_sensitivity=1e300),
]


def sample(rng: np.random.Generator, dtype: str, n: int) -> np.ndarray[Any, Any]:
    """Values that the dtype holds: mostly normal, with every special case mixed in."""
    with np.errstate(over="ignore", under="ignore"):
        x = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 2, n)
        special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 3e-8, 1e-5, 1e-320, -1e-310, 6e4, 3e38, -1e308]
        place = rng.random(n) < 0.3
        x[place] = rng.choice(special, int(place.sum()))
        if dtype == "bfloat16":
            return torch.from_numpy(x).bfloat16().float().numpy()
        return x.astype(dtype)


def native(x: np.ndarray[Any, Any], dtype: str) -> Any:
    """Return x in its dtype: torch for bfloat16, else NumPy."""
    return torch.from_numpy(x).bfloat16() if dtype == "bfloat16" else x


def same(a: Histogram, b: Histogram) -> None:
    assert (a.bits, a.format, a.signed) == (b.bits, b.format, b.signed)
    np.testing.assert_array_equal(a.counts, b.counts, strict=True)


@pytest.mark.parametrize("bits", [0, 6, 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_match_the_oracle(back_end: BackEnd, fresh: np.random.Generator, dtype: str, bits: int) -> None:
    if (bits, dtype) == (12, "float64"):
        bits = 8
    x = sample(fresh, dtype, 5003)
    for signed in (False, True):
        h = back_end.module("histogram").log_histogram(back_end.array(x, dtype), bits, signed=signed)
        same(h, oracle.log_histogram(native(x, dtype), bits, signed=signed))
        assert int(h.counts.sum()) == 5003
        assert h.total == int(np.isfinite(x).sum())


def test_sizes(back_end: BackEnd, fresh: np.random.Generator) -> None:
    for n in back_end.sizes([0, 1, 3, 4, 5, 255, 256, 257, 1023, 1025], "histogram.COUNT"):
        x = sample(fresh, "float32", n)
        same(
            back_end.module("histogram").log_histogram(back_end.array(x), 4, signed=True),
            oracle.log_histogram(x, 4, signed=True),
        )


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float32"), ("float32", "float64")]
)
def test_products_match_the_oracle(back_end: BackEnd, fresh: np.random.Generator, dtypes: tuple[str, str]) -> None:
    x, g = (sample(fresh, dtype, 3001) for dtype in dtypes)
    with np.errstate(all="ignore"):
        h = back_end.module("histogram").log_histogram(
            back_end.array(x, dtypes[0]), 6, gradient=back_end.array(g, dtypes[1])
        )
        wide = np.float64 if "float64" in dtypes else np.float32
        same(h, oracle.log_histogram(np.abs(g.astype(wide) * x.astype(wide)), 6))


@pytest.mark.parametrize("thresholds", THRESHOLDS)
@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float64", "bfloat16"), ("float16", None)]
)
def test_kept_matches_the_oracle(
    back_end: BackEnd, fresh: np.random.Generator, dtypes: tuple[str, str | None], thresholds: Thresholds
) -> None:
    x = sample(fresh, dtypes[0], 1501)
    g = None if dtypes[1] is None else sample(fresh, dtypes[1], 1501)
    gradient = None if g is None else back_end.array(g, dtypes[1])
    with np.errstate(all="ignore"):
        h = back_end.module("histogram").kept_histogram(back_end.array(x, dtypes[0]), thresholds, 5, gradient=gradient)
        x64 = x.astype(np.float64)
        keep = np.isfinite(x64) & (abs(x64) < thresholds.protect_magnitude) & (abs(x64) >= thresholds.prune_magnitude)
        if g is not None:
            wide = np.float64 if "float64" in dtypes else np.float32
            product = abs((g.astype(wide) * x.astype(wide)).astype(np.float64))
            keep &= np.isfinite(product) & (product < thresholds.protect_sensitivity)
            keep &= product >= thresholds.prune_sensitivity
    same(h, oracle.log_histogram(native(x[keep], dtypes[0]), 5, signed=True))


@pytest.mark.parametrize("fill", [0.0, -0.0, 1.0, -3e38, 1e-45, np.nan, np.inf])
def test_all_equal(back_end: BackEnd, fill: float) -> None:
    x = np.full(1037, fill, dtype=np.float32)
    same(back_end.module("histogram").log_histogram(back_end.array(x), 6), oracle.log_histogram(x, 6))


def test_strided_and_shaped(back_end: BackEnd, fresh: np.random.Generator) -> None:
    x = sample(fresh, "float32", 24 * 35).reshape(24, 35)
    module, a = back_end.module("histogram"), back_end.array(x)
    same(module.log_histogram(a.T, 6), oracle.log_histogram(x, 6))
    same(module.log_histogram(a[::2, 1:30:3], 6), oracle.log_histogram(x[::2, 1:30:3].copy(), 6))
    same(module.log_histogram(a[3, 4], 6), oracle.log_histogram(x[3:4, 4], 6))


def tensors(rng: np.random.Generator, back_end: BackEnd) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Dtypes and values of a model: every dtype, sizes 0, 1 and around a block."""
    dtypes = {"numpy": ["float16", "float32", "float64"], "strict": ["float32", "float64"]}.get(
        back_end.library, DTYPES
    )
    sizes = back_end.sizes([0, 1, 255, 256, 257, 1024, 1025, 4097], "histogram.COUNT")
    return [(dtypes[i % len(dtypes)], sample(rng, dtypes[i % len(dtypes)], n)) for i, n in enumerate((*sizes, 0, 300))]


@pytest.mark.parametrize("signed", [False, True])
def test_many_equal_one_by_one(back_end: BackEnd, fresh: np.random.Generator, signed: bool) -> None:
    model = tensors(fresh, back_end)
    many = back_end.module("histogram").log_histogram_many(
        [back_end.array(x, dtype) for dtype, x in model], 6, signed=signed, gradients=[None] * len(model)
    )
    assert len(many) == len(model)
    for h, (dtype, x) in zip(many, model, strict=True):
        same(h, oracle.log_histogram(native(x, dtype), 6, signed=signed))


def test_many_with_gradients_equal_one_by_one(back_end: BackEnd, fresh: np.random.Generator) -> None:
    """Histograms of many tensors with gradients equal those of each tensor."""
    model = tensors(fresh, back_end)
    other = {dtype: name for (dtype, _), (name, _) in itertools.pairwise(model)}
    pairs = [(d, x, None if i % 3 == 2 else sample(fresh, other[d], x.size)) for i, (d, x) in enumerate(model)]
    limits = [THRESHOLDS[i % len(THRESHOLDS)] for i in range(len(pairs))]
    xs = [back_end.array(x, dtype) for dtype, x, _ in pairs]
    gradients = [None if g is None else back_end.array(g, other[dtype]) for dtype, _, g in pairs]
    with np.errstate(all="ignore"):
        products = back_end.module("histogram").log_histogram_many(xs, 7, gradients=gradients)
        kept = back_end.module("histogram").kept_histogram_many(xs, limits, 7, gradients=gradients)
        for product, left, limit, (dtype, x, g) in zip(products, kept, limits, pairs, strict=True):
            t = torch.from_numpy(x).to(getattr(torch, dtype))
            gradient = None if g is None else torch.from_numpy(g).to(getattr(torch, other[dtype]))
            same(product, oracle.log_histogram(t, 7, gradient=gradient))
            same(left, oracle.kept_histogram(t, limit, 7, gradient=gradient))


@pytest.mark.parametrize("limit", ["SLICE", "COPIES", "COPIED_COUNTERS", "COUNTERS"])
def test_launches_on_a_gpu(limit: str, monkeypatch: pytest.MonkeyPatch, fresh: np.random.Generator) -> None:
    """All tensors of a dtype share one launch, with any number of parts and copies."""
    gpu = pytest.importorskip("shrinkpoint.kernels.histogram.gpu")
    launches: list[tuple[int, int]] = []
    launch = gpu._launch

    def counted(parts: Any, size: int, copies: int, *rest: Any) -> Any:
        launches.append((len(parts), copies))
        return launch(parts, size, copies, *rest)

    monkeypatch.setattr(gpu, "_launch", counted)
    back_end = BackEnd("gpu", "torch")
    model = [sample(fresh, "float32", n) for n in (3, 5000, 0, 2501, 700)]
    expected = [oracle.log_histogram(x, 0) for x in model]
    size = expected[0].counts.size

    def count() -> list[tuple[int, int]]:
        launches.clear()
        found = gpu.log_histogram_many([back_end.array(x) for x in model], 0, gradients=[None] * len(model))
        for h, other in zip(found, expected, strict=True):
            same(h, other)
        return list(launches)

    assert count() == [(2, 1), (2, gpu.COPIES)]
    few = {"SLICE": 999, "COPIES": 3, "COPIED_COUNTERS": 2 * size, "COUNTERS": 2 * size}
    monkeypatch.setattr(gpu, limit, few[limit])
    assert (
        count()
        == {
            "SLICE": [(11, 1)],
            "COPIES": [(2, 1), (2, 3)],
            "COPIED_COUNTERS": [(1, 1), (3, 2)],
            "COUNTERS": [(2, 1), (1, gpu.COPIES), (1, gpu.COPIES)],
        }[limit]
    )


@pytest.mark.parametrize("few", [False, True])
def test_both_ways_of_counting(
    few: bool, monkeypatch: pytest.MonkeyPatch, fresh: np.random.Generator, poisoned: None
) -> None:
    """Counting in four lanes and directly in buckets gives the same counts."""
    asked: list[int] = []
    monkeypatch.setattr(compiled, "is_few", lambda size, lanes: asked.append(size) or few)
    cpu = BackEnd("cpu", "torch")
    for dtype in DTYPES:
        for bits in (0, 6, 12):
            test_counts_match_the_oracle(cpu, fresh, dtype, bits)
        for other in DTYPES:
            test_products_match_the_oracle(cpu, fresh, (dtype, other))
            for thresholds in THRESHOLDS:
                test_kept_matches_the_oracle(cpu, fresh, (dtype, other), thresholds)
        for thresholds in THRESHOLDS:
            test_kept_matches_the_oracle(cpu, fresh, (dtype, None), thresholds)
    test_sizes(cpu, fresh)
    for fill in (0.0, -0.0, 1.0, 1e-45, np.nan):
        test_all_equal(cpu, fill)
    assert len(asked) > 100


def test_small_arrays_are_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small arrays are counted together, without clearing counters for each."""
    monkeypatch.setattr(compiled, "_count", None)
    assert log_histogram(np.ones(10_000, np.float32), 6).total == 10_000
    assert compiled.is_few(10_000, 4 << 15)
    assert not compiled.is_few(1_000_000, 4 << 15)


def test_blocks_with_and_without_subnormals(monkeypatch: pytest.MonkeyPatch, fresh: np.random.Generator) -> None:
    """Counts are right with zeros and subnormals in some blocks, and over counter flushes."""
    x = fresh.standard_normal(300_001).astype(np.float32)
    x[65_536:80_000] = 0.0
    x[131_072:140_000] *= np.float32(1e-40)
    x[-1] = -1e-45
    expected = oracle.log_histogram(x, 6, signed=True)
    same(log_histogram(x, 6, signed=True), expected)
    monkeypatch.setattr(compiled, "CHUNK", 70_000)
    same(log_histogram(x, 6, signed=True), expected)
    same(kept_histogram(x, Thresholds(), 6), expected)
    thresholds = Thresholds(prune_magnitude=0.123, protect_magnitude=1.234)
    kept = (abs(x.astype(np.float64)) >= 0.123) & (abs(x.astype(np.float64)) < 1.234)
    same(kept_histogram(x, thresholds, 6), oracle.log_histogram(x[kept], 6, signed=True))
    same(log_histogram(x, 6, gradient=np.ones_like(x)), expected.magnitude())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, 5, 10])
def test_values_and_lower_bounds_belong_to_their_buckets(fresh: np.random.Generator, dtype: str, bits: int) -> None:
    x = sample(fresh, dtype, 4001)
    h = log_histogram(native(x, dtype), bits)
    assert h.bits == min(bits, FORMATS[dtype].mantissa)
    values, lower = h.values(), h.lower_bounds()
    used = np.flatnonzero(h.counts[:-1])
    again = log_histogram(native(np.repeat(values[used], h.counts[used]).astype(x.dtype), dtype), bits)
    np.testing.assert_array_equal(again.counts[:-1], h.counts[:-1])
    assert (np.diff(values) >= 0).all()
    assert (np.diff(lower) >= 0).all()
    assert (lower <= values).all()
    magnitude = np.sort(np.abs(x[np.isfinite(x)]).astype(np.float64))
    below = np.concatenate([[0], np.cumsum(h.counts[:-2])])
    np.testing.assert_array_equal(np.searchsorted(magnitude, lower, side="left"), below)
    signed = log_histogram(native(x, dtype), bits, signed=True)
    np.testing.assert_array_equal(signed.values(), np.concatenate([-values[:0:-1], values]))
    same(signed.magnitude(), h)
    assert h.magnitude() is h


@pytest.mark.parametrize("signed", [False, True])
def test_merge_equals_counting_together(fresh: np.random.Generator, signed: bool) -> None:
    parts = {dtype: sample(fresh, dtype, 700) for dtype in DTYPES}
    every = [log_histogram(native(x, dtype), 5, signed=signed) for dtype, x in parts.items()]
    for n in (1, 3, 4):
        with np.errstate(over="ignore"):
            together = np.concatenate([x.astype(np.float64) for x in list(parts.values())[:n]]).astype(
                DTYPES[n - 1] if n > 1 else "float16"
            )
        same(merge(*every[:n]), log_histogram(together, 5, signed=signed))
    half = merge(every[0], every[1])
    assert half.format == "bfloat16"
    nothing = log_histogram(np.zeros(0, dtype=np.float32), 5, signed=signed)
    with np.errstate(over="ignore"):
        both = np.concatenate([parts["float16"].astype(np.float32), parts["bfloat16"]])
    same(merge(half, nothing), log_histogram(both, 5, signed=signed))


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40),
    st.floats(0, 1),
    st.integers(0, 12),
    st.booleans(),
)
def test_quantiles_are_within_their_bound(values: list[float], q: float, bits: int, signed: bool) -> None:
    x = np.array(values, dtype=np.float32)
    true = float(np.sort(x if signed else np.abs(x))[math.floor(q * (x.size - 1))])
    estimate = quantile(log_histogram(x, bits, signed=signed), q)
    assert abs(estimate - true) <= 2.0 ** -(bits + 1) * abs(true)


def test_other_libraries(fresh: np.random.Generator) -> None:
    """JAX and ml_dtypes arrays through the public function."""
    jax = pytest.importorskip("jax")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = sample(fresh, "bfloat16", 513)
    expected = oracle.log_histogram(native(x, "bfloat16"), 6, signed=True)
    same(log_histogram(x.astype(ml_dtypes.bfloat16), 6, signed=True), expected)
    same(log_histogram(jax.numpy.asarray(x.astype(ml_dtypes.bfloat16)), 6, signed=True), expected)


def test_bad_arguments() -> None:
    x = np.ones(4, dtype=np.float32)
    h = log_histogram(x, 4)
    cases: list[tuple[str, Any]] = [
        ("bits", lambda: log_histogram(x, -1)),
        ("bits", lambda: log_histogram(x, 13)),
        ("bits", lambda: kept_histogram(x, Thresholds(), 13)),
        ("int64", lambda: log_histogram(x.astype(np.int64), 4)),
        ("signed", lambda: log_histogram(x, 4, signed=True, gradient=x)),
        ("gradient", lambda: log_histogram(x, 4, gradient=x[:3])),
        ("int32", lambda: kept_histogram(x, Thresholds(), 4, gradient=x.astype(np.int32))),
        ("q is", lambda: quantile(h, 1.5)),
        ("q is", lambda: quantile(h, math.nan)),
        ("finite", lambda: quantile(log_histogram(x[:0], 4), 0.5)),
        ("empty", lambda: merge()),
        ("differ", lambda: merge(h, log_histogram(x, 5))),
        ("differ", lambda: merge(h, log_histogram(x, 4, signed=True))),
        ("signed", lambda: log_histogram(x, 4, signed=True).lower_bounds()),
        ("counts", lambda: Histogram(h.counts[:-1], 4, "float32", signed=False)),
        ("bits", lambda: Histogram(h.counts, 40, "float32", signed=False)),
        ("prune_magnitude", lambda: Thresholds(prune_magnitude=-1.0)),
        ("protect_sensitivity", lambda: Thresholds(protect_sensitivity=math.nan)),
        ("not an array", lambda: log_histogram([1.0], 4)),
        ("xs is", lambda: log_histogram_many(3, 4)),  # type: ignore[arg-type]
        ("2 arrays, but 1 gradients", lambda: log_histogram_many([x, x], 4, gradients=[x])),
        ("signed", lambda: log_histogram_many([x, x], 4, signed=True, gradients=[None, x])),
        ("gradient", lambda: log_histogram_many([x, x], 4, gradients=[None, x[:3]])),
        ("1 arrays, but 2 thresholds", lambda: kept_histogram_many([x], [Thresholds()] * 2, 4)),
    ]
    for message, call in cases:
        with pytest.raises(BadArgumentError, match=message):
            call()
    assert log_histogram_many([], 4) == kept_histogram_many([], [], 4) == []
