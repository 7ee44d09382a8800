"""Neighbourhood search: the last choice, and what is near it and milder."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .cube import Point, normal
from .plan import chances, open_points, undominated
from .result import SearchResult, Trial
from .space import Choice, Space

_BETTER = 0.9
"""The pruning metric is switched where the other's degradation is at most so many times as large."""
_PATIENCE = 4
"""Searches in which the other metric is not tried again once it was found no better."""


def near(space: Space, last: SearchResult, steps: int, *, relax: bool) -> Choice:
    """Neighbourhood search: `last`'s point under the other metric, then itself and its neighbours by falling ratio."""
    trials = space.trials
    if last.point is None:
        return Choice(None, {})
    origin = normal(last.point)
    points = list(dict.fromkeys(normal(p) for p in space.cube.neighbours(origin, steps, relax=relax)))
    twin, patience = _twin(space, origin, last), max(0, last.patience - 1)
    metric = origin.metric
    tried: dict[Point, Trial] = {}
    discarded: dict[str, int] = {}
    while space.left > 0:
        # Whoever asks for more aggressive points gets them before the last choice itself.
        order = [p for p in (twin, None if relax else origin) if p is not None and p not in tried]
        if len(order) < trials.at_once:
            own = [p for p in points if (not p.prune or p.metric == metric) and p not in tried and p not in order]
            queue, discarded = _queue(space, own, last.trials)
            order += queue
        if not order:
            break
        for trial in space.round(order[: trials.at_once], last.trials):
            if trial.point is not None:
                tried[trial.point] = trial
        # What was learned since may have changed how they are judged.
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


def _twin(space: Space, origin: Point, last: SearchResult) -> Point | None:
    """The same point under the other metric, unless that was no better a short while ago, or is expected to fail."""
    others = [m for m in space.cube.metric if m != origin.metric]
    if not origin.prune or not others or last.patience > 0:
        return None
    trials, twin = space.trials, dataclasses.replace(origin, metric=others[0])
    odds = chances(trials.candidates([twin]), trials.known(last.trials), trials.allowed, space.floor)
    return twin if odds[0] >= space.likely else None


def _queue(space: Space, points: Sequence[Point], stale: Sequence[Trial]) -> tuple[list[Point], dict[str, int]]:
    """The neighbours worth a trial, by falling ratio, and how many are not, by reason."""
    trials = space.trials
    candidates = trials.candidates(points)
    kept = undominated(candidates)
    known = trials.known(stale)
    state = open_points(kept, known, trials.allowed, 0.0, space.floor)
    odds = chances(kept, known, trials.allowed, space.floor)
    worth = [(p >= space.likely, bool(out)) for p, out in zip(odds, state.ruled_out, strict=True)]
    discarded = {
        "no smaller and no milder than another": len(candidates) - len(kept),
        "more aggressive than one that failed": sum(out for _, out in worth),
        "expected to fail": sum(not likely and not out for likely, out in worth),
    }
    return [c.point for c, (likely, out) in zip(kept, worth, strict=True) if likely and not out], discarded
