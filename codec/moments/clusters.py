"""Optimizer states in 16 clusters by normal quantiles, 8 bits per element (BitSnap).

    x~ = map[code] * scale[label] + minimum[label]

Mean, deviation and clusters are those of a chunk, so that memory stays bounded and cores stay busy. A chunk is

    varint number of clusters m, m float32 minima, m float32 scales,
    a block: symbol stream of the labels (published: 4 bits each),
    a block: symbol stream of the codes (published: 8 bits each), in the context of the labels or alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, choice, integer, number, or_none
from ...kernels.backend.arrays import on_gpu, placed_with
from ...kernels.backend.floats import FORMATS
from ...kernels.cluster import cluster_dequantize, cluster_quantize
from ...kernels.error_sums import Distortion, distortion
from ...kernels.packing import pack_bits
from .. import entropy
from ..base import CHUNK, Leaf, Reference, Stored, Unplanned
from ..errors import BadArgumentError, CorruptDataError
from ..format.fields import Chunk, Reader, Writer, chunks_of
from ..groups import Coded, own_parts
from ..lossless.addends import blocks
from ..lossless.exact import exactly
from ..parallel import map_chunks
from ..state.casting import float_values, largest, rounded
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, from_bytes, on_host
from .logbuckets import ValuesReference
from .symbolvalues import put, sent

MAX_CLUSTERS = 16


_LEAST = 1e-30
"""Largest magnitude of a float64 array below which float32, which clusters are computed in, would lose it."""


@dataclass(frozen=True, slots=True)
class Clusters(Unplanned):
    """Store float arrays by cluster quantization, or exactly if not finite or beyond float32.

    The summary row's note has the mean relative error (over elements that are not zero) and the mean squared error.
    A value within its cluster's lowest 8-bit step becomes the cluster's minimum: small second moments may become zero.

    Args:
        clusters: 1 to 16; default 16.
        coder: "smallest" (default) entropy codes labels and codes; "published" packs them, 4 + 8 bits an element.
        max_error: relative L2 error an array may have, in (0, 1); one that misses it is stored exactly. None:
            `Config.max_rel_error`.

    Raises:
        BadArgumentError: a value out of range; the message names it and its limits.

    Example:
        >>> Clusters(clusters=8)
        Clusters(clusters=8, coder='smallest', max_error=None)

    Source: BitSnap, section 3.4 and algorithm 2.
    """

    clusters: int = MAX_CLUSTERS
    coder: str = "smallest"
    max_error: float | None = None
    id: ClassVar[str] = "clusters"

    def __post_init__(self) -> None:
        check_field(self, "clusters", integer, 1, MAX_CLUSTERS)
        check_field(self, "coder", choice, ("smallest", "published"))
        check_field(self, "max_error", or_none, number, 0, 1, open_low=True, open_high=True)

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; `error` is the relative L2 error."""
        spec = leaf.spec
        if spec.dtype == "float64" and 0.0 < largest(leaf.flat) < _LEAST:
            return exactly(leaf, parent, "too small for float32")

        def one(start: int) -> tuple[bytes, Distortion, float, int] | None:
            x = leaf.flat[start : start + CHUNK]
            try:
                codes, labels, scale, minimum = cluster_quantize(x, self.clusters)
            except BadArgumentError:  # not finite, or too wide for float32
                return None
            met, relative, nonzero = _errors(x, cluster_dequantize(codes, labels, scale, minimum), spec)
            if not math.isfinite(met.squared_error):  # entry * scale + minimum was rounded beyond the largest number
                return None
            piece = _pack(on_host(codes), labels, on_host(scale), on_host(minimum), self.coder)
            return piece, met, relative, nonzero

        parts = map_chunks(one, range(0, spec.size, CHUNK))
        done = [p for p in parts if p is not None]
        if len(done) < len(parts):
            return exactly(leaf, parent, "what is not finite, or would not be, has no cluster")
        met = sum((p[1] for p in done), Distortion(0.0, 0.0, 0.0))
        if self.max_error is not None and met.relative_l2 > self.max_error:
            return exactly(leaf, parent, f"{self.clusters} clusters miss the error target {self.max_error:g}")
        relative = sum(p[2] for p in done) / max(sum(p[3] for p in done), 1)
        note = f"MRE {relative:.3g}, MSE {met.squared_error / max(spec.size, 1):.3g}"
        return Stored("clusters", {}, [p[0] for p in done], None, met.relative_l2, "relative L2", note)


