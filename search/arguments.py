"""The arguments of a search, the processes that share it, and checks between them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..codec.errors import BadArgumentError, ShrinkpointError, ShrinkpointWarning
from ..kernels.backend.arguments import check_field, choice, flag, instance, integer, number, or_none
from .cube import Cube
from .result import DIRECTIONS, SearchResult, Trial, essence, outcome
from .search_state import ARRAYS, SearchInputs, Watched

_NEGLIGIBLE = 1e-3
"""Share of the threshold below which a search is not worth its evaluations."""

METHODS = ("planned", "published")
Progress = bool | Callable[[Trial], None] | None
Json = Any


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Settings of a search, with defaults for most uses.

    Args:
        cube: the configurations to choose from; default the cube of `last`, else `Cube()`.
        earlier: past weights, as for `compress`: trials then predict the drift of the weights, and so does the
            configuration found (`Config.ahead`). If no point passes, the search is repeated without drift prediction.
            Default None: no drift prediction.
        direction: "lower" or "higher" is better; default None: as in `last`, else inferred from a state compressed
            beyond use, which costs one evaluation (two, if the first returns NaN).
        baseline: the result of `evaluate` for `state` itself, if the caller already has it for the same data; saves one
            evaluation. The first search still evaluates the state once, and refuses a value that differs by more than
            `threshold`. Default None: it is evaluated.
        expected_restores: number of times the run is expected to resume, >= 0. All restores together may then lose no
            more than `threshold`: the part that is left (`SearchResult.restored`) is divided by the number of restores
            still expected, or halved after more restores than expected. Default None: each restore may lose
            the whole threshold.
        steps: reach of the neighbourhood search in steps along the axes, >= 0; default 2.
        method: "planned" (default): trials are planned by a model of the degradation. "published": Inshrinkerator's
            search, divide and conquer over the whole cube, then all neighbours of the last choice by decreasing ratio;
            it needs more evaluations, and thus a larger budget.
        relax: also try configurations in the neighbourhood that are more aggressive than `last`; default False.
        budget: maximum number of successive calls of `evaluate`, baseline included, >= 3; default 12.
        resume: trials of an interrupted search with the same arguments, which are not run again; collect them with
            `progress=done.append`.
        progress: True: a bar on standard error; False: no bar; None (default): a bar if standard error is a terminal; a
            callable: called with each trial, without a bar.

    Example:
        >>> SearchOptions(direction="lower", budget=6).budget
        6
    """

    cube: Cube | None = None
    earlier: Any = None
    direction: str | None = None
    baseline: float | None = None
    expected_restores: float | None = None
    steps: int = 2
    method: str = "planned"
    relax: bool = False
    budget: int = 12
    resume: Sequence[Trial] = ()
    progress: Progress = None


@dataclass(frozen=True, slots=True)
class SearchArguments:
    """The arguments of a search other than arrays; unchecked until `check_arguments`."""

    evaluate: Any
    threshold: float
    last: SearchResult | None
    options: SearchOptions

    @property
    def cube(self) -> Cube:
        """Return the configurations to choose from."""
        if self.options.cube is not None:
            return self.options.cube
        return Cube() if self.last is None else self.last.cube

    @property
    def allowed(self) -> float:
        """Return the degradation that a checkpoint may have.

        It is the threshold, or a share of the part of the threshold that earlier restores have not used.
        """
        if self.options.expected_restores is None:
            return self.threshold
        done, spent = (0, 0.0) if self.last is None else (self.last.restores, self.last.spent)
        ahead = self.options.expected_restores - done
        # The sum of successive halves of the remainder never exceeds it, for any number of unexpected restores.
        share = 2.0 if done and ahead <= 0 else max(1.0, ahead)
        return max(0.0, self.threshold - spent) / share

    @property
    def is_spent(self) -> bool:
        """Return whether past restores have used up the threshold, within the noise of `evaluate`."""
        if self.last is None or self.options.expected_restores is None or not self.last.spent:
            return False
        return self.allowed <= max(self.last.spread, _NEGLIGIBLE * self.threshold)

    def fingerprints(self) -> dict[str, str]:
        """Return a hash of each argument that decides which points are tried."""
        names = ("direction", "baseline", "expected_restores", "steps", "method", "relax", "budget")
        return {name: repr(getattr(self.options, name)) for name in names} | {
            "threshold": repr(self.threshold),
            "evaluate": str(self.evaluate is None),
            "cube": hashed(json.dumps(self.cube.to_json())),
            "last": "" if self.last is None else hashed(essence(self.last)),
            "resume": hashed(json.dumps(outcome(self.options.resume))),
        }


