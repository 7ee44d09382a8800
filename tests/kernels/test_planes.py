"""Byte planes and lossless differences: exact against big-integer arithmetic."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.planes import WIDTHS, difference, merge_planes, split_planes, undifference

from .conftest import STRICT_SHAPES, strict_array
from .patterns import array_of, patterns_of, random_patterns

if TYPE_CHECKING:
    from .conftest import BackEnd

SIZES = [0, 1, 7, 511, 512, 513, 1300]
FLOATS = ["float16", "bfloat16", "float32", "float64", "float8_e5m2"]
UNMAPPED = ["bool", "int8", "uint16", "int32", "uint32", "int64", "uint64", "float8_e8m0fnu"]  # the last has no sign
METHODS = ["arithmetic", "xor"]


def expected_difference(c: int, p: int, width: int, *, is_float: bool, method: str) -> int:
    """The definition of a difference on Python's integers."""
    if method == "xor":
        return c ^ p

    def place(u: int) -> int:
        if u < 1 << (width - 1):
            return u
        return -(u - (1 << (width - 1))) - 1 if is_float else u - (1 << width)

    distance = (place(c) - place(p) + (1 << (width - 1))) % (1 << width) - (1 << (width - 1))
    return 2 * distance if distance >= 0 else -2 * distance - 1


