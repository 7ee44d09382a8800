"""Every lossless stage keeps every bit pattern of every width: bases, deltas, chunk boundaries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec import entropy

from .common import bits, difference, small_chunks, threads

DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "S3",
    "S5",
]
SIZES = [0, 1, 2, 15, 16, 17, 63, 65, 257, 1023, 1024, 1025, 4097]


def pattern(rng: np.random.Generator, dtype: str, n: int, how: str) -> np.ndarray[Any, Any]:
    """n values whose bit patterns are random, constant, few, small or ascending."""
    width = np.dtype(dtype).itemsize
    if how == "random":
        raw = rng.integers(0, 256, n * width, dtype=np.uint8)
    elif how == "constant":
        raw = np.full(n * width, rng.integers(0, 256), np.uint8)
    elif how == "few":
        raw = rng.choice(rng.integers(0, 256, 3, dtype=np.uint8), n * width, p=[0.9, 0.07, 0.03]).astype(np.uint8)
    elif how == "ascending":
        raw = (np.arange(n * width) // width % 256).astype(np.uint8)
    else:
        raw = (rng.standard_normal(n * width) * 3).astype(np.int8).view(np.uint8)
    return raw % 2 == 1 if dtype == "bool" else raw.view(dtype)


def changed(rng: np.random.Generator, x: np.ndarray[Any, Any], share: float) -> np.ndarray[Any, Any]:
    raw = x.copy().view(np.uint8)
    where = rng.random(raw.size) < share
    raw[where] = raw[where] ^ rng.integers(0, 256, int(where.sum()), dtype=np.uint8)
    return raw % 2 == 1 if x.dtype == bool else raw.view(x.dtype)


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(DTYPES),
    st.sampled_from(SIZES),
    st.sampled_from(["random", "constant", "few", "small", "ascending"]),
    st.lists(st.sampled_from([0.0, 0.001, 0.3, 1.0]), max_size=3),
    st.booleans(),
    st.sampled_from([64, 1024, 1 << 22]),
)
def test_every_bit_survives(
    seed: int, dtype: str, n: int, how: str, changes: list[float], torches: bool, chunk: int
) -> None:
    """A base and a chain of deltas, each read from its bytes; small chunks put their boundaries inside."""
    rng = np.random.default_rng(seed)
    x = pattern(rng, dtype, n, how)
    cfg = sp.presets.lossless()
    prev = read = None
    with small_chunks(chunk):
        for share in [0.0, *changes]:
            x = changed(rng, x, share)
            value = torch.from_numpy(x.copy()) if torches and not dtype.startswith("S") else x
            before = bits(value)
            ckpt = sp.compress({"x": value}, prev, cfg)
            assert bits(value) == before
            read = sp.Checkpoint.from_bytes(ckpt.to_bytes(), read)
            back = sp.decompress(read)["x"]
            assert back.dtype == value.dtype
            assert bits(back) == before
            assert ckpt.summary()[0].error == 0
            prev = ckpt


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_patterns_of_sixteen_bits(dtype: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(getattr(torch, dtype))
    cfg = sp.presets.lossless()
    base = sp.compress([x, x.flip(0)], cfg=cfg)
    delta = sp.compress([x.flip(0), x], base, cfg)
    read = sp.Checkpoint.from_bytes(base.to_bytes())
    assert difference([x, x.flip(0)], sp.decompress(read)) == ""
    assert difference([x.flip(0), x], sp.decompress(sp.Checkpoint.from_bytes(delta.to_bytes()), read)) == ""


def test_special_values_keep_their_bits() -> None:
    nan = np.array(
        [0x7FC00001, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x80000000, 0, 1, 0x80000001], np.uint32
    )
    x = np.resize(nan, 3000).view(np.float32)
    for cfg in (sp.presets.lossless(), sp.Config([("*", sp.Exact())])):
        base = sp.compress([x, torch.from_numpy(x[:7])], cfg=cfg)
        assert difference([x, torch.from_numpy(x[:7])], sp.decompress(sp.Checkpoint.from_bytes(base.to_bytes()))) == ""


def test_lossless_makes_deltas_small_and_bases_no_larger_than_needed() -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal(100_000).astype("f4")
    cfg = sp.presets.lossless()
    base = sp.compress([w], cfg=cfg)
    assert base.nbytes < 0.9 * w.nbytes
    assert sp.compress([w], base, cfg).nbytes < 1000
    assert sp.compress([np.nextafter(w, np.float32(9))], base, cfg).nbytes < w.nbytes / 16
    noise = rng.integers(0, 256, 100_000, dtype=np.uint8)
    assert sp.compress([noise], cfg=cfg).nbytes < noise.nbytes + 500
    other = sp.compress([rng.integers(0, 256, 100_000, dtype=np.uint8)], sp.compress([noise], cfg=cfg), cfg)
    assert other.nbytes < noise.nbytes + 500


symbols = st.tuples(
    st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 2, 15, 16, 17, 100, 1000, 5000]), st.integers(1, 256)
)


def draw(case: tuple[int, int, int], skew: float) -> np.ndarray[Any, np.dtype[np.uint8]]:
    seed, n, size = case
    rng = np.random.default_rng(seed)
    return np.minimum(size * rng.random(n) ** skew, size - 1).astype(np.uint8)


@given(symbols, st.sampled_from([1.0, 3.0, 30.0]))
def test_symbols_without_a_context(case: tuple[int, int, int], skew: float) -> None:
    x = draw(case, skew)
    for encode in (entropy.encode, entropy.encode_huffman, entropy.encode_published):
        data = encode(x)
        assert np.array_equal(entropy.decode(memoryview(data), x.size), x)
        assert len(data) <= max(x.size, 1) + 1 or encode is not entropy.encode
        assert encode(x.copy()) == data


@given(symbols, st.integers(2, 256), st.sampled_from([0.0, 0.01, 0.5, 1.0]), st.sampled_from(["smallest", "published"]))
def test_levels_in_the_context_of_their_parents(
    case: tuple[int, int, int], parent_size: int, share: float, coder: str
) -> None:
    seed, n, size = case
    size = max(size, 2)
    rng = np.random.default_rng(seed)
    parent = rng.integers(0, parent_size, n).astype(np.uint8)
    levels = np.where(rng.random(n) < share, rng.integers(0, size, n), np.minimum(parent, size - 1)).astype(np.uint8)
    data = entropy.encode_levels(levels, size, parent, parent_size, coder)
    back = entropy.decode(memoryview(data), n, parent, parent_size)
    assert np.array_equal(back, levels)


def test_real_chunk_size_and_one_element_more() -> None:
    """Arrays beyond one chunk, in each stream format, alike on one thread and on two."""
    n = (1 << 22) + 1
    rng = np.random.default_rng(0)
    w = (rng.standard_normal(1000).astype("f4")[rng.integers(0, 1000, n)] * np.float32(0.1)).astype("f4")
    state = {"w": torch.from_numpy(w), "o": {"0": {"exp_avg": torch.from_numpy(w[::-1].copy())}}, "i": np.arange(n)}
    with threads(1):
        one = sp.compress(state)
    with threads(2):
        two = sp.compress(state)
        back = sp.decompress(sp.Checkpoint.from_bytes(one.to_bytes()))
    assert one.to_bytes() == two.to_bytes()
    assert difference([state["i"]], [back["i"]]) == ""
    assert float((back["w"] - state["w"]).norm() / state["w"].norm()) < 0.1
    m, x = back["o"]["0"]["exp_avg"].double(), state["o"]["0"]["exp_avg"].double()
    assert bool(((m - x).abs() <= 0.25 * x.abs()).all())
