"""The points of a cube that apply to a state, and rounds of trials on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from .cube import Cube, Point, normal
from .degradation_model import degradations
from .next_trials import HOPELESS
from .result import SearchResult, Trial
from .trials import Trials

_LIKELY = 0.5
"""Least probability to pass with which a neighbour is tried where trials run one after another.

If several processes try points at once, all neighbours are tried except hopeless ones.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen trial (None: nothing passes), and counts of untried points by reason."""

    trial: Trial | None
    discarded: dict[str, int]
    notes: tuple[str, ...] = ()
    patience: int = 0


class Space:
    """The points of a cube that apply to a state, and the trials on them.

    Args:
        cube: the cube as the caller gave it.
        trials: runs the trials.
        budget: maximum number of rounds.
    """

    def __init__(self, cube: Cube, trials: Trials, budget: int) -> None:
        search_state, asked = trials.search_state, cube
        if not search_state.has_embeddings:
            cube = dataclasses.replace(cube, embedding_bins=cube.embedding_bins[-1:])
        self.sensitive = search_state.sensitive or "magnitude" not in cube.metric
        if not self.sensitive:
            cube = dataclasses.replace(cube, metric=("magnitude",))
        self.asked, self.cube, self.trials, self.budget = asked, cube, trials, budget
        self.notes: list[str] = []
        self._is_checked = False
        if not self.sensitive:
            self.notes.append("nothing is pruned by sensitivity: there are arrays without gradients")

    @property
    def left(self) -> int:
        """Number of rounds that may still be run."""
        return self.budget - self.trials.rounds

    @property
    def floor(self) -> float:
        """The smallest degradation that `evaluate` can distinguish from zero."""
        return max(self.trials.scale.spread, 0.01 * self.trials.allowed)

    @property
    def likely(self) -> float:
        """Least probability to pass at which a neighbour of the last choice is tried."""
        return _LIKELY if self.trials.at_once == 1 else HOPELESS

    def has(self, point: Point) -> bool:
        """Return whether the neighbourhood of a point can be searched."""
        return point.system == self.cube.system and (point.prune == 0.0 or point.metric in self.cube.metric)

    def round(self, points: Sequence[Point], stale: Sequence[Trial]) -> list[Trial]:
        """Try the points; check the baseline again after an implausible gain."""
        trials, begin = self.trials, len(self.trials.found)
        probes: list[Point] = []
        if trials.scale.direction is None and self.left > 1:
            if trials.at_once == 1:
                self.probe(reserve=1)
            elif trials.next_beyond_use is not None:
                probes = [trials.next_beyond_use]
        asked = [normal(p) for p in points][: trials.at_once - len(probes)]
        # A point that infers the direction may belong to the cube.
        probed = [*probes, *(t.point for t in trials.found[begin:])]
        points = [p for p in asked if p not in probed]
        expected: list[float | None] = []
        if points:
            known = trials.known(stale)
            expected = [float(d) for d in degradations(trials.candidates(points), known, self.floor)]
        if probes or points:
            trials.round([*probes, *points], [None] * len(probes) + expected)
        if trials.gain > trials.beyond:
            self.check()
            if trials.gain > trials.beyond and trials.is_inherited:
                self.probe()
        return [t for t in trials.tried if t.point in asked]

    def keeps_mildest(self, stale: Sequence[Trial]) -> bool:
        """Return whether the mildest point of the cube passes; try it if it was not tried."""
        mildest = normal(max(self.cube, key=Point.expected_bits))
        tried = [t for t in self.trials.tried if t.point == mildest]
        if not tried and self.left > 0:
            tried = self.round([mildest], stale)
        return any(t.passed for t in tried)

    def probe(self, reserve: int = 0) -> None:
        """Infer the direction from a state compressed beyond use, or a milder one after NaN.

        Args:
            reserve: rounds to leave unused; default 0.
        """
        while self.left > reserve and (point := self.trials.next_beyond_use) is not None:
            self.trials.round([point], [None])

    def depends_on_state(self, last: SearchResult | None) -> bool:
        """Return whether the result of `evaluate` depends on the state.

        If no trial shows it, a state compressed beyond use is tried.

        A function that ignores its argument, or an accuracy at the level of chance, lets everything pass.
        """
        trials = self.trials
        seen = {t.quality for t in trials.found} | (set() if trials.has_seen_itself else {trials.scale.baseline})
        if len(seen) > 1 or (last is not None and len({t.quality for t in last.trials}) > 1):
            return True
        if not trials.can_be_destroyed:
            return True
        # Of several processes each is tested (`Trials.blind`).
        if trials.at_once == 1 and self.left > 0 and (point := trials.next_beyond_use) is not None:
            trials.round([point], [None])
        return not trials.is_probed or len({t.quality for t in trials.found}) > 1

    def check(self) -> None:
        """Evaluate the state itself again, at most once per search.

        This finds out whether implausibly good results are comparable with the baseline. If every process evaluated
        the state at the start, no further call is needed, unless the caller gave the baseline.
        """
        trials = self.trials
        if self.left > 0 and not self._is_checked and (trials.at_once == 1 or not trials.has_seen_itself):
            self._is_checked = True
            trials.evaluate_itself()
