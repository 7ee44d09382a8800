"""A matrix of small signed numbers predicted by few products of a row's and a column's number.

A gradient is a sum of outer products, of what comes into a layer and what goes back through it, so a first moment has
far fewer directions than entries, and a number is likely near what the strongest of them say: its grid point costs
less, and within its cell the value is put nearer to the prediction (`Moves`). Directions are found by subspace
iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4), here on integers, so that the same numbers have the same
factors on every machine: products and their sums are exact, and what is rounded between is rounded one operation after
another. A reader needs the factors alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from ..kernels.levels import joint_counts
from ..kernels.products import column_products, product_classes, row_products

NpArray = np.ndarray[Any, Any]
Select = Callable[[Any], Any]
"""What takes a part of a flat array, of NumPy or torch."""

RANK = 8
HALF_STEPS = 6
"""Predictions of farther than so many half steps from 0 are of the same class."""
CLASSES = 2 * HALF_STEPS + 1
FARTHEST = 2
"""Quarter steps from a number beyond which its prediction is of the same class of `Factors.distances`: what is outside
the number's cell says no more than its edge."""
_SAMPLE, _ROWS = 1 << 18, 128
"""Numbers whose rows the directions of the columns are sought in, and how many rows these are at least: from few rows
of wide matrices they come out askew (12 % more bits at 256 x 16,384, 3 % at 1,024 x 4,096)."""
_GLANCE, _FIRST, _TELLING = 1 << 17, 2, 16
"""Numbers, and directions, by which it is decided whether to look for more; rows of them that can tell."""
_ROUNDS = 2
_TOP = 63
"""Largest number of a basis while directions are sought."""
_FINEST = 1
"""Factors are multiples of half a root of a finer step at best; of more where their range needs it."""
_NOISE = 1 / 12
"""Variance of a number about the value that was rounded to it: what no prediction takes away."""
_LEAST = 4096
"""Numbers below which factors are never paid for."""
_WORTH = 12 / (2 * math.log(2))
"""Bits that a squared step of error is worth: a uniform quantizer's, `step**2 / 12`, falls by `2 ln 2` of it a bit."""
_TOLD_APART = 18
"""Symbols from this one on count as one where the share of a move is fitted."""


@dataclass(frozen=True, slots=True)
class Factors:
    """A prediction: `2**-shift` times the sum over k of `rows[i, k] * columns[j, k]`, in half steps.

    Args:
        rows: int8, shape (R, r).
        columns: int8, shape (C, r).
        phase: column in which the first number stands.
        shift: 2 to 20.
    """

    rows: NpArray
    columns: NpArray
    phase: int
    shift: int

    def classes(self, n: int) -> NpArray:
        """uint8, shape (n,): the predicted half steps, within `HALF_STEPS`, plus these."""
        found: NpArray = product_classes(self.rows, self.columns, n, self.phase, shift=self.shift, most=HALF_STEPS)
        return found

    def distances(self, numbers: NpArray) -> NpArray:
        """uint8, shape (n,): the prediction less the number (int8) in quarter steps, within `FARTHEST`, plus these."""
        found: NpArray = product_classes(
            self.rows,
            self.columns,
            numbers.size,
            self.phase,
            shift=self.shift - 1,
            most=FARTHEST,
            origin=numbers,
            unit=2,
        )
        return found


@dataclass(frozen=True, slots=True)
class Finer:
    """A matrix's numbers in finer steps than those that are stored: what is left of them tells directions, too.

    Args:
        of: the numbers, int8, of what a selection takes of the matrix's values, a flat array of any library.
        bits: 1 to 7; a step is `2**bits` finer ones.
    """

    of: Callable[[Select], NpArray]
    bits: int


@dataclass(frozen=True, slots=True)
class Moves:
    """How far numbers are moved from their grid points towards their prediction: `share` of the distance.

    The mean of a number in its cell is not that of all numbers there, but nearer to what is predicted for it.

    Args:
        distances: uint8, shape (n,), as of `Factors.distances`.
        sums: float64, shape (256,): of the distances in quarter steps, by symbol.
        share: 0 to 1.
        gain: what the squared error falls by, in squared steps.
    """

    distances: NpArray
    sums: NpArray
    share: float
    gain: float

    @property
    def worth(self) -> float:
        """Bytes that may be spent on it."""
        return self.gain * _WORTH / 8


def move_table(reach: float) -> NpArray:
    """float32 [256]: by how much values of each distance are moved, at `reach` for a quarter step."""
    table = np.zeros(256, np.float32)
    table[: 2 * FARTHEST + 1] = np.arange(-FARTHEST, FARTHEST + 1, dtype=np.float32) * np.float32(reach)
    return table


