"""`search`: the smallest configuration of a cube that keeps the quality asked for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codec import presets
from ..codec.base import check_range
from ..codec.checkpoint import Checkpoint
from ..codec.config import Config
from ..codec.errors import BadArgumentError, ShrinkpointError
from ..kernels.arguments import flag
from .cube import Cube, Point, normal
from .plan import HOPELESS, LATE, Candidate, chances, degradations, distinct, next_trials, open_points, undominated
from .quality import Evaluate
from .report import Progress, Report
from .result import DIRECTIONS, SearchResult, Trial, essence, outcome
from .subject import Given, Subject, Watched
from .team import Team
from .trials import Trials

TOLERANCE = 0.01
"""Share of the bytes that is not worth another trial."""
BETTER = 0.9
"""The pruning metric is switched where the other's degradation is at most so many times as large."""
PATIENCE = 4
"""Searches in which the other metric is not tried again once it was found no better."""
_NOTHING = 1e-3
"""Share of the threshold that is too little to search for."""
LIKELY = 0.5
"""One after another, neighbours are only tried that pass with at least this probability; beside each other all are that
are not hopeless."""


_PROCESS = uuid.uuid4().hex
"""Names this process: the time between searches of two processes is not all training."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """How a search ended: the trial taken (None: nothing passes), and what was not tried and why."""

    trial: Trial | None
    discarded: dict[str, int]
    notes: tuple[str, ...] = ()
    patience: int = 0


def search(
    state: Any,
    evaluate: Evaluate | None,
    threshold: float,
    *,
    prev: Checkpoint | None = None,
    last: SearchResult | None = None,
    grads: Any = None,
    kinds: Mapping[str, Any] | None = None,
    group: Any = None,
    cube: Cube | None = None,
    direction: str | None = None,
    baseline: float | None = None,
    expected_restores: float | None = None,
    steps: int = 2,
    relax: bool = False,
    budget: int = 12,
    resume: Sequence[Trial] = (),
    progress: Progress = None,
) -> SearchResult:
    """Find the smallest configuration of a cube at which a restored state is good enough.

    D(point) = (evaluate(restored) - evaluate(state)) / |evaluate(state)|, with its sign turned where higher is better;
    the result has the fewest stored bytes of the points with D <= threshold that were tried. Which are tried is planned
    from sizes and errors that histograms and pair counts predict: docs/search.md. The same arguments give the same
    trials and the same choice.

    Args:
        state: as for `compress`.
        evaluate: gets a restored state (fresh arrays on the host, for it to keep or change) and returns a number: a
            loss, an accuracy, a perplexity; of the same data each time. It must leave `state` and `grads` as they are:
            load into a copy of the model. What it draws from the global generators of Python, NumPy and torch is put
            back. None: no trials, `threshold` is the relative L2 error that no array may exceed.
        threshold: relative degradation allowed, in (0, 10]; without `evaluate` in (0, 1).
        prev: parent of the checkpoint to come: sizes are those of deltas.
        last: result of the search at the checkpoint before: its neighbourhood is searched first.
        grads: gradient averages, as `SensitivityTracker.grads` gives them; default None, which leaves pruning by
            sensitivity out.
        kinds: as for `compress`.
        group: `torch.distributed` process group whose members all call this with the same arguments: trials run beside
            each other, in rounds of its size. Collectives within `evaluate` are then only right for sharded states
            (DTensor), which all processes try together.
        cube: what to choose from; default `last`'s, else `Cube()`.
        direction: "lower" or "higher" is better; None: as `last` has it, else inferred from a state that is compressed
            beyond use, which takes one call (two, where the first is NaN).
        baseline: what `evaluate` says of `state` itself, where that is known, as by the training's own evaluation on
            the same data: one call less. The first search evaluates it once all the same, and refuses a number that is
            not comparable. Default None: it is evaluated.
        expected_restores: how often a run is expected to resume, >= 0: so many restores together are to lose no more
            than `threshold`. What those so far took (`last`, see `SearchResult.restored`) is taken off, and the rest
            is shared by those to come: all of it by the last one expected, half of it by each beyond. None: each may
            take all of `threshold`.
        steps: reach of the neighbourhood search, 0 or more; default 2.
        relax: let the neighbourhood search be more aggressive than `last`; default False.
        budget: most calls of `evaluate` one after another, baseline included, 3 or more; default 12.
        resume: trials of an interrupted search with the same arguments, which are then not run again; collect them with
            `progress=done.append`.
        progress: True or False: a bar on standard error; None: where that is a terminal; or a callable for each trial.

    Returns:
        The choice, with every trial. Where no point is good enough it is lossless, and `met` is False.

    Raises:
        BadArgumentError: an argument out of range; `evaluate` raised, returned no number, returned NaN for the state
            itself, changed `state`, or gave numbers that cannot be compared; a failure on another process.
        MissingParentError: `prev` is not resolved.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        >>> def loss(restored):
        ...     return 1.0 + float(((restored["w"] - w) ** 2).mean())
        >>> found = sp.search({"w": w}, loss, 0.01)
        >>> found.met, found.degradation <= 0.01, sp.compress({"w": w}, cfg=found.config).nbytes < w.nbytes / 6
        (True, True, True)

    Source: Inshrinkerator, section 5; DynaQuant, section A.3.
    """
    begin = time.perf_counter()
    team = Team(group)
    try:
        asked = _Asked(
            threshold, last, cube, direction, baseline, expected_restores, steps, relax, budget, resume, progress
        )
        given, watched, fingerprint = _opened(team, asked, state, evaluate, prev, grads, kinds)
        cube, allowed = asked.where, asked.allowed
        if last is not None and asked.is_spent:
            return _finished(_spent(last, allowed, cube), last, begin)
        if evaluate is None or watched is None:
            if not given.is_sharded:
                Subject.made(given, next(iter(cube)))
            return _finished(_by_error(allowed, cube), last, begin)
        subject = Subject.made(given, next(iter(cube)))
        if not subject.leaves:
            return _finished(_nothing(allowed, cube, subject), last, begin)
        with Report(progress, budget, silent=team.rank != 0) as report:
            trials = Trials(given, subject, watched, fingerprint, evaluate, allowed, team, report, resume, cube)
            found = _agreed(team, _search(trials, asked))
            report.say(f"search: {found}", warn=not found.met)
        return _finished(found, last, begin)
    except BaseException as error:
        team.fail(error)
        raise


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of a search that are no arrays, as given."""

    threshold: float
    last: SearchResult | None
    cube: Cube | None
    direction: str | None
    baseline: float | None
    expected_restores: float | None
    steps: int
    relax: bool
    budget: int
    resume: Sequence[Trial]
    progress: Progress

    @property
    def where(self) -> Cube:
        """What is chosen from."""
        return self.cube if self.cube is not None else (self.last.cube if self.last is not None else Cube())

    @property
    def allowed(self) -> float:
        """Degradation that passes: of the whole threshold, or of what restores have left of it, a share."""
        if self.expected_restores is None:
            return self.threshold
        done, spent = (0, 0.0) if self.last is None else (self.last.restores, self.last.spent)
        ahead = self.expected_restores - done
        # However many there are beyond what was expected, halves of what is left never sum to more.
        share = 2.0 if done and ahead <= 0 else max(1.0, ahead)
        return max(0.0, self.threshold - spent) / share

    @property
    def is_spent(self) -> bool:
        """Whether restores have left less than `evaluate` can tell from nothing."""
        if self.last is None or self.expected_restores is None or not self.last.spent:
            return False
        return self.allowed <= max(self.last.spread, _NOTHING * self.threshold)

    def fingerprints(self) -> dict[str, str]:
        """A hash of each that decides what is tried."""
        names = ("direction", "baseline", "expected_restores", "steps", "relax", "budget")
        return {name: repr(getattr(self, name)) for name in names} | {
            "threshold": repr(float(self.threshold)),
            "cube": _hashed(json.dumps(self.where.to_json())),
            "last": "" if self.last is None else _hashed(essence(self.last)),
            "resume": _hashed(json.dumps(outcome(self.resume))),
        }


