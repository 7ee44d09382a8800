"""The published search: divide and conquer, and the order of the neighbourhood."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import shrinkpoint as sp
from shrinkpoint.searching.cube import Cube, Point, normal
from shrinkpoint.searching.methods import divided, parts

from .common import perceptron

BINS = (4, 6, 8, 12, 16, 32)
LINE = Cube(BINS, (0.0,), ("magnitude",), (0.005,))
TABLE_2 = Cube(metric=("magnitude",))


def order(cube: Cube, passes: dict[int, bool]) -> list[int]:
    """Return the bins tried on a cube of one axis."""
    tried, outcomes, cubes = [], {}, [cube]
    while cubes := divided(cubes, outcomes):
        axis = cubes[0].bins
        bins = axis[(len(axis) - 1) // 2]
        tried.append(bins)
        outcomes[Point(bins, 0.0, "magnitude", 0.005, 0.0, 32)] = passes[bins]
    return tried


def test_one_axis_is_the_papers_binary_search() -> None:
    # Table 2's bins: 8 are tried first. If 12 bins are needed, 8 fail, and 16 and 12 follow.
    assert order(LINE, {b: b >= 12 for b in BINS}) == [8, 16, 12]
    assert order(LINE, {b: b >= 4 for b in BINS}) == [8, 4]
    assert order(LINE, dict.fromkeys(BINS, False)) == [8, 16, 32]


def test_the_parts_of_table_2s_cube_are_what_the_middle_leaves_open() -> None:
    middle = Point(8, 0.3, "magnitude", 0.005, 0.0, 32)
    every = {normal(p) for p in TABLE_2}
    for passed in (True, False):
        found = [normal(p) for part in parts(TABLE_2, passed) for p in part]
        settled = {p for p in every if (p.at_least(middle) if passed else middle.at_least(p))}
        assert len(found) == len(set(found))
        assert set(found) == every - settled
        assert len(every) == 108


@pytest.mark.parametrize("threshold", [0.01, 0.05])
def test_the_first_search_finds_the_smallest_point_that_passes(threshold: float) -> None:
    chain, cube = perceptron(), Cube((4, 8, 16, 32), (0.0, 0.3), ("magnitude",), (0.0005, 0.01))
    found = sp.search(
        chain.states[0], chain.evaluate, threshold,
        options=sp.SearchOptions(method="published", cube=cube, budget=50, direction="lower"),
    )  # fmt: skip
    exact = chain.evaluate(chain.states[0])
    sizes = []
    for point in cube:
        ckpt = sp.compress(chain.states[0], cfg=point.config())
        if chain.evaluate(sp.decompress(ckpt)) / exact - 1 <= threshold:
            sizes.append(ckpt.nbytes)
    # Quality is only nearly monotonic along the axes.
    assert found.is_exhaustive
    assert found.nbytes <= 1.05 * min(sizes)
    assert found.evaluations < len(cube)


def test_neighbours_are_tried_by_decreasing_ratio_and_the_first_that_passes_is_taken() -> None:
    chain = perceptron()
    weights = chain.states[1]
    options = sp.SearchOptions(method="published", direction="lower", budget=40, steps=1)
    first = sp.search(weights, chain.evaluate, 0.05, grads=chain.grads[1], options=options)
    origin = Point(16, 0.2, "magnitude", 0.0005, 0.0, 32)
    last = dataclasses.replace(first, point=origin, patience=3)
    evaluated: list[float] = []

    def quality(state: dict[str, object]) -> float:
        # Nothing passes before the fifth call: the state itself, the other metric, the choice, two neighbours.
        evaluated.append(1.0 if len(evaluated) in (0, 4) else 2.0 + 0.1 * len(evaluated))
        return evaluated[-1]

    last = dataclasses.replace(last, baseline=1.0)
    found = sp.search(weights, quality, 0.05, grads=chain.grads[1], last=last, options=options)
    points = [t.point for t in found.trials if t.point is not None]
    assert points[0] == dataclasses.replace(origin, metric="sensitivity")
    assert points[1] == origin
    neighbours = [t.estimated for t in found.trials if t.point is not None][2:]
    assert neighbours == sorted(neighbours)
    assert all(p.at_least(origin) for p in points[1:])
    assert (found.method, found.point) == ("neighbourhood", points[-1])
    assert [t.passed for t in found.trials if t.point is not None] == [False] * (len(points) - 1) + [True]


def test_several_processes_try_the_middles_of_several_parts() -> None:
    after = divided([TABLE_2], {Point(8, 0.3, "magnitude", 0.005, 0.0, 32): False})
    assert [(part.bins, part.prune, part.protect) for part in after] == [
        ((12, 16, 32), TABLE_2.prune, TABLE_2.protect),
        ((4, 6, 8), (0.0, 0.1, 0.2), TABLE_2.protect),
        ((4, 6, 8), (0.3, 0.4, 0.5), (0.01,)),
    ]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(sp.BadArgumentError, match="method"):
        sp.search({"weight": torch.zeros(8, 8)}, lambda _: 1.0, 0.1, options=sp.SearchOptions(method="guess"))
