"""Number of steps that an optimizer has taken, from its own counters.

A store's step numbers may count epochs, samples or checkpoints, but the effect of a lost first moment is measured in
steps of its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from ..evidence.entries import Entry, Outline, entries_of
from ..evidence.moments import role_of

_BESIDE = ("step", "count")
"""Names of the step count next to a second moment: PyTorch's, Optax's."""
_BELOW = ("iteration", "iterations")
"""Anywhere below an optimizer: Keras's."""


def counting(paths: Iterable[str]) -> list[str]:
    """Return the paths at which an optimizer counts its steps.

    Example:
        >>> counting(["step", "optimizer/state/0/step", "optimizer/state/0/exp_avg_sq", "data/count"])
        ['optimizer/state/0/step']
        >>> counting(["optimizer/adam/iteration", "data/iteration"])
        ['optimizer/adam/iteration']
    """
    paths = list(paths)
    named = [(path, entry) for path, entry in zip(paths, entries_of(paths, Outline()), strict=True) if entry]
    moments = [entry for _, entry in named if role_of(entry) == "second moment"]
    places = {entry.owner for entry in moments} | {(entry.above, "") for entry in moments}

    def counts(entry: Entry) -> bool:
        if entry.name in _BELOW and "optimizer" in entry.above.split("/"):
            return True
        return entry.name in _BESIDE and entry.owner in places

    return [path for path, entry in named if counts(entry)]


def steps_taken(paths: Iterable[str], value: Callable[[str], float | None]) -> float | None:
    """Return the largest step count; parameters without gradients have lower ones.

    Args:
        paths: of all arrays.
        value: function that returns the value of the array at a path; None if it is not a single number.

    Returns:
        The steps, or None where nothing is counted.
    """
    counts = [value(path) for path in counting(paths)]
    return max((x for x in counts if x is not None and math.isfinite(x)), default=None)
