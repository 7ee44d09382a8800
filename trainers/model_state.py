"""State of a model by canonical names, under any parallelism.

The state is what the model's own `state_dict` gives, and its own `load_state_dict` loads it: modules may save and load
what no attribute shows. Names are those of the model without wrappers (`codec.evidence.module`). Under several
processes the whole state comes together on rank 0.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ..codec.evidence.module import bare, canonical_name, state_name
from ..codec.state.leaves import is_sharded
from ..kernels.backend.arrays import imported
from ..kernels.errors import BadArgumentError, ShrinkpointWarning
from .processes import broadcast_entries, rank, world
from .state import plain

Tree = TypeVar("Tree")
_LOAD = nn.Module.load_state_dict
_SHOWN = 20
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
    fsdp = imported("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
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
    return whole(plain({name: value for name, value in _state_by_name(model).items() if name not in without}))


def sharded(tree: Any, path: str) -> Iterator[str]:
    """Yield the paths of the DTensors in a tree, in the order of `whole`."""
    if is_sharded(tree):
        yield path
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from sharded(value, f"{path}/{key}")
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from sharded(value, f"{path}/{number}")


def whole(tree: Tree) -> Tree:
    """Return a tree with its DTensors whole, in the host memory of rank 0.

    In a single process it is the tree itself. Under several a collective, which all call with the same tree; what other
    ranks get is of no use.
    """

    def leaf(value: Any) -> Any:
        if not is_sharded(value):
            return value
        gathered = value.full_tensor()
        return gathered.cpu() if rank() == 0 else None

    found: Tree = plain(tree, leaf) if world() > 1 else tree
    return found


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


def refuse(lines: Sequence[str], where: str, hint: str = "") -> None:
    """Raise all mismatches as one error.

    Raises:
        BadArgumentError: there are such lines.
    """
    if lines:
        raise BadArgumentError(f"{where}: the checkpoint does not fit; nothing was changed{hint}\n  {listed(lines)}")


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
