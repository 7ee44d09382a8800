"""Rate-distortion levels on the CPU: one pass, four candidates, no branches.

An element is examined with its own importance only if it is not settled for the smallest importance. One range of
values per pair of levels decides that without arithmetic. Extrapolation is one vectorized pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..backend.arrays import Array, dtype_name, like, to_numpy
from ..backend.jit import njit_in_place, njit_inline
from ..backend.widen import NARROW, widened
from ..errors import BadArgumentError
from . import Table

_STEP = 1 << 20
_FEW = 1 << 16
"""Elements per block, whose positions stay in the cache."""
_LARGEST = np.float32(np.finfo(np.float32).max)
_INFINITY = np.float32(np.inf)
_ROUNDING, _TINY, _LEAST, _FAR = 2.0**-20, 2.0**-147, 2.0**-120, 2.0**122


@njit_in_place
def _choose(x: Any, levels: Any, previous: Any, codebook: Any, prices: Any, importance: Any, out: Any) -> bool:
    two, top = np.int64(2), np.int64(codebook.size + 1)
    contexts = prices.shape[0]
    weighted = importance.size > 0
    s = np.float32(1.0)
    for i in range(x.size):
        nearest: Any = np.int64(levels[i])
        p: Any = np.int64(previous[i])
        if p >= contexts or nearest > top:
            return False
        if nearest < 2:
            out[i] = nearest
            continue
        v = x[i]
        if weighted:
            s = importance[i]
        below, above = max(nearest - 1, two), min(nearest + 1, top)
        old = min(p, top) if p >= two else nearest
        d = v - codebook[nearest - 2]
        best = nearest
        least = s * (d * d) + prices[p, nearest]
        for candidate in (below, above, old):
            d = v - codebook[candidate - 2]
            cost = s * (d * d) + prices[p, candidate]
            best = candidate if cost < least else best
            least = min(cost, least)
        out[i] = best
    return True


@njit_inline
def _next(x: Any) -> Any:
    """Round a float64 up to a float32, at most two steps above it; infinities stay."""
    return np.nextafter(np.float32(x), _INFINITY) if x > -np.inf else -_INFINITY


@njit_in_place
def _bounds(codebook: Any, prices: Any, slack: float, bounds: Any) -> None:
    """See `settled_bounds`; codes and prices in float64."""
    top = codebook.size + 1
    for p in range(prices.shape[0]):
        for n in range(top + 1):
            low, high, low_worth, high_worth = -np.inf, np.inf, 0.0, 0.0
            gap = codebook[n - 2] - codebook[n - 3] if n > 2 else 0.0
            gap = max(gap, codebook[n - 1] - codebook[n - 2]) if 2 <= n < top else gap
            reach = 4.0 * gap
            for m in (n - 1, n + 1, min(p, top)):
                if n < 2 or m < 2 or m > top or m == n:
                    continue
                own, other = codebook[n - 2], codebook[m - 2]
                far, middle = abs(other - own), 0.5 * (own + other)
                gain = (prices[p, n] - prices[p, m]) + slack
                away, worth = 0.0, _LEAST
                if gain > 0.0:
                    square = reach * reach + (reach + far) * (reach + far)
                    away, worth = np.inf, np.inf
                    if far > 0.0:
                        away = (square * _ROUNDING + _TINY) / (2.0 * far)
                        worth = (gain + (prices[p, n] + prices[p, m]) * _ROUNDING + _TINY) / (2.0 * far)
                        worth = max(worth * (1.0 + _ROUNDING), _LEAST)
                    if not (square < _FAR and away < _FAR and worth < _FAR):
                        away, worth = np.inf, np.inf
                    low, high = max(low, own - reach), min(high, own + reach)
                if m < n:
                    low, low_worth = max(low, middle + away), max(low_worth, worth)
                else:
                    high, high_worth = min(high, middle - away), max(high_worth, worth)
            # Infinities times an importance of 0 would be NaN, and settled.
            bounds[p, n, 0], bounds[p, n, 1] = min(_next(low), _LARGEST), _next(low_worth)
            bounds[p, n, 2], bounds[p, n, 3] = max(-_next(-high), -_LARGEST), _next(high_worth)


@njit_in_place
def _ranges(bounds: Any, least: float, low: Any, high: Any) -> None:
    """Value range in which an element is settled for every importance of `least` or more."""
    for p in range(bounds.shape[0]):
        for n in range(bounds.shape[1]):
            b = bounds[p, n]
            below = np.float64(b[1]) / least * (1.0 + _ROUNDING) if least > 0.0 else np.inf
            above = np.float64(b[3]) / least * (1.0 + _ROUNDING) if least > 0.0 else np.inf
            low[p, n] = _next(np.float64(b[0]) + below) if b[0] > -np.inf else -np.inf
            high[p, n] = -_next(above - np.float64(b[2])) if b[2] < np.inf else np.inf


@njit_in_place
def _beyond(x: Any, levels: Any, previous: Any, lows: Any, highs: Any, width: Any, found: Any) -> Any:
    """Count the elements outside `lows[p * width + n] ... highs[...]` and write their positions.

    Positions go to `found`; -1 if a level is out of range.
    """
    one, contexts = np.uint64(1), np.uint64(lows.size) // width
    count = np.uint64(0)
    for i in range(x.size):
        n, p = np.uint64(levels[i]), np.uint64(previous[i])
        if p >= contexts or n >= width:
            return np.int64(-1)
        pair = p * width + n
        v = x[i]
        found[count] = np.uint32(i)
        count += one - np.uint64((v >= lows[pair]) & (v <= highs[pair]))
    return np.int64(count)


@njit_in_place
def _open(
    x: Any, levels: Any, previous: Any, importance: Any, bounds: Any, width: Any, found: Any, out: Any, marks: Any
) -> Any:
    """Keep the positions in `found` that are not settled; return their number.

    Value and importance of each go to `out`, level and previous level to `marks`.
    """
    count, one, two, four = np.uint64(0), np.uint64(1), np.uint64(2), np.uint64(4)
    values, weights, own, before = out[0], out[1], marks[0], marks[1]
    weighted = importance.size > 0
    s = np.float32(1.0)
    for i in range(found.size):
        at = np.uint64(found[i])
        v, n, p = x[at], levels[at], previous[at]
        b = (np.uint64(p) * width + np.uint64(n)) * four
        if weighted:
            s = importance[at]
        found[count] = np.uint32(at)
        values[count], weights[count], own[count], before[count] = v, s, n, p
        passed = (s * (v - bounds[b]) < bounds[b + one]) | (s * (bounds[b + two] - v) < bounds[b + two + one])
        count += np.uint64(passed)
    return np.int64(count)


def _parts(
    x: Array, levels: Array, previous: Array, importance: Array | None, step: int
) -> Iterator[tuple[int, Table, Any, Any, Table]]:
    """Yield blocks of elements: start, float32 values, levels, previous levels, importances.

    Importances are empty without any.
    """
    own, before = to_numpy(levels), to_numpy(previous)
    weights = np.empty(0, np.float32) if importance is None else to_numpy(importance)
    for start in range(0, own.size, step):
        part = slice(start, start + step)
        with np.errstate(over="ignore"):  # a float64 beyond the range becomes infinite
            values = widened(to_numpy(x[part]), dtype_name(x)).astype(np.float32, copy=False)
        yield start, values, own[part], before[part], weights[part]


def rate_distortion_levels(
    x: Array, levels: Array, previous: Array, codebook: Table, prices: Table, importance: Array | None = None
) -> Array:
    """See `kernels.rate_distortion`."""
    out = np.empty(levels.shape[0], np.uint8)
    for start, values, own, before, weights in _parts(x, levels, previous, importance, _STEP):
        if not _choose(values, own, before, codebook, prices, weights, out[start : start + _STEP]):
            raise BadArgumentError("a level is beyond the codebook, or a previous level beyond the prices")
    return like(out, x)


def settled_bounds(codebook: Table, prices: Table, slack: float) -> Table:
    """See `kernels.rate_distortion`."""
    bounds = np.empty((*prices.shape, 4), np.float32)
    _bounds(codebook.astype(np.float64), prices.astype(np.float64), slack, bounds)
    return bounds


def unsettled(
    x: Array, levels: Array, previous: Array, bounds: Table, importance: Array | None = None
) -> tuple[Array, Array, Array, Array, Array | None]:
    """See `kernels.rate_distortion`."""
    weighted = importance is not None and importance.shape[0] > 0
    low, high = np.empty(bounds.shape[:2], np.float32), np.empty(bounds.shape[:2], np.float32)
    _ranges(bounds, float(to_numpy(importance).min()) if weighted else 1.0, low, high)
    flat, width = np.ascontiguousarray(bounds).reshape(-1), np.uint64(bounds.shape[1])
    places, out, marks = np.empty(_FEW + 1, np.uint32), np.empty((2, _FEW), np.float32), np.empty((2, _FEW), np.uint8)
    found = [(np.empty(0, np.int64), out[:, :0], marks[:, :0])]
    for start, values, own, before, weights in _parts(x, levels, previous, importance, _FEW):
        count = _beyond(values, own, before, low.reshape(-1), high.reshape(-1), width, places)
        if count < 0:
            raise BadArgumentError("a level or a previous level is beyond the bounds")
        with np.errstate(invalid="ignore", over="ignore"):  # NaN is settled; uncompiled code would warn
            count = _open(values, own, before, weights, flat, width, places[:count], out, marks)
        found.append((start + places[:count].astype(np.int64), out[:, :count].copy(), marks[:, :count].copy()))
    at, wide, narrow = (np.concatenate(parts, axis=-1) for parts in zip(*found, strict=True))
    made = [like(np.ascontiguousarray(part), x) for part in (at, wide[0], narrow[0], narrow[1], wide[1])]
    return made[0], made[1], made[2], made[3], None if importance is None else made[4]


_BLOCK = 1 << 16
"""Elements per block: their float32 values stay in the second-level cache, and the cost of a call is small."""


@njit_in_place
def _extrapolate(x: Any, earlier: Any, factor: Any, out: Any) -> None:
    kind = out.dtype.type
    endless, nan = kind(np.inf), kind(np.nan)
    for i in range(x.size):
        v = x[i]
        far = v + (v - kind(earlier[i])) * factor
        stays = v if v == v else nan
        out[i] = far if abs(far) < endless else stays


def extrapolate(x: Array, earlier: Array, factor: float) -> Array:
    """See `kernels.extrapolate`."""
    names = dtype_name(x), dtype_name(earlier)
    own, before = to_numpy(x).reshape(-1), to_numpy(earlier).reshape(-1)
    out = np.empty(own.size, np.float64 if names[0] == "float64" else np.float32)
    step = max(own.size, 1) if NARROW.isdisjoint(names) else _BLOCK
    targets = [(name, np.empty(min(step, own.size), np.float32) if name in NARROW else None) for name in names]
    with np.errstate(all="ignore"):  # uncompiled code would warn
        for start in range(0, own.size, step):
            part = slice(start, start + step)
            a, b = (widened(v[part], *to) for v, to in zip((own, before), targets, strict=True))
            _extrapolate(a, b, out.dtype.type(factor), out[part])
    return like(out.reshape(x.shape), x)
