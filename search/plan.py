"""Which point to try next: divide and conquer over what may pass, by a model of what compression does to quality.

Two parts make up the degradation of a point that changes the weights by d:

    D = L + g . d,      ln L = a + p ln E + c[metric] f + local + noise,

E the mean squared relative error, f the share of it that is pruned weights; `local` is alike for points that are near
each other in the cube. L is what any error of that size costs. g . d is the gradient of `evaluate` along d: it has
either sign, and of g nothing is known but that it favours no direction, so that between two points its covariance is
s^2 times the mean over arrays of <d, d'> / ||x||^2, which the estimator counts. What one trial gained or lost by it
tells of all points with similar errors. How large s is, the trials say.

Draws from the model, given the trials, say which points may pass together, and so which of them are worth the trials
that are left. The *order* of the cube says the rest: a point that clearly fails rules out all that are more aggressive,
one that passes all that are not smaller.

Everything here is a pure function of its arguments; the draws come from a generator with a fixed seed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import numpy as np
from threadpoolctl import ThreadpoolController

from .cube import Point, normal

P = ParamSpec("P")
Floats = np.ndarray[Any, np.dtype[np.float64]]
Pattern = np.ndarray[Any, np.dtype[np.float32]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]

SAMPLES = 1024
LATE, _SURE = 3, 0.8
"""With so few rounds left and nothing that passed, only what passes with this probability is tried. What passes with it
is also what savings are counted from as long as nothing has."""
HOPELESS = 0.03
"""What passes with no more than this probability is not tried."""
_WORTH = 0.25
"""A trial is worth it if it is expected to save this share of the tolerance: others may follow from it."""
_FAR = 10
"""Rounds that are planned for where their number is not given."""
_MEAN = (-1.5, 0.9, 0.0, 0.0)
_DEVIATION = (1.3, 0.25, 0.6, 0.6)
"""Prior of a (at E = 0.01, in ln(L / E)), p, and c of either metric."""
_LOCAL, _NOISE = 0.3, 0.15
"""Standard deviations of the two last terms."""
_STALE = 0.5
"""Noise added to what was seen on an earlier checkpoint."""
_SWINGS = (0.001, 0.003, 0.006, 0.0125, 0.025, 0.05, 0.1, 0.2)
_USUAL = 0.03
"""Values of s that are reckoned with; ln s is normal around the usual one with deviation 1."""
_OWN = 0.02
"""Share of the signed part's variance that a point has for itself."""
_CLEARLY, _BEYOND = 1.25, 2.0
"""A degradation beyond so many times the threshold, and so many deviations of the signed part above it, rules out more
aggressive points; a near miss does not."""
_REFERENCE = math.log(0.01)
_LARGEST = math.log(100.0)
_NO_NUMBER = 1.0
"""What a quality that is no number counts as: how bad it is, it does not say."""
_NEWTON = 50
"""Most steps to the likeliest explanation of the trials; a few are enough."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point, and what the histograms say of it.

    Args:
        point: the configuration.
        nbytes: expected bytes of the whole checkpoint.
        error: mean squared relative error.
        pruned: share of `error` that is pruned weights.
        pattern: [k] errors of some elements, as `Estimate` has them; None: nothing is known of how they are like those
            of other points.
    """

    point: Point
    nbytes: float
    error: float
    pruned: float
    pattern: Pattern | None = field(default=None, compare=False, repr=False)


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


