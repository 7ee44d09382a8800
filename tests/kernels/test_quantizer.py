"""Assignment and dequantization: exact to the last bit on every back end."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint.kernels.backend.floats import FORMATS
from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.quantizer import Thresholds, assign, boundaries, codebook_float64, dequantize, magnitude_bits
from shrinkpoint.kernels.quantizer import reference as oracle

if TYPE_CHECKING:
    from .conftest import BackEnd

DTYPES = ["float16", "bfloat16", "float32", "float64"]

THRESHOLDS = [
    Thresholds(),
    Thresholds(protect_magnitude=math.pi / 2, prune_magnitude=math.e / 10),
    Thresholds(protect_sensitivity=1.1, prune_sensitivity=1e-3),
    Thresholds(protect_magnitude=1.5, protect_sensitivity=0.9, prune_magnitude=0.01, prune_sensitivity=0.001),
    Thresholds(protect_magnitude=0.5, prune_magnitude=1.0, prune_sensitivity=math.inf),
    Thresholds(protect_magnitude=1e300, prune_magnitude=1e-300, protect_sensitivity=1e300),
    Thresholds(protect_magnitude=0.0),
]

CODEBOOKS = {
    "none": [],
    "one": [0.3],
    "two": [-0.5, 0.5],
    "uniform": list(np.linspace(-2, 2, 32)),
    "many": list(np.sinh(np.linspace(-3, 3, 254)) / 5),
    "crowded": [1.0 + i * 2.0**-22 for i in range(40)],
    "repeated": [-1.0, -1.0, 0.0, 0.0, 0.0, 2.0],
    "extreme": [-1.7e308, -3e38, -65504.0, -1e-323, 0.0, 1e-323, 1e-45, 6e-8, 65504.0, 3e38, 1.7e308],
}


def rounded(x: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return x rounded to dtype; bfloat16 as equal float32."""
    with np.errstate(over="ignore", under="ignore"):
        if dtype == "bfloat16":
            return torch.from_numpy(x).bfloat16().float().numpy()  # type: ignore[no-any-return]
        return x.astype(dtype)


def sample(rng: np.random.Generator, dtype: str, n: int, codes: Any = ()) -> np.ndarray[Any, Any]:
    """Normal values, special values, and the neighbourhoods of every boundary of the codes."""
    x = rng.standard_normal(n) * 10.0 ** rng.integers(-3, 2, n)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-40, 6e-8, 1e-323, -1e-310, 6e4, 3e38, -1e308])
    place = rng.random(n) < 0.2
    x[place] = rng.choice(special, int(place.sum()))
    if len(codes) > 1:
        near = boundaries(np.array(codes), dtype)
        near = np.concatenate([near, 0.5 * np.array(codes[:-1]) + 0.5 * np.array(codes[1:]), np.array(codes)])
        with np.errstate(over="ignore"):
            near = np.concatenate(
                [near, *(np.nextafter(rounded(near, dtype), to).astype(float) for to in (np.inf, -np.inf))]
            )
        place = rng.random(n) < 0.4
        x[place] = rng.choice(near, int(place.sum()))
    return rounded(x, dtype)


def native(x: np.ndarray[Any, Any], dtype: str) -> Any:
    """Return x in its dtype: torch for bfloat16, else NumPy."""
    return torch.from_numpy(x).bfloat16() if dtype == "bfloat16" else x


