"""State of a model and its optimizers by parameter name, under any parallelism.

Through `torch.distributed.checkpoint.state_dict`: names are those of the bare model (no "module." of DDP, no
"_orig_mod." of `torch.compile`), optimizer entries go by the parameter's name instead of its number. Under several
processes the whole state comes together on rank 0.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..codec.evidence.kind import Kind
from ..codec.evidence.module import kinds
from ..kernels.errors import BadArgumentError, ShrinkpointWarning
from .broadcast import broadcast_entries, redistributed
from .processes import rank, world
from .state import plain
from .state_mismatch import differences, listed

_HOW = {"foreach", "fused", "capturable", "differentiable"}


class StateMismatchWarning(ShrinkpointWarning):
    """The checkpoint and the model differ in some parts, with `strict=False`."""


def bare(model: nn.Module) -> nn.Module:
    """Return the model without wrappers that only put a prefix before its names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _target(model: nn.Module) -> nn.Module:
    """Return the model to pass to torch, which handles all wrappers except DataParallel."""
    return model.module if isinstance(model, nn.DataParallel) else model


def optimizers_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return one optimizer or several as a tuple.

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
    """Return the kinds of a model and its optimizers, for the names used here."""
    return kinds(bare(model), list(optimizers) or None)


def refuse_flat(model: nn.Module) -> None:
    """Refuse a model of FSDP1: its optimizers have flat parameters without names.

    torch gathers its whole state on accelerators only (docs/trainers.md).

    Raises:
        BadArgumentError: there is a FullyShardedDataParallel in it.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise BadArgumentError(
            "model: there is a FullyShardedDataParallel (FSDP1) in it; take fully_shard (FSDP2), or save by "
            "torch.distributed.checkpoint with trainers.dcp.Writer and Reader"
        )


def refuse_unplaced(model: nn.Module) -> None:
    """Refuse a model with parameters on the meta device: they cannot hold values.

    Raises:
        BadArgumentError: it has such parameters or buffers.
    """
    found = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if found:
        raise BadArgumentError(
            f"{found[0]} and {len(found) - 1} more are on the meta device and hold no values; "
            "say model.to_empty(device=...) before the optimizer is made"
        )


def model_state(model: nn.Module, *, frozen: bool = True) -> dict[str, Any]:
    """Return parameters and buffers by name; whole on rank 0, empty on other ranks.

    Args:
        model: wrapped or not.
        frozen: whether to include parameters that do not require a gradient.
    """
    options = _options()
    options.ignore_frozen_params = not frozen
    state: dict[str, Any] = plain(_held(model, options))
    return state


def _held(model: nn.Module, options: StateDictOptions | None = None) -> dict[str, Any]:
    target = _target(model)
    # Of a model without any state torch asks for a process group.
    return get_model_state_dict(target, options=options) if target.state_dict() else {}


def optimizer_state(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return moments and parameter groups of all optimizers, by parameter name.

    Raises:
        BadArgumentError: an optimizer has a parameter that is not the model's, or that another one has too.
    """
    state: dict[Any, Any] = {}
    groups: list[Any] = []
    more: dict[str, Any] = {}
    _refuse_shared(model, optimizers)
    for one in optimizers:
        names = _names(model, one)
        extra = {k: v for k, v in one.state_dict().items() if k not in ("state", "param_groups")}
        if extra:
            more[_first(names)] = whole(plain(extra)) if world() > 1 else extra
        if one.state:
            # One by one: of several optimizers, one that has not stepped yet must not be touched.
            found: Any = get_optimizer_state_dict(_target(model), one, options=_options())
            state |= found.get("state", {})
            groups += found.get("param_groups", [])
        else:
            # For an optimizer that has not stepped yet, torch would make a step to see what its state will be, and
            # count it.
            groups += [{**g, "params": n} for g, n in zip(_groups(one), names, strict=True)]
    result: dict[str, Any] = plain({"state": state, "param_groups": groups, **({"more": more} if more else {})})
    return result


def _first(names: Sequence[Sequence[str]]) -> str:
    """Return the name of an optimizer's first parameter, which identifies the optimizer."""
    return next((name for group in names for name in group), "")


