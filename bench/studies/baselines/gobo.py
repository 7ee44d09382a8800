"""GOBO: exact outliers of a layer's Gaussian, and a few centroids for all other weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shrinkpoint.codec.errors import BadArgumentError, CorruptDataError
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.kernels.packing import pack_bits, unpack_bits
from shrinkpoint.kernels.quantizer import Thresholds, assign

from .base import Saved, State
from .parts import Bytes, Floats, Part, each, load, parts, save

Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Gobo:
    """Post-training quantization of each layer: a codebook for the Gaussian part, and outliers.

    Outliers are values whose log probability density under the layer's normal distribution is below `outlier`. The
    centroids start as means of 2**bits groups of equal size; each round assigns to the nearest and takes the means
    again, until the sum of |x - centroid| falls no more. The round of least sum counts.

    Args:
        bits: of a code, 1 to 7; default 3, as published for its larger models.
        outlier: log density, natural; default -4, as published.
        rounds: most rounds; default 1000, as in Inshrinkerator's table 12.

    Raises:
        BadArgumentError: a value out of range.

    Example:
        >>> centroids([0.0, 1.0, 10.0, 11.0], 2, 10).tolist()
        [0.5, 10.5]
    """

    bits: int = 3
    outlier: float = -4.0
    rounds: int = 1000
    name: str = "GOBO"
    source: str = (
        "A. H. Zadeh, I. Edo, O. M. Awad, A. Moshovos: GOBO: Quantizing Attention-Based NLP Models for Low Latency and "
        "Energy Efficient Inference, MICRO 2020, arXiv 2005.03842"
    )
    left_open: str = (
        "it was made for finished models: no delta, no optimizer states (exact here), no entropy coding (codes are "
        "packed). How outliers' positions are stored: gaps here, as bytes, with 255 for 255 and more to come"
    )

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 7:
            raise BadArgumentError(f"bits is {self.bits}; it must be from 1 to 7")
        if math.isnan(self.outlier):
            raise BadArgumentError("outlier is NaN; it must be a log density")
        if self.rounds < 1:
            raise BadArgumentError(f"rounds is {self.rounds}; it must be 1 or more")

    def encode(self, state: State, previous: State | None) -> Saved:
        """See `Baseline.encode`; the previous state is of no use to it."""
        found = parts(state)
        return save(found, each(found.of("weight"), self._encode), {}, None)

    def decode(self, saved: Saved, previous: State | None) -> State:
        """See `Baseline.decode`."""
        return load(saved, None, self._decode)

    def outliers(self, x: Floats) -> npt.NDArray[np.bool_]:
        """Return the mask of outliers."""
        mean, deviation = float(x.mean(dtype=np.float64)), float(x.std(dtype=np.float64))
        if deviation == 0.0:
            return np.zeros(x.size, np.bool_)
        density = -0.5 * ((x - mean) / deviation) ** 2 - math.log(deviation * math.sqrt(2 * math.pi))
        found: npt.NDArray[np.bool_] = density < self.outlier
        return found

    def _encode(self, part: Part) -> bytes:
        x, kept = part.values, self.outliers(part.values)
        places = np.flatnonzero(kept)
        codebook = centroids(x[~kept], 1 << self.bits, self.rounds).astype(np.float32)
        codebook = np.unique(codebook)
        out = Writer()
        out.varint(places.size)
        out.block(_gaps(places))
        out.raw(x[kept].astype("<f4"))
        out.varint(codebook.size)
        out.raw(codebook)
        # The kernel's levels 0 and 1 are for pruned and protected values, which do not occur here.
        codes = assign(x[~kept], Thresholds(), codebook) - 2 if codebook.size else np.zeros(0, np.uint8)
        out.raw(pack_bits(codes.astype(np.uint8), self.bits))
        return out.done()

    def _decode(self, piece: Bytes, spec: LeafSpec, _: Floats | None) -> Floats:
        data = Reader(piece, "GOBO")
        count = data.varint()
        places = _places(data.block(), count)
        if count > spec.size or (count and int(places[-1]) >= spec.size):
            raise CorruptDataError(f"GOBO: {count} outliers up to a place beyond {spec.size} elements")
        kept = np.zeros(spec.size, np.bool_)
        kept[places] = True
        values = np.empty(spec.size, np.float32)
        values[kept] = data.array("<f4", count)
        codebook = data.array("<f4", data.varint())
        codes = unpack_bits(np.frombuffer(data.rest(), np.uint8), self.bits, spec.size - count)
        if codes.size and int(codes.max()) >= codebook.size:
            raise CorruptDataError(f"GOBO: code {int(codes.max())}, the codebook has {codebook.size}")
        values[~kept] = codebook[codes]
        return values


def centroids(x: npt.ArrayLike, count: int, rounds: int) -> Doubles:
    """Fit at most `count` centroids of x by GOBO's iteration, ascending.

    Args:
        x: values, 1-D.
        count: centroids.
        rounds: most rounds.
    """
    values: Doubles = np.sort(np.asarray(x, np.float64))
    if not values.size:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    edges = np.unique(np.linspace(0, values.size, count + 1).round().astype(np.int64))
    codes = np.diff(sums[edges]) / np.diff(edges)
    best, least = codes, math.inf
    for _ in range(rounds):
        # The values nearest to a centroid are a stretch of the sorted ones, up to half-way to the next centroid.
        cuts = np.searchsorted(values, (codes[1:] + codes[:-1]) / 2, side="right")
        edges = np.concatenate([[0], cuts, [values.size]])
        total = _distance(values, sums, edges, codes)
        if not total < least:
            break
        best, least = codes, total
        sizes = np.diff(edges)
        codes = np.where(sizes > 0, np.diff(sums[edges]) / np.maximum(sizes, 1), codes)
    return best


def _distance(values: Doubles, sums: Doubles, edges: npt.NDArray[np.int64], codes: Doubles) -> float:
    """Sum of |x - code| over groups of sorted values."""
    middle = np.clip(np.searchsorted(values, codes), edges[:-1], edges[1:])
    below = codes * (middle - edges[:-1]) - (sums[middle] - sums[edges[:-1]])
    above = sums[edges[1:]] - sums[middle] - codes * (edges[1:] - middle)
    return float((below + above).sum())


def _gaps(places: npt.NDArray[np.int64]) -> bytes:
    """Encode ascending positions as gaps of one byte, where 255 means that more follows."""
    gaps = np.diff(places, prepend=-1) - 1
    out = np.full(int((gaps // 255 + 1).sum()), 255, np.uint8)
    out[np.cumsum(gaps // 255 + 1) - 1] = gaps % 255
    return out.tobytes()


def _places(data: Bytes, count: int) -> npt.NDArray[np.int64]:
    steps = np.frombuffer(data, np.uint8).astype(np.int64)
    ends = np.flatnonzero(steps != 255)
    if (
        ends.size != count
        or (steps.size and ends.size and int(ends[-1]) != steps.size - 1)
        or (steps.size and not count)
    ):
        raise CorruptDataError(f"GOBO: places of {ends.size} outliers, {count} expected")
    found: npt.NDArray[np.int64] = np.cumsum(steps)[ends] + np.arange(count)
    return found
