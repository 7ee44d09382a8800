"""Names of a module's arrays, with and without the wrappers around it and its parts.

A wrapper holds another module and changes how it runs: `torch.compile`, data parallelism, activation checkpointing. Its
attribute may stand in the names of parameters and of the state dict; in a canonical name it never does.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable
from typing import Any

WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
}
"""Class -> the attribute that holds the wrapped module. By name, since most of them are never imported."""
_HIDDEN = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module"}
"""Attributes that the wrappers leave out of the names of their state dicts."""
_PREFIX = re.compile(rf"(^|[./])(?:(?:{'|'.join(sorted(set(WRAPPERS.values())))})\.)+")


def unwrapped(path: str) -> str:
    """Return a path without the attributes of wrappers, where only the names are known.

    Example:
        >>> unwrapped("model/module._orig_mod.0.weight"), unwrapped("module/0.weight")
        ('model/0.weight', 'module/0.weight')
    """
    return _PREFIX.sub(r"\1", path)


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
