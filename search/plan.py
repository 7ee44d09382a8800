"""Which point to try next: divide and conquer over what the trials so far leave open.

Two things say what a trial tells about other points. The *order* of the cube: a point that clearly fails rules out all
that are more aggressive, one that passes all that are not smaller. And a *model* of the degradation from the error that
the histograms predict, a Gaussian process with a linear trend:

    ln D = a + p ln E + c[metric] f + local + noise,

E the mean squared relative error, f the share of it that is pruned weights; `local` is alike for points that are near
each other in the cube. Where trials *gained* by compression, a signed part s sqrt(E) of chance is added to D. Draws
from it, given the trials, say where the smallest passing point may be. The next trial is the median of these places,
the next m are their (m + 1)-quantiles: each round divides what is left into equal parts.

Everything here is a pure function of its arguments; the draws come from a generator with a fixed seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cube import Point, normal

Floats = np.ndarray[Any, np.dtype[np.float64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

SAMPLES = 512
_LATE, _SURE = 3, 0.8
"""With so few rounds left and nothing that passed, only what passes with this probability is tried."""
HOPELESS = 0.03
"""What passes with no more than this probability is not tried."""
_MEAN = (-1.5, 0.9, 0.0, 0.0)
_DEVIATION = (1.3, 0.25, 0.6, 0.6)
"""Prior of a (at E = 0.01, in ln(D / E)), p, and c of either metric."""
_LOCAL, _NOISE = 0.3, 0.15
"""Standard deviations of the two last terms."""
_STALE = 0.5
"""Noise added to what was seen on an earlier checkpoint."""
_CLEARLY = 1.25
"""A degradation beyond so many times the threshold rules out more aggressive points; a near miss does not."""
_REFERENCE = math.log(0.01)
_LARGEST = math.log(100.0)
_STEPS = np.array([-1.59, -0.97, -0.59, -0.28, 0.0, 0.28, 0.59, 0.97, 1.59])
"""Middles of nine parts of a normal distribution that are equally likely."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point, and what the histograms say of it.

    Args:
        point: the configuration.
        nbytes: expected bytes of the whole checkpoint.
        error: mean squared relative error.
        pruned: share of `error` that is pruned weights.
    """

    point: Point
    nbytes: float
    error: float
    pruned: float


@dataclass(frozen=True, slots=True)
class Known:
    """What a trial found.

    Args:
        candidate: what was tried; `nbytes` as it turned out.
        degradation: relative loss of quality; infinite where it was no number.
        passed: whether that was within the threshold.
        stale: it was seen on an earlier checkpoint: it tells of the model, not of the point.
    """

    candidate: Candidate
    degradation: float
    passed: bool
    stale: bool = False


def _trend(candidates: Sequence[Candidate]) -> Floats:
    """[n, 4]: the terms of the linear trend."""
    rows = []
    for c in candidates:
        by_magnitude = c.point.metric == "magnitude"
        level = math.log(max(c.error, 1e-12)) - _REFERENCE
        rows.append((1.0, level, c.pruned * by_magnitude, c.pruned * (not by_magnitude)))
    return np.asarray(rows, np.float64).reshape(-1, 4)


def _places(candidates: Sequence[Candidate]) -> Floats:
    """[n, 6]: where points stand in the cube, in units in which they cease to be alike."""
    rows = []
    for c in candidates:
        p = c.point
        side = 1.0 if p.prune and p.metric == "sensitivity" else 0.0
        protect, rate = math.log2(1e-4 + p.protect) / 3, math.log2(1e-3 + p.rate) / 3
        embedding = 0.5 * math.log2(p.embedding_bins or p.bins)
        rows.append((math.log2(p.bins), p.prune / 0.2, protect, rate, embedding, side))
    return np.asarray(rows, np.float64).reshape(-1, 6)


def _covariance(a: Sequence[Candidate], b: Sequence[Candidate]) -> Floats:
    distance = np.square(_places(a)[:, None] - _places(b)[None]).sum(axis=2)
    local = _LOCAL**2 * np.exp(-0.5 * distance)
    covariance: Floats = (_trend(a) * np.square(_DEVIATION)) @ _trend(b).T + local
    return covariance


def _mean(candidates: Sequence[Candidate]) -> Floats:
    mean: Floats = _trend(candidates) @ np.array(_MEAN) + _REFERENCE
    return mean


def posterior(candidates: Sequence[Candidate], known: Sequence[Known], floor: float) -> tuple[Floats, Floats]:
    """Mean and covariance of ln(degradation) of the candidates, given the trials; the noise is in the covariance.

    Args:
        candidates: what to predict.
        known: trials so far.
        floor: the smallest degradation that `evaluate` can tell from none, > 0.

    Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), section 2.2.
    """
    mean, covariance = _mean(candidates), _covariance(candidates, candidates)
    covariance[np.diag_indices(len(candidates))] += _NOISE**2
    if not known:
        return mean, covariance
    seen = [k.candidate for k in known]
    target, doubt = np.empty(len(known)), np.empty(len(known))
    for i, k in enumerate(known):
        value = max(k.degradation, floor)
        target[i] = min(math.log(value), _LARGEST) if math.isfinite(value) else _LARGEST
        # What is lost in the noise of `evaluate` says little of where exactly it was.
        doubt[i] = _NOISE + _STALE * k.stale + (1.0 if k.degradation <= floor else floor / value)
    between = _covariance(candidates, seen)
    gain = np.linalg.solve(_covariance(seen, seen) + np.diag(doubt**2), between.T).T
    return mean + gain @ (target - _mean(seen)), covariance - gain @ between.T


def luck(known: Sequence[Known]) -> float:
    """Deviation s of a signed part of the degradation, s sqrt(E): what compression does by chance, for better or worse.

    The model has no gains. Where n trials show some, they are half of what chance does: s^2 = 2 sum(min(D, 0)^2 / E) /
    (n + 2), as if two more had shown none.
    """
    fresh = [k for k in known if not k.stale and math.isfinite(k.degradation)]
    gains = [min(k.degradation, 0.0) ** 2 / max(k.candidate.error, 1e-12) for k in fresh]
    return math.sqrt(2 * sum(gains) / (len(gains) + 2))


def _chance(candidates: Sequence[Candidate], known: Sequence[Known]) -> Floats:
    """Deviation of the signed part for each candidate."""
    return luck(known) * np.sqrt([c.error for c in candidates])


def degradations(candidates: Sequence[Candidate], known: Sequence[Known], floor: float) -> Floats:
    """Expected degradation of each candidate (the median of its distribution); arguments as for `posterior`."""
    mean, _ = posterior(candidates, known, floor)
    return np.exp(np.minimum(mean, _LARGEST))


def chances(candidates: Sequence[Candidate], known: Sequence[Known], threshold: float, floor: float) -> Floats:
    """Probability of each candidate to pass, by the model alone; other arguments as for `posterior`."""
    mean, covariance = posterior(candidates, known, floor)
    deviation, chance = np.sqrt(np.diag(covariance)), _chance(candidates, known)
    if not chance.any():
        return np.array([_below(z) for z in (math.log(threshold) - mean) / deviation])
    steps = np.exp(np.minimum(mean[:, None] + deviation[:, None] * _STEPS, _LARGEST))
    return np.array([np.mean([_below(z) for z in row]) for row in (threshold - steps) / chance[:, None]])


def _below(z: float) -> float:
    """Probability that a standard normal number is at most z."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def milder(a: Candidate, b: Candidate) -> bool:
    """Whether quality at a is expected to be no worse than at b: in the order of the cube, and by predicted error.

    The cube alone does not say: pruning a little adds a level, zero, and among few bins that *lowers* the error.
    """
    return a.point.at_least(b.point) and a.error <= b.error


