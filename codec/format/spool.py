"""Coded bytes in a file, where they wait until the header of their checkpoint is known.

The header stands first in a checkpoint and needs the length of every piece. With a spool, the pieces of an array leave
memory as soon as they are coded.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from .fields import Piece, parts_of
from .ranged import Ranged


class Spool:
    """A file of pieces.

    Args:
        file: empty, opened to read and write without a buffer; best one without a name, which no crash leaves behind.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._end, self._lock = file, 0, threading.Lock()

    def add(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Append pieces, from any thread; return what replaces them in memory."""
        added: list[Piece] = []
        for piece in pieces:
            with self._lock:
                start, self._end = self._end, self._end + len(piece)
            at = start
            for part in parts_of(piece):
                rest = memoryview(part)
                while rest:
                    written = os.pwrite(self._file.fileno(), rest, at)
                    rest, at = rest[written:], at + written
            added.append(SpooledPiece(self, start, at - start))
        return added

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes start..stop."""
        return os.pread(self._file.fileno(), stop - start, start)


@dataclass(frozen=True, slots=True)
class SpooledPiece:
    """A piece in a spool; its bytes are read each time they are needed."""

    spool: Spool
    offset: int
    length: int

    def __len__(self) -> int:
        return self.length

    def parts(self) -> tuple[bytes, ...]:
        """Return the bytes of the piece, as `Writer.parts`."""
        return (self.spool.read(self.offset, self.offset + self.length),)


def ranged_over(front: bytes, pieces: Sequence[Piece]) -> Ranged:
    """Return the bytes of a file that begins with `front`, followed by pieces."""
    ends = list(itertools.accumulate((len(piece) for piece in pieces), initial=len(front)))

    def fetch(start: int, stop: int) -> bytes:
        found = [front[start:stop]] if start < len(front) else []
        for number in range(max(0, bisect.bisect_right(ends, start) - 1), len(pieces)):
            begin, end = ends[number], ends[number + 1]
            if begin >= stop:
                break
            data = b"".join(parts_of(pieces[number]))
            found.append(data[max(0, start - begin) : min(end, stop) - begin])
        return b"".join(found)

    return Ranged(ends[-1], fetch)
