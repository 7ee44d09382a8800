"""Huffman codes: exact against the oracle, optimal, and safe against hostile data."""

from __future__ import annotations

import heapq
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.huffman import (
    LIMIT,
    cpu,
    huffman_codes,
    huffman_decode,
    huffman_encode,
    huffman_lengths,
    pack_lengths,
    unpack_lengths,
)
from shrinkpoint.kernels.huffman import reference as oracle

from .hostile import outcome

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 2, 3, 4, 5, 8, 9, 511, cpu.BULK - 1, cpu.BULK, cpu.BULK + 1, 9973]

Array = np.ndarray[Any, Any]


def skewed(rng: np.random.Generator, n: int, size: int, power: float, dtype: str = "uint8") -> Array:
    """n symbols below `size`, the k-th most frequent (in random order) with weight k**-power."""
    weights = 1.0 / np.arange(1, size + 1) ** power
    return rng.permutation(size)[rng.choice(size, n, p=weights / weights.sum())].astype(dtype)


def lengths_for(symbols: Array, size: int, limit: int = 15) -> Array:
    found: Array = huffman_lengths(np.bincount(symbols, minlength=size), limit)
    return found


def fibonacci(size: int) -> Array:
    """Return counts whose optimal code has the greatest depth."""
    counts = [1, 1]
    while len(counts) < size:
        counts.append(counts[-1] + counts[-2])
    return np.asarray(counts[:size], np.int64)


# lengths and codes


@cache
def shapes(size: int, limit: int) -> list[tuple[int, ...]]:
    """Every ascending tuple of `size` lengths up to `limit` that belongs to a complete code."""
    found = []

    def extend(head: tuple[int, ...], left: int) -> None:
        if len(head) == size:
            if left == 0:
                found.append(head)
            return
        for length in range(head[-1] if head else 1, limit + 1):
            if 1 << (limit - length) <= left:
                extend((*head, length), left - (1 << (limit - length)))

    extend((), 1 << limit)
    return found


