"""Exponent buckets: counts by NumPy's frexp, values by fractions, equal on every back end."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

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
    exponent_differences,
    exponent_quantize,
    exponent_sums,
    merge_buckets,
    promote,
)
from shrinkpoint.kernels.exponent.cpu import PART

from .conftest import BackEnd
from .patterns import array_of, patterns_of, random_patterns

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
    levels, module = back_end.array(np.array([0, 1, level], np.uint8)), back_end.module("exponent")
    with pytest.raises(CorruptDataError, match=f"level {level} .* of 2"):
        module.exponent_dequantize(levels, np.zeros(2, np.uint32))
    with pytest.raises(CorruptDataError, match=f"level {level} .* of 2"):
        module.exponent_sums(back_end.array(np.ones(3), "float32"), levels, np.zeros(2, np.uint32))


def nearest(value: Fraction, dtype: str) -> int:
    """Return the pattern, without sign, that is nearest to a magnitude, halves to even."""
    fmt = FORMATS[dtype]
    unit = Fraction(2) ** fmt.lowest_exponent
    infinity = ((1 << fmt.exponent) - 1) << fmt.mantissa
    low, high = 0, infinity
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exact(middle, dtype) <= value else (low, middle)
    below = exact(low, dtype)
    above = exact(high, dtype) if high < infinity else below + max(unit, below - exact(low - 1, dtype))
    off, other = value - below, above - value
    return low if off < other or (off == other and low % 2 == 0) else high


def signed(value: Fraction, dtype: str, *, is_negative: bool) -> int:
    return nearest(abs(value), dtype) | is_negative << (FORMATS[dtype].width - 1)


def expected_sum(old: int, step: int, level: int, dtype: str) -> int:
    """Add by the definition, on fractions."""
    fmt = FORMATS[dtype]
    sign, infinity, quiet = 1 << (fmt.width - 1), ((1 << fmt.exponent) - 1) << fmt.mantissa, 1 << (fmt.mantissa - 1)
    if level == 0:
        return old
    if old & ~sign > infinity:
        return old | quiet
    infinite = [p for p in (old, step) if p & ~sign == infinity]
    if step & ~sign > infinity or len(set(infinite)) == 2:
        return sign | infinity | quiet
    if infinite:
        return infinite[0]
    total = exact(old, dtype) + exact(step, dtype)
    negative = total < 0 or (total == 0 and bool(old & step & sign))
    return signed(total, dtype, is_negative=negative)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    """All patterns are added to all, close ones too, where sums cancel or are rounded."""
    for n in (0, 1, 5, 700):
        u, codebook = random_patterns(fresh, dtype, n), random_patterns(fresh, dtype, 300)
        some = fresh.random(300) < 0.5
        codebook[some] = (u[fresh.integers(0, n, 300)] ^ fresh.integers(0, 64, 300).astype(u.dtype))[some] if n else 0
        for kind, size in ((np.uint8, 256), (np.uint16, 300)):
            levels = (fresh.integers(0, size, n) * (fresh.random(n) < 0.8)).astype(kind)
            previous, given = array_of(back_end, u, dtype), back_end.array(levels)
            found = back_end.module("exponent").exponent_sums(previous, given, codebook[:size])
            pairs = zip(u.tolist(), levels.tolist(), strict=True)
            expected = [expected_sum(old, int(codebook[level]), level, dtype) for old, level in pairs]
            np.testing.assert_array_equal(patterns_of(found), np.array(expected, u.dtype), strict=True)
            assert found.dtype == previous.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_differences(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    wide = "float32" if dtype == "float16" else dtype
    to, sign = FORMATS[wide], 1 << (FORMATS[dtype].width - 1)
    infinity = ((1 << FORMATS[dtype].exponent) - 1) << FORMATS[dtype].mantissa
    most = ((1 << to.exponent) - 1) << to.mantissa
    for n in (0, 1, 5, 700):
        u, v = random_patterns(fresh, dtype, n), random_patterns(fresh, dtype, n)
        near = fresh.random(n) < 0.5
        v[near] = u[near] ^ fresh.integers(0, 64, int(near.sum())).astype(u.dtype)
        found = back_end.module("exponent").exponent_differences(*(array_of(back_end, x, dtype) for x in (u, v)))
        expected = []
        for x, y in zip(u.tolist(), v.tolist(), strict=True):
            ends = [p for p in (x, y ^ sign) if p & ~sign >= infinity]
            if any(p & ~sign > infinity for p in ends) or len(set(ends)) == 2:
                expected.append(most)
            elif ends:
                expected.append(most | (bool(ends[0] & sign) << (to.width - 1)))
            else:
                step = exact(x, dtype) - exact(y, dtype)
                negative = step < 0 or (step == 0 and bool(x & sign) and not y & sign)
                expected.append(signed(step, wide, is_negative=negative))
        np.testing.assert_array_equal(patterns_of(found), np.array(expected, f"uint{to.width}"), strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_differences_of_several_blocks(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    """The oracle says them, which the tests above compare with the definition."""
    oracle = BackEnd("reference", "torch")
    for n in back_end.sizes([PART - 1, 2 * PART + 5], "exponent.LOOK_UP"):
        u, v, codebook = (random_patterns(fresh, dtype, size) for size in (n, n, 256))
        levels = fresh.integers(0, 256, n, dtype=np.uint8)
        found = []
        for each in (back_end, oracle):
            module, x, y = each.module("exponent"), array_of(each, u, dtype), array_of(each, v, dtype)
            sums = module.exponent_sums(x, each.array(levels), codebook)
            found.append([patterns_of(a) for a in (sums, module.exponent_differences(x, y))])
        for own, expected in zip(*found, strict=True):
            np.testing.assert_array_equal(own, expected, strict=True)


@given(st.lists(st.tuples(st.floats(width=32), st.floats(width=32)), max_size=30))
def test_a_difference_and_its_sum(pairs: list[tuple[float, float]]) -> None:
    """NumPy's own sums are the same where they are numbers."""
    x, y = np.array(pairs, np.float32).reshape(-1, 2).T
    with np.errstate(all="ignore"):
        steps, sums = x - y, x + y
    found = exponent_differences(x, y)
    assert np.array_equal(found, np.where(np.isnan(steps), np.float32(np.inf), steps))
    codebook = np.concatenate([np.zeros(1, np.float32), y]).view(np.uint32)
    out = exponent_sums(x, np.arange(1, x.size + 1).astype(np.uint8), codebook)
    assert np.array_equal(out, sums, equal_nan=True)


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
        (lambda: exponent_differences(ONES, ONES[:2]), "shape"),
        (lambda: exponent_differences(ONES, ONES.astype(float)), "float64"),
        (lambda: exponent_differences(np.ones(3, int), np.ones(3, int)), "int64"),
        (lambda: exponent_sums(ONES, np.zeros(2, np.uint8), ONE.codebook), "shape"),
        (lambda: exponent_sums(ONES, np.zeros(3, np.uint8), np.zeros(2, np.uint16)), "uint32"),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(BadArgumentError, match=message):
        call()
