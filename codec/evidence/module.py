"""`kinds`: layer types and roles of arrays, from a torch module and its optimizers."""

from __future__ import annotations

from typing import Any

from ..errors import BadArgumentError
from .entries import Entry
from .kind import TINY, Kind
from .module_names import canonical_name, state_name
from .moments import role_of
from .names import has_weight_name, is_attention, is_bias, is_norm


def kinds(module: Any = None, optimizer: Any = None) -> dict[str, Kind]:
    """Return the kinds of a module's and an optimizer's arrays, by their names.

    The keys are the paths *inside* the state dicts (`fc.weight`, `state/0/exp_avg`), with and without the prefixes of
    wrappers such as `torch.compile`. `compress` matches them with the tails of a state's own paths, so they fit at any
    depth of a state. They hold for one part of it: where `compress` warns that several fit, put the part into the keys,
    `{"policy/" + name: kind for name, kind in kinds(policy).items()}`. Frozen parameters, parameters in no group of the
    optimizer, buffers, and entries that are not known moments have the role "state" and stay exact.

    Args:
        module: a `torch.nn.Module`, or None.
        optimizer: a `torch.optim.Optimizer`, several in a list or tuple, or None.

    Returns:
        `{path: Kind}`, for `compress(..., kinds=)`, `search` and `Store.save`.

    Raises:
        BadArgumentError: `module` is not a module, or `optimizer` is not an optimizer.

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
            kind = Kind(layer, "weight" if is_trained else "state", name, shape=tuple(parameter.shape))
            table[name] = table[state_name(module, name)] = kind
            names.setdefault(id(parameter), name)  # of tied names the first, as in a checkpoint
        for short, buffer in sub.named_buffers(recurse=False):
            name = canonical_name(module, f"{prefix}.{short}".lstrip("."))
            shape = None if buffer is None else tuple(buffer.shape)
            kind = Kind("norm" if is_norm(name) else "other", "state", name, shape=shape)
            table[name] = table[state_name(module, name)] = kind
    for one in optimizers:
        _add_entries(table, one, names)
    return table


def _add_entries(table: dict[str, Kind], optimizer: Any, names: dict[int, str]) -> None:
    owner = _class_of(optimizer)
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            layer = table[name].layer if name is not None else "other"
            for entry, value in optimizer.state.get(parameter, {}).items():
                shape = tuple(getattr(value, "shape", ()))
                belongs = shape and shape == tuple(parameter.shape)
                role = role_of(Entry("", "state", str(number), entry)) if belongs else "state"
                kind = Kind(layer, role, name, owner, shape=shape)
                other = table.get(f"state/{number}/{entry}")
                if other is not None and other.parameter != name:  # a parameter of another optimizer has this number
                    kind = Kind("other", role if role == other.role else "state")
                table[f"state/{number}/{entry}"] = kind
                kind = Kind(layer, role, name, owner, shape=shape)
                if name is not None:
                    table[f"state/{name}/{entry}"] = kind
            number += 1


def _class_of(optimizer: Any) -> str:
    """Return the name of the class that has the `step` of an optimizer, inside of wrappers.

    A subclass that has a `step` of its own may keep other entries under the same names.
    """
    for name in ("optimizer", "_optimizer", "optim"):
        if hasattr(inner := getattr(optimizer, name, None), "param_groups"):
            return _class_of(inner)
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
    if parameter.ndim <= 1:
        return "norm" if parameter.numel() <= 8 * TINY else "other"
    if has_weight_name(name) or (known and sorted(parameter.shape)[-2] >= 16):
        return "convolution" if parameter.ndim > 2 else "linear"
    return "other"
