"""The container: magic, version, header, and chunks with checksums; see `docs/format.md`.

    0   8  magic                       32  4  number of chunks
    8   4  version (2)                 36  4  0
    12  4  flags (0)                   40  16 xxh3-128 of bytes 0..39, header and chunk table
    16  8  stored length of the header 56  .. header: JSON in a zstandard frame
    24  8  plain length of the header  ..  24 a chunk: length (8), xxh3-128 of its bytes (16); then the chunks

A *piece* is what a codec writes for an array; pieces stand one after another and never straddle two chunks, so small
arrays share a checksum and one array can be read without the rest.

Records of arrays and groups are stored as columns, one a field, since many repeat few values:

    {"count": 3, "l": {"v": ["numpy"]}, "d": {"v": ["float32", "int64"], "i": [0, 0, 1]}, "e": [0.1, null, 0.2]}

A column is a list with a value for each record (null: the record has no such field), or the different values `v` and
for each record the number `i` of its own; without `i` all have the first.
"""

from __future__ import annotations

import bisect
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
import zstandard

from ...kernels.backend.arrays import is_torch, on_gpu
from ..errors import BadArgumentError, CorruptDataError, NewerFormatError
from .bounded_json import check_limits, loads
from .fields import Bytes, Piece, parts_of
from .ranged import Ranged
from .schema import ARRAY_KEYS, COLUMNS, HEADER, OPTIONAL, check_keys

MAGIC = b"\x89SPT\r\n\x1a\n"
VERSION = 2
CHUNK_TARGET = 1 << 18
MAX_HEADER = 1 << 28
MOST_ARRAYS = 1 << 20
"""Arrays of a state: their records take about a kilobyte of memory each."""
_SMALL_HEADER = 1 << 19
_PREFIX = struct.Struct("<8sIIQQII")
_CHECKSUM = 16
_ENTRY = struct.Struct("<Q16s")
_SMALL = 1 << 16
"""Bytes: buffers below this are written together."""


class Buffers:
    """The bytes of a file in memory, in one or more buffers that do not change.

    A new checkpoint is written to a store buffer by buffer. Joining copies all of its bytes, which takes a sixth of the
    time of exact coding.

    Args:
        parts: in order.

    Example:
        >>> file = Buffers([b"abc", b"de"])
        >>> len(file), bytes(file[1:4])
        (5, b'bcd')
    """

    def __init__(self, parts: Sequence[Bytes]) -> None:
        self._parts = parts
        self._size = sum(map(len, parts))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, where: slice) -> memoryview:
        return memoryview(self.joined())[where]

    def joined(self) -> bytes:
        """Return all bytes as one buffer, which takes the place of the others."""
        parts = self._parts  # another thread may replace them meanwhile
        if len(parts) == 1 and isinstance(parts[0], bytes):
            return parts[0]
        whole = b"".join(parts)
        self._parts = [whole]
        return whole

    def blocks(self) -> Iterator[Bytes]:
        """Yield all bytes in order, buffer by buffer, the small ones joined."""
        for is_small, parts in itertools.groupby(self._parts, lambda part: len(part) < _SMALL):
            if is_small:
                yield b"".join(parts)
            else:
                yield from parts


Source = memoryview | Buffers | Ranged
"""The bytes of a file, in memory or fetched on demand."""


def _digest(*parts: Bytes) -> bytes:
    h = xxhash.xxh3_128()
    for part in parts:
        h.update(part)
    return bytes(h.digest())


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a file: its header, and each chunk's offset, length and checksum."""

    header: dict[str, Any]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    digests: tuple[bytes, ...]
    total: int


def write(header: dict[str, Any], pieces: Sequence[Piece]) -> tuple[bytes, Layout]:
    """Return the bytes of a file with this header and these pieces, and its layout."""
    front, where = write_front(header, pieces)
    # The pieces are joined here for the first time: the bytes of a large state are copied once.
    return b"".join([front, *itertools.chain.from_iterable(map(parts_of, pieces))]), where


