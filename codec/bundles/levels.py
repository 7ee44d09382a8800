"""Levels of several arrays coded together, each with its own codebook, in one stream.

To make levels of different codebooks comparable, they are shifted: the first entry that is not negative has the same
level in all arrays. The levels 0 and 1, which are not entries, do not change.

Pieces: (0) modes and sizes of the codebooks; multiples: first and step of each; explicit entries; protected values as
bfloat16 differences to the parents', and values that bfloat16 cannot hold. (1) the levels, in the context of the
parents' levels if there are any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.quantizer import FIRST_CODE, LARGEST_STEP, MAX_CODES, SMALLEST_STEP, Thresholds, uniform_values_many
from .. import entropy
from ..base import Leaf, Reference, Stored
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes
from ..weights.levels import (
    EXPLICIT,
    FARTHEST,
    GAIN_STEPS,
    MULTIPLES,
    PARENTS,
    LevelsReference,
    check_codebook,
    codebook_array,
    compatible_parent,
    multiples_of,
    predicted_patterns,
    read_gain,
    read_thresholds,
    thresholds_as_json,
    widened_bytes,
)
from ..weights.planning import Plan
from ..weights.protected import read_protected, write_protected
from ..weights.quantize import Quantize, Quantized
from ..weights.quantize_many import quantized_many
from .joined import Joined, Pieces, StoredBundle, Together, ends_of, matrix_of, parts


@dataclass(frozen=True, slots=True)
class JoinedLevels:
    """References of arrays of levels, joined.

    Args:
        levels: uint8 [n].
        references: of each array, its levels a part of these.
        specs: of the arrays.
    """

    levels: NpArray
    references: Sequence[LevelsReference]
    specs: Sequence[LeafSpec]

    def split(self) -> list[Reference]:
        """See `Joined`."""
        return list(self.references)

    def data(self) -> NpArray:
        """See `Joined`."""
        uniform = [r.multiples for r in self.references]
        if self.specs[0].dtype != "float32" or not all(m and _within(*m) for m in uniform):
            found = [as_bytes(r.values(spec)) for r, spec in zip(self.references, self.specs, strict=True)]
            return np.concatenate(found)
        firsts, steps = (np.array(column) for column in zip(*uniform, strict=True))
        values = uniform_values_many(self.levels, ends_of(self.specs), steps, firsts)
        protected = [r.protected for r in self.references if r.protected.size]
        if protected:
            values[self.levels == 1] = np.concatenate(protected).view(np.float32)
        return as_bytes(values)

    def shifts(self) -> NpArray:
        """Number of each array's first codebook entry that is not negative, int64."""
        return np.array([_shift(r.codebook, r.multiples) for r in self.references])


def _within(first: int, step: float) -> bool:
    return abs(first) <= 1 << 15 and SMALLEST_STEP <= step <= LARGEST_STEP


def _shift(codebook: NpArray, multiples: tuple[int, float] | None) -> int:
    """Return the number of the first codebook entry that is not negative."""
    return int(codebook.searchsorted(0.0)) if multiples is None else min(max(-multiples[0], 0), codebook.size)


def join_levels(references: Sequence[Reference | None], specs: Sequence[LeafSpec]) -> JoinedLevels | None:
    """See `BundleStream.join`."""
    found: list[LevelsReference] = []
    for reference, spec in zip(references, specs, strict=True):
        levels = compatible_parent(reference, spec)
        if levels is None:
            return None
        found.append(levels)
    return JoinedLevels(np.concatenate([r.levels for r in found]), found, specs)


def levels_together(
    codec: Quantize, leaves: Sequence[Leaf], parents: Sequence[Reference | None], plans: Sequence[Plan]
) -> Together:
    """Quantize weights of one dtype, and encode their levels together."""
    alone: dict[int, Stored | None] = {}
    found: dict[int, Quantized] = {}
    ordinary = quantized_many(codec, leaves, parents, plans)
    for i, (leaf, parent, plan) in enumerate(zip(leaves, parents, plans, strict=True)):
        quantized = ordinary[i] if i in ordinary else codec.quantized(leaf, parent, plan)
        if isinstance(quantized, Stored):
            alone[i] = quantized
        else:
            found[i] = quantized
    if not found:
        return Together([], alone)
    specs = [leaves[i].spec for i in found]
    joined = join_levels([q.levels for q in found.values()], specs)
    assert joined is not None
    before = join_levels([parents[i] for i in found], specs)
    pieces = level_pieces(joined, before)
    if sum(map(len, pieces)) > sum(spec.nbytes for spec in specs):  # most is not finite, and stands next to its level
        return Together([], alone | dict.fromkeys(found))
    references = _with_parts(joined)
    stored = [
        Stored("levels", {}, (), reference, q.error, "relative L2", q.note)
        for reference, q in zip(references, found.values(), strict=True)
    ]
    bundle = StoredBundle(list(found), "levels", _metadata(joined.references), pieces, before is not None, stored)
    return Together([bundle], alone)


