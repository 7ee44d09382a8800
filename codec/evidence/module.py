"""`kinds`: layer types and roles, from a torch module, its optimizers, declared averages."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..errors import BadArgumentError
from .entries import Entry
from .kind import TINY, WRAPPERS, Kind, unwrapped
from .names import has_weight_name, is_attention, is_bias, is_norm


def kinds(module: Any = None, optimizer: Any = None, *, averages: Any = None, masters: Any = None) -> dict[str, Kind]:
    """Return the kinds of a module's and an optimizer's arrays, by their names.

    The keys are the paths *inside* the state dicts (`fc.weight`, `state/0/exp_avg`), with and without the prefixes of
    wrappers such as `torch.compile`. `compress` matches them with the tails of a state's own paths, so they fit at any
    depth of a state. They hold for one part of it: where `compress` warns that several fit, put the part into the keys,
    `{"policy/" + name: kind for name, kind in kinds(policy).items()}`. Frozen parameters, parameters in no group of the
    optimizer, buffers, and entries that are not known moments have the role "state" and stay exact.

    Args:
        module: a `torch.nn.Module`, or None.
        optimizer: a `torch.optim.Optimizer`, several in a list or tuple, or None.
        averages: averages of the weights by their key in the state, `{"ema": ema_model}`: a module (`AveragedModel`),
            its state dict, tensors by parameter name or in the order of parameters, or an object with such a
            `state_dict()` (`shadow_params` of diffusers). Without this they stay exact.
        masters: float32 masters of 16-bit weights: the name of an entry in the optimizer's state ("master_param"), or
            `{key in the state: masters}`, in lists by the order of the optimizer's parameters or by parameter name
            (`{"fp32_from_fp16_params": ...}`). Their values must be those of the parameters up to rounding.

    Returns:
        `{path: Kind}`, for `compress(..., kinds=)`, `search` and `Store.save`.

    Raises:
        BadArgumentError: `module` is not a module, or `optimizer` is not an optimizer; averages or masters are of
            other parameters, by number, name, shape or values.

    Example:
        >>> import torch
        >>> sp_kinds = kinds(torch.nn.Linear(4, 4))
        >>> sp_kinds["weight"].layer
        'linear'
    """
    optimizers = () if optimizer is None else optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
    given = [("module", module, "named_modules")] if module is not None else []
    for what, one, needed in (*given, *(("optimizer", o, "param_groups") for o in optimizers)):
        if not hasattr(one, needed):
            raise BadArgumentError(f"{what} is a {type(one).__qualname__}, which has no {needed}")
    trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    table: dict[str, Kind] = {}
    names: dict[int, str] = {}
    for prefix, sub in [] if module is None else module.named_modules():
        for short, parameter in sub.named_parameters(recurse=False):
            name = canonical_name(module, f"{prefix}.{short}".lstrip("."))
            layer = _layer_of(sub, short, parameter, known=id(parameter) in trained)
            if layer == "linear" and is_attention(name):
                layer = "attention"
            is_trained = parameter.requires_grad and (not optimizers or id(parameter) in trained)
            kind = Kind(layer, "weight" if is_trained else "state", name, shape=_shape(parameter))
            table[name] = table[state_name(module, name)] = kind
            names.setdefault(id(parameter), name)  # of tied names the first, as in a checkpoint
        for short, buffer in sub.named_buffers(recurse=False):
            name = canonical_name(module, f"{prefix}.{short}".lstrip("."))
            kind = Kind("norm" if is_norm(name) else "other", "state", name, shape=_shape(buffer))
            table[name] = table[state_name(module, name)] = kind
    declared = {} if averages is None else average_kinds(averages, module, table)
    entry = masters if isinstance(masters, str) else None
    if masters is not None and entry is None:
        ordered = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        ordered = ordered or (list(module.parameters()) if module is not None else [])
        declared |= master_kinds(masters, module, ordered, table, names)
    for one in optimizers:
        _add_entries(table, one, names, entry)
    if entry is not None and not any(kind.declared == "master" for kind in table.values()):
        raise BadArgumentError(f"masters: no trained parameter has an entry {entry!r} in the optimizer's state")
    return table | declared


def _add_entries(table: dict[str, Kind], optimizer: Any, names: dict[int, str], masters: str | None) -> None:
    owner = class_of(optimizer)
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            layer = table[name].layer if name is not None else "other"
            for entry, value in optimizer.state.get(parameter, {}).items():
                shape = tuple(getattr(value, "shape", ()))
                belongs = shape and shape == tuple(parameter.shape)
                role = Entry("", "state", str(number), entry).role if belongs else "state"
                kind = Kind(layer, role, name, owner, shape=shape)
                if entry == masters:
                    kind = master_kind(f"masters: state/{number}/{entry}", value, parameter, table.get(name or ""))
                elif entry == "z" and belongs and name is not None and "schedulefree" in owner.lower():
                    of_weight = table[name].role == "weight"
                    kind = replace(table[name], declared="iterate") if of_weight else replace(kind, role="state")
                other = table.get(f"state/{number}/{entry}")
                if other is not None and other.parameter != name:  # a parameter of another optimizer has this number
                    shared = kind.role if kind.role == other.role and not kind.declared else "state"
                    table[f"state/{number}/{entry}"] = Kind("other", shared)
                else:
                    table[f"state/{number}/{entry}"] = kind
                if name is not None:
                    table[f"state/{name}/{entry}"] = kind
            number += 1


def _shape(tensor: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor, or None before the first call of a lazy module."""
    import torch

    return None if tensor is None or torch.nn.parameter.is_lazy(tensor) else tuple(tensor.shape)


