"""Fixed-width packing: exact against the oracle and against integers written in base two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.packing import cpu as compiled
from shrinkpoint.kernels.packing import pack_bits, unpack_bits
from shrinkpoint.kernels.packing import reference as oracle

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
def test_every_width(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    module = back_end.module("packing")
    for width in range(int(dtype[4:]) + 1):
        for n in SIZES if width in (1, 3, 8) else fresh.choice(SIZES, 2).tolist():
            values = drawn(fresh, n, width, dtype)
            data = module.pack_bits(back_end.array(values), width)
            found = back_end.numpy(data)
            np.testing.assert_array_equal(found, np.asarray(long_number(values, width), np.uint8), strict=True)
            back = back_end.numpy(module.unpack_bits(data, width, n, dtype))
            np.testing.assert_array_equal(back, values, strict=True)


@pytest.mark.parametrize(("dtype", "width"), [("uint8", 3), ("uint8", 8), ("uint16", 11), ("uint32", 32)])
def test_sizes_around_a_block(back_end: BackEnd, fresh: np.random.Generator, dtype: str, width: int) -> None:
    """Sizes around a GPU block: 1,024 words or 2,048 values."""
    module = back_end.module("packing")
    packed = 1024 // width * 32
    for size in (1024, 2048, packed, 3 * packed):
        for n in (size - 1, size, size + 1):
            values = drawn(fresh, n, width, dtype)
            data = module.pack_bits(back_end.array(values), width)
            np.testing.assert_array_equal(back_end.numpy(data), compiled.pack_bits(values, width), strict=True)
            np.testing.assert_array_equal(
                back_end.numpy(module.unpack_bits(data, width, n, dtype)), values, strict=True
            )


def test_strides_and_any_start_in_memory(back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = back_end.module("packing")
    for dtype, width in (("uint8", 5), ("uint16", 9), ("uint32", 31)):
        values = drawn(fresh, 300, width, dtype)
        data = module.pack_bits(back_end.array(values)[1::3], width)
        assert back_end.numpy(data).tolist() == long_number(values[1::3], width)
        for start in range(1, 6):
            behind = back_end.array(np.concatenate([np.full(start, 255, np.uint8), back_end.numpy(data)]))[start:]
            np.testing.assert_array_equal(
                back_end.numpy(module.unpack_bits(behind, width, 100, dtype)), values[1::3], strict=True
            )


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


def test_truncated_extended_and_trailing_bits(back_end: BackEnd) -> None:
    unpack = back_end.module("packing").unpack_bits
    for width, n in ((1, 5), (3, 11), (7, 9), (12, 3)):
        data = compiled.pack_bits(np.zeros(n, np.uint16), width)
        for size in range(data.size):
            with pytest.raises(CorruptDataError):
                unpack(back_end.array(data[:size]), width, n, "uint16")
        with pytest.raises(CorruptDataError):
            unpack(back_end.array(np.append(data, np.uint8(0))), width, n, "uint16")
        for bit in range(8 * data.size):
            flipped = data.copy()
            flipped[bit // 8] ^= 1 << (bit % 8)
            if bit < n * width:
                found = back_end.numpy(unpack(back_end.array(flipped), width, n, "uint16"))
                assert found[bit // width] == 1 << (bit % width)
            else:
                with pytest.raises(CorruptDataError):
                    unpack(back_end.array(flipped), width, n, "uint16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_of_too_many_bits_is_found_wherever_it_is(
    back_end: BackEnd, fresh: np.random.Generator, dtype: str
) -> None:
    pack = back_end.module("packing").pack_bits
    for width in {0, 1, 3, 7, int(dtype[4:]) - 1}:
        for at in (0, 1, 31, 32, 77, int(fresh.integers(100)), 99):
            values = drawn(fresh, 100, width, dtype)
            values[at] = 1 << width if at % 2 else (1 << int(dtype[4:])) - 1
            with pytest.raises(BadArgumentError, match=f"width of {width}"):
                pack(back_end.array(values), width)


def test_public_functions_stay_on_the_device(device: str, fresh: np.random.Generator) -> None:
    values = drawn(fresh, 100, 6, "uint8")
    data = pack_bits(torch.from_numpy(values).to(device), 6)
    assert data.device.type == device
    assert data.tolist() == long_number(values, 6)
    back = unpack_bits(data, 6, 100)
    assert back.device.type == device
    assert back.tolist() == values.tolist()


def test_bad_arguments() -> None:
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