def moves_of(factors: Factors, symbols: NpArray, finer: NpArray, bits: int, some: Select) -> Moves:
    """The share that leaves the least squared error beside each symbol's mean, by sums of integers.

    With r a number's distance from its grid point, d its prediction's, both less their means over the symbol,
    share = sum r d / sum d**2, and the squared error falls by (sum r d)**2 / sum d**2.

    Args:
        factors: that predict the numbers.
        symbols: uint8, shape (n,), of the numbers.
        finer: int8, shape (n,), the numbers in finer steps.
        bits: as `Finer.bits`.
        some: takes those by which the share is fitted.
    """
    distances = factors.distances(signed(symbols))
    width, most = 2 * FARTHEST + 1, 1 << (bits - 1)
    own, near = some(symbols), some(distances)
    rest = some(finer).astype(np.int16) - (signed(own).astype(np.int16) << np.int16(bits))
    off = (np.clip(rest, -most, most) + np.int16(most)).astype(np.uint8)
    group = np.minimum(own, np.uint8(_TOLD_APART)) * np.uint8(width) + near
    counts = joint_counts(group, off, (_TOLD_APART + 1) * width, 2 * most + 1).reshape(-1, width, 2 * most + 1)[1:]
    d, r = np.arange(-FARTHEST, FARTHEST + 1) / 4, np.arange(-most, most + 1) / (2 * most)
    n = np.maximum(counts.sum(axis=(1, 2)), 1)
    by_distance = counts.sum(axis=2)
    of_d, of_r = (by_distance * d).sum(axis=1), (counts.sum(axis=1) * r).sum(axis=1)
    # What is not divided is exact in whatever order it is summed.
    both = float(((counts * r).sum(axis=2) * d).sum()) - math.fsum((of_d * of_r / n).tolist())
    squares = float((by_distance * d**2).sum()) - math.fsum((of_d**2 / n).tolist())
    share = min(both / squares, 1.0) if both > 0 and squares > 0 else 0.0
    gain = share * (2 * both - share * squares) * (symbols.size / own.size)
    sums = (joint_counts(symbols, distances, 256, width) * np.arange(-FARTHEST, FARTHEST + 1)).sum(axis=1)
    return Moves(distances, sums.astype(np.float64), share, gain)


def signed(symbols: NpArray) -> NpArray:
    """int8: the numbers 0, -1, 1, -2, ... that the symbols 1, 2, 3, 4, ... (uint8) stand for; 0 for symbol 0."""
    even = (symbols & np.uint8(1)) - np.uint8(1)
    numbers = symbols >> np.uint8(1)
    numbers ^= even
    numbers -= even
    return numbers.view(np.int8)


