"""Optimizer entries in every layout of optimizer states, and the arrays that they belong to.

torch, nested          optimizer/state/0/exp_avg, optimizer/state/fc.weight/exp_avg
torch, flattened       optimizer/state.fc.weight.exp_avg
Megatron               optimizer/optimizer.state.exp_avg.fc.weight
Optax                  opt_state/0/mu/dense/kernel
Keras and others       optimizer/dense/kernel/velocity

An entry belongs to an array by name where the entries have one. Where parameters are numbered it does by order, and
then only if number and shapes of all parameters agree: with the numbers of the optimizer's groups, or with all arrays
of two axes or more. A match with several candidates does not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from .kind import unwrapped
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
_OPTAX = {"mu", "nu", "trace"}
"""Optax's moments. Its other trees have names that other optimizers use with another meaning."""
_LETTERS = 2
"""A name with at most this number of letters is a moment's only below the number or the name of a parameter."""
_NUMBERED = re.compile(r"(^|/)(\d+|state/.+|state)$")
Shape = tuple[int, ...]


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

    @property
    def role(self) -> str:
        """Role by the entry's name: "first moment", "second moment", or "state".

        Example:
            >>> parse("optimizer/state/0/exp_avg_sq").role
            'second moment'
            >>> parse("optimizer/state/0/momentum_of_another_kind").role
            'state'
        """
        if self.is_tree and self.name not in _OPTAX:
            return "state"
        role = "first moment" if self.name in FIRST else "second moment" if self.name in SECOND else "state"
        short = len(self.name) <= _LETTERS and not self.parameter and not _NUMBERED.search(self.above)
        return "state" if short else role


@dataclass(slots=True)
class Outline:
    """The parameter groups of a state's optimizers in torch's layout, by the path of each.

    Args:
        orders: the parameters of the groups in order.
        settings: the names of the settings of the groups.
    """

    orders: dict[str, list[Any]] = field(default_factory=dict)
    settings: dict[str, set[str]] = field(default_factory=dict)

    @staticmethod
    def of(skeleton: Any) -> Outline:
        """Read the outline of a state.

        Args:
            skeleton: the tree, with anything in place of each array.
        """
        outline = Outline()
        root: _Link = (None, "")
        stack: list[tuple[_Link, Any]] = [(root, skeleton)]
        while stack:
            link, node = stack.pop()
            if isinstance(node, dict) and "param_groups" in node:
                groups = [group for group in _sequence(node["param_groups"]) if isinstance(group, dict)]
                outline.orders[_spell(link)] = [p for group in groups for p in _sequence(group.get("params", ()))]
                outline.settings[_spell(link)] = set().union(*groups) - _NO_SETTINGS
            children = node.items() if isinstance(node, dict) else enumerate(node)
            stack += [((link, key), value) for key, value in children if isinstance(value, dict | list | tuple)]
        return outline


_Link = tuple[Any, Any]
"""A container's place: the link of the container above it, and its key. Paths are only formed when needed."""


def _spell(link: _Link) -> str:
    parts = []
    while link[0] is not None:
        link, key = link
        parts.append(str(key))
    return "/".join(reversed(parts))


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


@dataclass(frozen=True, slots=True)
class Matches:
    """The parameters that the optimizers of a state train.

    Args:
        trained: number of each array that entries belong to -> owner of these entries.
        contradicted: owners whose parameter has another shape than the entries.
        complete: whether every optimizer's parameters were found, so that an array without entries is frozen.
    """

    trained: dict[int, tuple[str, str]]
    contradicted: set[tuple[str, str]]
    complete: bool


@dataclass(slots=True)
class _Optimizer:
    """The parameters of one optimizer, by number or name, in the order of the state.

    Args:
        path: of the optimizer.
        owners: of each parameter.
        shapes: that a parameter may have: its moments', else those of any of its entries.
    """

    path: str
    owners: dict[str, tuple[str, str]]
    shapes: dict[str, set[Shape]]

    def shape(self, parameter: str) -> Shape | None:
        """Return the shape of a parameter if all its entries agree on it, else None."""
        found = self.shapes[parameter]
        return next(iter(found)) if len(found) == 1 else None

    @property
    def is_numbered(self) -> bool:
        return all(_INDEX.fullmatch(parameter) for parameter in self.shapes)


