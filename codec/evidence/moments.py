"""First and second moments among optimizer entries, their pairs, and those that stay exact."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..base import Leaf
from .entries import KNOWN, Entry, parse
from .kind import Kind
from .names import FIRST, SECOND, layer_of

if TYPE_CHECKING:
    from ..state.leaves import LeafSpec

_SUBTRACTED = {"grad_avg", "average_gradient", "average_grad", "mean_grad", "mg"}
"""Averages of the gradient whose square an update subtracts from the second moment, before it takes a root."""
_PAIRS = {"exp_avg": "exp_avg_sq", "mu": "nu", "m": "v"}
"""First and second moments whose update is the one over the root of the other: Adam's, by any name."""
_ADAMS = {
    "adam", "adamw", "nadam", "radam", "sparseadam", "lamb", "fusedadam", "fusedlamb", "deepspeedcpuadam", "ademamix",
    "prodigy", "stableadamw", "adamp", "yogi",
}  # fmt: skip
"""Optimizers of whose moments that is so, by the name in lower case of the class that has their `step`."""
_SETTINGS = {"amsgrad", "bias_correction", "momentum_decay", "decoupled_weight_decay"}
"""Adam and its variants have one of these settings, next to `betas`."""
_COMMON = {"lr", "initial_lr", "betas", "eps", "weight_decay"}
"""Settings that say nothing of the entries' meaning."""
_SLOW = "exp_avg_slow"
"""AdEMAMix's second average of gradients: its unit is its own, not that of sqrt(v)."""
_MAXIMA = {"max_exp_avg_sq", "nu_max"}
_SUMS = {"sum"}
"""Sums of squares (Adagrad), which no update squares."""
_OPTAX = {"mu", "nu", "trace"}
"""Optax's moments. Its other trees have names that other optimizers use with another meaning."""
_LETTERS = 2
"""A name with at most this number of letters is a moment's only below the number or the name of a parameter."""
_NUMBERED = re.compile(r"(^|/)(\d+|state/.+|state)$")


def role_of(entry: Entry) -> str:
    """Return the role of an optimizer's entry by its name: a moment, or "state".

    Example:
        >>> role_of(parse("optimizer/state/0/exp_avg_sq"))
        'second moment'
        >>> role_of(parse("optimizer/state/0/momentum_of_another_kind"))
        'state'
    """
    if entry.is_tree and entry.name not in _OPTAX:
        return "state"
    role = "first moment" if entry.name in FIRST else "second moment" if entry.name in SECOND else "state"
    short = len(entry.name) <= _LETTERS and not entry.parameter and not _NUMBERED.search(entry.above)
    return "state" if short else role


def guess(path: str, spec: LeafSpec) -> Kind:
    """Return the kind of an array by its name and shape, for display only."""
    entry = parse(path)
    return Kind(layer_of(path, spec), "weight" if entry is None else role_of(entry))


def updates(
    entries: Mapping[int, Entry],
    roles: Mapping[int, str],
    shapes: Sequence[tuple[int, ...]],
    classes: Mapping[int, str | None],
    settings: Mapping[str, set[str]],
) -> set[int]:
    """Return the first moments m whose m / sqrt(v) is the update, v their second moment.

    Names alone prove it where nothing is known of the optimizer. Its class, the settings of its groups and arrays that
    Adam does not keep for a parameter can contradict: LaProp and ADOPT call an average of g / sqrt(v) `exp_avg`.

    Args:
        entries: of the arrays below optimizers, by number.
        roles: of the same arrays.
        shapes: of all arrays.
        classes: of the optimizer of each entry, where `kinds=` gives one.
        settings: names of the settings of each optimizer, by its path.
    """
    found = set()
    for numbers in _by_owner(entries).values():
        seconds = [i for i in numbers if roles[i] == "second moment"]
        further = any(shapes[i] and entries[i].name not in KNOWN | _MAXIMA for i in numbers)
        for i in numbers:
            if roles[i] != "first moment" or len(seconds) != 1 or entries[i].name == _SLOW:
                continue
            cls = classes.get(i)
            if cls is not None:
                proven = cls.lower() in _ADAMS
            else:
                named = _PAIRS.get(entries[i].name) == entries[seconds[0]].name
                proven = named and not further and _are_adams(settings.get(entries[i].optimizer, set()))
            if proven:
                found.add(i)
    return found


def _are_adams(settings: set[str]) -> bool:
    """Return whether settings may be those of Adam; without any nothing is known."""
    plain = settings <= _COMMON or bool(settings & _SETTINGS and "centered" not in settings)
    return not settings or ("betas" in settings and plain)


