"""Names of parameters without the prefixes of wrappers."""

from __future__ import annotations

from torch import nn

_INNER = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What `torch.compile`, activation checkpointing and FSDP call the module that they wrap."""


def bare_name(module: nn.Module, name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers.

    Example:
        >>> model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
        >>> bare_name(model, "module.0.weight")
        '0.weight'
    """
    kept = []
    here = module
    *above, last = name.split(".")
    for part in above:
        replicated = isinstance(here, (nn.parallel.DistributedDataParallel, nn.DataParallel))
        if not (part in _INNER or (replicated and part == "module")):
            kept.append(part)
        here = getattr(here, part)
    return ".".join([*kept, last])
