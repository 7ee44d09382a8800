"""The tensors of a state dict: their bytes, hashes and shards, and changes of them.

A change is stored as pieces of a checkpoint file, and applied as patches: staged positions and new values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash

from ...codec.base import CHUNK
from ...codec.checkpoint import Checkpoint
from ...codec.errors import BadArgumentError, CorruptDataError
from ...codec.format.fields import Reader, Writer
from ...codec.lossless.exact import SPARSE, UNCHANGED, decode_chunk, encode_chunk
from ...codec.lossless.sparse import encode_sparse, read_sparse
from ...codec.parallel import map_chunks
from ...codec.records import ArrayRecord
from ...codec.state.leaves import LeafSpec, NpArray, as_bytes, is_sharded, local_part
from ...kernels.backend.arrays import is_allocated, to_cpu
from .layout import Where, is_inside, whole

STEP = 4 * CHUNK
"""Bytes of a piece."""
_DENSE = 4
"""A piece is staged whole if more than one element in this number changes."""
Places = Callable[[NpArray], tuple[NpArray, NpArray]]
"""Converts positions in a piece to positions in the receiver's tensor, with a mask of those that are there."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the receiver.

    Args:
        name: in the receiver's state dict.
        tensor: the whole tensor, or the local part of a distributed one; updates are written to it.
        source: name of the published tensor.
        where: of each axis the first index and the length that are here; None: all of it.
    """

    name: str
    tensor: torch.Tensor
    source: str
    where: Where | None

    @property
    def region(self) -> Where:
        """Box of the published tensor that this part is."""
        return whole(self.tensor.shape) if self.where is None else self.where


@dataclass(frozen=True, slots=True)
class Own:
    """A shard that a rank of the trainer has.

    Args:
        name: of the published tensor.
        tensor: the shard, on any device.
        shape: of the whole tensor.
        where: what of it this is.
        is_plain: whether other ranks may have the same tensor: it is neither a DTensor nor a slice.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    where: Where
    is_plain: bool

    @property
    def key(self) -> tuple[str, Where]:
        """Name and box, which no other shard has."""
        return self.name, self.where