@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_levels_match_the_oracle(back_end: BackEnd, fresh: np.random.Generator, dtype: str, codebook: str) -> None:
    codes = np.array(CODEBOOKS[codebook], dtype=np.float64)
    cases = [(3001, thresholds) for thresholds in THRESHOLDS]
    cases += [(n, THRESHOLDS[1]) for n in back_end.sizes([0, 1], "quantizer.ASSIGN")]
    for n, thresholds in cases:
        x = sample(fresh, dtype, n, codes)
        levels = back_end.module("quantizer").assign(back_end.array(x, dtype), thresholds, codes)
        expected = oracle.assign(torch.from_numpy(x), thresholds, codes).numpy()  # exact: x is what dtype holds
        np.testing.assert_array_equal(back_end.numpy(levels), expected, strict=True)


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float32", "float64"),
        ("float64", "bfloat16"),
    ],
)
def test_sensitivity_matches_the_oracle(back_end: BackEnd, fresh: np.random.Generator, dtypes: tuple[str, str]) -> None:
    codes = np.array(CODEBOOKS["uniform"])
    cases = [(2003, thresholds) for thresholds in THRESHOLDS]
    cases += [(n, THRESHOLDS[3]) for n in back_end.sizes([0, 1], "quantizer.ASSIGN")]
    with np.errstate(all="ignore"):
        for n, thresholds in cases:
            x, g = sample(fresh, dtypes[0], n, codes), sample(fresh, dtypes[1], n)
            levels = back_end.module("quantizer").assign(
                back_end.array(x, dtypes[0]), thresholds, codes, gradient=back_end.array(g, dtypes[1])
            )
            expected = oracle.assign(torch.from_numpy(x), thresholds, codes, gradient=torch.from_numpy(g)).numpy()
            np.testing.assert_array_equal(back_end.numpy(levels), expected, strict=True)


