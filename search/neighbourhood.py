"""Neighbourhood search: the last choice, and milder points near it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .arguments import SearchOptions
from .cube import Point, normal
from .degradation_model import chances
from .next_trials import open_points, undominated
from .result import SearchResult, Trial
from .space import Choice, Space

_BETTER = 0.9
"""The pruning metric is switched if the other metric has at most this multiple of the degradation."""
_PATIENCE = 4
"""Number of searches in which the other metric is not tried again after it was not better."""


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
