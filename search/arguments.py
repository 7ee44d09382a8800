"""The arguments of a search: checked, the same on all processes, and what follows from them."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..codec.errors import BadArgumentError, ShrinkpointWarning
from ..kernels.arguments import check_field, choice, flag, instance, integer, number, or_none
from .cube import Cube
from .report import Progress
from .result import DIRECTIONS, SearchResult, Trial, essence, outcome
from .subject import Given, Watched
from .team import Team

_NOTHING = 1e-3
"""Share of the threshold that is too little to search for."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The arguments of a search that are no arrays, as given until they are checked."""

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
        names = ("threshold", "direction", "baseline", "expected_restores", "steps", "relax", "budget")
        return {name: repr(getattr(self, name)) for name in names} | {
            "cube": hashed(json.dumps(self.where.to_json())),
            "last": "" if self.last is None else hashed(essence(self.last)),
            "resume": hashed(json.dumps(outcome(self.resume))),
        }


def opened(
    team: Team, asked: Asked, state: Any, evaluate: Any, prev: Any, grads: Any, kinds: Any, earlier: Any
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
        given = Given.of(state, prev, grads, kinds, earlier)
        if evaluate is None and team.size == 1:
            taken.append((given, None))
            return None
        watched = given.watch()
        taken.append((given, watched))
        same = asked.fingerprints() | given.fingerprints(watched) | {"evaluate": str(evaluate is None)}
        return {"same": same, "own": hashed(repr(watched))}

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
    names = ("state", "prev", "grads", "kinds", "earlier")
    common = [told[0]["same"][n] for n in names] + [t["own"] for t in told if taken[0][0].is_sharded]
    return *taken[0], hashed(json.dumps([common, point.config().to_json()]))


def _check(asked: Asked, evaluate: Any) -> None:
    check_field(asked, "last", or_none, instance, SearchResult)
    check_field(asked, "cube", or_none, instance, Cube)
    check_field(asked, "direction", or_none, choice, DIRECTIONS)
    check_field(asked, "baseline", or_none, number, -math.inf, math.inf, open_low=True, open_high=True)
    if asked.baseline == 0:
        raise BadArgumentError("baseline is 0; a relative degradation of 0 has no meaning")
    check_field(asked, "expected_restores", or_none, number, 0, 1e9)
    check_field(asked, "steps", integer, 0)
    check_field(asked, "budget", integer, 3)
    check_field(asked, "relax", flag)
    if not isinstance(asked.resume, Sequence) or not all(isinstance(t, Trial) for t in asked.resume):
        raise BadArgumentError("resume must be Trials, as `progress` was given them or SearchResult.trials has them")
    progress = asked.progress
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise BadArgumentError(f"progress is {progress!r}; it must be True, False, None or callable")
    limit = 1 if evaluate is None else 10
    check_field(asked, "threshold", number, 0, limit, open_low=True, open_high=evaluate is None)
    if asked.threshold > 1:
        said = f"threshold is {asked.threshold:g}, which is {asked.threshold:.0%}"
        warnings.warn(f"{said}; {asked.threshold:g} % is {asked.threshold / 100:g}", ShrinkpointWarning, stacklevel=6)
    if evaluate is not None and not callable(evaluate):
        raise BadArgumentError(f"evaluate is {evaluate!r}; it must be callable or None")


def hashed(text: str) -> str:
    """A text in 32 hexadecimal digits, for comparison."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
