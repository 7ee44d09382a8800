"""`search`: find the smallest configuration of a cube that keeps a quality threshold."""

from __future__ import annotations

import dataclasses
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

from ..codec import presets
from ..codec.checkpoint import Checkpoint
from ..codec.config import Config
from ..codec.errors import ShrinkpointError
from ..codec.inputs import Inputs
from .arguments import ProcessGroup, SearchArguments, SearchOptions, check_arguments, hashed
from .cube import Cube, Point
from .methods import Choice, Space, search_exhaustively, search_neighbourhood, search_published
from .quality import Evaluate
from .result import LEVELS, SearchResult, Trial, outcome
from .search_state import SearchInputs, SearchState
from .trials import ProgressReport, Trials

_PROCESS = uuid.uuid4().hex
"""Identifies this process. The time between two searches is training time only within one process."""


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
    options: SearchOptions | None = None,
) -> SearchResult:
    """Find the smallest configuration whose restored state is good enough.

    The degradation of a configuration is (evaluate(restored) - evaluate(state)) / |evaluate(state)|, with the opposite
    sign where higher is better. Of the configurations tried, the result has the fewest stored bytes among those with
    degradation <= threshold. `docs/search.md` describes which are tried. The same arguments give the same result.

    Args:
        state: as for `compress`.
        evaluate: called with a restored state (fresh arrays in host memory, which it may keep or change); returns a
            number such as a loss, an accuracy or a perplexity, on the same data at every call. It must not change
            `state` or `grads`: load the restored state into a copy of the model. The global random generators of
            Python, NumPy and torch are restored after each call. None: no trials; `threshold` is then the largest
            relative L2 error of any array.
        threshold: relative degradation allowed, in (0, 10], with a warning above 1; without `evaluate` in (0, 1).
        prev: parent of the next checkpoint, so that sizes are those of a delta; default None, a base.
        last: result of the previous search of this run, whose neighbourhood is searched first; default None.
        grads: gradient averages, as `SensitivityTracker.grads` gives them; default None, which excludes pruning by
            sensitivity.
        kinds: as for `compress`.
        group: `torch.distributed` process group whose members all call this with the same arguments: each round runs
            one trial per process. `evaluate` may use collectives only for sharded states (DTensor), which all
            processes try together. Default None: this process alone.
        options: further settings; default `SearchOptions()`.

    Returns:
        The choice with all trials. If no point of the cube is good enough, it is the first of `presets.precise()`,
        `exact_weights()` and `lossless()` that is; `met` is then False, but for `precise`.

    Raises:
        BadArgumentError: an argument is out of range; `evaluate` raised, returned something other than a number,
            returned NaN for the state itself, changed `state`, or gave numbers that cannot be compared; another process
            failed.
        MissingParentError: `prev` is not resolved.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        >>> def loss(restored):
        ...     return 1.0 + float(((restored["weight"] - w) ** 2).mean())
        >>> kinds = {"weight": "linear"}
        >>> found = sp.search({"weight": w}, loss, 0.01, kinds=kinds)
        >>> found.met, found.degradation <= 0.01
        (True, True)
        >>> sp.compress({"weight": w}, cfg=found.config, kinds=kinds).nbytes < w.nbytes / 6
        True

    Source: Inshrinkerator, section 5; DynaQuant, section A.3.
    """
    begin = time.perf_counter()
    processes = ProcessGroup(group)
    try:
        chosen = SearchOptions() if options is None else options
        arguments = SearchArguments(evaluate, threshold, last, chosen)
        earlier = getattr(chosen, "earlier", None)
        checked = check_arguments(
            processes, arguments, lambda: SearchInputs(state, grads, Inputs.of(state, prev, kinds, grads, earlier))
        )
        inputs = checked.inputs
        cube, allowed = arguments.cube, arguments.allowed
        if last is not None and arguments.is_spent:
            return _with_costs(_budget_spent(last, allowed, cube), last, begin)
        if evaluate is None:
            if not inputs.is_sharded:
                SearchState.made(inputs, next(iter(cube)))
            return _with_costs(_error_target_result(allowed, cube, ahead=earlier is not None), last, begin)
        search_state = SearchState.made(inputs, next(iter(cube)), rated=any(cube.rate))
        if not search_state.leaves:
            return _with_costs(_nothing_to_choose(allowed, cube, search_state), last, begin)
        with ProgressReport(chosen.progress, chosen.budget, silent=processes.rank != 0) as report:
            trials = Trials(checked, search_state, arguments, processes, report)
            found = _with_costs(_agreed(processes, _search(trials, arguments)), last, begin)
            report.say(f"search: {found}", warn=not found.met)
        return found
    except BaseException as error:
        processes.fail(error)
        raise


