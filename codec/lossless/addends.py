"""Exact difference of two arrays by the fewest addends, to merge deltas into a super-step.

The addends of several deltas cannot be summed, because each addition rounded. But for an element that went from p to r
the numbers s with round(p + s) = r are an interval, about as wide as a unit in the last place of r. The fewest points
that meet all intervals are found greedily. They are far fewer than the elements, since the elements share the few
addends that the deltas had. An element without such an s (p + s cannot give r in one step) is stored raw.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...kernels.backend.arrays import numbers, placed_with
from ...kernels.exponent import exponent_sums
from .. import entropy
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..groups import joined_bytes
from ..state.casting import float_values, rounded
from ..state.leaves import Array, LeafSpec, NpArray, floats

BLOCK = 1 << 15
MOST = (1 << 16) - 2
"""Most addends of one chunk: a level is two bytes, 0 adds nothing, and the last marks elements stored raw."""
_INSIDE = 1 - 2.0**-10
"""Share of an interval that is used."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""Odd factor that makes one key of two numbers. If two pairs have the same key, the check of the sums finds it."""


def encode_addends(after: NpArray, before: NpArray, spec: LeafSpec) -> bytes | None:
    """Encode the levels and addends that turn `before` into `after`.

    Args:
        after: uint8, bytes of an array of `spec.dtype` (float16, bfloat16, float32, float64), 4 M elements at most.
        before: as many bytes.
        spec: says the dtype.

    Returns:
        Bytes for `decode_addends`; None where more than `MOST` addends are needed.
    """
    width = f"<u{spec.itemsize}"
    new, old = after.view(width), before.view(width)
    at = np.flatnonzero(new != old)
    with np.errstate(all="ignore"):
        found = _fewest(new[at], old[at], spec)
        if found is None:
            return None
        values, number = found
        addends = rounded(values, spec).view(width)
        levels = np.zeros(new.size, np.uint16)
        levels[at] = number + 1
        levels[added(before, levels, addends, spec).view(width) != new] = addends.size + 1
    out = Writer()
    out.varint(addends.size)
    out.raw(addends)
    high = (levels >> 8).astype(np.uint8)
    rows = max(2, int(high.max(initial=0)) + 1)
    low = entropy.encode_levels((levels & 255).astype(np.uint8), 256, high, rows, "smallest")
    out.block(entropy.encode(high), low)
    out.raw(new[levels == addends.size + 1])
    return out.done()


def decode_addends(piece: memoryview, out: Array, spec: LeafSpec, before: NpArray) -> None:
    """Fill `out` with the bytes that `encode_addends` coded; raises CorruptDataError."""
    width = f"<u{spec.itemsize}"
    data = Reader(piece, "addends")
    size = data.varint()
    if size > MOST:
        raise CorruptDataError(f"addends: {size} of them")
    addends = data.array(width, size)
    n = out.shape[0] // spec.itemsize
    high = entropy.decode(data.block(), n)
    rows = max(2, int(high.max(initial=0)) + 1)
    low = entropy.decode(data.block(), n, high, rows)
    levels = low | high.astype(np.uint16) << np.uint16(8)
    if int(levels.max(initial=0)) > size + 1:
        raise CorruptDataError("addends: a level is beyond the last addend")
    kept = np.flatnonzero(levels == size + 1)
    levels[kept] = 0
    add(before, levels, addends, spec, out)
    raw = data.array(f"<i{spec.itemsize}", kept.size)
    numbers(out, spec.itemsize, "int")[placed_with(kept, out)] = placed_with(raw, out)
    data.end()


def add(before: NpArray, levels: NpArray, addends: NpArray, spec: LeafSpec, out: Array) -> None:
    """Fill bytes, on the host or on a GPU, with the result of `added`."""
    out[:] = added(placed_with(before, out), levels, addends, spec)


