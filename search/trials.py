"""Trials of a search, run and recorded in rounds over the processes, and their report.

Trials of an interrupted search are replayed, not repeated. Each trial has a line of a log, and on a terminal a bar.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..codec.errors import BadArgumentError, ShrinkpointError
from .arguments import CheckedInputs, Json, ProcessGroup, Progress, SearchArguments
from .cube import Point, normal
from .estimate import Estimator
from .planning import Candidate, Known, Pattern
from .quality import SURELY, Direction, Scale, measured, scale
from .result import LEVELS, SearchResult, Trial
from .search_state import SearchState, unlike

LOG = logging.getLogger("shrinkpoint.search")
_REPEATS = 2
_FAR = 2.0
"""Largest factor between the baselines of two searches; above it, `evaluate` may be another function."""


class ProgressReport:
    """Report trials and notes of a search; as a context manager, remove the bar at the end.

    Args:
        progress: True: a bar on standard error; False: no bar; None: a bar if standard error is a terminal; a callable:
            called with every trial when it is done, without a bar.
        total: maximum number of trials.
        silent: neither bar nor log, because another process reports.
    """

    def __init__(self, progress: Progress, total: int, silent: bool) -> None:
        self._call = progress if callable(progress) else None
        self._silent = silent
        shown = sys.stderr.isatty() if progress is None else progress is True
        self._bar: Any = None
        if shown and not silent:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("search"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("baseline", total=total)

    def __enter__(self) -> ProgressReport:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def trial(self, trial: Trial) -> None:
        """Report a trial that is done."""
        if self._call is not None:
            self._call(trial)
        if not self._silent:
            what = str(trial.point or trial.level or "baseline")
            quality = "nan" if trial.quality is None else f"{trial.quality:.6g}"
            found = f"quality {quality}, degradation {trial.degradation:+.3%}, {trial.nbytes} bytes"
            LOG.info("%s: %s, %.2f s: %s", what, found, trial.seconds, trial.reason)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=trial.reason)

    def say(self, text: str, *, warn: bool = False) -> None:
        """Log a line, as a warning if `warn`, unless the report is silent."""
        if not self._silent:
            LOG.log(logging.WARNING if warn else logging.INFO, "%s", text)


class Trials:
    """The trials of one search.

    Args:
        checked: the state, gradients and kinds as the caller passes them.
        state: the arrays that points change.
        arguments: of the search.
        processes: the processes that share the work.
        report: log and progress bar.
    """

    def __init__(
        self,
        checked: CheckedInputs,
        state: SearchState,
        arguments: SearchArguments,
        processes: ProcessGroup,
        report: ProgressReport,
    ) -> None:
        self._evaluate, self.allowed = arguments.evaluate, arguments.allowed
        self._inputs, self._watched, self.state = checked.inputs, checked.watched, checked.fingerprint
        self._processes, self._report = processes, report
        self.direction = Direction(arguments.cube, state.system)
        self._done = list(arguments.options.resume)
        for trial in self._done:
            if trial.state != self.state:
                raise BadArgumentError(f"resume: a trial ({trial.point}) belongs to another state")
        self._take(state)
        self.found: list[Trial] = []
        self.rounds = 0
        self.scale = Scale(1.0, 0.0, None)
        self._known_spread = 0.0
        self._given_baseline: float | None = None
        self.notes: list[str] = []

    def _take(self, search_state: SearchState) -> None:
        """Replace the search state, and drop the estimates of the former one."""
        self.search_state = search_state
        self._estimate = Estimator(search_state.leaves, search_state.parents, search_state.codec)
        self._candidates: dict[Point, Candidate] = {}

    @property
    def is_ahead(self) -> bool:
        """Return whether some weights are extrapolated by their drift."""
        return self.search_state.leads

    def without_drift(self) -> None:
        """Turn drift prediction off.

        Trials with drift prediction stay recorded but no longer count.
        """
        self._take(self.search_state.without_drift())

    @property
    def tried(self) -> list[Trial]:
        """Return the trials with the present setting of drift prediction."""
        return [t for t in self.found if t.point is not None and t.ahead == self.is_ahead]

    @property
    def at_once(self) -> int:
        """Return the trials per round: one per process, or one if arrays are sharded."""
        return 1 if self.search_state.is_sharded else self._processes.size

    @property
    def passing(self) -> list[Trial]:
        """Return the passing trials of points that may be chosen."""
        return [t for t, _ in self._counting(self.found) if t.passed]

    def _counting(self, trials: Sequence[Trial]) -> list[tuple[Trial, Point]]:
        """Return the trials of points that may be chosen, with the present setting, and the points."""
        return [
            (t, normal(t.point))
            for t in trials
            if t.point is not None and t.ahead == self.is_ahead and not self.direction.is_apart(t.point)
        ]

    @property
    def has_seen_itself(self) -> bool:
        """Return whether `evaluate` was called with the state itself."""
        return any(t.is_baseline for t in self.found)

    def baseline(self, last: SearchResult | None, direction: str | None, given: float | None) -> None:
        """Evaluate the state itself, several times if the spread is unknown.

        Args:
            last: the last search, whose spread and direction hold until a trial contradicts them.
            direction: as the caller gives it; None: not given.
            given: the baseline as the caller gives it, which saves a call; None: not given.
        """
        self._given_baseline = given
        self.direction.begin(last, direction)
        before = None if last is None else last.baseline
        if last is not None and before is not None:
            self._known_spread = last.spread
        calls = _REPEATS if before is None and self.at_once == 1 else 1
        # Each process compares its own result with the given baseline.
        self.evaluate_itself(calls - (given is not None and (self.at_once == 1 or before is not None)))
        now = self.scale.baseline
        if self.direction.is_given or before is None or _ratio(before, now) <= _FAR:
            return
        if self.direction.doubt() is not None:
            self.note(
                f"the state itself evaluates to {now:.6g}, at the last search to {before:.6g}: "
                "the better direction is inferred again"
            )
            self.judge()

    def evaluate_itself(self, rounds: int = 1) -> None:
        """Evaluate the state itself, which also checks the baseline and widens the spread."""
        for _ in range(rounds):
            have = sum(t.is_baseline for t in self.found)
            done = [t for t in self._done if t.is_baseline][have : have + self.at_once]
            replayed = len(done) == self.at_once
            found = done if replayed else self._run([None] * self.at_once)
            self.rounds += 1
            for trial in found:
                self._add(trial, replayed=replayed)
        values = [math.nan if t.quality is None else t.quality for t in self.found if t.is_baseline]
        if self._given_baseline is not None:
            values.insert(0, self._given_baseline)
        self.scale = scale(values, self._known_spread, self.scale.direction, self.allowed)
        self.judge()

    def candidates(self, points: Sequence[Point]) -> list[Candidate]:
        """Return expected sizes and errors of points, with sizes corrected by the trials so far."""
        self._expect(points)
        off = [k.candidate.nbytes / self._candidates[k.candidate.point].nbytes for k in self.known()]
        factor = sum(off) / len(off) if off else 1.0
        known = (self._candidates[normal(p)] for p in points)
        return [dataclasses.replace(c, nbytes=factor * c.nbytes) for c in known]

    def _expect(self, points: Sequence[Point]) -> None:
        """Estimate the points that have not been estimated yet."""
        missing = [p for p in dict.fromkeys(normal(p) for p in points) if p not in self._candidates]
        for point, found in zip(missing, self._estimate(missing), strict=True):
            nbytes = found.nbytes + self.search_state.rest_nbytes(point.rate)
            self._candidates[point] = Candidate(point, nbytes, found.error, found.pruned, found.pattern)

    def known(self, stale: Sequence[Trial] = ()) -> list[Known]:
        """Return the trials for the degradation model; `stale` ones are of an earlier checkpoint."""
        fresh = self._counting(self.found)
        self._expect([p for _, p in fresh])
        return [_known(t, p, self._candidates[p].pattern) for t, p in fresh] + [
            _known(t, p, None, stale=True) for t, p in self._counting(stale)
        ]

    def round(self, points: Sequence[Point], expected: Sequence[float | None]) -> list[Trial]:
        """Try up to `at_once` points at once; trials of an interrupted search are replayed."""
        points = [normal(p) for p in points]
        before = {normal(t.point): t for t in self._done if t.point is not None and t.ahead == self.is_ahead}
        missing = [p for p in points if p not in before]
        found = [before[p] for p in points if p in before]
        if missing:
            self.candidates(missing)
            found += self._run(missing)
        self.judge([*self.found, *found])
        places = {p: i for i, p in enumerate(points)}
        found.sort(key=lambda t: places[t.point] if t.point is not None else -1)
        scored = [self._scored(t, expected[places[t.point]], self.rounds) for t in found if t.point is not None]
        self.rounds += 1
        for trial in scored:
            self._add(trial, replayed=trial.point in before)
        return [t for t in self.tried if t.point in places]

    def level(self, name: str) -> Trial:
        """Try a level of `LEVELS` in place of a point."""
        done = [t for t in self._done if t.level == name]
        (trial,) = done[:1] or self._run([name])
        trial = self._scored(trial, None, self.rounds)
        self.rounds += 1
        self._add(trial, replayed=bool(done))
        return trial

    def _run(self, points: Sequence[Point | str | None]) -> list[Trial]:
        """Try one point or level (None: the state itself) per process, or one on all processes."""
        names = ["the state itself" if p is None else str(p) for p in points]

        def mine() -> list[object] | None:
            place = 0 if self.search_state.is_sharded else self._processes.rank
            if place >= len(points):
                return None
            begin = time.perf_counter()
            point = points[place]
            if point is None:
                state, nbytes = self.search_state.exact(), 0
            elif isinstance(point, Point):
                state, nbytes = self.search_state.restored(self.search_state.config(point))
            else:
                state, nbytes = self.search_state.without_drift().restored(LEVELS[point](), whole=True)
            return [repr(self._quality(names[place], state)), nbytes, time.perf_counter() - begin]

        results = [r for r in self._all("; ".join(names), mine) if r is not None]
        if self.search_state.is_sharded:
            mean = sum(float(r[0]) for r in results) / len(results)
            results = [[mean, results[0][1], results[0][2]]]
        return [
            self._record(point, int(nbytes), float(quality), rank, float(seconds))
            for rank, (point, (quality, nbytes, seconds)) in enumerate(zip(points, results, strict=True))
        ]

    def _quality(self, what: str, state: Any) -> float:
        quality = measured(self._evaluate, state, what)
        path = None if self._watched is None else unlike(self._watched, self._inputs.watch())
        if path is not None:
            raise BadArgumentError(
                f"evaluate changed {path} of the state that is being saved; "
                "it must load the restored state into a copy of the model"
            )
        return quality

    def _all(self, about: str, work: Callable[[], Json]) -> list[Json]:
        """Do the work on every process, and check that all are at the same step of the same search.

        Raises:
            ShrinkpointError: they are not; raised on all of them.
        """
        about = f"round {self.rounds}: {about}"
        results = self._processes.all(lambda: [about, work()])
        for rank, (other, _) in enumerate(results):
            if other != results[0][0]:
                raise ShrinkpointError(
                    f"the searches of the group's processes have diverged: rank 0 is at {results[0][0]}, "
                    f"rank {rank} at {other}"
                )
        return [result for _, result in results]

    @property
    def next_beyond_use(self) -> Point | None:
        """Return the next point from which to infer the direction, or None."""
        return self.direction.next_beyond_use(self.found)

    @property
    def can_be_destroyed(self) -> bool:
        """Return whether compression beyond use changes the state.

        A state of zeros or of few distinct values may not change.
        """
        (worst,) = self.candidates([self.direction.worst])
        return worst.error > 0

    @property
    def is_probed(self) -> bool:
        """Return whether a state compressed beyond use has been tried."""
        return self.direction.is_probed(self.found)

    def blind(self, last: SearchResult | None) -> list[int]:
        """Return the ranks whose `evaluate` returned the same number for every state.

        A state compressed beyond use is included. If one process has seen a single number only, all processes evaluate
        such a state in a separate round, because results of other processes do not show that this one loads the state.
        """
        before = [*self.found, *(() if last is None else last.trials)]
        asked = sorted({t.rank for t in self.tried})
        if self.at_once == 1 or not self.can_be_destroyed or not any(_is_constant(before, rank) for rank in asked):
            return []
        worst = normal(self.direction.worst)
        done = {t.rank: t for t in self._done if t.point == worst}
        replayed = len(done) == self.at_once
        found = [done[rank] for rank in sorted(done)] if replayed else self._run([worst] * self.at_once)
        for trial in found:
            self._add(self._scored(trial, None, self.rounds), replayed=replayed)
        self.rounds += 1
        return [rank for rank in asked if _is_constant([*before, *found], rank)]

    @property
    def is_inherited(self) -> bool:
        """Return whether the direction is only known because the last search inferred it."""
        return self.scale.direction is not None and not self.direction.is_given and not self.is_probed

    @property
    def beyond(self) -> float:
        """Return the relative difference of quality that is too large for chance."""
        return max(self.allowed, SURELY, 3 * self.scale.spread)

    @property
    def gain(self) -> float:
        """Return the relative gain of the best trial over the state itself."""
        tried = (t for t in self.found if t.point is not None and not self.direction.is_apart(t.point))
        return max((-t.degradation for t in tried), default=0.0)

    def judge(self, found: Sequence[Trial] | None = None) -> None:
        """Infer the direction from all trials, and score the trials again if it changes."""
        before = self.scale
        direction, note = self.direction.inferred(self.found if found is None else found, before, self.allowed)
        if note:
            self.note(note)
        self.scale = dataclasses.replace(before, direction=direction)
        if before.direction is None and direction is not None and not self.direction.is_given:
            self._report.say(f"{self.scale.direction} quality is better")
        self.found = [t if t.is_baseline else self._scored(t, t.expected, t.round) for t in self.found]

    def note(self, text: str) -> None:
        """Record and log an observation that contradicts an assumption."""
        if text not in self.notes:
            self.notes.append(text)
            self._report.say(f"search: {text}", warn=True)

    def _record(self, asked: Point | str | None, nbytes: int, quality: float, rank: int, seconds: float) -> Trial:
        point, level = (asked, None) if isinstance(asked, Point) else (None, asked)
        c = None if point is None else self._candidates[point]
        estimates: dict[str, Any] = dict.fromkeys(("estimated", "error", "pruned"), 0.0)
        if c is not None:
            estimates = {"estimated": c.nbytes, "error": c.error, "pruned": c.pruned}
        found: dict[str, Any] = {"quality": None if math.isnan(quality) else quality, "passed": asked is None}
        found |= {"expected": None, "degradation": 0.0, "reason": "the state itself", "seconds": seconds}
        where: dict[str, Any] = {"round": self.rounds, "rank": rank, "state": self.state, "level": level}
        return Trial(point, nbytes, ahead=point is not None and self.is_ahead, **estimates, **found, **where)

    def _scored(self, trial: Trial, expected: float | None, number: int) -> Trial:
        """Return the trial with its degradation, and the reason why it passes or fails."""
        loss = self.scale.degradation(trial.quality)
        passed = loss <= self.allowed  # an infinity or NaN is not within any threshold
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


def _is_constant(trials: Sequence[Trial], rank: int) -> bool:
    """Return whether the process got the same number for all states."""
    return len({t.quality for t in trials if t.rank == rank}) == 1


def _ratio(a: float, b: float) -> float:
    """Return the ratio of larger to smaller magnitude; infinite for different signs."""
    low, high = sorted((abs(a), abs(b)))
    return math.inf if a * b <= 0 else high / low


def _known(trial: Trial, point: Point, pattern: Pattern | None, *, stale: bool = False) -> Known:
    candidate = Candidate(point, trial.nbytes, trial.error, trial.pruned, pattern)
    return Known(candidate, trial.degradation, trial.passed, stale)
