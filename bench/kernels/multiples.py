"""Weights as multiples of a step."""

from __future__ import annotations

from shrinkpoint.kernels import multiples as kernels

from ..harness import Case, Job
from .place import Call, Place

HOW = (2.0**-13, "int16")
"""Step and dtype."""


def cases(at: Place) -> list[Case]:
    """Return the cases of the subject."""
    return [
        at.case("square_sum", lambda: at.compared(Call("multiples.square_sum", at.pair()[:1]), 4)),
        at.case("step_multiples", lambda: at.compared(Call("multiples.step_multiples", at.pair()[:1], HOW), 6)),
        at.case("step_values", lambda: values(at)),
    ]


def values(at: Place) -> Job:
    """Compute the weights of multiples."""
    found = kernels.step_multiples(at.pair()[0], *HOW)
    return at.compared(Call("multiples.step_values", (found,), (HOW[0], "float32")), 6)
