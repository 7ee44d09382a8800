"""The methods of a search: neighbourhood, exhaustive, and published.

- *neighbourhood*: the last choice, and milder points near it;
- *exhaustive*: the whole cube, guided by the model of the degradation;
- *published*: divide and conquer along the axes of the cube.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arguments import SearchOptions
from .cube import Cube, Point, normal
from .planning import HOPELESS, LATE, Candidate, chances, degradations, distinct, next_trials, open_points, undominated
from .result import SearchResult, Trial
from .trials import Trials

_LIKELY = 0.5
"""Least probability to pass with which a neighbour is tried where trials run one after another.

If several processes try points at once, all neighbours are tried except hopeless ones.
"""
_BETTER = 0.9
"""The pruning metric is switched if the other metric has at most this multiple of the degradation."""
_PATIENCE = 4
"""Number of searches in which the other metric is not tried again after it was not better."""
_TOLERANCE = 0.01
"""Share of the bytes below which a saving is not worth another trial."""
_SIGNS = {"bins": 1, "prune": -1, "protect": 1, "rate": -1}
"""Axes of a cube; the sign is positive where larger values are milder."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen trial (None: nothing passes), and counts of untried points by reason."""

    trial: Trial | None
    discarded: dict[str, int]
    notes: tuple[str, ...] = ()
    patience: int = 0


class Space:
    """The points of a cube that apply to a state, and the trials on them.

    Args:
        cube: the cube as the caller gave it.
        trials: runs the trials.
        budget: maximum number of rounds.
    """

    def __init__(self, cube: Cube, trials: Trials, budget: int) -> None:
        search_state, asked = trials.search_state, cube
        if not search_state.has_embeddings:
            cube = dataclasses.replace(cube, embedding_bins=cube.embedding_bins[-1:])
        self.notes: list[str] = []
        if not search_state.sensitive and "magnitude" in cube.metric:
            cube = dataclasses.replace(cube, metric=("magnitude",))
            self.notes.append("nothing is pruned by sensitivity: there are arrays without gradients")
        self.asked, self.cube, self.trials, self.budget = asked, cube, trials, budget
        self._is_checked = False

    @property
    def left(self) -> int:
        """Number of rounds that may still be run."""
        return self.budget - self.trials.rounds

    @property
    def floor(self) -> float:
        """The smallest degradation that `evaluate` can distinguish from zero."""
        return max(self.trials.scale.spread, 0.01 * self.trials.allowed)

    @property
    def likely(self) -> float:
        """Least probability to pass at which a neighbour of the last choice is tried."""
        return _LIKELY if self.trials.at_once == 1 else HOPELESS

    def has(self, point: Point) -> bool:
        """Return whether the neighbourhood of a point can be searched."""
        return point.system == self.cube.system and (point.prune == 0.0 or point.metric in self.cube.metric)

    def round(self, points: Sequence[Point], stale: Sequence[Trial]) -> list[Trial]:
        """Try the points; check the baseline again after an implausible gain."""
        trials, begin = self.trials, len(self.trials.found)
        probes: list[Point] = []
        if trials.scale.direction is None and self.left > 1:
            if trials.at_once == 1:
                self.probe(reserve=1)
            elif trials.next_beyond_use is not None:
                probes = [trials.next_beyond_use]
        asked = [normal(p) for p in points][: trials.at_once - len(probes)]
        # A point that infers the direction may belong to the cube.
        probed = [*probes, *(t.point for t in trials.found[begin:])]
        points = [p for p in asked if p not in probed]
        expected: list[float | None] = []
        if points:
            known = trials.known(stale)
            expected = [float(d) for d in degradations(trials.candidates(points), known, self.floor)]
        if probes or points:
            trials.round([*probes, *points], [None] * len(probes) + expected)
        if trials.gain > trials.beyond:
            self.check()
            if trials.gain > trials.beyond and trials.is_inherited:
                self.probe()
        return [t for t in trials.tried if t.point in asked]

    def keeps_mildest(self, stale: Sequence[Trial]) -> bool:
        """Return whether the mildest point of the cube passes; try it if it was not tried."""
        mildest = normal(max(self.cube, key=Point.expected_bits))
        tried = [t for t in self.trials.tried if t.point == mildest]
        if not tried and self.left > 0:
            tried = self.round([mildest], stale)
        return any(t.passed for t in tried)

    def probe(self, reserve: int = 0) -> None:
        """Infer the direction from a state compressed beyond use, or a milder one after NaN.

        Args:
            reserve: rounds to leave unused; default 0.
        """
        while self.left > reserve and (point := self.trials.next_beyond_use) is not None:
            self.trials.round([point], [None])

    def depends_on_state(self, last: SearchResult | None) -> bool:
        """Return whether the result of `evaluate` depends on the state.

        If no trial shows it, a state compressed beyond use is tried.

        A function that ignores its argument, or an accuracy at the level of chance, lets everything pass.
        """
        trials = self.trials
        seen = {t.quality for t in trials.found} | (set() if trials.has_seen_itself else {trials.scale.baseline})
        if len(seen) > 1 or (last is not None and len({t.quality for t in last.trials}) > 1):
            return True
        if not trials.can_be_destroyed:
            return True
        # Of several processes each is tested (`Trials.blind`).
        if trials.at_once == 1 and self.left > 0 and (point := trials.next_beyond_use) is not None:
            trials.round([point], [None])
        return not trials.is_probed or len({t.quality for t in trials.found}) > 1

    def check(self) -> None:
        """Evaluate the state itself again, at most once per search.

        This finds out whether implausibly good results are comparable with the baseline. If every process evaluated
        the state at the start, no further call is needed, unless the caller gave the baseline.
        """
        trials = self.trials
        if self.left > 0 and not self._is_checked and (trials.at_once == 1 or not trials.has_seen_itself):
            self._is_checked = True
            trials.evaluate_itself()


