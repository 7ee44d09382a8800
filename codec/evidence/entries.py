"""Optimizer entries: the parameter and role of each, in every layout of optimizer states.

torch, nested          optimizer/state/0/exp_avg, optimizer/state/fc.weight/exp_avg
torch, flattened       optimizer/state.fc.weight.exp_avg
Megatron               optimizer/optimizer.state.exp_avg.fc.weight
Optax                  opt_state/0/mu/dense/kernel
Keras and others       optimizer/dense/kernel/velocity
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .names import FIRST, OPTIMIZER, SECOND

KNOWN = FIRST | SECOND | {"max_exp_avg_sq", "exp_inf"}
"""Names of optimizer entries. Maxima (AMSGrad, Adamax) are not moments: later steps do not mend their errors."""
_UNMISTAKABLE = KNOWN - {"momentum", "trace", "mu", "m", "nu", "v"}
"""Names that only optimizers use. A velocity, a mass or the values of a cache may be called by the others."""
_FLAT = re.compile(r"(?:(?P<above>.*)\.)?state\.(?P<rest>.+\..+)")
_INDEX = re.compile(r"\d+")
_ADAM = ("exp_avg", "exp_avg_sq")
_COUNTS = {"step", "count", "iteration", "iterations"}
_NO_SETTINGS = {"params", "param_names", "name"}


class Entry(NamedTuple):
    """An array that an optimizer keeps for a parameter.

    Args:
        optimizer: path of the optimizer.
        above: what stands above the names of parameter and entry; of one optimizer's chained parts it differs.
        parameter: number or name of the parameter.
        name: of the entry: "exp_avg".
        is_tree: whether the optimizer keeps a tree of all parameters for each entry, as Optax does.
        is_update: whether it is a first moment m and m / sqrt(v) of its second moment v is proven to be the update.
    """

    optimizer: str
    above: str
    parameter: str
    name: str
    is_tree: bool = False
    is_update: bool = False

    @property
    def owner(self) -> tuple[str, str]:
        """Key that all entries of one parameter share."""
        return self.above, self.parameter


@dataclass(slots=True)
class Outline:
    """The structure of a state's containers, without its arrays.

    Args:
        orders: for each path of an optimizer in torch's layout, the parameters of its groups in order.
        settings: for the same paths, the names of the settings of its groups.
        averages: what the paths in averages of a model begin with.
        mixed: paths of the containers that also hold plain scalars, or are not dicts with text as keys.
    """

    orders: dict[str, list[Any]] = field(default_factory=dict)
    settings: dict[str, set[str]] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)
    averages: tuple[str, ...] = ()

    @staticmethod
    def of(skeleton: Any) -> Outline:
        """Read the outline of a state.

        Args:
            skeleton: the tree, with `ARRAY` in place of each array.
        """
        outline = Outline()
        root: _Link = (None, "")
        stack: list[tuple[_Link, Any]] = [(root, skeleton)]
        while stack:
            link, node = stack.pop()
            named = isinstance(node, dict)
            children = list(node.items() if named else enumerate(node))
            arrays = sum(value is ARRAY for _, value in children)
            nested = [((link, key), value) for key, value in children if isinstance(value, dict | list | tuple)]
            plain = named and len(children) == arrays + len(nested) and all(isinstance(key, str) for key, _ in children)
            if arrays and not plain:
                outline.mixed.add(_spell(link))
            if named and "param_groups" in node:
                groups = [group for group in _sequence(node["param_groups"]) if isinstance(group, dict)]
                outline.orders[_spell(link)] = [p for group in groups for p in _sequence(group.get("params", ()))]
                outline.settings[_spell(link)] = set().union(*groups) - _NO_SETTINGS
            stack += nested
        return outline


_Link = tuple[Any, Any]
"""A container's place: the link of the container above it, and its key. Paths are only formed when needed."""


def _spell(link: _Link) -> str:
    parts = []
    while link[0] is not None:
        link, key = link
        parts.append(str(key))
    return "/".join(reversed(parts))


ARRAY = object()
"""Placeholder of an array in a skeleton."""


def _sequence(value: Any) -> Any:
    return value if isinstance(value, list | tuple) else ()


