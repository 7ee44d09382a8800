"""`Kind`: layer type and role of an array, look-up of kinds by path, and recorded reasons."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...kernels.backend.arguments import shown
from ..errors import BadArgumentError

LAYERS = ("linear", "convolution", "attention", "embedding", "norm", "bias", "other")
DECLARED = ("", "average", "master", "iterate")
ROLES = ("weight", "first moment", "second moment", "state")
TINY = 1024
"""Arrays with fewer elements are always exact."""
TINY_MOMENT = 64
"""Moments with fewer elements are always exact."""
WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "lightning.fabric.wrappers._FabricModule": "_forward_module",
    "lightning_fabric.wrappers._FabricModule": "_forward_module",
}
"""Class -> the attribute that holds the wrapped module. By name, since most of them are never imported.

A wrapper holds another module and changes how it runs: `torch.compile`, data parallelism, activation checkpointing. Its
attribute may stand in the names of parameters and of the state dict; in a canonical name it never does.
"""
_PREFIX = re.compile(rf"(^|[./])(?:(?:{'|'.join(sorted(set(WRAPPERS.values())))})\.)+")


@dataclass(frozen=True, slots=True)
class Kind:
    """The layer type and the role of an array.

    Args:
        layer: layer type of the array, or of the parameter that an optimizer entry belongs to; one of `LAYERS`.
            "other" is not known to be a layer.
        role: "weight", "first moment" or "second moment" of an optimizer, or "state": a frozen parameter, a buffer,
            an unknown entry of an optimizer, anything that must stay exact.
        parameter: name of the parameter, also of the one that an optimizer entry belongs to; None: not known.
        optimizer: class name of the optimizer; None: not known.
        rows: packed bits (uint8 NumPy, row i is bit i mod 8 of byte i div 8), 1 for each row that may have changed
            since the parent; None: not known. Comparing kinds ignores it.
        rows_since_base: `rows` for a parent that is a base; None: `rows` holds for any parent.
        shape: shape of the array; the kind holds for no array of another shape. None: any.
        declared: what the array is to the parameter of its name: an "average" of its values, its "master" in a wider
            dtype, or the "iterate" that a schedule-free optimizer keeps with it; "": the parameter itself, or another
            entry.
    """

    layer: str = "other"
    role: str = "weight"
    parameter: str | None = None
    optimizer: str | None = None
    rows: Any = field(default=None, compare=False, repr=False)
    rows_since_base: Any = field(default=None, compare=False, repr=False)
    shape: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    declared: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.layer, str) or self.layer not in LAYERS:
            raise BadArgumentError(f"kind {shown(self.layer)} is unknown; one of {', '.join(LAYERS)}")
        if not isinstance(self.role, str) or self.role not in ROLES:
            raise BadArgumentError(f"role {shown(self.role)} is unknown; one of {', '.join(ROLES)}")
        if not isinstance(self.declared, str) or self.declared not in DECLARED:
            raise BadArgumentError(f"declared is {shown(self.declared)}; one of {', '.join(DECLARED[1:])} or ''")
        for name in ("parameter", "optimizer"):
            text = getattr(self, name)
            if not isinstance(text, str | None):
                raise BadArgumentError(f"{name} is {shown(text)}; a string or None is needed")
        for name in ("rows", "rows_since_base"):
            bits = getattr(self, name)
            if bits is not None and not (isinstance(bits, np.ndarray) and bits.dtype == np.uint8 and bits.ndim == 1):
                raise BadArgumentError(f"{name} is {str(bits)[:60]}; it must be packed bits, uint8 NumPy of one axis")


def unwrapped(path: str) -> str:
    """Return a path without the attributes of wrappers, where only the names are known.

    Example:
        >>> unwrapped("model/module._orig_mod.0.weight"), unwrapped("module/0.weight")
        ('model/0.weight', 'module/0.weight')
    """
    return _PREFIX.sub(r"\1", path)


class Match(NamedTuple):
    """The entry of a table for a path.

    Args:
        key: the whole path, or its tail.
        value: the entry.
        above: what stands above the key in the path.
    """

    key: str
    value: Any
    above: str


def by_path(table: Mapping[str, Any], path: str) -> Match | None:
    """Return the entry for `path` or its longest tail, at last without wrappers' attributes.

    `model/fc.weight` and `model/module.fc.weight` find `fc.weight`.

    Example:
        >>> by_path({"fc.weight": "linear"}, "best/module.fc.weight")
        Match(key='fc.weight', value='linear', above='best/')
    """
    found = _by_tail(table, path)
    if found is None and (bare := unwrapped(path)) != path:
        found = _by_tail(table, bare)
    return found


def _by_tail(table: Mapping[str, Any], path: str) -> Match | None:
    start = 0
    while True:
        tail = path[start:]
        if tail in table:
            return Match(tail, table[tail], path[:start])
        cut = path.find("/", start)
        if cut < 0:
            return None
        start = cut + 1


def touched_rows(paths: Iterable[str], kinds: Mapping[str, Any] | None, over_base: bool) -> dict[str, Any]:
    """Return the known bits of rows that may have changed since the parent, by path.

    If several paths end in the same name, such as weights and an average of them, the bits are used for none of them,
    because the average changes in other rows.

    Args:
        paths: of all arrays.
        kinds: as given to `compress`.
        over_base: whether the parent is a base.
    """
    found = [(path, by_path(kinds, path)) for path in paths] if kinds else []
    matches = Counter(match.key for _, match in found if match is not None)
    table = {}
    for path, match in found:
        if match is None or matches[match.key] > 1 or not isinstance(match.value, Kind):
            continue
        kind = match.value
        bits = kind.rows_since_base if over_base and kind.rows_since_base is not None else kind.rows
        if bits is not None:
            table[path] = bits
    return table


def check_used(kinds: Mapping[str, Any] | None, paths: Sequence[str]) -> None:
    """Refuse kinds if none of their keys is the name of an array.

    They are of another state then, or named otherwise.

    Some keys may be without an array: `kinds(module, optimizer)` names every entry, and a state may hold fewer.

    Args:
        kinds: as given to `compress`.
        paths: of all arrays, also of the second names of tied ones.

    Raises:
        BadArgumentError: with some names of both.
    """
    if kinds and paths and not any(by_path(kinds, path) for path in paths):
        raise BadArgumentError(
            f"kinds: none of its {len(kinds)} paths ({_some(kinds)}) is that of an array of the state ({_some(paths)})"
        )


def kinds_for(kinds: Mapping[str, Any] | None, paths: Iterable[str]) -> dict[str, Any] | None:
    """Return the kinds that belong to some of the paths, for a part of a state.

    Example:
        >>> kinds_for({"fc.weight": "linear", "wte": "embedding"}, ["model/wte"])
        {'wte': 'embedding'}
    """
    if kinds is None:
        return None
    matches = (by_path(kinds, path) for path in paths)
    return {match.key: match.value for match in matches if match is not None}


def _some(names: Iterable[str]) -> str:
    first = [str(name)[:80] for _, name in zip(range(4), names, strict=False)]
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")


def check_kinds(kinds: Any) -> None:
    """Refuse anything but a mapping of paths to layer types or `Kind`s."""
    if kinds is None:
        return
    if not isinstance(kinds, Mapping):
        raise BadArgumentError(f"kinds must map paths to kinds, not be a {type(kinds).__qualname__}")
    for path, kind in kinds.items():
        if not isinstance(path, str):
            raise BadArgumentError(f"kinds: the path {path!r} is not a string")
        if isinstance(kind, str):
            if kind not in LAYERS:
                raise BadArgumentError(f"kinds: {path}: kind {kind!r} is unknown; one of {', '.join(LAYERS)}")
        elif not isinstance(kind, Kind):
            raise BadArgumentError(f"kinds: {path}: {kind!r} is neither a layer type nor a Kind")


NOTHING = "nothing says what it is"
UNMATCHED = "the optimizer's parameters could not be matched"
FROZEN = "frozen: no optimizer entry belongs to it"
UNKNOWN_ENTRY = "an optimizer entry that is not a known moment"
SEVERAL_TREES = "kinds fit several parts of the state: "
SHORT_RECORDS = "no layer's weights: less than 16 values in the second longest axis"
CODEBOOK = "the codebook of a vector quantizer"
TRAINED = "structure: an optimizer entry belongs to it"
NAMED = "name and shape of a layer's weights"
FIRST = "structure: first moment of an optimizer"
SECOND = "structure: second moment of an optimizer"

REASONS = (
    NOTHING,
    UNMATCHED,
    FROZEN,
    UNKNOWN_ENTRY,
    SHORT_RECORDS,
    CODEBOOK,
    TRAINED,
    NAMED,
    FIRST,
    SECOND,
    "kinds: linear",
    "kinds: convolution",
    "kinds: attention",
    "kinds: embedding",
    "kinds: norm",
    "kinds: bias",
    "kinds: other",
    "kinds: state",
    "kinds: first moment",
    "kinds: second moment",
    "exact: norm",
    "exact: bias",
    "exact: less than 1024 elements",
    "exact: less than 64 elements",
    "exact: an update subtracts the square of an average from it",
    "exact: it holds NaN",
    "exact: a second moment is never negative",
    "exact: its parameter has another shape",
    "exact: part of a tensor subclass",
    "exact: float64",
    "exact: int64",
    "exact: int32",
    "exact: uint8",
    "exact: bool",
    "rule '*'",
    "rule 'weight'",
    "rule 'first moment'",
    "rule 'second moment'",
    "rule 'embedding'",
)
"""The standard reasons; a file names one by its number here.

They are part of format version 1 and must not change: a file numbers its own texts from the end of this list, so a
longer list would change the reasons in older files.
"""
