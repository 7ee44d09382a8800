"""Other libraries for the same task, imported on use; a missing one becomes a note."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import numpy.typing as npt

from .devices import Device
from .harness import Call, Peer, Target

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

    def histc() -> Call:
        torch = library("torch")
        tensor = torch.from_numpy(x)
        return lambda: torch.histc(tensor, _BINS)

    def torch_quantile() -> Call:
        torch = library("torch")
        tensor, q = torch.from_numpy(some), torch.tensor(QUANTILES)
        return lambda: torch.quantile(tensor, q)

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
        Peer("torch.histc", histc, note=f"{_BINS} even bins"),
        Peer("torch.quantile", torch_quantile, some.nbytes, note=f"5 quantiles {said}"),
        Peer("ddsketch", ddsketch, few.nbytes, note=f"alpha 0.01, {said_few}"),
    ]


def gpu_quantiles(x: Array, percentile: Target) -> list[Peer]:
    """Histograms and quantiles on the GPU; the published system was compared with CuPy's."""
    import torch

    some = x[:_TORCH_QUANTILE_MOST]

    def quantile() -> Call:
        q = torch.tensor(QUANTILES, device=x.device)
        return lambda: torch.quantile(some, q)

    def cupy() -> Call:
        module = library("cupy")
        array, q = module.from_dlpack(x), module.asarray(QUANTILES) * 100
        return lambda: module.percentile(array, q)

    return [
        Peer("torch.histc", lambda: lambda: torch.histc(x, _BINS), note=f"{_BINS} even bins"),
        Peer("torch.quantile", quantile, float(4 * some.numel()), note=f"on {some.numel():,} elements, its limit"),
        Peer("cupy.percentile", cupy, target=percentile),
    ]


def bucketing(device: Device, x: Array, boundaries: npt.NDArray[np.float32], before: npt.NDArray[Any]) -> list[Peer]:
    """Peers that find the nearest code by binary search over the boundaries."""
    import torch

    def bucketize() -> Call:
        tensor = x if device.gpu else torch.from_numpy(x)
        bounds = torch.from_numpy(boundaries).to(tensor.device)
        return lambda: torch.bucketize(tensor, bounds, out_int32=True)

    peers = [Peer("torch.bucketize", bucketize)]
    if not device.gpu:
        some, said = _part(before, 1_000_000)
        search = Peer("np.searchsorted", lambda: lambda: np.searchsorted(boundaries, some), some.nbytes, note=said)
        peers.insert(0, search)
    return peers


def sorting(device: Device, keys: Array) -> list[Peer]:
    """Peers that group values by a stable sort of the keys."""
    import torch

    def torch_sort() -> Call:
        tensor = keys if device.gpu else torch.from_numpy(keys)
        return lambda: torch.sort(tensor, stable=True)

    peers = [Peer("torch.sort", torch_sort)]
    if not device.gpu:
        peers.insert(0, Peer("np.argsort", lambda: lambda: np.argsort(keys, kind="stable"), note="kind='stable'"))
    return peers


def unsorting(device: Device, keys: Any, grouped: Any) -> list[Peer]:
    """Peers that put values back to their positions before a stable sort of the keys."""
    import torch

    def torch_sort() -> Call:
        by, values = (keys, grouped) if device.gpu else (torch.from_numpy(keys), torch.from_numpy(grouped))

        def call() -> object:
            order = torch.sort(by, stable=True).indices
            return torch.empty_like(values).scatter_(0, order, values)

        return call

    def argsort() -> Call:
        def call() -> object:
            out = np.empty_like(grouped)
            out[np.argsort(keys, kind="stable")] = grouped
            return out

        return call

    peers = [Peer("torch.sort", torch_sort, note="sort and scatter")]
    if not device.gpu:
        peers.insert(0, Peer("np.argsort", argsort, note="kind='stable', and scatter"))
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


def zstd_table(table: bytes, *, unpack: bool) -> Peer:
    """Peer that compresses or decompresses a table by zstandard at level 19."""

    def make() -> Call:
        z = library("zstandard")
        compressor = z.ZstdCompressor(level=19)
        if not unpack:
            return lambda: compressor.compress(table)
        packed, out = compressor.compress(table), z.ZstdDecompressor()
        return lambda: out.decompress(packed)

    size = len(library("zstandard").ZstdCompressor(level=19).compress(table))
    return Peer("zstd -19", make, note=f"of {len(table):,} bytes, {size:,} bytes")
