"""Loading of saved arrays into modules, and the differences between them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..kernels.errors import BadArgumentError

_SHOWN = 20


def differences(saved: Mapping[str, Any], mine: Mapping[str, Any], *, names: bool = True) -> list[str]:
    """Return a line for each difference of names and shapes between two tables of arrays.

    Args:
        saved: name -> array (or anything else, which fits), of the checkpoint.
        mine: the same of the model.
        names: also names that only one of them has.
    """
    lines = []
    if names:
        lines += [f"{name}: not in the checkpoint" for name in mine if name not in saved]
        lines += [f"{name}: not in the model" for name in saved if name not in mine]
    for name, before, now in _arrays(saved, mine):
        if before.shape != now.shape:
            lines.append(f"{name}: shape {tuple(before.shape)} in the checkpoint, {tuple(now.shape)} in the model")
    return lines


def dtype_differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return a line for each array of another dtype, which torch would convert."""
    return [
        f"{name}: {before.dtype} in the checkpoint, {now.dtype} in the model"
        for name, before, now in _arrays(saved, mine)
        if before.shape == now.shape and before.dtype != now.dtype
    ]


def _arrays(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the arrays that both have. Extra state is left out: it may grow."""
    for name, now in mine.items():
        before = saved.get(name)
        if not is_extra(name) and not nn.parameter.is_lazy(now) and hasattr(now, "shape") and hasattr(before, "shape"):
            yield name, before, now


def is_extra(name: str) -> bool:
    """Return whether an entry is a module's extra state, which has no fixed shape."""
    return name.rpartition(".")[2] == nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def group_differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return the differences between the group sizes of two optimizer states."""
    before, now = ([len(group["params"]) for group in state["param_groups"]] for state in (saved, mine))
    return [] if before == now else [f"groups of {before} parameters in the checkpoint, of {now} here"]


def load_state(module: nn.Module, saved: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Load what fits of a saved state by the module's own `load_state_dict`.

    Returns:
        Its result (None if it refused some shapes), and a line for each entry that was not loaded.
    """
    mine = module.state_dict()
    given: Any = OrderedDict(saved)
    given._metadata = getattr(mine, "_metadata", {})  # versions of the modules, by which they know old states
    try:
        result: Any = module.load_state_dict(given, strict=False)
    except RuntimeError as e:
        if not str(e).startswith("Error(s) in loading state_dict"):
            raise
        return None, str(e).split("\n\t")[1:]  # raised after everything that fits was loaded
    lines = [f"{name}: not in the checkpoint" for name in result.missing_keys if name in mine]
    # Quantized layers save more than they load; nothing is lost if they have the same values already.
    now = module.state_dict() if result.unexpected_keys else {}
    lines += [
        f"{name}: not in the model"
        for name in result.unexpected_keys
        if name not in now or not is_same(saved.get(name), now[name])
    ]
    return result, lines


def load_states(
    parts: Sequence[tuple[nn.Module, Mapping[str, Any]]], lines: Sequence[str], where: str, *, strict: bool = True
) -> list[Any]:
    """Load saved states into modules, all or none; return the results of `load_state_dict`.

    Args:
        parts: modules and their states.
        lines: differences between them. With some, the modules are asked whether they accept them.
        where: what messages begin with.
        strict: whether all names must be the same.

    Raises:
        BadArgumentError: parameters were renamed or resized, and no hook of the modules sees to it; a list of them.
    """
    before = [{n: _copy(v) for n, v in module.state_dict().items()} for module, _ in parts] if lines else []
    results, refused = [], list[str]()
    try:
        for module, saved in parts:
            result, left_out = load_state(module, saved)
            results.append(result)
            refused += left_out if strict or result is None else []
    except Exception as e:
        refused.append(f"{type(e).__name__}: {e}")
        if not lines:
            raise
    if refused:
        for (module, _), saved in zip(parts, before, strict=False):
            load_state(module, saved)
        if not lines:
            raise BadArgumentError(f"{where}: the model did not load all of its state\n  {listed(refused)}")
        refuse(lines, where)
    return results


def is_same(saved: Any, mine: Any) -> bool:
    """Return whether two entries of a state dict are equal."""
    if isinstance(saved, torch.Tensor) and isinstance(mine, torch.Tensor):
        is_like = saved.shape == mine.shape and saved.dtype == mine.dtype and not saved.is_meta
        return is_like and torch.equal(saved.to(mine.device), mine)
    return type(saved) is type(mine) and not isinstance(saved, torch.Tensor) and bool(saved == mine)


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
