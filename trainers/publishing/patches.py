"""Deltas of tensors as pieces of a checkpoint file, and as staged positions and new values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...codec.base import CHUNK
from ...codec.checkpoint import Checkpoint
from ...codec.errors import CorruptDataError
from ...codec.format.fields import Reader, Writer
from ...codec.lossless.exact import SPARSE, UNCHANGED, decode_chunk, encode_chunk
from ...codec.lossless.sparse import encode_sparse, read_sparse
from ...codec.parallel import map_chunks
from ...codec.records import ArrayRecord
from ...codec.state.leaves import LeafSpec, NpArray
from .layout import Where, is_inside
from .tensors import Part, host_bytes

STEP = 4 * CHUNK
"""Bytes of a piece."""
_DENSE = 4
"""A piece is staged whole if more than one element in this number changes."""


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes in a part of a tensor.

    Args:
        name: of the tensor in the receiver's state dict.
        positions: int64, flat positions in the receiver's tensor, ascending; None: all from `start` on.
        values: unsigned patterns.
        start: first element where `positions` is None.
    """

    name: str
    positions: NpArray | None
    values: NpArray
    start: int = 0


def encode(data: NpArray, before: NpArray | None, spec: LeafSpec, sliced: bool) -> list[Writer]:
    """Encode a tensor given as bytes, alone or against its last version; return its pieces.

    Args:
        data: uint8.
        before: as many bytes, or None.
        spec: of the tensor.
        sliced: use only what can be decoded where the receiver has a part of the tensor.
    """
    if before is data:
        unchanged = Writer()
        unchanged.byte(UNCHANGED)
        return [unchanged] * len(range(0, data.size, STEP))

    def one(start: int) -> Writer:
        own, old = data[start : start + STEP], None if before is None else before[start : start + STEP]
        first = start // spec.itemsize
        if old is None or not sliced:
            return encode_chunk(own, spec, old, first)
        out = Writer()
        if np.array_equal(own, old):
            out.byte(UNCHANGED)
            return out
        found = encode_sparse(own, old, spec, classes=False)
        if found is None or found.coded is None:
            return encode_chunk(own, spec, None, first)
        out.byte(SPARSE)
        out.raw(found.coded)
        return out

    return map_chunks(one, range(0, data.size, STEP))


@dataclass(frozen=True, slots=True)
class Stored:
    """A shard of a version as it is stored: a delta or a base.

    Args:
        ckpt: the file.
        record: of the shard in it.
        where: what of the tensor it is.
    """

    ckpt: Checkpoint
    record: ArrayRecord
    where: Where

    def needed(self, region: Where) -> list[int]:
        """Return the numbers of the pieces that may have elements of a region."""
        if is_inside(self.where, region):
            return list(range(len(self.record.group.lengths)))
        spec, box = self.record.spec, _within(region, self.where)
        step = STEP // spec.itemsize
        return [i for i in range(len(self.record.group.lengths)) if _meets(spec.shape, box, i * step, step)]

    def pieces(self, region: Where) -> dict[int, memoryview]:
        """Return the pieces that may have elements of a region, by number.

        Raises:
            CorruptDataError: there are too few or too many, or they are not of the right kind.
        """
        record = self.record
        expected = len(range(0, record.spec.nbytes, STEP))
        if len(record.group.lengths) != expected or record.stream != "bytes" or len(record.group.members) > 1:
            raise CorruptDataError(
                f"{record.path}: {len(record.group.lengths)} pieces of {record.stream} for {expected}"
            )
        stored = self.ckpt.some_pieces(record, self.needed(region))
        found = {i: _checked(data, record.path) for i, data in stored.items()}
        if not self.ckpt.is_delta and any(piece[0] in (UNCHANGED, SPARSE) for piece in found.values()):
            raise CorruptDataError(f"{record.path}: changes in a base")
        return found


