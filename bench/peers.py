"""Other libraries for the same tasks, imported on use; a missing one becomes a note."""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
import multiprocessing
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from . import data
from .harness import Call, CheckFailed, Device, Peer, Target

Array = Any
QUANTILES = (0.0005, 0.05, 0.5, 0.95, 0.9995)
_BINS = 2048
_TORCH_QUANTILE_MOST = 16_000_000


def library(name: str) -> Any:
    """Import a module that may be missing; the ImportError names it."""
    return importlib.import_module(name)


def _part(x: npt.NDArray[Any], most: int) -> tuple[npt.NDArray[Any], str]:
    """At most `most` elements, for slow peers, and a remark about it."""
    return x[:most], f"on the first {most:,} elements" if x.size > most else ""


def host_quantiles(x: npt.NDArray[np.float32]) -> list[Peer]:
    """Histograms and quantiles on the CPU."""
    some, said = _part(x, 1_000_000)
    few, said_few = _part(x, 20_000)

    def ddsketch() -> Call:
        sketch = library("ddsketch").DDSketch
        values = few.tolist()

        def call() -> object:
            found = sketch(0.01)
            for value in values:
                found.add(value)
            return found

        return call

    return [
        Peer("np.histogram", lambda: lambda: np.histogram(some, _BINS), some.nbytes, note=f"{_BINS} even bins {said}"),
        Peer("np.quantile", lambda: lambda: np.quantile(some, QUANTILES), some.nbytes, note=f"5 quantiles {said}"),
        Peer("torch.histc", lambda: partial(torch.histc, torch.from_numpy(x), _BINS), note=f"{_BINS} even bins"),
        Peer("torch.quantile", lambda: _torch_quantiles(some), some.nbytes, note=f"5 quantiles {said}"),
        Peer("ddsketch", ddsketch, few.nbytes, note=f"alpha 0.01, {said_few}"),
    ]


def gpu_quantiles(x: Array, percentile: Target) -> list[Peer]:
    """Histograms and quantiles on the GPU; the published system was compared with CuPy's."""
    some = x[:_TORCH_QUANTILE_MOST]

    def cupy() -> Call:
        module = library("cupy")
        array, q = module.from_dlpack(x), module.asarray(QUANTILES) * 100
        return lambda: module.percentile(array, q)

    return [
        Peer("torch.histc", lambda: partial(torch.histc, x, _BINS), note=f"{_BINS} even bins"),
        Peer(
            "torch.quantile", lambda: _torch_quantiles(some), 4.0 * some.numel(),
            note=f"on {some.numel():,} elements, its limit",
        ),
        Peer("cupy.percentile", cupy, target=percentile),
    ]  # fmt: skip


def _torch_quantiles(x: Any) -> Call:
    values = torch.as_tensor(x)
    return partial(torch.quantile, values, torch.tensor(QUANTILES, device=values.device))


def bucketing(device: Device, x: Array, boundaries: npt.NDArray[np.float32], before: npt.NDArray[Any]) -> list[Peer]:
    """Peers that find the nearest code by binary search over the boundaries."""

    def bucketize() -> Call:
        tensor = torch.as_tensor(x)
        return partial(torch.bucketize, tensor, torch.from_numpy(boundaries).to(tensor.device), out_int32=True)

    peers = [Peer("torch.bucketize", bucketize)]
    if not device.gpu:
        some, said = _part(before, 1_000_000)
        search = Peer("np.searchsorted", lambda: lambda: np.searchsorted(boundaries, some), some.nbytes, note=said)
        peers.insert(0, search)
    return peers


def sorting(device: Device, keys: Array) -> list[Peer]:
    """Peers that group values by a stable sort of the keys."""
    peers = [Peer("torch.sort", lambda: partial(torch.sort, torch.as_tensor(keys), stable=True))]
    if not device.gpu:
        peers.insert(0, Peer("np.argsort", lambda: lambda: np.argsort(keys, kind="stable"), note="kind='stable'"))
    return peers