def spec_of(tensor: torch.Tensor) -> LeafSpec:
    """Return library, dtype and shape of a tensor."""
    return LeafSpec("torch", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def host_bytes(tensor: torch.Tensor) -> NpArray:
    """Return the bytes of a tensor in C order, without a copy if possible."""
    return as_bytes(to_cpu(tensor.detach().resolve_conj().resolve_neg()).contiguous().reshape(-1))


def crop(part: Part, where: Where) -> NpArray:
    """Return the bytes of a box inside a receiver's tensor."""
    if where == part.region:
        return host_bytes(part.tensor)
    slices = tuple(slice(at - first, at - first + n) for (at, n), (first, _) in zip(where, part.region, strict=True))
    return host_bytes(part.tensor[slices])


def shards_of(state: Any, select: Mapping[str, Any] | None) -> list[Own]:
    """Return the shards of a trainer's state that this rank publishes.

    Of the ranks that hold the same part of a DTensor, the first one does.

    Args:
        state: names and tensors.
        select: `{name: (published name, its shape, (slice, ...))}` for tensors that are a slice of a published one.

    Raises:
        BadArgumentError: it is not a mapping from strings to tensors, or a slice does not fit.
    """
    if not isinstance(state, Mapping):
        raise BadArgumentError(f"state is a {type(state).__qualname__}; a state dict is needed")
    found = []
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise BadArgumentError(f"state: {name!r} is a {type(tensor).__qualname__}; names and tensors are needed")
        check_dense({name: tensor}, "state")
        if select and name in select:
            source, shape, where = _sliced("shards", name, tensor, select[name], "(name, shape, slices)")
            found.append(Own(source, tensor.detach(), shape, where, False))
        elif is_sharded(tensor):
            where, shape = _placed(name, tensor, "state"), tuple(tensor.shape)
            if _is_first(tensor) and (all(n for _, n in where) or not tensor.numel()):
                found.append(Own(name, local_part(tensor).detach(), shape, where, False))
        else:
            found.append(Own(name, tensor.detach(), tuple(tensor.shape), whole(tensor.shape), True))
    unknown = next((name for name in select or {} if name not in state), None)
    if unknown is not None:
        raise BadArgumentError(f"shards: the state has no tensor {unknown!r}")
    return found


def sample_hash(tensor: torch.Tensor) -> str:
    """Return a hash of dtype, shape and some elements; cheap also on another device."""
    flat = tensor.detach().reshape(-1)
    return hash_of(spec_of(tensor), host_bytes(flat[:: max(1, flat.numel() // 1024)]))


def check_dense(tensors: Mapping[str, torch.Tensor], what: str) -> None:
    """Raise BadArgumentError for a tensor without dense memory."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise BadArgumentError(
                f"{what}: {name} has layout {tensor.layout} on {tensor.device}; dense ones are needed"
            )
        if not is_allocated(local_part(tensor)):
            raise BadArgumentError(f"{what}: the storage of {name} was freed")


def hash_of(spec: LeafSpec, data: NpArray) -> str:
    """Return a hash of dtype, shape and bytes."""
    h = xxhash.xxh3_128(f"{spec.dtype} {spec.shape}".encode())
    h.update(data.data)
    return str(h.hexdigest())


def parts_of(tensors: Mapping[str, torch.Tensor], select: Mapping[str, Any] | None) -> dict[str, Part]:
    """Return the parts of tensors that a receiver holds.

    Args:
        tensors: its state dict.
        select: `{name: (source name, (slice, ...))}` for those that are a slice of a published tensor; slices have a
            start and a stop and no step. Others are whole, or as a DTensor says.

    Raises:
        BadArgumentError: a name that the model does not have, or slices that are not of the tensor's shape.
    """
    found = {}
    tensor: Any
    for name in select or {}:
        if name not in tensors:
            raise BadArgumentError(f"select: the model has no tensor {name!r}")
    for name, tensor in tensors.items():
        if select and name in select:
            source, where = _sliced("select", name, tensor, select[name], "(name, slices)")
            found[name] = Part(name, tensor, source, where)
        elif is_sharded(tensor):
            where = _placed(name, tensor, "model")
            found[name] = Part(name, tensor.to_local(), name, None if where == whole(tensor.shape) else where)
        else:
            found[name] = Part(name, tensor, name, None)
    return found


def sharing(parts: Mapping[str, Part]) -> list[list[str]]:
    """Return groups of names whose tensors share memory.

    Raises:
        BadArgumentError: tensors overlap in part, or the same memory has two dtypes.
    """
    ranges = sorted(
        (str(p.tensor.device), p.tensor.data_ptr(), p.tensor.numel() * p.tensor.element_size(), name)
        for name, p in parts.items()
        if p.tensor.numel()
    )
    groups: list[list[str]] = []
    last: tuple[str, int, int, str] | None = None
    for own in ranges:
        if last is not None and own[0] == last[0] and own[1] < last[1] + last[2]:
            if own[:3] != last[:3] or parts[own[3]].tensor.dtype != parts[last[3]].tensor.dtype:
                raise BadArgumentError(f"model: {last[3]} and {own[3]} overlap in memory, and are not the same tensor")
            groups[-1].append(own[3])
        else:
            groups.append([own[3]])
            last = own
    return [group for group in groups if len(group) > 1]


def _sliced(what: str, name: str, tensor: torch.Tensor, given: Any, form: str) -> tuple[Any, ...]:
    """Return a given slice as a box; BadArgumentError if it does not fit."""
    try:
        source, *shape, slices = given
        if len(shape) != form.count("shape"):
            raise ValueError
        if any(s.stop is None or s.step not in (None, 1) for s in slices):
            raise BadArgumentError(f"{what}: {name}: {slices}; slices have a start and a stop, and no step")
        where = tuple((int(s.start or 0), int(s.stop) - int(s.start or 0)) for s in slices)
        found = str(source), *map(tuple, shape), where
    except BadArgumentError:
        raise
    except (TypeError, ValueError, AttributeError):
        raise BadArgumentError(f"{what}: {name}: {given!r:.200} is not {form}") from None
    if tuple(n for _, n in where) != tuple(tensor.shape):
        raise BadArgumentError(f"{what}: {name} has shape {tuple(tensor.shape)}, its slices {slices}")
    return found


def _is_first(tensor: Any) -> bool:
    """Return whether this is the first of the ranks that hold the same part of a DTensor."""
    coordinate = tensor.device_mesh.get_coordinate()
    copies = [i for i, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return coordinate is not None and not any(coordinate[i] for i in copies)


def _placed(name: str, tensor: Any, what: str) -> Where:
    """Return the box of a DTensor's local part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise BadArgumentError(f"{what}: {name} is a DTensor with {tensor.placements}; a sum cannot be updated")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple((int(start) if n else 0, int(n)) for start, n in zip(offset, shape, strict=True))


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
                if piece[0] != UNCHANGED:
                    count = min(STEP, spec.nbytes - number * STEP) // width
                    places = partial(_local_positions, shape, box, number * STEP // width)
                    _scatter(piece, spec, local, count, places, not shard.ckpt.is_delta)
    rows = (-1, item)
    new = local.view(np.uint8).reshape(rows)
    at = np.flatnonzero((new != data.reshape(rows)).any(axis=1))
    return [Patch(part.name, at, new.view(_kind(item)).reshape(-1)[at])] if at.size else []


def _scatter(piece: memoryview, spec: LeafSpec, local: NpArray, count: int, places: Places, base: bool) -> None:
    """Apply a piece of so many elements to those that are here."""
    kind, is_sparse = local.dtype, piece[0] == SPARSE
    changes = read_sparse(Reader(piece[1:], "patch"), count * kind.itemsize, spec) if is_sparse else None
    own = np.zeros(count, kind)
    if changes is not None and not changes.edges:
        positions = changes.delta.ranks
        at, inside = places(positions)
        own[positions[inside]] = local[at]
        found, values = changes.positions(own.view(np.uint8))
        local[at] = values[inside] if np.array_equal(found, positions) else values
        return
    at, inside = places(np.arange(count))
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


def _local_positions(shape: tuple[int, ...], where: Where, first: int, positions: NpArray) -> tuple[NpArray, NpArray]:
    """Convert positions in a piece to flat local ones in a slice, with a mask of those inside.

    Args:
        shape: of the shard.
        where: the slice, relative to the shard.
        first: first element of the piece in the shard.
        positions: in the piece.
    """
    positions = positions + first
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
