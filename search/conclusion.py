"""The result of a search, with its notes."""

from __future__ import annotations

import dataclasses
import time
import uuid

from ..codec import presets
from ..codec.config import Config
from .cube import Cube, Point
from .result import LEVELS, SearchResult, Trial
from .search_state import SearchState
from .space import Choice, Space

_PROCESS = uuid.uuid4().hex
"""Identifies this process. The time between two searches is training time only within one process."""


def conclude(space: Space, choice: Choice, level: Trial | None, method: str, fell_back: bool) -> SearchResult:
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


def error_target_result(allowed: float, cube: Cube, *, ahead: bool) -> SearchResult:
    """Return the result of a search without `evaluate`, in which an error target sets bins."""
    mildest = max(cube, key=Point.expected_bits)
    config = dataclasses.replace(mildest, prune=0.0, rate=0.0).config(ahead=ahead)
    note = f"no evaluate: every array keeps a relative error of {allowed:g} with as few bins as possible"
    return _untried(
        Config(config.rules, max_rel_error=allowed, chain=config.chain, ahead=ahead),
        allowed,
        cube,
        "error target",
        note,
    )


def nothing_to_choose(allowed: float, cube: Cube, search_state: SearchState) -> SearchResult:
    """Return the result if every point gives the same checkpoint."""
    note = "the cube would not change any array of the state"
    return _untried(search_state.others, allowed, cube, "nothing to choose", note)


def budget_spent(last: SearchResult, allowed: float, cube: Cube) -> SearchResult:
    """Return a lossless result without trials, if restores have used up the threshold."""
    note = f"{last.restores} restores have taken {last.spent:.3%}: the rest of the threshold is too small to search"
    return dataclasses.replace(
        last, config=presets.lossless(), point=None, trials=(), met=False, method="budget spent", fell_back=False,
        nbytes=0, degradation=None, threshold=allowed, cube=cube, discarded={}, notes=(note,), rounds=0,
    )  # fmt: skip


def with_costs(found: SearchResult, last: SearchResult | None, begin: float) -> SearchResult:
    """Add duration, share of the training time, and losses of restores so far."""
    seconds, now = time.perf_counter() - begin, time.time()
    here = last is not None and last.process == _PROCESS
    training = now - seconds - last.finished if last is not None and here else 0.0
    share = seconds / training if training > 0 else None
    done, spent = (0, 0.0) if last is None else (last.restores, last.spent)
    return dataclasses.replace(
        found, restores=done, spent=spent, seconds=seconds, finished=now, share=share, process=_PROCESS
    )
