"""Exact coders of other libraries, which take an array to bytes and back; imported on use.

Arrays are flat: float32, uint16 for bit patterns of bfloat16, or integers. Each library gets every array by itself, as
its documentation shows it, except that the tiny arrays of a state are joined (`parts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .harness import Call, CheckFailed, Peer, Target
from .peers import library

Array = npt.NDArray[Any]
_TINY = 1024
"""Bytes: smaller arrays are joined before a library gets them."""
_SLOW = {"z4ai": 1 << 25}
"""Bytes after which a slow coder is measured on a part of the arrays, evenly spaced."""


@dataclass(frozen=True)
class Coder:
    """Exact compression by a library: an array to bytes and back."""

    encode: Callable[[Array], Any]
    decode: Callable[[Any], Any]


def _zstd(level: int) -> Callable[[int], Coder]:
    def make(threads: int) -> Coder:
        z = library("zstandard")
        compressor = z.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)
        return Coder(lambda x: compressor.compress(x.view(np.uint8)), z.ZstdDecompressor().decompress)

    return make


def _zipnn(threads: int) -> Coder:
    kinds = {2: "bfloat16", 4: "float32"}
    codecs = {
        size: library("zipnn").ZipNN(input_format="byte", bytearray_dtype=kind, threads=threads)
        for size, kind in kinds.items()
    }
    # A compressed array states its kind, so any of the codecs decompresses it.
    return Coder(lambda x: codecs.get(x.itemsize, codecs[4]).compress(x.tobytes()), codecs[4].decompress)


def _lz4(threads: int) -> Coder:
    frame = library("lz4.frame")
    return Coder(lambda x: frame.compress(x.view(np.uint8)), frame.decompress)


def _blosc2(threads: int) -> Coder:
    blosc2 = library("blosc2")

    def encode(x: Array) -> Any:
        settings = {"codec": blosc2.Codec.ZSTD, "filters": [blosc2.Filter.SHUFFLE], "clevel": 1, "nthreads": threads}
        return blosc2.compress2(x, typesize=x.itemsize, **settings)

    return Coder(encode, lambda packed: blosc2.decompress2(packed, nthreads=threads))


def _pcodec(threads: int) -> Coder:
    standalone, config = library("pcodec.standalone"), library("pcodec").ChunkConfig(enable_8_bit=True)
    return Coder(lambda x: standalone.simple_compress(x, config), standalone.simple_decompress)


def _openzl(threads: int) -> Coder:
    """Exponents by FSE, sign and fraction as they are: a graph of OpenZL's examples."""
    zl = library("openzl.ext")
    nodes, contexts, graphs = {2: zl.nodes.BFloat16Deconstruct, 4: zl.nodes.Float32Deconstruct}, {}, zl.graphs
    for size, node in nodes.items():
        compressor = zl.Compressor()
        compressor.select_starting_graph(node()(compressor, graphs.Store()(compressor), graphs.Fse()(compressor)))
        contexts[size] = _openzl_context(zl, compressor)
    compressor = zl.Compressor()
    compressor.select_starting_graph(graphs.Compress()(compressor))
    generic, reader = _openzl_context(zl, compressor), zl.DCtx()

    def encode(x: Array) -> Any:
        context = contexts[x.itemsize] if x.dtype in (np.float32, np.uint16) else generic
        return context.compress([zl.Input(zl.Type.Numeric, x)])

    return Coder(encode, lambda packed: reader.decompress(packed)[0].content.as_nparray())


def _openzl_context(zl: Any, compressor: Any) -> Any:
    context = zl.CCtx()
    context.ref_compressor(compressor)
    context.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
    context.set_parameter(zl.CParam.StickyParameters, 1)  # else the version holds for one call only
    return context


def _z4ai(threads: int) -> Coder:
    z4ai, kinds = library("z4ai"), {2: "bf16", 4: "fp32"}

    def encode(x: Array) -> Any:
        return z4ai.compress(x.tobytes(), dtype=kinds.get(x.itemsize), threads=threads)

    return Coder(encode, z4ai.decompress)


CODERS: Mapping[str, Callable[[int], Coder]] = {
    "zstd -1": _zstd(1),
    "zstd -3": _zstd(3),
    "zstd -19": _zstd(19),
    "LZ4": _lz4,
    "zipnn": _zipnn,
    "blosc2": _blosc2,
    "pcodec": _pcodec,
    "OpenZL": _openzl,
    "z4ai": _z4ai,
}
"""Each is called with the number of threads, which LZ4, pcodec and OpenZL do not have."""


def parts(arrays: Iterable[Array]) -> list[Array]:
    """Return flat arrays, those below a kilobyte joined as bytes.

    Example:
        >>> [x.size for x in parts([np.zeros((32, 32), np.float32), np.zeros((), np.int64), np.zeros(3, np.uint8)])]
        [1024, 11]
    """
    flat = [np.ascontiguousarray(x).reshape(-1) for x in arrays]
    tiny = [x.view(np.uint8) for x in flat if x.nbytes < _TINY]
    return [x for x in flat if x.nbytes >= _TINY] + ([np.concatenate(tiny)] if tiny else [])


def packed(name: str, arrays: Sequence[Array], threads: int = 1) -> list[Any]:
    """Compress each array by a coder, and check that it comes back.

    Raises:
        ImportError: the library is not installed.
        CheckFailed: other bytes come back.
    """
    coder, found = CODERS[name](threads), []
    for x in arrays:
        found.append(coder.encode(x))
        if memoryview(coder.decode(found[-1])).cast("B") != memoryview(x.view(np.uint8).data):
            raise CheckFailed(f"{name}: other bytes come back")
    return found


def size(name: str, arrays: Sequence[Array]) -> int:
    """Return the bytes of all arrays by a coder, after a check that they come back."""
    return sum(len(part) for part in packed(name, arrays))


def peers(
    arrays: Sequence[Array],
    names: Iterable[str],
    *,
    threads: int = 1,
    decode: bool = False,
    targets: Mapping[str, Target] | None = None,
    note: str = "exact",
) -> list[Peer]:
    """Return a peer a coder, which compresses or decompresses all arrays.

    Args:
        arrays: flat arrays.
        names: keys of `CODERS`.
        threads: of a library that has some.
        decode: measure decompression.
        targets: by name.
        note: of every peer.
    """

    amount = sum(x.nbytes for x in arrays)

    def peer(name: str) -> Peer:
        step = 1 + amount // _SLOW.get(name, 1 << 62)
        some = arrays[::step]

        def make() -> Call:
            coder, stored = CODERS[name](threads), packed(name, some, threads)
            if decode:
                return lambda: [coder.decode(x) for x in stored]
            return lambda: [coder.encode(x) for x in some]

        said = note if step == 1 else f"{note}, on one of {step} arrays"
        return Peer(name, make, float(sum(x.nbytes for x in some)), (targets or {}).get(name), said)

    return [peer(name) for name in names]
