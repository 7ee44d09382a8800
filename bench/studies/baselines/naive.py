"""Naive 8-bit: every tensor into [0, 255] over its own minimum and maximum, then zstandard."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import zstandard

from shrinkpoint.codec.format.fields import Reader, Writer
from shrinkpoint.codec.state.leaves import LeafSpec

from .parts import Bytes, Floats, Grid, Part, Saved, State, each, load, parts, save

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
        return load(saved, None, _decode, _decode)

    def _encode(self, part: Part) -> bytes:
        grid = Grid.over(part.values, 256)
        out = Writer()
        out.raw(np.array([grid.low, grid.high], "<f4"))
        out.raw(zstandard.ZstdCompressor(_ZSTD_LEVEL).compress(grid.levels(part.values).tobytes()))
        return out.done()


def _decode(piece: Bytes, spec: LeafSpec, _: Floats | None) -> Floats:
    data = Reader(piece, "naive 8-bit")
    low, high = data.array("<f4", 2)
    plain = zstandard.ZstdDecompressor().decompress(data.rest(), max_output_size=spec.size)
    return Grid(float(low), float(high), 256).values(np.frombuffer(plain, np.uint8))
