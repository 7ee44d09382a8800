"""Bit masks: exact against NumPy's packing and boolean indexing; hostile data is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.packing import changed_mask, gather, pack_mask, scatter, unpack_mask
from shrinkpoint.kernels.packing import cpu as compiled

from .conftest import STRICT_SHAPES, strict_array
from .patterns import array_of, patterns_of, random_patterns

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1000, 4095, 4096, 4097]
DTYPES = ["float16", "bfloat16", "float32", "float64", "uint8", "int64", "bool"]
DENSITIES = [0.0, 0.02, 0.5, 0.9, 1.0]


def packed(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.packbits(mask.reshape(-1), bitorder="little")


def test_pack_and_unpack(back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = back_end.module("packing")
    for n in back_end.sizes(SIZES, "packing.PACK_MASK", "packing.UNPACK_MASK"):
        mask = fresh.random(n) < fresh.random()
        bits = module.pack_mask(back_end.array(mask))
        np.testing.assert_array_equal(back_end.numpy(bits), packed(mask), strict=True)
        np.testing.assert_array_equal(back_end.numpy(module.unpack_mask(bits, n)), mask, strict=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changed_compares_patterns(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    module = back_end.module("packing")
    for n in back_end.sizes([0, 1, 65, 4097], "packing.PACK_MASK"):
        u = random_patterns(fresh, dtype, n)
        v = np.where(fresh.random(n) < 0.5, u, random_patterns(fresh, dtype, n))
        bits = module.changed_mask(array_of(back_end, u, dtype), array_of(back_end, v, dtype))
        np.testing.assert_array_equal(back_end.numpy(bits), packed(u != v), strict=True)


def test_signed_zeros_differ_and_nans_are_themselves(back_end: BackEnd) -> None:
    u = np.array([0, 0, 0x7FC00000, 0x7FC00000], np.uint32)
    v = np.array([0, 1 << 31, 0x7FC00000, 0x7FC00001], np.uint32)
    bits = back_end.module("packing").changed_mask(array_of(back_end, u, "float32"), array_of(back_end, v, "float32"))
    assert back_end.numpy(bits).tolist() == [0b1010]


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    module = back_end.module("packing")
    for n in back_end.sizes([0, 1, 64, 65, 200, 1301], "packing.MOVE"):
        for density in DENSITIES:
            u, v = random_patterns(fresh, dtype, n), random_patterns(fresh, dtype, n)
            mask = fresh.random(n) < density
            bits = back_end.array(packed(mask))
            current, base = array_of(back_end, u, dtype), array_of(back_end, v, dtype)
            values = module.gather(current, bits)
            assert values.dtype == current.dtype
            np.testing.assert_array_equal(patterns_of(values), u[mask], strict=True)
            out = module.scatter(base, bits, values)
            assert out.dtype == base.dtype
            np.testing.assert_array_equal(patterns_of(out), np.where(mask, u, v), strict=True)
            np.testing.assert_array_equal(patterns_of(base), v)  # the base is left alone


def test_shapes_and_strides(back_end: BackEnd, fresh: np.random.Generator) -> None:
    if back_end.library == "strict":
        pytest.skip("the array API standard has no strides")
    module = back_end.module("packing")
    u, v = (random_patterns(fresh, "float32", 26 * 9).reshape(26, 9) for _ in range(2))
    v[fresh.random(v.shape) < 0.5] = 0
    u[v == 0] = 0
    current, base = array_of(back_end, u, "float32")[::2].T, array_of(back_end, v, "float32")[::2].T
    differs = u[::2].T != v[::2].T
    bits = module.changed_mask(current, base)
    np.testing.assert_array_equal(back_end.numpy(bits), packed(differs))
    values = module.gather(current, bits)
    np.testing.assert_array_equal(patterns_of(values), np.ascontiguousarray(u[::2].T)[differs])
    out = module.scatter(base, bits, values)
    assert tuple(out.shape) == (9, 13)
    np.testing.assert_array_equal(patterns_of(out), u[::2].T)


def test_mixed_dense_and_sparse_words(back_end: BackEnd, fresh: np.random.Generator) -> None:
    """Words that are full, empty, sparse and dense side by side, dense ones at either end."""
    module = back_end.module("packing")
    n = 64 * 12 + 5
    density = np.repeat(fresh.permutation([1.0, 0.0, 0.9, 0.1, 1.0, 0.6, 0.5, 0.95, 0.0, 1.0, 0.3, 0.8, 1.0]), 64)[:n]
    mask = fresh.random(n) < density
    u, v = random_patterns(fresh, "float32", n), random_patterns(fresh, "float32", n)
    bits = back_end.array(packed(mask))
    values = module.gather(array_of(back_end, u, "float32"), bits)
    np.testing.assert_array_equal(patterns_of(values), u[mask])
    out = module.scatter(array_of(back_end, v, "float32"), bits, values)
    np.testing.assert_array_equal(patterns_of(out), np.where(mask, u, v))


@pytest.mark.parametrize("length", [64, 100, 200])
def test_no_index_leaves_its_array(fresh: np.random.Generator, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the compiled loops as plain Python, where NumPy checks every index."""
    monkeypatch.setattr(compiled, "local_array", np.empty)
    mask = fresh.random(length) < 0.9
    mask[-3:] = False
    words = np.zeros((length + 63) // 64, "<u8")
    words.view(np.uint8)[: (length + 7) // 8] = packed(mask)
    x, out, base = np.arange(length), np.zeros(int(mask.sum()), int), np.zeros(length, int)
    with np.errstate(over="ignore"):
        compiled._gather.py_func(x, words, compiled.BIT_AT, out)  # type: ignore[attr-defined]
        compiled._scatter.py_func(words, out, compiled.BIT_AT, base)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(out, x[mask])
    np.testing.assert_array_equal(base, np.where(mask, x, 0))


@pytest.mark.parametrize("n", [3, 63, 130])
def test_a_bit_past_the_end_is_refused(back_end: BackEnd, n: int) -> None:
    module = back_end.module("packing")
    bits = np.zeros((n + 7) // 8, np.uint8)
    bits[-1] = 1 << n % 8
    data, x = back_end.array(bits), back_end.array(np.zeros(n))
    for call in (
        lambda: module.unpack_mask(data, n),
        lambda: module.gather(x, data),
        lambda: module.scatter(x, data, back_end.array(np.zeros(1))),
    ):
        with pytest.raises(CorruptDataError, match="after its last"):
            call()


@pytest.mark.parametrize("values", [0, 1, 64, 299, 301])
def test_a_wrong_number_of_values_is_refused(back_end: BackEnd, values: int) -> None:
    module = back_end.module("packing")
    mask = np.zeros(1000, bool)
    mask[:300] = True
    with pytest.raises(CorruptDataError, match=f"300 elements.* {values} values"):
        module.scatter(back_end.array(np.zeros(1000)), back_end.array(packed(mask)), back_end.array(np.ones(values)))


@given(st.lists(st.booleans(), max_size=300), st.data())
def test_round_trip(flags: list[bool], data: st.DataObject) -> None:
    mask = np.array(flags, bool)
    bits = pack_mask(mask)
    assert unpack_mask(bits, len(flags)).tolist() == flags
    x = np.array(data.draw(st.lists(st.integers(0, 65535), min_size=len(flags), max_size=len(flags))), np.uint16)
    base = x[::-1].copy()
    assert np.array_equal(scatter(base, bits, gather(x, bits)), np.where(mask, x, base))
    changed = changed_mask(x, base)
    assert np.array_equal(scatter(base, changed, gather(x, changed)), x)


@given(st.binary(max_size=20), st.integers(0, 9), st.integers(-2, 2))
def test_any_bytes_are_refused_or_right(data: bytes, short: int, off: int) -> None:
    bits = np.frombuffer(data, np.uint8)
    n = max(8 * len(data) - short, 0)
    count = max(int(np.unpackbits(bits).sum()) + off, 0)
    base = np.zeros(n, np.float32)
    values = np.ones(count, np.float32)
    try:
        out = scatter(base, bits, values)
    except CorruptDataError:
        whole = np.unpackbits(bits, bitorder="little")
        assert len(data) != (n + 7) // 8 or whole[n:].any() or int(whole.sum()) != count
    else:
        assert int(out.sum()) == count


def test_public_functions_stay_in_torch() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16, requires_grad=True)
    y = torch.tensor([[1.0, 5.0], [3.0, 6.0]], dtype=torch.bfloat16)
    bits = changed_mask(x, y)
    values = gather(x, bits)
    assert values.dtype == torch.bfloat16
    assert torch.equal(scatter(y, bits, values), x.detach())
    assert unpack_mask(bits, 4).tolist() == [False, True, False, True]


EIGHT = np.zeros(8, np.float32)
ONE = np.zeros(1, np.uint8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: changed_mask(EIGHT, EIGHT[:7]), BadArgumentError, "shape"),
        (lambda: changed_mask(EIGHT, EIGHT.astype(float)), BadArgumentError, "dtype"),
        (lambda: changed_mask(EIGHT.astype(complex), EIGHT.astype(complex)), BadArgumentError, "complex"),
        (lambda: pack_mask(ONE), BadArgumentError, "bool"),
        (lambda: unpack_mask(ONE, -1), BadArgumentError, "n is -1"),
        (lambda: unpack_mask(EIGHT, 8), BadArgumentError, "uint8"),
        (lambda: unpack_mask(ONE, 9), CorruptDataError, "2 are needed"),
        (lambda: unpack_mask(ONE, 1 << 60), CorruptDataError, "are needed"),
        (lambda: gather(EIGHT, np.zeros(2, np.uint8)), CorruptDataError, "1 are needed"),
        (lambda: scatter(EIGHT, ONE[:0], EIGHT[:0]), CorruptDataError, "1 are needed"),
        (lambda: scatter(EIGHT, ONE, EIGHT[:0].astype(float)), BadArgumentError, "float32 of one axis is needed"),
        (lambda: scatter(EIGHT, ONE, EIGHT[:0].reshape(0, 1)), BadArgumentError, "one axis"),
        (lambda: scatter(EIGHT, ONE.reshape(1, 1), EIGHT[:0]), BadArgumentError, "one axis"),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("shape", STRICT_SHAPES)
def test_arrays_that_are_only_standard(shape: tuple[int, ...], fresh: np.random.Generator) -> None:
    old = np.asarray(fresh.normal(size=shape))
    new = np.where(fresh.random(shape) < 0.5, old, 0.0)
    base, wanted = strict_array(old), strict_array(new)
    bits = changed_mask(wanted, base)
    found = scatter(base, bits, gather(wanted, bits))
    assert type(found) is type(base)
    np.testing.assert_array_equal(np.asarray(found._array), new, strict=True)
