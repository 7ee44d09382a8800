"""Coding of symbols in a matrix: a low-rank prediction, or classes of rows and columns.

A gradient is a sum of outer products of a layer's inputs and the gradients at its outputs. So first moments, and what
row and column scales leave of second ones, have far fewer directions than entries, and the strongest directions
predict an entry well. The difference to the nearest integer is coded in four contexts: the quarter in which the
prediction lies between two integers. Where a matrix is little low-rank, but some of its rows and columns differ more
from the usual symbol than others, the class of the position is the context.
"""

from __future__ import annotations

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
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .method_ids import MATRIX, SLACK
from .plain import coded, decode_plain
from .row_column_classes import Places, classes_of
from .table import I64, U8, Table, least_stream, read_rans

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
_SIGN = np.uint8(128)
"""Exclusive-or mask that maps signed bytes to unsigned ones in the same order, and back."""


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
    head = Writer()
    for number in (MATRIX, kind, usual):
        head.byte(number)
    for number in (columns, phase, shape.size, *(lines if shape.size > 1 else ())):
        head.varint(number)
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
    out = Writer()
    out.byte(_CLASSES)
    out.varint(places.classes)
    out.varint(places.base)
    out.block(coded(places.rows))
    out.block(coded(places.columns))
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
    out = Writer()
    out.byte(_LOW_RANK)
    out.raw(ranks.astype(np.uint8))
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
