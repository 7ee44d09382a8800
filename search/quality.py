"""Qualities that `evaluate` returns, without a trace in random generators, as degradations.

Their better direction is given, known, or inferred from destroyed states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import numbers
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codec.errors import BadArgumentError
from ..kernels.backend.arrays import imported
from .cube import Cube, Point
from .result import SearchResult, Trial

Evaluate = Callable[[Any], Any]
_BEYOND_USE = (Point(2, 0.9, "magnitude", 0.0), Point(2, 0.5, "magnitude", 0.0))
"""Points surely worse than the state itself; the second is tried where `evaluate` returns NaN for the first."""
SURELY = 0.01
"""Relative difference from the baseline up to which a trial may be better or worse by chance."""
_LUCK = 0.1
"""Largest gain that counts as chance, as a share of the loss of a state compressed beyond use."""


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
        # A tensor or array of one element counts as a number.
        shape = getattr(value, "shape", None)
        if isinstance(shape, tuple) and math.prod(shape) == 1 and hasattr(value, "item"):
            value = value.item()
    except Exception as e:
        raise BadArgumentError(f"evaluate raised {type(e).__name__} at {what}: {e}") from e
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


class Direction:
    """The known direction, and the points from which it is inferred.

    Args:
        cube: the cube being searched.
        system: the system of its points.
    """

    def __init__(self, cube: Cube, system: str) -> None:
        self._cube = cube
        self._beyond_use = tuple(dataclasses.replace(point, system=system) for point in _BEYOND_USE)
        self._known: str | None = None
        self._was_in_vain = False
        self.is_given = False
        """Whether the caller gave the direction, now or at the last search."""

    @property
    def worst(self) -> Point:
        """Point with the most destructive compression."""
        return self._beyond_use[0]

    def begin(self, last: SearchResult | None, given: str | None) -> None:
        """Take the direction from the caller, or else from the last search."""
        self._known, self.is_given = given, given is not None
        if last is not None and last.baseline is not None:
            self._was_in_vain = last.probed_in_vain
            if given is None:
                self._known, self.is_given = last.direction, last.direction_given

    def doubt(self) -> str | None:
        """Forget a direction that was inferred at the last search, and return it."""
        self._was_in_vain = False
        known, self._known = self._known, None
        return known

    def _asked(self, found: Sequence[Trial]) -> list[Trial]:
        """Return the trials of points beyond use, in order, up to the first that was not tried."""
        tried = {t.point: t for t in found}
        asked = itertools.takewhile(lambda t: t is not None, map(tried.get, self._beyond_use))
        return [t for t in asked if t is not None]

    def next_beyond_use(self, found: Sequence[Trial]) -> Point | None:
        """Return the next point beyond use to try; None if that is not needed or in vain."""
        asked = self._asked(found)
        if self._was_in_vain or len(asked) == len(self._beyond_use) or any(t.quality is not None for t in asked):
            return None
        return self._beyond_use[len(asked)]

    def is_probed(self, found: Sequence[Trial]) -> bool:
        """Return whether a state compressed beyond use was tried."""
        return bool(self._asked(found))

    def no_numbers(self, found: Sequence[Trial]) -> list[Point]:
        """Return the points beyond use whose quality was NaN."""
        return [t.point for t in self._asked(found) if t.point is not None and t.quality is None]

    def in_vain(self, found: Sequence[Trial]) -> bool:
        """Return whether all points beyond use gave NaN, now or at the last search."""
        return self._was_in_vain or len(self.no_numbers(found)) == len(self._beyond_use)

    def is_apart(self, point: Point) -> bool:
        """Return whether a point outside the cube was tried only to infer the direction."""
        return dataclasses.replace(point, system=_BEYOND_USE[0].system) in _BEYOND_USE and point not in self._cube

    def inferred(self, found: Sequence[Trial], scale: Scale, allowed: float) -> tuple[str | None, str]:
        """Return the direction of quality, and a note on it or "".

        The direction is the given one, or the one inferred from the first state beyond use whose quality is a number,
        or the one of the last search. A gain beyond the threshold counts as chance if the state beyond use loses ten
        times as much. Otherwise the direction is unknown, for example for a model with so little training that
        strong compression may improve it.

        Args:
            found: all trials.
            scale: baseline and spread of their qualities.
            allowed: largest degradation that passes.
        """
        asked = self._asked(found)
        if self.is_given or not asked:
            return self._known, ""
        beyond_use = next((t for t in asked if t.quality is not None), None)
        if beyond_use is None or beyond_use.quality is None:
            return None, ""
        direction = scale.inferred(beyond_use.quality, max(allowed, SURELY))
        if direction is None:
            return None, ""
        judged = dataclasses.replace(scale, direction=direction)
        loss = judged.degradation(beyond_use.quality)
        others = [t for t in found if t.point is not None and t.point != beyond_use.point]
        best = min((judged.degradation(t.quality) for t in others), default=0.0)
        if -best > min(loss, max(allowed, _LUCK * loss)):
            return None, (
                f"which direction is better is not clear: a state compressed beyond use gave {beyond_use.quality:.6g}, "
                f"the state itself {scale.baseline:.6g}, and a trial differs too much to the other side"
            )
        changed = self._known not in (None, direction)
        return direction, (f"{direction} quality is better, not {self._known} as at the last search" if changed else "")


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
