"""The stream format "levels": levels of codebooks, coded as a delta if there are parents.

Piece 0 is what the levels refer to: the codebook of each array (or "the parent's"), the protected values as bfloat16
differences to the parents', and those values that bfloat16 cannot hold, to the bit. The other pieces are chunks of
levels (`entropy.encode_levels`). To make levels of different codebooks comparable, they are shifted: the first entry
that is not negative has the same level in all arrays. The levels 0 and 1, which are not entries, do not change.

A protected value is held when its rounding to bfloat16 (to nearest, ties to even; float64 by way of float32), taken
back to its own dtype, is finite and is zero only if the value is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.backend.arrays import bytes_of, is_torch, like, on_gpu, placed_with, to_host
from ...kernels.backend.floats import FORMATS
from ...kernels.planes import difference, merge_planes, split_planes, undifference
from ...kernels.quantizer import (
    FIRST_CODE,
    LARGEST_STEP,
    MAX_CODES,
    SMALLEST_STEP,
    Thresholds,
    dequantize,
    uniform_values_many,
)
from .. import entropy
from ..base import CHUNK, PART, Parents, Reference
from ..entropy.blocks import is_block, is_large
from ..errors import BadArgumentError, CorruptDataError
from ..format.fields import Piece, Reader, Writer, chunks_of
from ..groups import (
    Coded,
    FilledReference,
    ends_of,
    fill_each,
    matrix_of,
    own_parts,
    parts,
    sent_values,
    spread,
    values_of_each,
)
from ..parallel import map_chunks
from ..state.casting import bfloat16_patterns, float_values, from_bfloat16
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, from_bytes
from .codebook import MOST, codebook_array, multiples_of, uniform_of, widened

Codebook = tuple[NpArray, tuple[int, float] | None]
"""Entries, and the first multiple and the step where they are multiples."""
EXPLICIT, PARENTS, MULTIPLES = 0, 1, 2
MAX_BINS = MOST
GAIN_STEPS, LARGEST_GAIN = 256, 4.0
"""Steps of an gain of 1, and the largest gain."""


@dataclass(frozen=True, slots=True)
class LevelsReference(FilledReference):
    """Reference of an array of levels: levels, codebook and protected values.

    Args:
        levels: uint8, shape (n,), on the host; while values are decoded on a GPU perhaps there.
        codebook: float64, ascending, values of the array's dtype.
        protected: bytes of the protected values in the array's dtype, in order.
        thresholds: those the levels were made with.
        drift_gain: how far the next delta extrapolates the drift, see `codec.weights.level_assignment`; a multiple of
            `1 / GAIN_STEPS` in [0, `LARGEST_GAIN`].
        multiples: first multiple and step of the codebook; None: unknown.
        device_chunks: the levels of each chunk on the GPU that made them, while the array is encoded; else none.
    """

    levels: Array
    codebook: NpArray
    protected: NpArray
    thresholds: Thresholds
    drift_gain: float = 0.0
    multiples: tuple[int, float] | None = None
    device_chunks: tuple[Array, ...] = ()

    def uniform(self, spec: LeafSpec) -> tuple[int, float] | None:
        """Return first multiple and step of the codebook; None if its entries are not multiples."""
        return uniform_of(self.codebook, spec) if self.multiples is None else self.multiples

    def has_codebook_of(self, other: LevelsReference) -> bool:
        """Return whether another reference has the same codebook."""
        if self.multiples is not None and other.multiples is not None:
            return self.multiples == other.multiples and self.codebook.size == other.codebook.size
        return np.array_equal(self.codebook, other.codebook)

    @property
    def size(self) -> int:
        """Number of levels."""
        return int(self.codebook.size) + 2

    def fill(self, spec: LeafSpec, out: NpArray) -> None:
        """Write the bytes of the decoded values."""
        codebook, protected, end = codebook_array(self.codebook, spec), from_bytes(self.protected, spec), 0
        for start in range(0, self.levels.size, PART):
            levels = self.levels[start : start + PART]
            begin, end = end, end + int(np.count_nonzero(levels == 1))
            values = dequantize(like(levels, codebook), codebook, protected=protected[begin:end])
            out[start * spec.itemsize : (start + levels.size) * spec.itemsize] = as_bytes(values)

    def fill_there(self, spec: LeafSpec, out: Array) -> None:
        """Look the levels up in a codebook on a GPU, where both are sent."""
        data, at = (as_bytes(codebook_array(self.codebook, spec)), self.protected), _protected_at(self.levels)
        codebook, protected = (sent_values(part, out) for part in data)
        starts = range(0, spec.size, CHUNK)
        ends = [*at.searchsorted(starts).tolist(), at.size]
        for start, begin, end in zip(starts, ends, ends[1:], strict=False):
            levels = placed_with(self.levels[start : start + CHUNK], out)
            out[start : start + CHUNK] = dequantize(levels, codebook, protected=protected[begin:end])


def compatible_parent(parent: Reference | None, spec: LeafSpec) -> LevelsReference | None:
    """Return the parent if levels of this array can be a delta against it, else None."""
    return parent if isinstance(parent, LevelsReference) and parent.levels.size == spec.size else None


def compatible_parents(parents: Parents, specs: Sequence[LeafSpec]) -> list[LevelsReference] | None:
    """Return the parents if the levels of these arrays can be a delta against them, else None."""
    pairs = zip(parents, specs, strict=True)
    found = [known for parent, spec in pairs if (known := compatible_parent(parent, spec)) is not None]
    return found if len(found) == len(specs) else None


def level_pieces(
    specs: Sequence[LeafSpec],
    references: Sequence[LevelsReference],
    befores: Sequence[LevelsReference] | None,
    coder: str = "smallest",
) -> list[Piece]:
    """Return the pieces of a group: codebooks with protected values, and the levels in chunks."""
    symbols, size = _shifted_levels(references, specs)
    parents, parent_size = (None, 0) if befores is None else _shifted_levels(befores, specs)
    published = coder == "published"
    chunks = references[0].device_chunks if len(references) == 1 else ()

    def one(start: int) -> Piece:
        part = slice(start, start + CHUNK)
        own, parent = symbols[part], None if parents is None else parents[part]
        there, matrix = chunks[start // CHUNK] if chunks else own, matrix_of(specs, start)
        if not published and is_block(own.size):
            return entropy.CodedBlock(there, parent, parent_size)
        levels = there if published and parent is not None else own
        return entropy.encode_levels(levels, size, parent, parent_size, coder, matrix)

    return [head_piece(specs, references, befores), *map_chunks(one, range(0, symbols.size, CHUNK))]


def rebase_levels(
    specs: Sequence[LeafSpec], references: Sequence[Reference], parents: Parents
) -> tuple[dict[str, Any], list[Piece]]:
    """Encode the same levels and codebooks as a base or against other parents."""
    levels = compatible_parents(references, specs)
    if levels is None:
        raise BadArgumentError("levels: the reference of another stream cannot be rebased as levels")
    return metadata(levels), level_pieces(specs, levels, compatible_parents(parents, specs))


def _shift(codebook: NpArray, multiples: tuple[int, float] | None) -> int:
    """Return the number of the first codebook entry that is not negative."""
    return int(codebook.searchsorted(0.0)) if multiples is None else min(max(-multiples[0], 0), codebook.size)


def _shifts(codebooks: Sequence[Codebook]) -> tuple[NpArray, int]:
    """Return the shift of the levels of each array, int64, and the number of levels then."""
    zeros = np.array([_shift(*codebook) for codebook in codebooks])
    by = int(zeros.max()) - zeros
    return by, min(2 + max(int(k) + codebook.size for k, (codebook, _) in zip(by, codebooks, strict=True)), 256)


def _shifted_levels(references: Sequence[LevelsReference], specs: Sequence[LeafSpec]) -> tuple[NpArray, int]:
    """Return the joined and shifted levels of a group, and their number."""
    by, size = _shifts([(r.codebook, r.multiples) for r in references])
    levels = [r.levels for r in references]
    return _shifted(levels[0] if len(levels) == 1 else np.concatenate(levels), specs, by), size


def _shifted(levels: NpArray, specs: Sequence[LeafSpec], by: NpArray) -> NpArray:
    """Shift the joined levels of each array."""
    if not by.any():
        return levels
    table = np.empty((by.size, 256), np.uint8)
    table[:, :FIRST_CODE] = np.arange(FIRST_CODE)
    table[:, FIRST_CODE:] = (np.arange(MAX_CODES) + by[:, None]) % MAX_CODES + FIRST_CODE
    out = np.empty_like(levels)
    for row, own, to in zip(table, parts(levels, specs), parts(out, specs), strict=True):
        np.take(row, own, out=to)
    return out


def head_piece(
    specs: Sequence[LeafSpec], references: Sequence[LevelsReference], befores: Sequence[LevelsReference] | None
) -> bytes:
    """Encode the first piece: codebooks and protected values."""
    spec = specs[0]
    modes, sizes, firsts, steps, explicit = [], [], [], [], []
    predicted = []
    for i, reference in enumerate(references):
        old = None if befores is None else befores[i]
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
    out.block(*(entropy.coded(np.array(numbers, np.uint8)) for numbers in (modes, sizes)))
    first = np.array(firsts, np.int64)
    _write_planes(out, ((first << 1) ^ (first >> 63)).astype("<u8"))
    _write_planes(out, np.array(steps, "<f8").view("<u8").byteswap())
    out.raw(*explicit)
    protected = [reference.protected for reference in references]
    write_protected(out, np.concatenate(protected), np.concatenate(predicted), spec)
    return out.done()


def _write_planes(out: Writer, numbers: NpArray) -> None:
    """Write how many bytes numbers take, and each of these bytes as a plane, the lowest first."""
    width = (int(numbers.max(initial=0)).bit_length() + 7) // 8
    out.varint(width)
    out.block(*map(entropy.coded, np.ascontiguousarray(numbers.view(np.uint8).reshape(-1, 8)[:, :width].T)))


def _read_planes(data: Reader, count: int, most: int) -> NpArray:
    """Read numbers of at most `most` bytes that `_write_planes` wrote, uint64."""
    planes, width = np.zeros((count, 8), np.uint8), data.varint()
    if width > most:
        raise CorruptDataError(f"levels: numbers of {width} bytes")
    for k in range(width):
        planes[:, k] = entropy.decode(data.block(), count)
    numbers: NpArray = planes.view("<u8").reshape(-1)
    return numbers


def check_codebook(codebook: NpArray) -> None:
    """Raise CorruptDataError unless the entries that were read are finite and ascend."""
    if not np.isfinite(codebook).all() or (codebook[1:] <= codebook[:-1]).any():
        raise CorruptDataError("levels: the codebook is not finite and ascending")


def widened_bytes(data: NpArray, spec: LeafSpec) -> NpArray:
    """Convert bytes of values of any float dtype to float64."""
    return widened(from_bytes(data, spec))


def _protected_at(levels: Array) -> NpArray:
    """Return the positions of protected values, int64, on the host."""
    if not on_gpu(levels):
        return np.flatnonzero(levels == 1)
    return to_host((levels == 1).nonzero().reshape(-1))


def predicted_patterns(levels: Array, before: LevelsReference | None, spec: LeafSpec) -> NpArray:
    """Return the parent's protected values at protected positions, as bfloat16 patterns, or 0."""
    at = _protected_at(levels)
    guess = np.zeros(at.size, np.uint16)
    if before is None or before.protected.size == 0 or at.size == 0:
        return guess
    old_at = np.flatnonzero(before.levels == 1)
    old, _ = held_patterns(before.protected, spec)
    found = np.minimum(np.searchsorted(old_at, at), old_at.size - 1)
    same = old_at[found] == at
    guess[same] = old[found[same]]
    return guess


