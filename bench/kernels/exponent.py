"""Exponent buckets of differences, as LC-Checkpoint quantizes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from shrinkpoint.kernels import exponent as kernels

from ..harness import Case, Job, near, same
from .place import Call, Place, oracle


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("exponent_buckets", lambda: counted(at)),
        at.case("exponent_quantize", lambda: at.compared(_quantize(at), 5)),
        at.case("exponent_dequantize", lambda: dequantized(at)),
        at.case("exponent_differences", lambda: at.compared(Call("exponent.exponent_differences", _states(at)), 12)),
        at.case("exponent_sums", lambda: summed(at)),
        at.case("merge_buckets", lambda: merged(at), unit="us", on="cpu"),
        at.case("promote", lambda: promoted(at), unit="us", on="cpu"),
    ]


def counted(at: Place) -> Job:
    """Count exponents."""
    values = at.steps()
    (x,) = at.arrays(values)

    def check() -> str:
        found = kernels.exponent_buckets(x[: at.prefix]), oracle("exponent").exponent_buckets(values[: at.prefix])
        same("buckets", *[(part.counts, part.lowest, part.highest, part.zeros) for part in found])
        return at.says

    return at.job(lambda: kernels.exponent_buckets(x), check, 4)


def _quantize(at: Place) -> Call:
    steps = at.steps()
    return Call("exponent.exponent_quantize", (steps,), (kernels.promote(kernels.exponent_buckets(steps), 3),))


def dequantized(at: Place) -> Job:
    """Look up the values of buckets."""
    steps = at.steps()
    promotion = kernels.promote(kernels.exponent_buckets(steps), 3)
    levels = kernels.exponent_quantize(steps, promotion)
    return at.compared(Call("exponent.exponent_dequantize", (levels,), (promotion.codebook,)), 5, note="3 bits")


def _states(at: Place) -> tuple[Any, Any]:
    steps = at.steps()
    return steps + np.float32(1), np.ones_like(steps)


def summed(at: Place) -> Job:
    """Add the values of buckets to an array."""
    steps = at.steps()
    promotion = kernels.promote(kernels.exponent_buckets(steps), 3)
    arrays = np.ones_like(steps), kernels.exponent_quantize(steps, promotion)
    return at.compared(Call("exponent.exponent_sums", arrays, (promotion.codebook,)), 9, note="3 bits")


def _parts(steps: Any) -> list[Any]:
    return [kernels.exponent_buckets(part) for part in (steps[: steps.size // 3], steps[steps.size // 3 :])]


def merged(at: Place) -> Job:
    """Merge the buckets of two arrays."""
    steps = at.steps()
    parts = _parts(steps)
    whole = lambda: kernels.exponent_buckets(steps)  # noqa: E731
    return at.table(lambda: kernels.merge_buckets(*parts), whole, "two arrays", says="two parts = the whole")


def promoted(at: Place) -> Job:
    """Choose the buckets that three bits keep."""
    steps = at.steps()
    buckets = kernels.merge_buckets(*_parts(steps))

    def check() -> str:
        values = kernels.promote(buckets, 3).codebook.view(np.float32)
        exponents = np.frexp(np.abs(steps))[1]
        for value in values[1:]:
            members = np.abs(steps[(exponents == np.frexp(abs(value))[1]) & (np.sign(steps) == np.sign(value))])
            # The middle of two patterns of one octave is that of their values, rounded once.
            middle = np.float32((float(members.min()) + float(members.max())) / 2)
            near("value", abs(value), middle, 1e-12)
        return f"{values.size - 1} values = the middle of their buckets"

    return Job(lambda: kernels.promote(buckets, 3), check, 1.0, (), f"3 bits; data {at.sample.origin}")
