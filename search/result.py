"""The result of a search: every trial with its reason, the choice, and its cost."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..codec import presets
from ..codec.config import Config
from ..codec.errors import BadArgumentError
from ..kernels.backend.arguments import integer, number
from .cube import Cube, Point

DIRECTIONS = ("lower", "higher")
LEVELS = {"precise": presets.precise, "exact weights": presets.exact_weights, "lossless": presets.lossless}
"""Configurations used where no point passes, the smallest first; all but the last are tried."""
_KINDS: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
"""JSON types of the plain fields; other fields are read by their own classes."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One call of `evaluate`.

    Args:
        point: the configuration tried; None: a level, or the state itself, the baseline.
        nbytes: stored bytes of the whole checkpoint, to some tens of bytes of its header; 0 for the baseline.
        estimated: `nbytes` as estimated without encoding.
        error: mean squared relative error of the weights, estimated without restoring.
        pruned: share of `error` that is pruned weights.
        expected: degradation expected before the trial; None where it was not predicted.
        quality: result of `evaluate`; None for NaN.
        degradation: relative loss of quality against the baseline; infinite where quality was not a number.
        passed: whether that is within the threshold.
        reason: why it passed or failed, in words.
        round: number of the round; trials of one round ran at once.
        rank: process that ran it.
        state: fingerprint of the state it was tried on.
        seconds: time to compress, restore and evaluate; not compared.
        ahead: whether some weights were extrapolated by their drift; default False.
        level: the level tried, "precise" or "exact weights"; default None: a point or the baseline.
    """

    point: Point | None
    nbytes: int
    estimated: float
    error: float
    pruned: float
    expected: float | None
    quality: float | None
    degradation: float
    passed: bool
    reason: str
    round: int
    rank: int
    state: str
    seconds: float = field(default=0.0, compare=False)
    ahead: bool = False
    level: str | None = None

    @property
    def is_baseline(self) -> bool:
        """Return whether the state itself was evaluated."""
        return self.point is None and self.level is None

    def to_json(self) -> dict[str, Any]:
        """Return the trial as plain JSON, with infinities as text."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["point"] = None if self.point is None else self.point.to_json()
        return {k: _plain(v) for k, v in data.items()}

    @staticmethod
    def from_json(data: Any) -> Trial:
        """Return the trial that `to_json` described; raise BadArgumentError for other values."""
        found = _fields(data, Trial, "trial")
        point = found.pop("point")
        return Trial(point=None if point is None else Point.from_json(point), **{k: _read(v) for k, v in found.items()})


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The choice of a search with all trials; the next search takes it as `last`.

    Args:
        config: the configuration to compress with.
        point: its point in the cube; None where no point was chosen (`met` says why).
        trials: every call of `evaluate`, in order.
        met: whether a point of the cube or `presets.precise()` keeps the threshold; False: none does, and `config` is
            `presets.exact_weights()`, or lossless if that fails or with the method "budget spent".
        method: "neighbourhood", "exhaustive", "error target" (no `evaluate`), "nothing to choose", or "budget spent"
            (restores have used up `threshold`: lossless).
        fell_back: whether a neighbourhood search came first without success.
        nbytes: stored bytes with `config`, as `Trial.nbytes`; 0 where nothing was tried.
        baseline: quality of the state itself; None without `evaluate`.
        degradation: of the choice; None where it was not evaluated.
        spread: largest relative difference between two calls with the same state.
        direction: "lower" or "higher" quality is better; None where no trial differed from the baseline.
        direction_given: whether the caller gave it; otherwise it is inferred from a state compressed beyond use.
        threshold: degradation allowed at this checkpoint.
        cube: the cube that was searched.
        discarded: number of points that were never evaluated, by reason.
        notes: further remarks, in words.
        rounds: number of successive calls of `evaluate`; fewer than trials where those ran at once.
        patience: number of searches before the other pruning metric is tried again.
        probed_in_vain: whether `evaluate` returned NaN for every state compressed beyond use, so that the direction is
            not inferred again; default False.
        restores: number of restores of the run so far, as counted by `restored`; default 0.
        spent: sum of the degradations of those restores; default 0.
        seconds: duration of the search; not compared.
        share: `seconds` as a share of the training time since the last search; None if that time is not known, for
            example after a restart; not compared.
        finished: end of the search in seconds since the epoch; not compared.
        process: identifies the process, within which times are compared; not compared itself.
    """

    config: Config
    point: Point | None
    trials: tuple[Trial, ...]
    met: bool
    method: str
    fell_back: bool
    nbytes: int
    baseline: float | None
    degradation: float | None
    spread: float
    direction: str | None
    direction_given: bool
    threshold: float
    cube: Cube
    discarded: Mapping[str, int]
    notes: tuple[str, ...]
    rounds: int
    patience: int
    probed_in_vain: bool = False
    restores: int = 0
    spent: float = 0.0
    seconds: float = field(default=0.0, compare=False)
    share: float | None = field(default=None, compare=False)
    finished: float = field(default=0.0, compare=False)
    process: str = field(default="", compare=False)

    @property
    def evaluations(self) -> int:
        """Number of calls of `evaluate`, including the baseline and all processes."""
        return len(self.trials)

    @property
    def is_exhaustive(self) -> bool:
        """Return whether the whole cube was searched."""
        return self.method == "exhaustive"

    @property
    def within_spread(self) -> bool:
        """Return whether the choice's degradation is within the spread of `evaluate`."""
        return self.degradation is not None and abs(self.degradation) <= self.spread

    def restored(self) -> SearchResult:
        """Return this result with one more restore, of a checkpoint compressed with `config`.

        The restore adds to `spent`: `degradation`, if that is a loss; 0 if `config` keeps the weights exact or all
        points gave the same checkpoint; `threshold` if nothing was evaluated. The next search with
        `expected_restores` and the returned result as `last` allows only the remainder.

        Example:
            >>> import numpy as np
            >>> import shrinkpoint as sp
            >>> w = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
            >>> loss = lambda s: 1.0 + float(((s["weight"] - w) ** 2).mean())
            >>> found = sp.search({"weight": w}, loss, 0.02, kinds={"weight": "linear"})
            >>> again = found.restored()
            >>> again.restores, again.spent == found.degradation
            (1, True)
        """
        cost = self.threshold if self.degradation is None else max(0.0, self.degradation)
        if not self.met or self.method == "nothing to choose":
            cost = 0.0
        return dataclasses.replace(self, restores=self.restores + 1, spent=self.spent + cost)

    @property
    def _name(self) -> str:
        levels = (name for name, preset in LEVELS.items() if self.config == preset())
        return str(self.point) if self.point is not None else next(levels, self.method)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data |= {
            "config": self.config.to_json(),
            "point": None if self.point is None else self.point.to_json(),
            "trials": [t.to_json() for t in self.trials],
            "cube": self.cube.to_json(),
            "discarded": dict(self.discarded),
            "notes": list(self.notes),
        }
        return {k: _plain(v) for k, v in data.items()}

    @staticmethod
    def from_json(data: Any) -> SearchResult:
        """Return the result that `to_json` described; raise BadArgumentError for other values."""
        found = {k: _read(v) for k, v in _fields(data, SearchResult, "search result").items()}
        integer("not a search result: its restores", found["restores"], 0)
        number("not a search result: its spent", found["spent"], 0.0, math.inf, open_high=True)
        try:
            found |= {
                "config": Config.from_json(found["config"]),
                "point": None if found["point"] is None else Point.from_json(found["point"]),
                "trials": tuple(Trial.from_json(t) for t in found["trials"]),
                "cube": Cube.from_json(found["cube"]),
                "discarded": dict(found["discarded"]),
                "notes": tuple(found["notes"]),
            }
        except (TypeError, ValueError) as e:
            if isinstance(e, BadArgumentError):
                raise
            raise BadArgumentError(f"not a search result: {e}") from None
        return SearchResult(**found)

    def __str__(self) -> str:
        kept = (
            "" if self.degradation is None else f", degradation {self.degradation:+.3%} of {self.threshold:.3%} allowed"
        )
        size = f"{self.nbytes} bytes" if self.nbytes else "size not measured"
        share = "" if self.share is None else f", {self.share:.2%} of training time"
        cost = f"{self.evaluations} evaluations, {self.seconds:.1f} s{share}"
        return f"{self._name}: {size}{kept}; {self.method} search, {cost}"


