"""Experiments, states that several of them share, and means with confidence intervals."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import shrinkpoint as sp

from ...data import relative_l2
from ...harness import Options, Row, Rows
from .. import workloads
from ..baselines.parts import parts
from ..workloads import Run, State

FIGURES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))
"""Figures of the papers, and remarks on how they differ from ours."""
_STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262, 15: 2.145, 20: 2.093, 30: 2.045}
"""Two-sided 95 % quantiles of Student's t by sample size; between two the one of the smaller size counts."""


@dataclass(frozen=True)
class Experiment:
    """An experiment; its name begins the names of its rows, and `--only` selects by it.

    Args:
        name: system and subject.
        run: gives its rows; an ImportError becomes a row with the missing package.
    """

    name: str
    run: Callable[[str, Options], list[Row]]

    def rows(self, options: Options) -> list[Row]:
        """Return its rows, or one with the reason for a missing measurement."""
        options.say(self.name)
        remark = FIGURES["remarks"].get(self.name)
        try:
            found = self.run(self.name, options)
            return [dataclasses.replace(row, note="; ".join(filter(None, (row.note, remark)))) for row in found]
        except ImportError as error:
            rows = Rows(self.name)
            rows.add("", None, "", note=f"not measured: {error.name or error} is not installed")
            return rows


@dataclass(frozen=True)
class Mean:
    """Mean of a sample and half the width of its 95 % confidence interval."""

    mean: float
    half: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3g}" + (f" +- {self.half:.2g} (95 %, n = {self.n})" if self.n > 1 else " (one run)")


def mean(values: Sequence[float]) -> Mean:
    """Mean and confidence interval, by Student's t.

    Example:
        >>> print(mean([1.0, 2.0, 3.0]))
        2 +- 2.5 (95 %, n = 3)
    """
    n = len(values)
    if n < 2:
        return Mean(float(values[0]) if values else math.nan, math.nan, n)
    t = _STUDENT[max(size for size in _STUDENT if size <= n)]
    return Mean(statistics.fmean(values), t * statistics.stdev(values) / math.sqrt(n), n)


def restored(state: State, config: sp.Config, kinds: Any = None) -> State:
    """Return a state as a base gives it back."""
    found: State = sp.decompress(sp.compress(state, cfg=config, kinds=kinds))
    return found


def stored_bytes(ckpt: sp.Checkpoint, *ends: str, start: str = "") -> int:
    """Return the stored bytes of arrays by start and end of their paths (with an end: matrices)."""
    return sum(part.stored_bytes for part in _parts(ckpt, ends, start))


def raw_bytes(ckpt: sp.Checkpoint, *ends: str, start: str = "") -> int:
    """Raw bytes of the same arrays."""
    return sum(part.raw_bytes for part in _parts(ckpt, ends, start))


def l2_errors(exact: State, restored: State) -> dict[str, float]:
    """Relative l2 error of weights and of moments, all arrays of a role together."""
    pairs = zip(parts(exact).arrays, parts(restored).arrays, strict=True)
    return relative_l2(
        (f"{a.role}s", a.values, b.values) for a, b in pairs if a.role != "state" and a.spec.dtype == "float32"
    )


def _parts(ckpt: sp.Checkpoint, ends: tuple[str, ...], start: str) -> list[Any]:
    found = [part for part in ckpt.summary() if part.path.startswith(start)]
    return [part for part in found if part.path.endswith(ends) and len(part.shape) > 1] if ends else found


# ------------------------------------------------------------------------------------------------------ shared states

APART = (0, 1, 2, 5, 10)
"""Steps after the first."""


@dataclass(frozen=True)
class States:
    """States of one training.

    Args:
        name: of the workload.
        step: of the first.
        rate: learning rate there.
        after: by steps after the first.
        kinds: of their arrays.
    """

    name: str
    step: int
    rate: float
    after: dict[int, State]
    kinds: dict[str, sp.Kind]

    def where(self) -> str:
        """Name of the workload and step, for notes."""
        return f"{self.name} after {self.step} steps"


def _onwards(run: Run) -> States:
    """Train a run on, and return its states after some steps."""
    start, rate = run.step, run.learning_rate()
    after = {apart: run.train(start + apart).state() for apart in APART}
    return States(run.workload.name, start, rate, after, run.kinds())


@cache
def states(quick: bool) -> States:
    """Return states of a GPT at nine tenths of 360 steps; with `quick` of an MLP, of 100 steps."""
    workload = workloads.mlp(100) if quick else workloads.gpt(steps=360)
    return _onwards(Run(workload, 0, until=workload.steps * 9 // 10))


@cache
def slowed(quick: bool, times: int) -> States:
    """Continue the training of `states` at a learning rate divided by `times`."""
    workload = workloads.mlp(100) if quick else workloads.gpt(steps=360)
    run = Run(dataclasses.replace(workload, rate=workload.rate / times), 0)
    run.restore(states(quick).after[0])
    return _onwards(run)


class Chain:
    """Checkpoints of one system, each over the one before.

    Args:
        system: a configuration of this library, or a baseline.
    """

    def __init__(self, system: Any) -> None:
        self.system = system
        self.saved: Any = None
        self.last: Any = None
        self.sizes: list[int] = []
        """Bytes of the lossy weights of each checkpoint after the base."""

    def save(self, state: State, kinds: Any = None) -> None:
        """Add a checkpoint."""
        is_base = self.last is None
        if isinstance(self.system, sp.Config):
            self.saved = self.last = sp.compress(state, self.last, self.system, kinds=kinds)
        else:
            self.saved = self.system.encode(state, self.last)
            self.last = self.system.decode(self.saved, self.last)
        if not is_base:
            self.sizes.append(self._lossy())

    def _lossy(self) -> int:
        if isinstance(self.saved, sp.Checkpoint):
            return sum(row.stored_bytes for row in self.saved.summary() if row.measure != "exact")
        return len(self.saved.weights)

    @property
    def weights(self) -> int:
        """Stored bytes of the weights of the last checkpoint."""
        ours = isinstance(self.saved, sp.Checkpoint)
        return stored_bytes(self.saved, start="model/") if ours else len(self.saved.weights)

    def restored(self) -> State:
        """Return the state that the last checkpoint gives."""
        found: State = sp.decompress(self.last) if isinstance(self.last, sp.Checkpoint) else self.last
        return getattr(found, "state", found)
