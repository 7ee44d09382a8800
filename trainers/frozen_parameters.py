"""Frozen parameters: stored once or named by reference, and verified by a hash."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ..codec.errors import BadArgumentError, CorruptDataError, MissingParentError
from ..codec.presets import lossless
from ..codec.state.leaves import as_bytes, read_leaf
from ..store.frozen_sets import FOLDER, tag_of
from ..store.store import Store
from .model_state import parameters_of, whole
from .processes import on_all, on_rank_0, rank

ONCE = "once"
_MARK_EVERY = 3600.0
_marked: dict[tuple[str, str], float] = {}
"""(Store, tag) -> when this process marked that set as used: `gc` must not remove it before the step is committed."""
_digests: Any = WeakIdKeyDictionary()
"""Parameter -> (version, address, hash): a frozen parameter is hashed once."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """The record of frozen parameters in a checkpoint.

    Args:
        names: of the parameters, in the order of the model.
        digest: BLAKE3 of their names, dtypes, shapes and bytes.
        source: where they come from, as the user named it (a folder, or a hub model with its revision); None: they are
            stored in the folder `frozen` of the store.
    """

    names: tuple[str, ...]
    digest: str
    source: str | None

    def to_tree(self) -> dict[str, Any]:
        """Return the record as it is stored."""
        return {"names": list(self.names), "digest": self.digest, "source": self.source}

    @staticmethod
    def of_tree(tree: Any) -> Frozen | None:
        """Return the record in a stored tree, or None; CorruptDataError if it is malformed."""
        found = tree.get("frozen") if isinstance(tree, Mapping) else None
        if found is None:
            return None
        if not isinstance(found, Mapping) or not {"names", "digest", "source"} <= found.keys():
            raise CorruptDataError("frozen: malformed record of frozen parameters")
        return Frozen(tuple(found["names"]), str(found["digest"]), found["source"])


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

    Args:
        model: wrapped or not.
        names: of the bare model's parameters.
    """
    found = blake3()
    table = parameters_of(model)
    here = _parameters(model, names)
    keys = {name: (table[name]._version, _address(here[name])) for name in names}
    known = {name: _digests.get(table[name]) for name in names}
    # A rank may have a changed part of a sharded parameter where the others have not: all hash it then, or none.
    changed = {name for name in names if known[name] is None or known[name][0] != keys[name]}
    _, everywhere = on_all(lambda: sorted(changed), lambda found: found)
    for name in names:
        if any(name in one for one in everywhere):
            value = whole(here[name])
            _digests[table[name]] = keys[name], _hash(value) if rank() == 0 else ""
        found.update(json.dumps([name, _digests[table[name]][1]]).encode())
    return found.hexdigest() if rank() == 0 else ""


def _address(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.data_ptr())


def _hash(tensor: torch.Tensor) -> str:
    spec, flat = read_leaf(tensor, "")
    found = blake3(json.dumps([spec.dtype, list(spec.shape)]).encode())
    found.update(as_bytes(flat).data)
    return str(found.hexdigest())


def record(model: nn.Module, frozen: str | None) -> Frozen | None:
    """Return the record of a model's frozen parameters; None: they belong to each step."""
    names = [] if check_frozen(frozen) is None else frozen_names(model)
    if not names:
        return None
    return Frozen(tuple(names), digest_of(model, names), None if frozen == ONCE else frozen)


def frozen_store(store: Store) -> Store:
    """Return the lossless store of a run's frozen parameters, in the folder `frozen`."""
    return Store(f"{store.url.rstrip('/')}/{FOLDER}", lossless())


def store_once(store: Store, model: nn.Module, found: Frozen) -> None:
    """Store frozen parameters unless the run's store has them; a collective."""
    if found.source is not None:
        return

    def is_there() -> bool:
        target = frozen_store(store)
        step = target.tags().get(tag_of(found.digest))
        if step is None:
            return False
        if time.monotonic() - _marked.get((target.url, tag_of(found.digest)), -math.inf) > _MARK_EVERY:
            try:
                mark(target, step)
            except BadArgumentError:  # `gc` has removed it since it was listed
                return False
        return True

    def mark(target: Store, step: int) -> None:
        """Write the tag again, so that its age is the time since the last use."""
        target.tag(tag_of(found.digest), step)
        _marked[target.url, tag_of(found.digest)] = time.monotonic()

    if on_rank_0(is_there, lambda there: there, "the frozen parameters were not stored"):
        return
    tensors = {name: whole(value) for name, value in _parameters(model, found.names).items()}

    def write() -> None:
        target = frozen_store(store)
        saved = target.save(max(target.steps(), default=-1) + 1, {"model": tensors})
        mark(target, saved.step)

    on_rank_0(write, lambda _: None, "the frozen parameters were not stored")


def load_frozen(store: Store, found: Frozen) -> dict[str, Any]:
    """Return the stored frozen parameters of a checkpoint.

    Raises:
        MissingParentError: the store does not have them, or they are named by reference.
    """
    if found.source is not None:
        raise MissingParentError(
            f"the frozen parameters of the model are not those of the checkpoint: build the model from {found.source} "
            f"(hash {found.digest[:16]})"
        )
    source = frozen_store(store)
    if tag_of(found.digest) not in source.tags():
        raise MissingParentError(f"{source.url}: the frozen parameters with hash {found.digest[:16]} are gone")
    loaded: dict[str, Any] = source.load(tag_of(found.digest))["model"]
    return loaded


def without(state: Mapping[str, Any], found: Frozen | None) -> dict[str, Any]:
    """Return a model's state dict without its frozen parameters."""
    names = () if found is None else set(found.names)
    return {name: value for name, value in state.items() if name not in names}
