"""Symbols in matrices: savings, any shape, whole states, and damaged streams."""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.codec import entropy
from shrinkpoint.codec.entropy import Matrix, Numbers
from shrinkpoint.codec.errors import CorruptDataError
from shrinkpoint.codec.format.fields import Writer

from .. import second_reader
from .common import small_chunks, threads

NpArray = np.ndarray[Any, Any]


@pytest.fixture(name="fresh")
def _fresh() -> np.random.Generator:
    return np.random.default_rng(7)


def planted(rng: np.random.Generator, rows: int, columns: int, strength: float = 1.5, uneven: float = 0.0) -> NpArray:
    """Return int64 numbers near an outer product, whose noise differs between rows and columns."""
    shape = (rows, 1), (1, columns)
    left, right = (rng.standard_normal(s) for s in shape)
    scales = [np.exp(uneven * rng.standard_normal(s)) for s in shape]
    found = strength * left * right + 0.4 * scales[0] * scales[1] * rng.standard_normal((rows, columns))
    return np.clip(np.rint(found), -90, 90).astype(np.int64).reshape(-1)


def symbols_of(numbers: NpArray, kind: Numbers, origin: int | NpArray) -> NpArray:
    """Return the symbols of numbers by the definition of their kind."""
    if kind is Numbers.ALTERNATING:
        return np.where(numbers >= 0, 2 * numbers + 1, -2 * numbers).astype(np.uint8)
    return (numbers + origin).astype(np.uint8)


def both_read(data: bytes, n: int, context: NpArray | None = None, contexts: int = 0) -> NpArray:
    """Decode with the product and the second reader, which must agree."""
    found = entropy.decode(memoryview(data), n, context, contexts)
    second = second_reader.Source(data).symbols(n, None if context is None else context.astype(int), contexts)
    assert found.tolist() == second.tolist()
    return found


def coded(numbers: NpArray, kind: Numbers, matrix: Matrix) -> tuple[bytes, NpArray, NpArray | None]:
    """Code numbers of this kind; return bytes, symbols and context."""
    if kind is Numbers.RELATIVE:
        context = (np.arange(numbers.size) * 7 % 200).astype(np.uint8)
        symbols = symbols_of(numbers, kind, context)
        return entropy.encode_levels(symbols, 256, context, 256, "smallest", matrix), symbols, context
    symbols = symbols_of(numbers, kind, 100)
    return entropy.encode(symbols, None, matrix), symbols, None


@pytest.mark.parametrize("kind", list(Numbers))
@pytest.mark.parametrize(("strength", "uneven"), [(1.5, 0.0), (0.0, 1.2), (1.5, 1.2)])
def test_structure_saves_bytes(fresh: np.random.Generator, kind: Numbers, strength: float, uneven: float) -> None:
    numbers = planted(fresh, 90, 120, strength, uneven)
    data, symbols, context = coded(numbers, kind, Matrix(120, 0, (), kind))
    alone, _, _ = coded(numbers, kind, Matrix())
    assert data[0] == entropy.MATRIX
    assert len(data) < 0.92 * len(alone)
    np.testing.assert_array_equal(both_read(data, symbols.size, context, 256), symbols)


@pytest.mark.parametrize("kind", list(Numbers))
def test_noise_is_coded_without_its_place(fresh: np.random.Generator, kind: Numbers) -> None:
    for rows, columns in ((50, 100), (400, 1000), (4000, 2), (2, 4000)):
        numbers = planted(fresh, rows, columns, 0.0)
        assert coded(numbers, kind, Matrix(columns, 0, (), kind))[0] == coded(numbers, kind, Matrix())[0]


