"""Low-rank prediction of small numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import prediction as kernels

from ..harness import Case, Job
from .place import COLUMNS, FEW, LEVELS, ROWS, Call, Place, comes_back, oracle

_RANK = 8


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("low_rank_factors", lambda: factors(at), on="cpu"),
        at.case("low_rank_predictions", lambda: predictions(at), on="cpu"),
        at.case("low_rank_differences", lambda: differences(at), on="cpu"),
        at.case("zigzag", lambda: mapped(at, "zigzag", np.int8), on="cpu"),
        at.case("unzigzag", lambda: mapped(at, "unzigzag", np.uint8), on="cpu"),
    ]


def _signed(at: Place) -> tuple[Any, Any]:
    """Return small signed numbers, drawn from levels."""
    before, after = (part.view(np.int8) - np.int8(LEVELS // 2) for part in at.levels())
    return before, after


def factors(at: Place) -> Job:
    """Fit the factors of a matrix."""
    numbers = _signed(at)[0][: at.n // COLUMNS * COLUMNS]
    heights, few = np.array([numbers.size // COLUMNS]), np.array([max(1, FEW // 16 // COLUMNS)])
    part = numbers[: int(few[0]) * COLUMNS]
    expected = oracle("prediction").low_rank_factors(part, few, COLUMNS, 0)
    found = lambda: kernels.low_rank_factors(part, few, COLUMNS)  # noqa: E731
    check = comes_back("factors", found, expected, f"{part.size:,} elements = oracle")
    return at.job(lambda: kernels.low_rank_factors(numbers, heights, COLUMNS), check, 1, width=1, note=ROWS)


def predictions(at: Place) -> Job:
    """Multiply the factors."""
    rows, columns = (np.resize(_signed(at)[1], (lines, _RANK)) for lines in (-(-at.n // COLUMNS), COLUMNS))
    heights, n = np.array([rows.shape[0]]), min(at.n, FEW)
    few = np.array([-(-n // COLUMNS)])
    part = rows[: int(few[0])]
    expected = oracle("prediction").low_rank_predictions(part, columns, few, n, 0)
    found = lambda: kernels.low_rank_predictions(part, columns, few, n)  # noqa: E731
    check = comes_back("predictions", found, expected, f"{n:,} elements = oracle")
    call = lambda: kernels.low_rank_predictions(rows, columns, heights, at.n)  # noqa: E731
    return at.job(call, check, 2, width=1, note=f"rank {_RANK}, {ROWS}")


def differences(at: Place) -> Job:
    """Subtract the prediction from the numbers."""
    numbers, other = _signed(at)
    rows, columns = (np.resize(other, (lines, _RANK)) for lines in (-(-at.n // COLUMNS), COLUMNS))
    heights, n = np.array([rows.shape[0]]), min(at.n, FEW)
    few = np.array([-(-n // COLUMNS)])
    part = rows[: int(few[0])]
    expected = oracle("prediction").low_rank_differences(numbers[:n], part, columns, few, 0)
    found = lambda: kernels.low_rank_differences(numbers[:n], part, columns, few)  # noqa: E731
    check = comes_back("differences", found, expected, f"{n:,} elements = oracle")
    call = lambda: kernels.low_rank_differences(numbers, rows, columns, heights)  # noqa: E731
    return at.job(call, check, 3, width=1, note=f"rank {_RANK}, {ROWS}")


def mapped(at: Place, name: str, dtype: type[np.generic]) -> Job:
    """Map signed bytes to unsigned ones, or back."""
    values = np.ascontiguousarray(_signed(at)[0]).view(dtype)
    return at.compared(Call(f"prediction.{name}", (values,)), 2, width=1)