def stage(part: Part, links: Sequence[Sequence[Stored]]) -> list[Patch]:
    """Combine the changes of successive versions in a tensor, unwritten; positions ascend.

    Args:
        part: the tensor.
        links: of each version, the shards that meet the tensor, the oldest version first; together they cover it.

    Raises:
        CorruptDataError: a link is damaged, or is a delta against other values than the tensor's.
    """
    region, item = part.region, part.tensor.element_size()
    boxes = [shard.where for shard in links[0]]
    offsets = [_offset(where, region) for where in boxes]
    local = host_bytes(part.tensor)
    if None in offsets or any([shard.where for shard in link] != boxes for link in links):
        return _scattered(part, local, links)
    work = []
    for i in sorted(range(len(boxes)), key=lambda i: offsets[i] or 0):
        own = [link[i] for link in links]
        pieces, start = [shard.pieces(region) for shard in own], offsets[i] or 0
        base, spec = not own[0].ckpt.is_delta, own[0].record.spec
        data = local[start * item : start * item + spec.nbytes]
        work += [(spec, data, [p[n] for p in pieces], n * STEP, start, base) for n in range(len(pieces[0]))]
    found = map_chunks(lambda w: _whole(part.name, *w), work)
    return [patch for own in found for patch in own]


def _checked(data: memoryview, path: str) -> memoryview:
    """Return a piece, whose first byte is its method, if it is not malformed."""
    if not data or (data[0] == UNCHANGED and len(data) > 1):
        raise CorruptDataError(f"{path}: a malformed piece of {len(data)} bytes")
    return data


def _whole(
    name: str, spec: LeafSpec, data: NpArray, pieces: Sequence[memoryview], start: int, offset: int, base: bool
) -> list[Patch]:
    """Return the patch of one part of a shard that stands at an offset in the receiver's tensor."""
    item, before = spec.itemsize, data[start : start + STEP]
    changed = [piece for piece in pieces if piece[0] != UNCHANGED]
    if not changed:
        return []
    offset += start // item
    sparse = len(changed) == 1 and changed[0][0] == SPARSE
    if sparse and item in (1, 2, 4, 8) and not spec.dtype.startswith("complex"):
        positions, values = read_sparse(Reader(changed[0][1:], "patch"), before.size, spec).positions(before)
        return [Patch(name, positions + offset, values)]
    scratch = before.copy()
    for number, piece in enumerate(changed):
        old = scratch.copy() if piece[0] != SPARSE else scratch
        decode_chunk(piece, scratch, spec, None if base and not number else old)
    new, old = scratch.view(_kind(item)), before.view(_kind(item))
    at = np.flatnonzero(new != old)
    if at.size * _DENSE > new.size:
        return [Patch(name, None, new, offset)]
    return [Patch(name, at + offset, new[at])] if at.size else []


def _kind(item: int) -> np.dtype[Any]:
    return np.dtype(f"<u{item}") if item in (1, 2, 4, 8) else np.dtype(f"V{item}")


def _scattered(part: Part, data: NpArray, links: Sequence[Sequence[Stored]]) -> list[Patch]:
    """Return the patch of a tensor with elements of several shards, applied to a copy."""
    item, region = part.tensor.element_size(), part.region
    is_pair = part.tensor.is_complex()  # coded as pairs of numbers
    width = item // 2 if is_pair else item
    local = data.copy().view(f"<u{width}")
    for link in links:
        for shard in link:
            spec, box = shard.record.spec, _within(region, shard.where)
            shape, box = ((*spec.shape, 2), (*box, (0, 2))) if is_pair else (spec.shape, box)
            for number, piece in shard.pieces(region).items():
                first = number * STEP // width
                count = min(STEP, spec.nbytes - number * STEP) // width
                if piece[0] != UNCHANGED:
                    _scatter(piece, spec, local, _Places(shape, box, first, count), not shard.ckpt.is_delta)
    rows = (-1, item)
    new = local.view(np.uint8).reshape(rows)
    at = np.flatnonzero((new != data.reshape(rows)).any(axis=1))
    return [Patch(part.name, at, new.view(_kind(item)).reshape(-1)[at])] if at.size else []


@dataclass(frozen=True, slots=True)
class _Places:
    """Positions of a piece's elements in the receiver's tensor.

    Args:
        shape: of the shard.
        box: the receiver's tensor, relative to the shard.
        first: first element of the piece.
        count: its elements.
    """

    shape: tuple[int, ...]
    box: Where
    first: int
    count: int

    def of(self, positions: NpArray) -> tuple[NpArray, NpArray]:
        """Return flat local positions, with a mask of the elements that are here."""
        return _local_positions(self.shape, self.box, positions + self.first)