def _search(trials: Trials, arguments: SearchArguments) -> SearchResult:
    """Evaluate the baseline, then search; without drift prediction if nothing passes with it."""
    options, last = arguments.options, arguments.last
    trials.baseline(last, options.direction, options.baseline)
    space = Space(arguments.cube, trials, options.budget)
    choice, method, fell_back = _chosen(space, arguments)
    if choice.trial is None and trials.is_ahead:
        trials.without_drift()
        space.notes.append(f"no extrapolated weights keep {trials.allowed:.3%}: weights are coded where they are")
        choice, method, fell_back = _chosen(space, arguments)
    if choice.trial is not None and not space.depends_on_state(last):
        trials.note(
            "evaluate returns the same number for the state itself, for every trial, and for a state compressed beyond "
            "use: every choice passes. Does it load the state that it is given?"
        )
    elif choice.trial is not None and space.left > 0 and (blind := trials.blind(last)):
        trials.note(
            f"evaluate returns the same number for every state on rank {', '.join(map(str, blind))}: trials that "
            "passed there may lose anything. Does it load the state there?"
        )
    level = None
    if choice.trial is None:
        tried = (trials.level(name) for name in list(LEVELS)[:-1] if space.left > 0)
        level = next((t for t in tried if t.passed), None)
    return _conclude(space, choice, level, method, fell_back)


def _chosen(space: Space, arguments: SearchArguments) -> tuple[Choice, str, bool]:
    """Search the neighbourhood of the last choice, then the whole cube if nothing passes there."""
    last, choice, fell_back = arguments.last, None, False
    if last is not None and last.point is not None and space.has(last.point):
        choice = search_neighbourhood(space, last, arguments.options)
        fell_back = choice.trial is None
        if fell_back:
            # Neighbours are milder than the last choice, which passed. If none passes, `evaluate` may be noisy: trying
            # further points until one passes would then choose by chance.
            space.check()
    if choice is not None and choice.trial is not None:
        return choice, "neighbourhood", False
    stale = () if last is None else last.trials
    if space.trials.is_ahead and not space.keeps_mildest(stale):
        return Choice(None, {}), "exhaustive", fell_back
    if arguments.options.method == "published":
        return search_published(space, stale), "exhaustive", fell_back
    return search_exhaustively(space, stale, soon=fell_back), "exhaustive", fell_back


def _agreed(processes: ProcessGroup, found: SearchResult) -> SearchResult:
    """Check that all processes found the same, and return rank 0's result.

    The next search needs the same result as `last` on every process.
    """
    if processes.size == 1:
        return found
    data = found.to_json()
    same = [*(data[name] for name in ("config", "point", "met", "direction")), outcome(found.trials)]
    results = processes.all(lambda: [hashed(json.dumps(same)), data if processes.rank == 0 else None])
    for rank, (other, _) in enumerate(results):
        if other != results[0][0]:
            raise ShrinkpointError(f"the search results of the group's processes differ: rank {rank} and rank 0")
    return SearchResult.from_json(results[0][1])