def _opened(
    team: Team, asked: _Asked, state: Any, evaluate: Any, prev: Any, grads: Any, kinds: Any
) -> tuple[Given, Watched | None, str]:
    """Check all arguments, on every process before any does something that others must join in.

    Returns:
        The state taken apart, what it holds, and a fingerprint of what trials must have in common; None and "" where
        there are no trials and nobody to compare with.

    Raises:
        BadArgumentError: an argument is of no use, here or on another process, or is not the same on all of them.
    """
    taken: list[tuple[Given, Watched | None]] = []

    def opening() -> dict[str, Any] | None:
        _check(asked, evaluate)
        given = Given.of(state, prev, grads, kinds)
        if evaluate is None and team.size == 1:
            taken.append((given, None))
            return None
        watched = given.watch()
        taken.append((given, watched))
        same = asked.fingerprints() | given.fingerprints(watched) | {"evaluate": str(evaluate is None)}
        return {"same": same, "own": _hashed(repr(watched))}

    told = team.all(opening)
    if taken[0][1] is None:
        return *taken[0], ""
    for rank, other in enumerate(told):
        unlike = sorted(name for name, value in other["same"].items() if value != told[0]["same"][name])
        if unlike:
            raise BadArgumentError(
                f"the processes of the group do not have the same {' and '.join(unlike)}: "
                f"that of rank {rank} is not that of rank 0"
            )
    # Of what is in parts each process has its own values; a trial belongs to all of them.
    point = next(iter(asked.where))
    names = ("state", "prev", "grads", "kinds")
    common = [told[0]["same"][n] for n in names] + [t["own"] for t in told if taken[0][0].is_sharded]
    return *taken[0], _hashed(json.dumps([common, point.config().to_json()]))


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _agreed(team: Team, found: SearchResult) -> SearchResult:
    """What fails until here is heard by all, and all have found the same; rank 0's, for it is the next search's `last`
    on all of them."""
    if team.size == 1:
        return found
    data = found.to_json()
    same = [*(data[name] for name in ("config", "point", "met", "direction")), outcome(found.trials)]
    results = team.all(lambda: [_hashed(json.dumps(same)), data if team.rank == 0 else None])
    for rank, (other, _) in enumerate(results):
        if other != results[0][0]:
            raise ShrinkpointError(f"the processes of the group found different things: rank {rank} and rank 0")
    return SearchResult.from_json(results[0][1])