def _errors(x: Array, values: Array, spec: LeafSpec) -> tuple[Distortion, float, int]:
    """Return the distortion in the array's dtype, the sum of relative errors, and their number."""
    if on_gpu(x):
        return _differences(x, values.to(x.dtype))
    data, restored = as_bytes(x), rounded(on_host(values), spec)
    total, relative, nonzero = Distortion(0.0, 0.0, 0.0), 0.0, 0
    for part in blocks(x.shape[0], spec):
        met, more, n = _differences(float_values(data[part], spec), float_values(restored[part], spec))
        total, relative, nonzero = total + met, relative + more, nonzero + n
    return total, relative, nonzero


def _differences(x: Array, y: Array) -> tuple[Distortion, float, int]:
    some = x != 0
    own, other = (a[some].astype(np.float64) if isinstance(a, np.ndarray) else a[some].double() for a in (x, y))
    return distortion(x, y), float(abs((other - own) / own).sum()), int(own.shape[0])


def _pack(codes: NpArray, labels: Array, scale: NpArray, minimum: NpArray, coder: str) -> bytes:
    out = Writer()
    out.varint(scale.size)
    out.raw(minimum.astype("<f4"), scale.astype("<f4"))
    if coder == "published":
        packed = bytes([entropy.PACKED, 4]) + on_host(pack_bits(labels, 4)).tobytes()
        out.block(packed, bytes([entropy.STORED]) + codes.tobytes())
    else:
        contexts = on_host(labels)
        coded = entropy.encode_levels(codes, 256, contexts, max(2, scale.size), "smallest")
        out.block(entropy.encode(contexts), coded)
    return out.done()


def decode_clusters(coded: Coded) -> list[ValuesReference]:
    """Decode the stream format "clusters"."""
    spec, pieces = coded.spec, coded.pieces
    if spec.dtype not in FORMATS:
        raise CorruptDataError(f"clusters: dtype {spec.dtype} cannot be stored in clusters")
    chunks = chunks_of("clusters", pieces, spec.nbytes, spec.nbytes, step=CHUNK * spec.itemsize)
    data = coded.room()

    def one(chunk: Chunk) -> None:
        piece, part = chunk
        start, end = part.start // spec.itemsize, part.stop // spec.itemsize
        values = _unpack(piece, end - start, data)
        put(data, start, values if on_gpu(data) else from_bytes(rounded(values, spec), spec))

    map_chunks(one, chunks)
    return [ValuesReference(flat) for flat in own_parts(data, coded.specs)]


def _unpack(piece: memoryview, n: int, room: Array) -> Array:
    """Return the n values of a chunk as float32 where decoded values are made."""
    data = Reader(piece, "clusters")
    size = data.varint()
    if not 1 <= size <= MAX_CLUSTERS:
        raise CorruptDataError(f"clusters: {size} of them")
    minimum, scale = data.array("<f4", size), data.array("<f4", size)
    if not (np.isfinite(minimum).all() and np.isfinite(scale).all()):
        raise CorruptDataError("clusters: a range is not finite")
    labels = entropy.decode(data.block(), n)
    if int(labels.max(initial=0)) >= size:
        raise CorruptDataError("clusters: a label names no cluster")
    codes = entropy.decode(data.block(), n, labels, max(2, size))
    data.end()
    others = (placed_with(x, room) for x in (scale, minimum))
    return cluster_dequantize(placed_with(codes, room), sent(labels, 4, room), *others)