def _refuse_shared(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    seen: set[str] = set()
    for one in optimizers:
        names = {name for group in _names(model, one) for name in group}
        if names & seen:
            raise BadArgumentError(f"optimizer: {min(names & seen)} is a parameter of two optimizers; give one of them")
        seen |= names


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    return groups


def gathered(grads: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return gradient averages by name; sharded ones are gathered on rank 0's host.

    Under several processes a collective; what other ranks get is of no use.
    """
    return None if grads is None else dict(whole(grads))


def sharded(tree: Any, path: str) -> Iterator[str]:
    """Yield the paths of the DTensors in a tree, in the order of `whole`."""
    if isinstance(tree, DTensor):
        yield path
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from sharded(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from sharded(value, f"{path}/{number}")


def whole(tree: Any) -> Any:
    """Return a tree with its DTensors whole, in the host memory of rank 0.

    Under several processes a collective, which all call with the same tree; what other ranks get is of no use.
    """
    if isinstance(tree, DTensor):
        value = tree.full_tensor()
        return value.cpu() if rank() == 0 else None
    if isinstance(tree, Mapping):
        return {key: whole(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(whole, tree))
    return tree


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of an optimizer's parameters, group by group."""
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
    """Return a line for each difference between a saved model state and a model."""
    return differences(saved, _held(model), dtypes=True)


def names_of(model: nn.Module) -> set[str]:
    """Return the names of the model's parameters and buffers."""
    return set(_held(model))


def _shapes(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    state = _held(model)
    return {k: (tuple(v.shape), v.dtype) for k, v in state.items() if isinstance(v, torch.Tensor)}


def optimizer_mismatches(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], saved: Mapping[str, Any], classes: Sequence[str]
) -> list[str]:
    """Return a line for each difference between saved and present optimizers."""
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
    """Raise all mismatches as one error, or warn of them."""
    if not lines:
        return
    shown = listed(lines)
    if strict:
        raise BadArgumentError(
            f"{where}: the checkpoint does not fit; nothing was changed. strict=False loads what does.\n  {shown}"
        )
    message = f"{where}: not all of the checkpoint fits; what does not keeps its value:\n  {shown}"
    warnings.warn(message, StateMismatchWarning, stacklevel=stacklevel)


def set_model(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load a saved state into a model, except entries of another name or shape.

    Under several processes rank 0 has the state and the others give an empty one.
    """
    if world() > 1:
        shapes = _shapes(model)
        fitting = {k: v for k, v in saved.items() if k not in shapes or tuple(v.shape) == shapes[k][0]}
        set_model_state_dict(_target(model), fitting, options=_options(load=True))
        return
    mine = dict(_held(model))
    fitting = {k: redistributed(v, mine[k]) for k, v in saved.items() if k in mine and _fits(v, mine[k])}
    if mine:
        set_model_state_dict(_target(model), mine | fitting)


def _fits(saved: Any, mine: Any) -> bool:
    if not isinstance(mine, torch.Tensor):
        return True
    return isinstance(saved, torch.Tensor) and saved.shape == mine.shape


def resized(model: nn.Module, saved: Mapping[str, Any]) -> set[str]:
    """Return the names of parameters and buffers whose shape differs in a saved state."""
    shapes = _shapes(model)
    return {n for n, v in saved.items() if n in shapes and isinstance(v, torch.Tensor) and v.shape != shapes[n][0]}


def set_optimizers(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    saved: Mapping[str, Any],
    without: Collection[str] = (),
    *,
    keep: Collection[str] = (),
) -> None:
    """Load a saved state into optimizers, by parameter names.

    Parameters that the saved state does not know, or knows in another shape, start afresh. Under several processes
    rank 0 has the state and the others give an empty one.

    Args:
        model: whose parameters they are.
        optimizers: as they were when saved.
        saved: what `optimizer_state` gave.
        without: parameters whose entries are left out.
        keep: settings of the groups whose present values are kept; "lr" is left to `LearningRates`.
    """
    for one in optimizers:
        names = _names(model, one)
        flat = [name for group in names for name in group]
        parameters = dict(zip(flat, (p for g in one.param_groups for p in g["params"]), strict=True))
        entries: Mapping[str, Any] = {}
        settings: list[Mapping[str, Any]] = []
        extra: Mapping[str, Any] = {}
        if rank() == 0:
            kept = {n: e for n, e in saved["state"].items() if n in parameters and n not in without}
            entries = {n: e for n, e in kept.items() if _entry_fits(e, parameters[n].shape)}
            settings = _settings(names, saved["param_groups"])
            extra = saved.get("more", {}).get(_first(names), {})
        entries, (settings, extra) = broadcast_entries(entries, (settings, extra), parameters)
        pairs = zip(_groups(one), settings, strict=True)
        groups = [{**_with_own(g, s, set(keep) - {"lr"}), "params": g["params"]} for g, s in pairs]
        # Not by torch's `set_optimizer_state_dict`: it makes a step to see what the state is like, which some
        # optimizers cannot, and which gives parameters a state that had none.
        number = {name: i for i, name in enumerate(flat)}
        state = _unstepped(one) | {number[n]: e for n, e in entries.items()}
        one.load_state_dict({**extra, "state": state, "param_groups": groups})


def _unstepped(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """Return the optimizer's entries from before the first step, which some optimizers need."""
    state: dict[int, Any] = optimizer.state_dict()["state"]
    return {n: e for n, e in state.items() if "step" in e and float(e["step"]) == 0}


def _settings(names: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return for each group the saved settings of the group that held its first parameter."""
    table = {name: group for group in saved for name in group["params"]}
    return [next((table[name] for name in group if name in table), {}) for group in names]


def _with_own(group: Mapping[str, Any], saved: Mapping[str, Any], keep: Collection[str]) -> dict[str, Any]:
    """Return the saved settings of a group, with the present ones that are kept.

    The latter depend on the device, which may be another one than before.
    """
    return {**group, **{k: v for k, v in saved.items() if k not in group or k not in (_HOW | set(keep))}}


def check_keep(keep: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Refuse names that do not stand for a setting of any parameter group.

    Raises:
        BadArgumentError: with the nearest names.
    """
    if isinstance(keep, str) or not isinstance(keep, Sequence):
        raise BadArgumentError(f'keep must be a sequence of names such as ("lr", "weight_decay"), not {keep!r}')
    known = sorted({str(name) for one in optimizers for group in one.param_groups for name in group} - {"params"})
    for name in keep:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; the nearest is {near[0]!r}" if near else f"; the settings are {', '.join(known) or 'none'}"
            raise BadArgumentError(f"keep: {name!r} is not a setting of the optimizer{hint}")


@dataclass(frozen=True, slots=True)
class LearningRates:
    """Learning rates of new optimizers and schedulers, to restore after loading.

    Args:
        groups: (optimizer, number of the group, its rate, its base rate or None if no scheduler has set one).
        schedulers: (scheduler, its base rates), nested ones included.
    """

    groups: Sequence[tuple[torch.optim.Optimizer, int, Any, Any]]
    schedulers: Sequence[tuple[Any, list[Any]]]

    @staticmethod
    def of(optimizers: Sequence[torch.optim.Optimizer], scheduler: Any) -> LearningRates:
        """Record the present rates."""
        rates = [
            (one, number, _number(group["lr"]), _number(group.get("initial_lr")))
            for one in optimizers
            for number, group in enumerate(one.param_groups)
        ]
        schedulers = [(one, list(one.base_lrs)) for one in _schedulers(scheduler) if hasattr(one, "base_lrs")]
        return LearningRates(rates, schedulers)

    def restore(self) -> None:
        """Restore the rates, under a scheduler in proportion to the base rate."""
        for optimizer, number, rate, base in self.groups:
            group = optimizer.param_groups[number]  # loading has replaced the groups
            before = _number(group.get("initial_lr"))
            if self.schedulers and base is not None and before:
                rate = _number(group["lr"]) * base / before
            if base is not None:
                group["initial_lr"] = base
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        for scheduler, base_rates in self.schedulers:
            scheduler.base_lrs = base_rates
            if hasattr(scheduler, "_last_lr"):
                scheduler._last_lr = [_number(group["lr"]) for group in scheduler.optimizer.param_groups]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and those within it."""
    if scheduler is not None:
        yield scheduler
        for inner in getattr(scheduler, "_schedulers", ()):
            yield from _schedulers(inner)


def _entry_fits(entry: Any, shape: torch.Size) -> bool:
    """Return whether an optimizer's entry fits the shape of a parameter."""
    values = [v for k, v in entry.items() if k.startswith("exp_avg") or k == "momentum_buffer"]
    return all(not isinstance(v, torch.Tensor) or v.ndim != len(shape) or v.shape == shape for v in values)


def _options(*, load: bool = False) -> StateDictOptions:
    if world() == 1:
        return StateDictOptions()
    if load:
        return StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    return StateDictOptions(full_state_dict=True, cpu_offload=True)