def _search(trials: Trials, asked: _Asked) -> SearchResult:
    """Baseline, neighbourhood where there is a last choice, and the whole cube where that finds nothing."""
    last = asked.last
    trials.baseline(last, asked.direction, asked.baseline)
    space = _Space(asked.where, trials, asked.budget)
    choice, fell_back = None, False
    if last is not None and last.point is not None and space.has(last.point):
        choice = _near(space, last, asked.steps, relax=asked.relax)
        fell_back = choice.trial is None
        if fell_back:
            # Neighbours are milder than what passed before. Whoever tries all others until one passes finds what passes
            # by chance, if there is chance.
            space.check()
    method = "neighbourhood"
    if choice is None or choice.trial is None:
        method = "exhaustive"
        choice = _everywhere(space, () if last is None else last.trials, soon=fell_back)
    return _result(space, choice, method, fell_back)


def _check(asked: _Asked, evaluate: Any) -> None:
    last, cube, direction, progress = asked.last, asked.cube, asked.direction, asked.progress
    if last is not None and not isinstance(last, SearchResult):
        raise BadArgumentError(f"last must be a SearchResult, not {type(last).__qualname__}")
    if cube is not None and not isinstance(cube, Cube):
        raise BadArgumentError(f"cube must be a Cube, not {type(cube).__qualname__}")
    if direction is not None and direction not in DIRECTIONS:
        raise BadArgumentError(f"direction is {direction!r}; it must be one of {', '.join(DIRECTIONS)}, or None")
    if asked.baseline is not None:
        check_range("baseline", asked.baseline, -math.inf, math.inf, open_low=True, open_high=True)
        if asked.baseline == 0:
            raise BadArgumentError("baseline is 0; a relative degradation of 0 has no meaning")
    if asked.expected_restores is not None:
        check_range("expected_restores", asked.expected_restores, 0, 1e9)
    for name, value, least in (("steps", asked.steps, 0), ("budget", asked.budget, 3)):
        if type(value) is not int or value < least:
            raise BadArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}")
    flag("relax", asked.relax)
    if not isinstance(asked.resume, Sequence) or not all(isinstance(t, Trial) for t in asked.resume):
        raise BadArgumentError("resume must be Trials, as `progress` was given them or SearchResult.trials has them")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise BadArgumentError(f"progress is {progress!r}; it must be True, False, None or callable")
    limit = 1 if evaluate is None else 10
    check_range("threshold", asked.threshold, 0, limit, open_low=True, open_high=evaluate is None)
    if evaluate is not None and not callable(evaluate):
        raise BadArgumentError(f"evaluate is {evaluate!r}; it must be callable or None")


