"""What an array is: layer type and role, from `kinds=` where given, else from names and shapes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...kernels.arguments import shown
from ..errors import BadArgumentError

if TYPE_CHECKING:
    from .leaves import LeafSpec

LAYERS = ("linear", "convolution", "attention", "embedding", "norm", "bias", "other")
ROLES = ("weight", "first moment", "second moment", "state")
TINY = 1024
"""Weights with fewer elements are always exact."""
TINY_MOMENT = 64
"""So are moments with fewer: those of norms and biases follow the moment codec."""

_FIRST = {"exp_avg", "momentum_buffer", "momentum", "exp_avg_slow", "exp_inf", "mu", "m"}
"""Averages in the unit of a gradient or an update; Adamax's `exp_inf` is one, for it is no square."""
_SECOND = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "nu", "v"}
_SUBTRACTED = {"grad_avg", "average_gradient", "average_grad", "mean_grad", "mg"}
"""Averages of the gradient whose square an update takes from the second moment beside them, before it takes a root."""
_WORDS = {"momentum"}
"""Moments' names that are also words: they are one where an optimizer stands above them."""
_BESIDE = {("exp_avg", "exp_avg_sq"), ("exp_avg", "max_exp_avg_sq"), ("mu", "nu"), ("m", "v")}
"""First and second moments whose update is the one over the root of the other: Adam's, by whatever name."""
_ADAMS = {"adam", "adamw", "nadam", "radam", "lamb"}
"""Optimizers, by class name in lower case, of whose moments that is so whatever the moments are called."""
_OTHER_UNITS = {"Adafactor", "CAME"}
"""Optimizers that call an average of the update, already divided by the root, `exp_avg`."""
_NORM = re.compile(r"(^|[._/])(\w*norm\w*|ln|ln_?\w|bn|bn\d+|running_mean|running_var)([._/]|$)", re.IGNORECASE)
_EMBEDDING = re.compile(r"(^|[._/])(\w*emb\w*|wte|wpe|tok\w*)([._/]|$)", re.IGNORECASE)
_ATTENTION = re.compile(r"(^|[._/])(\w*attn\w*|\w*attention\w*|[qkvo]_proj|qkv\w*|in_proj\w*)([._/]|$)", re.IGNORECASE)


_BIAS = re.compile(r"(^|_)bias(_|$)")
_OPTIMIZER = (
    r"(?:[^/]*optim(?:i[sz]er)?s?|(?:[^/]*[^/a-z])?opt|optax)(?:_?states?)?"
    r"(?:[^/a-z][^/]*|(?-i:[A-Z])(?:[^/a-z][^/]*)?)?"
)
"""A key that an optimizer stands below: "opt", "optG", "optimisers", "my_optimizer_0", "optax_state"; not "optical"."""
_OWNER = re.compile(
    rf"(^|/)(state/[^/]+|(?!opt/(.*/)?(layers?|blocks?)/){_OPTIMIZER}/(.*/)?\d+)$",
    re.IGNORECASE,
)
"""Where a name of a letter or two is an optimizer's, and not a value projection's (also of a model called "opt")."""
_BELOW = re.compile(rf"(^|/)((?:[^/]*_)?states?|{_OPTIMIZER})/", re.IGNORECASE)
_ENTRY = re.compile(r"(^|/)state/\d+/|optim[^/]*/(.*/)?state/[^/]+/", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Kind:
    """What an array is.

    Args:
        layer: layer type of the array, or of the parameter an optimizer entry belongs to; one of `LAYERS`.
        role: "weight", "first moment" or "second moment" of an optimizer, or "state" (everything else).
        parameter: name of the parameter that an optimizer entry belongs to, where known.
        optimizer: class name of the optimizer, where known.
        rows: packed bits (uint8 NumPy, row i is bit i mod 8 of byte i div 8), 1 for each row that may have changed
            since the parent; None: not known. It is no part of what the array is: kinds compare equal whatever it is.
        rows_since_base: the same since the parent, where that is a base; None: `rows` is for any parent.
    """

    layer: str = "other"
    role: str = "weight"
    parameter: str | None = None
    optimizer: str | None = None
    rows: Any = field(default=None, compare=False, repr=False)
    rows_since_base: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.layer, str) or self.layer not in LAYERS:
            raise BadArgumentError(f"kind {shown(self.layer)} is unknown; one of {', '.join(LAYERS)}")
        if not isinstance(self.role, str) or self.role not in ROLES:
            raise BadArgumentError(f"role {shown(self.role)} is unknown; one of {', '.join(ROLES)}")
        for name in ("parameter", "optimizer"):
            text = getattr(self, name)
            if not isinstance(text, str | None):
                raise BadArgumentError(f"{name} is {shown(text)}; a string or None is needed")
        for name in ("rows", "rows_since_base"):
            bits = getattr(self, name)
            if bits is not None and not (isinstance(bits, np.ndarray) and bits.dtype == np.uint8 and bits.ndim == 1):
                raise BadArgumentError(f"{name} is {str(bits)[:60]}; it must be packed bits, uint8 NumPy of one axis")