def _with_parts(joined: JoinedLevels) -> list[LevelsReference]:
    """Return references whose levels are views of the joined levels."""
    return [
        LevelsReference(levels, r.codebook, r.protected, r.thresholds, r.drift_gain, r.multiples)
        for levels, r in zip(parts(joined.levels, joined.specs), joined.references, strict=True)
    ]


def _metadata(references: Sequence[LevelsReference]) -> dict[str, Any]:
    """Return the metadata: distinct thresholds, their number for each array, nonzero gains."""
    limits = [thresholds_as_json(r.thresholds) for r in references]
    different = list(dict.fromkeys(map(tuple, limits)))
    meta: dict[str, Any] = {"t": [list(t) for t in different]}
    if len(different) > 1:
        meta["i"] = [different.index(tuple(t)) for t in limits]
    gains = [round(GAIN_STEPS * r.drift_gain) for r in references]
    return meta | ({"a": gains} if any(gains) else {})


def _shifted(levels: NpArray, specs: Sequence[LeafSpec], shifts: NpArray, *, back: bool = False) -> NpArray:
    """Shift levels so that entry `shifts[i]` of array i has one common level, or shift back."""
    by = (int(shifts.max()) - shifts) % MAX_CODES
    if not by.any():
        return levels
    if back:
        by = (MAX_CODES - by) % MAX_CODES
    table = np.empty((by.size, 256), np.uint8)
    table[:, :FIRST_CODE] = np.arange(FIRST_CODE)
    table[:, FIRST_CODE:] = (np.arange(MAX_CODES) + by[:, None]) % MAX_CODES + FIRST_CODE
    out = np.empty_like(levels)
    for row, own, to in zip(table, parts(levels, specs), parts(out, specs), strict=True):
        np.take(row, own, out=to)
    return out


def level_pieces(joined: JoinedLevels, before: JoinedLevels | None) -> list[bytes]:
    """Return the two pieces of a bundle: codebooks with protected values, and levels."""
    specs = joined.specs
    symbols = _shifted(joined.levels, specs, joined.shifts())
    old = None if before is None else _shifted(before.levels, specs, before.shifts())
    chunk = entropy.encode_levels(symbols, 256, old, 256, "smallest", matrix_of(specs))
    return [_references(joined, before), chunk]


def rebase_levels_together(joined: Joined, before: Joined | None) -> Pieces:
    """Encode the levels of a bundle as a base or against another parent."""
    assert isinstance(joined, JoinedLevels)
    pieces = level_pieces(joined, before if isinstance(before, JoinedLevels) else None)
    return _metadata(joined.references), pieces


def _references(joined: JoinedLevels, before: JoinedLevels | None) -> bytes:
    """Encode the first piece: codebooks and protected values."""
    spec = joined.specs[0]
    modes, sizes, firsts, steps, explicit = [], [], [], [], []
    predicted = []
    for i, reference in enumerate(joined.references):
        old = None if before is None else before.references[i]
        if old is not None and reference.has_codebook_of(old):
            modes.append(PARENTS)
        else:
            uniform = reference.uniform(spec)
            modes.append(EXPLICIT if uniform is None else MULTIPLES)
            sizes.append(reference.codebook.size)
            if uniform is None:
                explicit.append(as_bytes(codebook_array(reference.codebook, spec)))
            else:
                firsts.append(uniform[0])
                steps.append(uniform[1])
        predicted.append(predicted_patterns(reference.levels, old, spec))
    out = Writer()
    for numbers in (modes, sizes):
        out.block(entropy.coded(np.array(numbers, np.uint8)))
    _write_planes(out, np.array(firsts, np.int64) + FARTHEST, 4)
    _write_planes(out, np.array(steps, np.float64).view(np.int64), 8)
    for entries in explicit:
        out.raw(entries)
    write_protected(out, np.concatenate([r.protected for r in joined.references]), np.concatenate(predicted), spec)
    return out.done()


def _write_planes(out: Writer, numbers: NpArray, width: int) -> None:
    """Write the lowest `width` bytes of int64 numbers, each as a plane."""
    planes = numbers.astype("<i8").view(np.uint8).reshape(-1, 8)
    for k in range(width):
        out.block(entropy.coded(np.ascontiguousarray(planes[:, k])))


