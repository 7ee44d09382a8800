"""The published search: every point is decided, and the order of neighbours is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shrinkpoint as sp
from shrinkpoint.searching.cube import Cube, Point, normal
from shrinkpoint.searching.published import divide

from .common import perceptron

CUBE = Cube()


def tried(cube: Cube, passes: Callable[[Point], bool]) -> dict[Point, bool]:
    """Return the points that one pruning metric's division tries, and whether each passed."""
    found: dict[Point, bool] = {}
    steps = divide(cube, "magnitude")
    point = next(steps)
    while True:
        assert point not in found
        found[point] = passes(point)
        try:
            point = steps.send(found[point])
        except StopIteration:
            return found


@given(
    weights=st.tuples(*[st.floats(0, 1)] * 3),
    least=st.floats(-0.1, 3.1),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3)),
)
def test_each_point_is_tried_or_decided_by_one_that_was(
    weights: tuple[float, ...], least: float, sizes: tuple[int, ...]
) -> None:
    cube = Cube(CUBE.bins[: sizes[0]], CUBE.prune[: sizes[1]], ("magnitude",), CUBE.protect[: sizes[2]])

    def quality(p: Point) -> float:
        mildness = p.bins / 32, 1 - p.prune, p.protect / 0.01
        return sum(w * x for w, x in zip(weights, mildness, strict=True))

    found = tried(cube, lambda p: quality(p) >= least)
    for point in cube:
        if point not in found:
            is_milder = any(passed and point.at_least(other) for other, passed in found.items())
            is_bolder = any(not passed and other.at_least(point) for other, passed in found.items())
            assert is_milder or is_bolder
            assert is_milder == (quality(point) >= least)


def test_the_middle_comes_first_and_decides_an_octant() -> None:
    """In a row of five the middle is tried, then the middle of the undecided half."""
    row = Cube(bins=(4, 6, 8, 12, 16), prune=(0.0,), metric=("magnitude",), protect=(0.005,))
    assert [p.bins for p in tried(row, lambda p: p.bins >= 12)] == [8, 12]
    assert [p.bins for p in tried(row, lambda p: p.bins >= 6)] == [8, 4, 6]
    whole = tried(CUBE, lambda p: p.bins >= 12 and p.prune <= 0.2)
    assert len(whole) <= len(CUBE) / 2 / 3  # of 108 points under one metric


def test_the_published_search_finds_what_the_modelled_one_finds() -> None:
    chain = perceptron()
    kinds = {f"model/{layer}.weight": "linear" for layer in (0, 2, 4)}
    options = sp.SearchOptions(direction="lower", budget=80, method="published")
    first = sp.search(chain.states[0], chain.evaluate, 0.01, grads=chain.grads[0], kinds=kinds, options=options)
    assert first.met
    passing = [t for t in first.trials if t.passed and t.point is not None]
    assert first.nbytes == min(t.nbytes for t in passing)
    later = sp.search(
        chain.states[1], chain.evaluate, 0.01, grads=chain.grads[1], kinds=kinds, options=options, last=first
    )
    assert later.met
    assert later.method == "neighbourhood"
    points = [t.point for t in later.trials if t.point is not None]
    assert first.point is not None
    origin = normal(first.point)
    assert all(p.bins >= origin.bins and p.prune <= origin.prune and p.protect >= origin.protect for p in points)
    assert [t.passed for t in later.trials if t.point is not None] == [False] * (len(points) - 1) + [True]


def test_the_other_pruning_metric_is_tried_first() -> None:
    chain = perceptron()
    kinds = {f"model/{layer}.weight": "linear" for layer in (0, 2, 4)}
    cube = Cube(bins=(16, 32), prune=(0.2,), protect=(0.005,))
    options = sp.SearchOptions(cube=cube, direction="lower", budget=80, method="published")
    first, later = None, None
    for number in (0, 1):
        first, later = (
            later,
            sp.search(
                chain.states[number],
                chain.evaluate,
                0.5,
                grads=chain.grads[number],
                kinds=kinds,
                options=options,
                last=later,
            ),
        )
    assert first is not None
    assert first.point is not None
    assert later is not None
    twin = next(t.point for t in later.trials if t.point is not None)
    assert twin.metric != first.point.metric
    assert (twin.bins, twin.prune, twin.protect) == (first.point.bins, first.point.prune, first.point.protect)


def test_a_method_must_be_known() -> None:
    with pytest.raises(sp.BadArgumentError, match="method"):
        sp.search({"w": [1.0]}, lambda state: 1.0, 0.01, options=sp.SearchOptions(method="best"))