def unsorting(device: Device, keys: Any, grouped: Any) -> list[Peer]:
    """Peers that put values back to their positions before a stable sort of the keys."""

    def torch_sort() -> Call:
        by, values = torch.as_tensor(keys), torch.as_tensor(grouped)

        def call() -> object:
            order = torch.sort(by, stable=True).indices
            return torch.empty_like(values).scatter_(0, order, values)

        return call

    def argsort() -> object:
        out = np.empty_like(grouped)
        out[np.argsort(keys, kind="stable")] = grouped
        return out

    peers = [Peer("torch.sort", torch_sort, note="sort and scatter")]
    if not device.gpu:
        peers.insert(0, Peer("np.argsort", lambda: argsort, note="kind='stable', and scatter"))
    return peers


def entropy_coders(levels: npt.NDArray[np.uint8], counts: npt.NDArray[np.int64], *, decode: bool) -> list[Peer]:
    """Coders of independent symbols: zstd's Huffman stage, a Python Huffman, constriction's ANS."""
    some, said = _part(levels, 1_000_000)
    few, said_few = _part(levels, 20_000)
    present = np.flatnonzero(counts)

    def zstd() -> Call:
        z = library("zstandard")
        # Matches of 7 bytes or more hardly occur: the Huffman stage remains.
        parameters = z.ZstdCompressionParameters.from_level(1, min_match=7, hash_log=6, strategy=z.STRATEGY_FAST)
        compressor = z.ZstdCompressor(compression_params=parameters)
        data = levels.tobytes()
        if not decode:
            return lambda: compressor.compress(data)
        packed, out = compressor.compress(data), z.ZstdDecompressor()
        return lambda: out.decompress(packed)

    def dahuffman() -> Call:
        codec = library("dahuffman").HuffmanCodec.from_frequencies({int(s): int(counts[s]) for s in present})
        symbols = few.tolist()
        if not decode:
            return lambda: codec.encode(symbols)
        packed = codec.encode(symbols)
        return lambda: codec.decode(packed)

    def constriction() -> Call:
        stream = library("constriction").stream
        model = stream.model.Categorical((counts / counts.sum()).astype(np.float64), perfect=False)
        symbols = some.astype(np.int32)

        def packed() -> npt.NDArray[np.uint32]:
            coder = stream.stack.AnsCoder()
            coder.encode_reverse(symbols, model)
            words: npt.NDArray[np.uint32] = coder.get_compressed()
            return words

        if not decode:
            return packed
        words = packed()
        return lambda: stream.stack.AnsCoder(words).decode(model, symbols.size)

    return [
        Peer("zstd entropy stage", zstd, note="level 1, matches of 7 bytes or more only"),
        Peer("dahuffman", dahuffman, few.size, note=said_few),
        Peer("constriction", constriction, some.size, note=f"ANS, not conditional, {said}"),
    ]


def raw_kmeans(x: npt.NDArray[np.float32], k: int, target: Target | None = None, *, iterations: int = 20) -> list[Peer]:
    """k-means on the raw values, as others fit codebooks; the calls return the centers.

    Args:
        x: values.
        k: number of centers.
        target: of both.
        iterations: of scikit-learn, at most; faiss has 20.
    """
    points = np.ascontiguousarray(x[:, None])

    def sklearn() -> Call:
        kind = library("sklearn.cluster").KMeans
        return lambda: kind(k, n_init=1, max_iter=iterations, random_state=0).fit(points).cluster_centers_

    def faiss() -> Call:
        module = library("faiss")
        module.omp_set_num_threads(1)

        def call() -> object:
            fit = module.Kmeans(1, k, niter=20, seed=0, max_points_per_centroid=points.shape[0])
            fit.train(points)
            return fit.centroids

        return call

    makes = {"scikit-learn": sklearn, "faiss": faiss}
    return [Peer(name, make, target=target, note="20 iterations") for name, make in makes.items()]


