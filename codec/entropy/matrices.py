"""Coding of symbols in a matrix: a low-rank prediction, or classes of rows and columns.

A gradient is a sum of outer products of a layer's inputs and the gradients at its outputs. So first moments, and what
row and column scales leave of second ones, have far fewer directions than entries, and the strongest directions
predict an entry well. The difference to the nearest integer is coded in four contexts: the quarter in which the
prediction lies between two integers. Where a matrix is little low-rank, but some of its rows and columns differ more
from the usual symbol than others, the class of the position is the context.

Some rows and columns change more than others: an inactive unit has small first moments, and the row of a frequent token
has more changed levels than that of a rare one. The expected size at a position is nearly the product of a row factor
and a column factor (a sum of logarithms). So one byte a row and one a column give encoder and decoder the distribution
of the symbol at each position in advance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from ...kernels.levels import joint_counts
from ...kernels.prediction import (
    QUARTERS,
    RANK,
    low_rank_differences,
    low_rank_factors,
    low_rank_predictions,
    unzigzag,
    zigzag,
)
from ...kernels.scales import class_sums, row_column_sums
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .plain import MATRIX, coded, decode_plain
from .table import I64, SLACK, U8, Table, least_stream, read_rans

NpArray = np.ndarray[Any, Any]
_WORTH = 512
"""Bytes below which neither a prediction nor classes are sought."""
_SAMPLE = 1 << 16
"""Size of the sample that decides between prediction and classes, in whole rows."""
_SAVING = 0.02
"""Share of the bytes that classes must save, for they take time."""
_CLEARLY = 0.9
"""Share of the bytes that a prediction leaves of a large matrix, below which classes are not tried."""
_LOW_RANK, _CLASSES = 1, 2
"""Forms of a matrix."""
MOST_CLASSES = 16
_LEAST = 4096
"""Number of symbols below which one table for each class never pays."""
_EACH = 512
"""Mean number of symbols in a context that pays for its part of the table; two classes are tried with fewer."""
_FARTHEST = 8
"""Largest deviation of a row or a column from the mean, in half octaves."""
_WITHOUT = 1 / 64
"""Share of the positions that need no class of their own."""
_ALIKE = 63 / 64
"""Share of the positions in one class above which further classes do not pay."""
_FAR = 8
"""Symbols are clipped to this, because larger ones cost few bits more."""
_SIGN = np.uint8(128)
"""Exclusive-or mask that maps signed bytes to unsigned ones in the same order, and back."""


def _halves() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the bounds between half octaves, 2**((2 k - 1) / 4), the same on all machines."""
    quarter = math.sqrt(math.sqrt(2.0))
    bounds = [math.ldexp(quarter if k % 2 else 1.0 / quarter, k // 2) for k in range(1 - _FARTHEST, _FARTHEST + 1)]
    return np.array(bounds)


_BOUNDS = _halves()


class Numbers(IntEnum):
    """Meaning of symbols as signed numbers, modulo 256.

    Use CENTERED where one symbol is 0, ALTERNATING where the symbols 1, 2, 3, 4, ... are 0, -1, 1, -2, ..., and
    RELATIVE where the number is the difference to a context that the decoder knows.
    """

    CENTERED = 0
    ALTERNATING = 1
    RELATIVE = 2

    def of(self, symbols: U8, origin: np.uint8 | U8) -> NpArray:
        """Return the number of each symbol, int8; `origin` is the symbol 0, or the context."""
        if self is Numbers.ALTERNATING:
            numbers: NpArray = unzigzag(symbols - np.uint8(1))
            return numbers
        return (symbols - origin).view(np.int8)

    def symbols(self, numbers: NpArray, origin: np.uint8 | U8) -> U8:
        """Return the symbol of each int8 number."""
        if self is Numbers.ALTERNATING:
            symbols: U8 = zigzag(numbers) + np.uint8(1)
            return symbols
        return numbers.view(np.uint8) + origin


@dataclass(frozen=True, slots=True)
class Matrix:
    """Place of symbols in matrices.

    Args:
        columns: of each matrix; 0: the symbols are not part of a matrix.
        start: number of the first symbol in its matrix, in C order; 0 of several matrices.
        heights: rows of each of several matrices that stand one after another; (): the symbols are of one.
        numbers: meaning of the symbols, in which a prediction is sought; None: no prediction.
    """

    columns: int = 0
    start: int = 0
    heights: Sequence[int] = ()
    numbers: Numbers | None = None


@dataclass(frozen=True, slots=True)
class _Form:
    """One way to code the numbers of a matrix: zigzag numbers in contexts.

    Args:
        head: form and side information.
        symbols: uint8 (n,).
        contexts: uint8 (n,).
        count: number of contexts.
    """

    head: bytes
    symbols: U8
    contexts: U8
    count: int


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes that symbols take by another coder.

    Args:
        least: a lower bound.
        exact: computes them; called only where the bound does not decide.
    """

    least: float
    exact: Callable[[], float]

    def is_above(self, limit: float) -> bool:
        """Return whether the symbols take more than `limit` bytes."""
        return self.least > limit or self.exact() > limit


ALONE = Matrix()
"""Symbols that are not part of a matrix."""


def in_matrix(symbols: U8, context: U8 | None, usual: int, matrix: Matrix, size: Size) -> Writer | None:
    """Code symbols by their place in a matrix; None if that is not smaller.

    Args:
        symbols: uint8, shape (n,).
        context: uint8, shape (n,), that the symbols are near, known to the decoder; or None.
        usual: the most frequent symbol; used without a context.
        matrix: where they stand.
        size: bytes that they take otherwise.
    """
    if not size.is_above(_WORTH):
        return None
    columns, phase = matrix.columns, matrix.start % matrix.columns
    lines = list(matrix.heights) or [-(-(phase + symbols.size) // columns)]
    shape = np.array(lines, np.int64)
    kind = Numbers.RELATIVE if context is not None else matrix.numbers or Numbers.CENTERED
    numbers = kind.of(symbols, np.uint8(usual) if context is None else context)
    head = Writer(MATRIX, bytes([kind, usual]))
    head.varint(columns, phase, shape.size, *(lines if shape.size > 1 else ()))
    predicted = None
    if context is not None or matrix.numbers is not None:
        predicted = _predicted(numbers, shape, columns, phase)
    form = _cheapest(numbers, predicted, matrix)
    if form is None:
        return None
    head.raw(form.head)
    pairs = joint_counts(form.contexts, form.symbols, form.count, max(2, int(form.symbols.max()) + 1))
    if not size.is_above(SLACK * (len(head) + least_stream(pairs))):
        return None
    table = Table.best(pairs, SLACK, form.count)
    if not size.is_above(SLACK * (len(head) + table.cost)):
        return None
    table.write(head, form.symbols, form.contexts)
    return head


def _cheapest(numbers: NpArray, predicted: _Form | None, matrix: Matrix) -> _Form | None:
    """Choose between prediction and classes by a sample of whole rows; None if neither pays."""
    columns, phase = matrix.columns, matrix.start % matrix.columns
    sample, start = _rows_of(numbers, phase, columns)
    symbols = zigzag(sample)
    alone = _bytes(symbols, np.zeros_like(symbols), 1)
    of_prediction = np.inf
    if predicted is not None:
        some, quarters = (_rows_of(x, phase, columns)[0] for x in (predicted.symbols, predicted.contexts))
        of_prediction = _bytes(some, quarters, QUARTERS) + len(predicted.head) * sample.size / numbers.size
        if sample.size < numbers.size and of_prediction < _CLEARLY * alone:
            return predicted
    places = classes_of(symbols, columns, start)
    of_classes = np.inf
    if places is not None:
        of_classes = _bytes(symbols, places.of(symbols.size), places.classes)
        of_classes += (places.rows.size + places.columns.size) / 2
        of_classes = of_classes if of_classes < (1 - _SAVING) * alone else np.inf
    if of_prediction < min(alone, of_classes):
        return predicted
    return (
        None if of_classes == np.inf else _classed(symbols if sample.size == numbers.size else zigzag(numbers), matrix)
    )


def _classed(symbols: U8, matrix: Matrix) -> _Form | None:
    """Return symbols in the classes of their rows and columns, if these differ."""
    places = classes_of(symbols, matrix.columns, matrix.start)
    if places is None:
        return None
    out = Writer(_CLASSES)
    out.varint(places.classes, places.base)
    out.block(coded(places.rows), coded(places.columns))
    return _Form(out.done(), symbols, places.of(symbols.size), places.classes)


def _rows_of(numbers: NpArray, phase: int, columns: int) -> tuple[NpArray, int]:
    """Return a sample of whole rows, and the column of its first number."""
    first = -phase % columns
    rows = (numbers.size - first) // columns
    if numbers.size <= 2 * _SAMPLE or not rows:
        return numbers, phase
    whole = numbers[first : first + rows * columns].reshape(rows, columns)
    return whole[:: max(1, rows * columns // _SAMPLE)].reshape(-1), 0


def _bytes(symbols: U8, contexts: U8, count: int) -> float:
    """Return a lower bound of the bytes of symbols in these contexts."""
    return least_stream(joint_counts(contexts, symbols, max(2, count), max(2, int(symbols.max()) + 1)))


def decode_matrix(data: Reader, n: int, context: U8 | None) -> U8:
    """Decode the symbols that `in_matrix` coded, uint8 (n,)."""
    kind, usual, columns, phase, count = data.byte(), data.byte(), data.varint(), data.varint(), data.varint()
    if kind not in tuple(Numbers) or not 1 <= columns <= n or phase >= columns:
        raise CorruptDataError(f"matrix: {n} symbols of kind {kind} in {columns} columns from {phase}")
    if (kind == Numbers.RELATIVE) != (context is not None):
        raise CorruptDataError("matrix: relative numbers need a parent, and others have none")
    lines = -(-(phase + n) // columns)
    if not 1 <= count <= lines:
        raise CorruptDataError(f"matrix: {count} matrices of {lines} rows")
    heights = [lines] if count == 1 else [data.varint() for _ in range(count)]
    if sum(heights) != lines or (count > 1 and (min(heights) < 1 or lines * columns != n)):
        raise CorruptDataError(f"matrix: {count} matrices have not {lines} rows together")
    form = data.byte()
    if form == _LOW_RANK:
        shape = np.array(heights, np.int64)
        ranks = data.array("u1", count).astype(np.int64)
        if int(ranks.max()) > RANK:
            raise CorruptDataError(f"matrix: rank {int(ranks.max())}; at most {RANK} is possible")
        rows, across = _read_factors(data, (shape, np.full(count, columns)), ranks)
        nearest, quarters = low_rank_predictions(rows, across, shape, n, phase)
        numbers = unzigzag(read_rans(data, quarters, QUARTERS, n))
        numbers += nearest
    elif form == _CLASSES:
        classes, base = data.varint(), data.varint()
        if not 2 <= classes <= 256 or base > 255:
            raise CorruptDataError(f"matrix: {classes} classes from {base} are out of range")
        places = Places(decode_plain(data.block(), lines), decode_plain(data.block(), columns), phase, base, classes)
        numbers = unzigzag(read_rans(data, places.of(n), classes, n))
    else:
        raise CorruptDataError(f"matrix: form {form} is unknown")
    return Numbers(kind).symbols(numbers, np.uint8(usual) if context is None else context)


def _predicted(numbers: NpArray, shape: I64, columns: int, phase: int) -> _Form | None:
    """Return numbers relative to a low-rank prediction, if a direction pays."""
    rows, across = low_rank_factors(numbers, shape, columns, phase)
    ranks = np.count_nonzero(across.reshape(shape.size, columns, RANK).any(axis=1), axis=1)
    if not ranks.any():
        return None
    out = Writer(_LOW_RANK, ranks.astype(np.uint8))
    used = []
    for factor, ends in ((rows, np.cumsum(shape)), (across, columns * np.arange(1, shape.size + 1))):
        parts = zip(np.split(factor, ends[:-1]), ranks.tolist(), strict=True)
        used += [part[:, :rank].T.reshape(-1) for part, rank in parts if rank]
    out.block(coded(np.concatenate(used).view(np.uint8) ^ _SIGN))
    return _Form(out.done(), *low_rank_differences(numbers, rows, across, shape, phase), QUARTERS)


def _read_factors(data: Reader, lines: Sequence[I64], ranks: I64) -> list[NpArray]:
    """Read the row and column factors of several matrices, int8 [sum of lines, RANK] each."""
    total = sum(int((own * ranks).sum()) for own in lines)
    numbers = (decode_plain(data.block(), total) ^ _SIGN).view(np.int8)
    found, begin = [np.zeros((int(own.sum()), RANK), np.int8) for own in lines], 0
    for factor, own in zip(found, lines, strict=True):
        line = 0
        for length, rank in zip(own.tolist(), ranks.tolist(), strict=True):
            factor[line : line + length, :rank] = numbers[begin : begin + rank * length].reshape(rank, length).T
            line, begin = line + length, begin + rank * length
    return found


@dataclass(frozen=True, slots=True)
class Places:
    """Class of each position: row class plus column class minus `base`, in 0 ... `classes` - 1.

    Args:
        rows: uint8, shape (R,), of the rows that the symbols are in.
        columns: uint8, shape (C,).
        phase: column in which the first symbol stands.
        base: sum that is class 0, as are those below.
        classes: 1 to 256.
    """

    rows: U8
    columns: U8
    phase: int
    base: int
    classes: int

    def of(self, n: int) -> U8:
        """Return the classes of n positions."""
        found: U8 = class_sums(self.rows, self.columns, n, self.phase, base=self.base, classes=self.classes)
        return found


def classes_of(symbols: U8, columns: int, start: int) -> Places | None:
    """Return classes by the mean symbol of rows and columns.

    Args:
        symbols: uint8, shape (n,), the rarer the larger.
        columns: of the matrix; 0: the symbols are not part of a matrix.
        start: number of the first symbol in it.

    Returns:
        None where nearly all places are of one class, or the matrix is too small.
    """
    n = symbols.size
    most = min(MOST_CLASSES, max(2, n // _EACH))
    if n < _LEAST or not 2 <= columns <= n // 2:
        return None
    phase = start % columns
    rows, sums = row_column_sums(symbols, columns, phase, most=_FAR)
    total = int(rows.sum())
    if not total:
        return None
    across, down = populations(n, columns, phase, rows.size)
    of_rows, of_columns = (off_mean(*own, n / total) for own in ((rows, across), (sums, down)))
    mass = _mass(of_rows, of_columns)
    if _span(mass) > most:
        of_rows, of_columns = of_rows >> 1, of_columns >> 1
        mass = _mass(of_rows, of_columns)
    if mass.max() >= _ALIKE * mass.sum():
        return None
    # As many sums next to each other as there may be classes, where most places are.
    within = np.convolve(mass, np.ones(most))
    base = max(0, int(within.argmax()) - most + 1)
    classes = min(most, mass.size - base)
    return Places(of_rows.astype(np.uint8), of_columns.astype(np.uint8), phase, base, classes)


def off_mean(sums: I64, numbers: I64, scale: float) -> I64:
    """Return the distance of each line's mean from the total mean, in half octaves.

    If there are far more lines than different sums (narrow matrices), each sum is computed once for each length of a
    line. Only the first and the last line may be short; the lengths of the others differ by at most two.
    """
    most = int(sums.max()) + 1
    if sums.size <= 4 * most:
        return np.searchsorted(_BOUNDS, sums * scale / np.maximum(numbers, 1)).astype(np.int64)
    between = numbers[1:-1] if numbers.size > 2 else numbers
    found = np.zeros(sums.size, np.int64)
    for length in {int(numbers[0]), int(numbers[-1]), *range(int(between.min()), int(between.max()) + 1)}:
        own = np.searchsorted(_BOUNDS, np.arange(most) * scale / max(length, 1))
        found = np.where(numbers == length, own[sums], found)
    return found


def populations(n: int, columns: int, phase: int, rows: int) -> tuple[I64, I64]:
    """Count how many of n elements are in each row and column; the first is in column `phase`."""
    across = np.full(rows, columns, np.int64)
    across[0] -= phase
    across[-1] -= -(phase + n) % columns
    down = np.full(columns, rows, np.int64)
    down[:phase] -= 1
    down[columns - (-(phase + n) % columns) :] -= 1
    return across, down


def _mass(rows: I64, columns: I64) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the number of positions for each sum of row class and column class."""
    return np.convolve(np.bincount(rows).astype(np.float64), np.bincount(columns).astype(np.float64))


def _span(mass: np.ndarray[Any, np.dtype[np.float64]]) -> int:
    """Return the number of central classes that hold all but `_WITHOUT` of the positions."""
    share = np.cumsum(mass) / mass.sum()
    return int(np.searchsorted(share, 1 - _WITHOUT / 2)) - int(np.searchsorted(share, _WITHOUT / 2)) + 1