def match(
    candidates: Mapping[int, tuple[str, Shape]], entries: Mapping[int, tuple[Entry, Shape]], outline: Outline
) -> Matches:
    """Match the entries of optimizers with the parameters they belong to.

    Args:
        candidates: path and shape of each array that may be a parameter.
        entries: entry and shape of each array below an optimizer.
        outline: of the state.
    """
    optimizers = _optimizers(entries)
    trained: dict[int, tuple[str, str]] = {}
    contradicted: set[tuple[str, str]] = set()
    claimed: Counter[int] = Counter()
    complete = True
    for optimizer in (o for o in optimizers if not o.is_numbered):
        found, wrong = _by_name(optimizer, candidates)
        contradicted |= {optimizer.owners[p] for p in wrong}
        complete &= len(found) == len(optimizer.shapes)
        claimed.update(found.values())
        trained |= {i: optimizer.owners[p] for p, i in found.items()}
    for i, owner in _by_order([o for o in optimizers if o.is_numbered], candidates, outline):
        claimed[i] += 1
        trained[i] = owner
    trained = {i: owner for i, owner in trained.items() if claimed[i] == 1}
    found_owners = set(trained.values())
    for one in (o for o in optimizers if o.is_numbered):
        matrices = [one.owners[p] for p, shapes in one.shapes.items() if max(map(len, shapes)) > 1]
        complete &= bool(matrices) and found_owners.issuperset(matrices)
    return Matches(trained, contradicted, complete)


def _optimizers(entries: Mapping[int, tuple[Entry, Shape]]) -> list[_Optimizer]:
    found: dict[str, _Optimizer] = {}
    of_moments: set[tuple[str, str]] = set()
    for entry, shape in entries.values():
        parameter = entry.parameter or entry.above.removeprefix(entry.optimizer).strip("/")
        if not shape or not parameter:
            continue
        one = found.setdefault(entry.optimizer, _Optimizer(entry.optimizer, {}, {}))
        one.owners.setdefault(parameter, entry.owner if entry.parameter else (entry.above, parameter))
        if entry.name in KNOWN and (entry.optimizer, parameter) not in of_moments:
            of_moments.add((entry.optimizer, parameter))
            one.shapes[parameter] = set()
        if entry.name in KNOWN or (entry.optimizer, parameter) not in of_moments:
            one.shapes.setdefault(parameter, set()).add(shape)
    return list(found.values())


def _plain(name: str) -> str:
    """Return a name with dots between all its parts, without the prefixes of wrappers."""
    return unwrapped(name.replace("/", "."))


def _by_name(optimizer: _Optimizer, candidates: Mapping[int, tuple[str, Shape]]) -> tuple[dict[str, int], list[str]]:
    """Return the array of each named parameter, and parameters found in other shapes only."""
    wanted = {_plain(parameter): parameter for parameter in optimizer.shapes}
    named: dict[str, list[int]] = {}
    for i, (path, _) in candidates.items():
        tail = _plain(path)
        while tail:
            if tail in wanted:
                named.setdefault(wanted[tail], []).append(i)
                break
            tail = tail.partition(".")[2]
    found, wrong = {}, []
    for parameter, numbers in named.items():
        fitting = [i for i in numbers if candidates[i][1] in optimizer.shapes[parameter]]
        if len(fitting) == 1:
            found[parameter] = fitting[0]
        elif not fitting:
            wrong.append(parameter)
    return found, wrong