class _Space:
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
        return LIKELY if self.trials.at_once == 1 else HOPELESS

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
        return [t for t in trials.found if t.point in asked]

    def probe(self, spare: int = 0) -> None:
        """See which direction is worse, from a state compressed beyond use; a milder one, where that is no number.

        Args:
            spare: rounds to leave; default 0.
        """
        while self.left > spare and (wreck := self.trials.next_wreck) is not None:
            self.trials.round([wreck], [None])

    def check(self) -> None:
        """Evaluate the state itself again, once a search: numbers that are too good may be no numbers to compare.

        Processes that each evaluated it at the start have seen as much; with a known baseline instead they have not.
        """
        trials = self.trials
        if self.left > 0 and not self._is_checked and (trials.at_once == 1 or not trials.has_seen_itself):
            self._is_checked = True
            trials.again()


def _near(space: _Space, last: SearchResult, steps: int, *, relax: bool) -> _Choice:
    """Neighbourhood search: `last`'s point under the other metric, then itself and its neighbours by falling ratio."""
    trials = space.trials
    if last.point is None:
        return _Choice(None, {})
    origin = normal(last.point)
    points = list(dict.fromkeys(normal(p) for p in space.cube.neighbours(origin, steps, relax=relax)))
    twin, patience = _twin(space, origin, last), max(0, last.patience - 1)
    metric = origin.metric
    tried: dict[Point, Trial] = {}
    discarded: dict[str, int] = {}
    while space.left > 0:
        own = [p for p in points if not p.prune or p.metric == metric]
        # Whoever asks for more aggressive points gets them before the last choice itself.
        first = [p for p in (twin, None if relax else origin) if p is not None and p not in tried]
        queue, discarded = _queue(space, [p for p in own if p not in tried and p not in first], last.trials)
        order = first + queue
        if not order:
            break
        for trial in space.round(order[: trials.at_once], last.trials):
            if trial.point is not None:
                tried[trial.point] = trial
        # What was learned since may have changed how they are judged.
        tried = {t.point: t for t in trials.found if t.point in tried}
        if twin is not None and twin in tried and origin in tried:
            other, same = tried[twin].degradation, tried[origin].degradation
            patience = PATIENCE
            if other <= BETTER * same and same - other > trials.scale.spread:
                metric = twin.metric
                space.notes.append(f"pruning metric switched to {metric}: {other:+.3%} instead of {same:+.3%}")
            twin = None
        passing = [t for p, t in tried.items() if t.passed and (not p.prune or p.metric == metric)]
        undecided = twin is not None and twin in tried and not relax
        if passing and not undecided:
            return _Choice(min(passing, key=lambda t: t.nbytes), discarded, patience=patience)
        if not passing and relax:
            space.check()
    return _Choice(None, discarded)


def _twin(space: _Space, origin: Point, last: SearchResult) -> Point | None:
    """The same point under the other metric, unless that was no better a short while ago, or is expected to fail."""
    others = [m for m in space.cube.metric if m != origin.metric]
    if not origin.prune or not others or last.patience > 0:
        return None
    trials, twin = space.trials, dataclasses.replace(origin, metric=others[0])
    odds = chances(trials.candidates([twin]), trials.known(last.trials), trials.allowed, space.floor)
    return twin if odds[0] >= space.likely else None


