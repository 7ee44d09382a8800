"""How a search ends: its result, with what there is to say of it."""

from __future__ import annotations

import dataclasses
import time
import uuid

from ..codec import presets
from ..codec.config import Config
from .cube import Cube, Point
from .result import SearchResult
from .space import Choice, Space
from .subject import Subject

_PROCESS = uuid.uuid4().hex
"""Names this process: the time between searches of two processes is not all training."""


def concluded(space: Space, choice: Choice, method: str, fell_back: bool) -> SearchResult:
    """The result of a search with trials.

    Args:
        space: what was searched, with its trials.
        choice: how that ended.
        method: how it was searched.
        fell_back: whether the neighbourhood of the last choice was tried in vain.
    """
    trials, best = space.trials, choice.trial
    direction, in_vain = trials.direction, trials.direction.in_vain(trials.found)
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
    elif not direction.is_given:
        whence = "from a state compressed beyond use" if trials.is_probed else "at an earlier search"
        notes.append(f"{trials.scale.direction} quality is better, as inferred {whence}")
    if trials.scale.direction is not None and trials.gain > trials.beyond:
        notes.append(
            f"a compressed state is better than the state itself by {trials.gain:.3%}, if {trials.scale.direction} "
            "quality is better: by luck, or because that or `evaluate` is not as it should be"
        )
    beyond_use = direction.no_numbers(trials.found)
    notes += [f"a state compressed beyond use ({p}) evaluated to no number" for p in beyond_use]
    if in_vain and not direction.is_given:
        notes.append("no state compressed beyond use evaluated to a number: the direction is not looked for again")
    point = None if best is None else best.point
    return SearchResult(
        config=presets.lossless() if point is None else trials.subject.config(point),
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


def by_error(allowed: float, cube: Cube, *, ahead: bool) -> SearchResult:
    """Without `evaluate`: the number of bins follows from the error target, array by array, when it is compressed."""
    mildest = max(cube, key=Point.expected_bits)
    config = dataclasses.replace(mildest, prune=0.0, rate=0.0).config(ahead=ahead)
    note = f"no evaluate: every array keeps a relative error of {allowed:g}, with as few bins as that takes"
    return _untried(
        Config(config.rules, max_rel_error=allowed, chain=config.chain, ahead=ahead),
        allowed,
        cube,
        "error target",
        note,
    )


def nothing_to_choose(allowed: float, cube: Cube, subject: Subject) -> SearchResult:
    """Where every point comes to the same."""
    note = "the state has no array that the cube would change"
    return _untried(subject.others, allowed, cube, "nothing to choose", note)


def budget_spent(last: SearchResult, allowed: float, cube: Cube) -> SearchResult:
    """Where restores have taken what was allowed: lossless, without a trial."""
    note = f"{last.restores} restores have taken {last.spent:.3%}: what is left of it is too little to search for"
    return dataclasses.replace(
        last, config=presets.lossless(), point=None, trials=(), met=False, method="budget spent", fell_back=False,
        nbytes=0, degradation=None, threshold=allowed, cube=cube, discarded={}, notes=(note,), rounds=0,
    )  # fmt: skip


def finished(found: SearchResult, last: SearchResult | None, begin: float) -> SearchResult:
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
