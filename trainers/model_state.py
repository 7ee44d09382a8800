"""State of a model by canonical names, under any parallelism.

The state is what the model's own `state_dict` gives, and its own `load_state_dict` loads it: modules may save and load
what no attribute shows. Names are those of the model without wrappers (`codec.evidence.module`). Under several
processes the whole state comes together on rank 0.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ..codec.evidence.module import bare, canonical_name, state_name
from ..kernels.errors import BadArgumentError, ShrinkpointWarning
from .broadcast import broadcast_entries
from .processes import rank, world
from .state import plain
from .state_mismatch import differences, dtype_differences, is_extra, is_same, listed, load_state, load_states

_LOAD = nn.Module.load_state_dict
_SMALL = 1 << 12
"""Bytes of a tensor up to which it is not decoded into: counters of steps, for example, which are read meanwhile."""


class StateMismatchWarning(ShrinkpointWarning):
    """The checkpoint and the model differ in some parts, with `strict=False`."""


def refuse_flat(model: nn.Module) -> None:
    """Refuse a model of FSDP1: its optimizers have flat parameters without names.

    torch gathers its whole state on accelerators only (docs/trainers/loop.md).

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


def parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters by canonical name; of tied ones each name."""
    model = bare(model)
    return {canonical_name(model, n): p for n, p in model.named_parameters(remove_duplicate=False)}


def _state_by_name(model: nn.Module) -> dict[str, Any]:
    """Return what the model's `state_dict` gives, by canonical name."""
    model = bare(model)
    return {canonical_name(model, name): value for name, value in model.state_dict().items()}


def model_state(model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the state by canonical name; whole on rank 0, of no use on other ranks.

    Args:
        model: wrapped or not.
        without: names to leave out.
    """
    state = plain({name: value for name, value in _state_by_name(model).items() if name not in without})
    found: dict[str, Any] = whole(state) if world() > 1 else state
    return found


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

    def leaf(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        gathered = value.full_tensor()
        return gathered.cpu() if rank() == 0 else None

    return plain(tree, leaf)


def plain_tensors(model: nn.Module, place: tuple[str, ...]) -> dict[tuple[str, ...], torch.Tensor]:
    """Return the large parameters and buffers that loading fills with the saved values.

    They are those of modules without hooks and methods of their own for that.

    Args:
        model: wrapped or not.
        place: of its state in the tree, with which the place of each tensor begins.
    """
    root, found = bare(model), dict[tuple[str, ...], torch.Tensor]()
    modules = list(root.named_modules())
    if any(m._load_state_dict_pre_hooks or type(m).load_state_dict is not _LOAD for _, m in modules):
        return {}
    for prefix, module in modules:
        if type(module)._load_from_state_dict is nn.Module._load_from_state_dict:
            for name, tensor in {**module._parameters, **module._buffers}.items():
                if is_plain(tensor):
                    found[*place, canonical_name(root, f"{prefix}.{name}".lstrip("."))] = tensor
    return found


def is_plain(value: Any) -> bool:
    """Return whether a value is a large tensor of torch's own class whose elements are in order."""
    is_own = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    return is_own and value.nbytes > _SMALL and value.is_contiguous()


def nested(tensors: Mapping[tuple[str, ...], torch.Tensor]) -> dict[str, Any]:
    """Return a tree of the tensors at these places, without those that share memory with others."""
    shared: set[tuple[str, ...]] = set()
    last: tuple[str, ...] = ()
    end = ("", 0)
    for begin, place in sorted(((str(t.device), t.data_ptr()), place) for place, t in tensors.items()):
        if begin < end:
            shared |= {last, place}
        end, last = max((end, last), ((begin[0], begin[1] + tensors[place].nbytes), place))
    tree: dict[str, Any] = {}
    for place in tensors.keys() - shared:
        below = tree
        for name in place[:-1]:
            below = below.setdefault(name, {})
        below[place[-1]] = tensors[place].detach()
    return tree


def mismatches(model: nn.Module, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the differences between a state and a model: to refuse, and that it may accept.

    A model may load other names and shapes, by hooks or by methods of its modules. Whether it does, only loading shows.
    """
    mine = _state_by_name(model)
    attributes = parameters_of(model).keys() | {canonical_name(bare(model), n) for n, _ in bare(model).named_buffers()}
    other = [name for name in mine.keys() & saved.keys() - attributes if not is_extra(name)]
    unlike = [f"{n}: other values, which the model does not load" for n in other if not is_same(saved[n], mine[n])]
    return dtype_differences(saved, mine), differences(saved, mine) + unlike


def refuse(lines: Sequence[str], where: str) -> None:
    """Raise all mismatches as one error."""
    raise BadArgumentError(
        f"{where}: the checkpoint does not fit; nothing was changed. strict=False loads what does.\n  {listed(lines)}"
    )


def warn(lines: Sequence[str], where: str, stacklevel: int) -> None:
    """Warn of all mismatches at once."""
    if lines:
        message = f"{where}: not all of the checkpoint fits; what does not keeps its value:\n  {listed(lines)}"
        warnings.warn(message, StateMismatchWarning, stacklevel=stacklevel + 1)


def set_models(
    parts: Sequence[tuple[nn.Module, Mapping[str, Any]]],
    lines: Sequence[str],
    where: str,
    *,
    strict: bool,
    keep: Collection[str] = (),
) -> None:
    """Load saved states into models; with `strict` all or none.

    Under several processes rank 0 has the states and the others give empty ones.

    Args:
        parts: models and their states.
        lines: the differences that the models may accept (`mismatches`).
        where: what messages begin with.
        strict: False: what does not fit keeps its value.
        keep: names of parameters that the states lack because the model has their values.

    Raises:
        BadArgumentError: a model does not accept the differences.
    """
    states = []
    for model, saved in parts:
        mine = _state_by_name(model)
        sent, _ = broadcast_entries(saved, None, mine)
        state = {name: value for name, value in mine.items() if name in keep or not strict} | sent
        states.append((bare(model), {state_name(bare(model), name): value for name, value in state.items()}))
    if strict:
        load_states(states, lines, where)
        return
    for module, named in states:
        load_state(module, named)


def resized(model: nn.Module, saved: Mapping[str, Any]) -> set[str]:
    """Return the names of parameters whose shape differs in a saved state."""
    return {n for n, p in parameters_of(model).items() if hasattr(saved.get(n), "shape") and saved[n].shape != p.shape}
