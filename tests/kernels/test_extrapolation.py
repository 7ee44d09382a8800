"""Extrapolation: one written order of operations, the same bits in every back end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shrinkpoint.kernels.backend.widen import widened
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.rate_distortion import extrapolate

from .conftest import STRICT_SHAPES, BackEnd, strict_array
from .patterns import array_of, assert_same_bits, random_patterns

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the oracle overflows on purpose
FLOATS = ("float16", "bfloat16", "float32", "float64")
SIZES = [0, 1, 7, 1000, 1023, 1024, 1025]
WIDENED = (1 << 16) + 1025
"""More than one block of what the CPU widens at a time."""


def values_of(patterns: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return numbers of these patterns; bfloat16 as float32."""
    if dtype == "bfloat16":
        return (patterns.astype(np.uint32) << 16).view(np.float32)
    return patterns.view(dtype)


def expected(x: np.ndarray[Any, Any], earlier: np.ndarray[Any, Any], factor: float) -> np.ndarray[Any, Any]:
    """Compute the extrapolation with NumPy, one operation after another."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    with np.errstate(all="ignore"):
        own, before = x.astype(wide), earlier.astype(wide)
        way = own - before
        way *= wide(factor)
        far = own + way
    return np.where(np.isfinite(far), far, np.where(np.isnan(own), wide(np.nan), own))


@pytest.mark.parametrize("earlier_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_agrees_with_the_written_order(
    back_end: BackEnd, dtype: str, earlier_dtype: str, fresh: np.random.Generator
) -> None:
    """Results equal the written order of operations for any patterns."""
    sizes = [*SIZES, WIDENED] if back_end.name == "cpu" else SIZES
    for n in back_end.sizes(sizes, "rate_distortion.ELEMENTS"):
        u, v = random_patterns(fresh, dtype, n), random_patterns(fresh, earlier_dtype, n)
        x, earlier = values_of(u, dtype), values_of(v, earlier_dtype)
        arrays = array_of(back_end, u, dtype), array_of(back_end, v, earlier_dtype)
        for factor in (0.0, 0.1, float(np.finfo(np.float32).max)):
            found = back_end.module("rate_distortion").extrapolate(*arrays, factor)
            assert_same_bits(back_end, found, expected(x, earlier, factor))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_is_fused(back_end: BackEnd, dtype: str, fresh: np.random.Generator) -> None:
    """No fused multiply-add changes the last bit."""
    x = fresh.normal(size=20001).astype(dtype)
    earlier = (x + fresh.normal(size=x.size) * 0.01).astype(dtype)
    found = back_end.module("rate_distortion").extrapolate(back_end.array(x), back_end.array(earlier), 1.1)
    want = expected(x, earlier, 1.1)
    assert_same_bits(back_end, found, want)
    if dtype == "float32":
        wide = (x - earlier).astype(np.float64) * np.float64(np.float32(1.1))
        assert ((x.astype(np.float64) + wide).astype(np.float32) != want).mean() > 0.001


def test_what_is_not_finite_stays_what_x_is(back_end: BackEnd) -> None:
    largest = float(np.finfo(np.float32).max)
    x = np.array([np.nan, np.inf, -np.inf, largest, -largest, 2.0, 2.0, -0.0, 1e-45], np.float32)
    earlier = np.array([1.0, 1.0, np.inf, -largest, 0.0, np.nan, -np.inf, -0.0, 2.8e-45], np.float32)
    found = back_end.module("rate_distortion").extrapolate(back_end.array(x), back_end.array(earlier), 2.0)
    want = np.array([np.nan, np.inf, -np.inf, largest, -largest, 2.0, 2.0, 0.0, -1.4e-45], np.float32)
    assert_same_bits(back_end, found, want)


def test_what_is_wider_is_rounded_first(back_end: BackEnd) -> None:
    x, earlier = back_end.array(np.float32([1.0, 1.0])), back_end.array(np.array([1.0 + 2.0**-30, 1e300]))
    found = back_end.module("rate_distortion").extrapolate(x, earlier, 2.0**20)
    assert_same_bits(back_end, found, np.float32([1.0, 1.0]))


def test_shapes_and_strides(back_end: BackEnd, fresh: np.random.Generator) -> None:
    x, earlier = fresh.normal(size=(2, 34, 50)).astype(np.float32)
    cut = [back_end.array(a)[::2, 3::5] for a in (x, earlier)]
    assert_same_bits(
        back_end, back_end.module("rate_distortion").extrapolate(*cut, 0.5), expected(x, earlier, 0.5)[::2, 3::5]
    )
    for shape in STRICT_SHAPES:
        x, earlier = np.asarray(fresh.normal(size=shape)), np.asarray(fresh.normal(size=shape))
        found = back_end.module("rate_distortion").extrapolate(back_end.array(x), back_end.array(earlier), 0.5)
        assert_same_bits(back_end, found, np.asarray(expected(x, earlier, 0.5)))


@pytest.mark.parametrize("shape", STRICT_SHAPES)
def test_arrays_that_are_only_standard(shape: tuple[int, ...], fresh: np.random.Generator) -> None:
    x, earlier = np.asarray(fresh.normal(size=shape)), np.asarray(fresh.normal(size=shape))
    found = extrapolate(strict_array(x), strict_array(earlier), 0.5)
    assert type(found).__module__.startswith("array_api_strict")
    np.testing.assert_array_equal(np.asarray(found._array), extrapolate(x, earlier, 0.5))


def test_arrays_stay_as_they_are_and_the_result_is_new(device: str, fresh: np.random.Generator) -> None:
    x = torch.from_numpy(fresh.normal(size=1000)).to(device)
    earlier = x.clone()
    found = extrapolate(x, earlier, 0.0)
    found += 1
    assert torch.equal(x, earlier)
    assert found.device == x.device


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf"), 1e39])
def test_a_factor_out_of_range(factor: float) -> None:
    with pytest.raises(BadArgumentError, match=r"factor is .*; it must be a number in \[0, 3.40282e\+38\]"):
        extrapolate(np.zeros(2), np.zeros(2), factor)


def test_shapes_and_dtypes_that_do_not_fit() -> None:
    with pytest.raises(BadArgumentError, match=r"earlier is float64 \(3,\); .* of shape \(2,\) is needed"):
        extrapolate(np.zeros(2), np.zeros(3), 1.0)
    for x, earlier in ((np.zeros(2, int), np.zeros(2)), (np.zeros(2), np.zeros(2, bool))):
        with pytest.raises(BadArgumentError, match="float16 or bfloat16 or float32 or float64"):
            extrapolate(x, earlier, 1.0)


@pytest.mark.filterwarnings("error")
def test_nothing_warns() -> None:
    with np.errstate(all="warn"):
        assert extrapolate(np.float32([3e38, 1.0]), np.array([-3e38, 1e300]), 3e38).tolist() == [np.float32(3e38), 1.0]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_each_16_bit_float_is_widened_exactly(dtype: str) -> None:
    u = np.arange(1 << 16, dtype=np.uint16)
    given = u if dtype == "bfloat16" else u.view(np.float16)
    want = values_of(u, dtype).astype(np.float32)
    for buffer in (None, np.empty(u.size + 3, np.float32)):
        found = widened(given, dtype, buffer)
        assert (found.dtype, found.shape) == (np.float32, u.shape)
        nan = np.isnan(want)
        np.testing.assert_array_equal(found.view(np.uint32)[~nan], want.view(np.uint32)[~nan])
        assert np.isnan(found[nan]).all()
    assert widened(want, "float32") is want
