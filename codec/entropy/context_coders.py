"""Coding of a matrix's symbols in the context of the class of their position.

A stream says its classes, and then is one with a table: `table.Table`.
"""

from __future__ import annotations

from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from .low_rank import Matrix, in_contexts
from .method_ids import PLACES
from .plain import coded, decode_plain
from .row_column_classes import Places, classes_of
from .table import I64, U8, read_rans

_WORTH_PLACES = 512
"""Bytes below which classes of places are not tried."""


def by_place(symbols: U8, context: U8 | None, counts: I64, matrix: Matrix, size: float) -> Writer | None:
    """Code symbols in the context of their position's class; None if that is not smaller.

    Args:
        symbols: uint8, shape (n,).
        context: uint8, shape (n,), values below `counts.shape[0]`, or None.
        counts: int64 [contexts, symbols], of the pairs.
        matrix: where they stand.
        size: bytes that they take otherwise.
    """
    if size < _WORTH_PLACES:
        return None
    contexts, columns = counts.shape[0], matrix.columns
    origin = int(counts[0].argmax()) if context is None else context
    places = classes_of(symbols, origin, columns, matrix.start, contexts)
    if places is None:
        return None
    head = Writer()
    head.byte(PLACES)
    for number in (columns, places.phase, contexts):
        head.varint(number)
    _write_classes(head, places)
    if len(head) >= size / 2:
        return None
    return in_contexts(head, symbols, places.beside(context, symbols.size), contexts * places.classes, size)


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
