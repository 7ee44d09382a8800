"""State of a model by canonical names, under any parallelism.

The state is what the model's own `state_dict` gives, and its own `load_state_dict` loads it: modules may save and load
what no attribute shows. Names are those of the model without wrappers (`codec.evidence.module`). Under several
processes the whole state comes together on rank 0. Frozen parameters may be stored once, or named by reference; a hash
of them is in each checkpoint.
"""

from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import xxhash
from blake3 import blake3
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..codec.compress import compress
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointError, ShrinkpointWarning
from ..codec.evidence.module import bare, canonical_name, state_name
from ..codec.outputs import overlapping
from ..codec.presets import lossless
from ..codec.state.leaves import as_bytes, is_sharded, read_leaf
from ..kernels.backend.arrays import imported
from ..store.frozen_sets import Frozen
from ..store.store import Store
from .processes import broadcast_entries, on_all, on_rank_0, rank, world
from .state import plain, stored

Tree = TypeVar("Tree")
_LOAD = nn.Module.load_state_dict
_SHOWN = 20
_SMALL = 1 << 12
"""Bytes of a tensor up to which it is not decoded into: counters of steps, for example, which are read meanwhile."""
ONCE = "once"
_digests: Any = WeakIdKeyDictionary()
"""Parameter -> (XXH3 of the part in this process, BLAKE3 of the whole)."""


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

    found: Tree = stored(tree, leaf) if world() > 1 else tree
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
    tree: dict[str, Any] = {}
    for place in tensors.keys() - overlapping(tensors):
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


def check_frozen(frozen: Any) -> str | None:
    """Return the argument if it is None, "once" or the name of a source."""
    if frozen is not None and (not isinstance(frozen, str) or not frozen):
        raise BadArgumentError(
            f'frozen is {frozen!r}; it must be None, "once", or where the frozen parameters come from: a folder, or a '
            "hub model with its revision"
        )
    return frozen


def frozen_names(model: nn.Module) -> list[str]:
    """Return the canonical names of the parameters that do not require a gradient.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 1))
        >>> frozen_names(model)
        ['0.weight', '0.bias']
    """
    return [name for name, parameter in parameters_of(model).items() if not parameter.requires_grad]


def _parameters_named(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    table = parameters_of(model)
    missing = [name for name in names if name not in table]
    if missing:
        raise BadArgumentError(f"frozen: {missing[0]} and {len(missing) - 1} more are not parameters of the model")
    return {name: table[name] for name in names}


def frozen_digest(model: nn.Module, names: Sequence[str]) -> str:
    """Return the hash of parameters, "" on ranks other than 0; a collective.

    All bytes are read each time: writes through `.data` or NumPy change neither the version that PyTorch counts nor the
    address. XXH3 finds the changed parameters, at the speed of memory; only these are gathered and hashed by BLAKE3.

    Args:
        model: wrapped or not.
        names: of the bare model's parameters.
    """
    found = blake3()
    table = _parameters_named(model, names)
    keys = dict[int, str]()
    for name, parameter in table.items():
        if id(parameter) not in keys:
            keys[id(parameter)] = _fingerprint(parameter, name)
    # A rank may have a changed part of a sharded parameter where the others have not: all hash it then, or none.
    changed = sorted(name for name, p in table.items() if _digests.get(p, ("",))[0] != keys[id(p)])
    _, everywhere = on_all(lambda: changed, lambda found: found)
    to_hash = {id(table[name]) for one in everywhere for name in one}
    for name, parameter in table.items():
        if id(parameter) in to_hash:
            to_hash.remove(id(parameter))
            value = whole(parameter.detach())
            _digests[parameter] = keys[id(parameter)], _hash(value, blake3(), name) if rank() == 0 else ""
        found.update(json.dumps([name, _digests[parameter][1]]).encode())
    return found.hexdigest() if rank() == 0 else ""


def _fingerprint(tensor: Any, name: str) -> str:
    """Return the XXH3 of this process's part of a parameter; "-" if rank 0 hashes it."""
    if hasattr(tensor, "to_local"):
        return _hash(tensor.to_local(), xxhash.xxh3_128(), name)
    return _hash(tensor, xxhash.xxh3_128(), name) if rank() == 0 else "-"


def _hash(tensor: torch.Tensor, hasher: Any, name: str) -> str:
    spec, flat = read_leaf(tensor.detach(), name)
    hasher.update(json.dumps([spec.dtype, list(spec.shape)]).encode())
    hasher.update(as_bytes(flat).data)
    return str(hasher.hexdigest())


def _digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return what `frozen_digest` returns for a model with these parameters."""
    found = blake3()
    for name, tensor in tensors.items():
        found.update(json.dumps([name, _hash(tensor, blake3(), name)]).encode())
    return str(found.hexdigest())


def frozen_record(model: nn.Module, frozen: str | None) -> Frozen | None:
    """Return the record of a model's frozen parameters; None: they belong to each step."""
    names = [] if check_frozen(frozen) is None else frozen_names(model)
    if not names:
        return None
    return Frozen(tuple(names), frozen_digest(model, names), None if frozen == ONCE else frozen)


def store_once(store: Store, model: nn.Module, found: Frozen | None) -> None:
    """Store frozen parameters unless the run's store has them; a collective.

    Raises:
        ShrinkpointError: they were changed meanwhile, by another thread.
    """
    if found is None or found.source is not None:
        return
    sets = store.frozen_sets
    if on_rank_0(lambda: sets.mark(found.digest), "the frozen parameters were not stored"):
        return
    tensors = {name: whole(value.detach()) for name, value in _parameters_named(model, found.names).items()}

    def write() -> None:
        ckpt = compress({"model": tensors}, cfg=lossless())
        if _digest_of_tensors(tensors) != found.digest:
            raise ShrinkpointError("the frozen parameters were changed while they were saved")
        sets.put(found.digest, ckpt)

    on_rank_0(write, "the frozen parameters were not stored")


def load_frozen(store: Store, found: Frozen) -> dict[str, Any]:
    """Return the stored frozen parameters of a checkpoint.

    Raises:
        MissingParentError: the store does not have them, or they are named by reference.
        CorruptDataError: the stored ones are others.
    """
    if found.source is not None:
        raise MissingParentError(
            f"the frozen parameters of the model are not those of the checkpoint: build the model from {found.source} "
            f"(hash {found.digest[:16]})"
        )
    sets = store.frozen_sets
    loaded: dict[str, Any] = sets.load(found.digest)["model"]
    if loaded.keys() != set(found.names) or _digest_of_tensors({n: loaded[n] for n in found.names}) != found.digest:
        raise CorruptDataError(f"{sets.files.root}: the frozen parameters under {found.digest[:16]} have another hash")
    return loaded


def without_frozen(state: Mapping[str, Any], found: Frozen | None) -> dict[str, Any]:
    """Return a model's state dict without its frozen parameters."""
    names = () if found is None else set(found.names)
    return {name: value for name, value in state.items() if name not in names}