def _plain(value: Any) -> Any:
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    return float(value) if value in ("inf", "-inf") else value


def essence(found: SearchResult) -> str:
    """Return all compared fields of a result as text."""
    data = found.to_json()
    for part in (data, *data["trials"]):
        for f in dataclasses.fields(SearchResult if part is data else Trial):
            if not f.compare:
                part.pop(f.name)
    return json.dumps(data, sort_keys=True)


def outcome(trials: Sequence[Trial]) -> list[Any]:
    """Return the fields of trials that are equal on all processes, as plain JSON.

    These are the values exchanged and their consequences. Each process makes its own estimates, whose last bits may
    depend on its processor.
    """
    names = ("point", "nbytes", "quality", "passed", "round", "rank", "state", "ahead", "level")
    return [[t.to_json()[name] for name in names] for t in trials]


def _fields(data: Any, kind: type[Any], what: str) -> dict[str, Any]:
    names = {f.name for f in dataclasses.fields(kind)}
    if not isinstance(data, Mapping) or not names.issuperset(data):
        raise BadArgumentError(f"{str(data)[:80]} is not a {what}; its fields are {', '.join(sorted(names))}")
    # Results of earlier versions lack fields added since, which have defaults.
    newer = {
        f.name: f.default
        for f in dataclasses.fields(kind)
        if f.default is not dataclasses.MISSING and f.name not in data
    }
    data = {**data, **newer}
    if set(data) != names:
        raise BadArgumentError(f"{str(data)[:80]} is not a {what}; it lacks {', '.join(sorted(names - set(data)))}")
    for f in dataclasses.fields(kind):
        if not _fits(str(f.type), _read(data[f.name])):
            raise BadArgumentError(f"not a {what}: its {f.name} is {str(data[f.name])[:80]!r}, not {f.type}")
    return dict(data)


def _fits(annotation: str, value: Any) -> bool:
    """Return whether a value has the type of a field; true for fields of other than plain types."""
    kind = _KINDS.get(annotation.removesuffix(" | None"))
    if kind is None or (value is None and annotation.endswith("None")):
        return True
    # In Python True is an int.
    return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