def added(before: Array, levels: Array, addends: NpArray, spec: LeafSpec) -> Array:
    """Return before + addends[level - 1] as bytes, rounded once; level 0 changes nothing.

    Args:
        before: uint8, bytes of n values, on the host or on a GPU.
        levels: uint8 or uint16 [n], there or on the host; one beyond the addends is a CorruptDataError.
        addends: unsigned patterns [k] as wide as the dtype, on the host.
        spec: says the dtype.
    """
    codebook = np.concatenate([np.zeros(1, addends.dtype), addends])
    old = floats(before, spec)
    return joined_bytes([exponent_sums(old, placed_with(levels, old), codebook)], there=True)


def blocks(n: int, spec: LeafSpec) -> Iterator[slice]:
    """Return slices of the bytes of n elements, small enough for the cache."""
    step = BLOCK * spec.itemsize
    return (slice(start, start + step) for start in range(0, n * spec.itemsize, step))


def _fewest(new: NpArray, old: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray] | None:
    """Return addends by descending frequency and each element's addend number; None if too many.

    A number may be wrong where the interval is odd (rounded bounds, values that are not finite): to be verified.
    """
    r, p = (float_values(u.view(np.uint8), spec).astype(np.float64) for u in (new, old))
    below = (new & new.dtype.type((1 << (8 * spec.itemsize - 1)) - 1)) - new.dtype.type(1)
    unit = np.abs(r) - float_values(below.view(np.uint8), spec)
    away = np.nan_to_num(r - p)
    # Elements that went as far at the same resolution have the same interval; few do not share theirs.
    _, resolution = np.frexp(np.nan_to_num(unit))
    key = away.view(np.uint64) ^ (resolution.astype(np.uint64) * _SPREAD)
    _, first, own, counts = np.unique(key, return_index=True, return_inverse=True, return_counts=True)
    if first.size > max(256, new.size // 4):
        return None
    # Without the ends, where round(p + s) is a tie; a little less, so that rounding a point does not put it there.
    middle, half = away[first], _INSIDE * 0.5 * np.nan_to_num(unit[first])
    low = np.minimum(np.nextafter(middle - half, np.inf), middle)
    high = np.maximum(np.nextafter(middle + half, -np.inf), middle)
    points = _stab(low, high)
    if points.size > MOST:
        return None
    points = np.unique(float_values(rounded(points, spec), spec).astype(np.float64))
    weight: NpArray = np.ones(points.size)
    for _ in range(2):  # with the weights found in the first round, all go to the most frequent point they can
        chosen = _heaviest(weight, np.searchsorted(points, low), np.searchsorted(points, high, "right"))
        weight = np.bincount(chosen, counts, points.size)
    order = np.lexsort((points, -weight))[: np.count_nonzero(weight)]
    rank = np.zeros(points.size, np.int64)
    rank[order] = np.arange(order.size)
    return points[order], rank[chosen[own]]


def _heaviest(weight: NpArray, start: NpArray, stop: NpArray) -> NpArray:
    """Return the position of the first maximum of each range; for an empty one, its start."""
    # best[k][i] is the place of the largest weight in i ... i + 2**k - 1.
    best = [np.arange(weight.size)]
    longest = int((stop - start).max(initial=1))
    while 2 << (len(best) - 1) <= longest:
        left, right = best[-1][: -(1 << (len(best) - 1))], best[-1][1 << (len(best) - 1) :]
        best.append(np.where(weight[right] > weight[left], right, left))
    size = np.maximum(stop - start, 1)
    level = np.log2(size).astype(np.int64)
    out = np.minimum(start, weight.size - 1)
    for k, places in enumerate(best):
        at = np.flatnonzero((level == k) & (stop > start))
        left, right = places[start[at]], places[stop[at] - (1 << k)]
        out[at] = np.where(weight[right] > weight[left], right, left)
    return out


def _stab(low: NpArray, high: NpArray) -> NpArray:
    """Return the fewest points, ascending, such that each interval [low, high] contains one."""
    points: list[float] = []
    right = -np.inf
    order = np.argsort(low, kind="stable")
    for start, stop in zip(low[order].tolist(), high[order].tolist(), strict=True):
        if start > right:
            points.append(0.0)
            right = stop
        right = min(right, stop)
        points[-1] = 0.5 * (start + right)
    return np.array(points)
