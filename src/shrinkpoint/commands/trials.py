"""Sizes, seconds and memory of a state at one level, or with another package."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..codec.state.leaves import as_bytes
from .diff import compare, side_of

if TYPE_CHECKING:
    from ..codec.config import Config
    from ..codec.display import Row

T = TypeVar("T")
_RESET = "/proc/self/clear_refs"
_COMPILING = 0.05
"""Share of a call's seconds spent on loading and compiling kernels from which the call is repeated."""
_PIECE = 1 << 23
"""Bytes that a lossless compressor gets at once."""
_ZIPNN = ("float32", "bfloat16", "float16")
"""dtypes that ZipNN compresses as bytes."""
_Coder = Callable[[str, bytes], bytes]
"""Function of the dtype and the bytes of a piece."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds and peak memory of one call.

    Args:
        seconds: wall time.
        peak_nbytes: peak of the process's memory above the memory before the call; None where the system does not
            measure it.
    """

    seconds: float
    peak_nbytes: int | None


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of one level or of one lossless compressor.

    Args:
        name: of the level or the package.
        nbytes: of the compressed state.
        ratio: bytes of the state divided by these.
        compress: seconds and memory to compress.
        restore: seconds and memory to restore.
        errors: relative L2 error of each array that changed, by path.
        rows: `summary()` of the checkpoint; empty for a package.
        delta_nbytes: of the later checkpoint as a delta; None: not measured.
        metric: what the function of the user returned for the restored state; None: not called.
    """

    name: str
    nbytes: int
    ratio: float
    compress: Usage
    restore: Usage
    errors: dict[str, float]
    rows: list[Row]
    delta_nbytes: int | None = None
    metric: float | None = None


def try_level(
    name: str, cfg: Config, state: Any, following: Any, evaluate: Callable[[Any, str], float] | None
) -> Trial:
    """Compress, restore and compare a state.

    Args:
        name: of the level.
        cfg: its configuration.
        state: the state.
        following: a later state of the same run, or None.
        evaluate: called with the restored state and the name, or None.
    """
    from ..codec.checkpoint import Checkpoint, decompress
    from ..codec.compress import compress
    from ..codec.plan import UnknownArraysWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnknownArraysWarning)  # the command says it in its own words
        ckpt, packing = measure(lambda: compress(state, cfg=cfg))
        delta = None if following is None else compress(following, ckpt, cfg).nbytes
    rows, blob, ratio = ckpt.summary(), ckpt.to_bytes(), ckpt.ratio
    del ckpt
    restored, restoring = measure(lambda: decompress(Checkpoint.from_bytes(blob)))
    errors = _errors(state, restored)
    metric = None if evaluate is None else evaluate(restored, name)
    return Trial(name, len(blob), ratio, packing, restoring, errors, rows, delta, metric)


def _errors(state: Any, restored: Any) -> dict[str, float]:
    """Return the relative L2 error of each array that changed; infinite if undefined."""
    changes = compare(side_of(state), side_of(restored))
    return {
        c.path: float("inf") if c.relative_l2 is None or c.relative_l2 != c.relative_l2 else c.relative_l2
        for c in changes
        if c.what != "same"
    }


def packages() -> list[str]:
    """Return the lossless compressors that can be imported, by name."""
    found = []
    with warnings.catch_warnings(), contextlib.suppress(Exception):  # an installed package may not fit this Python
        warnings.simplefilter("ignore")
        for name, module in (("zstd", "zstandard"), ("zipnn", "zipnn")):
            importlib.import_module(module)
            found.append(name)
    return found


def try_package(name: str, state: Any) -> Trial:
    """Compress and restore the bytes of all arrays with a package of `packages`."""
    pack, unpack = _zstd() if name == "zstd" else _zipnn()
    packed, packing = measure(lambda: [(dtype, pack(dtype, data)) for dtype, data in _pieces(state)])

    def restore() -> None:
        for dtype, data in packed:
            unpack(dtype, data)

    _, restoring = measure(restore)
    nbytes, raw = sum(len(data) for _, data in packed), sum(len(data) for _, data in _pieces(state))
    return Trial(name, nbytes, raw / nbytes, packing, restoring, {}, [])


def _pieces(state: Any) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of all arrays, joined by dtype and cut into pieces."""
    of_dtype: dict[str, list[Any]] = {}
    for spec, _, values in side_of(state).arrays.values():
        of_dtype.setdefault(spec.dtype, []).append(values)
    for dtype, arrays in of_dtype.items():
        piece = bytearray()
        for values in arrays:
            data = as_bytes(values()).data
            while len(data):
                room = _PIECE - len(piece)
                piece += data[:room]
                data = data[room:]
                if len(piece) == _PIECE:
                    yield dtype, bytes(piece)
                    piece.clear()
        if piece:
            yield dtype, bytes(piece)


def _zstd() -> tuple[_Coder, _Coder]:
    """Return functions that compress and restore a piece with zstd's default level."""
    import zstandard

    packer, unpacker = zstandard.ZstdCompressor(threads=-1), zstandard.ZstdDecompressor()
    return lambda _, data: packer.compress(data), lambda _, data: unpacker.decompress(data)


def _zipnn() -> tuple[_Coder, _Coder]:
    """Return the same with ZipNN; bytes of dtypes that it does not know stay as they are."""
    made = importlib.import_module("zipnn").ZipNN
    coders = {dtype: made(input_format="byte", bytearray_dtype=dtype) for dtype in _ZIPNN}

    def pack(dtype: str, data: bytes) -> bytes:
        return bytes(coders[dtype].compress(data)) if dtype in coders else data

    def unpack(dtype: str, data: bytes) -> bytes:
        return bytes(coders[dtype].decompress(data)) if dtype in coders else data

    return pack, unpack


def measure(call: Callable[[], T]) -> tuple[T, Usage]:
    """Return the result of a call, and its usage without compilation.

    A call that spends much of its time on loading and compiling kernels is repeated.
    """
    from numba.core import event

    with event.install_listener("numba:compiler_lock", event.RecordingListener()) as listener:  # type: ignore[no-untyped-call]
        result, usage = _once(call)
    if _locked_seconds(listener.buffer) > _COMPILING * usage.seconds:
        del result
        result, usage = _once(call)
    return result, usage


def peak(call: Callable[[], object]) -> int | None:
    """Return the bytes of the peak of a call above those held before; None without Linux."""
    gc.collect()
    return _once(call)[1].peak_nbytes


def _once(call: Callable[[], T]) -> tuple[T, Usage]:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc: free memory that it keeps would hide new allocations
    is_known = os.access(_RESET, os.W_OK)
    if is_known:
        Path(_RESET).write_text("5", encoding="ascii")
    before = _status("VmRSS") if is_known else 0
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    return result, Usage(seconds, max(0, _status("VmHWM") - before) if is_known else None)


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _locked_seconds(events: list[tuple[float, Any]]) -> float:
    """Seconds in which any thread held or awaited Numba's compiler."""
    total, depth, start = 0.0, 0, 0.0
    for when, one in events:
        if one.is_start:
            start = start if depth else when
            depth += 1
        elif depth:
            depth -= 1
            total += 0.0 if depth else when - start
    return total
