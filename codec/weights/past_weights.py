"""Past weights, and the drift in first moments, for extrapolating weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels.backend.arguments import check_field, number, or_none
from ..base import Codec, Leaf
from ..evidence.moments import moment_pairs
from ..moments.firstmoment import FirstMoment
from .importance import second_moments

_COASTING = 9.0
"""Steps of the drift that a first moment holds: beta1 / (1 - beta1) at 0.9."""
_MOST = 0.2
"""Largest part of the way that is added to it: most of a short way is noise."""


@dataclass(frozen=True, slots=True)
class PastWeights:
    """Weights of an earlier time and their distance in steps, for `compress(earlier=)`.

    Args:
        weights: a tree with the keys of the weights (or the tails of their paths), any float dtype.
        steps: optimizer steps from these weights to those of the state, > 0; for a slow average, their mean. None
            (default): unknown, so that the loss of first moments is not compensated.

    Raises:
        BadArgumentError: `steps` is out of range.

    Example:
        >>> import numpy as np
        >>> PastWeights({"w": np.zeros((64, 64))}, steps=100).steps
        100.0
    """

    weights: Any
    steps: float | None = None

    @staticmethod
    def of(given: Any) -> PastWeights:
        """Return the argument `earlier` as `PastWeights`; a tree of weights gets no steps."""
        return given if isinstance(given, PastWeights) else PastWeights(given)

    def __post_init__(self) -> None:
        check_field(self, "steps", or_none, number, 0, math.inf, open_low=True, open_high=True)


def with_lead(leaves: list[Leaf], codecs: Sequence[Codec], earlier: PastWeights | None) -> list[Leaf]:
    """Add to weights with a known drift the part that their first moments lose.

    A first moment that is restored as zero would still have moved its weight by about nine steps. A grid of step s (in
    units of sqrt(v)) loses about s**2 / (1 + s**2) of that movement (measured, docs/decisions/drift.md).
    """
    steps = None if earlier is None else earlier.steps
    if steps is None or all(leaf.earlier is None for leaf in leaves):
        return leaves
    firsts = {second: first for first, second in moment_pairs(leaves).items()}
    found = list(leaves)
    for weight, second in second_moments(leaves).items():
        codec = codecs[firsts[second]] if second in firsts else None
        if isinstance(codec, FirstMoment) and leaves[weight].earlier is not None:
            lost = codec.step**2 / (1 + codec.step**2)
            found[weight] = dataclasses.replace(leaves[weight], lead=min(_MOST, _COASTING * lost / steps))
    return found