class ProcessGroup:
    """A process group, or this process alone.

    Args:
        group: a `torch.distributed` process group; None: this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._is_informed = False
        self.size, self.rank = 1, 0
        if group is not None:
            import torch.distributed as dist

            if not dist.is_available() or not dist.is_initialized():
                raise BadArgumentError("group is given, but torch.distributed is not initialized")
            self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
            if self.rank < 0:
                raise BadArgumentError("group does not contain this process")

    def all(self, work: Callable[[], Json]) -> list[Json]:
        """Do the work on every process and return all results on each, in the order of the ranks.

        Args:
            work: returns plain JSON.

        Raises:
            BadArgumentError: it failed on another process; an error of this process is raised unchanged.
            ShrinkpointError: a process has ended.
        """
        if self.size == 1:
            return [work()]
        error: BaseException | None = None
        self._is_informed = True  # errors raised from here on reach all processes
        try:
            message = {"result": work()}
        except BaseException as e:
            error = e
            message = {"error": f"{type(e).__name__}: {e}"}
        try:
            found = self._exchange(json.dumps(message))
        except RuntimeError as e:
            if error is not None:
                raise error from None
            raise ShrinkpointError(f"rank {self.rank}: the process group failed during the search: {e}") from e
        if error is not None:
            raise error
        messages = [json.loads(text) for text in found]
        for rank, other in enumerate(messages):
            if "error" in other:
                raise BadArgumentError(f"the search failed on rank {rank}: {other['error']}")
        self._is_informed = False
        return [other["result"] for other in messages]

    def fail(self, error: BaseException) -> None:
        """Report an error outside of `all` to the processes that wait in their next `all`."""
        if self.size > 1 and not self._is_informed:
            with contextlib.suppress(RuntimeError):
                self._exchange(json.dumps({"error": f"{type(error).__name__}: {error}"}))

    def _exchange(self, text: str) -> list[str]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, text, group=self._group)
        return found


@dataclass(frozen=True, slots=True)
class CheckedInputs:
    """The checked arrays of a search.

    Args:
        inputs: the flattened state, with gradients and kinds.
        watched: hashes of the values that `evaluate` must not change; None where no trials are run.
        fingerprint: identifies the inputs, and is stored in every trial; "" where no trials are run.
    """

    inputs: SearchInputs
    watched: Watched | None
    fingerprint: str


def check_arguments(
    processes: ProcessGroup, arguments: SearchArguments, take: Callable[[], SearchInputs]
) -> CheckedInputs:
    """Check all arguments on every process, before any process enters a collective operation.

    Args:
        processes: of the search.
        arguments: those without arrays.
        take: flattens and checks the arguments with arrays, once the others are checked.

    Raises:
        BadArgumentError: an argument is unusable, here or on another process, or differs between processes.
    """
    taken: list[tuple[SearchInputs, Watched | None]] = []

    def check() -> dict[str, Any] | None:
        _check(arguments)
        inputs = take()
        if arguments.evaluate is None and processes.size == 1:
            taken.append((inputs, None))
            return None
        watched = inputs.watch()
        taken.append((inputs, watched))
        return {"same": arguments.fingerprints() | inputs.fingerprints(watched), "own": hashed(repr(watched))}

    reports = processes.all(check)
    inputs, watched = taken[0]
    if watched is None:
        return CheckedInputs(inputs, None, "")
    for rank, other in enumerate(reports):
        unlike = sorted(name for name, value in other["same"].items() if value != reports[0]["same"][name])
        if unlike:
            raise BadArgumentError(
                f"the processes of the group do not have the same {' and '.join(unlike)}: "
                f"rank {rank} differs from rank 0"
            )
    # Each process has its own values of a sharded array, but a trial belongs to all processes.
    point = next(iter(arguments.cube))
    common = [reports[0]["same"][name] for name in ARRAYS] + [r["own"] for r in reports if inputs.is_sharded]
    return CheckedInputs(inputs, watched, hashed(json.dumps([common, point.config().to_json()])))


def _check(arguments: SearchArguments) -> None:
    options = arguments.options
    if not isinstance(options, SearchOptions):
        raise BadArgumentError(f"options is {options!r:.80}; it must be SearchOptions or None")
    check_field(arguments, "last", or_none, instance, SearchResult)
    check_field(options, "cube", or_none, instance, Cube)
    check_field(options, "direction", or_none, choice, DIRECTIONS)
    check_field(options, "baseline", or_none, number, -math.inf, math.inf, open_low=True, open_high=True)
    if options.baseline == 0:
        raise BadArgumentError("baseline is 0; a relative degradation of 0 has no meaning")
    check_field(options, "expected_restores", or_none, number, 0, 1e9)
    check_field(options, "steps", integer, 0)
    check_field(options, "method", choice, METHODS)
    check_field(options, "budget", integer, 3)
    check_field(options, "relax", flag)
    if not isinstance(options.resume, Sequence) or not all(isinstance(t, Trial) for t in options.resume):
        raise BadArgumentError("resume must be a sequence of Trial, as passed to `progress` or in SearchResult.trials")
    progress = options.progress
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise BadArgumentError(f"progress is {progress!r}; it must be True, False, None or callable")
    evaluate = arguments.evaluate
    limit = 1 if evaluate is None else 10
    check_field(arguments, "threshold", number, 0, limit, open_low=True, open_high=evaluate is None)
    threshold = arguments.threshold
    if threshold > 1:
        warnings.warn(
            f"threshold is {threshold:g}, which is {threshold:.0%}; {threshold:g} % is {threshold / 100:g}",
            ShrinkpointWarning,
            stacklevel=6,
        )
    if evaluate is not None and not callable(evaluate):
        raise BadArgumentError(f"evaluate is {evaluate!r}; it must be callable or None")


def hashed(text: str) -> str:
    """Return the hash of a text as 32 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
