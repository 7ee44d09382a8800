"""Blocks of symbols that are coded on their device, those of a whole state at once.

A program of a GPU codes a block no faster than a thread of the host does; the GPU codes many at a time. So a block of
symbols on a GPU waits until the bytes of one are needed, and then all are coded together. A setting, off by default,
lets a GPU code the symbols of its arrays.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np

from ...kernels.backend.arrays import Array, device_of, is_torch, on_gpu, placed_with, to_host
from ...kernels.levels import joint_counts
from ...kernels.rans import WIDE_PRECISION, Block, rans_decode_many, rans_encode_many
from ..errors import BadArgumentError
from ..format.fields import Bytes, Piece, Reader, Writer
from .plain import CONDITIONAL, CONSTANT, RANS, STORED, UNCHANGED
from .table import I64, U8, Table, array, least_stream, read_table

VARIABLE = "SHRINKPOINT_DEVICE_CODING"
LEAST = 1 << 16
"""Symbols from which a block is coded on a GPU: one takes as long there as thousands of others at the same time."""
_place: ContextVar[Any] = ContextVar("device that decodes blocks", default=None)
_is_on: bool | None = None
"""What `set_device_coding` set."""
_MOST = 1 << 28
"""Symbols that are coded at once; their words take twice as many bytes."""
_lock = threading.Lock()
_waiting: list[weakref.ref[CodedBlock]] = []


def device_coding() -> bool:
    """Return whether a GPU codes the symbols of arrays on it.

    Raises:
        BadArgumentError: the environment variable SHRINKPOINT_DEVICE_CODING is neither 0 nor 1.
    """
    if _is_on is not None:
        return _is_on
    text = os.environ.get(VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise BadArgumentError(f"the environment variable {VARIABLE} is {text[:40]!r}; it must be 0 or 1")
    return text == "1"


def is_large(n: int) -> bool:
    """Return whether a GPU should work on n symbols by themselves."""
    return n >= LEAST


def is_block(n: int) -> bool:
    """Return whether n symbols are coded as a block that a GPU could code."""
    return is_large(n) and device_coding()


def set_device_coding(on: bool | None) -> None:
    """Set whether a GPU codes symbols.

    Blocks of 65,536 symbols and more of quantized weights and of moments are then coded by rANS with 64 states, or
    stored, wherever the array lies: the bytes depend on the setting, not on the device. Every reader reads them.

    Args:
        on: None goes back to the environment variable SHRINKPOINT_DEVICE_CODING.
    """
    global _is_on
    _is_on = on


@contextmanager
def decoding_near(outputs: Iterable[Any]) -> Iterator[None]:
    """Context in which blocks are decoded on the GPU of the first output that lies on one.

    Without such an output, or with the setting off, the host decodes them. All threads write to outputs on the default
    streams of their GPUs, after what the caller began there; at the end the outputs are complete.
    """
    devices = list(dict.fromkeys(x.device for x in outputs if is_torch(x) and on_gpu(x)))
    token = _place.set(devices[0] if devices and device_coding() else None)
    try:
        with _default_streams([device for device in devices if device.type == "cuda"]):
            yield
    finally:
        _place.reset(token)


@contextmanager
def _default_streams(devices: Sequence[Any]) -> Iterator[None]:
    """Context in which this thread, as any new one, uses default streams; waits at both ends."""
    with ExitStack() as stack:
        for device in devices:
            import torch

            torch.cuda.synchronize(device)
            stack.callback(torch.cuda.synchronize, device)
            stack.enter_context(torch.cuda.stream(torch.cuda.default_stream(device)))
        yield


def decoding_device() -> Any:
    """Return the torch device that decodes blocks here; None: the host does."""
    return _place.get()


class CodedBlock:
    """The stream of a block of symbols: constant, unchanged, by rANS with 64 states, or stored.

    Args:
        symbols: uint8 (n,), on the host or on a GPU; must not change.
        context: uint8 (n,), values below `contexts`, on the host; or None.
        contexts: 2 to 256.
        counts: int64 [256], number of each symbol, if known and without a context.
    """

    def __init__(self, symbols: Array, context: Array | None = None, contexts: int = 2, counts: I64 | None = None):
        self.symbols, self.context, self._contexts, self._counts = symbols, context, contexts, counts
        self._parts: tuple[Bytes, ...] | None = None
        self.most = int(symbols.shape[0]) + 1
        """Bytes that it takes at most, known before it is coded."""
        if on_gpu(symbols):
            with _lock:
                _waiting.append(weakref.ref(self))
        else:
            _code([self])

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts())

    def parts(self) -> tuple[Bytes, ...]:
        """Return the bytes, in order, as separate buffers."""
        if self._parts is None:
            with _lock:
                waiting = [block for known in _waiting if (block := known()) is not None]
                _waiting.clear()
                try:
                    for some in _batches(waiting):
                        _code(some)
                finally:
                    _waiting.extend(weakref.ref(block) for block in waiting if block._parts is None)
        assert self._parts is not None
        return self._parts

    def begun(self) -> tuple[Writer, Block | None]:
        """Return the start of the stream, and what rANS codes after it, if it does."""
        n, symbols, context = self.most - 1, self.symbols, self.context
        context = context if context is None else placed_with(context, symbols)
        counts = self._counts[None, :] if self._counts is not None else _pairs(symbols, context, self._contexts)
        total = counts.sum(axis=0)
        if context is not None and int(np.trace(counts)) == n:
            return Writer(UNCHANGED), None
        if np.count_nonzero(total) <= 1:
            return Writer(CONSTANT, bytes([int(total.argmax())])), None
        table, given = Table(total[None, :], WIDE_PRECISION, 1).widened(), None
        if context is not None and least_stream(counts) < table.cost:
            given = Table(counts, WIDE_PRECISION, self._contexts).widened()
        if given is not None and given.cost < table.cost:
            table = given
        else:
            context = None
        if table.cost >= n:
            return Writer(STORED, to_host(symbols)), None
        out = Writer(RANS if context is None else CONDITIONAL)
        table.write_head(out)
        return out, Block(symbols, context, table.frequencies)

    def finish(self, parts: tuple[Bytes, ...]) -> None:
        """Set the bytes, and let go of the symbols."""
        self._parts = parts
        self.symbols = self.context = self._counts = None


def _pairs(symbols: Array, context: Array | None, contexts: int) -> I64:
    """Return the counts of each pair of context and symbol; a single row without a context."""
    if context is None:
        zeros = np.zeros(symbols.shape[0], np.uint8) if isinstance(symbols, np.ndarray) else symbols * 0
        return to_host(joint_counts(zeros, symbols, 2, 256))[:1]
    return to_host(joint_counts(context, symbols, contexts, 256))


def _batches(blocks: Sequence[CodedBlock]) -> list[list[CodedBlock]]:
    """Return the blocks that are coded together: those of one device, and not too many symbols."""
    found: list[list[CodedBlock]] = []
    for block in sorted(blocks, key=lambda block: device_of(block.symbols)):
        last = found[-1] if found else []
        full = sum(other.most for other in last) + block.most > _MOST
        if not last or full or device_of(last[0].symbols) != device_of(block.symbols):
            found.append(last := [])
        last.append(block)
    return found


def _code(blocks: Sequence[CodedBlock]) -> None:
    """Code blocks of one device together."""
    begun = [block.begun() for block in blocks]
    coded = iter(_on_host(rans_encode_many([rest for _, rest in begun if rest is not None])))
    for block, (out, rest) in zip(blocks, begun, strict=True):
        if rest is not None:
            out.raw(next(coded))
        block.finish(out.parts())


def _on_host(arrays: Sequence[Array]) -> Sequence[Array]:
    """Return arrays on the host, from a GPU in a single copy."""
    if not arrays or not is_torch(arrays[0]):
        return arrays
    import torch

    return np.split(to_host(torch.cat(list(arrays))), np.cumsum([x.shape[0] for x in arrays])[:-1])


def decoded_there(streams: Sequence[tuple[memoryview, int, U8 | None]], contexts: int) -> list[U8 | None]:
    """Return the symbols of the streams that the device of `decoding_near` decodes, else None.

    They are decoded all at once.

    Args:
        streams: coded bytes, number of symbols and context of each.
        contexts: number of contexts.

    Raises:
        CorruptDataError: the bytes are not such a stream.
    """
    found: list[U8 | None] = [None] * len(streams)
    place, blocks = decoding_device(), dict[int, Block]()
    for k, (data, n, context) in enumerate(streams if place is not None else ()):
        reader = Reader(data, "symbols")
        method = reader.byte()
        if not is_block(n) or method not in (RANS, CONDITIONAL) or (method == CONDITIONAL and context is None):
            continue
        given = context if method == CONDITIONAL else None
        table, precision, states = read_table(reader, 1 if given is None else contexts, n)
        blocks[k] = Block(array(reader.rest()), given, table, precision, states)
    if blocks:
        bytes_of = _placed([block.data for block in blocks.values()], place)
        given_of = iter(_placed([block.contexts for block in blocks.values() if block.contexts is not None], place))
        moved = [
            replace(block, data=data, contexts=None if block.contexts is None else next(given_of))
            for block, data in zip(blocks.values(), bytes_of, strict=True)
        ]
        decoded = _on_host(rans_decode_many(moved, [streams[k][1] for k in blocks]))
        for k, symbols in zip(blocks, decoded, strict=True):
            found[k] = symbols
    return found


def _placed(arrays: Sequence[U8], place: Any) -> Sequence[Array]:
    """Return copies of arrays on a torch device, in a single transfer."""
    if not arrays:
        return ()
    import torch

    return torch.split(torch.from_numpy(np.concatenate(arrays)).to(place), [x.size for x in arrays])


class Later:
    """A piece that is written when its bytes are first needed.

    Args:
        write: returns it.
    """

    def __init__(self, write: Callable[[], Writer]) -> None:
        self._write: Callable[[], Writer] | None = write
        self._parts: tuple[Bytes, ...] = ()

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts())

    def parts(self) -> tuple[Bytes, ...]:
        """Return the bytes, in order, as separate buffers."""
        if self._write is not None:
            self._parts, self._write = self._write().parts(), None
        return self._parts


def most_bytes(piece: Piece) -> int:
    """Return how many bytes a piece has at most, without coding it."""
    return piece.most if isinstance(piece, CodedBlock) else len(piece)