@dataclass(frozen=True, slots=True)
class _Prior:
    """What is expected of the trials before they are seen.

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
    """The likeliest explanation of the trials for one s.

    Args:
        swing: s.
        log_weight: logarithm of its probability, but for a constant.
        level: [n] ln L of the trials.
        root: [n, n] root of the covariance of `level`.
    """

    swing: float
    log_weight: float
    level: Floats
    root: Floats


def _inverse(matrix: Any) -> Floats:
    return np.asarray(np.linalg.inv(matrix), np.float64)


def _products(a: Sequence[Candidate], b: Sequence[Candidate]) -> Floats:
    """[a, b]: covariance of the signed part for s = 1, but for what a point has for itself."""
    length = max((c.pattern.size for c in (*a, *b) if c.pattern is not None), default=0)
    none = np.zeros(length, np.float32)
    left, right = (np.array([none if c.pattern is None else c.pattern for c in x]) for x in (a, b))
    left, right = left.reshape(len(a), length), right.reshape(len(b), length)
    product: Floats = (left @ right.T).astype(np.float64)
    return product


def _signed(candidates: Sequence[Candidate]) -> Floats:
    """[n, n]: covariance of the signed part for s = 1."""
    covariance = _products(candidates, candidates)
    own = [c.error if c.pattern is None else _OWN * covariance[i, i] for i, c in enumerate(candidates)]
    covariance[np.diag_indices(len(candidates))] += np.array(own) + 1e-12
    return covariance


def _prior(known: Sequence[Known], floor: float) -> _Prior:
    """The prior of trials. Those of an earlier checkpoint had errors of their own: they share nothing of the sign."""
    seen = [k.candidate for k in known]
    doubt = np.array([_NOISE + _STALE * k.stale for k in known])
    steady = _covariance(seen, seen) + np.diag(doubt**2)
    apart = [dataclasses.replace(k.candidate, pattern=None) if k.stale else k.candidate for k in known]
    most = math.exp(_LARGEST)
    found = [max(-most, min(k.degradation, most)) if math.isfinite(k.degradation) else _NO_NUMBER for k in known]
    return _Prior(_mean(seen), _inverse(steady), _signed(apart), np.array(found), floor)


def _fitted(prior: _Prior, swing: float) -> _Fit:
    """Laplace's approximation of ln L of the trials, D - L being normal.

    Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), section 3.4.
    """
    n = prior.found.size
    covariance = swing**2 * prior.signed + prior.floor**2 * np.eye(n)
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
    likely = -0.5 * math.log(swing / _USUAL) ** 2
    volumes = float(np.linalg.slogdet(hessian)[1] + np.linalg.slogdet(covariance)[1])
    return _Fit(swing, likely - least - 0.5 * volumes, x, _inverse(np.linalg.cholesky(hessian)).T)


def _curvature(prior: _Prior, inverse: Floats, x: Floats) -> Floats:
    slope = _exp(x)
    curvature: Floats = prior.precision + slope[:, None] * inverse * slope
    return curvature


def _exp(x: Floats) -> Floats:
    result: Floats = np.exp(np.minimum(x, _LARGEST))
    return result


def _fits(known: Sequence[Known], floor: float) -> tuple[list[_Fit], Floats]:
    """The trials explained with each s, and how likely that is."""
    prior = _prior(known, floor)
    fits = [_fitted(prior, s) for s in _SWINGS]
    logs = np.array([f.log_weight for f in fits])
    weights = np.exp(logs - logs.max())
    return fits, weights / weights.sum()


def swing(known: Sequence[Known], floor: float) -> float:
    """Expected s: the signed part of a point's degradation has the deviation s sqrt(E) or so.

    Args:
        known: trials so far.
        floor: the smallest degradation that `evaluate` can tell from none, > 0.
    """
    _, weights = _fits(known, floor)
    return float(weights @ np.array(_SWINGS))


_TURN = threading.RLock()


@functools.cache
def _pools() -> Any:
    return ThreadpoolController()


def _on_one_thread(function: Callable[P, Floats]) -> Callable[P, Floats]:
    """Matrices of two hundred rows are no work for threads: where others use the cores, these wait for each other.

    And sums of another order could mean another plan on another machine. The limit is the whole process's, so that
    searches beside each other take turns: the second would find it set, and leave it so.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> Floats:
        with _TURN, _pools().limit(limits=1, user_api="blas"):
            return function(*args, **kwargs)

    return wrapper


