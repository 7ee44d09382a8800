"""QD-compressor: quantize each layer by bins that follow its entropy, code differences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shrinkpoint.codec.entropy import counts_of, decode, encode_huffman
from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.kernels.levels import delta, undelta
from shrinkpoint.kernels.rans import entropy_bits

from .parts import Bytes, Floats, Grid, Part, Parts, Saved, State, before, each, load, parts, save


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
        return load(saved, previous, _decode)

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


def _decode(piece: Bytes, spec: LeafSpec, old: Floats | None) -> Floats:
    data = Reader(piece, "QD-compressor")
    bins = data.varint()
    low, high = data.array("<f4", 2)
    grid = Grid(float(low), float(high), bins)
    levels = decode(data.rest(), spec.size)
    if old is not None:
        levels = undelta(grid.levels(old), levels, bins)
    return grid.values(levels)
