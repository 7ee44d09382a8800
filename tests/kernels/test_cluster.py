"""Cluster quantization: equal bits on every back end; map, sums, boundaries by definition."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shrinkpoint.kernels.cluster import (
    SHIFT,
    boundaries,
    cluster_dequantize,
    cluster_quantize,
    dynamic_map,
    first_code,
    normal_quantiles,
    thresholds,
)
from shrinkpoint.kernels.cluster import reference as oracle
from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError

from .patterns import assert_same_bits

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 2, 1023, 1024, 1025, 2500]
f32 = np.float32


def samples(rng: np.random.Generator, n: int) -> list[np.ndarray[Any, Any]]:
    normal = rng.standard_normal(n).astype(f32)
    return [
        normal,
        (normal**2 * f32(1e-12)),  # second moments: positive, skewed, tiny
        normal * f32(1e-44),  # subnormal
        np.where(normal > 0, f32(0.0), f32(-0.0)),
        np.full(n, 3.5, f32),
        np.where(np.abs(normal) < 1, f32(0), normal * f32(1e30)),
        cancelling(rng, n),
    ]


def cancelling(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    """Numbers of all sizes that cancel in pairs, so that rounding errors dominate the mean."""
    half = (rng.standard_normal(n // 2) * 2.0 ** rng.uniform(0, 60, n // 2)).astype(f32)
    return rng.permutation(np.concatenate([half, -half, np.ones(n % 2, f32)]))


@pytest.mark.parametrize("clusters", [1, 3, 16])
def test_quantize_matches_the_oracle(back_end: BackEnd, fresh: np.random.Generator, clusters: int) -> None:
    module = back_end.module("cluster")
    for n in back_end.sizes(SIZES, "cluster.ELEMENTS", "cluster.SUMS"):
        for x in samples(fresh, n):
            expected = oracle.cluster_quantize(x, clusters)
            found = module.cluster_quantize(back_end.array(x), clusters)
            for e, f in zip(expected, found, strict=True):
                assert_same_bits(back_end, f, e)
            values = module.cluster_dequantize(*found)
            assert_same_bits(back_end, values, oracle.cluster_dequantize(*expected))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floats_are_rounded_first(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    if back_end.library == "strict" and dtype != "float64":
        pytest.skip("the array API standard has no 16-bit floats")
    values = fresh.standard_normal((31, 40))
    if dtype != "float64":
        values = values.astype(f32)  # so that rounding to 16 bits happens once in any library
    rounded = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float32).numpy()
    found = back_end.module("cluster").cluster_quantize(back_end.array(values, dtype), 16)
    for e, f in zip(oracle.cluster_quantize(rounded, 16), found, strict=True):
        assert_same_bits(back_end, f, e)


def test_strided(back_end: BackEnd, fresh: np.random.Generator) -> None:
    if back_end.library == "strict":
        pytest.skip("the array API standard has no strides")
    x = fresh.standard_normal((61, 34)).astype(f32)
    found = back_end.module("cluster").cluster_quantize(back_end.array(x).T[::2], 5)
    for e, f in zip(oracle.cluster_quantize(np.ascontiguousarray(x.T[::2]), 5), found, strict=True):
        assert_same_bits(back_end, f, e)


def test_the_sum_is_the_tree(fresh: np.random.Generator) -> None:
    """Three blocks summed pair by pair in plain Python give the boundaries that were used."""
    x = cancelling(fresh, 2500)

    def tree(values: list[float]) -> float:
        values = values + [0.0] * (-len(values) % 1024)
        sums = []
        for k in range(0, len(values), 1024):
            s = values[k : k + 1024]
            while len(s) > 1:
                s = [a + b for a, b in zip(s[: len(s) // 2], s[len(s) // 2 :], strict=True)]
            sums.append(s[0])
        return sums[0] if len(sums) == 1 else tree(sums)

    wide = [float(v) for v in x]
    edges = boundaries(tree(wide), tree([v * v for v in wide]), x.size, 16)
    labels = (x[:, None] >= edges).sum(1)
    assert cluster_quantize(x).labels.tolist() == labels.tolist()


def test_clusters_are_filled_evenly_for_a_normal_array() -> None:
    x = (3 + 2 * np.random.default_rng(5).standard_normal(200_000)).astype(f32)
    counts = np.bincount(cluster_quantize(x).labels, minlength=16)
    assert np.abs(counts / x.size - 1 / 16).max() < 0.003


def test_the_dynamic_map() -> None:
    m = dynamic_map()
    assert (m.dtype, m.size, m[0], m[-1]) == (np.float32, 256, 0, 1)
    assert (np.diff(m) > 0).all()
    decades = [((m > 10.0**e * (1 + 1e-6)) & (m < 10.0 ** (e + 1) * (1 - 1e-6))).sum() for e in range(-7, 0)]
    assert decades == [2, 4, 8, 16, 32, 64, 128]
    top = m[-129:-1].astype(float)
    np.testing.assert_allclose(top, 0.1 + 0.9 * (np.arange(128) + 0.5) / 128, rtol=1e-7)
    np.testing.assert_allclose(m[1:3].astype(float), [3.25e-7, 7.75e-7], rtol=1e-7)


def test_look_up_finds_the_nearest_entry() -> None:
    """At every threshold, around it, and at the ends of every look-up group."""
    limits, first = thresholds()[:-1], first_code()
    groups = (np.arange(1, first.size, dtype=np.uint32) << SHIFT).view(f32)
    v = np.concatenate([limits, np.nextafter(limits, f32(2)), np.nextafter(limits, f32(-1)), dynamic_map(), groups])
    v = np.concatenate([v, np.nextafter(groups, f32(-1))])
    v = v[(v >= 0) & (v <= 1)]
    guess = first[v.view(np.uint32) >> SHIFT]
    codes = guess + (v > thresholds()[guess])
    nearest = np.abs(v.astype(float)[:, None] - dynamic_map().astype(float)).argmin(1)
    assert (codes == nearest).all()


def test_normal_quantiles() -> None:
    assert normal_quantiles(1) == ()
    assert normal_quantiles(2) == (0.0,)
    for k, z in enumerate(normal_quantiles(16), 1):
        assert abs(0.5 * (1 + math.erf(z / math.sqrt(2))) - k / 16) < 1e-8


@given(hnp.arrays(f32, st.integers(0, 60), elements=st.floats(-(2.0**50), 2.0**50, width=32)), st.integers(1, 16))
def test_values_stay_in_their_cluster(x: np.ndarray[Any, Any], clusters: int) -> None:
    q = cluster_quantize(x, clusters)
    out = cluster_dequantize(*q)
    assert q.labels.size == 0 or int(q.labels.max()) < clusters
    for k in range(clusters):
        members, restored = x[q.labels == k].astype(float), out[q.labels == k].astype(float)
        if members.size:
            low, high = members.min(), members.max()
            slack = max(abs(low), abs(high)) * 2.0**-22 + 2.0**-148
            assert q.minimum[k] == low
            assert (restored >= low - slack).all()
            assert (restored <= high + slack).all()
            # no gap of the map is wider than 0.9 / 128 of the range, and a value is at most half a gap off
            assert np.abs(restored - members).max() <= (high - low) * 0.9 / 256 * 1.01 + slack


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_has_no_effect(back_end: BackEnd, dtype: torch.dtype) -> None:
    x = back_end.array(np.linspace(-1, 1, 4000), "float32")
    expected = back_end.module("cluster").cluster_quantize(x, 3)
    torch.set_default_dtype(dtype)
    try:
        found = back_end.module("cluster").cluster_quantize(x, 3)
    finally:
        torch.set_default_dtype(torch.float32)
    for part in ("codes", "labels", "scale", "minimum"):
        assert np.array_equal(*(np.asarray(getattr(q, part)) for q in (found, expected)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(back_end: BackEnd, bad: float) -> None:
    x = np.ones(1500, f32)
    x[1400] = bad
    with pytest.raises(BadArgumentError, match="NaN or an infinity"):
        back_end.module("cluster").cluster_quantize(back_end.array(x), 4)


def test_a_range_beyond_float32_is_refused(back_end: BackEnd) -> None:
    x = np.array([3e38, -3e38] * 4, f32)
    with pytest.raises(BadArgumentError, match="spans more"):
        back_end.module("cluster").cluster_quantize(back_end.array(x), 1)
    back_end.module("cluster").cluster_quantize(back_end.array(x), 2)  # apart, the two fit


@pytest.mark.parametrize("label", [2, 255])
def test_a_label_without_cluster_is_refused(back_end: BackEnd, label: int) -> None:
    arrays = [np.zeros(3, np.uint8), np.array([0, 1, label], np.uint8), np.ones(2, f32), np.ones(2, f32)]
    with pytest.raises(CorruptDataError, match=f"label {label} is out of range for 2"):
        back_end.module("cluster").cluster_dequantize(*(back_end.array(a) for a in arrays))


def test_public_functions_stay_in_torch() -> None:
    x = torch.tensor([[0.0, 1.0], [5.0, 6.0]], dtype=torch.bfloat16, requires_grad=True)
    q = cluster_quantize(x, 2)
    assert [t.dtype for t in q] == [torch.uint8, torch.uint8, torch.float32, torch.float32]
    assert cluster_dequantize(*q).tolist() == [0.0, 1.0, 5.0, 6.0]


U = np.zeros(3, np.uint8)
S = np.zeros(2, f32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: cluster_quantize(np.zeros(3, int)), BadArgumentError, "int64"),
        (lambda: cluster_quantize(S, 0), BadArgumentError, "clusters is 0"),
        (lambda: cluster_quantize(S, 17), BadArgumentError, "clusters is 17"),
        (lambda: cluster_dequantize(S, U, S, S), BadArgumentError, "codes"),
        (lambda: cluster_dequantize(U, U, S.astype(float), S), BadArgumentError, "scale"),
        (lambda: cluster_dequantize(U, U.reshape(1, 3), S, S), BadArgumentError, "labels"),
        (lambda: cluster_dequantize(U, U[:2], S, S), CorruptDataError, "2 labels"),
        (lambda: cluster_dequantize(U, U, S, S[:1]), CorruptDataError, "entries"),
        (lambda: cluster_dequantize(U, U, S[:0], S[:0]), CorruptDataError, "entries"),
        (lambda: cluster_dequantize(U, U, np.zeros(17, f32), np.zeros(17, f32)), CorruptDataError, "entries"),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("clusters", [0, 17, 2**70, 2.5, None])
def test_quantiles_of_more_clusters_than_there_can_be_are_refused(clusters: Any) -> None:
    for call in (lambda: normal_quantiles(clusters), lambda: boundaries(1.0, 1.0, 1, clusters)):
        with pytest.raises(BadArgumentError, match="clusters is"):
            call()


@pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")  # Triton 3.6's interpreter
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("state", ["warn", "raise"])
def test_boundaries_beyond_float32_go_unnoticed(back_end: BackEnd, state: Any) -> None:
    largest = np.finfo(f32).max
    x = np.array([-largest, largest, 0.0, 1e-45], f32)
    expected = oracle.cluster_quantize(x, 16)
    with np.errstate(all=state):
        found = back_end.module("cluster").cluster_quantize(back_end.array(x), 16)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(back_end.numpy(got), want, strict=True)
