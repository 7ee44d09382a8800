"""The better direction of quality: given, known, or inferred from destroyed states."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from .cube import Cube, Point
from .quality import Scale
from .result import SearchResult, Trial

_BEYOND_USE = (Point(2, 0.9, "magnitude", 0.0), Point(2, 0.5, "magnitude", 0.0))
"""Points surely worse than the state itself; the second is tried where `evaluate` returns NaN for the first."""
SURELY = 0.01
"""Relative difference from the baseline up to which a trial may be better or worse by chance."""
_LUCK = 0.1
"""Largest gain that counts as chance, as a share of the loss of a state compressed beyond use."""


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
