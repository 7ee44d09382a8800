"""The configuration cube: what a search may choose, as data, with an order by expected size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..codec.config import Config
from ..codec.errors import BadArgumentError
from ..codec.presets import inshrinkerator


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration of the cube.

    Args:
        bins: codebook entries.
        prune: fraction pruned.
        metric: pruning metric, "magnitude" or "sensitivity".
        protect: fraction protected.
    """

    bins: int
    prune: float
    metric: str
    protect: float

    def expected_bits(self) -> float:
        """Bits a weight that a base would take if all levels were equally likely: the order of the cube."""
        quantized = 1.0 - self.prune - self.protect
        shares = (self.prune, self.protect, quantized)
        level = sum(-s * math.log2(s) for s in shares if s > 0)
        return level + quantized * math.log2(self.bins) + 16 * self.protect

    def config(self, *, embedding_bins: int | None = None) -> Config:
        """The published system at this point."""
        return inshrinkerator(
            self.bins,
            embedding_bins=embedding_bins,
            prune=self.prune,
            prune_metric=self.metric,
            protect=self.protect,
        )


@dataclass(frozen=True, slots=True)
class Cube:
    """The axes; quality is expected to rise along each of bins and protect, and to fall along prune.

    Args:
        bins: codebook entries, ascending.
        prune: pruned fractions, ascending.
        metric: pruning metrics.
        protect: protected fractions, ascending.
        embedding_bins: entries for embeddings, chosen apart.

    Source: Inshrinkerator, table 2 and table 9.
    """

    bins: tuple[int, ...] = (4, 6, 8, 12, 16, 32)
    prune: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    metric: tuple[str, ...] = ("magnitude", "sensitivity")
    protect: tuple[float, ...] = (0.0005, 0.005, 0.01)
    embedding_bins: tuple[int, ...] = (16, 32)

    def __post_init__(self) -> None:
        for name in ("bins", "prune", "metric", "protect", "embedding_bins"):
            axis = getattr(self, name)
            if not axis:
                raise BadArgumentError(f"the cube's axis {name} is empty")
            if name != "metric" and list(axis) != sorted(set(axis)):
                raise BadArgumentError(f"the cube's axis {name} is {axis}; it must ascend")

    def __len__(self) -> int:
        return len(self.bins) * len(self.prune) * len(self.metric) * len(self.protect)

    def __iter__(self) -> Iterator[Point]:
        """Every point, the smallest expected checkpoint first; ties in the order of the axes."""
        points = (
            Point(b, p, m, f) for b, p, m, f in itertools.product(self.bins, self.prune, self.metric, self.protect)
        )
        return iter(sorted(points, key=Point.expected_bits))
