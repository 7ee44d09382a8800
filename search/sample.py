"""A sample of an array: evenly spaced blocks of elements on which levels are counted.

The bytes that the codec writes for the array are estimated from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..codec import entropy
from ..codec.base import Array, Leaf
from ..codec.format import container
from ..codec.format.schema import StoredArray, StoredGroup, groups_to_json
from ..codec.state.casting import float_values, unit
from ..codec.state.leaves import LeafSpec, NpArray, as_bytes
from ..codec.weights.error_targets import blocks, taken
from ..codec.weights.levels import LevelsReference, compatible_parents, head_piece, held_values, level_pieces
from ..codec.weights.planning import Limits
from ..kernels.huffman import huffman_lengths, pack_lengths
from ..kernels.levels import joint_counts
from ..kernels.quantizer import Thresholds
from ..kernels.rate_distortion import extrapolate

T = TypeVar("T")
BLOCK = 1024
SAMPLE = 1 << 19
"""Number of elements sampled from a whole model; at least `LEAST` from each array, or all of a smaller one."""
LEAST = 1 << 12
GROUPS = 24
"""Maximum number of arrays that represent all."""
_FEW = 1 << 13
"""Number of elements up to which levels are coded instead of counted, because tables then dominate their size."""
_NO_BYTES = np.empty(0, np.uint8)
_NO_THRESHOLDS = Thresholds(np.inf, np.inf, 0.0, 0.0)
_PRIME = 7919


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


# ---------------------------------------------------------------------------------------------------------------- sizes


def nbytes_of_header(
    leaves: Sequence[Leaf], limits: Limits, is_delta: bool, groups: Sequence[Sequence[int]] = ()
) -> int:
    """Return the bytes of header records, with made-up lengths and errors.

    Args:
        leaves: the arrays.
        limits: thresholds over all arrays.
        is_delta: whether the arrays are coded against a parent.
        groups: numbers of the arrays of each group of several; default: none.
    """

    def thresholds(leaf: Leaf) -> list[float | None]:
        limit = limits.of(leaf.kind.layer)
        protect = [None if np.isinf(t) else t for t in (limit.protect_magnitude, limit.protect_sensitivity)]
        return [*protect, limit.prune_magnitude, limit.prune_sensitivity]

    def record(i: int, leaf: Leaf) -> StoredArray:
        other = _PRIME * i % 900
        note = (
            f"codebook refit: the parent's gives {1 + other / 1000:.3g} times the error" if is_delta else "codebook new"
        )
        error = (100 + other) / 1000
        return StoredArray(leaf.spec.dtype, leaf.spec.shape, measure="relative L2", error=error, note=note)

    def group(members: Sequence[int]) -> StoredGroup:
        first, other = leaves[members[0]], _PRIME * members[0] % 900
        lengths = [500, 50_000] if len(members) > 1 else [19 + other % 97, first.spec.size // 4 + other]
        return StoredGroup(members, "levels", lengths, {"t": [thresholds(first)]}, is_delta)

    empty = {"tree": [None for _ in leaves], "arrays": [], "groups": []}
    full: dict[str, Any] = {"tree": [{"a": i} for i, _ in enumerate(leaves)]}
    full["arrays"] = [record(*x).to_json() for x in enumerate(leaves)]
    alone = set(range(len(leaves))) - {i for members in groups for i in members}
    full["groups"] = groups_to_json([group(members) for members in (*groups, *([i] for i in sorted(alone)))])
    return len(container.write(full, [])[0]) - len(container.write(empty, [])[0])


def nbytes_of_codebook(codebook: NpArray, before: LevelsReference | None, spec: LeafSpec) -> int:
    """Return the bytes of the codebook part, which precedes protected values and levels."""
    parents = None if before is None else [LevelsReference(_NO_BYTES, before.codebook, _NO_BYTES, _NO_THRESHOLDS)]
    return len(head_piece([spec], [LevelsReference(_NO_BYTES, codebook, _NO_BYTES, _NO_THRESHOLDS)], parents))


def nbytes_of_protected(levels: NpArray, part: Sample, spec: LeafSpec) -> float:
    """Estimate the bytes of an array's protected values from its sample's levels."""
    none = nbytes_of_codebook(np.empty(0), None, spec)

    def one(at: NpArray | slice) -> int:
        own = np.ascontiguousarray(levels[at])
        held = held_values(part.x[at][own == 1], spec)
        befores = None if part.before is None else [held_of(part.before, at, spec)]
        return len(head_piece([spec], [LevelsReference(own, np.empty(0), held, _NO_THRESHOLDS)], befores)) - none

    return _extrapolated(one, part)


SampledLevels = tuple[LeafSpec, LevelsReference]
"""Spec and levels of the sample of an array."""


def sampled_levels(levels: NpArray, codebook: NpArray, part: Sample, spec: LeafSpec) -> SampledLevels:
    """Return a sample's levels, codebook and protected values, as the codec stores them."""
    held = held_values(part.x[levels == 1], spec)
    whole = spec if part.scale == 1.0 else LeafSpec(spec.library, spec.dtype, (levels.size,))
    return whole, LevelsReference(levels, codebook, held, _NO_THRESHOLDS)