def test_blocks(fresh: np.random.Generator) -> None:
    """More elements than one block of products holds."""
    x, g = (fresh.standard_normal(70_001).astype(np.float32) for _ in range(2))
    thresholds, codes = Thresholds(prune_sensitivity=0.1, protect_magnitude=2.0), np.array([-1.0, 0.0, 1.0])
    np.testing.assert_array_equal(
        assign(x, thresholds, codes, gradient=g), oracle.assign(x, thresholds, codes, gradient=g), strict=True
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_pattern(fresh: np.random.Generator, dtype: str) -> None:
    u = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    x = u.view(getattr(torch, dtype))
    for k in (1, 7, 254):
        codes = np.sort(fresh.standard_normal(k) * 10.0 ** fresh.integers(-6, 5, k))
        thresholds = Thresholds(*np.abs(fresh.standard_normal(4)) * [1e5, 1, 1e-4, 1])
        np.testing.assert_array_equal(
            assign(x, thresholds, codes).numpy(), oracle.assign(x, thresholds, codes).numpy(), strict=True
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_boundaries_are_the_smallest_values_above(fresh: np.random.Generator, dtype: str) -> None:
    fmt = FORMATS[dtype]
    for codes in (*CODEBOOKS.values(), list(np.sort(fresh.standard_normal(200)))):
        edges = boundaries(np.array(codes, dtype=np.float64), dtype)
        middles = 0.5 * np.array(codes[:-1]) + 0.5 * np.array(codes[1:])
        assert edges.shape == (max(len(codes) - 1, 0),)
        for edge, middle in zip(edges, middles, strict=True):
            assert edge > middle
            below = rounded(np.array([edge]), dtype)
            assert float(below[0]) == edge  # a value of dtype (or infinity), and the next one below it is not above
            if dtype == "bfloat16":
                pattern = int(below.view(np.int32)[0]) >> 16
                order = -(pattern & 0x7FFF) if pattern < 0 else pattern
                order -= 1
                pattern = order if order >= 0 else 0x8000 | -order
                lower = float((np.array([pattern & 0xFFFF], dtype=np.uint32) << 16).view(np.float32)[0])
            else:
                with np.errstate(over="ignore", under="ignore"):
                    lower = float(np.nextafter(below, below.dtype.type(-np.inf))[0])
            assert lower <= middle
    assert magnitude_bits(math.inf, fmt) == ((1 << fmt.exponent) - 1) << fmt.mantissa
    assert magnitude_bits(0.0, fmt) == 0
    assert magnitude_bits(-0.0, fmt) == 0  # its own pattern is above all magnitudes
    assert magnitude_bits(5e-324, fmt) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codebook", ["none", "one", "uniform", "many"])
def test_dequantize_matches_the_oracle(
    back_end: BackEnd, fresh: np.random.Generator, dtype: str, codebook: str
) -> None:
    codes = rounded(np.array(CODEBOOKS[codebook]), dtype)
    most = max(back_end.sizes([4099], "quantizer.VALUES"))
    levels = fresh.integers(0, codes.size + 2, most).astype(np.uint8)
    exact = rounded(fresh.standard_normal(int((levels == 1).sum())), dtype)
    module = back_end.module("quantizer")
    cases = [(n, exact[: int((levels[:n] == 1).sum())]) for n in back_end.sizes([0, 4099], "quantizer.VALUES")]
    for n, protected in (*cases, (4099, None), (most, None)):
        got = module.dequantize(
            back_end.array(levels[:n]),
            back_end.array(codes, dtype),
            protected=None if protected is None else back_end.array(protected, dtype),
        )
        table = np.concatenate([np.zeros(2, dtype=codes.dtype), codes])
        expected = table[levels[:n]]
        if protected is not None:
            expected[levels[:n] == 1] = protected
        assert str(got.dtype).endswith(dtype)
        if dtype == "bfloat16":
            got = got.float()
        np.testing.assert_array_equal(back_end.numpy(got), expected, strict=True)


def test_dequantize_refuses_what_does_not_fit(back_end: BackEnd) -> None:
    module = back_end.module("quantizer")
    codes, levels = np.array([1.0, 2.0], dtype=np.float32), np.array([0, 1, 2, 3], dtype=np.uint8)
    for bad_levels, count in (([0, 4], None), ([255], 0), (levels, 0), (levels, 2), ([0], 1), ([], 1)):
        protected = None if count is None else back_end.array(np.ones(count, dtype=np.float32))
        with pytest.raises(CorruptDataError):
            module.dequantize(
                back_end.array(np.array(bad_levels, dtype=np.uint8)), back_end.array(codes), protected=protected
            )


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 9), (2, 0, 3)])
def test_shapes_and_strides(back_end: BackEnd, fresh: np.random.Generator, shape: tuple[int, ...]) -> None:
    module = back_end.module("quantizer")
    x = np.asarray(fresh.standard_normal(shape).astype(np.float32))
    codes = np.array([-1.0, 0.0, 1.0], dtype=np.float32)
    a = back_end.array(x)
    levels = module.assign(a, Thresholds(), codes.astype(np.float64))
    assert tuple(levels.shape) == shape
    assert str(levels.dtype).endswith("uint8")
    assert tuple(module.dequantize(levels, back_end.array(codes)).shape) == shape
    if len(shape) == 2:
        turned = module.assign(a.T, Thresholds(prune_sensitivity=0.5), codes.astype(np.float64), gradient=a.T)
        np.testing.assert_array_equal(
            back_end.numpy(turned), oracle.assign(x.T, Thresholds(prune_sensitivity=0.5), codes, gradient=x.T)
        )
        part = module.assign(a[::2, ::3], Thresholds(), codes.astype(np.float64))
        np.testing.assert_array_equal(back_end.numpy(part), back_end.numpy(levels)[::2, ::3])
        np.testing.assert_array_equal(
            back_end.numpy(module.dequantize(levels.T, back_end.array(codes))),
            back_end.numpy(module.dequantize(levels, back_end.array(codes))).T,
        )


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(finite, max_size=50), st.lists(finite, min_size=1, max_size=254, unique=True), finite, finite)
def test_round_trip_picks_the_nearest(values: list[float], codes: list[float], a: float, b: float) -> None:
    x, codebook = np.array(values, dtype=np.float32), np.sort(np.array(codes, dtype=np.float32))
    thresholds = Thresholds(protect_magnitude=abs(a), prune_magnitude=abs(b))
    levels = assign(x, thresholds, codebook)
    back = dequantize(levels, codebook, protected=x[levels == 1])
    for value, level, restored in zip(x, levels, back, strict=True):
        if abs(value) >= abs(a):
            assert level == 1
            assert restored == value
        elif abs(value) < abs(b):
            assert level == restored == 0
        else:
            distance = abs(float(value) - codebook.astype(np.float64))
            assert abs(float(value) - float(restored)) == distance.min()


