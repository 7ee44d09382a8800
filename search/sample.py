"""A sample of an array: evenly spaced blocks of elements on which levels are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from ..codec.base import Array, Leaf
from ..codec.state.casting import float_values, unit
from ..codec.state.leaves import LeafSpec, NpArray, as_bytes
from ..codec.weights.error_targets import blocks, taken
from ..codec.weights.levels import LevelsReference
from ..kernels.rate_distortion import extrapolate

T = TypeVar("T")
BLOCK = 1024
SAMPLE = 1 << 19
"""Number of elements sampled from a whole model; at least `LEAST` from each array, or all of a smaller one."""
LEAST = 1 << 12
GROUPS = 24
"""Maximum number of arrays that represent all."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Evenly spaced blocks of an array, or all of a small one.

    Args:
        x, gradient, importance: values, their gradients, and the weight of an error in each, in host memory.
        wanted: the values to code: `x`, or these extrapolated by their drift.
        wide: finite values as NumPy float32 or float64, times `unit`; 0 for the rest.
        unit: a power of two that keeps squares in range.
        norm: sum of squares of `wide`.
        before: the parent's levels of the same elements, or None for a base.
        scale: number of elements of the array per element of the sample.
    """

    x: Array
    wanted: Array
    gradient: Array | None
    importance: Array | None
    wide: NpArray
    unit: float
    norm: float
    before: LevelsReference | None
    scale: float

    @property
    def half(self) -> NpArray:
        """Return the positions of every other block."""
        places = np.arange(self.wide.size)
        half: NpArray = places[places // BLOCK % 2 == 0]
        return half


def sample(leaf: Leaf, before: LevelsReference | None, total: int) -> Sample:
    """Take the sample of an array that is one of several with `total` elements together."""
    n = leaf.spec.size
    wanted = max(LEAST, SAMPLE * n // max(1, total))
    at = blocks(n, wanted, BLOCK)
    count = n if isinstance(at, slice) else at.size
    x = taken(leaf.flat, at)
    wide = float_values(as_bytes(x), leaf.spec)
    finite = np.isfinite(wide)
    power = unit(float(np.abs(wide[finite]).max(initial=0.0)))
    wide = np.where(finite, wide, 0) * wide.dtype.type(power)
    gain = 0.0 if leaf.earlier is None or before is None else before.drift_gain
    return Sample(
        x,
        extrapolate(x, taken(leaf.earlier, at), gain) if gain else x,
        None if leaf.gradient is None else taken(leaf.gradient, at),
        None if leaf.importance is None else taken(leaf.importance, at),
        wide,
        power,
        energy(wide),
        None if before is None else held_of(before, at, leaf.spec),
        n / count if count else 1.0,
    )


def held_of(memory: LevelsReference, at: NpArray | slice, spec: LeafSpec) -> LevelsReference:
    """Return the parent's levels and protected values at ascending positions."""
    levels = np.ascontiguousarray(memory.levels[at])
    protected = np.flatnonzero(memory.levels == 1)
    among = np.arange(memory.levels.size)[at][levels == 1]
    values = memory.protected.reshape(-1, spec.itemsize)[np.searchsorted(protected, among)].reshape(-1)
    return LevelsReference(levels, memory.codebook, values, memory.thresholds)


def energy(x: NpArray) -> float:
    """Return the sum of squares in float64."""
    wide = x.astype(np.float64)
    return float(np.square(wide, out=wide).sum())  # not with BLAS, whose sums depend on the number of threads


@dataclass(frozen=True, slots=True)
class Unit:
    """Sampled arrays, coded alone or as one group, and their share of all arrays.

    Args:
        members: numbers of the sampled arrays.
        scale: elements that the unit represents, divided by the elements of the members.
        count: number of arrays of the group; 0 for an array that is coded alone.
        times: elements that the unit represents, divided by the elements of the group; 1 for an array.
    """

    members: tuple[int, ...]
    scale: float
    count: int = 0
    times: float = 1.0


def chosen_units(leaves: Sequence[Leaf], scales: Sequence[float], groups: Sequence[Sequence[int]]) -> list[Unit]:
    """Choose about `GROUPS` arrays coded alone, and arrays of groups, to represent all.

    Args:
        leaves: the arrays.
        scales: magnitudes of their values.
        groups: numbers of the arrays of each group; no array is in two.
    """
    taken = {i for group in groups for i in group}
    alone = [i for i in range(len(leaves)) if i not in taken]
    found = representatives([leaves[i] for i in alone], [scales[i] for i in alone])
    units = [Unit((alone[at],), scale) for at, scale in found]
    some = _spread_out(list(groups), GROUPS)
    each = max(1, GROUPS // max(1, len(some)))

    def size(numbers: Sequence[int]) -> int:
        return sum(leaves[i].spec.size for i in numbers)

    times = sum(map(size, groups)) / max(1, sum(map(size, some)))
    for group in some:
        members = _spread_out(sorted(group, key=lambda i: scales[i]), each)
        units.append(Unit(tuple(members), times * size(group) / size(members), len(group), times))
    return units


def _spread_out(items: list[T], most: int) -> list[T]:
    """Return up to `most` items, evenly spaced."""
    if len(items) <= most:
        return items
    return [items[(2 * k + 1) * len(items) // (2 * most)] for k in range(most)]


def representatives(leaves: Sequence[Leaf], scales: Sequence[float]) -> list[tuple[int, float]]:
    """Choose up to `GROUPS` arrays that represent all, each with a scale.

    The scale is the number of elements of its group over its own.

    Arrays are grouped by layer type, dtype, size to a factor of two, and scale of the values; one array represents
    each group.

    Args:
        leaves: the arrays.
        scales: magnitudes of their values, which decide how much of each array is pruned and protected.
    """
    if len(leaves) <= GROUPS:
        return [(i, 1.0) for i in range(len(leaves))]
    keys = [
        (x.kind.layer, x.spec.dtype, x.spec.size.bit_length(), s, x.key) for x, s in zip(leaves, scales, strict=True)
    ]
    order = sorted(range(len(leaves)), key=keys.__getitem__)
    total = sum(leaf.spec.size for leaf in leaves)
    groups: dict[int, list[int]] = {}
    before = 0
    for i in order:
        size = leaves[i].spec.size
        groups.setdefault(GROUPS * (2 * before + size) // (2 * total), []).append(i)
        before += size
    found = []
    for members in groups.values():
        # Tables and records are counted per array, so the representative has the size class with the most elements.
        # Among the arrays of that size it is the one with the median scale.
        sizes = [leaves[i].spec.size for i in members]
        usual, middle = sum(n * n for n in sizes) / sum(sizes), (len(members) - 1) / 2
        best = members[min(range(len(members)), key=lambda k: (abs(sizes[k] - usual), abs(k - middle)))]
        found.append((best, sum(leaves[i].spec.size for i in members) / leaves[best].spec.size))
    return found