def class_of(optimizer: Any) -> str:
    """Return the name of the class that has the `step` of an optimizer, inside of wrappers.

    A subclass that has a `step` of its own may keep other entries under the same names.
    """
    for name in ("optimizer", "_optimizer", "optim"):
        if hasattr(inner := getattr(optimizer, name, None), "param_groups"):
            return class_of(inner)
    step = getattr(type(optimizer), "step", None)
    return str(getattr(step, "__qualname__", f"{type(optimizer).__name__}.step").split(".")[-2])


def _layer_of(module: Any, name: str, parameter: Any, *, known: bool) -> str:
    """Return the layer type of a parameter; "other" if module and name are unknown."""
    import torch.nn as nn

    if is_bias(name):
        return "bias"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    if "norm" in type(module).__name__.lower() or isinstance(module, nn.modules.batchnorm._NormBase):
        return "norm"
    if isinstance(module, (nn.Linear, nn.Bilinear, nn.RNNBase, nn.RNNCellBase)):
        return "linear"
    if _shape(parameter) is None:
        return "other"
    if parameter.ndim <= 1:
        return "norm" if parameter.numel() <= 8 * TINY else "other"
    if has_weight_name(name) or (known and sorted(parameter.shape)[-2] >= 16):
        return "convolution" if parameter.ndim > 2 else "linear"
    return "other"


_AGREE = 2.0**-6
"""Largest relative L2 difference of a master and its parameter. Rounding to bfloat16, at random too, errs by less."""
_LISTS = "shadow_params"
"""The entry of an average's state that holds its values in the order of parameters (torch_ema, diffusers)."""


def average_kinds(averages: Any, module: Any, table: Mapping[str, Kind]) -> dict[str, Kind]:
    """Return the kinds of averages of a module's weights.

    Args:
        averages: as given to `kinds`.
        module: their module.
        table: kinds of the module's arrays by name.

    Raises:
        BadArgumentError: an average is of another model, by its names, number or shapes.
    """
    found: dict[str, Kind] = {}
    for path, average in _parts("averages", averages, module):
        for key, value, kind in _average(f"averages: {path}", average, module, table):
            _check_shape(f"averages: {path}/{key}", value, kind)
            found[f"{path}/{key}"] = dataclasses.replace(kind, declared="average" if kind.role == "weight" else "")
    return found


