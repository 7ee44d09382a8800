"""Weights to levels of a codebook and back, multiples of a step, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import error_sums, multiples, rate_distortion
from shrinkpoint.kernels import levels as level_kernels
from shrinkpoint.kernels import quantizer as kernels

from .. import peers
from ..harness import Case, Job, near, same
from .place import LEVELS, ROUNDING, Call, Place, oracle

_STEP = (2.0**-13, "int16")
"""Step of multiples, and their dtype."""


def cases(at: Place) -> list[Case]:
    """Return the cases of the subjects."""
    extrapolated = lambda: at.compared(Call("rate_distortion.extrapolate", at.pair()[::-1], (1.5,)), 12)  # noqa: E731
    multiplied = lambda: at.compared(Call("multiples.step_multiples", at.pair()[:1], _STEP), 6)  # noqa: E731
    search = ("torch.bucketize",) if at.device.gpu else ("np.searchsorted", "torch.bucketize")
    return [
        at.case("assign", lambda: assign(at), at.target(0.55, 0.85), search),
        at.case("assign with gradient", lambda: at.compared(_assign(at, at.sample.after(at.n)), 9)),
        at.case("assign + joint_counts", lambda: with_counts(at), at.target(0.30, 0.85)),
        at.case("dequantize", lambda: dequantize(at)),
        at.case("boundaries", lambda: boundaries(at), unit="us", on="cpu"),
        at.case("rate_distortion_levels", lambda: cheapest(at)),
        at.case("unsettled", lambda: unsettled(at)),
        at.case("extrapolate", extrapolated),
        at.case("settled_bounds", lambda: bounds(at), unit="us", on="cpu"),
        at.case("distortion", lambda: distortion(at)),
        at.case("square_sum", lambda: at.compared(Call("multiples.square_sum", at.pair()[:1]), 4)),
        at.case("step_multiples", multiplied),
        at.case("step_values", lambda: values_of_multiples(at)),
    ]


def assign(at: Place) -> Job:
    """Find each weight's level."""
    values, codebook = at.sample.before(at.n), at.sample.codebook
    bounds = kernels.boundaries(codebook, "float32").astype(np.float32)
    return at.compared(_assign(at, None), 5, peers.bucketing(at.device, at.device.array(values), bounds, values))


def _assign(at: Place, gradient: Any) -> Call:
    limits, codebook = at.sample.thresholds, at.sample.codebook
    full = limits, codebook.astype(np.float64)
    return Call("quantizer.assign", (at.sample.before(at.n),), (limits, codebook), full, {"gradient": gradient})


def with_counts(at: Place) -> Job:
    """Find levels and count them by the levels before."""
    limits, codebook, p = at.sample.thresholds, at.sample.codebook, at.prefix
    x, previous = at.arrays(at.sample.after(at.n), at.sample.levels_before(at.n))

    def both(count: int) -> tuple[Any, Any]:
        levels = kernels.assign(x[:count], limits, codebook)
        return levels, level_kernels.joint_counts(previous[:count], levels, LEVELS, LEVELS)

    def check() -> str:
        levels = oracle("quantizer").assign(at.sample.after(p), limits, codebook.astype(np.float64), gradient=None)
        counts = oracle("levels").joint_counts(at.sample.levels_before(p), levels, LEVELS, LEVELS)
        same("levels and counts", both(p), (levels, counts))
        return at.says

    return at.job(lambda: both(at.n), check, 7)


def dequantize(at: Place) -> Job:
    """Look up the values of levels."""
    codebook = at.sample.codebook
    codes, named = (at.device.array(codebook),), {"protected": None}
    return at.compared(Call("quantizer.dequantize", (at.levels()[0],), codes, (codebook,), named), 5)


def boundaries(at: Place) -> Job:
    """Compute the borders between codes."""
    codebook, x = at.sample.codebook, at.sample.before(at.prefix)
    return at.table(
        lambda: kernels.boundaries(codebook, "float32"),
        lambda: np.abs(x[:, None].astype(np.float64) - codebook).argmin(axis=1),
        f"{codebook.size} codes",
        seen=lambda found: np.searchsorted(found, x, side="right"),
        says=f"{x.size:,} elements = the nearest code",
    )


# ------------------------------------------------------------------------------------------------------ rate-distortion


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
    bounds = rate_distortion.settled_bounds(at.sample.codebook, _prices(at))
    (x, levels, previous), p = at.arrays(values, after, before), at.prefix

    def check() -> str:
        expected = oracle("rate_distortion").unsettled(values[:p], after[:p], before[:p], bounds)
        found = rate_distortion.unsettled(x[:p], levels[:p], previous[:p], bounds)
        for name, part in zip(("at", "x", "levels", "previous"), expected, strict=False):
            same(name, getattr(found, name), part)
        return f"{at.says}, {found.at.shape[0] / p:.1%} of them open"

    return at.job(lambda: rate_distortion.unsettled(x, levels, previous, bounds), check, 6)


def bounds(at: Place) -> Job:
    """Compute between which values a level stays the cheapest."""
    codebook = at.sample.codebook
    prices = (1e-4 * (np.log2(at.n + 1.0) - np.log2(at.joint() + 1.0))).astype(np.float32)
    expected = lambda: oracle("rate_distortion").settled_bounds(codebook, prices, 0.0)  # noqa: E731
    return at.table(lambda: rate_distortion.settled_bounds(codebook, prices), expected, f"{LEVELS} x {LEVELS} pairs")


# ---------------------------------------------------------------------------------------------------- errors, multiples


def distortion(at: Place) -> Job:
    """Sum squared errors and find the largest relative one."""
    (x, y), p = at.arrays(*at.pair()), at.prefix

    def check() -> str:
        found = error_sums.distortion(x[:p], y[:p])
        expected = oracle("error_sums").distortion(*(part[:p] for part in at.pair()))
        near("relative L2", found.relative_l2, expected.relative_l2, ROUNDING)
        same("largest relative error", found.largest_relative, expected.largest_relative)
        return f"{at.says} to {ROUNDING:g}"

    return at.job(lambda: error_sums.distortion(x, y), check, 8)


def values_of_multiples(at: Place) -> Job:
    """Compute the weights of multiples."""
    found = multiples.step_multiples(at.pair()[0], *_STEP)
    return at.compared(Call("multiples.step_values", (found,), (_STEP[0], "float32")), 6)
