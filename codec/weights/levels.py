"""The stream format "levels": levels of a codebook, coded as a delta if there is a parent.

Piece 0 is what the levels refer to: the codebook (or "the parent's"), the protected values as bfloat16 differences to
the parent's, and those values that bfloat16 cannot hold, to the bit. The other pieces are chunks of levels
(`entropy.encode_levels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.backend.arrays import is_torch
from ...kernels.backend.floats import FORMATS
from ...kernels.quantizer import Thresholds, dequantize
from .. import entropy
from ..base import CHUNK, Reference
from ..entropy.row_column_classes import columns_of
from ..errors import BadArgumentError, CorruptDataError
from ..format.chunks import Chunk, chunks_of
from ..format.fields import Reader, Writer
from ..parallel import map_chunks
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes, from_bytes
from .codebook import MOST, spacing, to_8_bits
from .protected import held_patterns, read_protected, write_protected

EXPLICIT, PARENTS, MULTIPLES = 0, 1, 2
MAX_BINS = MOST
FARTHEST = 1 << 31
"""Multiples beyond this have no codebook of their own kind: their steps would be lost in rounding."""
GAIN_STEPS, LARGEST_GAIN = 256, 4.0
"""Steps of an gain of 1, and the largest gain."""


@dataclass(frozen=True, slots=True)
class LevelsReference:
    """Reference of an array of levels: levels, codebook and protected values.

    Args:
        levels: uint8, shape (n,).
        codebook: float64, ascending, values of the array's dtype.
        protected: bytes of the protected values in the array's dtype, in order.
        thresholds: those the levels were made with.
        drift_gain: how far the next delta extrapolates the drift, see `codec.weights.drift_gain`; a multiple of
            `1 / GAIN_STEPS` in [0, `LARGEST_GAIN`].
        multiples: first multiple and step of the codebook; None: unknown.
    """

    levels: NpArray
    codebook: NpArray
    protected: NpArray
    thresholds: Thresholds
    drift_gain: float = 0.0
    multiples: tuple[int, float] | None = None

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

    def values(self, spec: LeafSpec) -> Array:
        """Return the decoded values."""
        codebook = codebook_array(self.codebook, spec)
        out: Array = dequantize(_like(self.levels, codebook), codebook, protected=from_bytes(self.protected, spec))
        return out


def compatible_parent(parent: Reference | None, spec: LeafSpec) -> LevelsReference | None:
    """Return the parent if levels of this array can be a delta against it, else None."""
    return parent if isinstance(parent, LevelsReference) and parent.levels.size == spec.size else None


def _like(levels: NpArray, other: Array) -> Array:
    """Return levels in the library of `other`."""
    if is_torch(other):
        import torch

        return torch.from_numpy(levels)
    return levels


def codebook_array(codebook: NpArray, spec: LeafSpec) -> Array:
    """Convert a float64 codebook to the array's library and dtype, which hold it exactly."""
    if spec.library == "torch":
        import torch

        return torch.from_numpy(codebook).to(getattr(torch, spec.dtype))
    return codebook.astype(from_bytes(np.empty(0, np.uint8), spec).dtype)


def rounded_codebook(codebook: NpArray, spec: LeafSpec) -> NpArray:
    """Round a codebook to the array's dtype and merge equal entries; float64."""
    with np.errstate(over="ignore"):
        wide = widened(codebook_array(codebook, spec))
    return np.unique(wide[np.isfinite(wide)] + 0.0)


def level_chunks(reference: LevelsReference, spec: LeafSpec, before: LevelsReference | None, coder: str) -> list[bytes]:
    """Return the pieces with the levels of each chunk, in the context of the parent's levels."""
    columns = columns_of(spec.shape)

    def one(start: int) -> bytes:
        part = slice(start, start + CHUNK)
        parent = None if before is None else before.levels[part]
        parent_size = 0 if before is None else before.size
        return entropy.encode_levels(
            reference.levels[part], reference.size, parent, parent_size, coder, entropy.Matrix(columns, start)
        )

    return map_chunks(one, range(0, reference.levels.size, CHUNK))


def rebase_levels(
    spec: LeafSpec, meta: dict[str, Any], reference: Reference, parent: Reference | None
) -> tuple[dict[str, Any], list[bytes]]:
    """Encode the same levels and codebook as a base or against another parent."""
    if not isinstance(reference, LevelsReference):
        raise BadArgumentError("levels: the reference of another stream cannot be rebased as levels")
    before = compatible_parent(parent, spec)
    return meta, [references(reference, spec, before), *level_chunks(reference, spec, before, "smallest")]


def references(reference: LevelsReference, spec: LeafSpec, before: LevelsReference | None) -> bytes:
    """Encode the first piece: codebook and protected values."""
    out = Writer()
    out.varint(reference.codebook.size)
    if before is not None and reference.has_codebook_of(before):
        out.byte(PARENTS)
    else:
        _write_codebook(out, reference.codebook, spec)
    write_protected(out, reference.protected, predicted_patterns(reference.levels, before, spec), spec)
    return out.done()


def _write_codebook(out: Writer, codebook: NpArray, spec: LeafSpec) -> None:
    uniform = uniform_of(codebook, spec)
    if uniform is None:
        out.byte(EXPLICIT)
        out.raw(as_bytes(codebook_array(codebook, spec)))
        return
    first, step = uniform
    out.byte(MULTIPLES)
    out.varint(2 * first if first >= 0 else -2 * first - 1)
    out.raw(np.array([step], "<f8"))


