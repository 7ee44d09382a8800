"""How many steps an optimizer has taken, as it counts them itself.

A store's numbers may count epochs, samples or checkpoints. What a lost first moment costs is steps of its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ..state.kinds import MomentPlace, moment_place, role_of

_BESIDE = ("step", "count")
"""Names of the count beside a second moment: PyTorch's, Optax's."""
_BELOW = ("iteration", "iterations")
"""Anywhere below an optimizer: Keras's."""


def counting(paths: Iterable[str]) -> list[str]:
    """Those of the paths at which an optimizer counts its steps.

    Example:
        >>> counting(["step", "optimizer/state/0/step", "optimizer/state/0/exp_avg_sq", "data/count"])
        ['optimizer/state/0/step']
        >>> counting(["optimizer/adam/iteration", "data/iteration"])
        ['optimizer/adam/iteration']
    """
    named = [(path, moment_place(path)) for path in paths]
    places = {place.above for path, place in named if role_of(path) == "second moment"}

    def counts(place: MomentPlace) -> bool:
        if place.name in _BELOW and "optimizer" in place.above.split("/"):
            return True
        return place.name in _BESIDE and place.above in places

    return [path for path, place in named if counts(place)]


def steps_taken(paths: Iterable[str], value: Callable[[str], float | None]) -> float | None:
    """The largest count; parameters that had no gradient are behind.

    Args:
        paths: of all arrays.
        value: of the array at one of them; None: it is no single number.

    Returns:
        The steps, or None where nothing is counted.
    """
    counts = [value(path) for path in counting(paths)]
    return max((x for x in counts if x is not None and math.isfinite(x)), default=None)
