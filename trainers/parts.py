"""A model's and its optimizers' state by parameter names, and back, whatever parallelism they are under.

Through `torch.distributed.checkpoint.state_dict`: names are those of the bare model (no "module." of DDP, no
"_orig_mod." of `torch.compile`), optimizer entries go by the parameter's name instead of its number. Under several
processes the whole state comes together on rank 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ..codec.kinds import Kind, kinds
from ..kernels.errors import BadArgumentError
from .state import plain

_SHOWN = 20


class StateMismatchWarning(UserWarning):
    """With `strict=False`: parts of a checkpoint that the model has no place for, or the reverse."""


def world() -> int:
    """Number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's number among them."""
    return dist.get_rank() if world() > 1 else 0


def bare(model: nn.Module) -> nn.Module:
    """The model within wrappers that only put a prefix before its names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _target(model: nn.Module) -> nn.Module:
    """The model that torch is asked about: it sees through every wrapper but this one."""
    return model.module if isinstance(model, nn.DataParallel) else model


def optimizers_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """One optimizer or several as a tuple.

    Raises:
        BadArgumentError: something else is among them.
    """
    if optimizer is None:
        return ()
    found = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping)):
        raise BadArgumentError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__qualname__}")
    found = tuple(found)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise BadArgumentError(f"optimizer must be a torch.optim.Optimizer, not {type(one).__qualname__}")
    return found


def kinds_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Kind]:
    """What `kinds` says of a model and its optimizers, for the names used here."""
    inside = bare(model)
    table: dict[str, Kind] = kinds(inside)
    for one in optimizers:
        table |= kinds(inside, one)
    return table


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name; whole on rank 0, and empty on others, under several processes."""
    state: dict[str, Any] = plain(get_model_state_dict(_target(model), options=_options()))
    return state


def optimizer_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Moments and parameter groups of all optimizers, by the names of the model's parameters.

    Raises:
        BadArgumentError: an optimizer has a parameter that is not the model's.
    """
    state: dict[Any, Any] = {}
    groups: list[Any] = []
    for one in optimizers:
        names = _names(model, one)
        if one.state:
            # One by one: of several optimizers, one that has not stepped yet must not be touched.
            found: Any = get_optimizer_state_dict(_target(model), one, options=_options())
            state |= found.get("state", {})
            groups += found.get("param_groups", [])
        else:
            # For an optimizer that has not stepped yet, torch would make a step to see what its state will be, and
            # count it.
            groups += [{**g, "params": n} for g, n in zip(_groups(one), names, strict=True)]
    result: dict[str, Any] = plain({"state": state, "param_groups": groups})
    return result


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    return groups


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group."""
    table = {id(p): name for name, p in reversed(list(bare(model).named_parameters()))}
    names = []
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in table:
                raise BadArgumentError(
                    f"optimizer: parameter {i} of group {number}, of shape {tuple(parameter.shape)}, is not the model's"
                )
        names.append([table[id(p)].replace("_orig_mod.", "") for p in group["params"]])
    return names


def mismatches(model: nn.Module, saved: Mapping[str, Any]) -> list[str]:
    """What a saved model state and a model do not agree on, a line each, and nothing where they fit."""
    mine = _shapes(model)
    lines = [f"{name}: not in the checkpoint" for name in mine if name not in saved]
    lines += [f"{name}: not in the model" for name in saved if name not in mine]
    for name, (shape, dtype) in mine.items():
        if name in saved and isinstance(saved[name], torch.Tensor):
            before = tuple(saved[name].shape), saved[name].dtype
            if before[0] != shape:
                lines.append(f"{name}: shape {before[0]} in the checkpoint, {shape} in the model")
            elif before[1] != dtype:
                lines.append(f"{name}: {before[1]} in the checkpoint, {dtype} in the model")
    return lines


def _shapes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    state = get_model_state_dict(_target(model))
    return {k: (tuple(v.shape), v.dtype) for k, v in state.items() if isinstance(v, torch.Tensor)}


