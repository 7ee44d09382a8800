"""The path of an entry in a rank's container, and the kind of array it is.

A rank's container is an ordinary checkpoint of a nested dict. The entry `optim.state.fc.weight.exp_avg`, which the
planner flattened from the path `("optim", "state", "fc.weight", "exp_avg")`, is at that path again, so that rules,
kinds and the pairing of moments see the same paths as in a state that was never distributed. Keys that begin with "@"
are the container's own: "@values" holds values other than tensors, "@1", "@2", ... the second and later shards of an
entry.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...codec.errors import BadArgumentError, UnsupportedLeafError
from ...codec.evidence.kind import Kind, by_path, check_used, kinds_for
from ...codec.state.leaves import is_array
from ...codec.state.tree import flatten

Place = tuple[str, ...]
VALUES = "@values"
_SURROGATE = re.compile("[\ud800-\udfff]")
_FLATTENED = re.compile(r"(?:([^.]*optim[^.]*)\.)?state\.(.+)\.([^.]+)", re.IGNORECASE)
"""An optimizer entry whose path was flattened (`StateDictOptions(flatten_optimizer_state_dict=True)`)."""
_BY_ENTRY = re.compile(r"(?:([^.]*optim[^.]*)\.)?state\.(exp_avg_sq|exp_avg|momentum_buffer|fp32_param)\.(.+)")
"""The same with the entry first, as Megatron-Core names them."""


def place(fqn: str, path: Sequence[str | int] | None) -> Place:
    """Return the keys of an entry's shard in the container's tree.

    Args:
        fqn: fully qualified name of the entry.
        path: its path in the nested state if the planner gives it; None: the state was flat.

    Example:
        >>> place("optim.state.fc.weight.exp_avg", ["optim", "state", "fc.weight", "exp_avg"])
        ('optim', 'state', 'fc.weight', 'exp_avg')
        >>> place("optim.state.fc.weight.exp_avg", None)
        ('optim', 'state', 'fc.weight', 'exp_avg')
        >>> place("optimizer.state.exp_avg.fc.weight", None)
        ('optimizer', 'state', 'fc.weight', 'exp_avg')
    """
    keys = [str(key) for key in path] if path else [fqn]
    by_entry = _BY_ENTRY.fullmatch(keys[-1])
    match = by_entry or _FLATTENED.fullmatch(keys[-1])
    if match:
        owner, parameter, entry = match.group(1, 3, 2) if by_entry else match.groups()
        keys[-1:] = [*([owner] if owner else []), "state", parameter, entry]
    if keys[0].startswith("@"):
        keys[0] = "@" + keys[0]
    return tuple(keys)


def key_of(keys: Sequence[str]) -> str:
    """Return the codec's unique key of a place (`ArrayRecord.key`)."""
    return "\x1f".join(json.dumps(key) for key in keys)


def numbered(keys: Place, ordinal: int) -> Place:
    """Return the place of an entry's shard number `ordinal` in one container."""
    return (f"@{ordinal}", *keys) if ordinal else keys


def insert(tree: dict[str, Any], keys: Place, value: Any, fqn: str) -> None:
    """Put a value into nested dicts.

    Raises:
        BadArgumentError: another entry stands there, above or below it.
        UnsupportedLeafError: a name is not a string.
    """
    if any(_SURROGATE.search(key) for key in keys):
        raise UnsupportedLeafError(f"{fqn!a}: a name with lone surrogates cannot be stored")
    node: Any = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise BadArgumentError(f"{fqn}: another entry stands at {'/'.join(keys)} or above it; rename one of them")
    if keys[-1] in node:
        raise BadArgumentError(f"{fqn}: another entry stands at {'/'.join(keys)} or below it; rename one of them")
    node[keys[-1]] = value


def kinds_of(shards: Mapping[Place, Any], values: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the kinds for `compress`: the given ones, and those that paths do not show.

    Optimizer entries other than known moments are exact, however their names were flattened; so are arrays inside of
    values that are not tensors.

    Args:
        shards: tensors by place.
        values: values that are not tensors, by fully qualified name.
        given: `{path: layer type or Kind}`, as `shrinkpoint.kinds` gives it.

    Raises:
        UnsupportedLeafError: a distributed tensor inside of another value, where ranks cannot be distinguished.
    """
    # A rank holds shards of some arrays only, and `compress` refuses kinds that fit no array. Shards have own shapes.
    table = {path: _of_shard(kind) for path, kind in (kinds_for(given, map("/".join, shards)) or {}).items()}
    for node in flatten({VALUES: dict(values)}, is_array)[1]:
        if hasattr(node.value, "device_mesh"):
            raise UnsupportedLeafError(f"{node.path}: a DTensor inside of a tuple or list of values; put it in a dict")
        table[node.path] = Kind("other", "state")
    return table


def check_named(given: Mapping[str, Any] | None, names: Iterable[str]) -> None:
    """Raise BadArgumentError if no key of the kinds is the path of a tensor of any rank.

    Only planners know where a name is to be cut into keys, so that dots and slashes are one here.

    Args:
        given: as for `kinds_of`.
        names: the fully qualified names of all ranks' tensors.

    Raises:
        BadArgumentError: with some of both, see `check_used`.
    """
    paths = ["/".join(place(fqn, None)) for fqn in names]
    table = {path.replace(".", "/"): kind for path, kind in (given or {}).items()}
    if not any(by_path(table, path.replace(".", "/")) for path in paths):
        check_used(given, paths)


def _of_shard(kind: Any) -> Any:
    return replace(kind, shape=None) if isinstance(kind, Kind) else kind
