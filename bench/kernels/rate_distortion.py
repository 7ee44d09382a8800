"""Levels by the sum of error and price, and weights extrapolated."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import rate_distortion as kernels

from ..harness import Case, Job, same
from .place import LEVELS, Call, Place, oracle


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("rate_distortion_levels", lambda: cheapest(at)),
        at.case("unsettled", lambda: unsettled(at)),
        at.case("extrapolate", lambda: at.compared(Call("rate_distortion.extrapolate", at.pair()[::-1], (1.5,)), 12)),
        at.case("settled_bounds", lambda: bounds(at), unit="us", on="cpu"),
    ]


def _prices(at: Place) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Prices of level changes in bits, where most weights keep their level."""
    bits = np.where(np.eye(LEVELS, dtype=bool), 0.2, 5.0).astype(np.float32)
    return bits * np.float32(0.003 * float(at.sample.after(at.prefix).var()))


def cheapest(at: Place) -> Job:
    """Choose the cheapest level of each weight."""
    values = (at.sample.after(at.n), at.sample.levels_after(at.n), at.sample.levels_before(at.n))
    return at.compared(Call("rate_distortion.rate_distortion_levels", values, (at.sample.codebook, _prices(at))), 7)


def unsettled(at: Place) -> Job:
    """Find the weights whose level may still change."""
    values, (before, after) = at.sample.after(at.n), at.levels()
    bounds = kernels.settled_bounds(at.sample.codebook, _prices(at))
    (x, levels, previous), p = at.arrays(values, after, before), at.prefix

    def check() -> str:
        expected = oracle("rate_distortion").unsettled(values[:p], after[:p], before[:p], bounds)
        found = kernels.unsettled(x[:p], levels[:p], previous[:p], bounds)
        for name, part in zip(("at", "x", "levels", "previous"), expected, strict=False):
            same(name, getattr(found, name), part)
        return f"{at.says}, {found.at.shape[0] / p:.1%} of them open"

    return at.job(lambda: kernels.unsettled(x, levels, previous, bounds), check, 6)


def bounds(at: Place) -> Job:
    """Compute between which values a level stays the cheapest."""
    codebook = at.sample.codebook
    prices = (1e-4 * (np.log2(at.n + 1.0) - np.log2(at.joint() + 1.0))).astype(np.float32)
    expected = lambda: oracle("rate_distortion").settled_bounds(codebook, prices, 0.0)  # noqa: E731
    return at.table(lambda: kernels.settled_bounds(codebook, prices), expected, f"{LEVELS} x {LEVELS} pairs")
