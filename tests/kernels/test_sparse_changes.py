"""Sparse changes: exact against the oracle, near the bound on size, one form only."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.sparse_changes import rare_decode, rare_encode
from shrinkpoint.kernels.sparse_changes import reference as oracle

if TYPE_CHECKING:
    from .conftest import BackEnd

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def changed(rng: np.random.Generator, n: int, k: int, top: int, near: float) -> tuple[Bytes, Bytes]:
    """n expected symbols below `top` and the symbols: k changes, a share of them to a neighbour."""
    expected = rng.integers(0, top, n).astype(np.uint8)
    symbols = expected.copy()
    at = rng.choice(n, k, replace=False)
    neighbours = np.clip(expected[at].astype(np.int64) + rng.choice([-1, 1], k), 0, 255)
    others = expected[at].astype(np.int64) + rng.integers(1, 256, k)
    symbols[at] = np.where(rng.random(k) < near, neighbours, others % 256)
    return symbols, expected


@pytest.mark.parametrize("top", [1, 2, 40, 256])
def test_there_and_back(sequential_back_end: BackEnd, fresh: np.random.Generator, top: int) -> None:
    module = sequential_back_end.module("sparse_changes")
    for n in (0, 1, 2, 3, 255, 256, 1000):
        for k in sorted({0, min(1, n), min(7, n), n // 2, n}):
            for near in (0.0, 0.9, 1.0):
                symbols, expected = changed(fresh, n, k, top, near)
                own = sequential_back_end.array(expected)
                data = module.rare_encode(sequential_back_end.array(symbols), own)
                found = sequential_back_end.numpy(data)
                assert found.tobytes() == bytes(oracle.rare_encode(symbols, expected))
                back = sequential_back_end.numpy(module.rare_decode(data, own))
                np.testing.assert_array_equal(back, symbols, strict=True)


def test_oracle_on_strict(fresh: np.random.Generator) -> None:
    strict = pytest.importorskip("array_api_strict")
    symbols, expected = changed(fresh, 300, 9, 40, 0.7)
    data = oracle.rare_encode(strict.asarray(symbols), strict.asarray(expected))
    assert np.asarray(oracle.rare_decode(data, strict.asarray(expected))._array).tolist() == symbols.tolist()


@pytest.mark.parametrize(("n", "k"), [(4_000_000, 3), (4_000_000, 1000), (300_000, 100), (32_768, 275), (5_120, 37)])
def test_size_is_that_of_the_arrangements(fresh: np.random.Generator, n: int, k: int) -> None:
    """The size is log2 of the ways to place the changes, plus a few bytes."""
    symbols, expected = changed(fresh, n, k, 40, 1.0)
    arrangements = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    size = rare_encode(symbols, expected).size
    assert arrangements / 8 - 2 < size < 1.01 * (arrangements + k) / 8 + 8


def test_the_example_of_the_document() -> None:
    symbols = np.asarray([7, 7, 7, 8, 7, 7, 7, 7, 7, 2], np.uint8)
    assert bytes(rare_encode(symbols, np.full(10, 7, np.uint8))) == bytes.fromhex("09bef337")


def test_all_is_as_expected() -> None:
    expected = np.arange(256, dtype=np.uint8)
    assert rare_encode(expected, expected.copy()).size == 0
    assert rare_encode(np.empty(0, np.uint8), np.empty(0, np.uint8)).size == 0
    np.testing.assert_array_equal(rare_decode(b"", expected), expected)


def test_strided_and_read_only(fresh: np.random.Generator) -> None:
    symbols, expected = changed(fresh, 3000, 20, 40, 0.8)
    for step in (3, -1):
        data = rare_encode(symbols[::step], expected[::step])
        data.flags.writeable = False
        usual = expected[::step].copy()
        usual.flags.writeable = False
        np.testing.assert_array_equal(rare_decode(data, usual), symbols[::step])
        np.testing.assert_array_equal(usual, expected[::step])


def outcome(decode: Any, data: bytes, expected: Bytes) -> list[int] | None:
    """Return the symbols of a decoder on hostile bytes, or None for CorruptDataError."""
    try:
        return list(np.asarray(decode(np.frombuffer(data, np.uint8), expected)).tolist())
    except CorruptDataError:
        return None


def test_every_other_form_is_refused(fresh: np.random.Generator) -> None:
    """Cut, extended or flipped bytes are refused, or are the form of other symbols."""
    symbols, expected = changed(fresh, 60, 9, 40, 0.6)
    data = bytes(rare_encode(symbols, expected))
    others = [data[:k] for k in range(1, len(data))] + [data + b"\0", data + b"\1"]
    others += [data[:k] + bytes([data[k] ^ 1 << bit]) + data[k + 1 :] for k in range(len(data)) for bit in range(8)]
    accepted = 0
    for other in others:
        found = outcome(rare_decode, other, expected)
        assert found == outcome(oracle.rare_decode, other, expected)
        if found is not None:
            accepted += 1
            assert bytes(rare_encode(np.asarray(found, np.uint8), expected)) == other
    assert accepted < len(others)  # how many depends on the random draws


@given(data=st.binary(max_size=40), expected=st.binary(max_size=40))
def test_hostile_bytes(data: bytes, expected: bytes) -> None:
    usual = np.frombuffer(expected, np.uint8)
    assert outcome(rare_decode, data, usual) == outcome(oracle.rare_decode, data, usual)


def test_more_changes_than_elements_take_no_memory() -> None:
    with pytest.raises(CorruptDataError, match="the changes of 5 elements"):
        rare_decode(b"\x80\xff\xff\xff\xff", np.zeros(5, np.uint8))  # 2**31 of them and more


@pytest.mark.parametrize(
    ("symbols", "expected", "message"),
    [
        (np.zeros(3, np.uint8), np.zeros(4, np.uint8), "symbols have 3 elements and expected 4"),
        (np.zeros(3, np.int64), np.zeros(3, np.uint8), r"symbols is int64 \(3,\); uint8 of one axis is needed"),
        (np.zeros((3, 1), np.uint8), np.zeros(3, np.uint8), r"symbols is uint8 \(3, 1\); uint8 of one axis is needed"),
    ],
)
def test_bad_arguments(symbols: Any, expected: Any, message: str) -> None:
    with pytest.raises(BadArgumentError, match=message):
        rare_encode(symbols, expected)
