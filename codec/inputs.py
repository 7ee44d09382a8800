"""The arguments of `compress`, flattened and checked against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..kernels.backend.arguments import check_field, number, or_none
from .base import Array
from .checkpoint import Checkpoint, check_resolved
from .errors import BadArgumentError, UnsupportedLeafError
from .evidence.gather import Evidence
from .evidence.kind import Match, by_path, check_kinds, check_used, kinds_for
from .state import tree
from .state.leaves import is_array, is_stored_as_array, tie


@dataclass(frozen=True, slots=True)
class PastWeights:
    """Weights of an earlier time and their distance in steps, for `compress(earlier=)`.

    Args:
        weights: a tree with the keys of the weights (or the tails of their paths), any float dtype.
        steps: optimizer steps from these weights to those of the state, > 0; for a slow average, their mean. None
            (default): unknown, so that the loss of first moments is not compensated.

    Raises:
        BadArgumentError: `steps` is out of range.

    Example:
        >>> import numpy as np
        >>> PastWeights({"w": np.zeros((64, 64))}, steps=100).steps
        100.0
    """

    weights: Any
    steps: float | None = None

    @staticmethod
    def of(given: Any) -> PastWeights:
        """Return the argument `earlier` as `PastWeights`; a tree of weights gets no steps."""
        return given if isinstance(given, PastWeights) else PastWeights(given)

    def __post_init__(self) -> None:
        check_field(self, "steps", or_none, number, 0, math.inf, open_low=True, open_high=True)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of `compress` without the configuration, flattened.

    Args:
        nodes: the tree in preorder; array nodes refer to `arrays`.
        arrays: every array once, tied ones too.
        prev: the parent, resolved, or None.
        kinds: as given.
        grads: gradients by path.
        past_weights: earlier values of the weights by path; None: not given.
        named: every name of an array, tied ones too; empty in a part.
        evidence: of each array, if it was gathered before, maybe from a larger state; None: not gathered yet.
        is_whole: whether this is the caller's whole state. In a part, rules without a match cause no warning.
    """

    nodes: list[Any]
    arrays: list[tree.ArrayNode]
    prev: Checkpoint | None
    kinds: Mapping[str, Any] | None
    grads: dict[str, Array]
    past_weights: PastWeights | None
    named: Sequence[tree.ArrayNode] = ()
    evidence: Sequence[Evidence] | None = None
    is_whole: bool = True

    @staticmethod
    def of(
        state: Any, prev: Checkpoint | None, kinds: Mapping[str, Any] | None, grads: Any = None, earlier: Any = None
    ) -> Inputs:
        """Check and flatten the arguments of `compress`."""
        if prev is not None:
            check_resolved(prev)
        check_kinds(kinds)
        nodes, found = tree.flatten(state, is_stored_as_array)
        tied, arrays = tie(nodes, found)
        check_used(kinds, [node.path for node in found])
        gradients = by_weights(grads, found, "grads")
        if earlier is not None:
            before = PastWeights.of(earlier)
            earlier = PastWeights(by_weights(before.weights, found, "earlier"), before.steps)
        return Inputs(tied, arrays, prev, kinds, gradients, earlier, found)

    def part(self, numbers: Sequence[int]) -> Inputs:
        """Return the inputs with only some of the arrays; evidence is that of the whole state.

        Args:
            numbers: of the arrays, ascending.
        """
        place = {number: at for at, number in enumerate(numbers)}
        nodes = [_renumbered(node, place) for node in self.nodes]
        arrays = [self.arrays[i] for i in numbers]
        kinds = kinds_for(self.kinds, (node.path for node in arrays))
        evidence = None if self.evidence is None else [self.evidence[i] for i in numbers]
        return replace(self, nodes=nodes, arrays=arrays, kinds=kinds, named=(), evidence=evidence, is_whole=False)


def _renumbered(node: Any, place: Mapping[int, int]) -> Any:
    if not (isinstance(node, dict) and "a" in node):
        return node
    return {"a": place[node["a"]]} if node["a"] in place else None


def by_weights(given: Any, found: list[tree.ArrayNode], name: str) -> dict[str, Any]:
    """Return the arrays of a tree that is given along with the weights, by path.

    Each must belong to an array of the state, if only to the second name of a tied one. An entry that is the whole
    path of an array is for that one, and for no other whose tail it is.

    Args:
        given: the tree, or None.
        found: the arrays of the state.
        name: of the argument.
    """
    if given is None:
        return {}
    try:
        _, arrays = tree.flatten(given, is_array, name=name)
    except UnsupportedLeafError as e:
        raise UnsupportedLeafError(f"{name}/{e}") from None
    table = {a.path: a.value for a in arrays}
    entry = entries(table, found)
    used = {match.key for match in (entry(node.path) for node in found) if match is not None}
    for path in table:
        if path not in used:
            raise BadArgumentError(f"{name}/{path}: the state has no such weight")
    return table


def entries(table: dict[str, Any], found: list[tree.ArrayNode]) -> Callable[[str], Match | None]:
    """Return a look-up by path.

    It finds the entry of the path, else that of the path's longest tail that is not the path of an array.
    """
    others = {path: table[path] for path in table.keys() - {node.path for node in found}}
    return lambda path: Match(path, table[path], "") if path in table else by_path(others, path) if others else None
