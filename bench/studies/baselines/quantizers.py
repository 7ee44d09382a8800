"""Baselines that quantize each array by itself, and their search spaces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import zstandard

from shrinkpoint.codec.entropy import counts_of, decode, encode_huffman
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.kernels.histogram import log_histogram
from shrinkpoint.kernels.levels import delta, undelta
from shrinkpoint.kernels.packing import pack_bits, unpack_bits
from shrinkpoint.kernels.rans import entropy_bits

from .parts import Baseline, Bytes, Floats, Grid, Part, Parts, Saved, State, before, each, load, parts, save

Doubles = npt.NDArray[np.float64]
Range = tuple[float, float]
_ZSTD_LEVEL = 9


@dataclass(frozen=True)
class Naive8Bit:
    """Per-tensor uniform 8-bit quantization, no delta.

    Source: the yardstick of BitSnap, section 5.1: 'naive 8-bit quantization just packs tensor values into range [0,
    255]'.

    Left open: whether the range is a tensor's or a block's (a tensor's here), rounding (to nearest), entropy coding
    (zstandard here), and what training does with second moments that became zero.

    Args:
        moments: quantize Adam's moments in the same way (as the comparison was published); default False: exact, for
            second moments below 1/510 of the largest become zero and the next step divides by them.

    Example:
        >>> Naive8Bit().name
        'naive 8-bit'
    """

    moments: bool = False

    @property
    def name(self) -> str:
        """Name in tables."""
        return "naive 8-bit, moments too" if self.moments else "naive 8-bit"

    def encode(self, state: State, previous: State | None) -> Saved:
        """See `Baseline.encode`; the previous state is of no use to it."""
        found = parts(state)
        roles = ("weight", "first moment", "second moment") if self.moments else ("weight",)
        return save(found, each((part for role in roles for part in found.of(role)), self._encode))

    def decode(self, saved: Saved, previous: State | None) -> State:
        """See `Baseline.decode`."""
        return load(saved, None, _naive, _naive)

    def _encode(self, part: Part) -> bytes:
        grid = Grid.over(part.values, 256)
        out = Writer()
        out.raw(np.array([grid.low, grid.high], "<f4"))
        out.raw(zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(grid.levels(part.values).tobytes()))
        return out.done()


def _naive(piece: Bytes, spec: LeafSpec, _: Floats | None) -> Floats:
    data = Reader(piece, "naive 8-bit")
    low, high = data.array("<f4", 2)
    plain = zstandard.ZstdDecompressor().decompress(data.rest(), max_output_size=spec.size)
    return Grid(float(low), float(high), 256).values(np.frombuffer(plain, np.uint8))


@dataclass(frozen=True)
class Sketch:
    """The input of the greedy search: a tensor's histogram (error 1/128) and range.

    Args:
        values, counts: of the nonempty buckets.
        low, high: smallest and largest value.
    """

    values: npt.NDArray[np.float64]
    counts: npt.NDArray[np.int64]
    low: float
    high: float

    @staticmethod
    def of(x: Floats) -> Sketch:
        """Build the sketch of a tensor."""
        histogram = log_histogram(x, 6, signed=True)
        met = np.flatnonzero(histogram.counts[:-1])
        return Sketch(histogram.values()[met], histogram.counts[met], float(x.min()), float(x.max()))

    def loss(self, low: float, high: float, bins: int) -> float:
        """Squared error of even bins in a range."""
        width = (high - low) / (bins - 1)
        if width <= 0:
            return float("inf")
        codes = np.clip(np.rint((self.values - low) / width), 0, bins - 1)
        return float((self.counts * (self.values - (low + codes * width)) ** 2).sum())


def greedy_ranges(sketch: Sketch, bins: int, steps: int, ratios: Sequence[float]) -> list[Range]:
    """Return the best range of Check-N-Run's greedy search by each ratio.

    Args:
        sketch: of the tensor.
        bins: grid values in the range.
        steps: parts that the range is cut into.
        ratios: shares of the range that are walked through, ascending.
    """
    step = (sketch.high - sketch.low) / steps
    a, b = best = sketch.low, sketch.high
    least = sketch.loss(a, b, bins)
    found = []
    for ratio in ratios:
        while b - a > (1 - ratio) * (sketch.high - sketch.low) + step / 2:
            left, right = sketch.loss(a + step, b, bins), sketch.loss(a, b - step, bins)
            a, b = (a + step, b) if left < right else (a, b - step)
            if min(left, right) < least:
                best, least = (a, b), min(left, right)
        found.append(best)
    return found


@dataclass(frozen=True)
class Adaptive:
    """Even bins in a range narrowed by a greedy search, for each layer, without a delta.

    Source: A. Eisenman, K. Matam, S. Ingram, D. Mudigere, R. Krishnamoorthi, K. Nair, M. Smelyanskiy, M. Annavaram:
    Check-N-Run: a Checkpointing System for Training Deep Learning Recommendation Models, NSDI 2022; on dense layers
    as in Inshrinkerator, section 8.2 and table 11.

    Left open: one range a layer (a row of a table in Check-N-Run); codes are packed without an entropy coder;
    moments are not its subject: exact here.

    Args:
        bins: of a layer, a power of two from 8 to 256.
        steps: that the search cuts a range into.
        walked: largest share of the range that the search walks through, in (0, 1).

    Example:
        >>> Adaptive(16).name
        'Adaptive'
    """

    bins: int = 16
    steps: int = 25
    walked: float = 0.5
    name: str = "Adaptive"

    def encode(self, state: State, previous: State | None) -> Saved:
        """See `Baseline.encode`; the previous state is not used."""
        found = parts(state)
        return save(found, each(found.of("weight"), self._encode))

    def decode(self, saved: Saved, previous: State | None) -> State:
        """See `Baseline.decode`."""
        return load(saved, None, _adaptive)

    def _encode(self, part: Part) -> bytes:
        ((low, high),) = greedy_ranges(Sketch.of(part.values), self.bins, self.steps, (self.walked,))
        width = self.bins.bit_length() - 1
        out = Writer()
        out.varint(width)
        out.raw(np.array([low, high], "<f4"))
        out.raw(pack_bits(Grid(low, high, self.bins).levels(part.values), width))
        return out.done()


def _adaptive(piece: Bytes, spec: LeafSpec, _: Floats | None) -> Floats:
    data = Reader(piece, "Adaptive")
    width = data.varint()
    low, high = data.array("<f4", 2)
    levels = unpack_bits(np.frombuffer(data.rest(), np.uint8), width, spec.size)
    return Grid(float(low), float(high), 1 << width).values(levels)


@dataclass(frozen=True)
class QDCompressor:
    """Entropy-based variable-width uniform quantization, cyclic differences of levels, Huffman.

    A layer's values are put on 256 even levels over its range; with H their entropy in bits, it gets 2**ceil(H) bins,
    at least `least` and at most `most`.

    Source: S. Zhang, D. Wu, H. Jin, X. Zou, W. Xia, X. Huang: QD-Compressor: a Quantization-based Delta Compression
    Framework for Deep Neural Networks, ICCD 2021; as re-implemented in Inshrinkerator, section 8.2 (cited there as
    Jin et al. 2023).

    Left open: the rule from entropy to width is not in the abstract, nor in Inshrinkerator: ours is above. Deltas
    between layers whose bins changed: the previous restored values are put on the new grid, which both sides can
    do. Its error feedback is left out, for it needs the exact previous state, which a restored run has no longer.
    Optimizer states are not its subject: exact here.

    Args:
        least, most: bins of a layer, powers of two from 2 to 256 (the two axes of its search space in Inshrinkerator's
            table 10, which has 8 to 256).

    Example:
        >>> QDCompressor(least=16).name
        'QD-compressor'
    """

    least: int = 8
    most: int = 256
    name: str = "QD-compressor"

    def bins(self, x: Floats) -> int:
        """Return the number of bins of a layer."""
        return self.within(wanted_bins(x))

    def within(self, bins: int) -> int:
        """Return the number of bins of a layer, limited to the allowed range."""
        return min(max(bins, self.least), self.most)

    def encode(self, state: State, previous: State | None) -> Saved:
        """See `Baseline.encode`."""
        found, parent = parts(state), None if previous is None else parts(previous)
        return save(found, each(found.of("weight"), lambda part: self._encode(part, parent)), parent)

    def decode(self, saved: Saved, previous: State | None) -> State:
        """See `Baseline.decode`."""
        return load(saved, previous, _differences)

    def _encode(self, part: Part, parent: Parts | None) -> bytes:
        grid = Grid.over(part.values, self.bins(part.values))
        levels = grid.levels(part.values)
        if parent is not None:
            levels = delta(grid.levels(before(part, parent)), levels, grid.bins)
        out = Writer()
        out.varint(grid.bins)
        out.raw(np.array([grid.low, grid.high], "<f4"))
        out.raw(encode_huffman(levels))
        return out.done()


def wanted_bins(x: Floats) -> int:
    """Return the number of bins that a layer's entropy gives, before the limits."""
    return 1 << math.ceil(entropy_bits(counts_of(Grid.over(x, 256).levels(x))) / x.size)


def _differences(piece: Bytes, spec: LeafSpec, old: Floats | None) -> Floats:
    data = Reader(piece, "QD-compressor")
    bins = data.varint()
    low, high = data.array("<f4", 2)
    grid = Grid(float(low), float(high), bins)
    levels = decode(data.rest(), spec.size)
    if old is not None:
        levels = undelta(grid.levels(old), levels, bins)
    return grid.values(levels)


# ----------------------------------------------------------------------------------------------------------------- GOBO

# A. H. Zadeh, I. Edo, O. M. Awad, A. Moshovos: GOBO: Quantizing Attention-Based NLP Models for Low Latency and Energy
# Efficient Inference, MICRO 2020, arXiv 2005.03842. It was made for finished models: only its quantization is here,
# which Inshrinkerator's table 7 is about. Outliers are values whose log probability density under the layer's normal
# distribution is below -4.


def outliers(x: Floats, outlier: float = -4.0) -> npt.NDArray[np.bool_]:
    """Return the mask of values whose log density is below `outlier`."""
    mean, deviation = float(x.mean(dtype=np.float64)), float(x.std(dtype=np.float64))
    if deviation == 0.0:
        return np.zeros(x.size, np.bool_)
    density = -0.5 * ((x - mean) / deviation) ** 2 - math.log(deviation * math.sqrt(2 * math.pi))
    found: npt.NDArray[np.bool_] = density < outlier
    return found


def centroids(x: npt.ArrayLike, count: int, rounds: int) -> Doubles:
    """Fit at most `count` centroids of x by GOBO's iteration, ascending.

    They start as means of groups of equal size; each round assigns to the nearest and takes the means again, until the
    sum of |x - centroid| falls no more. The round of least sum counts.

    Args:
        x: values, 1-D.
        count: centroids.
        rounds: most rounds.

    Example:
        >>> centroids([0.0, 1.0, 10.0, 11.0], 2, 10).tolist()
        [0.5, 10.5]
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


def clustered(x: Floats, bins: int, outlier: float = -4.0, rounds: int = 1000) -> Floats:
    """Quantize as GOBO does: outliers stay exact, other values become centroids.

    Args:
        x: values.
        bins: centroids.
        outlier: log density below which a value is kept.
        rounds: most rounds of the clustering.
    """
    kept = outliers(x, outlier)
    codebook = centroids(x[~kept], bins, rounds)
    found = x.copy()
    middle = (codebook[1:] + codebook[:-1]) / 2
    found[~kept] = codebook[np.searchsorted(middle, x[~kept])]
    return found


# -------------------------------------------------------------------------------------------------------- search spaces

POWERS = (8, 16, 32, 64, 128, 256)
STEPS, RATIOS = (10, 25, 50, 100), (0.1, 0.2, 0.3, 0.4, 0.5)
"""Of Check-N-Run's greedy search: parts that a range is cut into, and shares of it that are walked through."""
Rung = tuple[tuple[float, ...], Baseline]
"""A baseline's place in its space, and the baseline."""
Ladder = Callable[[State], Iterator[Rung]]
"""The configurations of a baseline for a state, by ascending bins."""


def adaptive_ladder(_: State) -> Iterator[Rung]:
    """Table 11: even bins in a range narrowed by a greedy search."""
    for place in itertools.product(POWERS, STEPS, RATIOS):
        yield place, Adaptive(*place)


def uniform_space(weights: Collection[Floats]) -> list[tuple[float, tuple[int, ...], QDCompressor]]:
    """Return table 10 by mean bins: the mean, the bins of each layer, the system."""
    wanted, sizes = [wanted_bins(x) for x in weights], [x.size for x in weights]
    found = []
    for least, most in itertools.product(POWERS, POWERS):
        if least <= most:
            system = QDCompressor(least, most)
            bins = tuple(system.within(count) for count in wanted)
            mean = sum(count * size for count, size in zip(bins, sizes, strict=True)) / sum(sizes)
            found.append((mean, bins, system))
    return sorted(found, key=lambda one: one[0])


def uniform_ladder(state: State) -> Iterator[Rung]:
    """Table 10: even bins by a layer's entropy, between two limits."""
    found: dict[tuple[int, ...], Rung] = {}
    for mean, bins, system in uniform_space([part.values for part in parts(state).of("weight")]):
        found.setdefault(bins, ((mean,), system))
    return iter(found.values())
