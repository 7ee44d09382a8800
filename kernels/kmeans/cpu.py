"""Weighted one-dimensional k-means on the CPU, in the operation order of `reference.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..backend.arrays import Array, like, to_numpy
from ..backend.instructions import local_array
from ..backend.jit import njit_in_place, njit_inline
from . import prepared

Vector = np.ndarray[Any, np.dtype[np.float64]]
_MANY = 64
"""Number of candidates for a cut from which it is faster to skip those that cannot be optimal."""
_NEARLY = 1.0 - 1e-12
_PRICES = 6
"""Prices of a code that are tried."""
_FIRST_PRICE = 5.0
"""The first, in variances over the cube of the codes: about right for normal numbers."""
_NEAR = 16
"""A codebook whose codes differ from those wanted by at most this part of them is near enough."""


@njit_inline
def _gain(best: float, lever: float, mass: float) -> float:
    """Objective of a cut: the gain of the clusters before it plus that of the one after it."""
    return best + (lever * lever / mass if mass > 0.0 else 0.0)


@njit_in_place
def _exact(x: Any, w: Any, sums: Any, cut: Any, codes: Any) -> None:
    """Optimal codebook of 1 <= k < m codes for scaled, strictly ascending centers.

    sums: float64 [4, m + 1], and cut: int32 [k + 1, m + 1], to work in.
    """
    m, k = x.size, codes.size
    shift = x[m // 2]
    weight, moment, best, following = sums[0], sums[1], sums[2], sums[3]
    weight[0] = 0.0
    moment[0] = 0.0
    for i in range(m):
        weight[i + 1] = weight[i] + w[i]
        moment[i + 1] = moment[i] + w[i] * (x[i] - shift)
    # best[j]: the maximum of sum(moment**2 / weight) for the first j centers in `row` clusters. This sum is the total
    # of w * y**2, a constant, minus the loss.
    best[0] = 0.0
    for j in range(1, m + 1):
        mass = weight[j]
        best[j] = moment[j] * moment[j] / mass if mass > 0.0 else 0.0
    stack = local_array(256, np.int64)
    for row in range(2, k + 1):
        top = 0
        low, high, first, last = m if row == k else row, m - (k - row), row - 1, m - 1
        while True:
            j = (low + high) >> 1
            end = min(last, j - 1)
            mass_j, moment_j = weight[j], moment[j]
            at = first
            most = -1.0
            if end - first >= _MANY:
                # After a likely maximum, a cut that cannot reach it is skipped without a division. This is safe,
                # because the margin `_NEARLY` is larger than the rounding errors of both sides.
                at = (first + end) >> 1
                most = _gain(best[at], moment_j - moment[at], mass_j - weight[at])
                limit = most * _NEARLY
                for i in range(first, end + 1):
                    mass = mass_j - weight[i]
                    lever = moment_j - moment[i]
                    if lever * lever >= (limit - best[i]) * mass:
                        gain = _gain(best[i], lever, mass)
                        if gain > most or (gain == most and i < at):
                            most = gain
                            at = i
                            limit = most * _NEARLY
            else:
                for i in range(first, end + 1):
                    gain = _gain(best[i], moment_j - moment[i], mass_j - weight[i])
                    if gain > most:
                        most = gain
                        at = i
            following[j] = most
            cut[row, j] = at
            if low < j:
                if j < high:
                    stack[top], stack[top + 1], stack[top + 2], stack[top + 3] = j + 1, high, at, last
                    top += 4
                high, last = j - 1, at
            elif j < high:
                low, first = j + 1, at
            elif top == 0:
                break
            else:
                top -= 4
                low, high, first, last = stack[top], stack[top + 1], stack[top + 2], stack[top + 3]
        best, following = following, best
    end = m
    for row in range(k, 0, -1):
        start = cut[row, end] if row > 1 else 0
        mass = 0.0
        lever = 0.0
        for i in range(start, end):
            mass += w[i]
            lever += w[i] * (x[i] - shift)
        codes[row - 1] = min(max(shift + lever / mass, x[start]), x[end - 1])
        end = start


@njit_inline
def _priced(weight: Any, moment: Any, price: float, best: Any, number: Any, queue: Any, since: Any) -> int:
    """Find the codebook with the largest gain if each code costs `price`; return its size.

    `best[m]` becomes its gain less the price of its codes.

    The last cluster of the first j points begins after some i < j. Each i is best for one range of j, and larger i
    are best for later ranges. `queue` holds the i whose ranges have not ended, and `since` the first j of each range.
    """
    m = weight.size - 1
    best[0], number[0] = 0.0, 0
    queue[0], since[0] = 0, 1
    first, last = 0, 0
    for j in range(1, m + 1):
        while first < last and since[first + 1] <= j:
            first += 1
        i = queue[first]
        best[j] = _gain(best[i], moment[j] - moment[i], weight[j] - weight[i]) - price
        number[j] = number[i] + 1
        at = j + 1
        while last >= first:
            start = max(since[last], j + 1)
            if start > m:
                at = start
                break
            i = queue[last]
            own = _gain(best[j], moment[start] - moment[j], weight[start] - weight[j])
            if own >= _gain(best[i], moment[start] - moment[i], weight[start] - weight[i]):
                last -= 1
                at = start
                continue
            low, at = start, m + 1
            while at - low > 1:
                middle = (low + at) >> 1
                own = _gain(best[j], moment[middle] - moment[j], weight[middle] - weight[j])
                if own >= _gain(best[i], moment[middle] - moment[i], weight[middle] - weight[i]):
                    at = middle
                else:
                    low = middle
            break
        if at <= m:
            last += 1
            queue[last], since[last] = j, at
    codes: int = number[m]
    return codes


@njit_in_place
def _least_losses(centers: Any, weights: Any, ends: Any, k: int, floats: Any, integers: Any, losses: Any) -> None:
    """Compute the loss of each set.

    `floats` and `integers` have three rows, each one longer than the number of points of the largest set.
    """
    begin = 0
    for s in range(ends.size):
        x, w = centers[begin : ends[s]], weights[begin : ends[s]]
        begin = ends[s]
        m = x.size
        losses[s] = 0.0
        if m <= k:
            continue
        shift = x[m // 2]
        weight, moment, best = floats[0, : m + 1], floats[1, : m + 1], floats[2, : m + 1]
        number, queue, since = integers[0, : m + 1], integers[1, : m + 1], integers[2, : m + 1]
        weight[0] = moment[0] = total = 0.0
        for i in range(m):
            y = x[i] - shift
            weight[i + 1] = weight[i] + w[i]
            moment[i + 1] = moment[i] + w[i] * y
            total += w[i] * y * y
        variance = total - moment[m] * moment[m] / weight[m]
        price = _FIRST_PRICE * variance / (np.float64(k) * np.float64(k) * np.float64(k))
        nearest = k + m
        found = slope = 0.0
        for _ in range(_PRICES):
            codes = _priced(weight, moment, price, best, number, queue, since)
            if abs(codes - k) <= abs(nearest - k):
                nearest, found, slope = codes, max(total - (best[m] + price * np.float64(codes)), 0.0), price
            if _NEAR * abs(nearest - k) <= k:
                break
            ratio = np.float64(codes) / np.float64(k)
            price *= ratio * ratio * ratio
        if found == 0.0:
            continue
        # The price is the slope of the losses over the number of codes, and the curve that of a power law.
        missing = np.float64(k - nearest)
        curve = (slope * np.float64(nearest) / found + 1.0) * (0.5 * missing / np.float64(nearest))
        losses[s] = max(found - slope * missing * (1.0 - curve), 0.0)


def least_losses(centers: Vector, weights: Vector, ends: Any, k: int) -> Vector:
    """See `shrinkpoint.kernels.kmeans`."""
    losses = np.empty(ends.size)
    most = int(np.diff(ends, prepend=0).max(initial=0)) + 1
    _least_losses(centers, weights, ends, k, np.empty((3, most)), np.empty((3, most), np.int32), losses)
    return losses


@njit_in_place
def _lloyd(x: Any, w: Any, codes: Any, iterations: int) -> None:
    """Lloyd's iteration: replace codes by the means of their nearest centers until stable."""
    m = x.size
    k = codes.size
    if m == 0:
        return
    shift = x[m // 2]
    for _ in range(iterations):
        changed = False
        i = 0
        for c in range(k):
            # The next midpoint still uses the old codes c and c + 1.
            edge = 0.5 * codes[c] + 0.5 * codes[c + 1] if c + 1 < k else np.inf
            start = i
            mass = 0.0
            lever = 0.0
            while i < m and x[i] <= edge:
                mass += w[i]
                lever += w[i] * (x[i] - shift)
                i += 1
            if i > start and mass > 0.0:
                mean = min(max(shift + lever / mass, x[start]), x[i - 1])
                if mean != codes[c]:
                    codes[c] = mean
                    changed = True
        if not changed:
            break


@njit_inline
def _uniform(seed: Any, counter: int) -> float:
    """Random number `counter` of the stream of `seed`, in [0, 1): SplitMix64's upper 53 bits."""
    z = np.uint64(seed) + np.uint64(counter + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit_in_place
def _seeds(x: Any, w: Any, seed: Any, distance: Any, drawn: Any, codes: Any) -> None:
    """Draw distinct centers for k-means++; ascending.

    Each is drawn with probability `w * squared distance to the nearest drawn one`. `distance` comes as ones, `drawn` as
    zeros.
    """
    m = x.size
    for t in range(codes.size):
        total = 0.0
        for i in range(m):
            total += w[i] * distance[i]
        goal = _uniform(seed, t) * total
        pick = -1
        running = 0.0
        for i in range(m):
            running += w[i] * distance[i]
            if running > goal:
                pick = i
                break
        if pick < 0:  # every distance underflowed to 0: the first center not drawn yet
            pick = 0
            while drawn[pick] == 1:
                pick += 1
        drawn[pick] = 1
        for i in range(m):
            step = x[i] - x[pick]
            if t == 0 or step * step < distance[i]:
                distance[i] = step * step
    c = 0
    for i in range(m):
        if drawn[i] == 1:
            codes[c] = x[i]
            c += 1


@njit_in_place
def _loss(x: Any, w: Any, codes: Any) -> float:
    loss = 0.0
    c = 0
    for i in range(x.size):
        while c + 1 < codes.size and x[i] > 0.5 * codes[c] + 0.5 * codes[c + 1]:
            c += 1
        if w[i] > 0.0:
            step = x[i] - codes[c]
            loss += w[i] * (step * step)
    return loss


@np.errstate(all="ignore")
def _solve(
    centers: Array, weights: Array, k: int, method: str, initial: Array | None, seed: int, iterations: int
) -> Vector:
    x, w, exponent = prepared(centers, weights)
    if initial is not None:
        codes = np.ldexp(to_numpy(initial).astype(np.float64), -exponent)
        _lloyd(x, w, codes, iterations)
    elif k >= x.size:
        codes = x
    elif method == "exact":
        codes = np.empty(k)
        _exact(x, w, np.zeros((4, x.size + 1)), np.zeros((k + 1, x.size + 1), np.int32), codes)
    else:
        codes = np.empty(k)
        _seeds(x, w, np.uint64(seed % 2**64), np.ones(x.size), np.zeros(x.size, np.uint8), codes)
        _lloyd(x, w, codes, iterations)
    result: Vector = np.ldexp(codes, exponent)
    return result


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
    return [
        like(_solve(centers, weights, one, method, start, seed, iterations), centers, rounded=True)
        for (centers, weights), one, start in each
    ]


def quantization_loss(centers: Array, weights: Array, codebook: Array) -> float:
    """See `shrinkpoint.kernels.kmeans.quantization_loss`."""
    x, w, codes = (np.ascontiguousarray(to_numpy(a), np.float64) for a in (centers, weights, codebook))
    return float(_loss(x, w, codes))