def _queue(space: _Space, points: Sequence[Point], stale: Sequence[Trial]) -> tuple[list[Point], dict[str, int]]:
    """The neighbours worth a trial, by falling ratio, and how many are not, by reason."""
    trials = space.trials
    candidates = trials.candidates(points)
    kept = undominated(candidates)
    known = trials.known(stale)
    state = open_points(kept, known, trials.allowed, 0.0, space.floor)
    odds = chances(kept, known, trials.allowed, space.floor)
    worth = [(p >= space.likely, bool(out)) for p, out in zip(odds, state.ruled_out, strict=True)]
    discarded = {
        "no smaller and no milder than another": len(candidates) - len(kept),
        "more aggressive than one that failed": sum(out for _, out in worth),
        "expected to fail": sum(not likely and not out for likely, out in worth),
    }
    return [c.point for c, (likely, out) in zip(kept, worth, strict=True) if likely and not out], discarded


def _everywhere(space: _Space, stale: Sequence[Trial], *, soon: bool) -> _Choice:
    """Guided exhaustive search: the whole cube, both metrics; then fewer bins for embeddings.

    Args:
        soon: in the middle of a run, what surely passes is enough: the first that does is taken.
    """
    trials = space.trials
    points = list(dict.fromkeys(normal(p) for p in space.cube))
    worth = [c.point for c in distinct(trials.candidates(points))]
    while space.left > 0 and not (soon and trials.passing):
        candidates = trials.candidates(worth)
        known = trials.known(stale)
        chosen = next_trials(
            candidates,
            known,
            trials.allowed,
            at_once=trials.at_once,
            tolerance=TOLERANCE,
            floor=space.floor,
            left=min(space.left, LATE) if soon else space.left,
        )
        if not chosen:
            break
        space.round(chosen, stale)
    best = min(trials.passing, key=lambda t: t.nbytes, default=None)
    notes = []
    if space.left <= 0:
        notes.append(f"the budget of {space.budget} evaluations one after another is spent")
    discarded = {"the same as another": len(points) - len(worth)}
    discarded |= _left_out(trials.candidates(worth), trials, space.floor, stale)
    if best is not None:
        _fewer_embedding_bins(space, best, stale)
    if not soon:
        space.check()
    if best is not None:
        # They may be judged otherwise by now.
        best = min(trials.passing, key=lambda t: t.nbytes, default=None)
    return _Choice(best, discarded, tuple(notes))


def _left_out(candidates: Sequence[Candidate], trials: Trials, floor: float, stale: Sequence[Trial]) -> dict[str, int]:
    """How many points were never tried, by reason."""
    known = trials.known(stale)
    state = open_points(candidates, known, trials.allowed, TOLERANCE, floor)
    seen = {normal(t.point) for t in trials.found if t.point is not None}
    untried = np.array([c.point not in seen for c in candidates], bool)
    hopeless = chances(candidates, known, trials.allowed, floor) <= HOPELESS
    counts = {
        "more aggressive than one that failed": int((untried & state.ruled_out).sum()),
        "not smaller than the choice": int((untried & ~state.ruled_out & ~state.alive).sum()),
        "expected to fail": int((state.alive & hopeless).sum()),
        "not worth a trial": int((state.alive & ~hopeless).sum()),
    }
    return {reason: n for reason, n in counts.items() if n}


def _fewer_embedding_bins(space: _Space, best: Trial, stale: Sequence[Trial]) -> None:
    """Try the choice with fewer bins for embeddings, as long as that saves something and passes."""
    for bins in reversed(space.cube.embedding_bins[:-1]):
        if best.point is None or space.left <= 0:
            break
        coarser = dataclasses.replace(best.point, embedding_bins=bins)
        (candidate,) = space.trials.candidates([coarser])
        odds = chances([candidate], space.trials.known(stale), space.trials.allowed, space.floor)
        if candidate.nbytes > (1 - TOLERANCE) * best.nbytes or odds[0] <= HOPELESS:
            break
        (trial, *_) = space.round([coarser], stale)
        if not trial.passed or trial.nbytes >= best.nbytes:
            break
        best = trial


