"""Oracle of the codebooks on Python's floats; it defines the order of operations.

All in float64, each operation rounded to nearest, no fused multiply-add, so that every back end gives the same bits.

*Prepare* (`kmeans.prepare`, on the host): drop centers of weight 0; multiply the centers by `2**-e`, e the `frexp`
exponent of the largest magnitude, and the weights likewise by that of the largest weight; drop weights that underflowed
to 0; merge equal centers, adding their weights in order. m centers x remain, strictly ascending. Where `k >= m` (and
there is no `initial`, whose codes are multiplied by `2**-e` too) they are the codebook. In the end codes are multiplied
by `2**e`.

*Exact.* `s = x[m // 2]`; `W[0] = S[0] = 0`, `W[i+1] = W[i] + w[i]`, `S[i+1] = S[i] + w[i] * (x[i] - s)`, one after
another. A cluster of the centers i ... j-1 gains `g(i, j) = (d * d) / v`, `d = S[j] - S[i]`, `v = W[j] - W[i]`, and 0
where `v <= 0` (the loss is a constant less the gains). `D[1][j] = g(0, j)`.
Row r = 2 ... k: `D[r][j] = max over i of D[r-1][i] + g(i, j)`, **the smallest i on ties**, for j = r ... m - (k - r)
(only j = m in row k), by divide and conquer: a segment [low, high] of j with candidates [first, last], at the start
[r - 1, m - 1], solves `j = (low + high) >> 1` over i = first ... min(last, j - 1), then [low, j - 1] with
[first, argmax] and [j + 1, high] with [argmax, last]. Walking back from j = m gives the clusters; each code is
`s + (sum of w * (x - s)) / (sum of w)`, both summed in ascending order from 0, and clipped to the cluster's own
centers.

*Lloyd.* From ascending codes: center x belongs to code c, the number of midpoints `0.5 * a + 0.5 * b` of adjacent codes
that are < x (half-way: the lower). Every non-empty code becomes the mean above (s as above, sums in ascending order,
clipped); an empty one stays. Stops when no code changes, or after `iterations`.

*Seeding.* Number n = 0, 1, ... of the stream of `seed` is SplitMix64: `z = seed + (n + 1) * 0x9E3779B97F4A7C15`,
`z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9`, `z = (z ^ z >> 27) * 0x94D049BB133111EB`, `z ^= z >> 31` modulo 2**64, and
`u = (z >> 11) * 2**-53`. Draw n: `p[i] = w[i] * D[i]`, with `D[i]` the smallest `(x[i] - drawn)**2` so far (1 for
n = 0); T = sum of p in ascending order; the first i whose running sum exceeds `u * T`; if no sum does (all
underflowed), the first center not yet drawn. The k draws, ascending, start Lloyd.

*Loss.* `sum of w * (d * d)`, `d = x - nearest code`, in ascending order, of the centers as given (not prepared).
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..backend.arrays import Array

    Vector = np.ndarray[Any, np.dtype[np.float64]]


def _prepared(centers: list[float], weights: list[float]) -> tuple[list[float], list[float], int]:
    pairs = [(center, weight) for center, weight in zip(centers, weights, strict=True) if weight > 0.0]
    exponent = math.frexp(max((abs(center) for center, _ in pairs), default=0.0))[1]
    weight_exponent = math.frexp(max((weight for _, weight in pairs), default=0.0))[1]
    x: list[float] = []
    w: list[float] = []
    for center, weight in pairs:
        scaled, mass = math.ldexp(center, -exponent), math.ldexp(weight, -weight_exponent)
        if mass == 0.0:
            continue
        if x and x[-1] == scaled:
            w[-1] += mass
        else:
            x.append(scaled)
            w.append(mass)
    return x, w, exponent


def _mean(x: list[float], w: list[float], start: int, end: int) -> float:
    """Weighted mean of the centers start ... end - 1."""
    shift = x[len(x) // 2]
    mass = lever = 0.0
    for i in range(start, end):
        mass += w[i]
        lever += w[i] * (x[i] - shift)
    return min(max(shift + lever / mass, x[start]), x[end - 1])


def _exact(x: list[float], w: list[float], k: int) -> list[float]:
    m, shift = len(x), x[len(x) // 2]
    weight, moment = [0.0], [0.0]
    for center, mass in zip(x, w, strict=True):
        weight.append(weight[-1] + mass)
        moment.append(moment[-1] + mass * (center - shift))

    def gain(i: int, j: int) -> float:
        d, v = moment[j] - moment[i], weight[j] - weight[i]
        return d * d / v if v > 0.0 else 0.0

    best = [gain(0, j) for j in range(m + 1)]
    cuts: list[dict[int, int]] = []
    for row in range(2, k + 1):
        following, cut = [0.0] * (m + 1), {}

        def solve(low: int, high: int, first: int, last: int) -> None:
            if low > high:
                return
            j = (low + high) >> 1
            candidates = range(first, min(last, j - 1) + 1)
            totals = [best[i] + gain(i, j) for i in candidates]  # noqa: B023 - called within this row only
            following[j] = max(totals)  # noqa: B023
            cut[j] = candidates[totals.index(following[j])]  # noqa: B023
            solve(low, j - 1, first, cut[j])  # noqa: B023
            solve(j + 1, high, cut[j], last)  # noqa: B023

        solve(m if row == k else row, m - (k - row), row - 1, m - 1)
        best = following
        cuts.append(cut)
    codes: list[float] = []
    end = m
    for row in range(k, 0, -1):
        start = cuts[row - 2][end] if row > 1 else 0
        codes.insert(0, _mean(x, w, start, end))
        end = start
    return codes


def _nearest(x: float, codes: list[float]) -> int:
    return sum(x > 0.5 * a + 0.5 * b for a, b in pairwise(codes))


def _lloyd(x: list[float], w: list[float], codes: list[float], iterations: int) -> list[float]:
    for _ in range(iterations):
        owner = [_nearest(center, codes) for center in x]
        new = list(codes)
        for c in range(len(codes)):
            if c in owner:
                start = owner.index(c)
                new[c] = _mean(x, w, start, start + owner.count(c))
        if new == codes:
            break
        codes = new
    return codes


def _uniform(seed: int, counter: int) -> float:
    modulus = 1 << 64
    z = (seed + (counter + 1) * 0x9E3779B97F4A7C15) % modulus
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % modulus
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % modulus
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


def _seeds(x: list[float], w: list[float], k: int, seed: int) -> list[float]:
    distance = [1.0] * len(x)
    drawn: list[int] = []
    for counter in range(k):
        running, sums = 0.0, []
        for mass, d in zip(w, distance, strict=True):
            running += mass * d
            sums.append(running)
        goal = _uniform(seed, counter) * running
        past = [i for i, s in enumerate(sums) if s > goal]
        pick = past[0] if past else min(set(range(len(x))) - set(drawn))
        drawn.append(pick)
        squares = [(v - x[pick]) * (v - x[pick]) for v in x]
        distance = squares if counter == 0 else [min(a, b) for a, b in zip(distance, squares, strict=True)]
    return [x[i] for i in sorted(drawn)]


def _solve(
    centers: Array, weights: Array, k: int, method: str, initial: Array | None, seed: int, iterations: int
) -> Array:
    xp = array_namespace(centers)
    x, w, exponent = _prepared(_list(centers), _list(weights))
    if initial is not None:
        codes = _lloyd(x, w, [math.ldexp(c, -exponent) for c in _list(initial)], iterations)
    elif k >= len(x):
        codes = x
    elif method == "exact":
        codes = _exact(x, w, k)
    else:
        codes = _lloyd(x, w, _seeds(x, w, k, seed), iterations)
    return xp.asarray([math.ldexp(c, exponent) for c in codes], dtype=xp.float64)


def weighted_kmeans_many(
    problems: Sequence[tuple[Array, Array]],
    k: Sequence[int],
    method: str,
    initial: Sequence[Array | None],
    seed: int,
    iterations: int,
) -> list[Array]:
    """See `shrinkpoint.kernels.kmeans.weighted_kmeans_many`."""
    each = zip(problems, k, initial, strict=True)
    return [_solve(centers, weights, one, method, start, seed, iterations) for (centers, weights), one, start in each]


def quantization_loss(centers: Array, weights: Array, codebook: Array) -> float:
    """See `shrinkpoint.kernels.kmeans.quantization_loss`."""
    codes = _list(codebook)
    loss = 0.0
    for center, weight in zip(_list(centers), _list(weights), strict=True):
        if weight > 0.0:  # else a square that overflows would be 0 * inf
            d = center - codes[_nearest(center, codes)]
            loss += weight * (d * d)
    return loss


def _list(x: Array) -> list[float]:
    return [float(x[i]) for i in range(x.shape[0])]


_PRICES = 6
_FIRST_PRICE = 5.0
_NEAR = 16


def _gain(best: float, lever: float, mass: float) -> float:
    return best + (lever * lever / mass if mass > 0.0 else 0.0)


def _priced(weight: list[float], moment: list[float], price: float) -> tuple[float, int]:
    """Return the largest gain less `price` for each code, and the codebook's size."""
    m = len(weight) - 1
    best, number = [0.0] * (m + 1), [0] * (m + 1)

    def gain(i: int, j: int) -> float:
        return _gain(best[i], moment[j] - moment[i], weight[j] - weight[i])

    queue = deque([(0, 1)])
    for j in range(1, m + 1):
        while len(queue) > 1 and queue[1][1] <= j:
            queue.popleft()
        i = queue[0][0]
        best[j], number[j] = gain(i, j) - price, number[i] + 1
        at = j + 1
        while queue:
            i, since = queue[-1]
            start = max(since, j + 1)
            if start > m:
                at = start
                break
            if gain(j, start) >= gain(i, start):
                queue.pop()
                at = start
                continue
            low, at = start, m + 1
            while at - low > 1:
                middle = (low + at) >> 1
                low, at = (low, middle) if gain(j, middle) >= gain(i, middle) else (middle, at)
            break
        if at <= m:
            queue.append((j, at))
        elif not queue:
            break
    return best[m], number[m]