@given(
    seed=st.integers(0, 2**32 - 1),
    heights=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    columns=st.integers(1, 60),
    cut=st.integers(0, 10**4),
    strength=st.sampled_from([0.0, 2.0, 30.0]),
    kind=st.sampled_from(list(Numbers)),
)
def test_any_shape_comes_back_and_is_not_larger(
    seed: int, heights: list[int], columns: int, cut: int, strength: float, kind: Numbers
) -> None:
    rng = np.random.default_rng(seed)
    numbers = np.concatenate([planted(rng, rows, columns, strength, 1.0) for rows in heights])
    start = cut if len(heights) == 1 else 0
    if start:  # a part of a matrix begins and ends within a row
        numbers = numbers[start % columns : numbers.size - start % 5]
    matrix = Matrix(columns, start, tuple(heights) if len(heights) > 1 else (), kind)
    data, symbols, context = coded(numbers, kind, matrix)
    assert data == coded(numbers.copy(), kind, matrix)[0]
    assert len(data) <= len(coded(numbers, kind, Matrix())[0]) + 4
    np.testing.assert_array_equal(entropy.decode(memoryview(data), symbols.size, context, 256), symbols)


@pytest.mark.parametrize(("rows", "columns"), [(1, 2**16), (2**16, 1), (255, 257), (256, 256), (257, 256), (2**15, 4)])
def test_sizes_next_to_powers_of_two(fresh: np.random.Generator, rows: int, columns: int) -> None:
    numbers = planted(fresh, rows, columns)
    for kind in Numbers:
        data, symbols, context = coded(numbers, kind, Matrix(columns, 0, (), kind))
        np.testing.assert_array_equal(entropy.decode(memoryview(data), symbols.size, context, 256), symbols)


def states() -> list[dict[str, Any]]:
    """Return AdamW states of a small layer."""
    rng, shape, found = np.random.default_rng(3), (150, 70), []
    w, m, v = rng.standard_normal(shape), np.zeros(shape), np.zeros(shape)
    for step in range(30):
        g = planted(rng, *shape, 1.0, 0.5).reshape(shape)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w - 5e-3 * m / np.sqrt(v + 1e-12)
        if step % 10 == 9:
            entry = {"exp_avg": torch.from_numpy(m).float(), "exp_avg_sq": torch.from_numpy(v).float()}
            state = {0: {"step": torch.tensor(float(step)), **entry}}
            found.append({"model": {"fc.weight": torch.from_numpy(w).float()}, "optimizer": {"state": state}})
    return found


def test_chains_have_the_same_bytes_on_any_number_of_threads() -> None:
    """Chunks within rows, a base and two deltas: bytes do not depend on threads, and states come back."""
    found = []
    with small_chunks(4000):
        for count in (1, 4):
            chain: list[sp.Checkpoint] = []
            with threads(count):
                for state in states():
                    chain.append(sp.compress(state, chain[-1] if chain else None))
            found.append([ckpt.to_bytes() for ckpt in chain])
        assert found[0] == found[1]
        previous = None
        for blob, ckpt in zip(found[0], chain, strict=True):
            previous = sp.Checkpoint.from_bytes(blob, prev=previous)
            restored, right = sp.decompress(previous), sp.decompress(ckpt)
            assert torch.equal(restored["model"]["fc.weight"], right["model"]["fc.weight"])
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(*(s["optimizer"]["state"][0][name] for s in (restored, right)))


# ------------------------------------------------------------------------------------------------ hostile bytes


def test_damaged_bytes_are_an_error_or_as_many_symbols(fresh: np.random.Generator) -> None:
    for kind in Numbers:
        data, symbols, context = coded(planted(fresh, 40, 64, 1.5, 1.0), kind, Matrix(64, 0, (), kind))
        assert data[0] == entropy.MATRIX
        for at in range(min(len(data), 120)):
            for put in (b"\x00", b"\x01", b"\x7f", b"\xff", bytes([data[at] ^ 1]), b"\xff" * 8 + b"\x7f"):
                with contextlib.suppress(CorruptDataError):
                    damaged = data[:at] + put + data[at + 1 :]
                    assert entropy.decode(memoryview(damaged), symbols.size, context, 256).shape == symbols.shape
        for end in [*range(120), len(data) - 1]:
            with pytest.raises(CorruptDataError):
                entropy.decode(memoryview(data[:end]), symbols.size, context, 256)
        with pytest.raises(CorruptDataError):
            entropy.decode(memoryview(data + b"\0\0"), symbols.size, context, 256)