# -------------------------------------------------------------------------------------------------------- neighbourhood


def search_neighbourhood(space: Space, last: SearchResult, options: SearchOptions) -> Choice:
    """Try the last choice under the other metric, then the choice and its neighbours.

    The published method tries them all, by decreasing ratio; the first that passes is taken.
    """
    relax, is_published = options.relax, options.method == "published"
    trials = space.trials
    if last.point is None:
        return Choice(None, {})
    origin = normal(last.point)
    points = list(dict.fromkeys(normal(p) for p in space.cube.neighbours(origin, options.steps, relax=relax)))
    twin, patience = _twin(space, origin, last, is_published), max(0, last.patience - 1)
    metric = origin.metric
    tried: dict[Point, Trial] = {}
    discarded: dict[str, int] = {}
    while space.left > 0:
        # With `relax` more aggressive points come before the last choice itself.
        order = [p for p in (twin, None if relax else origin) if p is not None and p not in tried]
        if len(order) < trials.at_once:
            own = [p for p in points if (not p.prune or p.metric == metric) and p not in tried and p not in order]
            if is_published:
                order += [c.point for c in sorted(trials.candidates(own), key=lambda c: c.nbytes)]
            else:
                queue, discarded = _queue(space, own, last.trials)
                order += queue
        if not order:
            break
        for trial in space.round(order[: trials.at_once], last.trials):
            if trial.point is not None:
                tried[trial.point] = trial
        # Later trials may have changed the direction or the spread.
        tried = {t.point: t for t in trials.tried if t.point in tried}
        if twin is not None and twin in tried and origin in tried:
            other, same = tried[twin].degradation, tried[origin].degradation
            patience = _PATIENCE
            if other <= _BETTER * same and same - other > trials.scale.spread:
                metric = twin.metric
                space.notes.append(f"pruning metric switched to {metric}: {other:+.3%} instead of {same:+.3%}")
            twin = None
        passing = [t for p, t in tried.items() if t.passed and (not p.prune or p.metric == metric)]
        undecided = twin is not None and twin in tried and not relax
        if passing and not undecided:
            return Choice(min(passing, key=lambda t: t.nbytes), discarded, patience=patience)
        if not passing and relax:
            space.check()
    return Choice(None, discarded)


def _twin(space: Space, origin: Point, last: SearchResult, is_published: bool) -> Point | None:
    """Return the point with the other metric, or None if it is not worth a trial.

    It is not if it was not better at a recent search, or is expected to fail; the published method always tries it.
    """
    others = [m for m in space.cube.metric if m != origin.metric]
    if not origin.prune or not others:
        return None
    trials, twin = space.trials, dataclasses.replace(origin, metric=others[0])
    if is_published or last.patience > 0:
        return twin if is_published else None
    odds = chances(trials.candidates([twin]), trials.known(last.trials), trials.allowed, space.floor)
    return twin if odds[0] >= space.likely else None


def _queue(space: Space, points: Sequence[Point], stale: Sequence[Trial]) -> tuple[list[Point], dict[str, int]]:
    """Return the neighbours worth a trial, by decreasing ratio, and counts of others by reason."""
    trials = space.trials
    candidates = trials.candidates(points)
    kept = undominated(candidates)
    known = trials.known(stale)
    state = open_points(kept, known, trials.allowed, 0.0, space.floor)
    odds = chances(kept, known, trials.allowed, space.floor)
    worth = [(p >= space.likely, bool(out)) for p, out in zip(odds, state.ruled_out, strict=True)]
    discarded = {
        "neither smaller nor milder than another": len(candidates) - len(kept),
        "more aggressive than one that failed": sum(out for _, out in worth),
        "expected to fail": sum(not likely and not out for likely, out in worth),
    }
    return [c.point for c, (likely, out) in zip(kept, worth, strict=True) if likely and not out], discarded


