"""Octaves: both back ends alike, and the inverse exact."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels import octaves as public
from shrinkpoint.kernels.cpu import octaves as cpu
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.reference import octaves as reference


@st.composite
def indices(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    bits = draw(st.integers(0, 16))
    octaves = draw(st.sampled_from([1, 40, 254, 277, 2098]))
    buckets = octaves << bits
    n = draw(st.integers(0, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    low = int(rng.integers(0, max(1, octaves - 250)))
    j = rng.integers(low << bits, min(buckets, (low + 250) << bits) + 1, n)
    index = buckets + np.where(rng.random(n) < 0.5, -j, j)
    index[rng.random(n) < 0.05] = buckets
    index[rng.random(n) < 0.05] = 2 * buckets + 1
    return index.astype(np.int32), bits, buckets


@given(indices())
def test_back_ends_agree_and_the_inverse_is_exact(case: tuple[np.ndarray, int, int]) -> None:
    index, bits, buckets = case
    got, oracle = cpu.split_octaves(index, bits, buckets), reference.split_octaves(index, bits, buckets)
    assert got is not None
    assert oracle is not None
    assert (got.low, got.high) == (oracle.low, oracle.high)
    for name in ("symbols", "negative", "fraction", "odd"):
        np.testing.assert_array_equal(getattr(got, name), getattr(oracle, name), err_msg=name)
    finite = np.where(index == 2 * buckets + 1, buckets, index)
    np.testing.assert_array_equal(cpu.join_octaves(got, bits, buckets), finite)
    np.testing.assert_array_equal(reference.join_octaves(got, bits, buckets), finite)


def test_too_many_octaves_are_reported() -> None:
    buckets = 300
    index = np.array([buckets + 1, buckets + 255], np.int32)
    for module in (cpu, reference):
        assert module.split_octaves(index, 0, buckets) is None
        assert module.split_octaves(index - np.array([0, 1], np.int32), 0, buckets) is not None


def test_bad_arguments() -> None:
    with pytest.raises(BadArgumentError, match="bits"):
        public.split_octaves(np.zeros(3, np.int32), 17, 10)
    with pytest.raises(BadArgumentError, match="int32"):
        public.split_octaves(np.zeros(3, np.int64), 1, 10)
    octaves = public.split_octaves(np.array([3, 30], np.int32), 1, 20)
    assert octaves is not None
    broken = public.Octaves(0, 3, np.zeros(2, np.uint8), octaves.negative, octaves.fraction, octaves.odd)
    with pytest.raises(BadArgumentError, match="nonzero"):
        public.join_octaves(broken, 1, 20)


def test_a_number_of_buckets_that_compares_with_nothing_is_refused() -> None:
    # With it the two passes disagree on what is finite, and the second writes beyond what the first has counted.
    index = np.arange(5, dtype=np.int32)
    octaves = public.split_octaves(index, 4, 10)
    for buckets in (float("nan"), 2.5, -1, 2**30, None, np.array([4, 5])):
        with pytest.raises(BadArgumentError, match="buckets"):
            public.split_octaves(index, 4, buckets)  # type: ignore[arg-type]
        with pytest.raises(BadArgumentError, match="buckets"):
            public.join_octaves(octaves, 4, buckets)  # type: ignore[arg-type]


def test_streams_that_are_no_bytes_are_refused() -> None:
    octaves = public.split_octaves(np.arange(5, dtype=np.int32), 4, 10)
    assert octaves is not None
    for name, value in (
        ("symbols", octaves.symbols.astype(np.int64)),
        ("symbols", octaves.symbols[None]),
        ("negative", octaves.negative.tolist()),
        ("fraction", octaves.fraction[0]),
        ("low", -1),
        ("low", 2**40),
        ("low", 1.5),
    ):
        with pytest.raises(BadArgumentError, match=f"octaves.{name}"):
            public.join_octaves(dataclasses.replace(octaves, **{name: value}), 4, 10)
