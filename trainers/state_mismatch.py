"""Comparison of saved arrays with those of a model, before any value is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..kernels.errors import BadArgumentError

_SHOWN = 20


def differences(
    saved: Mapping[str, Any], mine: Mapping[str, Any], *, names: bool = True, dtypes: bool = False
) -> list[str]:
    """Return a line for each difference between two tables of arrays.

    Args:
        saved: name -> array (or anything else, which fits), of the checkpoint.
        mine: the same of the model.
        names: also names that only one of them has.
        dtypes: also dtypes.
    """
    lines = []
    if names:
        lines += [f"{name}: not in the checkpoint" for name in mine if name not in saved]
        lines += [f"{name}: not in the model" for name in saved if name not in mine]
    for name, array in mine.items():
        if nn.parameter.is_lazy(array) or not hasattr(array, "shape") or not hasattr(saved.get(name), "shape"):
            continue
        before, now = tuple(saved[name].shape), tuple(array.shape)
        if before != now:
            lines.append(f"{name}: shape {before} in the checkpoint, {now} in the model")
        elif dtypes and saved[name].dtype != array.dtype:
            lines.append(f"{name}: {saved[name].dtype} in the checkpoint, {array.dtype} in the model")
    return lines


def group_differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return the differences between the group sizes of two optimizer states."""
    before, now = ([len(group["params"]) for group in state["param_groups"]] for state in (saved, mine))
    return [] if before == now else [f"groups of {before} parameters in the checkpoint, of {now} here"]


def load_models(
    models: Sequence[nn.Module], states: Sequence[Mapping[str, Any]], where: str, *, strict: bool = True
) -> None:
    """Load saved states into modules, all or none.

    Raises:
        BadArgumentError: parameters were renamed or resized, and no hook of the modules sees to it; a list of them.
    """
    lines = []
    for number, (model, saved) in enumerate(zip(models, states, strict=True)):
        which = f"model {number}: " if len(models) > 1 else ""
        lines += [f"{which}{line}" for line in differences(saved, model.state_dict(), names=strict)]
    before = [{n: _copy(v) for n, v in model.state_dict().items()} for model in models] if lines else []
    try:
        for model, saved in zip(models, states, strict=True):
            model.load_state_dict(saved, strict=strict)
    except RuntimeError:
        for model, saved in zip(models, before, strict=False):
            model.load_state_dict(saved)
        refuse(lines, where)
        raise


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def listed(lines: Sequence[str]) -> str:
    """Return the first lines joined, and the number of further lines."""
    return "\n  ".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")


def refuse(lines: Sequence[str], where: str) -> None:
    """Raise all mismatches as one error.

    Raises:
        BadArgumentError: there are such lines.
    """
    if lines:
        raise BadArgumentError(f"{where}: the checkpoint does not fit; nothing was changed\n  {listed(lines)}")
