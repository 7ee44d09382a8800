"""Coding of symbols in a matrix: a low-rank prediction, and classes of rows and columns.

A gradient is a sum of outer products of a layer's inputs and the gradients at its outputs. So first moments, and what
row and column scales leave of second ones, have far fewer directions than entries, and the strongest directions
predict an entry well. The difference to the nearest integer is coded in four contexts: the quarter in which the
prediction lies between two integers. Some rows and columns differ more from their prediction than others; where that
pays, the class of the position is a further context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from ...kernels.levels import joint_counts
from ...kernels.prediction import QUARTERS, RANK, low_rank_factors, low_rank_predictions
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
"""Size of the sample that decides whether classes pay, in whole rows."""
_SAVING = 0.02
"""Share of the bytes that classes must save, for they take time."""
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
            return _signed(symbols - np.uint8(1))
        return (symbols - origin).view(np.int8)

    def symbols(self, numbers: NpArray, origin: np.uint8 | U8) -> U8:
        """Return the symbol of each int8 number."""
        if self is Numbers.ALTERNATING:
            return _unsigned(numbers) + np.uint8(1)
        return numbers.view(np.uint8) + origin


def _signed(symbols: U8) -> NpArray:
    """Map the bytes 0, 1, 2, 3, ... to the int8 numbers 0, -1, 1, -2, ..."""
    odd = (symbols & np.uint8(1)) * np.uint8(255)
    odd ^= symbols >> np.uint8(1)
    return odd.view(np.int8)


def _unsigned(numbers: NpArray) -> U8:
    """Map the int8 numbers 0, -1, 1, -2, ... to the bytes 0, 1, 2, 3, ..."""
    signs = (numbers >> np.int8(7)).view(np.uint8)
    signs ^= numbers.view(np.uint8) << np.uint8(1)
    return signs


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
    """One way to code the numbers of a matrix: what a prediction leaves of them, or themselves.

    Args:
        prediction: bytes of the prediction, or of its absence.
        numbers: int8 (n,), to be coded.
        quarters: uint8 (n,), contexts from the prediction, if there is one.
    """

    prediction: bytes
    numbers: NpArray
    quarters: U8 | None

    @property
    def contexts(self) -> int:
        """Return the number of contexts without classes."""
        return 1 if self.quarters is None else QUARTERS

    def estimate(self, matrix: Matrix) -> tuple[float, bool]:
        """Estimate the size in bytes by a sample of whole rows; return also whether classes pay."""
        n, columns, start = self.numbers.size, matrix.columns, matrix.start
        numbers, quarters = self.numbers, self.quarters
        first = -start % columns
        rows = (n - first) // columns
        if n > 2 * _SAMPLE and rows:
            step = max(1, rows * columns // _SAMPLE)
            numbers = numbers[first : first + rows * columns].reshape(rows, columns)[::step].reshape(-1)
            if quarters is not None:
                quarters = quarters[first : first + rows * columns].reshape(rows, columns)[::step].reshape(-1)
            start = 0
        differences = _unsigned(numbers)
        places = classes_of(differences, 0, columns, start, self.contexts)
        alone, classed = (_bytes(differences, quarters, own) for own in (None, places))
        pays = classed < (1 - _SAVING) * alone
        return len(self.prediction) + (classed if pays else alone) * n / numbers.size, pays


def _bytes(differences: U8, quarters: U8 | None, places: Places | None) -> float:
    """Return a lower bound of the bytes of differences in these contexts."""
    contexts, count = _combined(quarters, places, differences.size)
    most = max(2, int(differences.max()) + 1)
    zeros = np.zeros_like(differences) if contexts is None else contexts
    side = 0 if places is None else places.rows.size / 2 + places.columns.size / 2
    return least_stream(joint_counts(zeros, differences, max(2, count), most)) + side


ALONE = Matrix()
"""Symbols that are not part of a matrix."""


def in_matrix(symbols: U8, context: U8 | None, usual: int, matrix: Matrix, size: float) -> Writer | None:
    """Code symbols by their place in a matrix; None if that is not smaller.

    Args:
        symbols: uint8, shape (n,).
        context: uint8, shape (n,), that the symbols are near, known to the decoder; or None.
        usual: the most frequent symbol; used without a context.
        matrix: where they stand.
        size: bytes that they take otherwise.
    """
    if size < _WORTH:
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
    forms = [_Form(b"\0", numbers, None)]
    if context is not None or matrix.numbers is not None:
        forms += _predicted(numbers, shape, columns, phase)
    estimates = [form.estimate(matrix) for form in forms]
    (_, in_classes), form = min(zip(estimates, forms, strict=True), key=lambda pair: pair[0])
    if form.quarters is None and not in_classes:
        return None
    quarters, differences = form.quarters, _unsigned(form.numbers)
    places = classes_of(differences, 0, columns, matrix.start, form.contexts) if in_classes else None
    head.raw(form.prediction)
    _write_classes(head, places)
    contexts, count = _combined(quarters, places, symbols.size)
    rest = size / SLACK - len(head)
    pairs = joint_counts(contexts, differences, max(2, count), max(2, int(differences.max()) + 1))[:count]
    if least_stream(pairs) >= rest:
        return None
    table = Table.best(pairs, SLACK, count)
    if table.cost >= rest:
        return None
    table.write(head, differences, contexts)
    return head


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
    nearest = quarters = None
    if data.byte():
        shape = np.array(heights, np.int64)
        ranks = decode_plain(data.block(), count).astype(np.int64)
        if int(ranks.max()) > RANK:
            raise CorruptDataError(f"matrix: rank {int(ranks.max())}; at most {RANK} is possible")
        rows, across = (_read_factors(data, size, ranks) for size in (shape, np.full(count, columns)))
        nearest, quarters = low_rank_predictions(rows, across, shape, n, phase)
    places = _read_classes(data, columns, phase, lines, 1 if quarters is None else QUARTERS)
    contexts, number = _combined(quarters, places, n)
    numbers = _signed(read_rans(data, contexts, number, n))
    if nearest is not None:
        numbers += nearest
    return Numbers(kind).symbols(numbers, np.uint8(usual) if context is None else context)


def _predicted(numbers: NpArray, shape: I64, columns: int, phase: int) -> list[_Form]:
    """Return the form with a low-rank prediction, if a direction pays."""
    rows, across = low_rank_factors(numbers, shape, columns, phase)
    ranks = np.count_nonzero(across.reshape(shape.size, columns, RANK).any(axis=1), axis=1)
    if not ranks.any():
        return []
    out = Writer()
    out.byte(1)
    out.block(coded(ranks.astype(np.uint8)))
    for factor, ends in ((rows, np.cumsum(shape)), (across, columns * np.arange(1, shape.size + 1))):
        parts = np.split(factor, ends[:-1])
        used = [part[:, :rank].T.reshape(-1) for part, rank in zip(parts, ranks.tolist(), strict=True) if rank]
        out.block(coded(np.concatenate(used).view(np.uint8) ^ _SIGN))
    nearest, quarters = low_rank_predictions(rows, across, shape, numbers.size, phase)
    return [_Form(out.done(), numbers - nearest, quarters)]


def _read_factors(data: Reader, lines: I64, ranks: I64) -> NpArray:
    """Read the factors of several matrices, int8 [sum of lines, RANK]."""
    numbers = (decode_plain(data.block(), int((lines * ranks).sum())) ^ _SIGN).view(np.int8)
    found = np.zeros((int(lines.sum()), RANK), np.int8)
    line = begin = 0
    for length, rank in zip(lines.tolist(), ranks.tolist(), strict=True):
        found[line : line + length, :rank] = numbers[begin : begin + rank * length].reshape(rank, length).T
        line, begin = line + length, begin + rank * length
    return found


def _combined(quarters: U8 | None, places: Places | None, n: int) -> tuple[U8 | None, int]:
    """Return the context of each symbol, and the number of contexts."""
    count = 1 if quarters is None else QUARTERS
    return (quarters, count) if places is None else (places.beside(quarters, n), count * places.classes)


def _write_classes(out: Writer, places: Places | None) -> None:
    if places is None:
        out.varint(1)
        return
    out.varint(places.classes)
    out.varint(places.base)
    out.block(coded(places.rows))
    out.block(coded(places.columns))


def _read_classes(data: Reader, columns: int, phase: int, rows: int, contexts: int) -> Places | None:
    """Read the classes of rows and columns, for a given number of contexts; None for one class."""
    classes = data.varint()
    if not 1 <= classes <= 256 // contexts:
        raise CorruptDataError(f"matrix: {contexts} contexts with {classes} classes each are out of range")
    if classes == 1:
        return None
    base = data.varint()
    if base > 255:
        raise CorruptDataError(f"matrix: classes from {base} are out of range")
    return Places(decode_plain(data.block(), rows), decode_plain(data.block(), columns), phase, base, classes)
