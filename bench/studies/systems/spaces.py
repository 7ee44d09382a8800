"""Inshrinkerator's peers, and the search spaces of its tables 9 to 12.

A space gives a state's candidates by ascending bins, and the search, the same for all, takes the first whose restored
state is good enough. Where layers have bins of their own, their mean counts each layer by its elements.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

import shrinkpoint as sp
from shrinkpoint.kernels.histogram import log_histogram
from shrinkpoint.searching.cube import Cube

from ..workloads import State

Floats = npt.NDArray[np.float32]
Range = tuple[float, float]


def weights_of(state: State) -> dict[str, Floats]:
    """The weights of a model that our codec would quantize, flat, by their names."""
    from ..baselines.parts import parts

    return {part.path.split("/", 1)[1]: part.values for part in parts(state).of("weight")}


def with_weights(state: State, values: Mapping[str, Floats]) -> State:
    """Return the state with some weights replaced."""
    model = {
        name: torch.from_numpy(values[name]).view(value.shape) if name in values else value
        for name, value in state["model"].items()
    }
    return {**state, "model": model}


def even(x: Floats, bins: int, within: Range | None = None) -> Floats:
    """The nearest of `bins` even values in a range, by default that of x."""
    from ..baselines.parts import Grid

    low, high = (float(x.min()), float(x.max())) if within is None else within
    grid = Grid(low, high, bins)
    return grid.values(grid.levels(x))


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


def clustered(x: Floats, bins: int, outlier: float = -4.0, rounds: int = 1000) -> Floats:
    """Quantize as GOBO does: outliers stay exact, other values become centroids.

    Args:
        x: values.
        bins: centroids.
        outlier: log density below which a value is kept.
        rounds: most rounds of the clustering.
    """
    from ..baselines.gobo import centroids, outliers

    kept = outliers(x, outlier)
    codebook = centroids(x[~kept], bins, rounds)
    found = x.copy()
    middle = (codebook[1:] + codebook[:-1]) / 2
    found[~kept] = codebook[np.searchsorted(middle, x[~kept])]
    return found


Kinds = Mapping[str, Any]
LADDER = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 254)
POWERS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Candidate:
    """A configuration of a system, applied to one state.

    Args:
        bins: mean over the quantized weights.
        same: of a space's candidates, those for which it is equal restore the same.
        restore: the state after a save and a load.
    """

    bins: float
    same: Hashable
    restore: Callable[[], State] = field(compare=False)


Space = Callable[[State, Kinds], Iterator[Candidate]]
"""Candidates for a state whose weights are of these kinds, by ascending bins."""


def ladder(restore: Callable[[State, int, Kinds], State]) -> Space:
    """Search space with the same numbers of bins for every system and no other choice."""

    def space(state: State, kinds: Kinds) -> Iterator[Candidate]:
        return (Candidate(bins, bins, partial(restore, state, bins, kinds)) for bins in LADDER)

    return space


def kinds_of(module: nn.Module) -> Kinds:
    """Return the kinds of a module's weights; a tied head counts as an embedding."""
    found: dict[str, Any] = dict(sp.kinds(module))
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for same in names.values():
        table = next((name for name in same if found[name].layer == "embedding"), None)
        found |= {} if table is None else dict.fromkeys(same, found[table])
    return found


def _mean(weights: Mapping[str, Floats], bins: Mapping[str, int]) -> float:
    """Mean number of bins of an element."""
    return sum(bins[name] * x.size for name, x in weights.items()) / sum(x.size for x in weights.values())


def _apart(weights: Mapping[str, Floats], kinds: Kinds, bins: int, embedding_bins: int) -> dict[str, int]:
    """Number of bins of each weight, where embeddings have their own."""
    return {name: embedding_bins if kinds[name].layer == "embedding" else bins for name in weights}


def published(state: State, kinds: Kinds) -> Iterator[Candidate]:
    """Table 9, for `presets.inshrinkerator`: bins, also of embeddings, and protected shares."""
    weights, cube = weights_of(state), Cube(prune=(0.0,), metric=("magnitude",), system="inshrinkerator")

    def restored(config: sp.Config) -> Any:
        return sp.decompress(sp.compress(state, cfg=config, kinds=kinds))

    found = []
    for point, embedding_bins in itertools.product(cube, cube.embedding_bins):
        bins = _apart(weights, kinds, point.bins, embedding_bins)
        config = point.config(embedding_bins=embedding_bins)
        found.append(Candidate(_mean(weights, bins), (*bins.values(), point.protect), partial(restored, config)))
    return iter(sorted(found, key=lambda one: one.bins))


def uniform(state: State, _: Kinds) -> Iterator[Candidate]:
    """Table 10, for QD-compressor: even bins by a layer's entropy, between two limits."""
    from ..baselines.grids import QDCompressor, wanted_bins

    weights = weights_of(state)
    wanted = {name: wanted_bins(x) for name, x in weights.items()}

    def restored(bins: Mapping[str, int]) -> State:
        return with_weights(state, {name: even(x, bins[name]) for name, x in weights.items()})

    found = []
    for least, most in itertools.product(POWERS, POWERS):
        if least <= most:
            system = QDCompressor(least, most)
            bins = {name: system.within(count) for name, count in wanted.items()}
            found.append(Candidate(_mean(weights, bins), tuple(bins.values()), partial(restored, bins)))
    return iter(sorted(found, key=lambda one: one.bins))


STEPS, RATIOS = (10, 25, 50, 100), (0.1, 0.2, 0.3, 0.4, 0.5)
"""Of Check-N-Run's greedy search: parts that a range is cut into, and shares of it that are walked through."""


def adaptive(state: State, _: Kinds) -> Iterator[Candidate]:
    """Table 11, for Check-N-Run: even bins in a range narrowed by a greedy search."""
    weights = weights_of(state)
    sketches = {name: Sketch.of(x) for name, x in weights.items()}

    def restored(bins: int, ranges: Mapping[str, Range]) -> State:
        return with_weights(state, {name: even(x, bins, ranges[name]) for name, x in weights.items()})

    for bins, steps in itertools.product(POWERS, STEPS):
        ranges = {name: greedy_ranges(one, bins, steps, RATIOS) for name, one in sketches.items()}
        for place in range(len(RATIOS)):
            own = {name: found[place] for name, found in ranges.items()}
            yield Candidate(bins, (bins, *own.values()), partial(restored, bins, own))


def kmeans(state: State, kinds: Kinds) -> Iterator[Candidate]:
    """Table 12, for GOBO: clusters of least L1 distance, outliers apart."""
    weights = weights_of(state)

    def restored(bins: Mapping[str, int]) -> State:
        return with_weights(state, {name: clustered(x, bins[name]) for name, x in weights.items()})

    found = []
    for count, embedding_bins in itertools.product(POWERS, (16, 32)):
        bins = _apart(weights, kinds, count, embedding_bins)
        found.append(Candidate(_mean(weights, bins), tuple(bins.values()), partial(restored, bins)))
    return iter(sorted(found, key=lambda one: one.bins))
