"""Low-rank prediction of a matrix of small signed numbers from row and column factors.

A gradient is a sum of outer products of a layer's inputs and the gradients at its outputs. So a first moment has far
fewer directions than entries, and the strongest directions predict a grid point well. They are found by subspace
iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4), here on integers, so that the same numbers have the same
factors on every machine: products and their sums are exact, and the roundings between them are single operations in a
fixed order. A reader needs the factors alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.prediction import TOP, column_products, orthogonal_directions, product_classes, row_products

NpArray = np.ndarray[Any, Any]

RANK = 8
HALF_STEPS = 6
"""Predictions of more than this number of half steps from 0 are in the same class."""
CLASSES = 2 * HALF_STEPS + 1
_CLIP = 8
"""Larger numbers are clipped to this, because otherwise few of them would determine the directions."""
_SAMPLE, _ROWS = 1 << 18, 128
"""Size of the sample in which directions are searched, and its least number of rows: few rows of wide matrices give
poor directions (12 % more bits at 256 x 16,384, 3 % at 1,024 x 4,096)."""
_GLANCE, _FIRST, _TELLING = 1 << 17, 2, 16
"""Size of the sample and number of directions for the test whether more directions pay; its least number of rows."""
_ROUNDS = 2
_FINEST = 3
"""Factors are multiples of 2**-3, or of larger powers of two if their range needs it."""
_NOISE = 1 / 12
"""Variance of a number about the value before rounding, which no prediction removes."""


@dataclass(frozen=True, slots=True)
class Factors:
    """Prediction `2**-shift * sum over k of rows[i, k] * columns[j, k]`, in half steps.

    Args:
        rows: int8, shape (R, r).
        columns: int8, shape (C, r).
        phase: column in which the first number stands.
        shift: 1 to 20.
    """

    rows: NpArray
    columns: NpArray
    phase: int
    shift: int

    def classes(self, n: int) -> NpArray:
        """Return predicted half steps, clipped at `HALF_STEPS` and increased by it, uint8 (n,)."""
        found: NpArray = product_classes(self.rows, self.columns, n, self.phase, shift=self.shift, most=HALF_STEPS)
        return found


def signed(symbols: NpArray) -> NpArray:
    """Map symbols 1, 2, 3, 4, ... (uint8) to the int8 numbers 0, -1, 1, -2, ...; symbol 0 to 0."""
    even = (symbols & np.uint8(1)) - np.uint8(1)
    numbers = symbols >> np.uint8(1)
    numbers ^= even
    numbers -= even
    return numbers.view(np.int8)


def expected(classes: NpArray) -> NpArray:
    """Return the number that each class predicts, int8; halves are rounded up."""
    numbers = classes + np.uint8(1)
    numbers >>= np.uint8(1)
    numbers -= np.uint8(HALF_STEPS // 2)
    return numbers.view(np.int8)


def factors_of(symbols: NpArray, columns: int, start: int) -> Factors | None:
    """Return factors that predict a part of a matrix; None if they save less than they cost.

    Args:
        symbols: uint8, shape (n,), of `signed` numbers.
        columns: of the matrix.
        start: number of the first one in it.
    """
    n = symbols.size
    phase = start % columns
    rank = min(RANK, columns // 4, n // columns // 4)
    lines = -(-(phase + n) // columns) + columns
    if rank < 1 or not _promising(symbols, columns, phase, min(_FIRST, rank), lines):
        return None
    sample = _clipped(_sample(symbols, columns, phase, _SAMPLE, _ROWS))
    basis = _directions(sample, columns, rank)
    sums = row_products(_clipped(symbols), basis, phase)
    return _rounded(sums, basis, _power(sample), n, phase)


def factors_each(symbols: NpArray, columns: int, heights: Sequence[int]) -> list[Factors | None]:
    """Return the `factors_of` of each of several small matrices, joined end to end.

    Args:
        symbols: uint8, shape (n,), of `signed` numbers.
        columns: of all matrices.
        heights: rows of each; together n / columns.
    """
    found: list[Factors | None] = [None] * len(heights)
    begins = np.cumsum([0, *heights])
    rows = _clipped(symbols).reshape(-1, columns)
    for height in dict.fromkeys(heights):
        numbers = [i for i, own in enumerate(heights) if own == height]
        rank = min(RANK, columns // 4, height // 4)
        if rank < 1 or height * columns > _GLANCE:
            for i in numbers if rank >= 1 else ():
                found[i] = factors_of(symbols[begins[i] * columns : begins[i + 1] * columns], columns, 0)
            continue
        matrices = np.stack([rows[begins[i] : begins[i + 1]] for i in numbers]).astype(np.float32)
        chosen = _promising_ones(matrices, min(_FIRST, rank))
        if not chosen:
            continue
        some = matrices[chosen]
        basis = _directions_each(some, rank)
        sums = (some @ basis.astype(np.float32)).astype(np.int64)
        for k, i in enumerate(chosen):
            power = float((some[k] ** 2).sum(dtype=np.float64)) / (height * columns)
            found[numbers[i]] = _rounded(sums[k], basis[k], power, height * columns, 0)
    return found


def _rounded(sums: NpArray, basis: NpArray, power: float, n: int, phase: int) -> Factors | None:
    """Return rounded factors along the directions that save more bits than they cost.

    Args:
        sums: int64 [rows, r], products of the rows with the basis.
        basis: int8 [columns, r].
        power: mean square of the numbers.
        n: numbers.
        phase: column in which the first stands.
    """
    norms, lines = _norms(basis), sums.shape[0] + basis.shape[0]
    energies = _energies(sums, norms)
    kept = _worth(energies, power, n, lines)
    if not kept:
        return None
    # Each direction's length is shared by its two factors, so that they are rounded alike.
    lengths = np.sqrt(np.sqrt(energies[kept]))
    roots = np.sqrt(norms[kept].astype(np.float64))
    left = sums[:, kept] / roots / lengths
    right = basis[:, kept] / roots * lengths
    most = max(float(np.abs(left).max()), float(np.abs(right).max()))
    bits = min(_FINEST, math.frexp(127 / most)[1] - 1)
    if bits < 1:
        return None
    rows, across = (np.ascontiguousarray(np.rint(x * 2.0**bits).astype(np.int8)) for x in (left, right))
    return Factors(rows, across, phase, 2 * bits - 1)


def _promising(symbols: NpArray, columns: int, phase: int, rank: int, lines: int) -> bool:
    """Return whether directions fitted to half of a sample save bytes on the other half.

    A test on the same rows would be too optimistic: a few rows always have common directions by chance.
    """
    rows = _clipped(_sample(symbols, columns, phase, _GLANCE)).reshape(-1, columns)
    if rows.shape[0] < _TELLING:
        return True
    some, others = (np.ascontiguousarray(rows[i::2]).reshape(-1) for i in (0, 1))
    basis = _directions(some, columns, rank)
    energies = _energies(row_products(others, basis), _norms(basis)) * (symbols.size / others.size)
    return bool(_worth(energies, _power(others), symbols.size, lines))


def _promising_ones(matrices: NpArray, rank: int) -> list[int]:
    """Return the numbers of the matrices for which `_promising` holds."""
    count, height, columns = matrices.shape
    if height < _TELLING:
        return list(range(count))
    some, others = matrices[:, 0::2], matrices[:, 1::2]
    basis = _directions_each(some, rank)
    sums = (others @ basis.astype(np.float32)).astype(np.int64)
    size, half = height * columns, others.shape[1] * columns
    powers = (others**2).sum(axis=(1, 2), dtype=np.float64) / half
    found = []
    for i in range(count):
        energies = _energies(sums[i], _norms(basis[i])) * (size / half)
        if _worth(energies, float(powers[i]), size, height + columns):
            found.append(i)
    return found


def _power(numbers: NpArray) -> float:
    """Return the mean square of the numbers."""
    return float((numbers.astype(np.int16) ** 2).sum(dtype=np.int64)) / numbers.size


def _norms(basis: NpArray) -> NpArray:
    """Return the squared length of each direction."""
    found: NpArray = (basis.astype(np.int64) ** 2).sum(axis=0)
    return found


def _clipped(symbols: NpArray) -> NpArray:
    """Return the signed numbers of symbols, clipped at `_CLIP`."""
    return signed(np.minimum(symbols, np.uint8(2 * _CLIP) + (symbols & np.uint8(1))))


def _energies(sums: NpArray, norms: NpArray) -> NpArray:
    """Return the squared length of a matrix's component in each direction."""
    small, shift = _within(sums, 20)
    found: NpArray = (small**2).sum(axis=0) * 4.0**shift / np.maximum(norms, 1)
    return found