def header(numbers: tuple[int, ...], rest: bytes = b"\2\2") -> bytes:
    out = Writer()
    for number in (entropy.MATRIX, *numbers):
        out.varint(number)
    out.raw(rest)
    return out.done()


HUGE = 2**56


@pytest.mark.parametrize(
    "fields",  # kind, usual, columns, phase, matrices, heights ...
    [
        (3, 0, 4, 0, 1),
        (2, 0, 4, 0, 1),
        (0, 0, 0, 0, 1),
        (0, 0, 13, 0, 1),
        (0, 0, HUGE, 0, 1),
        (0, 0, 4, 4, 1),
        (0, 0, 4, HUGE, 1),
        (0, 0, 4, 0, 0),
        (0, 0, 4, 0, 4),
        (0, 0, 4, 0, HUGE),
        (0, 0, 4, 0, 2, 1, 1),
        (0, 0, 4, 0, 2, 3, 0),
        (0, 0, 4, 0, 2, HUGE, 2),
        (0, 0, 4, 1, 2, 1, 3),
        (0, 0, 5, 0, 2, 1, 2),
    ],
)
def test_each_field_out_of_range(fields: tuple[int, ...]) -> None:
    with pytest.raises(CorruptDataError, match="matrix"):
        entropy.decode(memoryview(header(fields)), 12)


def test_relative_numbers_need_a_parent(fresh: np.random.Generator) -> None:
    for kind in Numbers:
        data, symbols, _ = coded(planted(fresh, 40, 64), kind, Matrix(64, 0, (), kind))
        other = None if kind is Numbers.RELATIVE else symbols
        with pytest.raises(CorruptDataError, match="need a parent"):
            entropy.decode(memoryview(data), symbols.size, other, 256)


@pytest.mark.parametrize("rank", [9, 255])
def test_ranks_and_classes_out_of_range(rank: int) -> None:
    with pytest.raises(CorruptDataError, match=f"rank {rank}"):
        entropy.decode(memoryview(header((0, 0, 4, 0, 1), b"\1" + bytes([rank]))), 12)
    for classes in (b"\0", b"\1", b"\x81\2", b"\xff\xff\3", b"\4\x80\2"):
        with pytest.raises(CorruptDataError, match="classes"):
            entropy.decode(memoryview(header((0, 0, 4, 0, 1), b"\2" + classes + b"\0")), 12)
    for form in (b"\0", b"\3", b"\xff"):
        with pytest.raises(CorruptDataError, match="form"):
            entropy.decode(memoryview(header((0, 0, 4, 0, 1), form)), 12)


def test_no_memory_that_the_symbols_do_not_admit_to() -> None:
    """Decoding allocates some bytes a symbol, whatever the header says."""
    n = 1 << 18
    constant = bytes([2, entropy.CONSTANT])
    tracemalloc.start()
    try:
        for columns in (1, n, n // 2 + 1):
            factors = b"\1\x08" + constant + b"\xff"
            with contextlib.suppress(CorruptDataError):
                entropy.decode(memoryview(header((0, 0, columns, columns - 1, 1), factors)), n)
        assert tracemalloc.get_traced_memory()[1] < 100 * n + (1 << 26)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("nested", [0, 1])
def test_streams_inside_are_not_of_this_method(nested: int) -> None:
    """Factors and classes cannot nest, so that no reader recurses."""
    data = header((0, 0, 4, 0, 1))
    for _ in range(500):
        out = Writer()
        out.raw(header((0, 0, 4, 0, 1), bytes([1 + nested])))
        if nested:
            out.varint(2)
            out.varint(0)
        out.block(data)
        data = out.done()
    with pytest.raises(CorruptDataError):
        entropy.decode(memoryview(data), 12)
