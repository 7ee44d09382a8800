"""Coding of a matrix's symbols as differences to a low-rank prediction.

A gradient is a sum of outer products of a layer's inputs and the gradients at its outputs. So first moments, and what
row and column scales leave of second ones, have far fewer directions than entries, and the strongest directions
predict an entry well. The difference to the nearest integer is coded in four contexts: the quarter in which the
prediction lies between two integers.
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
from .method_ids import PREDICTED, SLACK
from .plain import coded, decode_plain
from .table import I64, U8, Table, least_stream, read_rans

NpArray = np.ndarray[Any, Any]
_WORTH = 512
"""Bytes below which no prediction is sought."""
_SIGN = np.uint8(128)
"""Exclusive-or mask that maps signed bytes to unsigned ones in the same order, and back."""


class Numbers(IntEnum):
    """Meaning of symbols as signed numbers, modulo 256.

    Use CENTERED where symbol 128 is 0, ALTERNATING where the symbols 1, 2, 3, 4, ... are 0, -1, 1, -2, ..., and
    RELATIVE where the number is the difference to a context that the decoder knows.
    """

    CENTERED = 0
    ALTERNATING = 1
    RELATIVE = 2

    def of(self, symbols: U8, context: U8 | None = None) -> NpArray:
        """Return the number of each symbol, int8."""
        if self is Numbers.ALTERNATING:
            return _signed(symbols - np.uint8(1))
        return (symbols - (_SIGN if context is None else context)).view(np.int8)

    def symbols(self, numbers: NpArray, context: U8 | None = None) -> U8:
        """Return the symbol of each int8 number."""
        if self is Numbers.ALTERNATING:
            return _unsigned(numbers) + np.uint8(1)
        return numbers.view(np.uint8) + (_SIGN if context is None else context)


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
    """

    columns: int = 0
    start: int = 0
    heights: Sequence[int] = ()


ALONE = Matrix()
"""Symbols that are not part of a matrix."""


def by_prediction(symbols: U8, context: U8 | None, numbers: Numbers, matrix: Matrix, size: float) -> Writer | None:
    """Code symbols as differences to a low-rank prediction; None if that is not smaller.

    Args:
        symbols: uint8, shape (n,).
        context: uint8, shape (n,), that the numbers are relative to; None: they are not.
        numbers: what the symbols mean.
        matrix: where they stand.
        size: bytes that they take otherwise.
    """
    if size < _WORTH:
        return None
    columns, phase = matrix.columns, matrix.start % matrix.columns
    lines = matrix.heights or [-(-(phase + symbols.size) // columns)]
    shape = np.array(lines, np.int64)
    own = numbers.of(symbols, context)
    rows, across = low_rank_factors(own, shape, columns, phase)
    ranks = np.count_nonzero(across.reshape(shape.size, columns, RANK).any(axis=1), axis=1)
    if not ranks.any():
        return None
    head = Writer()
    for number in (PREDICTED, numbers):
        head.byte(number)
    for number in (columns, phase, shape.size, *(lines if shape.size > 1 else ())):
        head.varint(number)
    head.block(coded(ranks.astype(np.uint8)))
    for factor, ends in ((rows, np.cumsum(shape)), (across, columns * np.arange(1, shape.size + 1))):
        parts = np.split(factor, ends[:-1])
        used = [part[:, :rank].T.reshape(-1) for part, rank in zip(parts, ranks.tolist(), strict=True) if rank]
        head.block(coded(np.concatenate(used).view(np.uint8) ^ _SIGN))
    nearest, quarters = low_rank_predictions(rows, across, shape, symbols.size, phase)
    return in_contexts(head, _unsigned(own - nearest), quarters, QUARTERS, size)


def decode_predicted(data: Reader, n: int, context: U8 | None) -> U8:
    """Decode the symbols that `by_prediction` coded, uint8 (n,)."""
    kind, columns, phase, count = data.byte(), data.varint(), data.varint(), data.varint()
    if kind not in tuple(Numbers) or not 1 <= columns <= n or phase >= columns:
        raise CorruptDataError(f"prediction: {n} symbols of kind {kind} in {columns} columns from {phase}")
    if kind == Numbers.RELATIVE and context is None:
        raise CorruptDataError("prediction: relative numbers need a parent")
    lines = -(-(phase + n) // columns)
    if not 1 <= count <= lines:
        raise CorruptDataError(f"prediction: {count} matrices of {lines} rows")
    heights = [lines] if count == 1 else [data.varint() for _ in range(count)]
    if sum(heights) != lines or (count > 1 and (min(heights) < 1 or lines * columns != n)):
        raise CorruptDataError(f"prediction: {count} matrices have not {lines} rows together")
    ranks = decode_plain(data.block(), count).astype(np.int64)
    if int(ranks.max()) > RANK:
        raise CorruptDataError(f"prediction: rank {int(ranks.max())}; at most {RANK} is possible")
    shape = np.array(heights, np.int64)
    rows = _read_factors(data, shape, ranks)
    across = _read_factors(data, np.full(count, columns), ranks)
    nearest, quarters = low_rank_predictions(rows, across, shape, n, phase)
    differences = _signed(read_rans(data, quarters, QUARTERS, n))
    return Numbers(kind).symbols(differences + nearest, context if kind == Numbers.RELATIVE else None)


def _read_factors(data: Reader, lines: I64, ranks: I64) -> NpArray:
    """Read the factors of several matrices, int8 [sum of lines, RANK]."""
    numbers = (decode_plain(data.block(), int((lines * ranks).sum())) ^ _SIGN).view(np.int8)
    found = np.zeros((int(lines.sum()), RANK), np.int8)
    line = begin = 0
    for length, rank in zip(lines.tolist(), ranks.tolist(), strict=True):
        found[line : line + length, :rank] = numbers[begin : begin + rank * length].reshape(rank, length).T
        line, begin = line + length, begin + rank * length
    return found


def in_contexts(head: Writer, symbols: U8, contexts: U8, rows: int, size: float) -> Writer | None:
    """Code symbols in contexts below `rows` and append them to `head`.

    Returns None if that does not save at least half a percent of `size` bytes.
    """
    rest = size / SLACK - len(head)
    pairs = joint_counts(contexts, symbols, rows, max(2, int(symbols.max()) + 1))
    if least_stream(pairs) >= rest:
        return None
    table = Table.best(pairs, SLACK, rows)
    if table.cost >= rest:
        return None
    table.write(head, symbols, contexts)
    return head
