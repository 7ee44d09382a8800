"""The plan of the trials: a model of the degradation, and the choice of the next ones.

The degradation of a point that changes the weights by d has two parts:

    D = L + g . d,      ln L = a + p ln E + c[metric] f + local + noise,

where E is the mean squared relative error, f the share of E that is pruned weights, and `local` is correlated between
points close to each other in the cube. L is the loss that any error of that size causes. g . d is the first-order
change of `evaluate` along d, with either sign. The direction of g is unknown and assumed to be uniform. The covariance
of g . d between two points is therefore s^2 times the mean over arrays of <d, d'> / ||x||^2, which the estimator
computes. So a trial informs about all points with similar errors. s is inferred from the trials.

Draws from the model show which points are likely to pass together, and so which are worth the remaining trials. The
order of the cube adds two rules: a point that clearly fails excludes all more aggressive points, and a point that
passes excludes all points that are not smaller.

Everything here is a pure function of its arguments; the draws come from a generator with a fixed seed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from .cube import Point, normal

Floats = np.ndarray[Any, np.dtype[np.float64]]
Pattern = np.ndarray[Any, np.dtype[np.float32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

SAMPLES = 1024
_MEAN = (-1.5, 0.9, 0.0, 0.0)
_DEVIATION = (1.3, 0.25, 0.6, 0.6)
"""Prior of a (at E = 0.01, in ln(L / E)), p, and c of either metric."""
_LOCAL, _NOISE = 0.3, 0.15
"""Standard deviations of the last two terms."""
_STALE = 0.5
"""Additional noise of trials on an earlier checkpoint."""
_SIGNED_SCALES = (0.001, 0.003, 0.006, 0.0125, 0.025, 0.05, 0.1, 0.2)
_USUAL_SCALE = 0.03
"""Candidate values of s; ln s is normal around the usual one with deviation 1."""
_INDEPENDENT = 0.02
"""Share of the signed part's variance that is independent between points."""
_REFERENCE = math.log(0.01)
_LARGEST = math.log(100.0)
_NO_NUMBER = 1.0
"""Degradation assumed for a quality that is not a number, whose size is unknown."""
_NEWTON = 50
"""Maximum number of Newton steps to the likeliest explanation of the trials; a few usually suffice."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point with the size and error expected from histograms.

    Args:
        point: the configuration.
        nbytes: expected bytes of the whole checkpoint.
        error: mean squared relative error.
        pruned: share of `error` that is pruned weights.
        pattern: [k] errors of some elements, as in `Estimate`; None: their correlation with other points is unknown.
    """

    point: Point
    nbytes: float
    error: float
    pruned: float
    pattern: Pattern | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Known:
    """The outcome of a trial.

    Args:
        candidate: the point tried; `nbytes` is the measured size.
        degradation: relative loss of quality; infinite where quality was not a number.
        passed: whether that was within the threshold.
        stale: whether it is from an earlier checkpoint: it informs about the model, not about the point.
    """

    candidate: Candidate
    degradation: float
    passed: bool
    stale: bool = False


def _trend(candidates: Sequence[Candidate]) -> Floats:
    """Return the terms of the linear trend, [n, 4]."""
    rows = []
    for c in candidates:
        by_magnitude = c.point.metric == "magnitude"
        level = math.log(max(c.error, 1e-12)) - _REFERENCE
        rows.append((1.0, level, c.pruned * by_magnitude, c.pruned * (not by_magnitude)))
    return np.asarray(rows, np.float64).reshape(-1, 4)


def _places(candidates: Sequence[Candidate]) -> Floats:
    """Return the positions of points in the cube, [n, 6], in units of the correlation length."""
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
    return np.asarray((_trend(a) * np.square(_DEVIATION)) @ _trend(b).T + local)


def _mean(candidates: Sequence[Candidate]) -> Floats:
    return np.asarray(_trend(candidates) @ np.array(_MEAN) + _REFERENCE)


