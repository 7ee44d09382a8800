"""`search`: find the smallest configuration of a cube that keeps a quality threshold."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping
from typing import Any

from ..codec.checkpoint import Checkpoint
from ..codec.errors import ShrinkpointError
from .arguments import SearchArguments, SearchOptions, check_arguments, hashed
from .conclusion import budget_spent, conclude, error_target_result, nothing_to_choose, with_costs
from .exhaustive import search_exhaustively
from .neighbourhood import search_neighbourhood
from .process_group import ProcessGroup
from .progress import ProgressReport
from .published import search_published
from .quality import Evaluate
from .result import LEVELS, SearchResult, outcome
from .search_state import SearchInputs, SearchState
from .space import Choice, Space
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
        take = functools.partial(SearchInputs.of, state, prev, grads, kinds, earlier)
        checked = check_arguments(processes, arguments, take)
        inputs = checked.inputs
        cube, allowed = arguments.cube, arguments.allowed
        if last is not None and arguments.is_spent:
            return with_costs(budget_spent(last, allowed, cube), last, begin)
        if evaluate is None:
            if not inputs.is_sharded:
                SearchState.made(inputs, next(iter(cube)))
            return with_costs(error_target_result(allowed, cube, ahead=earlier is not None), last, begin)
        search_state = SearchState.made(inputs, next(iter(cube)), rated=any(cube.rate))
        if not search_state.leaves:
            return with_costs(nothing_to_choose(allowed, cube, search_state), last, begin)
        with ProgressReport(chosen.progress, chosen.budget, silent=processes.rank != 0) as report:
            trials = Trials(checked, search_state, evaluate, allowed, processes, report, chosen.resume, cube)
            found = with_costs(_agreed(processes, _search(trials, arguments)), last, begin)
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
    return conclude(space, choice, level, method, fell_back)


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