def by_path(table: Mapping[str, Any], path: str) -> tuple[str, Any] | None:
    """The entry for `path`: its own, else that of the longest tail of it (`model/fc.weight` finds `fc.weight`)."""
    tail = path
    while True:
        if tail in table:
            return tail, table[tail]
        cut = tail.find("/")
        if cut < 0:
            return None
        tail = tail[cut + 1 :]


class MomentPlace(NamedTuple):
    """Where a moment stands: its path taken apart at its name.

    Args:
        above: what stands above the name.
        name: the moment's.
        below: the parameter, where the optimizer keeps a tree of parameters for each moment, as Optax does; else "".
    """

    above: str
    name: str
    below: str

    @property
    def owner(self) -> tuple[str, str]:
        """What the moments of one parameter have in common."""
        return self.above, self.below


def moment_place(path: str) -> MomentPlace:
    """The place of a moment with this path.

    Example:
        >>> moment_place("optimizer/state/0/exp_avg_sq")
        MomentPlace(above='optimizer/state/0', name='exp_avg_sq', below='')
        >>> moment_place("opt_state/0/nu/dense/kernel").owner
        ('opt_state/0', 'dense/kernel')
    """
    parts = path.split("/")
    for at, part in enumerate(parts[:-1]):
        if part in ("mu", "nu") and any(p.isdigit() for p in parts[:at]):
            return MomentPlace("/".join(parts[:at]), part, "/".join(parts[at + 1 :]))
    return MomentPlace("/".join(parts[:-1]), parts[-1], "")


def role_of(path: str) -> str:
    """The role of an array, as its path tells it."""
    above, last, below = moment_place(path)
    if below:
        return "first moment" if last == "mu" else "second moment"
    if above:
        where = _BELOW.search(path) if last in _WORDS else _OWNER.search(above)
        known = where is not None or (len(last) > 2 and last not in _WORDS)
        if last in _SECOND and known:
            return "second moment"
        if last in _FIRST and known:
            return "first moment"
    # An optimizer's entry that is no known moment: never lossy by guess.
    return "state" if _ENTRY.search(path) else "weight"


def no_moments(paths: Sequence[str], kinds_of_them: Sequence[Kind], negative: Callable[[int], bool]) -> list[int]:
    """Numbers of the arrays of which only a name of a letter or two makes moments, and that are none by their values.

    A second moment is nowhere negative. With what is none goes the first moment beside it.

    Args:
        paths: of all arrays.
        kinds_of_them: their kinds.
        negative: whether the array of a number has a negative value; asked of few.
    """
    short = {i: moment_place(path) for i, path in enumerate(paths) if len(moment_place(path).name) <= 2}
    known = {i: place for i, place in short.items() if kinds_of_them[i].role.endswith("moment")}
    seconds = [i for i in known if kinds_of_them[i].role == "second moment" and negative(i)]
    owners = {known[i].owner for i in seconds}
    return seconds + [i for i in known if kinds_of_them[i].role == "first moment" and known[i].owner in owners]