def decode_levels(coded: Coded) -> list[LevelsReference]:
    """Decode the stream format "levels"."""
    specs, size = coded.specs, coded.spec.size
    if specs[0].dtype not in FORMATS:
        raise CorruptDataError(f"levels: dtype {specs[0].dtype} cannot be stored as levels")
    befores = compatible_parents(coded.parents, specs)
    chunks = chunks_of("levels", coded.pieces, size, 2 * size, step=CHUNK, head=True)
    head = Reader(coded.pieces[0], "levels")
    codebooks = _read_codebooks(head, specs, befores)
    parents, parent_size = (None, 0) if befores is None else _shifted_levels(befores, specs)
    room = coded.there
    # Kernels decode only these, from the parent's levels, and wait several times for results.
    if (
        room is not None
        and len(specs) == 1
        and is_large(size)
        and all(entropy.is_rearranged(piece) for piece, _ in chunks)
    ):
        symbols = bytes_of(room[:0]).new_empty(size)
        parents = None if parents is None else placed_with(parents, room)
    else:
        symbols = np.empty(size, np.uint8)

    streams = [(piece, part.stop - part.start, None if parents is None else parents[part]) for piece, part in chunks]
    there = entropy.decoded_there(streams, parent_size)

    def one(number: int) -> None:
        known = there[number]
        symbols[chunks[number][1]] = entropy.decode(*streams[number], parent_size) if known is None else known

    map_chunks(one, range(len(chunks)))
    levels = parts(_shifted(symbols, specs, -_shifts(codebooks)[0]), specs)
    for part, (codebook, _) in zip(levels, codebooks, strict=True):
        if part.shape[0] and int(part.max()) >= codebook.size + FIRST_CODE:
            raise CorruptDataError("levels: a level is beyond its codebook")
    olds = [None] * len(specs) if befores is None else befores
    predicted = [predicted_patterns(part, before, specs[0]) for part, before in zip(levels, olds, strict=True)]
    protected = read_protected(head, np.concatenate(predicted), specs[0])
    head.end()
    held = np.split(protected, np.cumsum([p.size for p in predicted])[:-1] * specs[0].itemsize)
    thresholds, gains = _read_metadata(coded.meta, len(specs))
    references = [
        LevelsReference(part, codebook, own, limits, gain, multiples)
        for part, (codebook, multiples), own, limits, gain in zip(
            levels, codebooks, held, thresholds, gains, strict=True
        )
    ]
    if room is not None:
        fill_levels(specs, references, room)
    return references


