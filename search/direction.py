"""Which direction of quality is better: given, known from the last search, or told by states compressed beyond use."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from .cube import Cube, Point
from .quality import Scale
from .result import SearchResult, Trial

_WRECKS = (Point(2, 0.9, "magnitude", 0.0), Point(2, 0.5, "magnitude", 0.0))
"""Surely worse than the state itself. The second is for an `evaluate` that has no number for the first."""
SURELY = 0.01
"""A difference from the baseline up to which a trial may be better as well as worse."""
_LUCK = 0.1
"""Share of what a state beyond use loses up to which another one may seem to gain, by luck."""


class Direction:
    """What is known of the direction, and the points that tell it.

    Args:
        cube: what is searched.
        system: of its points.
    """

    def __init__(self, cube: Cube, system: str) -> None:
        self._cube = cube
        self._wrecks = tuple(dataclasses.replace(point, system=system) for point in _WRECKS)
        self._known: str | None = None
        self._was_in_vain = False
        self.is_given = False
        """Whether the caller said it, now or at the last search."""

    @property
    def worst(self) -> Point:
        """The point that is the farthest beyond use."""
        return self._wrecks[0]

    def begin(self, last: SearchResult | None, given: str | None) -> None:
        """Take what the caller says, or else what the last search knew."""
        self._known, self.is_given = given, given is not None
        if last is not None and last.baseline is not None:
            self._was_in_vain = last.probed_in_vain
            if given is None:
                self._known, self.is_given = last.direction, last.direction_given

    def doubt(self) -> str | None:
        """Forget what was only inferred at the last search; what that was."""
        self._was_in_vain = False
        known, self._known = self._known, None
        return known

    def _asked(self, found: Sequence[Trial]) -> list[Trial]:
        """The trials of points beyond use, in the order in which they are asked, up to the first that is not tried."""
        tried = {t.point: t for t in found}
        asked = itertools.takewhile(lambda t: t is not None, map(tried.get, self._wrecks))
        return [t for t in asked if t is not None]

    def next_wreck(self, found: Sequence[Trial]) -> Point | None:
        """The point beyond use that is to be tried next; None: one was a number, or it is in vain."""
        asked = self._asked(found)
        if self._was_in_vain or len(asked) == len(self._wrecks) or any(t.quality is not None for t in asked):
            return None
        return self._wrecks[len(asked)]

    def is_probed(self, found: Sequence[Trial]) -> bool:
        """Whether a state compressed beyond use has been tried."""
        return bool(self._asked(found))

    def no_numbers(self, found: Sequence[Trial]) -> list[Point]:
        """The points beyond use that evaluated to no number."""
        return [t.point for t in self._asked(found) if t.point is not None and t.quality is None]

    def in_vain(self, found: Sequence[Trial]) -> bool:
        """Whether all of them did, now or at the last search: it is of no use to try them again."""
        return self._was_in_vain or len(self.no_numbers(found)) == len(self._wrecks)

    def is_apart(self, point: Point) -> bool:
        """Whether a point was only tried to see which direction is worse, and is none of what is searched."""
        return dataclasses.replace(point, system=_WRECKS[0].system) in _WRECKS and point not in self._cube

    def inferred(self, found: Sequence[Trial], scale: Scale, allowed: float) -> tuple[str | None, str]:
        """The direction: given, or told by the first wreck that is a number, or as the last search had it; and what
        there is to say of it, or "".

        A gain beyond the threshold is luck where the wreck loses ten times as much. Where it does not, as with a model
        that is hardly trained and that ruin may do good, the direction may be the other one: then nothing is known.

        Args:
            found: all trials.
            scale: what their qualities are measured by.
            allowed: degradation that passes.
        """
        asked = self._asked(found)
        if self.is_given or not asked:
            return self._known, ""
        wreck = next((t for t in asked if t.quality is not None), None)
        if wreck is None or wreck.quality is None:
            return None, ""
        direction = scale.inferred(wreck.quality, max(allowed, SURELY))
        if direction is None:
            return None, ""
        judged = dataclasses.replace(scale, direction=direction)
        loss = judged.degradation(wreck.quality)
        others = [t for t in found if t.point is not None and t.point != wreck.point]
        best = min((judged.degradation(t.quality) for t in others), default=0.0)
        if -best > min(loss, max(allowed, _LUCK * loss)):
            return None, (
                f"which direction is better is not clear: a state compressed beyond use gave {wreck.quality:.6g}, "
                f"the state itself {scale.baseline:.6g}, and a trial differs too much to the other side"
            )
        changed = self._known not in (None, direction)
        return direction, (f"{direction} quality is better, not {self._known} as at the last search" if changed else "")