def unowned(paths: Sequence[str], kinds_of_them: Sequence[Kind]) -> dict[int, str]:
    """Roles of the arrays below a `mu` or `nu` that nothing but this name makes moments.

    What makes them moments is an optimizer's key above, a `count` beside (of steps, as Optax's Adam has it), or the
    other one of the two beside, with an array of the same name. A `mu` without any of these is a layer's name, and its
    arrays are weights; a `nu` may be Optax's `scale_by_rms`, so it is never lossy by guess.

    Args:
        paths: of all arrays.
        kinds_of_them: their kinds.

    Returns:
        {number: role}, of those arrays only.

    Example:
        >>> paths = ["0/mu/kernel", "1/0/mu/kernel", "1/0/nu/kernel"]
        >>> unowned(paths, [Kind(role=role_of(path)) for path in paths])
        {0: 'weight'}
    """
    places = [moment_place(path) for path in paths]
    held = set(paths)
    names: dict[tuple[str, str], set[str]] = {}
    for place in places:
        names.setdefault(place.owner, set()).add(place.name)
    found = {}
    for i, place in enumerate(places):
        if not place.below or not kinds_of_them[i].role.endswith("moment"):
            continue
        if _BELOW.search(f"{place.above}/") or f"{place.above}/count" in held or {"mu", "nu"} <= names[place.owner]:
            continue
        found[i] = "weight" if place.name == "mu" else "state"
    return found


def without_root(path: str, kind: Kind) -> Kind:
    """The kind of an array that is no moment though its name is: a weight; below an optimizer, never lossy by guess."""
    return replace(kind, role="state" if _BELOW.search(path) else "weight")


def subtracted(paths: Sequence[str], kinds_of_them: Sequence[Kind], variance: Callable[[int, int], bool]) -> list[int]:
    """Numbers of the second moments, and of the averages beside them, of which an update is made by `sqrt(v - m**2)`.

    An error in either of them can make that the root of a negative number, so both are kept to the bit. They are told
    by the name of the average (centered RMSprop of torch, timm, Keras); in Optax's `scale_by_stddev`, whose names are
    Adam's, by that there is no `count` beside and that `v >= m**2` holds everywhere: it would be NaN already.

    Args:
        paths: of all arrays.
        kinds_of_them: their kinds.
        variance: whether `v >= m**2` holds for the arrays of two numbers, v and m; asked of few.
    """
    places = [moment_place(path) for path in paths]
    below = [_BELOW.search(path) is not None for path in paths]
    averages = {
        place.owner for place, optimizers in zip(places, below, strict=True) if optimizers and place.name in _SUBTRACTED
    }
    seconds: dict[tuple[str, str], list[int]] = {}
    for j, place in enumerate(places):
        role = kinds_of_them[j].role
        # Beside such an average everything but a first moment may be it, by whatever name.
        if role == "second moment" or (below[j] and role != "first moment" and place.owner in averages):
            seconds.setdefault(place.owner, []).append(j)
    found: set[int] = set()
    groups: dict[str, list[tuple[int, int]]] = {}
    for i, place in enumerate(places):
        beside = seconds.get(place.owner, [])
        if beside and place.name in _SUBTRACTED:
            found.update(beside, [i])
        elif place.name == "mu" and kinds_of_them[i].optimizer is None:
            groups.setdefault(place.above, []).extend((j, i) for j in beside if places[j].name == "nu")
    held = set(paths)
    for above, pairs in groups.items():
        if f"{above}/count".lstrip("/") not in held and all(variance(j, i) for j, i in pairs):
            found.update(*pairs)
    return sorted(found)


def is_update(first: str, kind: Kind, second: str) -> bool:
    """Whether a first moment over the root of the second one beside it is the optimizer's update.

    Args:
        first: path of the first moment.
        kind: its kind.
        second: path of the second moment.
    """
    if kind.optimizer is not None and kind.optimizer.lower() in _ADAMS:
        return True
    names = moment_place(first).name, moment_place(second).name
    return names in _BESIDE and kind.optimizer not in _OTHER_UNITS


