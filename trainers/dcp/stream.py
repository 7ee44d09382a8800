"""A lossless stream transform for torch's own DCP writer: smaller files with one argument."""

from __future__ import annotations

import io
from typing import IO, Any

import numpy as np
import zstandard
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from ...codec.errors import CorruptDataError
from ...kernels.backend.arguments import integer

MAGIC = b"SPST"
VERSION = 1
BLOCK = 1 << 20
"""Bytes that are transformed at a time, a multiple of every item size."""
WIDTHS = (1, 2, 4, 8)
_HEADER = 9
_END = b"\1" + bytes(8)
_LARGEST = BLOCK + (BLOCK >> 7) + 1024
"""Stored bytes of a block: zstd adds less than this to data that does not shrink."""


class Lossless(StreamTransformExtension):
    """Lossless compression of each item that torch's DCP writer stores.

        dcp.save(state, storage_writer=FileSystemWriter(folder, _extensions=[Lossless()]))
        dcp.load(state, storage_reader=FileSystemReader(folder, _extension_registry=registry()))

    The bytes of floating-point numbers are grouped by their position, so that similar ones (signs and exponents) are
    next to each other, and compressed by zstd. A stream does not say the size of its items: each block of 1 MiB takes
    the size of 1, 2, 4 and 8 bytes that compresses a sample best.

    Args:
        level: of zstd, 1 (default) to 19.

    Raises:
        BadArgumentError: the level is out of range.
        CorruptDataError: on reading, a stream that was not written by this class, or was altered.

    Example:
        >>> data = np.linspace(0, 1, 4096, dtype=np.float32).tobytes()
        >>> import tempfile, warnings, torch, torch.distributed.checkpoint as dcp
        >>> warnings.simplefilter("ignore")  # torch warns where there is only one process
        >>> folder, state = tempfile.mkdtemp(), {"w": torch.arange(64.0)}
        >>> writer = dcp.FileSystemWriter(folder, _extensions=[Lossless()])
        >>> metadata = dcp.save(state, storage_writer=writer, no_dist=True)
        >>> loaded = {"w": torch.zeros(64)}
        >>> reader = dcp.FileSystemReader(folder, _extension_registry=registry())
        >>> dcp.load(loaded, storage_reader=reader, no_dist=True)
        >>> torch.equal(loaded["w"], state["w"])
        True
    """

    def __init__(self, level: int = 1) -> None:
        self.level = integer("level", level, 1, 19)

    @staticmethod
    def registry_name() -> str:
        """Return the name by which torch finds the transform."""
        return "shrinkpoint.lossless"

    @staticmethod
    def from_descriptor(version: str) -> Lossless:
        """Return the transform for a stored name and version; called by torch's reader."""
        if version != str(VERSION):
            raise CorruptDataError(f"shrinkpoint.lossless: version {version[:20]}; this reader knows {VERSION}")
        return Lossless()

    def get_descriptor(self) -> str:
        """Return the name and version that torch stores with each item."""
        return f"{self.registry_name()}/{VERSION}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that compresses into `output`; torch closes it."""
        found: Any = _Compressing(output, self.level)
        return found  # type: ignore[no-any-return]

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Return a stream with the bytes that were written."""
        found: Any = io.BufferedReader(_Expanding(input), BLOCK)
        return found  # type: ignore[no-any-return]


class _Compressing(io.RawIOBase):
    """Stream that collects blocks and writes each compressed."""

    def __init__(self, output: IO[bytes], level: int) -> None:
        super().__init__()
        self._output, self._block = output, bytearray()
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
        self._quick = zstandard.ZstdCompressor(level=1)
        output.write(MAGIC)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._block += view
        while len(self._block) >= BLOCK:
            self._store(bytes(self._block[:BLOCK]))
            del self._block[:BLOCK]
        return len(view)

    def close(self) -> None:
        if not self.closed:
            if self._block:
                self._store(bytes(self._block))
            self._output.write(_END)  # without it a truncated stream would read as a shorter one
            super().close()
            self._output.close()  # torch wraps its file so that this does not close it

    def _store(self, block: bytes) -> None:
        sample = block[len(block) // 2 :][: 1 << 15]
        width = min(WIDTHS, key=lambda w: len(self._quick.compress(_grouped(sample, w))))
        stored = self._compressor.compress(_grouped(block, width))
        self._output.write(bytes([width]) + len(block).to_bytes(4, "little") + len(stored).to_bytes(4, "little"))
        self._output.write(stored)


class _Expanding(io.RawIOBase):
    """Reader of blocks, one after another; the lengths in a header bound its allocations."""

    def __init__(self, source: IO[bytes]) -> None:
        super().__init__()
        self._source, self._rest, self._ended = source, memoryview(b""), False
        if source.read(len(MAGIC)) != MAGIC:
            raise CorruptDataError("not a stream of shrinkpoint.lossless")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._rest and not self._ended:
            self._rest = memoryview(self._block())
            self._ended = not self._rest
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def _block(self) -> bytes:
        header = self._source.read(_HEADER)
        if header == _END:
            return b""
        width = header[0] if len(header) == _HEADER else 0
        size, stored = int.from_bytes(header[1:5], "little"), int.from_bytes(header[5:9], "little")
        if width not in WIDTHS or not 0 < size <= BLOCK or stored > _LARGEST:
            raise CorruptDataError("shrinkpoint.lossless: the stream is truncated or altered")
        data = self._source.read(stored)
        try:
            found = zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
        except zstandard.ZstdError as e:
            raise CorruptDataError(f"shrinkpoint.lossless: the stream is truncated or altered: {e}") from None
        if len(data) != stored or len(found) != size:
            raise CorruptDataError("shrinkpoint.lossless: a block does not have the length that its header gives")
        return _ungrouped(found, width)


def _grouped(data: bytes, width: int) -> bytes:
    """Return the first bytes of all items, then the second ones, and so on.

    A rest that is shorter than an item stays at the end.
    """
    whole = len(data) // width * width
    return np.frombuffer(data[:whole], np.uint8).reshape(-1, width).T.tobytes() + data[whole:]


def _ungrouped(data: bytes, width: int) -> bytes:
    """Return the inverse of `_grouped`."""
    whole = len(data) // width * width
    return np.frombuffer(data[:whole], np.uint8).reshape(width, -1).T.tobytes() + data[whole:]


def registry() -> ExtensionRegistry:
    """Return a registry of torch's with `Lossless`, for its `FileSystemReader`."""
    found = ExtensionRegistry()
    found.register(Lossless)
    return found