def optimizer_mismatches(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: Mapping[str, Any], classes: Sequence[str]
) -> list[str]:
    """The same for optimizers: their classes, and the parameters of each group."""
    lines = []
    mine = [type(one).__qualname__ for one in optimizers]
    if list(classes) != mine:
        lines.append(f"optimizer: {', '.join(classes)} in the checkpoint, {', '.join(mine)} here")
    here = [names for one in optimizers for names in _names(model, one)]
    before = [group["params"] for group in saved["param_groups"]]
    if len(here) != len(before):
        lines.append(f"optimizer: {len(before)} parameter groups in the checkpoint, {len(here)} here")
    for number, (a, b) in enumerate(zip(before, here, strict=False)):
        lines += [f"optimizer: group {number}: {n}: not in the checkpoint" for n in sorted(set(b) - set(a))]
        lines += [f"optimizer: group {number}: {n}: not in the optimizer" for n in sorted(set(a) - set(b))]
    return lines


def refuse_or_warn(lines: Sequence[str], strict: bool, where: str, stacklevel: int) -> None:
    """Raise what does not fit as one error, or warn of it."""
    if not lines:
        return
    shown = "\n  ".join(lines[:_SHOWN]) + (f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
    if strict:
        raise BadArgumentError(
            f"{where}: the checkpoint does not fit; nothing was changed. strict=False loads what does.\n  {shown}"
        )
    message = f"{where}: not all of the checkpoint fits; what does not keeps its value:\n  {shown}"
    warnings.warn(message, StateMismatchWarning, stacklevel=stacklevel)


def set_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Put a saved state into a model; what does not fit in name or shape stays as it is.

    Under several processes rank 0 has the state and the others give an empty one.
    """
    if world() > 1:
        shapes = _shapes(model)
        fitting = {k: v for k, v in saved.items() if k not in shapes or tuple(v.shape) == shapes[k][0]}
        set_model_state_dict(_target(model), fitting, options=_options(load=True))
        return
    mine: dict[str, Any] = dict(get_model_state_dict(_target(model)))
    fitting = {k: v for k, v in saved.items() if k in mine and _fits(v, mine[k])}
    set_model_state_dict(_target(model), mine | fitting)


def _fits(saved: Any, mine: Any) -> bool:
    if not isinstance(mine, torch.Tensor):
        return True
    return isinstance(saved, torch.Tensor) and saved.shape == mine.shape


def set_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: Mapping[str, Any]) -> None:
    """Put a saved state into optimizers: entries by parameter name, settings by the group that holds the parameter.

    Parameters that the saved state does not know, or knows in another shape, start afresh.
    """
    for one in optimizers:
        if world() > 1:
            options = _options(load=True)
            set_optimizer_state_dict(_target(model), one, dict(saved), options=options)
            continue
        shapes = {
            n: p.shape
            for g, names in zip(one.param_groups, _names(model, one), strict=True)
            for p, n in zip(g["params"], names, strict=True)
        }
        settings = {name: group for group in saved["param_groups"] for name in group["params"]}
        groups = []
        for group, names in zip(_groups(one), _names(model, one), strict=True):
            before: Mapping[str, Any] = next((settings[name] for name in names if name in settings), {})
            groups.append({**group, **before, "params": names})
        entries = {n: e for n, e in saved["state"].items() if n in shapes and _entry_fits(e, shapes[n])}
        if entries:
            loadable: Any = {"state": entries, "param_groups": groups}
            set_optimizer_state_dict(_target(model), one, loadable, options=StateDictOptions(strict=False))
        else:
            one.load_state_dict({"state": {}, "param_groups": groups})


def _entry_fits(entry: Any, shape: torch.Size) -> bool:
    """Whether an optimizer's entry is of a parameter of this shape: what is as large as one moment must be that."""
    values = [v for k, v in entry.items() if k.startswith("exp_avg") or k == "momentum_buffer"]
    return all(not isinstance(v, torch.Tensor) or v.ndim != len(shape) or v.shape == shape for v in values)


def _options(*, load: bool = False) -> StateDictOptions:
    if world() == 1:
        return StateDictOptions()
    if load:
        return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    return StateDictOptions(full_state_dict=True, cpu_offload=True)
