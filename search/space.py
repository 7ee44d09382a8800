"""The points that make sense for a state, and rounds of trials on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from .cube import Cube, Point, normal
from .plan import HOPELESS, degradations
from .result import SearchResult, Trial
from .trials import Trials

_LIKELY = 0.5
"""One after another, neighbours are only tried that pass with at least this probability; beside each other all are that
are not hopeless."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How a search ended: the trial taken (None: nothing passes), and what was not tried and why."""

    trial: Trial | None
    discarded: dict[str, int]
    notes: tuple[str, ...] = ()
    patience: int = 0


class Space:
    """The points that make sense for a state, and the trials on them."""

    def __init__(self, cube: Cube, trials: Trials, budget: int) -> None:
        subject, asked = trials.subject, cube
        if not subject.has_embeddings:
            cube = dataclasses.replace(cube, embedding_bins=cube.embedding_bins[-1:])
        self.sensitive = subject.sensitive or "magnitude" not in cube.metric
        if not self.sensitive:
            cube = dataclasses.replace(cube, metric=("magnitude",))
        self.asked, self.cube, self.trials, self.budget = asked, cube, trials, budget
        self.notes: list[str] = []
        self._is_checked = False
        if not self.sensitive:
            self.notes.append("nothing is pruned by sensitivity: there are arrays without gradients")

    @property
    def left(self) -> int:
        """Rounds that may still be run."""
        return self.budget - self.trials.rounds

    @property
    def floor(self) -> float:
        """The smallest degradation that `evaluate` can tell from none."""
        return max(self.trials.scale.spread, 0.01 * self.trials.allowed)

    @property
    def likely(self) -> float:
        """The least probability to pass with which a neighbour of the last choice is tried."""
        return _LIKELY if self.trials.at_once == 1 else HOPELESS

    def has(self, point: Point) -> bool:
        """Whether the neighbourhood of a point can be searched."""
        return point.system == self.cube.system and (point.prune == 0.0 or point.metric in self.cube.metric)

    def round(self, points: Sequence[Point], stale: Sequence[Trial]) -> list[Trial]:
        """Try the points, each with its expected degradation; what looks too good is looked at twice."""
        trials, begin = self.trials, len(self.trials.found)
        beside: list[Point] = []
        if trials.scale.direction is None and self.left > 1:
            if trials.at_once == 1:
                self.probe(spare=1)
            elif trials.next_wreck is not None:
                beside = [trials.next_wreck]
        asked = [normal(p) for p in points][: trials.at_once - len(beside)]
        # A point to tell the direction by may be one of the cube.
        probed = [*beside, *(t.point for t in trials.found[begin:])]
        points = [p for p in asked if p not in probed]
        expected: list[float | None] = []
        if points:
            known = trials.known(stale)
            expected = [float(d) for d in degradations(trials.candidates(points), known, self.floor)]
        if beside or points:
            trials.round([*beside, *points], [None] * len(beside) + expected)
        if trials.gain > trials.beyond:
            self.check()
            if trials.gain > trials.beyond and trials.is_inherited:
                self.probe()
        return [t for t in trials.tried if t.point in asked]

    def keeps_mildest(self, stale: Sequence[Trial]) -> bool:
        """Whether the mildest point of the cube passes: it is tried, unless it was before."""
        mildest = normal(max(self.cube, key=Point.expected_bits))
        tried = [t for t in self.trials.tried if t.point == mildest]
        if not tried and self.left > 0:
            tried = self.round([mildest], stale)
        return any(t.passed for t in tried)

    def probe(self, spare: int = 0) -> None:
        """See which direction is worse, from a state compressed beyond use; a milder one, where that is no number.

        Args:
            spare: rounds to leave; default 0.
        """
        while self.left > spare and (wreck := self.trials.next_wreck) is not None:
            self.trials.round([wreck], [None])

    def can_tell(self, last: SearchResult | None) -> bool:
        """Whether anything changes what `evaluate` says; where nothing did yet, a state compressed beyond use should.

        One that never looks at what it is given, or an accuracy that is chance, lets everything pass.
        """
        trials = self.trials
        heard = {t.quality for t in trials.found} | (set() if trials.has_seen_itself else {trials.scale.baseline})
        if len(heard) > 1 or (last is not None and len({t.quality for t in last.trials}) > 1):
            return True
        if not trials.can_wreck:
            return True
        # Of several processes each is asked (`Trials.blind`).
        if trials.at_once == 1 and self.left > 0 and (wreck := trials.next_wreck) is not None:
            trials.round([wreck], [None])
        return not trials.is_probed or len({t.quality for t in trials.found}) > 1

    def check(self) -> None:
        """Evaluate the state itself again, once a search: numbers that are too good may be no numbers to compare.

        Processes that each evaluated it at the start have seen as much; with a known baseline instead they have not.
        """
        trials = self.trials
        if self.left > 0 and not self._is_checked and (trials.at_once == 1 or not trials.has_seen_itself):
            self._is_checked = True
            trials.again()
