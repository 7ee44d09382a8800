"""`search`: the smallest configuration of a cube that keeps the quality asked for."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ..codec.checkpoint import Checkpoint
from ..codec.errors import ShrinkpointError
from .arguments import Asked, hashed, opened
from .cube import Cube
from .ending import budget_spent, by_error, concluded, finished, nothing_to_choose
from .everywhere import everywhere
from .near import near
from .quality import Evaluate
from .report import Progress, Report
from .result import SearchResult, Trial, outcome
from .space import Choice, Space
from .subject import Subject
from .team import Team
from .trials import Trials


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
    earlier: Any = None,
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
        threshold: relative degradation allowed, in (0, 10], warned of beyond 1; without `evaluate` in (0, 1).
        prev: parent of the checkpoint to come: sizes are those of deltas.
        last: result of the search at the checkpoint before: its neighbourhood is searched first.
        grads: gradient averages, as `SensitivityTracker.grads` gives them; default None, which leaves pruning by
            sensitivity out.
        kinds: as for `compress`.
        group: `torch.distributed` process group whose members all call this with the same arguments: trials run beside
            each other, in rounds of its size. Collectives within `evaluate` are then only right for sharded states
            (DTensor), which all processes try together.
        cube: what to choose from; default `last`'s, else `Cube()`.
        earlier: as for `compress`, of `Store.earlier` or a `Trail`: trials are then coded ahead of the weights' drift,
            and so is what is stored with the configuration found (`Config.ahead`); where that fails even at the mildest
            point, weights are coded where they are, this time. Default None: they always are.
        direction: "lower" or "higher" is better; None: as `last` has it, else inferred from a state that is compressed
            beyond use, which takes one call (two, where the first is NaN).
        baseline: what `evaluate` says of `state` itself, where that is known, as by the training's own evaluation on
            the same data: one call less. The first search evaluates it once all the same, and refuses a number that is
            not comparable. Default None: it is evaluated.
        expected_restores: how often a run is expected to resume, >= 0: so many restores together are to lose no more
            than `threshold`. Each may take what is left of it after those so far (`last`, see
            `SearchResult.restored`), divided by the number still expected; beyond that number half of what is left.
            None: each may take all of `threshold`.
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
        asked = Asked(
            threshold, last, cube, direction, baseline, expected_restores, steps, relax, budget, resume, progress
        )
        given, watched, fingerprint = opened(team, asked, state, evaluate, prev, grads, kinds, earlier)
        cube, allowed = asked.where, asked.allowed
        if last is not None and asked.is_spent:
            return finished(budget_spent(last, allowed, cube), last, begin)
        if evaluate is None or watched is None:
            if not given.is_sharded:
                Subject.made(given, next(iter(cube)))
            return finished(by_error(allowed, cube, ahead=earlier is not None), last, begin)
        subject = Subject.made(given, next(iter(cube)), rated=any(cube.rate))
        if not subject.leaves:
            return finished(nothing_to_choose(allowed, cube, subject), last, begin)
        with Report(progress, budget, silent=team.rank != 0) as report:
            trials = Trials(given, subject, watched, fingerprint, evaluate, allowed, team, report, resume, cube)
            found = finished(_agreed(team, _search(trials, asked)), last, begin)
            report.say(f"search: {found}", warn=not found.met)
        return found
    except BaseException as error:
        team.fail(error)
        raise


def _search(trials: Trials, asked: Asked) -> SearchResult:
    """Baseline, then what passes ahead of the drift, where that is known; where nothing does, what passes without."""
    trials.baseline(asked.last, asked.direction, asked.baseline)
    space = Space(asked.where, trials, asked.budget)
    choice, method, fell_back = _chosen(space, asked)
    if choice.trial is None and trials.is_ahead:
        trials.where_they_are()
        space.notes.append(f"ahead of the drift nothing keeps {trials.allowed:.3%}: weights are coded where they are")
        choice, method, fell_back = _chosen(space, asked)
    if choice.trial is not None and not space.can_tell(asked.last):
        trials.note(
            "evaluate gives one and the same number for the state itself, for what was tried, and for a state "
            "compressed beyond use: whatever is chosen passes. Does it load the state that it is given?"
        )
    elif choice.trial is not None and space.left > 0 and (blind := trials.blind(asked.last)):
        trials.note(
            f"evaluate gives one and the same number on rank {', '.join(map(str, blind))}, whatever it is given: what "
            "passed there may lose anything. Does it load the state there?"
        )
    return concluded(space, choice, method, fell_back)


def _chosen(space: Space, asked: Asked) -> tuple[Choice, str, bool]:
    """Neighbourhood where there is a last choice, and the whole cube where that finds nothing."""
    last, choice, fell_back = asked.last, None, False
    if last is not None and last.point is not None and space.has(last.point):
        choice = near(space, last, asked.steps, relax=asked.relax)
        fell_back = choice.trial is None
        if fell_back:
            # Neighbours are milder than what passed before. Whoever tries all others until one passes finds what passes
            # by chance, if there is chance.
            space.check()
    if choice is not None and choice.trial is not None:
        return choice, "neighbourhood", False
    stale = () if last is None else last.trials
    if space.trials.is_ahead and not space.keeps_mildest(stale):
        return Choice(None, {}), "exhaustive", fell_back
    return everywhere(space, stale, soon=fell_back), "exhaustive", fell_back


def _agreed(team: Team, found: SearchResult) -> SearchResult:
    """What fails until here is heard by all, and all have found the same; rank 0's, for it is the next search's `last`
    on all of them."""
    if team.size == 1:
        return found
    data = found.to_json()
    same = [*(data[name] for name in ("config", "point", "met", "direction")), outcome(found.trials)]
    results = team.all(lambda: [hashed(json.dumps(same)), data if team.rank == 0 else None])
    for rank, (other, _) in enumerate(results):
        if other != results[0][0]:
            raise ShrinkpointError(f"the processes of the group found different things: rank {rank} and rank 0")
    return SearchResult.from_json(results[0][1])