def _conclude(space: Space, choice: Choice, level: Trial | None, method: str, fell_back: bool) -> SearchResult:
    """Return the result of a search with trials.

    Args:
        space: the points searched, with their trials.
        choice: the trial chosen.
        level: the trial of the level that is used where no point passes; None where none was tried or none passed.
        method: the search method, as in `SearchResult.method`.
        fell_back: whether the neighbourhood of the last choice was tried without success.
    """
    trials, best = space.trials, choice.trial or level
    point = None if best is None else best.point
    # Without a call left for the trials of levels, exact weights are assumed to pass.
    has_failed = any(t.level == "exact weights" and not t.passed for t in trials.found)
    name = (best.level if best is not None else None) or ("lossless" if has_failed else "exact weights")
    direction, in_vain = trials.direction, trials.direction.in_vain(trials.found)
    notes = [*space.notes, *choice.notes, *trials.notes]
    if best is None or point is None:
        notes.append(
            f"no configuration of the cube that was tried keeps {trials.allowed:.3%}: "
            f"presets.{name.replace(' ', '_')}() is used; the cube ends at {space.asked.bins[-1]} bins, more may pass"
        )
    elif abs(best.degradation) <= trials.scale.spread:
        notes.append(f"the choice's degradation is within the spread of evaluate, {trials.scale.spread:.3%}")
    if point is not None and point.bins in (space.asked.bins[0], space.asked.bins[-1]):
        notes.append(f"the choice has {point.bins} bins, an end of the cube: a wider one may hold a smaller choice")
    if trials.scale.direction is None:
        notes.append("the better direction is not known: any difference counts as a loss")
    elif not direction.is_given:
        whence = "from a state compressed beyond use" if trials.is_probed else "at an earlier search"
        notes.append(f"{trials.scale.direction} quality is better, as inferred {whence}")
    if trials.scale.direction is not None and trials.gain > trials.beyond:
        notes.append(
            f"a compressed state is better than the state itself by {trials.gain:.3%}, if {trials.scale.direction} "
            "quality is better: by chance, or because the direction or `evaluate` is wrong"
        )
    beyond_use = direction.no_numbers(trials.found)
    notes += [f"the quality of a state compressed beyond use ({p}) is not a number" for p in beyond_use]
    if in_vain and not direction.is_given:
        notes.append(
            "the quality of every state compressed beyond use is not a number: the direction is not inferred again"
        )
    return SearchResult(
        config=LEVELS[name]() if point is None else trials.search_state.config(point),
        point=point,
        trials=tuple(trials.found),
        met=point is not None or name == "precise",
        method=method,
        fell_back=fell_back,
        nbytes=0 if best is None else best.nbytes,
        baseline=trials.scale.baseline,
        degradation=None if best is None else best.degradation,
        spread=trials.scale.spread,
        direction=trials.scale.direction,
        direction_given=direction.is_given,
        threshold=trials.allowed,
        cube=space.asked,
        discarded={k: n for k, n in choice.discarded.items() if n},
        notes=tuple(notes),
        rounds=trials.rounds,
        patience=choice.patience,
        probed_in_vain=in_vain,
    )


def _untried(config: Config, allowed: float, cube: Cube, method: str, note: str) -> SearchResult:
    return SearchResult(
        config=config, point=None, trials=(), met=True, method=method, fell_back=False, nbytes=0, baseline=None,
        degradation=None, spread=0.0, direction=None, direction_given=False, threshold=allowed, cube=cube,
        discarded={}, notes=(note,), rounds=0, patience=0,
    )  # fmt: skip


def _error_target_result(allowed: float, cube: Cube, *, ahead: bool) -> SearchResult:
    """Return the result of a search without `evaluate`, in which an error target sets bins."""
    mildest = max(cube, key=Point.expected_bits)
    config = dataclasses.replace(mildest, prune=0.0, rate=0.0).config(ahead=ahead)
    note = f"no evaluate: every array keeps a relative error of {allowed:g} with as few bins as possible"
    return _untried(dataclasses.replace(config, max_rel_error=allowed), allowed, cube, "error target", note)


def _nothing_to_choose(allowed: float, cube: Cube, search_state: SearchState) -> SearchResult:
    """Return the result if every point gives the same checkpoint."""
    note = "the cube would not change any array of the state"
    return _untried(search_state.others, allowed, cube, "nothing to choose", note)


def _budget_spent(last: SearchResult, allowed: float, cube: Cube) -> SearchResult:
    """Return a lossless result without trials, if restores have used up the threshold."""
    note = f"{last.restores} restores have taken {last.spent:.3%}: the rest of the threshold is too small to search"
    return dataclasses.replace(
        last, config=presets.lossless(), point=None, trials=(), met=False, method="budget spent", fell_back=False,
        nbytes=0, degradation=None, threshold=allowed, cube=cube, discarded={}, notes=(note,), rounds=0,
    )  # fmt: skip


def _with_costs(found: SearchResult, last: SearchResult | None, begin: float) -> SearchResult:
    """Add duration, share of the training time, and losses of restores so far."""
    seconds, now = time.perf_counter() - begin, time.time()
    here = last is not None and last.process == _PROCESS
    training = now - seconds - last.finished if last is not None and here else 0.0
    share = seconds / training if training > 0 else None
    done, spent = (0, 0.0) if last is None else (last.restores, last.spent)
    return dataclasses.replace(
        found, restores=done, spent=spent, seconds=seconds, finished=now, share=share, process=_PROCESS
    )
