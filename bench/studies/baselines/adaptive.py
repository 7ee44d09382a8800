"""Adaptive: Check-N-Run's quantizer on dense layers, as Inshrinkerator re-implemented it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec
from shrinkpoint.kernels.packing import pack_bits, unpack_bits

from ..systems.spaces import Sketch, greedy_ranges
from .parts import Bytes, Floats, Grid, Part, Saved, State, each, load, parts, save


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
        return load(saved, None, _decode)

    def _encode(self, part: Part) -> bytes:
        ((low, high),) = greedy_ranges(Sketch.of(part.values), self.bins, self.steps, (self.walked,))
        width = self.bins.bit_length() - 1
        out = Writer()
        out.varint(width)
        out.raw(np.array([low, high], "<f4"))
        out.raw(pack_bits(Grid(low, high, self.bins).levels(part.values), width))
        return out.done()


def _decode(piece: Bytes, spec: LeafSpec, _: Floats | None) -> Floats:
    data = Reader(piece, "Adaptive")
    width = data.varint()
    low, high = data.array("<f4", 2)
    levels = unpack_bits(np.frombuffer(data.rest(), np.uint8), width, spec.size)
    return Grid(float(low), float(high), 1 << width).values(levels)