def _sample(symbols: NpArray, columns: int, phase: int, size: int, least: int = 1) -> NpArray:
    """Return evenly spaced whole rows with about a given number of symbols."""
    first = -phase % columns
    rows = (symbols.size - first) // columns
    whole = symbols[first : first + rows * columns].reshape(rows, columns)
    return np.ascontiguousarray(whole[:: max(1, min(symbols.size // size, rows // least))]).reshape(-1)


def _directions(values: NpArray, columns: int, rank: int) -> NpArray:
    """Return the approximately strongest directions of the rows, int8 [columns, rank]."""
    basis = _signs(columns, rank)
    for _ in range(_ROUNDS):
        rows = _shortened(row_products(values, basis))
        basis = orthogonal_directions(column_products(values, rows, columns)[None])[0]
    return basis


def _directions_each(matrices: NpArray, rank: int) -> NpArray:
    """Return the `_directions` of each of several matrices.

    Matrices are float32 [m, rows, columns], the result is int8 [m, columns, rank].

    Products in float32 are exact: 2**24 is more than 2**15 rows or columns of numbers within 8 and 63 add up to.
    """
    count, _, columns = matrices.shape
    basis = np.broadcast_to(_signs(columns, rank), (count, columns, rank))
    for _ in range(_ROUNDS):
        rows = _shortened(matrices @ basis.astype(np.float32))
        found = matrices.transpose(0, 2, 1) @ rows.astype(np.float32)
        basis = orthogonal_directions(found.astype(np.int64))
    return basis


def _shortened(vectors: NpArray) -> NpArray:
    """Scale each vector to the largest length that `TOP` allows, int8 [..., n, r]."""
    largest = np.maximum(np.abs(vectors).max(axis=-2, keepdims=True, initial=0), 1).astype(np.float64)
    shortened: NpArray = np.rint(vectors * (TOP / largest)).astype(np.int8)
    return shortened


def _signs(lines: int, rank: int) -> NpArray:
    """Return fixed pseudorandom signs +1 and -1, int8 [lines, rank].

    Source: Steele, Lea and Flood 2014, the mixing function of SplittableRandom.
    """
    x = np.arange(1, lines * rank + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.where(x >> np.uint64(63), np.int8(1), np.int8(-1)).reshape(lines, rank)


def _within(sums: NpArray, bits: int) -> tuple[NpArray, int]:
    """Shift integers right until they fit in `bits` bits; also return the shift."""
    shift = max(0, int(np.abs(sums).max(initial=0)).bit_length() - bits)
    return sums >> shift, shift


def _worth(energies: NpArray, power: float, n: int, lines: int) -> list[int]:
    """Return the directions that save more bits than their factors cost, strongest first.

    Of n numbers of variance s, a direction of energy E takes E / n away: n / 2 log2(s / (s - E / n)) bits. Its factors
    take what normal numbers in eighths do.
    """
    kept = []
    left = power + _NOISE
    for k in np.argsort(-energies, kind="stable"):
        after = max(left - float(energies[k]) / n, _NOISE)
        width = math.sqrt(math.sqrt(float(energies[k])) / lines * 2) * 2**_FINEST
        if n / 2 * math.log2(left / after) <= lines * max(0.5, math.log2(max(width, 1e-9)) + 2.05):
            break
        kept.append(int(k))
        left = after
    return kept
