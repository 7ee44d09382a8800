"""Exponent buckets: counts by NumPy's frexp, values by fractions, equal on every back end."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.backend.floats import FORMATS
from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.exponent import (
    Buckets,
    exponent_buckets,
    exponent_dequantize,
    exponent_quantize,
    merge_buckets,
    promote,
)

from .patterns import array_of, random_patterns

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 5, 1000, 1025]
DTYPES = ["float16", "bfloat16", "float32", "float64"]


def expected_buckets(u: np.ndarray[Any, Any], dtype: str) -> Buckets:
    """Compute buckets element by element with Python's integers."""
    fmt = FORMATS[dtype]
    counts, lowest, highest = (np.zeros((2, 1 << fmt.exponent), np.int64) for _ in range(3))
    zeros = 0
    for pattern in u.tolist():
        sign, magnitude = pattern >> (fmt.width - 1), pattern & ((1 << (fmt.width - 1)) - 1)
        at = sign, magnitude >> fmt.mantissa
        if magnitude == 0:
            zeros += 1
            continue
        lowest[at] = min(lowest[at], magnitude) if counts[at] else magnitude
        highest[at] = max(highest[at], magnitude)
        counts[at] += 1
    return Buckets(counts, lowest, highest, zeros, dtype)


def assert_same(found: Buckets, expected: Buckets) -> None:
    for name in ("counts", "lowest", "highest"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), strict=True, err_msg=name)
    assert (found.zeros, found.format) == (expected.zeros, expected.format)
    assert isinstance(found.zeros, int)


def finite(u: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """The patterns with the lowest exponent bit cleared where all are set."""
    fmt = FORMATS[dtype]
    top = ((1 << fmt.exponent) - 1) << fmt.mantissa
    return np.where(u & u.dtype.type(top) == top, u ^ u.dtype.type(1 << fmt.mantissa), u)


@pytest.mark.parametrize("dtype", DTYPES)
def test_buckets(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    module = back_end.module("exponent")
    for n in back_end.sizes(SIZES, "exponent.COUNT"):
        u = random_patterns(fresh, dtype, n)
        u[fresh.random(n) < 0.1] = 0
        assert_same(module.exponent_buckets(array_of(back_end, u, dtype)), expected_buckets(u, dtype))
    same = np.full(300, u[0])
    assert_same(module.exponent_buckets(array_of(back_end, same, dtype)), expected_buckets(same, dtype))


@pytest.mark.parametrize("bits", [1, 3, 8, 9, 12])
@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_and_values(back_end: BackEnd, fresh: np.random.Generator, dtype: str, bits: int) -> None:
    module = back_end.module("exponent")
    fmt = FORMATS[dtype]
    for n in back_end.sizes(SIZES, "exponent.LOOK_UP"):
        u = finite(random_patterns(fresh, dtype, n), dtype)
        u[fresh.random(n) < 0.1] = 0
        promotion = promote(expected_buckets(u, dtype), bits)
        buckets = u >> u.dtype.type(fmt.mantissa)
        nonzero = u & u.dtype.type((1 << (fmt.width - 1)) - 1) != 0
        fields = 1 << fmt.exponent
        ranked = sorted(set(buckets[nonzero].tolist()), key=lambda b: (-(b % fields), b))[: 2**bits - 1]
        rank = {b: level for level, b in enumerate(ranked, 1)}
        expected = [rank.get(b, 0) if keep else 0 for b, keep in zip(buckets.tolist(), nonzero.tolist(), strict=True)]
        levels = module.exponent_quantize(array_of(back_end, u, dtype), promotion)
        narrow = np.uint8 if bits <= 8 else np.uint16
        np.testing.assert_array_equal(back_end.numpy(levels), np.array(expected, narrow), strict=True)
        values = module.exponent_dequantize(levels, promotion.codebook)
        np.testing.assert_array_equal(back_end.numpy(values), promotion.codebook[expected], strict=True)


def exact(pattern: int, dtype: str) -> Fraction:
    fmt = FORMATS[dtype]
    magnitude = pattern & ((1 << (fmt.width - 1)) - 1)
    field, mantissa = magnitude >> fmt.mantissa, magnitude & ((1 << fmt.mantissa) - 1)
    units = mantissa + (1 << fmt.mantissa if field else 0)
    value = Fraction(units) * Fraction(2) ** (max(field, 1) - 1 + fmt.lowest_exponent)
    return -value if pattern >> (fmt.width - 1) else value


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_is_the_mean_of_the_extremes(fresh: np.random.Generator, dtype: str) -> None:
    """A bucket's value is the nearest to the mean of its extremes, ties to even."""
    u = finite(random_patterns(fresh, dtype, 400), dtype)
    fmt = FORMATS[dtype]
    promotion = promote(expected_buckets(u, dtype), 8)
    for level in range(1, promotion.codebook.size):
        value = int(promotion.codebook[level])
        at = int(np.flatnonzero(promotion.table == level)[0])
        members = [exact(p, dtype) for p in u.tolist() if p >> fmt.mantissa == at and exact(p, dtype)]
        mean = (min(members) + max(members)) / 2
        off = abs(exact(value, dtype) - mean)
        for neighbour in (value - 1, value + 1):
            other = abs(exact(neighbour, dtype) - mean)
            assert off < other or (off == other and value % 2 == 0)


def test_ties_and_ranks() -> None:
    x = np.array([-4.0, -5.0, 4.0, 1.0, 1.5, -1.0, 0.5, 1e-40, 0.0, -0.0], np.float32)
    p = promote(exponent_buckets(x), 2)
    assert p.codebook.view(np.float32).tolist() == [0.0, 4.0, -4.5, 1.25]
    assert exponent_quantize(x, p).tolist() == [2, 2, 1, 3, 3, 0, 0, 0, 0, 0]
    everything = promote(exponent_buckets(x), 8)
    assert everything.codebook.view(np.float32).tolist() == [0.0, 4.0, -4.5, 1.25, -1.0, 0.5, np.float32(1e-40)]
    assert exponent_quantize(x, everything).tolist() == [2, 2, 1, 3, 3, 4, 5, 6, 0, 0]


def test_an_empty_or_zero_array_has_one_value() -> None:
    for x in (np.zeros(0, np.float32), np.zeros(9, np.float32)):
        p = promote(exponent_buckets(x), 3)
        assert p.codebook.tolist() == [0]
        assert exponent_quantize(x, p).tolist() == [0] * x.size


@pytest.mark.parametrize("dtype", DTYPES)
def test_merging_is_counting_together(fresh: np.random.Generator, dtype: str) -> None:
    u = random_patterns(fresh, dtype, 900)
    parts = [expected_buckets(part, dtype) for part in np.split(u, [0, 10, 11, 500])]
    assert_same(merge_buckets(*parts), expected_buckets(u, dtype))
    other = next(d for d in DTYPES if d != dtype)
    with pytest.raises(BadArgumentError, match=other):
        merge_buckets(parts[0], expected_buckets(np.zeros(0, np.uint64), other))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40), st.integers(1, 8))
