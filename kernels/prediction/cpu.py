"""Low-rank prediction on the CPU: one compiled loop over the matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..backend.arrays import Array, like, to_numpy
from ..backend.jit import njit_in_place, njit_inline
from . import CLIP, LEAST_ROWS, RANK, SAMPLE, TOP, UNIT, WHOLE, Heights

NumPy = np.ndarray[Any, Any]
SHORT = 1 << 20
"""Numbers of a row that are summed in 32 bits (at most 2**30) before they are added to 64-bit sums."""
_NONE = np.empty(0, np.int8)


def low_rank_factors(numbers: Array, heights: Heights, columns: int, phase: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.prediction.low_rank_factors`."""
    own = to_numpy(numbers)
    rows = np.zeros((int(heights.sum()), RANK), np.int8)
    across = np.zeros((heights.size * columns, RANK), np.int8)
    _factors(own, heights, phase, rows, across, _room(heights, columns))
    return like(rows, numbers), like(across, numbers)


def _room(heights: Heights, columns: int) -> tuple[NumPy, ...]:
    """Return the arrays of intermediate results of `_factors`.

    A function that creates arrays compiles for longer. They are int16 directions [8, columns], a row, and the sample;
    int32 vectors; a float64 row; int64 order of the directions, their norms, and products of the sample with them; and
    the float64 matrices of `_orthogonal`.
    """
    most = min(int(heights.max()), max(LEAST_ROWS, SAMPLE // columns, WHOLE // columns))
    return (
        np.empty((RANK + 1 + most, columns), np.int16),
        np.empty((RANK, columns), np.int32),
        np.empty(columns),
        np.empty((2 + most, RANK), np.int64),
        np.empty((2 * RANK + 3, RANK)),
    )


def low_rank_predictions(rows: Array, columns: Array, heights: Heights, n: int, phase: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.prediction.low_rank_predictions`."""
    nearest, quarter = np.empty(n, np.uint8), np.empty(n, np.uint8)
    _fill_predictions(rows, columns, heights, phase, _NONE, nearest, quarter)
    return like(nearest.view(np.int8), rows), like(quarter, rows)


def _fill_predictions(
    rows: Array, columns: Array, heights: Heights, phase: int, numbers: NumPy, out: NumPy, quarter: NumPy
) -> None:
    across = to_numpy(columns)
    room = np.empty((RANK + 1, across.shape[0] // heights.size), np.int16)
    _predictions(to_numpy(rows), across, heights, phase, numbers, out, quarter, room)


def low_rank_differences(
    numbers: Array, rows: Array, columns: Array, heights: Heights, phase: int
) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.prediction.low_rank_differences`."""
    own = to_numpy(numbers)
    found, quarter = np.empty(own.size, np.uint8), np.empty(own.size, np.uint8)
    _fill_predictions(rows, columns, heights, phase, own, found, quarter)
    return like(found, rows), like(quarter, rows)


def zigzag(numbers: Array) -> Array:
    """See `shrinkpoint.kernels.prediction.zigzag`."""
    own = to_numpy(numbers)
    out = np.empty(own.size, np.uint8)
    _zigzag(own, out)
    return like(out, numbers)


def unzigzag(symbols: Array) -> Array:
    """See `shrinkpoint.kernels.prediction.unzigzag`."""
    own = to_numpy(symbols)
    out = np.empty(own.size, np.int8)
    _unzigzag(own, out)
    return like(out, symbols)


@njit_inline
def _products(numbers: NumPy, basis: NumPy, first: Any, sums: NumPy) -> None:
    """Products of a row of clipped numbers from column `first` on with each of the 8 directions."""
    sums[:] = 0
    for start in range(0, numbers.size, SHORT):
        x, at = numbers[start : start + SHORT], first + start
        b0, b1, b2, b3 = basis[0, at:], basis[1, at:], basis[2, at:], basis[3, at:]
        b4, b5, b6, b7 = basis[4, at:], basis[5, at:], basis[6, at:], basis[7, at:]
        t0 = t1 = t2 = t3 = t4 = t5 = t6 = t7 = np.int32(0)
        for j in range(x.size):
            v = np.int32(x[j])
            t0 = np.int32(t0 + np.int32(v * np.int32(b0[j])))
            t1 = np.int32(t1 + np.int32(v * np.int32(b1[j])))
            t2 = np.int32(t2 + np.int32(v * np.int32(b2[j])))
            t3 = np.int32(t3 + np.int32(v * np.int32(b3[j])))
            t4 = np.int32(t4 + np.int32(v * np.int32(b4[j])))
            t5 = np.int32(t5 + np.int32(v * np.int32(b5[j])))
            t6 = np.int32(t6 + np.int32(v * np.int32(b6[j])))
            t7 = np.int32(t7 + np.int32(v * np.int32(b7[j])))
        sums[0] += t0
        sums[1] += t1
        sums[2] += t2
        sums[3] += t3
        sums[4] += t4
        sums[5] += t5
        sums[6] += t6
        sums[7] += t7


@njit_inline
def _clipped(numbers: NumPy, out: NumPy) -> None:
    low, high = np.int16(-CLIP), np.int16(CLIP)
    for j in range(out.size):
        out[j] = min(max(np.int16(numbers[j]), low), high)


@njit_inline
def _orthogonal(vectors: NumPy, rank: Any, x: NumPy, basis: NumPy, work: NumPy) -> None:
    """Fill `basis` with orthogonal directions of the span of int64 vectors [8, n]."""
    gram, inverse, row, used = work[:RANK], work[RANK : 2 * RANK], work[2 * RANK], work[2 * RANK + 1]
    lines = vectors.shape[1]
    most = np.int32(0)
    for k in range(rank):
        own = vectors[k]
        for j in range(lines):
            most = max(most, np.int32(abs(own[j])))
    shift = np.int32(0)
    while most >> shift >= 1 << 15:
        shift += np.int32(1)
    for k in range(rank):
        own = vectors[k]
        for j in range(lines):
            own[j] = np.int32(own[j] >> np.int32(shift))
    for k in range(rank):
        for i in range(k + 1):
            one, other, whole = vectors[i], vectors[k], np.int64(0)
            for j in range(lines):
                whole += np.int64(np.int32(one[j] * other[j]))
            gram[i, k] = gram[k, i] = np.float64(whole)
    inverse[:] = 0.0
    used[:] = 0.0
    for k in range(rank):
        norm = 0.0
        for j in range(k):
            row[j] = 0.0
            if used[j] > 0.0:
                for i in range(j + 1):
                    row[j] += inverse[j, i] * gram[i, k]
            norm += row[j] * row[j]
        left = gram[k, k] - norm
        if not left > 1e-6 * gram[k, k]:
            continue
        used[k] = 1.0
        inverse[k, k] = 1.0
        for j in range(k):
            if used[j] > 0.0:
                for i in range(j + 1):
                    inverse[k, i] -= row[j] * inverse[j, i]
        length = np.sqrt(left)
        for i in range(k + 1):
            inverse[k, i] /= length
    for k in range(rank):
        own, largest = basis[k], 0.0
        if used[k] > 0.0:
            for j in range(lines):
                x[j] = np.float64(vectors[0, j]) * inverse[k, 0]
            for i in range(1, k + 1):
                other, times = vectors[i], inverse[k, i]
                for j in range(lines):
                    x[j] += np.float64(other[j]) * times
            for j in range(lines):
                largest = max(largest, abs(x[j]))
        scale = np.float64(TOP) / largest if largest > 0.0 else 0.0
        for j in range(lines):
            own[j] = np.int16(np.rint(x[j] * scale)) if largest > 0.0 else np.int16(0)


@njit_inline
def _directions(sample: NumPy, rank: Any, sums: NumPy, basis: NumPy, vectors: NumPy, x: NumPy, work: NumPy) -> None:
    """Two rounds of subspace iteration over the sample, then its products with the directions."""
    count, columns = sample.shape
    for j in range(columns):
        for k in range(RANK):
            seed = np.uint64(j * RANK + k + 1) * np.uint64(0x9E3779B97F4A7C15)
            seed = (seed ^ (seed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            sign = np.int16(1) if seed >> np.uint64(63) else np.int16(-1)
            basis[k, j] = sign if k < rank else np.int16(0)
    scales = work[2 * RANK]
    for turn in range(3):
        for i in range(count):
            _products(sample[i], basis, 0, sums[i])
        if turn == 2:
            break
        for k in range(rank):
            most = np.int64(1)
            for i in range(count):
                most = max(most, abs(sums[i, k]))
            scales[k] = np.float64(TOP) / np.float64(most)
        vectors[:] = np.int32(0)
        for i in range(0, count, 2):
            more = i + 1 < count
            one, other = sample[i], sample[i + 1 if more else i]
            for k in range(rank):
                a = np.int32(np.rint(np.float64(sums[i, k]) * scales[k]))
                b = np.int32(np.rint(np.float64(sums[i + 1, k]) * scales[k])) if more else np.int32(0)
                own = vectors[k]
                for j in range(columns):
                    own[j] = np.int32(
                        own[j] + np.int32(np.int32(a * np.int32(one[j])) + np.int32(b * np.int32(other[j])))
                    )
        _orthogonal(vectors, rank, x, basis, work)


@njit_inline
def _energies(sums: NumPy, norms: NumPy, rank: Any, noise: Any, more: Any, energies: NumPy) -> None:
    """Energy of each direction, in the sample and expected elsewhere, without that of noise."""
    most = np.int64(0)
    for k in range(rank):
        for i in range(sums.shape[0]):
            most = max(most, abs(sums[i, k]))
    shift = np.int64(0)
    while most >> shift >= 1 << 20:
        shift += 1
    for k in range(rank):
        total = np.int64(0)
        for i in range(sums.shape[0]):
            total += (sums[i, k] >> shift) * (sums[i, k] >> shift)
        scaled = np.float64(total) * np.float64(np.int64(1) << (2 * shift))
        found = scaled / np.float64(max(norms[k], np.int64(1)))
        energies[k] = found + (found - noise) * more


@njit_inline
def _worth(energies: NumPy, power: Any, count: Any, columns: Any, order: NumPy, rank: Any) -> Any:
    """Number of directions that save more bits than their factors cost; fill their `order`."""
    for k in range(rank):
        at = k
        while at > 0 and energies[order[at - 1]] < energies[k]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = k
    n, lines, left, kept = np.float64(count * columns), np.float64(count + columns), power, 0
    for slot in range(rank):
        energy = energies[order[slot]]
        if energy <= 0.0:
            break
        after = max(left - energy / n, 1 / 12)
        width = math.sqrt(math.sqrt(energy) / lines * 2) * UNIT
        if n / 2 * math.log2(left / after) <= lines * max(0.5, math.log2(width) + 2.05):
            break
        left = after
        kept += 1
    return kept


@njit_in_place
def _factors(numbers: NumPy, heights: NumPy, phase: int, rows: NumPy, across: NumPy, room: tuple[NumPy, ...]) -> None:
    integers, vectors, x, wide, work = room
    columns = x.size
    least = max(np.int64(LEAST_ROWS), np.int64(SAMPLE) // columns)
    basis, row, sample = integers[:RANK], integers[RANK], integers[RANK + 1 :]
    order, norms, sums, energies = wide[0], wide[1], wide[2:], work[2 * RANK + 2]
    begin = line = np.int64(0)
    for m in range(heights.size):
        size = min(heights[m] * columns, numbers.size - begin)
        first = begin + (columns - phase if phase else 0)
        count = (begin + size - first) // columns if begin + size > first else np.int64(0)
        rank = min(np.int64(RANK), columns // 4, count // 4)
        kept = 0
        if rank >= 1:
            taken = min(count, max(np.int64(LEAST_ROWS), np.int64(WHOLE) // columns, min(count // 4, least)))
            own, squares = sample[:taken], np.int64(0)
            for i in range(taken):
                at = first + i * (count // taken) * columns
                _clipped(numbers[at : at + columns], own[i])
                some = np.int32(0)
                for j in range(columns):
                    value = np.int32(own[i, j])
                    some = np.int32(some + np.int32(value * value))
                squares += some
            _directions(own, rank, sums[:taken], basis, vectors, x, work)
            for k in range(rank):
                norm = np.int64(0)
                for j in range(columns):
                    norm += np.int64(np.int32(np.int32(basis[k, j]) * np.int32(basis[k, j])))
                norms[k] = norm
            power = np.float64(squares) / np.float64(taken * columns) + 1 / 12
            root = math.sqrt(np.float64(taken)) + math.sqrt(np.float64(columns))
            noise = power * (root * root - np.float64(taken))
            _energies(sums[:taken], norms, rank, noise, np.float64(count - taken) / np.float64(taken), energies)
            kept = _worth(energies, power, count, columns, order, rank)
        if kept:
            scales = work[0]
            for slot in range(kept):
                k = order[slot]
                length, width = math.sqrt(math.sqrt(energies[k])), math.sqrt(np.float64(norms[k]))
                scales[k] = np.float64(UNIT) / (width * length)
                times = np.float64(UNIT) * length / width
                for j in range(columns):
                    value = np.rint(np.float64(basis[k, j]) * times)
                    across[m * columns + j, slot] = np.int8(min(max(value, -127.0), 127.0))
            totals = sums[0]
            for r in range(heights[m]):
                start = max(begin + r * columns - phase, begin)
                stop = min(begin + (r + 1) * columns - phase, begin + size)
                off = start - (begin + r * columns - phase)
                part = row[: stop - start]
                _clipped(numbers[start:stop], part)
                _products(part, basis, off, totals)
                for slot in range(kept):
                    value = np.rint(np.float64(totals[order[slot]]) * scales[order[slot]])
                    rows[line + r, slot] = np.int8(min(max(value, -127.0), 127.0))
        begin += size
        line += heights[m]


@njit_inline
def _rounded(sixteenths: Any) -> Any:
    """Sixteenths to which two quarters are added, so that a shift by four rounds to even."""
    above = np.int16(sixteenths + np.int16(39))
    odd = np.int16(np.int16(np.int16(above - np.int16(7)) >> np.int16(4)) & np.int16(1))
    return np.int16(above + odd)


@njit_in_place
def _predictions(
    rows: NumPy, across: NumPy, heights: NumPy, phase: int, numbers: NumPy, out: NumPy, quarter: NumPy, room: NumPy
) -> None:
    """Fill `quarter`, and `out` with the nearest integers or with differences to them.

    If numbers are given, `out` gets their zigzag differences. `room` is int16 [RANK + 1, columns]. Products of factors
    wrap at 16 bits: of a sum in sixteenths only its lowest 14 bits count, for `out` and `quarter` are 10 bits together.
    """
    columns = room.shape[1]
    factor, sums = room[:RANK], room[RANK]
    b0, b1, b2, b3 = factor[0], factor[1], factor[2], factor[3]
    b4, b5, b6, b7 = factor[4], factor[5], factor[6], factor[7]
    line, begin, four, six = 0, -phase, np.int16(4), np.int16(6)
    for m in range(heights.size):
        rank = 0
        for j in range(columns):
            for k in range(RANK):
                factor[k, j] = np.int16(across[m * columns + j, k])
                rank = max(rank, k + 1 if across[m * columns + j, k] != 0 else 0)
        for r in range(heights[m]):
            start, stop = max(begin, 0), min(begin + columns, out.size)
            off, n = start - begin, stop - start
            whole, part = out[start:stop], quarter[start:stop]
            begin += columns
            own = rows[line + r]
            a0, a1, a2, a3 = np.int16(own[0]), np.int16(own[1]), np.int16(own[2]), np.int16(own[3])
            a4, a5, a6, a7 = np.int16(own[4]), np.int16(own[5]), np.int16(own[6]), np.int16(own[7])
            if rank > 4:
                for j in range(columns):
                    low = np.int16(a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j])
                    high = np.int16(a4 * b4[j] + a5 * b5[j] + a6 * b6[j] + a7 * b7[j])
                    sums[j] = _rounded(np.int16(low + high))
            elif rank:
                for j in range(columns):
                    sums[j] = _rounded(np.int16(a0 * b0[j] + a1 * b1[j] + a2 * b2[j] + a3 * b3[j]))
            else:
                sums[:] = _rounded(np.int16(0))
            if numbers.size:
                given = numbers[start:stop]
                for j in range(n):
                    z = sums[off + j]
                    d = np.int8(given[j] - np.int8(z >> six))
                    whole[j] = np.uint8(np.uint8(d << np.int8(1)) ^ np.uint8(d >> np.int8(7)))
                    part[j] = np.uint8(np.int16(z >> four) & np.int16(3))
            else:
                for j in range(n):
                    z = sums[off + j]
                    whole[j] = np.uint8(z >> six)
                    part[j] = np.uint8(np.int16(z >> four) & np.int16(3))
        line += heights[m]


@njit_in_place
def _zigzag(numbers: NumPy, out: NumPy) -> None:
    for i in range(out.size):
        d = numbers[i]
        out[i] = np.uint8(np.uint8(d << np.int8(1)) ^ np.uint8(d >> np.int8(7)))


@njit_in_place
def _unzigzag(symbols: NumPy, out: NumPy) -> None:
    for i in range(out.size):
        s = symbols[i]
        out[i] = np.int8(np.uint8(s >> np.uint8(1)) ^ np.uint8(-np.int8(s & np.uint8(1))))
