"""The published search: divide and conquer, then the neighbourhood of the last choice.

It needs no model of the degradation. Quality is taken to rise along each axis of the cube, so that one trial decides a
part of it: every milder point of one that passes also passes and is larger; every more aggressive point of one that
fails also fails.

Source: Inshrinkerator, section 5 (guided exhaustive search, algorithm 4; delta-neighbourhood search).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

from .cube import Cube, Point, normal
from .result import SearchResult, Trial
from .space import Choice, Space

_AXES = ("bins", "prune", "protect")
_BETTER = 0.9
"""The pruning metric is switched if the other metric has at most this multiple of the degradation."""
Box = tuple[tuple[int, int], ...]
"""First and last step along each axis, from the most aggressive value on."""


def divide(cube: Cube, metric: str) -> Generator[Point, bool, None]:
    """Yield the points to try under one pruning metric; send whether each passed.

    The middle of a box decides one of its octants: the milder one if it passes, the more aggressive one if it fails.
    The rest of the box is divided into three boxes.

    Example:
        >>> steps = divide(Cube(bins=(4, 8, 16), prune=(0.0,), protect=(0.005,)), "magnitude")
        >>> next(steps).bins, steps.send(False).bins
        (8, 16)
    """
    values = {name: getattr(cube, name) for name in _AXES}
    values["prune"] = values["prune"][::-1]
    boxes: list[Box] = [tuple((0, len(values[name]) - 1) for name in _AXES)]
    while boxes:
        box = boxes.pop()
        if any(first > last for first, last in box):
            continue
        middle = tuple((first + last) // 2 for first, last in box)
        chosen = {name: values[name][at] for name, at in zip(_AXES, middle, strict=True)}
        first = Point(cube.bins[0], 0.0, metric, 0.0, cube.rate[0], cube.embedding_bins[-1], cube.system)
        passed = yield dataclasses.replace(first, **chosen)
        for axis in range(len(box)):
            # Along the axes before this one: the decided side. Along this one: the other side.
            part = list(box)
            for before in range(axis):
                part[before] = (middle[before], box[before][1]) if passed else (box[before][0], middle[before])
            part[axis] = (box[axis][0], middle[axis] - 1) if passed else (middle[axis] + 1, box[axis][1])
            boxes.append(tuple(part))


def search_divided(space: Space) -> Choice:
    """Search the cube by divide and conquer under each pruning metric; take the smaller choice."""
    tried: dict[Point, Trial] = {}
    for metric in space.cube.metric:
        steps = divide(space.cube, metric)
        point = next(steps, None)
        while point is not None and space.left > 0:
            key = normal(point)
            if key not in tried:
                tried |= {t.point: t for t in space.round([key], ()) if t.point is not None}
            try:
                point = steps.send(tried[key].passed)
            except StopIteration:
                point = None
    notes = (f"the budget of {space.budget} evaluations one after another is spent",) if space.left <= 0 else ()
    return Choice(min(space.trials.passing, key=lambda t: t.nbytes, default=None), {}, notes)


def search_near(space: Space, last: SearchResult, steps: int) -> Choice:
    """Try the last choice and its milder neighbours, the smallest first, until a round passes.

    The last choice under the other pruning metric comes first; if that is clearly better, it decides the metric.
    """
    if last.point is None:
        return Choice(None, {})
    origin, trials = normal(last.point), space.trials
    metric = origin.metric
    others = [m for m in space.cube.metric if m != metric] if origin.prune else []
    if others and space.left > 0:
        twin = dataclasses.replace(origin, metric=others[0])
        found = {t.point: t for t in space.round([twin, origin][: trials.at_once], ())}
        if twin in found and found[twin].degradation <= _BETTER * (last.degradation or 0.0):
            metric = others[0]
    points = {normal(p) for p in space.cube.neighbours(origin, steps) if not p.prune or p.metric == metric}
    points = {dataclasses.replace(p, metric=metric) if p.prune else p for p in points}
    queue = [c.point for c in sorted(trials.candidates(sorted(points, key=str)), key=lambda c: c.nbytes)]
    while queue and space.left > 0:
        passing = [t for t in space.round(queue[: trials.at_once], ()) if t.passed]
        if passing:
            return Choice(min(passing, key=lambda t: t.nbytes), {"not tried after the first that passed": len(queue)})
        queue = queue[trials.at_once :]
    return Choice(None, {})


def search_as_published(space: Space, last: SearchResult | None, steps: int) -> tuple[Choice, str, bool]:
    """Search near the last choice, then by divide and conquer.

    Returns:
        The choice, the method, and whether it fell back."""
    fell_back = False
    if last is not None and last.point is not None and space.has(last.point):
        choice = search_near(space, last, steps)
        if choice.trial is not None:
            return choice, "neighbourhood", False
        fell_back = True
    return search_divided(space), "exhaustive", fell_back