def _by_order(
    optimizers: list[_Optimizer], candidates: Mapping[int, tuple[str, Shape]], outline: Outline
) -> Iterable[tuple[int, tuple[str, str]]]:
    """Yield numbered parameters' arrays, matched by one optimizer or several together."""
    left = []
    # The deepest first: what stands next to one of them is not trained by another one further up.
    for optimizer in sorted(optimizers, key=lambda one: -one.path.count("/")):
        trees = _trees(optimizer.path, candidates)
        own = [(m, tree) for tree in trees if (m := _fit([optimizer], tree, outline))]
        if len(own) == 1 and not _is_part_of_another(own[0][1], trees):
            yield from own[0][0]
            candidates = {i: candidate for i, candidate in candidates.items() if i not in own[0][1]}
        else:
            left.append(optimizer)
    if len(left) > 1:
        groups = _trees(left[0].path, candidates)
        fitting = [m for group in groups if (m := _fit(left, group, outline))]
        if len(fitting) == 1:
            yield from fitting[0]


def _is_part_of_another(group: Mapping[int, Shape], groups: list[dict[int, Shape]]) -> bool:
    """Return whether another tree holds arrays of these shapes, so that either may be trained.

    Their names say nothing: a list of gradients, or of Fisher matrices, has the shapes of the trained parameters.
    """

    def shapes(one: Mapping[int, Shape]) -> Counter[Shape]:
        return Counter(shape for shape in one.values() if len(shape) > 1)

    own = shapes(group)
    return any(not (group.keys() & other.keys()) and own <= shapes(other) for other in groups)


def _trees(optimizer: str, candidates: Mapping[int, tuple[str, Shape]]) -> list[dict[int, Shape]]:
    """Return the groups of arrays that an optimizer may train: pair subtrees, and all."""
    parts = optimizer.split("/") if optimizer else []
    while parts and _INDEX.fullmatch(parts[-1]):
        parts.pop()
    above = "/".join(parts[:-1])
    prefix = f"{above}/" if above else ""
    groups: dict[tuple[str, ...], dict[int, Shape]] = {}
    for i, (path, shape) in candidates.items():
        if not path.startswith(prefix):
            continue
        below = path.removeprefix(prefix).split("/")
        keys = {(), tuple(below[:1]) if len(below) > 1 else ("", "")}
        if len(below) > 2 and _INDEX.fullmatch(below[1]):
            keys.add(tuple(below[:2]))
        for key in keys:
            groups.setdefault(key, {})[i] = shape
    unique: list[dict[int, Shape]] = []
    for group in groups.values():
        if group not in unique:
            unique.append(group)
    return unique


def _agrees(shape: Shape, entries: set[Shape]) -> bool:
    """Return whether entries of these shapes fit a parameter: its shape, or its factors."""
    if shape in entries:
        return True
    try:
        return np.broadcast_shapes(*entries) == shape
    except ValueError:
        return False


def _fit(
    optimizers: Sequence[_Optimizer], group: Mapping[int, Shape], outline: Outline
) -> list[tuple[int, tuple[str, str]]]:
    """Return the owner of each array if number and shapes of all parameters agree, else nothing."""
    if len(optimizers) == 1 and (order := outline.orders.get(optimizers[0].path)):
        one, arrays = optimizers[0], list(group.items())
        if len(order) == len(arrays):
            pairs = [(i, shape, str(p)) for (i, shape), p in zip(arrays, order, strict=True)]
            if all(_agrees(shape, one.shapes.get(p, {shape})) for _, shape, p in pairs):
                return [(i, one.owners[p]) for i, _, p in pairs if p in one.shapes]
    # Arrays of one axis are exact in any case, so only the others must agree.
    arrays = [(i, shape) for i, shape in group.items() if len(shape) > 1]
    owners: dict[Shape, list[tuple[str, str]]] = {}
    for one in optimizers:
        for parameter in sorted(one.shapes, key=int):
            shape = one.shape(parameter)
            if shape is None:
                return []
            if len(shape) > 1:
                owners.setdefault(shape, []).append(one.owners[parameter])
    if not arrays or Counter(shape for _, shape in arrays) != Counter({s: len(o) for s, o in owners.items()}):
        return []
    return [(i, owners[shape].pop(0)) for i, shape in arrays]