@pytest.mark.parametrize("dtype", FLOATS + UNMAPPED)
def test_planes_are_the_bytes(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    module = back_end.module("planes")
    for n in back_end.sizes(SIZES, "planes.ELEMENTS"):
        u = random_patterns(fresh, dtype, n)
        planes = module.split_planes(array_of(back_end, u, dtype))
        expected = u.view(np.uint8).reshape(n, u.itemsize).T
        np.testing.assert_array_equal(back_end.numpy(planes), expected, strict=True)
        merged = module.merge_planes(planes, dtype)
        np.testing.assert_array_equal(back_end.numpy(merged), u, strict=True)


@pytest.mark.parametrize("dtype", FLOATS + UNMAPPED)
def test_rotated_planes_are_the_bytes_of_rotated_patterns(
    back_end: BackEnd, fresh: np.random.Generator, dtype: str
) -> None:
    module = back_end.module("planes")
    width = WIDTHS[dtype]
    for n in (0, 1, 513, 700, *back_end.sizes([], "planes.ELEMENTS")[-1:]):
        u = random_patterns(fresh, dtype, n)
        rotation = int(fresh.integers(1, 8))
        turned = [(int(x) << rotation | int(x) >> (width - rotation)) & ((1 << width) - 1) for x in u]
        expected = np.array(turned, u.dtype).view(np.uint8).reshape(n, u.itemsize).T
        planes = module.split_planes(array_of(back_end, u, dtype), rotation)
        np.testing.assert_array_equal(back_end.numpy(planes), expected, strict=True)
        merged = module.merge_planes(planes, dtype, rotation)
        np.testing.assert_array_equal(back_end.numpy(merged), u, strict=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", FLOATS + UNMAPPED)
def test_difference_is_exact_and_comes_back(
    back_end: BackEnd, fresh: np.random.Generator, dtype: str, method: str
) -> None:
    module = back_end.module("planes")
    for n in (0, 1, 700, *back_end.sizes([], "planes.ELEMENTS")[-1:]):
        u, v = random_patterns(fresh, dtype, n), random_patterns(fresh, dtype, n)
        near = fresh.random(n) < 0.5
        v[near] = u[near] ^ (u[near] & 1) if dtype != "bool" else u[near]
        current, previous = array_of(back_end, u, dtype), array_of(back_end, v, dtype)
        d = module.difference(current, previous, method)
        expected = [
            expected_difference(int(a), int(b), WIDTHS[dtype], is_float=dtype in FLOATS, method=method)
            for a, b in zip(u, v, strict=True)
        ]
        np.testing.assert_array_equal(back_end.numpy(d), np.array(expected, dtype=u.dtype), strict=True)
        back = module.undifference(d, previous, method)
        assert back.dtype == current.dtype
        np.testing.assert_array_equal(patterns_of(back), u, strict=True)


def test_shape_and_strides(back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = back_end.module("planes")
    if back_end.library == "strict":
        pytest.skip("the array API standard has no strides")
    u, v = (random_patterns(fresh, "float32", 35 * 11).reshape(35, 11) for _ in range(2))
    current, previous = array_of(back_end, u, "float32")[::2].T, array_of(back_end, v, "float32")[::2].T
    planes = module.split_planes(current)
    np.testing.assert_array_equal(
        back_end.numpy(module.merge_planes(planes, "float32")), np.ascontiguousarray(u[::2].T).reshape(-1)
    )
    d = module.difference(current, previous)
    assert tuple(d.shape) == (11, 18)
    back = module.undifference(d, previous)
    assert tuple(back.shape) == (11, 18)
    np.testing.assert_array_equal(patterns_of(back), u[::2].T)
    np.testing.assert_array_equal(patterns_of(previous), v[::2].T)  # inputs are left alone


def test_scalars_keep_their_shape(back_end: BackEnd) -> None:
    module = back_end.module("planes")
    x, y = back_end.array(np.array(2.0)), back_end.array(np.array(1.0))
    d = module.difference(x, y)
    assert tuple(d.shape) == ()
    assert float(module.undifference(d, y)) == 2.0


def test_patterns_that_mean_bfloat16(back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = back_end.module("planes")
    u, v = random_patterns(fresh, "bfloat16", 300), random_patterns(fresh, "bfloat16", 300)
    current, previous = array_of(back_end, u, "uint16"), array_of(back_end, v, "uint16")
    d = module.difference(current, previous, dtype="bfloat16")
    expected = [
        expected_difference(int(a), int(b), 16, is_float=True, method="arithmetic") for a, b in zip(u, v, strict=True)
    ]
    np.testing.assert_array_equal(back_end.numpy(d), np.array(expected, np.uint16))
    back = module.undifference(d, previous, dtype="bfloat16")
    np.testing.assert_array_equal(back_end.numpy(back), u, strict=True)


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(-1000, 1000))
def test_a_step_of_k_units_gives_twice_k(x: float, k: int) -> None:
    line = struct.unpack("<i", struct.pack("<f", x))[0]
    line = line if line >= 0 else -(line & 0x7FFFFFFF) - 1
    moved = line + k
    bits = moved if moved >= 0 else (-moved - 1) | 1 << 31
    pair = np.array([struct.unpack("<I", struct.pack("<f", x))[0], bits], np.uint32).view(np.float32)
    assert difference(pair[1:], pair[:1]).tolist() == [2 * k if k >= 0 else -2 * k - 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int16", "bool", "float8_e4m3fn"])
def test_public_functions_stay_in_torch(fresh: np.random.Generator, dtype: str) -> None:
    u, v = random_patterns(fresh, dtype, 60), random_patterns(fresh, dtype, 60)
    kind = getattr(torch, dtype)
    x, y = (torch.from_numpy(w).view(kind).reshape(4, 15) for w in (u, v))
    back = merge_planes(split_planes(x), dtype).view(kind).reshape(4, 15)
    assert torch.equal(back.view(torch.uint8), x.view(torch.uint8))
    d = difference(x, y)
    assert isinstance(d, torch.Tensor)
    assert torch.equal(undifference(d, y).view(torch.uint8), x.view(torch.uint8))


def test_gradient_is_no_obstacle() -> None:
    x = torch.ones(3, requires_grad=True)
    assert difference(x, x).tolist() == [0, 0, 0]
    assert split_planes(x)[3].tolist() == [63, 63, 63]


def test_jax_arrays() -> None:
    jnp = pytest.importorskip("jax.numpy")
    x, y = jnp.asarray([1.0, -0.0, 3.0]), jnp.asarray([1.0, 0.0, 2.0])
    d = difference(x, y)
    assert type(d) is type(x)
    assert d.tolist()[:2] == [0, 1]
    assert undifference(d, y).tolist() == [1.0, -0.0, 3.0]
    assert merge_planes(split_planes(x), "float32").tolist() == np.asarray(x).view(np.uint32).tolist()


def _f32(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: split_planes(np.zeros(2, complex)), "real and imaginary"),
        (lambda: split_planes(np.zeros(2, "M8[s]")), "dtype is"),
        (lambda: split_planes(_f32(2), 8), "rotation is 8"),
        (lambda: merge_planes(np.zeros((4, 2), np.uint8), "float32", -1), "rotation is -1"),
        (lambda: merge_planes(np.zeros((4, 2), np.uint8), "float64"), "shape"),
        (lambda: merge_planes(np.zeros((4, 2), np.int8), "float32"), "uint8"),
        (lambda: merge_planes(np.zeros(4, np.uint8), "float32"), "2 axes"),
        (lambda: merge_planes(np.zeros((4, 2), np.uint8), "float128"), "float128"),
        (lambda: difference(_f32(2), _f32(3)), "shape"),
        (lambda: difference(_f32(2), np.zeros(2)), "dtype"),
        (lambda: difference(_f32(2), _f32(2), "minus"), "minus"),  # type: ignore[arg-type]
        (lambda: difference(_f32(2), _f32(2), dtype="bfloat16"), "bits wide"),
        (lambda: undifference(_f32(2), _f32(2)), "uint32"),
        (lambda: undifference(np.zeros(2, np.uint16), _f32(2)), "uint32"),
    ],
)
def test_bad_arguments(call: Any, message: str) -> None:
    with pytest.raises(BadArgumentError, match=message):
        call()


@pytest.mark.parametrize("shape", STRICT_SHAPES)
@pytest.mark.parametrize("method", METHODS)
def test_arrays_that_are_only_standard(shape: tuple[int, ...], method: Any, fresh: np.random.Generator) -> None:
    old, new = (np.asarray(fresh.normal(size=shape)) for _ in range(2))
    parts = strict_array(old), strict_array(new)
    found = difference(parts[1], parts[0], method)
    assert type(found) is type(parts[0])
    np.testing.assert_array_equal(np.asarray(found._array), difference(new, old, method), strict=True)
    back = undifference(found, parts[0], method)
    assert type(back) is type(parts[0])
    np.testing.assert_array_equal(np.asarray(back._array), new, strict=True)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
@pytest.mark.parametrize("rotation", [0, 1, 4])
def test_planes_from_several_places_into_given_memory(fresh: np.random.Generator, dtype: str, rotation: int) -> None:
    u = fresh.integers(0, 256, 1003 * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype)
    planes = [np.frombuffer(plane.tobytes(), np.uint8) for plane in split_planes(u, rotation)]
    out = np.zeros_like(u)
    assert merge_planes(planes, dtype, rotation, out=out) is out
    np.testing.assert_array_equal(out, u)
    np.testing.assert_array_equal(merge_planes(planes, dtype, rotation), u)


@pytest.mark.parametrize("method", ["arithmetic", "xor"])
def test_differences_in_place(fresh: np.random.Generator, method: Literal["arithmetic", "xor"]) -> None:
    old, new = fresh.integers(0, 1 << 16, (2, 1003), dtype=np.uint16)
    found = difference(new, old, method, dtype="bfloat16")
    assert undifference(found, old, method, dtype="bfloat16", out=found) is found
    np.testing.assert_array_equal(found, new)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_given_memory_on_a_device(device: str, fresh: np.random.Generator, dtype: str) -> None:
    """Planes and differences are written to a part of a tensor, and to nothing else."""
    width, kind = 8 * np.dtype(dtype).itemsize, getattr(torch, dtype)
    new, old = (fresh.integers(0, 256, 1003 * width // 8, dtype=np.uint8).view(dtype) for _ in range(2))
    around = torch.zeros(1009 * width // 8, dtype=torch.uint8, device=device).view(kind)
    out, there = around[3:1006], torch.from_numpy(old).to(device)
    for method in ("arithmetic", "xor"):
        planes = torch.from_numpy(split_planes(difference(new, old, method), 1)).to(device)
        assert merge_planes(planes, dtype, 1, out=out) is out
        assert undifference(out, there, method, out=out) is out
        assert torch.equal(out.cpu(), torch.from_numpy(new))
        assert not around.view(torch.uint8)[: 3 * width // 8].any()
        assert not around.view(torch.uint8)[1006 * width // 8 :].any()
    for memory in (around[::2][:1003], around[:1002], around.cpu().numpy()[:1003]):
        with pytest.raises(BadArgumentError, match="out"):
            undifference(there, there, out=memory)


def test_memory_that_does_not_fit() -> None:
    planes, u = [np.zeros(4, np.uint8)] * 2, np.zeros(4, np.uint16)
    fixed = u.copy()
    fixed.flags.writeable = False
    for call, said in (
        (lambda: merge_planes(planes, "uint32"), "2 arrays"),
        (lambda: merge_planes([planes[0], planes[0][1:]], "uint16"), "4"),
        (lambda: merge_planes(planes, "uint16", out=u[:3]), "out"),
        (lambda: merge_planes(planes, "uint16", out=u.view(np.int16)), "out"),
        (lambda: merge_planes(planes, "uint16", out=np.zeros(8, np.uint16)[::2]), "contiguous"),
        (lambda: undifference(u, u, out=fixed), "written"),
    ):
        with pytest.raises(BadArgumentError, match=said):
            call()
