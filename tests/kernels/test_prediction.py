"""Low-rank prediction: the oracle to the bit, planted structure, noise, any shape and phase."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shrinkpoint import kernels as k
from shrinkpoint.kernels.errors import BadArgumentError
from shrinkpoint.kernels.prediction import RANK, cpu, sample_rows
from shrinkpoint.kernels.prediction import reference as oracle

NpArray = np.ndarray[Any, Any]


def planted(rng: np.random.Generator, rows: int, columns: int, strengths: list[float], noise: float = 0.5) -> NpArray:
    """Return a rounded int8 sum of outer products with these strengths, and noise."""
    found = noise * rng.standard_normal((rows, columns))
    for strength in strengths:
        found += strength * rng.standard_normal((rows, 1)) * rng.standard_normal((1, columns))
    return np.clip(np.rint(found), -127, 127).astype(np.int8)


def power(numbers: NpArray) -> float:
    """Return the mean square of numbers."""
    return float((numbers.astype(np.float64) ** 2).mean())


def same(found: tuple[NpArray, NpArray], right: tuple[NpArray, NpArray]) -> None:
    for one, other in zip(found, right, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@given(
    seed=st.integers(0, 2**32),
    heights=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    columns=st.integers(1, 40),
    cut=st.integers(0, 39),
    strength=st.sampled_from([0.0, 0.7, 2.0, 60.0]),
)
def test_factors_and_predictions_are_the_oracles(
    seed: int, heights: list[int], columns: int, cut: int, strength: float
) -> None:
    rng = np.random.default_rng(seed)
    shape, phase, end = np.array(heights), 0, 0
    numbers = np.concatenate([planted(rng, h, columns, [strength], 0.4) for h in heights]).reshape(-1)
    if len(heights) == 1:  # a part of a matrix may begin and end within a row
        phase = cut % columns
        end = min((cut * 7) % columns, max(columns - phase - 1, 0) if heights[0] == 1 else columns - 1)
        numbers = numbers[phase : numbers.size - end]
    found = cpu.low_rank_factors(numbers, shape, columns, phase)
    same(found, oracle.low_rank_factors(numbers, shape, columns, phase))
    any_factors = rng.integers(-128, 128, (2, 200, RANK)).astype(np.int8)
    for rows, across in (
        found,
        (any_factors[0, : shape.sum()], any_factors[1, :1].repeat(shape.size * columns, axis=0)),
    ):
        given_ = np.ascontiguousarray(rows), across, shape, numbers.size, phase
        same(cpu.low_rank_predictions(*given_), oracle.low_rank_predictions(*given_))
        all_ = numbers, *given_[:3], phase
        same(cpu.low_rank_differences(*all_), oracle.low_rank_differences(*all_))


@pytest.mark.parametrize("module", [cpu, oracle])
def test_zigzag_and_back(module: Any) -> None:
    numbers = np.arange(-128, 128).astype(np.int8)
    symbols = module.zigzag(numbers)
    np.testing.assert_array_equal(symbols, [2 * x if x >= 0 else -2 * x - 1 for x in numbers.tolist()])
    np.testing.assert_array_equal(module.unzigzag(symbols), numbers)


def test_extreme_factors_wrap_as_in_the_oracle() -> None:
    rows, across = np.full((3, RANK), -128, np.int8), np.full((5, RANK), 127, np.int8)
    same(
        k.low_rank_predictions(rows, across, np.array([3]), 15),
        oracle.low_rank_predictions(rows, across, np.array([3]), 15, 0),
    )


@pytest.mark.parametrize(("rows", "columns"), [(200, 300), (1000, 40), (40, 1000), (64, 64), (2100, 700)])
def test_planted_structure_is_removed(fresh: np.random.Generator, rows: int, columns: int) -> None:
    numbers = planted(fresh, rows, columns, [1.5, 1.2, 1.0], 0.3).reshape(-1)
    shape = np.array([rows])
    factors = k.low_rank_factors(numbers, shape, columns)
    assert 3 <= np.count_nonzero(factors[1].any(axis=0)) <= 4
    nearest, _ = k.low_rank_predictions(*factors, shape, numbers.size)
    assert power(numbers - nearest) < 0.4 < power(numbers) / 3


@pytest.mark.parametrize("deviation", [0.1, 0.4, 1.0, 4.0, 40.0])
@pytest.mark.parametrize(("rows", "columns"), [(300, 200), (2000, 16), (16, 2000), (64, 64), (4, 4096), (4096, 4)])
def test_noise_has_no_factors(fresh: np.random.Generator, rows: int, columns: int, deviation: float) -> None:
    numbers = planted(fresh, rows, columns, [], deviation).reshape(-1)
    assert not any(factor.any() for factor in k.low_rank_factors(numbers, np.array([rows]), columns))


def test_few_large_numbers_do_not_determine_the_directions(fresh: np.random.Generator) -> None:
    numbers = planted(fresh, 256, 256, [1.5], 0.3)
    numbers[3, 7] = numbers[90, 200] = 127
    factors = k.low_rank_factors(numbers.reshape(-1), np.array([256]), 256)
    nearest, _ = k.low_rank_predictions(*factors, np.array([256]), numbers.size)
    rest = (numbers.reshape(-1) - nearest).astype(np.float64)
    assert np.sort(rest**2)[:-2].mean() < 0.3


def test_the_quarter_tells_on_which_side_a_number_is(fresh: np.random.Generator) -> None:
    """Differences are positive more often where the prediction lies above its nearest integer."""
    numbers = planted(fresh, 512, 512, [1.5, 1.0], 0.3).reshape(-1)
    factors = k.low_rank_factors(numbers, np.array([512]), 512)
    nearest, quarter = k.low_rank_predictions(*factors, np.array([512]), numbers.size)
    means = [float((numbers - nearest)[quarter == q].mean()) for q in range(4)]
    assert means == sorted(means)
    assert means[0] < -0.2 < 0.2 < means[3] + 0.05


def test_the_sample_is_within_the_matrix() -> None:
    for rows in (1, 63, 64, 300, 10**6):
        for columns in (1, 64, 4096, 10**7):
            assert 1 <= sample_rows(rows, columns) <= rows


@pytest.mark.parametrize(
    "call",
    [
        lambda: k.low_rank_factors(np.zeros(6, np.uint8), np.array([2]), 3),
        lambda: k.low_rank_factors(np.zeros(6, np.int8), np.array([3]), 3),
        lambda: k.low_rank_factors(np.zeros(6, np.int8), np.array([1, 0, 1]), 3),
        lambda: k.low_rank_factors(np.zeros(6, np.int8), np.array([1.0, 1.0]), 3),
        lambda: k.low_rank_factors(np.zeros(6, np.int8), np.array([1, 2]), 3, 1),
        lambda: k.low_rank_factors(np.zeros(7, np.int8), np.array([1, 2]), 3),
        lambda: k.low_rank_factors(np.zeros(6, np.int8), np.array([2]), 3, 3),
        lambda: k.low_rank_factors(np.zeros(6, np.int8), [2], 3),  # type: ignore[arg-type]
        lambda: k.low_rank_predictions(np.zeros((2, 7), np.int8), np.zeros((3, 8), np.int8), np.array([2]), 6),
        lambda: k.low_rank_predictions(np.zeros((2, 8), np.int8), np.zeros((3, 8), np.int16), np.array([2]), 6),
        lambda: k.low_rank_predictions(np.zeros((2, 8), np.int8), np.zeros((3, 8), np.int8), np.array([1, 1]), 6),
        lambda: k.low_rank_predictions(np.zeros((2, 8), np.int8), np.zeros((3, 8), np.int8), np.array([2]), 7),
        lambda: k.low_rank_predictions(np.zeros((2, 8), np.int8), np.zeros((0, 8), np.int8), np.array([2]), 0),
        lambda: k.low_rank_predictions(np.zeros((3, 8), np.int8), np.zeros((3, 8), np.int8), np.array([2]), 6),
    ],
)
def test_arguments_that_do_not_fit(call: Any) -> None:
    with pytest.raises(BadArgumentError):
        call()