def test_kept_values_keep_sign_and_exponent(values: list[float], bits: int) -> None:
    x = np.array(values, np.float32)
    p = promote(exponent_buckets(x), bits)
    levels = exponent_quantize(x, p)
    out = exponent_dequantize(levels, p.codebook).view(np.float32)
    kept = levels > 0
    assert (np.signbit(out[kept]) == np.signbit(x[kept])).all()
    normal = kept & (np.abs(x) >= np.finfo(np.float32).tiny)
    assert (np.frexp(out[normal])[1] == np.frexp(x[normal])[1]).all()
    assert (out[~kept] == 0).all()
    if kept.any() and not kept.all():
        assert (
            float(np.abs(x[~kept]).max()) < float(np.abs(x[kept]).min()) * 2
        )  # dropped elements are at most as large as the smallest kept exponent
    assert len(p.codebook) <= 2**bits


def test_shape_strides_and_library() -> None:
    x = torch.arange(-6.0, 6.0, dtype=torch.bfloat16, requires_grad=True).reshape(3, 4).T
    p = promote(exponent_buckets(x), 8)
    levels = exponent_quantize(x, p)
    assert (levels.dtype, levels.shape) == (torch.uint8, x.shape)
    out = exponent_dequantize(levels, p.codebook).view(torch.bfloat16)
    assert out.shape == x.shape
    assert torch.equal(torch.sign(out), torch.sign(x.detach()))
    y = np.arange(-6.0, 6.0).reshape(3, 4).T
    assert exponent_quantize(y, promote(exponent_buckets(y), 8)).tolist() == levels.tolist()
    assert exponent_quantize(np.asarray(y[1, 2]), promote(exponent_buckets(y), 8)).shape == ()


@pytest.mark.parametrize("level", [2, 255])
def test_a_level_without_entry_is_refused(back_end: BackEnd, level: int) -> None:
    levels = back_end.array(np.array([0, 1, level], np.uint8))
    with pytest.raises(CorruptDataError, match=f"level {level} .* of 2"):
        back_end.module("exponent").exponent_dequantize(levels, np.zeros(2, np.uint32))


ONES = np.ones(3, np.float32)
ONE = promote(exponent_buckets(ONES), 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exponent_buckets(np.zeros(3, int)), "int64"),
        (lambda: promote(exponent_buckets(ONES), 0), "bits is 0"),
        (lambda: promote(exponent_buckets(ONES), 13), "bits is 13"),
        (lambda: promote(exponent_buckets(np.array([1.0, np.nan, -np.inf])), 2), "2 NaNs or infinities"),
        (lambda: exponent_quantize(ONES.astype(float), ONE), "float64"),
        (lambda: exponent_dequantize(ONES, ONE.codebook), "uint8 or uint16"),
        (lambda: exponent_dequantize(np.zeros(1, np.uint8), ONES), "codebook is float32"),
        (lambda: exponent_dequantize(np.zeros(1, np.uint8), np.zeros(0, np.uint32)), "codebook"),
        (lambda: exponent_dequantize(np.zeros(1, np.uint8), np.zeros(65537, np.uint32)), "codebook"),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(BadArgumentError, match=message):
        call()