def _read_planes(data: Reader, count: int, width: int) -> NpArray:
    planes = np.zeros((count, 8), np.uint8)
    for k in range(width):
        planes[:, k] = entropy.decode(data.block(), count)
    numbers: NpArray = planes.view("<i8").reshape(-1)
    return numbers


def decode_levels_together(
    specs: Sequence[LeafSpec],
    meta: dict[str, Any],
    pieces: Sequence[memoryview],
    before: Joined | None,
    square: Array | None,
) -> JoinedLevels:
    """Decode levels that were coded together."""
    old = before if isinstance(before, JoinedLevels) else None
    if len(pieces) != 2:
        raise CorruptDataError(f"levels: a bundle in {len(pieces)} pieces; it has 2")
    data = Reader(pieces[0], "levels")
    codebooks = _read_codebooks(data, specs, old)
    size = sum(spec.size for spec in specs)
    context = None if old is None else _shifted(old.levels, specs, old.shifts())
    symbols = entropy.decode(pieces[1], size, context, 256)
    shifts = np.array([_shift(*codebook) for codebook in codebooks])
    levels = _shifted(symbols, specs, shifts, back=True)
    own = parts(levels, specs)
    for part, (codebook, _) in zip(own, codebooks, strict=True):
        if part.size and int(part.max()) >= codebook.size + FIRST_CODE:
            raise CorruptDataError("levels: a level is beyond its codebook")
    olds = [None] * len(own) if old is None else old.references
    predicted = [predicted_patterns(part, before, specs[0]) for part, before in zip(own, olds, strict=True)]
    joined = read_protected(data, np.concatenate(predicted), specs[0])
    data.end()
    protected = np.split(joined, np.cumsum([p.size for p in predicted])[:-1] * specs[0].itemsize)
    thresholds, gains = _read_metadata(meta, len(specs))
    references = [
        LevelsReference(part, codebook, held, limits, gain, multiples)
        for part, (codebook, multiples), held, limits, gain in zip(
            own, codebooks, protected, thresholds, gains, strict=True
        )
    ]
    return JoinedLevels(levels, references, specs)


Codebook = tuple[NpArray, tuple[int, float] | None]
"""Entries, and the first multiple and the step where they are multiples."""


def _read_codebooks(data: Reader, specs: Sequence[LeafSpec], old: JoinedLevels | None) -> list[Codebook]:
    spec = specs[0]
    modes = entropy.decode(data.block(), len(specs))
    if modes.size and int(modes.max()) > MULTIPLES:
        raise CorruptDataError(f"levels: mode {int(modes.max())} of a codebook")
    sizes = entropy.decode(data.block(), int(np.count_nonzero(modes != PARENTS))).astype(np.int64)
    if sizes.size and int(sizes.max()) > MAX_CODES:
        raise CorruptDataError(f"levels: a codebook of {int(sizes.max())} entries")
    uniform = int(np.count_nonzero(modes == MULTIPLES))
    firsts = _read_planes(data, uniform, 4) - FARTHEST
    steps = _read_planes(data, uniform, 8).view(np.float64)
    numbers, multiples = iter(sizes.tolist()), zip(firsts.tolist(), steps.tolist(), strict=True)
    found: list[Codebook] = []
    for i, mode in enumerate(modes.tolist()):
        if mode == PARENTS:
            if old is None:
                raise CorruptDataError("levels: the parent's codebook is wanted and is not there")
            found.append((old.references[i].codebook, old.references[i].multiples))
            continue
        size, own = next(numbers), None
        if mode == MULTIPLES:
            own = next(multiples)
            codebook = multiples_of(own[0], size, own[1], spec)
        else:
            codebook = widened_bytes(data.array("u1", size * spec.itemsize).copy(), spec)
        check_codebook(codebook)
        found.append((codebook, own))
    return found


def _read_metadata(meta: dict[str, Any], count: int) -> tuple[list[Thresholds], list[float]]:
    limits, numbers, gains = meta.get("t"), meta.get("i"), meta.get("a")
    if not isinstance(limits, list) or not limits:
        raise CorruptDataError("levels: no thresholds")
    thresholds = [read_thresholds(limit) for limit in limits]
    numbers = [0] * count if numbers is None else numbers
    gains = [0] * count if gains is None else gains
    if not (isinstance(numbers, list) and isinstance(gains, list) and len(numbers) == len(gains) == count):
        raise CorruptDataError(f"levels: thresholds or gains do not fit {count} arrays")
    if not all(type(i) is int and 0 <= i < len(thresholds) for i in numbers):
        raise CorruptDataError("levels: thresholds that are not there")
    return [thresholds[i] for i in numbers], [read_gain(gain) for gain in gains]
