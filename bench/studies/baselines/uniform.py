"""Uniform quantization over an array's own range, which several baselines use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .parts import Floats

Levels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Grid:
    """`bins` even values from low to high, including both.

    Args:
        low, high: range; low <= high.
        bins: 2 to 256.

    Example:
        >>> grid = Grid(0.0, 3.0, 4)
        >>> grid.levels(np.array([0.2, 2.9], np.float32)).tolist(), grid.values(np.array([1, 3], np.uint8)).tolist()
        ([0, 3], [1.0, 3.0])
    """

    low: float
    high: float
    bins: int

    @staticmethod
    def over(x: Floats, bins: int) -> Grid:
        """Return the grid over the range of x."""
        return Grid(float(x.min()), float(x.max()), bins)

    @property
    def step(self) -> float:
        """Distance of two values; 0 if all are equal."""
        return (self.high - self.low) / (self.bins - 1)

    def levels(self, x: Floats) -> Levels:
        """Return the number of the nearest grid value, uint8; values outside take the nearest end."""
        if self.step == 0.0:
            return np.zeros(x.size, np.uint8)
        places = np.rint((x.astype(np.float64) - self.low) / self.step)
        found: Levels = np.clip(places, 0, self.bins - 1).astype(np.uint8)
        return found

    def values(self, levels: Levels) -> Floats:
        """Return the grid values of levels."""
        table: Floats = (self.low + self.step * np.arange(self.bins)).astype(np.float32)
        return table[levels]