def uniform_of(codebook: NpArray, spec: LeafSpec) -> tuple[int, float] | None:
    """Return first multiple and step of a codebook; None if its entries are not multiples."""
    # Rounding the entries to 16 bits moves their mean distance a little off the step, which has 8 bits.
    for step in (spacing(codebook), to_8_bits(spacing(codebook))) if codebook.size > 1 else ():
        first = round(float(codebook[0]) / step) if 0 < step < np.inf else FARTHEST
        if abs(first) < FARTHEST and np.array_equal(multiples_of(first, codebook.size, step, spec), codebook):
            return first, step
    return None


def multiples_of(first: int, size: int, step: float, spec: LeafSpec) -> NpArray:
    """Return `size` multiples of a step from the `first`-th, in the array's dtype's precision."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        wide = np.arange(first, first + size) * step
        if spec.dtype in ("float32", "float16"):
            return wide.astype(spec.dtype).astype(np.float64)
        return wide if spec.dtype == "float64" else widened(codebook_array(wide, spec))


def widened(codebook: Array) -> NpArray:
    """Return values of any float dtype as float64 on the host."""
    with np.errstate(invalid="ignore"):
        wide: NpArray = codebook.double().numpy() if is_torch(codebook) else codebook.astype(np.float64)
    return wide


def check_codebook(codebook: NpArray) -> None:
    """Raise CorruptDataError unless the entries that were read are finite and ascend."""
    if not np.isfinite(codebook).all() or (codebook[1:] <= codebook[:-1]).any():
        raise CorruptDataError("levels: the codebook is not finite and ascending")


def widened_bytes(data: NpArray, spec: LeafSpec) -> NpArray:
    """Convert bytes of values of any float dtype to float64."""
    return widened(from_bytes(data, spec))


def predicted_patterns(levels: NpArray, before: LevelsReference | None, spec: LeafSpec) -> NpArray:
    """Return the parent's protected values at protected positions, as bfloat16 patterns, or 0."""
    at = np.flatnonzero(levels == 1)
    guess = np.zeros(at.size, np.uint16)
    if before is None or before.protected.size == 0 or at.size == 0:
        return guess
    old_at = np.flatnonzero(before.levels == 1)
    old, _ = held_patterns(before.protected, spec)
    found = np.minimum(np.searchsorted(old_at, at), old_at.size - 1)
    same = old_at[found] == at
    guess[same] = old[found[same]]
    return guess


def decode_levels(
    spec: LeafSpec,
    meta: dict[str, Any],
    pieces: Sequence[memoryview],
    parent: Reference | None,
    pair: Array | None = None,
) -> LevelsReference:
    """Decode the stream format "levels"."""
    if spec.dtype not in FORMATS:
        raise CorruptDataError(f"levels: dtype {spec.dtype} cannot be stored as levels")
    before = compatible_parent(parent, spec)
    chunks = chunks_of("levels", pieces, spec.size, 2 * spec.size, step=CHUNK, head=True)
    levels = np.empty(spec.size, np.uint8)

    def one(chunk: Chunk) -> None:
        piece, part = chunk
        own = levels[part]
        parent_levels = None if before is None else before.levels[part]
        own[:] = entropy.decode(piece, own.size, parent_levels, 0 if before is None else before.size)

    map_chunks(one, chunks)
    codebook, protected = _read_references(pieces[0], spec, levels, before)
    if levels.size and int(levels.max()) >= codebook.size + 2:
        raise CorruptDataError("levels: a level is beyond the codebook")
    return LevelsReference(levels, codebook, protected, read_thresholds(meta.get("t")), read_gain(meta.get("a", 0)))


def metadata(reference: LevelsReference) -> dict[str, Any]:
    """Return the metadata for the next delta: thresholds, None for infinity, and a nonzero gain."""
    limits = thresholds_as_json(reference.thresholds)
    return {"t": limits} | ({"a": round(GAIN_STEPS * reference.drift_gain)} if reference.drift_gain else {})


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


def _read_references(
    piece: memoryview, spec: LeafSpec, levels: NpArray, before: LevelsReference | None
) -> tuple[NpArray, NpArray]:
    data = Reader(piece, "levels")
    size, mode = data.varint(), data.byte()
    if size > MAX_BINS or mode not in (EXPLICIT, PARENTS, MULTIPLES):
        raise CorruptDataError(f"levels: a codebook of {size} entries, mode {mode}")
    if mode == PARENTS:
        if before is None or before.codebook.size != size:
            raise CorruptDataError("levels: the parent's codebook is wanted and is not there")
        codebook = before.codebook
    else:
        if mode == MULTIPLES:
            number, step = data.varint(), float(data.array("<f8", 1)[0])
            first = (number >> 1) ^ -(number & 1)
            if abs(first) >= FARTHEST:
                raise CorruptDataError(f"levels: a codebook from multiple {str(first)[:30]}")
            codebook = multiples_of(first, size, step, spec)
        else:
            codebook = widened_bytes(data.array("u1", size * spec.itemsize).copy(), spec)
        check_codebook(codebook)
    protected = read_protected(data, predicted_patterns(levels, before, spec), spec)
    data.end()
    return codebook, protected
