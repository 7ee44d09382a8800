"""Choice of the next points to try, from the degradation model and the order of the cube.

The draws show which points are likely to pass together, and so which are worth the remaining trials. The order of the
cube adds two rules: a point that clearly fails excludes all more aggressive points, and a point that passes excludes
all points that are not smaller. Everything here is a pure function of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cube import Point, normal
from .degradation_model import Candidate, Floats, Known, draws, signed_scale

Flags = np.ndarray[Any, np.dtype[np.bool_]]

LATE, SURE = 3, 0.8
"""With at most LATE rounds left and nothing passed, only points that pass with probability SURE are tried.

Before any point has passed, savings are also counted from the smallest point that passes with this probability.
"""
HOPELESS = 0.03
"""A point that passes with at most this probability is not tried."""
_WORTH = 0.25
"""A trial must be expected to save this share of the tolerance; further trials may follow from it."""
_HORIZON = 10
"""Rounds to plan for where their number is not given."""
_CLEARLY, _BEYOND = 1.25, 2.0
"""Conditions under which a failure excludes more aggressive points.

The degradation is above this multiple of the threshold, and this number of deviations of the signed part above it.
"""


def milder(a: Candidate, b: Candidate) -> bool:
    """Return whether `a` is at least as mild as `b` by the cube and by predicted error.

    This holds by the order of the cube and by predicted error.

    The order alone is not enough: a little pruning adds the level zero, which lowers the error where bins are few.
    """
    return a.point.at_least(b.point) and a.error <= b.error


@dataclass(frozen=True, slots=True)
class Open:
    """Candidates that the trials have not decided.

    Args:
        ruled_out: which candidates are more aggressive than one that clearly failed.
        alive: which are worth a trial.
        best: bytes of the smallest that passed; infinite where none has.
    """

    ruled_out: Flags
    alive: Flags
    best: float


def open_points(
    candidates: Sequence[Candidate], known: Sequence[Known], threshold: float, tolerance: float, floor: float
) -> Open:
    """Return the candidates that are still worth a trial, by the order of the cube.

    Excluded are candidates that were tried, that are more aggressive than one that clearly failed, or that are not
    smaller by `tolerance` than the smallest that passed.
    """
    n = len(candidates)
    fresh = [k for k in known if not k.stale]
    s = signed_scale(known, floor)
    failed = [
        k.candidate
        for k in fresh
        if not k.passed
        and k.degradation > max(_CLEARLY * threshold, threshold + _BEYOND * s * math.sqrt(k.candidate.error))
    ]
    best = min((k.candidate.nbytes for k in fresh if k.passed), default=math.inf)
    tried = {normal(k.candidate.point) for k in fresh}
    ruled_out = np.array([any(milder(f, c) for f in failed) for c in candidates], bool).reshape(n)
    smaller = np.array([c.nbytes < (1 - tolerance) * best for c in candidates], bool).reshape(n)
    untried = np.array([normal(c.point) not in tried for c in candidates], bool).reshape(n)
    return Open(ruled_out, ~ruled_out & smaller & untried, best)


def undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates without another that is milder and not larger, smallest first."""
    ordered = sorted(candidates, key=lambda c: c.nbytes)
    kept: list[Candidate] = []
    for c in ordered:
        if not any(milder(k, c) for k in kept):
            kept.append(c)
    return kept


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates without a milder one of equal size and error, smallest first."""
    kept: dict[tuple[float, float], list[Candidate]] = {}
    for c in candidates:
        same = kept.setdefault((c.nbytes, c.error), [])
        if not any(milder(k, c) for k in same):
            same[:] = [*(k for k in same if not milder(c, k)), c]
    return sorted((c for same in kept.values() for c in same), key=lambda c: c.nbytes)


def next_trials(
    candidates: Sequence[Candidate],
    known: Sequence[Known],
    threshold: float,
    *,
    at_once: int = 1,
    tolerance: float = 0.01,
    floor: float = 0.0,
    left: int | None = None,
) -> list[Point]:
    """Return the points to try in the next round; an empty list ends the search.

    The remaining trials are planned as a whole: a set of points whose smallest passing member saves most, on average
    over the draws. The point of median size in this set is tried, or the (m + 1)-quantiles for m concurrent trials, so
    that each round divides the set; then the plan is made again.

    Args:
        candidates: the points in question.
        known: trials so far.
        threshold: largest degradation that passes, > 0.
        at_once: most points of a round.
        tolerance: share of the bytes that is not worth another trial.
        floor: the smallest degradation that `evaluate` can distinguish from zero.
        left: rounds that may still be run; None: any number. If few are left and no point has passed, a point that
            almost certainly passes is tried.

    Source: Inshrinkerator, section 5, guided exhaustive search.
    """
    floor = max(floor, 0.01 * threshold)
    state = open_points(candidates, known, threshold, tolerance, floor)
    if not state.alive.any():
        return []
    sizes = np.array([c.nbytes for c in candidates])
    passing = (draws(candidates, known, floor) <= threshold) & state.alive
    odds = passing.mean(axis=0)
    safe, best = [], state.best
    if not math.isfinite(best):
        if float(passing.any(axis=1).mean()) < HOPELESS:
            # Giving up is expensive, so the mildest candidate is tried first.
            gentle = sorted(range(len(candidates)), key=lambda i: candidates[i].error)[:at_once]
            return [candidates[i].point for i in gentle if state.alive[i]] if state.alive[gentle[0]] else []
        likely = [int(i) for i in np.argsort(-odds, kind="stable") if odds[i] > 0]
        safe = [int(i) for i in np.argsort(sizes, kind="stable") if odds[i] >= SURE] or likely
        if left is not None and left <= LATE:
            return [candidates[i].point for i in safe[:at_once]]
        best = sizes[safe[0]]
    saved: Floats = np.where(passing, np.maximum(0.0, np.log(best / sizes)), 0.0)
    batch = _most_saving(saved, at_once * (_HORIZON if left is None else left), _WORTH * tolerance)
    batch.sort(key=lambda i: float(sizes[i]))
    middle = [batch[round((k + 1) * (len(batch) - 1) / (at_once + 1))] for k in range(at_once)] if batch else []
    chosen = list(dict.fromkeys([*middle, *batch, *safe]))
    return [candidates[i].point for i in chosen[:at_once]]


def _most_saving(saved: Floats, count: int, least: float) -> list[int]:
    """Choose columns greedily that maximize the mean over rows of their largest entry.

    Args:
        saved: [draws, n] saving of each candidate, 0 where it fails.
        count: most columns.
        least: what the first must save on average.

    Source: Nemhauser, Wolsey and Fisher (1978): the greedy choice reaches at least 63 % of the best one.
    """
    chosen: list[int] = []
    have = np.zeros((len(saved), 1))
    for _ in range(count):
        more = np.maximum(saved - have, 0.0).mean(axis=0)
        i = int(more.argmax())
        if more[i] <= 0.0 or (not chosen and more[i] < least):
            break
        chosen.append(i)
        have = np.maximum(have, saved[:, i : i + 1])
    return chosen
