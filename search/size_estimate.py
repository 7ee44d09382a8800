"""Estimation of the bytes that the codec writes for an array, from a sample of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codec import entropy
from ..codec.base import Leaf
from ..codec.format import container
from ..codec.format.schema import StoredArray, StoredGroup, groups_to_json
from ..codec.state.leaves import LeafSpec, NpArray
from ..codec.weights.levels import LevelsReference, compatible_parents, head_piece, held_values, level_pieces
from ..codec.weights.planning import Limits
from ..kernels.huffman import huffman_lengths, pack_lengths
from ..kernels.levels import joint_counts
from ..kernels.quantizer import Thresholds
from .sample import Sample, Unit, held_of

_FEW = 1 << 13
"""Number of elements up to which levels are coded instead of counted, because tables then dominate their size."""
_NO_BYTES = np.empty(0, np.uint8)
_NO_THRESHOLDS = Thresholds(np.inf, np.inf, 0.0, 0.0)
_PRIME = 7919


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
