"""Evidence of all arrays of a state, gathered once for all that use it.

An array may be stored with loss only if one of these shows its kind, in this order: a rule of the user that names it
by path (`codec.config`), `kinds=`, or the structure of the state (an optimizer's entry belongs to it). Everything else
is exact.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...kernels.backend.floats import FORMATS
from ..state import tree
from ..state.leaves import SCALARS, SEQUENCES, LeafSpec
from .entries import Entry, Matches, Outline, entries_of, match
from .kind import (
    CODEBOOK,
    FIRST,
    FROZEN,
    NOTHING,
    SECOND,
    SEVERAL_TREES,
    SHORT_RECORDS,
    TINY,
    TINY_MOMENT,
    TRAINED,
    UNKNOWN_ENTRY,
    UNMATCHED,
    Kind,
    Match,
    by_path,
    unwrapped,
)
from .moments import Arrays, contradicted, updates
from .names import Named, is_model, named

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
    said = named(arrays.paths, arrays.specs)
    outline = Outline.of(tree.unflatten(nodes, lambda i, _: arrays.flats[i].tolist() if i in lists else None))
    entries = {
        i: entry for i, entry in enumerate(entries_of(arrays.paths, outline)) if entry is not None and i not in lists
    }
    shapes = [spec.shape for spec in arrays.specs]
    roles = {i: entry.role if shapes[i] else "state" for i, entry in entries.items()}
    given, others = _given(arrays, said, entries, kinds, outline)
    for i, kind in enumerate(given):
        if kind is not None and kind.role == "weight":
            entries.pop(i, None), roles.pop(i, None)
        elif kind is not None and (i in entries or kind.role.endswith("moment")):
            above, _, name = arrays.paths[i].rpartition("/")
            entries.setdefault(i, Entry("", above, "", name))
            roles[i] = kind.role
    declared = {i for i, kind in enumerate(given) if kind is not None and kind.declared}
    matches = _matches(arrays, said, entries, outline, declared)
    classes = {i: None if (kind := given[i]) is None else kind.optimizer for i in entries}
    for i in updates(entries, roles, shapes, classes, outline.settings):
        entries[i] = entries[i]._replace(is_update=True)
    spoilt = contradicted(arrays, entries, roles, matches)
    has_optimizer = any(shapes[i] for i in entries)
    found = []
    for i, spec in enumerate(arrays.specs):
        kind = given[i]
        if i in others:
            evidence = others[i]
        elif i in entries:
            evidence = _of_entry(said[i].layer, entries[i], roles[i], kind)
        elif kind is not None and (kind.role == "state" or kind.layer != "other"):
            what = kind.declared or (kind.layer if kind.role == "weight" else kind.role)
            evidence = Evidence(kind, "kinds", f"kinds: {what}")
        else:
            evidence = _of_parameter(i, said[i], matches, has_optimizer)
        evidence = dataclasses.replace(evidence, entry=entries.get(i))
        found.append(_bound(evidence, spec, "part of a tensor subclass" if arrays.held[i] else spoilt.get(i, "")))
    return found


def _given(
    arrays: Arrays,
    said: Sequence[Named],
    entries: Mapping[int, Entry],
    kinds: Mapping[str, Any] | None,
    outline: Outline,
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
            found[i] = Match(nested, kinds[nested], unwrapped(arrays.paths[i]))
    axes: dict[str, set[int]] = {}
    for m, spec in zip(found, arrays.specs, strict=True):
        if m is not None and getattr(m.value, "shape", None) is None:
            axes.setdefault(m.key, set()).add(len(spec.shape))
    given = [
        None if m is None or (len(axes.get(m.key, ())) > 1 and m.key != path) else _fitting(m, path, spec, one)
        for m, path, spec, one in zip(found, arrays.paths, arrays.specs, said, strict=True)
    ]
    weights = {
        i: m
        for i, (m, kind) in enumerate(zip(found, given, strict=True))
        if m is not None and kind is not None and kind.role == "weight" and not kind.declared and i not in entries
    }
    others = _of_other_trees(weights, arrays, said, entries, outline) | _ambiguous(found, given, arrays.paths, said)
    others |= _of_other_shapes(found, arrays.specs, said)
    return [None if i in others else kind for i, kind in enumerate(given)], others


def _fitting(found: Match, path: str, spec: LeafSpec, said: Named) -> Kind | None:
    kind = found.value
    if not isinstance(kind, Kind):
        (entry,) = entries_of([path], Outline())
        return Kind(kind, "weight" if entry is None else entry.role)
    if kind.shape is not None and kind.shape != spec.shape:
        return None
    # A tail of a path is not the path: elsewhere in the state the same name may be that of another thing.
    elsewhere = said.is_other_part or (kind.role == "weight" and not kind.declared and said.is_average)
    return None if elsewhere and found.key != path else kind


def _of_other_trees(
    weights: Mapping[int, Match],
    arrays: Arrays,
    said: Sequence[Named],
    entries: Mapping[int, Entry],
    outline: Outline,
) -> dict[int, Evidence]:
    """Return the evidence of arrays with a weight's name that are not in the tree of `kinds=`.

    Kinds were made from one tree, and a state may hold several with the same names: the model, an earlier one, masters,
    accumulated gradients. The tree is the one whose whole paths the kinds name, else the one that optimizer entries
    belong to, else the only one at the root that is called as a model is. If none of these says it, all of them stay
    exact.

    Args:
        weights: match in the kinds of each weight that they name, by number.
        arrays: of the state.
        said: by their names.
        entries: of optimizers, by number.
        outline: of the state.
    """
    trees = {i: _RANKS.sub(r"\1", m.above) for i, m in weights.items()}
    of_key: dict[str, set[str]] = {}
    for i, m in weights.items():
        of_key.setdefault(m.key, set()).add(trees[i])
    if all(len(found) == 1 for found in of_key.values()):
        return {}
    supported = {trees[i] for i in weights.keys() & _matches(arrays, said, entries, outline).trained.keys()}
    kept_of = {key: _kept(found, supported) for key, found in of_key.items()}
    kept_of_any = set[str]().union(*kept_of.values())
    # Another tree stays one for the names that it alone has.
    other = set[str]().union(*of_key.values()) - kept_of_any
    others = {}
    for i, (key, *_) in weights.items():
        if trees[i] in kept_of[key] or (len(of_key[key]) == 1 and trees[i] not in other):
            continue
        kept = kept_of[key] if len(of_key[key]) > 1 else kept_of_any
        if kept:
            why = f"kinds are those of {' and '.join(sorted(kept))}"
        else:
            why = SEVERAL_TREES + ", ".join(sorted(of_key[key]))
        others[i] = Evidence(Kind(said[i].layer, "state"), "", why, is_unknown=not kept)
    return others


def _kept(found: set[str], supported: set[str]) -> set[str]:
    """Return which of several trees with one name the kinds are of; empty if unknown or one."""
    if len(found) == 1:
        return set()
    models = {tree for tree in found if is_model(tree)}
    return found & {""} or found & supported or (models if len(models) == 1 else set())


def _ambiguous(
    found: Sequence[Match | None], given: Sequence[Kind | None], paths: Sequence[str], said: Sequence[Named]
) -> dict[int, Evidence]:
    """Return the evidence of arrays that share the key of an average, a master or an iterate."""
    of_key: dict[str, dict[int, str]] = {}
    for i, (m, kind) in enumerate(zip(found, given, strict=True)):
        if m is not None and kind is not None and kind.declared and paths[i] != m.key:
            of_key.setdefault(m.key, {})[i] = m.above
    whole = {m.key for m, path in zip(found, paths, strict=True) if m is not None and path == m.key}
    return {
        i: Evidence(
            Kind(said[i].layer, "state"),
            "",
            SEVERAL_TREES + ", ".join(sorted(trees.values())),
            is_unknown=True,
        )
        for key, trees in of_key.items()
        if len(trees) > 1 or key in whole
        for i in trees
    }


def _of_other_shapes(
    found: Sequence[Match | None], specs: Sequence[LeafSpec], said: Sequence[Named]
) -> dict[int, Evidence]:
    """Return the evidence of moments, averages and masters of another shape than in `kinds`."""
    shapes = [m.value.shape if m is not None and isinstance(m.value, Kind) else None for m in found]
    fitting = {
        m.key
        for m, shape, spec in zip(found, shapes, specs, strict=True)
        if m is not None and shape in (None, spec.shape)
    }
    others = {}
    for i, (m, spec) in enumerate(zip(found, specs, strict=True)):
        if m is None or m.key in fitting or not spec.shape or not isinstance(m.value, Kind):
            continue
        if m.value.declared or m.value.role.endswith("moment"):
            others[i] = Evidence(Kind(said[i].layer, "state"), "", f"kinds: its shape was {m.value.shape}")
    return others


def _matches(
    arrays: Arrays,
    said: Sequence[Named],
    entries: Mapping[int, Entry],
    outline: Outline,
    without: Collection[int] = (),
) -> Matches:
    """Return the parameters that the entries belong to, among all arrays that may be parameters."""
    candidates = {}
    for i, (path, spec, one) in enumerate(zip(arrays.paths, arrays.specs, said, strict=True)):
        elsewhere = one.is_statistic or one.is_other_part or one.is_average
        if not (i in entries or i in without or arrays.held[i] or elsewhere or spec.dtype not in FORMATS):
            candidates[i] = path, spec.shape
    return match(candidates, {i: (entry, arrays.specs[i].shape) for i, entry in sorted(entries.items())}, outline)


def _of_entry(layer: str, entry: Entry, role: str, kind: Kind | None) -> Evidence:
    if kind is not None:
        return Evidence(dataclasses.replace(kind, shape=None), "kinds", f"kinds: {role}")
    if role == "state":
        return Evidence(Kind(layer, role, entry.parameter or None), "", UNKNOWN_ENTRY)
    name = None if entry.parameter.isdigit() or not entry.parameter else entry.parameter
    return Evidence(Kind(layer, role, name), "structure", FIRST if role == "first moment" else SECOND)


def _of_parameter(i: int, said: Named, matches: Matches, has_optimizer: bool) -> Evidence:
    state = Kind(said.layer, "state")
    if i in matches.trained:
        if not said.may_be_weight:
            return Evidence(state, "", SHORT_RECORDS)
        if said.is_codebook:
            return Evidence(state, "", CODEBOOK)
        owner = matches.trained[i][1]
        return Evidence(Kind(said.layer, "weight", None if owner.isdigit() else owner), "structure", TRAINED)
    if has_optimizer:
        return Evidence(state, "", FROZEN) if matches.complete else Evidence(state, "", UNMATCHED, is_unknown=True)
    return Evidence(state, "", NOTHING, is_unknown=not (said.is_other_part or said.is_average))


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
