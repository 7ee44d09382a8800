"""Row quantization: equal bits on every back end, against a scalar definition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from shrinkpoint.kernels.errors import BadArgumentError, CorruptDataError
from shrinkpoint.kernels.rows import reference as oracle
from shrinkpoint.kernels.rows import row_dequantize, row_kmeans, row_lookup, row_quantize, search_steps

from .patterns import assert_same_bits

if TYPE_CHECKING:
    from .conftest import BackEnd

WIDTHS = [0, 1, 2, 31, 64, 65]
METHODS = ["symmetric", "asymmetric", "adaptive"]
f32 = np.float32


def table(rng: np.random.Generator, columns: int) -> np.ndarray[Any, Any]:
    """Return rows with heavy tails, and rows of special values."""
    x = rng.standard_t(2, (24, columns)).astype(f32)
    if columns == 0:
        return x
    x[0] = 0
    x[1] = -0.0
    x[2] = 7.25
    x[3, -1] = np.nan
    x[4, 0] = np.inf
    x[5, -1] = -np.inf
    x[6] = np.where(np.arange(columns) % 2, f32(3e38), f32(-3e38))  # the range overflows
    x[7] = np.where(np.arange(columns) % 2, f32(1.7e38), f32(-1.7e38))  # the range just fits
    x[8] *= f32(1e-44)  # subnormal
    x[9] *= f32(1e-38)
    x[10, 1:] = 0
    x[11] = np.where(x[11] > 0, 1, -1)
    x[12] = np.arange(columns)
    x[13] = -np.abs(x[13])
    x[14] = 1 + np.arange(columns) * np.finfo(f32).eps  # neighbours: the scale is below one unit in the last place
    x[15, 0] = 100  # one outlier: what the search is for
    return x


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_quantize_matches_the_oracle(back_end: BackEnd, fresh: np.random.Generator, bits: int, method: str) -> None:
    module = back_end.module("rows")
    for columns in WIDTHS:
        x = table(fresh, columns)
        num_bins, ratio = int(fresh.integers(1, 30)), float(fresh.choice([0.3, 0.6, 1.0]))
        expected = oracle.row_quantize(x, bits, method, num_bins=num_bins, ratio=ratio)
        found = module.row_quantize(back_end.array(x), bits, method, num_bins=num_bins, ratio=ratio)
        for e, f in zip(expected, found, strict=True):
            assert_same_bits(back_end, f, e)
        values = module.row_dequantize(*found)
        np.testing.assert_array_equal(back_end.numpy(values), oracle.row_dequantize(*expected), strict=True)


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_kmeans_matches_the_oracle(back_end: BackEnd, fresh: np.random.Generator, bits: int) -> None:
    module = back_end.module("rows")
    for columns in WIDTHS:
        x = table(fresh, columns)
        iterations = int(fresh.choice([0, 1, 15]))
        expected = oracle.row_kmeans(x, bits, iterations=iterations)
        found = module.row_kmeans(back_end.array(x), bits, iterations=iterations)
        for e, f in zip(expected, found, strict=True):
            assert_same_bits(back_end, f, e)
        values = module.row_lookup(*found)
        np.testing.assert_array_equal(back_end.numpy(values), oracle.row_lookup(*expected), strict=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_floats_are_rounded_first(back_end: BackEnd, fresh: np.random.Generator, dtype: str) -> None:
    if back_end.library == "strict" and dtype != "float64":
        pytest.skip("the array API standard has no 16-bit floats")
    module = back_end.module("rows")
    values = fresh.standard_normal((5, 40))
    if dtype != "float64":
        values = values.astype(f32)  # so that rounding to 16 bits happens once in any library
    if dtype == "float64":
        values[2, 3] = 1e300  # infinite as float32
    x = back_end.array(values, dtype)
    rounded = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float32).numpy()
    for bits, method in ((4, "adaptive"), (8, "asymmetric")):
        found = module.row_quantize(x, bits, method, num_bins=8, ratio=1.0)
        for e, f in zip(oracle.row_quantize(rounded, bits, method, num_bins=8), found, strict=True):
            assert_same_bits(back_end, f, e)
    for e, f in zip(oracle.row_kmeans(rounded, 2), module.row_kmeans(x, 2, iterations=15), strict=True):
        assert_same_bits(back_end, f, e)


def test_empty_and_strided(back_end: BackEnd, fresh: np.random.Generator) -> None:
    module = back_end.module("rows")
    codes, scale, minimum = module.row_quantize(back_end.array(np.zeros((0, 4), f32)), 4, "adaptive", num_bins=5)
    assert (tuple(codes.shape), tuple(scale.shape), tuple(minimum.shape)) == ((0, 4), (0,), (0,))
    assert tuple(module.row_dequantize(codes, scale, minimum).shape) == (0, 4)
    if back_end.library == "strict":
        return
    x = table(fresh, 20)
    expected = oracle.row_quantize(np.ascontiguousarray(x.T[::2]), 4, "adaptive", num_bins=5)
    for e, f in zip(expected, module.row_quantize(back_end.array(x).T[::2], 4, "adaptive", num_bins=5), strict=True):
        assert_same_bits(back_end, f, e)


def scalar_quantize(
    row: np.ndarray[Any, Any], bits: int, num_bins: int, steps: int
) -> tuple[list[int], np.float32, np.float32]:
    """Quantize by the adaptive method in scalar float32 operations."""
    top = f32(2**bits - 1)
    lo, hi = row.min(), row.max()
    width = hi - lo

    def cost(i: int, j: int) -> int:
        a, b = f32(i) / f32(num_bins), f32(num_bins - j) / f32(num_bins)
        r = b - a
        total = 0
        for value in row:
            y = (value - lo) / width
            q = np.rint(min(max((y - a) * (top / r), f32(0)), top)) if r > 0 else f32(0)
            v = q * (r / top) + a if r > 0 else a
            total += int(np.rint(f32(32768) * (v - y))) ** 2
        return total

    i = j = 0
    best = (cost(0, 0), 0, 0)
    for _ in range(steps):
        up, down = cost(i + 1, j), cost(i, j + 1)
        i, j = (i + 1, j) if up < down else (i, j + 1)
        if min(up, down) < best[0]:
            best = (min(up, down), i, j)
    step = width / f32(num_bins)
    a, b = lo + f32(best[1]) * step, hi - f32(best[2]) * step
    scale = (b - a) / top
    return [int(np.rint(min(max((v - a) / scale, f32(0)), top))) for v in row], scale, a


@pytest.mark.parametrize("bits", [2, 4])
def test_the_search_by_the_book(fresh: np.random.Generator, bits: int) -> None:
    x = fresh.standard_t(2, (6, 24)).astype(f32)
    codes, scale, minimum = row_quantize(x, bits, "adaptive", num_bins=10, ratio=0.7)
    for r in range(x.shape[0]):
        expected = scalar_quantize(x[r], bits, 10, 7)
        assert (codes[r].tolist(), scale[r], minimum[r]) == expected


def test_the_earliest_of_equals_wins(back_end: BackEnd) -> None:
    """Of ranges with equal error the earliest, the whole one, is chosen."""
    x = back_end.array(np.array([[0.0, 0.5, 1.0]], f32))
    codes, scale, minimum = back_end.module("rows").row_quantize(x, 1, "adaptive", num_bins=2, ratio=1.0)
    assert back_end.numpy(codes).tolist() == [[0, 0, 1]]
    assert (back_end.numpy(scale).tolist(), back_end.numpy(minimum).tolist()) == ([1.0], [0.0])


def mean_l2(x: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(((x.astype(float) - values) ** 2).sum(1)).mean())


def test_the_order_of_the_methods(fresh: np.random.Generator) -> None:
    """Figure 9: symmetric is worst, and the search is never worse than the plain range."""
    x = (fresh.standard_t(4, (400, 64)) + 1.0).astype(f32)
    for bits in (2, 3, 4):
        errors = [mean_l2(x, row_dequantize(*row_quantize(x, bits, method))) for method in METHODS]  # type: ignore[arg-type]
        errors.append(mean_l2(x, row_lookup(*row_kmeans(x, bits))))
        symmetric, asymmetric, adaptive, kmeans = errors
        assert kmeans < asymmetric < symmetric
        assert adaptive < asymmetric


def test_kmeans_recovers_few_values(fresh: np.random.Generator) -> None:
    values = np.array([-1.0, -0.25, 0.5, 1.0], f32)
    x = fresh.choice(values, (20, 50))
    x[:, 0], x[:, 1] = values[0], values[-1]
    out = row_lookup(*row_kmeans(x, 2))
    assert np.abs(out - x).max() <= 2**-22


def test_defaults_are_the_papers(fresh: np.random.Generator) -> None:
    """15 iterations of k-means; 25 bins up to 3 bits, 45 at 4; over the whole range."""
    x = fresh.standard_t(2, (40, 64)).astype(f32)
    for found, same, other in zip(
        row_kmeans(x, 3), row_kmeans(x, 3, iterations=15), row_kmeans(x, 3, iterations=5), strict=True
    ):
        assert found.tobytes() == same.tobytes() != other.tobytes()
    for bits, bins in ((2, 25), (3, 25), (4, 45)):
        found, same = row_quantize(x, bits), row_quantize(x, bits, "adaptive", num_bins=bins, ratio=1.0)
        assert [a.tobytes() for a in found] == [a.tobytes() for a in same]
        assert found[0].tobytes() != row_quantize(x, bits, "adaptive", num_bins=bins - 10)[0].tobytes()


def test_ratio_stops_the_search() -> None:
    cases = {(25, 1.0): 25, (25, 0.6): 15, (25, 0.28): 7, (45, 0.2): 9, (10, 0.01): 1, (1, 1.0): 1, (3, 1 / 3): 1}
    assert {case: search_steps(*case) for case in cases} == cases


@given(
    hnp.arrays(
        f32, st.tuples(st.integers(0, 4), st.integers(0, 9)), elements=st.floats(-(2.0**100), 2.0**100, width=32)
    ),
    st.sampled_from([1, 2, 3, 8]),
)
def test_error_is_half_a_step(x: np.ndarray[Any, Any], bits: int) -> None:
    codes, scale, minimum = row_quantize(x, bits, "asymmetric")
    out = row_dequantize(codes, scale, minimum).astype(float)
    # the formula's own roundings: of the scale (also below the normal numbers), of the product and of the sum
    slack = np.abs(x).max(axis=1, initial=0.0) * 2.0**-22 + 2.0**-149 * 2**bits
    assert (np.abs(out - x) <= (scale.astype(float) / 2 + slack)[:, None]).all()
    assert codes.size == 0 or int(codes.max()) < 2**bits


def test_public_functions_stay_in_torch() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.bfloat16, requires_grad=True)
    codes, scale, minimum = row_quantize(x, 2)
    assert (codes.dtype, scale.dtype, minimum.dtype) == (torch.uint8, torch.float32, torch.float32)
    assert torch.equal(row_dequantize(codes, scale, minimum), x.detach().float())
    assert torch.allclose(row_lookup(*row_kmeans(x, 2)), x.detach().float(), atol=2e-6)


@pytest.mark.parametrize("code", [3, 255])
def test_a_code_without_entry_is_refused(back_end: BackEnd, code: int) -> None:
    codes, codebook = np.array([[0, 1], [code, 2]], np.uint8), np.zeros((2, 3), f32)
    with pytest.raises(CorruptDataError, match=f"code {code} .* of 3"):
        back_end.module("rows").row_lookup(back_end.array(codes), back_end.array(codebook))


X = np.zeros((2, 3), f32)
C = np.zeros((2, 3), np.uint8)
S = np.zeros(2, f32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: row_quantize(X.astype(int), 4), BadArgumentError, "int64"),
        (lambda: row_quantize(X[0], 4), BadArgumentError, "2 axes"),
        (lambda: row_quantize(X, 0), BadArgumentError, "bits is 0"),
        (lambda: row_quantize(X, 9), BadArgumentError, "bits is 9"),
        (lambda: row_quantize(X, 4, "greedy"), BadArgumentError, "greedy"),  # type: ignore[arg-type]
        (lambda: row_quantize(X, 4, num_bins=0), BadArgumentError, "num_bins is 0"),
        (lambda: row_quantize(X, 4, num_bins=5000), BadArgumentError, "num_bins is 5000"),
        (lambda: row_quantize(X, 4, ratio=0.0), BadArgumentError, "ratio is 0"),
        (lambda: row_quantize(X, 4, ratio=float("nan")), BadArgumentError, "ratio is nan"),
        (lambda: row_kmeans(X, 4, iterations=-1), BadArgumentError, "iterations is -1"),
        (lambda: row_dequantize(C.astype(int), S, S), BadArgumentError, "uint8"),
        (lambda: row_dequantize(C, S.astype(float), S), BadArgumentError, "scale is float64"),
        (lambda: row_dequantize(C, S, S[:1]), CorruptDataError, "minimum"),
        (lambda: row_lookup(C, X[:1]), CorruptDataError, "codebook"),
        (lambda: row_lookup(C, np.zeros((2, 0), f32)), CorruptDataError, "codebook"),
        (lambda: row_lookup(C, np.zeros((2, 257), f32)), CorruptDataError, "codebook"),
    ],
)
def test_bad_arguments(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