def write_front(header: dict[str, Any], pieces: Iterable[Piece]) -> tuple[bytes, Layout]:
    """Return the bytes of a file that stand in front of its pieces, and the layout of the file."""
    if len(header.get("arrays", ())) > MOST_ARRAYS:
        raise BadArgumentError(f"the state has {len(header['arrays'])} arrays; the limit is {MOST_ARRAYS}")
    stored_header = header | {name: to_columns(header[name]) for name in COLUMNS if name in header}
    plain = json.dumps(stored_header, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
    if len(plain) > MAX_HEADER:
        raise BadArgumentError(
            f"tree and scalars take {len(plain)} bytes, the limit is {MAX_HEADER}: store large ones as arrays"
        )
    try:
        check_limits(plain)
    except ValueError as e:
        raise BadArgumentError(f"tree and scalars: {e}: store large ones as arrays") from None
    # A higher level pays if the header is a large part of a small file; the highest level is 20 times slower.
    level = 12 if len(plain) <= _SMALL_HEADER else 3
    stored = zstandard.ZstdCompressor(level=level, write_checksum=False, write_content_size=True).compress(plain)
    digests: list[bytes] = []
    sizes: list[int] = []
    chunk, size = xxhash.xxh3_128(), 0
    for piece in pieces:
        for part in parts_of(piece):
            chunk.update(part)
        size += len(piece)
        if size >= CHUNK_TARGET:
            digests.append(bytes(chunk.digest()))
            sizes.append(size)
            chunk, size = xxhash.xxh3_128(), 0
    if size:
        digests.append(bytes(chunk.digest()))
        sizes.append(size)
    table = b"".join(_ENTRY.pack(n, digest) for n, digest in zip(sizes, digests, strict=True))
    prefix = _PREFIX.pack(MAGIC, VERSION, 0, len(stored), len(plain), len(sizes), 0)
    front = b"".join([prefix, _digest(prefix, stored, table), stored, table])
    ends = list(itertools.accumulate(sizes, initial=len(front)))
    return front, Layout(header, tuple(ends[:-1]), tuple(sizes), tuple(digests), ends[-1])


def apart_from(parts: Iterable[Bytes], arrays: Iterable[Any]) -> list[Bytes]:
    """Return buffers; those in the memory of an array are copied, whose owner may change it.

    Args:
        parts: the buffers.
        arrays: flat and contiguous, of NumPy or torch; those on a GPU share no memory with a buffer.

    Example:
        >>> import numpy as np
        >>> weights = np.zeros(4, np.uint8)
        >>> own, copied = apart_from([memoryview(b"ab"), weights[:2].data], [weights])
        >>> weights[:] = 1
        >>> bytes(own), bytes(copied)
        (b'ab', b'\\x00\\x00')
    """
    spans = sorted(_span(x) for x in arrays if not on_gpu(x))
    starts = [start for start, _ in spans]
    ends = list(itertools.accumulate((end for _, end in spans), max))

    def is_shared(part: Bytes) -> bool:
        if not isinstance(part, memoryview) or not spans:
            return False
        start, end = _span(np.frombuffer(part, np.uint8))
        before = bisect.bisect_left(starts, end)
        return before > 0 and ends[before - 1] > start

    return [bytes(part) if is_shared(part) else part for part in parts]


def _span(x: Any) -> tuple[int, int]:
    """Return the first address of a flat array, and the one behind it."""
    start = x.data_ptr() if is_torch(x) else x.__array_interface__["data"][0]
    return start, start + x.nbytes


def _need(data: Source, n: int, what: str) -> None:
    if len(data) < n:
        raise CorruptDataError(f"the file ends in its {what}: {len(data)} bytes, at least {n} needed")


def layout(data: Source) -> Layout:
    """Read and check the front of a file: magic, version, lengths, checksum, header.

    Raises:
        CorruptDataError: truncated, altered, or no such file.
        NewerFormatError: a version this reader does not know.
    """
    _need(data, 8, "magic")
    if data[:8] != MAGIC:
        raise CorruptDataError("no shrinkpoint file: the magic bytes are missing")
    start = _PREFIX.size + _CHECKSUM
    _need(data, start, "prefix")
    _, version, flags, stored_len, plain_len, count, reserved = _PREFIX.unpack(data[: _PREFIX.size])
    if version > VERSION:
        raise NewerFormatError(f"the file has format version {version}; this reader knows versions up to {VERSION}")
    if version == 1:
        raise version1_is_not_read()
    if version != VERSION or flags or reserved:
        raise CorruptDataError(f"prefix: version {version}, flags {flags}, {reserved} are reserved")
    if plain_len > MAX_HEADER or stored_len > MAX_HEADER + 4096:
        raise CorruptDataError(f"prefix: a header of {plain_len} bytes is over the limit of {MAX_HEADER}")
    table_at = start + stored_len
    body = table_at + count * _ENTRY.size
    _need(data, body, "header")
    stored, table = data[start:table_at], data[table_at:body]
    if _digest(data[: _PREFIX.size], stored, table) != data[_PREFIX.size : start]:
        raise CorruptDataError("header: the checksum does not match")
    header = _header(stored, plain_len)
    entries = list(_ENTRY.iter_unpack(table))
    lengths = tuple(e[0] for e in entries)
    ends = list(itertools.accumulate(lengths, initial=body))
    if ends[-1] != len(data):
        raise CorruptDataError(f"the file has {len(data)} bytes; its chunks end at {ends[-1]}")
    return Layout(header, tuple(ends[:-1]), lengths, tuple(e[1] for e in entries), len(data))


def _header(stored: memoryview, plain_len: int) -> dict[str, Any]:
    try:
        frame = zstandard.get_frame_parameters(stored)
        if frame.content_size != plain_len:
            raise CorruptDataError("header: its length is not what the prefix says")
        plain = zstandard.ZstdDecompressor(max_window_size=1 << 28).decompress(
            stored, max_output_size=plain_len, allow_extra_data=False
        )
        if not plain.isascii():
            raise ValueError("not ASCII")
        header = loads(plain)
    except (zstandard.ZstdError, ValueError, MemoryError) as e:
        if isinstance(e, CorruptDataError):
            raise
        raise CorruptDataError(f"header: {e}") from None
    if not isinstance(header, dict):
        raise CorruptDataError("header: no JSON object")
    check_keys(header, HEADER, "it")
    if lacking := sorted(HEADER - OPTIONAL - header.keys()):
        raise CorruptDataError(f"header: it has no key {lacking[0]!r}")
    most = _arrays_in(header.get("tree"))
    return header | {name: from_columns(header[name], most, keys) for name, keys in COLUMNS.items() if name in header}


def _arrays_in(nodes: Any) -> int:
    """Return the number of different arrays in a tree."""
    if not isinstance(nodes, list):
        return 0
    found = {n["a"] for n in nodes if type(n) is dict and type(n.get("a")) is int}
    if len(found) > MOST_ARRAYS:
        raise CorruptDataError(f"header: {len(found)} arrays; the limit is {MOST_ARRAYS}")
    return len(found)


class Body:
    """The chunks of a file; each is checked when one of its pieces is first read."""

    def __init__(self, data: Source, where: Layout) -> None:
        self._data = data
        self._where = where
        self._checked: set[int] = set()
        self._base = where.starts[0] if where.starts else where.total
        self.nbytes = where.total - self._base

    def over(self, data: Source) -> Body:
        """Return the body of another copy of the same file."""
        return Body(data, self._where)

    def check(self, chunk: int) -> None:
        """Raise CorruptDataError if the checksum of a chunk does not match."""
        if chunk in self._checked:
            return
        start = self._where.starts[chunk]
        if _digest(self._data[start : start + self._where.lengths[chunk]]) != self._where.digests[chunk]:
            raise CorruptDataError(f"chunk {chunk} (bytes {start}..): the checksum does not match")
        self._checked.add(chunk)

    def check_all(self) -> None:
        """Check every chunk."""
        for chunk in range(len(self._where.starts)):
            self.check(chunk)

    def fetch(self, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch the chunks with these parts of the body (offset, length), if the file is remote."""
        if not isinstance(self._data, Ranged):
            return
        chunks: set[int] = set()
        for offset, length in spans:
            if length > 0 and 0 <= offset <= self.nbytes - length:
                first = bisect.bisect_right(self._where.starts, self._base + offset) - 1
                last = bisect.bisect_left(self._where.starts, self._base + offset + length)
                chunks.update(range(first, last))
        self._data.load((self._where.starts[i], self._where.starts[i] + self._where.lengths[i]) for i in chunks)

    def forget(self) -> None:
        """Free fetched chunks of a remote file; they are checked again when fetched again."""
        if isinstance(self._data, Ranged):
            self._data.forget()
            self._checked.clear()

    def piece(self, offset: int, length: int) -> memoryview:
        """Return the piece at `offset` in the body."""
        if length < 0 or offset < 0 or offset + length > self.nbytes:
            raise CorruptDataError(f"header: a piece at {offset} of {length} bytes is outside the file")
        if length == 0:
            return self._data[:0]
        start = self._base + offset
        chunk = bisect.bisect_right(self._where.starts, start) - 1
        if start + length > self._where.starts[chunk] + self._where.lengths[chunk]:
            raise CorruptDataError(f"header: a piece at {offset} straddles two chunks")
        self.check(chunk)
        return self._data[start : start + length]


CONVERTER = "e5cd555fb963"
"""The last commit that wrote version 1: its `restore` converts such files."""


def version1_is_not_read() -> CorruptDataError:
    """Return the error for a file of format version 1, which no release wrote.

    Example:
        >>> str(version1_is_not_read())[:52]
        'the file has format version 1, which only developmen'
    """
    return CorruptDataError(
        "the file has format version 1, which only development versions wrote, and is not read any more. Install "
        f"commit {CONVERTER} of shrinkpoint, write the state with its `shrinkpoint restore RUN state.pt`, "
        "and compress that again"
    )


_COUNT = "count"
Record = dict[str, Any]


def to_columns(records: Sequence[Record]) -> dict[str, Any]:
    """Return records as columns.

    Args:
        records: plain JSON. A value is never None: None marks an absent field.

    Example:
        >>> to_columns([{"d": "float32"}, {"d": "float32", "s": [2]}])
        {'count': 2, 'd': {'v': ['float32']}, 's': [None, [2]]}
    """
    names = dict.fromkeys(name for record in records for name in record)
    return {_COUNT: len(records), **{name: _column([r.get(name) for r in records]) for name in names}}


def _column(values: list[Any]) -> Any:
    numbers: dict[Any, int] = {}
    found: list[Any] = []
    index = []
    for value in values:
        key = (type(value), json.dumps(value) if type(value) in (list, dict) else value)
        if key not in numbers:
            numbers[key] = len(found)
            found.append(value)
        index.append(numbers[key])
    if len(found) == 1:
        return {"v": found}
    return values if 2 * len(found) > len(values) else {"v": found, "i": index}


def from_columns(columns: Any, most: int, keys: frozenset[str] = ARRAY_KEYS) -> list[Record]:
    """Return the records that `to_columns` stored as columns.

    Args:
        columns: the columns read from a file.
        most: largest number of records.
        keys: that a record may have; default: those of an array.

    Raises:
        CorruptDataError: the columns are malformed, or there are more records.

    Example:
        >>> from_columns({"count": 2, "d": {"v": ["float32"]}, "s": [None, [2]]}, 2)
        [{'d': 'float32'}, {'d': 'float32', 's': [2]}]
    """
    count = columns.get(_COUNT) if isinstance(columns, dict) else None
    if type(count) is not int or not 0 <= count <= most:
        raise CorruptDataError("header: malformed columns, or more records than the tree has arrays")
    check_keys(columns.keys() - {_COUNT}, keys, "a record")
    records: list[Record] = [{} for _ in range(count)]
    for name, column in columns.items():
        if name == _COUNT:
            continue
        for record, value in zip(records, _values(name, column, count), strict=True):
            if value is not None:
                record[name] = value
    return records


def _values(name: str, column: Any, count: int) -> Sequence[Any]:
    if isinstance(column, list):
        if len(column) == count:
            return column
    elif isinstance(column, dict) and column.keys() <= {"v", "i"} and isinstance(column.get("v"), list):
        values, index = column["v"], column.get("i")
        if index is None and len(values) == 1:
            return [values[0]] * count
        numbers = index if isinstance(index, list) and len(index) == count else [-1]
        if all(type(i) is int and 0 <= i < len(values) for i in numbers):
            return [values[i] for i in numbers]
    raise CorruptDataError(f"header: the column {name[:20]!r} does not fit {count} records")