def _average(what: str, average: Any, module: Any, table: Mapping[str, Kind]) -> Iterator[tuple[str, Any, Kind]]:
    """Yield key, value and kind of each array of an average."""
    if not isinstance(average, Mapping | list | tuple):
        if not callable(getattr(average, "state_dict", None)):
            raise BadArgumentError(f"{what} is a {type(average).__qualname__}, not tensors by name or in a list")
        average = average.state_dict()
    if isinstance(average, Mapping) and isinstance(average.get(_LISTS), list | tuple):
        average = {_LISTS: average[_LISTS]}
    prefix, listed = "", average
    if isinstance(average, Mapping) and _LISTS in average:
        prefix, listed = f"{_LISTS}/", average[_LISTS]
    if not isinstance(listed, Mapping):
        yield from _in_order(what, prefix, listed, list(module.parameters()), module, table)
        return
    for name, value in listed.items():
        if not (hasattr(value, "shape") and len(value.shape)):  # counters and decays
            continue
        kind = table.get(str(name)) or table.get(unwrapped(str(name)))
        if kind is None:
            raise BadArgumentError(f"{what}/{name}: the module has no parameter or buffer of this name")
        yield str(name), value, kind


def master_kinds(
    masters: Any, module: Any, parameters: Sequence[Any], table: Mapping[str, Kind], names: Mapping[int, str]
) -> dict[str, Kind]:
    """Return the kinds of float32 masters that a state holds at some paths, in lists or by name.

    Args:
        masters: trees by path: lists, also of lists, in the order of the optimizer's parameters, or tensors by name.
        module: whose parameters they are masters of.
        parameters: of the optimizers, in order; else of the module.
        table: kinds of the module's arrays by name.
        names: of parameters by identity.

    Raises:
        BadArgumentError: number, order, names, shapes or values are not those of the parameters.
    """
    found: dict[str, Kind] = {}
    for path, tree in _parts("masters", masters, module):
        by_name = {name: p for p in module.parameters() if (name := names.get(id(p))) is not None}
        what = f"masters: {path}"
        if isinstance(tree, Mapping):
            pairs = []
            for name, value in tree.items():
                parameter = by_name.get(unwrapped(str(name)))
                if parameter is None:
                    raise BadArgumentError(f"{what}/{name}: the module has no parameter of this name")
                pairs.append((str(name), value, parameter))
        elif isinstance(tree, list | tuple):
            values = list(_flat(tree))
            halves = [p for p in parameters if p.element_size() == 2]
            ordered = next((some for some in (halves, list(parameters)) if len(some) == len(values)), None)
            if ordered is None:
                raise BadArgumentError(
                    f"{what} has {len(values)} arrays; the optimizer has {len(parameters)} parameters, {len(halves)} "
                    "of them of 16 bits"
                )
            pairs = [(key, value, p) for (key, value), p in zip(values, ordered, strict=True)]
        else:
            raise BadArgumentError(f"{what} is a {type(tree).__qualname__}, not tensors by name or in a list")
        for key, value, parameter in pairs:
            found[f"{path}/{key}"] = master_kind(f"{what}/{key}", value, parameter, table.get(names[id(parameter)]))
    return found


def master_kind(what: str, value: Any, parameter: Any, kind: Kind | None) -> Kind:
    """Return the kind of a parameter's master, after a look at shape and values."""
    kind = Kind("other", "state", shape=tuple(parameter.shape)) if kind is None else kind
    _check_shape(what, value, kind)
    if not agree(value, parameter):
        raise BadArgumentError(
            f"{what}: its values are not those of {kind.parameter or 'its parameter'}: they differ by more than "
            f"{_AGREE:.1%}. Masters must be in the order of the optimizer's parameters"
        )
    return dataclasses.replace(kind, declared="master" if kind.role == "weight" else "")


def agree(master: Any, parameter: Any) -> bool:
    """Return whether a parameter may be its master, rounded to 16 bits.

    Values that are not finite do not count.
    """
    import torch

    with torch.no_grad():
        wanted = parameter.detach().float()
        difference = torch.as_tensor(master).detach().to(wanted.device).float() - wanted
        finite = difference.isfinite()
        return bool(difference[finite].norm() <= _AGREE * wanted[finite].norm())


