"""Importance of a weight's error, and lead of its drift, by the moments of the weight.

The importance is the root of the second moment, if the state has one.

Adam's steps measure distance by `sum sqrt(v_i) d_i**2`. In the trainings that were tried, this weighting was better
than `v` (the diagonal of the empirical Fisher matrix) and than no weighting. Without second moments, the squares of the
gradients given for sensitivity are used. Only the encoder needs the importance: a second moment of the wrong weight
costs bytes or error, but never gives a wrong value.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ...kernels.backend.arrays import is_torch, like, on_gpu, to_numpy, to_place_of
from ...kernels.backend.floats import FORMATS
from ...kernels.histogram import log_histogram
from ..base import Array, Codec, Leaf
from ..moments.firstmoment import FirstMoment

FLOOR = 0.05
"""Least importance, as a multiple of the array's mean, which bounds the error of weights with small gradients."""
_SKETCH = 2
_BLOCK = 1 << 14
"""Elements at a time whose float64 values stay in the cache."""
_COASTING = 9.0
"""Steps of the drift that a first moment holds: beta1 / (1 - beta1) at 0.9."""
_MOST = 0.2
"""Largest part of the way that is added to it: most of a short way is noise."""


def with_lead(leaves: list[Leaf], codecs: Sequence[Codec], pairs: Mapping[int, int], steps: float | None) -> list[Leaf]:
    """Add to weights with a known drift the part that their first moments lose.

    A first moment that is restored as zero would still have moved its weight by about nine steps. A grid of step s (in
    units of sqrt(v)) loses about s**2 / (1 + s**2) of that movement (measured, docs/decisions/drift.md).

    Args:
        leaves: all arrays of a state.
        codecs: the codec of each.
        pairs: of each first moment, the number of its second moment.
        steps: optimizer steps from the earlier values of weights to these; None: not known.
    """
    if steps is None or all(leaf.earlier is None for leaf in leaves):
        return leaves
    firsts = {second: first for first, second in pairs.items()}
    found = list(leaves)
    for weight, second in second_moments(leaves).items():
        codec = codecs[firsts[second]] if second in firsts else None
        if isinstance(codec, FirstMoment) and leaves[weight].earlier is not None:
            lost = codec.step**2 / (1 + codec.step**2)
            found[weight] = dataclasses.replace(leaves[weight], lead=min(_MOST, _COASTING * lost / steps))
    return found


def with_importance(leaves: list[Leaf], wanted: Sequence[bool]) -> list[Leaf]:
    """Return the leaves, with the second moment of each weight that is coded at a rate.

    If no weight has one, the squares of the given gradients replace them: an estimate of second moments from few
    batches.

    Args:
        leaves: all arrays of a state.
        wanted: which of them the encoder will code.
    """
    if not any(wanted):
        return leaves
    pairs = {i: j for i, j in second_moments(leaves).items() if wanted[i] and leaves[j].spec.dtype in FORMATS}
    if not pairs:
        squares = squared([leaf.gradient if want else None for leaf, want in zip(leaves, wanted, strict=True)])
        return [
            leaf if square is None else dataclasses.replace(leaf, importance=square)
            for leaf, square in zip(leaves, squares, strict=True)
        ]
    return [
        dataclasses.replace(leaf, importance=to_place_of(leaves[pairs[i]].flat, leaf.flat)) if i in pairs else leaf
        for i, leaf in enumerate(leaves)
    ]


def second_moments(leaves: Sequence[Leaf]) -> dict[int, int]:
    """Return the number of the second moment of each weight that has one.

    They are matched by the parameter's name if `kinds` or the path gives it (`state/fc.weight/exp_avg_sq`, optax's
    `nu/fc/w`); else by order among the arrays of one shape, if it has equally many second moments and weights.
    """
    weights = [i for i, leaf in enumerate(leaves) if leaf.kind.role == "weight"]
    seconds: dict[tuple[str, str], int] = {}
    for i, leaf in enumerate(leaves):
        # Of several (amsgrad's maximum) the first.
        if leaf.kind.role == "second moment" and leaf.entry is not None:
            seconds.setdefault(leaf.entry.owner, i)
    by_tail: dict[str, list[int]] = {}
    for i in weights:
        parts = leaves[i].path.split("/")
        for cut in range(len(parts)):
            by_tail.setdefault("/".join(parts[cut:]), []).append(i)
    found: dict[int, int] = {}
    unnamed: list[int] = []
    for (above, parameter), j in seconds.items():
        named = leaves[j].kind.parameter or parameter or _name(above)
        candidates = [i for i in by_tail.get(named, []) if leaves[i].spec.shape == leaves[j].spec.shape]
        if len(candidates) == 1:
            found.setdefault(candidates[0], j)
        else:
            unnamed.append(j)
    for shape in {leaves[j].spec.shape for j in unnamed}:
        these = [j for j in unnamed if leaves[j].spec.shape == shape]
        free = [i for i in weights if leaves[i].spec.shape == shape and i not in found]
        if len(these) == len(free):
            found.update(zip(free, these, strict=True))
    return found


def _name(folder: str) -> str:
    """Return a parameter's name from the path of its optimizer entry; "" for a number."""
    last = folder.rpartition("/")[2]
    return "" if last.isdigit() else last


def squared(gradients: Sequence[Array | None]) -> list[Array | None]:
    """Return squares of gradients in a common float32 scale; only their ratios are used.

    Args:
        gradients: flat, of any float dtype; None stays None.
    """
    largest = max((_largest(g) for g in gradients if g is not None), default=0.0)
    scale = math.ldexp(1.0, min(1000, -math.frexp(largest)[1])) if 0 < largest < math.inf else 1.0
    return [None if g is None else _square(g, scale) for g in gradients]


def _largest(gradient: Array) -> float:
    histogram = log_histogram(gradient, 0)
    used = np.flatnonzero(histogram.counts[:-1])
    return float(histogram.values()[used[-1]]) if used.size else 0.0


def _square(gradient: Array, scale: float) -> Array:
    if is_torch(gradient):
        return (gradient.double() * scale).square().float()
    with np.errstate(invalid="ignore", over="ignore"):
        return ((gradient.astype(np.float64) * scale) ** 2).astype(np.float32)


def mean_root(square: Array) -> float:
    """Return the mean of sqrt(v) from a sketch, equal on all machines; 0 without valid values."""
    histogram = log_histogram(square, _SKETCH)
    if not histogram.total:
        return 0.0
    with np.errstate(over="ignore"):
        roots = np.sqrt(histogram.values())
    return float((histogram.counts[:-1] * roots).sum()) / histogram.total


def weights_of(square: Array, mean: float, scale: float) -> Array:
    """Return `scale * max(sqrt(v), FLOOR * mean)` as float32; the floor for invalid v.

    Args:
        square: second moments, shape (n,).
        mean: `mean_root` of the whole array.
        scale: factor.
    """
    low, high = FLOOR * mean * scale, 1e6 * mean * scale
    if on_gpu(square):
        import torch

        roots = torch.sqrt(square.double()) * scale
        return torch.nan_to_num(roots, nan=low).clamp(low, high).float()
    out = np.empty(square.shape[0], np.float32)
    for start in range(0, out.size, _BLOCK):
        part = square[start : start + _BLOCK]
        wide = to_numpy(part.double()) if is_torch(part) else part.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            roots = np.sqrt(wide) * scale
        out[start : start + _BLOCK] = np.minimum(np.fmax(roots, low), high)  # of NaN and a number fmax is the number
    return like(out, square)