@dataclass(frozen=True, slots=True)
class _Prior:
    """The model's prior distribution of the trials.

    Args:
        mean, precision: [n], [n, n] of ln L; the precision is the inverse of its covariance.
        signed: [n, n] covariance of the signed part, for s = 1.
        found: [n] their degradations.
        floor: deviation of `evaluate`.
    """

    mean: Floats
    precision: Floats
    signed: Floats
    found: Floats
    floor: float


@dataclass(frozen=True, slots=True)
class _Fit:
    """The most likely parameters of the model for one value of s.

    Args:
        signed_scale: s.
        log_weight: logarithm of its probability, but for a constant.
        level: [n] ln L of the trials.
        root: [n, n] root of the covariance of `level`.
    """

    signed_scale: float
    log_weight: float
    level: Floats
    root: Floats


def _inverse(matrix: Any) -> Floats:
    return np.asarray(np.linalg.inv(matrix), np.float64)


def _products(a: Sequence[Candidate], b: Sequence[Candidate]) -> Floats:
    """Return the covariance [a, b] of the signed part for s = 1, without its independent part."""
    length = max((c.pattern.size for c in (*a, *b) if c.pattern is not None), default=0)
    none = np.zeros(length, np.float32)
    left, right = (np.array([none if c.pattern is None else c.pattern for c in x]) for x in (a, b))
    left, right = left.reshape(len(a), length), right.reshape(len(b), length)
    return np.asarray((left @ right.T).astype(np.float64))


def _signed(candidates: Sequence[Candidate]) -> Floats:
    """Return the covariance [n, n] of the signed part for s = 1."""
    covariance = _products(candidates, candidates)
    own = [c.error if c.pattern is None else _INDEPENDENT * covariance[i, i] for i, c in enumerate(candidates)]
    covariance[np.diag_indices(len(candidates))] += np.array(own) + 1e-12
    return covariance


def _prior(known: Sequence[Known], floor: float) -> _Prior:
    """Return the prior of the trials.

    Trials of an earlier checkpoint had other errors, so their signed parts are independent.
    """
    seen = [k.candidate for k in known]
    doubt = np.array([_NOISE + _STALE * k.stale for k in known])
    steady = _covariance(seen, seen) + np.diag(doubt**2)
    apart = [dataclasses.replace(k.candidate, pattern=None) if k.stale else k.candidate for k in known]
    most = math.exp(_LARGEST)
    found = [max(-most, min(k.degradation, most)) if math.isfinite(k.degradation) else _NO_NUMBER for k in known]
    return _Prior(_mean(seen), _inverse(steady), _signed(apart), np.array(found), floor)


def _fitted(prior: _Prior, signed_scale: float) -> _Fit:
    """Fit ln L of the trials by Laplace's approximation, with D - L normally distributed.

    Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), section 3.4.
    """
    n = prior.found.size
    covariance = signed_scale**2 * prior.signed + prior.floor**2 * np.eye(n)
    inverse = _inverse(covariance)

    def cost(x: Floats) -> float:
        off, away = prior.found - _exp(x), x - prior.mean
        return 0.5 * float(off @ inverse @ off + away @ prior.precision @ away)

    x: Floats = min((np.log(np.maximum(prior.found, prior.floor)), prior.mean), key=cost)
    least, hessian = cost(x), _curvature(prior, inverse, x)
    for _ in range(_NEWTON):
        slope = _exp(x)
        step = np.linalg.solve(hessian, prior.precision @ (x - prior.mean) - slope * (inverse @ (prior.found - slope)))
        length = 1.0
        while cost(x - length * step) > least and length > 1e-3:
            length /= 2
        better = cost(x - length * step)
        if least - better < 1e-6:
            break
        x, least = x - length * step, better
        hessian = _curvature(prior, inverse, x)
    likely = -0.5 * math.log(signed_scale / _USUAL_SCALE) ** 2
    volumes = float(np.linalg.slogdet(hessian)[1] + np.linalg.slogdet(covariance)[1])
    return _Fit(signed_scale, likely - least - 0.5 * volumes, x, _inverse(np.linalg.cholesky(hessian)).T)


def _curvature(prior: _Prior, inverse: Floats, x: Floats) -> Floats:
    slope = _exp(x)
    return np.asarray(prior.precision + slope[:, None] * inverse * slope)


