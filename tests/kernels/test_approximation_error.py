"""Distortion: sums and the largest relative error, for all dtypes, over finite elements."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shrinkpoint.kernels.error_sums import Distortion, distortion
from shrinkpoint.kernels.errors import BadArgumentError

from .conftest import STRICT_SHAPES, BackEnd, strict_array

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # inf - inf, on purpose


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_sums_and_largest(back_end: BackEnd, dtype: str, fresh: np.random.Generator) -> None:
    for n in back_end.sizes([0, 1, 3, 127, 128, 129, 1000], "error_sums.SUMS"):
        x = back_end.array(fresh.normal(size=n), dtype)
        y = back_end.array(fresh.normal(size=n), dtype)
        got = back_end.module("error_sums").distortion(x, y)
        a, b = (_wide(back_end.numpy(v), dtype) for v in (x, y))
        assert got.squared_error == pytest.approx(((b - a) ** 2).sum(), rel=1e-12)
        assert got.squared_norm == pytest.approx((a * a).sum(), rel=1e-12)
        assert got.largest_relative == pytest.approx((np.abs(b - a) / np.abs(a)).max() if n else 0.0, rel=1e-12)


def _wide(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        x = (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float64)


def test_what_is_not_finite_and_zeros(back_end: BackEnd) -> None:
    module = back_end.module("error_sums")
    x = back_end.array([1.0, np.nan, np.inf, -np.inf, 0.0, 2.0], "float32")
    y = back_end.array([1.5, 0.0, np.inf, 0.0, 0.0, 2.0], "float32")
    assert module.distortion(x, y) == Distortion(0.25, 5.0, 0.5)
    zero = module.distortion(back_end.array([0.0], "float32"), back_end.array([1.0], "float32"))
    assert math.isinf(zero.largest_relative)
    assert math.isinf(zero.relative_l2)


@pytest.mark.parametrize("at", [0, 1, 3, 5000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nan_in_what_is_finite_is_told(back_end: BackEnd, dtype: str, at: int) -> None:
    x = np.ones(6000)
    y = x + 0.25
    y[at] = np.nan
    found = back_end.module("error_sums").distortion(back_end.array(x, dtype), back_end.array(y, dtype))
    assert math.isnan(found.largest_relative)
    assert math.isnan(found.relative_l2)
    fine = Distortion(1.0, 1.0, 0.5)
    assert math.isnan((fine + found).largest_relative)
    assert math.isnan((found + fine).largest_relative)


def test_shapes_must_match() -> None:
    with pytest.raises(BadArgumentError, match="shape"):
        distortion(np.zeros(2), np.zeros(3))


def test_parts_add_up() -> None:
    assert Distortion(1.0, 2.0, 0.5) + Distortion(2.0, 2.0, 0.25) == Distortion(3.0, 4.0, 0.5)
    assert Distortion(0.0, 0.0, 0.0).relative_l2 == 0.0
    assert 0.0 < Distortion(0.0, 1.0, 0.5).relative_l2 < 1e-300  # something differs, and its square underflows
    assert math.isinf(distortion(np.zeros(2), np.full(2, 1e-200)).relative_l2)


@pytest.mark.parametrize("shape", STRICT_SHAPES)
def test_arrays_that_are_only_standard(shape: tuple[int, ...], fresh: np.random.Generator) -> None:
    x, y = np.asarray(fresh.normal(size=shape)), np.asarray(fresh.normal(size=shape))
    assert distortion(strict_array(x), strict_array(y)) == distortion(x, y)


def test_dtypes_of_other_kinds_are_refused() -> None:
    for x, y in ((np.zeros(2, int), np.zeros(2)), (np.zeros(2), np.zeros(2, bool)), (np.zeros(2), np.zeros(2, ">f8"))):
        with pytest.raises(BadArgumentError, match="float16 or bfloat16 or float32 or float64"):
            distortion(x, y)
