"""Oracle of the low-rank prediction, in matrix products of whole numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from ..backend.arrays import Array
from . import CLIP, RANK, TOP, UNIT, Heights, sample_rows

NpArray = np.ndarray[Any, Any]


def low_rank_factors(numbers: Array, heights: Heights, columns: int, phase: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.prediction.low_rank_factors`."""
    xp = array_namespace(numbers)
    n = numbers.shape[0]
    clipped = np.array([min(max(int(x), -CLIP), CLIP) for x in numbers], np.int64)
    padded = np.concatenate([np.zeros(phase, np.int64), clipped, np.zeros(-(phase + n) % columns, np.int64)])
    matrix, rows, across, begin = padded.reshape(-1, columns), [], [], 0
    for height in heights.tolist():
        own = matrix[begin : begin + height]
        whole = own[1 if phase else 0 : height - (1 if (phase + n) % columns else 0)]
        a, b = _factors(own, whole)
        rows.append(a)
        across.append(b)
        begin += height
    return xp.asarray(np.concatenate(rows)), xp.asarray(np.concatenate(across))


def low_rank_predictions(rows: Array, columns: Array, heights: Heights, n: int, phase: int) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.prediction.low_rank_predictions`."""
    xp = array_namespace(rows)
    a, b = (xp.astype(x, xp.int64) for x in (rows, columns))
    width, begin, found = b.shape[0] // heights.size, 0, []
    for number, height in enumerate(heights.tolist()):
        left = xp.expand_dims(a[begin : begin + height, :], axis=1)
        right = xp.expand_dims(b[number * width : (number + 1) * width, :], axis=0)
        found.append(xp.reshape(xp.sum(left * right, axis=2, dtype=xp.int64), (-1,)))
        begin += height
    products = xp.concat(found)[phase : phase + n]
    quarters = xp.astype(xp.round(xp.astype(products, xp.float64) / 16), xp.int64) + 2
    nearest = xp.astype(quarters // 4, xp.int64) % 256
    signed = xp.where(nearest > 127, nearest - 256, nearest)
    return xp.astype(signed, xp.int8), xp.astype(quarters % 4, xp.uint8)


def low_rank_differences(
    numbers: Array, rows: Array, columns: Array, heights: Heights, phase: int
) -> tuple[Array, Array]:
    """See `shrinkpoint.kernels.prediction.low_rank_differences`."""
    xp = array_namespace(numbers)
    nearest, quarter = low_rank_predictions(rows, columns, heights, numbers.shape[0], phase)
    wide = (xp.astype(numbers, xp.int64) - xp.astype(nearest, xp.int64)) % 256
    return zigzag(xp.astype(xp.where(wide > 127, wide - 256, wide), xp.int8)), quarter


def zigzag(numbers: Array) -> Array:
    """See `shrinkpoint.kernels.prediction.zigzag`."""
    xp = array_namespace(numbers)
    wide = xp.astype(numbers, xp.int64)
    return xp.astype(xp.where(wide < 0, -2 * wide - 1, 2 * wide), xp.uint8)


def unzigzag(symbols: Array) -> Array:
    """See `shrinkpoint.kernels.prediction.unzigzag`."""
    xp = array_namespace(symbols)
    wide = xp.astype(symbols, xp.int64)
    return xp.astype(xp.where(wide % 2 == 1, -(wide + 1) // 2, wide // 2), xp.int8)


def _factors(matrix: NpArray, whole: NpArray) -> tuple[NpArray, NpArray]:
    """Return the factors of one matrix, int8 [lines, 8] each; `whole` holds its complete rows."""
    (height, columns), count = matrix.shape, whole.shape[0]
    rows, across = np.zeros((height, RANK), np.int8), np.zeros((columns, RANK), np.int8)
    rank = min(RANK, columns // 4, count // 4)
    if rank < 1:
        return rows, across
    taken = sample_rows(count, columns)
    sample = whole[:: count // taken][:taken]
    basis = _signs(columns, rank)
    for _ in range(2):
        sums = sample @ basis
        largest = np.maximum(np.abs(sums).max(axis=0), 1).astype(np.float64)
        basis = _orthogonal(sample.T @ np.rint(sums * (TOP / largest)).astype(np.int64))
    norms = (basis**2).sum(axis=0)
    sums = sample @ basis
    shift = max(0, int(np.abs(sums).max()).bit_length() - 20)
    power = float((sample**2).sum()) / (taken * columns) + 1 / 12
    root = math.sqrt(taken) + math.sqrt(columns)
    noise = power * (root * root - taken)
    energies = []
    for total, norm in zip(((sums >> shift) ** 2).sum(axis=0).tolist(), norms.tolist(), strict=True):
        found = float(total) * 4.0**shift / max(norm, 1)
        energies.append(found + (found - noise) * ((count - taken) / taken))
    for slot, k in enumerate(_worth(energies, power, count, columns)):
        length, own = math.sqrt(math.sqrt(energies[k])), math.sqrt(float(norms[k]))
        rows[:, slot] = _stored((matrix @ basis[:, k]) * (UNIT / (own * length)))
        across[:, slot] = _stored(basis[:, k] * (UNIT * length / own))
    return rows, across


def _stored(values: NpArray) -> NpArray:
    return np.clip(np.rint(values), -127, 127).astype(np.int8)


def _worth(energies: list[float], power: float, count: int, columns: int) -> list[int]:
    """Return the directions that save more bits than their factors cost, strongest first."""
    kept: list[int] = []
    n, lines, left = float(count * columns), float(count + columns), power
    for k in sorted(range(len(energies)), key=lambda k: -energies[k]):
        energy = energies[k]
        if energy <= 0:
            break
        after = max(left - energy / n, 1 / 12)
        width = math.sqrt(math.sqrt(energy) / lines * 2) * UNIT
        if n / 2 * math.log2(left / after) <= lines * max(0.5, math.log2(width) + 2.05):
            break
        kept.append(k)
        left = after
    return kept


def _signs(lines: int, rank: int) -> NpArray:
    """Return fixed pseudorandom signs +1 and -1, int64 [lines, rank].

    Source: Steele, Lea and Flood 2014, the mixing function of SplittableRandom.
    """
    x = np.arange(1, lines * RANK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.where(x >> np.uint64(63), 1, -1).reshape(lines, RANK)[:, :rank]


def _orthogonal(vectors: NpArray) -> NpArray:
    """Return orthogonal directions of the span of int64 vectors [n, r], up to `TOP`."""
    shift = max(0, int(np.abs(vectors).max(initial=0)).bit_length() - 15)
    x = vectors >> shift
    found = np.zeros(x.shape, np.int64)
    for k, own in enumerate(_inverse_root((x.T @ x).tolist())):
        if own is None:
            continue
        total = x[:, 0] * own[0]
        for j in range(1, k + 1):
            total += x[:, j] * own[j]
        largest = float(np.abs(total).max())
        if largest > 0:
            found[:, k] = np.rint(total * (TOP / largest))
    return found


def _inverse_root(gram: list[list[int]]) -> list[list[float] | None]:
    """Return the combinations that make the vectors of a Gram matrix orthogonal, one by one.

    A vector that depends linearly on those before it gives None.

    Cholesky's factorization of the Gram matrix and the inverse of its triangle, in plain floats.
    """
    rank = len(gram)
    found: list[list[float] | None] = []
    for k in range(rank):
        row = []
        for j in range(k):
            own = found[j]
            row.append(0.0 if own is None else _total(own[i] * gram[i][k] for i in range(j + 1)))
        left = gram[k][k] - _total(a * a for a in row)
        if not left > 1e-6 * gram[k][k]:
            found.append(None)
            continue
        combined = [0.0] * (k + 1)
        combined[k] = 1.0
        for j in range(k):
            own = found[j]
            if own is not None:
                for i in range(j + 1):
                    combined[i] -= row[j] * own[i]
        length = math.sqrt(left)
        found.append([c / length for c in combined])
    return found


def _total(terms: Iterable[float]) -> float:
    """Return the sum, rounded after each term as `sum` does up to Python 3.11."""
    return reduce(add, terms, 0.0)
