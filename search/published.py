"""The published search of a cube: divide and conquer along its axes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .cube import Cube, Point, normal
from .result import Trial
from .space import Choice, Space

_SIGNS = {"bins": 1, "prune": -1, "protect": 1, "rate": -1}
"""Axes of a cube; the sign is positive where larger values are milder."""


def _axis(cube: Cube, name: str) -> list[float]:
    """Return the values of an axis from the most aggressive to the mildest."""
    return sorted(getattr(cube, name), key=lambda value: _SIGNS[name] * value)


def _point(cube: Cube, *, middle: bool) -> Point:
    """Return the middle of a cube of one metric, or its most aggressive point."""
    axes = {name: _axis(cube, name) for name in _SIGNS}
    at = {name: axis[(len(axis) - 1) // 2 if middle else 0] for name, axis in axes.items()}
    return normal(
        Point(
            int(at["bins"]),
            at["prune"],
            cube.metric[0],
            at["protect"],
            at["rate"],
            cube.embedding_bins[-1],
            cube.system,
        )
    )


def _with_axis(cube: Cube, name: str, values: Sequence[float]) -> Cube:
    changed: dict[str, Any] = {name: tuple(sorted(values))}
    return dataclasses.replace(cube, **changed)


def parts(cube: Cube, passed: bool) -> list[Cube]:
    """Return the parts of a cube that the trial of its middle leaves open.

    If the middle passed, milder points are not smaller; if it failed, more aggressive ones fail too. On a cube of one
    axis this is binary search.

    Example:
        >>> [part.bins for part in parts(Cube((4, 6, 8, 12, 16, 32), (0.0,), ("magnitude",), (0.005,)), False)]
        [(12, 16, 32)]
    """
    found = []
    for name in _SIGNS:
        axis = _axis(cube, name)
        middle = (len(axis) - 1) // 2
        open_values, others = (axis[:middle], axis[middle:]) if passed else (axis[middle + 1 :], axis[: middle + 1])
        if open_values:
            found.append(_with_axis(cube, name, open_values))
        cube = _with_axis(cube, name, others)
    return found


def divided(cubes: Sequence[Cube], outcomes: Mapping[Point, bool]) -> list[Cube]:
    """Return the cubes that are still open, each without a trial of its middle.

    Args:
        cubes: disjoint parts of the cube searched, of one metric each.
        outcomes: whether each point tried passed.
    """
    found: list[Cube] = []
    for cube in cubes:
        passed = outcomes.get(_point(cube, middle=True))
        found += [cube] if passed is None else divided(parts(cube, passed), outcomes)
    return found


def search_published(space: Space, stale: Sequence[Trial]) -> Choice:
    """Search the cube by divide and conquer under each pruning metric, for the smallest point.

    Args:
        space: the points and trials.
        stale: trials of the last search; they only give the expected degradations of the trials.

    Source: Inshrinkerator, section 5 (guided exhaustive search, algorithm 4); DynaQuant, section 5.2.
    """
    trials = space.trials
    cubes = [dataclasses.replace(space.cube, metric=(metric,)) for metric in space.cube.metric]
    while True:
        best = min(trials.passing, key=lambda t: t.nbytes, default=None)
        cubes = divided(cubes, {t.point: t.passed for t in trials.tried if t.point is not None})
        if best is not None and cubes:
            smallest = trials.candidates([_point(cube, middle=False) for cube in cubes])
            cubes = [cube for cube, c in zip(cubes, smallest, strict=True) if c.nbytes < best.nbytes]
        if not cubes or space.left <= 0:
            break
        space.round([_point(cube, middle=True) for cube in cubes[: trials.at_once]], stale)
    notes = (f"the budget of {space.budget} evaluations one after another is spent",) if cubes else ()
    return Choice(best, {"not tried": sum(map(len, cubes))}, notes)
