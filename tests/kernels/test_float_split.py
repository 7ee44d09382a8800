"""Octaves: all back ends alike, and the inverse exact."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels import scales as public
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.histogram import bucket_index
from shrinkpoint.kernels.scales import cpu, reference

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 2, 255, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097]
STREAMS = ("symbols", "negative", "fraction")

Indices = np.ndarray[Any, np.dtype[np.int32]]


def drawn(rng: np.random.Generator, n: int, bits: int, octaves: int, density: float = 0.9) -> Indices:
    """Indices over as many octaves as a byte can hold, with zeros and not finite elements."""
    buckets = octaves << bits
    low = int(rng.integers(0, max(1, octaves - 250)))
    j = rng.integers(low << bits, min(buckets, (low + 250) << bits) + 1, n)
    index = buckets + np.where(rng.random(n) < 0.5, -j, j)
    index[rng.random(n) >= density] = buckets
    index[rng.random(n) < 0.05] = 2 * buckets + 1
    return index.astype(np.int32)


def assert_same(found: public.Octaves | None, expected: public.Octaves | None) -> None:
    assert found is not None
    assert expected is not None
    assert (found.low, found.high) == (expected.low, expected.high)
    for name in (*STREAMS, "odd"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name, strict=True)


def beside(back_end: BackEnd, octaves: public.Octaves) -> public.Octaves:
    """The streams where this back end joins them."""
    if back_end.name != "gpu":
        return octaves
    return dataclasses.replace(octaves, **{name: back_end.array(getattr(octaves, name)) for name in STREAMS})


def finite(index: Indices, buckets: int) -> Indices:
    """Indices after a round trip: zero's index for elements that are not finite."""
    return np.where(index == 2 * buckets + 1, np.int32(buckets), index)


@pytest.mark.parametrize("bits", [0, 1, 7, 8, 9, 16])
def test_everything_matches_the_oracle(back_end: BackEnd, fresh: np.random.Generator, bits: int) -> None:
    module = back_end.module("scales")
    octaves = int(fresh.choice([1, 40, 254, 277, 2098]))
    buckets = octaves << bits
    for n in back_end.sizes(SIZES, "scales.SPLIT", "scales.JOIN"):
        index = drawn(fresh, n, bits, octaves, float(fresh.choice([0.02, 0.5, 0.95, 1.0])))
        found = module.split_octaves(back_end.array(index), bits, buckets)
        assert_same(found, reference.split_octaves(index, bits, buckets))
        joined = module.join_octaves(beside(back_end, found), bits, buckets)
        np.testing.assert_array_equal(back_end.numpy(joined), finite(index, buckets), strict=True)


@pytest.mark.parametrize("fill", ["zeros", "not finite", "lowest", "highest", "negative"])
def test_all_equal(back_end: BackEnd, fill: str) -> None:
    module, bits, buckets = back_end.module("scales"), 3, 277 << 3
    value = {"zeros": buckets, "not finite": 2 * buckets + 1, "lowest": buckets + 1, "highest": 2 * buckets}
    index = np.full(2051, value.get(fill, 0), np.int32)
    found = module.split_octaves(back_end.array(index), bits, buckets)
    assert_same(found, reference.split_octaves(index, bits, buckets))
    joined = module.join_octaves(beside(back_end, found), bits, buckets)
    np.testing.assert_array_equal(back_end.numpy(joined), finite(index, buckets))


def test_strides(back_end: BackEnd, fresh: np.random.Generator) -> None:
    if back_end.library == "strict":
        pytest.skip("the array API standard has no strides")
    index = drawn(fresh, 3000, 6, 277)
    found = back_end.module("scales").split_octaves(back_end.array(index)[1::3], 6, 277 << 6)
    assert_same(found, reference.split_octaves(index[1::3], 6, 277 << 6))


def test_any_bytes_are_joined_alike(back_end: BackEnd, fresh: np.random.Generator) -> None:
    """Invalid signs, fractions and octaves give the same indices in every back end."""
    for bits in (0, 3, 11, 16):
        symbols = fresh.integers(0, 256, 3000).astype(np.uint8)
        m = int(np.count_nonzero(symbols))
        streams = fresh.integers(0, 256, (1 + (bits + 7) // 8, m)).astype(np.uint8)
        for low in (0, 200, 2**30 - 1):
            octaves = public.Octaves(low, low, symbols, streams[0], streams[1:], np.empty(0, np.int64))
            joined = back_end.module("scales").join_octaves(beside(back_end, octaves), bits, 277 << bits)
            np.testing.assert_array_equal(
                back_end.numpy(joined), reference.join_octaves(octaves, bits, 277 << bits), strict=True
            )


@given(st.integers(0, 16), st.sampled_from([1, 40, 254, 277, 2098]), st.integers(0, 300), st.integers(0, 2**32))
def test_the_inverse_is_exact(bits: int, octaves: int, n: int, seed: int) -> None:
    index = drawn(np.random.default_rng(seed), n, bits, octaves)
    buckets = octaves << bits
    got = cpu.split_octaves(index, bits, buckets)
    assert_same(got, reference.split_octaves(index, bits, buckets))
    assert got is not None
    np.testing.assert_array_equal(cpu.join_octaves(got, bits, buckets), finite(index, buckets))
    np.testing.assert_array_equal(reference.join_octaves(got, bits, buckets), finite(index, buckets))


def test_too_many_octaves_are_reported(back_end: BackEnd) -> None:
    split = back_end.module("scales").split_octaves
    index = np.array([301, 555], np.int32)
    assert split(back_end.array(index), 0, 300) is None
    assert split(back_end.array(index - np.array([0, 1], np.int32)), 0, 300) is not None


def test_public_functions_take_arrays_on_a_gpu(device: str, fresh: np.random.Generator) -> None:
    x = torch.from_numpy(fresh.normal(size=1000).astype(np.float32)).to(device)
    buckets = 277 << 9
    index = bucket_index(x, 9)
    octaves = public.split_octaves(index, 9, buckets)
    assert octaves is not None
    assert_same(octaves, reference.split_octaves(index.cpu().numpy(), 9, buckets))
    there = dataclasses.replace(
        octaves, **{name: torch.tensor(getattr(octaves, name), device=device) for name in STREAMS}
    )
    joined = public.join_octaves(there, 9, buckets)
    assert joined.device.type == device
    assert torch.equal(joined, index)
    for broken in (
        dataclasses.replace(there, negative=octaves.negative),
        dataclasses.replace(there, negative=there.negative[1:]),
        dataclasses.replace(there, fraction=there.fraction[:, 1:]),
        dataclasses.replace(there, symbols=there.symbols.to(torch.int8)),
    ):
        with pytest.raises(BadArgumentError):
            public.join_octaves(broken, 9, buckets)


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
    for bits in (0, 9):
        with pytest.raises(BadArgumentError, match="planes"):
            public.join_octaves(octaves, bits, 20)


def test_a_number_of_buckets_that_compares_with_nothing_is_refused() -> None:
    # With it the two passes disagree on which elements are finite, and the second writes beyond the first one's count.
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
