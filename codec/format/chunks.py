"""Pieces of an array that is coded by chunks, and the checks of every decoder."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CorruptDataError
from ..state.leaves import check_memory

Chunk = tuple[memoryview, slice]
"""A piece, and the part of the array that is in it."""


def chunks_of(
    what: str, pieces: Sequence[memoryview], size: int, needed: int, *, step: int, head: bool = False
) -> list[Chunk]:
    """Return each piece with its range of 0 ... size - 1, in order.

    Args:
        what: the stream format, for messages.
        size: of the array, in units of `step`: elements, bytes or rows.
        needed: bytes that decoding will allocate.
        step: units of a chunk; the last one may have fewer.
        head: whether a piece that belongs to no chunk comes first.

    Raises:
        CorruptDataError: the number of pieces is wrong, or this machine has too little memory.

    Example:
        >>> [part for _, part in chunks_of("bytes", [memoryview(b"a"), memoryview(b"b")], 5, 5, step=4)]
        [slice(0, 4, None), slice(4, 5, None)]
    """
    starts = range(0, size, step)
    if len(pieces) != len(starts) + head:
        raise CorruptDataError(f"{what}: {len(pieces)} pieces for {len(starts)} chunks")
    check_memory(needed, what)
    return [(piece, slice(i, min(i + step, size))) for piece, i in zip(pieces[head:], starts, strict=True)]