def _scatter(piece: memoryview, spec: LeafSpec, local: NpArray, places: _Places, base: bool) -> None:
    """Apply a piece to the elements that are here."""
    count, kind = places.count, local.dtype
    is_sparse = piece[0] == SPARSE
    changes = read_sparse(Reader(piece[1:], "patch"), count * kind.itemsize, spec) if is_sparse else None
    own = np.zeros(count, kind)
    if changes is not None and not changes.edges:
        positions = changes.delta.ranks
        at, inside = places.of(positions)
        own[positions[inside]] = local[at]
        found, values = changes.positions(own.view(np.uint8))
        local[at] = values[inside] if np.array_equal(found, positions) else values
        return
    at, inside = places.of(np.arange(count))
    if not base:
        own[inside] = local[at]
    before = None if base or not inside.all() else own.view(np.uint8)
    if before is None and changes is not None:
        raise CorruptDataError("published without sliced=True; a slice cannot be updated")
    out = own.view(np.uint8).copy()
    decode_chunk(piece, out, spec, before)
    local[at] = out.view(kind)[inside]


def _offset(where: Where, region: Where) -> int | None:
    """Return where a box begins in a region's flat elements; None if it is not contiguous."""
    offset, stride, rest = 0, 1, True
    for (start, n), (first, size) in zip(reversed(where), reversed(region), strict=True):
        if not (first <= start and start + n <= first + size) or not (rest or n == 1):
            return None
        offset, stride, rest = offset + (start - first) * stride, stride * size, rest and n == size
    return offset


def _within(region: Where, where: Where) -> Where:
    """Return a region relative to the first element of a box; it may begin before the box."""
    return tuple((start - first, n) for (start, n), (first, _) in zip(region, where, strict=True))


def _meets(shape: tuple[int, ...], where: Where, first: int, count: int) -> bool:
    """Return whether elements first ... first + count - 1 may overlap a slice."""
    if not shape:
        return True
    row = math.prod(shape[1:]) or 1
    start, length = where[0]
    return first < (start + length) * row and first + count > start * row


def _local_positions(shape: tuple[int, ...], where: Where, positions: NpArray) -> tuple[NpArray, NpArray]:
    """Convert global to flat local positions in a slice, with a mask of those inside."""
    rest, local, inside, scale = positions, np.zeros_like(positions), np.ones(positions.shape, bool), 1
    for size, (start, length) in zip(reversed(shape), reversed(where), strict=True):
        rest, index = np.divmod(rest, size)
        index = index - start
        inside &= (index >= 0) & (index < length)
        local = local + index * scale
        scale *= length
    return local[inside], inside


def write(tensor: torch.Tensor, patch: Patch) -> None:
    """Write a patch to its tensor, in place."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    item = tensor.element_size()
    if item == 16:
        flat = tensor.detach().view(-1).view(torch.float64).view(-1, 2).view(torch.int64)
        values = torch.from_numpy(np.ascontiguousarray(patch.values).view(np.int64)).reshape(-1, 2)
    else:
        flat = tensor.detach().view(-1).view(integers[item])
        signed = "u1" if item == 1 else f"<i{item}"
        values = torch.from_numpy(np.ascontiguousarray(patch.values).view(signed))
    values = values.to(flat.device)
    if patch.positions is None:
        flat[patch.start : patch.start + values.shape[0]] = values
    elif tensor.device.type == "cpu" and item < 16:
        flat.numpy()[patch.positions] = values.numpy()
    else:
        flat[torch.from_numpy(patch.positions).to(flat.device)] = values


def of_one(tensor: torch.Tensor, patches: Sequence[Patch]) -> Iterator[tuple[NpArray, torch.Tensor]]:
    """Yield positions and values of patches, values in the tensor's dtype."""
    for patch in patches:
        positions = patch.positions
        if positions is None:
            positions = np.arange(patch.start, patch.start + patch.values.shape[0])
        raw = torch.from_numpy(np.ascontiguousarray(patch.values).view(np.uint8))
        yield positions, raw.view(tensor.dtype)
