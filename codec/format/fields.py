"""Fields of a byte stream: a writer, and a reader that checks every length; pieces by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ..errors import CorruptDataError
from ..state.leaves import check_memory

Bytes = bytes | bytearray | memoryview

_LARGE = 1 << 12


class Writer:
    """Byte buffer of fields; large fields are not copied and must not change until `done`.

    A writer can be appended to another one without joining its parts first. Its length is in bytes.

    Args:
        method: the first byte, which names what follows; None: no such byte.
        data: written `raw` next.
    """

    def __init__(self, method: int | None = None, *data: Data) -> None:
        self._out = bytearray(() if method is None else (method,))
        self._parts: list[Bytes] = []
        self._before = 0
        self.raw(*data)

    def __len__(self) -> int:
        return self._before + len(self._out)

    def byte(self, *values: int) -> None:
        """Write unsigned bytes."""
        self._out += bytes(values)

    def varint(self, *values: int) -> None:
        """Write unsigned integers, LEB128: seven bits a byte, least significant first."""
        for value in values:
            while value >= 0x80:
                self._out.append(value & 0x7F | 0x80)
                value >>= 7
            self._out.append(value)

    def raw(self, *fields: Data) -> None:
        """Write bytes without their length."""
        for data in fields:
            if isinstance(data, Writer):
                self.raw(*data.parts())
                continue
            if isinstance(data, np.ndarray):
                is_small = data.nbytes < _LARGE
                data = data.tobytes() if is_small else memoryview(np.ascontiguousarray(data).view(np.uint8).data)
            if len(data) < _LARGE:
                self._out += data
            else:
                self._parts += (self._out, data)
                self._before += len(self._out) + len(data)
                self._out = bytearray()

    def block(self, *fields: Data) -> None:
        """Write a varint with the number of bytes of each field, then its bytes."""
        for data in fields:
            self.varint(data.nbytes if isinstance(data, np.ndarray) else len(data))
            self.raw(data)

    def parts(self) -> tuple[Bytes, ...]:
        """Return all bytes written so far, in order, as separate buffers."""
        return (*self._parts, self._out)

    def done(self) -> bytes:
        """Return all bytes written so far, joined."""
        return b"".join(self.parts())


Data = Bytes | np.ndarray[Any, Any] | Writer
"""What a writer takes."""


class Parts(Protocol):
    """Bytes in several buffers, such as those of a writer."""

    def __len__(self) -> int: ...

    def parts(self) -> tuple[Bytes, ...]:
        """Return the buffers, in order."""


Piece = bytes | Parts
"""Coded bytes of an array or a part of it, joined or in parts."""


def parts_of(piece: Piece) -> tuple[Bytes, ...]:
    """Return the buffers that a piece consists of."""
    return (piece,) if isinstance(piece, (bytes, bytearray, memoryview)) else piece.parts()


class Reader:
    """Reader of fields from a byte buffer; a truncated field is a CorruptDataError."""

    def __init__(self, data: Bytes, what: str) -> None:
        self._data = memoryview(data).cast("B")
        self._at = 0
        self._what = what

    @property
    def left(self) -> int:
        """Number of bytes not yet read."""
        return len(self._data) - self._at

    def raw(self, n: int) -> memoryview:
        """Read the next n bytes, without a copy."""
        if n < 0 or n > self.left:
            raise CorruptDataError(f"{self._what}: {n} bytes wanted, {self.left} left")
        self._at += n
        return self._data[self._at - n : self._at]

    def byte(self) -> int:
        """Read one unsigned byte."""
        return self.raw(1)[0]

    def varint(self) -> int:
        """Read an unsigned LEB128 integer below 2**63."""
        value = 0
        for shift in range(0, 63, 7):
            b = self.byte()
            value |= (b & 0x7F) << shift
            if b < 0x80:
                return value
        raise CorruptDataError(f"{self._what}: an integer is longer than 63 bits")

    def array(self, dtype: str, n: int) -> np.ndarray[Any, Any]:
        """Read n items of a NumPy dtype (little-endian), without a copy."""
        return np.frombuffer(self.raw(n * np.dtype(dtype).itemsize), dtype=dtype)

    def block(self) -> memoryview:
        """Read a varint length and that many bytes."""
        return self.raw(self.varint())

    def rest(self) -> memoryview:
        """Read all remaining bytes, without a copy."""
        return self.raw(self.left)

    def end(self) -> None:
        """Raise CorruptDataError unless all bytes were read."""
        if self.left:
            raise CorruptDataError(f"{self._what}: {self.left} bytes too many")


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
