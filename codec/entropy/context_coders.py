"""Coding of a matrix's symbols in the context of their position: its class or a prediction.

A stream of these methods says its classes, or factors, and then is one with a table: `table.Table`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ...kernels.levels import joint_counts
from ...kernels.prediction import MOST_RANK
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .low_rank import CLASSES, HALF_STEPS, Factors, expected, factors_each, factors_of, signed
from .method_ids import PLACES, PRODUCTS, SLACK
from .plain import coded, decode_plain
from .row_column_classes import Places, classes_of
from .table import I64, U8, Table, least_stream, read_rans

_WORTH_PLACES = 512
"""Bytes below which classes of places are not tried."""
_BESIDE_PRODUCTS = 8
"""Most classes of places that are combined with predictions from products; more classes gain nothing."""
_TRIED = 3
"""Matrices that are tried to decide whether several have useful factors."""
_SIGN = np.uint8(128)
"""Exclusive-or mask that maps signed bytes to unsigned ones in the same order, and back."""


def by_place(symbols: U8, context: U8 | None, counts: I64, columns: int, start: int, size: float) -> Writer | None:
    """Code symbols in the context of their position's class; None if that is not smaller.

    Args:
        symbols: uint8, shape (n,).
        context: uint8, shape (n,), values below `counts.shape[0]`, or None.
        counts: int64 [contexts, symbols], of the pairs.
        columns: of the matrix that the symbols are a part of.
        start: number of the first one in it.
        size: bytes that they take otherwise.
    """
    if size < _WORTH_PLACES:
        return None
    contexts = counts.shape[0]
    places = classes_of(symbols, int(counts[0].argmax()) if context is None else context, columns, start, contexts)
    if places is None:
        return None
    head = Writer()
    head.byte(PLACES)
    for number in (columns, places.phase, contexts):
        head.varint(number)
    _write_classes(head, places)
    if len(head) >= size / 2:
        return None
    return _in_classes(head, symbols, places.beside(context, symbols.size), contexts * places.classes, size)


def by_product(
    symbols: U8, columns: int, start: int, size: float, heights: Sequence[int] | None = None
) -> Writer | None:
    """Code signed numbers in the context of a low-rank prediction; None if not smaller.

    Args:
        symbols: as in `by_place`.
        columns: as in `by_place`.
        start: as in `by_place`; 0 of several matrices.
        size: as in `by_place`.
        heights: rows of each of several matrices that stand one after another, which have factors of their own; None:
            the symbols are of one.
    """
    if size < _WORTH_PLACES:
        return None
    several = [] if heights is None else list(heights)
    factors = [factors_of(symbols, columns, start)] if len(several) < 2 else _factors_each(symbols, columns, several)
    used = [own for own in factors if own is not None]
    if not used:
        return None
    head = Writer()
    head.byte(PRODUCTS)
    for number in (columns, start % columns, len(factors), *(several if len(factors) > 1 else ())):
        head.varint(number)
    for own in factors:
        head.varint(0 if own is None else own.rows.shape[1])
        if own is not None:
            head.varint(own.shift)
    for side in ([own.rows for own in used], [own.columns for own in used]):
        head.block(coded(np.concatenate([x.T.reshape(-1) for x in side]).view(np.uint8) ^ _SIGN))
    contexts = _predicted(factors, [symbols.size] if len(factors) == 1 else [rows * columns for rows in several])
    numbers, origins = (x.view(np.uint8) ^ _SIGN for x in (signed(symbols), expected(contexts)))
    places = classes_of(numbers, origins, columns, start, CLASSES, _BESIDE_PRODUCTS)
    _write_classes(head, places)
    if len(head) >= size / 2:
        return None
    return _in_classes(head, symbols, *_with_classes(contexts, CLASSES, places), size)


def _factors_each(symbols: U8, columns: int, heights: Sequence[int]) -> list[Factors | None]:
    """Return the factors of each matrix; all None if a few matrices gain nothing."""
    ends = list(accumulate(rows * columns for rows in heights))
    some = range(0, len(heights), -(-len(heights) // _TRIED))
    if not any(factors_of(symbols[ends[i] - heights[i] * columns : ends[i]], columns, 0) for i in some):
        return [None] * len(heights)
    return factors_each(symbols, columns, heights)


def _predicted(factors: Sequence[Factors | None], sizes: Sequence[int]) -> U8:
    """Return the predicted half steps of all symbols, one matrix after another."""
    found: U8 = np.full(sum(sizes), HALF_STEPS, np.uint8)
    begin = 0
    for own, size in zip(factors, sizes, strict=True):
        if own is not None:
            found[begin : begin + size] = own.classes(size)
        begin += size
    return found


def decode_places(data: Reader, n: int, context: U8 | None) -> U8:
    """Decode the symbols that `by_place` coded, uint8 (n,)."""
    columns, phase, rows = _read_place(data, n)
    contexts = data.varint()
    if not 1 <= contexts <= 256:
        raise CorruptDataError(f"places: {contexts} contexts are out of range")
    if contexts == 1:
        context = None
    elif context is None or int(context.max(initial=0)) >= contexts:
        raise CorruptDataError(f"places: {contexts} contexts are not those of a parent")
    places = _read_classes(data, columns, phase, rows, contexts)
    if places is None:
        raise CorruptDataError("places: a single class")
    return read_rans(data, places.beside(context, n), contexts * places.classes, n)


def decode_products(data: Reader, n: int) -> U8:
    """Decode the symbols that `by_product` coded, uint8 (n,)."""
    columns, phase, rows = _read_place(data, n)
    count = data.varint()
    if not 1 <= count <= rows:
        raise CorruptDataError(f"products: {count} matrices of {rows} rows")
    heights = [rows] if count == 1 else [data.varint() for _ in range(count)]
    if sum(heights) != rows or (count > 1 and (min(heights) < 1 or rows * columns != n)):
        raise CorruptDataError(f"products: {count} matrices have not {rows} rows together")
    sizes = [n] if count == 1 else [height * columns for height in heights]
    shapes = [_read_rank(data, size, columns) for size in sizes]
    ranks = [rank for rank, _ in shapes]
    left = _read_factors(data, [(rank, height) for rank, height in zip(ranks, heights, strict=True)])
    right = _read_factors(data, [(rank, columns) for rank in ranks])
    factors = [
        Factors(a, b, phase, shift) if rank else None for a, b, (rank, shift) in zip(left, right, shapes, strict=True)
    ]
    contexts = _predicted(factors, sizes)
    places = _read_classes(data, columns, phase, rows, CLASSES)
    return read_rans(data, *_with_classes(contexts, CLASSES, places), n)


def _read_rank(data: Reader, size: int, columns: int) -> tuple[int, int]:
    """Read rank and shift of the factors of a matrix; rank 0 means a matrix without factors."""
    rank = data.varint()
    if rank == 0:
        return 0, 1
    shift = data.varint()
    if rank > min(MOST_RANK, columns // 4, size // columns // 4) or not 1 <= shift <= 20:
        raise CorruptDataError(f"products: rank {rank} or shift {shift} is out of range for {size} / {columns}")
    return rank, shift


def _read_factors(data: Reader, shapes: Sequence[tuple[int, int]]) -> list[np.ndarray[Any, np.dtype[np.int8]]]:
    """Read the factors of several matrices, int8 [lines, rank] each."""
    numbers = (decode_plain(data.block(), sum(rank * lines for rank, lines in shapes)) ^ _SIGN).view(np.int8)
    found, begin = [], 0
    for rank, lines in shapes:
        found.append(numbers[begin : begin + rank * lines].reshape(rank, lines).T)
        begin += rank * lines
    return found


def _in_classes(head: Writer, symbols: U8, contexts: U8, rows: int, size: float) -> Writer | None:
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


def _with_classes(predicted: U8, contexts: int, places: Places | None) -> tuple[U8, int]:
    """Combine contexts with the classes of their positions, if any; return contexts and number."""
    if places is None:
        return predicted, contexts
    return places.beside(predicted, predicted.size), contexts * places.classes


def _write_classes(out: Writer, places: Places | None) -> None:
    if places is None:
        out.varint(1)
        return
    out.varint(places.classes)
    out.varint(places.base)
    out.block(coded(places.rows))
    out.block(coded(places.columns))


def _read_place(data: Reader, n: int) -> tuple[int, int, int]:
    """Read the number of columns, the column of the first symbol, and the number of rows."""
    columns, phase = data.varint(), data.varint()
    if not 1 <= columns <= n or phase >= columns:
        raise CorruptDataError(f"places: {n} symbols in {columns} columns from {phase}")
    return columns, phase, -(-(phase + n) // columns)


def _read_classes(data: Reader, columns: int, phase: int, rows: int, contexts: int) -> Places | None:
    """Read the classes of rows and columns, for a given number of contexts; None for one class."""
    classes = data.varint()
    if not 1 <= classes <= 256 // contexts:
        raise CorruptDataError(f"places: {contexts} contexts with {classes} classes each are out of range")
    if classes == 1:
        return None
    base = data.varint()
    if base > 255:
        raise CorruptDataError(f"places: classes from {base} are out of range")
    return Places(decode_plain(data.block(), rows), decode_plain(data.block(), columns), phase, base, classes)
