"""Loading of an optimizer's state in the dtypes that it was saved in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def load_optimizer(optimizer: Any, state: Any) -> None:
    """Call `load_state_dict` of an optimizer, and keep the saved dtypes of its entries.

    torch converts all entries to their parameter's dtype, and with it float32 moments of bfloat16 weights.

    Args:
        optimizer: a `torch.optim.Optimizer`, or Accelerate's wrapper of one.
        state: what its `state_dict` returned.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    given = [state]
    # The last hook: its input was adapted by all others.
    handle = inner.register_load_state_dict_pre_hook(lambda _, adapted: given.append(adapted))
    try:
        optimizer.load_state_dict(state)
    finally:
        handle.remove()
    restore_dtypes(inner, given[-1])


def restore_dtypes(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Replace the entries of an optimizer that `load_state_dict` has converted from this state."""
    numbers = [number for group in state.get("param_groups", ()) for number in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = state.get("state", {})
    for number, parameter in zip(numbers, parameters, strict=False):
        if number in entries and parameter in optimizer.state:
            optimizer.state[parameter] = _as_saved(entries[number], optimizer.state[parameter])


def _as_saved(saved: Any, loaded: Any) -> Any:
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return saved.to(loaded.device) if saved.dtype != loaded.dtype and saved.shape == loaded.shape else loaded
    if isinstance(saved, Mapping) and isinstance(loaded, dict):
        # Implementations of a step (`fused`, `capturable`) need its number in a form of their own.
        loaded.update({k: _as_saved(v, loaded[k]) for k, v in saved.items() if k in loaded and k != "step"})
        return loaded
    if isinstance(saved, (list, tuple)) and type(loaded) in (list, tuple) and len(saved) == len(loaded):
        return type(loaded)(map(_as_saved, saved, loaded))
    return saved if isinstance(saved, str) else loaded
