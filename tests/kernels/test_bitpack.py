"""Fixed-width packing: exact against the oracle and against integers written in base two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.bitpack import pack_bits, unpack_bits
from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.reference import bitpack as oracle

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 2, 7, 8, 9, 31, 64, 65, 501]
DTYPES = ["uint8", "uint16", "uint32"]

Values = np.ndarray[Any, Any]


def drawn(rng: np.random.Generator, n: int, width: int, dtype: str) -> Values:
    """n values of `width` bits, the smallest and the greatest among them."""
    top = (1 << width) - 1
    values = rng.integers(0, top, n, dtype=np.uint64, endpoint=True)
    return np.where(rng.random(n) < 0.2, rng.choice(np.asarray([0, top], np.uint64), n), values).astype(dtype)


def long_number(values: Values, width: int) -> list[int]:
    """The definition: one long integer, the first value lowest, cut into bytes."""
    number = sum(int(v) << (width * i) for i, v in enumerate(values))
    return list(number.to_bytes((values.size * width + 7) // 8, "little"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(sequential_back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    module = sequential_back_end.module("bitpack")
    for width in range(int(dtype[4:]) + 1):
        for n in SIZES if width in (1, 3, 8) else fresh.choice(SIZES, 2).tolist():
            values = drawn(fresh, n, width, dtype)
            data = module.pack_bits(sequential_back_end.array(values), width)
            found = sequential_back_end.numpy(data)
            np.testing.assert_array_equal(found, np.asarray(long_number(values, width), np.uint8), strict=True)
            back = sequential_back_end.numpy(module.unpack_bits(data, width, n, dtype))
            np.testing.assert_array_equal(back, values, strict=True)


def test_oracle_on_strict(fresh: np.random.Generator) -> None:
    strict = pytest.importorskip("array_api_strict")
    for width in (0, 1, 5, 16):
        values = drawn(fresh, 77, width, "uint16")
        data = oracle.pack_bits(strict.asarray(values), width)
        assert np.asarray(data._array).tolist() == long_number(values, width)
        assert np.asarray(oracle.unpack_bits(data, width, 77, "uint16")._array).tolist() == values.tolist()


def test_strided_read_only_and_bytes(fresh: np.random.Generator) -> None:
    values = drawn(fresh, 300, 5, "uint8")
    data = pack_bits(values[::-3], 5)
    assert data.tolist() == long_number(values[::-3], 5)
    np.testing.assert_array_equal(unpack_bits(data.tobytes(), 5, 100), values[::-3])
    np.testing.assert_array_equal(unpack_bits(np.repeat(data, 2)[::2], 5, 100), values[::-3])
    values.flags.writeable = False
    np.testing.assert_array_equal(unpack_bits(pack_bits(values, 5), 5, 300), values)


@given(st.integers(0, 32), st.lists(st.integers(0, 2**32 - 1), max_size=70))
def test_any_values(width: int, values: list[int]) -> None:
    array = np.asarray([v % 2**width for v in values], np.uint32)
    np.testing.assert_array_equal(unpack_bits(pack_bits(array, width), width, len(values), "uint32"), array)


@given(st.binary(max_size=24), st.integers(0, 16), st.integers(0, 40))
def test_any_bytes(data: bytes, width: int, n: int) -> None:
    array = np.frombuffer(data, np.uint8)
    try:
        expected = oracle.unpack_bits(array, width, n, "uint16").tolist()
    except CorruptDataError:
        with pytest.raises(CorruptDataError):
            unpack_bits(data, width, n, "uint16")
        return
    found = unpack_bits(data, width, n, "uint16")
    assert found.tolist() == expected
    assert pack_bits(found, width).tobytes() == data


def test_truncated_extended_and_trailing_bits() -> None:
    for width, n in ((1, 5), (3, 11), (7, 9), (12, 3)):
        data = pack_bits(np.zeros(n, np.uint16), width)
        for size in range(data.size):
            with pytest.raises(CorruptDataError):
                unpack_bits(data[:size], width, n, "uint16")
        with pytest.raises(CorruptDataError):
            unpack_bits(data.tobytes() + b"\0", width, n, "uint16")
        for bit in range(8 * data.size):
            flipped = data.copy()
            flipped[bit // 8] ^= 1 << (bit % 8)
            if bit < n * width:
                assert unpack_bits(flipped, width, n, "uint16")[bit // width] == 1 << (bit % width)
            else:
                with pytest.raises(CorruptDataError):
                    unpack_bits(flipped, width, n, "uint16")


def test_bad_arguments(sequential_back_end: BackEnd) -> None:
    module = sequential_back_end.module("bitpack")
    for width in (0, 3, 7):
        with pytest.raises(BadArgumentError):
            module.pack_bits(sequential_back_end.array(np.asarray([0, 1 << width], np.uint8)), width)
    values = np.zeros(3, np.uint8)
    for call in (
        lambda: pack_bits(values, 33),
        lambda: pack_bits(values, -1),
        lambda: pack_bits(np.zeros(3, np.int64), 3),
        lambda: pack_bits(np.zeros((3, 3), np.uint8), 3),
        lambda: unpack_bits(values, 9, 1),
        lambda: unpack_bits(values, 17, 1, "uint16"),
        lambda: unpack_bits(values, 8, -1),
        lambda: unpack_bits(values, 8, 3, "int8"),
        lambda: unpack_bits(np.zeros(3, np.uint16), 8, 3),
    ):
        with pytest.raises(BadArgumentError):
            call()
