"""Frozen parameters: stored once or named by reference, and verified by a hash."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import xxhash
from blake3 import blake3
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..codec.compress import compress
from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError, ShrinkpointError
from ..codec.presets import lossless
from ..codec.state.leaves import as_bytes, read_leaf
from ..store.frozen_sets import Frozen
from ..store.store import Store
from .model_state import parameters_of, whole
from .processes import on_all, on_rank_0, rank

ONCE = "once"
_digests: Any = WeakIdKeyDictionary()
"""Parameter -> (XXH3 of the part in this process, BLAKE3 of the whole)."""


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


def _parameters(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    table = parameters_of(model)
    missing = [name for name in names if name not in table]
    if missing:
        raise BadArgumentError(f"frozen: {missing[0]} and {len(missing) - 1} more are not parameters of the model")
    return {name: table[name].detach() for name in names}


def digest_of(model: nn.Module, names: Sequence[str]) -> str:
    """Return the hash of parameters, "" on ranks other than 0; a collective.

    All bytes are read each time: writes through `.data` or NumPy change neither the version that PyTorch counts nor the
    address. XXH3 finds the changed parameters, at the speed of memory; only these are gathered and hashed by BLAKE3.

    Args:
        model: wrapped or not.
        names: of the bare model's parameters.
    """
    found = blake3()
    table = parameters_of(model)
    here = _parameters(model, names)
    keys = {id(table[name]): "" for name in names}
    for name in names:
        if not keys[id(table[name])]:
            keys[id(table[name])] = _fingerprint(here[name], name)
    # A rank may have a changed part of a sharded parameter where the others have not: all hash it then, or none.
    changed = sorted(name for name in names if _digests.get(table[name], ("",))[0] != keys[id(table[name])])
    _, everywhere = on_all(lambda: changed, lambda found: found)
    to_hash = {id(table[name]) for one in everywhere for name in one}
    for name in names:
        key = id(table[name])
        if key in to_hash:
            to_hash.remove(key)
            value = whole(here[name])
            _digests[table[name]] = keys[key], _hash(value, blake3(), name) if rank() == 0 else ""
        found.update(json.dumps([name, _digests[table[name]][1]]).encode())
    return found.hexdigest() if rank() == 0 else ""


def _fingerprint(tensor: Any, name: str) -> str:
    """Return the XXH3 of this process's part of a parameter; "-" if rank 0 hashes it."""
    if hasattr(tensor, "to_local"):
        return _hash(tensor.to_local(), xxhash.xxh3_128(), name)
    return _hash(tensor, xxhash.xxh3_128(), name) if rank() == 0 else "-"


def _hash(tensor: torch.Tensor, hasher: Any, name: str) -> str:
    spec, flat = read_leaf(tensor, name)
    hasher.update(json.dumps([spec.dtype, list(spec.shape)]).encode())
    hasher.update(as_bytes(flat).data)
    return str(hasher.hexdigest())


def _digest_of_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return what `digest_of` returns for a model with these parameters."""
    found = blake3()
    for name, tensor in tensors.items():
        found.update(json.dumps([name, _hash(tensor, blake3(), name)]).encode())
    return str(found.hexdigest())


def record(model: nn.Module, frozen: str | None) -> Frozen | None:
    """Return the record of a model's frozen parameters; None: they belong to each step."""
    names = [] if check_frozen(frozen) is None else frozen_names(model)
    if not names:
        return None
    return Frozen(tuple(names), digest_of(model, names), None if frozen == ONCE else frozen)


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
    tensors = {name: whole(value) for name, value in _parameters(model, found.names).items()}

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


def without(state: Mapping[str, Any], found: Frozen | None) -> dict[str, Any]:
    """Return a model's state dict without its frozen parameters."""
    names = () if found is None else set(found.names)
    return {name: value for name, value in state.items() if name not in names}
