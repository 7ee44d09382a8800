"""Multiples of a step: the oracle, NumPy's order of a sum, halves, every width."""

from __future__ import annotations

import numpy as np
import pytest

from shrinkpoint import kernels as k
from shrinkpoint.kernels.errors import BadArgumentError

from .conftest import BackEnd

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the data overflow on purpose
FLOATS = ("float32", "float64")
SIZES = [0, 1, 7, 8, 9, 127, 128, 129, 135, 136, 137, 1000, 1023, 4099]


@pytest.mark.parametrize("dtype", FLOATS)
def test_squares_are_added_up_as_numpy_does(back_end: BackEnd, dtype: str, fresh: np.random.Generator) -> None:
    """Sums are equal to the bit for every size."""
    for n in [*back_end.sizes(SIZES, "multiples.SQUARES"), 30_011]:
        x = (fresh.normal(size=n) * np.exp(4 * fresh.normal(size=n))).astype(dtype)
        total, largest = back_end.module("multiples").square_sum(back_end.array(x))
        assert total == float(np.square(x, dtype=np.float64).sum())
        assert largest == float(np.abs(x).max(initial=0))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_a_sum_of_what_is_not_finite_is_not(back_end: BackEnd, odd: float) -> None:
    x = np.ones(300)
    for at in (0, 131, 299):
        x[at] = odd
        assert not np.isfinite(back_end.module("multiples").square_sum(back_end.array(x))[0])
        x[at] = 1.0


@pytest.mark.parametrize("width", ["int16", "int32"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_multiples_agree_with_the_oracle(back_end: BackEnd, dtype: str, width: str, fresh: np.random.Generator) -> None:
    """Also exactly between two, at both ends of the range, and of steps that are not exact."""
    most = np.iinfo(width).max
    for step in (0.1, 2.0**-7, 1.7e-300 if dtype == "float64" else 3e-42):
        for n in back_end.sizes([0, 1, 1000], "multiples.ELEMENTS"):
            x = fresh.normal(size=n) * most / 8 * step
            x[::3] = (np.rint(x[::3] / step) + 0.5) * step
            x[:2] = np.array([most - 1, 1 - most][: x[:2].size]) * step
            x = x.astype(dtype)
            module = back_end.module("multiples")
            found = module.step_multiples(back_end.array(x), step, width)
            expected = np.rint(x.astype(np.float64) / step).astype(width)
            np.testing.assert_array_equal(back_end.numpy(found), expected, strict=True)
            values = module.step_values(found, step, dtype)
            np.testing.assert_array_equal(back_end.numpy(values), (expected * np.float64(step)).astype(dtype))


def test_arguments_are_checked() -> None:
    for step in (0.0, np.inf, np.nan):
        with pytest.raises(BadArgumentError, match="step"):
            k.step_multiples(np.ones(3), step)
    with pytest.raises(BadArgumentError, match="dtype"):
        k.step_multiples(np.ones(3), 0.5, "int8")
    with pytest.raises(BadArgumentError, match="multiples"):
        k.step_values(np.ones(3), 0.5)
