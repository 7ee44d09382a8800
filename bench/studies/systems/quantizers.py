"""Inshrinkerator's peers: even bins, even bins in a narrowed range, k-means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from shrinkpoint.kernels.histogram import log_histogram

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
