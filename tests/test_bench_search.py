"""Remarks of `bench search` on smaller points that a search has missed."""

from __future__ import annotations

import pytest

from shrinkpoint.bench.studies.search import Measured, missed

BY = "by more than the 0.07% their losses differ on other data"


@pytest.mark.parametrize(
    ("loss", "elsewhere", "said"),
    [
        (0.0008, 0.0015, f"0 {BY}: a miss within the spread of evaluate"),
        (0.0001, 0.0008, f"1 {BY}"),
        (0.0011, 0.0002, ""),
    ],
)
def test_a_miss_is_told_with_the_spread(loss: float, elsewhere: float, said: str) -> None:
    # Larger points, those within three percent, and failing ones are not missed, and do not count for the spread.
    points = [Measured(90, loss, elsewhere), Measured(98, 0.0, 0.5), Measured(120, 0.0, 0.0), Measured(60, 0.4, 0.1)]
    assert missed(points, 99.0, 0.001) == (f"; 1 smaller ones pass, {said}" if said else "")
    assert missed(points, 91.0, 0.001) == ""
    assert missed(points, None, 0.001) == ""
