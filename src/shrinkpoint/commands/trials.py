"""Measure a state at one level, or with a lossless compressor of another package."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .measurement import Usage, measure

if TYPE_CHECKING:
    from ..codec.config import Config
    from ..codec.summary import Row

_PIECE = 1 << 23
"""Bytes that a lossless compressor gets at once."""
_ZIPNN = ("float32", "bfloat16", "float16")
"""dtypes that ZipNN compresses as bytes."""
_Coder = Callable[[str, bytes], bytes]
"""Function of the dtype and the bytes of a piece."""


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
    from .diff import compare, side_of

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
    from ..codec.state.leaves import as_bytes
    from .diff import side_of

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