def guess(path: str, spec: LeafSpec) -> Kind:
    """The kind of an array by its name and shape alone."""
    role = role_of(path)
    dims = len(spec.shape)
    last = re.split(r"[./]", path)[-1]
    layer = "other"
    if _NORM.search(path):
        layer = "norm"
    elif _BIAS.search(last):
        layer = "bias"
    elif dims <= 1 and last in ("weight", "gamma", "beta", "scale", "g") and spec.size <= 8 * TINY:
        layer = "norm"
    elif _EMBEDDING.search(path) and dims == 2:
        layer = "embedding"
    elif _ATTENTION.search(path) and dims >= 2:
        layer = "attention"
    elif dims >= 3:
        layer = "convolution"
    elif dims == 2:
        layer = "linear"
    return Kind(layer, role)


def kinds_of(paths: Sequence[str], specs: Sequence[LeafSpec], kinds: Mapping[str, Any] | None) -> list[Kind]:
    """The kind given for each path, else the guess.

    Arrays of several models may end in one name: a copy of each weight, of which the same is true, or other layers
    altogether. Where they differ in their number of axes, the layer type is guessed for all of them.

    Args:
        paths: of all arrays.
        specs: of the same arrays.
        kinds: as given to `compress`.
    """
    given = [by_path(kinds, path) if kinds else None for path in paths]
    axes: dict[str, set[int]] = {}
    for match, spec in zip(given, specs, strict=True):
        if match is not None:
            axes.setdefault(match[0], set()).add(len(spec.shape))
    found = []
    for path, spec, match in zip(paths, specs, given, strict=True):
        if match is None:
            found.append(guess(path, spec))
            continue
        kind = match[1] if isinstance(match[1], Kind) else Kind(match[1], role_of(path))
        found.append(replace(kind, layer=guess(path, spec).layer) if len(axes[match[0]]) > 1 else kind)
    return found


def touched_rows(paths: Iterable[str], kinds: Mapping[str, Any] | None, over_base: bool) -> dict[str, Any]:
    """Packed bits of the rows that may have changed since the parent, by path, where that is known.

    Rows are known of one array only: where several paths end in the same name (the weights, and an average of them kept
    beside, which changes in rows of its own), they are known of none.

    Args:
        paths: of all arrays.
        kinds: as given to `compress`.
        over_base: whether the parent is a base.
    """
    found = [(path, by_path(kinds, path)) for path in paths] if kinds else []
    matches = Counter(match[0] for _, match in found if match is not None)
    table: dict[str, Any] = {}
    for path, match in found:
        if match is None or matches[match[0]] > 1 or not isinstance(match[1], Kind):
            continue
        kind = match[1]
        bits = kind.rows_since_base if over_base and kind.rows_since_base is not None else kind.rows
        if bits is not None:
            table[path] = bits
    return table


def check_used(kinds: Mapping[str, Any] | None, paths: Sequence[str]) -> None:
    """Refuse kinds of which no key is the name of an array: then they are of another state, or named otherwise.

    Some may have none: `kinds(module, optimizer)` names every entry, and a state need not hold them all.

    Args:
        kinds: as given to `compress`.
        paths: of all arrays, also of the second names of tied ones.

    Raises:
        BadArgumentError: with some of both names.
    """
    if kinds and paths and not any(by_path(kinds, path) for path in paths):
        raise BadArgumentError(
            f"kinds: none of its {len(kinds)} paths ({_some(kinds)}) is that of an array of the state ({_some(paths)})"
        )


def kinds_for(kinds: Mapping[str, Any] | None, paths: Iterable[str]) -> dict[str, Any] | None:
    """Of `kinds` what belongs to some of the paths: for a part of a state, of which `check_used` would refuse the rest.

    Example:
        >>> kinds_for({"fc.weight": "linear", "wte": "embedding"}, ["model/wte"])
        {'wte': 'embedding'}
    """
    if kinds is None:
        return None
    matches = (by_path(kinds, path) for path in paths)
    return {match[0]: match[1] for match in matches if match is not None}