def _result(space: _Space, choice: _Choice, method: str, fell_back: bool) -> SearchResult:
    trials, best = space.trials, choice.trial
    notes = [*space.notes, *choice.notes, *trials.notes]
    if best is None or best.point is None:
        notes.append(
            f"no configuration of the cube was seen to keep {trials.allowed:.3%}: lossless is used; "
            f"the cube ends at {space.asked.bins[-1]} bins, more may do"
        )
    elif abs(best.degradation) <= trials.scale.spread:
        notes.append(f"the choice's degradation is within the spread of evaluate, {trials.scale.spread:.3%}")
    if best is not None and best.point is not None and best.point.bins in (space.asked.bins[0], space.asked.bins[-1]):
        notes.append(
            f"the choice has {best.point.bins} bins, an end of the cube: a wider one may hold a smaller choice"
        )
    if trials.scale.direction is None:
        notes.append("which direction is better is not known: any difference counts as a loss")
    elif not trials.is_given:
        whence = "from a state compressed beyond use" if trials.is_probed else "at an earlier search"
        notes.append(f"{trials.scale.direction} quality is better, as inferred {whence}")
    if trials.scale.direction is not None and trials.gain > trials.beyond:
        notes.append(
            f"a compressed state is better than the state itself by {trials.gain:.3%}, if {trials.scale.direction} "
            "quality is better: by luck, or because that or `evaluate` is not as it should be"
        )
    notes += [f"a state compressed beyond use ({p}) evaluated to no number" for p in trials.no_numbers]
    if trials.probed_in_vain and not trials.is_given:
        notes.append("no state compressed beyond use evaluated to a number: the direction is not looked for again")
    point = None if best is None else best.point
    return SearchResult(
        config=presets.lossless() if point is None else point.config(),
        point=point,
        trials=tuple(trials.found),
        met=point is not None,
        method=method,
        fell_back=fell_back,
        nbytes=0 if best is None else best.nbytes,
        baseline=trials.scale.baseline,
        degradation=None if best is None else best.degradation,
        spread=trials.scale.spread,
        direction=trials.scale.direction,
        direction_given=trials.is_given,
        threshold=trials.allowed,
        cube=space.asked,
        discarded={k: n for k, n in choice.discarded.items() if n},
        notes=tuple(notes),
        rounds=trials.rounds,
        patience=choice.patience,
        probed_in_vain=trials.probed_in_vain,
    )


def _untried(config: Config, allowed: float, cube: Cube, method: str, note: str) -> SearchResult:
    return SearchResult(
        config=config, point=None, trials=(), met=True, method=method, fell_back=False, nbytes=0, baseline=None,
        degradation=None, spread=0.0, direction=None, direction_given=False, threshold=allowed, cube=cube,
        discarded={}, notes=(note,), rounds=0, patience=0,
    )  # fmt: skip


def _by_error(allowed: float, cube: Cube) -> SearchResult:
    """Without `evaluate`: the number of bins follows from the error target, array by array, when it is compressed."""
    mildest = max(cube, key=Point.expected_bits)
    config = dataclasses.replace(mildest, prune=0.0, rate=0.0).config()
    note = f"no evaluate: every array keeps a relative error of {allowed:g}, with as few bins as that takes"
    return _untried(
        Config(config.rules, max_rel_error=allowed, chain=config.chain), allowed, cube, "error target", note
    )


def _nothing(allowed: float, cube: Cube, subject: Subject) -> SearchResult:
    note = "the state has no array that the cube would change"
    return _untried(subject.rest, allowed, cube, "nothing to choose", note)


def _spent(last: SearchResult, allowed: float, cube: Cube) -> SearchResult:
    note = f"{last.restores} restores have taken {last.spent:.3%}: what is left of it is too little to search for"
    return dataclasses.replace(
        last, config=presets.lossless(), point=None, trials=(), met=False, method="budget spent", fell_back=False,
        nbytes=0, degradation=None, threshold=allowed, cube=cube, discarded={}, notes=(note,), rounds=0,
    )  # fmt: skip


def _finished(found: SearchResult, last: SearchResult | None, begin: float) -> SearchResult:
    """The result with its cost: how long it took, and that as a share of the time since the last search ended; and with
    what restores have taken so far."""
    seconds, now = time.perf_counter() - begin, time.time()
    here = last is not None and last.process == _PROCESS
    training = now - seconds - last.finished if last is not None and here else 0.0
    share = seconds / training if training > 0 else None
    done, spent = (0, 0.0) if last is None else (last.restores, last.spent)
    return dataclasses.replace(
        found, restores=done, spent=spent, seconds=seconds, finished=now, share=share, process=_PROCESS
    )
