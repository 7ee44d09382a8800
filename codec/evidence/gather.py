"""Evidence of all arrays of a state, gathered once for all that use it.

An array may be stored with loss only if one of these shows its kind, in this order: a rule of the user that names it
by path (`codec.config`), `kinds=`, or the structure of the state (an optimizer's entry belongs to it). Everything else
is exact.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels.backend.floats import FORMATS
from ..state import tree
from ..state.leaves import SCALARS, SEQUENCES, LeafSpec, build_leaf
from . import names, reasons
from .entries import ARRAY, Entry, Outline, entries_of
from .kind import TINY, TINY_MOMENT, Kind, by_path, tree_of
from .moments import role_of, updates
from .parameters import Matches, match
from .values import Arrays, contradicted

_RANKS = re.compile(r"(^|/)ranks/\d+/")
"""The part of a path that names a rank."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The role of an array, and the source of that knowledge.

    Args:
        kind: layer type and role. Without evidence the role is "state".
        source: "kinds", "structure", "name", or "" without evidence.
        why: the evidence, or the reason for exact storage, in a few words for the summary.
        is_bound: whether the array stays exact even if a rule names it.
        is_unknown: whether it is exact only because it has no evidence.
        entry: the optimizer entry that the array is, or None.
    """

    kind: Kind
    source: str = ""
    why: str = ""
    is_bound: bool = False
    is_unknown: bool = False
    entry: Entry | None = None

    @property
    def may_be_lossy(self) -> bool:
        """Return whether the array may change without a rule that names it by path."""
        return bool(self.source) and not self.is_bound and self.kind.role != "state"


def gather(nodes: list[Any], arrays: Arrays, kinds: Mapping[str, Any] | None) -> list[Evidence]:
    """Return the evidence of each array.

    Args:
        nodes: the tree in preorder, as `state.tree.flatten` gives it.
        arrays: of the tree.
        kinds: as given to `compress`.
    """
    lists = {i for i, spec in enumerate(arrays.specs) if spec.library in SEQUENCES}
    outline = Outline.of(
        tree.unflatten(nodes, lambda i, _: build_leaf(arrays.flats[i], arrays.specs[i]) if i in lists else ARRAY)
    )
    outline.averages = names.averaged_prefixes(arrays.paths)
    entries = {
        i: entry for i, entry in enumerate(entries_of(arrays.paths, outline)) if entry is not None and i not in lists
    }
    given, others = _given(arrays, entries, kinds, outline)
    for i, kind in enumerate(given):
        if kind is not None and kind.role == "weight":
            entries.pop(i, None)
        elif kind is not None and kind.role.endswith("moment") and i not in entries:
            above, _, name = arrays.paths[i].rpartition("/")
            entries[i] = Entry("", above, "", name)
    shapes = [spec.shape for spec in arrays.specs]
    roles = {i: _role(entry, shapes[i], given[i]) for i, entry in entries.items()}
    declared = {i for i, kind in enumerate(given) if kind is not None and kind.declared}
    parameters = {i: p for i, p in _parameters(arrays, entries, outline).items() if i not in declared}
    matches = match(parameters, {i: (entry, shapes[i]) for i, entry in sorted(entries.items())}, outline)
    classes = {i: None if (kind := given[i]) is None else kind.optimizer for i in entries}
    for i in updates(entries, roles, shapes, classes, outline.settings):
        entries[i] = entries[i]._replace(is_update=True)
    spoilt = contradicted(arrays, entries, roles, matches)
    has_optimizer = any(shapes[i] for i in entries)
    found = []
    for i, (path, spec) in enumerate(zip(arrays.paths, arrays.specs, strict=True)):
        kind = given[i]
        if i in others:
            evidence = others[i]
        elif i in entries:
            evidence = _of_entry(path, spec, entries[i], roles[i], kind)
        elif kind is not None and (kind.role == "state" or kind.layer != "other"):
            what = kind.declared or (kind.layer if kind.role == "weight" else kind.role)
            evidence = Evidence(kind, "kinds", f"kinds: {what}")
        else:
            evidence = _of_parameter(i, path, spec, matches, has_optimizer, outline)
        evidence = dataclasses.replace(evidence, entry=entries.get(i))
        found.append(_bound(evidence, spec, "part of a tensor subclass" if arrays.held[i] else spoilt.get(i, "")))
    return found


def _role(entry: Entry, shape: tuple[int, ...], kind: Kind | None) -> str:
    if kind is not None:
        return kind.role
    return role_of(entry) if shape else "state"


def _given(
    arrays: Arrays, entries: Mapping[int, Entry], kinds: Mapping[str, Any] | None, outline: Outline
) -> tuple[list[Kind | None], dict[int, Evidence]]:
    """Return the kind that `kinds=` gives each array, and the evidence of other trees' arrays.

    Several arrays may end in one name, such as copies of weights or layers of another model. Where a kind gives no
    shape and their numbers of axes differ, the name is ambiguous, and only an array whose whole path is that name gets
    the kind.
    """
    if not kinds:
        return [None] * len(arrays.paths), {}
    found = [by_path(kinds, path) for path in arrays.paths]
    for i, entry in entries.items():
        # A flattened entry's path has no tail of the form that `kinds` uses.
        nested = f"state/{entry.parameter}/{entry.name}"
        if found[i] is None and nested in kinds:
            found[i] = nested, kinds[nested]
    axes: dict[str, set[int]] = {}
    for match_, spec in zip(found, arrays.specs, strict=True):
        if match_ is not None and getattr(match_[1], "shape", None) is None:
            axes.setdefault(match_[0], set()).add(len(spec.shape))
    given = [
        None if m is None or (len(axes.get(m[0], ())) > 1 and m[0] != path) else _fitting(m, path, spec, outline)
        for m, path, spec in zip(found, arrays.paths, arrays.specs, strict=True)
    ]
    weights = {
        i: m[0]
        for i, (m, kind) in enumerate(zip(found, given, strict=True))
        if m is not None and kind is not None and kind.role == "weight" and not kind.declared and i not in entries
    }
    others = _of_other_trees(weights, arrays, entries, outline) | _ambiguous(found, given, arrays)
    others |= _of_other_shapes(found, arrays)
    return [None if i in others else kind for i, kind in enumerate(given)], others


def _ambiguous(
    found: Sequence[tuple[str, Any] | None], given: Sequence[Kind | None], arrays: Arrays
) -> dict[int, Evidence]:
    """Return the evidence of arrays that share the key of an average, a master or an iterate."""
    of_key: dict[str, list[int]] = {}
    for i, (m, kind) in enumerate(zip(found, given, strict=True)):
        if m is not None and kind is not None and kind.declared and arrays.paths[i] != m[0]:
            of_key.setdefault(m[0], []).append(i)
    whole = {m[0] for i, m in enumerate(found) if m is not None and arrays.paths[i] == m[0]}
    return {
        i: Evidence(
            Kind(names.layer_of(arrays.paths[i], arrays.specs[i]), "state"),
            "",
            reasons.SEVERAL_TREES + ", ".join(sorted(tree_of(arrays.paths[j], key) for j in numbers)),
            is_unknown=True,
        )
        for key, numbers in of_key.items()
        if len(numbers) > 1 or key in whole
        for i in numbers
    }


def _of_other_shapes(found: Sequence[tuple[str, Any] | None], arrays: Arrays) -> dict[int, Evidence]:
    """Return the evidence of moments, averages and masters of another shape than in `kinds`."""
    fitting = {m[0] for m, spec in zip(found, arrays.specs, strict=True) if m is not None and _has_shape(m[1], spec)}
    others = {}
    for i, (m, spec) in enumerate(zip(found, arrays.specs, strict=True)):
        if m is None or m[0] in fitting or not spec.shape or not isinstance(m[1], Kind):
            continue
        if m[1].declared or m[1].role.endswith("moment"):
            layer = names.layer_of(arrays.paths[i], spec)
            others[i] = Evidence(Kind(layer, "state"), "", f"kinds: its shape was {m[1].shape}")
    return others


def _has_shape(kind: Any, spec: LeafSpec) -> bool:
    return not isinstance(kind, Kind) or kind.shape is None or kind.shape == spec.shape


def _of_other_trees(
    weights: Mapping[int, str], arrays: Arrays, entries: Mapping[int, Entry], outline: Outline
) -> dict[int, Evidence]:
    """Return the evidence of arrays with a weight's name that are not in the tree of `kinds=`.

    Kinds were made from one tree, and a state may hold several with the same names: the model, an earlier one, masters,
    accumulated gradients. The tree is the one whose whole paths the kinds name, else the one that optimizer entries
    belong to, else the only one at the root that is called as a model is. If none of these says it, all of them stay
    exact.

    Args:
        weights: key in the kinds of each weight that they name, by number.
        arrays: of the state.
        entries: of optimizers, by number.
        outline: of the state.
    """
    trees = {i: _RANKS.sub(r"\1", tree_of(arrays.paths[i], key)) for i, key in weights.items()}
    of_key: dict[str, set[str]] = {}
    for i, key in weights.items():
        of_key.setdefault(key, set()).add(trees[i])
    if all(len(found) == 1 for found in of_key.values()):
        return {}
    shapes = [spec.shape for spec in arrays.specs]
    parameters = _parameters(arrays, entries, outline)
    trained = match(parameters, {i: (entry, shapes[i]) for i, entry in sorted(entries.items())}, outline).trained
    supported = {trees[i] for i in weights.keys() & trained.keys()}
    kept_of = {key: _kept(found, supported) for key, found in of_key.items()}
    kept_of_any = set[str]().union(*kept_of.values())
    # Another tree stays one for the names that it alone has.
    other = set[str]().union(*of_key.values()) - kept_of_any
    others = {}
    for i, key in weights.items():
        if trees[i] in kept_of[key] or (len(of_key[key]) == 1 and trees[i] not in other):
            continue
        state = Kind(names.layer_of(arrays.paths[i], arrays.specs[i]), "state")
        kept = kept_of[key] if len(of_key[key]) > 1 else kept_of_any
        if kept:
            why = f"kinds are those of {' and '.join(sorted(kept))}"
        else:
            why = reasons.SEVERAL_TREES + ", ".join(sorted(of_key[key]))
        others[i] = Evidence(state, "", why, is_unknown=not kept)
    return others


def _kept(found: set[str], supported: set[str]) -> set[str]:
    """Return which of several trees with one name the kinds are of; empty if unknown or one."""
    if len(found) == 1:
        return set()
    models = {tree for tree in found if names.is_model(tree)}
    return found & {""} or found & supported or (models if len(models) == 1 else set())


def _fitting(found: tuple[str, Any], path: str, spec: LeafSpec, outline: Outline) -> Kind | None:
    key, value = found
    if not isinstance(value, Kind):
        (entry,) = entries_of([path], Outline())
        return Kind(value, "weight" if entry is None else role_of(entry))
    if value.shape is not None and value.shape != spec.shape:
        return None
    # A tail of a path is not the path: elsewhere in the state the same name may be that of another thing.
    elsewhere = key != path and (
        names.is_other_part(path) or (value.role == "weight" and not value.declared and _is_average(path, outline))
    )
    return None if elsewhere else value


def _is_average(path: str, outline: Outline) -> bool:
    return names.is_average(path) or path.startswith(outline.averages)


def _parameters(
    arrays: Arrays, entries: Mapping[int, Entry], outline: Outline
) -> dict[int, tuple[str, tuple[int, ...]]]:
    """Return path and shape of each array that may be a parameter, by number."""
    found = {}
    for i, (path, spec) in enumerate(zip(arrays.paths, arrays.specs, strict=True)):
        statistics = names.last_name(path) in ("running_mean", "running_var")
        elsewhere = names.is_other_part(path) or _is_average(path, outline)
        if not (i in entries or spec.dtype not in FORMATS or statistics or elsewhere or arrays.held[i]):
            found[i] = path, spec.shape
    return found


def _of_entry(path: str, spec: LeafSpec, entry: Entry, role: str, kind: Kind | None) -> Evidence:
    if kind is not None:
        return Evidence(dataclasses.replace(kind, shape=None), "kinds", f"kinds: {role}")
    layer = names.layer_of(path, spec)
    if role == "state":
        return Evidence(Kind(layer, role, entry.parameter or None), "", reasons.UNKNOWN_ENTRY)
    why = reasons.FIRST if role == "first moment" else reasons.SECOND
    return Evidence(Kind(layer, role, _name(entry)), "structure", why)


def _name(entry: Entry) -> str | None:
    return None if entry.parameter.isdigit() or not entry.parameter else entry.parameter


def _of_parameter(
    i: int, path: str, spec: LeafSpec, matches: Matches, has_optimizer: bool, outline: Outline
) -> Evidence:
    layer = names.layer_of(path, spec)
    state = Kind(layer, "state")
    if i in matches.trained:
        if not (names.has_weight_name(path) or names.could_be_matrix(spec)):
            return Evidence(state, "", reasons.SHORT_RECORDS)
        if names.is_codebook(path):
            return Evidence(state, "", reasons.CODEBOOK)
        owner = matches.trained[i][1]
        name = None if owner.isdigit() else owner
        return Evidence(Kind(layer, "weight", name), "structure", reasons.TRAINED)
    if has_optimizer:
        return (
            Evidence(state, "", reasons.FROZEN)
            if matches.complete
            else Evidence(state, "", reasons.UNMATCHED, is_unknown=True)
        )
    elsewhere = names.is_other_part(path) or _is_average(path, outline)
    return Evidence(state, "", reasons.NOTHING, is_unknown=not elsewhere)


def _bound(evidence: Evidence, spec: LeafSpec, spoilt: str) -> Evidence:
    """Return the evidence, marked as exact if no rule may make the array lossy."""
    kind = evidence.kind
    moment = kind.role.endswith("moment")
    least = TINY_MOMENT if moment else TINY
    if spec.library in SCALARS or spec.dtype not in FORMATS:
        why = f"exact: {spec.dtype}"
    elif spoilt:
        why = f"exact: {spoilt}"
    elif not moment and kind.layer in ("norm", "bias"):
        why = f"exact: {kind.layer}"
    elif spec.size < least:
        why = f"exact: less than {least} elements"
    else:
        return evidence
    return dataclasses.replace(evidence, why=why, is_bound=True, is_unknown=False)