def _read_codebooks(
    data: Reader, specs: Sequence[LeafSpec], befores: Sequence[LevelsReference] | None
) -> list[Codebook]:
    spec = specs[0]
    modes = entropy.decode(data.block(), len(specs))
    if int(modes.max(initial=0)) > MULTIPLES:
        raise CorruptDataError(f"levels: mode {int(modes.max())} of a codebook")
    sizes = entropy.decode(data.block(), int(np.count_nonzero(modes != PARENTS)))
    if int(sizes.max(initial=0)) > MAX_CODES:
        raise CorruptDataError(f"levels: a codebook of {int(sizes.max())} entries")
    uniform = int(np.count_nonzero(modes == MULTIPLES))
    numbers = _read_planes(data, uniform, 4).astype(np.int64)
    firsts = (numbers >> 1) ^ -(numbers & 1)
    steps = _read_planes(data, uniform, 8).byteswap().view("<f8")
    counts, multiples = iter(sizes.tolist()), zip(firsts.tolist(), steps.tolist(), strict=True)
    found: list[Codebook] = []
    for i, mode in enumerate(modes.tolist()):
        if mode == PARENTS:
            if befores is None:
                raise CorruptDataError("levels: the parent's codebook is wanted and is not there")
            found.append((befores[i].codebook, befores[i].multiples))
            continue
        size, own = next(counts), None
        if mode == MULTIPLES:
            own = next(multiples)
            if not own[1] > 0:
                raise CorruptDataError(f"levels: a codebook of multiples of {own[1]}")
            codebook = multiples_of(own[0], size, own[1], spec)
        else:
            codebook = widened_bytes(data.array("u1", size * spec.itemsize).copy(), spec)
        check_codebook(codebook)
        found.append((codebook, own))
    return found