def _by_owner(entries: Mapping[int, Entry]) -> dict[tuple[str, str], list[int]]:
    owners: dict[tuple[str, str], list[int]] = {}
    for i, entry in entries.items():
        owners.setdefault(entry.owner, []).append(i)
    return owners


def in_other_bases(
    entries: Mapping[int, Entry], roles: Mapping[int, str], shapes: Sequence[tuple[int, ...]]
) -> dict[int, str]:
    """Return the first moments that may be in another basis than their second, and why.

    An optimizer that keeps further matrices for a parameter, of another shape, may turn or project its gradients
    (SOAP's rotations). Its first moment is then no update in units of the second one.

    Args:
        entries: of the arrays below optimizers, by number.
        roles: of the same arrays.
        shapes: of all arrays.
    """
    further: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for i, entry in entries.items():
        if entry.name not in KNOWN and len(shapes[i]) >= 2:
            further.setdefault(entry.owner, set()).add(shapes[i])
    return {
        i: "its optimizer keeps matrices of another basis"
        for i, entry in entries.items()
        if roles[i] == "first moment" and further.get(entry.owner, set()) - {shapes[i]}
    }


def unpaired_roots(
    entries: Mapping[int, Entry], roles: Mapping[int, str], variance: Callable[[int, int], bool]
) -> dict[int, str]:
    """Return the numbers of moments that only exact storage keeps usable, each with the reason.

    Centered RMSprop takes the root of `v - m**2`. An error in either of the two can make that negative, so both stay
    exact. The name of the average says so (torch, timm, Keras); in Optax's `scale_by_stddev`, whose names are Adam's,
    there is no `count` next to them and `v >= m**2` holds everywhere. Where the update is not proven to be Adam's, an
    entry of unknown meaning may be such an average, too (centered LaProp).

    Args:
        entries: of the arrays below optimizers, by number.
        roles: of the same arrays.
        variance: whether `v >= m**2` holds for the arrays of two numbers, v and m; asked of few.
    """
    found: set[int] = set()
    optax: dict[str, list[tuple[int, int]]] = {}
    counted = {entry.above for entry in entries.values() if entry.name == "count" and not entry.parameter}
    for numbers in _by_owner(entries).values():
        names = {entries[i].name: i for i in numbers}
        if names.keys() & _SUBTRACTED:
            # Next to such an average everything but a first moment may be the square, by any name.
            found.update(i for i in numbers if roles[i] != "first moment")
        elif {"mu", "nu"} <= names.keys():
            optax.setdefault(entries[numbers[0]].above, []).append((names["nu"], names["mu"]))
        elif not any(entries[i].is_update for i in numbers):
            unknown = [i for name, i in names.items() if roles[i] == "state" and name not in KNOWN | _SUMS]
            seconds = [i for i in numbers if roles[i] == "second moment"]
            found.update(v for v in seconds if any(variance(v, i) for i in unknown))
    for above, pairs in optax.items():
        if above not in counted and all(variance(second, first) for second, first in pairs):
            found.update(i for pair in pairs for i in pair)
    return dict.fromkeys(sorted(found), "an update subtracts the square of an average from it")


def possible_maxima(entries: Mapping[int, Entry], bounds: Callable[[int, int], bool]) -> dict[int, str]:
    """Return the moments of Optax whose `nu` may be a maximum (Adamax), and why.

    A maximum bounds the average of the same gradients; an average of squares does only where all gradients are large.

    Args:
        entries: of the arrays below optimizers, by number.
        bounds: whether `v >= abs(m)` holds for the arrays of two numbers, v and m.
    """
    trees: dict[str, list[dict[str, int]]] = {}
    for numbers in _by_owner(entries).values():
        names = {entries[i].name: i for i in numbers if entries[i].is_tree}
        if {"mu", "nu"} <= names.keys():
            trees.setdefault(entries[numbers[0]].above, []).append(names)
    maxima = [pair for pairs in trees.values() if all(bounds(p["nu"], p["mu"]) for p in pairs) for pair in pairs]
    return {pair[name]: "it may be a maximum of gradients" for pair in maxima for name in ("mu", "nu")}


def moment_pairs(leaves: Sequence[Leaf]) -> dict[int, int]:
    """Return for each first moment the number of its second moment, if grids take its dtype."""
    seconds = {
        (leaf.entry.owner, leaf.spec): j
        for j, leaf in enumerate(leaves)
        if leaf.kind.role == "second moment" and leaf.entry is not None
    }
    pairs = {}
    for i, leaf in enumerate(leaves):
        if leaf.entry is not None and leaf.entry.is_update and leaf.spec.dtype in ("float32", "bfloat16"):
            pairs[i] = seconds.get((leaf.entry.owner, leaf.spec))
    return {i: j for i, j in pairs.items() if j is not None}