def _in_order(
    what: str, prefix: str, values: Sequence[Any], parameters: Sequence[Any], module: Any, table: Mapping[str, Kind]
) -> Iterator[tuple[str, Any, Kind]]:
    trained = [p for p in parameters if p.requires_grad]
    ordered = next((some for some in (parameters, trained) if len(some) == len(values)), None)
    if ordered is None:
        raise BadArgumentError(
            f"{what}/{prefix}".rstrip("/") + f" has {len(values)} arrays; the module has {len(parameters)} parameters, "
            f"{len(trained)} of them trainable"
        )
    names = {id(p): name for name, p in module.named_parameters()}
    for i, (value, parameter) in enumerate(zip(values, ordered, strict=True)):
        name = names[id(parameter)]
        yield f"{prefix}{i}", value, table.get(name) or table[unwrapped(name)]


def _parts(argument: str, given: Any, module: Any) -> Iterator[tuple[str, Any]]:
    if module is None:
        raise BadArgumentError(f"{argument} need the module: kinds(module, optimizer, {argument}=...)")
    if not isinstance(given, Mapping):
        raise BadArgumentError(
            f"{argument} must map the key that each has in the state to it, not be a {type(given).__qualname__}"
        )
    for path, tree in given.items():
        if not isinstance(path, str) or not path:
            raise BadArgumentError(f"{argument}: the key {path!r} must be a non-empty string")
        yield path, tree


def _flat(tree: Sequence[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf of nested lists."""
    for i, value in enumerate(tree):
        if isinstance(value, list | tuple):
            yield from _flat(value, f"{prefix}{i}/")
        else:
            yield f"{prefix}{i}", value


def _check_shape(what: str, value: Any, kind: Kind) -> None:
    shape = getattr(value, "shape", None)
    if shape is None:
        raise BadArgumentError(f"{what} is a {type(value).__qualname__}, not an array")
    if kind.shape is not None and tuple(shape) != kind.shape:
        raise BadArgumentError(f"{what} has shape {tuple(shape)}; {kind.parameter or 'its parameter'} has {kind.shape}")


_HIDDEN = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
"""Attributes that the wrappers leave out of the names of their state dicts."""


@functools.lru_cache(1024)
def _attribute(cls: Hashable) -> str | None:
    bases = (f"{base.__module__}.{base.__qualname__}" for base in getattr(cls, "__mro__", ()))
    return next((WRAPPERS[base] for base in bases if base in WRAPPERS), None)


def _attribute_of(module: Any) -> str | None:
    """Return the attribute of a wrapper that holds the wrapped module; None: not a wrapper."""
    cls: Any = type(module)
    return _attribute(cls)


def bare(module: Any) -> Any:
    """Return the module within all wrappers around it."""
    while (attribute := _attribute_of(module)) is not None:
        module = getattr(module, attribute)
    return module


def canonical_name(module: Any, name: str) -> str:
    """Return the name of a parameter or entry of a state dict without wrappers' attributes.

    Wrappers may stand at every level. The last parts may be those of an entry that is not an attribute of a module.

    Example:
        >>> from torch import nn
        >>> canonical_name(nn.DataParallel(nn.Sequential(nn.Linear(2, 2))), "module.0.weight")
        '0.weight'
    """
    kept = []
    for part in name.split("."):
        while (attribute := _attribute_of(module)) not in (None, part):
            module = getattr(module, str(attribute))
        if attribute is None:
            kept.append(part)
        module = getattr(module, "_modules", {}).get(part)
    return ".".join(kept)


def state_name(module: Any, name: str) -> str:
    """Return the name that the module's own state dict has for a canonical name.

    Example:
        >>> from torch import nn
        >>> state_name(nn.DataParallel(nn.Sequential(nn.Linear(2, 2))), "0.weight")
        'module.0.weight'
    """
    parts = []
    for part in name.split("."):
        while (attribute := _attribute_of(module)) is not None:
            if attribute not in _HIDDEN:
                parts.append(attribute)
            module = getattr(module, attribute)
        parts.append(part)
        module = getattr(module, "_modules", {}).get(part)
    return ".".join(parts)