def test_codebooks_of_any_library(fresh: np.random.Generator) -> None:
    jax = pytest.importorskip("jax")
    ml_dtypes = pytest.importorskip("ml_dtypes")
    codes = rounded(np.sort(fresh.standard_normal(9)), "bfloat16")
    for codebook in (
        codes,
        torch.from_numpy(codes).bfloat16(),
        codes.astype(ml_dtypes.bfloat16),
        jax.numpy.asarray(codes),
    ):
        np.testing.assert_array_equal(codebook_float64(codebook), codes.astype(np.float64), strict=True)
    x = jax.numpy.asarray(fresh.standard_normal(100).astype(np.float32))
    levels = assign(x, Thresholds(), codes)
    assert isinstance(levels, jax.Array)
    np.testing.assert_array_equal(np.asarray(levels), oracle.assign(np.asarray(x), Thresholds(), codes))
    values = dequantize(torch.from_numpy(np.array(levels)), torch.from_numpy(codes).bfloat16())
    assert values.dtype == torch.bfloat16
    np.testing.assert_array_equal(values.float().numpy(), codes[np.asarray(levels) - 2])


def test_bad_arguments() -> None:
    x, codes, levels = np.ones(4, dtype=np.float32), np.array([0.0, 1.0], dtype=np.float32), np.zeros(4, dtype=np.uint8)
    cases: list[tuple[str, Any]] = [
        ("ascending", lambda: assign(x, Thresholds(), codes[::-1])),
        ("ascending", lambda: assign(x, Thresholds(), np.array([0.0, np.nan]))),
        ("shape", lambda: assign(x, Thresholds(), np.zeros(255))),
        ("shape", lambda: assign(x, Thresholds(), np.zeros((2, 2)))),
        ("int64", lambda: assign(x.astype(np.int64), Thresholds(), codes)),
        ("gradient", lambda: assign(x, Thresholds(), codes, gradient=x[:2])),
        ("uint8", lambda: dequantize(x, codes)),
        ("codebook", lambda: dequantize(levels, np.zeros(255, dtype=np.float32))),
        ("int64", lambda: dequantize(levels, np.zeros(2, dtype=np.int64))),
        ("protected", lambda: dequantize(levels, codes, protected=np.zeros(0))),
        ("complex", lambda: boundaries(codes, "complex64")),
        ("not an array", lambda: assign([1.0], Thresholds(), codes)),
    ]
    for message, call in cases:
        with pytest.raises(BadArgumentError, match=message):
            call()


@pytest.mark.parametrize("prune", [0.0, 0.15])
def test_without_codes_the_gradient_still_prunes(back_end: BackEnd, prune: float) -> None:
    """With an empty codebook, elements are protected unless they are pruned."""
    x = back_end.array(np.array([1.0, 2.0, 3.0, -4.0, np.nan]), "float32")
    gradient = back_end.array(np.array([0.1, 0.01, 5.0, 0.0, 0.0]), "float32")
    thresholds = Thresholds(prune_sensitivity=prune)
    got = back_end.module("quantizer").assign(x, thresholds, np.empty(0), gradient=gradient)
    expected = [0, 0, 1, 0, 1] if prune else [1, 1, 1, 1, 1]
    assert back_end.numpy(got).tolist() == expected


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_nearest_among_the_smallest_subnormals(back_end: BackEnd, dtype: str) -> None:
    """The midpoint of two codes an odd number of smallest units apart is not in the dtype."""
    units = np.arange(-9, 10)
    smallest = np.finfo(dtype).smallest_subnormal
    codes = np.array([-5, 2, 3, 8])
    x = back_end.array((units * smallest).astype(dtype), dtype)
    got = back_end.numpy(back_end.module("quantizer").assign(x, Thresholds(), codes * np.float64(smallest)))
    distance = np.abs(units[:, None] - codes[None, :])
    np.testing.assert_array_equal(got, 2 + distance.argmin(axis=1))
