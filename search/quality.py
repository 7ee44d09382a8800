"""What `evaluate` says: numbers that can be compared, in which direction, against what, and with how much noise."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..codec.errors import BadArgumentError
from .generators import kept

Evaluate = Callable[[Any], Any]


def measured(evaluate: Evaluate, state: Any, what: str) -> float:
    """What `evaluate` returns for a state, as a float; NaN and infinities pass. It draws no random number of others.

    Raises:
        BadArgumentError: it raised, or returned no number.
    """
    try:
        with kept():
            value = evaluate(state)
    except Exception as e:
        raise BadArgumentError(f"evaluate raised {type(e).__name__} at {what}: {e}") from e
    # A tensor or array of one element is as good as a number; anything larger is none.
    shape = getattr(value, "shape", None)
    if shape is not None and math.prod(shape) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise BadArgumentError(
            f"evaluate returned {str(value)[:60]}, a {type(value).__name__}, at {what}; it must return a number"
        )
    try:
        return float(value)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Scale:
    """How a quality becomes a degradation.

    Args:
        baseline: quality of the state itself, finite and not zero.
        spread: largest relative difference between two calls with the same state, >= 0.
        direction: "lower" or "higher" is better; None: not known yet, so that any difference counts as a loss.
    """

    baseline: float
    spread: float
    direction: str | None

    def degradation(self, quality: float | None) -> float:
        """Relative loss of quality; infinite for what is no number (None) or infinitely bad.

        Example:
            >>> Scale(0.8, 0.0, "higher").degradation(0.76)  # doctest: +ELLIPSIS
            0.05...
        """
        if quality is None or not math.isfinite(quality):
            return math.inf
        change = (quality - self.baseline) / abs(self.baseline)
        if self.direction is None:
            return abs(change)
        return change if self.direction == "lower" else -change

    def inferred(self, quality: float, beyond: float) -> str | None:
        """The direction, if this is the quality of something that is surely worse; None where that cannot be told.

        Args:
            quality: of a state compressed beyond use; infinities tell as well.
            beyond: relative difference that is more than chance.

        Example:
            >>> Scale(0.8, 0.0, None).inferred(0.1, 0.01), Scale(0.8, 0.0, None).inferred(0.799, 0.01)
            ('higher', None)
        """
        change = (quality - self.baseline) / abs(self.baseline)
        if math.isnan(change) or abs(change) <= max(beyond, 3 * self.spread):
            return None
        return "lower" if change > 0 else "higher"


def scale(values: Sequence[float], spread: float, direction: str | None, threshold: float) -> Scale:
    """The scale that calls of `evaluate` with the state itself give.

    Args:
        values: what they returned, one or more.
        spread: relative spread known from before.
        direction: as given or known.
        threshold: degradation that must be told from none.

    Raises:
        BadArgumentError: a value is not finite or zero, or they differ by more than the threshold.
    """
    first = values[0]
    for value in values:
        if not math.isfinite(value):
            raise BadArgumentError(f"evaluate returned {value} for the state itself; there is nothing to compare with")
        if value == 0.0:
            raise BadArgumentError(
                "evaluate returned 0 for the state itself; a relative degradation of 0 has no meaning"
            )
    apart = (max(values) - min(values)) / abs(first)
    if apart > threshold:
        raise BadArgumentError(
            f"evaluate is not comparable between calls: the same state gave {min(values):.6g} and {max(values):.6g}, "
            f"{apart:.3%} apart, more than the threshold of {threshold:.3%}; evaluate the same data every time, in "
            "evaluation mode"
        )
    return Scale(first, max(spread, apart), direction)
