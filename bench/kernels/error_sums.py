"""Errors of restored values."""

from __future__ import annotations

from shrinkpoint.kernels import error_sums as kernels

from ..harness import Case, Job, near, same
from .place import ROUNDING, Place, oracle


def cases(at: Place) -> list[Case]:
    """Return the case of the subject."""
    return [at.case("distortion", lambda: distortion(at))]


def distortion(at: Place) -> Job:
    """Sum squared errors and find the largest relative one."""
    (x, y), p = at.arrays(*at.pair()), at.prefix

    def check() -> str:
        found = kernels.distortion(x[:p], y[:p])
        expected = oracle("error_sums").distortion(*(part[:p] for part in at.pair()))
        near("relative L2", found.relative_l2, expected.relative_l2, ROUNDING)
        same("largest relative error", found.largest_relative, expected.largest_relative)
        return f"{at.says} to {ROUNDING:g}"

    return at.job(lambda: kernels.distortion(x, y), check, 8)
