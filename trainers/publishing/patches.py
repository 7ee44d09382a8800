"""Deltas of tensors as pieces of a checkpoint file, and as staged positions and new values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


def stage(part: Part, links: Sequence[tuple[Checkpoint, ArrayRecord]]) -> list[Patch]:
    """Combine the changes of successive links in a tensor, without writing them.

    Args:
        part: the tensor.
        links: a checkpoint and the tensor's record in it, the oldest first; the first one may be a base.

    Raises:
        CorruptDataError: a link is damaged, or is a delta against other values than the tensor's.
    """
    spec, base = links[0][1].spec, not links[0][0].is_delta
    parts = range(0, spec.nbytes, STEP)
    pieces = []
    for ckpt, record in links:
        own = ckpt.pieces_of(record)
        if len(own) != len(parts) or record.stream != "bytes" or record.bundle is not None:
            raise CorruptDataError(f"{record.path}: {len(own)} pieces of {record.stream} for {len(parts)}")
        pieces.append([_Piece.of(piece, record.path) for piece in own])
    if base and any(piece.method in (UNCHANGED, SPARSE) for piece in pieces[0]):
        raise CorruptDataError(f"{part.source}: changes in a base")
    if part.where is not None:
        return _slice(part, spec, pieces)
    data = host_bytes(part.tensor)
    work = [(i, start) for i, start in enumerate(parts)]
    found = map_chunks(
        lambda w: _whole(part, spec, data[w[1] : w[1] + STEP], [p[w[0]] for p in pieces], w[1], base), work
    )
    return [patch for own in found for patch in own]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece and its method, the first byte."""

    method: int
    data: memoryview

    @staticmethod
    def of(data: memoryview, path: str) -> _Piece:
        """Check that the piece is not empty."""
        if not data or (data[0] == UNCHANGED and len(data) > 1):
            raise CorruptDataError(f"{path}: a malformed piece of {len(data)} bytes")
        return _Piece(data[0], data)


def _whole(
    part: Part, spec: LeafSpec, before: NpArray, pieces: Sequence[_Piece], start: int, base: bool
) -> list[Patch]:
    """Return the patch of one part of a whole tensor."""
    item = spec.itemsize
    changed = [p for p in pieces if p.method != UNCHANGED]
    if not changed:
        return []
    kind = np.dtype(f"<u{item}") if item in (1, 2, 4, 8) else np.dtype(f"V{item}")
    sparse = len(changed) == 1 and changed[0].method == SPARSE
    if sparse and item in (1, 2, 4, 8) and not spec.dtype.startswith("complex"):
        positions, values = read_sparse(Reader(changed[0].data[1:], "patch"), before.size, spec).positions(before)
        return [Patch(part.name, positions + start // item, values)]
    scratch = before.copy()
    for number, piece in enumerate(changed):
        old = scratch.copy() if piece.method != SPARSE else scratch
        decode_chunk(piece.data, scratch, spec, None if base and not number else old)
    new, old = scratch.view(kind), before.view(kind)
    at = np.flatnonzero(new != old)
    if at.size * _DENSE > new.size:
        return [Patch(part.name, None, new, start // item)]
    return [Patch(part.name, at + start // item, new[at])] if at.size else []


def _slice(part: Part, spec: LeafSpec, links: Sequence[Sequence[_Piece]]) -> list[Patch]:
    """Return the patches of a slice: the links are applied to a copy of the local tensor."""
    assert part.where is not None
    item, shape, where = spec.itemsize, spec.shape, part.where
    if spec.dtype.startswith("complex"):  # coded as pairs of numbers
        item, shape, where = item // 2, (*shape, 2), (*where, (0, 2))
    kind = np.dtype(f"<u{item}")
    data = host_bytes(part.tensor)
    local = data.copy().view(kind)
    for pieces in links:
        for number, piece in enumerate(pieces):
            first = number * STEP // item
            count = min(STEP, spec.nbytes - number * STEP) // item
            if piece.method == UNCHANGED or not _meets(shape, where, first, count):
                continue
            if piece.method == SPARSE:
                changes = read_sparse(Reader(piece.data[1:], "patch"), count * item, spec)
                if changes.edges:
                    raise CorruptDataError(f"{part.source}: published without sliced=True; a slice cannot be updated")
                positions = changes.delta.ranks
                at, inside = _local_positions(shape, where, positions + first)
                own = np.zeros(count, kind)
                own[positions[inside]] = local[at]
                found, values = changes.positions(own.view(np.uint8))
                local[at] = values[inside] if np.array_equal(found, positions) else values
            else:
                out = np.empty(count * item, np.uint8)
                decode_chunk(piece.data, out, spec, None)
                at, inside = _local_positions(shape, where, np.arange(first, first + count))
                local[at] = out.view(kind)[inside]
    rows = (-1, spec.itemsize)
    new = local.view(np.uint8).reshape(rows)
    at = np.flatnonzero((new != data.reshape(rows)).any(axis=1))
    whole = np.dtype(f"<u{spec.itemsize}") if spec.itemsize in (1, 2, 4, 8) else np.dtype(f"V{spec.itemsize}")
    return [Patch(part.name, at, new.view(whole).reshape(-1)[at])] if at.size else []


def _meets(shape: tuple[int, ...], where: tuple[tuple[int, int], ...], first: int, count: int) -> bool:
    """Return whether elements first ... first + count - 1 may overlap a slice."""
    if not shape:
        return True
    row = math.prod(shape[1:]) or 1
    start, length = where[0]
    return first < (start + length) * row and first + count > start * row


def _local_positions(
    shape: tuple[int, ...], where: tuple[tuple[int, int], ...], positions: NpArray
) -> tuple[NpArray, NpArray]:
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
