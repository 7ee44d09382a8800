"""The configuration cube: the points that a search may choose, and their order."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..codec.config import Config, Rule
from ..codec.errors import BadArgumentError
from ..codec.presets import inshrinkerator
from ..codec.weights.quantize import Quantize
from ..kernels.backend.arguments import check_field, choice, number

SYSTEMS = ("default", "inshrinkerator")
METRICS = ("magnitude", "sensitivity")
_STEPPED = ("bins", "prune", "protect", "rate", "embedding_bins")


@dataclass(frozen=True, slots=True)
class Point:
    """One configuration of the cube.

    Args:
        bins: how fine, 2 to 254: see `Quantize`.
        prune: fraction pruned, in [0, 1).
        metric: pruning metric, "magnitude" or "sensitivity"; ignored where nothing is pruned.
        protect: fraction protected, in [0, 1).
        rate: as `Config.rate`, which moments follow, >= 0; default 0.
        embedding_bins: the same for embeddings; default None, as `bins`.
        system: the coder: "default", this project's own as in `Config()`, or "inshrinkerator", the published one as in
            `presets.inshrinkerator`.

    Raises:
        BadArgumentError: a value out of range.

    Example:
        >>> Point(16, 0.0, "magnitude", 0.0005).config().rules[0].codec.bins
        16

    Source: Inshrinkerator, section 5 and table 2.
    """

    bins: int
    prune: float
    metric: str
    protect: float
    rate: float = 0.0
    embedding_bins: int | None = None
    system: str = "default"

    def __post_init__(self) -> None:
        check_field(self, "system", choice, SYSTEMS)
        check_field(self, "rate", number, 0, 1e6)
        if self.system == "inshrinkerator" and self.rate:
            raise BadArgumentError(f"rate is {self.rate:g}; the published system has no rate-distortion encoder, use 0")
        weights = self.codec()
        for name in ("bins", "prune", "protect", "embedding_bins"):
            object.__setattr__(self, name, getattr(weights, name))

    def codec(self) -> Quantize:
        """Return the codec of the point for weights; raise BadArgumentError for values out of range."""
        shares: dict[str, Any] = {"prune": self.prune, "prune_metric": self.metric, "protect": self.protect}
        if self.system == "inshrinkerator":
            rule = inshrinkerator(self.bins, embedding_bins=self.embedding_bins, **shares).rules[0]
            if isinstance(rule.codec, Quantize):
                return rule.codec
        return Quantize(bins=self.bins, embedding_bins=self.embedding_bins, rate=self.rate, **shares)

    def config(self, *, embedding_bins: int | None = None, ahead: bool = False) -> Config:
        """Return the whole configuration: the point's codec, and its system's other rules.

        Args:
            embedding_bins: entries for embeddings instead of the point's own.
            ahead: whether a store extrapolates weights by their drift; default False.
        """
        point = self if embedding_bins is None else dataclasses.replace(self, embedding_bins=embedding_bins)
        rules = inshrinkerator().rules if self.system == "inshrinkerator" else ()
        weights = Rule("weight", point.codec())
        others = [r for r in rules if r.match != "weight"]
        return Config([weights, *others], rate=self.rate, ahead=ahead)

    def expected_bits(self) -> float:
        """Return the bits per weight of a base with equally likely levels, which orders the cube."""
        quantized = 1.0 - self.prune - self.protect
        shares = (self.prune, self.protect, quantized)
        level = sum(-s * math.log2(s) for s in shares if s > 0)
        return level + quantized * math.log2(self.bins) + 16 * self.protect

    def at_least(self, other: Point) -> bool:
        """Return whether no axis is more aggressive than the other point's.

        This is a partial order: of two points each may be more aggressive along another axis. Points of different
        pruning metrics are only comparable where one of them prunes nothing.
        """
        return (
            self.system == other.system
            and self.bins >= other.bins
            and (self.prune == 0.0 or (self.metric == other.metric and self.prune <= other.prune))
            and self.protect >= other.protect
            and self.rate <= other.rate
            and (self.embedding_bins or self.bins) >= (other.embedding_bins or other.bins)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the point as plain JSON."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Any) -> Point:
        """Return the point that `to_json` described; raise BadArgumentError for other values."""
        return Point(**_fields(data, Point, "point of a cube"))

    def __str__(self) -> str:
        parts = [f"bins {self.bins}"]
        if self.prune:
            parts.append(f"prune {self.prune:g} by {self.metric}")
        parts.append(f"protect {self.protect:g}")
        if self.rate:
            parts.append(f"rate {self.rate:g}")
        if self.embedding_bins is not None:
            parts.append(f"embedding bins {self.embedding_bins}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Cube:
    """The axes of a configuration cube.

    Quality is expected to rise along `bins`, `protect` and `embedding_bins`, and to fall along `prune` and `rate`.

    Args:
        bins: how fine, ascending: see `Quantize`.
        prune: pruned fractions, ascending.
        metric: pruning metrics.
        protect: protected fractions, ascending.
        embedding_bins: entries for embeddings, ascending; chosen separately, after the rest, from the last one down.
        rate: lambdas of the rate-distortion encoder, ascending; default (0,). An axis like the others.
        system: the coder: "default" (this project's own coder) or "inshrinkerator" (the published one).

    Raises:
        BadArgumentError: an axis is empty, does not ascend, or holds a value out of range.

    Example:
        >>> len(Cube()), len(Cube(rate=(0.0, 0.003)))
        (216, 432)

    Source: Inshrinkerator, table 2 and table 9.
    """

    bins: tuple[int, ...] = (4, 6, 8, 12, 16, 32)
    prune: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    metric: tuple[str, ...] = METRICS
    protect: tuple[float, ...] = (0.0005, 0.005, 0.01)
    embedding_bins: tuple[int, ...] = (16, 32)
    rate: tuple[float, ...] = (0.0,)
    system: str = "default"

    def __post_init__(self) -> None:
        for name in ("metric", *_STEPPED):
            axis = getattr(self, name)
            if not isinstance(axis, tuple | list) or not axis:
                raise BadArgumentError(
                    f"the cube's axis {name} is {axis!r:.80}; it must be a tuple of at least one value"
                )
            object.__setattr__(self, name, tuple(axis))
            if name != "metric" and not _ascends(axis):
                raise BadArgumentError(f"the cube's axis {name} is {axis!r:.80}; it must ascend")
        if any(self.metric.count(m) > 1 for m in self.metric):
            raise BadArgumentError(f"the cube's axis metric is {self.metric}; it lists a metric twice")
        # Every value appears in one of these points, which raise for values out of range.
        longest = max(len(getattr(self, name)) for name in _STEPPED)
        padded = (itertools.islice(itertools.cycle(getattr(self, name)), longest) for name in _STEPPED)
        points = [
            Point(bins, prune, metric, protect, rate, embedding_bins, self.system)
            for bins, prune, protect, rate, embedding_bins in zip(*padded, strict=True)
            for metric in self.metric
        ][:: len(self.metric)]
        for name in _STEPPED:  # as plain numbers, as the points store them
            values = (getattr(point, name) for point in points)
            object.__setattr__(self, name, tuple(itertools.islice(values, len(getattr(self, name)))))
        Point(self.bins[0], self.prune[-1], self.metric[0], self.protect[-1])

    def __len__(self) -> int:
        return len(self.bins) * len(self.prune) * len(self.metric) * len(self.protect) * len(self.rate)

    def __iter__(self) -> Iterator[Point]:
        """Iterate over all points, smallest expected checkpoint first.

        All of them have the largest number of entries for embeddings.
        """
        axes = (self.bins, self.prune, self.metric, self.protect, self.rate)
        points = (Point(*values, self.embedding_bins[-1], self.system) for values in itertools.product(*axes))
        return iter(sorted(points, key=Point.expected_bits))

    def __contains__(self, point: object) -> bool:
        """Return whether a point is in the cube; the metric counts only with pruning."""
        return (
            isinstance(point, Point)
            and point.system == self.system
            and all(getattr(point, name) in getattr(self, name) for name in _STEPPED)
            and (point.prune == 0.0 or point.metric in self.metric)
        )

    def steps(self, a: Point, b: Point) -> int:
        """Return the number of steps along the axes between two points, without the pruning metric.

        A value that is not on its axis (of an older cube) is counted from its nearest neighbour.

        Example:
            >>> Cube().steps(Point(16, 0.1, "magnitude", 0.005), Point(12, 0.0, "sensitivity", 0.005))
            2
        """
        total = 0
        for name in _STEPPED:
            axis = getattr(self, name)
            x, y = getattr(a, name), getattr(b, name)
            if name == "embedding_bins":
                x, y = x or a.bins, y or b.bins
            total += abs(_place(axis, x) - _place(axis, y))
        return total

    def neighbours(self, point: Point, steps: int, *, relax: bool = False) -> list[Point]:
        """Return the points within a number of steps, the point itself first.

        Args:
            point: the center.
            steps: 0 or more.
            relax: also those that are more aggressive (section 10 of the paper); default False.

        Source: Inshrinkerator, section 5, delta-neighbourhood search.
        """
        axes = (self.bins, self.prune, self.metric, self.protect, self.rate, self.embedding_bins)
        found = [point]
        for values in itertools.product(*axes):
            other = Point(*values, self.system)
            near = self.steps(point, other) <= steps
            milder = dataclasses.replace(other, metric=point.metric).at_least(point)
            if near and (relax or milder) and not same(other, point):
                found.append(other)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the cube as plain JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(self).items()}

    @staticmethod
    def from_json(data: Any) -> Cube:
        """Return the cube that `to_json` described; raise BadArgumentError for other values."""
        fields = _fields(data, Cube, "cube")
        axes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return Cube(**axes)


def _fields(data: Any, kind: type[Any], what: str) -> Mapping[str, Any]:
    names = {f.name for f in dataclasses.fields(kind)}
    if not isinstance(data, Mapping) or set(data) != names:
        raise BadArgumentError(f"{str(data)[:80]} is not a {what}; its fields are {', '.join(sorted(names))}")
    return data


def _ascends(axis: Sequence[Any]) -> bool:
    try:
        return all(a < b for a, b in itertools.pairwise(axis))
    except TypeError:
        return False


def _place(axis: tuple[float, ...], value: float) -> int:
    return min(range(len(axis)), key=lambda i: abs(axis[i] - value))


def same(a: Point, b: Point) -> bool:
    """Return whether two points are the same configuration."""
    return normal(a) == normal(b)


def normal(point: Point) -> Point:
    """Return the point with the default metric if nothing is pruned."""
    return dataclasses.replace(point, metric="magnitude") if point.prune == 0.0 else point
