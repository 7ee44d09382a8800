"""Baselines whose values are even ones of a range: naive 8-bit, Adaptive, QD-compressor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import zstandard

from shrinkpoint.codec.entropy import counts_of, decode, encode_huffman
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.kernels.levels import delta, undelta
from shrinkpoint.kernels.packing import pack_bits, unpack_bits
from shrinkpoint.kernels.rans import entropy_bits

from ..systems.spaces import Sketch, greedy_ranges
from .parts import Bytes, Floats, Grid, Part, Parts, Saved, State, before, each, load, parts, save

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
