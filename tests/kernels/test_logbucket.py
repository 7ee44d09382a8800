"""Log buckets: the same index on every back end, and the error bound they promise."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.backend.floats import FORMATS
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.histogram import bucket_index, bucket_value
from shrinkpoint.kernels.histogram import reference as oracle

if TYPE_CHECKING:
    from .conftest import BackEnd

DTYPES = ["float16", "bfloat16", "float32", "float64"]
BITS = [0, 3, 6, 99]  # the last is cut to the most there is


def bits_of(bits: int, dtype: str) -> int:
    return min(bits, FORMATS[dtype].mantissa, 18)


def patterns(rng: np.random.Generator, dtype: str, n: int) -> np.ndarray[Any, Any]:
    """n floats of random bit patterns, with the edge cases in front."""
    fmt = FORMATS[dtype]
    top = ((1 << fmt.exponent) - 1) << fmt.mantissa
    edges = [0, 1, 2, 3, (1 << fmt.mantissa) - 1, 1 << fmt.mantissa, top - 1, top, top + 1, (1 << (fmt.width - 1)) - 1]
    edges += [e | 1 << (fmt.width - 1) for e in edges]
    subnormal = rng.integers(0, 1 << fmt.mantissa, n // 4, dtype=np.uint64)
    anything = rng.integers(0, 2**fmt.width - 1, n, dtype=np.uint64, endpoint=True)
    u = np.concatenate([np.array(edges, dtype=np.uint64), subnormal, anything])[:n]
    if dtype == "bfloat16":  # as float32, which holds them exactly
        return (u.astype(np.uint32) << 16).view(np.float32)
    return u.astype(f"uint{fmt.width}").view(dtype)


def oracle_index(x: np.ndarray[Any, Any], bits: int, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bfloat16":
        return oracle.bucket_index(torch.from_numpy(x).bfloat16(), bits).numpy()  # type: ignore[no-any-return]
    return oracle.bucket_index(x.astype(dtype), bits)  # type: ignore[no-any-return]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_index_and_value_match_the_oracle(back_end: BackEnd, fresh: np.random.Generator, dtype: str, bits: int) -> None:
    bits = bits_of(bits, dtype)
    x = patterns(fresh, dtype, 3001)
    expected = oracle_index(x, bits, dtype)
    module = back_end.module("histogram")
    index = module.bucket_index(back_end.array(x, dtype), bits)
    np.testing.assert_array_equal(back_end.numpy(index), expected, strict=True)

    buckets = FORMATS[dtype].buckets(bits)
    at = np.concatenate([np.arange(-2, 3), buckets + np.arange(-40, 41), 2 * buckets + np.arange(-2, 4), expected])
    at = np.concatenate([at, [2**31 - 1, -(2**31)]]).astype(np.int32)
    values = module.bucket_value(back_end.array(at), bits, dtype)
    wanted = oracle.bucket_value(torch.from_numpy(at), bits, dtype)
    width = FORMATS[dtype].width
    got = back_end.numpy(values)
    np.testing.assert_array_equal(got.view(f"uint{width}"), wanted.view(getattr(torch, f"uint{width}")).numpy())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_relative_error_is_bounded_and_values_stay_in_their_bucket(
    fresh: np.random.Generator, dtype: str, bits: int
) -> None:
    bits = bits_of(bits, dtype)
    x = torch.from_numpy(patterns(fresh, dtype, 20_001)).to(getattr(torch, dtype))
    index = bucket_index(x, bits)
    value = bucket_value(index, bits, x.dtype)
    assert value.dtype == x.dtype
    finite = torch.isfinite(x)
    error = (value.double() - x.double()).abs()[finite]  # exact: both have at most 24 significant bits
    assert bool((error <= 2.0 ** -(bits + 1) * x.double().abs()[finite]).all())
    assert bool(torch.isnan(value[~finite]).all())
    assert torch.equal(bucket_index(value[finite], bits), index[finite])
    if bits == FORMATS[dtype].mantissa:
        assert torch.equal(value[finite], x[finite])


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 18))
def test_relative_error_of_float64(x: float, bits: int) -> None:
    value = float(bucket_value(bucket_index(np.array(x), bits), bits, np.float64))
    assert abs(Fraction(value) - Fraction(x)) <= abs(Fraction(x)) / 2 ** (bits + 1)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=2), st.integers(0, 21))
def test_index_is_monotone_and_odd(values: list[float], bits: int) -> None:
    x = np.sort(np.array(values, dtype=np.float32))
    index = bucket_index(x, bits)
    assert (np.diff(index) >= 0).all()
    np.testing.assert_array_equal(bucket_index(-x, bits), 2 * FORMATS["float32"].buckets(bits) - index)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (5, 7)])
def test_shapes_and_strides(back_end: BackEnd, fresh: np.random.Generator, shape: tuple[int, ...]) -> None:
    x = fresh.standard_normal(shape).astype(np.float32)
    module = back_end.module("histogram")
    index = module.bucket_index(back_end.array(x), 6)
    assert tuple(index.shape) == shape
    np.testing.assert_array_equal(back_end.numpy(index), oracle.bucket_index(np.asarray(x), 6))
    assert tuple(module.bucket_value(index, 6, "float32").shape) == shape
    if len(shape) == 2:
        strided = back_end.array(x).T
        np.testing.assert_array_equal(back_end.numpy(module.bucket_index(strided, 6)), back_end.numpy(index).T)


def test_bad_arguments() -> None:
    x = np.ones(2, dtype=np.float32)
    for bits in (-1, 22):
        with pytest.raises(BadArgumentError, match="bits"):
            bucket_index(x, bits)
    with pytest.raises(BadArgumentError, match="bits"):
        bucket_value(np.zeros(1, dtype=np.int32), 19, "float64")
    with pytest.raises(BadArgumentError, match="int32"):
        bucket_value(np.zeros(1, dtype=np.int64), 4, "float32")
    with pytest.raises(BadArgumentError, match="int8"):
        bucket_index(np.ones(2, dtype=np.int8), 4)
