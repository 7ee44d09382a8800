"""An optimizer's whole state on rank 0, put where each process has its part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .processes import world

_SMALL = 1 << 10
"""Elements up to which an array travels with the outline: broadcasts one by one take longer than their bytes."""


@dataclass(frozen=True, slots=True)
class _Array:
    """Stands in the outline for an array that is broadcast by itself."""

    shape: torch.Size
    dtype: torch.dtype


def laid_out(value: Any, like: Any) -> Any:
    """A whole tensor as `like` is: sharded, where that is a DTensor of the same shape; any other value as it is."""
    if not hasattr(like, "device_mesh") or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    if hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Every process has all of it: none needs to be sent its part.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def spread(
    entries: Mapping[str, Mapping[str, Any]], settings: Any, parameters: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], Any]:
    """Entries and settings of rank 0 on every process; what is as large as its parameter is sharded as that is.

    One array is whole in memory at a time, on the parameter's device.

    Args:
        entries: parameter name -> entry, on rank 0; empty on the others.
        settings: anything small, on rank 0; any value on the others.
        parameters: name -> parameter, of this process.
    """
    sent: list[Any] = [{n: {k: _outline(v) for k, v in e.items()} for n, e in entries.items()}, settings]
    if world() > 1:
        dist.broadcast_object_list(sent)
    found = {}
    for name, outline in sent[0].items():
        mine = entries.get(name, {})
        parameter = parameters[name]
        found[name] = {k: _received(mine.get(k), told, parameter) for k, told in outline.items()}
    return found, sent[1]


def _outline(value: Any) -> Any:
    if world() == 1 or type(value) is not torch.Tensor or value.numel() <= _SMALL:
        return value
    return _Array(value.shape, value.dtype)


def _received(mine: Any, told: Any, parameter: Any) -> Any:
    value = told
    if isinstance(told, _Array):
        device = parameter.device
        empty = mine is None
        value = torch.empty(told.shape, dtype=told.dtype, device=device) if empty else mine.to(device).contiguous()
        dist.broadcast(value, 0)
    return laid_out(value, parameter)
