"""Parameters: the arrays of a state that optimizer entries belong to.

By name where the entries have one. By order where parameters are numbered, and then only if number and shapes of all
parameters agree: with the numbers of the optimizer's groups, or with all arrays of two axes or more. A match with
several candidates does not count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .entries import KNOWN, Entry, Outline
from .module_names import unwrapped

_INDEX = re.compile(r"\d+")
Shape = tuple[int, ...]


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
