"""Qualities that `evaluate` returns, without a trace in random generators, as degradations."""

from __future__ import annotations

import contextlib
import math
import numbers
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codec.errors import BadArgumentError
from ..kernels.backend.imported import imported

Evaluate = Callable[[Any], Any]


def measured(evaluate: Evaluate, state: Any, what: str) -> float:
    """Call `evaluate` with a state and return its result as a float, which may be NaN.

    Args:
        evaluate: the user's function; the global random generators are the same after the call.
        state: a restored state.
        what: description of the state, for messages.

    Raises:
        BadArgumentError: it raised, or returned something other than a number.
    """
    try:
        with preserved():
            value = evaluate(state)
    except Exception as e:
        raise BadArgumentError(f"evaluate raised {type(e).__name__} at {what}: {e}") from e
    # A tensor or array of one element counts as a number.
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
    """The conversion from a quality to a degradation.

    Args:
        baseline: quality of the state itself, finite and not zero.
        spread: largest relative difference between two calls with the same state, >= 0.
        direction: "lower" or "higher" is better; None: not known yet, so that any difference counts as a loss.
    """

    baseline: float
    spread: float
    direction: str | None

    def degradation(self, quality: float | None) -> float:
        """Return the relative loss of quality; infinite for None (not a number) and infinities.

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
        """Return the better direction, given the quality of a destroyed state; None if unclear.

        Args:
            quality: of a state compressed beyond use; may be infinite.
            beyond: relative difference that is more than chance.

        Example:
            >>> Scale(0.8, 0.0, None).inferred(0.1, 0.01), Scale(0.8, 0.0, None).inferred(0.799, 0.01)
            ('higher', None)
        """
        change = (quality - self.baseline) / abs(self.baseline)
        if math.isnan(change) or abs(change) <= max(beyond, 3 * self.spread):
            return None
        return "lower" if change > 0 else "higher"


def passes(degradation: float, allowed: float) -> bool:
    """Return whether a degradation is within the quality threshold; infinities and NaN are not.

    Example:
        >>> passes(0.01, 0.01), passes(float("nan"), 0.01)
        (True, False)
    """
    return degradation <= allowed


def scale(values: Sequence[float], spread: float, direction: str | None, threshold: float) -> Scale:
    """Return the scale that follows from calls of `evaluate` with the state itself.

    Args:
        values: their results, one or more.
        spread: relative spread known from before.
        direction: as given or known.
        threshold: degradation that must be distinguishable from zero.

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


@contextlib.contextmanager
def preserved() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch when the context ends.

    A training that draws from them (dropout, the order of a DataLoader) then continues as without a search. Generators
    of CUDA devices are included if CUDA was initialized before. Generator objects of the caller are not known here.
    """
    python, torch = random.getstate(), imported("torch")
    numpy = np.random.get_state()  # noqa: NPY002 - the global generator is the one that trainings draw from
    if torch is None:
        host = devices = None
    else:
        host = torch.get_rng_state()
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if torch is not None:
            torch.set_rng_state(host)
            if devices is not None:
                torch.cuda.set_rng_state_all(devices)
