"""The tensors of a state dict: flat bytes, specs, hashes, and slices of published ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ...codec.errors import BadArgumentError
from ...codec.state.leaves import LeafSpec, NpArray, local_part
from ...kernels.backend.arrays import is_allocated


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
    where: tuple[tuple[int, int], ...] | None


def spec_of(tensor: torch.Tensor) -> LeafSpec:
    """Return library, dtype and shape of a tensor."""
    return LeafSpec("torch", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def host_bytes(tensor: torch.Tensor) -> NpArray:
    """Return the bytes of a tensor in C order, without a copy if possible."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    data: NpArray = flat.view(torch.uint8).numpy()
    return data


def tensors_of(state: Any, what: str) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a state dict; all ranks gather distributed ones together.

    Raises:
        BadArgumentError: it is not a mapping from strings to tensors.
    """
    if not isinstance(state, Mapping):
        raise BadArgumentError(f"{what} is a {type(state).__qualname__}; a state dict is needed")
    found = {}
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise BadArgumentError(f"{what}: {name!r} is a {type(value).__qualname__}; names and tensors are needed")
        check_dense({name: value}, what)
        gather = getattr(value, "full_tensor", None)
        found[name] = value.detach() if gather is None else gather().detach()
    return found


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


def state_hash(hashes: Mapping[str, str]) -> str:
    """Return a hash of all tensors from their hashes, independent of the order of names."""
    h = xxhash.xxh3_128()
    for name in sorted(hashes):
        h.update(f"{len(name)} {name} {hashes[name]}".encode())
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
    for name in select or {}:
        if name not in tensors:
            raise BadArgumentError(f"select: the model has no tensor {name!r}")
    for name, tensor in tensors.items():
        if select and name in select:
            source, slices = select[name]
            if any(s.stop is None or s.step not in (None, 1) for s in slices):
                raise BadArgumentError(f"select: {name}: {slices}; slices have a start and a stop, and no step")
            where = tuple((int(s.start or 0), int(s.stop) - int(s.start or 0)) for s in slices)
            if tuple(n for _, n in where) != tuple(tensor.shape):
                raise BadArgumentError(f"select: {name} has shape {tuple(tensor.shape)}, its slices {slices}")
            found[name] = Part(name, tensor, str(source), where)
        elif hasattr(tensor, "device_mesh"):
            found[name] = _local(name, tensor)
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


def _local(name: str, tensor: Any) -> Part:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise BadArgumentError(f"model: {name} is a DTensor with {tensor.placements}; a sum cannot be updated")
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    where = tuple(zip(map(int, offset), map(int, shape), strict=True))
    whole = all(start == 0 and n == size for (start, n), size in zip(where, tensor.shape, strict=True))
    return Part(name, tensor.to_local(), name, None if whole else where)