def expected(classes: NpArray) -> NpArray:
    """int8: the number that each class (uint8) predicts, halves upwards."""
    numbers = classes + np.uint8(1)
    numbers >>= np.uint8(1)
    numbers -= np.uint8(HALF_STEPS // 2)
    return numbers.view(np.int8)


def factors_of(finer: Finer, n: int, columns: int, start: int) -> tuple[Factors, NpArray] | None:
    """Factors that predict a part of a matrix, and all its numbers in finer steps; None where factors are not worth
    the bytes they take: those they spare and those that the error they take away is worth.

    Args:
        finer: the numbers.
        n: how many.
        columns: of the matrix.
        start: number of the first one in it.
    """
    phase = start % columns
    rank = min(RANK, columns // 4, n // columns // 4)
    lines = -(-(phase + n) // columns) + columns
    if n < _LEAST or rank < 1 or not _promising(finer, n, columns, phase, min(_FIRST, rank), lines):
        return None
    numbers = finer.of(lambda x: x)
    sample = np.ascontiguousarray(_rows_of(n, columns, phase, _SAMPLE, _ROWS)(numbers)).reshape(-1)
    basis = _directions(sample, columns, rank)
    norms = _norms(basis)
    sums = row_products(numbers, basis, phase)
    energies = _energies(sums, norms)
    kept = _worth(energies, _power(sample), n, lines, finer.bits)
    if not kept:
        return None
    # Each direction's length is shared by its two factors, the longer one getting a little more: rounding does least
    # harm where their numbers are alike, and costs least where their lengths are.
    lengths = np.sqrt(np.sqrt(energies[kept])) / math.sqrt(math.sqrt(math.sqrt(sums.shape[0] / columns)))
    roots = np.sqrt(norms[kept].astype(np.float64))
    left = sums[:, kept] / roots / lengths
    right = basis[:, kept] / roots * lengths
    most = max(float(np.abs(left).max()), float(np.abs(right).max()))
    bits = min(_FINEST, math.frexp(127 / most)[1] - 1)
    shift = 2 * bits + finer.bits - 1  # twice the number of steps
    if shift < 2:
        return None
    rows, across = (np.ascontiguousarray(np.rint(x * 2.0**bits).astype(np.int8)) for x in (left, right))
    return Factors(rows, across, phase, shift), numbers


def _promising(finer: Finer, n: int, columns: int, phase: int, rank: int, lines: int) -> bool:
    """Whether the strongest directions of half of a sample are worth their factors, by its other half.

    The same rows would not tell: few of them have directions of their own by chance.
    """
    select = _rows_of(n, columns, phase, _GLANCE)
    rows = finer.of(lambda x: select(x).reshape(-1)).reshape(-1, columns)
    if rows.shape[0] < _TELLING:
        return True
    some, others = (np.ascontiguousarray(rows[i::2]).reshape(-1) for i in (0, 1))
    basis = _directions(some, columns, rank)
    energies = _energies(row_products(others, basis), _norms(basis)) * (n / others.size)
    return bool(_worth(energies, _power(others), n, lines, finer.bits))


def _power(numbers: NpArray) -> float:
    """Their mean square."""
    return float((numbers.astype(np.int16) ** 2).sum(dtype=np.int64)) / numbers.size


def _norms(basis: NpArray) -> NpArray:
    """The squared length of each direction."""
    found: NpArray = (basis.astype(np.int64) ** 2).sum(axis=0)
    return found


def _energies(sums: NpArray, norms: NpArray) -> NpArray:
    """The squared length of the part of a matrix in each direction, from its products with them."""
    small, shift = _within(sums, 20)
    found: NpArray = (small**2).sum(axis=0) * 4.0**shift / np.maximum(norms, 1)
    return found


def _rows_of(n: int, columns: int, phase: int, size: int, least: int = 1) -> Select:
    """What takes whole rows of about so many numbers, the same share of all of them; of wide ones at least so many
    rows. They come as a matrix of two dimensions, where the array's library can as a view."""
    first = -phase % columns
    rows = (n - first) // columns
    stride = max(1, min(n // size, rows // least))
    return lambda x: x[first : first + rows * columns].reshape(rows, columns)[::stride]


def _directions(values: NpArray, columns: int, rank: int) -> NpArray:
    """int8 [columns, rank]: about the strongest directions of the rows."""
    basis = _signs(columns, rank)
    for _ in range(_ROUNDS):
        rows = _shortened(row_products(values, basis))
        basis = _orthogonal(column_products(values, rows, columns))
    return basis


def _shortened(vectors: NpArray) -> NpArray:
    """int8 [n, r]: each vector as long as `_TOP` allows."""
    largest = np.maximum(np.abs(vectors).max(axis=0, initial=0), 1)
    shortened: NpArray = np.rint(vectors * (_TOP / largest)).astype(np.int8)
    return shortened


def _signs(lines: int, rank: int) -> NpArray:
    """int8 [lines, rank] of +1 and -1, always the same.

    Source: Steele, Lea and Flood 2014, the mixing function of SplittableRandom.
    """
    x = np.arange(1, lines * rank + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.where(x >> np.uint64(63), np.int8(1), np.int8(-1)).reshape(lines, rank)


def _within(sums: NpArray, bits: int) -> tuple[NpArray, int]:
    """Integers shifted to the right until they have no more bits than that; and by how much."""
    shift = max(0, int(np.abs(sums).max(initial=0)).bit_length() - bits)
    return sums >> shift, shift


def _orthogonal(vectors: NpArray) -> NpArray:
    """int8 [n, r]: orthogonal directions of the same space, as long as `_TOP` allows; zeros where there is none."""
    x = _within(vectors, 15)[0]
    inverse = _inverse_root((x.T @ x).tolist())
    found = np.zeros(x.shape, np.int8)
    for k, own in enumerate(inverse):
        if own is None:
            continue
        total = x[:, 0] * own[0]
        for j in range(1, k + 1):
            total += x[:, j] * own[j]
        largest = float(np.abs(total).max())
        if largest > 0:
            found[:, k] = np.rint(total * (_TOP / largest))
    return found


def _inverse_root(gram: list[list[int]]) -> list[list[float] | None]:
    """For each vector the combination of those up to it that is orthogonal to all before; None where nothing is left.

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
    """The sum, rounded after each term: `sum` itself does so up to Python 3.11 only."""
    return reduce(add, terms, 0.0)


def _worth(energies: NpArray, power: float, n: int, lines: int, bits: int) -> list[int]:
    """The directions that spare more bits than their factors take, the strongest first; all in finer steps.

    Of n numbers of variance s, a direction of energy E takes E / n away: n / 2 log2(s / (s - E / n)) bits, s being in
    steps and with the noise of rounding. Of small numbers that is what the error it takes away is worth. Its factors
    take what normal numbers in multiples of `2**-_FINEST` do, and each loses 1/12 of the square of these to rounding.
    """
    kept = []
    left = power / 4.0**bits + _NOISE
    for k in np.argsort(-energies, kind="stable"):
        width = math.sqrt(math.sqrt(float(energies[k])) / lines * 2) * 2**_FINEST
        told = max(0.0, 1 - 1 / max(6 * width**2, 1.0))
        after = max(left - told * float(energies[k]) / 4.0**bits / n, _NOISE)
        if n / 2 * math.log2(left / after) <= lines * max(0.5, math.log2(max(width, 1e-9)) + 2.05):
            break
        kept.append(int(k))
        left = after
    return kept