@dataclass(frozen=True, slots=True)
class Open:
    """What the trials leave open.

    Args:
        ruled_out: which candidates are more aggressive than one that clearly failed.
        alive: which are worth a trial.
        best: bytes of the smallest that passed; infinite where none has.
    """

    ruled_out: Flags
    alive: Flags
    best: float


def open_points(candidates: Sequence[Candidate], known: Sequence[Known], threshold: float, tolerance: float) -> Open:
    """What follows from the order of the cube alone.

    A candidate is no longer alive once it was tried, is more aggressive than one that clearly failed, or is not smaller
    by `tolerance` than the smallest that passed.
    """
    n = len(candidates)
    fresh = [k for k in known if not k.stale]
    s = luck(known)
    failed = [
        k.candidate
        for k in fresh
        if not k.passed and k.degradation > max(_CLEARLY * threshold, threshold + s * math.sqrt(k.candidate.error))
    ]
    best = min((k.candidate.nbytes for k in fresh if k.passed), default=math.inf)
    tried = {normal(k.candidate.point) for k in fresh}
    ruled_out = np.array([any(milder(f, c) for f in failed) for c in candidates], bool).reshape(n)
    smaller = np.array([c.nbytes < (1 - tolerance) * best for c in candidates], bool).reshape(n)
    untried = np.array([normal(c.point) not in tried for c in candidates], bool).reshape(n)
    return Open(ruled_out, ~ruled_out & smaller & untried, best)


def undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates beside which there is none that is no larger and no more aggressive, smallest first."""
    ordered = sorted(candidates, key=lambda c: c.nbytes)
    kept: list[Candidate] = []
    for c in ordered:
        if not any(milder(k, c) for k in kept):
            kept.append(c)
    return kept


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
    """The points to try in the next round; none when the search is over.

    Args:
        candidates: the points in question.
        known: trials so far.
        threshold: largest degradation that passes, > 0.
        at_once: most points of a round.
        tolerance: the search is over when going on is expected to save less than this share of the bytes.
        floor: the smallest degradation that `evaluate` can tell from none.
        left: rounds that may still be run; where few are and nothing has passed yet, something that will is tried.
            None: any number.

    Source: Inshrinkerator, section 5, guided exhaustive search.
    """
    state = open_points(candidates, known, threshold, tolerance)
    if not state.alive.any():
        return []
    sizes = np.array([c.nbytes for c in candidates])
    order = np.argsort(sizes, kind="stable")
    passing = _drawn(candidates, known, threshold, max(floor, 0.01 * threshold)) & state.alive
    # Of each sample the smallest that passes; n where none does.
    ranked = passing[:, order]
    optimum = np.where(ranked.any(axis=1), ranked.argmax(axis=1), len(candidates))
    if math.isfinite(state.best):
        saved = 1.0 - np.append(sizes[order], state.best)[optimum] / state.best
        if float(saved.mean()) < 0.5 * tolerance:
            return []
    elif float(ranked.any(axis=1).mean()) < HOPELESS:
        # Giving up costs much, so not before the mildest has failed.
        gentle = sorted(range(len(candidates)), key=lambda i: candidates[i].error)[:at_once]
        return [candidates[i].point for i in gentle if state.alive[i]] if state.alive[gentle[0]] else []
    elif left is not None and left <= _LATE:
        odds = np.where(state.alive, passing.mean(axis=0), 0.0)
        sure = [i for i in order if odds[i] >= _SURE]
        return [candidates[i].point for i in (sure or np.argsort(-odds, kind="stable"))[:at_once] if odds[i] > 0]
    alive = np.flatnonzero(state.alive[order])
    weights = np.bincount(optimum, minlength=len(candidates) + 1)[alive].astype(np.float64)
    if weights.sum() * 2 < SAMPLES and not math.isfinite(state.best):
        # Most likely nothing passes at all: the mildest says so soonest.
        mildest = min((int(order[i]) for i in alive), key=lambda i: candidates[i].error)
        return [candidates[mildest].point]
    return [candidates[order[i]].point for i in _quantiles(alive, weights, at_once)]


def _drawn(candidates: Sequence[Candidate], known: Sequence[Known], threshold: float, floor: float) -> Flags:
    """[SAMPLES, candidates]: who passes, in draws from the model."""
    mean, covariance = posterior(candidates, known, floor)
    root = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(candidates)))
    rng = np.random.default_rng(0)
    losses = mean + rng.standard_normal((SAMPLES, len(candidates))) @ root.T
    by_chance = _chance(candidates, known) * rng.standard_normal((SAMPLES, len(candidates)))
    passing: Flags = np.exp(np.minimum(losses, _LARGEST)) + by_chance <= threshold
    return passing


def _quantiles(places: Any, weights: Floats, count: int) -> list[int]:
    """Up to `count` different places at equal steps of the cumulated weight; the heaviest fill the round up."""
    if not weights.any():
        weights = np.ones(len(places))
    cumulated = np.cumsum(weights) / weights.sum()
    chosen: list[int] = []
    for k in range(1, count + 1):
        i = int(np.searchsorted(cumulated, k / (count + 1)))
        if i not in chosen:
            chosen.append(i)
    for i in np.argsort(-weights, kind="stable"):
        if len(chosen) < count and int(i) not in chosen and weights[i] > 0:
            chosen.append(int(i))
    return [int(places[i]) for i in chosen]