def _least_loss(x: list[float], w: list[float], k: int) -> float:
    m = len(x)
    if m <= k:
        return 0.0
    weight, moment, total = [0.0], [0.0], 0.0
    for value, mass in zip(x, w, strict=True):
        y = value - x[m // 2]
        weight.append(weight[-1] + mass)
        moment.append(moment[-1] + mass * y)
        total += mass * y * y
    price = _FIRST_PRICE * (total - moment[m] * moment[m] / weight[m]) / (float(k) * float(k) * float(k))
    nearest, found, slope = k + m, 0.0, 0.0
    for _ in range(_PRICES):
        gained, codes = _priced(weight, moment, price)
        if abs(codes - k) <= abs(nearest - k):
            nearest, found, slope = codes, max(total - (gained + price * codes), 0.0), price
        if _NEAR * abs(nearest - k) <= k:
            break
        price *= codes / k * (codes / k) * (codes / k)
    if found == 0.0:
        return 0.0
    away = slope * (k - nearest)
    curve = (slope * nearest / found + 1.0) * (0.5 * (k - nearest) / nearest)
    return max(found - away * (1.0 - curve), 0.0)


def least_losses(centers: Vector, weights: Vector, ends: Any, k: int) -> Vector:
    """See `shrinkpoint.kernels.kmeans`."""
    parts = zip((0, *ends.tolist()), ends.tolist(), strict=False)
    return np.array([_least_loss(centers[a:b].tolist(), weights[a:b].tolist(), k) for a, b in parts], np.float64)
