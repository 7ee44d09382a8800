"""Coding of a matrix's symbols in the context of their position: its class or a prediction.

A stream of these methods says its classes, or factors, and then is one with a table: `table.Table`.
"""

from __future__ import annotations

import numpy as np

from ...kernels.integer_products import MOST_RANK
from ...kernels.levels import joint_counts
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .low_rank import CLASSES, Factors, expected, factors_of, signed
from .method_ids import PLACES, PRODUCTS, SLACK
from .plain import coded, decode_plain
from .row_column_classes import Places, classes_of
from .table import I64, U8, Table, least_stream, read_rans

_WORTH_PLACES = 512
"""Bytes below which classes of places are not tried."""
_BESIDE_PRODUCTS = 8
"""Maximum number of position classes next to a low-rank prediction; more classes gain nothing."""
_SIGN = np.uint8(128)
"""What makes a signed byte an unsigned one in the same order, and back."""


def by_place(symbols: U8, context: U8 | None, counts: I64, columns: int, start: int, size: float) -> Writer | None:
    """Code symbols in the context of their position's class and another one; None if not smaller.

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


def by_product(symbols: U8, columns: int, start: int, size: float) -> Writer | None:
    """Code symbols of signed numbers in the context of a low-rank prediction and a position class.

    Arguments as `by_place`.
    """
    if size < _WORTH_PLACES:
        return None
    factors = factors_of(symbols, columns, start)
    if factors is None:
        return None
    head = Writer()
    head.byte(PRODUCTS)
    for number in (columns, factors.phase, factors.rows.shape[1], factors.shift):
        head.varint(number)
    for factor in (factors.rows, factors.columns):
        head.block(coded(factor.T.reshape(-1).view(np.uint8) ^ _SIGN))
    contexts = factors.classes(symbols.size)
    numbers, origins = (x.view(np.uint8) ^ _SIGN for x in (signed(symbols), expected(contexts)))
    places = classes_of(numbers, origins, columns, start, CLASSES, _BESIDE_PRODUCTS)
    _write_classes(head, places)
    if len(head) >= size / 2:
        return None
    return _in_classes(head, symbols, *_with_classes(contexts, CLASSES, places), size)


def decode_places(data: Reader, n: int, context: U8 | None) -> U8:
    """What `by_place` wrote after its method, uint8 (n,)."""
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
    """What `by_product` wrote after its method, uint8 (n,)."""
    columns, phase, rows = _read_place(data, n)
    rank, shift = data.varint(), data.varint()
    if not 1 <= rank <= min(MOST_RANK, columns // 4, n // columns // 4) or not 1 <= shift <= 20:
        raise CorruptDataError(f"products: rank {rank} or shift {shift} is out of range for {rows} x {columns}")
    left, right = (
        (decode_plain(data.block(), rank * lines) ^ _SIGN).view(np.int8).reshape(rank, lines).T
        for lines in (rows, columns)
    )
    contexts: U8 = Factors(left, right, phase, shift).classes(n)
    places = _read_classes(data, columns, phase, rows, CLASSES)
    return read_rans(data, *_with_classes(contexts, CLASSES, places), n)


def _in_classes(head: Writer, symbols: U8, contexts: U8, rows: int, size: float) -> Writer | None:
    """Symbols in contexts below `rows`, which the head says; None where that is not smaller than `size` bytes by half
    a percent."""
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
    """Combine contexts with the classes of their positions, if any; return them and their number."""
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
    """Columns, column of the first symbol, rows."""
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
