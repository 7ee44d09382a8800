"""Symbols to bytes: which coder is chosen, what is not counted, and writers in writers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.codec import entropy, exact
from shrinkpoint.codec.base import Codec, Leaf
from shrinkpoint.codec.changed import Changed
from shrinkpoint.codec.fields import Reader, Writer, parts_of
from shrinkpoint.codec.kinds import Kind
from shrinkpoint.codec.leaves import LeafSpec
from shrinkpoint.codec.streams import STREAMS


@pytest.fixture(name="fresh")
def _fresh() -> np.random.Generator:
    return np.random.default_rng(7)


def decoded(data: bytes, n: int) -> np.ndarray:
    return entropy.decode(memoryview(data), n)


@pytest.mark.parametrize("n", [entropy.SAMPLE * 4 - 1, entropy.SAMPLE * 4, 300_001])
def test_noise_is_stored_and_what_is_nearly_noise_is_coded(fresh: np.random.Generator, n: int) -> None:
    noise = fresh.integers(0, 256, n, dtype=np.uint8)
    data = entropy.encode(noise)
    assert data[0] == entropy.STORED
    assert len(data) == n + 1
    np.testing.assert_array_equal(decoded(data, n), noise)
    # 240 of 256 symbols take 7.91 bits: one percent less, which a code gets.
    fewer = (noise.astype(np.uint16) * 240 >> 8).astype(np.uint8)
    data = entropy.encode(fewer)
    assert data[0] != entropy.STORED
    assert len(data) < 0.995 * n
    np.testing.assert_array_equal(decoded(data, n), fewer)


def test_noise_in_a_part_is_not_taken_for_noise(fresh: np.random.Generator) -> None:
    symbols = fresh.integers(0, 256, 200_000, dtype=np.uint8)
    symbols[120_000:150_000] = 7
    data = entropy.encode(symbols)
    assert len(data) < 0.95 * symbols.size
    np.testing.assert_array_equal(decoded(data, symbols.size), symbols)


@given(st.lists(st.binary(max_size=9) | st.integers(4000, 9000).map(lambda n: bytes([n % 256]) * n), max_size=8))
def test_writers_in_writers_are_what_their_bytes_are(fields: list[bytes]) -> None:
    flat, nested = Writer(), Writer()
    inner = Writer()
    for field in fields:
        flat.raw(field)
        inner.raw(np.frombuffer(field, np.uint8))
        inner.varint(len(field))
        flat.varint(len(field))
    assert len(inner) == len(flat) == len(flat.done())
    nested.block(inner)
    nested.raw(inner)
    assert len(nested) == len(nested.done())
    reader = Reader(nested.done(), "test")
    assert bytes(reader.block()) == flat.done()
    assert bytes(reader.rest()) == flat.done()


@pytest.mark.parametrize("codec", [exact.Exact(), Changed(), Changed("published")], ids=str)
def test_what_is_stored_does_not_refer_to_the_callers_array(fresh: np.random.Generator, codec: Codec) -> None:
    data = fresh.integers(0, 256, 100_000, dtype=np.uint8)
    spec = LeafSpec("numpy", "uint8", (data.size,))
    kept = data.copy()
    stored = codec.encode(Leaf("x", "x", spec, Kind("other", "state"), data), None, None)
    data[:] = 0
    pieces = [memoryview(b"".join(parts_of(piece))) for piece in stored.pieces]
    memory = STREAMS[stored.stream](spec, stored.meta, pieces, None, None)
    np.testing.assert_array_equal(memory.values(spec), kept)
