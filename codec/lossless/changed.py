"""Exact changes since the parent: a mask with one bit per element, and new values (BitSnap).

A chunk's first byte names its form:

    0 full       all values, as a chunk of the stream "bytes"
    1 changed    a block with the packed mask as a symbol stream, then the changed values as a chunk of "bytes" of
                 their own

The mask costs an eighth of a byte an element, so that with 16-bit values it pays until 15/16 of them changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ...kernels.backend.arguments import check_field, choice
from ...kernels.backend.arrays import is_torch, placed_with, to_host
from ...kernels.packing import changed_mask, gather, scatter
from .. import entropy
from ..base import CHUNK, Leaf, Parents, Reference, Stored, Unplanned
from ..errors import CorruptDataError
from ..format.fields import Reader, Writer
from ..groups import BytesReference, Coded, joined_bytes
from ..parallel import map_chunks
from ..state.leaves import Array, LeafSpec, NpArray, as_bytes
from .exact import PLAIN, decode_chunk, decode_parts, encode_chunk, near, parent_bytes
from .sparse import Patterns

FULL, MASKED = range(2)
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Changed(Unplanned):
    """Store an array exactly, as a mask and changed values, or whole if that is smaller.

    Args:
        coder: "smallest" (default) entropy codes mask and values; "published" stores them as they are.

    Raises:
        BadArgumentError: another coder.

    Example:
        >>> Changed(coder="published")
        Changed(coder='published')

    Source: BitSnap, section 3.3 (improved bitmask sparsification).
    """

    coder: str = "smallest"
    id: ClassVar[str] = "changed"

    def __post_init__(self) -> None:
        check_field(self, "coder", choice, ("smallest", "published"))

    def encode(self, leaf: Leaf, parent: Reference | None, plan: None = None) -> Stored:
        """Encode one array; `error` is 0."""
        data = np.empty(leaf.spec.nbytes, np.uint8)
        chunks = _chunks(joined_bytes([leaf.flat], there=True), data, leaf.spec, parent, self.coder)
        note = ""
        if chunks and chunks[0].changed is not None:
            changed = sum(c.changed or 0 for c in chunks)
            note = f"{100 * changed / max(leaf.spec.size, 1):.3g} % changed"
            full = sum(c.form == FULL for c in chunks)
            if full:
                note += ", stored in full" if full == len(chunks) else f", {full} of {len(chunks)} chunks in full"
        return Stored("changed", {}, [c.piece for c in chunks], BytesReference(data), note=note)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A coded chunk, its form, and its number of changed elements (None without a parent)."""

    piece: Writer
    form: int
    changed: int | None


def _chunks(source: Array, data: NpArray, spec: LeafSpec, parent: Reference | None, coder: str) -> list[_Chunk]:
    """Encode all bytes of an array, on the host or on a GPU; `data` receives them."""
    before = parent_bytes(parent, spec) if spec.itemsize in _WIDTHS else None
    step = CHUNK * spec.itemsize

    def one(start: int) -> _Chunk:
        own, copy = near(source[start : start + step], spec), data[start : start + step]
        if not is_torch(own):
            copy[:] = own
            own = copy
        if before is None:
            return _Chunk(_full(own, copy, spec, coder, start // spec.itemsize), FULL, None)
        return _masked(own, copy, before[start : start + step], spec, coder, start // spec.itemsize)

    return map_chunks(one, range(0, data.size, step))


def _values(source: Array, data: NpArray, spec: LeafSpec, coder: str, start: int | None) -> Writer:
    """Encode values that begin at element `start`, or (None) come from all over the array.

    `data` receives them.
    """
    if coder != "published":
        return encode_chunk(source, spec, None, start, None if source is data else data)
    if source is not data:
        data[:] = to_host(source)
    return Writer(PLAIN, bytes([entropy.STORED]), data)


def _full(source: Array, data: NpArray, spec: LeafSpec, coder: str, start: int) -> Writer:
    return Writer(FULL, _values(source, data, spec, coder, start))


def _masked(source: Array, data: NpArray, before: NpArray, spec: LeafSpec, coder: str, start: int) -> _Chunk:
    """Encode a chunk as mask and changed values, or in full if that is smaller."""
    view = Patterns(spec.itemsize, "", None).view
    new, old = view(source), view(before)
    marks = changed_mask(new, placed_with(before, source).view(new.dtype))
    changed = near(joined_bytes([gather(new, marks)], there=True), spec)
    mask, values = to_host(marks), np.empty(changed.shape[0], np.uint8) if is_torch(changed) else changed
    out = Writer(MASKED)
    out.block(bytes([entropy.STORED]) + mask.tobytes() if coder == "published" else entropy.encode(mask))
    if values.size:
        out.raw(_values(changed, values, spec, coder, None))
    if source is not data:
        view(data)[:] = scatter(old, mask, view(values))
    # Entropy coding leaves the same share of the changed values as of all, so that sizes before it decide.
    count = values.size // spec.itemsize
    masked = _Chunk(out, MASKED, count)
    if mask.size + values.size < data.size:
        return masked
    full = _full(data, data, spec, coder, start)
    return masked if len(out) <= len(full) else _Chunk(full, FULL, count)


def rebase_changed(
    specs: Sequence[LeafSpec], references: Sequence[Reference], parents: Parents
) -> tuple[dict[str, Any], list[Writer]]:
    """Encode the same bytes as a base or against another parent."""
    (spec,), (reference,), (parent,) = specs, references, parents
    data = reference.data if isinstance(reference, BytesReference) else as_bytes(reference.values(spec))
    return {}, [c.piece for c in _chunks(data, data, spec, parent, "smallest")]


def decode_changed(coded: Coded) -> list[BytesReference]:
    """Decode the stream format "changed"."""
    before = parent_bytes(coded.parent, coded.spec)
    return [decode_parts("changed", coded, before, CHUNK * coded.spec.itemsize, _decode_part)]


def _decode_part(piece: memoryview, out: Array, spec: LeafSpec, before: NpArray | None) -> None:
    data = Reader(piece, "changed")
    form = data.byte()
    if form == FULL:
        decode_chunk(data.rest(), out, spec, None)
        return
    if form != MASKED:
        raise CorruptDataError(f"changed: form {form} is unknown")
    if before is None:
        raise CorruptDataError("changed: a mask without a parent")
    if spec.itemsize not in _WIDTHS:
        raise CorruptDataError(f"changed: items of {spec.itemsize} bytes have no mask")
    view = Patterns(spec.itemsize, "", None).view
    n = out.shape[0] // spec.itemsize
    mask = entropy.decode(data.block(), -(-n // 8))
    size = min(int(np.bitwise_count(mask).sum()), n) * spec.itemsize
    values = out.new_empty(size) if is_torch(out) else np.empty(size, np.uint8)
    if size:
        decode_chunk(data.rest(), values, spec, None)
    data.end()
    old, marks = (placed_with(x, out) for x in (before, mask))
    view(out)[:] = scatter(view(old), marks, view(values))
