"""The tensors of a state dict: flat bytes, specs, hashes, and slices of published ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ...codec.errors import BadArgumentError
from ...codec.state.leaves import LeafSpec, NpArray, is_sharded, local_part
from ...kernels.backend.arrays import is_allocated, to_cpu
from .layout import Where, whole


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
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    flat = to_cpu(tensor.detach().resolve_conj().resolve_neg()).contiguous().reshape(-1)
    data: NpArray = flat.view(torch.uint8).numpy()
    return data


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
            source, shape, slices = select[name]
            found.append(Own(str(source), tensor.detach(), tuple(shape), _box(name, tensor, slices), False))
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
            source, slices = select[name]
            found[name] = Part(name, tensor, str(source), _box(name, tensor, slices))
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


def _box(name: str, tensor: torch.Tensor, slices: Sequence[slice]) -> Where:
    """Return the box of some slices; BadArgumentError if they are not of the tensor's shape."""
    if any(s.stop is None or s.step not in (None, 1) for s in slices):
        raise BadArgumentError(f"select: {name}: {slices}; slices have a start and a stop, and no step")
    where = tuple((int(s.start or 0), int(s.stop) - int(s.start or 0)) for s in slices)
    if tuple(n for _, n in where) != tuple(tensor.shape):
        raise BadArgumentError(f"select: {name} has shape {tuple(tensor.shape)}, its slices {slices}")
    return where


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