def _some(names: Iterable[str]) -> str:
    first = [str(name)[:80] for _, name in zip(range(4), names, strict=False)]
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")


def check_kinds(kinds: Any) -> None:
    """Refuse what is no mapping of paths to kinds."""
    if kinds is None:
        return
    if not isinstance(kinds, Mapping):
        raise BadArgumentError(f"kinds must map paths to kinds, not be a {type(kinds).__qualname__}")
    for path, kind in kinds.items():
        if not isinstance(path, str):
            raise BadArgumentError(f"kinds: the path {path!r} is no string")
        if isinstance(kind, str):
            if kind not in LAYERS:
                raise BadArgumentError(f"kinds: {path}: kind {kind!r} is unknown; one of {', '.join(LAYERS)}")
        elif not isinstance(kind, Kind):
            raise BadArgumentError(f"kinds: {path}: {kind!r} is neither a layer type nor a Kind")


def _layer_of_module(module: Any, name: str, parameter: Any) -> str:
    import torch.nn as nn

    if _BIAS.search(name.rpartition(".")[2]):
        return "bias"
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return "embedding"
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolution"
    if "norm" in type(module).__name__.lower() or isinstance(module, nn.modules.batchnorm._NormBase):
        return "norm"
    if isinstance(module, nn.Linear):
        return "linear"
    return "norm" if parameter.ndim <= 1 and parameter.numel() <= 8 * TINY else "other"


def kinds(module: Any = None, optimizer: Any = None) -> dict[str, Kind]:
    """Kinds of a module's parameters and buffers, and of an optimizer's state, by their names in a state dict.

    The keys are the paths *inside* the state dicts (`fc.weight`, `state/0/exp_avg`); `compress` matches them with the
    tails of a state's own paths, so they fit whatever the state is nested in.

    Args:
        module: a `torch.nn.Module`, or None.
        optimizer: a `torch.optim.Optimizer`, or None.

    Returns:
        `{path: Kind}`, for `compress(..., kinds=)`, `search` and `Store.save`.

    Raises:
        BadArgumentError: what was given is no module or no optimizer.

    Example:
        >>> import torch
        >>> sp_kinds = kinds(torch.nn.Linear(4, 4))
        >>> sp_kinds["weight"].layer
        'linear'
    """
    for what, given, needed in (("module", module, "named_modules"), ("optimizer", optimizer, "param_groups")):
        if given is not None and not hasattr(given, needed):
            raise BadArgumentError(f"{what} is a {type(given).__qualname__}, which has no {needed}")
    table: dict[str, Kind] = {}
    names: dict[int, str] = {}
    if module is not None:
        for prefix, sub in module.named_modules():
            for short, parameter in sub.named_parameters(recurse=False):
                name = f"{prefix}.{short}" if prefix else short
                layer = _layer_of_module(sub, short, parameter)
                if layer == "linear" and _ATTENTION.search(name):
                    layer = "attention"
                table[name] = Kind(layer, "weight", name)
                names.setdefault(id(parameter), name)  # of tied names the first, as in a checkpoint
            for short, _ in sub.named_buffers(recurse=False):
                name = f"{prefix}.{short}" if prefix else short
                table[name] = Kind("norm" if _NORM.search(name) else "other", "state", name)
    if optimizer is not None:
        owner = type(optimizer).__name__
        number = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names.get(id(parameter))
                layer = table[name].layer if name is not None else "other"
                for entry, value in optimizer.state.get(parameter, {}).items():
                    role = role_of(f"state/{number}/{entry}") if getattr(value, "ndim", 0) else "state"
                    if role == "weight":
                        role = "state"
                    kind = Kind(layer, role, name, owner)
                    table[f"state/{number}/{entry}"] = kind
                    if name is not None:
                        table[f"state/{name}/{entry}"] = kind
                number += 1
    return table
