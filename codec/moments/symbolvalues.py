"""Common parts of both moment streams: tables of symbol values, and escaped values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...kernels.backend.arrays import on_gpu, placed_with
from ...kernels.packing import pack_bits, unpack_bits
from .. import entropy
from ..entropy.blocks import decoding_device, is_block
from ..errors import CorruptDataError
from ..format.fields import Chunk, Piece, Reader, Writer, parts_of
from ..groups import sent_values
from ..state.casting import rounded
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, from_bytes, on_host


def room_like(flat: Array, spec: LeafSpec) -> Array:
    """Return an empty array for decoded values, on the device of the original values."""
    return flat.new_empty(spec.size) if on_gpu(flat) else from_bytes(np.empty(spec.nbytes, np.uint8), spec)


def put(room: Array, start: int, part: Array) -> None:
    """Write decoded values into an array, from element `start` on.

    On the host they are copied as bytes, since torch would start threads of its own to copy.
    """
    if on_gpu(room):
        room[start : start + part.shape[0]] = part
    elif part.shape[0]:
        data = as_bytes(part)
        at = start * (data.size // part.shape[0])
        as_bytes(room)[at : at + data.size] = data


def put_decoded(
    room: Array, start: int, values: Array, symbols: Array, escape: int, escaped: NpArray, spec: LeafSpec
) -> None:
    """Write decoded float32 values as `put` does, and escaped ones where their symbol stands."""
    if not on_gpu(room):
        put(room, start, as_stored(with_escapes(values, symbols, escape, escaped), spec))
        return
    put(room, start, values)
    if escaped.size:  # rounded on the host: devices write NaN in other ways
        room[start : start + symbols.shape[0]][symbols == escape] = sent_values(rounded(escaped, spec), room)


def sent(symbols: NpArray, width: int, room: Array) -> Array:
    """Return flat symbols on the device where decoded values are made.

    They go to a GPU in `width` bits each; larger ones become the largest.
    """
    if not on_gpu(room) or not symbols.size or width == 8:
        return placed_with(symbols, room)
    packed = pack_bits(np.minimum(symbols, (1 << width) - 1), width)
    return unpack_bits(placed_with(packed, room), width, symbols.size)


def as_stored(values: Array, spec: LeafSpec) -> Array:
    """Convert float32 values to the array's dtype, on the same device."""
    if on_gpu(values):
        return values.bfloat16() if spec.dtype == "bfloat16" else values
    return from_bytes(rounded(values, spec), spec)


def escapes_of(x: Array, symbols: Array, escape: int, counts: NpArray) -> Array:
    """Return the values whose symbol is the escape symbol, in order."""
    return x[symbols == escape] if counts[escape] else x[:0]


def with_escapes(values: Array, symbols: Array, escape: int, escaped: Array) -> Array:
    """Put the escaped values back at the positions of the escape symbol."""
    if len(escaped):
        values[symbols == escape] = escaped
    return values


def pack_table(table: NpArray) -> bytes:
    """Pack the nonzero entries of a table.

    Stored are their number, the distance of each from the one before less one, and their bfloat16 values.
    """
    used = np.flatnonzero(table)
    out = Writer()
    out.varint(used.size, *(np.diff(used, prepend=-1) - 1).tolist())
    out.raw((table[used].view(np.uint32) >> np.uint32(16)).astype("<u2"))
    return out.done()


def read_table(data: Reader) -> NpArray:
    """Read a table that `pack_table` wrote, float32 [256]; raises CorruptDataError."""
    count = data.varint()
    if count > 256:
        raise CorruptDataError(f"moment: a table of {count} values")
    at = -1
    used = []
    for _ in range(count):
        at += 1 + data.varint()
        used.append(at)
    if at > 255:
        raise CorruptDataError("moment: an entry is beyond the table")
    table = np.zeros(256, np.uint32)
    table[used] = data.array("<u2", count).astype(np.uint32) << np.uint32(16)
    values = table.view(np.float32)
    if not np.isfinite(values).all():
        raise CorruptDataError("moment: a value of the table is not finite")
    return values


def pack_chunk(
    symbols: Array,
    escaped: Array,
    counts: NpArray | None,
    before: NpArray | None,
    matrix: entropy.Matrix,
) -> Piece:
    """Encode the symbols of a chunk; `counts` are those of its symbols, if known."""
    known = None if counts is None or before is not None else counts.astype(np.int64)
    values = on_host(escaped).astype("<f4", copy=False)
    if is_block(symbols.shape[0]):
        block = entropy.CodedBlock(symbols, before, 256, known)
        return entropy.Later(lambda: _chunk(block, values))
    own = symbols if isinstance(symbols, np.ndarray) else on_host(symbols)
    if before is None:
        return _chunk(entropy.encode(own, known, matrix), values).done()
    return _chunk(entropy.encode_levels(own, 256, before, 256, "smallest", matrix), values).done()


def _chunk(stream: Piece, escaped: NpArray) -> Writer:
    out = Writer()
    out.varint(len(stream))
    out.raw(*parts_of(stream))
    out.varint(escaped.size)
    out.raw(escaped)
    return out


def symbols_there(chunks: Sequence[Chunk], before: NpArray | None = None) -> list[NpArray | None]:
    """Return the symbols of the chunks that a device decodes together, else None."""
    if decoding_device() is None:
        return [None] * len(chunks)
    streams = [
        (Reader(piece, "moment").block(), part.stop - part.start, None if before is None else before[part])
        for piece, part in chunks
    ]
    return list(entropy.decoded_there(streams, 256))


def read_chunk(
    piece: memoryview, n: int, escape: int, before: NpArray | None = None, known: NpArray | None = None
) -> tuple[NpArray, NpArray]:
    """Read the n symbols and the escaped values of a chunk; raises CorruptDataError.

    Symbols that are known are not read.
    """
    data = Reader(piece, "moment")
    stream = data.block()
    symbols = entropy.decode(stream, n, before, 256) if known is None else known
    count = data.varint()
    if count != int(np.count_nonzero(symbols == escape)):
        raise CorruptDataError(f"moment: {count} escaped values do not fit the symbols")
    escaped = data.array("<f4", count)
    data.end()
    return symbols, escaped
