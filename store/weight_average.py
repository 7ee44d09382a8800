"""Past weights as a slow average, for `compress(earlier=)`.

One float32 average represents all past weights. It moves a tenth of the way at each checkpoint, so that its distance to
the weights is about that of the last ten checkpoints. No checkpoint stores it: a run that continues a chain begins with
the weights that the chain restores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codec.base import CHUNK
from ..codec.checkpoint import Checkpoint, check_resolved
from ..codec.config import Config
from ..codec.evidence.entries import Entry, Outline, entries_of
from ..codec.inputs import Inputs, PastWeights
from ..codec.state.leaves import is_array, is_sharded, read_leaf
from ..codec.state.tree import flatten
from ..codec.weights.quantize import Quantize
from ..kernels.backend import arguments
from ..kernels.backend.arrays import is_torch, on_gpu, to_place_of

Array = Any
_SHARE = 0.1
"""Part of the way to the weights that the average moves at each checkpoint."""
_BLOCK = (1 << 15) - 1
"""Elements updated at once on the host: temporary arrays stay in the cache, and torch starts no threads."""


def needs_average(cfg: Config) -> bool:
    """Return whether weights are extrapolated by their drift: by default if a rate is set."""
    if cfg.ahead is not None or cfg.chain.against == "base":
        return bool(cfg.ahead)
    return cfg.rate > 0 or any(isinstance(r.codec, Quantize) and (r.codec.rate or 0) > 0 for r in cfg.rules)


@dataclass(frozen=True, slots=True)
class _Clock:
    """Training step of the average, which moves as the average does.

    Args:
        step: None: unknown.
        counted: whether the step is the optimizer's own count, rather than the number that was given.
    """

    step: float | None
    counted: bool = False

    @staticmethod
    def of(paths: Iterable[str], step: float | None, value: Callable[[str], float | None]) -> _Clock:
        """Return the clock at the optimizer's own count, see `steps_taken`, or else at `step`."""
        counted = steps_taken(paths, value)
        return _Clock(step) if counted is None else _Clock(counted, counted=True)

    def until(self, now: _Clock) -> float | None:
        """Return the steps until `now`; None if unknown."""
        if self.step is None or now.step is None or self.counted is not now.counted:
            return None
        return now.step - self.step

    def moved(self, now: _Clock) -> _Clock:
        """Return the clock a tenth of the way towards `now`; all of it if the distance is unknown."""
        way = self.until(now)
        return now if self.step is None or way is None else _Clock(self.step + _SHARE * way, now.counted)