@_on_one_thread
def draws(candidates: Sequence[Candidate], known: Sequence[Known], floor: float) -> Floats:
    """[SAMPLES, n]: degradations of the candidates, drawn from the model given the trials.

    Args:
        candidates: what to predict.
        known: trials so far.
        floor: the smallest degradation that `evaluate` can tell from none, > 0.

    Source: Rasmussen and Williams, "Gaussian Processes for Machine Learning" (2006), section 2.2.
    """
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
        # What of the trials L does not explain is their signed part.
        variance = fit.swing**2
        pull = variance * np.linalg.solve(variance * among + floor**2 * np.eye(fresh.size), shared.T).T
        rest = np.linalg.cholesky(variance * (signed - pull @ shared.T))
        off = (prior.found - _exp(levels))[:, fresh]
        drawn.append(_exp(steady) + off @ pull.T + rng.standard_normal((count, n)) @ rest.T)
    return np.concatenate(drawn)


def degradations(candidates: Sequence[Candidate], known: Sequence[Known], floor: float) -> Floats:
    """Expected degradation of each candidate (the median of its distribution); arguments as for `draws`."""
    median: Floats = np.median(draws(candidates, known, floor), axis=0)
    return median


def chances(candidates: Sequence[Candidate], known: Sequence[Known], threshold: float, floor: float) -> Floats:
    """Probability of each candidate to pass, by the model alone; other arguments as for `draws`."""
    share: Floats = (draws(candidates, known, floor) <= threshold).mean(axis=0)
    return share


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


def open_points(
    candidates: Sequence[Candidate], known: Sequence[Known], threshold: float, tolerance: float, floor: float
) -> Open:
    """What follows from the order of the cube.

    A candidate is no longer alive once it was tried, is more aggressive than one that clearly failed, or is not smaller
    by `tolerance` than the smallest that passed.
    """
    n = len(candidates)
    fresh = [k for k in known if not k.stale]
    s = swing(known, floor)
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
    """The candidates beside which there is none that is no larger and no more aggressive, smallest first."""
    ordered = sorted(candidates, key=lambda c: c.nbytes)
    kept: list[Candidate] = []
    for c in ordered:
        if not any(milder(k, c) for k in kept):
            kept.append(c)
    return kept


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates without those that come to the same as a milder one: of equal size and error, smallest first."""
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
    """The points to try in the next round; none when the search is over.

    The trials that are left are planned as a whole: points of which, in the draws, the smallest to pass saves most on
    average. The one of median size is tried, or the (m + 1)-quantiles for m beside each other, so that each round
    divides what is left; then all is planned anew.

    Args:
        candidates: the points in question.
        known: trials so far.
        threshold: largest degradation that passes, > 0.
        at_once: most points of a round.
        tolerance: share of the bytes that is not worth another trial.
        floor: the smallest degradation that `evaluate` can tell from none.
        left: rounds that may still be run; where few are and nothing has passed yet, something that will is tried.
            None: any number.

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
            # Giving up costs much, so not before the mildest has failed.
            gentle = sorted(range(len(candidates)), key=lambda i: candidates[i].error)[:at_once]
            return [candidates[i].point for i in gentle if state.alive[i]] if state.alive[gentle[0]] else []
        likely = [int(i) for i in np.argsort(-odds, kind="stable") if odds[i] > 0]
        safe = [int(i) for i in np.argsort(sizes, kind="stable") if odds[i] >= _SURE] or likely
        if left is not None and left <= LATE:
            return [candidates[i].point for i in safe[:at_once]]
        best = sizes[safe[0]]
    saved: Floats = np.where(passing, np.maximum(0.0, np.log(best / sizes)), 0.0)
    batch = _most_saving(saved, at_once * (_FAR if left is None else left), _WORTH * tolerance)
    batch.sort(key=lambda i: float(sizes[i]))
    middle = [batch[round((k + 1) * (len(batch) - 1) / (at_once + 1))] for k in range(at_once)] if batch else []
    chosen = list(dict.fromkeys([*middle, *batch, *safe]))
    return [candidates[i].point for i in chosen[:at_once]]


def _most_saving(saved: Floats, count: int, least: float) -> list[int]:
    """Columns whose largest entry in a row is, on average, as large as may be; found one after the other.

    Args:
        saved: [draws, n] what each saves, 0 where it fails.
        count: most columns.
        least: what the first must save on average.

    Source: Nemhauser, Wolsey and Fisher (1978): what is found so is at least 63 % of what the best choice gives.
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