def _exp(x: Floats) -> Floats:
    return np.asarray(np.exp(np.minimum(x, _LARGEST)))


def _fits(known: Sequence[Known], floor: float) -> tuple[list[_Fit], Floats]:
    """Return the fit of the model to the trials for each s, with its probability."""
    prior = _prior(known, floor)
    fits = [_fitted(prior, s) for s in _SIGNED_SCALES]
    logs = np.array([f.log_weight for f in fits])
    weights = np.exp(logs - logs.max())
    return fits, weights / weights.sum()


def signed_scale(known: Sequence[Known], floor: float) -> float:
    """Return the expected s: the signed part of a degradation deviates by about s sqrt(E).

    Args:
        known: trials so far.
        floor: the smallest degradation that `evaluate` can distinguish from zero, > 0.
    """
    _, weights = _fits(known, floor)
    return float(weights @ np.array(_SIGNED_SCALES))


_TURN = threading.RLock()


@functools.cache
def _pools() -> Any:
    return ThreadpoolController()


def draws(candidates: Sequence[Candidate], known: Sequence[Known], floor: float) -> Floats:
    """Return degradations of the candidates, [SAMPLES, n], drawn from the fitted model.

    Args:
        candidates: what to predict.
        known: trials so far.
        floor: the smallest degradation that `evaluate` can distinguish from zero, > 0.

    BLAS is limited to one thread: matrices of two hundred rows do not gain from threads, which wait for each other
    where other work uses the cores; and another order of summation could give another plan on another machine. The
    limit holds for the whole process, so concurrent searches take turns: the second would otherwise find the limit set
    and restore it as the normal state.

    Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), section 2.2.
    """
    with _TURN, _pools().limit(limits=1, user_api="blas"):
        return _drawn(candidates, known, floor)


def _drawn(candidates: Sequence[Candidate], known: Sequence[Known], floor: float) -> Floats:
    n = len(candidates)
    if not n:
        return np.zeros((SAMPLES, 0))
    rng = np.random.default_rng(0)
    prior, seen = _prior(known, floor), [k.candidate for k in known]
    between = _covariance(candidates, seen)
    gain = between @ prior.precision
    spread = _covariance(candidates, candidates) - gain @ between.T
    spread[np.diag_indices(n)] += _NOISE**2
    root = np.linalg.cholesky(spread + 1e-9 * np.eye(n))
    fresh = np.flatnonzero([not k.stale for k in known])
    signed, shared = _signed(candidates), _products(candidates, [seen[i] for i in fresh])
    among = prior.signed[np.ix_(fresh, fresh)]
    fits, weights = _fits(known, floor)
    counts = np.diff(np.round(np.cumsum(weights) * SAMPLES).astype(int), prepend=0)
    drawn = []
    for fit, count in zip(fits, counts, strict=True):
        levels = fit.level + rng.standard_normal((count, len(known))) @ fit.root.T
        steady = _mean(candidates) + (levels - prior.mean) @ gain.T + rng.standard_normal((count, n)) @ root.T
        # The part of the trials that L does not explain is their signed part.
        variance = fit.signed_scale**2
        pull = variance * np.linalg.solve(variance * among + floor**2 * np.eye(fresh.size), shared.T).T
        rest = np.linalg.cholesky(variance * (signed - pull @ shared.T))
        off = (prior.found - _exp(levels))[:, fresh]
        drawn.append(_exp(steady) + off @ pull.T + rng.standard_normal((count, n)) @ rest.T)
    return np.concatenate(drawn)


def degradations(candidates: Sequence[Candidate], known: Sequence[Known], floor: float) -> Floats:
    """Return the expected (median) degradation of each candidate."""
    return np.asarray(np.median(draws(candidates, known, floor), axis=0))


def chances(candidates: Sequence[Candidate], known: Sequence[Known], threshold: float, floor: float) -> Floats:
    """Return the probability of each candidate to pass, by the model alone."""
    return np.asarray((draws(candidates, known, floor) <= threshold).mean(axis=0))


# ------------------------------------------------------------------------------------------------------ the next trials


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