# ----------------------------------------------------------------------------------------------------------- exhaustive


def search_exhaustively(space: Space, stale: Sequence[Trial], *, soon: bool) -> Choice:
    """Search the whole cube under both pruning metrics, then try fewer bins for embeddings.

    Args:
        space: the points and trials.
        stale: trials of the last search.
        soon: take the first point that passes, which is enough in the middle of a run. Points that passed before the
            call do not count.
    """
    trials = space.trials
    before = len(trials.passing)
    points = list(dict.fromkeys(normal(p) for p in space.cube))
    worth = [c.point for c in distinct(trials.candidates(points))]
    while space.left > 0 and not (soon and len(trials.passing) > before):
        candidates = trials.candidates(worth)
        known = trials.known(stale)
        chosen = next_trials(
            candidates,
            known,
            trials.allowed,
            at_once=trials.at_once,
            tolerance=_TOLERANCE,
            floor=space.floor,
            left=min(space.left, LATE) if soon else space.left,
        )
        if not chosen:
            break
        space.round(chosen, stale)
    best = min(trials.passing, key=lambda t: t.nbytes, default=None)
    notes = []
    if space.left <= 0:
        notes.append(f"the budget of {space.budget} evaluations one after another is spent")
    discarded = {"the same as another": len(points) - len(worth)}
    discarded |= _left_out(trials.candidates(worth), trials, space.floor, stale)
    if best is not None:
        _fewer_embedding_bins(space, best, stale)
    if not soon:
        space.check()
    if best is not None:
        # Later trials may have changed the direction or the spread.
        best = min(trials.passing, key=lambda t: t.nbytes, default=None)
    return Choice(best, discarded, tuple(notes))


def _left_out(candidates: Sequence[Candidate], trials: Trials, floor: float, stale: Sequence[Trial]) -> dict[str, int]:
    """Return the number of points that were never tried, by reason."""
    known = trials.known(stale)
    state = open_points(candidates, known, trials.allowed, _TOLERANCE, floor)
    seen = {normal(t.point) for t in trials.tried if t.point is not None}
    untried = np.array([c.point not in seen for c in candidates], bool)
    hopeless = chances(candidates, known, trials.allowed, floor) <= HOPELESS
    counts = {
        "more aggressive than one that failed": int((untried & state.ruled_out).sum()),
        "not smaller than the choice": int((untried & ~state.ruled_out & ~state.alive).sum()),
        "expected to fail": int((state.alive & hopeless).sum()),
        "not worth a trial": int((state.alive & ~hopeless).sum()),
    }
    return {reason: n for reason, n in counts.items() if n}


def _fewer_embedding_bins(space: Space, best: Trial, stale: Sequence[Trial]) -> None:
    """Try the choice with fewer bins for embeddings, as long as that saves something and passes."""
    for bins in reversed(space.cube.embedding_bins[:-1]):
        if best.point is None or space.left <= 0:
            break
        coarser = dataclasses.replace(best.point, embedding_bins=bins)
        (candidate,) = space.trials.candidates([coarser])
        odds = chances([candidate], space.trials.known(stale), space.trials.allowed, space.floor)
        if candidate.nbytes > (1 - _TOLERANCE) * best.nbytes or odds[0] <= HOPELESS:
            break
        (trial, *_) = space.round([coarser], stale)
        if not trial.passed or trial.nbytes >= best.nbytes:
            break
        best = trial


# ------------------------------------------------------------------------------------------------------------ published


def _axis(cube: Cube, name: str) -> list[float]:
    """Return the values of an axis from the most aggressive to the mildest."""
    return sorted(getattr(cube, name), key=lambda value: _SIGNS[name] * value)


def _point(cube: Cube, *, middle: bool) -> Point:
    """Return the middle of a cube of one metric, or its most aggressive point."""
    axes = {name: _axis(cube, name) for name in _SIGNS}
    at: dict[str, Any] = {name: axis[(len(axis) - 1) // 2 if middle else 0] for name, axis in axes.items()}
    return normal(Point(**at, metric=cube.metric[0], embedding_bins=cube.embedding_bins[-1], system=cube.system))


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

    At the end fewer bins for embeddings are tried, which the paper chooses apart.

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
    for bins in reversed(space.cube.embedding_bins[:-1]):
        if best is None or best.point is None or space.left <= 0:
            break
        (coarser, *_) = space.round([dataclasses.replace(best.point, embedding_bins=bins)], stale)
        if not coarser.passed or coarser.nbytes >= best.nbytes:
            break
        best = coarser
    notes = (f"the budget of {space.budget} evaluations one after another is spent",) if cubes else ()
    return Choice(best, {"not tried": sum(map(len, cubes))}, notes)