def zstd_table(table: npt.NDArray[Any], *, unpack: bool) -> list[Peer]:
    """Compress or decompress a table by zstandard at level 19."""
    plain = table.reshape(-1).view(np.uint8)
    note = f"of {plain.size:,} bytes, {coded_size('zstd -19', [plain]):,} bytes"
    return coder_peers([plain], ("zstd -19",), decode=unpack, note=note)


# ----------------------------------------------------------------------------------------------------- coders of arrays

# Arrays are flat: float32, uint16 for bit patterns of bfloat16, or integers. Each library gets every array by itself,
# as its documentation shows it, except that the tiny arrays of a state are joined (`flat_parts`).

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


def flat_parts(arrays: Iterable[Array]) -> list[Array]:
    """Return flat arrays, those below a kilobyte joined as bytes.

    Example:
        >>> some = [np.zeros((32, 32), np.float32), np.zeros((), np.int64), np.zeros(3, np.uint8)]
        >>> [x.size for x in flat_parts(some)]
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


def coded_size(name: str, arrays: Sequence[Array]) -> int:
    """Return the bytes of all arrays by a coder, after a check that they come back."""
    return sum(len(part) for part in packed(name, arrays))


def coder_peers(
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


# ----------------------------------------------------------------------------------------------------- savers of states
TORCH, DURABLE = "torch.save", "torch.save + fsync"
DCP, MOONCLIP = "DCP", "moonclip"
DCP_THREAD, DCP_PROCESS = "DCP async_save, thread", "DCP async_save, process"
ORBAX = "Orbax AsyncCheckpointer"
Arrays = dict[str, Any]


def tensors(state: Any) -> Arrays:
    """Return the arrays of a state by path as torch tensors, as every library can store them."""
    return {path: torch.from_numpy(np.array(x)) for path, x in data.arrays(state)}


def equal(a: Arrays, b: Arrays) -> bool:
    """Return whether two sets of arrays are equal bit for bit."""
    return set(a) == set(b) and all(
        x.shape == b[n].shape and x.dtype == b[n].dtype and x.numpy().tobytes() == b[n].numpy().tobytes()
        for n, x in a.items()
    )


@dataclass(frozen=True)
class Other:
    """Another library: how it saves arrays below a path, and how it loads them again."""

    name: str
    save: Callable[[Arrays, Path], object]
    load: Callable[[Arrays, Path], Any]


def checked_calls(other: Other, arrays: Arrays, path: Path) -> tuple[Call, Call]:
    """Return the calls by which a library saves and loads arrays, once they have come back.

    Raises:
        CheckFailed: other arrays come back.
    """
    other.save(arrays, path)
    if not equal(arrays, other.load(arrays, path)):
        raise CheckFailed(f"{other.name}: other arrays come back")
    return partial(other.save, arrays, path), partial(other.load, arrays, path)


def torch_save(state: Any, path: Path, *, durable: bool = False) -> None:
    """Save by `torch.save`, with `durable` also to the disk."""
    with path.open("wb") as file:
        torch.save(state, file)
        if durable:
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def _quiet() -> Iterator[Any]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield library("torch.distributed.checkpoint")


def _dcp_save(arrays: Arrays, path: Path, *, zstd: bool = False) -> None:
    more: dict[str, Any] = {}
    with _quiet() as dcp:
        if zstd:
            extension = library("torch.distributed.checkpoint._extension").ZStandard()
            more["storage_writer"] = dcp.FileSystemWriter(path, _extensions=[extension])
        dcp.save(arrays, checkpoint_id=path, **more)


def _dcp_load(arrays: Arrays, path: Path) -> Any:
    into = {name: torch.zeros_like(x) for name, x in arrays.items()}
    with _quiet() as dcp:
        dcp.load(into, checkpoint_id=path)
    return into


def _npz_save(arrays: Arrays, path: Path) -> None:
    named: Arrays = {f"a{i}": x.numpy() for i, x in enumerate(arrays.values())}
    np.savez(path.with_name(f"{path.name}.npz"), **named)


def _npz_load(arrays: Arrays, path: Path) -> Any:
    with np.load(path.with_name(f"{path.name}.npz")) as found:
        return {name: torch.from_numpy(found[f"a{i}"]) for i, name in enumerate(arrays)}


def _moonclip_save(arrays: Arrays, path: Path) -> None:
    # Over an earlier snapshot it would store only changed arrays, and here nothing changes.
    shutil.rmtree(path, ignore_errors=True)
    library("moonclip").MoonclipManager(str(path), async_save=False).save_tensors(0, arrays)


def _moonclip_load(arrays: Arrays, path: Path) -> Any:
    found = library("moonclip").MoonclipManager(str(path), async_save=False).load_latest()[1]
    return {name: torch.frombuffer(found[name], dtype=x.dtype).reshape(x.shape) for name, x in arrays.items()}


def _torch_load(_: Arrays, path: Path) -> Any:
    return torch.load(path, weights_only=True)


OTHERS = (
    Other(TORCH, torch_save, _torch_load),
    Other(DURABLE, partial(torch_save, durable=True), _torch_load),
    Other(
        "safetensors",
        lambda arrays, path: library("safetensors.torch").save_file(arrays, path),
        lambda _, path: library("safetensors.torch").load_file(path),
    ),
    Other(DCP, _dcp_save, _dcp_load),
    Other("DCP with zstd", partial(_dcp_save, zstd=True), _dcp_load),
    Other("npz", _npz_save, _npz_load),
    Other(MOONCLIP, _moonclip_save, _moonclip_load),
)
UNSYNCED = tuple(other for other in OTHERS if other.name != DURABLE)
"""Those whose files differ."""


# ------------------------------------------------------------------------------------------------------- asynchronous

Begin = Callable[[Any], Callable[[], object]]
"""Begins to save a state, and returns the call that waits until it is durable."""


def beginner(name: str, root: Path, stack: contextlib.ExitStack) -> Begin:
    """Return the function by which a library begins a save below a folder.

    Args:
        name: `TORCH`, `DURABLE`, `DCP_THREAD`, `DCP_PROCESS` or `ORBAX`.
        root: of all its files, each save in its own.
        stack: ends what the library starts.
    """
    number = itertools.count()

    def path() -> Path:
        return root / f"peer-{name.replace(' ', '')}-{next(number)}"

    if name in (TORCH, DURABLE):

        def torch_begin(state: Any) -> Callable[[], object]:
            torch_save(state, path(), durable=name == DURABLE)
            return lambda: None

        return torch_begin
    if name == ORBAX:
        ocp = library("orbax.checkpoint")
        orbax = stack.enter_context(ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()))

        def orbax_begin(state: Any) -> Any:
            orbax.save(path(), _as_numpy(state))
            return orbax.wait_until_finished

        return orbax_begin
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    if not dist.is_initialized():
        dist.init_process_group("gloo", f"file://{root}/meet", rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
    how = AsyncCheckpointerType.PROCESS if name == DCP_PROCESS else AsyncCheckpointerType.THREAD

    def dcp_begin(state: Any) -> Any:
        future: Any = dcp.async_save(state, checkpoint_id=str(path()), async_checkpointer_type=how)  # type: ignore[attr-defined]
        return future.result

    return dcp_begin


def remove_saved(root: Path) -> None:
    """Remove the files that such saves left below a folder."""
    for old in root.glob("peer-*"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def pids(name: str) -> list[int]:
    """Return the processes that a library's saves take place in."""
    return [os.getpid(), *(p.pid for p in multiprocessing.active_children() if p.pid and name == DCP_PROCESS)]


def _as_numpy(state: Any) -> Any:
    """Return a state with NumPy arrays, which share the memory, in the place of tensors."""
    if isinstance(state, dict):
        return {str(key): _as_numpy(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [_as_numpy(value) for value in state]
    return state.numpy() if hasattr(state, "numpy") else state