def test_lengths_are_those_of_the_oracle(sequential_back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = sequential_back_end.module("huffman")
    for size, limit in ((1, 1), (2, 1), (3, 2), (18, 5), (18, 15), (64, 6), (200, 24), (300, 9)):
        for high in (2, 10, 10**12):
            counts = fresh.integers(0, high, size)
            expected = oracle.huffman_lengths(counts, limit)
            found = sequential_back_end.numpy(module.huffman_lengths(sequential_back_end.array(counts), limit))
            np.testing.assert_array_equal(found, expected, strict=True)


@given(st.lists(st.integers(1, 60) | st.integers(1, 10**6), min_size=2, max_size=7), st.integers(3, 7))
def test_lengths_are_optimal(counts: list[int], limit: int) -> None:
    found = huffman_lengths(np.asarray(counts, np.int64), limit)
    descending = sorted(counts, reverse=True)
    best = min(sum(c * x for c, x in zip(descending, shape, strict=True)) for shape in shapes(len(counts), limit))
    assert int((found * np.asarray(counts)).sum()) == best
    assert found.max() <= limit
    assert (0.5**found).sum() == 1.0


def test_without_a_limit_as_good_as_huffman(fresh: np.random.Generator) -> None:
    for size in (2, 17, 256, 3000):
        counts = fresh.integers(1, 1000, size)
        heap = counts.tolist()
        heapq.heapify(heap)
        cost = 0
        while len(heap) > 1:
            pair = heapq.heappop(heap) + heapq.heappop(heap)
            cost += pair
            heapq.heappush(heap, pair)
        assert int((huffman_lengths(counts, 24) * counts).sum()) == cost


def test_ties_and_special_alphabets() -> None:
    assert huffman_lengths(np.asarray([0, 0, 7])).tolist() == [0, 0, 1]
    assert huffman_lengths(np.asarray([0, 0, 0])).tolist() == [0, 0, 0]
    assert huffman_lengths(np.asarray([5])).tolist() == [1]
    assert huffman_lengths(np.asarray([1, 1, 1])).tolist() == [2, 2, 1]  # the first two are paired first
    assert huffman_lengths(fibonacci(30), 24).max() == 24
    assert huffman_lengths(fibonacci(30), 15).max() == 15


def test_the_greatest_alphabet(fresh: np.random.Generator) -> None:
    counts = fresh.integers(0, 10**6, 65536)
    for limit in (16, 24):
        lengths = huffman_lengths(counts, limit)
        assert (0.5 ** lengths[counts > 0].astype(np.float64)).sum() == 1.0
        assert (lengths[counts == 0] == 0).all()
        assert lengths.max() <= limit
        p = counts[counts > 0] / counts.sum()
        mean = (lengths * counts).sum() / counts.sum()
        entropy = -(p * np.log2(p)).sum()
        assert entropy <= mean <= entropy + (0.3 if limit == 16 else 0.05)  # at 16 there is only one code


def test_codes(sequential_back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = sequential_back_end.module("huffman")
    for size in (1, 2, 3, 18, 256):
        lengths = huffman_lengths(fresh.integers(0, 50, size), 12)
        codes = sequential_back_end.numpy(module.huffman_codes(sequential_back_end.array(lengths)))
        np.testing.assert_array_equal(codes, oracle.huffman_codes(lengths), strict=True)
        present = np.flatnonzero(lengths)
        order = present[np.lexsort((present, lengths[present]))]
        strings = [format(codes[s], f"0{lengths[s]}b") for s in order]
        assert strings == sorted(strings)  # canonical: in the order of the bits, no code before its prefix
        assert not any(b.startswith(a) for a, b in pairwise(strings))


# symbols


@pytest.mark.parametrize(("size", "dtype"), [(2, "uint8"), (18, "uint8"), (256, "uint8"), (700, "uint16")])
@pytest.mark.parametrize("streams", [1, 4, 5])
def test_bytes_and_back(
    sequential_back_end: BackEnd, fresh: np.random.Generator, size: int, dtype: str, streams: int
) -> None:
    module = sequential_back_end.module("huffman")
    slow = sequential_back_end.name == "reference"
    for n in SIZES[: -4 if slow else None]:
        symbols = skewed(fresh, n, size, fresh.uniform(0, 3), dtype)
        lengths = lengths_for(symbols, size)
        expected = oracle.huffman_encode(symbols, lengths, streams=streams)
        given_lengths = sequential_back_end.array(lengths)
        data = module.huffman_encode(sequential_back_end.array(symbols), given_lengths, streams=streams)
        np.testing.assert_array_equal(sequential_back_end.numpy(data), expected, strict=True)
        back = module.huffman_decode(data, given_lengths, n, dtype, streams=streams)
        np.testing.assert_array_equal(sequential_back_end.numpy(back), symbols, strict=True)


@pytest.mark.parametrize(
    ("size", "dtype", "power", "n"),
    [
        (18, "uint8", 4.0, 50_000),  # seven symbols a look-up
        (256, "uint8", 1.3, 50_000),  # now and then a code longer than a look-up
        (3000, "uint16", 1.2, 50_000),
        (9000, "uint16", 0.0, 150_000),  # most codes are longer: the wide look-up
        (65536, "uint16", 0.6, 150_000),
    ],
)
def test_bulk(fresh: np.random.Generator, size: int, dtype: str, power: float, n: int) -> None:
    symbols = skewed(fresh, n, size, power, dtype)
    lengths = lengths_for(symbols, size, 24)
    for streams in (1, 4):
        data = huffman_encode(symbols, lengths, streams=streams)
        np.testing.assert_array_equal(data, oracle.huffman_encode(symbols, lengths, streams=streams))
        np.testing.assert_array_equal(huffman_decode(data, lengths, n, dtype, streams=streams), symbols, strict=True)


def test_codes_of_every_length(fresh: np.random.Generator) -> None:
    counts = fibonacci(25)
    lengths = huffman_lengths(counts, LIMIT)
    assert sorted(set(lengths.tolist())) == list(range(1, LIMIT + 1))
    for dtype in ("uint8", "uint16"):
        for n in (60, 30_000):
            symbols = fresh.integers(0, 25, n).astype(dtype)
            data = huffman_encode(symbols, lengths)
            np.testing.assert_array_equal(data, oracle.huffman_encode(symbols, lengths))
            np.testing.assert_array_equal(huffman_decode(data, lengths, n, dtype), symbols)


def test_one_symbol_takes_a_bit() -> None:
    lengths = np.asarray([0, 0, 1], np.uint8)
    for n in (1, 7, 40, 9000):
        symbols = np.full(n, 2, np.uint8)
        data = huffman_encode(symbols, lengths, streams=1)
        assert data.tolist() == [0] * ((n + 7) // 8)
        assert huffman_decode(data, lengths, n, streams=1).tolist() == [2] * n
        assert huffman_decode(huffman_encode(symbols, lengths), lengths, n).tolist() == [2] * n
        data[n // 9] |= 0x80
        assert outcome(huffman_decode, data, lengths, n, streams=1) is None  # the code 1 belongs to nothing


@pytest.mark.parametrize("longest", [14, 15])  # four symbols a step, two symbols a step
def test_a_symbol_without_a_code_is_found_anywhere(longest: int) -> None:
    lengths = np.asarray([longest, 0, *range(1, longest + 1)], np.uint8)
    for at in range(7):
        symbols = np.full(7, 2, np.uint8)
        symbols[at] = 1
        with pytest.raises(BadArgumentError):
            huffman_encode(symbols, lengths, streams=1)


def test_strided_read_only_and_bytes(fresh: np.random.Generator) -> None:
    symbols = skewed(fresh, 9000, 18, 1.0)
    lengths = lengths_for(symbols, 18)
    data = huffman_encode(symbols[::-2], lengths)
    np.testing.assert_array_equal(data, huffman_encode(symbols[::-2].copy(), lengths))
    np.testing.assert_array_equal(huffman_decode(data.tobytes(), lengths, 4500), symbols[::-2])
    symbols.flags.writeable = lengths.flags.writeable = False
    np.testing.assert_array_equal(huffman_decode(huffman_encode(symbols, lengths), lengths, 9000), symbols)


@given(st.lists(st.integers(0, 300), max_size=300), st.integers(9, 24), st.integers(1, 9))
def test_any_symbols(symbols: list[int], limit: int, streams: int) -> None:
    array = np.asarray(symbols, np.uint16)
    lengths = lengths_for(array, 301, limit)
    data = huffman_encode(array, lengths, streams=streams)
    assert huffman_decode(data, lengths, len(symbols), "uint16", streams=streams).tolist() == symbols
    np.testing.assert_array_equal(unpack_lengths(pack_lengths(lengths), 301), lengths, strict=True)


# hostile data


@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize(("size", "dtype"), [(5, "uint8"), (300, "uint16")])
def test_truncated_and_flipped(fresh: np.random.Generator, streams: int, size: int, dtype: str) -> None:
    """Every truncation, flip and extension is refused or read as the oracle reads it."""
    n = 41
    symbols = skewed(fresh, n, size, 1.0, dtype)
    lengths = lengths_for(symbols, size)
    data = huffman_encode(symbols, lengths, streams=streams).tobytes()
    hostile = [data[:k] for k in range(len(data))] + [data + b"\0", data + b"\x80", b"\x80" * 20, b"\xff" * 40]
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        hostile.append(bytes(changed))
    for wrong in hostile:
        array = np.frombuffer(wrong, np.uint8)
        for count in (n, n - 1, n + 1, 0):
            found = outcome(huffman_decode, wrong, lengths, count, dtype, streams=streams)
            assert found == outcome(oracle.huffman_decode, array, lengths, count, dtype, streams=streams)
            assert found is None or len(found) == count
            if found is not None:  # nothing is read that would not have been written
                again = huffman_encode(np.asarray(found, dtype), lengths, streams=streams)
                assert again.tobytes() == wrong


def test_sizes_have_one_form(sequential_back_end: BackEnd) -> None:
    """A size in a longer form, without an end, or beyond the data is refused."""
    module = sequential_back_end.module("huffman")
    lengths = np.asarray([1, 2, 2], np.uint8)
    data = huffman_encode(np.asarray([0, 1, 2, 1] * 1000, np.uint8), lengths).tobytes()
    assert data[0] >= 128 > data[1]
    for head in (
        bytes([data[0], data[1] | 128, 0]),
        bytes([data[0], data[1] | 128, 128, 0]),
        b"\xff" * 20,
        b"\xff" * 8 + b"\x7f",
        bytes([data[0] | 127, data[1] | 127]),
    ):
        wrong = sequential_back_end.array(np.frombuffer(head + data[2:], np.uint8))
        with pytest.raises(CorruptDataError):
            module.huffman_decode(wrong, sequential_back_end.array(lengths), 4000)


@pytest.mark.parametrize(("size", "dtype"), [(18, "uint8"), (256, "uint8"), (700, "uint16")])
def test_flipped_in_bulk(fresh: np.random.Generator, size: int, dtype: str) -> None:
    n = 6000
    symbols = skewed(fresh, n, size, 1.0, dtype)
    lengths = lengths_for(symbols, size, 24)
    data = huffman_encode(symbols, lengths)
    for k in range(40):
        wrong = data.copy()
        wrong[fresh.integers(data.size) if k % 4 else fresh.integers(6)] ^= 1 << fresh.integers(8)
        wrong = wrong[: fresh.integers(data.size)] if k % 5 == 0 else wrong
        found = outcome(huffman_decode, wrong, lengths, n, dtype)
        assert found == outcome(oracle.huffman_decode, wrong, lengths, n, dtype)
        assert found is None or len(found) == n


@given(st.binary(max_size=40), st.integers(0, 60), st.integers(1, 5))
def test_any_bytes(data: bytes, n: int, streams: int) -> None:
    lengths = np.asarray([2, 1, 0, 4, 4, 3], np.uint8)
    array = np.frombuffer(data, np.uint8)
    found = outcome(huffman_decode, data, lengths, n, streams=streams)
    assert found == outcome(oracle.huffman_decode, array, lengths, n, streams=streams)


def test_incomplete_and_overfull_codes(sequential_back_end: BackEnd) -> None:
    module = sequential_back_end.module("huffman")
    data = sequential_back_end.array(np.zeros(10, np.uint8))
    for wrong in ([1, 2], [1, 1, 1], [2], [1, 2, 3, 3, 24], [25, 1], [255] * 3, [1, 2, 3, 4, 5, 6]):
        lengths = sequential_back_end.array(np.asarray(wrong, np.uint8))
        with pytest.raises(CorruptDataError):
            module.huffman_decode(data, lengths, 3)
        for call in (
            lambda lengths=lengths: module.huffman_codes(lengths),
            lambda lengths=lengths: module.huffman_encode(data, lengths),
            lambda lengths=lengths: module.pack_lengths(lengths),
        ):
            with pytest.raises(BadArgumentError):
                call()
    with pytest.raises(CorruptDataError):
        module.huffman_decode(data, sequential_back_end.array(np.zeros(4, np.uint8)), 3)


# tables


def test_tables_are_those_of_the_oracle(sequential_back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = sequential_back_end.module("huffman")
    for size in (1, 2, 3, 18, 256, 2000):
        for high in (1, 2, 3, 1000):
            lengths = huffman_lengths(fresh.integers(0, high, size) * fresh.integers(0, 2, size), 20)
            data = module.pack_lengths(sequential_back_end.array(lengths))
            assert data == oracle.pack_lengths(lengths)
            back = module.unpack_lengths(sequential_back_end.array(np.frombuffer(data, np.uint8)), size)
            np.testing.assert_array_equal(sequential_back_end.numpy(back), lengths, strict=True)


def test_documented_bytes() -> None:
    """The examples of docs/entropy.md are right."""
    lengths = np.asarray([1, 2, 0, 3, 3], np.uint8)
    assert huffman_codes(lengths).tolist() == [0b0, 0b10, 0, 0b110, 0b111]
    assert huffman_encode(np.asarray([0, 0, 1, 4], np.uint8), lengths, streams=1).tobytes().hex() == "2e"
    assert huffman_encode(np.asarray([0, 0, 1, 4], np.uint8), lengths).tobytes().hex() == "010101000080e0"
    assert pack_lengths(lengths).hex() == "d5f2"


def test_tables_are_small() -> None:
    counts = np.zeros(18, np.int64)
    assert pack_lengths(huffman_lengths(counts)) == b""
    counts[0] = 1
    assert len(pack_lengths(huffman_lengths(counts))) <= 2
    counts[[3, 17]] = 90, 4
    assert len(pack_lengths(huffman_lengths(counts))) <= 4
    assert len(pack_lengths(np.full(256, 8, np.uint8))) <= 66
    assert len(pack_lengths(np.full(65536, 16, np.uint8))) <= (2 * 65536) // 8 + 4


def test_hostile_tables(fresh: np.random.Generator) -> None:
    lengths = huffman_lengths(fresh.integers(0, 40, 12) * fresh.integers(0, 2, 12))
    data = pack_lengths(lengths)
    hostile = [data[:k] for k in range(len(data))] + [data + bytes([k]) for k in range(256)]
    hostile += [bytes([k]) for k in range(256)] + [bytes(8), b"\xff" * 8, b"\xff" * 300]
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << (bit % 8)
        hostile.append(bytes(changed))
    for wrong in hostile:
        for size in (12, 11, 1, 40):
            found = outcome(unpack_lengths, wrong, size)
            assert found == outcome(oracle.unpack_lengths, np.frombuffer(wrong, np.uint8), size)
            if found is not None:
                assert len(found) == size
                assert pack_lengths(np.asarray(found, np.uint8)) == wrong


@given(st.binary(max_size=12), st.integers(1, 70))
def test_any_table(data: bytes, size: int) -> None:
    found = outcome(unpack_lengths, data, size)
    assert found == outcome(oracle.unpack_lengths, np.frombuffer(data, np.uint8), size)


def test_bad_arguments() -> None:
    symbols, lengths = np.asarray([0, 1, 3], np.uint8), np.asarray([1, 2, 2], np.uint8)
    for call in (
        lambda: huffman_lengths(np.asarray([1, -1])),
        lambda: huffman_lengths(np.asarray([2**56, 1])),
        lambda: huffman_lengths(np.ones(3, np.int64), 1),
        lambda: huffman_lengths(np.ones(3, np.int64), 25),
        lambda: huffman_lengths(np.ones(3)),
        lambda: huffman_lengths(np.zeros(0, np.int64)),
        lambda: huffman_codes(lengths.astype(np.int64)),
        lambda: huffman_encode(symbols, lengths),  # 3 is beyond the alphabet
        lambda: huffman_encode(np.asarray([1], np.uint8), np.asarray([1, 0, 1], np.uint8)),  # 1 has no code
        lambda: huffman_encode(symbols[:2], lengths, streams=0),
        lambda: huffman_encode(symbols.astype(np.uint32), lengths),
        lambda: huffman_decode(b"", lengths, -1),
        lambda: huffman_decode(b"", lengths, 1, "uint32"),
        lambda: huffman_decode(b"", np.full(512, 9, np.uint8), 1),  # uint8 cannot hold 256
        lambda: unpack_lengths(b"", 0),
        lambda: unpack_lengths(b"", 65537),
    ):
        with pytest.raises(BadArgumentError):
            call()


@pytest.mark.parametrize("n", [1, 8, 5000])
def test_a_table_without_codes_reads_nothing(sequential_back_end: BackEnd, n: int) -> None:
    """A table without codes is an error before any look-up."""
    data = sequential_back_end.array(np.full(n, 0xFF, np.uint8))
    lengths = sequential_back_end.array(np.zeros(256, np.uint8))
    with pytest.raises(CorruptDataError):
        sequential_back_end.module("huffman").huffman_decode(data, lengths, n)
