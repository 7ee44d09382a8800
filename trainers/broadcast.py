"""Broadcast of an optimizer's whole state from rank 0; each process keeps its part."""

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
    entries: Mapping[str, Mapping[str, Any]], settings: Any, parameters: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], Any]:
    """Return rank 0's entries and settings on every process, sharded as the parameters are.

    One array is whole in memory at a time, on the parameter's device.

    Args:
        entries: parameter name -> entry, on rank 0; empty on the others.
        settings: anything small, on rank 0; any value on the others.
        parameters: name -> parameter, of this process.
    """
    outlines: list[Any] = [{n: {k: _outline(v) for k, v in e.items()} for n, e in entries.items()}, settings]
    if world() > 1:
        dist.broadcast_object_list(outlines)
    found = {}
    for name, outline in outlines[0].items():
        mine = entries.get(name, {})
        parameter = parameters[name]
        found[name] = {k: _received(mine.get(k), sent, parameter) for k, sent in outline.items()}
    return found, outlines[1]


def _outline(value: Any) -> Any:
    if world() == 1 or type(value) is not torch.Tensor or value.numel() <= _SMALL:
        return value
    return _Array(value.shape, value.dtype)


def _received(mine: Any, sent: Any, parameter: Any) -> Any:
    value = sent
    if isinstance(sent, _Array):
        device = parameter.device
        empty = mine is None
        value = torch.empty(sent.shape, dtype=sent.dtype, device=device) if empty else mine.to(device).contiguous()
        dist.broadcast(value, 0)
    return redistributed(value, parameter)