def entries_of(paths: Sequence[str], outline: Outline) -> list[Entry | None]:
    """Return the entry at each path; None outside of optimizers.

    Args:
        paths: of all arrays.
        outline: of the same state.

    Example:
        >>> paths = ["optimizer/state/0/exp_avg_sq", "opt_state/0/nu/dense/kernel", "model/fc.weight"]
        >>> [entry and entry.parameter for entry in entries_of(paths, Outline())]
        ['0', 'dense/kernel', None]
    """
    optimizers = outline.orders.keys()
    found = [parse(path, optimizers) for path in paths]
    held = set(paths)
    names: dict[tuple[str, str], set[str]] = {}
    for entry in found:
        if entry is not None:
            names.setdefault(entry.owner, set()).add(entry.name)
    for i, entry in enumerate(found):
        # A `mu` below a number alone may be a layer, and without a count of steps next to it another optimizer's (SM3).
        if entry is None or entry.name not in ("mu", "nu") or not entry.is_tree:
            continue
        if f"{entry.above}/count".lstrip("/") in held:
            continue
        if not entry.optimizer:
            found[i] = None
        elif entry.name == "mu" and "nu" not in names[entry.owner]:
            above, _, name = paths[i].rpartition("/")
            found[i] = Entry(entry.optimizer, above, "", name)
    tails = _tails(path for path, entry in zip(paths, found, strict=True) if entry is None)
    for i, entry in enumerate(found):
        if entry is not None and entry.optimizer and not entry.parameter:
            found[i] = _of_tree(paths[i].split("/"), entry, tails)
    for i, path in enumerate(paths):
        # Adam's two entries side by side need no optimizer's key above them.
        above, _, name = path.rpartition("/")
        if found[i] is None and name in _ADAM and all(f"{above}/{other}" in held for other in _ADAM):
            optimizer, _, parameter = above.rpartition("/")
            found[i] = Entry(optimizer, optimizer, parameter, name)
    return found


def _tails(paths: Iterable[str]) -> set[str]:
    """Return all paths and their tails: the path without its first keys."""
    found = set()
    for path in paths:
        found.add(path)
        while "/" in path:
            path = path.partition("/")[2]
            found.add(path)
    return found


def _of_tree(parts: list[str], entry: Entry, tails: set[str]) -> Entry:
    """Return the entry with the parameter whose path ends as the entry's path does."""
    if parts[-1] in _COUNTS:
        return entry
    for at in range(entry.optimizer.count("/") + 2, len(parts)):
        if (parameter := "/".join(parts[at:])) in tails:
            return Entry(entry.optimizer, "/".join(parts[: at - 1]), parameter, parts[at - 1], is_tree=True)
    return entry


def parse(path: str, optimizers: Collection[str] = ()) -> Entry | None:
    """Return the entry at a path, by the path alone.

    Args:
        path: of the array.
        optimizers: paths that are known to be optimizers in torch's layout.

    Example:
        >>> parse("optimizer/state.fc.weight.exp_avg")[:4]
        ('optimizer', 'optimizer/state', 'fc.weight', 'exp_avg')
        >>> parse("model/fc.weight")
    """
    parts = path.split("/")
    root = _root(parts)
    for at, part in enumerate(parts[:-2]):
        if part == "state" and (entry := _nested(parts, at, root, optimizers)) is not None:
            return entry
    flat = _FLAT.fullmatch(parts[-1])
    if flat is not None and (entry := _flattened(parts, flat, root, optimizers)) is not None:
        return entry
    for at, part in enumerate(parts[:-1]):
        if part in ("mu", "nu") and (root or any(_INDEX.fullmatch(p) for p in parts[:at])):
            return Entry(root, "/".join(parts[:at]), "/".join(parts[at + 1 :]), part, is_tree=True)
    if root and path != root:
        return Entry(root, "/".join(parts[:-1]), "", parts[-1])
    return None


def _root(parts: list[str]) -> str:
    """Return the path of the optimizer above an entry, with its numbers; "" without one."""
    for at in range(len(parts) - 1):
        if OPTIMIZER.match("/".join(parts[at:])):
            end = at + 1
            while end < len(parts) - 2 and _INDEX.fullmatch(parts[end]) and parts[end + 1] == "state":
                end += 1
            return "/".join(parts[:end])
    return ""


def _nested(parts: list[str], at: int, root: str, optimizers: Collection[str]) -> Entry | None:
    above, below = "/".join(parts[:at]), parts[at + 1 :]
    where = "/".join(parts[: at + 1])
    if below[0] in KNOWN and root:
        return Entry(above, where, "/".join(below[1:]), below[0])
    # A number or a name with dots is a complete parameter name, and the rest is an entry that is a container.
    whole = below[0].isdigit() or "." in below[0]
    parameter, name = (below[0], "/".join(below[1:])) if whole else ("/".join(below[:-1]), below[-1])
    if root or above in optimizers or name in _UNMISTAKABLE:
        return Entry(above, where, parameter, name)
    return None


def _flattened(parts: list[str], flat: re.Match[str], root: str, optimizers: Collection[str]) -> Entry | None:
    folder = "/".join(parts[:-1])
    above = flat["above"] or ""
    optimizer = "/".join(p for p in (folder, above) if p)
    where = f"{optimizer}/state".lstrip("/")
    head, _, tail = flat["rest"].partition(".")
    known = root or optimizer in optimizers or (above and OPTIMIZER.match(above.rpartition(".")[2]))
    if head in KNOWN and known:
        return Entry(optimizer, where, tail, head)
    parameter, _, name = flat["rest"].rpartition(".")
    return Entry(optimizer, where, parameter, name) if known or name in _UNMISTAKABLE else None
