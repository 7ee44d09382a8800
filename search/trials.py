"""Running trials: rounds of points over the processes, recorded; what was done before a restart is not done again."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from ..codec.errors import BadArgumentError
from .cube import Point, normal
from .estimate import Estimator
from .plan import Candidate, Known, Pattern
from .quality import Evaluate, Scale, measured, scale
from .report import Report
from .result import Trial
from .subject import Subject, changed
from .team import Team

_REPEATS = 2
_WRECK = Point(2, 0.9, "magnitude", 0.0)
_SURELY = 0.01
"""A difference from the baseline up to which a trial may be better as well as worse."""


class Trials:
    """The trials of one search, and what they need.

    Args:
        subject: the state.
        evaluate: the user's.
        allowed: degradation that passes.
        team: the processes that share the work.
        report: what is shown.
        done: trials of an interrupted search of the same state.
    """

    def __init__(
        self,
        subject: Subject,
        evaluate: Evaluate,
        allowed: float,
        team: Team,
        report: Report,
        done: Sequence[Trial],
    ) -> None:
        self.subject, self._evaluate, self.allowed = subject, evaluate, allowed
        self._team, self._report = team, report
        self._hashes = subject.hashes()
        self.state = subject.fingerprint(self._hashes)
        if len(set(team.all(lambda: self.state))) > 1 and not subject.is_sharded:
            raise BadArgumentError("the processes of the group do not have the same state, parent, gradients and kinds")
        for trial in done:
            if trial.state != self.state:
                raise BadArgumentError(f"resume: a trial ({trial.point}) is of another state than this one")
        self._done = list(done)
        self._estimate = Estimator(subject.leaves, subject.parents, subject.codec)
        self._candidates: dict[Point, Candidate] = {}
        self.found: list[Trial] = []
        self.rounds = 0
        self.scale = Scale(1.0, 0.0, None)

    @property
    def at_once(self) -> int:
        """Trials of a round. Processes that each hold a part of the state can only try one point together."""
        return 1 if self.subject.is_sharded else self._team.size

    @property
    def passing(self) -> list[Trial]:
        """Trials of points that may be chosen."""
        return [t for t in self.found if t.passed and t.point is not None and not is_wreck(t.point)]

    def baseline(self, spread: float | None, direction: str | None) -> None:
        """Evaluate the state itself; more than once where its spread is not known yet."""
        wanted = _REPEATS if spread is None and self.at_once == 1 else 1
        values: list[float] = []
        while len(values) < wanted * self.at_once:
            found = [t for t in self._done if t.point is None][len(values) : len(values) + self.at_once]
            replayed = len(found) == self.at_once
            if not replayed:
                begin = time.perf_counter()
                qualities = [float(q) for q in self._team.all(lambda: repr(self._quality(None)))]
                if self.subject.is_sharded:
                    qualities = [sum(qualities) / len(qualities)]
                seconds = time.perf_counter() - begin
                found = [self._record(None, 0, q, rank, seconds) for rank, q in enumerate(qualities)]
            values += [math.nan if t.quality is None else t.quality for t in found]
            self.rounds += 1
            for trial in found:
                self._add(trial, replayed=replayed)
        self.scale = scale(values, spread or 0.0, direction, self.allowed)

    def candidates(self, points: Sequence[Point]) -> list[Candidate]:
        """What the histograms say of these points; sizes as the trials so far correct them."""
        self._expect(points)
        off = [k.candidate.nbytes / self._candidates[k.candidate.point].nbytes for k in self.known()]
        factor = sum(off) / len(off) if off else 1.0
        known = (self._candidates[normal(p)] for p in points)
        return [dataclasses.replace(c, nbytes=factor * c.nbytes) for c in known]

    def _expect(self, points: Sequence[Point]) -> None:
        """Estimate what has not been yet."""
        missing = [p for p in dict.fromkeys(normal(p) for p in points) if p not in self._candidates]
        for point, found in zip(missing, self._estimate(missing), strict=True):
            nbytes = found.nbytes + self.subject.rest_nbytes
            self._candidates[point] = Candidate(point, nbytes, found.error, found.pruned, found.pattern)

    def known(self, stale: Sequence[Trial] = ()) -> list[Known]:
        """What the trials tell the plan; `stale` ones are of an earlier checkpoint."""
        tried = [(t, normal(t.point)) for t in self.found if t.point is not None and not is_wreck(t.point)]
        self._expect([p for _, p in tried])
        return [_known(t, stale=False, pattern=self._candidates[p].pattern) for t, p in tried] + [
            _known(t, stale=True) for t in stale if t.point is not None and not is_wreck(t.point)
        ]

    def round(self, points: Sequence[Point], expected: Sequence[float | None]) -> list[Trial]:
        """Try up to `at_once` points beside each other; those of an interrupted search are only read."""
        points = [normal(p) for p in points]
        before = {normal(t.point): t for t in self._done if t.point is not None}
        missing = [p for p in points if p not in before]
        found = [before[p] for p in points if p in before]
        if missing:
            self.candidates(missing)
            found += self._run(missing)
        if self.scale.direction is None:
            self._infer(found)
        places = {p: i for i, p in enumerate(points)}
        found.sort(key=lambda t: places[t.point] if t.point is not None else -1)
        scored = [self._scored(t, expected[places[t.point]], self.rounds) for t in found if t.point is not None]
        self.rounds += 1
        for trial in scored:
            self._add(trial, replayed=trial.point in before)
        return scored

    def _run(self, points: Sequence[Point]) -> list[Trial]:
        """Each process its own point, or all of them the same one."""

        def mine() -> list[object] | None:
            place = 0 if self.subject.is_sharded else self._team.rank
            if place >= len(points):
                return None
            begin = time.perf_counter()
            restored = self.subject.restored(points[place].config())
            quality = self._quality(points[place], restored.state)
            return [repr(quality), restored.nbytes, time.perf_counter() - begin]

        results = [r for r in self._team.all(mine) if r is not None]
        if self.subject.is_sharded:
            mean = sum(float(r[0]) for r in results) / len(results)
            results = [[mean, results[0][1], results[0][2]]]
        return [
            self._record(point, int(nbytes), float(quality), rank, float(seconds))
            for rank, (point, (quality, nbytes, seconds)) in enumerate(zip(points, results, strict=True))
        ]

    def _quality(self, point: Point | None, restored: object = None) -> float:
        what = "the state itself" if point is None else str(point)
        quality = measured(self._evaluate, self.subject.exact() if point is None else restored, what)
        path = changed(self._hashes, self.subject)
        if path is not None:
            raise BadArgumentError(
                f"evaluate changed {path} of the state that is being saved; "
                "load what it is given into a copy of the model"
            )
        return quality

    def settle(self) -> None:
        """Find out which direction is better from a state compressed beyond use, and score the trials so far by it."""
        wreck = dataclasses.replace(_WRECK, system=self.subject.system)
        tried = [t for t in self.found if t.point is not None]
        # What is no different either way passes either way.
        if self.scale.direction is not None or any(t.passed or t.point == wreck for t in tried):
            return
        self.round([wreck], [None])
        self.found = [t if t.point is None else self._scored(t, t.expected, t.round) for t in self.found]

    def _infer(self, found: Sequence[Trial]) -> None:
        """Settle which direction is better, if the coarsest of these trials tells."""
        numbers = [(t.error, t.quality) for t in found if t.quality is not None and math.isfinite(t.quality)]
        if not numbers:
            return
        _, quality = max(numbers)
        direction = self.scale.inferred(quality, max(self.allowed, _SURELY))
        if direction is not None:
            self.scale = Scale(self.scale.baseline, self.scale.spread, direction)
            self._report.say(
                f"{direction} quality is better, as the coarsest trial gave {quality:.6g} "
                f"and the state itself {self.scale.baseline:.6g}"
            )

    def _record(self, point: Point | None, nbytes: int, quality: float, rank: int, seconds: float) -> Trial:
        c = None if point is None else self._candidates[point]
        return Trial(
            point,
            nbytes,
            0.0 if c is None else c.nbytes,
            0.0 if c is None else c.error,
            0.0 if c is None else c.pruned,
            None,
            None if math.isnan(quality) else quality,
            0.0,
            point is None,
            "the state itself",
            self.rounds,
            rank,
            self.state,
            seconds,
        )

    def _scored(self, trial: Trial, expected: float | None, number: int) -> Trial:
        """The trial with its degradation on the scale, and why it passes or not."""
        loss = self.scale.degradation(trial.quality)
        passed = loss <= self.allowed
        if math.isinf(loss):
            reason = f"fails: quality is {'not a number' if trial.quality is None else trial.quality}"
        else:
            reason = f"{'passes' if passed else 'fails'}: {loss:+.3%} of {self.allowed:.3%} allowed"
            if self.scale.spread and abs(loss - self.allowed) <= self.scale.spread:
                reason += f", within the spread of {self.scale.spread:.3%}"
        return dataclasses.replace(
            trial, expected=expected, degradation=loss, passed=passed, reason=reason, round=number
        )

    def _add(self, trial: Trial, *, replayed: bool) -> None:
        self.found.append(trial)
        if not replayed:
            self._report.trial(trial)


def is_wreck(point: Point) -> bool:
    """Whether a trial was only made to see which direction is worse."""
    return dataclasses.replace(point, system=_WRECK.system) == _WRECK


def _known(trial: Trial, *, stale: bool, pattern: Pattern | None = None) -> Known:
    if trial.point is None:
        raise BadArgumentError("the baseline is no trial of a point")
    candidate = Candidate(normal(trial.point), trial.nbytes, trial.error, trial.pruned, pattern)
    return Known(candidate, trial.degradation, trial.passed, stale)
