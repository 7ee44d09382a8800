"""Magnitude categories: exact against oracle and definition, for every width."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.planes import VALUE_WIDTHS as WIDTHS
from shrinkpoint.kernels.planes import category_count, join_categories, most_bits, split_categories
from shrinkpoint.kernels.planes import reference as oracle

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 2, 63, 511, 512, 513, 1024, 1301]
CASES = [(dtype, bits) for dtype in WIDTHS for bits in range(1, most_bits(WIDTHS[dtype]) + 1)]


def drawn(rng: np.random.Generator, n: int, dtype: str) -> np.ndarray[Any, Any]:
    """Values of every bit length, powers of two and their neighbours among them."""
    width = WIDTHS[dtype]
    values = rng.integers(0, 1 << 64, n, dtype=np.uint64) >> rng.integers(64 - width, 65, n).clip(0, 63).astype(
        np.uint64
    )
    near = np.uint64(1) << rng.integers(0, width, n).astype(np.uint64)
    near = near + rng.choice(np.array([0, 1, 2**64 - 1], np.uint64), n)
    return np.where(rng.random(n) < 0.5, values, near).astype(dtype)


@pytest.mark.parametrize(("dtype", "bits"), CASES)
def test_every_length(sequential_back_end: BackEnd, fresh: np.random.Generator, dtype: str, bits: int) -> None:
    module = sequential_back_end.module("planes")
    for n in SIZES if sequential_back_end.name == "cpu" else SIZES[:6]:
        values = drawn(fresh, n, dtype)
        categories, extra = module.split_categories(sequential_back_end.array(values), bits)
        number = at = 0
        for v, c in zip(values.tolist(), sequential_back_end.numpy(categories).tolist(), strict=True):
            if v < 2 << bits:
                assert c == v
                continue
            k = v.bit_length() - 1 - bits
            assert c == (k + 1 << bits) + (v >> k & (1 << bits) - 1)
            number |= v % (1 << k) << at
            at += k
        assert sequential_back_end.numpy(extra).tobytes() == number.to_bytes((at + 7) // 8, "little")
        back = module.join_categories(categories, extra, bits, dtype)
        np.testing.assert_array_equal(sequential_back_end.numpy(back), values, strict=True)


@pytest.mark.parametrize(("dtype", "bits"), CASES)
def test_limits(dtype: str, bits: int) -> None:
    """The largest value has the last category, which a byte holds; the next one is refused."""
    top = np.array([np.iinfo(dtype).max], dtype)
    categories, extra = split_categories(top, bits)
    count = category_count(WIDTHS[dtype], bits)
    assert categories.tolist() == [count - 1]
    assert count <= 256
    assert join_categories(categories, extra, bits, dtype).tolist() == top.tolist()
    if count < 256:
        with pytest.raises(CorruptDataError, match=str(count)):
            join_categories(categories + np.uint8(1), extra, bits, dtype)


def test_long_runs_of_values_without_open_bits() -> None:
    values = np.zeros(5000, np.uint32)
    values[[1500, 4999]] = [2**32 - 1, 77]
    categories, extra = split_categories(values, 3)
    assert extra.size == (28 + 3 + 7) // 8
    np.testing.assert_array_equal(join_categories(categories, extra, 3, "uint32"), values, strict=True)


@given(st.sampled_from(CASES), st.binary(max_size=20), st.binary(max_size=20))
def test_any_bytes(case: tuple[str, int], first: bytes, second: bytes) -> None:
    """Refuse the inputs that the oracle refuses; others are the one form of their values."""
    dtype, bits = case
    categories, extra = (np.frombuffer(b, np.uint8) for b in (first, second))
    try:
        expected = oracle.join_categories(categories, extra, bits, dtype).tolist()
    except CorruptDataError:
        with pytest.raises(CorruptDataError):
            join_categories(categories, second, bits, dtype)
        return
    values = join_categories(categories, second, bits, dtype)
    assert values.tolist() == expected
    again, rest = split_categories(values, bits)
    assert (again.tobytes(), rest.tobytes()) == (first, second)


def test_truncated_extended_and_trailing_bits() -> None:
    values = np.array([1000, 3, 77777, 12], np.uint32)
    categories, extra = split_categories(values, 2)
    for data in (extra[:-1], np.append(extra, np.uint8(0)), extra[:0]):
        with pytest.raises(CorruptDataError):
            join_categories(categories, data, 2, "uint32")
    open_bits = 7 + 14 + 1
    extra[-1] |= 1 << open_bits % 8
    with pytest.raises(CorruptDataError):
        join_categories(categories, extra, 2, "uint32")


def test_oracle_on_strict(fresh: np.random.Generator) -> None:
    strict = pytest.importorskip("array_api_strict")
    values = drawn(fresh, 99, "uint32")
    categories, extra = oracle.split_categories(strict.asarray(values), 3)
    back = oracle.join_categories(categories, extra, 3, "uint32")
    assert np.asarray(back._array).tolist() == values.tolist()


def test_strided_and_read_only(fresh: np.random.Generator) -> None:
    values = drawn(fresh, 600, "uint16")
    for x in (values[::-2], np.repeat(values, 2)[::2]):
        categories, extra = split_categories(x, 3)
        for array in (categories, extra):
            array.flags.writeable = False
        np.testing.assert_array_equal(join_categories(categories, extra, 3, "uint16"), x)


def test_bad_arguments() -> None:
    values, categories = np.zeros(3, np.uint32), np.zeros(3, np.uint8)
    for call in (
        lambda: split_categories(values, 0),
        lambda: split_categories(values, 4),
        lambda: split_categories(values.astype(np.uint64), 3),
        lambda: split_categories(values.astype(np.int32), 3),
        lambda: split_categories(values.reshape(1, 3), 3),
        lambda: join_categories(categories, b"", 3, "uint8"),
        lambda: join_categories(categories, b"", 0, "uint32"),
        lambda: join_categories(values, b"", 3, "uint32"),
    ):
        with pytest.raises(BadArgumentError):
            call()
