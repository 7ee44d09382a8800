"""The distribution of the restored values of one array, and its codebook."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..codec.base import CHUNK, Reference
from ..codec.state.leaves import LeafSpec
from ..codec.weights.levels import LevelsReference
from ..kernels.backend.arrays import is_torch

BINS = 64


@dataclass(frozen=True, slots=True)
class Histogram:
    """Equal bins over the finite values of an array, and its codebook.

    Args:
        low: the least finite value.
        high: the largest one.
        counts: number of values in each of `BINS` bins from low to high; one bin if low equals high; empty if all
            values are not finite.
        zeros: number of values that are zero.
        odd: number of values that are not finite.
        codebook: ascending entries; empty for an array without a codebook.
        uses: number of uses of each entry.
        protected: number of values stored in addition to the codebook.
        pruned: number of values set to zero by pruning.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    zeros: int
    odd: int
    codebook: tuple[float, ...] = ()
    uses: tuple[int, ...] = ()
    protected: int = 0
    pruned: int = 0


def widened(flat: Any) -> Any:
    """Convert a flat array of numbers, NumPy or torch, to float64 (or complex128) NumPy."""
    if is_torch(flat):
        import torch

        return flat.to(torch.complex128 if flat.dtype.is_complex else torch.float64).numpy()
    with np.errstate(invalid="ignore"):  # NumPy warns about signalling NaNs
        return flat.astype(np.complex128 if flat.dtype.kind == "c" else np.float64)


def histogram(memory: Reference, spec: LeafSpec) -> Histogram:
    """Return the histogram of a decoded array of floats.

    Args:
        memory: the array, as `Checkpoint.reference_of` returns it.
        spec: its dtype and shape.

    Example:
        >>> import shrinkpoint as sp
        >>> ckpt = sp.compress([np.array([0.0, 1.0, 1.0, 4.0])])
        >>> found = histogram(ckpt.reference_of(ckpt.records[0]), ckpt.records[0].spec)
        >>> found.low, found.high, found.counts[0], found.counts[16], found.zeros
        (0.0, 4.0, 1, 2, 1)
    """
    flat = memory.values(spec)
    starts = range(0, spec.size, CHUNK)
    low, high, odd, zeros = np.inf, -np.inf, 0, 0
    for start in starts:
        x = widened(flat[start : start + CHUNK])
        finite = x[np.isfinite(x)]
        odd += x.size - finite.size
        zeros += int((finite == 0).sum())
        low, high = float(finite.min(initial=low)), float(finite.max(initial=high))
    counts: Any = np.zeros(0, np.int64)
    if low == high:
        counts = np.array([spec.size - odd])
    elif low < high:
        # Scaled so that the width of a bin is finite for all values.
        scale = 2.0 ** -max(0, int(np.frexp(max(abs(low), abs(high)))[1]) - 1000)
        edges = np.linspace(low * scale, high * scale, BINS + 1)
        counts = np.zeros(BINS, np.int64)
        if (np.diff(edges) > 0).all():
            for start in starts:
                x = widened(flat[start : start + CHUNK])
                counts += np.histogram(x[np.isfinite(x)] * scale, bins=edges)[0]
        else:
            counts = np.array([spec.size - odd])  # the values are closer than float64 can divide
    shape = (low, high) if low <= high else (0.0, 0.0)
    found = Histogram(*shape, tuple(map(int, counts)), zeros, odd)
    if not isinstance(memory, LevelsReference):
        return found
    uses = np.bincount(memory.levels, minlength=memory.size)
    return dataclasses.replace(
        found,
        codebook=tuple(map(float, memory.codebook)),
        uses=tuple(map(int, uses[2:])),
        protected=int(uses[1]),
        pruned=int(uses[0]),
    )