class WeightAverage:
    """A slow average of the weights that are stored as levels: 4 bytes per weight.

    Each average is on the device of its weight.

    Args:
        checkpoint: resolved; the average begins with its weights. None (default): with the weights of the first
            `follow`.
        step: training step of these weights; None: unknown. If the optimizer's state counts its own steps (`step` next
            to a second moment), that count is used instead, here and below.

    Raises:
        BadArgumentError: `checkpoint` is not a Checkpoint, or `step` not a number.
        MissingParentError: the checkpoint is not resolved.

    Example:
        >>> import numpy as np
        >>> import shrinkpoint as sp
        >>> w, cfg = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32), sp.Config(rate=0.002)
        >>> ckpt, average = None, WeightAverage()
        >>> for step in range(10, 60, 10):
        ...     state = {"weight": w * np.float32(1 + 0.001 * step)}
        ...     ckpt = sp.compress(state, ckpt, cfg, earlier=average.earlier(state, step), kinds={"weight": "linear"})
        ...     average.follow(state, ckpt, step)
        >>> average.earlier(state, step).steps
        30.951
    """

    def __init__(self, checkpoint: Checkpoint | None = None, step: float | None = None) -> None:
        self._means: dict[str, Array] = {}
        self._clock = _Clock(_checked(step))
        if checkpoint is None:
            return
        check_resolved(arguments.instance("checkpoint", checkpoint, Checkpoint))
        records = {record.path: record for record in checkpoint.records}

        def value(path: str) -> float | None:
            return _number(checkpoint.values_of(records[path])) if records[path].spec.size == 1 else None

        self._clock = _Clock.of(records, self._clock.step, value)
        for record in checkpoint.records:
            if record.stream == "levels":
                self._means[record.path] = _copied(checkpoint.values_of(record)).reshape(record.spec.shape)

    def earlier(self, state: Any, step: float | None = None) -> PastWeights:
        """Return the average of a state's weights, and how many steps ago they were.

        Args:
            state: the state that will be compressed, or its `Inputs`.
            step: its training step; None: unknown.

        Returns:
            The argument of `compress(earlier=)`; its arrays are the average itself, which the next `follow` changes.

        Raises:
            BadArgumentError: the state is not a tree, or the step not a number.
        """
        arrays = _arrays_by_path(state)
        steps = self._clock.until(_Clock.of(arrays, _checked(step), lambda path: _number(arrays[path])))
        return PastWeights(self._fitting(arrays), steps if steps is not None and steps > 0 else None)

    def follow(self, state: Any, checkpoint: Checkpoint, step: float | None = None) -> None:
        """Move a tenth of the way towards the weights of a state that was compressed.

        Args:
            state: the state, or its `Inputs`.
            checkpoint: its checkpoint.
            step: its training step; None: unknown.

        Raises:
            BadArgumentError: the state is not a tree, the checkpoint not a Checkpoint, or the step not a number.
        """
        step = _checked(step)
        arguments.instance("checkpoint", checkpoint, Checkpoint)
        arrays = _arrays_by_path(state)
        means = self._fitting(arrays)
        self._clock = self._clock.moved(_Clock.of(arrays, step, lambda path: _number(arrays[path])))
        self._means = {}
        for record in checkpoint.records:
            if record.stream == "levels" and _shape(arrays.get(record.path)) == record.spec.shape:
                flat = read_leaf(arrays[record.path], record.path)[1]
                mean = means.get(record.path)
                now = _copied(flat) if mean is None else _moved(to_place_of(mean.reshape(-1), flat), flat)
                self._means[record.path] = now.reshape(record.spec.shape)

    def _fitting(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Return the averages of the arrays that still have the same shape."""
        return {path: mean for path, mean in self._means.items() if _shape(arrays.get(path)) == _shape(mean)}


def _checked(step: Any) -> float | None:
    """Return a step as a number, also a NumPy one; None: unknown."""
    return arguments.or_none("step", step, arguments.number, -math.inf, math.inf, open_low=True, open_high=True)


def _arrays_by_path(state: Any) -> Mapping[str, Array]:
    """Return the arrays of a state by path, without arrays that share a path."""
    nodes = [n for n in state.named if is_array(n.value)] if isinstance(state, Inputs) else flatten(state, is_array)[1]
    times = Counter(node.path for node in nodes)
    return {node.path: node.value for node in nodes if times[node.path] == 1}


def _number(x: Array) -> float | None:
    """Return the value of an array of one element; None for other and sharded arrays."""
    return float(x.reshape(())) if _shape(x) in ((), (1,)) and not is_sharded(x) else None


def _shape(x: Array) -> tuple[int, ...] | None:
    return None if x is None else tuple(x.shape)


@np.errstate(over="ignore")
def _copied(flat: Array) -> Array:
    """Copy values in float32."""
    if not is_torch(flat):
        return flat.astype("float32")
    import torch

    # A tensor made in inference mode cannot be updated outside of it.
    with torch.inference_mode(False):
        return flat.float().clone()


@np.errstate(over="ignore", invalid="ignore")
def _moved(mean: Array, flat: Array) -> Array:
    """Update the mean by the new values, in place; a mean that is not finite starts again."""
    block = CHUNK if on_gpu(flat) else _BLOCK
    for start in range(0, mean.shape[0], block):
        old, new = mean[start : start + block], flat[start : start + block]
        new = new.float() if is_torch(new) else new.astype("float32", copy=False)
        old += _SHARE * (new - old)
        if not math.isfinite(float(old.sum())):
            lost = ~(old - old == 0)
            old[lost] = new[lost]
    return mean


_COUNTS = ("step", "count")
"""Names of the step count next to a second moment: PyTorch's, Optax's."""
_COUNTS_OF_KERAS = ("iteration", "iterations")
"""Anywhere below an optimizer: Keras's."""


def counting(paths: Iterable[str]) -> list[str]:
    """Return the paths at which an optimizer counts its steps.

    A store's step numbers may count epochs, samples or checkpoints, but the effect of a lost first moment is measured
    in steps of its optimizer.

    Example:
        >>> counting(["step", "optimizer/state/0/step", "optimizer/state/0/exp_avg_sq", "data/count"])
        ['optimizer/state/0/step']
        >>> counting(["optimizer/adam/iteration", "data/iteration"])
        ['optimizer/adam/iteration']
    """
    paths = list(paths)
    named = [(path, entry) for path, entry in zip(paths, entries_of(paths, Outline()), strict=True) if entry]
    moments = [entry for _, entry in named if entry.role == "second moment"]
    places = {entry.owner for entry in moments} | {(entry.above, "") for entry in moments}

    def counts(entry: Entry) -> bool:
        if entry.name in _COUNTS_OF_KERAS and "optimizer" in entry.above.split("/"):
            return True
        return entry.name in _COUNTS and entry.owner in places

    return [path for path, entry in named if counts(entry)]


def steps_taken(paths: Iterable[str], value: Callable[[str], float | None]) -> float | None:
    """Return the largest step count; parameters without gradients have lower ones.

    Args:
        paths: of all arrays.
        value: function that returns the value of the array at a path; None if it is not a single number.

    Returns:
        The steps, or None where nothing is counted.
    """
    counts = [value(path) for path in counting(paths)]
    return max((x for x in counts if x is not None and math.isfinite(x)), default=None)
