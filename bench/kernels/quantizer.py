"""Weights to levels of a codebook and back."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import levels as level_kernels
from shrinkpoint.kernels import quantizer as kernels

from .. import peers
from ..harness import Case, Job, same
from .histogram import ONE, TENSORS, elements, many, many_job, tensors
from .place import LEVELS, Call, Place, comes_back, oracle


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    search = ("torch.bucketize",) if at.device.gpu else ("np.searchsorted", "torch.bucketize")
    return [
        at.case("assign", lambda: assign(at), at.target(0.55, 0.85), search),
        at.case("assign with gradient", lambda: with_gradient(at)),
        at.case("assign + joint_counts", lambda: with_counts(at), at.target(0.30, 0.85)),
        at.case("dequantize", lambda: dequantize(at)),
        at.case("boundaries", lambda: boundaries(at), unit="us", on="cpu"),
        many(at, "assign", lambda: assign_many(at), ()),
    ]


def _expected(at: Place, x: Any, gradient: Any = None) -> Any:
    codes = at.sample.codebook.astype(np.float64)
    return oracle("quantizer").assign(x, at.sample.thresholds, codes, gradient=gradient)


def assign(at: Place) -> Job:
    """Find each weight's level."""
    values, limits, codebook = at.sample.before(at.n), at.sample.thresholds, at.sample.codebook
    bounds = kernels.boundaries(codebook, "float32").astype(np.float32)
    others = peers.bucketing(at.device, at.device.array(values), bounds, values)
    full = (limits, codebook.astype(np.float64))
    call = Call("quantizer.assign", (values,), (limits, codebook), full, {"gradient": None})
    return at.compared(call, 5, others)


def with_gradient(at: Place) -> Job:
    """Find levels where products with the gradient protect."""
    limits, codebook, p = at.sample.thresholds, at.sample.codebook, at.prefix
    x, g = at.arrays(*at.pair())
    expected = _expected(at, *(part[:p] for part in at.pair()))
    check = comes_back("levels", lambda: kernels.assign(x[:p], limits, codebook, gradient=g[:p]), expected, at.says)
    return at.job(lambda: kernels.assign(x, limits, codebook, gradient=g), check, 9)


def with_counts(at: Place) -> Job:
    """Find levels and count them by the levels before."""
    limits, codebook, p = at.sample.thresholds, at.sample.codebook, at.prefix
    x, previous = at.arrays(at.sample.after(at.n), at.sample.levels_before(at.n))

    def both(count: int) -> tuple[Any, Any]:
        levels = kernels.assign(x[:count], limits, codebook)
        return levels, level_kernels.joint_counts(previous[:count], levels, LEVELS, LEVELS)

    def check() -> str:
        levels = _expected(at, at.sample.after(p))
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


def assign_many(at: Place) -> Job:
    """Find the levels of many small tensors."""
    limits, codebook = at.sample.thresholds, at.sample.codebook
    (whole, parts), step = tensors(at), elements(at) // TENSORS

    def check() -> str:
        levels = kernels.assign(whole, limits, codebook)
        for number, part in enumerate(parts):
            same("levels", kernels.assign(part, limits, codebook), levels[number * step : (number + 1) * step])
        return "levels = levels of one tensor"

    calls = {
        "": lambda: [kernels.assign(part, limits, codebook) for part in parts],
        ONE: lambda: kernels.assign(whole, limits, codebook),
    }
    return many_job(at, calls, check, f"{TENSORS} calls")
