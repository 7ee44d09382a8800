"""Broadcast of a whole state from rank 0; each process keeps its part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .processes import world

_SMALL = 1 << 10
"""Elements up to which an array is sent with the outline: a broadcast of its own takes longer than its bytes."""


@dataclass(frozen=True, slots=True)
class _Array:
    """Placeholder in the outline for an array that is broadcast separately."""

    shape: torch.Size
    dtype: torch.dtype


def redistributed(value: Any, like: Any) -> Any:
    """Return a whole tensor sharded as the DTensor `like`; other values unchanged."""
    if not hasattr(like, "device_mesh") or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    if hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has the whole tensor: nothing needs to be sent.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def broadcast_entries(
    entries: Mapping[str, Any], settings: Any, parameters: Mapping[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Return rank 0's entries and settings on every process, sharded as the parameters are.

    One sharded array is whole in memory at a time, on the parameter's device.

    Args:
        entries: parameter name -> entry (a value or a dict of values), on rank 0; empty on the others.
        settings: anything small, on rank 0; any value on the others.
        parameters: name -> parameter (anything else, if the entry is not sharded), of this process.
    """
    outlines: list[Any] = [{name: _outline(entry) for name, entry in entries.items()}, settings]
    if world() > 1:
        dist.broadcast_object_list(outlines)
    return {n: _received(entries.get(n), sent, parameters.get(n)) for n, sent in outlines[0].items()}, outlines[1]


def _outline(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _outline(one) for key, one in value.items()}
    if world() == 1 or type(value) is not torch.Tensor or value.numel() <= _SMALL:
        return value
    return _Array(value.shape, value.dtype)


def _received(mine: Any, sent: Any, parameter: Any) -> Any:
    if isinstance(sent, Mapping):
        return {key: _received(None if mine is None else mine[key], one, parameter) for key, one in sent.items()}
    value = sent
    if isinstance(sent, _Array):
        device = _device(parameter)
        empty = mine is None
        value = torch.empty(sent.shape, dtype=sent.dtype, device=device) if empty else mine.to(device).contiguous()
        dist.broadcast(value, 0)
    return redistributed(value, parameter)


def _device(parameter: Any) -> torch.device:
    """Return a parameter's device if the processes can send from it, else one where they can."""
    group: Any = dist.group.WORLD
    devices = list(group._device_types)
    own: torch.device | None = getattr(parameter, "device", None)
    first: torch.device = devices[0]
    return own if own is not None and own.type in {device.type for device in devices} else first