def nbytes_of_group(samples: Sequence[SampledLevels], parts: Sequence[Sample], unit: Unit) -> float:
    """Estimate the bytes of a group from the samples of some of its arrays.

    Args:
        samples: of these arrays.
        parts: their samples.
        unit: the group and the number of elements that it represents.
    """
    elements = sum(part.scale * part.wide.size for part in parts) * unit.scale / unit.times

    def pieces(step: int) -> tuple[int, int, int]:
        specs, references = [spec for spec, _ in samples[::step]], [levels for _, levels in samples[::step]]
        befores = compatible_parents([part.before for part in parts[::step]], specs)
        refers, levels = map(len, level_pieces(specs, references, befores))
        return refers, levels, sum(spec.size for spec in specs)

    refers, levels, size = pieces(1)
    more = unit.count - len(samples)
    if not more and size == elements:
        return float(refers + levels)
    if len(samples) == 1:
        return float(refers * unit.count + levels * elements / size)
    # Each further array adds as much as an array of the second half of the samples: tables are written once.
    few_refer, few_levels, few = pieces(2)
    refers_of_one = (refers - few_refer) / (len(samples) // 2)
    return refers + more * refers_of_one + levels + (elements - size) * (levels - few_levels) / (size - few)


def nbytes_of_levels(levels: NpArray, size: int, part: Sample, coder: str, columns: int = 0) -> float:
    """Estimate the bytes of an array's levels from those of its sample.

    Counts ignore rows and columns, which a sample does not have: estimates of deltas are up to 9 % too large for an MLP
    or a CNN, and 12 to 33 % for an embedding model, whose rows differ most. All points are affected alike.

    Args:
        levels: uint8, shape (n,), of the sample.
        size: number of levels.
        part: the sample.
        coder: as in `Quantize`.
        columns: number of columns of the array as a matrix; 0 (default): not a matrix.
    """
    before, scale = part.before, part.scale

    def coded(at: NpArray | slice, columns: int = 0) -> int:
        parent = None if before is None else np.ascontiguousarray(before.levels[at])
        parent_size = 0 if before is None else before.size
        own = np.ascontiguousarray(levels[at])
        return len(entropy.encode_levels(own, size, parent, parent_size, coder, entropy.Matrix(columns)))

    if before is None:
        counts = entropy.counts_of(levels)[None, :size]
        changes = levels.size - int(counts.max(initial=0))
    else:
        counts = joint_counts(before.levels, levels, before.size, max(size, before.size))
        changes = levels.size - int(np.trace(counts))
    if coder == "published" and before is not None:
        return _extrapolated(coded, part)
    if scale == 1.0 and levels.size <= _FEW:
        return coded(slice(None), columns)
    if not changes:
        return 2.0
    counts = np.rint(scale * counts).astype(np.int64)
    if coder == "published":
        lengths = huffman_lengths(counts[0])
        return float((counts[0] * lengths).sum()) / 8 + len(pack_lengths(lengths)) + 8
    return min(entropy.rans_bytes(counts), entropy.rans_bytes(counts.sum(axis=0, keepdims=True)))


def _extrapolated(nbytes: Any, part: Sample) -> float:
    """Extrapolate the bytes of the sample to the array, by those that its second half adds."""
    whole = nbytes(slice(None))
    if part.scale == 1.0:
        return float(whole)
    more = whole - nbytes(part.half)
    return float(whole + (part.scale - 1) * part.wide.size / max(1, part.wide.size - part.half.size) * more)