def _read_metadata(meta: dict[str, Any], count: int) -> tuple[list[Thresholds], list[float]]:
    limits, numbers, gains = meta.get("t"), meta.get("i"), meta.get("a")
    if not isinstance(limits, list) or not 0 < len(limits) <= count:
        raise CorruptDataError(f"levels: no thresholds, or more than {count}")
    thresholds = [read_thresholds(limit) for limit in limits]
    numbers = [0] * count if numbers is None else numbers
    gains = [0] * count if gains is None else gains
    if not (isinstance(numbers, list) and isinstance(gains, list) and len(numbers) == len(gains) == count):
        raise CorruptDataError(f"levels: thresholds or gains do not fit {count} arrays")
    if not all(type(i) is int and 0 <= i < len(thresholds) for i in numbers):
        raise CorruptDataError("levels: thresholds that are not there")
    return [thresholds[i] for i in numbers], [read_gain(gain) for gain in gains]


def metadata(references: Sequence[LevelsReference]) -> dict[str, Any]:
    """Return the metadata for the next delta: thresholds, their number for each array, gains."""
    limits = [thresholds_as_json(r.thresholds) for r in references]
    different = list(dict.fromkeys(map(tuple, limits)))
    meta: dict[str, Any] = {"t": [list(t) for t in different]}
    if len(different) > 1:
        meta["i"] = [different.index(tuple(t)) for t in limits]
    gains = [round(GAIN_STEPS * r.drift_gain) for r in references]
    return meta | ({"a": gains} if any(gains) else {})


