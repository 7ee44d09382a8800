"""Files that are read in parts: remote ones, and the coded bytes of a checkpoint in a file.

The header stands first in a checkpoint and needs the length of every piece. With a spool, the pieces of an array leave
memory as soon as they are coded, and wait in a file until the header is known.
"""

from __future__ import annotations

import bisect
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from ..errors import CorruptDataError
from .fields import Piece, parts_of

FRONT = 1 << 16
"""Bytes fetched at once at the beginning: prefix and header of most files."""
_BLOCK = 1 << 22
_GAP = 1 << 16
"""Parts closer together than this are fetched as one: a request costs more than these bytes."""


class Ranged:
    """The bytes of a remote file; parts are fetched and cached.

    Args:
        size: its length in bytes.
        fetch: `fetch(start, stop)` gives those bytes.

    Example:
        >>> data = bytes(range(100))
        >>> file = Ranged(len(data), lambda start, stop: data[start:stop])
        >>> bytes(file[10:13]), len(file)
        (b'\\n\\x0b\\x0c', 100)
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        self._size, self._fetch = size, fetch
        self._starts: list[int] = []
        self._parts: list[memoryview] = []
        self.fetched = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> memoryview:
        start, stop, _ = where.indices(self._size)
        if start >= stop:
            return memoryview(b"")
        part = self._find(start, stop)
        if part is None:
            self._get(start, max(stop, min(FRONT, self._size)) if start < FRONT else stop)
            part = self._find(start, stop)
        assert part is not None
        return part

    def _find(self, start: int, stop: int) -> memoryview | None:
        at = bisect.bisect_right(self._starts, start) - 1
        # Of parts that overlap an earlier one may reach farther.
        for i in range(at, max(at - 4, -1), -1):
            if stop <= self._starts[i] + len(self._parts[i]):
                return self._parts[i][start - self._starts[i] : stop - self._starts[i]]
        return None

    def _get(self, start: int, stop: int) -> None:
        part = self._fetch(start, stop)
        if len(part) != stop - start:
            raise CorruptDataError(f"the file has no bytes {start}..{stop}; it ended at {start + len(part)}")
        self.fetched += len(part)
        at = bisect.bisect_right(self._starts, start)
        self._starts.insert(at, start)
        self._parts.insert(at, memoryview(part))

    def blocks(self) -> Iterator[bytes]:
        """Yield all bytes of the file in order, fetched block by block and not kept."""
        for start in range(0, self._size, _BLOCK):
            yield self._fetch(start, min(start + _BLOCK, self._size))

    def forget(self) -> None:
        """Free the fetched parts."""
        self._starts.clear()
        self._parts.clear()

    def load(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch these parts now, in few requests."""
        joined: list[list[int]] = []
        for start, stop in sorted(spans):
            if self._find(start, stop) is not None or start >= stop:
                continue
            if joined and start <= joined[-1][1] + _GAP:
                joined[-1][1] = max(joined[-1][1], stop)
            else:
                joined.append([start, stop])
        for start, stop in joined:
            self._get(start, stop)


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
