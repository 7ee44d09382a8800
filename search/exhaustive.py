"""Guided exhaustive search of the whole cube."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .cube import normal
from .degradation_model import Candidate, chances
from .next_trials import HOPELESS, LATE, distinct, next_trials, open_points
from .result import Trial
from .space import Choice, Space
from .trials import Trials

_TOLERANCE = 0.01
"""Share of the bytes below which a saving is not worth another trial."""


def search_exhaustively(space: Space, stale: Sequence[Trial], *, soon: bool) -> Choice:
    """Search the whole cube under both pruning metrics, then try fewer bins for embeddings.

    Args:
        space: the points and trials.
        stale: trials of the last search.
        soon: take the first point that passes, which is enough in the middle of a run. Points that passed before the
            call do not count.
    """
    trials = space.trials
    before = len(trials.passing)
    points = list(dict.fromkeys(normal(p) for p in space.cube))
    worth = [c.point for c in distinct(trials.candidates(points))]
    while space.left > 0 and not (soon and len(trials.passing) > before):
        candidates = trials.candidates(worth)
        known = trials.known(stale)
        chosen = next_trials(
            candidates,
            known,
            trials.allowed,
            at_once=trials.at_once,
            tolerance=_TOLERANCE,
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
        # Later trials may have changed the direction or the spread.
        best = min(trials.passing, key=lambda t: t.nbytes, default=None)
    return Choice(best, discarded, tuple(notes))


def _left_out(candidates: Sequence[Candidate], trials: Trials, floor: float, stale: Sequence[Trial]) -> dict[str, int]:
    """Return the number of points that were never tried, by reason."""
    known = trials.known(stale)
    state = open_points(candidates, known, trials.allowed, _TOLERANCE, floor)
    seen = {normal(t.point) for t in trials.tried if t.point is not None}
    untried = np.array([c.point not in seen for c in candidates], bool)
    hopeless = chances(candidates, known, trials.allowed, floor) <= HOPELESS
    counts = {
        "more aggressive than one that failed": int((untried & state.ruled_out).sum()),
        "not smaller than the choice": int((untried & ~state.ruled_out & ~state.alive).sum()),
        "expected to fail": int((state.alive & hopeless).sum()),
        "not worth a trial": int((state.alive & ~hopeless).sum()),
    }
    return {reason: n for reason, n in counts.items() if n}


def _fewer_embedding_bins(space: Space, best: Trial, stale: Sequence[Trial]) -> None:
    """Try the choice with fewer bins for embeddings, as long as that saves something and passes."""
    for bins in reversed(space.cube.embedding_bins[:-1]):
        if best.point is None or space.left <= 0:
            break
        coarser = dataclasses.replace(best.point, embedding_bins=bins)
        (candidate,) = space.trials.candidates([coarser])
        odds = chances([candidate], space.trials.known(stale), space.trials.allowed, space.floor)
        if candidate.nbytes > (1 - _TOLERANCE) * best.nbytes or odds[0] <= HOPELESS:
            break
        (trial, *_) = space.round([coarser], stale)
        if not trial.passed or trial.nbytes >= best.nbytes:
            break
        best = trial