def level_values(specs: Sequence[LeafSpec], references: Sequence[Reference]) -> list[Array]:
    """Return the values of the references of a group."""
    levels = compatible_parents(references, specs) if len(specs) > 1 else None
    uniform = [r.multiples for r in levels or () if r.multiples is not None and _within(*r.multiples)]
    if levels is None or specs[0].dtype != "float32" or len(uniform) < len(levels):
        return values_of_each(specs, references)
    joined = np.concatenate([r.levels for r in levels])
    firsts, steps = (np.array(column) for column in zip(*uniform, strict=True))
    values = uniform_values_many(joined, ends_of(specs), steps, firsts)
    protected = [r.protected for r in levels if r.protected.size]
    if protected:
        values[joined == 1] = np.concatenate(protected).view(np.float32)
    return own_parts(as_bytes(values), specs)


def fill_levels(specs: Sequence[LeafSpec], references: Sequence[Reference], out: Array) -> None:
    """Fill a flat tensor on a GPU with the values of a group, from a table of all codebooks."""
    found = compatible_parents(references, specs)
    if found is None or len(found) == 1:
        fill_each(specs, references, out)
        return
    none = np.zeros(FIRST_CODE)
    entries = np.concatenate([part for r in found for part in (none, r.codebook)])
    table = sent_values(as_bytes(codebook_array(entries, specs[0])), out)
    levels, numbers = np.concatenate([r.levels for r in found]), [r.codebook.size + FIRST_CODE for r in found]
    at, places = np.flatnonzero(levels == 1), spread(np.cumsum([0, *numbers[:-1]]), [spec.size for spec in specs], out)
    out[:] = table[places + placed_with(levels, out)]
    if at.size:
        out[placed_with(at, out)] = sent_values(np.concatenate([r.protected for r in found]), out)


def _within(first: int, step: float) -> bool:
    return abs(first) <= 1 << 15 and SMALLEST_STEP <= step <= LARGEST_STEP


def thresholds_as_json(t: Thresholds) -> list[float | None]:
    """Return thresholds as plain JSON; None for infinity."""
    return [
        _finite(t.protect_magnitude),
        _finite(t.protect_sensitivity),
        float(t.prune_magnitude),
        float(t.prune_sensitivity),
    ]


def _finite(threshold: float) -> float | None:
    return None if np.isinf(threshold) else threshold


def read_thresholds(values: Any) -> Thresholds:
    """Read thresholds that `thresholds_as_json` wrote; raises CorruptDataError."""
    if not isinstance(values, list) or len(values) != 4 or not all(v is None or type(v) is float for v in values):
        raise CorruptDataError("levels: no thresholds")
    try:
        return Thresholds(*(np.inf if v is None else float(v) for v in values))
    except BadArgumentError as e:
        raise CorruptDataError(f"levels: {e}") from None


def read_gain(steps: Any) -> float:
    """Return a gain from its number of steps; raises CorruptDataError."""
    if type(steps) is not int or not 0 <= steps <= LARGEST_GAIN * GAIN_STEPS:
        raise CorruptDataError("levels: no gain")
    return steps / GAIN_STEPS


def _round(data: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray]:
    """Return bfloat16 patterns of values, and whether bfloat16 can represent each value."""
    values = float_values(data, spec)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = bfloat16_patterns(values.astype(np.float32))
    found = np.where(np.isfinite(values), nearest, 0).astype(np.uint16)
    back = float_values(from_bfloat16(found, spec), spec)
    fits = np.isfinite(values) & np.isfinite(back) & ((back != 0) | (values == 0))
    return np.where(fits, found, np.uint16(0)).astype(np.uint16), fits


def held_values(values: Array, spec: LeafSpec) -> NpArray:
    """Return protected values as restored, as bytes: rounded to bfloat16 if it holds them."""
    data = as_bytes(values) if is_torch(values) else np.ascontiguousarray(values).view(np.uint8)
    found, fits = _round(data, spec)
    back = from_bfloat16(found, spec).reshape(-1, spec.itemsize)
    own = data.reshape(-1, spec.itemsize)
    return np.where(fits[:, None], back, own).reshape(-1)


def held_patterns(restored: NpArray, spec: LeafSpec) -> tuple[NpArray, NpArray]:
    """Return bfloat16 patterns of the result of `held_values`, and positions of exact values."""
    found, fits = _round(restored, spec)
    return found, np.flatnonzero(~fits)


def write_protected(out: Writer, protected: NpArray, predicted: NpArray, spec: LeafSpec) -> None:
    """Write protected values as bfloat16 differences to a prediction.

    Values that bfloat16 cannot hold follow exactly, with their positions.

    Args:
        out: receives the bytes.
        protected: bytes of n values, as `held_values` returned them.
        predicted: uint16 [n], bfloat16 patterns.
        spec: of the array, or of arrays of one dtype.
    """
    patterns, odd = held_patterns(protected, spec)
    out.varint(patterns.size)
    out.block(*map(entropy.encode, split_planes(difference(patterns, predicted, dtype="bfloat16"))))
    out.varint(odd.size, *np.diff(odd, prepend=0).tolist())
    out.raw(protected.reshape(-1, spec.itemsize)[odd])


def read_protected(data: Reader, predicted: NpArray, spec: LeafSpec) -> NpArray:
    """Return the bytes of the protected values that `write_protected` wrote.

    Args:
        data: the bytes, from the position where `write_protected` began.
        predicted: uint16 [n], the same patterns; n is the number of protected elements.
        spec: as in `write_protected`.

    Raises:
        CorruptDataError: the bytes are malformed, or hold another number of values.
    """
    count = data.varint()
    if count != predicted.size:
        raise CorruptDataError(f"levels: {count} protected values do not fit the levels")
    planes = np.empty((2, count), np.uint8)
    for plane in planes:
        plane[:] = entropy.decode(data.block(), count)
    steps = merge_planes(planes, dtype="uint16")
    protected = from_bfloat16(undifference(steps, predicted, dtype="bfloat16"), spec)
    odd = data.varint()
    if odd > count:
        raise CorruptDataError("levels: more values beyond bfloat16 than protected ones")
    at = np.fromiter(itertools.accumulate(min(data.varint(), count) for _ in range(odd)), np.int64, odd)
    if odd and int(at[-1]) >= count:
        raise CorruptDataError("levels: a position is out of range")
    exact = data.array("u1", odd * spec.itemsize).reshape(odd, spec.itemsize)
    protected.reshape(count, spec.itemsize)[at] = exact
    return protected
